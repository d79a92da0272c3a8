// A small chunk for tests, and ways to forge one.
#ifndef QUIRE_CHUNK_TESTING_TEST_CHUNK_H_
#define QUIRE_CHUNK_TESTING_TEST_CHUNK_H_

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
// SampleChunk with three tensors of a caller's states, of no, two and five dimensions.
Passport CallerPassport();
std::vector<std::byte> CallerChunk();
// What asks for SampleChunk.
ChunkExpectation ExpectSample();

// One chunk of KV in the sample's shape, and a state chunk without a sampler.
Status WriteSampleSnapshot(const std::string& path);
// A file of version 2: three layers, of which the second has a window of 3 tokens and rows for two,
// and the third is recurrent; a window of the sequence that has lost a token.
Status WriteHidingSnapshot(const std::string& path);
// The state chunk of such a file, with these bytes for the section of windows, 64 of them.
std::vector<std::byte> HidingStateChunk(std::span<const std::byte> windows);
// What asks for it.
ChunkExpectation ExpectHidingState();
Passport HidingPassport();

// Corrects the header's checksum after a change, as far as its fields allow.
void SealAgain(std::vector<std::byte>& chunk);
// The same for the header of a snapshot file.
void SealSnapshotAgain(std::span<std::byte> file);

}  // namespace quire

#endif  // QUIRE_CHUNK_TESTING_TEST_CHUNK_H_
