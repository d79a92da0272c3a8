// The cache's control calls: what a step costs beside its kernels. One small layer in pages of 16
// tokens, so that only bookkeeping counts; the sequences share nothing.
#include <algorithm>
#include <numeric>
#include <vector>

#include "base/random.h"
#include "bench_case.h"
#include "quire/attention_kv_cache.h"

namespace quire::bench {
namespace {

constexpr int64_t kKeyDim = 2;
constexpr int64_t kValueDim = 16;
constexpr int64_t kPageSize = 16;      // that of the peer
constexpr int64_t kFillTokens = 4096;  // of one forward while the cache is filled
constexpr int64_t kSteps = 9;          // decode steps of one round; the first follows another batch
constexpr int64_t kRepeats = 40;

class PlanCase : public BenchCase {
 public:
  PlanCase(int64_t sequences, int64_t length, int threads)
      : sequences_(sequences), length_(length), ids_(static_cast<size_t>(sequences)) {
    AttentionKVCacheOptions options;
    options.layers = {{.num_qo_heads = 1,
                       .num_kv_heads = 1,
                       .qk_head_dim = kKeyDim,
                       .v_head_dim = kValueDim,
                       .dtype = DType::kBF16}};
    options.max_num_sequences = 2 * sequences;
    options.token_capacity = sequences * (length + 8 * kPageSize);
    options.prefill_chunk_size = std::max(kFillTokens, sequences);
    options.page_size = kPageSize;
    options.runner = CreateThreadPool(threads).value();
    cache_ = Require(AttentionKVCache::Create(options));
    values_.resize(static_cast<size_t>(options.prefill_chunk_size * kValueDim));
    outputs_.resize(values_.size());
    std::iota(ids_.begin(), ids_.end(), 0);
    for (int64_t id : ids_) Require(cache_->AddSequence(id));
    const int64_t chunk = std::max<int64_t>(1, kFillTokens / sequences);
    for (int64_t at = 0; at < length; at += chunk) Forward(std::min(chunk, length - at));
  }

  // Every part leaves the cache as it found it; the parts run until the limits are met.
  nlohmann::json Run(const RunLimits& limits) override {
    samples_ = nlohmann::json::object();
    const double begin = Now();
    for (int64_t i = 0; i < limits.min_calls || Now() - begin < limits.seconds; ++i) {
      Steps();
      Repeats();
      OtherOrders();
      Forks(-1, "fork_end", "begin_forked_end");
      Forks(length_ / 2 + 3, "fork_middle", "begin_forked_middle");
    }
    return samples_;
  }

 private:
  template <typename F>
  void Time(const char* name, double calls, F&& f) {
    const double begin = Now();
    f();
    const double seconds = (Now() - begin) / calls;
    if (name != nullptr) samples_[name].push_back(seconds);
  }

  void Begin(const char* name, const std::vector<int64_t>& ids, int64_t tokens) {
    const std::vector<int64_t> lengths(ids.size(), tokens);
    Time(name, 1, [&] { Require(cache_->BeginForward(ids, lengths)); });
  }
  void Abort(const char* name) {
    Time(name, 1, [&] { Require(cache_->AbortForward()); });
  }

  void RunLayer(int64_t rows) {
    const TensorView k(values_.data(), DType::kF32, {rows, 1, kKeyDim});
    const TensorView v(values_.data(), DType::kF32, {rows, 1, kValueDim});
    const TensorView o(outputs_.data(), DType::kF32, {rows, 1, kValueDim});
    Require(cache_->Append(0, k, v));
    Require(cache_->Attend(0, k, o, nullptr, 1));
  }

  void Forward(int64_t tokens) {
    Begin(nullptr, ids_, tokens);
    RunLayer(tokens * sequences_);
    Require(cache_->EndForward());
  }

  // Decode as an engine does it: the batch of the step before, a layer in between.
  void Steps() {
    for (int64_t step = 0; step < kSteps; ++step) {
      Begin(step == 0 ? nullptr : "begin_step", ids_, 1);
      RunLayer(sequences_);
      Time("end", 1, [&] { Require(cache_->EndForward()); });
    }
    for (int64_t step = 0; step < kSteps; ++step) {
      Time("pop", static_cast<double>(sequences_), [&] {
        for (int64_t id : ids_) Require(cache_->PopN(id, 1));
      });
    }
  }

  void Repeats() {
    Begin(nullptr, ids_, 1);
    Abort(nullptr);
    for (int64_t i = 0; i < kRepeats; ++i) {
      Begin("begin_repeat", ids_, 1);
      Abort("abort");
    }
  }

  void OtherOrders() {
    std::vector<int64_t> order = ids_;
    for (int64_t i = 0; i < kRepeats; ++i) {
      for (size_t k = order.size(); k > 1; --k) {
        std::swap(order[k - 1], order[static_cast<size_t>(random_.Below(static_cast<int64_t>(k)))]);
      }
      Begin("begin_other_order", order, 1);
      Abort(nullptr);
    }
  }

  void Forks(int64_t position, const char* fork_name, const char* begin_name) {
    std::vector<int64_t> children = ids_;
    for (int64_t& id : children) id += sequences_;
    const auto count = static_cast<double>(sequences_);
    Time(fork_name, count, [&] {
      for (int64_t id : ids_) Require(cache_->ForkSequence(id, id + sequences_, position));
    });
    Begin(begin_name, children, 1);
    Abort(nullptr);
    Time("remove", count, [&] {
      for (int64_t id : children) Require(cache_->RemoveSequence(id));
    });
  }

  int64_t sequences_, length_;
  std::vector<int64_t> ids_;
  std::unique_ptr<AttentionKVCache> cache_;
  std::vector<float> values_;
  std::vector<float> outputs_;
  RandomSequence random_{11};
  nlohmann::json samples_;
};

}  // namespace

std::unique_ptr<BenchCase> MakePlanCase(const JsonValue& request) {
  return std::make_unique<PlanCase>(Require(request.GetInt("sequences", 1)),
                                    Require(request.GetInt("length", 1)),
                                    static_cast<int>(Require(request.GetInt("threads", 1))));
}

}  // namespace quire::bench
