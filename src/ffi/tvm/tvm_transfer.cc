#include "ffi/tvm/tvm_transfer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "ffi/errors.h"

namespace quire::ffi {

int64_t TvmTransferHub::Join(TvmTransferPeer* peer, KVTransfer* receiver) {
  const std::lock_guard lock(mutex_);
  ThrowIfError(channel_->Connect(next_, receiver));
  peers_[next_] = peer;
  return next_++;
}

void TvmTransferHub::Leave(int64_t number) {
  const std::lock_guard lock(mutex_);
  peers_.erase(number);
  const Status status = channel_->Disconnect(number);
  static_cast<void>(status);  // it has joined
}

Result<ReceiveMap> TvmTransferHub::FindMap(int64_t number, std::span<const int64_t> slots) const {
  const std::lock_guard lock(mutex_);
  const auto peer = peers_.find(number);
  if (peer != peers_.end()) {
    const std::lock_guard peer_lock(peer->second->mutex_);
    for (const TvmTransferPeer::Reservation& reservation : peer->second->reservations_) {
      if (std::ranges::equal(reservation.map.slots, slots)) return reservation.map;
    }
  }
  return Status(StatusCode::kNotFound,
                "kv_cache_disagg_mark_send: PE " + std::to_string(number) +
                    (peer == peers_.end() ? " is no cache of this process that was created with "
                                            "transfer"
                                          : " has no pending reservation with this map; call "
                                            "kv_cache_disagg_prepare_recv there first"));
}

TvmTransferPeer::TvmTransferPeer(std::shared_ptr<TvmTransferHub> hub, KVTransfer* cache)
    : hub_(std::move(hub)), cache_(cache) {
  ThrowIfError(cache_->SetLayerSink(hub_->channel()));
  number_ = hub_->Join(this, cache_);
}

TvmTransferPeer::~TvmTransferPeer() { hub_->Leave(number_); }

void TvmTransferPeer::Prune() {
  std::erase_if(reservations_, [&](const Reservation& reservation) {
    return !cache_->GetReceiveProgress(reservation.map.epoch).ok();
  });
}

Result<std::vector<int64_t>> TvmTransferPeer::PrepareRecv(int64_t seq_id, int64_t length) {
  const std::lock_guard lock(mutex_);
  Prune();
  reservations_.reserve(reservations_.size() + 1);
  QUIRE_ASSIGN_OR_RETURN(ReceiveMap map, cache_->DisaggPrepareRecv(seq_id, length));
  reservations_.push_back({seq_id, std::move(map)});
  return reservations_.back().map.slots;
}

Status TvmTransferPeer::MarkSend(int64_t seq_id, int64_t begin, int64_t length,
                                 std::span<const int64_t> slots, int64_t pe_offset) {
  QUIRE_ASSIGN_OR_RETURN(const ReceiveMap map, hub_->FindMap(pe_offset, slots));
  if (length - begin >= map.count) {  // TVM's own rule
    return Status(StatusCode::kBadArgument,
                  "kv_cache_disagg_mark_send: sequence " + std::to_string(seq_id) + " has " +
                      std::to_string(length - begin) + " tokens from position " +
                      std::to_string(begin) + " on already, and the map " +
                      std::to_string(map.count) + "; at least one must be left to compute");
  }
  return cache_->DisaggMarkSend(seq_id, begin, std::span(&map, 1), pe_offset, 0);
}

Status TvmTransferPeer::RequireComplete(const char* call, const Reservation& reservation) const {
  QUIRE_ASSIGN_OR_RETURN(const ReceiveProgress progress,
                         cache_->GetReceiveProgress(reservation.map.epoch));
  if (progress.complete == reservation.map.count) return Status();
  std::string why = std::string(call) + ": sequence " + std::to_string(reservation.seq_id) +
                    " receives " + std::to_string(reservation.map.count) + " tokens, and token " +
                    std::to_string(progress.complete) + " of them is not complete in every layer";
  if (!progress.failure.ok()) why += " (" + progress.failure.ToString() + ")";
  return Status(StatusCode::kBadState,
                why + "; call again when it is, or remove or pop what was reserved");
}

Status TvmTransferPeer::TakeOver(const char* call, std::span<const int64_t> seq_ids) {
  const std::lock_guard lock(mutex_);
  Prune();
  std::vector<const Reservation*> pending;
  for (const Reservation& reservation : reservations_) {
    if (std::ranges::find(seq_ids, reservation.seq_id) == seq_ids.end()) continue;
    QUIRE_RETURN_IF_ERROR(RequireComplete(call, reservation));
    pending.push_back(&reservation);
  }
  for (const Reservation* reservation : pending)
    QUIRE_RETURN_IF_ERROR(cache_->DisaggCommitRecv(reservation->map.epoch, reservation->map.count));
  Prune();
  return Status();
}

}  // namespace quire::ffi
