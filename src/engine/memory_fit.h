// What an engine takes of a given memory: the plans of Engine::PlanMemory and Engine::Create, which
// read the machine's.
#ifndef QUIRE_ENGINE_MEMORY_FIT_H_
#define QUIRE_ENGINE_MEMORY_FIT_H_

#include "quire/engine.h"
#include "quire/status.h"
#include "tensor/machine_memory.h"

namespace quire {

// With EngineOptions::kv_bytes 0 there are fewer pages where the usual number does not fit; a plan
// that does not fit even so, or whose kv_bytes were given, has available_bytes below total_bytes.
Result<MemoryPlan> PlanMemoryWithin(const EngineOptions& options, const MachineMemory& memory);

// Ok, or the OutOfMemory of Engine::Create for a plan that does not fit.
Status CheckMemoryWithin(const EngineOptions& options, const MachineMemory& memory);

}  // namespace quire

#endif  // QUIRE_ENGINE_MEMORY_FIT_H_
