// Storing new tokens: every path against WriteSlot and a rotation in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "base/random.h"
#include "base/testing/host_float_environment.h"
#include "kernels/backend.h"
#include "kernels/kv_slot.h"
#include "tensor/half.h"

namespace quire {
namespace {

struct AppendCase {
  KVLayout layout;
  DType k_dtype = DType::kF32;
  DType v_dtype = DType::kF32;
  int rotary_dim = 0;
  bool interleaved = false;
  int64_t rows = 40;
  uint64_t seed = 1;

  // Filled by Build().
  std::vector<float> k, v;  // logical, [row][head][dim], exact in the given dtypes
  std::vector<std::byte> k_data, v_data;
  std::vector<float> cos, sin;
  std::vector<AppendTarget> targets;
  std::vector<uint8_t> opens;
  int page_count = 0;

  void Build() {
    RandomSequence random(seed);
    const int heads = layout.num_kv_heads;
    const auto fill = [&](int dim, DType dtype, std::vector<float>* logical,
                          std::vector<std::byte>* data) {
      const auto bytes = static_cast<size_t>(DTypeBytes(dtype));
      // Head stride dim + 1, row stride heads * (dim + 1) + 2.
      data->assign(static_cast<size_t>(rows * (heads * (dim + 1) + 2)) * bytes, std::byte{0xFF});
      for (int64_t row = 0; row < rows; ++row) {
        for (int h = 0; h < heads; ++h) {
          for (int d = 0; d < dim; ++d) {
            const float x = static_cast<float>(random.Normal());
            std::byte* to =
                data->data() +
                static_cast<size_t>(row * (heads * (dim + 1) + 2) + h * (dim + 1) + d) * bytes;
            logical->push_back(Put(x, dtype, to));
          }
        }
      }
    };
    fill(layout.qk_head_dim, k_dtype, &k, &k_data);
    fill(layout.v_head_dim, v_dtype, &v, &v_data);
    for (int64_t i = 0; i < rows * rotary_dim / 2; ++i) {
      const double angle = random.Uniform(0, 6.28);
      cos.push_back(static_cast<float>(std::cos(angle)));
      sin.push_back(static_cast<float>(std::sin(angle)));
    }
    // Two sequences whose tokens alternate, in pages 2 i and 2 i + 1; every seventh row is not
    // stored.
    int64_t length[2] = {5, 0};
    bool is_open[2] = {false, false};
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t s = row % 2;
      if (row % 7 == 6) {
        targets.push_back({-1, 0});
        opens.push_back(0);
        continue;
      }
      const int64_t position = length[s]++;
      const auto slot = static_cast<int32_t>(position % layout.page_size);
      if (slot % kTilePositions == 0) is_open[s] = false;
      targets.push_back({static_cast<int32_t>(position / layout.page_size * 2 + s), slot});
      opens.push_back(is_open[s] ? 0 : 1);
      is_open[s] = true;
      page_count = std::max(page_count, targets.back().page + 1);
    }
  }

  // Stores x rounded to dtype and returns what is stored.
  static float Put(float x, DType dtype, std::byte* to) {
    if (dtype == DType::kF32) {
      std::memcpy(to, &x, sizeof x);
      return x;
    }
    const uint16_t bits = dtype == DType::kBF16 ? F32ToBf16(x) : F32ToF16(x);
    std::memcpy(to, &bits, sizeof bits);
    return dtype == DType::kBF16 ? Bf16ToF32(bits) : F16ToF32(bits);
  }
};

struct Stored {
  std::vector<std::byte> memory;
  std::vector<uint8_t> flags;
  KVPages pages;

