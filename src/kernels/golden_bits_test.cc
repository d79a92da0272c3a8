// What the paths that share their arithmetic (docs/exactness.md) give for fixed inputs, as digests
// that stand here. Other tests compare the paths of one CPU with each other; these hold a path to
// what CPUs of another architecture give. A change of the arithmetic changes digests, and its
// commit says so.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "base/random.h"
#include "kernels/backend.h"
#include "kernels/recurrence.h"
#include "kernels/testing/attention_case.h"
#include "kernels/testing/equal_paths.h"
#include "kernels/testing/quantised_rows.h"
#include "kernels/testing/random_floats.h"
#include "tensor/host_memory.h"

namespace quire {
namespace {

using Floats = std::vector<float>;

// Some are subnormal, zero or large.
Floats WideFloats(int64_t count, uint64_t seed) {
  Floats values = RandomFloats(count, seed);
  constexpr float kFactors[] = {1, 0x1p-10F, 0x1p-130F, 0, 0x1p4F, 0x1p-3F, 30, 0x1p-60F};
  for (size_t i = 0; i < values.size(); ++i) values[i] *= kFactors[i % std::size(kFactors)];
  return values;
}

// Adds up what a test gives, in its order.
class Digest {
 public:
  void Add(const void* data, size_t bytes) { hash_ = Hash64(data, bytes, hash_); }
  void Add(const Floats& values) {
    for (const float value : values) ASSERT_FALSE(std::isnan(value)) << "its bits are not promised";
    Add(values.data(), values.size() * sizeof(float));
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0;
};

std::string Hex(uint64_t value) {
  char text[19];
  std::snprintf(text, sizeof(text), "0x%016llx", static_cast<unsigned long long>(value));
  return text;
}

HostMemory Memory(size_t bytes) {
  HostMemory memory = HostMemory::Allocate(bytes).value();
  if (bytes > 0) std::memset(memory.data(), 0, memory.size());
  return memory;
}

class GoldenBits : public testing::TestWithParam<const Backend*> {
 protected:
  const Backend& backend() const { return *GetParam(); }
  ParallelRunner& runner() const { return *runner_; }
  static void Expect(const Digest& digest, uint64_t golden) {
    EXPECT_EQ(Hex(digest.value()), Hex(golden));
  }

