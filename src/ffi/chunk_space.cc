// quire.ChunkSpace for tvm-ffi.
#include "ffi/chunk_space.h"

#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "ffi/tensors.h"
#include "quire/kv_export.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

// A scheduler asks for the chains of its running requests; what is beyond that is hashed again.
constexpr size_t kChainsMax = 256;
constexpr size_t kChainTokensMax = size_t{4} << 20;
// Sections begin where O_DIRECT reads them, as those of an engine do.
constexpr int64_t kSectionAlignment = 4096;
constexpr int64_t kTtlMsMax = int64_t{1} << 50;  // sums with times fit

Status CheckTtl(const char* call, int64_t ttl_ms) {
  if (ttl_ms >= 0 && ttl_ms <= kTtlMsMax) return {};
  return Status(StatusCode::kBadArgument, std::string(call) + ": ttl_ms is " +
                                              std::to_string(ttl_ms) + "; it is out of range");
}

std::vector<std::string> ReadExtras(const Extras& extras) {
  std::vector<std::string> read;
  read.reserve(extras.size());
  for (const tf::Bytes& each : extras) read.emplace_back(each.data(), each.size());
  return read;
}

std::vector<std::string> ExtrasOf(OptionsReader& reader) {
  const auto extras = reader.Get<Extras>("extras");
  return extras ? ReadExtras(*extras) : std::vector<std::string>{};
}

}  // namespace

// ---------------------------------------------------------------------- chains

// Leading chunks that are the same.
size_t RecentChains::CommonChunks(const Entry& entry, std::span<const int32_t> tokens,
                                  std::span<const std::string> extras) const {
  const size_t same =
      static_cast<size_t>(std::ranges::mismatch(entry.tokens, tokens).in1 - entry.tokens.begin());
  const size_t count = same / chunk_tokens_;
  const auto extra = [](std::span<const std::string> all, size_t i) {
    return i < all.size() ? std::string_view(all[i]) : std::string_view();
  };
  const size_t with_extras = std::min(count, std::max(entry.extras.size(), extras.size()));
  for (size_t i = 0; i < with_extras; ++i)
    if (extra(entry.extras, i) != extra(extras, i)) return i;
  return count;
}

Result<std::vector<ChunkKey>> RecentChains::Chain(const KeySpace& keys,
                                                  std::span<const int32_t> tokens,
                                                  std::span<const std::string> extras) {
  const size_t count = tokens.size() / chunk_tokens_;
  if (extras.size() > count) {
    return Status(StatusCode::kBadArgument, "ChunkSpace: there are extras of " +
                                                std::to_string(extras.size()) + " chunks, and " +
                                                std::to_string(count) + " whole chunks");
  }
  tokens = tokens.first(count * chunk_tokens_);
  std::vector<ChunkKey> chain;
  chain.reserve(count);
  const std::lock_guard lock(mutex_);
  auto best = entries_.end();
  size_t common = 0;
  for (auto at = entries_.begin(); at != entries_.end() && common < count; ++at) {
    const size_t chunks = CommonChunks(*at, tokens, extras);
    if (chunks > common) {
      best = at;
      common = chunks;
    }
  }
  if (best != entries_.end()) {
    chain.assign(best->keys.begin(), best->keys.begin() + static_cast<std::ptrdiff_t>(common));
  }
  for (size_t i = common; i < count; ++i) {
    const std::string_view extra = i < extras.size() ? std::string_view(extras[i]) : "";
    chain.push_back(keys.Next(chain.empty() ? keys.root() : chain.back(),
                              tokens.subspan(i * chunk_tokens_, chunk_tokens_), extra));
  }
  if (count == 0 || tokens.size() > kChainTokensMax) return chain;
  const bool grows = best != entries_.end() && common == best->keys.size();
  if (common < count) {
    Entry entry{{tokens.begin(), tokens.end()}, {extras.begin(), extras.end()}, chain};
    if (grows) {
      token_count_ -= best->tokens.size();
      *best = std::move(entry);
    } else {
      entries_.push_front(std::move(entry));
      best = entries_.begin();
    }
    token_count_ += tokens.size();
  }
  entries_.splice(entries_.begin(), entries_, best);
  while (entries_.size() > kChainsMax || token_count_ > kChainTokensMax) {
    token_count_ -= entries_.back().tokens.size();
    entries_.pop_back();
  }
  return chain;
}

