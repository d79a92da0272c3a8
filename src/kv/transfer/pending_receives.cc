#include "kv/transfer/pending_receives.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string>
#include <utility>

#include "base/check.h"
#include "kv/pages/reserve.h"

namespace quire {
namespace {

constexpr int64_t kAlignment = 64;  // of the tensors of a layer: a cache line

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// A latent layer's values are in its keys.
int64_t StoredValueDim(const AttentionLayerSpec& spec) { return spec.latent ? 0 : spec.v_head_dim; }

std::string Name(uint64_t epoch) { return "epoch " + std::to_string(epoch); }

// The first row of `layer` that is not complete, at most n.
int64_t CompleteCount(const PendingReceives::Layer& layer, int64_t n) {
  QUIRE_DCHECK(n >= 0 && n <= std::ssize(layer.row));
  return std::min(layer.leading, n);
}

// Whether what a receiver of n tokens waits for is there.
bool HasArrived(const PendingReceives::Layer& layer, int64_t n) {
  return layer.row.empty() ? layer.rows >= n : CompleteCount(layer, n) == n;
}

// What keeps the first n tokens from being committed; empty: nothing.
std::string WhatIsMissing(const PendingReceives::Layer& layer, bool is_state, int64_t n) {
  if (is_state) {
    if (layer.rows == n) return "";
    return "the state after token " + std::to_string(n) + " is needed, " +
           (layer.rows == 0 ? std::string("and none is complete")
                            : "and the one after token " + std::to_string(layer.rows) + " is here");
  }
  const int64_t rows = CompleteCount(layer, n);
  return rows == n ? "" : "token " + std::to_string(rows) + " is not complete";
}

Status WrongCount(const char* call, uint64_t epoch, int64_t count, int64_t n) {
  return Status(StatusCode::kBadArgument, std::string(call) + ": the reservation of " +
                                              Name(epoch) + " has " + std::to_string(count) +
                                              " tokens, not " + std::to_string(n));
}

constexpr uint8_t kAbsent = 0;  // of a row and head: it is in no page
constexpr uint8_t kStored = 1;  // it is in its page and does not count
constexpr uint8_t kCounts = 2;

// The rows that lie in the tile of `row`.
TokenRange TileOf(const TokenSlots& slots, int64_t row) {
  const AppendTarget of = slots.targets[static_cast<size_t>(row)];
  QUIRE_DCHECK(of.page >= 0) << "a reserved token has no slot";
  const int64_t lane = of.slot % kTilePositions;
  TokenRange tile{.begin = std::max<int64_t>(row - lane, 0), .end = row + 1};
  const int64_t end = std::min(row - lane + kTilePositions, std::ssize(slots.targets));
  // The last tile of a page may be shorter.
  while (tile.end < end && slots.targets[static_cast<size_t>(tile.end)].page == of.page) ++tile.end;
  return tile;
}

int64_t StateBytes(const TransferLayer& layer) {
  return layer.is_state() ? Aligned(layer.elements * DTypeBytes(layer.dtype)) : 0;
}

// The tensors of a part, without addresses. What there is none of has rank 0.
LayerKV PartShapes(const TransferLayer& layer, int64_t count, int64_t heads) {
  const auto shaped = [](DType dtype, std::initializer_list<int64_t> shape) {
    return TensorView(nullptr, dtype, std::span(shape.begin(), shape.size()));
  };
  if (layer.is_state()) return {.k = shaped(layer.dtype, {1, 1, layer.elements})};
  const AttentionLayerSpec& spec = *layer.rows;
  const bool has_values = StoredValueDim(spec) > 0;
  LayerKV kv;
  kv.k = shaped(spec.dtype, {count, heads, spec.qk_head_dim});
  if (has_values) kv.v = shaped(spec.value_dtype(), {count, heads, spec.v_head_dim});
  if (IsQuantised(spec.dtype)) kv.k_scale = shaped(DType::kF32, {count, heads});
  if (has_values && IsQuantised(spec.value_dtype()))
    kv.v_scale = shaped(DType::kF32, {count, heads});
  return kv;
}

constexpr TensorView LayerKV::*kTensors[] = {&LayerKV::k, &LayerKV::v, &LayerKV::k_scale,
                                             &LayerKV::v_scale};

int64_t BytesOf(const LayerKV& rows) {
  int64_t bytes = 0;
  for (const TensorView LayerKV::*tensor : kTensors) {
    if ((rows.*tensor).rank() > 0)
      bytes += (rows.*tensor).element_count() * DTypeBytes((rows.*tensor).dtype());
  }
  return bytes;
}

// The same tensors in `memory`: those of the widest elements first, so that each is aligned without
// a gap, and the memory has as many bytes as travel.
LayerKV PlacedIn(std::byte* memory, LayerKV rows) {
  for (const int64_t width : {8, 4, 2, 1}) {
    for (TensorView LayerKV::*tensor : kTensors) {
      TensorView& of = rows.*tensor;
      if (of.rank() == 0 || DTypeBytes(of.dtype()) != width) continue;
      of = TensorView(memory, of.dtype(), of.shape());
      memory += of.element_count() * width;
    }
  }
  return rows;
}

bool HasShapes(const LayerKV& rows, const LayerKV& shapes) {
  return std::ranges::all_of(kTensors, [&](const TensorView LayerKV::*tensor) {
    const TensorView& of = rows.*tensor;
    const TensorView& due = shapes.*tensor;
    if (due.rank() == 0) return of.rank() == 0;
    return of.dtype() == due.dtype() && std::ranges::equal(of.shape(), due.shape()) &&
           of.is_contiguous() && of.data() != nullptr;
  });
}

}  // namespace

// ---------------------------------------------------------------------- layers

int64_t LayerBytes(const AttentionLayerSpec& spec, int64_t count) {
  const int64_t rows = count * spec.num_kv_heads;
  const int64_t scales = Aligned(rows * DTypeBytes(DType::kF32));
  return Aligned(rows * spec.qk_head_dim * DTypeBytes(spec.dtype)) +
         Aligned(rows * StoredValueDim(spec) * DTypeBytes(spec.value_dtype())) +
         (IsQuantised(spec.dtype) ? scales : 0) + (IsQuantised(spec.value_dtype()) ? scales : 0);
}

LayerKV LayerRowsIn(std::byte* memory, const AttentionLayerSpec& spec, int64_t count) {
  const int64_t heads = spec.num_kv_heads;
  const auto take = [&](DType dtype, std::span<const int64_t> shape) {
    const TensorView tensor(memory, dtype, shape);
    memory += Aligned(tensor.element_count() * DTypeBytes(dtype));
    return tensor;
  };
  const int64_t k_shape[] = {count, heads, spec.qk_head_dim};
  const int64_t v_shape[] = {count, heads, spec.v_head_dim};
  const int64_t scale_shape[] = {count, heads};
  LayerKV kv;
  kv.k = take(spec.dtype, k_shape);
  if (StoredValueDim(spec) > 0) kv.v = take(spec.value_dtype(), v_shape);
  if (IsQuantised(spec.dtype)) kv.k_scale = take(DType::kF32, scale_shape);
  if (IsQuantised(spec.value_dtype()) && StoredValueDim(spec) > 0)
    kv.v_scale = take(DType::kF32, scale_shape);
  return kv;
}

// ---------------------------------------------------------------------- reservations

PendingReceives::PendingReceives(std::vector<TransferLayer> layers)
    : layers_(std::move(layers)),
      writes_freed_pages_(std::ranges::any_of(layers_, [](const TransferLayer& layer) {
        return layer.pages != nullptr && layer.pages->WritesFreedPages();
      })) {}

PendingReceives::~PendingReceives() {
  QUIRE_CHECK(late_ == 0) << "a channel stores in a state that is gone";
}

std::shared_ptr<PendingReceives::Receive> PendingReceives::Prepare(int64_t seq_id,
                                                                   int64_t first_position,
                                                                   int64_t count,
                                                                   size_t group_count) {
  QUIRE_DCHECK(count > 0);
  auto receive = std::make_shared<Receive>();
  receive->seq_id = seq_id;
  receive->first_position = first_position;
  receive->count = count;
  receive->slots.resize(group_count);
  for (TokenSlots& slots : receive->slots) {
    slots.targets.resize(static_cast<size_t>(count));
    slots.opens_tile.resize(static_cast<size_t>(count));
  }
  int64_t bytes = kAlignment;
  for (const TransferLayer& layer : layers_) bytes += StateBytes(layer);
  receive->states.reset(new std::byte[static_cast<size_t>(bytes)]);
  std::byte* memory = receive->states.get();
  memory += (kAlignment - reinterpret_cast<intptr_t>(memory) % kAlignment) % kAlignment;
  for (const TransferLayer& of : layers_) {
    Layer& layer = receive->layers.emplace_back();
    if (of.is_state()) {
      layer.state = TensorView(memory, of.dtype, {1, 1, of.elements});
      memory += StateBytes(of);
    } else {
      layer.head.resize(static_cast<size_t>(count * of.heads()), kAbsent);
      layer.row.resize(static_cast<size_t>(count));
    }
  }
  QUIRE_DCHECK(memory <= receive->states.get() + bytes);
  const std::lock_guard lock(mutex_);
  ReserveGrowing(receives_, receives_.size() + 1);
  receive->epoch = next_epoch_;
  return receive;
}

void PendingReceives::Add(std::shared_ptr<Receive> receive) noexcept {
  const std::lock_guard lock(mutex_);
  QUIRE_DCHECK(receives_.size() < receives_.capacity()) << "no room was reserved";
  QUIRE_DCHECK(receive->epoch == next_epoch_) << "another reservation was prepared in between";
  ++next_epoch_;
  receives_.push_back(std::move(receive));
}

void PendingReceives::Open(Receive& receive) noexcept {
  const std::lock_guard lock(mutex_);
  receive.is_awaited = false;
  copied_.notify_all();
}

Result<PendingReceives::Ending> PendingReceives::Take(const char* call, uint64_t epoch, int64_t n) {
  std::unique_lock lock(mutex_);
  QUIRE_ASSIGN_OR_RETURN(auto receive, RequireLocked(call, epoch));
  if (n != 0 || writes_freed_pages_) AwaitCopy(lock, *receive);
  if (n != 0) QUIRE_RETURN_IF_ERROR(RequireCompleteLocked(call, *receive, n));
  receive->is_awaited = true;
  return Ending(*this, std::move(receive));
}

PendingReceives::Ending::~Ending() {
  if (receive_ != nullptr && !receive_->is_over) receives_.Open(*receive_);
}

void PendingReceives::Ending::End() noexcept {
  const std::lock_guard lock(receives_.mutex_);
  receives_.EndLocked(*receive_);
}

void PendingReceives::EndLocked(Receive& receive) noexcept {
  receive.is_over = true;
  if (receive.is_copying) ++late_;
  const size_t ended =
      std::erase_if(receives_, [&](const auto& other) { return other.get() == &receive; });
  QUIRE_DCHECK(ended == 1) << "epoch " << receive.epoch << " is over already";
  changed_.notify_all();
  copied_.notify_all();
}

void PendingReceives::EndOf(int64_t seq_id) noexcept {
  std::unique_lock lock(mutex_);
  const auto of = [](const auto& receive) { return receive->seq_id; };
  const auto place = std::ranges::find(receives_, seq_id, of);
  if (place == receives_.end()) return;
  const std::shared_ptr<Receive> receive = *place;
  if (writes_freed_pages_) AwaitCopy(lock, *receive);
  EndLocked(*receive);
}

void PendingReceives::Clear() noexcept {
  std::unique_lock lock(mutex_);
  while (!receives_.empty()) {
    const std::shared_ptr<Receive> receive = receives_.back();
    if (writes_freed_pages_) AwaitCopy(lock, *receive);
    EndLocked(*receive);
  }
}

void PendingReceives::AwaitCopy(std::unique_lock<std::mutex>& lock, Receive& receive) noexcept {
  receive.is_awaited = true;
  copied_.wait(lock, [&] { return !receive.is_copying; });
  receive.is_awaited = false;
  copied_.notify_all();
}

void PendingReceives::AwaitLateCopies() const noexcept {
  if (late_ == 0) return;
  std::unique_lock lock(mutex_);
  copied_.wait(lock, [&] { return late_ == 0; });
}

// ---------------------------------------------------------------------- look-up

std::shared_ptr<PendingReceives::Receive> PendingReceives::FindLocked(uint64_t epoch) const {
  for (const auto& receive : receives_) {
    if (receive->epoch == epoch) return receive;
  }
  return nullptr;
}

Result<std::shared_ptr<PendingReceives::Receive>> PendingReceives::RequireLocked(
    const char* call, uint64_t epoch) const {
  if (auto receive = FindLocked(epoch)) return receive;
  return Status(StatusCode::kNotFound,
                std::string(call) + ": there is no reservation of " + Name(epoch) +
                    "; it was committed or cancelled, or never made by DisaggPrepareRecv");
}

Result<PendingReceives::Claim> PendingReceives::Find(const char* call, uint64_t epoch) const {
  const std::lock_guard lock(mutex_);
  QUIRE_ASSIGN_OR_RETURN(const auto receive, RequireLocked(call, epoch));
  return Claim{receive->seq_id, receive->count};
}

Status PendingReceives::RequireCompleteLocked(const char* call, const Receive& receive,
                                              int64_t n) const {
  if (n < 0 || n > receive.count) return WrongCount(call, receive.epoch, receive.count, n);
  for (size_t l = 0; l < layers_.size(); ++l) {
    const std::string missing = WhatIsMissing(receive.layers[l], layers_[l].is_state(), n);
    if (missing.empty()) continue;
    std::string why = std::string(call) + ": in layer " + std::to_string(l) + " of " +
                      Name(receive.epoch) + " " + missing;
    if (!receive.failure.ok()) why += " (" + receive.failure.ToString() + ")";
    return Status(StatusCode::kBadState,
                  why +
                      "; wait for it, commit another number of tokens, or cancel and compute "
                      "them here");
  }
  return Status();
}

int64_t PendingReceives::count() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(receives_.size());
}