 private:
  const std::shared_ptr<ParallelRunner> runner_ = CreateThreadPool(2).value();
};

// y for `rows` rows of k inputs, from packed weights.
Floats RunPacked(const Backend& backend, const PackedLinear& w, DType x_rounding, int64_t rows,
                 ParallelRunner& runner) {
  const Floats x = RandomFloats(rows * w.k, 5);
  Floats y(static_cast<size_t>(rows * w.n), 0.25F);
  const HostMemory scratch =
      Memory(backend.linear_scratch_bytes(rows, w.n, w.k, runner.worker_count()));
  backend.linear({.w = w,
                  .row_count = rows,
                  .x = x.data(),
                  .x_stride = w.k,
                  .x_rounding = x_rounding,
                  .y = y.data(),
                  .y_stride = w.n,
                  .accumulate = rows == 5,
                  .scratch = scratch.data()},
                 runner);
  return y;
}

// Rows by tiles, by panels and, with AVX2, in lanes; inputs in one block and in several.
constexpr int64_t kRowCounts[] = {1, 3, 5, 14, 40};
constexpr int64_t kInputCounts[] = {30, 77, 1300};

Digest OfLinear(const Backend& backend, DType dtype, ParallelRunner& runner) {
  Digest digest;
  constexpr int64_t kN = 45;
  const DType x_rounding = dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;
  const Floats bias = RandomFloats(kN, 2);
  for (const int64_t k : kInputCounts) {
    const Floats weights = RandomFloats(kN * k, 3);
    const HostMemory packed = Memory(backend.packed_linear_bytes(dtype, kN, k));
    backend.pack_linear(weights.data(), DType::kF32, kN, k, dtype, packed.data(), runner);
    const PackedLinear w{
        .dtype = dtype, .n = kN, .k = k, .data = packed.data(), .bias = bias.data()};
    for (const int64_t rows : kRowCounts)
      digest.Add(RunPacked(backend, w, x_rounding, rows, runner));
  }
  return digest;
}

TEST_P(GoldenBits, LinearOfFloat32) {
  Expect(OfLinear(backend(), DType::kF32, runner()), 0x62650ae367acb0b7);
}
TEST_P(GoldenBits, LinearOfFloat16) {
  Expect(OfLinear(backend(), DType::kF16, runner()), 0x5ba5545027129f4a);
}
TEST_P(GoldenBits, LinearOfBfloat16) {
  Expect(OfLinear(backend(), DType::kBF16, runner()), 0xe160a83b5dc9c7ef);
}

TEST_P(GoldenBits, LinearOfFloat8) {
  Digest digest;
  constexpr int64_t kN = 45;
  for (const int64_t k : kInputCounts) {
    RandomSequence random(static_cast<uint64_t>(k));
    std::vector<uint8_t> codes(static_cast<size_t>(kN * k));
    for (uint8_t& code : codes) {
      code = static_cast<uint8_t>(random.Below(256));
      if (!IsFloat8Number(code)) code = 0x80;
    }
    std::vector<const uint8_t*> rows;
    for (int64_t row = 0; row < kN; ++row) rows.push_back(codes.data() + row * k);
    const HostMemory packed = Memory(PackedFloat8Bytes(kN, k));
    ASSERT_EQ(PackFloat8(rows, k, reinterpret_cast<uint8_t*>(packed.data()), runner()), -1);
    for (const bool of_outputs : {false, true}) {
      Float8Scales scales{nullptr, 128, of_outputs};
      const Floats numbers = RandomFloats(Float8ScaleCount(scales, kN, k), 7, 0x1p-12, 0x1p-8);
      scales.data = numbers.data();
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const PackedLinear w{
            .dtype = dtype, .n = kN, .k = k, .data = packed.data(), .float8 = scales};
        for (const int64_t count : kRowCounts)
          digest.Add(RunPacked(backend(), w, dtype, count, runner()));
      }
    }
  }
  Expect(digest, 0x8038c846c204921b);
}

TEST_P(GoldenBits, LinearOfQuantisedWeights) {
  constexpr int64_t kN = 37;
  constexpr int64_t kK = 768;
  constexpr int64_t kRows = 13;
  const Floats x = RandomFloats(kRows * kK, 11);
  const Floats bias = RandomFloats(kN, 12);
  Digest digest;
  Digest few_bits;  // formats that came later
  for (const WeightFormat format : kWeightFormats) {
    const bool is_later = format == WeightFormat::kQ3_K || format == WeightFormat::kQ2_K;
    const std::vector<std::byte> stored = RandomQuantisedRows(format, kN, kK, 1, 13);
    const HostMemory packed = Memory(PackedQuantisedBytes(format, kN, kK));
    PackQuantised(format, stored.data(), kN, kK, 0, packed.data(), runner());
    const QuantisedLinear part{
        .format = format, .n = kN, .k = kK, .data = packed.data(), .bias = bias.data()};
    Floats y(static_cast<size_t>(kRows * kN));
    const HostMemory scratch = Memory(backend().quantised_scratch_bytes(kRows, kK));
    backend().quantised_linear({.parts = {&part, 1},
                                .row_count = kRows,
                                .x = x.data(),
                                .x_stride = kK,
                                .y = y.data(),
                                .y_stride = kN,
                                .scratch = scratch.data()},
                               runner());
    (is_later ? few_bits : digest).Add(y);
  }
  Expect(digest, 0xaac97cb6a2d3c157);
  Expect(few_bits, 0xc5ea48acb321a866);
}

TEST_P(GoldenBits, Elementwise) {
  constexpr int64_t kRows = 3;
  constexpr int64_t kDim = 141;
  constexpr int64_t kCount = kRows * kDim;
  const Floats x = WideFloats(2 * kCount, 21);
  const Floats w = RandomFloats(kDim, 22);
  Digest digest;
  Floats y(static_cast<size_t>(kCount));
  backend().rms_norm(x.data(), w.data(), 1, 1e-6F, kRows, kDim, y.data(), runner());
  digest.Add(y);
  for (const Activation activation :
       {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kQuickGelu,
        Activation::kRelu, Activation::kRelu2}) {
    backend().gated_mul(activation, x.data(), kRows, kDim, y.data(), runner());
    digest.Add(y);
  }
  backend().soft_cap(x.data(), 3.5F, kRows, kDim, y.data(), runner());
  digest.Add(y);
  const int64_t greatest = backend().arg_max(x.data(), kCount);
  digest.Add(&greatest, sizeof(greatest));
  backend().exp2_scaled(x.data(), kCount, x[static_cast<size_t>(greatest)], 1.7F, y.data());
  digest.Add(y);
  Expect(digest, 0xce7c4aaf8ed046e3);
}

// One sequence behind a shared prefix of a segment, one with a window, and of each several rows.
CaseSpec AttentionSpec(DType dtype, DType value_dtype, bool inline_keys) {
  CaseSpec spec;
  spec.dtype = dtype;
  spec.value_dtype = value_dtype;
  spec.q_dtype = dtype == DType::kF16 ? DType::kF16 : DType::kF32;
  spec.kv_heads = 2;
  spec.group = 3;
  spec.qk_dim = 40;
  spec.v_dim = 24;
  spec.page_size = inline_keys ? 48 : 32;
  spec.rotary_dim = 20;
  spec.interleaved = inline_keys;
  spec.inline_keys = inline_keys;
  spec.soft_cap = inline_keys ? 20.0F : 0.0F;
  spec.head_sinks = inline_keys;
  spec.sharpness = 4;
  spec.sequences = {
      {.content = 1, .base = 300, .rows = 3, .prefixes = {{1000, 1}}},
      {.content = 2, .base = 290, .rows = 5, .prefixes = {{1000, 1}}},
      {.content = 3, .base = 270, .rows = 9, .window = {.window = 100, .sinks = 4}},
  };
  return spec;
}

void AddAttention(const CaseSpec& spec, const Backend& backend, ParallelRunner& runner,
                  Digest* digest) {
  const CaseOutput output = AttentionCase(spec).Run(backend, runner);
  for (size_t i = 0; i < output.o.size(); ++i) {
    digest->Add(output.o[i].data(), output.o[i].size());  // a NaN of it has one payload
    digest->Add(output.lse[i]);
  }
}

Digest OfAttention(const Backend& backend, DType dtype, DType value_dtype, ParallelRunner& runner) {
  Digest digest;
  for (const bool inline_keys : {false, true}) {
    AddAttention(AttentionSpec(dtype, value_dtype, inline_keys), backend, runner, &digest);
  }
  CaseSpec latent = AttentionSpec(dtype, dtype, false);
  latent.value_dtype.reset();
  latent.latent = true;
  latent.kv_heads = 1;
  latent.group = 16;
  latent.qk_dim = 48;
  latent.v_dim = 32;
  latent.rotary_dim = 16;
  AddAttention(latent, backend, runner, &digest);
  return digest;
}

TEST_P(GoldenBits, AttentionOfFloat32) {
  Expect(OfAttention(backend(), DType::kF32, DType::kF32, runner()), 0x4f2ac38db56043c3);
}
TEST_P(GoldenBits, AttentionOfFloat16) {
  Expect(OfAttention(backend(), DType::kF16, DType::kF16, runner()), 0x5144a22b14d90fb7);
}
TEST_P(GoldenBits, AttentionOfBfloat16) {
  Expect(OfAttention(backend(), DType::kBF16, DType::kBF16, runner()), 0x04d88dc578a452be);
}
TEST_P(GoldenBits, AttentionOfInt8) {
  Expect(OfAttention(backend(), DType::kI8, DType::kI8, runner()), 0x0bfe361e94049bb3);
}
TEST_P(GoldenBits, AttentionOfFloat8AndInt8) {
  Expect(OfAttention(backend(), DType::kF8E4M3, DType::kI8, runner()), 0x97f6ba7a257d6d7f);
}
TEST_P(GoldenBits, AttentionOfInt8AndFloat8) {
  Expect(OfAttention(backend(), DType::kI8, DType::kF8E4M3, runner()), 0x1cc3f10f2e21bc7e);
}

TEST_P(GoldenBits, Merge) {
  constexpr int64_t kRows = 7;
  constexpr int kHeads = 3;
  constexpr int kDim = 37;
  Floats o = RandomFloats(kRows * kHeads * kDim, 31);
  Floats lse = RandomFloats(kRows * kHeads, 32, -20, 20);
  const Floats other_o = RandomFloats(kRows * kHeads * kDim, 33);
  const Floats other_lse = RandomFloats(kRows * kHeads, 34, -20, 20);
  backend().merge_attention({.row_count = kRows,
                             .head_count = kHeads,
                             .dim = kDim,
                             .o = {o.data(), DType::kF32, kHeads * kDim, kDim},
                             .lse = lse.data(),
                             .lse_row_stride = kHeads,
                             .other_o = {other_o.data(), DType::kF32, kHeads * kDim, kDim},
                             .other_lse = other_lse.data(),
                             .other_lse_row_stride = kHeads},
                            runner());
  Digest digest;
  digest.Add(o);
  digest.Add(lse);
  Expect(digest, 0x162329493016b7ad);
}

// Rotated keys, and values, in the bytes of pages.
TEST_P(GoldenBits, Append) {
  constexpr int64_t kRows = 40;
  constexpr int kHeads = 2;
  constexpr int kDim = 24;
  constexpr int64_t kPairs = 10;
  const Floats k = RandomFloats(kRows * kHeads * kDim, 41);
  const Floats v = RandomFloats(kRows * kHeads * kDim, 42);
  const Floats cos = RandomFloats(kRows * kPairs, 43);
  const Floats sin = RandomFloats(kRows * kPairs, 44);
  std::vector<RotaryAngles> angles;
  std::vector<AppendTarget> targets;
  std::vector<uint8_t> opens;
  for (int32_t row = 0; row < kRows; ++row) {
    angles.push_back({cos.data() + row * kPairs, sin.data() + row * kPairs});
    targets.push_back({row / 16, row % 16});
    opens.push_back(row % 16 == 0 ? 1 : 0);
  }
  Digest digest;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kI8, DType::kF8E4M3}) {
    KVPages pages{{dtype, kHeads, kDim, kDim, 16}};
    std::vector<std::byte> memory(3 * pages.layout.page_bytes());
    std::vector<uint8_t> flags(3);
    pages.base = memory.data();
    pages.v_nonfinite = flags.data();
    backend().append_kv({.pages = pages,
                         .row_count = kRows,
                         .k = {k.data(), DType::kF32, kHeads * kDim, kDim},
                         .v = {v.data(), DType::kF32, kHeads * kDim, kDim},
                         .rotary = {angles.data(), 2 * kPairs, dtype == DType::kF16},
                         .targets = targets.data(),
                         .opens_tile = opens.data()},
                        runner());
    digest.Add(memory.data(), memory.size());
  }
  Expect(digest, 0x81aaf7ba362a593c);
}

