// Frequencies of every family against Hugging Face transformers (tests/golden/rope.json, made by
// make_rope_goldens.py), the rotation in the cache against the same file, and what must be refused.
#include "quire/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "kv/testing/kv_model.h"
#include "kv/testing/kv_test_forward.h"

namespace quire {
namespace {

using nlohmann::json;

const json& Goldens() {
  static const json goldens = json::parse(std::ifstream(QUIRE_GOLDEN_DIR "/rope.json"));
  return goldens;
}

RopeScaling ScalingOf(const std::string& name) {
  const std::map<std::string, RopeScaling> names = {
      {"kNone", RopeScaling::kNone},         {"kLinear", RopeScaling::kLinear},
      {"kDynamic", RopeScaling::kDynamic},   {"kLlama3", RopeScaling::kLlama3},
      {"kLongRope", RopeScaling::kLongRope}, {"kYarn", RopeScaling::kYarn}};
  return names.at(name);
}

RopeOptions OptionsOf(const json& golden) {
  RopeOptions options;
  options.mode = RopeMode::kNormal;
  options.scaling = ScalingOf(golden.at("scaling"));
  const std::map<std::string, double*> numbers = {{"theta", &options.theta},
                                                  {"factor", &options.factor},
                                                  {"low_freq_factor", &options.low_freq_factor},
                                                  {"high_freq_factor", &options.high_freq_factor},
                                                  {"beta_fast", &options.beta_fast},
                                                  {"beta_slow", &options.beta_slow},
                                                  {"mscale", &options.mscale},
                                                  {"mscale_all_dim", &options.mscale_all_dim},
                                                  {"attention_factor", &options.attention_factor}};
  for (const auto& [key, value] : golden.at("options").items()) {
    if (key == "rotary_dim") {
      options.rotary_dim = value;
    } else if (key == "original_max_position_embeddings") {
      options.original_max_position_embeddings = value;
    } else if (key == "truncate") {
      options.truncate = value;
    } else if (key == "short_factors") {
      options.short_factors = value.get<std::vector<double>>();
    } else if (key == "long_factors") {
      options.long_factors = value.get<std::vector<double>>();
    } else {
      *numbers.at(key) = value;
    }
  }
  return options;
}

// Those of kDynamic are for sequences beyond the original length.
bool IsLong(const json& golden) {
  return golden.at("long_factors") || OptionsOf(golden).scaling == RopeScaling::kDynamic;
}

// transformers computes in float32: a power with an exponent of up to ln(theta) = 14 loses that
// many units.
constexpr double kGoldenTolerance = 2e-6;

TEST(Rope, FrequenciesEqualTransformers) {
  ASSERT_GE(Goldens().at("cases").size(), 20u);
  for (const json& golden : Goldens().at("cases")) {
    SCOPED_TRACE(golden.at("name").get<std::string>());
    const auto result =
        ComputeRopeFrequencies(OptionsOf(golden), golden.at("head_dim"), IsLong(golden));
    ASSERT_TRUE(result.ok()) << result.status().ToString();
    const std::vector<double> expected = golden.at("inv_freq");
    ASSERT_EQ(result->inv_freq.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(result->inv_freq[i] / expected[i], 1, kGoldenTolerance) << "pair " << i;
    }
    EXPECT_NEAR(result->amplitude, golden.at("amplitude").get<double>(), 1e-12);
  }
}

// The oracle's rotation, to which the walks compare the cache in every mode.
TEST(Rope, TheModelRotatesAsTransformersDoes) {
  const std::vector<int64_t> positions = Goldens().at("positions");
  for (const json& golden : Goldens().at("cases")) {
    if (!golden.contains("x")) continue;
    const size_t head_dim = golden.at("head_dim");
    const auto frequencies =
        ComputeRopeFrequencies(OptionsOf(golden), static_cast<int64_t>(head_dim), IsLong(golden));
    const std::vector<double> x = golden.at("x");
    for (const RopePairing pairing : {RopePairing::kHalfSplit, RopePairing::kInterleaved}) {
      const bool half_split = pairing == RopePairing::kHalfSplit;
      SCOPED_TRACE(golden.at("name").get<std::string>() + (half_split ? " half" : " interleaved"));
      const std::vector<double> expected = golden.at(half_split ? "half_split" : "interleaved");
      for (size_t row = 0; row < positions.size(); ++row) {
        const auto y = RotateReference(std::span(x).subspan(row * head_dim, head_dim),
                                       frequencies.value(), pairing, positions[row]);
        for (size_t d = 0; d < head_dim; ++d) {
          EXPECT_NEAR(y[d], expected[row * head_dim + d], 5e-4) << "row " << row << " dim " << d;
        }
      }
    }
  }
}

RopeOptions Llama4Options(double low, double high) {
  RopeOptions options;
  options.mode = RopeMode::kNormal;
  options.scaling = RopeScaling::kLlama4;
  options.pairing = RopePairing::kInterleaved;
  options.theta = 500000;
  options.factor = 16;
  options.low_freq_factor = low;
  options.high_freq_factor = high;
  options.original_max_position_embeddings = 8192;
  return options;
}

TEST(Rope, Llama4IsLlama3WhereTheBandIsWide) {
  RopeOptions llama3 = Llama4Options(1, 4);
  llama3.scaling = RopeScaling::kLlama3;
  EXPECT_EQ(ComputeRopeFrequencies(Llama4Options(1, 4), 128, false)->inv_freq,
            ComputeRopeFrequencies(llama3, 128, false)->inv_freq);
}

TEST(Rope, Llama4StepsWhereTheBandIsEmpty) {
  const auto result = ComputeRopeFrequencies(Llama4Options(2, 2), 128, false);
  ASSERT_TRUE(result.ok());
  int steps = 0;
  for (size_t i = 0; i < 64; ++i) {
    const double base = std::pow(500000.0, -static_cast<double>(i) / 64);
    const bool slow = 2 * M_PI / base > 8192.0 / 2;
    steps += slow;
    EXPECT_NEAR(result->inv_freq[i], slow ? base / 16 : base, 1e-12 * base) << i;
  }
  EXPECT_GT(steps, 0);
  EXPECT_LT(steps, 64);
}

TEST(Rope, PositionScaleMultipliesEveryFrequency) {
  for (const json& golden : Goldens().at("cases")) {
    RopeOptions options = OptionsOf(golden);
    const int64_t head_dim = golden.at("head_dim");
    const auto plain = ComputeRopeFrequencies(options, head_dim, false);
    options.position_scale = 0.25;
    const auto scaled = ComputeRopeFrequencies(options, head_dim, false);
    for (size_t i = 0; i < plain->inv_freq.size(); ++i) {
      EXPECT_EQ(scaled->inv_freq[i], plain->inv_freq[i] * 0.25);
    }
    EXPECT_EQ(scaled->amplitude, plain->amplitude);
  }
}

TEST(Rope, DynamicLeavesThetaAsItIsInTheShortSet) {
  RopeOptions options;
  options.mode = RopeMode::kNormal;
  options.scaling = RopeScaling::kDynamic;
  options.factor = 4;
  options.original_max_position_embeddings = 128;
  RopeOptions plain;
  plain.mode = RopeMode::kNormal;
  const auto unscaled = ComputeRopeFrequencies(plain, 64, false)->inv_freq;
  EXPECT_EQ(ComputeRopeFrequencies(options, 64, false)->inv_freq, unscaled);
  EXPECT_LT(ComputeRopeFrequencies(options, 64, true)->inv_freq[31], unscaled[31] / 4);
}

TEST(Rope, DynamicWithOnePairTurnsByOne) {
  RopeOptions options;
  options.mode = RopeMode::kInline;
  options.scaling = RopeScaling::kDynamic;
  options.factor = 4;
  options.original_max_position_embeddings = 128;
  EXPECT_EQ(ComputeRopeFrequencies(options, 2, false)->inv_freq, std::vector<double>{1});
  EXPECT_EQ(ComputeRopeFrequencies(options, 2, true)->inv_freq, std::vector<double>{1});
}

TEST(Rope, WithoutRotationThereAreNoFrequencies) {
  const auto result = ComputeRopeFrequencies(RopeOptions(), 7, false);
  ASSERT_TRUE(result.ok());
  EXPECT_TRUE(result->inv_freq.empty());
  EXPECT_EQ(result->amplitude, 1);
}

// ---------------------------------------------------------------------- refused options

struct BadOption {
  std::string field;
  RopeScaling scaling;
  std::function<void(RopeOptions&)> spoil;
};

RopeOptions GoodOptions(RopeScaling scaling) {
  RopeOptions options = Llama4Options(1, 4);
  options.scaling = scaling;
  options.short_factors = {1, 1, 1, 1};
  options.long_factors = {1, 2, 3, 4};
  return options;
}

TEST(Rope, EveryBadFieldIsNamed) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  using S = RopeScaling;
  const std::vector<BadOption> rows = {
      {"mode", S::kNone, [](RopeOptions& o) { o.mode = static_cast<RopeMode>(3); }},
      {"pairing", S::kNone, [](RopeOptions& o) { o.pairing = static_cast<RopePairing>(2); }},
      {"scaling", S::kNone, [](RopeOptions& o) { o.scaling = static_cast<RopeScaling>(99); }},
      {"rotary_dim", S::kNone, [](RopeOptions& o) { o.rotary_dim = 3; }},
      {"rotary_dim", S::kNone, [](RopeOptions& o) { o.rotary_dim = 10; }},
      {"rotary_dim", S::kNone, [](RopeOptions& o) { o.rotary_dim = -2; }},
      {"theta", S::kNone, [](RopeOptions& o) { o.theta = 0; }},
      {"theta", S::kNone, [=](RopeOptions& o) { o.theta = nan; }},
      {"theta", S::kYarn, [](RopeOptions& o) { o.theta = 1; }},
      {"position_scale", S::kNone, [=](RopeOptions& o) { o.position_scale = inf; }},
      {"position_scale", S::kNone, [](RopeOptions& o) { o.position_scale = -1; }},
      {"factor", S::kLinear, [](RopeOptions& o) { o.factor = 0; }},
      {"factor", S::kDynamic, [=](RopeOptions& o) { o.factor = nan; }},
      {"factor", S::kYarn, [](RopeOptions& o) { o.factor = -4; }},
      {"low_freq_factor", S::kLlama3, [](RopeOptions& o) { o.low_freq_factor = 0; }},
      {"high_freq_factor", S::kLlama3, [](RopeOptions& o) { o.high_freq_factor = 1; }},
      {"high_freq_factor", S::kLlama4, [](RopeOptions& o) { o.high_freq_factor = 0.5; }},
      {"pairing", S::kLlama4, [](RopeOptions& o) { o.pairing = RopePairing::kHalfSplit; }},
      {"short_factors", S::kLongRope, [](RopeOptions& o) { o.short_factors.pop_back(); }},
      {"long_factors", S::kLongRope, [](RopeOptions& o) { o.long_factors.push_back(1); }},
      {"long_factors[2]", S::kLongRope, [](RopeOptions& o) { o.long_factors[2] = 0; }},
      {"short_factors[3]", S::kLongRope, [=](RopeOptions& o) { o.short_factors[3] = inf; }},
      {"attention_factor", S::kLongRope, [](RopeOptions& o) { o.attention_factor = -1; }},
      {"attention_factor", S::kYarn, [=](RopeOptions& o) { o.attention_factor = nan; }},
      {"beta_fast", S::kYarn, [](RopeOptions& o) { o.beta_fast = 0.5; }},
      {"beta_slow", S::kYarn, [](RopeOptions& o) { o.beta_slow = 0; }},
      {"mscale", S::kYarn, [](RopeOptions& o) { o.mscale = -1; }},
      {"mscale_all_dim", S::kYarn, [=](RopeOptions& o) { o.mscale_all_dim = inf; }},
      {"original_max_position_embeddings", S::kLongRope,
       [](RopeOptions& o) { o.original_max_position_embeddings = 1; }},
  };
  for (const BadOption& row : rows) {
    RopeOptions options = GoodOptions(row.scaling);
    const auto good = ComputeRopeFrequencies(options, 8, true);
    ASSERT_TRUE(good.ok()) << good.status().ToString();
    row.spoil(options);
    const auto bad = ComputeRopeFrequencies(options, 8, true);
    ASSERT_FALSE(bad.ok()) << row.field;
    EXPECT_EQ(bad.status().code(), StatusCode::kBadArgument);
    EXPECT_NE(bad.status().message().find("RopeOptions." + row.field + " "), std::string::npos)
        << row.field << " is not in: " << bad.status().message();
  }
}

TEST(Rope, OriginalLengthIsRequiredWhereItIsUsed) {
  for (const RopeScaling scaling :
       {RopeScaling::kDynamic, RopeScaling::kLlama3, RopeScaling::kLlama4, RopeScaling::kLongRope,
        RopeScaling::kYarn}) {
    RopeOptions options = GoodOptions(scaling);
    options.original_max_position_embeddings = 0;
    const auto result = ComputeRopeFrequencies(options, 8, false);
    ASSERT_FALSE(result.ok());
    EXPECT_NE(result.status().message().find("original_max_position_embeddings"),
              std::string::npos);
  }
}

TEST(Rope, FieldsOfOtherFamiliesAreNotRead) {
  RopeOptions options;
  options.mode = RopeMode::kNormal;
  options.factor = -1;
  options.beta_fast = -1;
  options.mscale = -1;
  options.low_freq_factor = -1;
  options.original_max_position_embeddings = -1;
  EXPECT_TRUE(ComputeRopeFrequencies(options, 8, false).ok());
}

// ---------------------------------------------------------------------- in the cache

// Keys as a cache with kNormal stores them, against transformers. Position p of the file is reached
// by p other tokens.
TEST(Rope, TheCacheStoresKeysAsTransformersRotatesThem) {
  const std::vector<int64_t> positions = Goldens().at("positions");
  for (const json& golden : Goldens().at("cases")) {
    if (!golden.contains("x")) continue;
    const int64_t head_dim = golden.at("head_dim");
    for (const RopePairing pairing : {RopePairing::kHalfSplit, RopePairing::kInterleaved}) {
      const bool half_split = pairing == RopePairing::kHalfSplit;
      SCOPED_TRACE(golden.at("name").get<std::string>() + (half_split ? " half" : " interleaved"));
      AttentionKVCacheOptions options;
      options.layers = {{1, 1, head_dim, head_dim, DType::kF32}};
      options.max_num_sequences = 1;
      options.token_capacity = 64;
      options.prefill_chunk_size = 64;
      options.page_size = 16;
      options.rope = OptionsOf(golden);
      options.rope.pairing = pairing;
      options.rope.use_long_factors = IsLong(golden);
      options.runner = std::make_shared<SerialRunner>();
      auto cache = AttentionKVCache::Create(options);
      ASSERT_TRUE(cache.ok()) << cache.status().ToString();
      const int64_t n = positions.back() + 1;
      TestTensor k(DType::kF32, {n, 1, head_dim});
      TestTensor v(DType::kF32, {n, 1, head_dim});
      for (int64_t i = 0; i < k.count(); ++i) k.Set(i, 0.5);
      for (int64_t i = 0; i < v.count(); ++i) v.Set(i, 0);
      const std::vector<double> x = golden.at("x");
      for (size_t row = 0; row < positions.size(); ++row) {
        for (int64_t d = 0; d < head_dim; ++d) {
          const size_t from = row * static_cast<size_t>(head_dim) + static_cast<size_t>(d);
          k.Set(positions[row] * head_dim + d, static_cast<float>(x[from]));
        }
      }
      TestTensor o(DType::kF32, {n, 1, head_dim});
      const std::vector<int64_t> ids = {0};
      const std::vector<int64_t> lengths = {n};
      ASSERT_TRUE((*cache)->AddSequence(0).ok());
      ASSERT_TRUE((*cache)->BeginForward(ids, lengths).ok());
      ASSERT_TRUE((*cache)->Append(0, k.view(), v.view()).ok());
      ASSERT_TRUE((*cache)->Attend(0, k.view(), o.view(), nullptr, 1.0).ok());
      ASSERT_TRUE((*cache)->EndForward().ok());
      TestTensor stored(DType::kF32, {1, n, 1, head_dim});
      TestTensor values(DType::kF32, {1, n, 1, head_dim});
      ASSERT_TRUE((*cache)->DebugGetKV(0, 0, n, stored.view(), values.view()).ok());
      const std::vector<double> expected = golden.at(half_split ? "half_split" : "interleaved");
      const double amplitude = golden.at("amplitude");
      for (size_t row = 0; row < positions.size(); ++row) {
        for (int64_t d = 0; d < head_dim; ++d) {
          const size_t at = row * static_cast<size_t>(head_dim) + static_cast<size_t>(d);
          EXPECT_NEAR(stored.Get(positions[row] * head_dim + d), expected[at], 5e-4) << row;
        }
      }
      // A rotation keeps the norm of the turned part, times the amplitude: TVM's YaRN does not.
      const int64_t rotary_dim = options.rope.rotary_dim == 0 ? head_dim : options.rope.rotary_dim;
      for (int64_t p = 0; p < n; ++p) {
        double before = 0;
        double after = 0;
        for (int64_t d = 0; d < head_dim; ++d) {
          const double in = k.Get(p * head_dim + d);
          const double out = stored.Get(p * head_dim + d);
          if (d < rotary_dim) {
            before += in * in;
            after += out * out;
          } else {
            EXPECT_EQ(in, out) << "position " << p << " dim " << d;
          }
        }
        EXPECT_NEAR(std::sqrt(after), amplitude * std::sqrt(before), 1e-5 * std::sqrt(before));
      }
    }
  }
}

}  // namespace
}  // namespace quire
