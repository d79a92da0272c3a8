// Sections of chunks: the rows of attention layers and the states of recurrent ones, out of the
// caches and back, for chunks of a prefix chain and for those of a snapshot.
//
// Attention layers come first, in their order, then the recurrent ones.
#ifndef QUIRE_KV_CHUNKS_KV_SECTIONS_H_
#define QUIRE_KV_CHUNKS_KV_SECTIONS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "quire/chunk.h"
#include "quire/kv_export.h"

namespace quire {

// For each attention layer the positions whose rows are left out: one range, which may be empty.
using HiddenRanges = std::vector<TokenRange>;

// What the next query of a sequence of `length` tokens does not see.
HiddenRanges HiddenOfLayers(const SequenceStates& states, const WindowSettings& windows,
                            int64_t length);

int64_t AttentionLayerCount(const SequenceStates& states);
// A tensor of a recurrent part's states.
struct StateTensor {
  StateKind kind = StateKind::kRecurrent;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape{};
};
// In the order in which RecurrentState exports them. BadArgument for a RecurrentState that is
// neither a RecurrentCache nor an RNNState: what its tensors are is not known.
Result<std::vector<StateTensor>> StateTensorsOf(const RecurrentState& part);
// The sections of all recurrent parts' tensors, a layer for each, none without any.
Result<std::vector<SectionSpec>> StateSections(const SequenceStates& states);
// Writes the states at `position` into these sections of the writer.
Status ExportStates(const SequenceStates& states, int64_t seq_id, int64_t position,
                    ChunkWriter& writer);
// The verified states of all recurrent parts in a chunk: [part][tensor]. Corrupt, Incompatible.
Result<std::vector<std::vector<TensorView>>> StatesOf(const ChunkView& chunk,
                                                      const SequenceStates& states);

// A chunk of fields.tokens from position `start` on, without the rows in `hidden`; `with_states`:
// also with the states behind its last token.
Result<ChunkBuffer> ExportRows(const SequenceStates& states, int64_t seq_id, int64_t start,
                               ChunkFields fields, const HiddenRanges& hidden, bool with_states,
                               const ChunkWriteOptions& options);
// The block of a chunk whose tokens stand from `position` on and whose rows were `stored` without
// those there, but for what is hidden in `wanted`, which is as much or more at the begin. Only the
// sections of what is wanted are verified.
Result<KVBlock> ImportRows(const ChunkView& chunk, const SequenceStates& states, int64_t position,
                           const HiddenRanges& stored, const HiddenRanges& wanted);

}  // namespace quire

#endif  // QUIRE_KV_CHUNKS_KV_SECTIONS_H_
