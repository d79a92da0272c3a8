// What a rotation kernel of TVM does, seen from outside.
#ifndef QUIRE_FFI_TVM_TVM_ROPE_H_
#define QUIRE_FFI_TVM_TVM_ROPE_H_

#include <tvm/ffi/function.h>

#include <cstdint>

#include "quire/rope.h"
#include "quire/tensor.h"

namespace quire::ffi {

struct TvmRopeArguments {
  double scale = 1;
  double theta = 10000;
  int64_t num_qo_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  DType dtype = DType::kF32;
};

// TVM hands over theta and scale only: pairing, partial rotation and scaling families are compiled
// into the kernel that splits and rotates. It is called on unit vectors at a few positions, and
// what comes out says which dimensions it turns by how much. The mode is left to the caller.
// BadArgument if it is no rotation (TVM's YaRN).
RopeOptions ReadRotationKernel(const tvm::ffi::Function& kernel, const TvmRopeArguments& arguments);

}  // namespace quire::ffi

#endif  // QUIRE_FFI_TVM_TVM_ROPE_H_
