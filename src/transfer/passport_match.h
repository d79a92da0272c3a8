// Whether the KV of two processes can be handed over: their passports, but for what a transfer
// adapts (docs/transfer.md).
#ifndef QUIRE_TRANSFER_PASSPORT_MATCH_H_
#define QUIRE_TRANSFER_PASSPORT_MATCH_H_

#include <string_view>

#include "quire/status.h"

namespace quire {

// Incompatible with one line: the first field that differs, and both values. Heads of attention may
// differ by a whole factor, the same for all layers that differ; block_tokens and shard do not
// count. Corrupt or BadArgument for what is no passport.
Status MatchPassports(std::string_view ours_json, std::string_view theirs_json);

}  // namespace quire

#endif  // QUIRE_TRANSFER_PASSPORT_MATCH_H_
