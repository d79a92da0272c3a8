#include "kv/recurrent/recurrent_cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "kv/pages/page_storage.h"
#include "kv/plan/memory_overlap.h"

namespace quire {

Result<std::unique_ptr<RecurrentCache>> RecurrentCache::Create(RecurrentCacheOptions options) {
  return SlottedRecurrentCache::Create(std::move(options));
}

Result<std::unique_ptr<RecurrentCache>> SlottedRecurrentCache::Create(
    RecurrentCacheOptions options) {
  return GuardEntry([&]() -> Result<std::unique_ptr<RecurrentCache>> {
    QUIRE_ASSIGN_OR_RETURN(RecurrentLayout layout, MakeRecurrentLayout(options));
    const Result<const Backend*> backend = FindBackend(options.kernel_path);
    if (!backend.ok()) {
      return Status(backend.status().code(), "RecurrentCacheOptions: kernel_path: " +
                                                 std::string(backend.status().message()));
    }
    QUIRE_ASSIGN_OR_RETURN(HostMemory storage,
                           HostMemory::Allocate(static_cast<size_t>(layout.storage_bytes())));
    if (options.runner == nullptr) {
      QUIRE_ASSIGN_OR_RETURN(options.runner, CreateThreadPool(0));
    }
    if (NumaNodes* const nodes = options.runner->numa_nodes(); nodes != nullptr) {
      nodes->Spread(storage.data(), storage.size());
    }
    options.kernel_path = (*backend)->name;
    return std::unique_ptr<RecurrentCache>(new SlottedRecurrentCache(
        std::move(options), std::move(layout), std::move(storage), *backend));
  });
}

SlottedRecurrentCache::SlottedRecurrentCache(RecurrentCacheOptions options, RecurrentLayout layout,
                                             HostMemory storage, const Backend* backend)
    : RecurrentBase(layout.history),
      options_(std::move(options)),
      layout_(std::move(layout)),
      storage_(std::move(storage)),
      blocks_(storage_.as<float>() + history_.slots().slot_count() * layout_.slot_size),
      backend_(backend),
      done_(layout_.layers.size(), 0),
      loaded_(layout_.layers.size(), 0) {
  if (!options_.poison_freed_slots) return;
  std::memset(storage_.data(), kPoisonByte, storage_.size());
  slot_poisoner_.base = storage_.as<float>();
  slot_poisoner_.size = layout_.slot_size;
  history_.slots().set_listener(&slot_poisoner_);
  block_poisoner_.base = blocks_;
  block_poisoner_.size = layout_.block_size;
  history_.blocks().set_listener(&block_poisoner_);
}

void SlottedRecurrentCache::Poisoner::OnSlotFreed(int32_t slot) noexcept {
  std::memset(base + slot * size, kPoisonByte, static_cast<size_t>(size) * sizeof(float));
}

void SlottedRecurrentCache::AppendFacts(std::vector<int64_t>& facts) const {
  for (const uint8_t done : done_) facts.push_back(history_.in_forward() && done != 0);
}

// ---------------------------------------------------------------------- control

Status SlottedRecurrentCache::PlanCall(const ControlCall& call) {
  const bool begins =
      call.kind == ControlCall::Kind::kBegin || call.kind == ControlCall::Kind::kBeginTree;
  if (begins) return PlanForward(call);
  if (call.kind == ControlCall::Kind::kImport) return PlanImport(call);
  if (call.kind == ControlCall::Kind::kEnd && history_.in_forward()) {
    QUIRE_RETURN_IF_ERROR(CheckLayersDone());
  }
  QUIRE_RETURN_IF_ERROR(history_.Plan(call));
  if (history_.replay().needed) RunReplay();
  if (call.kind == ControlCall::Kind::kCommitTree) KeepAcceptedInputs();
  return Status();
}

void SlottedRecurrentCache::CommitCall() noexcept {
  const bool idle = !history_.in_forward();
  const ControlCall::Kind committed = history_.Commit();
  if (idle && history_.in_forward()) CommitForward();
  if (committed == ControlCall::Kind::kClear) ReleaseMemory();
}

void SlottedRecurrentCache::ReleaseMemory() noexcept {
  QUIRE_DCHECK(!history_.in_forward());
  FreeAll(slot_pieces_);
  FreeAll(pieces_);
  FreeAll(sequences_);
  scratch_.reset();
  scratch_size_ = 0;
  scratch_peak_ = {};
}

int64_t SlottedRecurrentCache::table_bytes() const {
  const size_t bytes = slot_pieces_.capacity() * sizeof(SlotPiece) +
                       pieces_.capacity() * sizeof(RecurrencePiece) +
                       sequences_.capacity() * sizeof(RecurrenceSequence);
  return history_.memory_bytes() + static_cast<int64_t>(bytes);
}

Status SlottedRecurrentCache::CheckLayersDone() const {
  for (size_t l = 0; l < done_.size(); ++l) {
    if (done_[l] != 0) continue;
    return Status(StatusCode::kBadState, "EndForward: layer " + std::to_string(l) +
                                             " was not run; run every layer, or call AbortForward");
  }
  return Status();
}

Status SlottedRecurrentCache::PlanForward(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(history_.Plan(call));
  const int64_t row_count = history_.row_count();
  if (row_count > options_.prefill_chunk_size) {
    history_.Drop();
    return Status(StatusCode::kTooLarge, std::string(call.name()) + ": " +
                                             std::to_string(row_count) +
                                             " new tokens are over prefill_chunk_size, " +
                                             std::to_string(options_.prefill_chunk_size));
  }
  size_t piece_count = 0;
  for (const StateMember& member : history_.members()) {
    piece_count += member.is_tree ? static_cast<size_t>(member.row_count) : member.pending.size();
  }
  slot_pieces_.reserve(piece_count);
  pieces_.reserve(piece_count);
  sequences_.reserve(history_.members().size());
  // As much as this forward needs and recent ones did; what is four times that is given back.
  const auto size = static_cast<int64_t>(
      scratch_peak_.Count(static_cast<size_t>(layout_.scratch_floats(row_count))));
  if (size <= scratch_size_ && scratch_size_ / 4 <= size) return Status();
  scratch_size_ = 0;
  scratch_.reset();
  scratch_ = std::unique_ptr<float[]>(new float[static_cast<size_t>(size)]);
  scratch_size_ = size;
  if (options_.poison_freed_slots)
    std::memset(scratch_.get(), kPoisonByte, static_cast<size_t>(size) * sizeof(float));
  return Status();
}

void SlottedRecurrentCache::CommitForward() noexcept {
  slot_pieces_.clear();
  sequences_.clear();
  std::fill(done_.begin(), done_.end(), uint8_t{0});
  std::fill(loaded_.begin(), loaded_.end(), uint8_t{0});
  for (const StateMember& member : history_.members()) {
    if (member.is_tree) {
      AddNodePieces(member);
      continue;
    }
    std::span<const StateRecord> records = member.pending;
    int64_t position = member.base;
    int32_t from = member.current;
    if (member.imported > 0) {  // each layer's state will be there when it is run
      from = records.front().slot;
      records = records.subspan(1);
    }
    sequences_.push_back({.first_piece = static_cast<int64_t>(slot_pieces_.size()),
                          .piece_count = static_cast<int64_t>(records.size())});
    for (const StateRecord& record : records) {
      slot_pieces_.push_back({.first_row = member.first_row + position - member.base,
                              .row_count = record.position - position,
                              .from = from,
                              .to = record.slot});
      position = record.position;
      from = record.slot;
    }
    QUIRE_DCHECK(position == member.end()) << "rows of the member are in no piece";
    CopySharedBlock(member);
  }
}

// Copies from the block with whose inputs the member's first new one begins.
void SlottedRecurrentCache::CopySharedBlock(const StateMember& member) noexcept {
  if (member.copied_block < 0) return;
  const int64_t token_count = member.base % kRecurrentCheckpointInterval;
  CopyInputs(member.copied_block, 0, member.blocks[member.first_new_block].slot, 0, token_count);
}

void SlottedRecurrentCache::CopyInputs(int32_t from, int64_t from_token, int32_t to,
                                       int64_t to_token, int64_t count) noexcept {
  QUIRE_DCHECK(from_token >= 0 && from_token + count <= kRecurrentCheckpointInterval);
  QUIRE_DCHECK(to_token >= 0 && to_token + count <= kRecurrentCheckpointInterval);
  for (const RecurrentLayerLayout& layer : layout_.layers) {
    const int64_t size = layer.input_size();
    std::memcpy(InputsIn(to, layer.input_offset) + to_token * size,
                InputsIn(from, layer.input_offset) + from_token * size,
                static_cast<size_t>(count * size) * sizeof(float));
  }
}

// A node is a piece of one token that starts from its parent's state. Parents come first.
void SlottedRecurrentCache::AddNodePieces(const StateMember& member) noexcept {
  sequences_.push_back(
      {.first_piece = static_cast<int64_t>(slot_pieces_.size()), .piece_count = member.row_count});
  bool is_known = false;
  for (int64_t row = member.first_row; row < member.first_row + member.row_count; ++row) {
    QUIRE_DCHECK(slot_pieces_.size() < slot_pieces_.capacity()) << "no room was reserved";
    slot_pieces_.push_back({.first_row = row,
                            .row_count = 1,
                            .from = history_.batch().SlotBeforeRow(row, &is_known),
                            .to = history_.batch().SlotOfRow(row)});
  }
}

// Into the blocks that the commit will make the sequences': new ones, and room behind the ends of
// those that nobody else holds.
void SlottedRecurrentCache::KeepAcceptedInputs() noexcept {
  for (const StateMember& member : history_.members()) {
    CopySharedBlock(member);
    const std::vector<int32_t>& from = history_.track(member.index).tree.blocks;
    for (const InputBlock& block : member.blocks) {
      const int64_t first = block.index * kRecurrentCheckpointInterval;
      const int64_t end = std::min(first + kRecurrentCheckpointInterval, member.end());
      for (int64_t p = std::max(first, member.base); p < end; ++p) {
        const int64_t node = member.path[static_cast<size_t>(p - member.base)];
        CopyInputs(from[static_cast<size_t>(node / kRecurrentCheckpointInterval)],
                   node % kRecurrentCheckpointInterval, block.slot, p - first, 1);
      }
    }
  }
}

void SlottedRecurrentCache::RunReplay() noexcept {
  const ReplayPlan& replay = history_.replay();
  const RecurrenceSequence sequence{.first_piece = 0, .piece_count = 1};
  for (const RecurrentLayerLayout& layer : layout_.layers) {
    const RecurrencePiece piece{
        .row_count = replay.position - replay.from,
        .from = replay.from_slot < 0 ? nullptr : StateIn(replay.from_slot, layer.state_offset),
        .to = StateIn(replay.to_slot, layer.state_offset)};
    const float* const inputs = InputsIn(replay.block, layer.input_offset) +
                                replay.from % kRecurrentCheckpointInterval * layer.input_size();
    const RecurrenceBatch batch{.sequences = {&sequence, 1}, .pieces = &piece};
    if (layer.convolution) {
      backend_->recurrence->convolve({.shape = layer.channels, .batch = batch, .x = inputs},
                                     *options_.runner);
    } else {
      backend_->recurrence->advance_matrix(
          {.shape = layer.matrix, .batch = batch, .inputs = inputs}, *options_.runner);
    }
  }
}

// ---------------------------------------------------------------------- arguments

namespace {

const char* KindName(RecurrentLayerKind kind) {
  switch (kind) {
    case RecurrentLayerKind::kLinearAttention:
      return "LinearAttention";
    case RecurrentLayerKind::kGatedDelta:
      return "GatedDelta";
    case RecurrentLayerKind::kStateSpace:
      return "StateSpace";
    case RecurrentLayerKind::kConvolution:
      break;
  }
  return "Convolution";
}

bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

std::string ShapeText(std::initializer_list<int64_t> dims) {
  std::string text;
  for (const int64_t dim : dims) text += (text.empty() ? "" : ", ") + std::to_string(dim);
  return text;
}

// Axes [first_axis, rank) are `dims`, contiguous.
bool IsContiguousFrom(const TensorView& tensor, int first_axis,
                      std::initializer_list<int64_t> dims) {
  if (tensor.rank() != first_axis + static_cast<int>(dims.size())) return false;
  int64_t stride = 1;
  for (int axis = tensor.rank(); axis-- > first_axis;) {
    if (tensor.dim(axis) != dims.begin()[axis - first_axis]) return false;
    if (tensor.dim(axis) != 1 && tensor.stride(axis) != stride) return false;
    stride *= tensor.dim(axis);
  }
  return true;
}

int64_t RowSize(const TensorView& tensor) {
  int64_t size = 1;
  for (int axis = 1; axis < tensor.rank(); ++axis) size *= tensor.dim(axis);
  return size;
}

}  // namespace

Result<SlottedRecurrentCache::LayerCall> SlottedRecurrentCache::BeginLayer(
    const char* name, int64_t layer, RecurrentLayerKind kind) const {
  QUIRE_RETURN_IF_ERROR(history_.RequireForward(name));
  if (layer < 0 || layer >= static_cast<int64_t>(layout_.layers.size())) {
    return Status(StatusCode::kBadArgument, std::string(name) + ": no layer " +
                                                std::to_string(layer) + "; there are " +
                                                std::to_string(layout_.layers.size()));
  }
  const RecurrentLayerKind own = options_.layers[static_cast<size_t>(layer)].kind;
  if (own != kind) {
    return Status(StatusCode::kBadArgument, std::string(name) + ": layer " + std::to_string(layer) +
                                                " is of kind " + KindName(own));
  }
  return LayerCall{name, layer, &layout_.layers[static_cast<size_t>(layer)]};
}

SlottedRecurrentCache::Scratch SlottedRecurrentCache::ScratchOf(const LayerCall& call) const {
  const int64_t rows = history_.row_count();
  Scratch scratch;
  scratch.parameters = scratch_.get();
  scratch.inputs = scratch.parameters + layout_.parameter_scratch;
  scratch.side = scratch.inputs + rows * call.layout->input_size();
  scratch.output = scratch.side + rows * call.layout->side_size();
  QUIRE_DCHECK(scratch.output + rows * call.layout->output_size() <= scratch_.get() + scratch_size_)
      << "a layer writes behind the scratch memory";
  return scratch;
}

Status SlottedRecurrentCache::CheckRows(const LayerCall& call, const char* name,
                                        const TensorView& tensor,
                                        std::initializer_list<int64_t> dims) const {
  if (tensor.data() != nullptr && IsFloat(tensor.dtype()) && IsContiguousFrom(tensor, 1, dims) &&
      tensor.dim(0) >= history_.row_count()) {
    return Status();
  }
  return Status(StatusCode::kBadArgument,
                std::string(call.name) + ": layer " + std::to_string(call.layer) + ": " + name +
                    " is " + tensor.ToString() +
                    "; it must be float32, float16 or bfloat16 [m >= " +
                    std::to_string(history_.row_count()) + ", " + ShapeText(dims) +
                    "], contiguous but for its first axis");
}

// Inputs are read before the outputs are written, so that both may share memory.
Status SlottedRecurrentCache::CheckOutput(const LayerCall& call, const TensorView& o,
                                          std::initializer_list<int64_t> dims) const {
  QUIRE_RETURN_IF_ERROR(CheckRows(call, "o", o, dims));
  return CheckOutputs({.name = call.name, .layer = call.layer}, {{"o", &o}}, {},
                      history_.row_count());
}

Status SlottedRecurrentCache::CheckWhole(const LayerCall& call, const char* name,
                                         const TensorView& tensor,
                                         std::initializer_list<int64_t> dims) const {
  if (tensor.data() != nullptr && IsFloat(tensor.dtype()) && IsContiguousFrom(tensor, 0, dims))
    return Status();
  return Status(StatusCode::kBadArgument,
                std::string(call.name) + ": layer " + std::to_string(call.layer) + ": " + name +
                    " is " + tensor.ToString() + "; it must be float32, float16 or bfloat16 [" +
                    ShapeText(dims) + "], contiguous");
}

Status SlottedRecurrentCache::CheckDecay(const LayerCall& call, const TensorView& decay) const {
  const int64_t heads = call.layout->matrix.head_count;
  return decay.rank() == 1 ? CheckWhole(call, "decay", decay, {heads})
                           : CheckRows(call, "decay", decay, {heads});
}

void SlottedRecurrentCache::Widen(const TensorView& tensor, float* to, int64_t to_stride) noexcept {
  backend_->recurrence->convert_rows({.row_count = history_.row_count(),
                                      .size = RowSize(tensor),
                                      .from = tensor.data(),
                                      .from_dtype = tensor.dtype(),
                                      .from_stride = tensor.stride(0),
                                      .to = to,
                                      .to_stride = to_stride},
                                     *options_.runner);
}

void SlottedRecurrentCache::WidenWhole(const TensorView& tensor, float* to) noexcept {
  backend_->recurrence->convert_rows({.row_count = 1,
                                      .size = tensor.element_count(),
                                      .from = tensor.data(),
                                      .from_dtype = tensor.dtype(),
                                      .to = to},
                                     *options_.runner);
}

void SlottedRecurrentCache::WidenDecay(const TensorView& decay, float* to,
                                       int64_t to_stride) noexcept {
  if (decay.rank() > 1) return Widen(decay, to, to_stride);
  backend_->recurrence->convert_rows({.row_count = history_.row_count(),
                                      .size = decay.dim(0),
                                      .from = decay.data(),
                                      .from_dtype = decay.dtype(),
                                      .to = to,
                                      .to_stride = to_stride},
                                     *options_.runner);
}

// ---------------------------------------------------------------------- layers

RecurrenceBatch SlottedRecurrentCache::BatchOf(const LayerCall& call) noexcept {
  const int64_t offset = call.layout->state_offset;
  QUIRE_DCHECK(pieces_.capacity() >= slot_pieces_.size()) << "no room was reserved";
  pieces_.clear();
  for (const SlotPiece& piece : slot_pieces_) {
    pieces_.push_back({.first_row = piece.first_row,
                       .row_count = piece.row_count,
                       .from = piece.from < 0 ? nullptr : StateIn(piece.from, offset),
                       .to = StateIn(piece.to, offset)});
  }
  return {.sequences = sequences_, .pieces = pieces_.data()};
}

void SlottedRecurrentCache::FinishLayer(const LayerCall& call, const TensorView& o) noexcept {
  QUIRE_DCHECK(o.dim(0) >= history_.row_count());
  KeepInputs(call);
  backend_->recurrence->convert_rows({.row_count = history_.row_count(),
                                      .size = call.layout->output_size(),
                                      .from = ScratchOf(call).output,
                                      .from_stride = call.layout->output_size(),
                                      .to = o.data(),
                                      .to_dtype = o.dtype(),
                                      .to_stride = o.stride(0)},
                                     *options_.runner);
  done_[static_cast<size_t>(call.layer)] = 1;
}

void SlottedRecurrentCache::KeepInputs(const LayerCall& call) noexcept {
  const int64_t size = call.layout->input_size();
  const float* const inputs = ScratchOf(call).inputs;
  for (const StateMember& member : history_.members()) {
    const StateTree& tree = history_.track(member.index).tree;
    for (int64_t row = member.first_row;
         member.is_tree && row < member.first_row + member.row_count; ++row) {
      const int64_t node = history_.batch().NodeOfRow(member, row);
      const int32_t block = tree.blocks[static_cast<size_t>(node / kRecurrentCheckpointInterval)];
      std::memcpy(
          InputsIn(block, call.layout->input_offset) + node % kRecurrentCheckpointInterval * size,
          inputs + row * size, static_cast<size_t>(size) * sizeof(float));
    }
    for (const InputBlock& block : member.blocks) {
      const int64_t first = block.index * kRecurrentCheckpointInterval;
      const int64_t begin = std::max(first, member.base);
      const int64_t end = std::min(first + kRecurrentCheckpointInterval, member.end());
      if (begin >= end) continue;  // a block of earlier tokens
      std::memcpy(InputsIn(block.slot, call.layout->input_offset) + (begin - first) * size,
                  inputs + (member.first_row + begin - member.base) * size,
                  static_cast<size_t>((end - begin) * size) * sizeof(float));
    }
  }
}

Status SlottedRecurrentCache::RunMatrix(const LayerCall& call, const TensorView& q,
                                        const TensorView& k, const TensorView& v,
                                        const TensorView& decay, const TensorView* beta,
                                        const TensorView& o, double sm_scale) {
  const MatrixStateShape& shape = call.layout->matrix;
  QUIRE_RETURN_IF_ERROR(CheckRows(call, "q", q, {shape.key_head_count, shape.key_dim}));
  QUIRE_RETURN_IF_ERROR(CheckRows(call, "k", k, {shape.key_head_count, shape.key_dim}));
  QUIRE_RETURN_IF_ERROR(CheckRows(call, "v", v, {shape.head_count, shape.value_dim}));
  QUIRE_RETURN_IF_ERROR(CheckDecay(call, decay));
  if (beta != nullptr) QUIRE_RETURN_IF_ERROR(CheckRows(call, "beta", *beta, {shape.head_count}));
  QUIRE_RETURN_IF_ERROR(CheckOutput(call, o, {shape.head_count, shape.value_dim}));
  if (!std::isfinite(sm_scale)) {
    return Status(StatusCode::kBadArgument, std::string(call.name) + ": layer " +
                                                std::to_string(call.layer) + ": sm_scale is " +
                                                std::to_string(sm_scale) + "; it must be finite");
  }
  QUIRE_RETURN_IF_ERROR(LoadStates(call));
  const Scratch scratch = ScratchOf(call);
  const int64_t stride = shape.input_size();
  Widen(q, scratch.side, shape.value_offset());
  Widen(k, scratch.inputs, stride);
  Widen(v, scratch.inputs + shape.value_offset(), stride);
  WidenDecay(decay, scratch.inputs + shape.decay_offset(), stride);
  if (beta != nullptr) Widen(*beta, scratch.inputs + shape.beta_offset(), stride);
  backend_->recurrence->advance_matrix({.shape = shape,
                                        .batch = BatchOf(call),
                                        .inputs = scratch.inputs,
                                        .q = scratch.side,
                                        .scale = static_cast<float>(sm_scale),
                                        .o = scratch.output},
                                       *options_.runner);
  FinishLayer(call, o);
  return Status();
}

Status SlottedRecurrentCache::LinearAttention(int64_t layer, const TensorView& q,
                                              const TensorView& k, const TensorView& v,
                                              const TensorView& decay, const TensorView& o,
                                              double sm_scale) {
  return Enter("LinearAttention", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const LayerCall call, BeginLayer("LinearAttention", layer,
                                                            RecurrentLayerKind::kLinearAttention));
    return RunMatrix(call, q, k, v, decay, nullptr, o, sm_scale);
  });
}

