#include "kv/chunks/kv_sections.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "quire/recurrent_cache.h"
#include "quire/rnn_state.h"

namespace quire {
namespace {

// The sections of `count` tokens of a layer, in the order in which they stand in a chunk; none if
// there are no tokens.
std::vector<SectionSpec> SectionsOf(int64_t layer, const AttentionLayerSpec& spec, int64_t count) {
  QUIRE_DCHECK(layer >= 0 && count >= 0);
  if (count == 0) return {};
  const int64_t heads = spec.num_kv_heads;
  const auto section = [&](SectionKind kind, DType dtype, std::vector<int64_t> dims) {
    return SectionSpec{kind, layer, layer, dtype, std::move(dims)};
  };
  std::vector<SectionSpec> sections;
  if (!spec.latent) {
    sections.push_back(section(SectionKind::kKey, spec.dtype, {count, heads, spec.qk_head_dim}));
    sections.push_back(
        section(SectionKind::kValue, spec.value_dtype(), {count, heads, spec.v_head_dim}));
  }
  if (IsQuantised(spec.dtype))
    sections.push_back(section(SectionKind::kKeyScale, DType::kF32, {count, heads}));
  if (!spec.latent && IsQuantised(spec.value_dtype()))
    sections.push_back(section(SectionKind::kValueScale, DType::kF32, {count, heads}));
  // Behind its scales: sections of a layer ascend by kind.
  if (spec.latent)
    sections.push_back(section(SectionKind::kLatent, spec.dtype, {count, spec.qk_head_dim}));
  return sections;
}

// Adds the bytes of one of these sections to the layer's tensors.
void SetSection(const AttentionLayerSpec& spec, const SectionSpec& section,
                std::span<const std::byte> bytes, LayerKV* kv) {
  QUIRE_DCHECK(section.dims.size() >= 2);
  if (section.kind == SectionKind::kLatent) {
    kv->k = TensorView(bytes.data(), spec.dtype, {section.dims[0], int64_t{1}, section.dims[1]});
  } else if (section.kind == SectionKind::kKey) {
    kv->k =
        TensorView(bytes.data(), spec.dtype, {section.dims[0], section.dims[1], section.dims[2]});
  } else if (section.kind == SectionKind::kValue) {
    kv->v = TensorView(bytes.data(), spec.value_dtype(),
                       {section.dims[0], section.dims[1], section.dims[2]});
  } else {
    TensorView& scale = section.kind == SectionKind::kKeyScale ? kv->k_scale : kv->v_scale;
    scale = TensorView(bytes.data(), DType::kF32, {section.dims[0], section.dims[1]});
  }
}

// The verified bytes of the section that has exactly this shape.
Result<std::span<const std::byte>> FindSection(const ChunkView& chunk, const SectionSpec& wanted) {
  const int64_t index = chunk.header().Find(wanted.kind, wanted.layer_first);
  const bool fits =
      index >= 0 && static_cast<const SectionSpec&>(
                        chunk.header().sections[static_cast<size_t>(index)]) == wanted;
  if (fits) return chunk.section(index);
  std::string shape;
  for (const int64_t dim : wanted.dims) shape += (shape.empty() ? "" : ", ") + std::to_string(dim);
  return Status(StatusCode::kIncompatible,
                "ImportChunks: the chunk has no " + std::string(SectionKindName(wanted.kind)) +
                    " section of layer " + std::to_string(wanted.layer_first) + " in the shape [" +
                    shape + "] that this cache takes");
}

Status CheckPosition(const ChunkHeader& header, int64_t position) {
  if (header.first_position == kNotRotated || header.first_position == position) return Status();
  return Status(StatusCode::kIncompatible,
                "ImportChunks: the chunk's keys are rotated for position " +
                    std::to_string(header.first_position) + " and would stand at " +
                    std::to_string(position));
}

// The verified rows of `count` tokens of a layer.
Result<LayerKV> RowsOf(const ChunkView& chunk, const AttentionLayerSpec& spec, int64_t layer,
                       int64_t count) {
  LayerKV kv;
  for (const SectionSpec& section : SectionsOf(layer, spec, count)) {
    QUIRE_ASSIGN_OR_RETURN(const auto bytes, FindSection(chunk, section));
    SetSection(spec, section, bytes, &kv);
  }
  return kv;
}

// What is not hidden of [begin, end), in two pieces.
struct ShownPieces {
  TokenRange before;
  TokenRange behind;
  int64_t count() const { return before.count() + behind.count(); }
};
ShownPieces ShownOf(const TokenRange& hidden, int64_t begin, int64_t end) {
  QUIRE_DCHECK(begin <= end);
  const int64_t hole = std::clamp(hidden.begin, begin, end);
  const int64_t hole_end = std::clamp(hidden.end, hole, end);
  return {{begin, hole}, {hole_end, end}};
}

std::span<const AttentionLayerSpec> LayersOf(const SequenceStates& states) {
  if (states.attention() == nullptr) return {};
  return states.attention()->options().layers;
}

}  // namespace

int64_t AttentionLayerCount(const SequenceStates& states) {
  return static_cast<int64_t>(LayersOf(states).size());
}

HiddenRanges HiddenOfLayers(const SequenceStates& states, const WindowSettings& windows,
                            int64_t length) {
  HiddenRanges hidden;
  for (const AttentionLayerSpec& layer : LayersOf(states))
    hidden.push_back(HiddenTokens(windows, layer.window, length));
  return hidden;
}

namespace {

StateTensor TensorOf(const RecurrentLayerSpec& layer) {
  if (layer.kind == RecurrentLayerKind::kConvolution)
    return {.shape = {layer.width - 1, layer.num_channels}};
  return {.shape = {layer.num_heads, layer.key_dim, layer.value_dim}};
}

// Sections have four dimensions at most: of a state with five the first two are one.
std::vector<int64_t> SectionDims(std::vector<int64_t> shape) {
  constexpr size_t kDimsMax = 4;
  while (shape.size() > kDimsMax) {
    shape[1] *= shape[0];
    shape.erase(shape.begin());
  }
  return shape;
}

// Calls each(part, tensor, of the part, layer in a chunk) for all states, until one fails.
template <typename F>
Status ForEachState(const SequenceStates& states, F&& each) {
  int64_t layer = AttentionLayerCount(states);
  for (size_t part = 0; part < states.recurrent_count(); ++part) {
    int64_t index = 0;
    QUIRE_ASSIGN_OR_RETURN(const auto tensors, StateTensorsOf(states.recurrent(part)));
    for (const StateTensor& tensor : tensors)
      QUIRE_RETURN_IF_ERROR(each(part, tensor, index++, layer++));
  }
  return Status();
}

SectionSpec SectionOf(const StateTensor& tensor, int64_t layer) {
  return {SectionKind::kRecurrentState, layer, layer, tensor.dtype, SectionDims(tensor.shape)};
}

Result<TensorView> StateIn(const ChunkView& chunk, const StateTensor& tensor, int64_t layer) {
  QUIRE_ASSIGN_OR_RETURN(const auto bytes, FindSection(chunk, SectionOf(tensor, layer)));
  // An import only reads.
  return TensorView(const_cast<std::byte*>(bytes.data()), tensor.dtype, tensor.shape);
}

}  // namespace

Result<std::vector<StateTensor>> StateTensorsOf(const RecurrentState& part) {
  std::vector<StateTensor> tensors;
  if (const auto* cache = dynamic_cast<const RecurrentCache*>(&part)) {
    for (const RecurrentLayerSpec& layer : cache->options().layers)
      tensors.push_back(TensorOf(layer));
    return tensors;
  }
  const auto* rnn = dynamic_cast<const RNNState*>(&part);
  if (rnn == nullptr) {
    return Status(StatusCode::kBadArgument,
                  "a recurrent state that is neither a RecurrentCache nor an RNNState of this "
                  "library has no chunks");
  }
  for (int64_t layer = 0; layer < rnn->options().num_layers; ++layer) {
    for (const RNNStateSpec& state : rnn->options().states)
      tensors.push_back({StateKind::kCaller, state.dtype, state.shape});
  }
  return tensors;
}

Result<std::vector<SectionSpec>> StateSections(const SequenceStates& states) {
  std::vector<SectionSpec> sections;
  QUIRE_RETURN_IF_ERROR(ForEachState(
      states, [&](size_t, const StateTensor& tensor, int64_t, int64_t layer) -> Status {
        sections.push_back(SectionOf(tensor, layer));
        return Status();
      }));
  return sections;
}

Status ExportStates(const SequenceStates& states, int64_t seq_id, int64_t position,
                    ChunkWriter& writer) {
  return ForEachState(
      states, [&](size_t part, const StateTensor& tensor, int64_t index, int64_t layer) -> Status {
        const int64_t section = writer.header().Find(SectionKind::kRecurrentState, layer);
        QUIRE_ASSIGN_OR_RETURN(const std::span<std::byte> bytes, writer.section(section));
        const TensorView to(bytes.data(), tensor.dtype, tensor.shape);
        return states.recurrent(part).ExportState(index, seq_id, position, to);
      });
}

Result<std::vector<std::vector<TensorView>>> StatesOf(const ChunkView& chunk,
                                                      const SequenceStates& states) {
  std::vector<std::vector<TensorView>> parts(states.recurrent_count());
  QUIRE_RETURN_IF_ERROR(ForEachState(
      states, [&](size_t part, const StateTensor& tensor, int64_t, int64_t layer) -> Status {
        QUIRE_ASSIGN_OR_RETURN(parts[part].emplace_back(), StateIn(chunk, tensor, layer));
        return Status();
      }));
  return parts;
}

Result<ChunkBuffer> ExportRows(const SequenceStates& states, int64_t seq_id, int64_t start,
                               ChunkFields fields, const HiddenRanges& hidden, bool with_states,
                               const ChunkWriteOptions& options) {
  const std::span<const AttentionLayerSpec> layers = LayersOf(states);
  QUIRE_DCHECK(hidden.size() == layers.size());
  const int64_t end = start + static_cast<int64_t>(fields.tokens.size());
  std::vector<SectionSpec> sections;
  std::vector<ShownPieces> shown;
  for (size_t l = 0; l < layers.size(); ++l) {
    shown.push_back(ShownOf(hidden[l], start, end));
    for (SectionSpec& section : SectionsOf(static_cast<int64_t>(l), layers[l], shown[l].count()))
      sections.push_back(std::move(section));
  }
  const int64_t first_state = static_cast<int64_t>(sections.size());
  if (with_states) {
    QUIRE_ASSIGN_OR_RETURN(const std::vector<SectionSpec> of_states, StateSections(states));
    sections.insert(sections.end(), of_states.begin(), of_states.end());
  }
  QUIRE_ASSIGN_OR_RETURN(ChunkWriter writer,
                         ChunkWriter::Create(std::move(fields), sections, options));
  for (int64_t s = 0; s < first_state;) {
    const int64_t layer = sections[static_cast<size_t>(s)].layer_first;
    LayerKV to;
    for (; s < first_state && sections[static_cast<size_t>(s)].layer_first == layer; ++s) {
      QUIRE_ASSIGN_OR_RETURN(const std::span<std::byte> bytes, writer.section(s));
      SetSection(layers[static_cast<size_t>(layer)], sections[static_cast<size_t>(s)], bytes, &to);
    }
    int64_t row = 0;
    const ShownPieces& pieces = shown[static_cast<size_t>(layer)];
    for (const TokenRange& piece : {pieces.before, pieces.behind}) {
      if (piece.count() == 0) continue;
      QUIRE_RETURN_IF_ERROR(states.attention()->ExportKV(seq_id, layer, piece.begin,
                                                         SomeTokens(to, row, piece.count())));
      row += piece.count();
    }
    QUIRE_DCHECK(row == pieces.count() && row > 0) << "layer " << layer;
  }
  if (with_states) QUIRE_RETURN_IF_ERROR(ExportStates(states, seq_id, end, writer));
  return std::move(writer).Seal();
}

Result<KVBlock> ImportRows(const ChunkView& chunk, const SequenceStates& states, int64_t position,
                           const HiddenRanges& stored, const HiddenRanges& wanted) {
  QUIRE_RETURN_IF_ERROR(CheckPosition(chunk.header(), position));
  const std::span<const AttentionLayerSpec> layers = LayersOf(states);
  const int64_t end = position + static_cast<int64_t>(chunk.header().tokens.size());
  KVBlock block(layers.size());
  QUIRE_DCHECK(stored.size() == layers.size() && wanted.size() == layers.size());
  for (size_t l = 0; l < layers.size(); ++l) {
    const int64_t held = ShownOf(stored[l], position, end).count();
    const int64_t count = ShownOf(wanted[l], position, end).count();
    QUIRE_DCHECK(held >= count) << "layer " << l << " wants rows that no chunk holds";
    if (count == 0) continue;
    QUIRE_ASSIGN_OR_RETURN(const LayerKV rows,
                           RowsOf(chunk, layers[l], static_cast<int64_t>(l), held));
    block[l] = SomeTokens(rows, held - count, count);
  }
  return block;
}

Result<LayerKV> ChunkLayer(const ChunkView& chunk, const AttentionLayerSpec& spec, int64_t layer,
                           int64_t position, int64_t end) {
  QUIRE_RETURN_IF_ERROR(CheckPosition(chunk.header(), position));
  const int64_t chunk_end = position + static_cast<int64_t>(chunk.header().tokens.size());
  const TokenRange stored = HiddenTokens({}, spec.window, chunk_end);
  const TokenRange wanted = HiddenTokens({}, spec.window, end);
  const int64_t held = ShownOf(stored, position, chunk_end).count();
  const int64_t hidden = held - ShownOf(wanted, position, chunk_end).count();
  const int64_t count = held - hidden - std::max<int64_t>(chunk_end - end, 0);
  QUIRE_DCHECK(hidden >= 0 && count >= 0);
  if (count == 0) return LayerKV{};
  QUIRE_ASSIGN_OR_RETURN(const LayerKV rows, RowsOf(chunk, spec, layer, held));
  return SomeTokens(rows, hidden, count);
}

LayerKV SomeTokens(const LayerKV& kv, int64_t first, int64_t count) {
  const auto some = [&](const TensorView& rows) {
    if (rows.rank() == 0) return rows;  // scales, where there are none
    QUIRE_DCHECK(first >= 0 && count >= 0 && count <= rows.dim(0) - first);
    std::vector<int64_t> shape(rows.shape().begin(), rows.shape().end());
    shape[0] = count;
    const int64_t offset = first * rows.stride(0) * DTypeBytes(rows.dtype());
    return TensorView(static_cast<std::byte*>(rows.data()) + offset, rows.dtype(), shape);
  };
  return {
      .k = some(kv.k), .v = some(kv.v), .k_scale = some(kv.k_scale), .v_scale = some(kv.v_scale)};
}

Result<TensorView> ChunkState(const ChunkView& chunk, const SequenceStates& states, int64_t layer) {
  if (states.recurrent_count() == 0) {
    return Status(StatusCode::kBadArgument, "ChunkState: there is no recurrent state");
  }
  QUIRE_ASSIGN_OR_RETURN(const auto tensors, StateTensorsOf(states.recurrent(0)));
  if (layer < 0 || layer >= static_cast<int64_t>(tensors.size())) {
    return Status(StatusCode::kBadArgument, "ChunkState: layer " + std::to_string(layer) +
                                                " is not in [0, " + std::to_string(tensors.size()) +
                                                ")");
  }
  return StateIn(chunk, tensors[static_cast<size_t>(layer)], AttentionLayerCount(states) + layer);
}

}  // namespace quire
