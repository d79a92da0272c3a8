// Arguments of TVM's functions by number, with errors that name them.
#ifndef QUIRE_FFI_TVM_TVM_ARGUMENTS_H_
#define QUIRE_FFI_TVM_TVM_ARGUMENTS_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/object.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "ffi/errors.h"

namespace quire::ffi {

class TvmArguments {
 public:
  TvmArguments(std::string call, const tvm::ffi::AnyView* arguments, int32_t count)
      : call_(std::move(call)), arguments_(arguments), count_(count) {}

  int32_t count() const { return count_; }

  [[noreturn]] void Throw(int32_t index, const std::string& what) const {
    ThrowBadArgument(call_ + ": argument " + std::to_string(index) + " " + what);
  }

  template <typename T>
  T Get(int32_t index, const char* name) const {
    std::optional<T> value = arguments_[index].try_cast<T>();
    // Some references of tvm-ffi can be null, and then None is one.
    if (!value || IsNone(index)) {
      Throw(index, std::string("(") + name + ") cannot be a value of type " +
                       arguments_[index].GetTypeKey());
    }
    return *std::move(value);
  }

  int64_t GetInt(int32_t index, const char* name, int64_t least,
                 int64_t most = std::numeric_limits<int32_t>::max()) const {
    const int64_t value = Get<int64_t>(index, name);
    CheckRange(index, name, value, least, most);
    return value;
  }

  void CheckRange(int32_t index, const std::string& name, int64_t value, int64_t least,
                  int64_t most) const {
    if (value >= least && value <= most) return;
    Throw(index, "(" + name + ") is " + std::to_string(value) + "; it must be at least " +
                     std::to_string(least) + " and at most " + std::to_string(most));
  }

  template <typename T>
  bool Is(int32_t index) const {
    return arguments_[index].try_cast<T>().has_value();
  }
  bool IsNone(int32_t index) const {
    return arguments_[index].type_index() == tvm::ffi::TypeIndex::kTVMFFINone;
  }

 private:
  std::string call_;
  const tvm::ffi::AnyView* arguments_;
  int32_t count_;
};

}  // namespace quire::ffi

#endif  // QUIRE_FFI_TVM_TVM_ARGUMENTS_H_
