#include "model/weights/safetensors.h"

#include <gtest/gtest.h>

#include <string>

#include "model/testing/test_checkpoint.h"

namespace quire {
namespace {

Result<StoredTensors> Parse(std::string_view bytes) {
  return ParseSafetensors(AsBytes(bytes), "m.safetensors");
}

TEST(Safetensors, ReadsTensorsInAnyOrderOfNamesAndOffsets) {
  const auto contents =
      Parse(SafetensorsBytes(R"({"b":{"data_offsets":[0,8],"dtype":"F32","shape":[2]},)"
                             R"("__metadata__":{"format":"pt"},)"
                             R"("a":{"dtype":"BF16","shape":[2,3],"data_offsets":[8,20]}}   )",
                             std::string(20, 'x')));
  ASSERT_TRUE(contents.ok()) << contents.status().ToString();
  ASSERT_EQ(contents->tensors.size(), 2u);
  const StoredTensor* const a = contents->Find("a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->dtype, DType::kBF16);
  EXPECT_EQ(a->TypeAndShape(), "BF16 [2, 3]");
  EXPECT_EQ(a->begin, 8);
  EXPECT_EQ(a->end, 20);
  ASSERT_NE(contents->Find("b"), nullptr);
  EXPECT_EQ(contents->Find("b")->dtype, DType::kF32);
  EXPECT_EQ(contents->Find("c"), nullptr);
}

TEST(Safetensors, TakesScalarsEmptyTensorsAndTypesThatQuireLacks) {
  const auto contents =
      Parse(SafetensorsBytes(R"({"scalar":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                             R"("empty":{"dtype":"F16","shape":[3,0,5],"data_offsets":[4,4]},)"
                             R"("packed":{"dtype":"F4","shape":[6],"data_offsets":[4,7]},)"
                             R"("mask":{"dtype":"BOOL","shape":[3],"data_offsets":[7,10]}})",
                             std::string(10, 'x')));
  ASSERT_TRUE(contents.ok()) << contents.status().ToString();
  EXPECT_EQ(contents->Find("scalar")->TypeAndShape(), "F32 []");
  EXPECT_EQ(contents->Find("mask")->dtype, std::nullopt);
  EXPECT_EQ(contents->Find("packed")->type_name, "F4");
}

TEST(Safetensors, TakesAFileWithoutTensors) {
  const auto contents = Parse(SafetensorsBytes("{}", ""));
  ASSERT_TRUE(contents.ok()) << contents.status().ToString();
  EXPECT_TRUE(contents->tensors.empty());
}

struct Attack {
  const char* name;
  std::string bytes;
  const char* message;  // part of the error
  StatusCode code = StatusCode::kCorrupt;
};

std::string LengthOnly(uint64_t length, std::string_view rest) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> (8 * i) & 0xFF);
  return bytes.append(rest);
}

std::string OneTensor(std::string_view fields, size_t data_bytes) {
  return SafetensorsBytes(R"({"t":{)" + std::string(fields) + "}}", std::string(data_bytes, 'x'));
}

std::string TwoTensors(std::string_view first, std::string_view second, size_t data_bytes) {
  const auto entry = [](const char* name, std::string_view offsets) {
    return "\"" + std::string(name) + R"(":{"dtype":"U8","shape":[4],"data_offsets":)" +
           std::string(offsets) + "}";
  };
  return SafetensorsBytes("{" + entry("t", first) + "," + entry("u", second) + "}",
                          std::string(data_bytes, 'x'));
}

std::string Repeat(std::string_view part, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += part;
  return text;
}

std::vector<Attack> BrokenFrames() {
  const std::string sound = OneTensor(R"("dtype":"U8","shape":[4],"data_offsets":[0,4])", 4);
  return {
      {"no bytes", "", "too few"},
      {"half a length", sound.substr(0, 5), "too few"},
      {"header cut", sound.substr(0, 20), "bytes, the file only 20"},
      {"data cut", sound.substr(0, sound.size() - 1), "not within"},
      {"bytes behind the data", sound + "y", "end at byte 4 of 5"},
      {"length is all ones", LengthOnly(~uint64_t{0}, "{}"), "over the format's limit",
       StatusCode::kTooLarge},
      {"length is one over the limit", LengthOnly(100'000'001, "{}"), "over the format's limit",
       StatusCode::kTooLarge},
      {"length is one over the file", LengthOnly(3, "{}"), "the header has 3 bytes"},
      {"length 0", LengthOnly(0, "{}"), "does not begin with {"},
      {"space first", SafetensorsBytes(" {}", ""), "does not begin with {"},
      {"a byte order mark", SafetensorsBytes("\xEF\xBB\xBF{}", ""), "does not begin with {"},
      {"zeros behind the header", SafetensorsBytes(std::string("{}\0\0", 4), ""), "not valid JSON"},
      {"an array", SafetensorsBytes("[]", ""), "does not begin with {"},
      {"two documents", SafetensorsBytes("{}{}", ""), "not valid JSON"},
      {"bad UTF-8", SafetensorsBytes("{\"\xFF\":1}", ""), "not valid JSON"},
      {"a pickle", LengthOnly(6, "\x80\x04\x95\x0b\x00\x00"), "the header has 6 bytes"},
  };
}

std::vector<Attack> BrokenOffsets() {
  return {
      {"overlap", TwoTensors("[0,4]", "[2,6]", 6), "overlap"},
      {"the same bytes twice", TwoTensors("[0,4]", "[0,4]", 4), "overlap"},
      {"hole between", TwoTensors("[0,4]", "[5,9]", 9), "unused bytes before it"},
      {"hole at the start", OneTensor(R"("dtype":"U8","shape":[3],"data_offsets":[1,4])", 4),
       "unused bytes before it"},
      {"hole at the end", TwoTensors("[0,4]", "[4,8]", 12), "end at byte 8 of 12"},
      {"no tensor for the data", SafetensorsBytes("{}", "data"), "end at byte 0 of 4"},
      {"begin behind end", OneTensor(R"("dtype":"U8","shape":[4],"data_offsets":[4,0])", 4),
       "not within"},
      {"end behind the file", OneTensor(R"("dtype":"U8","shape":[9],"data_offsets":[0,9])", 4),
       "not within"},
      {"offset 2^63",
       OneTensor(R"("dtype":"U8","shape":[4],"data_offsets":[0,9223372036854775808])", 4),
       "beyond any file"},
      {"offset 2^64",
       OneTensor(R"("dtype":"U8","shape":[4],"data_offsets":[0,18446744073709551616])", 4),
       "no integer"},
      {"negative offset", OneTensor(R"("dtype":"U8","shape":[4],"data_offsets":[-4,0])", 4),
       "negative"},
      {"fraction", OneTensor(R"("dtype":"U8","shape":[4],"data_offsets":[0,4.0])", 4),
       "no integer"},
      {"one offset", OneTensor(R"("dtype":"U8","shape":[4],"data_offsets":[4])", 4),
       "not two numbers"},
      {"three offsets", OneTensor(R"("dtype":"U8","shape":[4],"data_offsets":[0,4,4])", 4),
       "more than two"},
  };
}

std::vector<Attack> BrokenTensors() {
  return {
      {"size and offsets differ", OneTensor(R"("dtype":"F32","shape":[4],"data_offsets":[0,4])", 4),
       "needs 128 bits"},
      {"shape overflows",
       OneTensor(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4])", 4),
       "overflows"},
      {"shape overflows to the right size",
       OneTensor(R"("dtype":"U8","shape":[4611686018427387904,2,4],"data_offsets":[0,0])", 0),
       "overflows"},
      {"overflow hidden by a zero",
       OneTensor(R"("dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0])", 0),
       "overflows"},
      {"negative dimension", OneTensor(R"("dtype":"U8","shape":[-4],"data_offsets":[0,4])", 4),
       "negative"},
      {"half a byte", OneTensor(R"("dtype":"F4","shape":[1],"data_offsets":[0,1])", 1),
       "needs 4 bits"},
      {"65 dimensions",
       OneTensor(R"("dtype":"U8","shape":[1)" + Repeat(",1", 64) + R"(],"data_offsets":[0,1])", 1),
       "more than 64 dimensions"},
      {"unknown dtype", OneTensor(R"("dtype":"F33","shape":[1],"data_offsets":[0,4])", 4),
       "unknown dtype \"F33\""},
      {"dtype is a number", OneTensor(R"("dtype":32,"shape":[1],"data_offsets":[0,4])", 4),
       "a number has no place"},
      {"no dtype", OneTensor(R"("shape":[4],"data_offsets":[0,4])", 4), "not all there"},
      {"no shape", OneTensor(R"("dtype":"U8","data_offsets":[0,4])", 4), "not all there"},
      {"no offsets", OneTensor(R"("dtype":"U8","shape":[4])", 4), "not all there"},
      {"a field twice",
       OneTensor(R"("dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4])", 4),
       "stands twice"},
      {"an unknown field",
       OneTensor(R"("dtype":"U8","shape":[4],"data_offsets":[0,4],"stride":[1])", 4),
       "unknown field \"stride\""},
      {"shape is nested", OneTensor(R"("dtype":"U8","shape":[[4]],"data_offsets":[0,4])", 4),
       "an array has no place"},
      {"shape holds text", OneTensor(R"("dtype":"U8","shape":["4"],"data_offsets":[0,4])", 4),
       "a string has no place"},
      {"tensor is null", SafetensorsBytes(R"({"t":null})", ""), "null has no place"},
      {"tensor is a list", SafetensorsBytes(R"({"t":[]})", ""), "an array has no place"},
      {"deep nesting", SafetensorsBytes(Repeat(R"({"shape":)", 100'000), ""),
       "an object has no place"},
      {"deep arrays", OneTensor("\"shape\":" + std::string(1'000'000, '['), 0),
       "an array has no place"},
  };
}

