#include "quire/host_tensor.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "base/testing/refuse_each.h"
#include "wire/testing/test_tensor.h"

namespace quire {
namespace {

DLTensor View(void* data, DLDataType dtype, std::vector<int64_t>& shape,
              std::vector<int64_t>* strides = nullptr) {
  return {.data = data,
          .device = {kDLCPU, 0},
          .ndim = static_cast<int32_t>(shape.size()),
          .dtype = dtype,
          .shape = shape.data(),
          .strides = strides == nullptr ? nullptr : strides->data(),
          .byte_offset = 0};
}

TEST(HostTensor, CopiesStridedTensorsInOrder) {
  std::vector<int32_t> data = {0, 1, 2, 3, 4, 5};
  std::vector<int64_t> shape = {3, 2};
  std::vector<int64_t> transposed = {1, 3};
  const HostTensor copy =
      HostTensor::CopyOf(View(data.data(), {kDLInt, 32, 1}, shape, &transposed)).value();
  EXPECT_EQ(ValuesOf<int32_t>(copy), (std::vector<int32_t>{0, 3, 1, 4, 2, 5}));
  std::vector<int64_t> backwards_shape = {3};
  std::vector<int64_t> backwards = {-2};
  DLTensor view = View(data.data(), {kDLInt, 32, 1}, backwards_shape, &backwards);
  view.byte_offset = 4 * sizeof(int32_t);
  EXPECT_EQ(ValuesOf<int32_t>(HostTensor::CopyOf(view).value()), (std::vector<int32_t>{4, 2, 0}));
}

TEST(HostTensor, OwnsItsBytes) {
  std::vector<float> data = {1, 2, 3};
  std::vector<int64_t> shape = {3};
  const HostTensor copy = HostTensor::CopyOf(View(data.data(), {kDLFloat, 32, 1}, shape)).value();
  data.assign(3, 0);
  EXPECT_EQ(ValuesOf<float>(copy), (std::vector<float>{1, 2, 3}));
}

TEST(HostTensor, TakesScalarsAndEmptyTensors) {
  std::vector<double> data = {7};
  std::vector<int64_t> scalar;
  EXPECT_EQ(
      ValuesOf<double>(HostTensor::CopyOf(View(data.data(), {kDLFloat, 64, 1}, scalar)).value()),
      data);
  for (std::vector<int64_t> shape :
       {std::vector<int64_t>{0, 3}, {2, 0}, {int64_t{1} << 62, 0, 9}}) {
    const HostTensor copy = HostTensor::CopyOf(View(nullptr, {kDLFloat, 32, 1}, shape)).value();
    EXPECT_EQ(copy.bytes(), 0);
    EXPECT_EQ(std::vector(copy.shape().begin(), copy.shape().end()), shape);
  }
}

TEST(HostTensor, RefusesWhatItCannotCopy) {
  std::vector<float> data = {1, 2, 3, 4};
  std::vector<int64_t> shape = {4};
  DLTensor view = View(data.data(), {kDLFloat, 32, 1}, shape);
  view.device = {kDLCUDA, 0};
  EXPECT_EQ(HostTensor::CopyOf(view).status().code(), StatusCode::kBadArgument);
  EXPECT_EQ(HostTensor::CopyOf(View(data.data(), {kDLFloat, 32, 4}, shape)).status().code(),
            StatusCode::kBadArgument);
  EXPECT_EQ(HostTensor::CopyOf(View(data.data(), {kDLInt, 4, 1}, shape)).status().code(),
            StatusCode::kBadArgument);
  shape = {-1};
  EXPECT_EQ(HostTensor::CopyOf(View(data.data(), {kDLFloat, 32, 1}, shape)).status().code(),
            StatusCode::kBadArgument);
  shape = {int64_t{1} << 40, int64_t{1} << 40};
  EXPECT_EQ(HostTensor::CopyOf(View(data.data(), {kDLFloat, 32, 1}, shape)).status().code(),
            StatusCode::kTooLarge);
}

TEST(HostTensor, RefusesWhatItCannotShareAndNullPointers) {
  const auto bytes = std::make_shared<std::byte[]>(16);
  const auto code = [&](ElementType dtype, std::vector<int64_t> shape, bool with_bytes) {
    return HostTensor::Share(dtype, std::move(shape), with_bytes ? bytes : nullptr).status().code();
  };
  EXPECT_EQ(code(DType::kF32, {4}, true), StatusCode::kOk);
  EXPECT_EQ(code(DType::kF32, {0}, false), StatusCode::kOk);
  EXPECT_EQ(code(DType::kF32, {4}, false), StatusCode::kBadArgument);
  EXPECT_EQ(code(DType::kF32, {-4}, true), StatusCode::kBadArgument);
  EXPECT_EQ(code(ElementType(kDLInt, 4), {4}, true), StatusCode::kBadArgument);
  EXPECT_EQ(code(DType::kF32, {int64_t{1} << 40, int64_t{1} << 40}, true), StatusCode::kTooLarge);
  std::vector<int64_t> shape = {4};
  DLTensor view = View(nullptr, {kDLFloat, 32, 1}, shape);
  EXPECT_EQ(HostTensor::CopyOf(view).status().code(), StatusCode::kBadArgument);
  view.ndim = -1;
  EXPECT_EQ(HostTensor::CopyOf(view).status().code(), StatusCode::kBadArgument);
}

TEST(HostTensor, EachAllocationRefused) {
  std::vector<float> data(4);
  std::vector<int64_t> shape = {2, 2};
  const DLTensor view = View(data.data(), {kDLFloat, 32, 1}, shape);
  RefuseEach("CopyOf", StatusCode::kOk, [&] { return HostTensor::CopyOf(view).status(); });
  const DLTensor null = View(nullptr, {kDLFloat, 32, 1}, shape);
  RefuseEach("CopyOf null", StatusCode::kBadArgument,
             [&] { return HostTensor::CopyOf(null).status(); });
  RefuseEach("Share null", StatusCode::kBadArgument, [&] {
    std::vector<int64_t> given;
    {
      const AllocationsAllowed allowed;
      given = {4};
    }
    return HostTensor::Share(DType::kF32, std::move(given), nullptr).status();
  });
}

}  // namespace
}  // namespace quire
