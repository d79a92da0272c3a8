// Attention of every path against plain loops in double, and against itself: the same tokens must
// give the same bits however they lie in memory, however they are batched and whichever worker
// computes them.
#include "kernels/reference/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>

#include "base/random.h"
#include "base/testing/host_float_environment.h"
#include "kernels/cpu/paths.h"
#include "kernels/testing/attention_case.h"
#include "tensor/half.h"

namespace quire {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

ParallelRunner& Pool(int workers) {
  static std::map<int, std::shared_ptr<ParallelRunner>> pools;
  std::shared_ptr<ParallelRunner>& pool = pools[workers];
  if (pool == nullptr) pool = CreateThreadPool(workers).value();
  return *pool;
}

const Backend& BestBackend() { return **FindBackend(""); }  // or that of QUIRE_KERNELS

// Whether keys are multiplied as bfloat16: int8 is, once it has been rotated.
bool RoundsQueries(const CaseSpec& spec) {
  if (spec.dtype == DType::kI8) return spec.inline_keys && spec.rotary_dim > 0;
  return ComputeDType(spec.dtype) == DType::kBF16;
}

// Whether the path multiplies bfloat16 in an order of its own, so that its bits are.
bool HasOwnBits(const Backend& backend, const CaseSpec& spec) {
  const DType values = spec.value_dtype.value_or(spec.dtype);
  const bool pairs =
      RoundsQueries(spec) || (values != DType::kI8 && ComputeDType(values) == DType::kBF16);
  return pairs && (backend.name == "avx512_bf16" || backend.name == "avx512_amx");
}

void ExpectSame(const CaseOutput& a, const CaseOutput& b, const std::string& what) {
  ASSERT_EQ(a.o.size(), b.o.size());
  for (size_t s = 0; s < a.o.size(); ++s) {
    ASSERT_EQ(a.o[s].size(), b.o[s].size());
    EXPECT_EQ(std::memcmp(a.o[s].data(), b.o[s].data(), a.o[s].size()), 0)
        << what << ": o of sequence " << s;
    EXPECT_EQ(std::memcmp(a.lse[s].data(), b.lse[s].data(), a.lse[s].size() * sizeof(float)), 0)
        << what << ": lse of sequence " << s;
  }
}

double OutputAt(const std::vector<std::byte>& o, DType dtype, size_t index) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, o.data() + index * sizeof value, sizeof value);
    return static_cast<double>(value);
  }
  uint16_t bits;
  std::memcpy(&bits, o.data() + index * sizeof bits, sizeof bits);
  return static_cast<double>(dtype == DType::kBF16 ? Bf16ToF32(bits) : F16ToF32(bits));
}

double UnitRoundoff(DType dtype) {
  if (dtype == DType::kF32) return 0x1p-24;
  return dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
}

// Errors that the arithmetic may make. A score is off by at most `score` (in units of log2): q, and
// with inline keys k, are rounded to the compute type, a chain of qk_dim steps and the rotation
// round in float32. Each weight is then off by a factor 2^(2 score), the maximum and the rounding
// of p included; o is a chain over 256 keys, folded once per segment. Weights of int8 values are
// off by half a step of the segment's largest instead.
struct Bounds {
  double score;
  double weight;
  double step = 0;

  Bounds(const CaseSpec& spec, double score_scale, double segments) {
    const double u = 0x1p-24;
    double rounding = (spec.qk_dim + 16) * u;
    if (RoundsQueries(spec)) {
      rounding += 0x1p-8 * (spec.inline_keys ? 2.01 : 1.01);
    } else if (spec.dtype == DType::kI8) {  // half a step of the largest element, in all of them
      rounding += std::sqrt(spec.qk_dim) / (2 * 29000.0);
    }
    score = score_scale * rounding;
    score += static_cast<double>(spec.soft_cap) * 8 * u;  // of tanh, in base 2
    weight = std::expm1(2 * score * 0.6931471805599453) + (300 + 8 * segments) * u;
    const DType values = spec.value_dtype.value_or(spec.dtype);
    if (values == DType::kI8) {
      step = 0.501 / 32767;
    } else if (ComputeDType(values) == DType::kBF16) {
      weight += 0x1p-8;
    }
  }
};

