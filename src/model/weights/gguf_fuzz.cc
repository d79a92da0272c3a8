// A GGUF file from anywhere. What is accepted must lie in the file.
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/check.h"
#include "model/weights/gguf.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto stored = quire::ParseGguf(std::as_bytes(std::span(data, size)), "fuzz.gguf");
  if (!stored.ok()) return 0;
  for (const quire::StoredTensor& tensor : stored->tensors) {
    QUIRE_CHECK(stored->Find(tensor.name) == &tensor);
    QUIRE_CHECK(tensor.begin >= 0);
    QUIRE_CHECK(tensor.end >= tensor.begin);
    QUIRE_CHECK(stored->data_offset + tensor.end <= static_cast<int64_t>(size));
  }
  return 0;
}
