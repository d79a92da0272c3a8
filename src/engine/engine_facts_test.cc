#include "engine/engine_facts.h"

#include <gtest/gtest.h>

namespace quire {
namespace {

EngineFacts FactsOf(DType dtype, DType activations, const std::string& weight_type) {
  ModelInfo info;
  info.weight_types = {{"float32", 100}, {weight_type, 1000}};
  return {.model = nullptr,
          .reported_info = std::move(info),
          .kernel_path = "",
          .numa = "off",
          .options = {.dtype = dtype, .activations = activations},
          .limits = {},
          .sizes = {},
          .salt_key = ""};
}

std::string NumericsOf(const EngineFacts& facts) {
  Passport identity;
  identity.model = "name";
  identity.numerics = "of somebody else";
  const Passport own = facts.WithNumerics(identity);
  EXPECT_EQ(own.model, "name");
  return own.numerics;
}

TEST(EngineFacts, NumericsAreWhatIsNotTheDefault) {
  EXPECT_EQ(NumericsOf(FactsOf(DType::kBF16, DType::kI8, "Q4_K")), "");
  EXPECT_EQ(NumericsOf(FactsOf(DType::kF32, DType::kI8, "Q4_K")), "model=float32");
  EXPECT_EQ(NumericsOf(FactsOf(DType::kBF16, DType::kBF16, "Q4_K")), "activations=bfloat16");
  EXPECT_EQ(NumericsOf(FactsOf(DType::kF32, DType::kF32, "I4ZWide")),
            "model=float32/activations=float32");
}

TEST(EngineFacts, ActivationsAreOfQuantisedWeightsAlone) {
  for (const char* const type : {"bfloat16", "float16", "float8_e4m3fn"}) {
    EXPECT_EQ(NumericsOf(FactsOf(DType::kBF16, DType::kBF16, type)), "") << type;
  }
}

}  // namespace
}  // namespace quire