void ExpectMatchesReference(const AttentionCase& test, const CaseOutput& output,
                            const std::string& what) {
  const CaseSpec& spec = test.spec();
  const ReferenceOutput reference = ReferenceAttention(test.args());
  const auto heads = static_cast<size_t>(test.args().num_qo_heads);
  const auto v_dim = static_cast<size_t>(spec.v_dim);
  // Sequences of the plan and of the spec: found by first row.
  for (const AttentionSequence& sequence : test.args().sequences) {
    const size_t s = test.SpecIndex(sequence);
    const double segments = static_cast<double>(sequence.base + sequence.row_count) / 256 + 1;
    for (size_t i = 0; i < static_cast<size_t>(sequence.row_count) * heads; ++i) {
      const size_t row = static_cast<size_t>(sequence.first_row) * heads + i;
      const Bounds bounds(spec, reference.score_scale[row], segments);
      const double lse = static_cast<double>(output.lse[s][i]);
      if (std::isinf(reference.lse[row])) {
        ASSERT_EQ(lse, reference.lse[row]) << what;
      } else {
        ASSERT_NEAR(lse, reference.lse[row],
                    bounds.score + 0x1p-22 * (std::fabs(lse) + segments + 300))
            << what << ": lse of sequence " << s << ", row and head " << i;
      }
      for (size_t d = 0; d < v_dim; ++d) {
        const double expected = reference.o[row * v_dim + d];
        const double bound = 2 * bounds.weight * reference.value_scale[row * v_dim + d] +
                             bounds.step * reference.value_peak[row] +
                             UnitRoundoff(spec.o_dtype) * std::fabs(expected) + 1e-7;
        ASSERT_NEAR(OutputAt(output.o[s], spec.o_dtype, i * v_dim + d), expected, bound)
            << what << ": sequence " << s << ", row and head " << i << ", dimension " << d;
      }
    }
  }
}

template <typename T, size_t N>
T Pick(RandomSequence& random, const T (&values)[N]) {
  return values[random.Below(static_cast<int64_t>(N))];
}

CaseSpec RandomSpec(uint64_t seed) {
  RandomSequence random(seed);
  CaseSpec spec;
  spec.dtype = Pick(random, {DType::kF32, DType::kF16, DType::kBF16});
  spec.q_dtype = Pick(random, {DType::kF32, DType::kF16, DType::kBF16});
  spec.o_dtype = Pick(random, {DType::kF32, DType::kF32, DType::kF16, DType::kBF16});
  const std::pair<int, int> dims[] = {{16, 16}, {17, 17}, {64, 64},   {80, 80},
                                      {96, 96}, {40, 24}, {128, 128}, {192, 128}};
  const std::pair<int, int> dim = Pick(random, dims);
  spec.qk_dim = dim.first;
  spec.v_dim = dim.second;
  spec.group = Pick(random, {1, 2, 3, 4, 5, 7, 8, 17});
  spec.kv_heads = static_cast<int>(random.Below(spec.group > 4 ? 3 : 9)) + 1;
  spec.page_size = Pick(random, {1, 3, 7, 16, 32, 48, 64, 256});
  if (random.Below(2) == 0) {
    spec.rotary_dim = random.Below(3) == 0 ? spec.qk_dim / 4 * 2 : spec.qk_dim / 2 * 2;
    spec.interleaved = random.Below(2) == 0;
    spec.inline_keys = random.Below(2) == 0;
  }
  spec.sharpness = Pick(random, {1.0F, 1.0F, 4.0F, 30.0F});
  spec.fork_probability = Pick(random, {0.0, 0.01, 0.2});
  spec.junk =
      Pick(random, {0.0F, 1e3F, -1e30F, kInfinity, std::numeric_limits<float>::quiet_NaN()});
  spec.layout_seed = seed;
  const int64_t count = random.Below(4) + 1;
  const bool shares = random.Below(3) == 0;
  for (int64_t i = 0; i < count; ++i) {
    SequenceSpec sequence;
    sequence.content = i;
    const int64_t length = Pick(random, {1, 2, 15, 16, 17, 31, 100, 255, 256, 257, 300, 513, 620});
    sequence.rows = std::min<int64_t>(length, Pick(random, {1, 1, 1, 2, 5, 40}));
    sequence.base = length - sequence.rows;
    if (shares && i != 1) {  // the second sequence of the batch stands alone
      sequence.prefixes = {{1000, 1}};
      sequence.base += kSegmentPositions;
      if (i >= 2) {
        sequence.prefixes.push_back({2000, 2});
        sequence.base += kSegmentPositions;
      }
    }
    spec.sequences.push_back(sequence);
  }
  spec.cached_only = random.Below(6) == 0;
  if (random.Below(2) == 0) {
    spec.dtype = Pick(random, {DType::kI8, DType::kF8E4M3, spec.dtype});
    spec.value_dtype = Pick(random, {DType::kI8, DType::kF8E4M3, DType::kBF16, DType::kF32});
  }
  return spec;
}