Status SlottedRecurrentCache::GatedDelta(int64_t layer, const TensorView& q, const TensorView& k,
                                         const TensorView& v, const TensorView& decay,
                                         const TensorView& beta, const TensorView& o,
                                         double sm_scale) {
  return Enter("GatedDelta", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const LayerCall call,
                           BeginLayer("GatedDelta", layer, RecurrentLayerKind::kGatedDelta));
    return RunMatrix(call, q, k, v, decay, &beta, o, sm_scale);
  });
}

Status SlottedRecurrentCache::StateSpace(int64_t layer, const TensorView& x, const TensorView& dt,
                                         const TensorView& a, const TensorView& b,
                                         const TensorView& c, const TensorView* d,
                                         const TensorView& o) {
  return Enter("StateSpace", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const LayerCall call,
                           BeginLayer("StateSpace", layer, RecurrentLayerKind::kStateSpace));
    const MatrixStateShape& shape = call.layout->matrix;
    QUIRE_RETURN_IF_ERROR(CheckRows(call, "x", x, {shape.head_count, shape.value_dim}));
    QUIRE_RETURN_IF_ERROR(CheckRows(call, "dt", dt, {shape.head_count}));
    QUIRE_RETURN_IF_ERROR(CheckWhole(call, "a", a, {shape.head_count}));
    QUIRE_RETURN_IF_ERROR(CheckRows(call, "b", b, {shape.key_head_count, shape.key_dim}));
    QUIRE_RETURN_IF_ERROR(CheckRows(call, "c", c, {shape.key_head_count, shape.key_dim}));
    if (d != nullptr) QUIRE_RETURN_IF_ERROR(CheckWhole(call, "d", *d, {shape.head_count}));
    QUIRE_RETURN_IF_ERROR(CheckOutput(call, o, {shape.head_count, shape.value_dim}));
    QUIRE_RETURN_IF_ERROR(LoadStates(call));
    const Scratch scratch = ScratchOf(call);
    const int64_t row_count = history_.row_count();
    const int64_t stride = shape.input_size();
    float* const wide_x = scratch.side + row_count * shape.value_offset();
    float* const wide_a = scratch.parameters;
    float* const wide_d = wide_a + shape.head_count;
    // The steps wait where the outputs will be written: they are used up before.
    Widen(x, wide_x, shape.head_count * shape.value_dim);
    Widen(dt, scratch.output, shape.head_count);
    WidenWhole(a, wide_a);
    Widen(b, scratch.inputs, stride);
    Widen(c, scratch.side, shape.value_offset());
    const RecurrenceKernels& kernels = *backend_->recurrence;
    kernels.discretize({.row_count = row_count,
                        .head_count = shape.head_count,
                        .head_dim = shape.value_dim,
                        .x = wide_x,
                        .dt = scratch.output,
                        .a = wide_a,
                        .v = scratch.inputs + shape.value_offset(),
                        .decay = scratch.inputs + shape.decay_offset(),
                        .stride = stride},
                       *options_.runner);
    kernels.advance_matrix({.shape = shape,
                            .batch = BatchOf(call),
                            .inputs = scratch.inputs,
                            .q = scratch.side,
                            .o = scratch.output},
                           *options_.runner);
    if (d != nullptr) {
      WidenWhole(*d, wide_d);
      kernels.add_skip({.row_count = row_count,
                        .head_count = shape.head_count,
                        .head_dim = shape.value_dim,
                        .x = wide_x,
                        .d = wide_d,
                        .o = scratch.output},
                       *options_.runner);
    }
    FinishLayer(call, o);
    return Status();
  });
}

