#include "kernels/recurrence.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "base/testing/host_float_environment.h"
#include "kernels/backend.h"
#include "kernels/reference/recurrence.h"
#include "kernels/testing/random_floats.h"

namespace quire {
namespace {

using Floats = std::vector<float>;

bool SameBits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

reference::Bounded ToBounded(const Floats& values) {
  reference::Bounded bounded;
  for (const float value : values) {
    bounded.values.push_back(value);
    bounded.magnitudes.push_back(std::abs(value));
  }
  return bounded;
}

// `roundings`: how many each number has seen at most.
void ExpectWithin(const Floats& got, const reference::Bounded& expected, double roundings) {
  ASSERT_EQ(got.size(), expected.values.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const double bound = roundings * 0x1p-24 * expected.magnitudes[i] + 1e-37;
    ASSERT_NEAR(got[i], expected.values[i], bound) << "element " << i;
  }
}

// The tokens of one sequence, run from a state in pieces.
struct MatrixCase {
  MatrixStateShape shape;
  Floats inputs, q, state;
  int64_t row_count = 0;
};

MatrixCase MakeCase(const MatrixStateShape& shape, int64_t row_count, uint64_t seed) {
  MatrixCase c{.shape = shape,
               .inputs = RandomFloats(row_count * shape.input_size(), seed),
               .q = RandomFloats(row_count * shape.key_head_count * shape.key_dim, seed + 1),
               .state = RandomFloats(shape.state_size(), seed + 2),
               .row_count = row_count};
  RandomSequence random(seed + 3);
  for (int64_t r = 0; r < row_count; ++r) {
    float* const row = c.inputs.data() + r * shape.input_size();
    // Keys of about unit length, as models have them: the delta rule then contracts.
    for (int64_t i = 0; i < shape.value_offset(); ++i)
      row[i] /= static_cast<float>(std::sqrt(static_cast<double>(shape.key_dim) / 3));
    for (int64_t h = 0; h < shape.head_count; ++h) {
      row[shape.decay_offset() + h] = static_cast<float>(random.Uniform(0.5, 1));
      if (shape.delta_rule) row[shape.beta_offset() + h] = static_cast<float>(random.Uniform());
    }
  }
  return c;
}

struct MatrixRun {
  Floats o;
  std::vector<Floats> states;  // after each piece
};

// `cuts`: rows after each piece. A null `start` begins from nothing.
MatrixRun RunMatrix(const Backend& backend, const MatrixCase& c, const std::vector<int64_t>& cuts,
                    bool from_zero, ParallelRunner& runner, bool outputs = true) {
  MatrixRun run;
  const size_t o_size = static_cast<size_t>(c.row_count * c.shape.head_count * c.shape.value_dim);
  run.o.assign(o_size, NAN);
  run.states.assign(cuts.size(), Floats(c.state.size(), NAN));
  std::vector<RecurrencePiece> pieces;
  int64_t row = 0;
  for (size_t p = 0; p < cuts.size(); ++p) {
    const float* const before = p > 0 ? run.states[p - 1].data() : c.state.data();
    pieces.push_back({.first_row = row,
                      .row_count = cuts[p] - row,
                      .from = p == 0 && from_zero ? nullptr : before,
                      .to = run.states[p].data()});
    row = cuts[p];
  }
  const RecurrenceSequence sequence{0, static_cast<int64_t>(pieces.size())};
  backend.recurrence->advance_matrix({.shape = c.shape,
                                      .batch = {{&sequence, 1}, pieces.data()},
                                      .inputs = c.inputs.data(),
                                      .q = outputs ? c.q.data() : nullptr,
                                      .scale = 0.37F,
                                      .o = run.o.data()},
                                     runner);
  return run;
}

std::vector<MatrixStateShape> Shapes() {
  std::vector<MatrixStateShape> shapes;
  for (const bool delta : {false, true}) {
    shapes.push_back({1, 1, 1, 1, delta});
    shapes.push_back({4, 4, 16, 16, delta});
    shapes.push_back({4, 2, 24, 17, delta});
    shapes.push_back({6, 2, 7, 64, delta});
    shapes.push_back({2, 1, 128, 100, delta});
    shapes.push_back({3, 3, 33, 131, delta});
  }
  return shapes;
}

class RecurrenceTest : public testing::TestWithParam<const Backend*> {
 protected:
  const Backend& backend() const { return *GetParam(); }
  const Backend& scalar_ = *FindBackend("scalar").value();
  const std::shared_ptr<ParallelRunner> pool_ = CreateThreadPool(3).value();
  const std::shared_ptr<ParallelRunner> single_ = CreateThreadPool(1).value();
};

TEST_P(RecurrenceTest, MatrixAgreesWithTheReference) {
  for (const MatrixStateShape& shape : Shapes()) {
    const MatrixCase c = MakeCase(shape, 9, 1);
    for (const bool from_zero : {false, true}) {
      const MatrixRun run = RunMatrix(backend(), c, {9}, from_zero, *pool_);
      const Floats start = from_zero ? Floats(c.state.size(), 0.0F) : c.state;
      const reference::MatrixResult expected =
          reference::AdvanceMatrix(shape, ToBounded(start), c.inputs.data(), c.q.data(), 0.37, 9);
      // Each token adds a product, an fma and, with the delta rule, a chain over the keys.
      const double per_token = 4 + (shape.delta_rule ? static_cast<double>(shape.key_dim) : 0);
      ExpectWithin(run.states[0], expected.state, 9 * per_token);
      ExpectWithin(run.o, expected.o, 9 * per_token + static_cast<double>(shape.key_dim) + 2);
    }
  }
}

TEST_P(RecurrenceTest, MatrixIsTheSameOnEveryPathAndNumberOfThreads) {
  for (const MatrixStateShape& shape : Shapes()) {
    const MatrixCase c = MakeCase(shape, 20, 2);
    const MatrixRun run = RunMatrix(backend(), c, {20}, false, *pool_);
    const MatrixRun scalar = RunMatrix(scalar_, c, {20}, false, *single_);
    EXPECT_TRUE(SameBits(run.o, scalar.o));
    EXPECT_TRUE(SameBits(run.states[0], scalar.states[0]));
  }
}

TEST_P(RecurrenceTest, MatrixDoesNotDependOnTheCut) {
  for (const MatrixStateShape& shape : Shapes()) {
    const MatrixCase c = MakeCase(shape, 12, 3);
    for (const bool from_zero : {false, true}) {
      const MatrixRun whole = RunMatrix(backend(), c, {12}, from_zero, *pool_);
      for (const std::vector<int64_t>& cuts :
           {std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, {7, 12}, {1, 11, 12}}) {
        const MatrixRun cut = RunMatrix(backend(), c, cuts, from_zero, *pool_);
        EXPECT_TRUE(SameBits(cut.o, whole.o));
        EXPECT_TRUE(SameBits(cut.states.back(), whole.states[0]));
      }
      const MatrixRun states = RunMatrix(backend(), c, {5, 12}, from_zero, *pool_, false);
      EXPECT_TRUE(SameBits(states.states[1], whole.states[0])) << "a replay has no queries";
      EXPECT_TRUE(std::isnan(states.o[0])) << "and writes no outputs";
    }
  }
}

TEST_P(RecurrenceTest, MatrixOfABatchIsThatOfEachSequenceAlone) {
  for (const MatrixStateShape& shape : Shapes()) {
    const MatrixCase c = MakeCase(shape, 10, 4);  // three sequences of 5, 1 and 4 tokens
    const int64_t lengths[] = {5, 1, 4};
    std::vector<Floats> states(3, Floats(c.state.size(), NAN));
    std::vector<RecurrencePiece> pieces;
    std::vector<RecurrenceSequence> sequences;
    int64_t row = 0;
    for (size_t s = 0; s < 3; ++s) {
      sequences.push_back({static_cast<int64_t>(s), 1});
      pieces.push_back({row, lengths[s], s == 1 ? nullptr : c.state.data(), states[s].data()});
      row += lengths[s];
    }
    Floats o(static_cast<size_t>(10 * shape.head_count * shape.value_dim), NAN);
    backend().recurrence->advance_matrix({.shape = shape,
                                          .batch = {sequences, pieces.data()},
                                          .inputs = c.inputs.data(),
                                          .q = c.q.data(),
                                          .scale = 0.37F,
                                          .o = o.data()},
                                         *pool_);
    for (size_t s = 0; s < 3; ++s) {
      const int64_t first = pieces[s].first_row;
      MatrixCase alone = c;
      alone.row_count = lengths[s];
      alone.inputs.erase(alone.inputs.begin(), alone.inputs.begin() + first * shape.input_size());
      alone.q.erase(alone.q.begin(),
                    alone.q.begin() + first * shape.key_head_count * shape.key_dim);
      const MatrixRun run = RunMatrix(backend(), alone, {lengths[s]}, s == 1, *single_);
      EXPECT_TRUE(SameBits(run.states[0], states[s]));
      const int64_t width = shape.head_count * shape.value_dim;
      const Floats rows(o.begin() + first * width, o.begin() + (first + lengths[s]) * width);
      EXPECT_TRUE(SameBits(run.o, rows));
    }
  }
}

TEST_P(RecurrenceTest, TheCallersFloatEnvironmentDoesNotMatter) {
  MatrixCase c = MakeCase({2, 2, 8, 16, true}, 6, 5);
  for (float& value : c.inputs) value *= 1e-19F;  // products are subnormal
  for (float& value : c.state) value *= 1e-38F;
  const MatrixRun plain = RunMatrix(backend(), c, {6}, false, *single_);
  const HostFloatEnvironment host(kFlushSubnormals);
  const MatrixRun flushed = RunMatrix(backend(), c, {6}, false, *single_);
  EXPECT_TRUE(SameBits(plain.states[0], flushed.states[0]));
  EXPECT_TRUE(SameBits(plain.o, flushed.o));
}

// ---------------------------------------------------------------------- convolution

struct ConvolutionRun {
  Floats y;
  Floats state;
};

ConvolutionRun RunConvolution(const Backend& backend, const ConvolutionShape& shape,
                              const Floats* before, const Floats& x, const Floats& weight,
                              const Floats* bias, bool silu, const std::vector<int64_t>& cuts,
                              ParallelRunner& runner) {
  ConvolutionRun run{.y = Floats(x.size(), NAN), .state = {}};
  std::vector<Floats> states(cuts.size(), Floats(static_cast<size_t>(shape.state_size()), NAN));
  std::vector<RecurrencePiece> pieces;
  int64_t row = 0;
  for (size_t p = 0; p < cuts.size(); ++p) {
    const float* from = before == nullptr ? nullptr : before->data();
    if (p > 0) from = states[p - 1].data();
    pieces.push_back({row, cuts[p] - row, from, states[p].data()});
    row = cuts[p];
  }
  const RecurrenceSequence sequence{0, static_cast<int64_t>(pieces.size())};
  backend.recurrence->convolve({.shape = shape,
                                .batch = {{&sequence, 1}, pieces.data()},
                                .x = x.data(),
                                .weight = weight.data(),
                                .bias = bias == nullptr ? nullptr : bias->data(),
                                .silu = silu,
                                .y = run.y.data()},
                               runner);
  run.state = states.back();
  return run;
}

TEST_P(RecurrenceTest, ConvolutionAgreesWithTheReferenceAndDoesNotDependOnTheCut) {
  for (const int64_t width : {2, 3, 4, 7}) {
    for (const int64_t channels : {1, 15, 16, 40, 259}) {
      const ConvolutionShape shape{channels, width};
      const Floats x = RandomFloats(11 * channels, 6, -3, 3);
      const Floats before = RandomFloats(shape.state_size(), 7, -3, 3);
      const Floats zeros(before.size(), 0.0F);
      const Floats weight = RandomFloats(channels * width, 8);
      const Floats bias = RandomFloats(channels, 9);
      for (const bool silu : {false, true}) {
        for (const bool from_zero : {false, true}) {
          const Floats* const start = from_zero ? nullptr : &before;
          const Floats* const b = from_zero ? nullptr : &bias;
          const auto run = [&](const Backend& path, const std::vector<int64_t>& cuts) {
            return RunConvolution(path, shape, start, x, weight, b, silu, cuts, *pool_);
          };
          const ConvolutionRun whole = run(backend(), {11});
          const reference::Bounded expected =
              reference::Convolve(shape, from_zero ? zeros.data() : before.data(), x.data(),
                                  weight.data(), b == nullptr ? nullptr : b->data(), silu, 11);
          ExpectWithin(whole.y, expected, static_cast<double>(width) + 8);
          const ConvolutionRun steps = run(backend(), {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
          EXPECT_TRUE(SameBits(whole.y, steps.y));
          EXPECT_TRUE(SameBits(whole.state, steps.state));
          const ConvolutionRun scalar = run(scalar_, {4, 11});
          EXPECT_TRUE(SameBits(whole.y, scalar.y));
          const Floats last(x.end() - shape.state_size(), x.end());
          EXPECT_TRUE(SameBits(whole.state, last)) << "the state is the last inputs";
        }
      }
    }
  }
}

// ---------------------------------------------------------------------- steps row by row

TEST_P(RecurrenceTest, DiscretizeAgreesWithTheReference) {
  for (const int64_t heads : {1, 16, 19}) {
    const Floats x = RandomFloats(3 * heads * 5, 10);
    Floats dt = RandomFloats(3 * heads, 11, 0, 4);
    Floats a = RandomFloats(heads, 12, -16, 0.5);
    a[0] = -1000;
    const int64_t stride = heads * 6 + 2;
    Floats out(static_cast<size_t>(3 * stride), NAN);
    const DiscretizeArgs args{
        3, heads, 5, x.data(), dt.data(), a.data(), out.data(), out.data() + heads * 5, stride};
    backend().recurrence->discretize(args, *pool_);
    for (int64_t r = 0; r < 3; ++r) {
      for (int64_t h = 0; h < heads; ++h) {
        const double step = dt[static_cast<size_t>(r * heads + h)];
        const double exponent = static_cast<float>(step * a[static_cast<size_t>(h)]);
        const double decay = std::exp(exponent);
        EXPECT_NEAR(out[static_cast<size_t>(r * stride + heads * 5 + h)], decay,
                    5 * 0x1p-24 * decay + 1e-37);
        for (int64_t i = 0; i < 5; ++i) {
          const float value = x[static_cast<size_t>((r * heads + h) * 5 + i)];
          EXPECT_EQ(out[static_cast<size_t>(r * stride + h * 5 + i)],
                    dt[static_cast<size_t>(r * heads + h)] * value);
        }
      }
      EXPECT_TRUE(std::isnan(out[static_cast<size_t>(r * stride + heads * 6)]));
    }
    Floats scalar(out.size(), NAN);
    scalar_.recurrence->discretize({3, heads, 5, x.data(), dt.data(), a.data(), scalar.data(),
                                    scalar.data() + heads * 5, stride},
                                   *single_);
    for (int64_t r = 0; r < 3; ++r) {
      EXPECT_EQ(0, std::memcmp(scalar.data() + r * stride, out.data() + r * stride,
                               static_cast<size_t>(heads * 6) * sizeof(float)));
    }
  }
}

TEST_P(RecurrenceTest, SkipIsOneFma) {
  const Floats x = RandomFloats(4 * 3 * 21, 13);
  const Floats d = RandomFloats(3, 14);
  const Floats before = RandomFloats(4 * 3 * 21, 15);
  Floats o = before;
  backend().recurrence->add_skip({4, 3, 21, x.data(), d.data(), o.data()}, *pool_);
  for (size_t i = 0; i < o.size(); ++i) EXPECT_EQ(o[i], std::fma(d[i / 21 % 3], x[i], before[i]));
}

TEST_P(RecurrenceTest, RowsAreConverted) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Floats x = RandomFloats(2 * 40, 16);
    Floats stored(40 * 2);
    ConvertElements(x.data(), DType::kF32, stored.data(), dtype, 2 * 40);
    Floats wide(2 * 50, NAN);
    backend().recurrence->convert_rows(
        {2, 37, stored.data(), dtype, 40, wide.data(), DType::kF32, 50}, *pool_);
    Floats expected(2 * 40);
    ConvertElements(stored.data(), dtype, expected.data(), DType::kF32, 2 * 40);
    for (size_t r = 0; r < 2; ++r) {
      for (size_t i = 0; i < 50; ++i) {
        if (i < 37) {
          EXPECT_EQ(wide[r * 50 + i], expected[r * 40 + i]);
        } else {
          EXPECT_TRUE(std::isnan(wide[r * 50 + i]));
        }
      }
    }
    Floats narrow(40 * 2, 0.0F);
    backend().recurrence->convert_rows({2, 37, x.data(), DType::kF32, 40, narrow.data(), dtype, 40},
                                       *pool_);
    const size_t bytes = 37 * static_cast<size_t>(DTypeBytes(dtype));
    EXPECT_EQ(0, std::memcmp(narrow.data(), stored.data(), bytes));
  }
}

std::string PathName(const testing::TestParamInfo<const Backend*>& info) {
  return std::string(info.param->name);
}

INSTANTIATE_TEST_SUITE_P(Paths, RecurrenceTest,
                         testing::ValuesIn(Backends().begin(), Backends().end()), PathName);

}  // namespace
}  // namespace quire
