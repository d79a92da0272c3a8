// quire.ChunkStore for tvm-ffi.
#include "ffi/store.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/tensors.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

// In the order of the enumerations in quire/chunk_store.h.
constexpr std::array<std::string_view, 4> kDurabilities = {"none", "async", "os", "sync"};
constexpr std::array<std::string_view, 3> kFolderUses = {"create", "existing", "look"};
constexpr std::array<std::string_view, 3> kWritePolicies = {"through", "selective", "back"};
constexpr std::array<std::string_view, 3> kEvictions = {"lru", "s3fifo", "cost"};
constexpr std::array<std::string_view, 5> kEvents = {"stored", "removed", "evicted", "expired",
                                                     "corrupt"};
static_assert(kDurabilities.size() == static_cast<size_t>(Durability::kSync) + 1);
static_assert(kFolderUses.size() == static_cast<size_t>(FolderUse::kLook) + 1);
static_assert(kWritePolicies.size() == static_cast<size_t>(WritePolicy::kBack) + 1);
static_assert(kEvictions.size() == static_cast<size_t>(EvictionKind::kCost) + 1);
static_assert(kEvents.size() == static_cast<size_t>(ChunkEvent::Kind::kCorrupt) + 1);

void ReadBytes(OptionsReader& reader, const char* name, std::string* out) {
  if (const auto bytes = reader.Get<tf::Bytes>(name)) out->assign(bytes->data(), bytes->size());
}

ChunkStoreOptions ReadOptions(const OptionMap& fields) {
  ChunkStoreOptions options;
  OptionsReader reader("ChunkStore", fields);
  reader.Read("ram_bytes", &options.ram.bytes_max);
  reader.Read("directory", &options.disk.directory);
  reader.ReadEnum("folder_use", kFolderUses, &options.disk.use);
  reader.Read("disk_bytes", &options.disk.bytes_max);
  reader.ReadEnum("durability", kDurabilities, &options.disk.durability);
  reader.Read("use_uring", &options.disk.use_uring);
  reader.Read("disk_timeout_ms", &options.disk.io_timeout_ms);
  reader.Read("redis", &options.redis.endpoints);
  reader.Read("redis_username", &options.redis.username);
  reader.Read("redis_password", &options.redis.password);
  reader.Read("redis_prefix", &options.redis.key_prefix);
  reader.Read("redis_ttl_ms", &options.redis.ttl_ms);
  reader.Read("redis_tls", &options.redis.tls);
  reader.Read("redis_tls_verify", &options.redis.tls_verify);
  reader.Read("redis_tls_ca_file", &options.redis.tls_ca_file);
  reader.Read("redis_tls_cert_file", &options.redis.tls_cert_file);
  reader.Read("redis_tls_key_file", &options.redis.tls_key_file);
  reader.Read("redis_tls_server_name", &options.redis.tls_server_name);
  reader.Read("redis_connect_timeout_ms", &options.redis.connect_timeout_ms);
  reader.Read("redis_timeout_ms", &options.redis.io_timeout_ms);
  reader.Read("redis_replicas", &options.redis.replicas);
  reader.ReadEnum("write_policy", kWritePolicies, &options.write_policy);
  reader.Read("admit_after", &options.admit_after);
  reader.ReadEnum("eviction", kEvictions, &options.eviction);
  reader.Read("promote", &options.promote);
  reader.Read("priority", &options.priority);
  reader.Read("pin_timeout_ms", &options.pin_timeout_ms);
  reader.Read("queue_bytes", &options.queue_bytes_max);
  reader.Read("fetch_bytes", &options.fetch_bytes_max);
  reader.Read("scrub_bytes_per_second", &options.scrub_bytes_per_second);
  ReadBytes(reader, "key", &options.mac_key);
  reader.Finish();
  return options;
}

TierKind ReadTier(const tf::String& name) {
  std::string known;
  for (int i = 0; i < kTierCount; ++i) {
    const auto tier = static_cast<TierKind>(i);
    if (TierName(tier) == std::string_view(name.data(), name.size())) return tier;
    known += (i == 0 ? "'" : ", '") + std::string(TierName(tier)) + "'";
  }
  ThrowBadArgument("ChunkStore: the tier '" + std::string(name) + "' is none of " + known);
}

tf::String Text(std::string_view text) { return tf::String(std::string(text)); }

