// Disaggregated prefill and decode, the cache's part: one cache reserves slots for tokens that
// another one computes, and gets their keys and values layer by layer (docs/transfer.md).
//
//   receiver                                     sender
//   map = DisaggPrepareRecv(seq, n)   --map-->   SetLayerSink(channel)
//                                                DisaggMarkSend(seq, begin, {map}, peer)
//                                                forwards; for every layer:
//   View, Store (any thread)        <--bytes--     channel.OnLayerAppended
//   Complete (any thread)           <--record-   EndForward: channel.OnForwardEnded
//   WaitReceived(map.epoch, n)
//   DisaggCommitRecv(map.epoch, n)
//   forwards of the tokens after them
//
// Every outcome is, bit for bit, that of computing the tokens in the receiver.
#ifndef QUIRE_KV_TRANSFER_H_
#define QUIRE_KV_TRANSFER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "quire/attention_kv_cache.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

// What a receiver publishes and a sender needs: plain data, for any wire.
struct ReceiveMap {
  uint64_t epoch = 0;  // of this reservation, never used again by its cache
  // TVM's encoding: [segments, begin_1, length_1, ...]; a segment is a run of slots that increase
  // by 1. With one group of layers slot = page * page_size + slot in page, else slots count the
  // tokens from 0.
  std::vector<int64_t> slots;
  int64_t first_position = 0;     // of the first token in the receiver's sequence
  int64_t count = 0;              // tokens
  std::vector<int64_t> kv_heads;  // of the receiver's layers
  uint64_t layout = 0;            // equal iff the stored bytes mean the same, heads and pages aside
};

// The slots of a map's tokens; -1: not stored. BadArgument for what is no encoding, or of more
// tokens than count_max: a number for each is allocated.
Result<std::vector<int64_t>> DecodeSlots(std::span<const int64_t> slots, int64_t count_max);

// One layer's tokens on their way to one peer.
struct SendRange {
  int64_t seq_id = 0;  // of the sender
  uint64_t epoch = 0;
  int64_t first_position = 0;  // of the first token, in the sender's sequence
  int64_t first_row = 0;       // the same as an index into the map's tokens
  int64_t count = 0;
  LayerKV local;  // [count, the sender's kv heads, dim], contiguous, as stored
  std::shared_ptr<const void> memory{};  // of `local`, which stays for its holders; may be null
  int64_t local_head = 0;   // heads [local_head, local_head + head_count) become those from
  int64_t remote_head = 0;  // remote_head on
  int64_t head_count = 0;
  std::span<const int64_t> remote_slots;  // [count], none of them -1; for the call alone
  int64_t peer = 0;
};

// Tokens of all layers, to one peer.
struct SendRecord {
  int64_t seq_id = 0;
  uint64_t epoch = 0;
  int64_t first_row = 0;
  int64_t count = 0;
  int64_t peer = 0;
};

// A part of one layer of a reservation.
struct ReceivePart {
  int64_t first_row = 0;
  int64_t count = 0;
  int64_t first_head = 0;
  int64_t head_count = 0;
};

// Where a channel writes the part's rows. The memory is no page: it lives as long as somebody holds
// it, so bytes that come late hurt nobody.
struct ReceiveView {
  LayerKV rows;  // [part.count, part.head_count, dim], contiguous; as many bytes as the part has
  std::shared_ptr<void> memory;
};

// Memory of views, in bytes: staging memory.
struct StagingUse {
  static constexpr int64_t kLimitDefault = int64_t{64} << 20;
  int64_t limit = kLimitDefault;  // that views of a state may hold at a time
  int64_t held = 0;               // by views that somebody holds
  int64_t largest = 0;            // of `held`, ever
};

struct ReceiveProgress {
  int64_t count = 0;                // tokens reserved
  std::vector<int64_t> layer_rows;  // [layer], rows that are complete
  // The most tokens that DisaggCommitRecv takes now: the first rows without a gap that are complete
  // in every layer. With recurrent layers, the tokens before their states, if those rows are there.
  int64_t complete = 0;
  Status failure;  // the first error that was reported
};

struct SendProgress {
  int64_t begin = 0;    // position of the map's first token
  int64_t count = 0;    // tokens of the map
  int64_t sent = 0;     // of them, whose forward has ended
  bool active = false;  // false: all are sent, or it has failed
  Status failure;
};

// CRC-32C of some heads of rows [n, heads, dim], row by row: k, v, scales of what is quantised.
uint32_t DigestOfHeads(const LayerKV& rows, int64_t first_head, int64_t head_count);
// Rows [first, first + count) of contiguous tensors [n, heads, dim]: the same memory.
LayerKV RowsOf(const LayerKV& rows, int64_t first, int64_t count);
// REQUIRES: the same layer layout but for the number of heads, and as many rows.
void CopyHeads(const LayerKV& from, int64_t from_head, const LayerKV& to, int64_t to_head,
               int64_t head_count);

// Obtained from AttentionKVCache::transfer(). Calls of the cache as those that are not const, one
// at a time, GetSendProgress too, but for those of "any thread". Errors leave everything as it was.
class KVTransfer {
 public:
  virtual ~KVTransfer() = default;

