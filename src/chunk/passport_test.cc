#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <utility>

#include "quire/chunk.h"

namespace quire {
namespace {

Passport ToyPassport() {
  return {.model = "toy",
          .revision = "r0",
          .rope = "theta=10000;scaling=none",
          .shard = "tp0of1.pp0of1",
          .block_tokens = 4,
          .layers = std::vector<PassportLayer>(
              4, {.dtype = DType::kBF16, .kv_heads = 2, .head_dim = 8, .v_head_dim = 8})};
}

std::string JsonOf(const Passport& passport) {
  const Result<std::string> json = passport.ToJson();
  EXPECT_TRUE(json.ok()) << json.status().ToString();
  return json.ok() ? *json : "";
}

// Example 21 of the specification.
TEST(Passport, WritesTheCanonicalTextOfTheExample) {
  EXPECT_EQ(JsonOf(ToyPassport()),
            R"({"block":4,"dtype":"bf16","head_dim":8,"kv_heads":2,"layers":[0,4],)"
            R"("layout":"L2THD","model":"toy","quant":"none","revision":"r0",)"
            R"("rope":"theta=10000;scaling=none","shard":"tp0of1.pp0of1","v":1})");
  EXPECT_EQ(ToyPassport().Fingerprint()->ToHex(),
            "2827cd536db7eb87c2418a93164502690a11ebbd761935cc28a2401dec1142b4");
}

TEST(Passport, LayersThatDifferAreLists) {
  Passport passport = ToyPassport();
  passport.layers[1].dtype = DType::kF32;
  passport.layers[2].v_head_dim = 4;
  passport.layers[3].kind = StateKind::kRecurrent;
  const std::string json = JsonOf(passport);
  EXPECT_NE(json.find(R"("dtype":["bf16","f32","bf16","bf16"])"), json.npos) << json;
  EXPECT_NE(json.find(R"("v_head_dim":[8,8,4,8])"), json.npos) << json;
  EXPECT_NE(json.find(R"("kind":["attention","attention","attention","recurrent"])"), json.npos);
  EXPECT_NE(json.find(R"("kv_heads":2)"), json.npos) << json;
}

PassportLayer CallerState(std::vector<int64_t> shape) {
  return {.kind = StateKind::kCaller,
          .dtype = DType::kF16,
          .kv_heads = 1,
          .head_dim = 1,
          .v_head_dim = 1,
          .state_shape = std::move(shape)};
}

TEST(Passport, ACallersStateHasAShape) {
  Passport passport = ToyPassport();
  passport.layers = {CallerState({8, 64}), CallerState({})};
  const std::string json = JsonOf(passport);
  EXPECT_NE(json.find(R"("kind":"caller")"), json.npos) << json;
  EXPECT_NE(json.find(R"("state":["8x64","scalar"])"), json.npos) << json;
  passport.layers[1] = ToyPassport().layers[0];
  EXPECT_NE(JsonOf(passport).find(R"("state":["8x64",""])"), json.npos) << JsonOf(passport);
  passport.layers = {CallerState({3})};
  EXPECT_NE(JsonOf(passport).find(R"("state":"3")"), json.npos) << JsonOf(passport);
  EXPECT_LT(ChunkLimits::Of(passport).total_bytes_max, int64_t{1} << 30);
  // Every shape is another one, and is named.
  std::set<std::string> fingerprints;
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>(), {1}, {64}, {8, 8}, {1, 64}}) {
    Passport other = passport;
    other.layers[0].state_shape = shape;
    EXPECT_TRUE(fingerprints.insert(other.Fingerprint()->ToHex()).second);
    const std::string difference = PassportDifference(JsonOf(passport), JsonOf(other));
    EXPECT_EQ(difference.rfind("state: ", 0), 0U) << difference;
  }
}

struct Change {
  const char* name;
  std::function<void(Passport&)> make;
};

const std::vector<Change>& Changes() {
  static const std::vector<Change> changes = {
      {"model", [](Passport& p) { p.model = "other"; }},
      {"revision", [](Passport& p) { p.revision = "r1"; }},
      {"tokenizer", [](Passport& p) { p.tokenizer = "t"; }},
      {"adapter", [](Passport& p) { p.adapter = "lora"; }},
      {"rope", [](Passport& p) { p.rope = "none"; }},
      {"quant", [](Passport& p) { p.quant = "int8"; }},
      {"layout", [](Passport& p) { p.layout = "other"; }},
      {"shard", [](Passport& p) { p.shard = "canonical"; }},
      {"numerics", [](Passport& p) { p.numerics = "1/avx2/f32"; }},
      {"block", [](Passport& p) { p.block_tokens = 5; }},
      {"layers", [](Passport& p) { p.first_layer = 1; }},
      {"layers", [](Passport& p) { p.layers.pop_back(); }},
      {"dtype", [](Passport& p) { p.layers[0].dtype = DType::kF16; }},
      {"kv_heads", [](Passport& p) { p.layers[1].kv_heads = 3; }},
      {"head_dim", [](Passport& p) { p.layers[2].head_dim = 9; }},
      {"v_head_dim", [](Passport& p) { p.layers[3].v_head_dim = 7; }},
      {"v_dtype", [](Passport& p) { p.layers[2].v_dtype = ElementType(DType::kI8); }},
      {"kind", [](Passport& p) { p.layers[3].kind = StateKind::kLatent; }},
      {"model", [](Passport& p) { p.model = "\"\\\n\u00e4"; }},
      {"dtype", [](Passport& p) { p.layers[3] = CallerState({}); }},
      {"dtype", [](Passport& p) { p.layers[3] = CallerState({1}); }},
      {"dtype",
       [](Passport& p) {
         p.layers[3] = CallerState({8, 64});
       }},
      {"dtype",
       [](Passport& p) {
         p.layers[3] = CallerState({64, 8});
       }},
      {"dtype",
       [](Passport& p) {
         p.layers[3] = CallerState({1, 2, 3, 4, 5});
       }},
      {"dtype", [](Passport& p) { p.layers.assign(2, CallerState({8})); }},
  };
  return changes;
}