OptionMap TierFields(const TierStatistics& tier) {
  return {{"present", tier.present},
          {"chunks", tier.chunks},
          {"bytes", tier.bytes},
          {"bytes_max", tier.bytes_max},
          {"hits", tier.hits},
          {"misses", tier.misses},
          {"corrupt", tier.corrupt},
          {"errors", tier.errors},
          {"timeouts", tier.timeouts},
          {"writes", tier.writes},
          {"dropped_writes", tier.dropped_writes},
          {"deduplicated", tier.deduplicated},
          {"evicted", tier.evicted},
          {"expired", tier.expired},
          {"bytes_read", tier.bytes_read},
          {"bytes_written", tier.bytes_written},
          {"queue_bytes", tier.queue_bytes},
          {"latency_seconds", tier.latency_seconds},
          {"bytes_per_second", tier.bytes_per_second},
          {"available", tier.available}};
}

OptionMap HeaderFields(const StoredChunk& chunk) {
  const ChunkHeader& header = chunk.header();
  return {{"key", Text(header.key.digest.ToHex())},
          {"fingerprint", Text(header.fingerprint.ToHex())},
          {"context", Text(header.context.ToHex())},
          {"first_token",
           header.first_position == kNotRotated ? int64_t{-1} : int64_t{header.first_position}},
          {"created_ms", header.created_ms},
          {"expires_ms", header.expires_ms},
          {"tokens", NewTensor(std::span(header.tokens))},
          {"sections", static_cast<int64_t>(header.sections.size())},
          {"signed", header.has_mac},
          {"tail", header.tail},
          {"data",
           tf::Bytes(reinterpret_cast<const char*>(chunk.bytes().data()), chunk.bytes().size())}};
}

Digest ReadDigest(const tf::String& hex) {
  return ValueOrThrow(Digest::FromHex({hex.data(), hex.size()}));
}

KeySpace ReadKeySpace(const tf::String& fingerprint, const tf::Bytes& salt) {
  return KeySpace(ReadDigest(fingerprint), {salt.data(), salt.size()});
}

std::vector<ChunkKey> ReadKeys(const tf::Array<tf::String>& keys) {
  std::vector<ChunkKey> read;
  for (const tf::String& key : keys) read.push_back({.digest = ReadDigest(key)});
  return read;
}

tf::Array<tf::String> ChunkKeys(const tf::String& fingerprint, const tf::Bytes& salt,
                                const tf::TensorView& tokens, int64_t chunk_tokens) {
  const std::vector<int32_t> ids = TokenIds(tokens);
  const std::vector<ChunkKey> chain =
      ValueOrThrow(ReadKeySpace(fingerprint, salt).Chain(ids, chunk_tokens, /*tail=*/true));
  tf::Array<tf::String> keys;
  for (const ChunkKey& key : chain) keys.push_back(Text(key.digest.ToHex()));
  return keys;
}

// The moment in `timeout_ms` on the machine's clock.
int64_t MomentIn(const char* call, int64_t timeout_ms) {
  constexpr int64_t kTimeoutMsMax = 365 * 24 * 3600 * int64_t{1000};
  if (timeout_ms < 0 || timeout_ms > kTimeoutMsMax) {
    ThrowBadArgument(std::string("ChunkStore.") + call + ": timeout_ms = " +
                     std::to_string(timeout_ms) + "; it must be at least 0 and at most a year");
  }
  return MachineTime()->SteadyNs() + timeout_ms * 1'000'000;
}

}  // namespace

ChunkStoreObj::ChunkStoreObj(const OptionMap& fields)
    : store_(latch_.Run([&] { return ChunkStore::Open(ReadOptions(fields)); })) {}

OptionMap ChunkStoreObj::Statistics() {
  return latch_.Run([&] {
    const ChunkStoreStatistics statistics = store_->Statistics();
    OptionMap tiers;
    for (int i = 0; i < kTierCount; ++i) {
      tiers.Set(Text(TierName(static_cast<TierKind>(i))),
                TierFields(statistics.tiers[static_cast<size_t>(i)]));
    }
    OptionMap misses;
    for (size_t i = 0; i < statistics.misses.size(); ++i) {
      misses.Set(Text(MissReasonName(static_cast<MissReason>(i))), statistics.misses[i]);
    }
    return OptionMap{{"tiers", tiers},
                     {"misses", misses},
                     {"fetches", statistics.fetches},
                     {"prefetches", statistics.prefetches},
                     {"fetched_tokens", statistics.fetched_tokens},
                     {"pins", statistics.pins},
                     {"forced_unpins", statistics.forced_unpins},
                     {"events_dropped", statistics.events_dropped}};
  });
}

