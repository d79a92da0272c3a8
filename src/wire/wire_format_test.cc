#include "wire/wire_format.h"

#include <gtest/gtest.h>

#include <cctype>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>
#include <string>

#include "base/checksum.h"
#include "wire/testing/test_tensor.h"
#include "wire/wire_link.h"

namespace quire::wire {
namespace {

std::string ReadPage() {
  std::ifstream file(QUIRE_WIRE_PAGE);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// The bytes of an example of the page.
std::vector<std::byte> Example(const std::string& name) {
  const std::string page = ReadPage();
  const std::string begin = "```hex " + name + "\n";
  const size_t at = page.find(begin);
  if (at == std::string::npos) return {};
  const size_t from = at + begin.size();
  std::istringstream words(page.substr(from, page.find("```", from) - from));
  std::vector<std::byte> bytes;
  for (std::string word; words >> word;) {
    bytes.push_back(static_cast<std::byte>(std::stoi(word, nullptr, 16)));
  }
  return bytes;
}

std::string Hex(std::span<const std::byte> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto value = static_cast<unsigned>(bytes[i]);
    text += {kDigits[value / 16], kDigits[value % 16], i % 16 == 15 ? '\n' : ' '};
  }
  return text;
}

std::vector<std::byte> Flatten(WireSender* sender) {
  std::vector<std::byte> bytes;
  while (sender->has_output()) {
    const size_t before = bytes.size();
    for (const auto part : sender->Gather()) bytes.insert(bytes.end(), part.begin(), part.end());
    sender->Consume(bytes.size() - before);
  }
  return bytes;
}

Message TakeRequest() {
  Message message{.opcode = Opcode::kTake, .request = 1};
  FieldWriter(&message.fields).Add(int64_t{0});
  message.tensors.emplace_back("tokens", Ids({7}));
  return message;
}

Message EntryAnswer() {
  Message message{.opcode = Opcode::kTake, .is_reply = true, .request = 1};
  message.tensors.emplace_back("tokens", Ids({7}));
  message.tensors.emplace_back("roi", Ones(1));
  message.tensors.emplace_back("key", TensorOf<uint8_t>(ElementType(kDLUInt, 8), {2}, {5, 6}));
  return message;
}

TEST(WireFormat, WritesTheBytesOfThePage) {
  WireSender client;
  const auto check = [](WireSender* sender, Message message, const char* name) {
    sender->Queue(std::move(message));
    EXPECT_EQ(Hex(Flatten(sender)), Hex(Example(name))) << name;
  };
  check(&client,
        {.opcode = Opcode::kHello, .fields = EncodeFields(ClientHello{.services = kServiceLookup})},
        "client hello");
  check(&client, TakeRequest(), "take");
  check(&client, {.opcode = Opcode::kAcknowledge, .request = 1}, "acknowledge");
  WireSender server;
  server.Queue({.opcode = Opcode::kHello, .is_reply = true});
  Flatten(&server);
  check(&server, EntryAnswer(), "entry");
  check(&server,
        ErrorReply(Opcode::kGoodbye, 0,
                   Status(StatusCode::kClosed, "the server of the buffer was closed")),
        "goodbye");
}

class Collector final : public WireReceiver::Handler {
 public:
  Status OnBegin(const Message&, std::span<const TensorHeader>, int64_t) override { return {}; }
  void OnMessage(Message message) override { messages.push_back(std::move(message)); }
  void OnBroken(const FrameHeader&, const Status& why) override { broken = why; }
  std::vector<Message> messages;
  Status broken;
};

TEST(WireFormat, ReadsTheBytesOfThePage) {
  Collector client;
  WireReceiver receiver(&client, nullptr, 4);
  for (const char* name : {"client hello", "take", "acknowledge"}) {
    ASSERT_TRUE(receiver.Receive(Example(name)).ok()) << name;
  }
  ASSERT_EQ(client.messages.size(), 3U);
  EXPECT_EQ(DecodeClientHello(client.messages[0].fields)->services, kServiceLookup);
  EXPECT_EQ(ValuesOf<int64_t>(client.messages[1].tensors[0].second), std::vector<int64_t>{7});
  EXPECT_EQ(client.messages[2].request, 1U);
  EXPECT_EQ(receiver.memory_bytes(), 0);
}

// A header as the page has it, with one field overwritten and sealed again.
template <typename T>
Status DecodeWith(size_t at, T value) {
  std::vector<std::byte> frame = Example("take");
  std::memcpy(frame.data() + at, &value, sizeof(value));
  const uint32_t crc = Crc32c(frame.data(), 60);
  std::memcpy(frame.data() + 60, &crc, sizeof(crc));
  return DecodeHeader(std::span<const std::byte, kHeaderBytes>(frame.data(), kHeaderBytes), 1,
                      kHeadBytesMax)
      .status();
}

TEST(WireFormat, ChecksEveryFieldOfAHeader) {
  EXPECT_TRUE(DecodeWith<uint8_t>(0, 'Q').ok());
  EXPECT_EQ(DecodeWith<uint8_t>(0, 'X').code(), StatusCode::kCorrupt);
  EXPECT_EQ(DecodeWith<uint16_t>(4, 2).code(), StatusCode::kIncompatible);
  EXPECT_TRUE(DecodeWith<uint8_t>(6, 200).ok()) << "unknown requests are answered";
  EXPECT_EQ(DecodeWith<uint8_t>(7, 8).code(), StatusCode::kCorrupt);
  EXPECT_EQ(DecodeWith<uint64_t>(16, 0).code(), StatusCode::kCorrupt);
  EXPECT_EQ(DecodeWith<uint64_t>(16, 2).code(), StatusCode::kCorrupt);
  EXPECT_EQ(DecodeWith<uint16_t>(24, kStatusCodeCount).code(), StatusCode::kCorrupt);
  EXPECT_EQ(DecodeWith<uint16_t>(26, 1).code(), StatusCode::kCorrupt);
  EXPECT_TRUE(DecodeWith<uint32_t>(32, kHeadBytesMax).ok());
  EXPECT_EQ(DecodeWith<uint32_t>(32, kHeadBytesMax + 1).code(), StatusCode::kTooLarge);
  EXPECT_EQ(DecodeWith<uint32_t>(32, 7).code(), StatusCode::kCorrupt) << "less than the fields";
  EXPECT_EQ(DecodeWith<uint32_t>(40, 9).code(), StatusCode::kCorrupt) << "more than the message";
  EXPECT_EQ(DecodeWith<uint32_t>(40, 0xffffffff).code(), StatusCode::kCorrupt);
  EXPECT_EQ(DecodeWith<uint64_t>(48, (uint64_t{1} << 62) + 1).code(), StatusCode::kCorrupt);
  EXPECT_EQ(DecodeWith<uint8_t>(7, kFlagContinued).code(), StatusCode::kCorrupt) << "with a head";
  EXPECT_EQ(DecodeWith<uint8_t>(7, kFlagAborted).code(), StatusCode::kCorrupt) << "never began";
}

TEST(WireFormat, AFrameHasAtMostAMebibyte) {
  WireSender sender;
  Message message{.opcode = Opcode::kPut, .request = 9};
  message.tensors.emplace_back("", Floats({700'000}, 1));
  sender.Queue(std::move(message));
  std::vector<size_t> frames;
  while (sender.has_output()) {
    size_t bytes = 0;
    for (const auto part : sender.Gather()) bytes += part.size();
    frames.push_back(bytes);
    sender.Consume(bytes);
  }
  ASSERT_EQ(frames.size(), 3U);
  EXPECT_EQ(frames[0], size_t{kFrameBytesMax});
  EXPECT_EQ(frames[1], size_t{kFrameBytesMax});
}

TEST(WireFormat, ChecksTensorHeaders) {
  const auto decode = [](ElementType type, std::vector<int64_t> shape, uint64_t data_bytes,
                         uint32_t count = 1) {
    std::vector<std::byte> head;
    FieldWriter writer(&head);
    writer.Add(type.code).Add(type.bits).Add(static_cast<uint8_t>(shape.size())).Add(uint8_t{0});
    writer.Add(uint32_t{1});
    for (const int64_t size : shape) writer.Add(size);
    writer.AddText("n");
    return DecodeTensorHeaders(head, count, data_bytes).status().code();
  };
  const ElementType f32(kDLFloat, 32);
  EXPECT_EQ(decode(f32, {2, 3}, 24), StatusCode::kOk);
  EXPECT_EQ(decode(f32, {}, 4), StatusCode::kOk);
  EXPECT_EQ(decode(f32, {0, 3}, 0), StatusCode::kOk);
  EXPECT_EQ(decode(f32, {2, 3}, 23), StatusCode::kCorrupt);
  EXPECT_EQ(decode(f32, {2, 3}, 25), StatusCode::kCorrupt);
  EXPECT_EQ(decode(f32, {2, 3}, 24, 2), StatusCode::kCorrupt);
  EXPECT_EQ(decode(f32, {2, 3}, 24, 0), StatusCode::kCorrupt);
  EXPECT_EQ(decode(f32, {2, 3}, 24, 0xffffffff), StatusCode::kCorrupt);
  EXPECT_EQ(decode(f32, {-1}, 0), StatusCode::kCorrupt);
  const int64_t large = int64_t{1} << 40;
  EXPECT_EQ(decode(f32, {large, large}, 0), StatusCode::kCorrupt) << "2^82 bytes";
  EXPECT_EQ(decode(f32, {large, large, 0}, 0), StatusCode::kCorrupt) << "hidden behind a 0";
  EXPECT_EQ(decode(ElementType(kDLInt, 4), {2}, 1), StatusCode::kCorrupt);
  EXPECT_EQ(decode(ElementType(kDLInt, 0), {2}, 0), StatusCode::kCorrupt);
}

TEST(WireFormat, ReadsFieldsOfTheRightLengthOnly) {
  const std::vector<std::byte> client = EncodeFields(ClientHello{.services = 3});
  ServerHello full{.requests_max = 1, .heartbeat_ms = 2, .dead_after_ms = 3};
  const std::vector<std::byte> server = EncodeFields(full);
  EXPECT_EQ(client.size(), 40U);
  EXPECT_EQ(server.size(), 64U);
  EXPECT_EQ(DecodeClientHello(client)->services, 3U);
  EXPECT_EQ(DecodeServerHello(server)->dead_after_ms, 3U);
  EXPECT_FALSE(DecodeClientHello(std::span(client).first(39)).ok());
  EXPECT_FALSE(DecodeServerHello(std::span(server).first(63)).ok());
  EXPECT_FALSE(DecodeServerHello(EncodeFields(ServerHello{})).ok()) << "limits of 0";
  const std::string_view names[] = {"a", "bc"};
  std::vector<std::byte> keys;
  EncodeKeys(names, &keys);
  EXPECT_EQ(DecodeKeys(keys).value(), (std::vector<std::string_view>{"a", "bc"}));
  EXPECT_FALSE(DecodeKeys(std::span(keys).first(keys.size() - 1)).ok());
  EXPECT_FALSE(DecodeKeys(std::vector<std::byte>(2)).ok()) << "an empty key";
}

}  // namespace
}  // namespace quire::wire