// ---------------------------------------------------------------------- the space

ChunkSpaceObj::ChunkSpaceObj(const ChunkStoreRef& store, const tf::String& passport,
                             const tf::Bytes& salt, const tf::Bytes& mac_key)
    : store_(store->store()),
      passport_(ValueOrThrow(Passport::FromJson({passport.data(), passport.size()}))),
      keys_(ValueOrThrow(passport_.Fingerprint()), {salt.data(), salt.size()}),
      mac_key_(mac_key.data(), mac_key.size()),
      limits_(ChunkLimits::Of(passport_)),
      chains_(passport_.block_tokens) {
  latch_.Run([&] { return store_->AddPassport(passport_); });
}

tf::String ChunkSpaceObj::Fingerprint() const { return tf::String(keys_.fingerprint().ToHex()); }

tf::Array<tf::String> ChunkSpaceObj::Keys(const tf::TensorView& tokens, const Extras& extras) {
  const std::vector<int32_t> ids = TokenIds(tokens);
  const std::vector<std::string> read = ReadExtras(extras);
  const std::vector<ChunkKey> chain = latch_.Run([&] { return chains_.Chain(keys_, ids, read); });
  tf::Array<tf::String> keys;
  for (const ChunkKey& key : chain) keys.push_back(tf::String(key.digest.ToHex()));
  return keys;
}

int64_t ChunkSpaceObj::KnownPrefix(const tf::TensorView& tokens, const Extras& extras) {
  const std::vector<int32_t> ids = TokenIds(tokens);
  const std::vector<std::string> read = ReadExtras(extras);
  return latch_.Run([&]() -> Result<int64_t> {
    QUIRE_ASSIGN_OR_RETURN(const std::vector<ChunkKey> chain, chains_.Chain(keys_, ids, read));
    return store_->KnownPrefix(keys_, chain);
  });
}

tf::Array<bool> ChunkSpaceObj::Wanted(const tf::TensorView& tokens, const Extras& extras) {
  const std::vector<int32_t> ids = TokenIds(tokens);
  const std::vector<std::string> read = ReadExtras(extras);
  const std::vector<bool> wanted = latch_.Run([&]() -> Result<std::vector<bool>> {
    QUIRE_ASSIGN_OR_RETURN(const std::vector<ChunkKey> chain, chains_.Chain(keys_, ids, read));
    return store_->Wanted(keys_, chain);
  });
  tf::Array<bool> answers;
  for (const bool each : wanted) answers.push_back(each);
  return answers;
}

tf::ObjectRef ChunkSpaceObj::Fetch(const tf::TensorView& tokens, const OptionMap& options) {
  const std::vector<int32_t> ids = TokenIds(tokens);
  OptionsReader reader("ChunkSpace.fetch", options);
  const std::vector<std::string> extras = ExtrasOf(reader);
  FetchRequest request{
      .keys = &keys_, .tokens = ids, .chunk_tokens = passport_.block_tokens, .extras = extras};
  int64_t timeout_ms = 0;
  bool prefetch = false;
  reader.Read("first_chunk", &request.first_chunk);
  reader.Read("timeout_ms", &timeout_ms);
  reader.Read("prefetch", &prefetch);
  reader.Read("compute_seconds_per_token", &request.compute_seconds_per_token);
  reader.Finish();
  if (timeout_ms > 0) request.deadline_ns = MachineTime()->SteadyNs() + timeout_ms * 1'000'000;
  const std::shared_ptr<ChunkFetch> fetch =
      latch_.Run([&] { return prefetch ? store_->Prefetch(request) : store_->Fetch(request); });
  // Behind the last chunk there is none, however far; the product fits.
  const int64_t first =
      std::min(request.first_chunk, static_cast<int64_t>(ids.size()) / passport_.block_tokens);
  return tf::ObjectRef(
      tf::make_object<ChunkFetchObj>(fetch, passport_, first * passport_.block_tokens));
}

