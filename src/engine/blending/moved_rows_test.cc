// Rows of a document out of pages: keys stand where the reference rotation puts them, values and
// unmoved keys keep their bits, and what is not held is not there. Rows that come layer by layer
// are the same.
#include "engine/blending/moved_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "base/random.h"
#include "kernels/kv_quantise.h"
#include "quire/seams.h"

namespace quire {
namespace {

constexpr int64_t kHeads = 2;
constexpr int64_t kDim = 8;
constexpr int64_t kTokens = 40;

struct Written {
  std::unique_ptr<AttentionKVCache> cache;
  std::vector<float> k;  // [tokens, heads, dim], before rotation
  std::vector<float> v;
};

// A sequence 0 of kTokens tokens in two layers with the same keys and values.
Written Write(AttentionLayerSpec layer, RopeMode mode) {
  AttentionKVCacheOptions options;
  layer.num_qo_heads = layer.num_kv_heads = kHeads;
  layer.qk_head_dim = layer.v_head_dim = kDim;
  options.layers = {layer, layer};
  options.max_num_sequences = 4;
  options.token_capacity = 256;
  options.prefill_chunk_size = 64;
  options.page_size = 16;
  options.rope.mode = mode;
  options.rope.theta = 100;
  options.runner = CreateThreadPool(1).value();
  Written written;
  written.cache = AttentionKVCache::Create(options).value();
  RandomSequence random(3);
  for (int64_t i = 0; i < kTokens * kHeads * kDim; ++i) {
    written.k.push_back(static_cast<float>(random.Uniform(-2, 2)));
    written.v.push_back(static_cast<float>(random.Uniform(-2, 2)));
  }
  AttentionKVCache& cache = *written.cache;
  EXPECT_TRUE(cache.AddSequence(0).ok());
  const std::vector<int64_t> ids = {0};
  const std::vector<int64_t> lengths = {kTokens};
  EXPECT_TRUE(cache.BeginForward(ids, lengths).ok());
  for (int64_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(cache
                    .Append(i, TensorView(written.k.data(), DType::kF32, {kTokens, kHeads, kDim}),
                            TensorView(written.v.data(), DType::kF32, {kTokens, kHeads, kDim}))
                    .ok());
  }
  for (int64_t i = 0; i < 2; ++i) {
    std::vector<float> o(written.k.size());
    EXPECT_TRUE(cache
                    .Attend(i, TensorView(written.k.data(), DType::kF32, {kTokens, kHeads, kDim}),
                            TensorView(o.data(), DType::kF32, {kTokens, kHeads, kDim}), nullptr,
                            1.0)
                    .ok());
  }
  EXPECT_TRUE(cache.EndForward().ok());
  return written;
}

// The key of a token and head at a position, in double.
std::vector<double> Rotated(const Written& written, int64_t token, int64_t head, double position) {
  std::vector<double> key(kDim);
  const float* x = written.k.data() + (token * kHeads + head) * kDim;
  for (int64_t i = 0; i < kDim / 2; ++i) {
    const double angle = position * std::pow(100.0, -2.0 * static_cast<double>(i) / kDim);
    key[i] = x[i] * std::cos(angle) - x[i + kDim / 2] * std::sin(angle);
    key[i + kDim / 2] = x[i + kDim / 2] * std::cos(angle) + x[i] * std::sin(angle);
  }
  return key;
}

TEST(MovedPiece, KeysAreWhereTheirNewPositionsPutThem) {
  Written written = Write({.dtype = DType::kF32}, RopeMode::kNormal);
  // Tokens 10 to 29 stand at 108 to 127: rows 8 to 27 of a piece that begins at 100.
  MovedPiece piece(written.cache->options(), 100, 40, false);
  ASSERT_TRUE(piece.Take(*written.cache, {.rows = {8, 28}, .seq_id = 0, .from = 10}).ok());
  EXPECT_EQ(piece.moved_count(), 20);
  EXPECT_EQ(piece.moved_bytes(), 20 * 2 * 2 * kHeads * kDim * 4);
  EXPECT_EQ(std::count(piece.kinds().begin(), piece.kinds().end(), kRowMoved), 20);
  EXPECT_EQ(piece.kinds()[7], kRowInvalid);
  EXPECT_EQ(piece.kinds()[8], kRowMoved);
  for (int64_t layer = 0; layer < 2; ++layer) {
    const Result<std::span<const MovedRows>> moved = piece.Load(layer);
    ASSERT_TRUE(moved.ok());
    ASSERT_EQ(moved->size(), 1U);
    EXPECT_EQ(moved->front().rows, (TokenRange{8, 28}));
    const LayerKV& kv = moved->front().kv;
    for (int64_t row = 0; row < 20; ++row) {
      for (int64_t head = 0; head < kHeads; ++head) {
        const std::vector<double> want =
            Rotated(written, 10 + row, head, static_cast<double>(108 + row));
        for (int64_t d = 0; d < kDim; ++d) {
          const int64_t at = (row * kHeads + head) * kDim + d;
          EXPECT_NEAR(kv.k.data_as<float>()[at], want[d], 2e-6);
          EXPECT_EQ(kv.v.data_as<float>()[at], written.v[(10 * kHeads * kDim) + at]);
        }
      }
    }
  }
}

TEST(MovedPiece, WhatStaysKeepsItsBits) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kI8, DType::kF8E4M3}) {
    SCOPED_TRACE(std::string(DTypeName(dtype)));
    Written written = Write({.dtype = dtype}, RopeMode::kNormal);
    MovedPiece unmoved(written.cache->options(), 5, 20, false);
    ASSERT_TRUE(unmoved.Take(*written.cache, {.rows = {0, 20}, .seq_id = 0, .from = 5}).ok());
    MovedPiece moved(written.cache->options(), 50, 20, false);
    ASSERT_TRUE(moved.Take(*written.cache, {.rows = {0, 20}, .seq_id = 0, .from = 5}).ok());
    const LayerKV a = unmoved.Load(0)->front().kv;
    const LayerKV b = moved.Load(0)->front().kv;
    const auto bytes = static_cast<size_t>(a.k.element_count() * DTypeBytes(dtype));
    std::vector<std::byte> stored(bytes);
    std::vector<std::byte> values(bytes);
    std::vector<float> k_scale(20 * kHeads);
    std::vector<float> v_scale(20 * kHeads);
    LayerKV raw{.k = TensorView(stored.data(), dtype, {20, kHeads, kDim}),
                .v = TensorView(values.data(), dtype, {20, kHeads, kDim})};
    if (IsQuantised(dtype)) {
      raw.k_scale = TensorView(k_scale.data(), DType::kF32, {20, kHeads});
      raw.v_scale = TensorView(v_scale.data(), DType::kF32, {20, kHeads});
    }
    ASSERT_TRUE(written.cache->ExportKV(0, 0, 5, raw).ok());
    EXPECT_EQ(std::memcmp(a.k.data(), stored.data(), bytes), 0);
    EXPECT_EQ(std::memcmp(a.v.data(), values.data(), bytes), 0);
    EXPECT_NE(std::memcmp(b.k.data(), stored.data(), bytes), 0);
    EXPECT_EQ(std::memcmp(b.v.data(), values.data(), bytes), 0) << "values have no position";
  }
}

