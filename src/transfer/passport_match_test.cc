// Which differences between two processes a transfer adapts, and which it refuses (reliability goal
// R19).
#include "transfer/passport_match.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "quire/chunk.h"
#include "quire/rope.h"

namespace quire {
namespace {

Passport Ours() {
  PassportLayer layer;
  layer.dtype = DType::kBF16;
  layer.kv_heads = 8;
  layer.head_dim = layer.v_head_dim = 128;
  Passport passport;
  passport.model = "llama";
  passport.revision = "weights-1";
  passport.tokenizer = "tokenizer-1";
  RopeOptions rope;
  rope.mode = RopeMode::kNormal;
  passport.rope = RopePassport(rope, false);
  passport.numerics = "1/avx2/f32";
  passport.layers.assign(4, layer);
  return passport;
}

using Change = std::function<void(Passport&)>;
using Named = std::pair<std::string, Change>;

Status Match(const Change& change) {
  const Passport ours = Ours();
  Passport theirs = Ours();
  change(theirs);
  return MatchPassports(ours.ToJson().value(), theirs.ToJson().value());
}

Change OfRope(const std::function<void(RopeOptions&)>& change) {
  return [change](Passport& passport) {
    RopeOptions rope;
    rope.mode = RopeMode::kNormal;
    change(rope);
    passport.rope = RopePassport(rope, false);
  };
}

Change OfLayers(const std::function<void(PassportLayer&)>& change) {
  return [change](Passport& passport) {
    for (PassportLayer& layer : passport.layers) change(layer);
  };
}

TEST(MatchPassports, TwentyMismatchesAreRefusedWithTheField) {
  const Named mismatches[] = {
      {"model", [](Passport& p) { p.model = "qwen"; }},
      {"revision", [](Passport& p) { p.revision = "weights-2"; }},
      {"tokenizer", [](Passport& p) { p.tokenizer = "tokenizer-2"; }},
      {"tokenizer", [](Passport& p) { p.tokenizer = ""; }},
      {"adapter", [](Passport& p) { p.adapter = "lora-1"; }},
      {"rope", [](Passport& p) { p.rope = "none"; }},
      {"rope", OfRope([](RopeOptions& r) { r.theta = 5e5; })},
      {"rope", OfRope([](RopeOptions& r) { r.mode = RopeMode::kInline; })},
      {"rope", OfRope([](RopeOptions& r) { r.position_scale = 0.5; })},
      {"quant", [](Passport& p) { p.quant = "i8"; }},
      {"layout", [](Passport& p) { p.layout = "another"; }},
      {"numerics", [](Passport& p) { p.numerics = "1/avx512/f32"; }},
      {"numerics", [](Passport& p) { p.numerics = ""; }},
      {"dtype", OfLayers([](PassportLayer& l) { l.dtype = DType::kF16; })},
      {"dtype", [](Passport& p) { p.layers[2].dtype = DType::kI8; }},
      {"v_dtype", OfLayers([](PassportLayer& l) { l.v_dtype = DType::kF8E4M3; })},
      {"head_dim", OfLayers([](PassportLayer& l) { l.head_dim = 64; })},
      {"v_head_dim", OfLayers([](PassportLayer& l) { l.v_head_dim = 64; })},
      {"layers", [](Passport& p) { p.layers.pop_back(); }},
      {"layers", [](Passport& p) { p.first_layer = 4; }},
      {"window", OfLayers([](PassportLayer& l) { l.window = 4096; })},
      {"kind", OfLayers([](PassportLayer& l) { l.kind = StateKind::kLatent; })},
      {"kv_heads", OfLayers([](PassportLayer& l) { l.kv_heads = 3; })},
      {"kv_heads", OfLayers([](PassportLayer& l) { l.kv_heads = 12; })},
  };
  EXPECT_GE(std::size(mismatches), 20U);
  for (const auto& [field, change] : mismatches) {
    const Status status = Match(change);
    SCOPED_TRACE(status.ToString());
    EXPECT_EQ(status.code(), StatusCode::kIncompatible);
    EXPECT_NE(status.message().find(": " + field + ": "), std::string::npos) << field;
    EXPECT_NE(status.message().find(" here, "), std::string::npos);
    EXPECT_EQ(status.message().find('\n'), std::string::npos);
  }
}

TEST(MatchPassports, HeadsAndChunksMayDiffer) {
  const Change adapted[] = {
      [](Passport&) {},
      OfLayers([](PassportLayer& l) { l.kv_heads = 4; }),
      OfLayers([](PassportLayer& l) { l.kv_heads = 1; }),
      OfLayers([](PassportLayer& l) { l.kv_heads = 32; }),
      [](Passport& p) { p.block_tokens = 1024; },
      [](Passport& p) { p.shard = "rank 1 of 2"; },
  };
  for (const Change& change : adapted) EXPECT_EQ(Match(change).ToString(), "Ok");
}

TEST(MatchPassports, StatesAreNotSplit) {
  const Change recurrent = OfLayers([](PassportLayer& l) { l.kind = StateKind::kRecurrent; });
  Passport ours = Ours();
  recurrent(ours);
  Passport theirs = ours;
  for (PassportLayer& layer : theirs.layers) layer.kv_heads = 4;
  const Status status = MatchPassports(ours.ToJson().value(), theirs.ToJson().value());
  EXPECT_EQ(status.code(), StatusCode::kIncompatible);
  EXPECT_NE(status.message().find("kv_heads"), std::string::npos);
}

TEST(MatchPassports, WhatIsNoPassportIsAnError) {
  for (const char* text : {"", "{}", "[1]", "{\"model\":1}", "\xff"}) {
    const Status status = MatchPassports(Ours().ToJson().value(), text);
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.code(), StatusCode::kIncompatible) << text;
  }
}

}  // namespace
}  // namespace quire
