// Export and import of KV as chunks: bit-exact between caches of any page size, all or nothing when
// something is wrong.
#include "quire/kv_export.h"

#include <gtest/gtest.h>

#include <cstring>

#include "kv/testing/kv_test_bytes.h"
#include "kv/testing/kv_test_forward.h"

namespace quire {
namespace {

using Tokens = std::vector<uint64_t>;

// Two groups: their layers differ in heads, dims and page tables.
std::vector<AttentionLayerSpec> TwoGroups(DType dtype,
                                          std::optional<DType> v_dtype = std::nullopt) {
  const AttentionLayerSpec wide{.num_qo_heads = 4,
                                .num_kv_heads = 2,
                                .qk_head_dim = 8,
                                .v_head_dim = 8,
                                .dtype = dtype,
                                .v_dtype = v_dtype};
  const AttentionLayerSpec narrow{.num_qo_heads = 3,
                                  .num_kv_heads = 1,
                                  .qk_head_dim = 10,
                                  .v_head_dim = 5,
                                  .dtype = dtype,
                                  .v_dtype = v_dtype};
  return {wide, narrow, wide};
}

std::unique_ptr<AttentionKVCache> MakeCache(int64_t page_size,
                                            std::vector<AttentionLayerSpec> layers,
                                            RopeMode mode = RopeMode::kNormal,
                                            int64_t token_capacity = 400) {
  AttentionKVCacheOptions options =
      TestCacheOptions(std::move(layers), {.max_num_sequences = 8,
                                           .token_capacity = token_capacity,
                                           .prefill_chunk_size = 256,
                                           .page_size = page_size,
                                           .rope = mode});
  return MakeTestCache(std::move(options));
}

Tokens Sequence(uint64_t first, size_t count) {
  Tokens tokens(count);
  for (size_t i = 0; i < count; ++i) tokens[i] = first + i;
  return tokens;
}

std::vector<int32_t> Ids(const Tokens& tokens) { return {tokens.begin(), tokens.end()}; }

void Prefill(AttentionKVCache& cache, int64_t id, const Tokens& tokens) {
  ASSERT_TRUE(cache.AddSequence(id).ok());
  ForwardBytes(cache, id, tokens);
}

Passport TestPassport(AttentionKVCache& cache, int64_t block_tokens = 16) {
  Passport identity;
  identity.model = "test";
  identity.block_tokens = block_tokens;
  const Result<Passport> passport = CachePassport(cache, identity, false);
  EXPECT_TRUE(passport.ok()) << passport.status().ToString();
  return *passport;
}

// The sequence as chunks of `block` tokens and a tail.
std::vector<ChunkBuffer> Export(AttentionKVCache& cache, int64_t id, const Tokens& tokens,
                                int64_t block) {
  const Passport passport = TestPassport(cache, block);
  const KeySpace keys(*passport.Fingerprint(), "");
  std::vector<ChunkBuffer> chunks;
  int64_t start = 0;
  std::vector<ChunkFields> chain = ChainFields(passport, keys, Ids(tokens), /*tail=*/true).value();
  for (ChunkFields& fields : chain) {
    const int64_t count = static_cast<int64_t>(fields.tokens.size());
    Result<ChunkBuffer> chunk = ExportChunk(cache, id, start, std::move(fields));
    EXPECT_TRUE(chunk.ok()) << chunk.status().ToString();
    chunks.push_back(*std::move(chunk));
    start += count;
  }
  return chunks;
}

// Views of chunks whose headers are believed; their sections are still to be verified.
std::vector<ChunkView> Views(const std::vector<ChunkBuffer>& chunks) {
  std::vector<ChunkView> views;
  for (const ChunkBuffer& chunk : chunks) {
    const auto header = DecodeChunkHeader(chunk.bytes(), {});
    EXPECT_TRUE(header.ok()) << header.status().ToString();
    const auto view = ChunkView::Open(chunk.bytes(),
                                      {.key = header->key, .fingerprint = header->fingerprint}, {});
    EXPECT_TRUE(view.ok()) << view.status().ToString();
    views.push_back(*view);
  }
  return views;
}

// ---- Exactness

struct ExportCase {
  DType dtype;
  RopeMode mode;
  std::optional<DType> v_dtype = std::nullopt;
};

class ExportTest : public testing::TestWithParam<ExportCase> {};

// Cold and imported give the same bits afterwards, and the same chunks.
TEST_P(ExportTest, PageSizesOfWriterAndReaderDoNotMatter) {
  const auto [dtype, mode, v_dtype] = GetParam();
  const Tokens tokens = Sequence(1, 75);
  const Tokens next = Sequence(500, 9);
  for (const int64_t writer_pages : {16, 3}) {
    const auto writer = MakeCache(writer_pages, TwoGroups(dtype, v_dtype), mode);
    Prefill(*writer, 0, tokens);
    const std::vector<ChunkBuffer> chunks = Export(*writer, 0, tokens, 16);
    ASSERT_EQ(chunks.size(), 5u);
    const std::vector<std::byte> cold = ForwardBytes(*writer, 0, next);
    for (const int64_t reader_pages : {1, 3, 16, 64}) {
      const auto reader = MakeCache(reader_pages, TwoGroups(dtype, v_dtype), mode);
      ASSERT_TRUE(ImportChunks(*reader, 7, Views(chunks)).ok());
      ASSERT_TRUE(reader->CheckInvariants().ok());
      EXPECT_EQ(*reader->GetSequenceLength(7), 75);
      const std::vector<ChunkBuffer> again = Export(*reader, 7, tokens, 16);
      for (size_t i = 0; i < chunks.size(); ++i)
        ASSERT_TRUE(std::ranges::equal(chunks[i].bytes(), again[i].bytes())) << i;
      EXPECT_TRUE(cold == ForwardBytes(*reader, 7, next)) << writer_pages << " -> " << reader_pages;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, ExportTest,
                         testing::Values(ExportCase{DType::kF32, RopeMode::kNormal},
                                         ExportCase{DType::kF16, RopeMode::kInline},
                                         ExportCase{DType::kBF16, RopeMode::kNormal},
                                         ExportCase{DType::kBF16, RopeMode::kNone},
                                         ExportCase{DType::kI8, RopeMode::kNormal},
                                         ExportCase{DType::kF8E4M3, RopeMode::kInline},
                                         ExportCase{DType::kBF16, RopeMode::kNormal, DType::kI8},
                                         ExportCase{DType::kF8E4M3, RopeMode::kNone, DType::kF32},
                                         ExportCase{DType::kI8, RopeMode::kInline,
                                                    DType::kF8E4M3}));

TEST(KVExport, ImportsBehindWhatIsThere) {
  const Tokens tokens = Sequence(1, 50);
  const auto writer = MakeCache(16, TwoGroups(DType::kF32));
  Prefill(*writer, 0, tokens);
  const std::vector<ChunkBuffer> chunks = Export(*writer, 0, tokens, 10);
  const std::vector<ChunkView> views = Views(chunks);
  const Tokens next = Sequence(500, 3);
  const std::vector<std::byte> cold = ForwardBytes(*writer, 0, next);
  for (const int64_t page_size : {1, 16, 7}) {
    const auto reader = MakeCache(page_size, TwoGroups(DType::kF32));
    // The first 20 tokens are computed, 20 imported in two parts, 10 computed.
    Prefill(*reader, 0, Sequence(1, 20));
    ASSERT_TRUE(ImportChunks(*reader, 0, std::span(views).subspan(2, 1)).ok());
    ASSERT_TRUE(ImportChunks(*reader, 0, std::span(views).subspan(3, 1)).ok());
    ForwardBytes(*reader, 0, Sequence(41, 10));
    EXPECT_TRUE(cold == ForwardBytes(*reader, 0, next)) << page_size;
    ASSERT_TRUE(reader->CheckInvariants().ok());
  }
}

// Sequence 4's last page range lies in 4 pages and its next slot is taken: the import has to gather
// them first.
TEST(KVExport, AForkThatImportsLeavesItsSiblingsAlone) {
  const Tokens tokens = Sequence(1, 40);
  const auto writer = MakeCache(16, TwoGroups(DType::kBF16));
  Prefill(*writer, 0, tokens);
  const std::vector<ChunkBuffer> chunks = Export(*writer, 0, tokens, 20);
  const std::vector<ChunkView> views = Views(chunks);
  const auto reader = MakeCache(16, TwoGroups(DType::kBF16));
  Prefill(*reader, 0, Sequence(1, 24));
  for (int64_t id = 1; id <= 4; ++id) {
    const int64_t position = 16 + id;
    ASSERT_TRUE(reader->ForkSequence(id - 1, id, position).ok());
    if (id == 4) break;
    ForwardBytes(*reader, id,
                 Sequence(static_cast<uint64_t>(position) + 1, static_cast<size_t>(24 - position)));
  }
  ASSERT_TRUE(ImportChunks(*reader, 4, std::span(views).subspan(1)).ok());
  const Status sound = reader->CheckInvariants();
  ASSERT_TRUE(sound.ok()) << sound.ToString();
  const auto alone = MakeCache(16, TwoGroups(DType::kBF16));
  Prefill(*alone, 0, Sequence(1, 24));
  const std::vector<std::byte> expected = ForwardBytes(*alone, 0, {7});
  for (int64_t id = 0; id < 4; ++id) EXPECT_TRUE(expected == ForwardBytes(*reader, id, {7})) << id;
  EXPECT_TRUE(ForwardBytes(*writer, 0, {7}) == ForwardBytes(*reader, 4, {7}));
  ASSERT_TRUE(reader->Clear().ok());
  EXPECT_EQ(reader->pages_in_use(), 0);
}

// Bits, not numbers: NaN payloads, signalling ones too, infinities, subnormals and signs come
// through.
TEST(KVExport, EveryBitPatternComesThrough) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const AttentionLayerSpec spec{
        .num_qo_heads = 1, .num_kv_heads = 1, .qk_head_dim = 7, .v_head_dim = 6, .dtype = dtype};
    const auto writer = MakeCache(16, {spec}, RopeMode::kNone);
    const Tokens tokens = Sequence(1, 4);
    Prefill(*writer, 0, tokens);
    TestTensor k(dtype, {1, 4, 1, 7});
    TestTensor v(dtype, {1, 4, 1, 6});
    const uint32_t patterns[] = {0x7FA00001, 0xFF80FFFF, 0x7F800000, 0x80000000,
                                 0x00000001, 0x7C017C01, 0x7F817F81, 0x80008000,
                                 0x0001FE01, 0xFFC1FFC1, 0x7DFF7DFF, 0x3F803F80};
    for (const TestTensor* tensor : {&k, &v}) {
      auto* bytes = tensor->view().data_as<std::byte>();
      for (size_t i = 0; i + 4 <= tensor->bytes().size(); i += 4)
        std::memcpy(bytes + i, &patterns[i / 4 % std::size(patterns)], 4);
    }
    const Status set = writer->DebugSetKV(0, 0, k.view(), v.view());
    ASSERT_TRUE(set.ok()) << set.ToString();
    const TestTensor k_out(dtype, {4, 1, 7});
    const TestTensor v_out(dtype, {4, 1, 6});
    ASSERT_TRUE(writer->ExportKV(0, 0, 0, {k_out.view(), v_out.view()}).ok());
    EXPECT_TRUE(std::ranges::equal(k_out.bytes(), k.bytes())) << DTypeName(dtype);
    EXPECT_TRUE(std::ranges::equal(v_out.bytes(), v.bytes())) << DTypeName(dtype);
    const std::vector<ChunkBuffer> chunks = Export(*writer, 0, tokens, 4);
    const std::vector<ChunkView> views = Views(chunks);
    EXPECT_TRUE(std::ranges::equal(*views[0].section(0), k.bytes()));
    EXPECT_TRUE(std::ranges::equal(*views[0].section(1), v.bytes()));
    const auto reader = MakeCache(3, {spec}, RopeMode::kNone);
    ASSERT_TRUE(ImportChunks(*reader, 0, views).ok());
    const std::vector<ChunkBuffer> again = Export(*reader, 0, tokens, 4);
    EXPECT_TRUE(std::ranges::equal(chunks[0].bytes(), again[0].bytes())) << DTypeName(dtype);
  }
}

// Also codes and scales that no append makes.
TEST(KVExport, EveryCodeAndScaleComesThrough) {
  for (const DType dtype : {DType::kI8, DType::kF8E4M3}) {
    const AttentionLayerSpec spec{
        .num_qo_heads = 1, .num_kv_heads = 1, .qk_head_dim = 64, .v_head_dim = 70, .dtype = dtype};
    StoredRows rows(spec, 40);
    for (const TestTensor* tensor : {&rows.k, &rows.v}) {
      auto* const codes = tensor->view().data_as<uint8_t>();
      for (int64_t i = 0; i < tensor->count(); ++i) codes[i] = static_cast<uint8_t>(i);
    }
    const uint32_t patterns[] = {0x7FA00001, 0xFF80FFFF, 0x7F800000, 0x80000000,
                                 0x00000001, 0x3F803F80, 0xBF812345};
    for (const TestTensor* tensor : {&rows.k_scale, &rows.v_scale}) {
      for (size_t i = 0; i < 40; ++i)
        std::memcpy(tensor->view().data_as<float>() + i, &patterns[i % std::size(patterns)], 4);
    }
    const Tokens tokens = Sequence(1, 40);
    const auto first = MakeCache(16, {spec}, RopeMode::kNone);
    ASSERT_TRUE(first->AddSequence(0).ok());
    const KVBlock block = {rows.view()};
    const Status imported = first->ImportKV(0, std::span(&block, 1));
    ASSERT_TRUE(imported.ok()) << imported.ToString();
    for (const int64_t page_size : {16, 3}) {
      const auto reader = MakeCache(page_size, {spec}, RopeMode::kNone);
      ASSERT_TRUE(ImportChunks(*reader, 5, Views(Export(*first, 0, tokens, 40))).ok());
      StoredRows out(spec, 40);
      ASSERT_TRUE(reader->ExportKV(5, 0, 0, out.view()).ok());
      EXPECT_TRUE(out == rows) << DTypeName(dtype) << ", pages of " << page_size;
    }
  }
}

// ---- All or nothing

// A cache with one sequence of 20 tokens and the chunks of 30 more behind them.
class ImportFailure : public testing::Test {
 protected:
  void SetUp() override {
    const Tokens tokens = Sequence(1, 50);
    const auto writer = MakeCache(16, TwoGroups(DType::kF32));
    Prefill(*writer, 0, tokens);
    chunks_ = Export(*writer, 0, tokens, 10);
    views_ = Views(chunks_);
    cache_ = MakeCache(16, TwoGroups(DType::kF32), RopeMode::kNormal, 96);
    Prefill(*cache_, 0, Sequence(1, 20));
    digest_ = cache_->StateDigest();
  }
  void TearDown() override {
    EXPECT_TRUE(cache_->CheckInvariants().ok());
    // What is right still works.
    EXPECT_TRUE(ImportChunks(*cache_, 0, std::span(views_).subspan(2)).ok());
  }