TEST(Passport, EveryFieldChangesTheFingerprintAndIsNamed) {
  const Passport toy = ToyPassport();
  std::set<std::string> fingerprints{toy.Fingerprint()->ToHex()};
  for (const Change& change : Changes()) {
    Passport other = toy;
    change.make(other);
    EXPECT_TRUE(fingerprints.insert(other.Fingerprint()->ToHex()).second) << change.name;
    const std::string difference = PassportDifference(JsonOf(toy), JsonOf(other));
    EXPECT_NE(difference.find(change.name), difference.npos) << difference;
  }
  EXPECT_EQ(PassportDifference(JsonOf(toy), JsonOf(toy)), "");
}

TEST(Passport, ReadsWhatItWrites) {
  for (const Change& change : Changes()) {
    Passport passport = ToyPassport();
    change.make(passport);
    const Result<Passport> back = Passport::FromJson(JsonOf(passport));
    ASSERT_TRUE(back.ok()) << change.name << ": " << back.status().ToString();
    EXPECT_EQ(*back, passport) << change.name;
  }
}

TEST(Passport, RefusesWhatHasNoCanonicalText) {
  const std::vector<Change> bad = {
      {"model", [](Passport& p) { p.model = "\xff"; }},
      {"rope", [](Passport& p) { p.rope = std::string(4097, 'x'); }},
      {"block_tokens", [](Passport& p) { p.block_tokens = 0; }},
      {"layers", [](Passport& p) { p.layers.clear(); }},
      {"layers", [](Passport& p) { p.first_layer = -1; }},
      {"layers", [](Passport& p) { p.first_layer = 65535; }},
      {"kv_heads", [](Passport& p) { p.layers[0].kv_heads = 0; }},
      {"head_dim", [](Passport& p) { p.layers[0].head_dim = int64_t{1} << 31; }},
      {"v_head_dim", [](Passport& p) { p.layers[0].v_head_dim = -1; }},
      {"code9.8", [](Passport& p) { p.layers[0].dtype = ElementType(9, 8); }},
      {"state_shape", [](Passport& p) { p.layers[0].state_shape = {1}; }},
      {"state_shape",
       [](Passport& p) {
         p.layers[0] = CallerState({4, 0});
       }},
      {"state_shape",
       [](Passport& p) {
         p.layers[0] = CallerState({1, 1, 1, 1, 1, 1});
       }},
      {"caller's state", [](Passport& p) { (p.layers[0] = CallerState({4})).window = 3; }},
      {"caller's state", [](Passport& p) { (p.layers[0] = CallerState({4})).head_dim = 3; }},
  };
  for (const Change& change : bad) {
    Passport passport = ToyPassport();
    change.make(passport);
    const Status status = passport.ToJson().status();
    EXPECT_EQ(status.code(), StatusCode::kBadArgument) << change.name;
    EXPECT_NE(status.message().find(change.name), std::string_view::npos) << status.ToString();
  }
}

