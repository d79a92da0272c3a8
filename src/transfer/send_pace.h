// How long a forward waits for room in its peer's window.
#ifndef QUIRE_TRANSFER_SEND_PACE_H_
#define QUIRE_TRANSFER_SEND_PACE_H_

#include <algorithm>
#include <cstdint>

namespace quire {

// A peer that makes a little room just in time, again and again, would hold a forward up for hours:
// a window of one row takes a part for each row and layer. So the waits of a forward are counted
// together, and forgotten where bytes enough have gone, as they do over any network worth using.
// One thread at a time.
class SendPace {
 public:
  // A wait for one part is at most wait_ns.
  explicit SendPace(int64_t wait_ns) : wait_ns_(wait_ns) {}

  // For how long the next part may wait.
  int64_t left_ns() const {
    return std::max<int64_t>(0, std::min(wait_ns_, kWaits * wait_ns_ - waited_ns_));
  }
  void Waited(int64_t ns) { waited_ns_ += ns; }
  void Sent(int64_t bytes) {
    bytes_ += bytes;
    if (bytes_ >= kBytes) Reset();
  }
  // A forward has ended, or a transfer.
  void Reset() { bytes_ = waited_ns_ = 0; }

  // Waits in which kBytes must have gone: 8 MiB in a second, with a wait of a quarter of one.
  static constexpr int64_t kWaits = 8;
  static constexpr int64_t kBytes = int64_t{16} << 20;

 private:
  const int64_t wait_ns_;  // at most a day
  int64_t waited_ns_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_SEND_PACE_H_