uint64_t PendingReceives::any_epoch() const {
  const std::lock_guard lock(mutex_);
  return receives_.empty() ? 0 : receives_.front()->epoch;
}

int64_t PendingReceives::PendingOf(int64_t seq_id) const {
  const std::lock_guard lock(mutex_);
  for (const auto& receive : receives_) {
    if (receive->seq_id == seq_id) return receive->count;
  }
  return 0;
}

void PendingReceives::AppendFacts(std::vector<int64_t>* facts) const {
  const std::lock_guard lock(mutex_);
  for (const auto& receive : receives_) {
    facts->insert(facts->end(), {static_cast<int64_t>(receive->epoch), receive->seq_id,
                                 receive->first_position, receive->count});
  }
}

Result<std::shared_ptr<PendingReceives::Receive>> PendingReceives::FindPart(
    const char* call, uint64_t epoch, int64_t layer, const ReceivePart& part) const {
  QUIRE_ASSIGN_OR_RETURN(auto receive, RequireLocked(call, epoch));
  if (layer < 0 || layer >= std::ssize(layers_)) {
    return Status(StatusCode::kBadArgument, std::string(call) + ": no layer " +
                                                std::to_string(layer) + "; there are " +
                                                std::to_string(layers_.size()));
  }
  const int64_t heads = LayerAt(layer).heads();
  const bool is_state = LayerAt(layer).is_state();
  const bool fits = part.first_row >= 0 && part.count >= 1 && part.first_row < receive->count &&
                    part.count <= (is_state ? 1 : receive->count - part.first_row) &&
                    part.first_head >= 0 && part.head_count >= 1 && part.first_head < heads &&
                    part.head_count <= heads - part.first_head;
  if (fits) return receive;
  return Status(StatusCode::kBadArgument,
                std::string(call) + ": " + std::to_string(part.count) + " tokens from " +
                    std::to_string(part.first_row) + " on, " + std::to_string(part.head_count) +
                    " heads from " + std::to_string(part.first_head) + " on, are no part of " +
                    Name(epoch) + ", whose layer " + std::to_string(layer) + " has " +
                    (is_state ? "a state: one head of one of " : "") +
                    std::to_string(receive->count) + " tokens" +
                    (is_state ? "" : " of " + std::to_string(heads) + " heads"));
}