TEST(MovedPiece, QuantisedKeysAreNumbersWhileTheyAreMoved) {
  for (const DType dtype : {DType::kI8, DType::kF8E4M3}) {
    Written written = Write({.dtype = dtype}, RopeMode::kNormal);
    MovedPiece piece(written.cache->options(), 70, 16, false);
    ASSERT_TRUE(piece.Take(*written.cache, {.rows = {4, 16}, .seq_id = 0, .from = 2}).ok());
    const KVRows rows = piece.CachedRows(1);
    EXPECT_EQ(rows.k.dtype(), DType::kF32);
    const double step = dtype == DType::kI8 ? 3.0 / 127 : 3.0 / 8;  // of one rounding, doubled
    for (int64_t row = 4; row < 16; ++row) {
      const std::vector<double> want = Rotated(written, row - 2, 1, static_cast<double>(70 + row));
      for (int64_t d = 0; d < kDim; ++d) {
        const int64_t at = (row * kHeads + 1) * kDim + d;
        EXPECT_NEAR(rows.k.data_as<float>()[at], want[d], step) << row << " " << d;
        EXPECT_NEAR(rows.v.data_as<float>()[at], written.v[at - 2 * kHeads * kDim], step);
      }
    }
  }
}

TEST(MovedPiece, KeysThatAreRotatedWhenTheyAreReadAreCopied) {
  Written written = Write({.dtype = DType::kBF16}, RopeMode::kInline);
  MovedPiece here(written.cache->options(), 3, 16, false);
  ASSERT_TRUE(here.Take(*written.cache, {.rows = {0, 16}, .seq_id = 0, .from = 3}).ok());
  MovedPiece there(written.cache->options(), 90, 16, false);
  ASSERT_TRUE(there.Take(*written.cache, {.rows = {0, 16}, .seq_id = 0, .from = 3}).ok());
  EXPECT_EQ(std::memcmp(here.Load(0)->front().kv.k.data(), there.Load(0)->front().kv.k.data(),
                        16 * kHeads * kDim * 2),
            0);
}

