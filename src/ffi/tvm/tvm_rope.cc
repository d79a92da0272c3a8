#include "ffi/tvm/tvm_rope.h"

#include <tvm/ffi/container/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numbers>
#include <optional>
#include <string>
#include <vector>

#include "ffi/errors.h"
#include "ffi/tensors.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

// At position 1 no angle is ambiguous as long as the fastest pair turns by less than half a circle.
// Each further position multiplies the precision of the angle per position, and is small enough
// that the angle known so far says how many whole turns are in it, even from float16 results.
constexpr std::array<int32_t, 5> kPositions = {1, 32, 1024, 32768, 1 << 20};

// Results are rounded to the cache's dtype: a few units in the last place of a value near 1.
double ToleranceOf(DType dtype) {
  if (dtype == DType::kF32) return 1e-5;
  return dtype == DType::kF16 ? 4e-3 : 3e-2;
}

[[noreturn]] void ThrowNoRotation(const std::string& why) {
  ThrowBadArgument(
      "paged_attention_kv_cache_create: the kernel that splits and rotates (argument 24) is no "
      "rotation that Quire knows: " +
      why + ". Give the model's rotation to quire.tvm.install(rope=quire.RopeOptions(...))");
}

// Float values of a 16-bit or 32-bit float tensor.
float ToFloat(const TensorView& view, int64_t i) {
  if (view.dtype() == DType::kF32) return view.data_as<float>()[i];
  const uint16_t bits = view.data_as<uint16_t>()[i];
  if (view.dtype() == DType::kBF16) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  }
  const int exponent = bits >> 10 & 31;
  const float mantissa = static_cast<float>(bits & 1023);
  const float sign = (bits & 0x8000) != 0 ? -1.0F : 1.0F;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(mantissa + 1024, exponent - 25);
}

uint16_t OneBits(DType dtype) { return dtype == DType::kF16 ? 0x3C00 : 0x3F80; }

// What the kernel makes of the unit vectors at one position: [in][out], of the first query head.
class Response {
 public:
  Response(const tf::Function& kernel, const TvmRopeArguments& a, int32_t position)
      : dim_(a.head_dim), values_(static_cast<size_t>(dim_ * dim_)) {
    const DLDataType dtype = ToDLDataType(a.dtype);
    const int64_t heads = a.num_qo_heads + 2 * a.num_kv_heads;
    const tf::Tensor qkv = NewTensor(dtype, {dim_, heads, dim_});
    const tf::Tensor q = NewTensor(dtype, {dim_, a.num_qo_heads, dim_});
    const tf::Tensor k = NewTensor(dtype, {dim_, a.num_kv_heads, dim_});
    const tf::Tensor v = NewTensor(dtype, {dim_, a.num_kv_heads, dim_});
    const std::vector<int32_t> positions(static_cast<size_t>(dim_), position);
    std::memset(qkv.data_ptr(), 0, static_cast<size_t>(dim_ * heads * dim_) * (dtype.bits / 8));
    for (int64_t row = 0; row < dim_; ++row) {
      const int64_t at = row * heads * dim_ + row;
      if (a.dtype == DType::kF32) {
        static_cast<float*>(qkv.data_ptr())[at] = 1;
      } else {
        static_cast<uint16_t*>(qkv.data_ptr())[at] = OneBits(a.dtype);
      }
    }
    kernel(qkv, NewTensor(std::span<const int32_t>(positions)), q, k, v, int64_t{1});
    const TensorView result = ViewOf(tf::TensorView(q));
    for (int64_t row = 0; row < dim_; ++row) {
      for (int64_t d = 0; d < dim_; ++d) {
        values_[static_cast<size_t>(row * dim_ + d)] =
            ToFloat(result, row * a.num_qo_heads * dim_ + d);
      }
    }
  }

  double operator()(int64_t in, int64_t out) const {
    return values_[static_cast<size_t>(in * dim_ + out)];
  }

 private:
  int64_t dim_;
  std::vector<double> values_;
};

struct Pairs {
  RopePairing pairing;
  int64_t rotary_dim;

  int64_t first(int64_t pair) const {
    return pairing == RopePairing::kInterleaved ? 2 * pair : pair;
  }
  int64_t second(int64_t pair) const {
    return pairing == RopePairing::kInterleaved ? 2 * pair + 1 : pair + rotary_dim / 2;
  }
};

// Dimensions of a head that some position changes.
int64_t RotaryDim(const std::vector<Response>& responses, int64_t head_dim, double tolerance) {
  int64_t end = head_dim;
  const auto changes = [&](int64_t d) {
    return std::any_of(responses.begin(), responses.end(),
                       [&](const Response& r) { return std::abs(r(d, d) - 1) > tolerance; });
  };
  while (end > 0 && !changes(end - 1)) --end;
  return end;
}