// ---------------------------------------------------------------------- arrival

Status PendingReceives::SetStagingLimit(int64_t bytes) {
  for (size_t l = 0; l < layers_.size(); ++l) {
    const int64_t least = BytesOf(PartShapes(layers_[l], 1, layers_[l].heads()));
    if (bytes >= least) continue;
    return Status(StatusCode::kBadArgument,
                  "SetStagingLimit: staging_bytes is " + std::to_string(bytes) + ", and " +
                      (layers_[l].is_state() ? "the state" : "a row") + " of layer " +
                      std::to_string(l) + " has " + std::to_string(least) +
                      " bytes; it must be at least as much");
  }
  staging_->SetLimit(bytes);
  return Status();
}

// Not under the lock: memory takes its time, and nothing here is of the reservation.
Result<ReceiveView> PendingReceives::View(uint64_t epoch, int64_t layer, const ReceivePart& part) {
  {
    const std::lock_guard lock(mutex_);
    QUIRE_RETURN_IF_ERROR(FindPart("View", epoch, layer, part).status());
  }
  const LayerKV shapes = PartShapes(LayerAt(layer), part.count, part.head_count);
  QUIRE_ASSIGN_OR_RETURN(const std::shared_ptr<std::byte[]> memory,
                         StagingMemory::Take(staging_, BytesOf(shapes)));
  return ReceiveView{.rows = PlacedIn(memory.get(), shapes), .memory = memory};
}

