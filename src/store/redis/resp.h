// RESP, the protocol of Redis: commands out, replies in. The reader puts a large value straight to
// where it is wanted, which hiredis' reply objects cannot, and takes no more memory than the caller
// allows, whatever lengths and counts the other side claims.
#ifndef QUIRE_STORE_REDIS_RESP_H_
#define QUIRE_STORE_REDIS_RESP_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quire/status.h"

namespace quire {

// Commands, encoded. Long arguments are referenced, not copied: they stay until they were sent.
class RedisRequest {
 public:
  void Add(std::span<const std::string_view> arguments);
  void Add(std::initializer_list<std::string_view> arguments) {
    Add(std::span(arguments.begin(), arguments.size()));
  }
  int64_t command_count() const { return command_count_; }
  size_t bytes() const { return bytes_; }

  // Appends up to `count_max` spans that stand behind the first `offset` bytes.
  void Gather(size_t offset, size_t count_max,
              std::vector<std::span<const std::byte>>* spans) const;

 private:
  // A stretch of text_, or somebody else's bytes.
  struct Part {
    const char* foreign;
    size_t begin;
    size_t size;
  };
  void AddText(std::string_view text);

  std::string text_;
  std::vector<Part> parts_;
  int64_t command_count_ = 0;
  size_t bytes_ = 0;
};

enum class RespType : uint8_t { kSimple, kError, kInteger, kBulk, kNull, kArray };

struct RespValue {
  RespType type = RespType::kNull;
  int64_t integer = 0;    // an integer; of a bulk string its length
  std::string text = {};  // simple, error, and bulk that was not put in place
  bool in_place = false;  // the bulk string lies in RespExpectation::place
  std::vector<RespValue> items = {};
};

// What a reply may be at most.
struct RespExpectation {
  // Not empty: a bulk string of exactly this length goes here; of another length, up to
  // bytes_max, it is skipped.
  std::span<std::byte> place = {};
  int64_t bytes_max = 4096;  // of all bulk strings of the reply together
  int64_t items_max = 64;    // of all arrays of the reply together
};

// Reads a stream of replies. The caller puts what it receives into Space(), says how much, and asks
// Next() until that is false.
class RespReader {
 public:
  RespReader();

  // Where received bytes go, in this order; the first may be empty.
  std::array<std::span<std::byte>, 2> Space();
  void Filled(size_t count);
  // Goes on with the reply under way; true when it is complete. Corrupt: this is no RESP, or more
  // than expected; the stream is lost then. `expected` stays the same until a reply is complete.
  Result<bool> Next(const RespExpectation& expected);
  // The complete reply. REQUIRES: Next returned true; once.
  RespValue Take();
  // Leading bytes of expected.place that have arrived for the reply under way.
  size_t placed() const { return body_mode_ == BodyMode::kPlace ? body_done_ : 0; }
  // Nothing of a next reply has come.
  bool idle() const { return begin_ == end_ && stack_.empty() && body_mode_ == BodyMode::kNone; }

 private:
  enum class BodyMode : uint8_t { kNone, kText, kPlace, kSkip };
  struct Frame {
    RespValue value;
    int64_t remaining;
  };
  Result<bool> ReadLine(std::string_view* line);
  Result<bool> StartValue(std::string_view line, const RespExpectation& expected);
  Result<bool> StartBulk(std::string_view line, int64_t length, const RespExpectation& expected);
  Result<bool> StartArray(std::string_view line, int64_t count, const RespExpectation& expected);
  Result<bool> ReadBody();
  bool Complete(RespValue value);
  std::byte* body() const;

  std::unique_ptr<std::byte[]> buffer_;
  size_t begin_ = 0, end_ = 0;
  std::vector<Frame> stack_;
  RespValue current_;
  BodyMode body_mode_ = BodyMode::kNone;
  std::byte* place_ = nullptr;
  size_t body_size_ = 0, body_done_ = 0;
  int64_t bytes_seen_ = 0, items_seen_ = 0;
};

// An error of the server for a message: one line of printable characters, not too long.
std::string PrintableError(std::string_view text);

}  // namespace quire

#endif  // QUIRE_STORE_REDIS_RESP_H_
