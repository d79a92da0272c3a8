// Each single allocation of a call failing: the call says so and has changed nothing, and works
// when there is memory again; in the store's threads it is a miss or a drop.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/testing/fake_clock.h"
#include "base/testing/replaced_new.h"
#include "quire/store_buffer.h"
#include "store/disk/file_system.h"
#include "store/testing/fake_tier.h"
#include "store/testing/test_chain.h"
#include "store/tier/chunk_index.h"
#include "store/tiered/tiered_store.h"

namespace {

// Allocations of this thread that may still succeed; negative: all.
thread_local int64_t allocations_left = -1;
thread_local bool allocation_refused = false;
// One in this number of allocations of all other threads is refused; 0 = none.
std::atomic<int64_t> refuse_one_in{0};
std::atomic<int64_t> allocations_of_others{0};
thread_local bool is_the_test = false;

}  // namespace

namespace quire {

bool RefusesAllocation(size_t) noexcept {
  if (allocations_left >= 0 && allocations_left-- == 0) {
    allocation_refused = true;
    return true;
  }
  const int64_t one_in = refuse_one_in.load();
  return !is_the_test && one_in > 0 && allocations_of_others.fetch_add(1) % one_in == 0;
}

namespace {

// Lets the n-th allocation of `call` fail, for n = 0, 1, ... until it needs no more. `call` returns
// whether it worked; `check` runs after each failure.
int64_t ForEachFailure(const std::function<bool()>& call, const std::function<void()>& check) {
  for (int64_t n = 0;; ++n) {
    allocation_refused = false;
    allocations_left = n;
    const bool worked = call();
    allocations_left = -1;
    if (!allocation_refused) {
      EXPECT_TRUE(worked);
      return n;
    }
    if (worked) return n;  // a failure that only costs a convenience
    check();
    if (testing::Test::HasFailure()) return n;
  }
}

class StoreFailure : public testing::Test {
 protected:
  void SetUp() override { is_the_test = true; }
  void Open(int64_t chunks, bool with_disk) {
    ChunkStoreOptions options;
    options.ram.bytes_max = chunks * TestChunkBytes();
    options.clock = clock_;
    SlowTiers slow;
    if (with_disk) slow[1] = std::make_unique<FakeTier>(TierKind::kDisk, clock_);
    disk_ = static_cast<FakeTier*>(slow[1].get());
    store_ = *TieredStore::Create(std::move(options), std::move(slow));
    ASSERT_TRUE(store_->AddPassport(TestPassport()).ok());
  }
  TierStatistics Ram() const { return store_->Statistics().tiers[0]; }