Status PendingReceives::Store(uint64_t epoch, int64_t layer, const ReceivePart& part,
                              const ReceiveView& view, std::optional<uint32_t> digest) {
  {
    const std::lock_guard lock(mutex_);
    QUIRE_RETURN_IF_ERROR(FindPart("Store", epoch, layer, part).status());
  }
  if (!HasShapes(view.rows, PartShapes(LayerAt(layer), part.count, part.head_count))) {
    return Status(StatusCode::kBadArgument,
                  "Store: the view is not one of a part like it, as View "
                  "returns them");
  }
  // The caller's memory until it is stored: several senders' parts are verified at a time.
  std::optional<uint32_t> found;
  if (digest.has_value()) found = DigestOfHeads(view.rows, 0, part.head_count);
  ReceivedRows::OtherHeads others = OtherHeadsOf(layer, part);
  std::unique_lock lock(mutex_);
  QUIRE_ASSIGN_OR_RETURN(const auto receive, FindPart("Store", epoch, layer, part));
  if (found != digest) {
    const Status corrupt(StatusCode::kCorrupt,
                         "Store: tokens [" + std::to_string(part.first_row) + ", " +
                             std::to_string(part.first_row + part.count) + ") of layer " +
                             std::to_string(layer) + " of " + Name(epoch) + " have the digest " +
                             std::to_string(*found) + ", not " + std::to_string(*digest) +
                             "; send them again, or cancel and compute them here");
    if (receive->failure.ok()) receive->failure = corrupt;
    changed_.notify_all();
    return corrupt;
  }
  copied_.wait(lock,
               [&] { return receive->is_over || (!receive->is_copying && !receive->is_awaited); });
  QUIRE_RETURN_IF_ERROR(RequireLocked("Store", epoch).status());
  BeginCopyLocked(*receive, layer, part, &others);
  lock.unlock();
  Copy(*receive, layer, part, view.rows, others);
  lock.lock();
  EndCopyLocked(*receive, layer, part);
  return RequireLocked("Store", epoch).status();
}

