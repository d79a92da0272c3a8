// Sections of chunks: the rows of attention layers and the states of recurrent ones, out of the
// caches and back, for chunks of a prefix chain and for those of a snapshot.
//
// Attention layers come first, in their order, then the recurrent ones.
#ifndef QUIRE_KV_KV_SECTIONS_H_
#define QUIRE_KV_KV_SECTIONS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "quire/chunk.h"
#include "quire/kv_export.h"

namespace quire {

// Of each attention layer the positions whose rows are left out: one range, which may be empty.
using HiddenRanges = std::vector<TokenRange>;

// What the next query of a sequence of `length` tokens does not see.
HiddenRanges HiddenOfLayers(const SequenceStates& states, const SequenceWindows& windows,
                            int64_t length);

int64_t AttentionLayerCount(const SequenceStates& states);
// Shape of a recurrent layer's state.
std::vector<int64_t> StateDims(const RecurrentLayerSpec& layer);
// The sections of all recurrent layers, none without any.
std::vector<SectionSpec> StateSections(const SequenceStates& states);
// Writes the states at `position` into these sections of the writer.
Status ExportStates(const SequenceStates& states, int64_t seq_id, int64_t position,
                    ChunkWriter& writer);
// The verified states of all recurrent layers in a chunk. Corrupt, Incompatible.
Result<std::vector<TensorView>> StatesOf(const ChunkView& chunk, const SequenceStates& states);

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

#endif  // QUIRE_KV_KV_SECTIONS_H_
