#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <string>

#include "kernels/backend.h"

namespace quire {
namespace {

// Sets QUIRE_KERNELS and puts back what was there.
class ScopedKernels {
 public:
  explicit ScopedKernels(const char* value) {
    const char* const old = std::getenv(kName);
    had_value_ = old != nullptr;
    if (had_value_) old_ = old;
    value != nullptr ? setenv(kName, value, 1) : unsetenv(kName);
  }
  ~ScopedKernels() { had_value_ ? setenv(kName, old_.c_str(), 1) : unsetenv(kName); }

 private:
  static constexpr const char* kName = "QUIRE_KERNELS";
  bool had_value_;
  std::string old_;
};

TEST(Dispatch, ScalarIsAlwaysThereAndLast) {
  ASSERT_FALSE(Backends().empty());
  EXPECT_EQ(Backends().back()->name, "scalar");
}

TEST(Dispatch, EveryPathIsCompleteAndFoundByItsName) {
  for (const Backend* backend : Backends()) {
    EXPECT_EQ(FindBackend(backend->name).value(), backend);
    EXPECT_NE(backend->append_kv, nullptr);
    EXPECT_NE(backend->attention_scratch_bytes, nullptr);
    EXPECT_NE(backend->attention, nullptr);
    EXPECT_NE(backend->packed_linear_bytes, nullptr);
    EXPECT_NE(backend->pack_linear, nullptr);
    EXPECT_NE(backend->linear_scratch_bytes, nullptr);
    EXPECT_NE(backend->linear, nullptr);
    EXPECT_NE(backend->rms_norm, nullptr);
    EXPECT_NE(backend->gated_mul, nullptr);
    EXPECT_NE(backend->soft_cap, nullptr);
    EXPECT_NE(backend->gather_rows, nullptr);
    EXPECT_NE(backend->arg_max, nullptr);
    EXPECT_NE(backend->exp2_scaled, nullptr);
  }
}

TEST(Dispatch, NoNameMeansTheBest) {
  const ScopedKernels unset(nullptr);
  EXPECT_EQ(FindBackend("").value(), Backends().front());
  const ScopedKernels empty("");
  EXPECT_EQ(FindBackend("").value(), Backends().front());
}

TEST(Dispatch, TheEnvironmentNamesTheDefaultOnly) {
  const ScopedKernels scalar("scalar");
  EXPECT_EQ(FindBackend("").value()->name, "scalar");
  EXPECT_EQ(FindBackend(Backends().front()->name).value(), Backends().front());
}

TEST(Dispatch, AnUnknownNameIsRefusedWithTheListOfNames) {
  const ScopedKernels unset(nullptr);
  const Status status = FindBackend("sse9").status();
  EXPECT_EQ(status.code(), StatusCode::kBadArgument);
  EXPECT_NE(status.message().find("\"sse9\""), std::string::npos);
  EXPECT_NE(status.message().find("scalar"), std::string::npos);
  const ScopedKernels wrong("mmx");
  EXPECT_NE(FindBackend("").status().message().find("QUIRE_KERNELS"), std::string::npos);
}

#if defined(__x86_64__)

// Linux refuses tiles to a process with a signal stack that is too small for them. In a process of
// its own, as what is detected once stays.
TEST(DispatchDeathTest, TilesThatAreRefusedAreNotListedAndTheReasonIsTold) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto detect_with_a_small_signal_stack = [] {
    static char stack[4096];
    const stack_t small = {.ss_sp = stack, .ss_flags = 0, .ss_size = sizeof(stack)};
    if (sigaltstack(&small, nullptr) != 0) std::exit(1);
    const bool listed = Backends().front()->name == "avx512_amx";
    const std::string_view reason = TilesRefused();
    const bool told = reason.empty() || reason.find("arch_prctl") != std::string_view::npos;
    std::exit(listed || !told ? 1 : 0);
  };
  EXPECT_EXIT(detect_with_a_small_signal_stack(), testing::ExitedWithCode(0), "");
}

TEST(Dispatch, AgreesWithTheCompilersDetection) {
  const auto has = [](std::string_view name) {
    for (const Backend* backend : Backends()) {
      if (backend->name == name) return true;
    }
    return false;
  };
  if (Backends().size() == 1) GTEST_SKIP() << "built without vector paths, or the CPU has none";
  EXPECT_EQ(has("avx2"), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
#if QUIRE_EMULATE_AVX512
  EXPECT_TRUE(has("avx512") && has("avx512_bf16") && has("avx512_amx"));
#else
  EXPECT_EQ(has("avx512"),
            __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"));
  EXPECT_EQ(has("avx512_bf16"), has("avx512") && __builtin_cpu_supports("avx512bf16") &&
                                    __builtin_cpu_supports("avx512vnni"));
#endif
}
#endif

}  // namespace
}  // namespace quire