TEST(Passport, RefusesTextsThatAreNotCanonical) {
  const std::string json = JsonOf(ToyPassport());
  const auto code_of = [](const std::string& text) {
    return Passport::FromJson(text).status().code();
  };
  EXPECT_EQ(code_of(json.substr(0, json.size() - 1)), StatusCode::kCorrupt);
  EXPECT_EQ(code_of(json + " "), StatusCode::kBadArgument);
  EXPECT_NE(code_of(json + std::string("\0x", 2)), StatusCode::kOk);
  EXPECT_EQ(code_of(std::string(json).insert(1, R"("a":1,)")), StatusCode::kBadArgument);
  EXPECT_EQ(code_of(std::string(json).replace(json.find("\"v\":1"), 5, "\"v\":2")),
            StatusCode::kIncompatible);
  EXPECT_EQ(code_of(std::string(json).replace(json.find("\"bf16\""), 6, "[\"bf16\"]")),
            StatusCode::kBadArgument);
  EXPECT_EQ(code_of(std::string(json).replace(json.find("[0,4]"), 5, "[4,0]")),
            StatusCode::kBadArgument);
  EXPECT_EQ(code_of("[]"), StatusCode::kBadArgument);
  Passport caller = ToyPassport();
  caller.layers = {CallerState({8, 64})};
  const std::string shaped = JsonOf(caller);
  for (const std::string_view state : {"", "8x", "x8", "8xx4", "08x64", "8x64x", "8 x64", "-8x64",
                                       "1x1x1x1x1x1", "8x0", "99999999999999999999", "Scalar"}) {
    const std::string text =
        std::string(shaped).replace(shaped.find("8x64"), 4, std::string(state));
    EXPECT_EQ(code_of(text), StatusCode::kBadArgument) << text;
  }
  const std::string field = R"("state":"8x64",)";
  EXPECT_EQ(code_of(std::string(shaped).replace(shaped.find(field), field.size(), "")),
            StatusCode::kBadArgument);
  EXPECT_EQ(code_of(std::string(json).insert(json.find("\"v\":1"), field)),
            StatusCode::kBadArgument);
}

TEST(ElementType, NamesGoThereAndBack) {
  for (const std::string_view name : {"f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8",
                                      "bool", "f8_e4m3fn", "f8_e5m2"}) {
    const Result<ElementType> type = ElementType::Parse(name);
    ASSERT_TRUE(type.ok()) << name;
    EXPECT_EQ(type->ToString(), name);
  }
  EXPECT_EQ(ElementType(DType::kBF16).ToString(), "bf16");
  EXPECT_EQ(ElementType(DType::kF32).bytes(), 4);
  EXPECT_FALSE(ElementType::Parse("f31").ok());
}

// KV of builds that knew no short set was made with the long one.
TEST(RopePassport, TheLongSetOfDynamicHasTheTextOfEarlierBuilds) {
  RopeOptions rope;
  rope.mode = RopeMode::kNormal;
  rope.scaling = RopeScaling::kDynamic;
  rope.factor = 2;
  rope.original_max_position_embeddings = 128;
  const std::string text = RopePassport(rope, true);
  EXPECT_TRUE(text.ends_with(";original=128")) << text;
  EXPECT_EQ(RopePassport(rope, false), text + ";set=short");
}

TEST(RopePassport, EveryFieldThatTurnsKeysIsInIt) {
  RopeOptions rope;
  rope.mode = RopeMode::kNormal;
  rope.scaling = RopeScaling::kLongRope;
  rope.short_factors = {1.0, 1.5};
  rope.long_factors = {2.0, 0.1};
  const std::vector<std::function<void(RopeOptions&)>> changes = {
      [](RopeOptions& r) { r.mode = RopeMode::kInline; },
      [](RopeOptions& r) { r.pairing = RopePairing::kInterleaved; },
      [](RopeOptions& r) { r.scaling = RopeScaling::kYarn; },
      [](RopeOptions& r) { r.theta = 500000; },
      [](RopeOptions& r) { r.position_scale = 0.5; },
      [](RopeOptions& r) { r.rotary_dim = 2; },
      [](RopeOptions& r) { r.factor = 8; },
      [](RopeOptions& r) { r.low_freq_factor = 2; },
      [](RopeOptions& r) { r.high_freq_factor = 5; },
      [](RopeOptions& r) { r.beta_fast = 31; },
      [](RopeOptions& r) { r.beta_slow = 2; },
      [](RopeOptions& r) { r.mscale = 1; },
      [](RopeOptions& r) { r.mscale_all_dim = 1; },
      [](RopeOptions& r) { r.truncate = false; },
      [](RopeOptions& r) { r.attention_factor = 1.19; },
      [](RopeOptions& r) { r.original_max_position_embeddings = 4096; },
      [](RopeOptions& r) { r.short_factors[1] = 1.25; },
  };
  std::set<std::string> texts{RopePassport(rope, false), RopePassport(rope, true), "none"};
  for (size_t i = 0; i < changes.size(); ++i) {
    RopeOptions other = rope;
    changes[i](other);
    EXPECT_TRUE(texts.insert(RopePassport(other, false)).second) << i;
  }
  RopeOptions other = rope;
  other.long_factors[0] = 3;
  EXPECT_TRUE(texts.insert(RopePassport(other, true)).second);
  // A field that a new family adds to RopeOptions belongs into RopePassport and into this test.
  EXPECT_EQ(sizeof(RopeOptions), 168u);
}

TEST(RopePassport, WritesTheShortestDecimals) {
  RopeOptions rope;
  rope.mode = RopeMode::kNormal;
  rope.theta = 0.1;
  rope.rotary_dim = 64;
  EXPECT_EQ(RopePassport(rope, false),
            "mode=normal;pairing=half;theta=0.1;position_scale=1;rotary_dim=64;scaling=none");
  EXPECT_EQ(RopePassport({}, false), "none");
}

}  // namespace
}  // namespace quire
