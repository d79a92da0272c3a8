// A receiver without a cache: reservations of two layers in plain memory, which counts what is
// completed and fails a check for what a channel must never do.
#ifndef QUIRE_TRANSFER_TESTING_TEST_RECEIVER_H_
#define QUIRE_TRANSFER_TESTING_TEST_RECEIVER_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/check.h"
#include "base/clock.h"
#include "quire/kv_transfer.h"
#include "transfer/testing/channel_receiver.h"

namespace quire {

inline constexpr int64_t kTestLayers = 2;
inline constexpr int64_t kTestHeads = 2;
inline constexpr int64_t kTestDim = 4;
// Bytes of one row: float32 keys, float16 values.
inline constexpr int64_t kTestRowBytes = kTestHeads * kTestDim * (4 + 2);

// Rows of a layer with two heads.
struct TestRows {
  explicit TestRows(int64_t rows)
      : count(rows),
        k(static_cast<size_t>(rows * kTestHeads * kTestDim)),
        v(static_cast<size_t>(rows * kTestHeads * kTestDim)) {}
  LayerKV View(int64_t first, int64_t rows) {
    const int64_t at = first * kTestHeads * kTestDim;
    return {.k = TensorView(k.data() + at, DType::kF32, {rows, kTestHeads, kTestDim}),
            .v = TensorView(v.data() + at, DType::kF16, {rows, kTestHeads, kTestDim})};
  }
  bool operator==(const TestRows&) const = default;