Pairs FindPairs(const std::vector<Response>& responses, int64_t head_dim, double tolerance) {
  const int64_t rotary_dim = RotaryDim(responses, head_dim, tolerance);
  if (rotary_dim == 0) ThrowNoRotation("it rotates nothing");
  if (rotary_dim % 2 != 0)
    ThrowNoRotation("it rotates " + std::to_string(rotary_dim) + " dimensions");
  const Response& at_one = responses.front();
  const bool neighbours = std::abs(at_one(0, 1)) > std::abs(at_one(0, rotary_dim / 2));
  return {neighbours ? RopePairing::kInterleaved : RopePairing::kHalfSplit, rotary_dim};
}

// Every entry of the response must be what turning the pairs by these angles gives.
void CheckRotation(const Response& response, const Pairs& pairs, int64_t head_dim, int32_t position,
                   double tolerance) {
  std::vector<double> expected(static_cast<size_t>(head_dim * head_dim), 0.0);
  const auto at = [&](int64_t in, int64_t out) -> double& {
    return expected[static_cast<size_t>(in * head_dim + out)];
  };
  for (int64_t d = pairs.rotary_dim; d < head_dim; ++d) at(d, d) = 1;
  for (int64_t pair = 0; pair < pairs.rotary_dim / 2; ++pair) {
    const int64_t a = pairs.first(pair);
    const int64_t b = pairs.second(pair);
    at(a, a) = at(b, b) = response(a, a);
    at(a, b) = response(a, b);
    at(b, a) = -response(a, b);
  }
  for (int64_t in = 0; in < head_dim; ++in) {
    for (int64_t out = 0; out < head_dim; ++out) {
      if (std::abs(response(in, out) - at(in, out)) <= tolerance) continue;
      ThrowNoRotation("at position " + std::to_string(position) + " dimension " +
                      std::to_string(in) + " gives " + std::to_string(response(in, out)) +
                      " to dimension " + std::to_string(out) + " where " +
                      std::to_string(at(in, out)) + " would turn it like its partner");
    }
  }
}

double Wrapped(double angle) { return std::remainder(angle, 2 * std::numbers::pi); }

// Angle per position of each pair.
std::vector<double> Frequencies(const std::vector<Response>& responses, const Pairs& pairs) {
  std::vector<double> frequencies;
  for (int64_t pair = 0; pair < pairs.rotary_dim / 2; ++pair) {
    const int64_t a = pairs.first(pair);
    const int64_t b = pairs.second(pair);
    double frequency = 0;
    for (size_t i = 0; i < responses.size(); ++i) {
      const double angle = std::atan2(responses[i](a, b), responses[i](a, a));
      const double predicted = frequency * kPositions[i];
      frequency = (predicted + Wrapped(angle - predicted)) / kPositions[i];
    }
    frequencies.push_back(frequency);
  }
  return frequencies;
}

bool Agree(const std::vector<double>& measured, const std::vector<double>& known,
           double tolerance) {
  for (size_t i = 0; i < measured.size(); ++i) {
    // What kPositions' last resolves, and what a kernel loses that computes powers in float32. No
    // scaling family changes frequencies by so little.
    const double slack = tolerance / kPositions.back() + 1e-5 * known[i];
    if (std::abs(measured[i] - known[i]) > slack) return false;
  }
  return true;
}

}  // namespace

RopeOptions ReadRotationKernel(const tf::Function& kernel, const TvmRopeArguments& a) {
  const double tolerance = ToleranceOf(a.dtype);
  std::vector<Response> responses;
  for (const int32_t position : kPositions) responses.emplace_back(kernel, a, position);
  const Pairs pairs = FindPairs(responses, a.head_dim, tolerance);
  const Response& at_one = responses.front();
  const int64_t b0 = pairs.second(0);
  const double amplitude = std::hypot(at_one(0, 0), at_one(0, b0));
  for (size_t i = 0; i < responses.size(); ++i)
    CheckRotation(responses[i], pairs, a.head_dim, kPositions[i], tolerance * amplitude);

  RopeOptions options;
  options.mode = RopeMode::kNormal;
  options.pairing = pairs.pairing;
  options.theta = a.theta;
  options.position_scale = a.scale;
  options.rotary_dim = pairs.rotary_dim;
  const std::vector<double> measured = Frequencies(responses, pairs);
  const std::vector<double> plain =
      ValueOrThrow(ComputeRopeFrequencies(options, a.head_dim, false)).inv_freq;
  const bool has_amplitude = std::abs(amplitude - 1) > tolerance;
  if (!has_amplitude && Agree(measured, plain, tolerance)) return options;

  // Any other table of frequencies: as the factors of one set of LongRoPE.
  options.scaling = RopeScaling::kLongRope;
  options.attention_factor = has_amplitude ? amplitude : 1.0;
  for (size_t i = 0; i < measured.size(); ++i) {
    if (measured[i] <= 0)
      ThrowNoRotation("pair " + std::to_string(i) + " turns by " + std::to_string(measured[i]) +
                      " per position");
    options.short_factors.push_back(plain[i] / measured[i]);
  }
  options.long_factors = options.short_factors;
  options.original_max_position_embeddings = 1;  // not read, as the factor is given
  return options;
}

}  // namespace quire::ffi
