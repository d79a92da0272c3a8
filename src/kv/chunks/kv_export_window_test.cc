// Chunks of layers with windows: each has what it takes to go on behind it, and no more. Rows that
// nobody will see are left out, and nobody gets to see them.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "base/random.h"
#include "kv/testing/kv_model.h"
#include "kv/testing/kv_test_bytes.h"
#include "kv/testing/kv_test_forward.h"

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
  return TestCacheOptions({layer(0, 1), layer(5, 1), layer(20, 2), layer(1, 1), layer(5, 1)},
                          {.max_num_sequences = 4,
                           .token_capacity = 160,
                           .prefill_chunk_size = 64,
                           .page_size = page_size});
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
    KVModel model(Options(page_size), cache.get());
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
      ASSERT_GE(cache->pages_in_use(), model.PagesInUse().least);
      ASSERT_LE(cache->pages_in_use(), model.PagesInUse().most);
      for (int64_t p = 0; p <= *cache->GetSequenceLength(id); ++p)
        ASSERT_EQ(cache->CanFork(id, p), model.CanFork(id, p)) << p;
      ExpectSound(*cache);
    }
  }
}

// A forward that takes the layers of chunks is one behind an import of them.
struct Loading {
  // The sequence has the first `held` chunks; the others are loaded.
  Loading(const TestChain& chain, int64_t page_size, const Types& types, size_t held, size_t count)
      : views(chain.Views(count)),
        rest(std::span(views).subspan(held)),
        cache(MakeTestCache(Options(page_size, types))) {
    EXPECT_TRUE(cache->AddSequence(7).ok());
    if (held > 0) {
      const Status imported = ImportChunks(*cache, 7, std::span(views).first(held));
      EXPECT_TRUE(imported.ok()) << imported.ToString();
    }
    source.emplace(*cache, rest, static_cast<int64_t>(held) * kChunk);
  }
  Status Begin(int64_t new_tokens) {
    const LayerLoad load{
        .seq_id = 7, .tokens = source->tokens(), .source = &*source, .only_visible = true};
    const int64_t id = 7;
    return cache->BeginLoadingForward({&id, 1}, {&new_tokens, 1}, {&load, 1});
  }

  std::vector<ChunkView> views;
  std::span<const ChunkView> rest;
  std::unique_ptr<AttentionKVCache> cache;
  std::optional<ChunkSource> source;
};

TEST(WindowChunks, LoadedLayerByLayerTheyAreAnImport) {
  for (const Types types : {Types{}, Types{DType::kI8, DType::kF8E4M3}}) {
    const auto writer = MakeTestCache(Options(4, types));
    const TestChain chain = Compute(*writer, 0, 6);
    for (const int64_t page_size : {1, 3, 16}) {
      for (const size_t held : {size_t{0}, size_t{1}, size_t{3}}) {
        for (size_t count = held + 1; count <= 6; ++count) {
          for (const size_t fresh : {size_t{1}, size_t{9}}) {
            SCOPED_TRACE(std::to_string(page_size) + " " + std::to_string(held) + " " +
                         std::to_string(count) + " " + std::to_string(fresh));
            Loading loading(chain, page_size, types, held, count);
            Loading imported(chain, page_size, types, held, count);
            const Status taken = ImportChunks(*imported.cache, 7, imported.rest);
            ASSERT_TRUE(taken.ok()) << taken.ToString();
            const auto want = ForwardBytes(*imported.cache, 7, Range(900, fresh));
            const Status begun = loading.Begin(static_cast<int64_t>(fresh));
            ASSERT_TRUE(begun.ok()) << begun.ToString();
            ExpectSound(*loading.cache);
            ASSERT_TRUE(LayerBytes(*loading.cache, Range(900, fresh)) == want);
            ExpectSound(*loading.cache);
            EXPECT_EQ(loading.cache->pages_in_use(), imported.cache->pages_in_use());
            EXPECT_EQ(*loading.cache->HeldTokens(7), *imported.cache->HeldTokens(7));
            for (const Tokens& more : {Range(30, 1), Range(31, 1), Range(32, 20)}) {
              ASSERT_TRUE(ForwardBytes(*loading.cache, 7, more) ==
                          ForwardBytes(*imported.cache, 7, more));
              ExpectSound(*loading.cache);
            }
          }
        }
      }
    }
  }
}

