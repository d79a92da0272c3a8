#include "wire/transfer_frames.h"

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>
#include <string>

#include "base/checksum.h"

namespace quire::wire {
namespace {

// The bytes of an example of the page.
std::vector<std::byte> PageExample(const std::string& name) {
  std::ifstream file(QUIRE_TRANSFER_WIRE_PAGE);
  const std::string page(std::istreambuf_iterator<char>(file), {});
  const std::string begin = "```hex " + name + "\n";
  const size_t at = page.find(begin);
  if (at == std::string::npos) return {};
  const size_t from = at + begin.size();
  std::istringstream words(page.substr(from, page.find("```", from) - from));
  std::vector<std::byte> bytes;
  for (std::string word; words >> word;)
    bytes.push_back(static_cast<std::byte>(std::stoi(word, nullptr, 16)));
  return bytes;
}

std::string HexOf(std::span<const std::byte> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto value = static_cast<unsigned>(bytes[i]);
    text += {kDigits[value >> 4], kDigits[value & 15], i % 16 == 15 ? '\n' : ' '};
  }
  return text;
}

std::vector<std::byte> FrameOf(uint64_t number, TransferOpcode opcode,
                               const std::vector<std::byte>& head) {
  std::vector<std::byte> frame(kTransferHeaderBytes);
  EncodeTransferHeader({.opcode = opcode,
                        .number = number,
                        .head_bytes = static_cast<uint32_t>(head.size()),
                        .head_crc = Crc32c(head.data(), head.size())},
                       std::span(frame).first<kTransferHeaderBytes>());
  frame.insert(frame.end(), head.begin(), head.end());
  return frame;
}

Instance SixteenAb() {
  Instance instance;
  instance.fill(std::byte{0xab});
  return instance;
}

TransferPart SomePart() {
  return {.receiver = SixteenAb(),
          .epoch = 7,
          .layer = 2,
          .part = {.first_row = 256, .count = 256, .first_head = 0, .head_count = 2},
          .number = 5,
          .bytes = 65536,
          .digest = 0x01020304};
}

TransferJoin SomeJoin() {
  TransferJoin join{.connection = SixteenAb(), .stream = 1};
  join.proof.bytes.fill(0xcd);
  return join;
}

TEST(TransferFrames, TheExamplesOfThePageAreWhatIsWritten) {
  const struct {
    const char* name;
    std::vector<std::byte> frame;
  } examples[] = {
      {"heartbeat", FrameOf(3, TransferOpcode::kHeartbeat, {})},
      {"part", FrameOf(4, TransferOpcode::kPart, Encode(SomePart()))},
      {"record",
       FrameOf(5, TransferOpcode::kRecord,
               Encode(TransferRecord{
                   .receiver = SixteenAb(), .epoch = 7, .first_row = 256, .count = 256}))},
      {"cancel", FrameOf(6, TransferOpcode::kCancel,
                         EncodeEnd(7, Status(StatusCode::kCancelled, "the reservation is over")))},
      {"streams", FrameOf(2, TransferOpcode::kStreams, Encode(TransferStreams{.count = 4}))},
      {"join", FrameOf(0, TransferOpcode::kJoin, Encode(SomeJoin()))},
  };
  for (const auto& example : examples) {
    EXPECT_EQ(HexOf(PageExample(example.name)), HexOf(example.frame)) << example.name;
  }
}

TEST(TransferFrames, MessagesComeBackAsTheyWere) {
  const auto part = DecodeTransferPart(Encode(SomePart()));
  ASSERT_TRUE(part.ok());
  EXPECT_EQ(Encode(*part), Encode(SomePart()));
  const TransferJob job{.id = 3,
                        .tokens = {1, -2, 3},
                        .salt = std::string("a\0b", 3),
                        .window = 64,
                        .sinks = 4,
                        .long_rope = true,
                        .deadline_ns = 5};
  EXPECT_EQ(Encode(*DecodeTransferJob(Encode(job))), Encode(job));
  EXPECT_EQ(DecodeTransferJob(Encode(job))->salt, job.salt);
  EXPECT_EQ(DecodeTransferJob(Encode(job))->sinks, 4);
  EXPECT_TRUE(DecodeTransferJob(Encode(job))->long_rope);
  const TransferLoad load{.queued_tokens = 8192, .ns_per_token = 900};
  EXPECT_EQ(*DecodeTransferLoad(Encode(load)), load);
  EXPECT_EQ(DecodeTransferJob(Encode(job))->tokens, job.tokens);
  EXPECT_EQ(DecodeTransferJob(Encode(job))->deadline_ns, 5);
  const TransferMap map{.job = 3,
                        .map = {.epoch = 9,
                                .slots = {1, 0, 5},
                                .first_position = 2,
                                .count = 5,
                                .kv_heads = {2, 4},
                                .layout = 77}};
  const auto read = DecodeTransferMap(Encode(map));
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(Encode(*read), Encode(map));
  EXPECT_EQ(read->map.slots, map.map.slots);
  TransferHello hello{.has_secret = true,
                      .heartbeat_ms = 500,
                      .dead_after_ms = 3000,
                      .lease_ms = 30000,
                      .window_bytes = 1 << 20,
                      .instance = SixteenAb()};
  EXPECT_EQ(Encode(*DecodeTransferHello(Encode(hello))), Encode(hello));
  EXPECT_TRUE(DecodeTransferCredit(Encode(TransferCredit{4, true}))->wants_again);
  EXPECT_TRUE(DecodeTransferRecord(Encode(TransferRecord{.is_aborted = true}))->is_aborted);
  EXPECT_EQ(DecodeTransferLease(Encode(TransferLease{12}))->epoch, 12U);
  EXPECT_EQ(DecodeTransferData(Encode(TransferData{3, 4}))->offset, 4);
  const TransferStreams streams{.count = 16, .token = {std::byte{1}, std::byte{2}}};
  EXPECT_EQ(Encode(*DecodeTransferStreams(Encode(streams))), Encode(streams));
  EXPECT_EQ(DecodeTransferStreams(Encode(streams))->count, 16);
  EXPECT_EQ(Encode(*DecodeTransferJoin(Encode(SomeJoin()))), Encode(SomeJoin()));
  EXPECT_EQ(DecodeTransferJoin(Encode(SomeJoin()))->proof, SomeJoin().proof);
  const Status full(StatusCode::kFull, "no room");
  EXPECT_EQ(DecodeTransferEnd(EncodeEnd(8, full))->status().ToString(), full.ToString());
  EXPECT_EQ(DecodeTransferEnd(EncodeEnd(8, Status()))->status().code(), StatusCode::kCancelled);
}

// A stranger's goodbye is read before it has shown the secret, and goes to logs and to Python.
TEST(TransferFrames, WhatAPeerSaysIsOneLineOfAscii) {
  const Status foreign(StatusCode::kFull, "a\nb\x1b[2J \xff\xc3\xa9~ \x7f");
  EXPECT_EQ(DecodeTransferEnd(EncodeEnd(8, foreign))->text, "a?b?[2J ???~ ?");
}

TEST(TransferFrames, CutAndLongMessagesAreRefused) {
  const std::vector<std::byte> part = Encode(SomePart());
  const std::vector<std::byte> job = Encode(TransferJob{.id = 3, .tokens = {1, 2}});
  const std::vector<std::byte> map =
      Encode(TransferMap{.map = {.epoch = 1, .slots = {}, .count = 1, .kv_heads = {2}}});
  const std::vector<std::byte> record = Encode(TransferRecord{});
  const std::vector<std::byte> hello = Encode(
      TransferHello{.heartbeat_ms = 1, .dead_after_ms = 1, .lease_ms = 1, .window_bytes = 1});
  const auto refuses_others = [](std::vector<std::byte> bytes, const auto& decode) {
    EXPECT_TRUE(decode(bytes).ok());
    for (size_t size = 0; size < bytes.size(); ++size)
      EXPECT_FALSE(decode(std::span(bytes).first(size)).ok()) << size;
    bytes.push_back({});
    EXPECT_FALSE(decode(bytes).ok());
  };
  refuses_others(part, DecodeTransferPart);
  refuses_others(job, DecodeTransferJob);
  refuses_others(map, DecodeTransferMap);
  refuses_others(record, DecodeTransferRecord);
  refuses_others(hello, DecodeTransferHello);
  refuses_others(Encode(TransferCredit{1, false}), DecodeTransferCredit);
  refuses_others(Encode(TransferLease{1}), DecodeTransferLease);
  refuses_others(Encode(TransferData{1, 2}), DecodeTransferData);
  refuses_others(Encode(TransferLoad{1, 2}), DecodeTransferLoad);
  refuses_others(Encode(TransferStreams{.count = 1}), DecodeTransferStreams);
  refuses_others(Encode(SomeJoin()), DecodeTransferJoin);
  EXPECT_FALSE(DecodeTransferStreams(Encode(TransferStreams{.count = 0})).ok());
  // A list that claims more than there is takes no memory for it: the salt, the tokens.
  for (const size_t place : {33, 37}) {
    std::vector<std::byte> lying = job;
    for (size_t i = place; i < place + 4; ++i) lying[i] = std::byte{0xff};
    EXPECT_FALSE(DecodeTransferJob(lying).ok()) << place;
  }
  for (const TransferJob& bad :
       {TransferJob{.salt = std::string(4097, 's')}, TransferJob{.window = -1},
        TransferJob{.sinks = -1}, TransferJob{.deadline_ns = -1}}) {
    EXPECT_EQ(DecodeTransferJob(Encode(bad)).status().code(), StatusCode::kCorrupt);
  }
  EXPECT_TRUE(DecodeTransferJob(Encode(TransferJob{.salt = std::string(4096, 's')})).ok());
  EXPECT_FALSE(DecodeTransferLoad(Encode(TransferLoad{-1, 0})).ok());
  EXPECT_FALSE(DecodeTransferLoad(Encode(TransferLoad{0, -1})).ok());
}

TEST(TransferFrames, HeadersAreCheckedBitByBit) {
  const std::vector<std::byte> frame = FrameOf(3, TransferOpcode::kHeartbeat, {});
  const auto header = std::span(frame).first<kTransferHeaderBytes>();
  EXPECT_TRUE(DecodeTransferHeader(header, 3, 0).ok());
  EXPECT_FALSE(DecodeTransferHeader(header, 4, 0).ok());
  for (size_t bit = 0; bit < 8 * frame.size(); ++bit) {
    std::vector<std::byte> flipped = frame;
    flipped[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    EXPECT_FALSE(
        DecodeTransferHeader(std::span(flipped).first<kTransferHeaderBytes>(), 3, 1 << 20).ok())
        << bit;
  }
}

TEST(TransferFrames, LengthsAreHeldAgainstTheirLimits) {
  const auto decode = [](TransferHeader header, int64_t head_max) {
    std::vector<std::byte> bytes(kTransferHeaderBytes);
    const auto out = std::span(bytes).first<kTransferHeaderBytes>();
    EncodeTransferHeader(header, out);
    return DecodeTransferHeader(out, 0, head_max).status().code();
  };
  const auto job = TransferOpcode::kJob;
  EXPECT_EQ(decode({.opcode = job, .head_bytes = 100}, 100), StatusCode::kOk);
  EXPECT_EQ(decode({.opcode = job, .head_bytes = 101}, 100), StatusCode::kTooLarge);
  EXPECT_EQ(decode({.opcode = job, .head_bytes = 0xffffffff}, kTransferHeadBytesMax),
            StatusCode::kTooLarge);
  EXPECT_EQ(decode({.opcode = job, .data_bytes = 1}, 100), StatusCode::kCorrupt);
  const auto data = [&](uint32_t head, int64_t bytes) {
    return decode({.opcode = TransferOpcode::kData,
                   .head_bytes = head,
                   .data_bytes = static_cast<uint32_t>(bytes)},
                  kTransferHeadBytesMax);
  };
  EXPECT_EQ(data(kDataHeadBytes, kFrameDataBytesMax), StatusCode::kOk);
  EXPECT_EQ(data(kDataHeadBytes, kFrameDataBytesMax + 1), StatusCode::kCorrupt);
  EXPECT_EQ(data(kDataHeadBytes, 0), StatusCode::kCorrupt);
  EXPECT_EQ(data(kDataHeadBytes - 1, 1), StatusCode::kCorrupt);
}

TEST(TransferFrames, PartsThatNoCacheHasAreRefused) {
  const auto code = [](const std::function<void(TransferPart&)>& change) {
    TransferPart part = SomePart();
    change(part);
    return DecodeTransferPart(Encode(part)).status().code();
  };
  EXPECT_EQ(code([](TransferPart& p) { p.part.count = 0; }), StatusCode::kCorrupt);
  EXPECT_EQ(code([](TransferPart& p) { p.part.first_row = -1; }), StatusCode::kCorrupt);
  EXPECT_EQ(code([](TransferPart& p) { p.part.head_count = INT64_MAX; }), StatusCode::kCorrupt);
  EXPECT_EQ(code([](TransferPart& p) { p.layer = 65535; }), StatusCode::kCorrupt);
  EXPECT_EQ(code([](TransferPart& p) { p.number = 0; }), StatusCode::kCorrupt);
  EXPECT_EQ(code([](TransferPart& p) { p.bytes = 0; }), StatusCode::kTooLarge);
  EXPECT_EQ(code([](TransferPart& p) { p.bytes = kPartBytesMax; }), StatusCode::kOk);
  EXPECT_EQ(code([](TransferPart& p) { p.bytes = kPartBytesMax + 1; }), StatusCode::kTooLarge);
}

TEST(TransferFrames, AProofIsOfOneSideAndOneOpening) {
  TransferHello connector{.instance = SixteenAb()};
  TransferHello listener{.window_bytes = 5};
  const Digest proof = TransferProof("secret", kConnectorProofLabel, connector, listener);
  EXPECT_EQ(proof, TransferProof("secret", kConnectorProofLabel, connector, listener));
  EXPECT_NE(proof, TransferProof("secret", kListenerProofLabel, connector, listener));
  EXPECT_NE(proof, TransferProof("secres", kConnectorProofLabel, connector, listener));
  connector.nonce[0] = std::byte{1};
  EXPECT_NE(proof, TransferProof("secret", kConnectorProofLabel, connector, listener));
}

}  // namespace
}  // namespace quire::wire
