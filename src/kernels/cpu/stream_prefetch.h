// How decode asks for keys, values and quantised weights, which it reads once, ahead of reading
// them. A matter of speed alone.
#ifndef QUIRE_KERNELS_CPU_STREAM_PREFETCH_H_
#define QUIRE_KERNELS_CPU_STREAM_PREFETCH_H_

#include <cstdint>

namespace quire {

struct StreamPrefetch {
  bool into_l1;         // else into L2
  int64_t bytes_ahead;  // of what is read
};

// In dispatch.cc.
StreamPrefetch StreamPrefetchOfCpu();  // keys and values
// Quantised weights, by their codes and the rows that they are multiplied with.
StreamPrefetch WeightPrefetchOfCpu(bool eight_bits, bool one_row);

}  // namespace quire

#endif  // QUIRE_KERNELS_CPU_STREAM_PREFETCH_H_
