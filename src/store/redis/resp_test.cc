#include "store/redis/resp.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

namespace quire {
namespace {

// Feeds the stream in portions of `portion` bytes; the replies, or the error behind them.
struct Outcome {
  std::vector<RespValue> replies;
  Status status;
  bool idle = false;
};

Outcome Parse(const std::string& stream, size_t portion, const RespExpectation& expected = {}) {
  RespReader reader;
  Outcome outcome;
  size_t at = 0;
  while (true) {
    const Result<bool> complete = reader.Next(expected);
    if (!complete.ok()) {
      outcome.status = complete.status();
      return outcome;
    }
    if (*complete) {
      outcome.replies.push_back(reader.Take());
      continue;
    }
    if (at == stream.size()) break;
    size_t left = std::min(portion, stream.size() - at), filled = 0;
    for (const std::span<std::byte> space : reader.Space()) {
      const size_t size = std::min(space.size(), left);
      if (size > 0) std::memcpy(space.data(), stream.data() + at, size);
      at += size;
      left -= size;
      filled += size;
    }
    EXPECT_GT(filled, 0U);
    reader.Filled(filled);
  }
  outcome.idle = reader.idle();
  return outcome;
}

std::string TextOf(const RespValue& value) {
  switch (value.type) {
    case RespType::kSimple:
      return "+" + value.text;
    case RespType::kError:
      return "-" + value.text;
    case RespType::kInteger:
      return ":" + std::to_string(value.integer);
    case RespType::kBulk:
      return "$" + value.text;
    case RespType::kNull:
      return "null";
    case RespType::kArray:
      break;
  }
  std::string text = "[";
  for (const RespValue& item : value.items) text += TextOf(item) + " ";
  return text + "]";
}

TEST(RespReader, ReadsAllTypesHoweverTheyArrive) {
  const std::string stream =
      "+OK\r\n-ERR no\r\n:-42\r\n$5\r\na\r\nbc\r\n$0\r\n\r\n$-1\r\n*-1\r\n*0\r\n"
      "*3\r\n:1\r\n*2\r\n$1\r\nx\r\n*0\r\n$-1\r\n+end\r\n";
  for (size_t portion = 1; portion <= stream.size(); ++portion) {
    const Outcome outcome = Parse(stream, portion);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.ToString();
    std::string text;
    for (const RespValue& reply : outcome.replies) text += TextOf(reply) + "|";
    EXPECT_EQ(text, "+OK|-ERR no|:-42|$a\r\nbc|$|null|null|[]|[:1 [$x [] ] null ]|+end|")
        << portion;
    EXPECT_TRUE(outcome.idle);
  }
}

TEST(RespReader, PutsAValueOfTheRightLengthInPlace) {
  const std::string value(200'000, 'v');
  const std::string stream =
      "$200000\r\n" + value + "\r\n$3\r\nabc\r\n$-1\r\n:7\r\n$200000\r\n" + value + "\r\n";
  for (const size_t portion : {size_t{1}, size_t{777}, size_t{70'000}, stream.size()}) {
    std::string place(value.size(), '?');
    const Outcome outcome = Parse(
        stream, portion, {.place = std::as_writable_bytes(std::span(place)), .bytes_max = 1000});
    ASSERT_EQ(outcome.replies.size(), 5U) << outcome.status.ToString();
    EXPECT_TRUE(outcome.replies[0].in_place);
    EXPECT_TRUE(outcome.replies[0].text.empty());
    EXPECT_FALSE(outcome.replies[1].in_place);  // skipped
    EXPECT_EQ(outcome.replies[1].integer, 3);
    EXPECT_EQ(outcome.replies[2].type, RespType::kNull);
    EXPECT_EQ(outcome.replies[3].integer, 7);
    EXPECT_TRUE(outcome.replies[4].in_place);
    EXPECT_EQ(place, value);
  }
}

TEST(RespReader, TakesNoMoreThanExpected) {
  const RespExpectation small = {.bytes_max = 10, .items_max = 4};
  std::string place(3, '?');
  const RespExpectation placed = {.place = std::as_writable_bytes(std::span(place)),
                                  .bytes_max = 10};
  for (const auto& [stream, expected] :
       std::vector<std::pair<std::string, RespExpectation>>{{"$11\r\n", small},
                                                            {"$9223372036854775807\r\n", small},
                                                            {"*5\r\n", small},
                                                            {"*9223372036854775807\r\n", small},
                                                            {"*2\r\n$6\r\naaaaaa\r\n$6\r\n", small},
                                                            {"*2\r\n*2\r\n*1\r\n", small},
                                                            {"$11\r\n", placed}}) {
    EXPECT_EQ(Parse(stream, stream.size(), expected).status.code(), StatusCode::kCorrupt) << stream;
  }
  EXPECT_TRUE(Parse("$10\r\naaaaaaaaaa\r\n", 100, small).status.ok());
  // The limits are those of one reply, not of all.
  EXPECT_EQ(Parse("*4\r\n:1\r\n:1\r\n:1\r\n:1\r\n*4\r\n:1\r\n:1\r\n:1\r\n:1\r\n", 9, small)
                .replies.size(),
            2U);
}

TEST(RespReader, RefusesWhatIsNoResp) {
  std::string deep;
  for (int i = 0; i < 8; ++i) deep += "*1\r\n";
  EXPECT_TRUE(Parse(deep + ":1\r\n", 5000).status.ok());
  deep += "*1\r\n";
  for (const std::string& stream :
       {std::string("HTTP/1.1 200 OK\r\n"), std::string("$-2\r\n"), std::string("*-2\r\n"),
        std::string("$\r\n"), std::string("$1x\r\n"), std::string(":\r\n"), std::string("\r\n"),
        std::string("\n"), std::string("+OK\n"), std::string("$2\r\nabc\r\n"),
        std::string("$1\r\na\rX"), std::string("$99999999999999999999\r\n"), deep,
        std::string(20'000, '+'), std::string("%1\r\n")}) {
    for (const size_t portion : {size_t{1}, size_t{5000}})
      EXPECT_EQ(Parse(stream, portion).status.code(), StatusCode::kCorrupt) << stream.substr(0, 30);
  }
}

TEST(RedisRequest, EncodesAndReferencesLongArguments) {
  std::string large(10'000, 'L');
  RedisRequest request;
  request.Add({"SET", "key", large, "NX"});
  request.Add({"GET", ""});
  large[0] = 'M';  // referenced, not copied
  const std::string expected = "*4\r\n$3\r\nSET\r\n$3\r\nkey\r\n$10000\r\n" + large +
                               "\r\n$2\r\nNX\r\n*2\r\n$3\r\nGET\r\n$0\r\n\r\n";
  EXPECT_EQ(request.command_count(), 2);
  EXPECT_EQ(request.bytes(), expected.size());
  for (size_t offset = 0; offset <= expected.size(); offset += 7) {
    std::vector<std::span<const std::byte>> spans;
    request.Gather(offset, 100, &spans);
    std::string text;
    for (const auto span : spans)
      text.append(reinterpret_cast<const char*>(span.data()), span.size());
    EXPECT_EQ(text, expected.substr(offset)) << offset;
    spans.clear();
    request.Gather(offset, 1, &spans);
    EXPECT_LE(spans.size(), 1U);
  }
}

TEST(RespReader, ErrorsBecomeOnePrintableLine) {
  EXPECT_EQ(PrintableError("a\r\nb\x01\xff"), "a??b??");
  EXPECT_LT(PrintableError(std::string(5000, 'x')).size(), 200U);
}

}  // namespace
}  // namespace quire
