// Chunks to bytes and back. Lengths are checked in the order in which they are believed: the fixed
// part bounds the header, the header's own checksum makes its fields those of the writer, and only
// then are counts and offsets held against the limits and used.
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <utility>

#include "base/guard.h"
#include "base/huge_pages.h"
#include "chunk/chunk_layout.h"
#include "chunk/sha256.h"

namespace quire {
namespace {

using namespace chunk_layout;

// ---- Messages

std::string ShortHex(const Digest& digest) { return digest.ToHex().substr(0, 16); }

Status Corrupt(const std::string& why) {
  return Status(StatusCode::kCorrupt, "chunk: " + why + "; drop it and compute the tokens again");
}

Status Incompatible(const std::string& why) {
  return Status(StatusCode::kIncompatible, "chunk: " + why);
}

Status OverLimit(const std::string& what, int64_t value, int64_t limit) {
  return Status(StatusCode::kTooLarge, "chunk: " + what + " is " + std::to_string(value) +
                                           ", over the limit of " + std::to_string(limit));
}

std::string SectionName(int64_t index, const SectionSpec& section) {
  return "section " + std::to_string(index) + " (" + std::string(SectionKindName(section.kind)) +
         ", layers " + std::to_string(section.layer_first) + " to " +
         std::to_string(section.layer_last) + ")";
}

// ---- Sizes

// a * b, or `cap` where that is less. REQUIRES: a, b >= 0, cap >= 0.
int64_t CappedProduct(int64_t a, int64_t b, int64_t cap) {
  if (a == 0 || b == 0) return 0;
  return a > cap / b ? cap : a * b;
}

constexpr int64_t kBeyond = std::numeric_limits<int64_t>::max() / 4;

// Bytes of the section's tensor; kBeyond for more than any limit allows.
int64_t TensorBytes(const SectionSpec& section) {
  int64_t bytes = section.dtype.bytes();
  for (const int64_t dim : section.dims) bytes = CappedProduct(bytes, dim, kBeyond);
  return bytes;
}

int64_t HeaderBytesMax(const ChunkLimits& limits) {
  return RoundUp(HeaderContentBytes(limits.section_count_max, limits.token_count_max, true),
                 kFileAlignment);
}

// The end of a chunk: what follows the last section up to the next unit belongs to it, as readers
// with O_DIRECT take whole units. A header of whole file units says that it was written for them.
int64_t TotalBytes(int64_t header_bytes, std::span<const Section> sections) {
  const int64_t end =
      sections.empty() ? header_bytes : sections.back().offset + sections.back().length;
  return RoundUp(end, header_bytes % kFileAlignment == 0 ? kFileAlignment : kUnitBytes);
}

// ---- Sections: one check for what is written and what is read

bool IsWholeType(ElementType type) {
  return type.bits == 8 || type.bits == 16 || type.bits == 32 || type.bits == 64;
}

bool FitsTable(const SectionSpec& section) {
  constexpr int64_t kLayerMax = std::numeric_limits<uint16_t>::max();
  constexpr int64_t kDimMax = std::numeric_limits<uint32_t>::max();
  return section.dims.size() <= kRankMax && 0 <= section.layer_first &&
         section.layer_first <= section.layer_last && section.layer_last <= kLayerMax &&
         std::all_of(section.dims.begin(), section.dims.end(),
                     [](int64_t dim) { return 0 <= dim && dim <= kDimMax; });
}

// `previous` is the section before, or null. `code` is whose mistake it is.
Status CheckSpec(StatusCode code, int64_t index, const SectionSpec& section,
                 const SectionSpec* previous, const ChunkLimits& limits) {
  const auto bad = [&](const std::string& why) {
    return Status(code, "chunk: " + SectionName(index, section) + " " + why);
  };
  if (!FitsTable(section)) return bad("has layers or dimensions out of range");
  if (!IsWholeType(section.dtype))
    return bad("has elements of " + std::to_string(section.dtype.bits) + " bits");
  if (previous != nullptr && std::pair(previous->layer_first, previous->kind) >=
                                 std::pair(section.layer_first, section.kind)) {
    return bad("is not behind the one before; sections ascend by layer, then kind, each once");
  }
  const int64_t bytes = TensorBytes(section);
  if (bytes > limits.section_bytes_max) {
    return OverLimit("the size of " + SectionName(index, section), bytes, limits.section_bytes_max);
  }
  return Status();
}

Status CheckTotal(const ChunkHeader& header, const ChunkLimits& limits) {
  const int64_t tokens = static_cast<int64_t>(header.tokens.size());
  const int64_t sections = static_cast<int64_t>(header.sections.size());
  if (tokens > limits.token_count_max)
    return OverLimit("the number of tokens", tokens, limits.token_count_max);
  if (sections > limits.section_count_max)
    return OverLimit("the number of sections", sections, limits.section_count_max);
  if (header.total_bytes > limits.total_bytes_max)
    return OverLimit("the number of bytes", header.total_bytes, limits.total_bytes_max);
  return Status();
}

// ---- Encoding

void StoreDigest(std::span<std::byte> bytes, size_t at, const Digest& digest) {
  std::memcpy(bytes.data() + at, digest.bytes.data(), digest.bytes.size());
}

Digest LoadDigest(std::span<const std::byte> bytes, size_t at) {
  Digest digest;
  std::memcpy(digest.bytes.data(), bytes.data() + at, digest.bytes.size());
  return digest;
}

uint16_t FlagsOf(const ChunkHeader& header) {
  return static_cast<uint16_t>(
      (header.tail ? kFlagTail : 0) | (header.contextual ? kFlagContextual : 0) |
      (header.approximate ? kFlagApproximate : 0) | (header.has_mac ? kFlagMac : 0));
}

void EncodeFixed(const ChunkHeader& header, std::span<std::byte> out) {
  std::memcpy(out.data(), kMagic.data(), kMagic.size());
  Store(out, kVersionAt, kVersion);
  Store(out, kFlagsAt, FlagsOf(header));
  Store(out, kHeaderBytesAt, static_cast<uint32_t>(header.header_bytes));
  StoreDigest(out, kKeyAt, header.key.digest);
  StoreDigest(out, kFingerprintAt, header.fingerprint);
  Store(out, kTokenCountAt, static_cast<uint32_t>(header.tokens.size()));
  Store(out, kFirstPositionAt, header.first_position);
  Store(out, kCreatedAt, header.created_ms);
  Store(out, kExpiresAt, header.expires_ms);
  StoreDigest(out, kContextAt, header.context);
  Store(out, kRopeTableAt, header.rope_table_id);
  Store(out, kGenerationAt, header.generation);
  Store(out, kNumericsAt, header.numerics_id);
  Store(out, kSectionCountAt, static_cast<uint32_t>(header.sections.size()));
}

void EncodeEntry(const Section& section, int64_t header_bytes, std::span<std::byte> out) {
  Store(out, kEntryKindAt, static_cast<uint16_t>(section.kind));
  Store(out, kEntryLayerFirstAt, static_cast<uint16_t>(section.layer_first));
  Store(out, kEntryLayerLastAt, static_cast<uint16_t>(section.layer_last));
  Store(out, kEntryDTypeAt, static_cast<uint16_t>(section.dtype.code << 8 | section.dtype.bits));
  Store(out, kEntryRankAt, static_cast<uint8_t>(section.dims.size()));
  for (size_t i = 0; i < section.dims.size(); ++i)
    Store(out, kEntryDimsAt + 4 * i, static_cast<uint32_t>(section.dims[i]));
  Store(out, kEntryOffsetAt, static_cast<uint32_t>((section.offset - header_bytes) / kUnitBytes));
  Store(out, kEntryLengthAt, static_cast<uint32_t>(section.length));
  Store(out, kEntryCrcAt, section.crc32c);
}

size_t MacAt(const ChunkHeader& header) {
  if (!header.has_mac) return 0;
  return static_cast<size_t>(HeaderContentBytes(static_cast<int64_t>(header.sections.size()),
                                                static_cast<int64_t>(header.tokens.size()), false));
}

// All but checksum and MAC.
void EncodeHeader(const ChunkHeader& header, std::span<std::byte> out) {
  std::fill(out.begin(), out.end(), std::byte{0});
  EncodeFixed(header, out);
  size_t at = kFixedBytes;
  for (const Section& section : header.sections) {
    EncodeEntry(section, header.header_bytes, out.subspan(at, kEntryBytes));
    at += kEntryBytes;
  }
  const std::span<const std::byte> tokens = std::as_bytes(std::span(header.tokens));
  std::copy(tokens.begin(), tokens.end(), out.begin() + static_cast<ptrdiff_t>(at));
}

Digest ChunkMac(std::span<const std::byte> chunk, size_t header_bytes, size_t mac_at,
                std::string_view key) {
  HmacSha256 mac(key);
  VisitHeader(chunk.first(header_bytes), mac_at,
              [&](std::span<const std::byte> piece) { mac.Update(piece); });
  return mac.Update(chunk.subspan(header_bytes)).Finish();
}

// ---- Decoding

// The counts that say where things stand in a header, before its checksum was verified: all that
// may be done with them is to compare them with the header's length.
struct RawCounts {
  uint16_t flags;
  int64_t section_count;
  int64_t token_count;
  bool has_mac() const { return (flags & kFlagMac) != 0; }
  size_t mac_at() const {
    return has_mac() ? static_cast<size_t>(HeaderContentBytes(section_count, token_count, false))
                     : 0;
  }
};

Result<RawCounts> LoadCounts(std::span<const std::byte> header) {
  const RawCounts counts{.flags = Load<uint16_t>(header, kFlagsAt),
                         .section_count = Load<uint32_t>(header, kSectionCountAt),
                         .token_count = Load<uint32_t>(header, kTokenCountAt)};
  const int64_t content =
      HeaderContentBytes(counts.section_count, counts.token_count, counts.has_mac());
  if (content <= static_cast<int64_t>(header.size())) return counts;
  return Corrupt("its header of " + std::to_string(header.size()) + " bytes cannot hold " +
                 std::to_string(counts.section_count) + " sections and " +
                 std::to_string(counts.token_count) + " tokens");
}

Status CheckVersion(std::span<const std::byte> header, uint16_t flags) {
  const uint16_t version = Load<uint16_t>(header, kVersionAt);
  if (version != kVersion) {
    return Incompatible("its format is version " + std::to_string(version) +
                        "; this build reads version " + std::to_string(kVersion));
  }
  const int unread = flags & ~kFlagsRead;
  if (unread != 0 || Load<uint32_t>(header, kReservedAt) != 0) {
    return Incompatible("it is compressed, encrypted or has a field of a newer version (flags " +
                        std::to_string(flags) + ")");
  }
  return Status();
}

void DecodeFixed(std::span<const std::byte> header, const RawCounts& counts, ChunkHeader& to) {
  to.tail = (counts.flags & kFlagTail) != 0;
  to.contextual = (counts.flags & kFlagContextual) != 0;
  to.approximate = (counts.flags & kFlagApproximate) != 0;
  to.has_mac = counts.has_mac();
  to.header_bytes = static_cast<int64_t>(header.size());
  to.key.digest = LoadDigest(header, kKeyAt);
  to.fingerprint = LoadDigest(header, kFingerprintAt);
  to.first_position = Load<uint32_t>(header, kFirstPositionAt);
  to.created_ms = Load<int64_t>(header, kCreatedAt);
  to.expires_ms = Load<int64_t>(header, kExpiresAt);
  to.context = LoadDigest(header, kContextAt);
  to.rope_table_id = Load<uint64_t>(header, kRopeTableAt);
  to.generation = Load<uint64_t>(header, kGenerationAt);
  to.numerics_id = Load<uint32_t>(header, kNumericsAt);
}

Result<Section> DecodeEntry(std::span<const std::byte> entry, int64_t header_bytes) {
  Section section;
  section.kind = static_cast<SectionKind>(Load<uint16_t>(entry, kEntryKindAt));
  section.layer_first = Load<uint16_t>(entry, kEntryLayerFirstAt);
  section.layer_last = Load<uint16_t>(entry, kEntryLayerLastAt);
  const uint16_t dtype = Load<uint16_t>(entry, kEntryDTypeAt);
  section.dtype = ElementType(static_cast<uint8_t>(dtype >> 8), static_cast<uint8_t>(dtype));
  section.offset = header_bytes + Load<uint32_t>(entry, kEntryOffsetAt) * kUnitBytes;
  section.length = Load<uint32_t>(entry, kEntryLengthAt);
  section.crc32c = Load<uint32_t>(entry, kEntryCrcAt);
  const size_t rank = Load<uint8_t>(entry, kEntryRankAt);
  bool zeros = rank <= kRankMax;
  for (size_t i = kEntryPaddingAt; i < kEntryDimsAt; ++i) zeros &= entry[i] == std::byte{0};
  for (size_t i = 0; i < kRankMax; ++i) {
    const int64_t dim = Load<uint32_t>(entry, kEntryDimsAt + 4 * i);
    if (i < rank) section.dims.push_back(dim);
    zeros &= i < rank || dim == 0;
  }
  if (zeros) return section;
  return Corrupt("a section has " + std::to_string(rank) +
                 " dimensions, or bytes set that must be zero");
}

// Sections follow one another without overlap, each as long as its shape says.
Status CheckPlace(int64_t index, const Section& section, int64_t earliest) {
  if (section.length != TensorBytes(section)) {
    return Corrupt(SectionName(index, section) + " has " + std::to_string(section.length) +
                   " bytes; its shape makes " + std::to_string(TensorBytes(section)));
  }
  if (section.offset >= earliest) return Status();
  return Corrupt(SectionName(index, section) + " begins at byte " + std::to_string(section.offset) +
                 ", inside of what stands before");
}

Status DecodeSections(std::span<const std::byte> header, int64_t count, const ChunkLimits& limits,
                      ChunkHeader& to) {
  to.sections.reserve(static_cast<size_t>(count));
  int64_t end = to.header_bytes;
  for (int64_t i = 0; i < count; ++i) {
    const size_t at = kFixedBytes + static_cast<size_t>(i) * kEntryBytes;
    QUIRE_ASSIGN_OR_RETURN(Section section,
                           DecodeEntry(header.subspan(at, kEntryBytes), to.header_bytes));
    const Section* const previous = to.sections.empty() ? nullptr : &to.sections.back();
    QUIRE_RETURN_IF_ERROR(CheckSpec(StatusCode::kCorrupt, i, section, previous, limits));
    QUIRE_RETURN_IF_ERROR(CheckPlace(i, section, end));
    end = section.offset + section.length;
    to.sections.push_back(std::move(section));
  }
  return Status();
}

Result<ChunkHeader> DecodeWhole(std::span<const std::byte> header, const ChunkLimits& limits) {
  QUIRE_ASSIGN_OR_RETURN(const RawCounts counts, LoadCounts(header));
  if (HeaderCrc(header, counts.mac_at()) != Load<uint32_t>(header, kCrcAt))
    return Corrupt("the checksum of its header is wrong");
  QUIRE_RETURN_IF_ERROR(CheckVersion(header, counts.flags));
  if (counts.token_count > limits.token_count_max)
    return OverLimit("the number of tokens", counts.token_count, limits.token_count_max);
  if (counts.section_count > limits.section_count_max)
    return OverLimit("the number of sections", counts.section_count, limits.section_count_max);

  ChunkHeader to;
  DecodeFixed(header, counts, to);
  if (to.created_ms < 0 || to.expires_ms < 0) return Corrupt("its times are out of range");
  QUIRE_RETURN_IF_ERROR(DecodeSections(header, counts.section_count, limits, to));
  to.tokens.resize(static_cast<size_t>(counts.token_count));
  const size_t tokens_at = kFixedBytes + to.sections.size() * kEntryBytes;
  if (!to.tokens.empty())
    std::memcpy(to.tokens.data(), header.data() + tokens_at, to.tokens.size() * sizeof(int32_t));
  to.total_bytes = TotalBytes(to.header_bytes, to.sections);
  QUIRE_RETURN_IF_ERROR(CheckTotal(to, limits));
  return to;
}

Status CheckMac(std::span<const std::byte> chunk, const ChunkHeader& header, std::string_view key) {
  const size_t at = MacAt(header);
  const Digest mac = ChunkMac(chunk, static_cast<size_t>(header.header_bytes), at, key);
  if (EqualInConstantTime(mac, LoadDigest(chunk, at))) return Status();
  return Corrupt("its MAC is not that of the key: it was changed, or signed with another key");
}

// A new chunk is written once from end to end, so the first touch of its pages is a good part of
// its cost, and large pages are touched 512 times less often. Advice only: where the kernel has
// none the memory is as good, and slower.
void AdviseHugePages(std::span<std::byte> bytes) {
  const std::span<std::byte> huge = HugePagesOf(bytes);
  if (!huge.empty()) madvise(huge.data(), huge.size(), MADV_HUGEPAGE);
}

}  // namespace

// ---------------------------------------------------------------------- header and limits

std::string_view SectionKindName(SectionKind kind) {
  switch (kind) {
    case SectionKind::kKey:
      return "key";
    case SectionKind::kValue:
      return "value";
    case SectionKind::kKeyScale:
      return "key scale";
    case SectionKind::kValueScale:
      return "value scale";
    case SectionKind::kLatent:
      return "latent";
    case SectionKind::kRecurrentState:
      return "recurrent state";
    case SectionKind::kRecurrentInputs:
      return "recurrent inputs";
    case SectionKind::kTokens:
      return "tokens";
    case SectionKind::kSampler:
      return "sampler";
    case SectionKind::kWindow:
      return "window";
  }
  return "kind of a newer version";
}

int64_t ChunkHeader::Find(SectionKind kind, int64_t layer) const {
  for (size_t i = 0; i < sections.size(); ++i) {
    const Section& section = sections[i];
    if (section.kind == kind && section.layer_first <= layer && layer <= section.layer_last)
      return static_cast<int64_t>(i);
  }
  return -1;
}

ChunkLimits ChunkLimits::Of(const Passport& passport) {
  ChunkLimits limits;
  const int64_t layer_count = static_cast<int64_t>(passport.layers.size());
  constexpr int64_t kKindsPerLayer = 4;  // keys, values and the scales of both
  constexpr int64_t kExtras = 8;         // tokens, sampler, window and room for two kinds more each
  limits.token_count_max = passport.block_tokens;
  limits.section_count_max = kKindsPerLayer * layer_count + kExtras;
  const int64_t cap = limits.section_bytes_max;
  int64_t payload = kExtras * cap;
  for (const PassportLayer& layer : passport.layers) {
    if (layer.kind == StateKind::kRecurrent) {
      payload += 2 * cap;  // a state and the inputs behind it
      continue;
    }
    if (layer.kind == StateKind::kCaller) {
      int64_t bytes = layer.dtype.bytes();
      for (const int64_t dim : layer.state_shape) bytes = CappedProduct(bytes, dim, cap);
      payload += bytes + kFileAlignment;
      continue;
    }
    const int64_t heads = CappedProduct(passport.block_tokens, layer.kv_heads, cap);
    const int64_t scales = CappedProduct(heads, 2 * static_cast<int64_t>(sizeof(float)), cap);
    const int64_t width = CappedProduct(layer.head_dim, layer.dtype.bytes(), cap) +
                          CappedProduct(layer.v_head_dim, layer.value_dtype().bytes(), cap);
    payload += CappedProduct(heads, width, 2 * cap) + scales + kKindsPerLayer * kFileAlignment;
  }
  limits.total_bytes_max = HeaderBytesMax(limits) + payload;
  return limits;
}

// ---------------------------------------------------------------------- writing

ChunkBuffer::ChunkBuffer(int64_t size)
    : data_(static_cast<std::byte*>(
          ::operator new(static_cast<size_t>(size), std::align_val_t(kFileAlignment)))),
      size_(static_cast<size_t>(size)) {
  AdviseHugePages(bytes());
}

void ChunkBuffer::Free::operator()(std::byte* data) const {
  ::operator delete(data, std::align_val_t(kFileAlignment));
}

ChunkWriter::ChunkWriter(ChunkHeader header, std::string mac_key, ChunkBuffer buffer)
    : header_(std::move(header)), mac_key_(std::move(mac_key)), buffer_(std::move(buffer)) {}

Result<ChunkWriter> ChunkWriter::Create(ChunkFields fields, std::span<const SectionSpec> specs,
                                        const ChunkWriteOptions& options) {
  return GuardEntry([&]() -> Result<ChunkWriter> {
    if (options.alignment != kUnitBytes && options.alignment != kFileAlignment) {
      return Status(
          StatusCode::kBadArgument,
          "chunk: alignment is " + std::to_string(options.alignment) + "; it must be 64 or 4096");
    }
    if (fields.created_ms < 0 || fields.expires_ms < 0)
      return Status(StatusCode::kBadArgument, "chunk: a time is negative");
    ChunkHeader header;
    static_cast<ChunkFields&>(header) = std::move(fields);
    header.has_mac = !options.mac_key.empty();
    header.header_bytes =
        RoundUp(HeaderContentBytes(static_cast<int64_t>(specs.size()),
                                   static_cast<int64_t>(header.tokens.size()), header.has_mac),
                options.alignment);
    int64_t end = header.header_bytes;
    for (const SectionSpec& spec : specs) {
      const int64_t index = static_cast<int64_t>(header.sections.size());
      const Section* const previous = header.sections.empty() ? nullptr : &header.sections.back();
      QUIRE_RETURN_IF_ERROR(
          CheckSpec(StatusCode::kBadArgument, index, spec, previous, options.limits));
      Section section{spec};
      section.offset = RoundUp(end, options.alignment);
      section.length = TensorBytes(spec);
      end = section.offset + section.length;
      header.sections.push_back(std::move(section));
    }
    header.total_bytes = TotalBytes(header.header_bytes, header.sections);
    QUIRE_RETURN_IF_ERROR(CheckTotal(header, options.limits));
    ChunkBuffer buffer(header.total_bytes);
    return ChunkWriter(std::move(header), std::string(options.mac_key), std::move(buffer));
  });
}

Result<std::span<std::byte>> ChunkWriter::section(int64_t index) {
  return GuardEntry([&]() -> Result<std::span<std::byte>> {
    if (buffer_.bytes().data() == nullptr)
      return Status(StatusCode::kBadArgument, "ChunkWriter::section: the chunk was sealed");
    if (index < 0 || index >= static_cast<int64_t>(header_.sections.size())) {
      return Status(StatusCode::kBadArgument, "ChunkWriter::section: there is no section " +
                                                  std::to_string(index) + " in a chunk of " +
                                                  std::to_string(header_.sections.size()));
    }
    const Section& section = header_.sections[static_cast<size_t>(index)];
    return buffer_.bytes().subspan(static_cast<size_t>(section.offset),
                                   static_cast<size_t>(section.length));
  });
}

Result<ChunkBuffer> ChunkWriter::Seal() && {
  return GuardEntry([&]() -> Result<ChunkBuffer> {
    const std::span<std::byte> bytes = buffer_.bytes();
    int64_t end = header_.header_bytes;
    const auto zero_gap = [&](int64_t to) {
      std::fill(bytes.begin() + end, bytes.begin() + to, std::byte{0});
    };
    for (Section& section : header_.sections) {
      zero_gap(section.offset);
      section.crc32c = Crc32c(bytes.data() + section.offset, static_cast<size_t>(section.length));
      end = section.offset + section.length;
    }
    zero_gap(header_.total_bytes);

    const size_t header_bytes = static_cast<size_t>(header_.header_bytes);
    const size_t mac_at = MacAt(header_);
    EncodeHeader(header_, bytes.first(header_bytes));
    if (header_.has_mac)
      StoreDigest(bytes, mac_at, ChunkMac(bytes, header_bytes, mac_at, mac_key_));
    Store(bytes, kCrcAt, HeaderCrc(bytes.first(header_bytes), mac_at));
    return std::move(buffer_);
  });
}

// ---------------------------------------------------------------------- reading

Result<int64_t> ChunkHeaderBytes(std::span<const std::byte> begin, const ChunkLimits& limits) {
  return GuardEntry([&]() -> Result<int64_t> {
    if (begin.size() < kFixedBytes) {
      return Corrupt("it has only " + std::to_string(begin.size()) +
                     " bytes; a header has at least " + std::to_string(kFixedBytes));
    }
    if (std::memcmp(begin.data(), kMagic.data(), kMagic.size()) != 0)
      return Corrupt("it does not begin with " + std::string(kMagic));
    const int64_t header_bytes = Load<uint32_t>(begin, kHeaderBytesAt);
    if (header_bytes < kChunkFixedBytes || header_bytes % kUnitBytes != 0)
      return Corrupt("its header is said to have " + std::to_string(header_bytes) + " bytes");
    if (header_bytes > HeaderBytesMax(limits))
      return OverLimit("the size of its header", header_bytes, HeaderBytesMax(limits));
    return header_bytes;
  });
}

Result<ChunkHeader> DecodeChunkHeader(std::span<const std::byte> header,
                                      const ChunkLimits& limits) {
  return GuardEntry([&]() -> Result<ChunkHeader> {
    QUIRE_ASSIGN_OR_RETURN(const int64_t header_bytes, ChunkHeaderBytes(header, limits));
    if (header_bytes > static_cast<int64_t>(header.size())) {
      return Corrupt("its header has " + std::to_string(header_bytes) + " bytes, of which " +
                     std::to_string(header.size()) + " are there");
    }
    return DecodeWhole(header.first(static_cast<size_t>(header_bytes)), limits);
  });
}

Status CheckChunk(const ChunkHeader& header, const ChunkExpectation& expected) {
  return GuardEntry([&]() -> Status {
    if (header.key != expected.key) {
      return Incompatible("it is " + ShortHex(header.key.digest) + "..., not " +
                          ShortHex(expected.key.digest) + "... that was asked for");
    }
    if (header.fingerprint != expected.fingerprint) {
      return Incompatible("its passport " + ShortHex(header.fingerprint) +
                          "... is not the reader's " + ShortHex(expected.fingerprint) +
                          "...: other model, dtype, RoPE or layout");
    }
    if (header.expires_ms != 0 && header.expires_ms <= expected.now_ms) {
      return Status(
          StatusCode::kNotFound,
          "chunk: it expired " + std::to_string(expected.now_ms - header.expires_ms) + " ms ago");
    }
    if (header.approximate != expected.approximate)
      return Incompatible(header.approximate ? "it is approximate and an exact one was asked for"
                                             : "it is exact and an approximate one was asked for");
    if (expected.tokens && !std::ranges::equal(header.tokens, *expected.tokens))
      return Incompatible("it has the key that was asked for and other tokens");
    if (!expected.mac_key.empty() && !header.has_mac)
      return Incompatible("it has no MAC, and the reader takes only signed ones");
    return Status();
  });
}

Status CheckSection(const ChunkHeader& header, int64_t index, std::span<const std::byte> bytes) {
  return GuardEntry([&]() -> Status {
    const int64_t count = static_cast<int64_t>(header.sections.size());
    if (index < 0 || index >= count) {
      return Status(StatusCode::kBadArgument, "chunk: it has no section " + std::to_string(index) +
                                                  "; there are " + std::to_string(count));
    }
    const Section& section = header.sections[static_cast<size_t>(index)];
    if (static_cast<int64_t>(bytes.size()) != section.length) {
      return Corrupt(SectionName(index, section) + " has " + std::to_string(section.length) +
                     " bytes, of which " + std::to_string(bytes.size()) + " are there");
    }
    if (Crc32c(bytes.data(), bytes.size()) == section.crc32c) return Status();
    return Corrupt("the checksum of " + SectionName(index, section) + " is wrong");
  });
}

ChunkView::ChunkView(ChunkHeader header, std::span<const std::byte> bytes)
    : header_(std::move(header)), bytes_(bytes) {}

Result<ChunkView> ChunkView::Open(std::span<const std::byte> bytes,
                                  const ChunkExpectation& expected, const ChunkLimits& limits) {
  return GuardEntry([&]() -> Result<ChunkView> {
    QUIRE_ASSIGN_OR_RETURN(ChunkHeader header, DecodeChunkHeader(bytes, limits));
    QUIRE_RETURN_IF_ERROR(CheckChunk(header, expected));
    if (header.total_bytes != static_cast<int64_t>(bytes.size())) {
      return Corrupt("it has " + std::to_string(bytes.size()) + " bytes; its header says " +
                     std::to_string(header.total_bytes));
    }
    if (!expected.mac_key.empty()) QUIRE_RETURN_IF_ERROR(CheckMac(bytes, header, expected.mac_key));
    return ChunkView(std::move(header), bytes);
  });
}

Result<std::span<const std::byte>> ChunkView::section(int64_t index) const {
  std::span<const std::byte> bytes;
  if (index >= 0 && index < static_cast<int64_t>(header_.sections.size())) {
    const Section& section = header_.sections[static_cast<size_t>(index)];
    bytes =
        bytes_.subspan(static_cast<size_t>(section.offset), static_cast<size_t>(section.length));
  }
  QUIRE_RETURN_IF_ERROR(CheckSection(header_, index, bytes));
  return bytes;
}

Status ChunkView::CheckAll() const {
  for (size_t i = 0; i < header_.sections.size(); ++i)
    QUIRE_RETURN_IF_ERROR(section(static_cast<int64_t>(i)).status());
  return Status();
}

}  // namespace quire
