// What Quire's objects behind TVM's names `vm.builtin.*` have in common (docs/tvm.md).
#ifndef QUIRE_FFI_TVM_TVM_STATE_H_
#define QUIRE_FFI_TVM_TVM_STATE_H_

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/optional.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "quire/rope.h"

namespace quire::ffi {

class TvmTransferHub;  // tvm_transfer.h

// Where TVM's behaviour is not wrong but another one; all on unless quire.tvm.install() says
// otherwise.
struct TvmOptions {
  bool window_span = true;    // AttentionKVCacheOptions::tvm_window_span
  bool tree_commit = true;    // TvmTrees::KeptLeaf
  bool tree_lengths = false;  // TvmTrees::KeptByTvm
  bool rnn_history1 = true;   // RNNStateOptions::tvm_rnn_history1
  // In place of what the rotation kernel shows, but for the mode: for rotations that a kernel of
  // TVM gets wrong (YaRN) or cannot have (LongRoPE). For MLA layers, how the model rotates.
  std::optional<RopeOptions> rope;
  // Whose caches this process makes; without it the Disco worker's, as in TVM.
  std::optional<int64_t> pipeline_stage;
  std::shared_ptr<TvmTransferHub> transfer;  // of caches that are created with transfer
};

inline std::span<const int64_t> TvmSpanOf(const tvm::ffi::Shape& shape) {
  return {shape.data(), shape.size()};
}

// The functions vm.builtin.kv_state_*.
class TvmStateObj : public tvm::ffi::Object {
 public:
  virtual void Clear() = 0;
  virtual void AddSequence(int64_t seq_id) = 0;
  virtual void RemoveSequence(int64_t seq_id) = 0;
  virtual void ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos) = 0;
  virtual void PopN(int64_t seq_id, int64_t n) = 0;
  virtual void BeginForward(const tvm::ffi::Shape& seq_ids, const tvm::ffi::Shape& append_lengths,
                            const tvm::ffi::Optional<tvm::ffi::Shape>& parents) = 0;
  virtual void EndForward() = 0;
  // TVM has no such call; a method of the object in Python. The way out of a forward in which an
  // attention call was refused.
  virtual void AbortForward() = 0;

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO("quire.tvm.KVState", TvmStateObj, tvm::ffi::Object);
};

}  // namespace quire::ffi

#endif  // QUIRE_FFI_TVM_TVM_STATE_H_