std::vector<Attack> BrokenNames() {
  const std::string empty = R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  return {
      {"a name twice", SafetensorsBytes("{\"t\":" + empty + ",\"t\":" + empty + "}", ""),
       "tensor \"t\" stands twice"},
      {"a name twice, once escaped",
       SafetensorsBytes("{\"t\":" + empty + R"(,"\u0074":)" + empty + "}", ""),
       "tensor \"t\" stands twice"},
      {"a long name", SafetensorsBytes("{\"" + std::string(1025, 'n') + "\":" + empty + "}", ""),
       "1025 bytes, the limit is 1024", StatusCode::kTooLarge},
      {"metadata twice", SafetensorsBytes(R"({"__metadata__":{},"__metadata__":{}})", ""),
       "__metadata__ stands twice"},
      {"a metadata key twice", SafetensorsBytes(R"({"__metadata__":{"a":"","a":""}})", ""),
       "key \"a\" twice"},
      {"metadata is no object", SafetensorsBytes(R"({"__metadata__":"a"})", ""),
       "a string has no place"},
      {"metadata holds a number", SafetensorsBytes(R"({"__metadata__":{"a":1}})", ""),
       "a number has no place"},
      {"metadata is nested", SafetensorsBytes(R"({"__metadata__":{"a":{}}})", ""),
       "an object has no place"},
      {"escape codes in a name", SafetensorsBytes("{\"\\u001b[2J\":1}", ""), "\"\\x1b[2J\""},
  };
}

