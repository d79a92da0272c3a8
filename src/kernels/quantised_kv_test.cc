// Codes and scales of quantised keys and values: what is stored, read, copied and handed over.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/random.h"
#include "kernels/backend.h"
#include "kernels/kv_quantise.h"
#include "kernels/kv_slot.h"

namespace quire {
namespace {

constexpr DType kTypes[] = {DType::kI8, DType::kF8E4M3};

// The number that the format's definition gives a code.
double Float8(int code) {
  const int exponent = code >> 3 & 15;
  const double fraction = (code & 7) / 8.0;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -6) : std::ldexp(1 + fraction, exponent - 7);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

TEST(Float8, EveryCodeIsWhatItsDefinitionSaysAndComesBack) {
  for (int code = 0; code < 256; ++code) {
    const float x = F8E4M3ToF32(static_cast<uint8_t>(code));
    EXPECT_EQ(static_cast<double>(x), Float8(code)) << code;
    if ((code & 0x7F) == 0x7F) continue;
    EXPECT_EQ(F32ToF8E4M3(x), code);
  }
}

TEST(Float8, RoundsToTheNearestAndTiesToEven) {
  for (int code = 0; code < 0x7E; ++code) {
    const float low = F8E4M3ToF32(static_cast<uint8_t>(code));
    const float high = F8E4M3ToF32(static_cast<uint8_t>(code + 1));
    const float middle = (low + high) / 2;
    EXPECT_EQ(F32ToF8E4M3(middle), code % 2 == 0 ? code : code + 1) << code;
    EXPECT_EQ(F32ToF8E4M3(std::nextafter(middle, 0.0F)), code) << code;
    EXPECT_EQ(F32ToF8E4M3(std::nextafter(middle, 1e9F)), code + 1) << code;
    EXPECT_EQ(F32ToF8E4M3(-std::nextafter(middle, 1e9F)), (code + 1) | 0x80) << code;
  }
  EXPECT_EQ(F32ToF8E4M3(1e30F), 0x7E);
  EXPECT_EQ(F32ToF8E4M3(-std::numeric_limits<float>::infinity()), 0xFE);
}

// Codes times scales are exact, and the largest number is the largest code.
TEST(Quantise, AgainGivesTheSameCodesAndScale) {
  RandomSequence random(1);
  for (const DType dtype : kTypes) {
    for (int round = 0; round < 2000; ++round) {
      const double size = std::exp(random.Uniform(-60, 60));
      float x[40];
      HeadRange range;
      for (float& value : x) {
        value = static_cast<float>(random.Normal() * size);
        range.Add(value);
      }
      const float scale = range.Scale(dtype);
      HeadRange again;
      uint8_t codes[40];
      for (int i = 0; i < 40; ++i) {
        codes[i] = QuantiseElement(dtype, x[i], scale);
        const float back = CodeToF32(dtype, codes[i]) * scale;
        const double step = dtype == DType::kI8
                                ? 0.501 * static_cast<double>(scale)
                                : std::max(std::fabs(static_cast<double>(x[i])) * 0x1.01p-4,
                                           0x1.01p-10 * static_cast<double>(scale));
        ASSERT_NEAR(static_cast<double>(back), static_cast<double>(x[i]), step);
        again.Add(back);
      }
      ASSERT_EQ(again.Scale(dtype), scale);
      for (int i = 0; i < 40; ++i) {
        ASSERT_EQ(QuantiseElement(dtype, CodeToF32(dtype, codes[i]) * scale, scale), codes[i]);
      }
    }
  }
}

// It is the nearest number of 16 significant bits; of two at the same distance, the even one.
TEST(Quantise, AScaleIsRoundedToTheNearest) {
  RandomSequence random(2);
  const auto scale_of = [](float greatest, DType dtype) {
    HeadRange range;
    range.Add(greatest);
    return range.Scale(dtype);
  };
  for (const DType dtype : kTypes) {
    const float most = dtype == DType::kI8 ? kI8Max : kF8E4M3Max;
    for (int round = 0; round < 2000; ++round) {
      const auto greatest = static_cast<float>(std::exp(random.Uniform(-40, 40)));
      const double wanted = static_cast<double>(greatest / most);
      const double step = std::ldexp(1.0, std::ilogb(wanted) - 15);
      ASSERT_EQ(static_cast<double>(scale_of(greatest, dtype)), std::rint(wanted / step) * step)
          << greatest;
    }
  }
}

TEST(Quantise, ZerosAndWhatIsNotFiniteHaveAScaleOfTheirOwn) {
  for (const DType dtype : kTypes) {
    HeadRange zeros;
    zeros.Add(0.0F);
    zeros.Add(-0.0F);
    EXPECT_EQ(zeros.Scale(dtype), 0.0F);
    EXPECT_EQ(QuantiseElement(dtype, 0.0F, 0.0F), 0);
    for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
      HeadRange range;
      range.Add(1);
      range.Add(bad);
      range.Add(2);
      EXPECT_TRUE(std::isnan(range.Scale(dtype)));
      EXPECT_EQ(QuantiseElement(dtype, 2.0F, range.Scale(dtype)), 0);
    }
  }
}

struct Memory {
  explicit Memory(const KVLayout& layout)
      : bytes(3 * layout.page_bytes() + 64, std::byte{0xFF}),
        flags(3 * static_cast<size_t>(layout.tiles_per_page())) {
    pages = {layout, bytes.data(), flags.data()};
  }
  std::vector<std::byte> bytes;
  std::vector<uint8_t> flags;
  KVPages pages;
};

std::vector<KVLayout> Layouts() {
  std::vector<KVLayout> layouts;
  for (const DType keys : {DType::kI8, DType::kF8E4M3, DType::kBF16, DType::kF32}) {
    for (const DType values : {DType::kI8, DType::kF8E4M3, DType::kBF16, DType::kF32}) {
      for (const int page_size : {5, 16, 48}) {
        layouts.push_back({keys, 3, 19, 21, page_size, values});
      }
    }
  }
  return layouts;
}

// A slot's numbers as float32 in a place of its own.
struct Slot {
  std::vector<float> k, v;
};
Slot Read(const KVPages& pages, AppendTarget slot) {
  Slot out{std::vector<float>(3 * 19), std::vector<float>(3 * 21)};
  ReadSlot(pages, slot, DType::kF32, out.k.data(), out.v.data());
  return out;
}

TEST(QuantisedSlots, AreCopiedBitForBitBetweenPagesAndSlots) {
  for (const KVLayout& layout : Layouts()) {
    Memory memory(layout);
    RandomSequence random(7);
    std::vector<Slot> slots;
    std::vector<AppendTarget> from;
    std::vector<AppendTarget> to;
    std::vector<uint8_t> opens;
    for (int slot = 0; slot < layout.page_size; ++slot) {
      Slot x{std::vector<float>(3 * 19), std::vector<float>(3 * 21)};
      for (float& value : x.k) value = static_cast<float>(random.Normal());
      for (float& value : x.v) value = static_cast<float>(random.Normal());
      from.push_back({0, slot});
      to.push_back({2, layout.page_size - 1 - slot});
      opens.push_back(to.back().slot % 16 == 15 || slot == 0);
      WriteSlot(memory.pages, from.back(), DType::kF32, x.k.data(), x.v.data(), slot % 16 == 0);
      slots.push_back(Read(memory.pages, from.back()));
    }
    CopySlots(memory.pages, from, to, opens.data());
    for (size_t i = 0; i < to.size(); ++i) {
      const Slot copy = Read(memory.pages, to[i]);
      EXPECT_EQ(copy.k, slots[i].k);
      EXPECT_EQ(copy.v, slots[i].v);
    }
  }
}

// Codes and scales that were read elsewhere are stored as they are.
TEST(QuantisedSlots, CodesAreStoredAsGivenOnEveryPath) {
  for (const DType dtype : kTypes) {
    for (const int page_size : {5, 16, 48}) {
      const KVLayout layout{dtype, 3, 19, 21, page_size};
      RandomSequence random(9);
      std::vector<uint8_t> k(5 * 3 * 19);
      std::vector<uint8_t> v(5 * 3 * 21);
      for (uint8_t& code : k) code = static_cast<uint8_t>(random.Bits());
      for (uint8_t& code : v) code = static_cast<uint8_t>(random.Bits());
      std::vector<float> k_scale;
      std::vector<float> v_scale;
      for (int i = 0; i < 15; ++i) k_scale.push_back(static_cast<float>(random.Uniform()));
      for (int i = 0; i < 15; ++i) v_scale.push_back(static_cast<float>(random.Uniform()));
      const AppendTarget targets[] = {{1, 0}, {1, 2}, {-1, 0}, {1, 1}, {1, 4}};
      const uint8_t opens[] = {1, 0, 0, 0, 0};
      for (const Backend* backend : Backends()) {
        Memory memory(layout);
        const std::shared_ptr<ParallelRunner> runner = CreateThreadPool(1).value();
        backend->append_kv({.pages = memory.pages,
                            .row_count = 5,
                            .k = {k.data(), dtype, 3 * 19, 19},
                            .v = {v.data(), dtype, 3 * 21, 21},
                            .k_scale = k_scale.data(),
                            .v_scale = v_scale.data(),
                            .rotary = {},
                            .targets = targets,
                            .opens_tile = opens},
                           *runner);
        for (size_t row = 0; row < 5; ++row) {
          if (targets[row].page < 0) continue;
          const Slot slot = Read(memory.pages, targets[row]);
          for (size_t h = 0; h < 3; ++h) {
            for (size_t d = 0; d < 19; ++d) {
              const float code = CodeToF32(dtype, k[(row * 3 + h) * 19 + d]);
              ASSERT_EQ(slot.k[h * 19 + d], code * k_scale[row * 3 + h]);
            }
            for (size_t d = 0; d < 21; ++d) {
              const float code = CodeToF32(dtype, v[(row * 3 + h) * 21 + d]);
              ASSERT_EQ(slot.v[h * 21 + d], code * v_scale[row * 3 + h]);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace quire