// Whatever layer does not come: nothing has happened, and the next try works.
TEST(WindowChunks, ALayerThatDoesNotComeLeavesNothingBehind) {
  const auto writer = MakeTestCache(Options(4));
  const TestChain chain = Compute(*writer, 0, 5);
  Loading want(chain, 4, {}, 2, 5);
  ASSERT_TRUE(ImportChunks(*want.cache, 7, want.rest).ok());
  const auto bytes = ForwardBytes(*want.cache, 7, Range(900, 3));
  Loading loading(chain, 4, {}, 2, 5);
  const uint64_t digest = loading.cache->StateDigest();
  for (int64_t failing = 0; failing < 5; ++failing) {
    SCOPED_TRACE(failing);
    loading.source->arrive = [&](int64_t layer) {
      return layer == failing ? Status(StatusCode::kTimeout, "late") : Status();
    };
    ASSERT_TRUE(loading.Begin(3).ok());
    Status status;
    for (int64_t layer = 0; layer < 5 && status.ok(); ++layer) {
      LayerOutputs outputs;
      status = RunLayer(*loading.cache, loading.cache->options().layers[static_cast<size_t>(layer)],
                        layer, Range(900, 3), {}, &outputs);
    }
    EXPECT_EQ(status.code(), StatusCode::kTimeout) << status.ToString();
    EXPECT_NE(status.ToString().find("layer " + std::to_string(failing)), std::string::npos);
    ASSERT_TRUE(loading.cache->AbortForward().ok());
    EXPECT_EQ(loading.cache->StateDigest(), digest);
    ExpectSound(*loading.cache);
  }
  loading.source->arrive = nullptr;
  ASSERT_TRUE(loading.Begin(3).ok());
  EXPECT_TRUE(LayerBytes(*loading.cache, Range(900, 3)) == bytes);
}

TEST(WindowChunks, WhatIsLoadedIsCheckedAgainstWhatIsSeen) {
  const auto writer = MakeTestCache(Options(4));
  const TestChain chain = Compute(*writer, 0, 3);
  // A source of all rows where some are to be left out.
  Loading loading(chain, 4, {}, 0, 3);
  const std::vector<ChunkView> views = chain.Views(3);
  const int64_t id = 7, one = 1;
  LayerLoad load{.seq_id = 7, .tokens = 3 * kChunk, .source = &*loading.source};
  ASSERT_TRUE(loading.cache->BeginLoadingForward({&id, 1}, {&one, 1}, {&load, 1}).ok());
  LayerOutputs outputs;
  const auto& layers = loading.cache->options().layers;
  EXPECT_TRUE(RunLayer(*loading.cache, layers[0], 0, Range(900, 1), {}, &outputs).ok());
  const Status few = RunLayer(*loading.cache, layers[1], 1, Range(900, 1), {}, &outputs);
  EXPECT_EQ(few.code(), StatusCode::kBadArgument) << few.ToString();
  ASSERT_TRUE(loading.cache->AbortForward().ok());
  // A sequence with a window of its own may see others.
  ASSERT_TRUE(loading.cache->EnableSlidingWindowForSeq(7, 30, 2).ok());
  load.only_visible = true;
  EXPECT_EQ(loading.cache->BeginLoadingForward({&id, 1}, {&one, 1}, {&load, 1}).code(),
            StatusCode::kBadState);
  ExpectSound(*loading.cache);
}

}  // namespace
}  // namespace quire
