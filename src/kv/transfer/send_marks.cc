#include "kv/transfer/send_marks.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace quire {

HeadsOfTarget HeadsFor(int64_t heads, int64_t remote_heads, int64_t rank, int64_t target,
                       int64_t targets) {
  if (heads == remote_heads) return {.head_count = heads};
  if (heads < remote_heads) {
    if (remote_heads % heads != 0 || targets != 1) return {};
    return {.remote_head = rank % (remote_heads / heads) * heads, .head_count = heads};
  }
  if (remote_heads < 1 || heads != remote_heads * targets) return {};
  return {.local_head = target * remote_heads, .head_count = remote_heads};
}

bool SendMarks::any_active() const {
  return std::ranges::any_of(marks_,
                             [](const auto& mark) { return mark != nullptr && mark->active(); });
}

void SendMarks::Reserve(int32_t sequence, int64_t rows_bytes) {
  if (marks_.size() <= static_cast<size_t>(sequence))
    marks_.resize(static_cast<size_t>(sequence) + 1);
  slots_.resize(static_cast<size_t>(kRowsMax));
  if (memory_bytes_ >= rows_bytes) return;
  memory_.reset(new std::byte[static_cast<size_t>(rows_bytes)]);
  memory_bytes_ = rows_bytes;
}

void SendMarks::Put(int32_t sequence, std::unique_ptr<SendMark> mark) noexcept {
  QUIRE_DCHECK(static_cast<size_t>(sequence) < marks_.size()) << "no room was reserved";
  QUIRE_DCHECK(mark != nullptr);
  auto& place = marks_[static_cast<size_t>(sequence)];
  count_ += place == nullptr;
  place = std::move(mark);
}

void SendMarks::Erase(int32_t sequence) noexcept {
  if (Find(sequence) == nullptr) return;
  marks_[static_cast<size_t>(sequence)].reset();
  --count_;
  QUIRE_DCHECK(count_ >= 0);
}

void SendMarks::ShortenTo(int32_t sequence, int64_t length) noexcept {
  SendMark* const mark = Find(sequence);
  QUIRE_DCHECK(mark == nullptr || mark->given == 0) << "a forward sends these tokens";
  if (mark != nullptr) mark->next = std::max(mark->begin, std::min(mark->next, length));
}

}  // namespace quire
