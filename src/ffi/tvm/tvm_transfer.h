// Disaggregation behind TVM's names. A map of TVM is slots alone, and a peer a number of the
// process group; here the caches that one quire.tvm.install() has created with transfer are
// numbered from 0 in the order of creation, and know each other's reservations.
#ifndef QUIRE_FFI_TVM_TVM_TRANSFER_H_
#define QUIRE_FFI_TVM_TVM_TRANSFER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "quire/transfer.h"

namespace quire::ffi {

class TvmTransferPeer;

// The hub of one installation. Calls from any thread.
class TvmTransferHub {
 public:
  // The number of a new peer. Throws as LocalChannel::Connect returns.
  int64_t Join(TvmTransferPeer* peer, KVTransfer* receiver);
  void Leave(int64_t number);
  // The reservation of that peer with these slots; NotFound.
  Result<ReceiveMap> FindMap(int64_t number, std::span<const int64_t> slots) const;
  const std::shared_ptr<LocalChannel>& channel() const { return channel_; }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<LocalChannel> channel_ = CreateLocalChannel();
  std::map<int64_t, TvmTransferPeer*> peers_;
  int64_t next_ = 0;
};

// One cache in a hub: what it has reserved and not taken over yet.
class TvmTransferPeer {
 public:
  TvmTransferPeer(std::shared_ptr<TvmTransferHub> hub, KVTransfer* cache);
  ~TvmTransferPeer();
  TvmTransferPeer(const TvmTransferPeer&) = delete;
  TvmTransferPeer& operator=(const TvmTransferPeer&) = delete;

  Result<std::vector<int64_t>> PrepareRecv(int64_t seq_id, int64_t length);
  // `length`: tokens that the sequence has.
  Status MarkSend(int64_t seq_id, int64_t begin, int64_t length, std::span<const int64_t> slots,
                  int64_t pe_offset);
  // The pending tokens of these sequences count from now on. BadState unless all of them are there.
  Status TakeOver(const char* call, std::span<const int64_t> seq_ids);

 private:
  friend class TvmTransferHub;
  struct Reservation {
    int64_t seq_id;
    ReceiveMap map;
  };
  // Forgets those that are over.
  void Prune();
  Status RequireComplete(const char* call, const Reservation& reservation) const;

  const std::shared_ptr<TvmTransferHub> hub_;
  KVTransfer* const cache_;
  mutable std::mutex mutex_;  // of reservations_, which other caches' marks look at
  std::vector<Reservation> reservations_;
  int64_t number_ = 0;
};

}  // namespace quire::ffi

#endif  // QUIRE_FFI_TVM_TVM_TRANSFER_H_
