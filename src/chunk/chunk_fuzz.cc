// A chunk from anywhere, also with its checksum corrected, as an attacker would. What is accepted
// lies inside of the input and has the sizes that it states.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "chunk/testing/test_chunk.h"

namespace {

void CheckAccepted(const quire::ChunkView& view, std::span<const std::byte> bytes) {
  const quire::ChunkHeader& header = view.header();
  QUIRE_CHECK(header.total_bytes == static_cast<int64_t>(bytes.size()));
  int64_t end = header.header_bytes;
  for (size_t s = 0; s < header.sections.size(); ++s) {
    const quire::Section& section = header.sections[s];
    QUIRE_CHECK(section.offset >= end);
    end = section.offset + section.length;
    QUIRE_CHECK(end <= header.total_bytes);
    const auto found = view.section(static_cast<int64_t>(s));
    if (!found.ok()) continue;
    QUIRE_CHECK(static_cast<int64_t>(found->size()) == section.length);
    QUIRE_CHECK(found->data() == bytes.data() + section.offset);
  }
}

void Read(std::span<const std::byte> bytes) {
  quire::ChunkLimits limits;
  limits.total_bytes_max = int64_t{1} << 20;
  const auto header = quire::DecodeChunkHeader(bytes, limits);
  if (!header.ok()) return;
  quire::ChunkExpectation expected{.key = header->key, .fingerprint = header->fingerprint};
  expected.approximate = header->approximate;
  expected.tokens = header->tokens;
  if (header->has_mac) expected.mac_key = "key";
  const auto view = quire::ChunkView::Open(bytes, expected, limits);
  if (view.ok()) CheckAccepted(*view, bytes);
}

void ReadPassport(std::string_view text) {
  const auto passport = quire::Passport::FromJson(text);
  if (!passport.ok()) return;
  QUIRE_CHECK(passport->ToJson().value() == text);
  QUIRE_CHECK(quire::ChunkLimits::Of(*passport).total_bytes_max > 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  Read(bytes);
  std::vector<std::byte> forged(bytes.begin(), bytes.end());
  quire::SealAgain(forged);
  Read(forged);
  // A chunk with the input as its head: deeper states than random bytes reach.
  std::vector<std::byte> sample = size % 2 == 0 ? quire::SampleChunk() : quire::CallerChunk();
  for (size_t i = 0; i + 2 < size; i += 3) {
    const size_t at = static_cast<size_t>(data[i] | data[i + 1] << 8) % sample.size();
    sample[at] = static_cast<std::byte>(data[i + 2]);
  }
  quire::SealAgain(sample);
  Read(sample);
  ReadPassport({reinterpret_cast<const char*>(data), size});
  std::string json = *quire::CallerPassport().ToJson();
  for (size_t i = 0; i + 1 < size; i += 2)
    json[data[i] % json.size()] = static_cast<char>(data[i + 1]);
  ReadPassport(json);
  return 0;
}
