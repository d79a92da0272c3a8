// Rows that one connection hands to another one, from plain memory to plain memory: no caches and
// no pages, but digests and records. Beside it a plain copy, in blocks as large.
#include <cstring>
#include <string>
#include <vector>

#include "bench_case.h"
#include "transfer/testing/connection_loop.h"

namespace quire::bench {
namespace {

class ChannelCase : public BenchCase {
 public:
  ChannelCase(const std::string& way, int64_t bytes, int64_t part_bytes, int64_t streams)
      : part_rows_(part_bytes / RowMemory::kRowBytes),
        loop_(Require(
            ConnectionLoop::Open(PlaceToListen(way), bytes / RowMemory::kRowBytes, streams))) {}

  nlohmann::json Run(const RunLimits& limits) override {
    return TimeCalls(limits, [&] { Require(loop_->Move(part_rows_)); });
  }

 private:
  const int64_t part_rows_;
  const std::unique_ptr<ConnectionLoop> loop_;
};

class BlockCopyCase : public BenchCase {
 public:
  BlockCopyCase(int64_t bytes, int64_t part_bytes)
      : part_bytes_(static_cast<size_t>(part_bytes)),
        from_(static_cast<size_t>(bytes), std::byte{0x3c}),
        to_(from_.size()) {}

  nlohmann::json Run(const RunLimits& limits) override {
    return TimeCalls(limits, [&] {
      for (size_t at = 0; at < from_.size(); at += part_bytes_)
        std::memcpy(to_.data() + at, from_.data() + at, part_bytes_);
    });
  }

 private:
  const size_t part_bytes_;
  const std::vector<std::byte> from_;
  std::vector<std::byte> to_;
};

}  // namespace

std::unique_ptr<BenchCase> MakeChannelCase(const JsonValue& request) {
  const int64_t part_bytes = Require(request.GetInt("message_bytes", RowMemory::kRowBytes));
  const int64_t bytes = Require(request.GetInt("bytes", part_bytes));
  if (part_bytes % RowMemory::kRowBytes != 0 || bytes % part_bytes != 0) {
    Require(Status(StatusCode::kBadArgument, "message_bytes: whole rows of " +
                                                 std::to_string(RowMemory::kRowBytes) +
                                                 " bytes, and bytes are whole messages"));
  }
  const std::string way = Require(request.GetString("way"));
  if (way == "copy") return std::make_unique<BlockCopyCase>(bytes, part_bytes);
  const int64_t streams = Require(request.GetIntOr("streams", 1, 1, 16));
  return std::make_unique<ChannelCase>(way, bytes, part_bytes, streams);
}

}  // namespace quire::bench
