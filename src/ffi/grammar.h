// quire.Grammar as an object that the engine takes: what an answer must look like.
#ifndef QUIRE_FFI_GRAMMAR_H_
#define QUIRE_FFI_GRAMMAR_H_

#include <tvm/ffi/object.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "quire/seams.h"

namespace quire::ffi {

class GrammarObj : public tvm::ffi::Object {
 public:
  // bytes: that it takes, about.
  GrammarObj(std::shared_ptr<const TokenFilter> filter, int64_t bytes)
      : filter_(std::move(filter)), bytes_(bytes) {}

  // At the beginning of an answer.
  const std::shared_ptr<const TokenFilter>& filter() const { return filter_; }

  int64_t bytes() { return bytes_; }

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.Grammar", GrammarObj, tvm::ffi::Object);

 private:
  const std::shared_ptr<const TokenFilter> filter_;
  const int64_t bytes_;
};

class GrammarRef : public tvm::ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(GrammarRef, tvm::ffi::ObjectRef, GrammarObj);
};

}  // namespace quire::ffi

#endif  // QUIRE_FFI_GRAMMAR_H_
