// The creating functions of TVM, with Quire's objects as results.
#ifndef QUIRE_FFI_TVM_TVM_CREATE_H_
#define QUIRE_FFI_TVM_TVM_CREATE_H_

#include <tvm/ffi/any.h>

#include <cstdint>

#include "ffi/tvm/tvm_state.h"

namespace quire::ffi {

// vm.builtin.paged_attention_kv_cache_create: 28 arguments, a 29th is ignored. BadArgument names
// the argument.
tvm::ffi::Any CreateTvmKVCache(const TvmOptions& options, const tvm::ffi::AnyView* arguments,
                               int32_t count);

// vm.builtin.rnn_state_create: 6 arguments.
tvm::ffi::Any CreateTvmRNNState(const TvmOptions& options, const tvm::ffi::AnyView* arguments,
                                int32_t count);

}  // namespace quire::ffi

#endif  // QUIRE_FFI_TVM_TVM_CREATE_H_