void ExpectRefused(const std::vector<Attack>& attacks) {
  for (const Attack& attack : attacks) {
    SCOPED_TRACE(attack.name);
    const auto contents = Parse(attack.bytes);
    ASSERT_FALSE(contents.ok());
    EXPECT_EQ(contents.status().code(), attack.code) << contents.status().ToString();
    const std::string message(contents.status().message());
    EXPECT_TRUE(message.starts_with("m.safetensors: ")) << message;
    EXPECT_NE(message.find(attack.message), std::string::npos) << message;
    EXPECT_LT(message.size(), 600u);
  }
}

TEST(Safetensors, RefusesBrokenFrames) { ExpectRefused(BrokenFrames()); }
TEST(Safetensors, RefusesOffsetsThatDoNotTileTheData) { ExpectRefused(BrokenOffsets()); }
TEST(Safetensors, RefusesBrokenTensors) { ExpectRefused(BrokenTensors()); }
TEST(Safetensors, RefusesBrokenNames) { ExpectRefused(BrokenNames()); }

TEST(Safetensors, RefusesEveryPrefixOfASoundFile) {
  const std::vector<TestTensor> tensors = {{"a", {2, 2}, {1, 2, 3, 4}},
                                           {"b", {3}, {1, 2, 3}, DType::kBF16}};
  const std::string sound = SafetensorsBytes(tensors);
  ASSERT_TRUE(Parse(sound).ok());
  for (size_t size = 0; size < sound.size(); ++size) {
    EXPECT_FALSE(Parse(sound.substr(0, size)).ok()) << size;
  }
}

