// Bytes over each way: what is read with its checksum, however it is cut.
#include "transfer/byte_channel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/checksum.h"
#include "base/random.h"
#include "transfer/testing/test_channels.h"

namespace quire {
namespace {

// Reads into places of odd sizes until `to` is full; returns the checksum behind `crc`.
uint32_t MoveAll(const Channels& channels, std::span<const std::byte> bytes, uint32_t crc,
                 std::vector<std::byte>* to) {
  for (size_t read = 0; read < to->size();) {
    const Result<size_t> sent = channels[0]->Write(std::span(&bytes, 1));
    EXPECT_TRUE(sent.ok()) << sent.status().ToString();
    bytes = bytes.subspan(*sent);
    std::vector<std::span<std::byte>> places;
    size_t at = read;
    for (const size_t size : {1, 4099, 70'001}) {
      const size_t here = std::min<size_t>(size, to->size() - at);
      if (here > 0) places.push_back(std::span(*to).subspan(at, here));
      at += here;
    }
    const Result<size_t> got = channels[1]->ReadSummed(places, &crc);
    EXPECT_TRUE(got.ok()) << got.status().ToString();
    read += *got;
    if (*sent == 0 && *got == 0) {
      WaitForEither(channels[0]->PrepareWait(false, !bytes.empty()),
                    channels[1]->PrepareWait(true, false));
    }
  }
  return crc;
}

// Several times round a ring of shared memory, so that pieces end at its end, too.
TEST(ByteChannel, TheChecksumGoesOnOverAllThatIsRead) {
  constexpr uint32_t kBefore = 0x1234;
  RandomSequence random(1);
  std::vector<uint64_t> words(3 << 19);
  for (uint64_t& word : words) word = random.Bits();
  const std::span<const std::byte> bytes = std::as_bytes(std::span(words));
  for (const Way way : EachWay()) {
    SCOPED_TRACE(NameOf(way));
    const Channels channels = MakeChannels(way);
    std::vector<std::byte> got(bytes.size());
    EXPECT_EQ(MoveAll(channels, bytes, kBefore, &got), Crc32c(bytes.data(), bytes.size(), kBefore));
    EXPECT_TRUE(std::ranges::equal(got, bytes));
  }
}

}  // namespace
}  // namespace quire
