// Chunk: the one form in which KV leaves a cache, for RAM tiers, files, Redis and the wire alike. A
// chunk is the state of up to `block_tokens` consecutive tokens: one section per layer and kind,
// each with a digest of its own, after a header with key, fingerprint of the passport and the
// token ids. docs/formats/chunk.md is the byte layout.
//
// What is not exactly the chunk that was asked for is a miss: damaged bytes are Corrupt; sound
// bytes of another key, model, dtype, version or token list are Incompatible; an expired chunk is
// NotFound. No byte of a section is handed out before its digest was verified.
//
// All functions here are pure and may be called from any thread.
#ifndef QUIRE_CHUNK_H_
#define QUIRE_CHUNK_H_

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quire/rope.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

// ---- Digests and keys

// A SHA-256 value.
struct Digest {
  std::array<uint8_t, 32> bytes{};

  auto operator<=>(const Digest&) const = default;
  std::string ToHex() const;                            // 64 lower-case digits
  static Result<Digest> FromHex(std::string_view hex);  // BadArgument unless 64 hex digits
};

// Names a chunk. It comes from a KeySpace, so that it commits to passport, salt and tokens, or back
// from where such a key was written to.
struct ChunkKey {
  Digest digest;
  auto operator<=>(const ChunkKey&) const = default;
};

// Keys under one passport and one salt. Two key spaces share no key.
class KeySpace {
 public:
  // `salt`: what separates tenants; any bytes, empty for none. It is hashed, never stored. Chunks
  // that were not computed exactly (blended) live in a space of their own.
  KeySpace(const Digest& fingerprint, std::string_view salt, bool approximate = false);

  const Digest& fingerprint() const { return fingerprint_; }
  bool approximate() const { return approximate_; }
  // The key in front of the first chunk; no chunk has it.
  const ChunkKey& root() const { return root_; }
  // The chunk of `tokens` after the prefix `previous` (root() or the key of the chunk before).
  // `extras`: canonical bytes of what else the tokens stand for (images), usually empty.
  ChunkKey Next(const ChunkKey& previous, std::span<const int32_t> tokens,
                std::string_view extras = {}) const;
  // Keys of the prefix chain over `tokens`, block_tokens at a time; with `tail` also that of a
  // shorter last chunk. `extras`: those of the leading chunks; the chunks after them have none.
  // BadArgument for block_tokens below 1 and for more extras than chunks, OutOfMemory.
  Result<std::vector<ChunkKey>> Chain(std::span<const int32_t> tokens, int64_t block_tokens,
                                      bool tail = false,
                                      std::span<const std::string> extras = {}) const;
  // The chunk of `tokens` wherever it stands (blending).
  ChunkKey Segment(std::span<const int32_t> tokens) const;

 private:
  Digest fingerprint_;
  ChunkKey root_;
  bool approximate_;
};

// ---- Passport: what the KV is of. Two deployments share chunks iff their passports are equal.

// An element type as stored: DLPack's type code and the bits of one element. Wider than DType, as
// stores keep types that Quire does not compute with.
struct ElementType {
  uint8_t code = kDLFloat;
  uint8_t bits = 32;

  ElementType() = default;
  ElementType(uint8_t type_code, uint8_t element_bits) : code(type_code), bits(element_bits) {}
  ElementType(DType dtype)  // NOLINT(google-explicit-constructor): every DType is one
      : code(ToDLDataType(dtype).code), bits(ToDLDataType(dtype).bits) {}
  bool operator==(const ElementType&) const = default;
  int64_t bytes() const { return bits / 8; }
  std::string ToString() const;  // "bf16", "f32", "i8", ...; "code10.8" for one without a name
  static Result<ElementType> Parse(std::string_view name);  // what ToString gives
};

enum class StateKind : uint8_t {
  kAttention,  // keys and values per token
  kLatent,     // MLA: one latent row per token
  kRecurrent,  // a state per sequence, at one position
  kCaller,     // such a state that the caller computes (RNNState): a layer per layer and state
};

struct PassportLayer {
  StateKind kind = StateKind::kAttention;
  ElementType dtype{};  // as stored
  // A recurrent layer's state is [kv_heads, head_dim, v_head_dim], a convolution's [1, width - 1,
  // channels].
  int64_t kv_heads = 0;                               // latent: 1
  int64_t head_dim = 0;                               // of keys; latent: rank + rope dims
  int64_t v_head_dim = 0;                             // of values; latent: rank
  std::optional<ElementType> v_dtype = std::nullopt;  // of values, where it is not dtype
  int64_t window = 0;                  // tokens that a query sees, its own included; 0: all
  std::vector<int64_t> state_shape{};  // kCaller, of which all sizes above are 1; else empty

