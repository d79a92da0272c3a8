#include "quire/tensor.h"

#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <vector>

#include "base/testing/refuse_each.h"

namespace quire {
namespace {

constexpr DType kAll[] = {DType::kF32, DType::kF16, DType::kBF16,
                          DType::kI32, DType::kI64, DType::kU8};

TEST(DType, NamesAndDLPackTypesGoThereAndBack) {
  for (const DType dtype : kAll) {
    EXPECT_EQ(ParseDType(DTypeName(dtype)).value(), dtype);
    EXPECT_EQ(FromDLDataType(ToDLDataType(dtype)).value(), dtype);
    EXPECT_EQ(DTypeBytes(dtype) * 8, ToDLDataType(dtype).bits);
  }
  EXPECT_EQ(ParseDType("bf16").value(), DType::kBF16);
  EXPECT_EQ(ParseDType("BF16").value(), DType::kBF16);
  EXPECT_EQ(ParseDType("I64").value(), DType::kI64);
}

TEST(DType, ErrorsNameWhatIsThere) {
  EXPECT_EQ(ParseDType("float8").status().ToString(),
            "BadArgument: unknown element type \"float8\"; Quire has float32, float16, bfloat16, "
            "int32, int64, uint8, int8, float8_e4m3fn");
  EXPECT_FALSE(FromDLDataType({kDLFloat, 64, 1}).ok());
  EXPECT_FALSE(FromDLDataType({kDLFloat, 32, 4}).ok());
  const std::string refused = FromDLDataType({kDLFloat, 64, 1}).status().ToString();
  EXPECT_NE(refused.find("float64 is not taken"), std::string::npos) << refused;
}

TEST(TensorView, IsRowMajor) {
  std::vector<float> data(24);
  const TensorView view(data.data(), DType::kF32, {2, 3, 4});
  EXPECT_EQ(view.rank(), 3);
  EXPECT_EQ(view.stride(0), 12);
  EXPECT_EQ(view.stride(1), 4);
  EXPECT_EQ(view.stride(2), 1);
  EXPECT_EQ(view.element_count(), 24);
  EXPECT_TRUE(view.is_contiguous());
  EXPECT_EQ(view.ToString(), "float32 [2, 3, 4]");
  EXPECT_EQ(view.data_as<float>(), data.data());
}

struct DLPack {
  std::vector<float> data = std::vector<float>(64);
  std::array<int64_t, 8> shape{2, 3, 1, 1, 1, 1, 1, 1};
  std::array<int64_t, 8> strides{3, 1, 1, 1, 1, 1, 1, 1};
  DLTensor tensor{data.data(), {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape.data(), strides.data(), 0};
};

TEST(FromDLPack, TakesShapeStridesAndOffset) {
  DLPack d;
  d.strides = {10, 2};
  d.tensor.byte_offset = 8;
  const auto view = TensorView::FromDLPack(d.tensor);
  ASSERT_TRUE(view.ok()) << view.status().ToString();
  EXPECT_EQ(view->data(), d.data.data() + 2);
  EXPECT_EQ(view->stride(0), 10);
  EXPECT_EQ(view->stride(1), 2);
  EXPECT_FALSE(view->is_contiguous());
}

TEST(FromDLPack, NullStridesMeanRowMajor) {
  DLPack d;
  d.tensor.strides = nullptr;
  const auto view = TensorView::FromDLPack(d.tensor);
  EXPECT_EQ(view->stride(0), 3);
  EXPECT_TRUE(view->is_contiguous());
}

TEST(FromDLPack, StridesOfUnitDimensionsDoNotMatter) {
  DLPack d;
  d.shape = {1, 3};
  d.strides = {77, 1};
  EXPECT_TRUE(TensorView::FromDLPack(d.tensor)->is_contiguous());
}

TEST(FromDLPack, EmptyTensorsNeedNoData) {
  DLPack d;
  d.shape[0] = 0;
  d.tensor.data = nullptr;
  const auto view = TensorView::FromDLPack(d.tensor);
  ASSERT_TRUE(view.ok());
  EXPECT_EQ(view->element_count(), 0);
  EXPECT_TRUE(view->is_contiguous());
}

TEST(FromDLPack, RefusesWhatCannotBeRead) {
  const auto error = [](auto change) {
    DLPack d;
    change(d);
    const auto view = TensorView::FromDLPack(d.tensor);
    EXPECT_EQ(view.status().code(), StatusCode::kBadArgument);
    return std::string(view.status().message());
  };
  EXPECT_NE(error([](DLPack& d) {
              d.tensor.device = {kDLCUDA, 0};
            }).find("copy it to the CPU"),
            std::string::npos);
  EXPECT_NE(error([](DLPack& d) { d.tensor.ndim = 7; }).find("7 dimensions"), std::string::npos);
  EXPECT_NE(error([](DLPack& d) { d.tensor.ndim = -1; }).find("-1 dim"), std::string::npos);
  EXPECT_NE(error([](DLPack& d) { d.tensor.dtype.bits = 64; }).find("float64"), std::string::npos);
  EXPECT_NE(error([](DLPack& d) { d.tensor.data = nullptr; }).find("null"), std::string::npos);
  EXPECT_NE(error([](DLPack& d) { d.tensor.byte_offset = 2; }).find("aligned"), std::string::npos);
  EXPECT_NE(error([](DLPack& d) { d.shape[1] = -3; }).find("dimension 1 is -3"), std::string::npos);
  EXPECT_NE(error([](DLPack& d) {
              d.shape = {int64_t{1} << 40, int64_t{1} << 40};
            }).find("2^63"),
            std::string::npos);
}

TEST(FromDLPack, EachAllocationRefused) {
  const auto view = [](auto change) {
    return [change] {
      std::optional<DLPack> d;
      {
        const AllocationsAllowed allowed;
        change(d.emplace());
      }
      return TensorView::FromDLPack(d->tensor).status();
    };
  };
  constexpr StatusCode kBad = StatusCode::kBadArgument;
  RefuseEach("device", kBad, view([](DLPack& d) { d.tensor.device = {kDLCUDA, 0}; }));
  RefuseEach("dimensions", kBad, view([](DLPack& d) { d.tensor.ndim = 7; }));
  RefuseEach("element type", kBad, view([](DLPack& d) { d.tensor.dtype.bits = 64; }));
  RefuseEach("null", kBad, view([](DLPack& d) { d.tensor.data = nullptr; }));
  RefuseEach("alignment", kBad, view([](DLPack& d) { d.tensor.byte_offset = 2; }));
  RefuseEach("shape", kBad, view([](DLPack& d) { d.shape[1] = -3; }));
  RefuseEach("ParseDType", kBad, [] { return ParseDType("float99").status(); });
}

TEST(TensorView, TooManyDimensionsHoldNothing) {
  float data = 0;
  const TensorView view(&data, DType::kF32, {1, 1, 1, 1, 1, 1, 1});
  EXPECT_EQ(view.data(), nullptr);
  EXPECT_EQ(view.rank(), TensorView::kMaxRank);
  EXPECT_EQ(view.element_count(), 0);
  EXPECT_EQ(view.ToString(), "float32 of 7 dimensions, of which 6 are the most");
}

}  // namespace
}  // namespace quire
