// The tile unit against its documented order of sums, stated again output by output: the emulation
// on every CPU with AVX2, the instructions where this CPU has them and the process may use them.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/random.h"
#include "kernels/backend.h"
#include "kernels/cpu/path_includes.h"

#if defined(__x86_64__)

#define QUIRE_SIMD_AVX2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace quire {
namespace emulated {
namespace {
#define QUIRE_EMULATE_TILES 1
#include "kernels/cpu/simd-inl.h"
#include "kernels/cpu/tile_unit-inl.h"
#undef QUIRE_EMULATE_TILES
}  // namespace
}  // namespace emulated

namespace instructions {
namespace {
using emulated::kLanes;
#undef QUIRE_KERNELS_CPU_TILE_UNIT_INL_H_
#include "kernels/cpu/tile_unit-inl.h"
}  // namespace
}  // namespace instructions

namespace {

constexpr int kRows = emulated::kTileRows;
constexpr int kPairs = emulated::kTilePairs;

struct Operands {
  alignas(64) uint16_t a[kRows][kPairs][2];
  alignas(64) uint16_t b[kPairs][kRows][2];
  alignas(64) float c[kRows][kRows];
};

template <typename Unit, typename Shape>
void Multiply(int rows, int pairs, Operands* x) {
  Unit unit(Shape{rows, pairs});
  unit.template Read<0>(x->c, sizeof(x->c[0]));
  unit.template ReadOnce<5>(x->a, sizeof(x->a[0]));
  unit.template Read<6>(x->b, sizeof(x->b[0]));
  unit.template Dot<0, 5, 6>();
  unit.template Write<0>(x->c, sizeof(x->c[0]));
}

// One output. The caller has MXCSR round to nearest and flush denormals.
__attribute__((noinline)) float DocumentedSum(const Operands& x, int pairs, int row, int column) {
  __m128 chains[2] = {_mm_setzero_ps(), _mm_setzero_ps()};
  for (int pair = 0; pair < pairs; ++pair) {
    for (int i = 0; i < 2; ++i) {
      const __m128 a = _mm_set_ss(Bf16ToF32(x.a[row][pair][i]));
      const __m128 b = _mm_set_ss(Bf16ToF32(x.b[pair][column][i]));
      chains[i] = _mm_fmadd_ss(a, b, chains[i]);
    }
  }
  return _mm_cvtss_f32(_mm_add_ss(_mm_set_ss(x.c[row][column]), _mm_add_ss(chains[0], chains[1])));
}

void MultiplyAsDocumented(int rows, int pairs, Operands* x) {
  Operands before = *x;
  const unsigned environment = _mm_getcsr();
  _mm_setcsr(0x9fc0);
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < kRows; ++column) {
      x->c[row][column] = DocumentedSum(before, pairs, row, column);
    }
  }
  _mm_setcsr(environment);
}

// A bfloat16 whose exponent is one of [low, high].
uint16_t RandomBF16(RandomSequence* random, int low, int high) {
  const uint64_t bits = random->Bits();
  const auto exponent = static_cast<int>(bits >> 16 & 0xFFFF) % (high - low + 1) + low;
  return static_cast<uint16_t>((bits & 0x807F) | static_cast<uint64_t>(exponent) << 7);
}

// Exponents of the operands: ordinary numbers; all, with NaN and infinities; denormals and tiny
// ones; products around the least normal number; overflow.
constexpr int kExponents[][2] = {{118, 127}, {0, 255}, {0, 40}, {63, 66}, {180, 200}};

Operands RandomOperands(RandomSequence* random, int low, int high) {
  Operands x;
  for (auto& row : x.a) {
    for (auto& pair : row) {
      for (uint16_t& element : pair) element = RandomBF16(random, low, high);
    }
  }
  for (auto& row : x.b) {
    for (auto& pair : row) {
      for (uint16_t& element : pair) element = RandomBF16(random, low, high);
    }
  }
  for (auto& row : x.c) {
    for (float& sum : row) {
      const bool is_denormal = random->Bits() % 4 == 0;
      const uint32_t high_half = RandomBF16(random, is_denormal ? 0 : low, is_denormal ? 0 : high);
      sum = std::bit_cast<float>(high_half << 16 | static_cast<uint32_t>(random->Bits() & 0xFFFF));
    }
  }
  return x;
}

// Equal bits, but that one NaN is as good as another.
bool IsSame(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

// Bytes of `a` count as signed or unsigned, those of `b` as signed.
struct ByteOperands {
  alignas(64) uint8_t a[kRows][4 * kPairs];
  alignas(64) int8_t b[kPairs][4 * kRows];
  alignas(64) int32_t c[kRows][kRows];
};

template <typename Unit, typename Shape>
void MultiplyBytes(int rows, int quads, bool is_signed, ByteOperands* x) {
  Unit unit(Shape{rows, quads});
  unit.template Read<3>(x->c, sizeof(x->c[0]));
  unit.template Read<4>(x->a, sizeof(x->a[0]));
  unit.template ReadOnce<7>(x->b, sizeof(x->b[0]));
  if (is_signed) {
    unit.template DotBytes<3, 4, 7>();
  } else {
    unit.template DotUnsignedBytes<3, 4, 7>();
  }
  unit.template Write<3>(x->c, sizeof(x->c[0]));
}

void MultiplyBytesAsDocumented(int rows, int quads, bool is_signed, ByteOperands* x) {
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < kRows; ++column) {
      int64_t sum = x->c[row][column];
      for (int i = 0; i < 4 * quads; ++i) {
        const uint8_t a = x->a[row][i];
        sum += (is_signed ? int64_t{static_cast<int8_t>(a)} : int64_t{a}) *
               x->b[i / 4][4 * column + i % 4];
      }
      x->c[row][column] = static_cast<int32_t>(static_cast<uint32_t>(sum));
    }
  }
}