// Windows and caps on top, in two of three.
CaseSpec RandomWindowSpec(uint64_t seed) {
  CaseSpec spec = RandomSpec(seed);
  RandomSequence random(seed, 1);
  if (random.Below(2) == 0)
    spec.layer_window = Pick(random, {int64_t{1}, int64_t{2}, int64_t{17}, int64_t{64},
                                      int64_t{256}, int64_t{300}, int64_t{1000}});
  if (random.Below(2) == 0) spec.soft_cap = Pick(random, {0.5F, 3.0F, 50.0F});
  spec.head_sinks = random.Below(2) == 0;
  spec.rotates_sinks = random.Below(3) != 0;
  for (SequenceSpec& sequence : spec.sequences) {
    if (random.Below(3) == 0) continue;
    SequenceWindow& window = sequence.window;
    window.sinks = Pick(random, {int64_t{0}, int64_t{1}, int64_t{4}, int64_t{16}, int64_t{40},
                                 int64_t{256}, int64_t{270}});
    window.window = window.sinks + 1 + random.Below(300);
    if (random.Below(4) != 0) continue;
    // Switched off: what had slid by then stays hidden.
    const int64_t first = std::max<int64_t>(sequence.base - window.sinks, 0);
    window.slid = random.Below(first + 1);
    if (random.Below(2) == 0) window.window = kNoWindow;
  }
  return spec;
}

// The same with a latent layer.
CaseSpec RandomLatentSpec(uint64_t seed) {
  CaseSpec spec = seed % 3 == 0 ? RandomSpec(seed) : RandomWindowSpec(seed);
  RandomSequence random(seed, 2);
  spec.latent = true;
  spec.kv_heads = 1;
  spec.inline_keys = false;
  spec.value_dtype.reset();
  const std::pair<int, int> dims[] = {{48, 32}, {36, 32}, {19, 17}, {20, 5}, {16, 16}, {144, 128}};
  const std::pair<int, int> dim = Pick(random, dims);
  spec.qk_dim = dim.first;
  spec.v_dim = dim.second;
  spec.group = Pick(random, {1, 2, 5, 16, 17, 40});
  spec.rotary_dim = spec.rotary_dim == 0 ? 0 : (spec.qk_dim - spec.v_dim) / 2 * 2;
  return spec;
}

std::string Describe(const CaseSpec& spec, uint64_t seed, const Backend& backend) {
  return "seed " + std::to_string(seed) + ", " + std::string(DTypeName(spec.dtype)) + " and " +
         std::string(DTypeName(spec.value_dtype.value_or(spec.dtype))) + ", page size " +
         std::to_string(spec.page_size) + ", path " + std::string(backend.name);
}

// The scalar path calls fmaf for each lane, so cases are kept small for it.
void ExpectPathsAgree(const CaseSpec& spec, uint64_t seed) {
  const AttentionCase test(spec);
  const CaseOutput expected = test.Run(*Backends().back(), Pool(1));
  ExpectMatchesReference(test, expected, Describe(spec, seed, *Backends().back()));
  for (const Backend* backend : Backends()) {
    const CaseOutput output = test.Run(*backend, Pool(2));
    if (HasOwnBits(*backend, spec)) {
      ExpectMatchesReference(test, output, Describe(spec, seed, *backend));
    } else {
      ExpectSame(output, expected, Describe(spec, seed, *backend));
    }
  }
}

TEST(Attention, EveryPathMatchesTheReferenceAndEachOther) {
  for (uint64_t seed = 1; seed <= 50 && !HasFailure(); ++seed) {
    ExpectPathsAgree(RandomSpec(seed), seed);
    ExpectPathsAgree(RandomWindowSpec(seed + 1000), seed + 1000);
  }
}

TEST(Attention, EveryPathReadsTheValuesOfLatentLayersOutOfTheirKeys) {
  for (uint64_t seed = 1; seed <= 60 && !HasFailure(); ++seed)
    ExpectPathsAgree(RandomLatentSpec(seed), seed);
}

