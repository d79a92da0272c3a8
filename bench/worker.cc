// The process in which bench/bench measures Quire's library. One JSON object a line on standard
// input, one a line as the answer:
//   {"do": "info"}                                            what is measured here
//   {"do": "probe", "threads", "bytes", "repetitions", "single"}   the machine's bounds, now
//   {"do": "prepare", "key", "kind": "attention" | "blend" | "plan" | "growth" | "chunks" |
//    "transfer" | "channel", ...}                           makes a case
//   {"do": "run", "key", "seconds", "min_calls"}              {"samples": {name: [seconds...]}}
//   {"do": "drop", "key"}
// A request that cannot be met ends the process with the reason on standard error.
#include <iostream>
#include <map>
#include <string>

#include "bench_case.h"
#include "chunk_place.h"
#include "kernels/backend.h"
#include "machine_probe.h"

namespace quire::bench {
namespace {

class Worker {
 public:
  nlohmann::json Answer(const JsonValue& request) {
    const std::string action = Require(request.GetString("do"));
    if (action == "info") return Info();
    if (action == "probe") return Probe(request);
    const std::string key = Require(request.GetString("key"));
    if (action == "prepare") return Prepare(key, request);
    if (action == "run") return Run(key, request);
    if (action == "drop") {
      cases_.erase(key);
      return nlohmann::json::object();
    }
    Require(Status(StatusCode::kBadArgument, "do: there is no " + action));
    return {};
  }

 private:
  static nlohmann::json Info() {
    return {{"kernel_path", Require(FindBackend(""))->name},
            {"bf16_dot", MachineProbe::has_bf16_dot()},
            {"peer_stores", PeerPlaces()},
            {"ucx", HasUcx()},
            {"compiler", __VERSION__}};
  }

  nlohmann::json Probe(const JsonValue& request) {
    if (probe_ == nullptr) {
      probe_ =
          std::make_unique<MachineProbe>(static_cast<int>(Require(request.GetInt("threads", 1))),
                                         static_cast<size_t>(Require(request.GetInt("bytes", 1))));
      probe_->Measure(1, true);  // threads and pages warm up
    }
    return probe_->Measure(static_cast<int>(Require(request.GetInt("repetitions", 1))),
                           Require(request.GetBoolOr("single", false)));
  }

  nlohmann::json Prepare(const std::string& key, const JsonValue& request) {
    const std::string kind = Require(request.GetString("kind"));
    if (kind == "attention") {
      cases_[key] = MakeAttentionCase(request);
    } else if (kind == "blend") {
      cases_[key] = MakeBlendCase(request);
    } else if (kind == "plan") {
      cases_[key] = MakePlanCase(request);
    } else if (kind == "growth") {
      cases_[key] = MakeGrowthCase(request);
    } else if (kind == "chunks") {
      cases_[key] = MakeChunkCase(request);
    } else if (kind == "transfer") {
      cases_[key] = MakeTransferCase(request);
    } else if (kind == "channel") {
      cases_[key] = MakeChannelCase(request);
    } else {
      Require(Status(StatusCode::kBadArgument, "kind: there is no " + kind));
    }
    cases_[key]->Run({.seconds = 0, .min_calls = 1});
    return nlohmann::json::object();
  }

  nlohmann::json Run(const std::string& key, const JsonValue& request) {
    const auto found = cases_.find(key);
    if (found == cases_.end()) Require(Status(StatusCode::kBadArgument, key + ": not prepared"));
    const RunLimits limits{Require(request.GetNumber("seconds")),
                           Require(request.GetInt("min_calls", 1))};
    return {{"samples", found->second->Run(limits)}};
  }

  std::unique_ptr<MachineProbe> probe_;
  std::map<std::string, std::unique_ptr<BenchCase>> cases_;
};

}  // namespace
}  // namespace quire::bench

int main() {
  quire::bench::Worker worker;
  for (std::string line; std::getline(std::cin, line);) {
    const nlohmann::json request = quire::bench::Require(quire::ParseJson(line, "request"));
    std::cout << worker.Answer(quire::JsonValue(request, "request")) << std::endl;
  }
}
