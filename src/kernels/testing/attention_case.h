// Batches of sequences over paged KV for the tests and benchmarks of attention. What a token is
// (its key, value and query) is a function of (content, position) alone; where it lies is drawn
// from the layout's seed. So two cases with the same contents must give the same bits, whatever
// else differs.
#ifndef QUIRE_KERNELS_TESTING_ATTENTION_CASE_H_
#define QUIRE_KERNELS_TESTING_ATTENTION_CASE_H_

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kernels/backend.h"

namespace quire {

// Values of a token that replace the drawn ones (0: key, 1: value), for Inf and NaN.
struct Special {
  int64_t content;
  int64_t position;
  bool in_value;
  float value;
};

struct SequenceSpec {
  int64_t content = 0;
  int64_t base = 0;
  int64_t rows = 1;
  // Positions before the i-th end lie in the pages of prefix i (from the end before): {prefix
  // content, end segment}.
  struct Prefix {
    int64_t content;
    int64_t end_segment;
  };
  std::vector<Prefix> prefixes = {};
  SequenceWindow window = {};
};

struct CaseSpec {
  DType dtype = DType::kF32;
  std::optional<DType> value_dtype = std::nullopt;  // where it is not dtype
  DType q_dtype = DType::kF32;
  DType o_dtype = DType::kF32;
  int kv_heads = 2;
  int group = 2;
  int qk_dim = 32;
  int v_dim = 32;
  int page_size = 16;
  bool latent = false;  // one kv head; queries come rotated, those of sinks are turned after v_dim
  int rotary_dim = 0;
  bool interleaved = false;
  bool inline_keys = false;
  bool use_spans = true;  // false: the same pages, but no SharedSpan
  bool cached_only = false;
  float sharpness = 1.0F;         // factor of the usual scale
  double fork_probability = 0.1;  // that a new page entry begins at a position
  double run_probability = 0.02;  // that a new run begins at a position
  int64_t layer_window = kNoWindow;
  float soft_cap = 0.0F;
  bool head_sinks = false;    // a learned logit per query head
  bool rotates_sinks = true;  // false: sinks are scored with the query as it is
  float junk = 0.0F;          // value of tokens stored after the ends; 0: none (memory stays NaN)
  uint64_t layout_seed = 1;
  std::vector<SequenceSpec> sequences;
  std::vector<Special> specials = {};
};

struct CaseOutput {
  // By sequence of the spec, then [row][head][v_dim] in o_dtype and [row][head].
  std::vector<std::vector<std::byte>> o;
  std::vector<std::vector<float>> lse;
};

class AttentionCase {
 public:
  explicit AttentionCase(const CaseSpec& spec);
  AttentionCase(const AttentionCase&) = delete;
  AttentionCase& operator=(const AttentionCase&) = delete;

  const CaseSpec& spec() const { return spec_; }
  // o, lse and scratch are null.
  const AttentionArgs& args() const { return args_; }
  // Which sequence of the spec a sequence of the plan is.
  size_t SpecIndex(const AttentionSequence& sequence) const {
    return plan_order_[static_cast<size_t>(&sequence - sequences_.data())];
  }
  // Runs it in memory poisoned with NaN, and checks that nothing around it is written.
  CaseOutput Run(const Backend& backend, ParallelRunner& runner) const;
  // The same with other queries: float32 [row][head][qk_dim].
  CaseOutput RunWith(const float* q, const Backend& backend, ParallelRunner& runner) const;
  // Rows [begin, begin + count) of the only sequence; its later tokens are stored already.
  CaseOutput RunRows(const Backend& backend, ParallelRunner& runner, int64_t begin,
                     int64_t count) const;

 private:
  // A stretch of positions with pages of its own.
  struct Store {
    int64_t content, begin, end;
    std::vector<PageEntry> entries;
    std::vector<PageRun> runs;
  };

  const Store& StoreOf(int64_t content, int64_t begin, int64_t end);
  void BuildPages();
  void BuildPlan();
  void BuildQueries();
  void BuildInlineAngles(size_t half);
  void WriteToken(const AppendTarget& target, int64_t content, int64_t position);
  void WriteJunk(const Store& store);
  void FreeUnseenPages();
  int64_t PageCountMax() const;
  CaseOutput RunPlan(AttentionArgs args, const Backend& backend, ParallelRunner& runner) const;

  CaseSpec spec_;
  AttentionArgs args_;
  std::vector<std::byte> pages_;
  std::vector<uint8_t> v_nonfinite_;
  std::vector<uint8_t> is_open_;
  std::vector<int32_t> free_pages_;
  std::map<std::pair<int64_t, int64_t>, std::unique_ptr<Store>> stores_;
  std::vector<std::vector<PageRun>> runs_;
  std::vector<AttentionSequence> sequences_;
  std::vector<size_t> plan_order_;  // plan sequence -> sequence of the spec
  std::vector<SharedSpan> spans_;
  std::vector<std::byte> q_;
  std::vector<float> cos_table_, sin_table_;  // [position][rotary_dim / 2]
  std::vector<float> inline_tiles_;
  std::vector<AngleLeaf> inline_leaves_;
  std::vector<const AngleLeaf*> inline_leaf_view_;
  AngleTable inline_angles_;
  std::vector<RotaryAngles> angle_rows_, sink_angle_rows_;
  std::vector<float> head_sinks_;
  uint64_t random_state_;

  uint64_t Random();
  double Uniform() { return static_cast<double>(Random() >> 11) * 0x1p-53; }
};

// The value of dimension `dim` of `head` of a token, about N(0, 1) in spread; `kind` 0: key, 1:
// value, 2: query.
float TokenValue(int64_t content, int64_t position, int kind, int head, int dim);

}  // namespace quire

#endif  // QUIRE_KERNELS_TESTING_ATTENTION_CASE_H_
