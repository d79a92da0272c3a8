// quire.tvm.RNNState: RNNState with the arguments of TVM's functions.
#ifndef QUIRE_FFI_TVM_TVM_RNN_STATE_H_
#define QUIRE_FFI_TVM_TVM_RNN_STATE_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <memory>

#include "ffi/errors.h"
#include "ffi/tvm/tvm_state.h"
#include "quire/rnn_state.h"

namespace quire::ffi {

class TvmRNNStateObj : public TvmStateObj {
 public:
  explicit TvmRNNStateObj(const RNNStateOptions& options);

  void Clear() override;
  void AddSequence(int64_t seq_id) override;
  void RemoveSequence(int64_t seq_id) override;
  void ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos) override;
  void PopN(int64_t seq_id, int64_t n) override;
  // Parents may only say what holds without them: a chain.
  void BeginForward(const tvm::ffi::Shape& seq_ids, const tvm::ffi::Shape& append_lengths,
                    const tvm::ffi::Optional<tvm::ffi::Shape>& parents) override;
  void EndForward() override;
  void AbortForward() override;

  void Get(int64_t layer, int64_t state, tvm::ffi::TensorView o);
  void Set(int64_t layer, int64_t state, tvm::ffi::TensorView data);
  tvm::ffi::Tensor DebugGet(int64_t layer, int64_t state, int64_t seq_id);

  // ---- For tests.
  int64_t StateDigest();
  void CheckInvariants();

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.tvm.RNNState", TvmRNNStateObj, TvmStateObj);

 private:
  FaultLatch latch_;
  std::unique_ptr<RNNState> state_;
};

}  // namespace quire::ffi

#endif  // QUIRE_FFI_TVM_TVM_RNN_STATE_H_