Status SlottedRecurrentCache::Convolution(int64_t layer, const TensorView& x,
                                          const TensorView& weight, const TensorView* bias,
                                          bool silu, const TensorView& o) {
  return Enter("Convolution", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const LayerCall call,
                           BeginLayer("Convolution", layer, RecurrentLayerKind::kConvolution));
    const ConvolutionShape& shape = call.layout->channels;
    QUIRE_RETURN_IF_ERROR(CheckRows(call, "x", x, {shape.channel_count}));
    QUIRE_RETURN_IF_ERROR(CheckWhole(call, "weight", weight, {shape.channel_count, shape.width}));
    if (bias != nullptr)
      QUIRE_RETURN_IF_ERROR(CheckWhole(call, "bias", *bias, {shape.channel_count}));
    QUIRE_RETURN_IF_ERROR(CheckOutput(call, o, {shape.channel_count}));
    QUIRE_RETURN_IF_ERROR(LoadStates(call));
    const Scratch scratch = ScratchOf(call);
    float* const wide_weight = scratch.parameters;
    float* const wide_bias = wide_weight + shape.channel_count * shape.width;
    Widen(x, scratch.inputs, shape.channel_count);
    WidenWhole(weight, wide_weight);
    if (bias != nullptr) WidenWhole(*bias, wide_bias);
    backend_->recurrence->convolve({.shape = shape,
                                    .batch = BatchOf(call),
                                    .x = scratch.inputs,
                                    .weight = wide_weight,
                                    .bias = bias == nullptr ? nullptr : wide_bias,
                                    .silu = silu,
                                    .y = scratch.output},
                                   *options_.runner);
    FinishLayer(call, o);
    return Status();
  });
}