// ---------------------------------------------------------------------- copies

ReceivedRows::OtherHeads PendingReceives::OtherHeadsOf(int64_t layer,
                                                       const ReceivePart& part) const {
  const TransferLayer& of = LayerAt(layer);
  ReceivedRows::OtherHeads others;
  if (part.head_count == of.heads()) return others;
  others.tile.resize(static_cast<size_t>(LayerBytes(*of.rows, kTilePositions)));
  others.is_there.resize(static_cast<size_t>(part.count * of.heads()));
  return others;
}

void PendingReceives::BeginCopyLocked(Receive& receive, int64_t layer, const ReceivePart& part,
                                      ReceivedRows::OtherHeads* others) noexcept {
  QUIRE_DCHECK(!receive.is_over && !receive.is_copying);
  receive.is_copying = true;
  Layer& to = LayerOf(receive, layer);
  if (LayerAt(layer).is_state()) {
    to.rows = 0;
    to.stored = -1;
    return;
  }
  OpenTilesLocked(receive, layer, part);
  const int64_t heads = LayerAt(layer).heads();
  const auto first = to.head.begin() + part.first_row * heads;
  if (!others->is_there.empty())
    std::copy(first, first + part.count * heads, others->is_there.begin());
  for (int64_t row = part.first_row; row < part.first_row + part.count; ++row) {
    std::fill_n(to.head.begin() + row * heads + part.first_head, part.head_count, kAbsent);
    to.rows -= std::exchange(to.row[static_cast<size_t>(row)], uint8_t{0});
  }
  to.leading = std::min(to.leading, part.first_row);
  QUIRE_DCHECK(to.rows >= 0);
}

