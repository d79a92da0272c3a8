#include "engine/loading/store_link.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/guard.h"
#include "quire/kv_export.h"

namespace quire {
namespace {

// Sections lie on pages of 4096 bytes, so that a file of the chunk can be read around the system's
// page cache. With real models the padding is less than a thousandth.
constexpr int64_t kAlignment = 4096;

constexpr int64_t kChunkTokens = 256;
constexpr int64_t kSmallChunkTokens = 1024;
// Loads that a request waits for are read first.
constexpr int kPrefetchPriority = -1;
// A chunk below this is more header, system calls and round trips than KV.
constexpr int64_t kChunkBytesMin = int64_t{1} << 20;

int64_t BytesPerToken(const SequenceStates& states) {
  int64_t bytes = 0;
  if (states.attention() == nullptr) return bytes;
  for (const AttentionLayerSpec& layer : states.attention()->options().layers) {
    const auto head_bytes = [](DType dtype, int64_t dim) {
      return dim * DTypeBytes(dtype) + (IsQuantised(dtype) ? int64_t{sizeof(float)} : 0);
    };
    bytes += layer.num_kv_heads *
             (head_bytes(layer.dtype, layer.qk_head_dim) +
              (layer.latent ? 0 : head_bytes(layer.value_dtype(), layer.v_head_dim)));
  }
  return bytes;
}

// The states of recurrent layers are in each chunk, as large as hundreds of tokens: fewer of them.
int64_t DefaultChunkTokens(const SequenceStates& states) {
  const bool is_small = kChunkTokens * BytesPerToken(states) < kChunkBytesMin;
  return is_small || states.recurrent_count() > 0 ? kSmallChunkTokens : kChunkTokens;
}

Status OutOfRange(const char* field, int64_t value, const char* range) {
  return Status(StatusCode::kBadArgument, std::string("StoreUseOptions::") + field + " is " +
                                              std::to_string(value) + "; it must be " + range);
}

}  // namespace

StoreLink::StoreLink(std::shared_ptr<ChunkStore> store, const SequenceStates& states,
                     bool at_borders, const StoreUseOptions& options, int64_t chunk_tokens)
    : store_(std::move(store)),
      states_(states),
      at_borders_(at_borders),
      options_(options),
      clock_(options.clock ? options.clock : MachineTime()),
      has_ram_(store_->Statistics().tiers[static_cast<size_t>(TierKind::kRam)].present),
      chunk_tokens_(chunk_tokens) {}

Result<std::unique_ptr<StoreLink>> StoreLink::Create(std::shared_ptr<ChunkStore> store,
                                                     const SequenceStates& states, bool at_borders,
                                                     const Passport& identity,
                                                     const StoreUseOptions& options,
                                                     bool long_rope) {
  // A header holds the ids of its tokens, and ChunkLimits bounds their number.
  constexpr int64_t kChunkTokensMax = 65536;
  constexpr int64_t kLoadTimeoutMsMax = 24 * 3600 * int64_t{1000};
  if (store == nullptr) {
    return Status(StatusCode::kBadArgument, "Engine::AttachStore: the store is null");
  }
  if (options.chunk_tokens < 0 || options.chunk_tokens > kChunkTokensMax) {
    return OutOfRange("chunk_tokens", options.chunk_tokens, "in [0, 65536] (0 = by the model)");
  }
  if (options.load_timeout_ms < 1 || options.load_timeout_ms > kLoadTimeoutMsMax) {
    return OutOfRange("load_timeout_ms", options.load_timeout_ms, "at least 1 and at most a day");
  }
  const auto key_bytes = static_cast<int64_t>(options.mac_key.size());
  if (key_bytes > 0 && key_bytes < kMacKeyBytesMin) {
    static_assert(kMacKeyBytesMin == 16);
    return OutOfRange("mac_key size", key_bytes, "at least 16, or 0 (not signed)");
  }
  const int64_t chunk_tokens =
      options.chunk_tokens > 0 ? options.chunk_tokens : DefaultChunkTokens(states);
  auto link = std::unique_ptr<StoreLink>(
      new StoreLink(std::move(store), states, at_borders, options, chunk_tokens));
  QUIRE_RETURN_IF_ERROR(link->AddKind(identity, false));
  if (long_rope) QUIRE_RETURN_IF_ERROR(link->AddKind(identity, true));
  return link;
}

Status StoreLink::AddKind(const Passport& identity, bool long_rope) {
  KeyKind& kind = kinds_[long_rope ? 1 : 0];
  QUIRE_ASSIGN_OR_RETURN(kind.passport, CachePassport(states_, identity, long_rope));
  kind.passport.block_tokens = chunk_tokens_;
  QUIRE_ASSIGN_OR_RETURN(kind.fingerprint, kind.passport.Fingerprint());
  kind.limits = ChunkLimits::Of(kind.passport);
  return store_->AddPassport(kind.passport);
}

int64_t StoreLink::ChunksEnd(int64_t length, bool tail) const {
  QUIRE_DCHECK(length >= 0 && chunk_tokens_ > 0);
  const int64_t in_tail = length % chunk_tokens_;
  const bool has_tail = tail && options_.tails && in_tail >= kLoadTokensMin;
  return has_tail ? length : length - in_tail;
}

int64_t StoreLink::NextStop(int64_t computed, int64_t prompt_tokens) const {
  if (states_.recurrent_count() == 0 || !options_.write) return kNoLimit;
  const int64_t border = (computed / chunk_tokens_ + 1) * chunk_tokens_;
  const int64_t prompt_end = ChunksEnd(PromptEnd(prompt_tokens), true);
  return computed < prompt_end ? std::min(border, prompt_end) : border;
}

bool StoreLink::HasMore(int64_t length, int64_t held, bool tail) const {
  return ChunksEnd(length, tail) - held >= kLoadTokensMin;
}

FetchRequest StoreLink::RequestOf(const KeySpace& keys, const Wish& wish,
                                  double compute_seconds_per_token) const {
  const int64_t end = ChunksEnd(static_cast<int64_t>(wish.tokens.size()), wish.tail);
  QUIRE_DCHECK(wish.held >= 0 && end <= std::ssize(wish.tokens));
  return {.keys = &keys,
          .tokens = wish.tokens.first(static_cast<size_t>(end)),
          .chunk_tokens = chunk_tokens_,
          .tail = end % chunk_tokens_ != 0,
          .chain = wish.keys,
          .first_chunk = wish.held / chunk_tokens_,
          .compute_seconds_per_token = options_.load_always ? 0 : compute_seconds_per_token};
}

Result<std::vector<ChunkKey>> StoreLink::KeysOf(const PrefixSpace& space,
                                                std::span<const int32_t> tokens, bool tail) const {
  const int64_t end = ChunksEnd(static_cast<int64_t>(tokens.size()), tail);
  return KeySpace(KindOf(space).fingerprint, space.salt)
      .Chain(tokens.first(static_cast<size_t>(end)), chunk_tokens_, end % chunk_tokens_ != 0);
}

int64_t StoreLink::Known(const PrefixSpace& space, std::span<const ChunkKey> keys) const {
  const KeySpace name(KindOf(space).fingerprint, space.salt);
  return store_->KnownPrefix(name, keys) * chunk_tokens_;
}

Result<std::vector<std::unique_ptr<PrefixLoad>>> StoreLink::StartLoads(
    std::span<const Wish> wishes, double compute_seconds_per_token) {
  std::vector<KeySpace> keys;
  keys.reserve(wishes.size());  // requests point there
  std::vector<FetchRequest> requests;
  const int64_t start_ns = clock_->SteadyNs();
  for (const Wish& wish : wishes) {
    keys.emplace_back(KindOf(*wish.space).fingerprint, wish.space->salt);
    FetchRequest& request =
        requests.emplace_back(RequestOf(keys.back(), wish, compute_seconds_per_token));
    request.deadline_ns = start_ns + options_.load_timeout_ms * kNsPerMs;
    QUIRE_DCHECK(request.first_chunk <= std::ssize(wish.keys)) << "all of it is held";
  }
  QUIRE_ASSIGN_OR_RETURN(auto fetches, store_->FetchAll(requests));
  std::vector<std::unique_ptr<PrefixLoad>> loads;
  for (size_t i = 0; i < requests.size(); ++i) {
    const FetchRequest& request = requests[i];
    loads.push_back(std::make_unique<PrefixLoad>(
        std::move(fetches[i]),
        std::vector<ChunkKey>(request.chain.begin() + request.first_chunk, request.chain.end()),
        std::vector<int32_t>(request.tokens.begin(), request.tokens.end()), chunk_tokens_,
        request.first_chunk, start_ns, request.deadline_ns));
  }
  return loads;
}

std::shared_ptr<ChunkFetch> StoreLink::Prefetch(const Wish& wish,
                                                double compute_seconds_per_token) const {
  if (!has_ram_) return nullptr;
  const KeySpace keys(KindOf(*wish.space).fingerprint, wish.space->salt);
  FetchRequest request = RequestOf(keys, wish, compute_seconds_per_token);
  request.priority = kPrefetchPriority;
  Result<std::shared_ptr<ChunkFetch>> fetch = store_->Prefetch(request);
  return fetch.ok() ? *std::move(fetch) : nullptr;
}

Result<ChunkView> StoreLink::Open(const PrefixSpace& space, std::span<const int32_t> tokens,
                                  const PrefixLoad::Chunk& chunk) const {
  const KeyKind& kind = KindOf(space);
  QUIRE_DCHECK(chunk.begin < chunk.end && chunk.end <= std::ssize(tokens));
  const auto part = tokens.subspan(static_cast<size_t>(chunk.begin),
                                   static_cast<size_t>(chunk.end - chunk.begin));
  return chunk.stored->View(
      {
          .key = chunk.key,
          .fingerprint = kind.fingerprint,
          .now_ms = clock_->WallMs(),
          .tokens = part,
      },
      kind.limits);
}

int64_t StoreLink::attention_layer_count() const {
  return states_.attention() == nullptr ? 0 : std::ssize(states_.attention()->options().layers);
}

Result<LayerKV> StoreLink::LayerOf(const ChunkView& chunk, int64_t layer, int64_t position,
                                   int64_t end) const {
  QUIRE_DCHECK(layer >= 0 && layer < attention_layer_count());
  const AttentionLayerSpec& spec =
      states_.attention()->options().layers[static_cast<size_t>(layer)];
  return ChunkLayer(chunk, spec, layer, position, end);
}

Status StoreLink::Import(int64_t sequence_id, const PrefixSpace& space,
                         std::span<const int32_t> tokens,
                         std::span<const PrefixLoad::Chunk> chunks) {
  return GuardEntry([&]() -> Status {
    std::vector<ChunkView> views;
    for (const PrefixLoad::Chunk& chunk : chunks) {
      QUIRE_ASSIGN_OR_RETURN(ChunkView view, Open(space, tokens, chunk));
      views.push_back(std::move(view));
    }
    return ImportChunks(states_, sequence_id, views);
  });
}

int64_t StoreLink::Export(int64_t sequence_id, const PrefixSpace& space,
                          std::span<const int32_t> tokens, bool tail, int64_t bytes_max,
                          double compute_seconds_per_token, StoredPrefix* stored) noexcept {
  if (!options_.write || stored->broken) return 0;
  const int64_t end = ChunksEnd(static_cast<int64_t>(tokens.size()), tail && !stored->tail);
  if (end <= stored->tokens) return 0;
  try {
    return ExportUntil(sequence_id, space, tokens.first(static_cast<size_t>(end)), bytes_max,
                       compute_seconds_per_token, stored);
  } catch (const std::bad_alloc&) {  // storing is a favour
    ++put_counts_.refused;
    return 0;
  }
}

// `tokens` end where the last chunk ends.
int64_t StoreLink::ExportUntil(int64_t sequence_id, const PrefixSpace& space,
                               std::span<const int32_t> tokens, int64_t bytes_max,
                               double compute_seconds_per_token, StoredPrefix* stored) {
  const KeyKind& kind = KindOf(space);
  const KeySpace keys(kind.fingerprint, space.salt);
  const auto part_at = [&](int64_t start) {
    const auto rest = tokens.subspan(static_cast<size_t>(start));
    return rest.first(std::min(rest.size(), static_cast<size_t>(chunk_tokens_)));
  };
  const int64_t end = static_cast<int64_t>(tokens.size());
  QUIRE_DCHECK(stored->tokens < end && stored->tokens % chunk_tokens_ == 0)
      << "a chain goes on behind whole chunks";
  std::vector<ChunkKey> names;  // of the chunks behind `stored`
  ChunkKey previous = stored->tokens == 0 ? keys.root() : stored->key;
  for (int64_t start = stored->tokens; start < end; start += chunk_tokens_) {
    names.push_back(keys.Next(names.empty() ? previous : names.back(), part_at(start)));
  }
  const std::vector<bool> wanted = store_->Wanted(keys, names);
  int64_t bytes = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    if (wanted[i] && bytes >= bytes_max) break;
    const int64_t start = stored->tokens;
    const auto part = part_at(start);
    if (wanted[i]) {
      ChunkFields fields = NextFields(kind.passport, keys, previous, start, part);
      const Result<int64_t> put = ExportOne(sequence_id, keys, start, std::move(fields),
                                            kind.limits, compute_seconds_per_token);
      if (!put.ok()) {
        // What follows a whole chunk would hang on one that nobody has; behind a tail is nothing.
        const bool is_tail = static_cast<int64_t>(part.size()) < chunk_tokens_;
        (is_tail ? stored->tail : stored->broken) = true;
        break;
      }
      bytes += *put;
    }
    if (static_cast<int64_t>(part.size()) < chunk_tokens_) {
      stored->tail = true;  // the chain goes on behind the chunk before it
      break;
    }
    previous = names[i];
    stored->tokens = start + chunk_tokens_;
    stored->key = names[i];
  }
  return bytes;
}

Result<int64_t> StoreLink::ExportOne(int64_t sequence_id, const KeySpace& keys, int64_t start,
                                     ChunkFields fields, const ChunkLimits& limits,
                                     double compute_seconds_per_token) {
  const auto count = static_cast<double>(fields.tokens.size());
  fields.created_ms = clock_->WallMs();
  Result<ChunkBuffer> sealed =
      ExportChunk(states_, sequence_id, start, std::move(fields),
                  {.alignment = kAlignment, .mac_key = options_.mac_key, .limits = limits});
  const StatusCode code = sealed.status().code();
  const bool is_gone = code == StatusCode::kNeedsReplay || code == StatusCode::kBadArgument;
  if (at_borders_ && is_gone) return sealed.status();
  const int64_t bytes = sealed.ok() ? static_cast<int64_t>(sealed->bytes().size()) : 0;
  const bool is_put =
      sealed.ok() &&
      store_
          ->Put(keys, *std::move(sealed), {.recompute_seconds = count * compute_seconds_per_token})
          .ok();
  if (!is_put) {
    ++put_counts_.refused;
    return int64_t{0};
  }
  ++put_counts_.chunks;
  put_counts_.bytes += bytes;
  return bytes;
}

}  // namespace quire
