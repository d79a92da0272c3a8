// Options of which sizes are made: whatever the numbers, an object is created, or a Status names
// what is wrong.
#ifndef QUIRE_BASE_TESTING_HOSTILE_OPTIONS_H_
#define QUIRE_BASE_TESTING_HOSTILE_OPTIONS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "quire/status.h"

namespace quire {

inline constexpr int64_t kHostile[] = {-1,
                                       0,
                                       (int64_t{1} << 31) - 1,
                                       int64_t{1} << 31,
                                       int64_t{1} << 32,
                                       int64_t{1} << 61,
                                       int64_t{1} << 62,
                                       std::numeric_limits<int64_t>::max(),
                                       std::numeric_limits<int64_t>::min()};

// A refusal is one of a caller that can act: it names one of the fields, or it is about memory.
inline void ExpectRefusal(const Status& status, const std::vector<std::string>& fields) {
  ASSERT_FALSE(status.ok());
  const std::string message = status.ToString();
  if (status.code() == StatusCode::kOutOfMemory) return;
  EXPECT_TRUE(status.code() == StatusCode::kBadArgument || status.code() == StatusCode::kTooLarge)
      << message;
  bool named = false;
  for (const std::string& field : fields) named |= message.find(field) != std::string::npos;
  EXPECT_TRUE(named) << "no option is named: " << message;
}

template <typename Options>
using Field = std::pair<const char*, std::function<void(Options&, int64_t)>>;

// Each field with each number, and each pair of fields with large ones.
template <typename Options, typename Create>
void TryAll(const Options& good, const std::vector<Field<Options>>& fields, Create&& create) {
  ASSERT_TRUE(create(good).ok()) << create(good).ToString();
  for (const auto& [name, set] : fields) {
    for (const int64_t value : kHostile) {
      Options options = good;
      set(options, value);
      const Status status = create(options);
      SCOPED_TRACE(std::string(name) + " = " + std::to_string(value));
      if (!status.ok()) ExpectRefusal(status, {name});
      for (const auto& [other_name, set_other] : fields) {
        Options both = options;
        set_other(both, value);
        const Status of_both = create(both);
        SCOPED_TRACE(other_name);
        if (!of_both.ok()) ExpectRefusal(of_both, {name, other_name, "bytes"});
      }
    }
  }
}

}  // namespace quire

#endif  // QUIRE_BASE_TESTING_HOSTILE_OPTIONS_H_
