// The receiver's half of a connection, without the connection: which reservations this side has
// asked for, and the parts that arrive for them.
//
// A transfer begins with Open and has one end: the reservation is over, Cancel, its deadline, the
// sender's stop, damage that stays, or the end of the connection. A part is written to the cache's
// staging memory, hashed there, stored in its pages and confirmed; it is completed when the
// sender's record of the forward has come. So a peer that still writes, dies or lies changes
// nothing that counts, and one part holds memory at a time. Where other connections' parts hold all
// of it, a part waits, and with it all that the peer sends.
//
// The bytes of a part are read and hashed by the thread that reads, into places that DataPlaces
// gives with their memory; OnData tells what came. A transfer that ends between the two lets go of
// the part: what comes then counts for nothing.
//
// Storing copies rows, which takes its time: this does not do it, and says what is due (TakeDue).
// The thread that reads does it before it reads on, and tells what came of it (OnStored);
// meanwhile all other calls are allowed.
#ifndef QUIRE_TRANSFER_RECEIVE_HALF_H_
#define QUIRE_TRANSFER_RECEIVE_HALF_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "quire/kv_transfer.h"
#include "quire/status.h"
#include "quire/transfer_peer.h"
#include "transfer/frame_reader.h"
#include "transfer/frame_writer.h"
#include "wire/transfer_frames.h"

namespace quire {

// One thread at a time. An error of a method that takes a peer's message is the peer's breach of
// the protocol: the connection ends.
//
// Invariants:
// - While a transfer is open, there is a receiver.
// - waiting_bytes_ are those of the parts that are not stored.
// - The current part alone has a view, or waits for one. A part that is due to be stored has its
//   view, and there is no current part before it is stored.
class ReceiveHalf {
 public:
  struct Options {
    wire::Instance instance{};
    int64_t window_bytes = 0;
    int64_t lease_ns = 0;
    bool carries_salts = false;
    int64_t poll_ns = 0;  // how often it asks whether a reservation is over
  };
  ReceiveHalf(FrameWriter* writer, const Options& options)
      : writer_(writer), options_(options), lease_ns_(options.lease_ns) {}

  KVTransfer* receiver() const { return receiver_; }
  // Null ends all transfers; their reservations fail. That may throw std::bad_alloc with some of
  // them open and the receiver still there; EndAll needs no memory.
  void SetReceiver(KVTransfer* receiver);
  // A lease is over when the sender thinks so: renewals keep to the shorter of both sides'.
  void SetSenderLease(int64_t ns) { lease_ns_ = std::min(options_.lease_ns, ns); }

  Status Open(const TransferRequest& request, int64_t now_ns);
  Status Cancel(uint64_t epoch, const Status& why);
  // The connection is over: every reservation fails.
  void EndAll(const Status& why);
  void Tick(int64_t now_ns);
  int64_t next_deadline() const;

  Status OnPart(const wire::TransferPart& part, int64_t now_ns);
  // No data are to be read: Tick looks for room again.
  bool waits_for_room() const { return room_at_ns_ != kNever; }
  Status OnDataFrame(const wire::TransferData& data, size_t bytes);
  void DataPlaces(size_t count, std::vector<std::span<std::byte>>* places, FrameRead* read);
  Status OnData(size_t count, uint32_t crc);

  // A part whose rows have come. Nothing is to be read before it is stored.
  struct DueStore {
    KVTransfer* receiver = nullptr;
    uint64_t number = 0;
    wire::TransferPart head{};
    ReceiveView view{};

    // Needs nothing of the connection. Its memory is for other parts then.
    Status Store() {
      const ReceiveView rows = std::exchange(view, {});
      return receiver->Store(head.epoch, head.layer, head.part, rows, std::nullopt);
    }
  };
  bool has_due() const { return due_.has_value(); }
  // REQUIRES: has_due(), and OnStored follows.
  DueStore TakeDue() { return *std::exchange(due_, std::nullopt); }
  void OnStored(const DueStore& due, const Status& stored);

  Status OnRecord(const wire::TransferRecord& record);
  void OnStop(const wire::TransferEnd& stop);

  size_t open_count() const { return transfers_.size(); }
  int64_t parts_received = 0;
  int64_t bytes_received = 0;

 private:
  struct Transfer {
    int64_t deadline_ns = 0;
    int64_t renewed_ns = 0;
  };
  struct Incoming {
    wire::TransferPart head{};
    ReceiveView view{};                        // none: its bytes go nowhere
    std::vector<std::span<std::byte>> runs{};  // of the view
    size_t run = 0;                            // where the next byte goes
    size_t run_at = 0;
    int64_t received = 0;
    uint32_t crc = 0;
    int damaged = 0;           // times that it was
    bool is_stored = false;    // all there, right, and in its pages
    bool is_recorded = false;  // counts as soon as it is stored
  };
  using Parts = std::map<uint64_t, Incoming>;

  // REQUIRES: a part has begun, and not all of its data have come.
  Parts::iterator Current();
  Status CheckPart(const wire::TransferPart& part) const;
  // The current part.
  void StartPart(int64_t now_ns);
  void FinishPart(Parts::iterator place);
  void CompletePart(Parts::iterator place);
  void Credit(uint64_t number, bool wants_again);
  void DropParts(uint64_t epoch);
  // Forgets the transfer and tells the sender.
  void End(uint64_t epoch, const Status& why);
  // The same for one that still waits here: it learns why.
  void Fail(uint64_t epoch, const Status& why);
  void PollReservations(int64_t now_ns);
  int64_t renew_every_ns() const;

  FrameWriter* const writer_;
  const Options options_;
  int64_t lease_ns_;
  KVTransfer* receiver_ = nullptr;
  std::map<uint64_t, Transfer> transfers_;  // by epoch
  Parts parts_;                             // by number
  uint64_t current_ = 0;                    // the part whose data come; 0: none
  uint64_t last_number_ = 0;                // of the parts that came
  uint64_t last_epoch_ = 0;                 // the highest that was open
  uint64_t past_epoch_ = 0;                 // that of receivers that have left
  int64_t waiting_bytes_ = 0;               // of parts that are announced and not credited
  int64_t next_poll_ns_ = 0;
  int64_t room_at_ns_ = kNever;  // when the current part, which found no room, looks again
  std::optional<DueStore> due_;
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_RECEIVE_HALF_H_
