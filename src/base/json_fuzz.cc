// JSON from anywhere: a document or an error. What is accepted means the same after it has been
// written and read again, and no byte after its end was passed over.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/json.h"

namespace {

constexpr quire::JsonLimits kLimits = {.max_bytes = 1 << 16, .max_depth = 16};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto document = quire::ParseJson(text, "fuzz.json", kLimits);
  if (!document.ok()) return 0;
  QUIRE_CHECK(size <= kLimits.max_bytes);
  QUIRE_CHECK(text.find('\0') == text.npos);
  const auto longer = quire::ParseJson(std::string(text) + " x", "fuzz.json", kLimits);
  QUIRE_CHECK(!longer.ok());
  // Escapes can make the text longer than the limit on what is read.
  const auto again = quire::ParseJson(document->dump(), "fuzz.json", {.max_depth = 16});
  QUIRE_CHECK(again.ok()) << again.status().ToString();
  QUIRE_CHECK(*again == *document);
  return 0;
}