// Where the tokens of a case's first sequence lie, by position.
std::vector<AppendTarget> SlotsOf(const AttentionCase& test) {
  const AttentionSequence& sequence = test.args().sequences[0];
  std::vector<AppendTarget> slots;
  for (const PageRun& run : std::span(sequence.runs, static_cast<size_t>(sequence.run_count))) {
    int64_t entry = 0;
    for (int64_t p = run.begin; p < run.end; ++p) {
      while (entry + 1 < run.entry_count && run.entries[entry + 1].start <= p) ++entry;
      slots.push_back({run.entries[entry].page, static_cast<int32_t>(p % test.spec().page_size)});
    }
  }
  return slots;
}

// The arithmetic is that of a plain layer with the same numbers.
TEST(Attention, ALatentLayerIsAPlainOneWhoseValuesAreItsKeysBeginning) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kI8, DType::kF8E4M3}) {
    for (const int group : {3, 16, 128}) {
      CaseSpec spec;
      spec.dtype = dtype;
      spec.latent = true;
      spec.kv_heads = 1;
      spec.group = group;
      spec.qk_dim = 40;
      spec.v_dim = 40;  // all of it, so that both quantise the same numbers
      spec.sequences = {{.content = 1, .base = 530, .rows = 2}};
      const AttentionCase latent(spec);
      const KVPages& from = latent.args().pages;
      spec.latent = false;
      const AttentionCase plain(spec);
      const KVPages& to = plain.args().pages;
      std::vector<float> k(40);
      std::vector<float> v(40);
      const std::vector<AppendTarget> slots = SlotsOf(latent);
      const std::vector<AppendTarget> other = SlotsOf(plain);
      ASSERT_EQ(slots.size(), other.size());
      for (size_t i = 0; i < slots.size(); ++i) {
        ReadSlot(from, slots[i], DType::kF32, k.data(), v.data());
        ASSERT_EQ(k, v);
        WriteSlot(to, other[i], DType::kF32, k.data(), v.data(), false);
      }
      ExpectSame(latent.Run(BestBackend(), Pool(2)), plain.Run(BestBackend(), Pool(2)),
                 std::string(DTypeName(dtype)) + ", " + std::to_string(group) + " heads");
    }
  }
}

// Rows enough for a tile of the unit that sums bytes: sums of integers are the same on all paths,
// whatever the dimensions' last step, and where sinks have queries of their own.
TEST(Attention, ManyRowsOverInt8HaveTheBitsOfEveryPath) {
  for (uint64_t seed = 1; seed <= 32 && !HasFailure(); ++seed) {
    CaseSpec spec = seed % 4 == 0   ? RandomLatentSpec(seed)
                    : seed % 2 == 0 ? RandomWindowSpec(seed)
                                    : RandomSpec(seed);
    RandomSequence random(seed, 3);
    spec.dtype = DType::kI8;
    spec.value_dtype.reset();
    spec.inline_keys = false;
    if (!spec.latent) {
      const std::pair<int, int> dims[] = {{14, 16}, {16, 16}, {18, 33},   {66, 24},
                                          {80, 80}, {112, 9}, {130, 128}, {128, 128}};
      const std::pair<int, int> dim = Pick(random, dims);
      spec.qk_dim = dim.first;
      spec.v_dim = dim.second;
      spec.rotary_dim = spec.rotary_dim == 0 ? 0 : spec.qk_dim / 4 * 2;
      spec.group = Pick(random, {1, 4, 9});
      spec.kv_heads = 2;
    }
    SequenceSpec& sequence = spec.sequences[0];
    const int64_t end = sequence.base + sequence.rows;
    const int64_t own = end - std::ssize(sequence.prefixes) * kSegmentPositions;
    sequence.rows = std::min<int64_t>(own, Pick(random, {4, 16, 17, 33, 70}));
    sequence.base = end - sequence.rows;
    SequenceWindow& window = sequence.window;
    window.slid = std::min(window.slid, std::max<int64_t>(sequence.base - window.sinks, 0));
    ExpectPathsAgree(spec, seed);
  }
}

