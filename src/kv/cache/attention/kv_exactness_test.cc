// The promise of exactness at the cache (docs/exactness.md): the output row of a token is a
// function of the tokens that it may see, of build and kernel path, and of nothing else. Every test
// brings a sequence into being on another way and compares rows, bit for bit, with those of the
// same tokens run alone, in one piece, on one thread.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <ostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/random.h"
#include "base/testing/host_float_environment.h"
#include "kv/testing/kv_test_forward.h"

namespace quire {
namespace {

using Tokens = std::vector<uint64_t>;
using Outputs = std::vector<LayerOutputs>;  // [layer]

// More than a segment of attention and a part of a tile.
constexpr int64_t kLength = 300;

Tokens TokenRange(uint64_t first, int64_t count) {
  Tokens tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// [begin, end) of the sequence under test.
Tokens OfSequence(int64_t begin, int64_t end) {
  return TokenRange(1000 + static_cast<uint64_t>(begin), end - begin);
}

// Tokens of other sequences.
Tokens Junk(RandomSequence& random, int64_t count) {
  return TokenRange(1'000'000 + 1000 * static_cast<uint64_t>(random.Below(1000)), count);
}

struct Parameters {
  std::string kernel_path;
  DType dtype;
  RopeMode mode;
  DType v_dtype;
  bool has_latents = false;  // the second layer is latent
};

std::string Describe(const Parameters& parameters) {
  constexpr const char* kModes[] = {"None", "Normal", "Inline"};
  std::string types(DTypeName(parameters.dtype));
  if (parameters.v_dtype != parameters.dtype)
    types += "_" + std::string(DTypeName(parameters.v_dtype));
  if (parameters.has_latents) types += "_latent";
  return parameters.kernel_path + "_" + types + "_" + kModes[static_cast<size_t>(parameters.mode)];
}
void PrintTo(const Parameters& parameters, std::ostream* out) { *out << Describe(parameters); }

class KVExactness : public testing::TestWithParam<Parameters> {
 protected:
  AttentionKVCacheOptions Options(int64_t page_size = 16) const {
    const DType dtype = GetParam().dtype;
    // Two groups; the second with dimensions that fill no vector.
    const DType v_dtype = GetParam().v_dtype;
    AttentionKVCacheOptions options =
        TestCacheOptions({{4, 2, 16, 16, dtype, v_dtype}, {2, 1, 24, 17, dtype, v_dtype}},
                         {.max_num_sequences = 80,
                          .token_capacity = 8192,
                          .prefill_chunk_size = 1024,
                          .page_size = page_size,
                          .rope = GetParam().mode});
    if (GetParam().has_latents) {
      options.layers[1].latent = true;
      options.layers[1].qk_head_dim = 17 + 12;
      options.layers[1].v_dtype.reset();
    }
    options.rope.rotary_dim = 12;
    options.kernel_path = GetParam().kernel_path;
    return options;
  }

  void SetUp() override {
    cache_ = MakeTestCache(Options());
    const auto alone = MakeTestCache(Options());
    ASSERT_TRUE(alone->AddSequence(0).ok());
    reference_ = Run(*alone, {0}, {OfSequence(0, kLength)});
  }

  Outputs Run(AttentionKVCache& cache, const std::vector<int64_t>& ids,
              const std::vector<Tokens>& tokens, CallStyle calls = CallStyle::kHalves) {
    ForwardStyle style;
    style.calls = calls;
    auto outputs = RunForward(cache, Options().layers, ids, tokens, style);
    EXPECT_TRUE(outputs.ok()) << outputs.status().ToString();
    return outputs.ok() ? *std::move(outputs) : Outputs();
  }

  // Rows [first_row, first_row + count) are those of positions [position, position + count) of the
  // sequence.
  void ExpectRows(const Outputs& outputs, int64_t first_row, int64_t position, int64_t count,
                  const std::string& what) {
    ASSERT_EQ(outputs.size(), reference_.size()) << what;
    for (size_t l = 0; l < outputs.size(); ++l) {
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_TRUE(std::ranges::equal(outputs[l].o.rows(first_row + i, 1),
                                       reference_[l].o.rows(position + i, 1)))
            << what << ": o of layer " << l << ", position " << position + i;
        if (outputs[l].lse.count() == 0) continue;
        ASSERT_TRUE(std::ranges::equal(outputs[l].lse.rows(first_row + i, 1),
                                       reference_[l].lse.rows(position + i, 1)))
            << what << ": lse of layer " << l << ", position " << position + i;
      }
    }
  }

  // Appends [from, kLength) of the sequence to `id`, in pieces of these sizes over and over.
  void ExtendInPieces(AttentionKVCache& cache, int64_t id, int64_t from,
                      const std::vector<int64_t>& pieces, const std::string& what,
                      CallStyle calls = CallStyle::kHalves) {
    for (size_t i = 0; from < kLength && !HasFatalFailure(); ++i) {
      const int64_t to = std::min(kLength, from + pieces[i % pieces.size()]);
      const Outputs outputs = Run(cache, {id}, {OfSequence(from, to)}, calls);
      ExpectRows(outputs, 0, from, to - from, what + " from " + std::to_string(from));
      from = to;
    }
  }

  std::unique_ptr<AttentionKVCache> cache_;
  Outputs reference_;
};

TEST_P(KVExactness, AnyCutOfThePrompt) {
  const std::vector<std::vector<int64_t>> cuts = {
      {1}, {7}, {16}, {100}, {255, 45}, {256, 44}, {257, 43}, {1, 2, 3, 5, 8, 13, 21}, {299, 1}};
  for (const std::vector<int64_t>& cut : cuts) {
    ASSERT_TRUE(cache_->AddSequence(0).ok());
    ExtendInPieces(*cache_, 0, 0, cut, "pieces of " + std::to_string(cut[0]));
    ASSERT_TRUE(cache_->RemoveSequence(0).ok());
  }
}

TEST_P(KVExactness, AnyPageSize) {
  for (const int64_t page_size : {0, 1, 3, 16, 48, 64, 256}) {
    const auto cache = MakeTestCache(Options(page_size));
    ASSERT_TRUE(cache->AddSequence(5).ok());
    ExtendInPieces(*cache, 5, 0, {130, 1, 1, 40}, "page size " + std::to_string(page_size));
  }
}

TEST_P(KVExactness, FusedCallsAndHalves) {
  ASSERT_TRUE(cache_->AddSequence(0).ok());
  ExtendInPieces(*cache_, 0, 0, {90, 1}, "fused", CallStyle::kFused);
}

TEST_P(KVExactness, AnyNumberOfWorkers) {
  for (const int workers : {2, 3}) {
    AttentionKVCacheOptions options = Options();
    options.runner = CreateThreadPool(workers).value();
    const auto cache = MakeTestCache(options);
    ASSERT_TRUE(cache->AddSequence(0).ok());
    ExtendInPieces(*cache, 0, 0, {130, 1, 60}, std::to_string(workers) + " workers");
  }
}

TEST_P(KVExactness, CachesThatShareARunnerOnTwoThreads) {
  AttentionKVCacheOptions options = Options();
  options.runner = CreateThreadPool(3).value();
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      const auto cache = MakeTestCache(options);
      ASSERT_TRUE(cache->AddSequence(0).ok());
      for (int round = 0; round < 4; ++round) {
        ExtendInPieces(*cache, 0, 0, {130, 1, 60}, "thread " + std::to_string(t));
        ASSERT_TRUE(cache->PopN(0, *cache->GetSequenceLength(0)).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(KVExactness, AnyBatch) {
  RandomSequence random(7);
  for (const int64_t batch_size : {2, 3, 5, 8, 17, 33, 64}) {
    ASSERT_TRUE(cache_->Clear().ok());
    std::vector<int64_t> ids(static_cast<size_t>(batch_size));
    std::iota(ids.begin(), ids.end(), 0);
    for (const int64_t id : ids) {
      ASSERT_TRUE(cache_->AddSequence(id).ok());
      const int64_t length = random.Below(60);
      if (id != 0 && length > 0) Run(*cache_, {id}, {Junk(random, length)});
    }
    for (int64_t from = 0; from < kLength && !HasFatalFailure();) {
      for (size_t i = ids.size() - 1; i > 0; --i) {
        std::swap(ids[i], ids[static_cast<size_t>(random.Below(static_cast<int64_t>(i) + 1))]);
      }
      const int64_t to =
          std::min(kLength, from + (random.Below(2) == 0 ? 1 : 1 + random.Below(100)));
      std::vector<Tokens> tokens;
      int64_t row = 0;
      int64_t first_row = 0;
      for (const int64_t id : ids) {
        if (id == 0) first_row = row;
        tokens.push_back(id == 0 ? OfSequence(from, to) : Junk(random, 1 + random.Below(3)));
        row += static_cast<int64_t>(tokens.back().size());
      }
      const Outputs outputs = Run(*cache_, ids, tokens);
      ExpectRows(outputs, first_row, from, to - from, "batch of " + std::to_string(batch_size));
      from = to;
    }
  }
}

TEST_P(KVExactness, ForkedAnywhere) {
  ASSERT_TRUE(cache_->AddSequence(0).ok());
  Run(*cache_, {0}, {OfSequence(0, kLength)});
  int64_t child = 1;
  for (const int64_t position : {0, 1, 8, 15, 16, 17, 100, 255, 256, 257, 299}) {
    ASSERT_TRUE(cache_->ForkSequence(0, child, position).ok());
    ExtendInPieces(*cache_, child, position, {1, 50}, "forked at " + std::to_string(position));
    ++child;
  }
}

// Each page range in as many pages as may be, and a range that is gathered.
TEST_P(KVExactness, ForkedManyTimesInsideATile) {
  RandomSequence random(11);
  for (const int64_t page_size : {16, 64, 7}) {
    const auto cache = MakeTestCache(Options(page_size));
    ASSERT_TRUE(cache->AddSequence(0).ok());
    Run(*cache, {0}, {OfSequence(0, 257)});
    for (int64_t child = 1; child <= 12; ++child) {
      const int64_t position = 256 + child;
      ASSERT_TRUE(cache->ForkSequence(child - 1, child, position).ok());
      Run(*cache, {child - 1}, {Junk(random, 3)});  // takes the slot behind the fork
      const Outputs outputs = Run(*cache, {child}, {OfSequence(position, position + 1)});
      ExpectRows(outputs, 0, position, 1, "fork " + std::to_string(child));
    }
    ExtendInPieces(*cache, 12, 269, {1, 5}, "after the forks");
  }
}

TEST_P(KVExactness, ASharedPrefixOfManySequences) {
  ASSERT_TRUE(cache_->AddSequence(0).ok());
  Run(*cache_, {0}, {OfSequence(0, 270)});
  RandomSequence random(3);
  std::vector<int64_t> ids = {0};
  for (int64_t child = 1; child <= 20; ++child) {
    ASSERT_TRUE(cache_->ForkSequence(0, child, 256 + child % 14).ok());
    ids.push_back(child);
  }
  for (int64_t step = 0; step < 3; ++step) {
    std::vector<Tokens> tokens;
    for (const int64_t id : ids) {
      tokens.push_back(id == 0 ? OfSequence(270 + step, 271 + step) : Junk(random, 1));
    }
    ExpectRows(Run(*cache_, ids, tokens), 0, 270 + step, 1, "shared by 21");
  }
}

TEST_P(KVExactness, PoppedAndWrittenAgain) {
  RandomSequence random(5);
  ASSERT_TRUE(cache_->AddSequence(0).ok());
  Run(*cache_, {0}, {OfSequence(0, kLength)});
  int64_t length = kLength;
  for (const int64_t kept : {299, 290, 256, 250, 17, 16, 0}) {
    ASSERT_TRUE(cache_->PopN(0, length - kept).ok());
    const int64_t junk = 1 + random.Below(30);
    Run(*cache_, {0}, {Junk(random, junk)});
    ASSERT_TRUE(cache_->PopN(0, junk).ok());
    ExtendInPieces(*cache_, 0, kept, {11}, "popped to " + std::to_string(kept));
    length = kLength;
  }
}

TEST_P(KVExactness, PoppedIntoASharedPrefix) {
  RandomSequence random(6);
  ASSERT_TRUE(cache_->AddSequence(0).ok());
  Run(*cache_, {0}, {OfSequence(0, 280)});
  ASSERT_TRUE(cache_->ForkSequence(0, 1, 270).ok());
  Run(*cache_, {1}, {Junk(random, 9)});
  ASSERT_TRUE(cache_->PopN(1, 9 + 12).ok());
  ExtendInPieces(*cache_, 1, 258, {1, 9}, "popped below the fork");
  ExtendInPieces(*cache_, 0, 280, {3}, "the parent");
}

TEST_P(KVExactness, RemovedAndAddedAgain) {
  RandomSequence random(8);
  for (int64_t round = 0; round < 3; ++round) {
    ASSERT_TRUE(cache_->AddSequence(0).ok());
    ExtendInPieces(*cache_, 0, 0, {150}, "round " + std::to_string(round));
    const int64_t other = 10 + round;
    ASSERT_TRUE(cache_->AddSequence(other).ok());
    Run(*cache_, {other}, {Junk(random, 100)});
    ASSERT_TRUE(cache_->RemoveSequence(0).ok());
  }
}

TEST_P(KVExactness, AbortedAndDoneAgain) {
  ASSERT_TRUE(cache_->AddSequence(0).ok());
  Run(*cache_, {0}, {OfSequence(0, 250)});
  ASSERT_TRUE(cache_->ForkSequence(0, 1, 200).ok());
  const std::vector<int64_t> ids = {0, 1};
  const std::vector<int64_t> lengths = {20, 9};
  const std::vector<AttentionLayerSpec> layers = Options().layers;
  const Tokens junk = TokenRange(77, 29);
  for (size_t layers_run = 0; layers_run <= layers.size(); ++layers_run) {
    ASSERT_TRUE(cache_->BeginForward(ids, lengths).ok());
    for (size_t l = 0; l < layers_run; ++l) {
      LayerOutputs outputs;
      ASSERT_TRUE(RunLayer(*cache_, layers[l], static_cast<int64_t>(l), junk, {}, &outputs).ok());
    }
    ASSERT_TRUE(cache_->AbortForward().ok());
  }
  const Outputs both = Run(*cache_, ids, {OfSequence(250, 270), OfSequence(200, 209)});
  ExpectRows(both, 0, 250, 20, "parent after aborts");
  ExpectRows(both, 20, 200, 9, "child after aborts");
}

// What a token stores must not reach the rows before it, be it NaN.
TEST_P(KVExactness, RowsDoNotSeeWhatComesAfterThem) {
  const float specials[] = {std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()};
  const std::vector<AttentionLayerSpec> layers = Options().layers;
  for (const int64_t page_size : {16, 3}) {
    for (const int64_t bad : {0, 5, 16, 258, 299}) {
      const auto cache = MakeTestCache(Options(page_size));
      ASSERT_TRUE(cache->AddSequence(0).ok());
      const std::vector<int64_t> ids = {0};
      const std::vector<int64_t> lengths = {kLength};
      ASSERT_TRUE(cache->BeginForward(ids, lengths).ok());
      Outputs outputs(layers.size());
      for (size_t l = 0; l < layers.size(); ++l) {
        const AttentionLayerSpec& spec = layers[l];
        TokenInputs inputs =
            MakeTokenInputs(spec, static_cast<int64_t>(l), DType::kF32, OfSequence(0, kLength));
        for (const auto& [tensor, dim] :
             {std::pair{&inputs.k, spec.qk_head_dim}, std::pair{&inputs.v, spec.v_head_dim}}) {
          const int64_t row = spec.num_kv_heads * dim;
          for (int64_t i = 0; i < row; ++i) tensor->Set(bad * row + i, specials[i % 3]);
        }
        outputs[l].o = TestTensor(DType::kF32, {kLength, spec.num_qo_heads, spec.v_head_dim});
        outputs[l].lse = TestTensor(DType::kF32, {kLength, spec.num_qo_heads});
        const int64_t layer = static_cast<int64_t>(l);
        ASSERT_TRUE(AppendInputs(*cache, spec, layer, inputs).ok());
        ASSERT_TRUE(cache
                        ->Attend(layer, inputs.q.view(), outputs[l].o.view(),
                                 &outputs[l].lse.view(), ScoreScale(spec))
                        .ok());
      }
      ASSERT_TRUE(cache->EndForward().ok());
      ExpectRows(outputs, 0, 0, bad, "bad token " + std::to_string(bad));
      if (bad == 0) continue;
      // Popped again it is forgotten.
      ASSERT_TRUE(cache->PopN(0, kLength - bad).ok());
      ExtendInPieces(*cache, 0, bad, {1, 70}, "bad token popped at " + std::to_string(bad));
    }
  }
}

// What is stored as codes is computed with as bfloat16.
DType OutputDType(DType stored) { return IsQuantised(stored) ? DType::kBF16 : stored; }

TEST_P(KVExactness, AnOutputInTheLayersDtypeIsTheFloatOutputRounded) {
  const auto outputs_in = [&](DType dtype) {
    const auto cache = MakeTestCache(Options());
    EXPECT_TRUE(cache->AddSequence(0).ok());
    ForwardStyle style;
    style.output_dtype = dtype;
    const std::vector<int64_t> ids = {0};
    return RunForward(*cache, Options().layers, ids, {OfSequence(0, 60)}, style).value();
  };
  const DType dtype = OutputDType(GetParam().dtype);
  const Outputs narrow = outputs_in(dtype);
  const Outputs wide = outputs_in(DType::kF32);
  for (size_t l = 0; l < narrow.size(); ++l) {
    TestTensor rounded(dtype, {narrow[l].o.count()});
    for (int64_t i = 0; i < rounded.count(); ++i) rounded.Set(i, wide[l].o.Get(i));
    EXPECT_TRUE(std::ranges::equal(rounded.bytes(), narrow[l].o.bytes())) << "layer " << l;
  }
}

// Values so small that flushing them would show. Made before any flags are set: the product is one
// of those.
std::vector<TokenInputs> SmallInputs(const AttentionKVCacheOptions& options) {
  const std::vector<AttentionLayerSpec>& layers = options.layers;
  std::vector<TokenInputs> inputs;
  for (size_t l = 0; l < layers.size(); ++l) {
    float small = 0x1p-130f;
    if (layers[l].dtype == DType::kF16 || layers[l].v_dtype == DType::kF16) small = 0x1p-18f;
    if (IsQuantised(layers[l].value_dtype())) small = 0x1p-118f;  // its scale is a normal number
    const bool flushes =
        options.kernel_path == "avx512_bf16" || options.kernel_path == "avx512_amx";
    if (layers[l].value_dtype() == DType::kBF16 && flushes) {
      small = 0x1p-122f;  // its products take and give no denormals; what comes behind them does
    }
    inputs.push_back(
        MakeTokenInputs(layers[l], static_cast<int64_t>(l), DType::kF32, OfSequence(0, 40)));
    TestTensor& v = inputs[l].v;
    for (int64_t i = 0; i < v.count(); ++i) v.Set(i, v.Get(i) * small);
  }
  return inputs;
}

Outputs RunInputs(AttentionKVCache& cache, const std::vector<AttentionLayerSpec>& layers,
                  const std::vector<TokenInputs>& inputs) {
  Outputs outputs(layers.size());
  const std::vector<int64_t> ids = {0};
  const std::vector<int64_t> lengths = {40};
  EXPECT_TRUE(cache.BeginForward(ids, lengths).ok());
  for (size_t l = 0; l < layers.size(); ++l) {
    const AttentionLayerSpec& spec = layers[l];
    const int64_t layer = static_cast<int64_t>(l);
    outputs[l].o = TestTensor(OutputDType(spec.dtype), {40, spec.num_qo_heads, spec.v_head_dim});
    EXPECT_TRUE(AppendInputs(cache, spec, layer, inputs[l]).ok());
    EXPECT_TRUE(
        cache.Attend(layer, inputs[l].q.view(), outputs[l].o.view(), nullptr, ScoreScale(spec))
            .ok());
  }
  EXPECT_TRUE(cache.EndForward().ok());
  return outputs;
}

TEST_P(KVExactness, ACallerWithAnotherFloatEnvironment) {
  ASSERT_TRUE(cache_->AddSequence(0).ok());
  const std::vector<TokenInputs> inputs = SmallInputs(Options());
  const Outputs expected = RunInputs(*cache_, Options().layers, inputs);
  int64_t not_zero = 0;
  for (int64_t i = 0; i < expected[0].o.count(); ++i) not_zero += expected[0].o.Get(i) != 0;
  ASSERT_GT(not_zero, expected[0].o.count() / 2) << "nothing could be flushed";
  for (const int workers : {1, 3}) {
    AttentionKVCacheOptions options = Options();
    Outputs outputs;
    {
      // As hosts that want speed have it, and rounding upwards, which any thread may.
      const HostFloatEnvironment host(kFlushSubnormals | kRoundUpward);
      options.runner = CreateThreadPool(workers).value();  // its threads inherit the caller's flags
      const auto cache = MakeTestCache(options);
      ASSERT_TRUE(cache->AddSequence(0).ok());
      outputs = RunInputs(*cache, options.layers, inputs);
      EXPECT_TRUE(host.IsInForce()) << "not put back";
      ASSERT_TRUE(cache->AddSequence(1).ok());
      ExtendInPieces(*cache, 1, 0, {120, 1}, "another environment");
    }
    for (size_t l = 0; l < outputs.size(); ++l) {
      EXPECT_TRUE(std::ranges::equal(outputs[l].o.bytes(), expected[l].o.bytes()))
          << "layer " << l << ", " << workers << " workers";
    }
  }
}

std::vector<Parameters> AllParameters() {
  std::vector<Parameters> all;
  for (const std::string& path : KernelPaths()) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const RopeMode mode : {RopeMode::kNone, RopeMode::kNormal, RopeMode::kInline}) {
        all.push_back({path, dtype, mode, dtype});
      }
    }
    for (const RopeMode mode : {RopeMode::kNone, RopeMode::kNormal, RopeMode::kInline}) {
      all.push_back({path, DType::kI8, mode, DType::kI8});
      all.push_back({path, DType::kF8E4M3, mode, DType::kF8E4M3});
    }
    all.push_back({path, DType::kBF16, RopeMode::kNormal, DType::kI8});
    all.push_back({path, DType::kI8, RopeMode::kInline, DType::kF16});
    all.push_back({path, DType::kF32, RopeMode::kInline, DType::kF8E4M3});
    all.push_back({path, DType::kF8E4M3, RopeMode::kNone, DType::kI8});
    all.push_back({path, DType::kBF16, RopeMode::kNormal, DType::kBF16, true});
    all.push_back({path, DType::kI8, RopeMode::kInline, DType::kI8, true});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Paths, KVExactness, testing::ValuesIn(AllParameters()),
                         [](const auto& row) { return Describe(row.param); });

}  // namespace
}  // namespace quire
