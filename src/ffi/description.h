// EngineStats and EngineDescription as values of tvm-ffi.
#ifndef QUIRE_FFI_DESCRIPTION_H_
#define QUIRE_FFI_DESCRIPTION_H_

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/string.h>

#include <cstdint>

#include "ffi/options.h"
#include "quire/engine.h"

namespace quire::ffi {

// Counts, times in nanoseconds.
tvm::ffi::Map<tvm::ffi::String, int64_t> StatsFields(const EngineStats& stats);
// blocks, sequences and waiting are columns: arrays of equal length, by field.
OptionMap DescriptionFields(const EngineDescription& description);

}  // namespace quire::ffi

#endif  // QUIRE_FFI_DESCRIPTION_H_
