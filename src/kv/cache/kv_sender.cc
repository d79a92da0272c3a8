#include "kv/cache/kv_sender.h"

#include <algorithm>

#include "base/check.h"
#include "kv/pages/kv_export_rows.h"
#include "kv/transfer/pending_receives.h"

namespace quire {

// ---------------------------------------------------------------------- marks

std::vector<TransferLayer> KVSender::send_layers() {
  std::vector<TransferLayer> layers;
  for (const AttentionLayerSpec& spec : kv_.options.layers) layers.push_back({.rows = &spec});
  return layers;
}

const Sequence& KVSender::SequenceOf(int64_t seq_id) const {
  const int32_t index = kv_.control.table().Find(seq_id);
  QUIRE_CHECK(index != SequenceTable::kAbsent) << "sequence " << seq_id << " went before its mark";
  return kv_.control[index];
}

uint64_t KVSender::SendLayout(int64_t seq_id) const {
  return kv_.TransferLayout(SequenceOf(seq_id).long_factors);
}

// The caller rotates for latent layers.
bool KVSender::binds_positions() const {
  return kv_.options.rope.mode == RopeMode::kNormal ||
         std::ranges::any_of(kv_.options.layers,
                             [](const AttentionLayerSpec& layer) { return layer.latent; });
}

Status KVSender::CheckHeld(const char* call, int64_t seq_id, int64_t begin, int64_t end) const {
  const Sequence& sequence = SequenceOf(seq_id);
  for (int g = 0; g < kv_.tree.group_count(); ++g)
    QUIRE_RETURN_IF_ERROR(kv_.CheckHeld(call, sequence, g, begin, end));
  return Status();
}

int64_t KVSender::SendableLength(int64_t seq_id) const {
  return kv_.CommittedLength(SequenceOf(seq_id));
}

void KVSender::Clear() noexcept {
  if (is_part()) return;
  own_.FinishForward(SendMarks::Outcome::kAborted);
  own_.StopAll("the cache was cleared");
}

// ---------------------------------------------------------------------- sending

void KVSender::SendMembers(int64_t layer, const ForwardPlan& plan) noexcept {
  for (const ForwardMember& member : plan.members) {
    SendMark* const mark = sender_->FindActive(member.id);
    if (mark == nullptr) continue;
    const int64_t length = member.is_tree() ? member.committed : member.position_end();
    SendRows(mark, kv_.control[member.sequence], layer, std::min(length, mark->end));
  }
}

Status KVSender::Send(SendMark* mark, int64_t begin, int64_t end) {
  QUIRE_DCHECK(begin == mark->next);
  const Sequence& sequence = SequenceOf(mark->seq_id);
  for (size_t l = 0; l < kv_.options.layers.size(); ++l)
    SendRows(mark, sequence, static_cast<int64_t>(l), end);
  return mark->failure;
}

void KVSender::SendRows(SendMark* mark, const Sequence& sequence, int64_t layer,
                        int64_t end) noexcept {
  QUIRE_DCHECK(end <= mark->end);
  sender_->SendRows(mark, first_layer_ + layer, end, [&](int64_t begin, int64_t piece_end) {
    return Read(sequence, layer, begin, piece_end);
  });
}

Result<TransferSender::ReadLayer> KVSender::Read(const Sequence& sequence, int64_t layer,
                                                 int64_t begin, int64_t end) {
  const size_t l = static_cast<size_t>(layer);
  const int group = kv_.layer_groups[l];
  // Tokens that only another sequence still saw may be gone since the mark was made.
  QUIRE_RETURN_IF_ERROR(kv_.CheckHeld("the mark", sequence, group, begin, end));
  const auto slots = sender_->rows_slots().first(static_cast<size_t>(end - begin));
  kv_.FillSlots(sequence.last, group, begin, slots);
  const AttentionLayerSpec& spec = kv_.options.layers[l];
  const auto memory = sender_->TakeMemory(LayerBytes(spec, end - begin));
  const LayerKV rows = LayerRowsIn(memory.get(), spec, end - begin);
  ReadRows(kv_.storage->layer(layer), slots,
           {.k = rows.k.data(),
            .v = rows.v.data(),
            .k_scale = rows.k_scale.data_as<float>(),
            .v_scale = rows.v_scale.data_as<float>()},
           *kv_.options.runner);
  return TransferSender::ReadLayer{.rows = rows, .memory = memory};
}

}  // namespace quire