tf::Array<tf::Any> ChunkStoreObj::TakeEvents() {
  return latch_.Run([&] {
    tf::Array<tf::Any> events;
    for (const ChunkEvent& event : store_->TakeEvents()) {
      events.push_back(OptionMap{{"kind", Text(kEvents[static_cast<size_t>(event.kind)])},
                                 {"tier", Text(TierName(event.tier))},
                                 {"key", Text(event.key.digest.ToHex())}});
    }
    return events;
  });
}

tf::Array<tf::Any> ChunkStoreObj::List(const tf::String& tier) {
  const TierKind kind = ReadTier(tier);
  const std::vector<ChunkListing> listings = latch_.Run([&] { return store_->List(kind); });
  tf::Array<tf::Any> chunks;
  for (const ChunkListing& listing : listings) {
    chunks.push_back(OptionMap{{"tier", Text(TierName(listing.tier))},
                               {"key", Text(listing.key.digest.ToHex())},
                               {"fingerprint", Text(listing.fingerprint.ToHex())},
                               {"tokens", listing.tokens},
                               {"first_token", listing.first_token},
                               {"bytes", listing.bytes},
                               {"created_ms", listing.created_ms},
                               {"expires_ms", listing.expires_ms}});
  }
  return chunks;
}

OptionMap ChunkStoreObj::Get(const tf::String& tier, const tf::String& key) {
  const TierKind kind = ReadTier(tier);
  const Digest digest = ReadDigest(key);
  const std::shared_ptr<const StoredChunk> chunk =
      latch_.Run([&] { return store_->Get(kind, {.digest = digest}); });
  return HeaderFields(*chunk);
}

int64_t ChunkStoreObj::Verify(const tf::String& tier) {
  const TierKind kind = ReadTier(tier);
  return latch_.Run([&] { return store_->Verify(kind); });
}

int64_t ChunkStoreObj::CollectGarbage(const tf::String& tier) {
  const TierKind kind = ReadTier(tier);
  return latch_.Run([&] { return store_->CollectGarbage(kind); });
}

void ChunkStoreObj::Flush(int64_t timeout_ms) {
  const int64_t until_ns = MomentIn("flush", timeout_ms);
  latch_.Run([&] { return store_->Flush(until_ns); });
}

tf::Array<tf::Any> ChunkStoreObj::Passports() {
  const std::vector<Passport> passports = latch_.Run([&] { return store_->Passports(); });
  tf::Array<tf::Any> found;
  for (const Passport& passport : passports) {
    const std::string json = ValueOrThrow(passport.ToJson());
    found.push_back(
        OptionMap{{"fingerprint", Text(FingerprintOf(json).ToHex())}, {"json", Text(json)}});
  }
  return found;
}

int64_t ChunkStoreObj::KnownPrefix(const tf::String& fingerprint, const tf::Bytes& salt,
                                   const tf::Array<tf::String>& chain) {
  const KeySpace keys = ReadKeySpace(fingerprint, salt);
  const std::vector<ChunkKey> wanted = ReadKeys(chain);
  return latch_.Run([&] { return store_->KnownPrefix(keys, wanted); });
}

OptionMap ChunkStoreObj::Prefetch(const tf::String& fingerprint, const tf::Bytes& salt,
                                  const tf::TensorView& tokens, int64_t chunk_tokens,
                                  int64_t timeout_ms) {
  const KeySpace keys = ReadKeySpace(fingerprint, salt);
  const std::vector<int32_t> ids = TokenIds(tokens);
  const int64_t until_ns = MomentIn("prefetch", timeout_ms);
  return latch_.Run([&]() -> Result<OptionMap> {
    QUIRE_ASSIGN_OR_RETURN(const std::shared_ptr<ChunkFetch> fetch,
                           store_->Prefetch({.keys = &keys,
                                             .tokens = ids,
                                             .chunk_tokens = chunk_tokens,
                                             .tail = true,
                                             .deadline_ns = until_ns}));
    const bool done = fetch->Wait(until_ns);
    const MissReason miss = done ? fetch->miss() : MissReason::kTimeout;
    return OptionMap{{"ready", fetch->ready()}, {"miss", Text(MissReasonName(miss))}};
  });
}

void ChunkStoreObj::SetQuota(const tf::String& fingerprint, const tf::Bytes& salt,
                             int64_t bytes_max, int64_t bytes_guaranteed) {
  const KeySpace keys = ReadKeySpace(fingerprint, salt);
  latch_.Run([&] {
    return store_->SetQuota(keys, {.bytes_max = bytes_max, .bytes_guaranteed = bytes_guaranteed});
  });
}

