// The sender's half of a connection, without the connection: what the other side has asked for, and
// the parts that it has not confirmed.
//
// A transfer begins with the map that the receiver sends and has one end: the receiver's cancel
// (also when it has all), the stop of this side, its lease or deadline, or the end of the
// connection.
#ifndef QUIRE_TRANSFER_SEND_HALF_H_
#define QUIRE_TRANSFER_SEND_HALF_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "quire/status.h"
#include "quire/transfer_peer.h"
#include "transfer/frame_writer.h"
#include "wire/transfer_frames.h"

namespace quire {

// One thread at a time. An error of a method that takes a peer's message is the peer's breach of
// the protocol: the connection ends.
class SendHalf {
 public:
  class Owner {
   public:
    // A transfer begins.
    virtual void OnRequest(TransferRequest request) = 0;
    // It is over.
    virtual void OnSendOver(uint64_t epoch, const Status& why) = 0;
    // The receiver has the part, or never wants it.
    virtual void OnPartTaken(const OutgoingPart& part) = 0;

   protected:
    ~Owner() = default;
  };

  SendHalf(FrameWriter* writer, Owner* owner, int64_t lease_ns)
      : writer_(writer), owner_(owner), lease_ns_(lease_ns) {}

  // A part of a transfer that is over is taken at once.
  void SendPart(std::shared_ptr<OutgoingPart> part);
  void SendRecord(const wire::TransferRecord& record);
  void Stop(uint64_t epoch, const Status& why);
  // The connection is over. As much memory is needed as the owner's OnSendOver takes.
  void EndAll(const Status& why);
  void Tick(int64_t now_ns);
  int64_t next_deadline() const;
  // Whether the receiver takes rows too slowly to be waited for. A receiver that reads rows, renews
  // leases and confirms nothing would hold memory here, and prompts of an engine, for ever.
  bool IsStuck(int64_t now_ns);

  Status OnJob(TransferJob job);
  Status OnMap(wire::TransferMap map, int64_t now_ns);
  Status OnCredit(const wire::TransferCredit& credit);
  void OnCancel(const wire::TransferEnd& cancel);
  void OnLease(const wire::TransferLease& lease, int64_t now_ns);

  size_t open_count() const { return transfers_.size(); }
  int64_t parts_sent = 0;
  int64_t parts_sent_again = 0;
  int64_t bytes_sent = 0;

 private:
  struct Transfer {
    int64_t deadline_ns = 0;
    int64_t lease_ns = 0;  // the moment when it is over
    int64_t bytes = 0;     // of job and map
  };

  struct Unconfirmed {
    std::shared_ptr<OutgoingPart> part{};
    int again = 0;  // times that the receiver has asked for it again
  };

  void End(uint64_t epoch, const Status& why);
  Status TakeBytes(int64_t bytes);

  FrameWriter* const writer_;
  Owner* const owner_;
  const int64_t lease_ns_;
  std::map<uint64_t, TransferJob> jobs_;    // by id: without a map yet
  std::map<uint64_t, Transfer> transfers_;  // by epoch
  std::map<uint64_t, Unconfirmed> parts_;   // by number
  uint64_t last_number_ = 0;
  int64_t request_bytes_ = 0;    // of jobs and maps that are held
  int64_t taken_bytes_ = 0;      // of parts, since waits_since_ns_
  int64_t waits_since_ns_ = 0;   // there are parts_ since then
  bool has_first_part_ = false;  // since the last look
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_SEND_HALF_H_