Result<ChunkFields> ChunkSpaceObj::FieldsOf(std::span<const int32_t> tokens, int64_t index,
                                            std::span<const std::string> extras, int64_t ttl_ms) {
  const int64_t block = passport_.block_tokens;
  const auto count = static_cast<int64_t>(tokens.size()) / block;
  if (index < 0 || index >= count) {
    return Status(StatusCode::kBadArgument, "ChunkSpace.put: chunk " + std::to_string(index) +
                                                " is not in [0, " + std::to_string(count) +
                                                "), the whole chunks of " +
                                                std::to_string(tokens.size()) + " tokens");
  }
  const int64_t first = index * block;
  if (first >= int64_t{kNotRotated}) {
    return Status(StatusCode::kBadArgument,
                  "ChunkSpace.put: position " + std::to_string(first) + " does not fit 32 bits");
  }
  const auto until = tokens.first(static_cast<size_t>(first + block));
  const auto leading = extras.first(std::min(extras.size(), static_cast<size_t>(index + 1)));
  QUIRE_ASSIGN_OR_RETURN(const std::vector<ChunkKey> chain, chains_.Chain(keys_, until, leading));
  const auto at = static_cast<size_t>(index);
  ChunkFields fields;
  fields.key = chain[at];
  fields.fingerprint = keys_.fingerprint();
  fields.first_position = static_cast<uint32_t>(first);
  fields.created_ms = MachineTime()->WallMs();
  if (ttl_ms > 0) fields.expires_ms = fields.created_ms + ttl_ms;
  fields.context = index == 0 ? keys_.root().digest : chain[at - 1].digest;
  fields.rope_table_id = ShortId(passport_.rope);
  fields.numerics_id = static_cast<uint32_t>(ShortId(passport_.numerics));
  const auto own = until.subspan(static_cast<size_t>(first));
  fields.tokens.assign(own.begin(), own.end());
  return fields;
}

void ChunkSpaceObj::Put(const tf::TensorView& tokens, int64_t index, const BlockMemoryRef& memory,
                        std::span<const int64_t> blocks, const OptionMap& options) {
  const std::vector<int32_t> ids = TokenIds(tokens);
  OptionsReader reader("ChunkSpace.put", options);
  const std::vector<std::string> extras = ExtrasOf(reader);
  PutOptions put;
  int64_t ttl_ms = 0;
  int priority = -1;
  reader.Read("ttl_ms", &ttl_ms);
  reader.Read("priority", &priority);
  reader.Read("recompute_seconds", &put.recompute_seconds);
  reader.Finish();
  ThrowIfError(CheckTtl("ChunkSpace.put", ttl_ms));
  if (priority >= 0) put.priority = priority;
  if (index >= 0 && static_cast<size_t>(index) < extras.size())
    put.extras = extras[static_cast<size_t>(index)];
  latch_.Run([&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(ChunkFields fields, FieldsOf(ids, index, extras, ttl_ms));
    QUIRE_ASSIGN_OR_RETURN(const std::vector<SectionSpec> sections,
                           TokenSections(passport_, passport_.block_tokens));
    if (memory->places().size() != sections.size()) {
      return Status(StatusCode::kBadArgument,
                    "ChunkSpace.put: " + std::to_string(memory->places().size()) +
                        " arrays are given; the passport's layers have " +
                        std::to_string(sections.size()) + " sections");
    }
    QUIRE_ASSIGN_OR_RETURN(ChunkWriter writer, ChunkWriter::Create(std::move(fields), sections,
                                                                   {.alignment = kSectionAlignment,
                                                                    .mac_key = mac_key_,
                                                                    .limits = limits_}));
    for (size_t i = 0; i < sections.size(); ++i) {
      const SectionSpec& spec = sections[i];
      const auto place = memory->places().find({spec.kind, spec.layer_first});
      if (place == memory->places().end()) {
        return Status(StatusCode::kBadArgument, "ChunkSpace.put: there is no array of section '" +
                                                    std::string(SectionKindName(spec.kind)) +
                                                    "' of layer " +
                                                    std::to_string(spec.layer_first));
      }
      QUIRE_ASSIGN_OR_RETURN(const std::span<std::byte> section,
                             writer.section(static_cast<int64_t>(i)));
      QUIRE_RETURN_IF_ERROR(GatherBlocks(place->second, blocks, section));
    }
    QUIRE_ASSIGN_OR_RETURN(ChunkBuffer sealed, std::move(writer).Seal());
    QUIRE_ASSIGN_OR_RETURN(const std::shared_ptr<ChunkPut> result,
                           store_->Put(keys_, std::move(sealed), put));
    // A tier that took it has still to write it; one that had no room has said so by now.
    return result->done() ? result->status() : Status();
  });
}