// ---------------------------------------------------------------------- states as bytes

Status SlottedRecurrentCache::CheckState(const char* call, int64_t layer, const char* name,
                                         const TensorView& state) const {
  if (layer < 0 || layer >= static_cast<int64_t>(layout_.layers.size())) {
    return Status(StatusCode::kBadArgument, std::string(call) + ": no layer " +
                                                std::to_string(layer) + "; there are " +
                                                std::to_string(layout_.layers.size()));
  }
  const RecurrentLayerLayout& layout = layout_.layers[static_cast<size_t>(layer)];
  const MatrixStateShape& matrix = layout.matrix;
  const LayerCall layer_call{call, layer, &layout};
  QUIRE_RETURN_IF_ERROR(layout.convolution
                            ? CheckWhole(layer_call, name, state,
                                         {layout.channels.width - 1, layout.channels.channel_count})
                            : CheckWhole(layer_call, name, state,
                                         {matrix.head_count, matrix.key_dim, matrix.value_dim}));
  if (state.dtype() == DType::kF32) return Status();
  return Status(StatusCode::kBadArgument, std::string(call) + ": " + name + " is " +
                                              state.ToString() + "; states are float32");
}

// Slot -1 is the initial state.
void SlottedRecurrentCache::CopyState(int64_t layer, int32_t slot, const TensorView& o) noexcept {
  const RecurrentLayerLayout& layout = layout_.layers[static_cast<size_t>(layer)];
  const size_t bytes = static_cast<size_t>(layout.state_size()) * sizeof(float);
  if (slot < 0) {
    std::memset(o.data(), 0, bytes);
  } else {
    std::memcpy(o.data(), StateIn(slot, layout.state_offset), bytes);
  }
}