  int64_t count;
  std::vector<float> k;
  std::vector<uint16_t> v;
};

// What a sender computes for a layer: other bits for each element.
inline TestRows RowsOfLayer(int64_t layer, int64_t rows) {
  TestRows made(rows);
  for (size_t i = 0; i < made.k.size(); ++i) {
    made.k[i] = static_cast<float>(layer * 100'000 + static_cast<int64_t>(i));
    made.v[i] = static_cast<uint16_t>(layer * 7 + static_cast<int64_t>(i) * 3 + 1);
  }
  return made;
}

// A forward's rows of all layers, and its end. The first layer's stay where they are, the other's
// are for the call alone.
inline Status SendRows(LayerSink* to, uint64_t epoch, int64_t first, int64_t count,
                       int64_t first_head = 0, int64_t head_count = kTestHeads) {
  for (int64_t layer = 0; layer < kTestLayers; ++layer) {
    const auto rows = std::make_shared<TestRows>(RowsOfLayer(layer, first + count));
    SendRange range;
    range.epoch = epoch;
    range.first_row = first;
    range.count = count;
    range.local = rows->View(first, count);
    if (layer == 0) range.memory = rows;
    range.local_head = range.remote_head = first_head;
    range.head_count = head_count;
    QUIRE_RETURN_IF_ERROR(to->OnLayerAppended(layer, std::span(&range, 1)));
  }
  const SendRecord record{.epoch = epoch, .first_row = first, .count = count};
  return to->OnForwardEnded(std::span(&record, 1));
}

// Calls of KVTransfer and CheckPages from any thread; the others while nothing arrives.
class TestReceiver final : public ChannelReceiver {
 public:
  struct Reservation {
    std::vector<TestRows> pages;           // [layer]
    std::vector<std::vector<int>> stored;  // [layer][row]: bits of those that are in their page
    std::vector<std::vector<int>> heads;   // [layer][row]: bits of those that count
    Status failure;
  };

  ReceiveMap Reserve(int64_t rows) {
    Reservation made;
    for (int64_t layer = 0; layer < kTestLayers; ++layer) {
      made.pages.emplace_back(rows);
      made.stored.emplace_back(static_cast<size_t>(rows), 0);
      made.heads.emplace_back(static_cast<size_t>(rows), 0);
    }
    const std::lock_guard lock(mutex_);
    ReceiveMap map{.epoch = ++last_epoch,
                   .slots = {1, 0, rows},
                   .count = rows,
                   .kv_heads = std::vector<int64_t>(kTestLayers, kTestHeads)};
    open.emplace(map.epoch, std::move(made));
    return map;
  }
  // Calls wait until it is let go.
  std::unique_lock<std::mutex> Hold() { return std::unique_lock(mutex_); }
  // The reservation is over.
  void End(uint64_t epoch) {
    const std::lock_guard lock(mutex_);
    open.erase(epoch);
  }
  int64_t CompleteRows(uint64_t epoch, int64_t layer) const {
    int64_t rows = 0;
    for (const int heads : open.at(epoch).heads[static_cast<size_t>(layer)])
      rows += heads == (1 << kTestHeads) - 1;
    return rows;
  }
  // Every byte that counts is the sender's.
  void CheckPages() const {
    const std::lock_guard lock(mutex_);
    for (const auto& [epoch, reservation] : open) {
      for (int64_t layer = 0; layer < kTestLayers; ++layer) {
        const TestRows& page = reservation.pages[static_cast<size_t>(layer)];
        const TestRows due = RowsOfLayer(layer, page.count);
        for (int64_t row = 0; row < page.count; ++row) {
          for (int64_t head = 0; head < kTestHeads; ++head) {
            const int bits =
                reservation.heads[static_cast<size_t>(layer)][static_cast<size_t>(row)];
            if ((bits >> head & 1) == 0) continue;
            const auto at = static_cast<size_t>((row * kTestHeads + head) * kTestDim);
            QUIRE_CHECK(std::memcmp(&page.k[at], &due.k[at], kTestDim * sizeof(float)) == 0);
            QUIRE_CHECK(std::memcmp(&page.v[at], &due.v[at], kTestDim * sizeof(uint16_t)) == 0);
          }
        }
      }
    }
  }

  Result<ReceiveView> View(uint64_t epoch, int64_t layer, const ReceivePart& part) override {
    const std::lock_guard lock(mutex_);
    ++views;
    const auto found = open.find(epoch);
    if (found == open.end()) return Status(StatusCode::kNotFound, "the reservation is over");
    QUIRE_RETURN_IF_ERROR(Check(found->second, layer, part));
    const int64_t elements = part.count * part.head_count * kTestDim;
    const int64_t bytes = elements * (4 + 2);
    if (bytes > use_->limit) return Status(StatusCode::kTooLarge, "raise staging_bytes");
    if (bytes > use_->limit - use_->held) return Status(StatusCode::kFull, "no room");
    use_->held += bytes;
    use_->largest = std::max(use_->largest, use_->held.load());
    const std::shared_ptr<std::byte[]> memory(new std::byte[static_cast<size_t>(bytes)],
                                              [use = use_, bytes](std::byte* held) {
                                                delete[] held;
                                                use->held -= bytes;
                                              });
    const int64_t shape[] = {part.count, part.head_count, kTestDim};
    return ReceiveView{
        .rows = {.k = TensorView(memory.get(), DType::kF32, std::span(shape)),
                 .v = TensorView(memory.get() + elements * 4, DType::kF16, std::span(shape))},
        .memory = memory};
  }
  StagingUse staging() const override {
    const std::lock_guard lock(mutex_);
    return {.limit = use_->limit, .held = use_->held, .largest = use_->largest};
  }
  Status SetStagingLimit(int64_t bytes) override {
    use_->limit = bytes;
    return Status();
  }
  Status Store(uint64_t epoch, int64_t layer, const ReceivePart& part, const ReceiveView& view,
               std::optional<uint32_t> digest) override {
    if (on_store) on_store();
    const std::lock_guard lock(mutex_);
    const auto found = open.find(epoch);
    if (found == open.end()) return Status(StatusCode::kNotFound, "the reservation is over");
    Reservation& reservation = found->second;
    QUIRE_RETURN_IF_ERROR(Check(reservation, layer, part));
    if (digest.has_value() && DigestOfHeads(view.rows, 0, part.head_count) != *digest)
      return Status(StatusCode::kCorrupt, "another digest");
    CopyHeads(view.rows, 0,
              reservation.pages[static_cast<size_t>(layer)].View(part.first_row, part.count),
              part.first_head, part.head_count);
    SetHeads(&reservation.stored[static_cast<size_t>(layer)], part, true);
    SetHeads(&reservation.heads[static_cast<size_t>(layer)], part, false);
    return Status();
  }
  Status Complete(uint64_t epoch, int64_t layer, const ReceivePart& part) override {
    const std::lock_guard lock(mutex_);
    const auto found = open.find(epoch);
    if (found == open.end()) return Status(StatusCode::kNotFound, "the reservation is over");
    Reservation& reservation = found->second;
    std::vector<int> due(reservation.pages[0].v.size(), 0);
    SetHeads(&due, part, true);
    for (int64_t row = part.first_row; row < part.first_row + part.count; ++row) {
      const auto at = static_cast<size_t>(row);
      const int stored = reservation.stored[static_cast<size_t>(layer)][at];
      QUIRE_CHECK((stored & due[at]) == due[at]) << "row " << row << " counts without being there";
    }
    SetHeads(&reservation.heads[static_cast<size_t>(layer)], part, true);
    changed_.notify_all();
    return Status();
  }
  Status FailReceive(uint64_t epoch, const Status& why) override {
    const std::lock_guard lock(mutex_);
    const auto found = open.find(epoch);
    if (found == open.end()) return Status(StatusCode::kNotFound, "the reservation is over");
    if (found->second.failure.ok()) found->second.failure = why;
    changed_.notify_all();
    return Status();
  }
  Result<ReceiveProgress> GetReceiveProgress(uint64_t epoch) const override {
    const std::lock_guard lock(mutex_);
    if (is_without_memory) return Status::OutOfMemory();
    if (open.count(epoch) == 0) return Status(StatusCode::kNotFound, "the reservation is over");
    return ReceiveProgress{};
  }
  Status WaitReceived(uint64_t epoch, int64_t n, Clock& clock, int64_t until_ns) const override {
    std::unique_lock lock(mutex_);
    const bool is_over = WaitUntil(clock, changed_, lock, until_ns, [&] {
      return !open.at(epoch).failure.ok() || HasRows(epoch, n);
    });
    if (HasRows(epoch, n)) return Status();
    return is_over ? open.at(epoch).failure : Status(StatusCode::kTimeout, "the rows did not come");
  }

  std::map<uint64_t, Reservation> open;
  uint64_t last_epoch = 0;
  int64_t views = 0;
  bool is_without_memory = false;  // GetReceiveProgress is refused some
  std::function<void()> on_store;  // runs where rows are copied; set before any come

 private:
  bool HasRows(uint64_t epoch, int64_t n) const {
    for (int64_t layer = 0; layer < kTestLayers; ++layer) {
      if (CompleteRows(epoch, layer) < n) return false;
    }
    return true;
  }
  static Status Check(const Reservation& reservation, int64_t layer, const ReceivePart& part) {
    const bool fits = layer >= 0 && layer < kTestLayers && part.first_row >= 0 && part.count >= 1 &&
                      part.first_row + part.count <= reservation.pages[0].count &&
                      part.first_head >= 0 && part.head_count >= 1 &&
                      part.first_head + part.head_count <= kTestHeads;
    return fits ? Status() : Status(StatusCode::kBadArgument, "no part of the reservation");
  }
  static void SetHeads(std::vector<int>* rows, const ReceivePart& part, bool on) {
    for (int64_t row = part.first_row; row < part.first_row + part.count; ++row) {
      int& heads = (*rows)[static_cast<size_t>(row)];
      for (int64_t head = part.first_head; head < part.first_head + part.head_count; ++head)
        heads = on ? heads | 1 << head : heads & ~(1 << head);
    }
  }

  struct Use {
    std::atomic<int64_t> limit = StagingUse::kLimitDefault;
    std::atomic<int64_t> held = 0;
    int64_t largest = 0;
  };

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  const std::shared_ptr<Use> use_ = std::make_shared<Use>();
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_TESTING_TEST_RECEIVER_H_
