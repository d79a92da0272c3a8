#include "transfer/frame_writer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "wire/transfer_frames.h"

namespace quire {
namespace {

using wire::TransferOpcode;
using Opcodes = std::vector<TransferOpcode>;

class FrameWriterTest : public testing::Test {
 protected:
  // Writes what comes next, `piece` bytes at a time, and reads its headers.
  Opcodes Write(size_t frames_max, size_t piece = 1000) {
    std::vector<std::byte> bytes;
    for (auto spans = writer_.Gather(frames_max); !spans.empty();) {
      const size_t count = std::min(piece, spans.front().size());
      bytes.insert(bytes.end(), spans.front().begin(),
                   spans.front().begin() + static_cast<ptrdiff_t>(count));
      const bool is_last = count == spans.front().size() && spans.size() == 1;
      writer_.Consume(count);
      if (is_last) break;
      spans = writer_.Gather(frames_max);
    }
    Opcodes opcodes;
    for (std::span<const std::byte> rest(bytes); !rest.empty();) {
      const auto header = wire::DecodeTransferHeader(rest.first<wire::kTransferHeaderBytes>(),
                                                     number_++, wire::kTransferHeadBytesMax);
      EXPECT_TRUE(header.ok()) << header.status().ToString();
      opcodes.push_back(header->opcode);
      rest = rest.subspan(wire::kTransferHeaderBytes + header->head_bytes);
      data_.insert(data_.end(), rest.begin(), rest.begin() + header->data_bytes);
      rest = rest.subspan(header->data_bytes);
    }
    return opcodes;
  }
  // A part in runs of 3, 5 and 2 bytes.
  void QueuePart(uint64_t number, bool wants_digest = false) {
    const auto bytes = std::make_shared<std::vector<std::byte>>();
    for (int i = 0; i < 10; ++i) bytes->push_back(static_cast<std::byte>(i));
    auto part = std::make_shared<OutgoingPart>();
    part->head.number = number;
    part->head.bytes = std::ssize(*bytes);
    for (const auto& [first, count] : {std::pair<size_t, size_t>{0, 3}, {3, 5}, {8, 2}})
      part->runs.push_back(std::span(*bytes).subspan(first, count));
    part->memory = bytes;
    part->wants_digest = wants_digest;
    writer_.Queue(std::move(part));
  }

  FrameWriter writer_;
  uint64_t number_ = 0;
  std::vector<std::byte> data_;
};

TEST_F(FrameWriterTest, FramesGoTogetherUpToTheFirstWithData) {
  writer_.Queue(TransferOpcode::kStop, std::vector<std::byte>(5));
  writer_.QueueUrgent(TransferOpcode::kHeartbeat, {});
  QueuePart(1);
  QueuePart(2);
  EXPECT_EQ(Write(8), (Opcodes{TransferOpcode::kHeartbeat, TransferOpcode::kStop,
                               TransferOpcode::kPart, TransferOpcode::kData}));
  EXPECT_EQ(Write(8, 1), (Opcodes{TransferOpcode::kPart, TransferOpcode::kData}));
  ASSERT_EQ(data_.size(), 20U);
  for (size_t i = 0; i < data_.size(); ++i) EXPECT_EQ(data_[i], static_cast<std::byte>(i % 10));
  EXPECT_FALSE(writer_.has_output());
}

// What stands before a part that wants its digest goes, and what passes it; it goes when it has
// one.
TEST_F(FrameWriterTest, APartIsWrittenWhenItHasItsDigest) {
  writer_.Queue(TransferOpcode::kStop, {});
  QueuePart(1, true);
  QueuePart(2, true);
  EXPECT_EQ(writer_.WithoutDigest()->head.number, 1U);
  EXPECT_EQ(Write(8), (Opcodes{TransferOpcode::kStop}));
  EXPECT_TRUE(Write(8).empty());
  EXPECT_TRUE(writer_.has_output());
  writer_.QueueUrgent(TransferOpcode::kHeartbeat, {});
  EXPECT_EQ(Write(8), (Opcodes{TransferOpcode::kHeartbeat}));
  writer_.WithoutDigest()->wants_digest = false;
  EXPECT_EQ(Write(8, 1), (Opcodes{TransferOpcode::kPart, TransferOpcode::kData}));
  EXPECT_EQ(writer_.WithoutDigest()->head.number, 2U);
  EXPECT_TRUE(Write(8).empty());
  std::vector<uint64_t> dropped;
  writer_.DropParts(0, [&](uint64_t number) { dropped.push_back(number); });
  EXPECT_EQ(dropped, std::vector<uint64_t>{2});
  EXPECT_EQ(writer_.WithoutDigest(), nullptr);
  EXPECT_FALSE(writer_.has_output());
}

TEST_F(FrameWriterTest, NoMoreFramesGoTogetherThanAreAskedFor) {
  for (int i = 0; i < 5; ++i) writer_.QueueUrgent(TransferOpcode::kHeartbeat, {});
  QueuePart(1);
  EXPECT_EQ(Write(4).size(), 4U);
  EXPECT_EQ(Write(1).size(), 1U);
  EXPECT_EQ(Write(1), (Opcodes{TransferOpcode::kPart}));
  // What was queued meanwhile goes before the part's data.
  writer_.QueueUrgent(TransferOpcode::kHeartbeat, {});
  EXPECT_EQ(Write(4), (Opcodes{TransferOpcode::kHeartbeat, TransferOpcode::kData}));
}

TEST_F(FrameWriterTest, WhatWasGatheredIsNotChanged) {
  writer_.Queue(TransferOpcode::kStop, {});
  const auto first = writer_.Gather(4);
  ASSERT_EQ(first.size(), 1U);
  writer_.QueueUrgent(TransferOpcode::kHeartbeat, {});
  EXPECT_EQ(writer_.Gather(4).front().data(), first.front().data());
  EXPECT_EQ(Write(4), (Opcodes{TransferOpcode::kStop}));
  EXPECT_EQ(Write(4), (Opcodes{TransferOpcode::kHeartbeat}));
}

}  // namespace
}  // namespace quire