// A tile is open from its first row on, and is opened again by a part that has all of it.
void PendingReceives::OpenTilesLocked(Receive& receive, int64_t layer,
                                      const ReceivePart& part) noexcept {
  const TransferLayer& of = LayerAt(layer);
  const int64_t heads = of.heads();
  const int64_t end = part.first_row + part.count;
  TokenSlots& slots = receive.slots[static_cast<size_t>(of.group)];
  std::fill(slots.opens_tile.begin() + part.first_row, slots.opens_tile.begin() + end, uint8_t{0});
  for (int64_t row = part.first_row; row < end;) {
    const TokenRange tile = TileOf(slots, row);
    const bool has_all =
        part.head_count == heads && tile.begin >= part.first_row && tile.end <= end;
    const auto head = LayerOf(receive, layer).head.begin();
    const auto is_absent = [](uint8_t x) { return x == kAbsent; };
    slots.opens_tile[static_cast<size_t>(row)] =
        has_all || std::all_of(head + tile.begin * heads, head + tile.end * heads, is_absent);
    row = tile.end;
  }
}

void PendingReceives::Copy(Receive& receive, int64_t layer, const ReceivePart& part,
                           const LayerKV& rows, ReceivedRows::OtherHeads& others) const noexcept {
  const TransferLayer& of = LayerAt(layer);
  if (of.is_state()) {
    const TensorView& state = LayerOf(receive, layer).state;
    std::memcpy(state.data(), rows.k.data(),
                static_cast<size_t>(state.element_count() * DTypeBytes(state.dtype())));
    return;
  }
  QUIRE_DCHECK(of.pages != nullptr);
  of.pages->StoreReceived(receive.slots[static_cast<size_t>(of.group)], of.layer, part, rows,
                          others);
}

void PendingReceives::EndCopyLocked(Receive& receive, int64_t layer,
                                    const ReceivePart& part) noexcept {
  QUIRE_DCHECK(receive.is_copying);
  receive.is_copying = false;
  copied_.notify_all();
  if (receive.is_over) {
    --late_;
    return;
  }
  Layer& to = LayerOf(receive, layer);
  if (LayerAt(layer).is_state()) {
    to.stored = part.first_row;
    return;
  }
  const int64_t heads = LayerAt(layer).heads();
  for (int64_t row = part.first_row; row < part.first_row + part.count; ++row)
    std::fill_n(to.head.begin() + row * heads + part.first_head, part.head_count, kStored);
}

Status PendingReceives::Complete(uint64_t epoch, int64_t layer, const ReceivePart& part) {
  const std::lock_guard lock(mutex_);
  QUIRE_ASSIGN_OR_RETURN(const auto receive, FindPart("Complete", epoch, layer, part));
  Layer& to = LayerOf(*receive, layer);
  if (!LayerAt(layer).is_state()) {
    const int64_t before = to.leading;
    QUIRE_RETURN_IF_ERROR(CompleteRows(*receive, layer, part));
    // A wake-up for each part would cost more than its copy.
    if (to.leading == before || to.leading < receive->awaited) return Status();
  } else if (to.stored == part.first_row) {
    to.rows = part.first_row + 1;
  } else {
    return Status(StatusCode::kBadState,
                  "Complete: the state after token " + std::to_string(part.first_row + 1) +
                      " of layer " + std::to_string(layer) + " of " + Name(epoch) +
                      " was not stored last; a later one has taken its place");
  }
  QUIRE_DCHECK(to.rows <= receive->count);
  changed_.notify_all();
  return Status();
}