  ElementType value_dtype() const { return v_dtype.value_or(dtype); }
  bool operator==(const PassportLayer&) const = default;
};

// The name of the layout of sections: see docs/formats/chunk.md.
inline constexpr std::string_view kLogicalLayout = "L2THD";

struct Passport {
  std::string model{};         // a name for people
  std::string revision{};      // digest of the weights
  std::string tokenizer{};     // digest; empty = not stated
  std::string adapter{};       // LoRA name and revision; empty = none
  std::string rope = "none";   // RopePassport()
  std::string quant = "none";  // scheme of quantised KV with its scales
  std::string layout{kLogicalLayout};
  std::string shard = "canonical";  // all heads and layers; else the writer of this part
  std::string numerics{};  // kernel generation / kernel path / compute dtype; empty = not stated
  int64_t block_tokens = 256;  // of a full chunk
  int64_t first_layer = 0;
  std::vector<PassportLayer> layers{};

  bool operator==(const Passport&) const = default;

  // Canonical JSON: sorted keys, no spaces, integers and strings only. A field that is equal for
  // all layers stands once, else as a list. BadArgument for a text that is not UTF-8 or longer than
  // 4096 bytes, sizes out of [1, 2^31), no layer or more than 65535.
  Result<std::string> ToJson() const;
  // The passport of a canonical JSON. BadArgument or Corrupt, naming the field, for anything else.
  static Result<Passport> FromJson(std::string_view json);
  // SHA-256 of ToJson().
  Result<Digest> Fingerprint() const;
};

// SHA-256 of a passport's canonical JSON.
Digest FingerprintOf(std::string_view passport_json);

// Canonical text of all that decides about the angles of keys, floats as the shortest decimal that
// reads back. `long_factors`: the choice of the sequence (RopeScaling::kLongRope).
std::string RopePassport(const RopeOptions& options, bool long_factors);

// For people and refusals: the first field in which two passports differ, with both values; empty
// if they are equal.
std::string PassportDifference(std::string_view ours_json, std::string_view theirs_json);

// ---- The header

enum class SectionKind : uint16_t {
  kKey = 1,    // [tokens, kv_heads, head_dim], as stored: rotated with RopeMode::kNormal
  kValue = 2,  // [tokens, kv_heads, v_head_dim]
  kKeyScale = 3,
  kValueScale = 4,
  kLatent = 5,  // [tokens, head_dim]
  kRecurrentState = 6,
  kRecurrentInputs = 7,
  kTokens = 8,
  kSampler = 9,
  kWindow = 10,
};
std::string_view SectionKindName(SectionKind kind);

// A tensor of one layer, or of all layers from the first to the last one.
struct SectionSpec {
  SectionKind kind = SectionKind::kKey;
  int64_t layer_first = 0;
  int64_t layer_last = 0;  // inclusive
  ElementType dtype{};
  std::vector<int64_t> dims{};  // at most 4, row-major

  bool operator==(const SectionSpec&) const = default;
};

struct Section : SectionSpec {
  int64_t offset = 0;  // bytes from the begin of the chunk; a multiple of 64
  int64_t length = 0;  // bytes
  uint32_t crc32c = 0;
};

inline constexpr uint32_t kNotRotated = 0xFFFFFFFF;

// What the writer says about a chunk. Times are milliseconds since 1970.
struct ChunkFields {
  ChunkKey key;
  Digest fingerprint;
  uint32_t first_position = kNotRotated;  // where keys were rotated for; kNotRotated = they are not
  int64_t created_ms = 0;
  int64_t expires_ms = 0;      // 0 = never
  Digest context;              // key of the prefix that the KV was computed after
  uint64_t rope_table_id = 0;  // ShortId of the passport's rope
  uint64_t generation = 0;     // for what is written again under one key; chunks of KV are not: 0
  uint32_t numerics_id = 0;    // ShortId of the passport's numerics, low half
  bool tail = false;           // fewer tokens than block_tokens
  bool contextual = false;     // keyed by its own tokens, but computed after others
  bool approximate = false;    // not equal to what full prefill gives
  std::vector<int32_t> tokens;
};

struct ChunkHeader : ChunkFields {
  bool has_mac = false;
  int64_t header_bytes = 0;
  int64_t total_bytes = 0;  // header and payload
  std::vector<Section> sections;