  // ---- Receiving. The sequence's length grows by `count` at once; the new tokens are *pending*.
  // Until they are committed or cancelled: forwards, windows, SetRetained(.., true), import, and
  // DebugSet* of the sequence are BadState, as are ExportKV and DebugGet* of pending tokens;
  // ForkSequence works up to the first pending position; PopN works to at or before it and cancels,
  // as RemoveSequence and Clear do. Pages as for a forward, but that the first pending token opens
  // one of its own. BadState in FORWARD; errors as BeginForward.
  virtual Result<ReceiveMap> DisaggPrepareRecv(int64_t seq_id, int64_t count) = 0;
  // The first n tokens count from now on, the others are given back. n = 0 is DisaggCancelRecv.
  // BadState unless the first n rows are complete in every layer, whether or not a failure was
  // reported; NotFound for an epoch that is over.
  virtual Status DisaggCommitRecv(uint64_t epoch, int64_t n) = 0;
  // The sequence is as before DisaggPrepareRecv.
  virtual Status DisaggCancelRecv(uint64_t epoch) = 0;

  // Any thread, also in a forward. NotFound for an epoch that is over.
  // Memory for the part, until the view's last holder lets go. Full: the part has no room at the
  // moment beside what other views hold of the staging memory; TooLarge: it never has.
  virtual Result<ReceiveView> View(uint64_t epoch, int64_t layer, const ReceivePart& part) = 0;
  // The part is written in `view`, which is for a part like it and is of no more use then. A digest
  // is checked; none: the channel has done so. The part goes to the pages, where it does not count:
  // it is no longer complete, if it was. Corrupt: nothing has changed. Nobody writes meanwhile.
  virtual Status Store(uint64_t epoch, int64_t layer, const ReceivePart& part,
                       const ReceiveView& view, std::optional<uint32_t> digest) = 0;
  // The part counts. BadState unless all of it was stored.
  virtual Status Complete(uint64_t epoch, int64_t layer, const ReceivePart& part) = 0;
  // Nothing more will come; waiting calls learn why.
  virtual Status FailReceive(uint64_t epoch, const Status& why) = 0;
  virtual Result<ReceiveProgress> GetReceiveProgress(uint64_t epoch) const = 0;
  // Until the first n rows are complete in every layer (ok), a failure was reported (that), the
  // epoch is over (Cancelled) or clock.SteadyNs() is until_ns (Timeout).
  virtual Status WaitReceived(uint64_t epoch, int64_t n, Clock& clock, int64_t until_ns) const = 0;
  virtual StagingUse staging() const = 0;

  // The most that views may hold from now on, StagingUse::kLimitDefault before. BadArgument for
  // less than one row of the largest layer, or one state: it could never come.
  virtual Status SetStagingLimit(int64_t bytes) = 0;

  // ---- Sending. BadState in FORWARD or while a mark is active. Null: none.
  virtual Status SetLayerSink(std::shared_ptr<LayerSink> sink) = 0;
  // From the next forward on, tokens at positions begin, begin + 1, ... go to the map's first,
  // second, ... token until the map is full; those that the sequence has already, all of them
  // perhaps, go with the next forward or DisaggFlushSend. Replaces the sequence's mark; forks do
  // not inherit it. After PopN, positions that are computed again are sent again.
  //
  // first_row > 0: the receiver has the map's tokens before it, and they are not sent. Marking
  // again for the same reservation, whichever way, is no end of the transfer for its receiver.
  //
  // Heads: a sender of rank r with fewer kv heads than the receiver, a of b, gives one map and
  // sends to peer + r / (b / a); one with more, a = f b, gives f maps, and sends heads [j b, (j +
  // 1) b) to peer + r f + j by the j-th. Layers of equal heads go to every one of them whole.
  // REQUIRES: IDLE (else BadState, as without a sink); begin >= 0; 0 <= first_row < the map's
  // count; stored tokens that are to be sent are held. Incompatible: other layers, RoPE or kernels,
  // or keys rotated for other positions.
  virtual Status DisaggMarkSend(int64_t seq_id, int64_t begin, std::span<const ReceiveMap> maps,
                                int64_t peer, int64_t rank, int64_t first_row = 0) = 0;
  // Ends the mark; the receiver is told. NotFound without one.
  virtual Status DisaggUnmarkSend(int64_t seq_id) = 0;
  // Ends the mark; the receiver is not told and goes on waiting. Returns the map's tokens that were
  // sent, which is first_row of a mark that resumes: of a prompt that was preempted, perhaps on
  // another sequence. NotFound without one, the mark's failure if it has one.
  virtual Result<int64_t> DisaggDetachSend(int64_t seq_id) = 0;
  // Fence: sends what the sequence has and no forward has sent yet. The mark's failure, if any.
  virtual Status DisaggFlushSend(int64_t seq_id) = 0;
  virtual Result<SendProgress> GetSendProgress(int64_t seq_id) const = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_TRANSFER_H_
