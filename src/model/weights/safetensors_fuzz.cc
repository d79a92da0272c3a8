// A safetensors file and an index from anywhere. What is accepted must tile its data.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/check.h"
#include "model/weights/safetensors.h"

namespace {

void CheckContents(std::span<const std::byte> bytes) {
  const auto contents = quire::ParseSafetensors(bytes, "fuzz.safetensors");
  if (!contents.ok()) return;
  int64_t total = 0;
  for (const quire::StoredTensor& tensor : contents->tensors) {
    QUIRE_CHECK(contents->Find(tensor.name) == &tensor);
    QUIRE_CHECK(tensor.begin >= 0);
    QUIRE_CHECK(tensor.end >= tensor.begin);
    total += tensor.end - tensor.begin;
  }
  QUIRE_CHECK(contents->data_offset + total == static_cast<int64_t>(bytes.size()));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  CheckContents(std::as_bytes(std::span(data, size)));
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto index = quire::ParseSafetensorsIndex(text, "fuzz.index.json");
  if (index.ok()) {
    for (const auto& [name, file] : index->tensors) QUIRE_CHECK(file < index->files.size());
  }
  return 0;
}