// Random bytes, or one number in all of `a` and one in all of `b`: products of the greatest
// magnitudes do not saturate, and sums wrap.
ByteOperands RandomByteOperands(RandomSequence* random, int round) {
  constexpr int kExtremes[] = {-128, 127, 0, -1, 1};
  const int a = kExtremes[round % 5];
  const int b = kExtremes[round / 5 % 5];
  const bool is_random = round % 2 == 0;
  ByteOperands x;
  for (auto& row : x.a) {
    for (uint8_t& byte : row) byte = static_cast<uint8_t>(is_random ? random->Bits() : a);
  }
  for (auto& row : x.b) {
    for (int8_t& byte : row) byte = static_cast<int8_t>(is_random ? random->Bits() : b);
  }
  for (auto& row : x.c) {
    for (int32_t& sum : row) {
      sum = round % 3 == 0 ? INT32_MAX : static_cast<int32_t>(random->Bits() >> 40);
    }
  }
  return x;
}

template <typename Unit, typename Shape>
void CheckBytes() {
  RandomSequence random(3);
  for (int round = 0; round < 300; ++round) {
    const int rows = round % 4 == 0 ? kRows : static_cast<int>(random.Bits() % kRows) + 1;
    const int quads = round % 8 < 4 ? kPairs : static_cast<int>(random.Bits() % kPairs) + 1;
    const ByteOperands before = RandomByteOperands(&random, round);
    for (const bool is_signed : {true, false}) {
      ByteOperands expected = before;
      ByteOperands product = before;
      MultiplyBytesAsDocumented(rows, quads, is_signed, &expected);
      MultiplyBytes<Unit, Shape>(rows, quads, is_signed, &product);
      ASSERT_EQ(std::memcmp(product.c, expected.c, sizeof(product.c)), 0)
          << "round " << round << ", " << rows << " rows, " << quads << " quads, signed "
          << is_signed;
    }
  }
}

template <typename Unit, typename Shape>
void CheckUnit() {
  RandomSequence random(1);
  for (const auto& [low, high] : kExponents) {
    for (int round = 0; round < 200; ++round) {
      const int rows = round % 2 == 0 ? kRows : static_cast<int>(random.Bits() % kRows) + 1;
      const int pairs = round % 4 < 2 ? kPairs : static_cast<int>(random.Bits() % kPairs) + 1;
      const Operands before = RandomOperands(&random, low, high);
      Operands expected = before;
      Operands product = before;
      MultiplyAsDocumented(rows, pairs, &expected);
      Multiply<Unit, Shape>(rows, pairs, &product);
      for (int row = 0; row < kRows; ++row) {
        for (int column = 0; column < kRows; ++column) {
          ASSERT_TRUE(IsSame(product.c[row][column], expected.c[row][column]))
              << "exponents " << low << " to " << high << ", " << rows << " rows, " << pairs
              << " pairs: row " << row << ", column " << column << " is " << product.c[row][column]
              << ", not " << expected.c[row][column];
        }
      }
    }
  }
}

TEST(TileUnit, TheEmulationSumsInTheDocumentedOrder) {
  if (!__builtin_cpu_supports("avx2")) GTEST_SKIP() << "this CPU has no AVX2";
  CheckUnit<emulated::TileUnit, emulated::TileShape>();
  CheckBytes<emulated::TileUnit, emulated::TileShape>();
}

TEST(TileUnit, TheInstructionsSumInTheDocumentedOrder) {
  if (Backends().front()->name != "avx512_amx") {
    GTEST_SKIP() << "this CPU has no tiles, or the process may not use them " << TilesRefused();
  }
  CheckUnit<instructions::TileUnit, instructions::TileShape>();
  CheckBytes<instructions::TileUnit, instructions::TileShape>();
}

// With denormals kept, and with single products added to the sum, bits are others: the operands
// above would tell.
TEST(TileUnit, TheOperandsTellOtherOrders) {
  if (!__builtin_cpu_supports("avx2")) GTEST_SKIP() << "this CPU has no AVX2";
  RandomSequence random(2);
  const Operands before = RandomOperands(&random, 118, 127);
  Operands sum = before;
  MultiplyAsDocumented(kRows, kPairs, &sum);
  float chain = before.c[0][0];
  for (int pair = 0; pair < kPairs; ++pair) {
    for (int i = 0; i < 2; ++i) {
      chain = std::fma(Bf16ToF32(before.a[0][pair][i]), Bf16ToF32(before.b[pair][0][i]), chain);
    }
  }
  EXPECT_NE(chain, sum.c[0][0]);
}

TEST(TileUnit, TheThreadsFloatEnvironmentComesBack) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x3F80);  // rounds down
  {
    const emulated::ScopedFlush flush;
    EXPECT_EQ(_mm_getcsr() & 0xFFC0, 0x9FC0U);
  }
  EXPECT_EQ(_mm_getcsr() & 0xFFC0, 0x3F80U);
  _mm_setcsr(before);
}

}  // namespace
}  // namespace quire

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
