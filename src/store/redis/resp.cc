#include "store/redis/resp.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace quire {
namespace {

constexpr size_t kReferencedBytes = 4096;   // shorter arguments are cheaper to copy than to gather
constexpr size_t kBufferBytes = 64 << 10;   // of what is not put in place: lines and short values
constexpr size_t kLineBytesMax = 16 << 10;  // error texts are the longest lines there are
constexpr size_t kDepthMax = 8;             // CLUSTER SLOTS has 4
constexpr size_t kErrorBytesMax = 160;

Status Garbage(std::string_view what, std::string_view line) {
  return Status(StatusCode::kCorrupt, "Redis reply: " + std::string(what) + " in \"" +
                                          PrintableError(line) +
                                          "\"; is this port a Redis server's?");
}

bool ParseNumber(std::string_view text, int64_t* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

}  // namespace

std::string PrintableError(std::string_view text) {
  std::string line(text.substr(0, kErrorBytesMax));
  for (char& c : line) {
    if (c < ' ' || c > '~') c = '?';
  }
  if (text.size() > kErrorBytesMax) line += "...";
  return line;
}

// ---- Commands

void RedisRequest::AddText(std::string_view text) {
  if (parts_.empty() || parts_.back().foreign != nullptr)
    parts_.push_back({nullptr, text_.size(), 0});
  text_ += text;
  parts_.back().size += text.size();
  bytes_ += text.size();
}

void RedisRequest::Add(std::span<const std::string_view> arguments) {
  AddText("*" + std::to_string(arguments.size()) + "\r\n");
  for (const std::string_view argument : arguments) {
    AddText("$" + std::to_string(argument.size()) + "\r\n");
    if (argument.size() < kReferencedBytes) {
      AddText(argument);
    } else {
      parts_.push_back({argument.data(), 0, argument.size()});
      bytes_ += argument.size();
    }
    AddText("\r\n");
  }
  ++command_count_;
}

void RedisRequest::Gather(size_t offset, size_t count_max,
                          std::vector<std::span<const std::byte>>* spans) const {
  for (const Part& part : parts_) {
    if (count_max == 0) return;
    if (offset >= part.size) {
      offset -= part.size;
      continue;
    }
    const char* data = part.foreign != nullptr ? part.foreign : text_.data() + part.begin;
    spans->push_back(std::as_bytes(std::span(data + offset, part.size - offset)));
    offset = 0;
    --count_max;
  }
}

// ---- Replies

RespReader::RespReader() : buffer_(std::make_unique_for_overwrite<std::byte[]>(kBufferBytes)) {}

std::byte* RespReader::body() const {
  // Asked for each time: current_ may have been moved since.
  return body_mode_ == BodyMode::kPlace
             ? place_
             : reinterpret_cast<std::byte*>(const_cast<char*>(current_.text.data()));
}

std::array<std::span<std::byte>, 2> RespReader::Space() {
  if (begin_ == end_) begin_ = end_ = 0;
  if (end_ == kBufferBytes) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  const std::span<std::byte> rest(buffer_.get() + end_, kBufferBytes - end_);
  const bool has_body = body_mode_ == BodyMode::kPlace || body_mode_ == BodyMode::kText;
  // Bytes in the buffer come before those that are received now.
  if (!has_body || begin_ != end_) return {std::span<std::byte>(), rest};
  return {std::span(body() + body_done_, body_size_ - body_done_), rest};
}

void RespReader::Filled(size_t count) {
  const auto [first, second] = Space();
  const size_t in_body = std::min(count, first.size());
  body_done_ += in_body;
  end_ += count - in_body;
}

Result<bool> RespReader::ReadLine(std::string_view* line) {
  const std::string_view text(reinterpret_cast<const char*>(buffer_.get()) + begin_, end_ - begin_);
  const size_t at = text.find('\n');
  if (at == text.npos) {
    if (text.size() > kLineBytesMax) return Garbage("a line without an end", text);
    return false;
  }
  if (at < 2 || text[at - 1] != '\r') return Garbage("a line that does not end with CR LF", text);
  *line = text.substr(0, at - 1);
  begin_ += at + 1;
  return true;
}

bool RespReader::Complete(RespValue value) {
  while (!stack_.empty()) {
    Frame& top = stack_.back();
    top.value.items.push_back(std::move(value));
    if (--top.remaining > 0) return false;
    value = std::move(top.value);
    stack_.pop_back();
  }
  current_ = std::move(value);
  return true;
}

Result<bool> RespReader::StartBulk(std::string_view line, int64_t length,
                                   const RespExpectation& expected) {
  if (length == -1) return Complete({});
  if (length < 0) return Garbage("a negative length", line);
  const bool top_level = stack_.empty();
  const auto size = static_cast<size_t>(length);
  const bool fits_place = top_level && !expected.place.empty() && size == expected.place.size();
  if (!fits_place && length > expected.bytes_max - bytes_seen_) {
    return Garbage("a value over the limit of " + std::to_string(expected.bytes_max) + " bytes",
                   line);
  }
  current_ = {.type = RespType::kBulk, .integer = length, .in_place = fits_place};
  body_size_ = size;
  body_done_ = 0;
  if (fits_place) {
    body_mode_ = BodyMode::kPlace;
    place_ = expected.place.data();
  } else if (top_level && !expected.place.empty()) {
    body_mode_ = BodyMode::kSkip;
  } else {
    bytes_seen_ += length;
    current_.text.resize(size);
    body_mode_ = BodyMode::kText;
  }
  return false;
}

Result<bool> RespReader::StartArray(std::string_view line, int64_t count,
                                    const RespExpectation& expected) {
  if (count == -1) return Complete({});
  if (count < 0) return Garbage("a negative count", line);
  if (count > expected.items_max - items_seen_) {
    return Garbage("an array over the limit of " + std::to_string(expected.items_max) + " items",
                   line);
  }
  if (stack_.size() >= kDepthMax) return Garbage("arrays that are nested too deep", line);
  items_seen_ += count;
  RespValue array{.type = RespType::kArray};
  if (count == 0) return Complete(std::move(array));
  stack_.push_back({std::move(array), count});
  return false;
}

// True if that completed the reply.
Result<bool> RespReader::StartValue(std::string_view line, const RespExpectation& expected) {
  const std::string_view rest = line.substr(1);
  if (line[0] == '+') return Complete({.type = RespType::kSimple, .text = std::string(rest)});
  if (line[0] == '-') return Complete({.type = RespType::kError, .text = std::string(rest)});
  int64_t number = 0;
  if (line[0] != ':' && line[0] != '$' && line[0] != '*')
    return Garbage("a reply of no known type", line);
  if (!ParseNumber(rest, &number)) return Garbage("something that is no number", line);
  if (line[0] == ':') return Complete({.type = RespType::kInteger, .integer = number});
  if (line[0] == '$') return StartBulk(line, number, expected);
  return StartArray(line, number, expected);
}

// True when the bulk string and the CR LF behind it have arrived.
Result<bool> RespReader::ReadBody() {
  const size_t buffered = std::min(end_ - begin_, body_size_ - body_done_);
  if (buffered > 0) {
    if (body_mode_ != BodyMode::kSkip)
      std::memcpy(body() + body_done_, buffer_.get() + begin_, buffered);
    begin_ += buffered;
    body_done_ += buffered;
  }
  if (body_done_ < body_size_ || end_ - begin_ < 2) return false;
  if (std::memcmp(buffer_.get() + begin_, "\r\n", 2) != 0) {
    return Garbage("a value that is longer than was said",
                   {reinterpret_cast<const char*>(buffer_.get()) + begin_, 2});
  }
  begin_ += 2;
  body_mode_ = BodyMode::kNone;
  return true;
}

Result<bool> RespReader::Next(const RespExpectation& expected) {
  while (true) {
    bool complete = false;
    if (body_mode_ != BodyMode::kNone) {
      QUIRE_ASSIGN_OR_RETURN(const bool has_body, ReadBody());
      if (!has_body) return false;
      complete = Complete(std::move(current_));
    } else {
      std::string_view line;
      QUIRE_ASSIGN_OR_RETURN(const bool has_line, ReadLine(&line));
      if (!has_line) return false;
      QUIRE_ASSIGN_OR_RETURN(complete, StartValue(line, expected));
    }
    if (complete) {
      bytes_seen_ = items_seen_ = 0;
      return true;
    }
  }
}

RespValue RespReader::Take() { return std::exchange(current_, RespValue{}); }

}  // namespace quire
