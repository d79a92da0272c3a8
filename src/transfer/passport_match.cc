#include "transfer/passport_match.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "quire/chunk.h"

namespace quire {
namespace {

// States are moved as wholes: their heads are not split.
bool MayDiffer(const PassportLayer& ours, const PassportLayer& theirs) {
  const int64_t more = std::max(ours.kv_heads, theirs.kv_heads);
  const int64_t fewer = std::min(ours.kv_heads, theirs.kv_heads);
  QUIRE_DCHECK(fewer > 0) << "a passport that was read has heads";
  return ours.kind == StateKind::kAttention && theirs.kind == StateKind::kAttention &&
         more % fewer == 0;
}

// The same passport with what does not count set as in `ours`.
void Adapt(const Passport& ours, Passport* theirs) {
  theirs->block_tokens = ours.block_tokens;
  theirs->shard = ours.shard;
  const size_t count = std::min(ours.layers.size(), theirs->layers.size());
  for (size_t l = 0; l < count; ++l) {
    if (MayDiffer(ours.layers[l], theirs->layers[l]))
      theirs->layers[l].kv_heads = ours.layers[l].kv_heads;
  }
}

}  // namespace

Status MatchPassports(std::string_view ours_json, std::string_view theirs_json) {
  QUIRE_ASSIGN_OR_RETURN(const Passport ours, Passport::FromJson(ours_json));
  QUIRE_ASSIGN_OR_RETURN(Passport theirs, Passport::FromJson(theirs_json));
  Adapt(ours, &theirs);
  QUIRE_ASSIGN_OR_RETURN(const std::string adapted, theirs.ToJson());
  const std::string difference = PassportDifference(ours_json, adapted);
  if (difference.empty()) return Status();
  return Status(StatusCode::kIncompatible, "transfer: the two sides hold other KV: " + difference);
}

}  // namespace quire