  const std::shared_ptr<FakeClock> clock_ = std::make_shared<FakeClock>();
  const KeySpace keys_ = TestKeys();
  FakeTier* disk_ = nullptr;
  std::unique_ptr<ChunkStore> store_;
};

TEST_F(StoreFailure, AnInsertIntoTheIndexThatFailsChangesNothing) {
  for (const EvictionKind kind : {EvictionKind::kLru, EvictionKind::kS3Fifo, EvictionKind::kCost}) {
    const auto index = ChunkIndex::Create(kind, 100);
    const std::vector<ChunkKey> chain = keys_.Chain(TokensFrom(1, 8), kTestBlock).value();
    const IndexedChunk chunk{
        .id = {keys_.fingerprint(), keys_.root(), chain[1]}, .context = chain[0], .bytes = 10};
    const int64_t failures = ForEachFailure(
        [&] {
          try {
            index->Insert(chunk);
            return true;
          } catch (const std::bad_alloc&) {
            return false;
          }
        },
        [&] {
          EXPECT_EQ(index->size(), 0);
          EXPECT_EQ(index->CheckInvariants(), "");
        });
    EXPECT_GT(failures, 4);
    EXPECT_EQ(index->size(), 1);
    EXPECT_EQ(index->CheckInvariants(), "");
  }
}

TEST_F(StoreFailure, APutThatFailsEvictsNobody) {
  Open(2, /*with_disk=*/false);
  for (const int32_t first : {100, 200}) {
    const auto tokens = TokensFrom(first, 4);
    ASSERT_TRUE(store_->Put(keys_, TestChunk(keys_, tokens, 0), {}).ok());
  }
  const auto tokens = TokensFrom(300, 4);
  const int64_t failures = ForEachFailure(
      [&] {
        const int64_t left = std::exchange(allocations_left, -1);
        ChunkBuffer chunk = TestChunk(keys_, tokens, 0);
        allocations_left = left;
        const auto put = store_->Put(keys_, std::move(chunk), {});
        allocations_left = -1;
        EXPECT_TRUE(put.ok() || put.status().code() == StatusCode::kOutOfMemory);
        return put.ok() && (*put)->status().ok();
      },
      [&] {
        EXPECT_EQ(Ram().chunks, 2);
        EXPECT_EQ(Ram().evicted, 0);
        for (const int32_t first : {100, 200})
          EXPECT_EQ(
              store_->KnownPrefix(keys_, keys_.Chain(TokensFrom(first, 4), kTestBlock).value()), 1);
      });
  EXPECT_GT(failures, 5);
  EXPECT_EQ(Ram().chunks, 2);
  EXPECT_EQ(Ram().evicted, 1);
}

TEST_F(StoreFailure, AFetchOrPinThatFailsLeavesNoPin) {
  Open(8, /*with_disk=*/false);
  const auto tokens = TokensFrom(1, 12);
  const std::vector<ChunkKey> chain = keys_.Chain(tokens, kTestBlock).value();
  for (int64_t i = 0; i < 3; ++i)
    ASSERT_TRUE(store_->Put(keys_, TestChunk(keys_, tokens, i), {}).ok());
  const FetchRequest request{.keys = &keys_, .tokens = tokens, .chunk_tokens = kTestBlock};
  const int64_t failures = ForEachFailure(
      [&] {
        const auto fetch = store_->Fetch(request);
        // Memory may also be out in the middle: then it is a shorter prefix.
        return fetch.ok() && (*fetch)->done() && (*fetch)->ready() == 3;
      },
      [&] { EXPECT_EQ(store_->Statistics().pins, 0); });
  EXPECT_GT(failures, 5);
  EXPECT_EQ(store_->Statistics().pins, 0);
  ForEachFailure([&] { return store_->Pin(chain) == 3; }, [&] { store_->Unpin(chain); });
  store_->Unpin(chain);
  EXPECT_EQ(store_->Statistics().pins, 0);
  ASSERT_TRUE(store_->Remove(chain).ok());
}

// These run all the time and under locks: they look at what there is to do, not at all there is.
TEST_F(StoreFailure, WhatHasNothingToDoTakesNoMemory) {
  Open(8, /*with_disk=*/false);
  const auto tokens = TokensFrom(1, 12);
  for (int64_t i = 0; i < 3; ++i)
    ASSERT_TRUE(store_->Put(keys_, TestChunk(keys_, tokens, i), {}).ok());
  ASSERT_TRUE(store_->SetQuota(keys_, {.bytes_max = 4 * TestChunkBytes()}).ok());
  EXPECT_EQ(ForEachFailure([&] { return store_->CollectGarbage(TierKind::kRam).ok(); }, [] {}), 0);
  PassportTable passports;
  passports.Add(keys_.fingerprint(), TestPassport());
  EXPECT_EQ(
      ForEachFailure([&] { return passports.Find(keys_.fingerprint())->block_bytes > 0; }, [] {}),
      0);
}

TEST_F(StoreFailure, ThreadsWithoutMemoryMissAndDropAndGoOn) {
  Open(0, /*with_disk=*/true);
  // The fake tier allocates in its calls as a real one does.
  refuse_one_in = 101;
  int64_t served = 0;
  for (int round = 0; round < 200; ++round) {
    const auto tokens = TokensFrom(100 * (round % 16), 12);
    for (int64_t i = 0; i < 3; ++i) {
      const auto put = store_->Put(keys_, TestChunk(keys_, tokens, i), {});
      ASSERT_TRUE(put.ok());
      EXPECT_TRUE((*put)->Wait(kNever));
    }
    const std::vector<ChunkKey> chain = keys_.Chain(tokens, kTestBlock).value();
    const auto fetch =
        store_->Fetch({.keys = &keys_, .tokens = tokens, .chunk_tokens = kTestBlock});
    ASSERT_TRUE(fetch.ok());
    EXPECT_TRUE((*fetch)->Wait(kNever));
    for (int64_t i = 0; i < (*fetch)->ready(); ++i) {
      EXPECT_TRUE(IsTestChunk(*(*fetch)->chunk(i), chain[static_cast<size_t>(i)]));
      ++served;
    }
  }
  refuse_one_in = 0;
  EXPECT_GT(served, 0);
  EXPECT_GT(store_->Statistics().tiers[1].dropped_writes, 0);
  store_->Close();
  EXPECT_EQ(store_->Statistics().pins, 0);
}

// Transfers of a disk that are under way: in this thread, in threads of a queue.
TEST(FileQueueFailure, TransfersThatAreUnderWayTakeNoMemory) {
  is_the_test = true;
  const auto files = CreateMachineFileSystem(/*use_uring=*/false);
  const int file = files->Open("/proc/self/exe", OpenMode::kRead);
  ASSERT_GE(file, 0);
  std::vector<std::byte> bytes(4096);
  const std::unique_ptr<FileQueue> queues[] = {CreateThreadQueue(*files, 16, 2),
                                               files->FileSystem::CreateQueue(16)};
  for (const auto& queue : queues) {
    refuse_one_in = 1;
    const int64_t allocations = ForEachFailure(
        [&] {
          for (size_t round = 0; round < 100; ++round) {
            for (size_t i = 0; i < 16; ++i)
              queue->Start({.file = file, .data = bytes.data(), .size = 4096, .tag = i});
            for (size_t i = 0; i < 16; ++i)
              if (queue->Next().result != 4096) return false;
          }
          return true;
        },
        [] {});
    refuse_one_in = 0;
    EXPECT_EQ(allocations, 0);
  }
  files->Close(file);
}

// What is wrong with a call cannot be said without memory: that is OutOfMemory then.
TEST(StoreBufferFailure, EveryRefusedAllocationOfAWrongCallIsAValue) {
  const std::unique_ptr<StoreBuffer> buffer = *StoreBuffer::Create({.capacity_bytes = 1 << 20});
  const std::string_view no_key;
  const std::function<Status()> wrong[] = {
      [&] { return buffer->Put(no_key, {}); },
      [&] { return buffer->Get(no_key).status(); },
      [&] { return buffer->Delete(no_key).status(); },
      [&] { return buffer->Exists(no_key).status(); },
      [&] {
        return buffer->PrefixHits({&no_key, 1}).status();
      },
      [&] {
        return buffer->MultiGet({&no_key, 1}).status();
      },
      [&] {
        return buffer->MultiExists({&no_key, 1}).status();
      },
      [&] {
        return buffer->MultiPut({&no_key, 1}, {});
      },
  };
  for (const std::function<Status()>& call : wrong) {
    Status status;
    const auto says_what = [&] {
      status = call();
      return status.code() == StatusCode::kBadArgument;
    };
    const int64_t refusals =
        ForEachFailure(says_what, [&] { EXPECT_EQ(status.code(), StatusCode::kOutOfMemory); });
    EXPECT_GT(refusals, 0);
  }
}

}  // namespace
}  // namespace quire
