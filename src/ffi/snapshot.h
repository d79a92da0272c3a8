// Snapshots as maps, for the functions quire.snapshot_* and the engine.
#ifndef QUIRE_FFI_SNAPSHOT_H_
#define QUIRE_FFI_SNAPSHOT_H_

#include "ffi/options.h"
#include "quire/snapshot.h"

namespace quire::ffi {

// model, revision, tokenizer, adapter, block_tokens.
void ReadIdentityFields(OptionsReader& reader, Passport* identity);
Passport ReadIdentity(const OptionMap& fields);
// The same, and tokens (int32 or int64 tensor), sampler (bytes), created_ms.
SnapshotContents ReadSnapshotContents(const OptionMap& fields);
OptionMap SnapshotFields(const SnapshotInfo& info);

}  // namespace quire::ffi

#endif  // QUIRE_FFI_SNAPSHOT_H_
