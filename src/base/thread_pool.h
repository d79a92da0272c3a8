// The pool behind CreateThreadPool, with threads that belong to NUMA nodes.
#ifndef QUIRE_BASE_THREAD_POOL_H_
#define QUIRE_BASE_THREAD_POOL_H_

#include <memory>

#include "base/numa_calls.h"
#include "base/numa_topology.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

// As CreateThreadPool. Where two nodes or more have threads, each thread but the caller's runs on
// the CPUs of its node, and numa_nodes() of the pool is there. The caller belongs to the node on
// which it calls: its thread is the host's. What the system refuses is left out, and
// NumaNodes::Text says so.
Result<std::shared_ptr<ParallelRunner>> CreateNumaThreadPool(int thread_count,
                                                             const NumaTopology& topology,
                                                             std::shared_ptr<NumaCalls> calls);

}  // namespace quire

#endif  // QUIRE_BASE_THREAD_POOL_H_