TEST(MovedPiece, WhatIsNotHeldIsNotThere) {
  Written written = Write({.dtype = DType::kF32}, RopeMode::kNormal);
  MovedPiece piece(written.cache->options(), 100, 60, false);
  const Status status = piece.Take(*written.cache, {.rows = {0, 20}, .seq_id = 0, .from = 30});
  EXPECT_EQ(status.code(), StatusCode::kNotFound) << status.ToString();
  EXPECT_EQ(piece.moved_count(), 0);
  EXPECT_EQ(std::count(piece.kinds().begin(), piece.kinds().end(), kRowMoved), 0);
  EXPECT_TRUE(piece.Load(0)->empty());
  // Another part is.
  ASSERT_TRUE(piece.Take(*written.cache, {.rows = {20, 30}, .seq_id = 0, .from = 30}).ok());
  EXPECT_EQ(piece.moved_count(), 10);
}

// Tokens [0, 40) of the sequence in blocks of 16, as chunks are, one layer at a time.
class Blocks final : public LayerSource {
 public:
  explicit Blocks(AttentionKVCache* cache) : cache_(*cache) {}
  Result<std::span<const LayerKV>> Load(int64_t layer) override {
    asked.push_back(layer);
    if (layer == fails) return Status(StatusCode::kTimeout, "injected");
    blocks_.clear();
    memory_.clear();
    const AttentionLayerSpec& spec = cache_.options().layers[static_cast<size_t>(layer)];
    for (int64_t begin = 0; begin < kTokens; begin += 16) {
      const int64_t n = std::min<int64_t>(16, kTokens - begin);
      const auto take = [&](DType dtype, std::vector<int64_t> shape) {
        int64_t bytes = DTypeBytes(dtype);
        for (const int64_t dim : shape) bytes *= dim;
        memory_.emplace_back(static_cast<size_t>(bytes));
        return TensorView(memory_.back().data(), dtype, shape);
      };
      LayerKV& block = blocks_.emplace_back();
      block.k = take(spec.dtype, {n, kHeads, kDim});
      block.v = take(spec.dtype, {n, kHeads, kDim});
      if (IsQuantised(spec.dtype)) {
        block.k_scale = take(DType::kF32, {n, kHeads});
        block.v_scale = take(DType::kF32, {n, kHeads});
      }
      EXPECT_TRUE(cache_.ExportKV(0, layer, begin, block).ok());
    }
    return std::span<const LayerKV>(blocks_);
  }

  std::vector<int64_t> asked;
  int64_t fails = -1;

 private:
  AttentionKVCache& cache_;
  std::vector<LayerKV> blocks_;
  std::vector<std::vector<std::byte>> memory_;
};

