#include "transfer/receive_half.h"

#include <algorithm>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "transfer/part_runs.h"

namespace quire {
namespace {

using wire::TransferOpcode;

// Parts between two records: those of a forward, of at least one row and layer each.
constexpr size_t kOpenPartsMax = size_t{1} << 16;
constexpr int kDamagedMax = wire::kPartAgainMax + 1;
// How often a part that found no room asks again. The room is another connection's, and comes back
// with the part that arrives there.
constexpr int64_t kRoomEveryNs = kNsPerMs;
// A renewal may be lost in a pause of this process without the lease being over.
constexpr int64_t kRenewalsPerLease = 3;
// Whatever lease the sender names: it could have this side do nothing else, and hold renewals that
// it does not read.
constexpr int64_t kRenewalMinNs = 10 * kNsPerMs;

Status Breach(const std::string& what) {
  return Status(StatusCode::kCorrupt, "transfer: the sender " + what);
}

}  // namespace

void ReceiveHalf::SetReceiver(KVTransfer* receiver) {
  if (receiver == nullptr) {
    while (!transfers_.empty()) {
      Fail(transfers_.begin()->first,
           Status(StatusCode::kCancelled, "the receiving cache has left the connection"));
    }
  }
  QUIRE_CHECK(receiver == nullptr || receiver_ == nullptr) << "parts would go to the wrong cache";
  past_epoch_ = last_epoch_;
  receiver_ = receiver;
}

Status ReceiveHalf::Open(const TransferRequest& request, int64_t now_ns) {
  const uint64_t epoch = request.map.epoch;
  if (receiver_ == nullptr) {
    return Status(StatusCode::kBadState,
                  "Request: no cache receives over this connection; call SetReceiver first");
  }
  if (transfers_.count(epoch) > 0) {
    return Status(StatusCode::kBadState,
                  "Request: epoch " + std::to_string(epoch) + " is requested already");
  }
  // Every cache counts epochs from 1 on: rows for one that has left may be on their way.
  if (epoch > 0 && epoch <= past_epoch_) {
    return Status(StatusCode::kBadState,
                  "Request: epoch " + std::to_string(epoch) +
                      " may be one of the cache that received over this connection before; connect "
                      "again for another cache");
  }
  const auto salt_bytes = static_cast<int64_t>(request.job.salt.size());
  if (salt_bytes > TransferJob::kSaltBytesMax) {
    return Status(StatusCode::kTooLarge, "Request: the salt has " + std::to_string(salt_bytes) +
                                             " bytes; a job takes " +
                                             std::to_string(TransferJob::kSaltBytesMax));
  }
  if (salt_bytes > 0 && !options_.carries_salts) {
    return Status(StatusCode::kBadArgument,
                  "Request: the job has a salt, and the connection neither a secret nor a unix "
                  "socket: set a secret on both sides, or use unix:PATH");
  }
  // The peer would end the connection for it, and with it the transfers of others.
  for (const std::string_view wrong : {wire::WrongOf(request.job), wire::WrongOf(request.map)}) {
    if (!wrong.empty())
      return Status(StatusCode::kBadArgument, "Request: it is " + std::string(wrong));
  }
  std::vector<std::byte> job = wire::Encode(request.job);
  std::vector<std::byte> map =
      wire::Encode(wire::TransferMap{.job = request.job.id, .map = request.map});
  if (static_cast<int64_t>(std::max(job.size(), map.size())) > wire::kTransferHeadBytesMax) {
    return Status(StatusCode::kTooLarge, "Request: the job has " + std::to_string(job.size()) +
                                             " bytes and the map " + std::to_string(map.size()) +
                                             "; a frame takes " +
                                             std::to_string(wire::kTransferHeadBytesMax));
  }
  const Transfer transfer{.deadline_ns = MomentAfter(now_ns, request.job.deadline_ns),
                          .renewed_ns = now_ns};
  const auto place = transfers_.emplace(epoch, transfer).first;
  const size_t queued = writer_->urgent_count();
  try {
    // In one queue with what ends it: a cancel that came first would end nothing.
    if (request.job.id != 0) writer_->QueueUrgent(TransferOpcode::kJob, std::move(job));
    writer_->QueueUrgent(TransferOpcode::kMap, std::move(map));
  } catch (const std::bad_alloc&) {
    // The peer would keep a job without a map, and take the next one of its number for a breach.
    writer_->DropUrgentSince(queued);
    transfers_.erase(place);
    throw;
  }
  last_epoch_ = std::max(last_epoch_, epoch);
  return Status();
}

Status ReceiveHalf::Cancel(uint64_t epoch, const Status& why) {
  QUIRE_DCHECK(!why.ok());
  if (transfers_.count(epoch) == 0) {
    return Status(StatusCode::kNotFound, "Cancel: no transfer of epoch " + std::to_string(epoch) +
                                             " is open on this connection");
  }
  End(epoch, why);
  return Status();
}

void ReceiveHalf::EndAll(const Status& why) {
  QUIRE_CHECK(transfers_.empty() || receiver_ != nullptr);
  for (const auto& [epoch, transfer] : transfers_) {
    // NotFound: the reservation is over, and nobody waits.
    static_cast<void>(receiver_->FailReceive(epoch, why));
  }
  transfers_.clear();
  parts_.clear();
  due_.reset();
  current_ = 0;
  room_at_ns_ = kNever;
}

// ------------------------------------------------------------------------------------------ parts

ReceiveHalf::Parts::iterator ReceiveHalf::Current() {
  const auto place = parts_.find(current_);
  QUIRE_CHECK(place != parts_.end()) << "part " << current_ << " went before its data had come";
  QUIRE_DCHECK(place->second.received < place->second.head.bytes);
  return place;
}

Status ReceiveHalf::CheckPart(const wire::TransferPart& part) const {
  if (part.receiver != options_.instance) return Breach("names another instance as the receiver");
  if (current_ != 0) return Breach("begins a part within another one");
  const auto known = parts_.find(part.number);
  if (known != parts_.end()) {
    const Incoming& incoming = known->second;
    const bool is_again = incoming.damaged > 0 && !incoming.is_stored;
    const bool is_same = incoming.head.epoch == part.epoch && incoming.head.layer == part.layer &&
                         incoming.head.bytes == part.bytes &&
                         incoming.head.part.first_row == part.part.first_row &&
                         incoming.head.part.count == part.part.count &&
                         incoming.head.part.first_head == part.part.first_head &&
                         incoming.head.part.head_count == part.part.head_count;
    return is_again && is_same ? Status() : Breach("sends a part again that was not asked for");
  }
  if (part.number <= last_number_) return Status();  // asked for again, then dropped
  QUIRE_DCHECK(waiting_bytes_ >= 0);
  if (part.bytes > options_.window_bytes - waiting_bytes_) {
    return Breach("sends " + std::to_string(part.bytes) + " bytes beyond its window of " +
                  std::to_string(options_.window_bytes));
  }
  // It would hold staging memory of this state that parts of other connections wait for.
  if (part.part.count > 1 && part.bytes > kPartBytes) {
    return Breach("sends a part of " + std::to_string(part.part.count) + " rows and " +
                  std::to_string(part.bytes) + " bytes; several rows have at most " +
                  std::to_string(kPartBytes));
  }
  if (parts_.size() >= kOpenPartsMax) {
    return Breach("has sent " + std::to_string(parts_.size()) + " parts without a record");
  }
  return Status();
}

Status ReceiveHalf::OnPart(const wire::TransferPart& part, int64_t now_ns) {
  QUIRE_DCHECK(part.number > 0 && part.bytes > 0) << "its decoder takes no such part";
  QUIRE_RETURN_IF_ERROR(CheckPart(part));
  const auto [place, is_unknown] = parts_.try_emplace(part.number);
  // What is known was asked for again.
  const bool is_wanted = !is_unknown || part.number > last_number_;
  Incoming& incoming = place->second;
  QUIRE_DCHECK(incoming.runs.empty()) << "what is damaged holds no memory";
  incoming.head = part;
  incoming.run = incoming.run_at = 0;
  incoming.received = 0;
  incoming.crc = 0;
  if (is_unknown) waiting_bytes_ += part.bytes;
  last_number_ = std::max(last_number_, part.number);
  current_ = part.number;
  if (is_wanted && transfers_.count(part.epoch) > 0) StartPart(now_ns);
  return Status();
}

// Without a view its bytes go nowhere: the transfer was cancelled, or ends here. Without room they
// are not read before there is some.
void ReceiveHalf::StartPart(int64_t now_ns) {
  QUIRE_CHECK(receiver_ != nullptr) << "a transfer is open without a receiver";
  Incoming* const incoming = &Current()->second;
  QUIRE_DCHECK(incoming->runs.empty());
  const wire::TransferPart& head = incoming->head;
  Result<ReceiveView> view = receiver_->View(head.epoch, head.layer, head.part);
  const bool is_full = view.status().code() == StatusCode::kFull;
  room_at_ns_ = is_full ? MomentAfter(now_ns, kRoomEveryNs) : kNever;
  if (is_full) return;
  if (!view.ok()) return Fail(head.epoch, view.status());
  const int64_t due = head.part.count * RowBytes(view->rows, head.part.head_count);
  if (due != head.bytes) {
    return Fail(head.epoch, Status(StatusCode::kCorrupt,
                                   "transfer: a part of layer " + std::to_string(head.layer) +
                                       " has " + std::to_string(head.bytes) +
                                       " bytes; its rows have " + std::to_string(due) + " here"));
  }
  const ReceivePart whole{.first_row = 0,
                          .count = head.part.count,
                          .first_head = 0,
                          .head_count = head.part.head_count};
  incoming->runs = PartRuns(view->rows, whole);
  incoming->view = *std::move(view);
}

Status ReceiveHalf::OnDataFrame(const wire::TransferData& data, size_t bytes) {
  if (current_ == 0 || data.part != current_) return Breach("sends data of no part that began");
  QUIRE_CHECK(!waits_for_room()) << "bytes are read that have no room";
  QUIRE_DCHECK(!due_) << "a part has two views";
  const Incoming& incoming = Current()->second;
  if (data.offset != incoming.received ||
      static_cast<int64_t>(bytes) > incoming.head.bytes - incoming.received) {
    return Breach("goes on elsewhere than where a part stopped");
  }
  return Status();
}

void ReceiveHalf::DataPlaces(size_t count, std::vector<std::span<std::byte>>* places,
                             FrameRead* read) {
  const Incoming& incoming = Current()->second;
  QUIRE_DCHECK(static_cast<int64_t>(count) <= incoming.head.bytes - incoming.received);
  if (incoming.runs.empty()) return;
  read->memory = incoming.view.memory;
  read->crc = incoming.crc;
  size_t at = incoming.run_at;
  for (size_t run = incoming.run; run < incoming.runs.size() && count > 0; ++run, at = 0) {
    const std::span<std::byte> rest = incoming.runs[run].subspan(at);
    places->push_back(rest.first(std::min(count, rest.size())));
    count -= places->back().size();
  }
  QUIRE_DCHECK(count == 0) << "the part's places have fewer bytes than the part";
}

Status ReceiveHalf::OnData(size_t count, uint32_t crc) {
  const auto place = Current();
  Incoming& incoming = place->second;
  QUIRE_CHECK(static_cast<int64_t>(count) <= incoming.head.bytes - incoming.received);
  incoming.received += static_cast<int64_t>(count);
  incoming.crc = crc;
  while (count > 0 && !incoming.runs.empty()) {
    QUIRE_CHECK(incoming.run < incoming.runs.size()) << "bytes have come for which no place was";
    const size_t rest = incoming.runs[incoming.run].size() - incoming.run_at;
    const size_t here = std::min(count, rest);
    incoming.run_at += here;
    count -= here;
    if (here < rest) continue;
    ++incoming.run;
    incoming.run_at = 0;
  }
  if (incoming.received == incoming.head.bytes) FinishPart(place);
  return Status();
}

void ReceiveHalf::FinishPart(Parts::iterator place) {
  Incoming& incoming = place->second;
  QUIRE_DCHECK(current_ == place->first);
  QUIRE_DCHECK(!incoming.is_stored) << "it came again without being asked for";
  current_ = 0;
  if (incoming.runs.empty()) {
    Credit(place->first, false);
    parts_.erase(place);
    return;
  }
  QUIRE_DCHECK(incoming.run == incoming.runs.size()) << "places were left out";
  // Its memory is for the next part, whatever becomes of this one.
  ReceiveView view = std::exchange(incoming.view, {});
  incoming.runs.clear();
  if (incoming.crc != incoming.head.digest) {
    view = {};
    if (++incoming.damaged < kDamagedMax) return Credit(place->first, true);
    const std::string times = std::to_string(incoming.damaged);
    return Fail(
        incoming.head.epoch,
        Status(StatusCode::kCorrupt, "transfer: a part of layer " +
                                         std::to_string(incoming.head.layer) + " arrived damaged " +
                                         times + " times; cancel and compute the tokens here"));
  }
  due_ = DueStore{.receiver = receiver_,
                  .number = place->first,
                  .head = incoming.head,
                  .view = std::move(view)};
}

// A part whose transfer has ended meanwhile is confirmed already.
void ReceiveHalf::OnStored(const DueStore& due, const Status& stored) {
  const auto place = parts_.find(due.number);
  if (place == parts_.end()) return;
  Incoming& incoming = place->second;
  QUIRE_DCHECK(!incoming.is_stored) << "part " << due.number << " is stored twice";
  if (!stored.ok()) return Fail(due.head.epoch, stored);
  incoming.is_stored = true;
  ++parts_received;
  bytes_received += incoming.head.bytes;
  Credit(due.number, false);
  if (incoming.is_recorded) CompletePart(place);
}

void ReceiveHalf::CompletePart(Parts::iterator place) {
  QUIRE_CHECK(place->second.is_stored) << "rows would count that are not those that were sent";
  const wire::TransferPart head = place->second.head;
  parts_.erase(place);
  const Status status = receiver_->Complete(head.epoch, head.layer, head.part);
  if (!status.ok()) Fail(head.epoch, status);
}

void ReceiveHalf::Credit(uint64_t number, bool wants_again) {
  const auto place = parts_.find(number);
  QUIRE_CHECK(place != parts_.end()) << "part " << number << " went before it was confirmed";
  writer_->QueueUrgent(TransferOpcode::kCredit,
                       wire::Encode(wire::TransferCredit{number, wants_again}));
  if (!wants_again) waiting_bytes_ -= place->second.head.bytes;
  QUIRE_DCHECK(waiting_bytes_ >= 0) << "a part was confirmed twice";
}

Status ReceiveHalf::OnRecord(const wire::TransferRecord& record) {
  if (record.receiver != options_.instance) return Breach("names another instance as the receiver");
  if (current_ != 0) return Breach("sends a record within a part");
  for (auto place = parts_.begin(); place != parts_.end();) {
    const auto here = place++;
    const wire::TransferPart& head = here->second.head;
    const bool is_meant = head.epoch == record.epoch && head.part.first_row >= record.first_row &&
                          head.part.first_row - record.first_row < record.count;
    if (!is_meant) continue;
    if (record.is_aborted) {
      if (!here->second.is_stored) Credit(here->first, false);
      parts_.erase(here);
    } else if (here->second.is_stored) {
      CompletePart(here);
      // A failure ends the transfer, and with it all of its parts.
      if (transfers_.count(record.epoch) == 0) return Status();
    } else {
      here->second.is_recorded = true;
    }
  }
  return Status();
}

void ReceiveHalf::OnStop(const wire::TransferEnd& stop) {
  if (transfers_.erase(stop.epoch) == 0) return;
  DropParts(stop.epoch);
  static_cast<void>(receiver_->FailReceive(stop.epoch, stop.status()));
}

// ------------------------------------------------------------------------------------------- ends

// The current part stays, without a place, until its last byte.
void ReceiveHalf::DropParts(uint64_t epoch) {
  if (due_ && due_->head.epoch == epoch) due_.reset();
  for (auto place = parts_.begin(); place != parts_.end();) {
    const auto here = place++;
    if (here->second.head.epoch != epoch) continue;
    if (here->first == current_) {
      here->second.runs.clear();
      here->second.view = {};
      room_at_ns_ = kNever;
      continue;
    }
    if (!here->second.is_stored) Credit(here->first, false);
    parts_.erase(here);
  }
}

void ReceiveHalf::End(uint64_t epoch, const Status& why) {
  if (transfers_.erase(epoch) == 0) return;
  DropParts(epoch);
  writer_->QueueUrgent(TransferOpcode::kCancel, wire::EncodeEnd(epoch, why));
}

void ReceiveHalf::Fail(uint64_t epoch, const Status& why) {
  QUIRE_DCHECK(!why.ok());
  static_cast<void>(receiver_->FailReceive(epoch, why));
  End(epoch, why);
}

int64_t ReceiveHalf::renew_every_ns() const {
  return std::max(lease_ns_ / kRenewalsPerLease, kRenewalMinNs);
}

void ReceiveHalf::Tick(int64_t now_ns) {
  for (auto place = transfers_.begin(); place != transfers_.end();) {
    const auto here = place++;
    if (now_ns >= here->second.deadline_ns) {
      Fail(here->first, Status(StatusCode::kTimeout,
                               "transfer: the job's deadline is over; cancel the reservation and "
                               "compute the tokens here"));
    } else if (now_ns >= MomentAfter(here->second.renewed_ns, renew_every_ns())) {
      here->second.renewed_ns = now_ns;
      writer_->QueueUrgent(TransferOpcode::kLease,
                           wire::Encode(wire::TransferLease{.epoch = here->first}));
    }
  }
  if (now_ns >= next_poll_ns_) PollReservations(now_ns);
  if (waits_for_room() && now_ns >= room_at_ns_) StartPart(now_ns);
}

// A reservation that was committed or cancelled wants nothing more.
void ReceiveHalf::PollReservations(int64_t now_ns) {
  QUIRE_CHECK(transfers_.empty() || receiver_ != nullptr);
  next_poll_ns_ = now_ns + options_.poll_ns;
  for (auto place = transfers_.begin(); place != transfers_.end();) {
    const uint64_t epoch = (place++)->first;
    const auto progress = receiver_->GetReceiveProgress(epoch);
    const bool is_over = !progress.ok() && progress.status().code() != StatusCode::kOutOfMemory;
    if (is_over) End(epoch, Status(StatusCode::kCancelled, "the reservation is over"));
  }
}

int64_t ReceiveHalf::next_deadline() const {
  if (transfers_.empty()) return kNever;
  int64_t next = std::min(next_poll_ns_, room_at_ns_);
  for (const auto& [epoch, transfer] : transfers_) {
    next =
        std::min({next, transfer.deadline_ns, MomentAfter(transfer.renewed_ns, renew_every_ns())});
  }
  return next;
}

}  // namespace quire
