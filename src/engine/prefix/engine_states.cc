#include "engine/prefix/engine_states.h"

#include <algorithm>

#include "base/check.h"

namespace quire {
namespace {

bool HasWindows(const AttentionKVCache* cache) {
  if (cache == nullptr) return false;
  const std::vector<AttentionLayerSpec>& layers = cache->options().layers;
  return std::any_of(layers.begin(), layers.end(),
                     [](const AttentionLayerSpec& layer) { return layer.window != 0; });
}

}  // namespace

std::unique_ptr<CompositeState> JoinStates(const std::shared_ptr<AttentionKVCache>& attention,
                                           const std::shared_ptr<RecurrentCache>& recurrent) {
  if (recurrent == nullptr) return nullptr;
  Result<std::unique_ptr<CompositeState>> joined =
      CompositeState::Create({.attention = attention, .recurrent = {recurrent}});
  QUIRE_CHECK(joined.ok()) << joined.status().ToString();
  return *std::move(joined);
}

StateSizes StateSizesOf(std::span<const RecurrentLayerSpec> layers) {
  StateSizes sizes;
  for (const RecurrentLayerSpec& layer : layers) {
    const int64_t floats = layer.kind == RecurrentLayerKind::kConvolution
                               ? (layer.width - 1) * layer.num_channels
                               : layer.num_heads * layer.key_dim * layer.value_dim;
    const int64_t bytes = floats * static_cast<int64_t>(sizeof(float));
    sizes.all += bytes;
    sizes.largest = std::max(sizes.largest, bytes);
  }
  return sizes;
}

EngineStates::EngineStates(AttentionKVCache* attention)
    : kv_(attention),
      attention_(attention),
      composite_(nullptr),
      has_windows_(HasWindows(attention)),
      forks_anywhere_(!has_windows_) {
  QUIRE_CHECK(attention != nullptr);
}

EngineStates::EngineStates(CompositeState* composite)
    : kv_(composite),
      attention_(composite->parts().attention.get()),
      composite_(composite),
      has_windows_(HasWindows(attention_)),
      forks_anywhere_(false) {}

Status EngineStates::AddSequence(int64_t sequence_id, bool long_rope) const {
  QUIRE_RETURN_IF_ERROR(kv_->AddSequence(sequence_id));
  if (!long_rope) return {};
  const Status selected = attention_->SelectLongRope(sequence_id, true);
  if (selected.ok()) return {};
  RemoveSequence(sequence_id);
  return selected;
}

Status EngineStates::EnableWindow(int64_t sequence_id, int64_t window, int64_t sinks) const {
  const Status enabled = attention_->EnableSlidingWindowForSeq(sequence_id, window, sinks);
  if (enabled.ok()) return enabled;
  RemoveSequence(sequence_id);
  return enabled;
}

bool EngineStates::DropWindow(int64_t sequence_id) const noexcept {
  const Result<TokenRange> slid = attention_->SlidRange(sequence_id);
  return slid.ok() && slid->count() == 0 &&
         attention_->DisableSlidingWindowForSeq(sequence_id).ok();
}

void EngineStates::RemoveSequence(int64_t sequence_id) const noexcept {
  const Status removed = kv_->RemoveSequence(sequence_id);
  QUIRE_CHECK(removed.ok()) << removed.ToString();
}

Status EngineStates::SetRetained(int64_t sequence_id, bool retained) const {
  return composite_ != nullptr ? composite_->SetRetained(sequence_id, retained)
                               : attention_->SetRetained(sequence_id, retained);
}

Status EngineStates::BeginLoadingForward(std::span<const int64_t> sequence_ids,
                                         std::span<const int64_t> lengths,
                                         std::span<const LayerLoad> loads) const {
  return composite_ != nullptr ? composite_->BeginLoadingForward(sequence_ids, lengths, loads)
                               : attention_->BeginLoadingForward(sequence_ids, lengths, loads);
}

int64_t EngineStates::ForkStart(int64_t sequence_id, int64_t position) const noexcept {
  if (composite_ != nullptr) {
    const Result<int64_t> start = composite_->ReplayStart(sequence_id, position);
    if (!start.ok()) return 0;
    position = *start;
  }
  if (attention_ == nullptr || attention_->CanFork(sequence_id, position)) return position;
  return 0;
}

int64_t EngineStates::ForkBorder(int64_t sequence_id, int64_t position,
                                 int64_t border) const noexcept {
  while (position > 0) {
    position -= position % border;
    const int64_t start = ForkStart(sequence_id, position);
    if (start == position) return position;
    position = start;
  }
  return 0;
}

Result<int64_t> EngineStates::GetSequenceLength(int64_t sequence_id) const {
  return composite_ != nullptr ? composite_->GetSequenceLength(sequence_id)
                               : attention_->GetSequenceLength(sequence_id);
}

int64_t EngineStates::sequence_count() const {
  return composite_ != nullptr ? composite_->sequence_count() : attention_->sequence_count();
}

int64_t EngineStates::retained_sequence_count() const {
  return composite_ != nullptr ? composite_->parts().recurrent.front()->retained_sequence_count()
                               : attention_->retained_sequence_count();
}

Status EngineStates::CheckInvariants() const {
  return composite_ != nullptr ? composite_->CheckInvariants() : attention_->CheckInvariants();
}

int64_t EngineStates::pages_free() const {
  return attention_ != nullptr ? attention_->GetNumAvailablePages() : kPagesUnlimited;
}

int64_t EngineStates::retained_pages() const {
  return attention_ != nullptr ? attention_->page_counts().retained_only : 0;
}

Result<int64_t> EngineStates::PagesNeeded(std::span<const int64_t> sequence_ids,
                                          std::span<const int64_t> lengths) const {
  if (attention_ != nullptr) return attention_->PagesNeeded(sequence_ids, lengths);
  return 0;
}

Result<int64_t> EngineStates::PagesNeededForTree(std::span<const int64_t> sequence_ids,
                                                 std::span<const int64_t> lengths,
                                                 std::span<const int64_t> parents) const {
  if (attention_ == nullptr) return 0;
  return attention_->PagesNeededForTree(sequence_ids, lengths, parents);
}

StateSlotCounts EngineStates::slot_counts() const {
  StateSlotCounts sum;
  if (composite_ == nullptr) return sum;
  for (const auto& part : composite_->parts().recurrent) {
    const StateSlotCounts counts = part->slot_counts();
    sum.total += counts.total;
    sum.free += counts.free;
    sum.retained += counts.retained;
  }
  return sum;
}

}  // namespace quire
