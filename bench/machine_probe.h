// What the machine gives at this moment: the bounds that the other cases are compared with.
#ifndef QUIRE_BENCH_MACHINE_PROBE_H_
#define QUIRE_BENCH_MACHINE_PROBE_H_

#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "quire/seams.h"
#include "tensor/host_memory.h"

namespace quire::bench {

class MachineProbe {
 public:
  // `bytes` is read in one pass, in pieces that are timed one by one: far more than the last cache
  // holds, or it is no memory that is measured.
  MachineProbe(int threads, size_t bytes);

  // {"read_1": [bytes per second...], "read_n", "f32_1", "f32_n": [FLOP per second...]} and
  // "bf16_n" where the CPU has bf16 dot products; _1 is one thread, _n is all.
  // `single`: also with one thread.
  nlohmann::json Measure(int repetitions, bool single);

  static bool has_bf16_dot();

 private:
  // Appends the rates of the pieces of one pass.
  void ReadAll(ParallelRunner& runner, nlohmann::json* rates) const;

  HostMemory memory_;
  std::shared_ptr<ParallelRunner> one_, all_;
};

}  // namespace quire::bench

#endif  // QUIRE_BENCH_MACHINE_PROBE_H_