Status PendingReceives::CompleteRows(Receive& receive, int64_t layer, const ReceivePart& part) {
  Layer& to = LayerOf(receive, layer);
  const int64_t heads = LayerAt(layer).heads();
  const int64_t end = part.first_row + part.count;
  const auto is_stored = [&](int64_t row) {
    const auto first = to.head.begin() + row * heads + part.first_head;
    return std::find(first, first + part.head_count, kAbsent) == first + part.head_count;
  };
  for (int64_t row = part.first_row; row < end; ++row) {
    if (is_stored(row)) continue;
    return Status(StatusCode::kBadState, "Complete: token " + std::to_string(row) + " of layer " +
                                             std::to_string(layer) + " of " + Name(receive.epoch) +
                                             " was not stored; call Store first");
  }
  for (int64_t row = part.first_row; row < end; ++row) {
    const auto first = to.head.begin() + row * heads;
    std::fill_n(first + part.first_head, part.head_count, kCounts);
    const bool full = std::all_of(first, first + heads, [](uint8_t x) { return x == kCounts; });
    to.rows += full - std::exchange(to.row[static_cast<size_t>(row)], full);
  }
  to.leading = std::find(to.row.begin() + to.leading, to.row.end(), uint8_t{0}) - to.row.begin();
  QUIRE_DCHECK(to.leading <= to.rows && to.rows <= receive.count);
  return Status();
}

Status PendingReceives::Fail(uint64_t epoch, const Status& why) {
  const std::lock_guard lock(mutex_);
  QUIRE_ASSIGN_OR_RETURN(const auto receive, RequireLocked("FailReceive", epoch));
  if (why.ok()) {
    return Status(StatusCode::kBadArgument,
                  "FailReceive: " + Name(epoch) + " cannot fail for an ok status");
  }
  if (receive->failure.ok()) receive->failure = why;
  changed_.notify_all();
  return Status();
}

Result<ReceiveProgress> PendingReceives::Progress(uint64_t epoch) const {
  const std::lock_guard lock(mutex_);
  QUIRE_ASSIGN_OR_RETURN(const auto receive, RequireLocked("GetReceiveProgress", epoch));
  ReceiveProgress progress{.count = receive->count,
                           .layer_rows = {},
                           .complete = receive->count,
                           .failure = receive->failure};
  for (const Layer& layer : receive->layers) {
    progress.layer_rows.push_back(layer.rows);
    if (!layer.row.empty()) progress.complete = CompleteCount(layer, progress.complete);
  }
  // States are those of one position or of none.
  for (size_t l = 0; l < layers_.size(); ++l) {
    if (!layers_[l].is_state()) continue;
    const int64_t state = receive->layers[l].rows;
    const bool is_first = l == 0 || !layers_[l - 1].is_state();
    const bool fits = is_first ? state <= progress.complete : state == progress.complete;
    progress.complete = fits ? state : 0;
  }
  return progress;
}

Status PendingReceives::Wait(uint64_t epoch, int64_t n, Clock& clock, int64_t until_ns) const {
  std::unique_lock lock(mutex_);
  for (;;) {
    const std::shared_ptr<Receive> receive = FindLocked(epoch);
    if (receive == nullptr) {
      return Status(StatusCode::kCancelled,
                    "WaitReceived: the reservation of " + Name(epoch) + " is over");
    }
    if (n < 0 || n > receive->count) return WrongCount("WaitReceived", epoch, receive->count, n);
    const bool complete = std::ranges::all_of(
        receive->layers, [&](const Layer& layer) { return HasArrived(layer, n); });
    if (complete) return Status();
    if (!receive->failure.ok()) return receive->failure;
    receive->awaited = std::min(receive->awaited, n);
    if (clock.SteadyNs() >= until_ns) {
      return Status(StatusCode::kTimeout, "WaitReceived: the first " + std::to_string(n) +
                                              " tokens of " + Name(epoch) +
                                              " did not come in time; cancel and compute them "
                                              "here, or wait again");
    }
    clock.Wait(changed_, lock, until_ns);
  }
}

}  // namespace quire