  void ExpectRefused(int64_t id, std::span<const ChunkView> views, StatusCode code) {
    const Status status = ImportChunks(*cache_, id, views);
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_EQ(cache_->StateDigest(), digest_) << status.ToString();
    EXPECT_EQ(cache_->sequence_count(), 1);
  }

  std::vector<ChunkBuffer> chunks_;
  std::vector<ChunkView> views_;
  std::unique_ptr<AttentionKVCache> cache_;
  uint64_t digest_ = 0;
};

TEST_F(ImportFailure, ADamagedSectionOfAnyLayer) {
  for (size_t c = 2; c < chunks_.size(); ++c) {
    for (const Section& section : views_[c].header().sections) {
      for (const int64_t at : {section.offset, section.offset + section.length - 1}) {
        std::byte& byte = chunks_[c].bytes()[static_cast<size_t>(at)];
        byte ^= std::byte{4};
        ExpectRefused(0, std::span(views_).subspan(2), StatusCode::kCorrupt);
        byte ^= std::byte{4};
      }
    }
  }
}

TEST_F(ImportFailure, AKeyRotatedForAnotherPosition) {
  ExpectRefused(0, std::span(views_).subspan(3), StatusCode::kIncompatible);
  ExpectRefused(1, std::span(views_).subspan(1), StatusCode::kIncompatible);
  const std::vector<ChunkView> swapped{views_[2], views_[4], views_[3]};
  ExpectRefused(0, swapped, StatusCode::kIncompatible);
}

TEST_F(ImportFailure, LayersOfAnotherShape) {
  const Tokens tokens = Sequence(1, 50);
  std::vector<AttentionLayerSpec> fewer = TwoGroups(DType::kF32);
  fewer.pop_back();
  std::vector<AttentionLayerSpec> wider = TwoGroups(DType::kF32);
  wider[1].v_head_dim = 6;
  for (const auto& layers : {fewer, wider, TwoGroups(DType::kF16)}) {
    const auto writer = MakeCache(16, layers);
    Prefill(*writer, 0, tokens);
    const std::vector<ChunkBuffer> chunks = Export(*writer, 0, tokens, 10);
    const std::vector<ChunkView> views = Views(chunks);
    ExpectRefused(0, std::span(views).subspan(2), StatusCode::kIncompatible);
  }
}

TEST_F(ImportFailure, NoPagesLeft) {
  // The same tokens again and again, which only chunks without a position allow.
  const auto writer = MakeCache(16, TwoGroups(DType::kF32), RopeMode::kNone);
  Prefill(*writer, 0, Sequence(1, 50));
  const std::vector<ChunkBuffer> chunks = Export(*writer, 0, Sequence(1, 50), 50);
  const ChunkView view = Views(chunks)[0];
  ExpectRefused(0, std::vector<ChunkView>(3, view), StatusCode::kOutOfPages);
  ExpectRefused(1, std::vector<ChunkView>(3, view), StatusCode::kOutOfPages);
}

TEST_F(ImportFailure, NothingToImport) { ExpectRefused(0, {}, StatusCode::kBadArgument); }

TEST_F(ImportFailure, AnOpenForward) {
  const std::vector<int64_t> ids{0};
  const std::vector<int64_t> lengths{1};
  ASSERT_TRUE(cache_->BeginForward(ids, lengths).ok());
  EXPECT_EQ(ImportChunks(*cache_, 1, std::span(views_).first(1)).code(), StatusCode::kBadState);
  EXPECT_FALSE(cache_->HasSequence(1));
  ASSERT_TRUE(cache_->AbortForward().ok());
}

TEST_F(ImportFailure, NoRoomForAnotherSequence) {
  for (int64_t id = 1; id < 8; ++id) ASSERT_TRUE(cache_->AddSequence(id).ok());
  EXPECT_FALSE(ImportChunks(*cache_, 9, std::span(views_).first(1)).ok());
  EXPECT_FALSE(cache_->HasSequence(9));
}

TEST(KVExport, RefusesRangesThatAreNotThere) {
  const auto cache = MakeCache(16, TwoGroups(DType::kF32));
  Prefill(*cache, 0, Sequence(1, 20));
  ChunkFields fields;
  fields.tokens = Ids(Sequence(1, 10));
  EXPECT_EQ(ExportChunk(*cache, 0, 11, fields).status().code(), StatusCode::kBadArgument);
  EXPECT_EQ(ExportChunk(*cache, 0, -1, fields).status().code(), StatusCode::kBadArgument);
  EXPECT_EQ(ExportChunk(*cache, 1, 0, fields).status().code(), StatusCode::kUnknownSequence);
  EXPECT_TRUE(ExportChunk(*cache, 0, 10, fields).ok());
  fields.tokens.clear();
  EXPECT_EQ(ExportChunk(*cache, 0, 0, fields).status().code(), StatusCode::kBadArgument);
}

TEST(KVExport, RefusesTensorsOfAnotherShape) {
  const AttentionLayerSpec spec = TwoGroups(DType::kBF16)[0];
  const auto cache = MakeCache(16, {spec});
  Prefill(*cache, 0, Sequence(1, 5));
  const TestTensor good(DType::kBF16, {5, 2, 8});
  const TestTensor values(DType::kBF16, {5, 2, 8});
  const TestTensor wide(DType::kF32, {5, 2, 8});
  const TestTensor flat(DType::kBF16, {5, 16});
  const TestTensor more(DType::kBF16, {6, 2, 8});
  const LayerKV right{good.view(), values.view()};
  EXPECT_TRUE(cache->ExportKV(0, 0, 0, right).ok());
  EXPECT_EQ(cache->ExportKV(0, 1, 0, right).code(), StatusCode::kBadArgument);
  const uint64_t digest = cache->StateDigest();
  for (const TestTensor* wrong : {&wide, &flat, &more}) {
    const LayerKV bad{good.view(), wrong->view()};
    EXPECT_EQ(cache->ExportKV(0, 0, 0, bad).code(), StatusCode::kBadArgument);
    EXPECT_EQ(cache->ImportKV(0, std::vector<KVBlock>{{right}, {bad}}).code(),
              StatusCode::kBadArgument);
  }
  EXPECT_EQ(cache->ImportKV(0, std::vector<KVBlock>{{right, right}}).code(),
            StatusCode::kBadArgument);
  EXPECT_EQ(cache->StateDigest(), digest);
}

// ---- Passports

TEST(CachePassport, SaysWhatTheCacheStores) {
  const auto cache = MakeCache(16, TwoGroups(DType::kBF16));
  const Passport passport = TestPassport(*cache);
  ASSERT_EQ(passport.layers.size(), 3u);
  EXPECT_EQ(passport.layers[1].kv_heads, 1);
  EXPECT_EQ(passport.layers[1].head_dim, 10);
  EXPECT_EQ(passport.layers[1].v_head_dim, 5);
  EXPECT_EQ(passport.layers[1].dtype, ElementType(DType::kBF16));
  EXPECT_TRUE(passport.rope.starts_with("mode=normal;")) << passport.rope;
  EXPECT_TRUE(passport.numerics.starts_with("1/" + cache->options().kernel_path + "/"));
  EXPECT_FALSE(cache->options().kernel_path.empty());
  // Page size is no part of it, all that decides about the bytes is.
  EXPECT_EQ(TestPassport(*MakeCache(64, TwoGroups(DType::kBF16))), passport);
  EXPECT_NE(TestPassport(*MakeCache(16, TwoGroups(DType::kF16))), passport);
  EXPECT_NE(TestPassport(*MakeCache(16, TwoGroups(DType::kBF16, DType::kI8))), passport);
  EXPECT_EQ(TestPassport(*MakeCache(16, TwoGroups(DType::kBF16, DType::kBF16))), passport);
  EXPECT_NE(TestPassport(*MakeCache(16, TwoGroups(DType::kBF16), RopeMode::kInline)), passport);
}

TEST(ChainFields, SayWhatEachChunkIs) {
  const auto cache = MakeCache(16, TwoGroups(DType::kF32));
  const Passport passport = TestPassport(*cache, 4);
  const KeySpace keys(*passport.Fingerprint(), "salt");
  const std::vector<int32_t> tokens{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  EXPECT_EQ(ChainFields(passport, keys, tokens, false).value().size(), 2u);
  const std::vector<ChunkFields> chain = ChainFields(passport, keys, tokens, true).value();
  const std::vector<ChunkKey> names = keys.Chain(tokens, 4, true).value();
  ASSERT_EQ(chain.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(chain[i].key, names[i]);
    EXPECT_EQ(chain[i].context, i == 0 ? keys.root().digest : names[i - 1].digest);
    EXPECT_EQ(chain[i].first_position, 4 * i);
    EXPECT_EQ(chain[i].tail, i == 2);
  }
  EXPECT_EQ(chain[2].tokens, (std::vector<int32_t>{9, 10}));
  const auto unrotated = MakeCache(16, TwoGroups(DType::kF32), RopeMode::kInline);
  EXPECT_EQ(ChainFields(TestPassport(*unrotated, 4), keys, tokens, false).value()[1].first_position,
            kNotRotated);
}

TEST(KVExport, AChainOfBlocksBelowOneTokenIsBadArgument) {
  const KeySpace keys(Digest{}, "");
  const std::vector<int32_t> tokens = {1, 2, 3};
  for (const int64_t block_tokens : {int64_t{0}, int64_t{-5}}) {
    Passport passport;
    passport.block_tokens = block_tokens;
    for (const bool tail : {false, true}) {
      EXPECT_EQ(ChainFields(passport, keys, tokens, tail).status().code(),
                StatusCode::kBadArgument);
    }
  }
}

}  // namespace
}  // namespace quire
