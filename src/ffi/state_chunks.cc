#include "ffi/state_chunks.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/string.h>

#include <utility>

#include "ffi/snapshot.h"
#include "ffi/tensors.h"
#include "quire/seams.h"

namespace quire::ffi {
namespace {

// The chain that a request asks for.
struct Chain {
  Passport passport;
  std::vector<ChunkFields> chunks;
};

Result<Chain> ChainOf(const SequenceStates& states, const ChainRequest& request) {
  Chain chain;
  QUIRE_ASSIGN_OR_RETURN(chain.passport, CachePassport(states, request.identity, false));
  QUIRE_ASSIGN_OR_RETURN(const Digest fingerprint, chain.passport.Fingerprint());
  const KeySpace keys(fingerprint, request.salt);
  QUIRE_ASSIGN_OR_RETURN(chain.chunks,
                         ChainFields(chain.passport, keys, request.tokens, /*tail=*/true));
  return chain;
}

}  // namespace

ChainRequest ReadChainRequest(const OptionMap& fields) {
  ChainRequest request;
  OptionsReader reader("chunks", fields);
  ReadIdentityFields(reader, &request.identity);
  if (const auto tokens = reader.Get<tvm::ffi::Tensor>("tokens"))
    request.tokens = TokenIds(tvm::ffi::TensorView(*tokens));
  if (const auto salt = reader.Get<tvm::ffi::Bytes>("salt"))
    request.salt.assign(salt->data(), salt->size());
  reader.Finish();
  return request;
}

Result<ChunkBuffer> ExportLastChunk(const SequenceStates& states, int64_t seq_id,
                                    const ChainRequest& request) {
  QUIRE_ASSIGN_OR_RETURN(Chain chain, ChainOf(states, request));
  if (chain.chunks.empty()) {
    return Status(StatusCode::kBadArgument,
                  "export_chunk: no tokens; a chunk ends behind at least one");
  }
  ChunkFields& fields = chain.chunks.back();
  fields.created_ms = MachineTime()->WallMs();
  const auto start = static_cast<int64_t>(request.tokens.size() - fields.tokens.size());
  return ExportChunk(states, seq_id, start, std::move(fields));
}

Status ImportChain(const SequenceStates& states, int64_t seq_id, const ChainRequest& request,
                   std::span<const std::string_view> chunks) {
  QUIRE_ASSIGN_OR_RETURN(const Chain chain, ChainOf(states, request));
  if (chunks.size() != chain.chunks.size()) {
    return Status(StatusCode::kBadArgument,
                  "import_chunks: " + std::to_string(chunks.size()) + " chunks for " +
                      std::to_string(request.tokens.size()) + " tokens; these are in " +
                      std::to_string(chain.chunks.size()) + " of up to " +
                      std::to_string(chain.passport.block_tokens));
  }
  const ChunkLimits limits = ChunkLimits::Of(chain.passport);
  const int64_t now_ms = MachineTime()->WallMs();
  std::vector<ChunkView> views;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const ChunkFields& wanted = chain.chunks[i];
    const ChunkExpectation expected{.key = wanted.key,
                                    .fingerprint = wanted.fingerprint,
                                    .now_ms = now_ms,
                                    .tokens = std::span(wanted.tokens)};
    QUIRE_ASSIGN_OR_RETURN(ChunkView view,
                           ChunkView::Open(std::as_bytes(std::span(chunks[i])), expected, limits));
    views.push_back(std::move(view));
  }
  return ImportChunks(states, seq_id, views);
}

}  // namespace quire::ffi
