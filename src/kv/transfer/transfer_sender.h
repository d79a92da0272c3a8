// TransferSender: the one sender of a state, whatever parts the state has. It knows which maps a
// sequence may be sent to, and what of a mark goes when (SendMarks says how far one has got and
// what the sink is told). Each part reads what is sent: rows of pages as forwards compute them
// (KVSender), states when a forward has ended (StateTransfer). A cache alone is a state of one
// part.
//
// A state is sent as one row of one head, that of the last token before it, in a layer after those
// with rows. It exists where a forward ended, so it goes after the rows have, with a record of its
// own.
//
// Invariant: while no forward is open and no call is inside, no mark has `given` anything. What an
// open forward has given counts from its end on.
#ifndef QUIRE_KV_TRANSFER_TRANSFER_SENDER_H_
#define QUIRE_KV_TRANSFER_TRANSFER_SENDER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/guard.h"
#include "kv/transfer/pending_receives.h"
#include "kv/transfer/send_marks.h"
#include "quire/kv_transfer.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

class TransferSender;

// A part of a state that sends.
class SendingPart {
 public:
  // All have rows, or all have states.
  virtual std::vector<TransferLayer> send_layers() = 0;
  // Whose marks the part sends from now on, and the number of its first layer there; null: its own.
  virtual void SetSender(TransferSender* sender, int64_t first_layer) noexcept = 0;

  // Equal iff the stored bytes mean the same, heads aside.
  virtual uint64_t SendLayout(int64_t seq_id) const = 0;
  // Whether what is stored of a token is that of its position alone.
  virtual bool binds_positions() const = 0;
  // An error if some of what it has of [begin, end) is no longer held.
  virtual Status CheckHeld(const char* call, int64_t seq_id, int64_t begin, int64_t end) const = 0;
  // Tokens of the sequence that Send can send now.
  virtual int64_t SendableLength(int64_t seq_id) const = 0;
  // Sends tokens [begin, end) of all its layers; of states that at `end`. An error ends the mark.
  virtual Status Send(SendMark* mark, int64_t begin, int64_t end) = 0;

 protected:
  ~SendingPart() = default;
};

class TransferSender {
 public:
  // In the order of layers: parts whose layers have rows come first. They outlive it.
  explicit TransferSender(std::span<SendingPart* const> parts);
  TransferSender(const TransferSender&) = delete;
  TransferSender& operator=(const TransferSender&) = delete;

  // ---- Calls of KVTransfer for a sequence that exists. REQUIRES: no forward is open, but for
  // Progress, and the sequence's Unmark and Detach outside of the batch.
  Status SetSink(std::shared_ptr<LayerSink> sink) { return marks_.SetSink(std::move(sink)); }
  Status Mark(int64_t seq_id, int64_t begin, std::span<const ReceiveMap> maps, int64_t peer,
              int64_t rank, int64_t first_row);
  Status Unmark(const char* call, int64_t seq_id) { return marks_.Unmark(call, seq_id); }
  Result<int64_t> Detach(const char* call, int64_t seq_id) { return marks_.Detach(call, seq_id); }
  // Sends what is committed and has not been sent.
  Status Flush(const char* call, int64_t seq_id);
  Result<SendProgress> Progress(const char* call, int64_t seq_id) const {
    return marks_.Progress(call, seq_id);
  }

  // ---- The forward.
  bool has_marks() const { return !marks_.empty(); }
  // Null if the sequence has none, or nothing is left to send.
  SendMark* FindActive(int64_t seq_id) { return marks_.FindActive(seq_id); }
  // What was given counts from now on, or never. At an end, states go too. REQUIRES: all parts have
  // ended the forward.
  void FinishForward(SendMarks::Outcome outcome) noexcept {
    if (has_marks()) FinishMarks(outcome);
  }

  // ---- The sequence. Nothing is done where there is no mark.
  // The mark goes; the sink hears of it.
  void Stop(int64_t seq_id, const char* why) noexcept {
    if (has_marks()) marks_.Stop(seq_id, why);
  }
  void StopAll(const char* why) noexcept { marks_.StopAll(why); }
  // It has `length` tokens: rows after those are sent again when they come again.
  void ShortenRows(int64_t seq_id, int64_t length) noexcept {
    if (SendMark* const mark = has_marks() ? marks_.Find(seq_id) : nullptr)
      ShortenRows(mark, length);
  }
  // The same for states: that at the sequence's end is sent again, even if it was sent before a
  // longer one.
  void ShortenStates(int64_t seq_id, int64_t length) noexcept;
  // What a digest of the state has of the sequence's mark.
  void AppendFacts(int64_t seq_id, std::vector<int64_t>* facts) const;
  void AppendAllFacts(std::vector<int64_t>* facts) const;

  // ---- What parts use to send.
  // Memory for what is given; slots of kRowsMax rows.
  std::shared_ptr<std::byte[]> TakeMemory(int64_t bytes) { return marks_.TakeMemory(bytes); }
  std::span<AppendTarget> rows_slots() { return marks_.rows_slots(); }
  // What was read of a layer, in such memory.
  struct ReadLayer {
    LayerKV rows;
    std::shared_ptr<const void> memory;
  };
  // Sends rows of a layer up to position `end` that were not sent before, kRowsMax at most at once:
  // read(begin, end) -> Result<ReadLayer>. An error ends the mark.
  template <typename F>
  void SendRows(SendMark* mark, int64_t layer, int64_t end, F&& read) noexcept {
    if (mark->next >= end) return;
    mark->given = end;
    for (int64_t begin = mark->next; begin < end && mark->failure.ok();
         begin += SendMarks::kRowsMax) {
      const int64_t piece_end = std::min(end, begin + SendMarks::kRowsMax);
      mark->failure = GuardEntry([&]() -> Status {
        QUIRE_ASSIGN_OR_RETURN(const ReadLayer from, read(begin, piece_end));
        return Give(mark, layer, begin, from);
      });
    }
  }
  // Gives the sink rows of positions from `begin` on, kRowsMax at most, but for those that a
  // receiver does not store.
  Status Give(SendMark* mark, int64_t layer, int64_t begin, const ReadLayer& from);
  // Whether any receiver of the mark stores the token at this position.
  static bool IsStored(const SendMark& mark, int64_t position);

 private:
  struct Sending {
    SendingPart* part = nullptr;
    bool has_states = false;
  };
  Status CheckMaps(int64_t seq_id, std::span<const ReceiveMap> maps, int64_t begin,
                   int64_t rank) const;
  Status CheckHeads(const ReceiveMap& map, int64_t rank, int64_t targets) const;
  Result<int64_t> PeerOf(const ReceiveMap& map, int64_t peer, int64_t rank, int64_t target,
                         int64_t targets) const;
  static void ShortenRows(SendMark* mark, int64_t length) noexcept;
  void FinishMarks(SendMarks::Outcome outcome) noexcept;
  void FinishRows(SendMark* mark, SendMarks::Outcome outcome) noexcept;
  void SendStates(SendMark* mark) noexcept;

  std::vector<Sending> parts_;
  std::vector<TransferLayer> layers_;
  bool has_rows_ = false;
  bool has_states_ = false;
  SendMarks marks_;
};

}  // namespace quire

#endif  // QUIRE_KV_TRANSFER_TRANSFER_SENDER_H_
