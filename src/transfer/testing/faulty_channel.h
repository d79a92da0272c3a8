// A channel around another one that delays, cuts, changes, repeats and moves what is written, from
// a seed. What is read comes as it is: the other side has a faulty channel of its own.
#ifndef QUIRE_TRANSFER_TESTING_FAULTY_CHANNEL_H_
#define QUIRE_TRANSFER_TESTING_FAULTY_CHANNEL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/random.h"
#include "transfer/byte_channel.h"

namespace quire {

// A fault of 1 in `n` pieces of at most kFaultPieceBytes; n = 0: none.
struct FaultRates {
  int64_t change = 0;  // of one bit
  int64_t repeat = 0;
  int64_t move = 0;   // behind the next piece
  int64_t cut = 0;    // the connection ends
  int64_t delay = 0;  // the writer is told to come again
};

inline constexpr size_t kFaultPieceBytes = 4096;

class FaultyChannel final : public ByteChannel {
 public:
  FaultyChannel(std::unique_ptr<ByteChannel> inner, const FaultRates& rates, uint64_t seed)
      : inner_(std::move(inner)), rates_(rates), random_(seed) {}

  Result<size_t> Read(std::span<const std::span<std::byte>> into) override {
    if (is_cut_) return Cut();
    return inner_->Read(into);
  }
  Result<size_t> Write(std::span<const std::span<const std::byte>> parts) override {
    QUIRE_RETURN_IF_ERROR(WritePending());
    if (is_cut_) return Cut();
    if (!pending_.empty() || Happens(rates_.delay)) return size_t{0};
    std::vector<std::byte> piece;
    for (const std::span<const std::byte>& part : parts) {
      const size_t count = std::min(part.size(), kFaultPieceBytes - piece.size());
      piece.insert(piece.end(), part.begin(), part.begin() + static_cast<ptrdiff_t>(count));
    }
    const size_t taken = piece.size();
    Spoil(std::move(piece));
    QUIRE_RETURN_IF_ERROR(WritePending());
    return taken;
  }
  void EndWrites() noexcept override { inner_->EndWrites(); }
  bool HasLeft() noexcept override { return is_cut_ || inner_->HasLeft(); }
  Wait PrepareWait(bool wants_read, bool wants_write) override {
    if (!pending_.empty()) static_cast<void>(WritePending().ok());  // the next write tells
    Wait wait = inner_->PrepareWait(wants_read, wants_write || !pending_.empty());
    wait.is_ready |= is_cut_ || wants_write;
    return wait;
  }
  int loss_fd() const noexcept override { return inner_->loss_fd(); }

 private:
  static Status Cut() { return Status(StatusCode::kUnavailable, "the network is cut"); }
  bool Happens(int64_t rate) { return rate > 0 && random_.Below(rate) == 0; }

  void Spoil(std::vector<std::byte> piece) {
    if (Happens(rates_.cut)) is_cut_ = true;
    if (Happens(rates_.change)) {
      const auto at = static_cast<size_t>(random_.Below(static_cast<int64_t>(piece.size())));
      piece[at] ^= static_cast<std::byte>(1 << random_.Below(8));
    }
    const bool is_moved = Happens(rates_.move);
    const bool is_repeated = Happens(rates_.repeat);
    if (is_moved && held_.empty()) {
      held_ = std::move(piece);
      return;
    }
    if (is_repeated) pending_.push_back(piece);
    pending_.push_back(std::move(piece));
    if (!held_.empty()) pending_.push_back(std::exchange(held_, {}));
  }
  Status WritePending() {
    while (!pending_.empty()) {
      const std::span<const std::byte> bytes = pending_.front();
      const Result<size_t> count = inner_->Write(std::span(&bytes, 1));
      if (!count.ok()) return count.status();
      if (*count == 0) return Status();
      pending_.front().erase(pending_.front().begin(),
                             pending_.front().begin() + static_cast<ptrdiff_t>(*count));
      if (pending_.front().empty()) pending_.pop_front();
    }
    return Status();
  }

  const std::unique_ptr<ByteChannel> inner_;
  const FaultRates rates_;
  RandomSequence random_;
  std::deque<std::vector<std::byte>> pending_;
  std::vector<std::byte> held_;
  bool is_cut_ = false;
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_TESTING_FAULTY_CHANNEL_H_