// A segment whose codes are all the largest, seen with the largest weights.
TEST(Attention, TheLargestSumsOfInt8Fit) {
  constexpr int kShapes[][3] = {{128, 128, 2}, {576, 512, 2}, {128, 128, 40}, {576, 512, 40}};
  for (const auto& [qk_dim, v_dim, group] : kShapes) {
    CaseSpec spec;
    spec.dtype = DType::kI8;
    spec.latent = true;
    spec.kv_heads = 1;
    spec.group = group;
    spec.qk_dim = qk_dim;
    spec.v_dim = v_dim;
    spec.sequences = {{.content = 1, .base = kSegmentPositions - 1, .rows = 1}};
    const AttentionCase test(spec);
    const std::vector<float> ones(static_cast<size_t>(qk_dim * spec.group), 1.0F);
    for (const AppendTarget& slot : SlotsOf(test)) {
      WriteSlot(test.args().pages, slot, DType::kF32, ones.data(), ones.data(), false);
    }
    for (const Backend* backend : Backends()) {
      const CaseOutput output = test.RunWith(ones.data(), *backend, Pool(1));
      const double score = qk_dim * static_cast<double>(test.args().scale_log2);
      EXPECT_NEAR(static_cast<double>(output.lse[0][0]), score + 8, 1e-4 * score) << backend->name;
      for (size_t d = 0; d < static_cast<size_t>(v_dim); ++d) {
        ASSERT_NEAR(OutputAt(output.o[0], DType::kF32, d), 1, 1e-4) << backend->name << ' ' << d;
      }
    }
  }
}

TEST(Attention, BitsDoNotDependOnWhereTokensLie) {
  for (uint64_t seed = 200; seed < 260; ++seed) {
    CaseSpec spec = seed >= 240     ? RandomLatentSpec(seed)
                    : seed % 2 == 0 ? RandomSpec(seed)
                                    : RandomWindowSpec(seed);
    const CaseOutput expected = AttentionCase(spec).Run(BestBackend(), Pool(1));
    for (const int page_size : {1, 3, 7, 16, 32, 64, 256}) {
      spec.page_size = page_size;
      spec.layout_seed += 1000;
      spec.fork_probability = page_size % 2 == 0 ? 0.02 : 0.3;
      spec.junk = page_size < 10 ? 5.0F : kInfinity;
      ExpectSame(AttentionCase(spec).Run(BestBackend(), Pool(1)), expected,
                 Describe(spec, seed, BestBackend()));
    }
    if (HasFailure()) return;
  }
}

TEST(Attention, BitsDoNotDependOnTheBatchTheSpansOrTheWorkers) {
  for (uint64_t seed = 300; seed < 370; ++seed) {
    CaseSpec spec = seed >= 350     ? RandomLatentSpec(seed)
                    : seed % 2 == 0 ? RandomSpec(seed)
                                    : RandomWindowSpec(seed);
    const CaseOutput expected = AttentionCase(spec).Run(BestBackend(), Pool(1));
    for (const int workers : {2, 3, 5}) {
      ExpectSame(AttentionCase(spec).Run(BestBackend(), Pool(workers)), expected,
                 std::to_string(workers) + " workers, " + Describe(spec, seed, BestBackend()));
    }
    CaseSpec unshared = spec;
    unshared.use_spans = false;
    ExpectSame(AttentionCase(unshared).Run(BestBackend(), Pool(2)), expected,
               "without spans, " + Describe(spec, seed, BestBackend()));
    CaseOutput alone;
    for (const SequenceSpec& sequence : spec.sequences) {
      CaseSpec one = spec;
      one.sequences = {sequence};
      const CaseOutput output = AttentionCase(one).Run(BestBackend(), Pool(3));
      alone.o.push_back(output.o[0]);
      alone.lse.push_back(output.lse[0]);
    }
    ExpectSame(alone, expected, "alone, " + Describe(spec, seed, BestBackend()));
    if (HasFailure()) return;
  }
}

// Rows of one sequence computed in chunks, put together.
CaseOutput InChunks(const AttentionCase& test, int64_t chunk, int workers) {
  const int64_t rows = test.spec().sequences[0].rows;
  CaseOutput joined;
  joined.o.resize(1);
  joined.lse.resize(1);
  for (int64_t row = 0; row < rows; row += chunk) {
    const CaseOutput part =
        test.RunRows(BestBackend(), Pool(workers), row, std::min(chunk, rows - row));
    joined.o[0].insert(joined.o[0].end(), part.o[0].begin(), part.o[0].end());
    joined.lse[0].insert(joined.lse[0].end(), part.lse[0].begin(), part.lse[0].end());
  }
  return joined;
}