TEST_P(GoldenBits, RecurrentLayers) {
  constexpr int64_t kRows = 12;
  Digest digest;
  for (const bool delta_rule : {false, true}) {
    const MatrixStateShape shape{4, 2, 24, 17, delta_rule};
    Floats inputs = RandomFloats(kRows * shape.input_size(), 51, -0.25, 0.25);
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t i = shape.decay_offset(); i < shape.input_size(); ++i)
        inputs[static_cast<size_t>(row * shape.input_size() + i)] += 0.5F;
    }
    const Floats q = RandomFloats(kRows * shape.key_head_count * shape.key_dim, 52);
    const Floats before = RandomFloats(shape.state_size(), 53);
    Floats after(before.size());
    Floats o(static_cast<size_t>(kRows * shape.head_count * shape.value_dim));
    const RecurrencePiece piece{0, kRows, before.data(), after.data()};
    const RecurrenceSequence sequence{0, 1};
    backend().recurrence->advance_matrix({.shape = shape,
                                          .batch = {{&sequence, 1}, &piece},
                                          .inputs = inputs.data(),
                                          .q = q.data(),
                                          .scale = 0.37F,
                                          .o = o.data()},
                                         runner());
    digest.Add(o);
    digest.Add(after);
  }
  const ConvolutionShape shape{.channel_count = 37, .width = 4};
  const Floats x = RandomFloats(kRows * shape.channel_count, 54);
  const Floats weight = RandomFloats(shape.channel_count * shape.width, 55);
  Floats after(static_cast<size_t>(shape.state_size()));
  Floats y(x.size());
  const RecurrencePiece piece{0, kRows, nullptr, after.data()};
  const RecurrenceSequence sequence{0, 1};
  backend().recurrence->convolve({.shape = shape,
                                  .batch = {{&sequence, 1}, &piece},
                                  .x = x.data(),
                                  .weight = weight.data(),
                                  .silu = true,
                                  .y = y.data()},
                                 runner());
  digest.Add(y);
  digest.Add(after);
  Expect(digest, 0xd5293ce02d9039d7);
}

INSTANTIATE_TEST_SUITE_P(Paths, GoldenBits, testing::ValuesIn(EqualPaths()),
                         [](const auto& param) { return std::string(param.param->name); });

}  // namespace
}  // namespace quire