  explicit Stored(const AppendCase& test)
      : memory(test.layout.page_bytes() * static_cast<size_t>(test.page_count), std::byte{0xFF}),
        flags(static_cast<size_t>(test.page_count * test.layout.tiles_per_page()), 1),
        pages{test.layout, memory.data(), flags.data()} {}
};

Stored Append(const AppendCase& test, const Backend& backend, int workers) {
  Stored stored(test);
  const std::shared_ptr<ParallelRunner> pool = CreateThreadPool(workers).value();
  AppendArgs args;
  args.pages = stored.pages;
  args.row_count = test.rows;
  const int heads = test.layout.num_kv_heads;
  const int k_dim = test.layout.qk_head_dim;
  const int v_dim = test.layout.v_head_dim;
  args.k = {test.k_data.data(), test.k_dtype, heads * (k_dim + 1) + 2, k_dim + 1};
  args.v = {test.v_data.data(), test.v_dtype, heads * (v_dim + 1) + 2, v_dim + 1};
  std::vector<RotaryAngles> angles;
  for (int64_t row = 0; row < test.rows; ++row) {
    const int64_t first = row * test.rotary_dim / 2;
    angles.push_back({test.cos.data() + first, test.sin.data() + first});
  }
  args.rotary = {angles.data(), test.rotary_dim, test.interleaved};
  args.targets = test.targets.data();
  args.opens_tile = test.opens.data();
  backend.append_kv(args, *pool);
  return stored;
}

std::vector<AppendCase> Cases() {
  std::vector<AppendCase> cases;
  uint64_t seed = 1;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kI8, DType::kF8E4M3}) {
    for (const int page_size : {1, 5, 16, 32, 48}) {
      for (const bool interleaved : {false, true}) {
        AppendCase test;
        test.layout = {dtype, 3, page_size == 16 ? 80 : 19, 21, page_size};
        if (seed % 2 == 0) test.layout.value_dtype = seed % 4 == 0 ? DType::kI8 : DType::kF8E4M3;
        test.k_dtype = seed % 3 == 0 ? DType::kBF16 : DType::kF32;
        test.v_dtype = seed % 3 == 1 ? DType::kF16 : DType::kBF16;
        test.rotary_dim = seed % 4 == 0 ? 0 : page_size == 16 ? 80 : 14;
        test.interleaved = interleaved;
        test.seed = seed++;
        test.Build();
        cases.push_back(test);
      }
    }
  }
  return cases;
}

TEST(Append, AllPathsAndWorkersStoreTheSameBits) {
  for (const AppendCase& test : Cases()) {
    const Stored expected = Append(test, *Backends().back(), 1);
    for (const Backend* backend : Backends()) {
      for (const int workers : {1, 3}) {
        const Stored stored = Append(test, *backend, workers);
        EXPECT_EQ(stored.memory, expected.memory) << backend->name;
        EXPECT_EQ(stored.flags, expected.flags) << backend->name;
      }
    }
  }
}

TEST(Append, WithoutRotationItStoresWhatWriteSlotStores) {
  for (AppendCase test : Cases()) {
    test.rotary_dim = 0;
    const Stored stored = Append(test, *Backends().front(), 2);
    Stored expected(test);
    const KVLayout& layout = test.layout;
    for (size_t row = 0; row < test.targets.size(); ++row) {
      if (test.targets[row].page < 0) continue;
      WriteSlot(expected.pages, test.targets[row], DType::kF32,
                test.k.data() + row * static_cast<size_t>(layout.num_kv_heads * layout.qk_head_dim),
                test.v.data() + row * static_cast<size_t>(layout.num_kv_heads * layout.v_head_dim),
                test.opens[row] != 0);
    }
    EXPECT_EQ(stored.memory, expected.memory) << "page size " << layout.page_size;
    EXPECT_EQ(stored.flags, expected.flags);
  }
}

