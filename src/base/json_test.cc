#include "base/json.h"

#include <gtest/gtest.h>

#include <string>

namespace quire {
namespace {

Status ErrorOf(std::string_view text, const JsonLimits& limits = {}) {
  return ParseJson(text, "x.json", limits).status();
}

std::string Nested(int depth) {
  const size_t n = static_cast<size_t>(depth);
  return std::string(n, '[') + std::string(n, ']');
}

TEST(ParseJson, BuildsWhatTheLibraryBuilds) {
  for (
      const char* text :
      {"null", "true", "-3", "18446744073709551615", "1.5e3", "\"a\\u00e9\"", "[]", "{}",
       R"({"a": [1, [2, {"b": null}], []], "c": {"d": {"e": 1}, "f": 2}, "": [{}, {"g": "h"}]})"}) {
    const auto parsed = ParseJson(text, "x.json");
    ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
    EXPECT_EQ(*parsed, nlohmann::json::parse(text)) << text;
  }
}

TEST(ParseJson, RefusesWhatIsNoJson) {
  for (const char* text : {"", " ", "{", "[1,]", "{\"a\"}", "{a: 1}", "nul", "1 2", "\"\xff\"",
                           "1e999", "NaN", "[1] x", "/* c */ 1", "\"\x01\""}) {
    const Status status = ErrorOf(text);
    EXPECT_EQ(status.code(), StatusCode::kCorrupt) << text;
    EXPECT_EQ(status.message().substr(0, 7), "x.json:") << status.ToString();
  }
  EXPECT_NE(ErrorOf("[1,\n 2,]").message().find("line 2, column 4"), std::string::npos);
}

// The library below takes a NUL for the end of the text.
TEST(ParseJson, RefusesANulWhereverItStands) {
  for (const std::string_view text :
       {std::string_view("{}\0", 3), std::string_view("{}\0{\"a\":", 8),
        std::string_view("\0{}", 3), std::string_view("\0", 1), std::string_view("[1,\0 2]", 8),
        std::string_view("\"\0\"", 3)}) {
    const Status status = ErrorOf(text);
    EXPECT_EQ(status.code(), StatusCode::kCorrupt) << text;
    EXPECT_NE(status.message().find("is a NUL"), std::string::npos) << status.ToString();
  }
  EXPECT_TRUE(ErrorOf("\"\\u0000\"").ok()) << "escaped it is a character like others";
}

TEST(ParseJson, RefusesRepeatedKeys) {
  EXPECT_NE(ErrorOf(R"({"a": {"b": 1, "b": 2}})").message().find("the key \"b\" stands twice"),
            std::string::npos);
  EXPECT_TRUE(ErrorOf(R"({"a": {"a": 1}, "b": [{"a": 1}, {"a": 1}]})").ok());
}

TEST(ParseJson, DepthHasALimit) {
  EXPECT_TRUE(ErrorOf(Nested(64)).ok());
  EXPECT_NE(ErrorOf(Nested(65)).message().find("deeper than 64"), std::string::npos);
  EXPECT_EQ(ErrorOf(Nested(1'000'000)).code(), StatusCode::kCorrupt);
}

TEST(ParseJson, SizeHasALimit) {
  EXPECT_TRUE(ErrorOf("[1]", {.max_bytes = 3}).ok());
  EXPECT_EQ(ErrorOf("[1] ", {.max_bytes = 3}).code(), StatusCode::kTooLarge);
}

class JsonValueTest : public testing::Test {
 protected:
  const nlohmann::json document_ = nlohmann::json::parse(R"({
    "layers": 32, "eps": 1e-5, "tied": false, "name": "m", "none": null, "big": 9223372036854775808,
    "low": -9223372036854775808, "text_config": {"heads": [4, "eight"]}})");
  const JsonValue root_{document_, "config.json"};
};

TEST_F(JsonValueTest, ReadsFields) {
  EXPECT_EQ(root_.GetInt("layers").value(), 32);
  EXPECT_EQ(root_.GetInt("low").value(), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(root_.GetNumber("eps").value(), 1e-5);
  EXPECT_EQ(root_.GetNumber("layers").value(), 32);
  EXPECT_EQ(root_.GetString("name").value(), "m");
  EXPECT_FALSE(root_.GetBoolOr("tied", true).value());
  EXPECT_EQ(root_.Get("text_config")->Get("heads")->At(0)->Int().value(), 4);
}

TEST_F(JsonValueTest, FallbacksStandInForAbsentAndNullFieldsOnly) {
  EXPECT_EQ(root_.GetIntOr("absent", 5).value(), 5);
  EXPECT_EQ(root_.GetIntOr("none", 6).value(), 6);
  EXPECT_EQ(root_.GetNumberOr("absent", 0.5).value(), 0.5);
  EXPECT_EQ(root_.GetStringOr("none", "s").value(), "s");
  EXPECT_TRUE(root_.GetBoolOr("absent", true).value());
  EXPECT_FALSE(root_.GetIntOr("name", 5).ok());
}

TEST_F(JsonValueTest, ErrorsNamePathAndValue) {
  EXPECT_EQ(root_.Get("text_config")->Get("heads")->At(1)->Int().status().ToString(),
            "BadArgument: config.json.text_config.heads[1]: expected an integer, found \"eight\"");
  EXPECT_EQ(root_.GetInt("absent").status().ToString(),
            "BadArgument: config.json: the field \"absent\" is missing");
  EXPECT_EQ(root_.GetInt("layers", 1, 16).status().ToString(),
            "BadArgument: config.json.layers: 32 is not in [1, 16]");
  EXPECT_EQ(root_.Get("text_config")->Get("heads")->At(2).status().ToString(),
            "BadArgument: config.json.text_config.heads: it has 2 elements, index 2 was asked for");
  EXPECT_FALSE(root_.GetInt("big").ok());
  EXPECT_FALSE(root_.GetInt("eps").ok());
  EXPECT_FALSE(root_.GetString("layers").ok());
  EXPECT_FALSE(root_.Get("name")->Get("x").ok());
  EXPECT_FALSE(root_.At(0).ok());
}

}  // namespace
}  // namespace quire
