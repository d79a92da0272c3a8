// Snapshots as maps, for the functions quire.snapshot_* and the engine.
#ifndef QUIRE_FFI_SNAPSHOT_H_
#define QUIRE_FFI_SNAPSHOT_H_

#include <tvm/ffi/string.h>

#include <cstdint>

#include "ffi/errors.h"
#include "ffi/options.h"
#include "quire/snapshot.h"

namespace quire::ffi {

// model, revision, tokenizer, adapter, block_tokens.
void ReadIdentityFields(OptionsReader& reader, Passport* identity);
Passport ReadIdentity(const OptionMap& fields);
// The same, and tokens (int32 or int64 tensor), sampler (bytes), created_ms.
SnapshotContents ReadSnapshotContents(const OptionMap& fields);
OptionMap SnapshotFields(const SnapshotInfo& info);

// The methods save_snapshot and load_snapshot of caches and composite states, by the object's
// latch.
void SaveStateSnapshot(FaultLatch* latch, const SequenceStates& states, int64_t seq_id,
                       const OptionMap& contents, const tvm::ffi::String& path);
OptionMap LoadStateSnapshot(FaultLatch* latch, const SequenceStates& states, int64_t seq_id,
                            const OptionMap& identity, const tvm::ffi::String& path,
                            bool any_numerics);

}  // namespace quire::ffi

#endif  // QUIRE_FFI_SNAPSHOT_H_