TEST(Attention, BitsDoNotDependOnHowAPromptIsCut) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int group : {1, 4}) {
      for (const bool inline_keys : {false, true}) {
        CaseSpec spec;
        spec.dtype = dtype;
        spec.group = group;
        spec.rotary_dim = 32;
        spec.inline_keys = inline_keys;
        spec.junk = 3.0F;
        spec.sequences = {{.content = 1, .base = 37, .rows = 330}};
        const CaseOutput whole = AttentionCase(spec).Run(BestBackend(), Pool(2));
        spec.layout_seed += 1;
        const AttentionCase test(spec);
        for (const int64_t chunk : {1, 5, 16, 63, 256, 300}) {
          ExpectSame(InChunks(test, chunk, chunk % 2 == 0 ? 2 : 1), whole,
                     "chunks of " + std::to_string(chunk));
        }
      }
    }
  }
}

TEST(Attention, BitsOfAWindowDoNotDependOnHowAPromptIsCut) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int64_t sinks : {0, 4, 21}) {
      for (const bool inline_keys : {false, true}) {
        CaseSpec spec;
        spec.dtype = dtype;
        spec.rotary_dim = 32;
        spec.inline_keys = inline_keys;
        spec.junk = 3.0F;
        spec.soft_cap = sinks == 4 ? 20.0F : 0.0F;
        spec.head_sinks = sinks == 21;
        spec.layer_window = sinks == 4 ? 500 : kNoWindow;
        spec.sequences = {{.content = 1,
                           .base = 37,
                           .rows = 660,
                           .prefixes = {},
                           .window = {.window = 100, .sinks = sinks, .slid = 0}}};
        const CaseOutput whole = AttentionCase(spec).Run(BestBackend(), Pool(2));
        spec.layout_seed += 1;
        const AttentionCase test(spec);
        for (const int64_t chunk : {1, 16, 63, 256, 500}) {
          ExpectSame(InChunks(test, chunk, chunk % 2 == 0 ? 2 : 1), whole,
                     "chunks of " + std::to_string(chunk));
        }
      }
    }
  }
}

// A window that nothing has slid out of changes no bit, and what is hidden may be anything.
TEST(Attention, AWindowHidesAndDoesNothingElse) {
  CaseSpec spec;
  spec.rotary_dim = 32;
  spec.fork_probability = 0.0;
  spec.sequences = {{.content = 1, .base = 600, .rows = 3}, {.content = 2, .base = 0, .rows = 90}};
  const CaseOutput plain = AttentionCase(spec).Run(BestBackend(), Pool(2));
  spec.layer_window = 603;
  for (SequenceSpec& sequence : spec.sequences) sequence.window = {.window = 603, .sinks = 9};
  ExpectSame(AttentionCase(spec).Run(BestBackend(), Pool(2)), plain, "a wide window");
  spec.layer_window = 602;
  EXPECT_NE(AttentionCase(spec).Run(BestBackend(), Pool(2)).o[0], plain.o[0]);
  spec.sequences[0].window = {.window = 70, .sinks = 9};
  const CaseOutput narrow = AttentionCase(spec).Run(BestBackend(), Pool(2));
  EXPECT_NE(narrow.o[0], plain.o[0]);
  EXPECT_EQ(narrow.o[1], plain.o[1]);
  // In one page with positions that are seen, on both sides of the gap.
  for (const int64_t hidden : {9, 300, 600 + 1 - 70 + 9 - 1}) {
    spec.specials.push_back({1, hidden, true, std::numeric_limits<float>::quiet_NaN()});
    spec.specials.push_back({1, hidden, false, kInfinity});
  }
  for (const int page_size : {7, 16, 256}) {
    spec.page_size = page_size;
    ExpectSame(AttentionCase(spec).Run(BestBackend(), Pool(2)), narrow, "non-finite where hidden");
  }
}

// Long contexts on few rows: units are cut along segments, in several waves.
TEST(Attention, BitsDoNotDependOnCutsAlongSegments) {
  for (const int64_t rows : {1, 3, 20}) {
    CaseSpec spec;
    spec.dtype = DType::kBF16;
    spec.kv_heads = 3;
    spec.group = 40;
    spec.qk_dim = 16;
    spec.v_dim = 16;
    spec.page_size = 64;
    spec.fork_probability = 0.001;
    spec.sequences = {{.content = 1, .base = 23 * 256 + 17, .rows = rows},
                      {.content = 2, .base = 500, .rows = 1}};
    const AttentionCase test(spec);
    const CaseOutput expected = test.Run(BestBackend(), Pool(1));
    ExpectMatchesReference(test, expected, "one worker");
    for (const int workers : {2, 3, 5}) {
      ExpectSame(test.Run(BestBackend(), Pool(workers)), expected,
                 std::to_string(workers) + " workers");
    }
  }
}

