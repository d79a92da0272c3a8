// Chunks of layers with windows: each has what it takes to go on behind it, and no more. Rows that
// nobody will see are left out, and nobody gets to see them.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "base/random.h"
#include "kv/kv_model.h"
#include "kv/kv_test_bytes.h"
#include "kv/kv_test_forward.h"

namespace quire {
namespace {

using Tokens = std::vector<uint64_t>;

constexpr int64_t kChunk = 8;

struct Types {
  DType k = DType::kBF16;
  std::optional<DType> v = std::nullopt;
};

AttentionKVCacheOptions Options(int64_t page_size, const Types& types = {}) {
  const auto layer = [&](int64_t window, int64_t heads) {
    return AttentionLayerSpec{.num_qo_heads = 2 * heads,
                              .num_kv_heads = heads,
                              .qk_head_dim = 4,
                              .v_head_dim = 4,
                              .dtype = types.k,
                              .v_dtype = types.v,
                              .window = window};
  };
  AttentionKVCacheOptions options;
  options.layers = {layer(0, 1), layer(5, 1), layer(20, 2), layer(1, 1), layer(5, 1)};
  options.max_num_sequences = 4;
  options.token_capacity = 160;
  options.prefill_chunk_size = 64;
  options.page_size = page_size;
  options.rope.mode = RopeMode::kNormal;
  options.runner = std::make_shared<SerialRunner>();
  options.poison_freed_pages = true;
  return options;
}

Tokens Range(uint64_t first, size_t count) {
  Tokens tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Computes `count` chunks of a sequence, each of which is exported at its end.
TestChain Compute(AttentionKVCache& cache, int64_t id, size_t count) {
  TestChain chain(cache, {.model = "test", .block_tokens = kChunk});
  EXPECT_TRUE(cache.AddSequence(id).ok());
  for (size_t i = 0; i < count; ++i) {
    ForwardBytes(cache, id, Range(1 + i * kChunk, kChunk));
    const Status added = chain.Add(cache, id, kChunk);
    EXPECT_TRUE(added.ok()) << added.ToString();
  }
  return chain;
}

void ExpectSound(const AttentionKVCache& cache) {
  const Status status = cache.CheckInvariants();
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST(WindowChunks, AnyNumberOfThemGoesOnExactly) {
  for (const Types types : {Types{}, Types{DType::kI8, DType::kF8E4M3}}) {
    const auto writer = MakeTestCache(Options(4, types));
    const TestChain chain = Compute(*writer, 0, 6);
    for (const int64_t page_size : {1, 3, 16, 64}) {
      for (size_t count = 1; count <= 6; ++count) {
        SCOPED_TRACE(std::to_string(page_size) + " " + std::to_string(count));
        const auto cold = MakeTestCache(Options(page_size, types));
        ASSERT_TRUE(cold->AddSequence(7).ok());
        ForwardBytes(*cold, 7, Range(1, count * kChunk));
        const auto reader = MakeTestCache(Options(page_size, types));
        const Status imported = ImportChunks(*reader, 7, chain.Views(count));
        ASSERT_TRUE(imported.ok()) << imported.ToString();
        ExpectSound(*reader);
        for (const Tokens& more : {Range(900, 1), Range(901, 9), Range(910, 30)}) {
          ASSERT_TRUE(ForwardBytes(*cold, 7, more) == ForwardBytes(*reader, 7, more));
          ExpectSound(*reader);
        }
      }
    }
  }
}

TEST(WindowChunks, HoldWhatTheirEndSees) {
  const auto cache = MakeTestCache(Options(4));
  const TestChain chain = Compute(*cache, 0, 3);
  const ChunkHeader header = chain.Views(3)[2].header();
  const auto rows = [&](int64_t layer) -> int64_t {
    const int64_t index = header.Find(SectionKind::kKey, layer);
    return index < 0 ? 0 : header.sections[static_cast<size_t>(index)].dims[0];
  };
  EXPECT_EQ(rows(0), 8);
  EXPECT_EQ(rows(1), 4);  // a window of 5, with the query itself
  EXPECT_EQ(rows(2), 8);
  EXPECT_EQ(rows(3), 0);
  EXPECT_EQ(rows(4), 4);
}

TEST(WindowChunks, BehindAForkOnlyTheRestIsImported) {
  const auto writer = MakeTestCache(Options(4));
  const TestChain chain = Compute(*writer, 0, 5);
  for (const int64_t page_size : {3, 16}) {
    for (size_t from = 1; from < 5; ++from) {
      SCOPED_TRACE(std::to_string(page_size) + " " + std::to_string(from));
      const auto reader = MakeTestCache(Options(page_size));
      ASSERT_TRUE(reader->AddSequence(1).ok());
      ForwardBytes(*reader, 1, Range(1, from * kChunk));
      ASSERT_TRUE(reader->ForkSequence(1, 2).ok());
      std::vector<ChunkView> rest = chain.Views(5);
      rest.erase(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(from));
      const Status imported = ImportChunks(*reader, 2, rest);
      ASSERT_TRUE(imported.ok()) << imported.ToString();
      ExpectSound(*reader);
      const auto cold = MakeTestCache(Options(page_size));
      ASSERT_TRUE(cold->AddSequence(2).ok());
      ForwardBytes(*cold, 2, Range(1, 5 * kChunk));
      EXPECT_TRUE(ForwardBytes(*cold, 2, Range(700, 12)) ==
                  ForwardBytes(*reader, 2, Range(700, 12)));
      // The parent is where it was.
      const auto parent = MakeTestCache(Options(page_size));
      ASSERT_TRUE(parent->AddSequence(1).ok());
      ForwardBytes(*parent, 1, Range(1, from * kChunk));
      EXPECT_TRUE(ForwardBytes(*parent, 1, Range(800, 4)) ==
                  ForwardBytes(*reader, 1, Range(800, 4)));
      ExpectSound(*reader);
    }
  }
}

// A row that was left out is not held, even where its page is.
TEST(WindowChunks, WhatWasLeftOutCannotBeSeen) {
  const auto writer = MakeTestCache(Options(16));
  const TestChain chain = Compute(*writer, 0, 5);
  const auto reader = MakeTestCache(Options(16));
  ASSERT_TRUE(ImportChunks(*reader, 0, chain.Views(5)).ok());
  EXPECT_TRUE(reader->CanFork(0, 40));
  EXPECT_FALSE(reader->CanFork(0, 39));
  EXPECT_EQ(reader->PopN(0, 1).code(), StatusCode::kBadState);
  EXPECT_EQ(*reader->HeldTokens(0), 0) << "one layer sees no token but its own";
  StoredRows rows(reader->options().layers[1], 1);
  EXPECT_TRUE(reader->ExportKV(0, 1, 36, rows.view()).ok());
  EXPECT_EQ(reader->ExportKV(0, 1, 35, rows.view()).code(), StatusCode::kBadArgument);
  // From 0 on all is as new; and from where nothing that is seen was left out.
  EXPECT_TRUE(reader->CanFork(0, 0));
  ForwardBytes(*reader, 0, Range(41, 8));
  ASSERT_TRUE(reader->PopN(0, 0).ok());
  ExpectSound(*reader);
}

// A border that has been left behind can be exported as long as the window has not moved on.
TEST(WindowChunks, TooLateIsSaid) {
  const auto cache = MakeTestCache(Options(4));
  TestChain chain(*cache, {.model = "test", .block_tokens = kChunk});
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ForwardBytes(*cache, 0, Range(1, 24));
  const Status late = chain.Add(*cache, 0, kChunk);
  EXPECT_EQ(late.code(), StatusCode::kBadArgument);
  EXPECT_NE(late.message().find("slid out of the window"), std::string_view::npos)
      << late.ToString();
}

TEST(WindowChunks, WhatIsNotNeededIsNotRead) {
  const auto writer = MakeTestCache(Options(4));
  TestChain chain = Compute(*writer, 0, 4);
  const auto flip = [&](size_t chunk, int64_t layer) {
    const ChunkHeader header = chain.Views(4)[chunk].header();
    const int64_t index = header.Find(SectionKind::kKey, layer);
    const int64_t at = header.sections[static_cast<size_t>(index)].offset;
    chain.bytes(chunk)[static_cast<size_t>(at)] ^= std::byte{1};
  };
  flip(1, 1);  // rows of a window that has moved on by the end
  const auto reader = MakeTestCache(Options(4));
  EXPECT_EQ(ImportChunks(*reader, 0, chain.Views(2)).code(), StatusCode::kCorrupt);
  EXPECT_TRUE(reader->Empty());
  EXPECT_TRUE(ImportChunks(*reader, 0, chain.Views(3)).ok());
  flip(0, 0);  // of a layer that sees all
  EXPECT_EQ(ImportChunks(*reader, 1, chain.Views(4)).code(), StatusCode::kCorrupt);
  EXPECT_EQ(reader->sequence_count(), 1);
  ExpectSound(*reader);
}

TEST(WindowChunks, TakeFewerPagesAndSayWhenThereAreTooFew) {
  const auto writer = MakeTestCache(Options(4));
  const TestChain chain = Compute(*writer, 0, 5);
  AttentionKVCacheOptions small = Options(4);
  small.token_capacity = 36;  // ten pages of a group, for 40 tokens
  const auto reader = MakeTestCache(small);
  ASSERT_TRUE(ImportChunks(*reader, 0, chain.Views(5)).ok());
  EXPECT_EQ(reader->pages_in_use(), 10 + 1 + 5 + 0);
  const uint64_t digest = reader->StateDigest();
  EXPECT_EQ(ImportChunks(*reader, 1, chain.Views(1)).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(reader->StateDigest(), digest);
  ExpectSound(*reader);
}

TEST(WindowChunks, TheOracleAgreesOnWhatIsHeld) {
  const auto writer = MakeTestCache(Options(4));
  const TestChain chain = Compute(*writer, 0, 5);
  for (const int64_t page_size : {1, 3, 8, 16}) {
    SCOPED_TRACE(page_size);
    const auto cache = MakeTestCache(Options(page_size));
    KVModel model(Options(page_size));
    for (AttentionKVCache* each : {cache.get(), static_cast<AttentionKVCache*>(&model)}) {
      ASSERT_TRUE(ImportChunks(*each, 0, chain.Views(4)).ok());
      ASSERT_TRUE(each->ForkSequence(0, 1, 32).ok());
    }
    RandomSequence random(static_cast<uint64_t>(page_size));
    for (int step = 0; step < 60; ++step) {
      const int64_t id = static_cast<int64_t>(random.Below(2));
      const int64_t pop = static_cast<int64_t>(random.Below(3));
      const Tokens more = Range(100 + static_cast<uint64_t>(step) * 10, 1 + random.Below(6));
      for (AttentionKVCache* each : {cache.get(), static_cast<AttentionKVCache*>(&model)}) {
        if (*each->GetSequenceLength(id) < 70) {
          ASSERT_TRUE(
              RunForward(*each, each->options().layers, std::vector<int64_t>{id}, {more}).ok());
        }
      }
      ASSERT_EQ(cache->PopN(id, pop).code(), model.PopN(id, pop).code());
      ASSERT_EQ(*cache->HeldTokens(id), *model.HeldTokens(id));
      ASSERT_EQ(cache->pages_in_use(), model.pages_in_use());
      for (int64_t p = 0; p <= *cache->GetSequenceLength(id); ++p)
        ASSERT_EQ(cache->CanFork(id, p), model.CanFork(id, p)) << p;
      ExpectSound(*cache);
    }
  }
}

}  // namespace
}  // namespace quire
