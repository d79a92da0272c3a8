// One thing to measure: prepared once, run in every round.
#ifndef QUIRE_BENCH_BENCH_CASE_H_
#define QUIRE_BENCH_BENCH_CASE_H_

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "base/json.h"
#include "quire/status.h"

namespace quire::bench {

// How long a case runs in one round: `seconds`, but at least `min_calls` calls.
struct RunLimits {
  double seconds = 0;
  int64_t min_calls = 1;
};

class BenchCase {
 public:
  virtual ~BenchCase() = default;
  // {"name": [seconds of each call...], ...}
  virtual nlohmann::json Run(const RunLimits& limits) = 0;
};

std::unique_ptr<BenchCase> MakeAttentionCase(const JsonValue& request);
std::unique_ptr<BenchCase> MakeBlendCase(const JsonValue& request);
std::unique_ptr<BenchCase> MakePlanCase(const JsonValue& request);
std::unique_ptr<BenchCase> MakeGrowthCase(const JsonValue& request);
std::unique_ptr<BenchCase> MakeChunkCase(const JsonValue& request);
std::unique_ptr<BenchCase> MakeTransferCase(const JsonValue& request);
std::unique_ptr<BenchCase> MakeChannelCase(const JsonValue& request);
bool HasUcx();  // whether way "ucx" can be had
// Where a listener may be, a new place each time. way: "tcp", "unix" or "ucx".
std::string PlaceToListen(const std::string& way);

inline double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A benchmark that cannot go on ends its process; the driver reports what stands on stderr.
inline void Require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}
template <typename T>
T Require(Result<T> result) {
  Require(result.status());
  return *std::move(result);
}

// The seconds of each call of `call`, as "call".
template <typename F>
nlohmann::json TimeCalls(const RunLimits& limits, F&& call) {
  nlohmann::json samples = nlohmann::json::object();
  const double begin = Now();
  for (int64_t i = 0; i < limits.min_calls || Now() - begin < limits.seconds; ++i) {
    const double start = Now();
    call();
    samples["call"].push_back(Now() - start);
  }
  return samples;
}

}  // namespace quire::bench

#endif  // QUIRE_BENCH_BENCH_CASE_H_