Status SlottedRecurrentCache::DebugGet(int64_t layer, int64_t seq_id, const TensorView& o) {
  return Enter("DebugGet", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, history_.Find("DebugGet", seq_id));
    QUIRE_RETURN_IF_ERROR(CheckState("DebugGet", layer, "o", o));
    const std::vector<StateRecord>& records = history_.track(index).records;
    CopyState(layer, records.empty() ? -1 : records.back().slot, o);
    return Status();
  });
}

Status SlottedRecurrentCache::ExportState(int64_t layer, int64_t seq_id, int64_t position,
                                          const TensorView& o) {
  return Enter("ExportState", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t slot, history_.SlotAt("ExportState", seq_id, position));
    QUIRE_RETURN_IF_ERROR(CheckState("ExportState", layer, "o", o));
    CopyState(layer, slot, o);
    return Status();
  });
}

Status SlottedRecurrentCache::PlanImport(const ControlCall& call) {
  if (call.states.size() != layout_.layers.size()) {
    return Status(StatusCode::kBadArgument,
                  std::string(call.name()) + ": states of " + std::to_string(call.states.size()) +
                      " layers; this cache has " + std::to_string(layout_.layers.size()));
  }
  for (size_t l = 0; l < call.states.size(); ++l) {
    QUIRE_RETURN_IF_ERROR(
        CheckState(call.name(), static_cast<int64_t>(l), "the state", call.states[l]));
  }
  QUIRE_RETURN_IF_ERROR(history_.Plan(call));
  QUIRE_DCHECK(history_.import_slot() >= 0);
  for (size_t l = 0; l < call.states.size(); ++l) {
    const RecurrentLayerLayout& layout = layout_.layers[l];
    std::memcpy(StateIn(history_.import_slot(), layout.state_offset), call.states[l].data(),
                static_cast<size_t>(layout.state_size()) * sizeof(float));
  }
  return Status();
}

}  // namespace quire