TEST(Safetensors, HoldsTheLimitOfMetadataEntries) {
  std::string header = R"({"__metadata__":{"k0":"")";
  for (int i = 1; i <= 10'000; ++i) header += ",\"k" + std::to_string(i) + "\":\"\"";
  const auto contents = Parse(SafetensorsBytes(header + "}}", ""));
  ASSERT_FALSE(contents.ok());
  EXPECT_EQ(contents.status().code(), StatusCode::kTooLarge);
}

TEST(Safetensors, HoldsTheLimitOfTensors) {
  std::string header = "{";
  for (int64_t i = 0; i <= kMaxSafetensorsTensors; ++i) {
    header += (i == 0 ? "\"" : ",\"") + std::to_string(i) +
              R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  }
  const auto contents = Parse(SafetensorsBytes(header + "}", ""));
  ASSERT_FALSE(contents.ok());
  EXPECT_EQ(contents.status().code(), StatusCode::kTooLarge) << contents.status().ToString();
}

Result<SafetensorsIndex> ParseIndex(std::string_view text) {
  return ParseSafetensorsIndex(text, "index.json");
}

TEST(SafetensorsIndex, ListsFilesAndTensors) {
  const auto index =
      ParseIndex(R"({"metadata":{"total_size":12,"nested":[{"weight_map":{"x":1}}]},)"
                 R"("weight_map":{"b":"2.safetensors","a":"1.safetensors","c":"1.safetensors"},)"
                 R"("extra":null})");
  ASSERT_TRUE(index.ok()) << index.status().ToString();
  EXPECT_EQ(index->files, (std::vector<std::string>{"1.safetensors", "2.safetensors"}));
  const std::vector<std::pair<std::string, size_t>> tensors = {{"a", 0}, {"b", 1}, {"c", 0}};
  EXPECT_EQ(index->tensors, tensors);
}

TEST(SafetensorsIndex, RefusesFilesOutsideTheFolder) {
  for (const std::string name :
       {"../m.safetensors", "/etc/m.safetensors", "sub/m.safetensors", ".hidden.safetensors",
        "..safetensors", ".safetensors", "m.bin", "", "a\\\\b.safetensors", "m.safetensors\\u0000",
        "m\\u0000.safetensors"}) {
    SCOPED_TRACE(name);
    const auto index = ParseIndex(R"({"weight_map":{"t":")" + name + "\"}}");
    ASSERT_FALSE(index.ok());
    EXPECT_EQ(index.status().code(), StatusCode::kCorrupt);
    EXPECT_NE(index.status().message().find("no plain *.safetensors name"), std::string::npos)
        << index.status().ToString();
  }
}

TEST(SafetensorsIndex, RefusesWhatIsNoIndex) {
  const std::pair<std::string, const char*> cases[] = {
      {"", "not valid JSON"},
      {"{}", "no weight_map"},
      {"[]", "an array has no place"},
      {"7", "this value has no place"},
      {R"({"weight_map":[]})", "an array has no place"},
      {R"({"weight_map":3})", "has no place"},
      {R"({"weight_map":{"t":3}})", "has no place"},
      {R"({"weight_map":{"t":{}}})", "an object has no place"},
      {R"({"weight_map":{},"weight_map":{}})", "stands twice"},
      {R"({"weight_map":{"t":"a.safetensors","t":"b.safetensors"}})", "\"t\" twice"},
      {"{\"metadata\":" + std::string(100'000, '['), "deeper than 64"},
      {R"({"weight_map":{"t":"a.safetensors"})", "not valid JSON"},
  };
  for (const auto& [text, message] : cases) {
    SCOPED_TRACE(message);
    const auto index = ParseIndex(text);
    ASSERT_FALSE(index.ok());
    EXPECT_EQ(index.status().code(), StatusCode::kCorrupt);
    EXPECT_NE(index.status().message().find(message), std::string::npos)
        << index.status().ToString();
  }
}

TEST(SafetensorsIndex, HoldsTheLimitOfFiles) {
  std::string text = R"({"weight_map":{"t":"m.safetensors")";
  for (size_t i = 0; i < kMaxShards; ++i) {
    const std::string number = std::to_string(i);
    text += ",\"" + number + "\":\"" + number + ".safetensors\"";
  }
  const auto index = ParseIndex(text + "}}");
  ASSERT_FALSE(index.ok());
  EXPECT_EQ(index.status().code(), StatusCode::kTooLarge);
}

}  // namespace
}  // namespace quire
