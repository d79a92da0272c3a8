// A target with a bug on purpose: ./test fails if fuzzing does not find it, for then the harness
// would not notice the bugs of the other targets either. The bug needs what they need too:
// feedback from coverage to get past the comparisons, and the address sanitizer to see the read.
#include <cstddef>
#include <cstdint>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::vector<uint8_t> bytes(data, data + size);
  if (bytes.size() >= 3 && bytes[0] == 'Q' && bytes[1] == 'K' && bytes[2] == 'V') {
    volatile uint8_t beyond = bytes.data()[bytes.size()];
    (void)beyond;
  }
  return 0;
}