void ExpectSameBytes(const TensorView& a, const TensorView& b) {
  ASSERT_EQ(a.rank(), b.rank());
  if (a.rank() == 0) return;
  ASSERT_EQ(a.element_count(), b.element_count());
  EXPECT_EQ(std::memcmp(a.data(), b.data(),
                        static_cast<size_t>(a.element_count() * DTypeBytes(a.dtype()))),
            0);
}

TEST(MovedPiece, WhatComesLayerByLayerIsWhatPagesGive) {
  const std::shared_ptr<Clock> clock = MachineTime();
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kI8, DType::kF8E4M3}) {
    SCOPED_TRACE(std::string(DTypeName(dtype)));
    Written written = Write({.dtype = dtype}, RopeMode::kNormal);
    MovedPiece want(written.cache->options(), 100, 50, false);
    // The second part begins and ends inside blocks.
    const MovedPiece::Part parts[] = {{.rows = {0, 4}, .seq_id = 0, .from = 0},
                                      {.rows = {5, 40}, .seq_id = 0, .from = 3}};
    for (const auto& part : parts) ASSERT_TRUE(want.Take(*written.cache, part).ok());
    Blocks source(written.cache.get());
    MovedPiece piece(written.cache->options(), 100, 50, false);
    ASSERT_TRUE(piece.Take(*written.cache, parts[0]).ok());
    piece.Expect({.part = parts[1], .source = &source, .source_begin = 0, .clock = clock.get()});
    EXPECT_EQ(source.asked, std::vector<int64_t>{}) << "nothing is waited for before its time";
    EXPECT_EQ(piece.moved_count(), want.moved_count());
    EXPECT_EQ(piece.moved_bytes(), want.moved_bytes());
    EXPECT_TRUE(std::equal(piece.kinds().begin(), piece.kinds().end(), want.kinds().begin()));
    for (int64_t layer = 0; layer < 2; ++layer) {
      const auto moved = piece.Load(layer);
      const auto other = want.Load(layer);
      ASSERT_TRUE(moved.ok() && other.ok());
      ASSERT_EQ(moved->size(), 2U);
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_EQ((*moved)[i].rows, (*other)[i].rows);
        ExpectSameBytes((*moved)[i].kv.k, (*other)[i].kv.k);
        ExpectSameBytes((*moved)[i].kv.v, (*other)[i].kv.v);
        ExpectSameBytes((*moved)[i].kv.k_scale, (*other)[i].kv.k_scale);
        ExpectSameBytes((*moved)[i].kv.v_scale, (*other)[i].kv.v_scale);
      }
      ASSERT_TRUE(piece.Reach(layer).ok());
    }
    EXPECT_EQ(source.asked, (std::vector<int64_t>{0, 1})) << "each layer once";
  }
}

TEST(MovedPiece, ALayerThatDoesNotComeIsAnError) {
  const std::shared_ptr<Clock> clock = MachineTime();
  Written written = Write({.dtype = DType::kF32}, RopeMode::kNormal);
  Blocks source(written.cache.get());
  source.fails = 1;
  MovedPiece piece(written.cache->options(), 100, 20, false);
  piece.Expect({.part = {.rows = {0, 20}, .seq_id = 0, .from = 5},
                .source = &source,
                .source_begin = 0,
                .clock = clock.get()});
  EXPECT_TRUE(piece.Load(0).ok());
  EXPECT_EQ(piece.Reach(1).code(), StatusCode::kTimeout);
  EXPECT_EQ(piece.Load(1).status().code(), StatusCode::kTimeout);
  source.fails = -1;
  EXPECT_TRUE(piece.Load(1).ok()) << "nothing was kept of the failure";
  // A source with fewer tokens than the part.
  MovedPiece longer(written.cache->options(), 100, 20, false);
  longer.Expect({.part = {.rows = {0, 20}, .seq_id = 0, .from = 30},
                 .source = &source,
                 .source_begin = 0,
                 .clock = clock.get()});
  EXPECT_EQ(longer.Load(0).status().code(), StatusCode::kIncompatible);
}

}  // namespace
}  // namespace quire
