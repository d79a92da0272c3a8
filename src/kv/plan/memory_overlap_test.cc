#include "kv/plan/memory_overlap.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <set>
#include <vector>

#include "base/random.h"

namespace quire {
namespace {

// A view; its shape and strides are in elements.
TensorView Strided(std::byte* data, DType dtype, std::vector<int64_t> shape,
                   std::vector<int64_t> strides) {
  const DLTensor tensor{.data = data,
                        .device = {kDLCPU, 0},
                        .ndim = static_cast<int>(shape.size()),
                        .dtype = ToDLDataType(dtype),
                        .shape = shape.data(),
                        .strides = strides.data(),
                        .byte_offset = 0};
  return *TensorView::FromDLPack(tensor);
}

// The bytes of a tensor, one after the other; `twice`: whether one is there more than once.
std::set<std::byte*> BytesOf(const TensorView& tensor, bool* twice) {
  std::vector<int64_t> offsets{0};
  for (int axis = 0; axis < tensor.rank(); ++axis) {
    std::vector<int64_t> next;
    for (const int64_t offset : offsets) {
      for (int64_t i = 0; i < tensor.dim(axis); ++i)
        next.push_back(offset + i * tensor.stride(axis));
    }
    offsets = next;
  }
  std::set<std::byte*> bytes;
  const int64_t size = DTypeBytes(tensor.dtype());
  for (const int64_t offset : offsets) {
    for (int64_t b = 0; b < size; ++b)
      *twice |= !bytes.insert(tensor.data_as<std::byte>() + offset * size + b).second;
  }
  return bytes;
}

constexpr uint64_t kSeed = 20261123;
constexpr size_t kMiddle = 2000;  // of the memory

TensorView RandomTensor(uint64_t number, std::byte* memory) {
  uint64_t next = 0;
  const auto draw = [&](int64_t below) {
    return static_cast<int64_t>(RandomUniform(kSeed, number, next++) * static_cast<double>(below));
  };
  const int64_t rank = 1 + draw(4);
  std::vector<int64_t> shape, strides(static_cast<size_t>(rank));
  for (int64_t axis = 0; axis < rank; ++axis) shape.push_back(draw(30) == 0 ? 0 : 1 + draw(4));
  strides.back() = 1;
  int64_t reach = shape.back();
  for (size_t axis = strides.size() - 1; axis-- > 0;) {
    // Mostly as tensors are, else anything.
    strides[axis] = draw(3) > 0 ? reach + draw(6) : draw(25) - 8;
    reach = (shape[axis] - 1) * strides[axis] + reach;
  }
  const DType dtype = draw(2) == 0 ? DType::kF16 : DType::kU8;
  return Strided(memory + kMiddle + 2 * draw(60), dtype, shape, strides);
}

TEST(MemoryOverlap, IsThatOfTheBytes) {
  std::vector<std::byte> memory(2 * kMiddle);
  int64_t overlapping = 0, apart = 0, itself = 0;
  for (uint64_t i = 0; i < 20000; ++i) {
    const TensorView a = RandomTensor(2 * i, memory.data());
    const TensorView b = RandomTensor(2 * i + 1, memory.data());
    bool a_twice = false, b_twice = false;
    const std::set<std::byte*> a_bytes = BytesOf(a, &a_twice), b_bytes = BytesOf(b, &b_twice);
    bool common = false;
    for (std::byte* const byte : a_bytes) common |= b_bytes.count(byte) > 0;
    const bool within = !a_bytes.empty() && !b_bytes.empty() &&
                        *a_bytes.begin() <= *b_bytes.rbegin() &&
                        *b_bytes.begin() <= *a_bytes.rbegin();
    ASSERT_EQ(MemoryRuns(a).Overlaps(MemoryRuns(b)), common) << "case " << i;
    ASSERT_EQ(MemoryRuns(b).Overlaps(MemoryRuns(a)), common) << "case " << i;
    ASSERT_EQ(MemoryRuns(a).OverlapsItself(), a_twice) << "case " << i;
    overlapping += common;
    apart += within && !common;
    itself += a_twice;
  }
  EXPECT_GT(overlapping, 1000);
  EXPECT_GT(apart, 300);
  EXPECT_GT(itself, 300);
}

TEST(MemoryOverlap, RowsBehindThoseAskedForDoNotCount) {
  std::vector<std::byte> memory(100);
  const TensorView a = Strided(memory.data(), DType::kU8, {5, 10}, {10, 1});
  const TensorView b = Strided(memory.data() + 30, DType::kU8, {2, 10}, {0, 1});
  EXPECT_TRUE(MemoryRuns(a).Overlaps(MemoryRuns(b)));
  EXPECT_FALSE(MemoryRuns(a, 3).Overlaps(MemoryRuns(b)));
  EXPECT_TRUE(MemoryRuns(b).OverlapsItself());
  EXPECT_FALSE(MemoryRuns(b, 1).OverlapsItself());
  EXPECT_FALSE(MemoryRuns(a, 0).Overlaps(MemoryRuns(a)));
}

TEST(MemoryOverlap, MessagesNameBoth) {
  std::vector<std::byte> memory(100);
  const TensorView a = Strided(memory.data(), DType::kU8, {5, 10}, {10, 1});
  const TensorView b = Strided(memory.data() + 49, DType::kU8, {5, 10}, {10, 1});
  const TensorCall call{.name = "Call", .layer = 3};
  const Status status = CheckOutputs(call, {{"lse", nullptr}, {"o", &a}}, {{"q", &b}}, -1);
  EXPECT_EQ(status.code(), StatusCode::kBadArgument);
  EXPECT_EQ(status.message(),
            "Call: layer 3: o uint8 [5, 10] shares memory with q uint8 [5, 10]; give each memory "
            "of its own");
  EXPECT_EQ(CheckOutputs(call, {{"o", &a}, {"lse", &b}}, {}, -1).code(), StatusCode::kBadArgument);
  EXPECT_TRUE(CheckOutputs(call, {{"o", &a}}, {{"q", &b}}, 4).ok());
}

}  // namespace
}  // namespace quire
