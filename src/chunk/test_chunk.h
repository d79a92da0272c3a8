// A small chunk for tests, and the hands of somebody who forges one.
#ifndef QUIRE_CHUNK_TEST_CHUNK_H_
#define QUIRE_CHUNK_TEST_CHUNK_H_

#include <span>
#include <string>
#include <vector>

#include "quire/chunk.h"

namespace quire {

// Two attention layers of bf16: one kv head, 4 key and 2 value dimensions; 5 tokens a chunk.
Passport SamplePassport();
ChunkFields SampleFields();
std::vector<SectionSpec> SampleSections();
// Byte i of section s is s * 37 + i.
std::vector<std::byte> SampleChunk(const ChunkWriteOptions& options = {});
std::vector<std::byte> ChunkOf(ChunkFields fields, const std::vector<SectionSpec>& sections,
                               const ChunkWriteOptions& options = {});
// What asks for SampleChunk.
ChunkExpectation ExpectSample();

// One chunk of KV in the sample's shape, and a state chunk without a sampler.
Status WriteSampleSnapshot(const std::string& path);

// Corrects the header's checksum after a change, as far as its fields allow.
void SealAgain(std::vector<std::byte>& chunk);
// The same for the header of a snapshot file.
void SealSnapshotAgain(std::span<std::byte> file);

}  // namespace quire

#endif  // QUIRE_CHUNK_TEST_CHUNK_H_
