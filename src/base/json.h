// JSON from outside (configurations, safetensors headers, requests), read with bounds and without
// exceptions.
#ifndef QUIRE_BASE_JSON_H_
#define QUIRE_BASE_JSON_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "quire/status.h"

namespace quire {

struct JsonLimits {
  size_t max_bytes =
      size_t{16} << 20;  // the largest header of a published checkpoint is some 5 MiB
  int max_depth = 64;    // nesting of arrays and objects
};

// Corrupt for text that is no JSON, holds a NUL byte, has a key twice in one object or is nested
// too deep; TooLarge over max_bytes. `what` names the text in messages, for instance a file.
Result<nlohmann::json> ParseJson(std::string_view text, std::string_view what,
                                 const JsonLimits& limits = {});

// A value inside a parsed document together with the path that leads to it, which is what messages
// name. It refers to the document and must not outlive it. All errors are BadArgument.
class JsonValue {
 public:
  // `path` names the document, for instance "config.json".
  JsonValue(const nlohmann::json& value, std::string path)
      : value_(&value), path_(std::move(path)) {}

  const nlohmann::json& json() const { return *value_; }
  const std::string& path() const { return path_; }

  // The member `key` of this object. A member that is null counts as absent.
  Result<JsonValue> Get(std::string_view key) const;
  Result<std::optional<JsonValue>> Find(std::string_view key) const;
  // Element `index` of this array.
  Result<JsonValue> At(size_t index) const;
  Result<size_t> ArraySize() const;

  Result<int64_t> Int(int64_t min = std::numeric_limits<int64_t>::min(),
                      int64_t max = std::numeric_limits<int64_t>::max()) const;
  // Any number; integers are converted.
  Result<double> Number() const;
  Result<bool> Bool() const;
  Result<std::string> String() const;

  // The member `key`, read as above; with a fallback for when it is absent.
  Result<int64_t> GetInt(std::string_view key, int64_t min = std::numeric_limits<int64_t>::min(),
                         int64_t max = std::numeric_limits<int64_t>::max()) const;
  Result<int64_t> GetIntOr(std::string_view key, int64_t fallback,
                           int64_t min = std::numeric_limits<int64_t>::min(),
                           int64_t max = std::numeric_limits<int64_t>::max()) const;
  Result<double> GetNumber(std::string_view key) const;
  Result<double> GetNumberOr(std::string_view key, double fallback) const;
  Result<bool> GetBoolOr(std::string_view key, bool fallback) const;
  Result<std::string> GetString(std::string_view key) const;
  Result<std::string> GetStringOr(std::string_view key, std::string_view fallback) const;

 private:
  Status WrongType(std::string_view wanted) const;

  const nlohmann::json* value_;
  std::string path_;
};

}  // namespace quire

#endif  // QUIRE_BASE_JSON_H_