TEST(Attention, SharedSpansOfManyRowsAtSeveralDepths) {
  for (const auto& [rows, windows] : {std::pair<int64_t, bool>{1, false},
                                      {33, false},
                                      {150, false},
                                      {1, true},
                                      {33, true},
                                      {150, true}}) {
    CaseSpec spec;
    spec.dtype = DType::kBF16;
    spec.page_size = 16;
    spec.group = 2;
    for (int64_t i = 0; i < 9; ++i) {
      SequenceSpec sequence = {.content = i, .base = 256 * 5 + 3 + 40 * i, .rows = rows + i};
      if (i != 4) sequence.prefixes = {{100, 2}};
      if (i % 3 == 1 && i != 4) sequence.prefixes.push_back({101, 3});
      if (i % 3 == 2) sequence.prefixes.push_back({102, 4});
      if (i == 5 || i == 8) sequence.prefixes.push_back({103, 5});
      if (windows) sequence.window = {.window = 200 + 150 * i, .sinks = i % 3 * 7};
      spec.sequences.push_back(sequence);
    }
    const AttentionCase test(spec);
    EXPECT_EQ(test.args().shared.size(), 4U);
    const CaseOutput expected = test.Run(BestBackend(), Pool(1));
    if (rows == 1) ExpectMatchesReference(test, expected, "spans");
    for (const int workers : {2, 5}) {
      ExpectSame(test.Run(BestBackend(), Pool(workers)), expected, "workers");
    }
    spec.use_spans = false;
    ExpectSame(AttentionCase(spec).Run(BestBackend(), Pool(2)), expected, "without spans");
  }
}

TEST(Attention, ManyHeadsAndOddGroups) {
  for (const auto& heads :
       {std::pair{128, 1}, std::pair{1, 128}, std::pair{2, 71}, std::pair{32, 4}}) {
    CaseSpec spec;
    spec.dtype = DType::kF32;
    spec.kv_heads = heads.first;
    spec.group = heads.second;
    spec.qk_dim = 18;
    spec.v_dim = 18;
    spec.sequences = {{.content = 1, .base = 300, .rows = 1},
                      {.content = 2, .base = 0, .rows = 14}};
    const AttentionCase test(spec);
    const CaseOutput expected = test.Run(BestBackend(), Pool(1));
    ExpectMatchesReference(test, expected, "heads");
    ExpectSame(test.Run(BestBackend(), Pool(3)), expected, "workers");
  }
}

TEST(Attention, ARowThatSeesNothingIsZero) {
  CaseSpec spec;
  spec.sequences = {{.content = 1, .base = -1, .rows = 2},
                    {.content = 2, .base = 3, .rows = 0},
                    {.content = 3, .base = -1, .rows = 1}};
  const CaseOutput output = AttentionCase(spec).Run(BestBackend(), Pool(2));
  for (size_t i = 0; i < 4 * 32; ++i) {
    EXPECT_EQ(OutputAt(output.o[0], DType::kF32, i), 0.0);
    EXPECT_NE(OutputAt(output.o[0], DType::kF32, 4 * 32 + i), 0.0);
    EXPECT_EQ(OutputAt(output.o[2], DType::kF32, i), 0.0);
  }
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(output.lse[0][i], -kInfinity);
    EXPECT_EQ(output.lse[2][i], -kInfinity);
  }
}

#if QUIRE_EMULATED_AMX
// What the tile unit computes and what its emulation does, which stands for it on other machines.
TEST(Attention, TheEmulationGivesTheBitsOfTheTiles) {
  const Backend& tiles = *Backends().front();
  if (tiles.name != "avx512_amx") GTEST_SKIP() << "this CPU has no tiles";
  for (uint64_t seed = 1; seed <= 60 && !HasFailure(); ++seed) {
    CaseSpec spec = seed % 2 == 0 ? RandomSpec(seed) : RandomWindowSpec(seed);
    spec.dtype = seed % 5 == 0 ? DType::kF8E4M3 : DType::kBF16;
    spec.value_dtype.reset();
    const AttentionCase test(spec);
    ExpectSame(test.Run(tiles, Pool(2)), test.Run(kEmulatedAmxBackend, Pool(2)),
               Describe(spec, seed, tiles));
  }
}
#endif

