// Options of a store, each with numbers that no store can have: it opens and closes, or the refusal
// names the option.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "quire/chunk_store.h"
#include "quire/store_buffer.h"
#include "store/tiered/tiered_store.h"

namespace quire {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kHostile[] = {std::numeric_limits<int64_t>::min(),
                                -1,
                                0,
                                int64_t{1} << 31,
                                int64_t{1} << 32,
                                int64_t{1} << 44,
                                int64_t{1} << 51,
                                int64_t{1} << 61,
                                kMost / 1'000'000,
                                kMost / 1'000'000 + 1,
                                kMost};

struct Field {
  const char* name;
  std::function<void(ChunkStoreOptions&, int64_t)> set;
};

const std::vector<Field>& Fields() {
  using O = ChunkStoreOptions;
  static const std::vector<Field> fields = {
      {"ram.bytes_max", [](O& o, int64_t v) { o.ram.bytes_max = v; }},
      {"disk.bytes_max", [](O& o, int64_t v) { o.disk.bytes_max = v; }},
      {"disk.io_timeout_ms", [](O& o, int64_t v) { o.disk.io_timeout_ms = v; }},
      {"redis.ttl_ms", [](O& o, int64_t v) { o.redis.ttl_ms = v; }},
      {"redis.connect_timeout_ms", [](O& o, int64_t v) { o.redis.connect_timeout_ms = v; }},
      {"redis.io_timeout_ms", [](O& o, int64_t v) { o.redis.io_timeout_ms = v; }},
      {"redis.replicas", [](O& o, int64_t v) { o.redis.replicas = v; }},
      {"admit_after", [](O& o, int64_t v) { o.admit_after = v; }},
      {"queue_bytes_max", [](O& o, int64_t v) { o.queue_bytes_max = v; }},
      {"fetch_bytes_max", [](O& o, int64_t v) { o.fetch_bytes_max = v; }},
      {"pin_timeout_ms", [](O& o, int64_t v) { o.pin_timeout_ms = v; }},
      {"scrub_bytes_per_second", [](O& o, int64_t v) { o.scrub_bytes_per_second = v; }}};
  return fields;
}

void ExpectNamed(const Status& status, const std::string& name) {
  EXPECT_EQ(status.code(), StatusCode::kBadArgument) << status.ToString();
  EXPECT_NE(status.ToString().find(name), std::string::npos) << status.ToString();
}

TEST(HostileStoreOptions, OfChunkStore) {
  for (const Field& field : Fields()) {
    for (const int64_t value : kHostile) {
      SCOPED_TRACE(std::string(field.name) + " = " + std::to_string(value));
      ChunkStoreOptions options;
      options.ram.bytes_max = 1 << 20;
      field.set(options, value);
      const bool no_tier = options.ram.bytes_max == 0;
      const auto store = ChunkStore::Open(options);
      if (!store.ok()) ExpectNamed(store.status(), no_tier ? "no tier" : field.name);
      EXPECT_TRUE(value >= 0 || !store.ok());
    }
  }
}

// Milliseconds become nanoseconds inside.
TEST(HostileStoreOptions, TimesThatWouldWrapAreRefused) {
  for (const Field& field : Fields()) {
    if (!std::string(field.name).ends_with("_ms")) continue;
    ChunkStoreOptions options;
    options.ram.bytes_max = 1 << 20;
    field.set(options, kMost / 1000);
    ExpectNamed(CheckStoreOptions(options, /*has_slow_tier=*/true), field.name);
  }
}

TEST(HostileStoreOptions, OfStoreBuffer) {
  for (const int64_t value : kHostile) {
    const auto buffer = StoreBuffer::Create({.capacity_bytes = value});
    EXPECT_TRUE(value > 0 || !buffer.ok()) << value;
    if (!buffer.ok()) ExpectNamed(buffer.status(), "capacity_bytes");
  }
}

}  // namespace
}  // namespace quire
