// SlottedRecurrentCache: the RecurrentCache of this library. A history says which slots hold which
// states and which blocks hold which inputs; here are their bytes and the kernels that fill them.
//
// A layer's call first brings all its inputs into scratch, in float32, in the form in which blocks
// keep them; the kernel reads them there and writes the states of the forward's new slots; then
// those inputs that the history wants are copied into its blocks. A replay runs the same kernel
// over a block.
#ifndef QUIRE_KV_RECURRENT_RECURRENT_CACHE_H_
#define QUIRE_KV_RECURRENT_RECURRENT_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kv/pages/reserve.h"
#include "kv/recurrent/recurrent_base.h"
#include "kv/recurrent/recurrent_layout.h"
#include "quire/recurrent_cache.h"
#include "tensor/host_memory.h"

namespace quire {

class SlottedRecurrentCache final : public RecurrentBase<RecurrentCache> {
 public:
  static Result<std::unique_ptr<RecurrentCache>> Create(RecurrentCacheOptions options);

  const RecurrentCacheOptions& options() const override { return options_; }
  int64_t storage_bytes() const override { return static_cast<int64_t>(storage_.size()); }
  // What is taken now beside the storage, for tests.
  int64_t scratch_bytes() const { return scratch_size_ * static_cast<int64_t>(sizeof(float)); }
  int64_t table_bytes() const;

  Status LinearAttention(int64_t layer, const TensorView& q, const TensorView& k,
                         const TensorView& v, const TensorView& decay, const TensorView& o,
                         double sm_scale) override;
  Status GatedDelta(int64_t layer, const TensorView& q, const TensorView& k, const TensorView& v,
                    const TensorView& decay, const TensorView& beta, const TensorView& o,
                    double sm_scale) override;
  Status StateSpace(int64_t layer, const TensorView& x, const TensorView& dt, const TensorView& a,
                    const TensorView& b, const TensorView& c, const TensorView* d,
                    const TensorView& o) override;
  Status Convolution(int64_t layer, const TensorView& x, const TensorView& weight,
                     const TensorView* bias, bool silu, const TensorView& o) override;
  Status DebugGet(int64_t layer, int64_t seq_id, const TensorView& o) override;
  Status ExportState(int64_t layer, int64_t seq_id, int64_t position, const TensorView& o) override;

 private:
  // Fills freed slots of one pool with NaN.
  struct Poisoner final : SlotFreeListener {
    float* base = nullptr;
    int64_t size = 0;
    void OnSlotFreed(int32_t slot) noexcept override;
  };
  // A piece of a member's tokens, for whichever layer.
  struct SlotPiece {
    int64_t first_row = 0;
    int64_t row_count = 0;
    int32_t from = -1;
    int32_t to = -1;
  };
  Status CheckState(const char* call, int64_t layer, const char* name,
                    const TensorView& state) const;
  Status PlanImport(const ControlCall& call);
  void CopyState(int64_t layer, int32_t slot, const TensorView& o) noexcept;
  // One layer's call while it runs.
  struct LayerCall {
    const char* name;
    int64_t layer;
    const RecurrentLayerLayout* layout;
  };
  // Parts of the scratch, for the rows of the forward.
  struct Scratch {
    float* inputs = nullptr;      // [row][input_size]
    float* side = nullptr;        // [row][side_size]: queries [row][...], then x [row][...]
    float* output = nullptr;      // [row][output_size]
    float* parameters = nullptr;  // [parameter_size]
  };

  SlottedRecurrentCache(RecurrentCacheOptions options, RecurrentLayout layout, HostMemory storage,
                        const Backend* backend);

  void AppendFacts(std::vector<int64_t>& facts) const override;

  Status PlanCall(const ControlCall& call) override;
  void CommitCall() noexcept override;
  Status PlanForward(const ControlCall& call);
  Status CheckLayersDone() const;
  // Brings the states of members that load, once per layer and forward: recurrent_loads.cc.
  Status LoadStates(const LayerCall& call);
  void CommitForward() noexcept;
  void ReleaseMemory() noexcept;
  void RunReplay() noexcept;
  void AddNodePieces(const StateMember& member) noexcept;
  void CopySharedBlock(const StateMember& member) noexcept;
  void KeepAcceptedInputs() noexcept;
  // `count` tokens of all layers, between blocks.
  void CopyInputs(int32_t from, int64_t from_token, int32_t to, int64_t to_token,
                  int64_t count) noexcept;

  Result<LayerCall> BeginLayer(const char* name, int64_t layer, RecurrentLayerKind kind) const;
  Scratch ScratchOf(const LayerCall& call) const;
  // `tensor` has m >= row_count rows of `dims`, or is `dims` itself.
  Status CheckRows(const LayerCall& call, const char* name, const TensorView& tensor,
                   std::initializer_list<int64_t> dims) const;
  Status CheckOutput(const LayerCall& call, const TensorView& o,
                     std::initializer_list<int64_t> dims) const;
  Status CheckWhole(const LayerCall& call, const char* name, const TensorView& tensor,
                    std::initializer_list<int64_t> dims) const;
  Status CheckDecay(const LayerCall& call, const TensorView& decay) const;
  // Rows of a checked tensor, widened to float32.
  void Widen(const TensorView& tensor, float* to, int64_t to_stride) noexcept;
  void WidenWhole(const TensorView& tensor, float* to) noexcept;
  void WidenDecay(const TensorView& decay, float* to, int64_t to_stride) noexcept;

  Status RunMatrix(const LayerCall& call, const TensorView& q, const TensorView& k,
                   const TensorView& v, const TensorView& decay, const TensorView* beta,
                   const TensorView& o, double sm_scale);
  RecurrenceBatch BatchOf(const LayerCall& call) noexcept;
  // After the kernel: keeps the inputs, hands out the outputs.
  void FinishLayer(const LayerCall& call, const TensorView& o) noexcept;
  void KeepInputs(const LayerCall& call) noexcept;

  float* StateIn(int32_t slot, int64_t offset) const {
    return storage_.as<float>() + slot * layout_.slot_size + offset;
  }
  float* InputsIn(int32_t block, int64_t offset) const {
    return blocks_ + block * layout_.block_size + offset;
  }

  const RecurrentCacheOptions options_;
  const RecurrentLayout layout_;
  const HostMemory storage_;  // [slot][slot_size], then [block][block_size]
  float* const blocks_;
  const Backend* const backend_;
  Poisoner slot_poisoner_;
  Poisoner block_poisoner_;

  // The pieces of the open forward.
  std::vector<SlotPiece> slot_pieces_;
  std::vector<RecurrencePiece> pieces_;  // of the layer that runs
  std::vector<RecurrenceSequence> sequences_;
  std::vector<uint8_t> done_;    // [layer]
  std::vector<uint8_t> loaded_;  // [layer]
  std::unique_ptr<float[]> scratch_;
  int64_t scratch_size_ = 0;
  RecentPeak scratch_peak_;
};

}  // namespace quire

#endif  // QUIRE_KV_RECURRENT_RECURRENT_CACHE_H_