int64_t ChunkStoreObj::Clear(const tf::String& fingerprint, const tf::Bytes& salt) {
  const KeySpace keys = ReadKeySpace(fingerprint, salt);
  return latch_.Run([&] { return store_->Clear(keys); });
}

int64_t ChunkStoreObj::Pin(const tf::Array<tf::String>& keys) {
  const std::vector<ChunkKey> chunks = ReadKeys(keys);
  return latch_.Run([&] { return store_->Pin(chunks); });
}

int64_t ChunkStoreObj::Unpin(const tf::Array<tf::String>& keys) {
  const std::vector<ChunkKey> chunks = ReadKeys(keys);
  return latch_.Run([&] { return store_->Unpin(chunks); });
}

void ChunkStoreObj::Touch(const tf::Array<tf::String>& keys) {
  const std::vector<ChunkKey> chunks = ReadKeys(keys);
  latch_.Run([&] { store_->Touch(chunks); });
}

int64_t ChunkStoreObj::SetTtl(const tf::Array<tf::String>& keys, int64_t ttl_ms) {
  const std::vector<ChunkKey> chunks = ReadKeys(keys);
  return latch_.Run([&] { return store_->SetTtl(chunks, ttl_ms); });
}

int64_t ChunkStoreObj::SetPriority(const tf::Array<tf::String>& keys, int64_t priority) {
  const std::vector<ChunkKey> chunks = ReadKeys(keys);
  // What does not fit an int is out of range there, too.
  const auto value = static_cast<int>(std::clamp<int64_t>(priority, -1, kPriorityMax + 1));
  return latch_.Run([&] { return store_->SetPriority(chunks, value); });
}

int64_t ChunkStoreObj::Remove(const tf::Array<tf::String>& keys) {
  const std::vector<ChunkKey> chunks = ReadKeys(keys);
  return latch_.Run([&] { return store_->Remove(chunks); });
}

void ChunkStoreObj::Close() { store_->Close(); }

StoreUseOptions ReadStoreUseOptions(const OptionMap& fields) {
  StoreUseOptions options;
  OptionsReader reader("Engine: store", fields);
  reader.Read("chunk_tokens", &options.chunk_tokens);
  reader.Read("load_timeout_ms", &options.load_timeout_ms);
  reader.Read("load_always", &options.load_always);
  reader.Read("write", &options.write);
  reader.Read("tails", &options.tails);
  ReadBytes(reader, "key", &options.mac_key);
  reader.Finish();
  return options;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::GlobalDef().def("quire.miss_reason_name", [](int64_t reason) {
    const auto known = static_cast<int64_t>(ChunkStoreStatistics{}.misses.size());
    if (reason < 0 || reason >= known) {
      ThrowBadArgument("miss_reason_name: there is no reason " + std::to_string(reason));
    }
    return Text(MissReasonName(static_cast<MissReason>(reason)));
  });
  // A store is made by a function and no constructor: a folder that does not answer is waited for,
  // and other Python threads run meanwhile.
  tf::reflection::GlobalDef()
      .def("quire.chunk_keys", &ChunkKeys)
      .def("quire.ChunkStore.create", [](const OptionMap& options) {
        return tf::ObjectRef(tf::make_object<ChunkStoreObj>(options));
      });
  tf::reflection::ObjectDef<ChunkStoreObj>()
      .def("statistics", &ChunkStoreObj::Statistics)
      .def("take_events", &ChunkStoreObj::TakeEvents)
      .def("list", &ChunkStoreObj::List)
      .def("get", &ChunkStoreObj::Get)
      .def("passports", &ChunkStoreObj::Passports)
      .def("known_prefix", &ChunkStoreObj::KnownPrefix)
      .def("prefetch", &ChunkStoreObj::Prefetch)
      .def("set_quota", &ChunkStoreObj::SetQuota)
      .def("clear", &ChunkStoreObj::Clear)
      .def("pin", &ChunkStoreObj::Pin)
      .def("unpin", &ChunkStoreObj::Unpin)
      .def("touch", &ChunkStoreObj::Touch)
      .def("set_ttl", &ChunkStoreObj::SetTtl)
      .def("set_priority", &ChunkStoreObj::SetPriority)
      .def("remove", &ChunkStoreObj::Remove)
      .def("verify", &ChunkStoreObj::Verify)
      .def("collect_garbage", &ChunkStoreObj::CollectGarbage)
      .def("flush", &ChunkStoreObj::Flush)
      .def("close", &ChunkStoreObj::Close);
}

}  // namespace quire::ffi
