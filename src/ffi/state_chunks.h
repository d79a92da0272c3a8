// Chunks of recurrent states by their tokens: for objects of tvm-ffi that have such states.
#ifndef QUIRE_FFI_STATE_CHUNKS_H_
#define QUIRE_FFI_STATE_CHUNKS_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/options.h"
#include "quire/chunk.h"
#include "quire/kv_export.h"
#include "quire/status.h"

namespace quire::ffi {

// Whose chunks, and of which tokens from position 0 on.
struct ChainRequest {
  Passport identity{};  // as CachePassport takes it
  std::string salt{};
  std::vector<int32_t> tokens{};
};
// What ReadIdentity takes, tokens (int32 or int64 tensor) and salt (bytes).
ChainRequest ReadChainRequest(const OptionMap& fields);

// The last chunk of the chain over the tokens.
Result<ChunkBuffer> ExportLastChunk(const SequenceStates& states, int64_t seq_id,
                                    const ChainRequest& request);
// All chunks of the chain over the tokens, verified, as ImportChunks. BadArgument for another
// number of chunks; Incompatible, Corrupt, NotFound (expired) for a chunk that is not the one.
Status ImportChain(const SequenceStates& states, int64_t seq_id, const ChainRequest& request,
                   std::span<const std::string_view> chunks);

}  // namespace quire::ffi

#endif  // QUIRE_FFI_STATE_CHUNKS_H_