  // Index of the section, or -1.
  int64_t Find(SectionKind kind, int64_t layer) const;
};

// The first 8 bytes of a text's SHA-256 as a little-endian number; 0 for an empty text.
uint64_t ShortId(std::string_view text);

// What a decoder takes at most. Everything is checked before it sizes or indexes anything.
struct ChunkLimits {
  int64_t token_count_max = 65536;
  int64_t section_count_max = 16384;
  int64_t section_bytes_max = int64_t{64} << 20;
  int64_t total_bytes_max = int64_t{1} << 32;

  // As large as a chunk of this passport can be.
  static ChunkLimits Of(const Passport& passport);
};

// ---- Writing

// Owns the bytes of one chunk, aligned to 4096 for O_DIRECT. Movable.
class ChunkBuffer {
 public:
  ChunkBuffer() = default;
  // Uninitialised. std::bad_alloc when there is no memory.
  explicit ChunkBuffer(int64_t size);
  std::span<std::byte> bytes() { return {data_.get(), size_}; }
  std::span<const std::byte> bytes() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte[], Free> data_;
  size_t size_ = 0;
};

struct ChunkWriteOptions {
  int64_t alignment = 64;      // of the sections: 64, or 4096 for files that are read with O_DIRECT
  std::string_view mac_key{};  // not empty: the chunk carries an HMAC-SHA256 under this key
  ChunkLimits limits{};
};

// Lays a chunk out, lets the caller write its sections in place, then seals it.
class ChunkWriter {
 public:
  // BadArgument for sections out of range, TooLarge over a limit, OutOfMemory.
  static Result<ChunkWriter> Create(ChunkFields fields, std::span<const SectionSpec> sections,
                                    const ChunkWriteOptions& options = {});

  const ChunkHeader& header() const { return header_; }
  // Where section i is to be written. Uninitialised. BadArgument for an index out of range, and for
  // any after Seal.
  Result<std::span<std::byte>> section(int64_t index);
  // Digests of what was written, header and MAC. The writer is empty then.
  Result<ChunkBuffer> Seal() &&;

 private:
  ChunkWriter(ChunkHeader header, std::string mac_key, ChunkBuffer buffer);

  ChunkHeader header_;
  std::string mac_key_;
  ChunkBuffer buffer_;
};

// ---- Reading

inline constexpr int64_t kChunkFixedBytes =
    168;  // a reader needs these to know the header's length

// Length of the whole header, from at least the first kChunkFixedBytes bytes. Corrupt if these
// begin no chunk, TooLarge.
Result<int64_t> ChunkHeaderBytes(std::span<const std::byte> begin, const ChunkLimits& limits);

// Structure and checksum of a whole header. Corrupt, TooLarge; Incompatible for a newer format.
Result<ChunkHeader> DecodeChunkHeader(std::span<const std::byte> header, const ChunkLimits& limits);

// What the reader asked for.
struct ChunkExpectation {
  ChunkKey key{};
  Digest fingerprint{};
  int64_t now_ms = 0;
  bool approximate = false;  // whether the key is of an approximate KeySpace
  // Compared with the chunk's own ids, as a digest that collides must not serve other tokens.
  // nullopt where the reader has none (repair tools).
  std::optional<std::span<const int32_t>> tokens{};
  std::string_view mac_key{};  // not empty: only chunks with the MAC of this key are taken
};

// In this order: key, fingerprint, expiry, exactness, tokens.
Status CheckChunk(const ChunkHeader& header, const ChunkExpectation& expected);
// `bytes`: those of the section alone. Corrupt.
Status CheckSection(const ChunkHeader& header, int64_t index, std::span<const std::byte> bytes);

// A whole chunk in memory that does not change while the view is used.
class ChunkView {
 public:
  // Header, expectation, size and MAC are verified; sections when they are asked for.
  static Result<ChunkView> Open(std::span<const std::byte> bytes, const ChunkExpectation& expected,
                                const ChunkLimits& limits);

  const ChunkHeader& header() const { return header_; }
  // The verified bytes of a section. Corrupt; BadArgument for an index out of range.
  Result<std::span<const std::byte>> section(int64_t index) const;
  // Verifies all sections.
  Status CheckAll() const;

 private:
  ChunkView(ChunkHeader header, std::span<const std::byte> bytes);

  ChunkHeader header_;
  std::span<const std::byte> bytes_;
};

}  // namespace quire

#endif  // QUIRE_CHUNK_H_
