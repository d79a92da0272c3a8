// Damage on a real disk that nobody asked for: the store's scrubber meets it, tells of it and puts
// it aside, and goes on serving what lies around it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/testing/fake_clock.h"
#include "store/testing/test_chain.h"
#include "store/tier/chunk_tier.h"

namespace quire {
namespace {

namespace fs = std::filesystem;

class StoreScrub : public testing::Test {
 protected:
  StoreScrub()
      : folder_(fs::temp_directory_path() / ("store_scrub_test_" + std::to_string(::getpid()))) {}
  ~StoreScrub() override { fs::remove_all(folder_); }

  std::unique_ptr<ChunkStore> Open(int64_t scrub_bytes_per_second) {
    ChunkStoreOptions options;
    options.disk.directory = folder_.string();
    options.disk.io_timeout_ms = 3600 * 1000;  // time flies here, and the disk does not
    options.scrub_bytes_per_second = scrub_bytes_per_second;
    options.clock = clock_;
    Result<std::unique_ptr<ChunkStore>> store = ChunkStore::Open(std::move(options));
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    EXPECT_TRUE((*store)->AddPassport(TestPassport()).ok());
    return *std::move(store);
  }
  fs::path FileOf(const ChunkKey& key) const {
    const std::string name = key.digest.ToHex() + ".qkv";
    for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
      if (entry.path().filename() == name) return entry.path();
    }
    return {};
  }
  bool IsQuarantined(const ChunkKey& key) const {
    for (const auto& entry : fs::directory_iterator(folder_ / "quarantine")) {
      if (entry.path().string().find(key.digest.ToHex()) != std::string::npos) return true;
    }
    return false;
  }
  // Time passes until the store has told of damage.
  std::vector<ChunkEvent> AwaitDamage(ChunkStore* store) {
    for (;;) {
      clock_->Advance(int64_t{1'000'000'000});
      for (const ChunkEvent& event : store->TakeEvents()) {
        if (event.kind == ChunkEvent::Kind::kCorrupt) return {event};
      }
      std::this_thread::yield();
    }
  }

  const fs::path folder_;
  const std::shared_ptr<FakeClock> clock_ = std::make_shared<FakeClock>();
  const KeySpace keys_ = TestKeys();
};

void FlipByte(const fs::path& path, int64_t from_end) {
  std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(-from_end, std::ios::end);
  const auto at = stream.tellg();
  const char byte = static_cast<char>(stream.get() ^ 1);
  stream.seekp(at);
  stream.put(byte);
}

TEST_F(StoreScrub, DamageThatNobodyReadsIsFoundAndToldOf) {
  const std::vector<int32_t> tokens = TokensFrom(1, 3 * kTestBlock);
  const std::vector<ChunkKey> chain = keys_.Chain(tokens, kTestBlock).value();
  const std::function<void(const fs::path&)> damages[] = {
      [](const fs::path& path) { FlipByte(path, 1); },  // of the last section
      [](const fs::path& path) { FlipByte(path, static_cast<int64_t>(fs::file_size(path)) - 9); },
      [](const fs::path& path) { fs::resize_file(path, fs::file_size(path) - 1); }};
  for (size_t d = 0; d < std::size(damages); ++d) {
    SCOPED_TRACE(d);
    const auto store = Open(int64_t{1} << 40);
    for (int64_t i = 0; i < 3; ++i) {
      ASSERT_TRUE(store->Put(keys_, TestChunk(keys_, tokens, i), {}).ok());
    }
    ASSERT_TRUE(store->Flush(kNever).ok());
    store->TakeEvents();
    damages[d](FileOf(chain[1]));
    const std::vector<ChunkEvent> events = AwaitDamage(store.get());
    EXPECT_EQ(events[0].key, chain[1]);
    EXPECT_EQ(events[0].tier, TierKind::kDisk);
    EXPECT_EQ(store->Statistics().tiers[static_cast<size_t>(TierKind::kDisk)].corrupt, 1);
    EXPECT_TRUE(FileOf(chain[1]).empty());
    EXPECT_TRUE(IsQuarantined(chain[1]));

    const auto fetch = store->Fetch({.keys = &keys_, .tokens = tokens, .chunk_tokens = kTestBlock});
    ASSERT_TRUE(fetch.ok());
    EXPECT_TRUE((*fetch)->Wait(kNever));
    ASSERT_EQ((*fetch)->ready(), 1);
    EXPECT_TRUE(IsTestChunk(*(*fetch)->chunk(0), chain[0]));
    EXPECT_EQ((*fetch)->miss(), MissReason::kNotStored);
    const auto neighbour = store->Get(TierKind::kDisk, chain[2]);
    ASSERT_TRUE(neighbour.ok()) << neighbour.status().ToString();
    EXPECT_TRUE(IsTestChunk(**neighbour, chain[2]));
    // What is put again is there again.
    const auto wanted = store->Wanted(keys_, chain);
    EXPECT_EQ(wanted, (std::vector<bool>{false, true, false}));
    ASSERT_TRUE(store->Clear(keys_).ok());
    fs::remove_all(folder_ / "quarantine");
  }
}

}  // namespace
}  // namespace quire