void ChunkSpaceObj::PutSections(const tf::TensorView& tokens, int64_t index,
                                const BlockMemoryRef& sections, const OptionMap& options) {
  constexpr int64_t kWhole[] = {0};
  Put(tokens, index, sections, kWhole, options);
}

void ChunkSpaceObj::PutBlocks(const tf::TensorView& tokens, int64_t index,
                              const BlockMemoryRef& memory, const tf::TensorView& blocks,
                              const OptionMap& options) {
  const std::vector<int32_t> ids = TokenIds(blocks);
  Put(tokens, index, memory, std::vector<int64_t>(ids.begin(), ids.end()), options);
}

Result<int64_t> ChunkSpaceObj::PutSequence(AttentionKVCache& cache, int64_t seq_id,
                                           std::span<const int32_t> tokens, int64_t ttl_ms) {
  QUIRE_RETURN_IF_ERROR(CheckTtl("KVCache.put_chunks", ttl_ms));
  QUIRE_RETURN_IF_ERROR(RequirePassportOf(cache, seq_id, passport_));
  QUIRE_ASSIGN_OR_RETURN(const std::vector<ChunkKey> chain, chains_.Chain(keys_, tokens, {}));
  const std::vector<bool> wanted = store_->Wanted(keys_, chain);
  const int64_t block = passport_.block_tokens;
  for (size_t i = 0; i < chain.size(); ++i) {
    if (!wanted[i]) continue;
    const int64_t start = static_cast<int64_t>(i) * block;
    ChunkFields fields =
        NextFields(passport_, keys_, i == 0 ? keys_.root() : chain[i - 1], start,
                   tokens.subspan(static_cast<size_t>(start), static_cast<size_t>(block)));
    fields.created_ms = MachineTime()->WallMs();
    if (ttl_ms > 0) fields.expires_ms = fields.created_ms + ttl_ms;
    QUIRE_ASSIGN_OR_RETURN(
        ChunkBuffer sealed,
        ExportChunk(cache, seq_id, start, std::move(fields),
                    {.alignment = kSectionAlignment, .mac_key = mac_key_, .limits = limits_}));
    QUIRE_ASSIGN_OR_RETURN(const std::shared_ptr<ChunkPut> put,
                           store_->Put(keys_, std::move(sealed), {}));
    if (!put->done() || put->status().ok()) continue;
    // What hangs on a chunk that was dropped could not be found.
    if (put->status().code() == StatusCode::kFull) return static_cast<int64_t>(i);
    return put->status();
  }
  return static_cast<int64_t>(chain.size());
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::ObjectDef<ChunkSpaceObj>()
      .def(tf::reflection::init<ChunkStoreRef, tf::String, tf::Bytes, tf::Bytes>())
      .def("fingerprint", &ChunkSpaceObj::Fingerprint)
      .def("chunk_tokens", &ChunkSpaceObj::chunk_tokens)
      .def("keys", &ChunkSpaceObj::Keys)
      .def("known_prefix", &ChunkSpaceObj::KnownPrefix)
      .def("wanted", &ChunkSpaceObj::Wanted)
      .def("fetch", &ChunkSpaceObj::Fetch)
      .def("put_sections", &ChunkSpaceObj::PutSections)
      .def("put_blocks", &ChunkSpaceObj::PutBlocks);
}

}  // namespace quire::ffi
