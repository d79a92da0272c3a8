#include "transfer/striped_channel.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "base/check.h"

namespace quire {
namespace {

// The first `count` bytes of `spans` behind `skipped` of them.
template <typename Byte>
void Cut(std::span<const std::span<Byte>> spans, size_t skipped, size_t count,
         std::vector<std::span<Byte>>* out) {
  out->clear();
  for (const std::span<Byte>& span : spans) {
    const size_t from = std::min(skipped, span.size());
    const size_t taken = std::min(span.size() - from, count);
    if (taken > 0) out->push_back(span.subspan(from, taken));
    skipped -= from;
    count -= taken;
    if (count == 0) return;
  }
}

}  // namespace

StripedChannel::StripedChannel(std::vector<std::unique_ptr<ByteChannel>> streams)
    : streams_(std::move(streams)) {
  QUIRE_CHECK(!streams_.empty() && std::ssize(streams_) <= wire::kStreamsMax);
  others_.reserve(streams_.size());
}

// Stripe by stripe, until a stream takes or gives less than it could.
template <typename Byte, typename F>
Result<size_t> StripedChannel::Move(Direction* direction, std::span<const std::span<Byte>> spans,
                                    std::vector<std::span<Byte>>* stripe, F&& move) {
  size_t total = 0;
  for (;;) {
    const size_t most = direction->is_striped
                            ? wire::kStripeBytes - direction->position % wire::kStripeBytes
                            : std::numeric_limits<size_t>::max();
    Cut(spans, total, most, stripe);
    size_t wanted = 0;
    for (const std::span<Byte>& span : *stripe) wanted += span.size();
    if (wanted == 0) return total;
    const Result<size_t> moved = move(&StreamOf(*direction), *stripe);
    // What was moved before a failure counts; the next call finds it again.
    if (!moved.ok()) return total > 0 ? Result<size_t>(total) : moved;
    QUIRE_CHECK(*moved <= wanted) << "a stream moves more than there was";
    total += *moved;
    if (direction->is_striped) direction->position += *moved;
    if (*moved < wanted) return total;
  }
}

Result<size_t> StripedChannel::Read(std::span<const std::span<std::byte>> into) {
  const auto read = [](ByteChannel* stream, std::span<const std::span<std::byte>> places) {
    return stream->Read(places);
  };
  QUIRE_ASSIGN_OR_RETURN(const size_t count, Move(&read_, into, &read_spans_, read));
  // A stream that is not due is lost without a word of the one that is.
  if (count == 0) QUIRE_RETURN_IF_ERROR(CheckStreams());
  return count;
}

Result<size_t> StripedChannel::Write(std::span<const std::span<const std::byte>> parts) {
  const auto write = [](ByteChannel* stream, std::span<const std::span<const std::byte>> spans) {
    return stream->Write(spans);
  };
  return Move(&write_, parts, &write_spans_, write);
}

Status StripedChannel::CheckStreams() {
  others_.clear();
  for (const auto& stream : streams_) others_.push_back({.fd = stream->loss_fd()});
  PollSockets(others_, 0);
  for (size_t i = 0; i < others_.size(); ++i) {
    if (!others_[i].can_read) continue;
    return Status(StatusCode::kUnavailable, "stream " + std::to_string(i) + " of " +
                                                std::to_string(streams_.size()) + " was lost");
  }
  return Status();
}

void StripedChannel::EndWrites() noexcept {
  for (const auto& stream : streams_) stream->EndWrites();
}

bool StripedChannel::HasLeft() noexcept {
  return std::ranges::all_of(streams_, [](const auto& stream) { return stream->HasLeft(); });
}

// The streams whose turn it is wait for bytes; the others for their loss, and until all is sent
// that they have taken.
ByteChannel::Wait StripedChannel::PrepareWait(bool wants_read, bool wants_write) {
  const size_t reads = IndexOf(read_);
  const size_t writes = IndexOf(write_);
  Wait wait = streams_[reads]->PrepareWait(wants_read, wants_write && reads == writes);
  others_.clear();
  for (size_t i = 0; i < streams_.size(); ++i) {
    if (i == reads) continue;
    const Wait other = streams_[i]->PrepareWait(false, wants_write && i == writes);
    if (i == writes) wait.is_ready |= other.is_ready;
    PollEntry entry = other.entry;
    if (entry.fd < 0 && wants_read) entry.fd = streams_[i]->loss_fd();
    if (entry.fd >= 0) others_.push_back(entry);
  }
  wait.more = others_;
  return wait;
}

}  // namespace quire