// A token with Inf or NaN changes no row that does not see it; rows that see it get what IEEE
// gives.
TEST(Attention, NonFiniteTokensStayWhereTheyAreSeen) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int64_t rows : {3, 14, 60}) {
      for (const int page_size : {7, 16}) {
        for (const float value : {kInfinity, -kInfinity, nan}) {
          for (const bool in_value : {false, true}) {
            CaseSpec spec;
            spec.dtype = dtype;
            spec.group = 1;
            spec.page_size = page_size;
            spec.sequences = {{.content = 1, .base = 300 - rows, .rows = rows},
                              {.content = 2, .base = 280, .rows = 1}};
            const CaseOutput clean = AttentionCase(spec).Run(BestBackend(), Pool(2));
            const int64_t position = 300 - rows / 2 - 1;
            spec.specials = {{1, position, in_value, value}};
            spec.fork_probability = 0.0;
            const AttentionCase test(spec);
            for (const Backend* backend : Backends()) {
              const bool is_other = backend->name != BestBackend().name;
              if (is_other && (HasOwnBits(*backend, spec) || HasOwnBits(BestBackend(), spec))) {
                continue;
              }
              const CaseOutput output = test.Run(*backend, Pool(2));
              const size_t row_bytes = output.o[0].size() / static_cast<size_t>(rows);
              const auto unseen = static_cast<size_t>(position - (300 - rows));
              EXPECT_EQ(std::memcmp(output.o[0].data(), clean.o[0].data(), unseen * row_bytes), 0)
                  << "rows before the token, " << value << ", page size " << page_size;
              EXPECT_EQ(output.o[1], clean.o[1]) << "another sequence";
              const ReferenceOutput reference = ReferenceAttention(test.args());
              const auto first = static_cast<size_t>(test.args().sequences[0].first_row) * 2 * 32;
              for (size_t i = 0; i < static_cast<size_t>(rows) * 2 * 32; ++i) {
                const double got = OutputAt(output.o[0], DType::kF32, i);
                const double expected = reference.o[first + i];
                EXPECT_EQ(std::isnan(got), std::isnan(expected)) << i;
                if (std::isinf(expected)) {
                  EXPECT_EQ(got, expected) << i;
                }
              }
            }
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Attention, NonFiniteLatentsStayWhereTheyAreSeen) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int page_size : {7, 16}) {
      for (const int group : {2, 16}) {
        CaseSpec spec;
        spec.dtype = dtype;
        spec.latent = true;
        spec.kv_heads = 1;
        spec.group = group;
        spec.qk_dim = 48;
        spec.page_size = page_size;
        spec.fork_probability = 0.0;
        spec.sequences = {{.content = 1, .base = 290, .rows = 9},
                          {.content = 2, .base = 280, .rows = 1}};
        const CaseOutput clean = AttentionCase(spec).Run(BestBackend(), Pool(2));
        spec.specials = {{1, 294, true, kInfinity}};
        const CaseOutput output = AttentionCase(spec).Run(BestBackend(), Pool(2));
        const size_t row_bytes = output.o[0].size() / 9;
        EXPECT_EQ(std::memcmp(output.o[0].data(), clean.o[0].data(), 4 * row_bytes), 0);
        EXPECT_NE(std::memcmp(output.o[0].data(), clean.o[0].data(), 5 * row_bytes), 0);
        EXPECT_EQ(output.o[1], clean.o[1]) << "another sequence";
      }
    }
  }
}

TEST(Attention, TheCallersFloatEnvironmentDoesNotMatter) {
  CaseSpec spec = RandomSpec(7);
  spec.dtype = DType::kF32;
  spec.sharpness = 30.0F;  // weights down to the smallest
  const AttentionCase test(spec);
  const CaseOutput expected = test.Run(BestBackend(), Pool(1));
  for (const uint64_t changes : {kFlushSubnormals, kRoundTowardZero}) {
    const HostFloatEnvironment host(changes);
    const CaseOutput output = test.Run(BestBackend(), Pool(1));
    EXPECT_TRUE(host.IsInForce()) << "not restored";
    ExpectSame(output, expected, "flags");
  }
}

}  // namespace
}  // namespace quire
