// Options as a map from names to values, as keyword arguments of other languages arrive.
#ifndef QUIRE_FFI_OPTIONS_H_
#define QUIRE_FFI_OPTIONS_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "ffi/errors.h"
#include "quire/attention_kv_cache.h"
#include "quire/rope.h"
#include "quire/seams.h"
#include "quire/tensor.h"

namespace quire::ffi {

using OptionMap = tvm::ffi::Map<tvm::ffi::String, tvm::ffi::Any>;

// Reads fields of the right type and range into C++ options; what is absent keeps its default.
// BadArgument names the owner and the field. A field that nobody read is a spelling mistake and
// refused by Finish.
class OptionsReader {
 public:
  OptionsReader(std::string owner, OptionMap fields)
      : owner_(std::move(owner)), fields_(std::move(fields)) {}

  template <typename T>
  void Read(const char* name, T* out) {
    const std::optional<tvm::ffi::Any> value = Find(name);
    if (value) Convert(name, *value, out);
  }

  // The value as it came, for fields of richer types.
  template <typename T>
  std::optional<T> Get(const char* name) {
    const std::optional<tvm::ffi::Any> value = Find(name);
    if (!value) return std::nullopt;
    std::optional<T> cast = value->template try_cast<T>();
    if (!cast) ThrowWrongType(name, *value);
    return cast;
  }

  // Names of an enumeration, in the order of its values from 0.
  template <typename E>
  void ReadEnum(const char* name, std::span<const std::string_view> names, E* out) {
    const std::optional<tvm::ffi::String> value = Get<tvm::ffi::String>(name);
    if (value) *out = static_cast<E>(IndexOf(name, std::string(*value), names));
  }

  // The option "threads": null for 0, which stands for one per core. BadArgument out of [0, 1024].
  std::shared_ptr<ParallelRunner> ReadRunner();

  void Finish() const;

 private:
  std::optional<tvm::ffi::Any> Find(const char* name);
  [[noreturn]] void ThrowWrongType(const char* name, const tvm::ffi::Any& value) const;
  [[noreturn]] void ThrowOutOfRange(const char* name, int64_t value) const;
  int IndexOf(const char* name, const std::string& value,
              std::span<const std::string_view> names) const;

  template <typename T>
  T Cast(const char* name, const tvm::ffi::Any& value) const {
    std::optional<T> cast = value.template try_cast<T>();
    if (!cast) ThrowWrongType(name, value);
    return *std::move(cast);
  }

  void Convert(const char* name, const tvm::ffi::Any& value, bool* out) const;
  void Convert(const char* name, const tvm::ffi::Any& value, int* out) const;
  void Convert(const char* name, const tvm::ffi::Any& value, int64_t* out) const;
  // Unsigned values travel as the signed value of the same bits.
  void Convert(const char* name, const tvm::ffi::Any& value, uint64_t* out) const;
  void Convert(const char* name, const tvm::ffi::Any& value, float* out) const;
  void Convert(const char* name, const tvm::ffi::Any& value, double* out) const;
  void Convert(const char* name, const tvm::ffi::Any& value, std::string* out) const;
  void Convert(const char* name, const tvm::ffi::Any& value, DType* out) const;
  void Convert(const char* name, const tvm::ffi::Any& value, std::optional<DType>* out) const;
  void Convert(const char* name, const tvm::ffi::Any& value, std::vector<double>* out) const;

  std::string owner_;
  OptionMap fields_;
  std::set<std::string> read_;
};

AttentionLayerSpec ReadLayerSpec(const OptionMap& fields);
RopeOptions ReadRopeOptions(const OptionMap& fields);
OptionMap LayerSpecFields(const AttentionLayerSpec& layer);
OptionMap RopeFields(const RopeOptions& rope);

}  // namespace quire::ffi

#endif  // QUIRE_FFI_OPTIONS_H_
