#include "base/json.h"

#include <cmath>
#include <utility>
#include <vector>

namespace quire {
namespace {

using Json = nlohmann::json;

// Builds the document and stops at the first thing that is not allowed.
class DocumentBuilder final : public nlohmann::json_sax<Json> {
 public:
  explicit DocumentBuilder(int max_depth) : max_depth_(max_depth) {}

  const std::string& error() const { return error_; }
  Json TakeDocument() { return std::move(root_); }

  bool null() override { return Place(Json(nullptr)) != nullptr; }
  bool boolean(bool value) override { return Place(Json(value)) != nullptr; }
  bool number_integer(number_integer_t value) override { return Place(Json(value)) != nullptr; }
  bool number_unsigned(number_unsigned_t value) override { return Place(Json(value)) != nullptr; }
  bool number_float(number_float_t value, const string_t&) override {
    return Place(Json(value)) != nullptr;
  }
  bool string(string_t& value) override { return Place(Json(std::move(value))) != nullptr; }
  bool binary(binary_t&) override { return Fail("binary values are not JSON"); }

  bool start_object(size_t) override { return Open(Json::object()); }
  bool start_array(size_t) override { return Open(Json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  bool key(string_t& name) override {
    auto [member, is_new] = open_.back()->get_ref<Json::object_t&>().emplace(name, nullptr);
    if (!is_new) return Fail("the key \"" + name + "\" stands twice in one object");
    member_ = &member->second;
    return true;
  }

  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& e) override {
    // The library's text is "[json.exception...] what is wrong at which line and column".
    const std::string_view text = e.what();
    const size_t prefix_end = text.find("] ");
    return Fail(std::string(prefix_end == text.npos ? text : text.substr(prefix_end + 2)));
  }

 private:
  bool Fail(std::string error) {
    error_ = std::move(error);
    return false;
  }

  // Elements of an open array are added only while no reference to an earlier one is held, so none
  // dangles.
  Json* Place(Json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (open_.back()->is_array()) return &open_.back()->emplace_back(std::move(value));
    *member_ = std::move(value);
    return member_;
  }

  bool Open(Json container) {
    if (open_.size() >= static_cast<size_t>(max_depth_)) {
      return Fail("it is nested deeper than " + std::to_string(max_depth_) + " levels");
    }
    open_.push_back(Place(std::move(container)));
    return true;
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  const int max_depth_;
  Json root_;
  std::vector<Json*> open_;  // the containers around the current value, outermost first
  Json* member_ = nullptr;   // where the value of the last key goes
  std::string error_;
};

std::string ShortDump(const Json& value) {
  constexpr size_t kMaxShown = 60;
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kMaxShown) text = text.substr(0, kMaxShown) + "...";
  return text;
}

}  // namespace

Result<Json> ParseJson(std::string_view text, std::string_view what, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) {
    return Status(StatusCode::kTooLarge,
                  std::string(what) + ": JSON of " + std::to_string(text.size()) +
                      " bytes is over the limit of " + std::to_string(limits.max_bytes));
  }
  // The parser takes a NUL for the end of the text; whatever stood after it would go unread.
  if (const size_t nul = text.find('\0'); nul != text.npos) {
    return Status(StatusCode::kCorrupt, std::string(what) + ": this is not acceptable JSON: byte " +
                                            std::to_string(nul) + " is a NUL");
  }
  DocumentBuilder builder(limits.max_depth);
  if (!Json::sax_parse(text.begin(), text.end(), &builder)) {
    return Status(StatusCode::kCorrupt,
                  std::string(what) + ": this is not acceptable JSON: " + builder.error());
  }
  return builder.TakeDocument();
}

Status JsonValue::WrongType(std::string_view wanted) const {
  return Status(StatusCode::kBadArgument,
                path_ + ": expected " + std::string(wanted) + ", found " + ShortDump(*value_));
}

Result<std::optional<JsonValue>> JsonValue::Find(std::string_view key) const {
  if (!value_->is_object()) return WrongType("an object");
  const auto member = value_->find(key);
  if (member == value_->end() || member->is_null()) return std::optional<JsonValue>();
  return std::optional<JsonValue>(JsonValue(*member, path_ + "." + std::string(key)));
}

Result<JsonValue> JsonValue::Get(std::string_view key) const {
  QUIRE_ASSIGN_OR_RETURN(std::optional<JsonValue> found, Find(key));
  if (!found) {
    return Status(StatusCode::kBadArgument,
                  path_ + ": the field \"" + std::string(key) + "\" is missing");
  }
  return *std::move(found);
}

Result<size_t> JsonValue::ArraySize() const {
  if (!value_->is_array()) return WrongType("an array");
  return value_->size();
}

Result<JsonValue> JsonValue::At(size_t index) const {
  QUIRE_ASSIGN_OR_RETURN(const size_t size, ArraySize());
  if (index >= size) {
    return Status(StatusCode::kBadArgument, path_ + ": it has " + std::to_string(size) +
                                                " elements, index " + std::to_string(index) +
                                                " was asked for");
  }
  return JsonValue((*value_)[index], path_ + "[" + std::to_string(index) + "]");
}

Result<int64_t> JsonValue::Int(int64_t min, int64_t max) const {
  if (!value_->is_number_integer()) return WrongType("an integer");
  const bool too_big = value_->is_number_unsigned() &&
                       value_->get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()};
  const int64_t number = too_big ? 0 : value_->get<int64_t>();
  if (too_big || number < min || number > max) {
    return Status(StatusCode::kBadArgument, path_ + ": " + ShortDump(*value_) + " is not in [" +
                                                std::to_string(min) + ", " + std::to_string(max) +
                                                "]");
  }
  return number;
}

Result<double> JsonValue::Number() const {
  if (!value_->is_number()) return WrongType("a number");
  return value_->get<double>();
}

Result<bool> JsonValue::Bool() const {
  if (!value_->is_boolean()) return WrongType("true or false");
  return value_->get<bool>();
}

Result<std::string> JsonValue::String() const {
  if (!value_->is_string()) return WrongType("a string");
  return value_->get_ref<const std::string&>();
}

Result<int64_t> JsonValue::GetInt(std::string_view key, int64_t min, int64_t max) const {
  QUIRE_ASSIGN_OR_RETURN(const JsonValue member, Get(key));
  return member.Int(min, max);
}

Result<int64_t> JsonValue::GetIntOr(std::string_view key, int64_t fallback, int64_t min,
                                    int64_t max) const {
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> member, Find(key));
  if (!member) return fallback;
  return member->Int(min, max);
}

Result<double> JsonValue::GetNumber(std::string_view key) const {
  QUIRE_ASSIGN_OR_RETURN(const JsonValue member, Get(key));
  return member.Number();
}

Result<double> JsonValue::GetNumberOr(std::string_view key, double fallback) const {
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> member, Find(key));
  if (!member) return fallback;
  return member->Number();
}

Result<bool> JsonValue::GetBoolOr(std::string_view key, bool fallback) const {
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> member, Find(key));
  if (!member) return fallback;
  return member->Bool();
}

Result<std::string> JsonValue::GetString(std::string_view key) const {
  QUIRE_ASSIGN_OR_RETURN(const JsonValue member, Get(key));
  return member.String();
}

Result<std::string> JsonValue::GetStringOr(std::string_view key, std::string_view fallback) const {
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> member, Find(key));
  if (!member) return std::string(fallback);
  return member->String();
}

}  // namespace quire
