#include "transfer/send_half.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/clock.h"

namespace quire {
namespace {

using wire::TransferOpcode;

// What one peer may ask for and not let go.
constexpr size_t kTransfersOpenMax = 1024;
constexpr int64_t kRequestBytesMax = int64_t{64} << 20;
// What a receiver takes in the time of a lease, if it does not take all: half a MiB in a second.
constexpr int64_t kTakenBytesMin = int64_t{16} << 20;

int64_t BytesOf(const TransferJob& job) {
  return static_cast<int64_t>(sizeof(job) + job.salt.size() + job.tokens.size() * sizeof(int32_t));
}

Status ReceiverBreach(const std::string& what) {
  return Status(StatusCode::kCorrupt, "transfer: the receiver " + what);
}

}  // namespace

void SendHalf::SendPart(std::shared_ptr<OutgoingPart> part) {
  if (transfers_.count(part->head.epoch) == 0) return owner_->OnPartTaken(*part);
  QUIRE_DCHECK(part->head.number == 0) << "the part was sent before";
  part->head.number = ++last_number_;
  ++parts_sent;
  bytes_sent += part->head.bytes;
  has_first_part_ |= parts_.empty();
  parts_.emplace(part->head.number, Unconfirmed{.part = part});
  writer_->Queue(std::move(part));
}

void SendHalf::SendRecord(const wire::TransferRecord& record) {
  if (transfers_.count(record.epoch) > 0)
    writer_->Queue(TransferOpcode::kRecord, wire::Encode(record));
}

void SendHalf::Stop(uint64_t epoch, const Status& why) {
  QUIRE_DCHECK(!why.ok());
  if (transfers_.count(epoch) == 0) return;
  writer_->Queue(TransferOpcode::kStop, wire::EncodeEnd(epoch, why));
  End(epoch, why);
}

void SendHalf::EndAll(const Status& why) {
  for (const auto& [number, sent] : parts_) owner_->OnPartTaken(*sent.part);
  parts_.clear();
  while (!transfers_.empty()) End(transfers_.begin()->first, why);
  jobs_.clear();
}

// The receiver confirms the parts that it was told of; the others are not sent.
void SendHalf::End(uint64_t epoch, const Status& why) {
  const auto place = transfers_.find(epoch);
  if (place == transfers_.end()) return;
  writer_->DropParts(epoch, [&](uint64_t number) {
    const auto sent = parts_.find(number);
    if (sent == parts_.end()) return;
    owner_->OnPartTaken(*sent->second.part);
    parts_.erase(sent);
  });
  QUIRE_DCHECK(place->second.bytes <= request_bytes_) << "bytes are given back that none has taken";
  request_bytes_ -= place->second.bytes;
  transfers_.erase(place);
  owner_->OnSendOver(epoch, why);
}

Status SendHalf::TakeBytes(int64_t bytes) {
  QUIRE_DCHECK(bytes > 0);
  QUIRE_DCHECK(request_bytes_ >= 0 && request_bytes_ <= kRequestBytesMax);
  if (bytes > kRequestBytesMax - request_bytes_ ||
      transfers_.size() + jobs_.size() >= kTransfersOpenMax) {
    return ReceiverBreach("asks for more than " + std::to_string(kTransfersOpenMax) +
                          " transfers, or with jobs of more than " +
                          std::to_string(kRequestBytesMax) + " bytes, at a time");
  }
  request_bytes_ += bytes;
  return Status();
}

Status SendHalf::OnJob(TransferJob job) {
  if (job.id == 0 || jobs_.count(job.id) > 0) return ReceiverBreach("gives a job's number twice");
  QUIRE_RETURN_IF_ERROR(TakeBytes(BytesOf(job)));
  const uint64_t id = job.id;
  jobs_.emplace(id, std::move(job));
  return Status();
}

Status SendHalf::OnMap(wire::TransferMap map, int64_t now_ns) {
  const uint64_t epoch = map.map.epoch;
  if (transfers_.count(epoch) > 0) return ReceiverBreach("gives an epoch twice");
  TransferRequest request{.job = {.deadline_ns = TransferJob::kNoDeadline},
                          .map = std::move(map.map)};
  if (map.job != 0) {
    const auto job = jobs_.find(map.job);
    if (job == jobs_.end()) return ReceiverBreach("gives a map for a job that there is not");
    request.job = std::move(job->second);
    jobs_.erase(job);
  }
  const auto numbers = request.map.slots.size() + request.map.kv_heads.size();
  const auto bytes = static_cast<int64_t>(sizeof(Transfer) + numbers * sizeof(int64_t));
  QUIRE_RETURN_IF_ERROR(TakeBytes(bytes));
  const Transfer transfer{.deadline_ns = MomentAfter(now_ns, request.job.deadline_ns),
                          .lease_ns = MomentAfter(now_ns, lease_ns_),
                          .bytes = bytes + (request.job.id == 0 ? 0 : BytesOf(request.job))};
  transfers_.emplace(epoch, transfer);
  owner_->OnRequest(std::move(request));
  return Status();
}

Status SendHalf::OnCredit(const wire::TransferCredit& credit) {
  // One that was confirmed before would take memory here beyond any window, and one that is asked
  // for again and again would fill the queue.
  if (credit.number == 0 || credit.number > writer_->last_whole_part())
    return ReceiverBreach("confirms a part that was not sent");
  const auto place = parts_.find(credit.number);
  if (place == parts_.end()) return Status();  // it was confirmed when its transfer ended
  if (credit.wants_again) {
    if (++place->second.again > wire::kPartAgainMax) {
      return ReceiverBreach("asks for a part again more than " +
                            std::to_string(wire::kPartAgainMax) + " times");
    }
    ++parts_sent_again;
    writer_->Queue(place->second.part);
    return Status();
  }
  const std::shared_ptr<OutgoingPart> part = std::move(place->second.part);
  QUIRE_DCHECK(part->head.number == credit.number);
  parts_.erase(place);
  taken_bytes_ += part->head.bytes;
  owner_->OnPartTaken(*part);
  return Status();
}

void SendHalf::OnCancel(const wire::TransferEnd& cancel) { End(cancel.epoch, cancel.status()); }

void SendHalf::OnLease(const wire::TransferLease& lease, int64_t now_ns) {
  const auto place = transfers_.find(lease.epoch);
  if (place != transfers_.end()) place->second.lease_ns = MomentAfter(now_ns, lease_ns_);
}

void SendHalf::Tick(int64_t now_ns) {
  for (auto place = transfers_.begin(); place != transfers_.end();) {
    const auto here = place++;
    const bool is_late = now_ns >= here->second.deadline_ns;
    if (!is_late && now_ns < here->second.lease_ns) continue;
    Stop(here->first, Status(StatusCode::kTimeout,
                             is_late ? "transfer: the job's deadline is over"
                                     : "transfer: its receiver has not renewed the lease in time"));
  }
}

bool SendHalf::IsStuck(int64_t now_ns) {
  if (parts_.empty() || std::exchange(has_first_part_, false) || taken_bytes_ >= kTakenBytesMin) {
    taken_bytes_ = 0;
    waits_since_ns_ = now_ns;
  }
  return now_ns - waits_since_ns_ >= lease_ns_;
}

int64_t SendHalf::next_deadline() const {
  int64_t next = parts_.empty() ? kNever : MomentAfter(waits_since_ns_, lease_ns_);
  for (const auto& [epoch, transfer] : transfers_)
    next = std::min({next, transfer.deadline_ns, transfer.lease_ns});
  return next;
}

}  // namespace quire
