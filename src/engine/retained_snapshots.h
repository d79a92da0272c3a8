// Snapshots out of and into the prefix cache.
//
// Invariant: a sequence that is made here is retained when the call returns, or is gone.
#ifndef QUIRE_ENGINE_RETAINED_SNAPSHOTS_H_
#define QUIRE_ENGINE_RETAINED_SNAPSHOTS_H_

#include <cstdint>
#include <string>

#include "engine/engine_facts.h"
#include "engine/traffic/sequence_holders.h"
#include "quire/engine.h"
#include "quire/kv_export.h"

namespace quire {

class RetainedSnapshots {
 public:
  // All must outlive it.
  RetainedSnapshots(const EngineFacts& facts, const SequenceStates& states,
                    SequenceHolders* holders)
      : facts_(facts), states_(states), holders_(*holders) {}

  // As Engine::SaveSnapshot and Engine::LoadSnapshot.
  Result<int64_t> Save(const SnapshotContents& contents, const std::string& path);
  Result<SnapshotInfo> Load(const Passport& identity, const std::string& path,
                            const SnapshotLoadOptions& options);

 private:
  const EngineFacts& facts_;
  const SequenceStates& states_;
  SequenceHolders& holders_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_RETAINED_SNAPSHOTS_H_