TEST(Append, KeysAreRotatedInFloat32AndRoundedOnce) {
  for (const AppendCase& test : Cases()) {
    const Stored stored = Append(test, *Backends().front(), 1);
    const KVLayout& layout = test.layout;
    const int half = test.rotary_dim / 2;
    const double roundoff = layout.dtype == DType::kF32    ? 0
                            : layout.dtype == DType::kF16  ? 0x1p-11
                            : layout.dtype == DType::kBF16 ? 0x1p-8
                                                           : 0;
    std::vector<float> k(static_cast<size_t>(layout.num_kv_heads * layout.qk_head_dim));
    std::vector<float> v(static_cast<size_t>(layout.num_kv_heads * layout.v_head_dim));
    for (size_t row = 0; row < test.targets.size(); ++row) {
      if (test.targets[row].page < 0) continue;
      ReadSlot(stored.pages, test.targets[row], DType::kF32, k.data(), v.data());
      for (int h = 0; h < layout.num_kv_heads; ++h) {
        const float* from = test.k.data() + row * k.size() + h * layout.qk_head_dim;
        const float* got = k.data() + h * layout.qk_head_dim;
        double step = 0;  // between codes, at most
        if (IsQuantised(layout.dtype)) {
          for (int d = 0; d < layout.qk_head_dim; ++d) {
            step = std::max(step, static_cast<double>(std::fabs(from[d])) * 1.42);
          }
          step /= layout.dtype == DType::kI8 ? 127 : 14;  // the largest numbers are 32 of 448 apart
        }
        for (int i = 0; i < half; ++i) {
          const int first = test.interleaved ? 2 * i : i;
          const int second = test.interleaved ? 2 * i + 1 : i + half;
          const auto angle = row * static_cast<size_t>(half) + static_cast<size_t>(i);
          const auto c = static_cast<double>(test.cos[angle]);
          const auto s = static_cast<double>(test.sin[angle]);
          const auto x = static_cast<double>(from[first]);
          const auto y = static_cast<double>(from[second]);
          const double bound =
              (std::fabs(x) + std::fabs(y)) * (roundoff + 0x1p-23) + 0x1p-25 + 0.51 * step;
          EXPECT_NEAR(static_cast<double>(got[first]), x * c - y * s, bound);
          EXPECT_NEAR(static_cast<double>(got[second]), y * c + x * s, bound);
        }
      }
    }
  }
}

TEST(Append, ValuesThatAreNotFiniteSetTheFlagOfTheirTileAlone) {
  constexpr int kHeads = 3;
  const float infinity = std::numeric_limits<float>::infinity();
  const int64_t row = 38;  // not the first of its tile
  for (int head = 0; head < kHeads; ++head) {
    AppendCase test;
    test.layout = {DType::kBF16, kHeads, 16, 16, 32};
    test.Build();
    const int64_t element = row * (kHeads * 17 + 2) + head * 17 + 15;
    std::memcpy(test.v_data.data() + element * 4, &infinity, 4);
    for (const Backend* backend : Backends()) {
      const Stored stored = Append(test, *backend, 2);
      for (size_t r = 0; r < test.targets.size(); ++r) {
        if (test.targets[r].page < 0) continue;
        const size_t flag = TileFlag(test.layout, test.targets[r].page, test.targets[r].slot);
        const size_t expected =
            TileFlag(test.layout, test.targets[row].page, test.targets[row].slot);
        EXPECT_EQ(stored.flags[flag], flag == expected ? 1 : 0)
            << backend->name << ", row " << r << ", head " << head;
      }
    }
  }
}

TEST(Append, TheCallersFloatEnvironmentDoesNotMatter) {
  AppendCase test = Cases()[0];
  ASSERT_GT(test.rotary_dim, 0);
  for (float& x : test.cos) x *= 1e-38F;  // products are subnormal
  for (float& x : test.sin) x *= 1e-38F;
  const Stored expected = Append(test, *Backends().front(), 1);
  const HostFloatEnvironment host(kFlushSubnormals);
  const Stored stored = Append(test, *Backends().front(), 1);
  EXPECT_TRUE(host.IsInForce());
  EXPECT_EQ(stored.memory, expected.memory);
}

}  // namespace
}  // namespace quire
