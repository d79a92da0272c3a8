// One prompt on its way from a peer: a reservation in the cache of this process, and the job for
// it. It has one end: Finish, or the destructor, which gives everything back. Until then the
// sequence's tokens behind `first` are pending (quire/kv_transfer.h).
#ifndef QUIRE_ENGINE_REMOTE_REMOTE_RECEIVE_H_
#define QUIRE_ENGINE_REMOTE_REMOTE_RECEIVE_H_

#include <cstdint>
#include <memory>

#include "quire/kv_transfer.h"
#include "quire/transfer_peer.h"

namespace quire {

class RemoteReceive {
 public:
  // Reserves `count` tokens and asks the peer for them. An error leaves everything as it was:
  // those of DisaggPrepareRecv, and of TransferPeer::Request. `transfer` outlives this.
  static Result<std::unique_ptr<RemoteReceive>> Start(KVTransfer* transfer,
                                                      std::shared_ptr<TransferPeer> peer,
                                                      int64_t sequence_id, int64_t count,
                                                      const TransferJob& job);
  RemoteReceive(const RemoteReceive&) = delete;
  RemoteReceive& operator=(const RemoteReceive&) = delete;
  ~RemoteReceive();  // cancels what was not finished; needs no memory

  int64_t sequence_id() const { return sequence_id_; }
  int64_t first() const { return first_; }  // position of the first token that is to come
  int64_t count() const { return count_; }
  const TransferPeer& peer() const { return *peer_; }

  struct Progress {
    int64_t complete = 0;  // tokens that Finish takes now
    Status failure;        // nothing more will come
  };
  Result<Progress> Poll() const;
  // The peer learns why nothing more is wanted, in place of a plain cancel.
  void TellEnd(const Status& why) noexcept;
  // Until all has come, nothing more will, or the moment.
  void Await(Clock& clock, int64_t until_ns) const;
  // The first n tokens are the sequence's from now on, and the transfer is over. After an error it
  // is not. REQUIRES: n <= Poll().complete; once.
  Status Finish(int64_t n);

 private:
  RemoteReceive(KVTransfer* transfer, std::shared_ptr<TransferPeer> peer, int64_t sequence_id,
                const ReceiveMap& map);

  KVTransfer* const transfer_;
  const std::shared_ptr<TransferPeer> peer_;
  const int64_t sequence_id_;
  const uint64_t epoch_;
  const int64_t first_;
  const int64_t count_;
  const Status unwanted_;  // the peer is told
  bool is_over_ = false;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_REMOTE_REMOTE_RECEIVE_H_
