#include "store/redis/redis_tier.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/clock.h"
#include "base/guard.h"
#include "net/socket.h"
#include "store/tier/event_ring.h"

namespace quire {
namespace {

// How long a chunk is believed to be there: the server may have evicted it since.
constexpr int64_t kSeenNs = 60'000 * kNsPerMs;
constexpr size_t kPrefixBatch = 4096;  // questions at once: some 400 KiB
constexpr std::string_view kScanCount = "1000";
constexpr size_t kScanPageMax = 1 << 16;  // names that one SCAN may answer with; asked for are 1000
constexpr size_t kHeaderBatch = 64;       // headers read at once when all are looked at

// Pieces that were left behind without a header may be of other bytes than ours: they give way.
// KEYS: the header, then the pieces.
constexpr std::string_view kMakeRoomScript =
    "if redis.call('EXISTS',KEYS[1])==0 then "
    "for i=2,#KEYS do redis.call('UNLINK',KEYS[i]) end end return 0";

// Where a chunk is put together for Get and Verify: the one item of a read.
class WholeChunkSink final : public TierReadSink {
 public:
  Result<std::span<std::byte>> OnHeader(size_t, const ChunkHeader& header) override {
    header_ = header;
    buffer_ = ChunkBuffer(header.total_bytes);
    return buffer_.bytes();
  }
  void OnSection(size_t, int64_t) override {}
  void OnEnd(size_t, const Status& status) override { status_ = status; }
  bool Cancelled(size_t) const override { return false; }

  Result<std::shared_ptr<const StoredChunk>> Take() {
    QUIRE_RETURN_IF_ERROR(status_);
    return std::make_shared<const StoredChunk>(std::move(header_), std::move(buffer_));
  }

 private:
  ChunkHeader header_;
  ChunkBuffer buffer_;
  Status status_;
};

bool IsThere(const RedisOp& op) {
  return op.status.ok() && op.replies.front().type == RespType::kInteger &&
         op.replies.front().integer > 0;
}

std::string ShortName(const ChunkKey& key) {
  return "chunk " + key.digest.ToHex().substr(0, 16) + "...";
}

}  // namespace

Result<std::unique_ptr<RedisTier>> RedisTier::Create(const RedisTierOptions& options,
                                                     std::string mac_key,
                                                     std::shared_ptr<Clock> clock) {
  return GuardEntry([&]() -> Result<std::unique_ptr<RedisTier>> {
    // A brace there would decide about the slot in place of the chunk's key.
    if (options.key_prefix.find_first_of("{}") != std::string::npos) {
      return Status(StatusCode::kBadArgument, "redis.key_prefix is \"" +
                                                  PrintableError(options.key_prefix) +
                                                  "\"; braces are for hash tags");
    }
    std::shared_ptr<Clock> time = clock != nullptr ? std::move(clock) : MachineTime();
    QUIRE_ASSIGN_OR_RETURN(std::unique_ptr<RedisCluster> cluster,
                           RedisCluster::Create(options, time));
    return std::unique_ptr<RedisTier>(
        new RedisTier(options, std::move(mac_key), std::move(time), std::move(cluster)));
  });
}

RedisTier::RedisTier(const RedisTierOptions& options, std::string mac_key,
                     std::shared_ptr<Clock> clock, std::unique_ptr<RedisCluster> cluster)
    : options_(options),
      mac_key_(std::move(mac_key)),
      clock_(std::move(clock)),
      cluster_(std::move(cluster)) {}

// Keys commit to the passport, and each header has its fingerprint: nothing to compare.
Status RedisTier::AddPassport(const Digest&, std::string_view) { return Status(); }

Result<std::vector<std::string>> RedisTier::Passports(int64_t) {
  return std::vector<std::string>();
}

// ---- What is there

int RedisTier::Knows(const ChunkId& id) const {
  const std::lock_guard<std::mutex> guard(mutex_);
  const std::optional<int64_t> seen_ns = seen_.Find(id.key);
  return seen_ns && clock_->SteadyNs() - *seen_ns < kSeenNs ? 1 : -1;
}

void RedisTier::Remember(const ChunkKey& key, int64_t removals) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (removals != removals_) return;
  seen_.Add(key, clock_->SteadyNs());
}

void RedisTier::Forget(const ChunkKey& key) {
  const std::lock_guard<std::mutex> guard(mutex_);
  seen_.Remove(key);
}

void RedisTier::ForgetRemoved(const ChunkKey& key) {
  const std::lock_guard<std::mutex> guard(mutex_);
  seen_.Remove(key);
  ++removals_;
}

int64_t RedisTier::Removals() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return removals_;
}

void RedisTier::AddEvent(ChunkEvent::Kind kind, const ChunkKey& key) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (events_.size() == EventRing::kEventsMax) {
    events_.pop_front();
    ++usage_.events_dropped;
  }
  events_.push_back({kind, TierKind::kRedis, key});
}

RedisOp RedisTier::HeaderExists(const ChunkKey& key) const {
  const std::string name = RedisHeaderName(options_.key_prefix, key);
  RedisOp op;
  op.slot = RedisSlotOf(name);
  op.request.Add({"EXISTS", name});
  return op;
}

// How many of the leading ids are there, as the answers to HeaderExists say.
Result<int64_t> RedisTier::CountLeading(std::span<const ChunkId> ids, std::span<const RedisOp> ops,
                                        int64_t removals) {
  int64_t there = 0;
  for (const RedisOp& op : ops) {
    const ChunkKey& key = ids[static_cast<size_t>(there)].key;
    // In a cluster that lost a master: as far as the others know.
    if (!op.status.ok()) return there > 0 ? Result<int64_t>(there) : op.status;
    if (!IsThere(op)) {
      Forget(key);
      return there;
    }
    Remember(key, removals);
    ++there;
  }
  return there;
}

Result<int64_t> RedisTier::Prefix(std::span<const ChunkId> ids, int64_t deadline_ns) {
  return GuardEntry([&]() -> Result<int64_t> {
    int64_t there = 0;
    // All of a batch in one round trip, which is no slower than one step of a binary search and
    // right where the server evicted from the middle.
    for (size_t begin = 0; begin < ids.size(); begin += kPrefixBatch) {
      const auto batch = ids.subspan(begin, std::min(kPrefixBatch, ids.size() - begin));
      const int64_t removals = Removals();
      std::vector<RedisOp> ops;
      for (const ChunkId& id : batch) ops.push_back(HeaderExists(id.key));
      cluster_->Execute(ops, deadline_ns);
      const Result<int64_t> leading = CountLeading(batch, ops, removals);
      if (!leading.ok()) return there > 0 ? Result<int64_t>(there) : leading;
      there += *leading;
      if (*leading < std::ssize(batch)) break;
    }
    return there;
  });
}

std::vector<Result<int64_t>> RedisTier::Prefixes(std::span<const std::span<const ChunkId>> chains,
                                                 int64_t deadline_ns) {
  size_t count = 0;
  for (const auto& ids : chains) count += ids.size();
  if (count > kPrefixBatch) return ChunkTier::Prefixes(chains, deadline_ns);
  const int64_t removals = Removals();
  std::vector<RedisOp> ops;
  for (const auto& ids : chains)
    for (const ChunkId& id : ids) ops.push_back(HeaderExists(id.key));
  cluster_->Execute(ops, deadline_ns);
  std::vector<Result<int64_t>> there;
  std::span<const RedisOp> rest = ops;
  for (const auto& ids : chains) {
    there.push_back(CountLeading(ids, rest.first(ids.size()), removals));
    rest = rest.subspan(ids.size());
  }
  return there;
}

// ---- Reading

void RedisTier::Read(std::span<const TierRead> items, int64_t deadline_ns, TierReadSink& sink) {
  std::vector<RedisReadItem> list;
  try {
    list.reserve(items.size());
    for (const TierRead& item : items) list.push_back({&item});
    const int64_t removals = Removals();
    RedisRead read(*cluster_, options_.key_prefix, list, sink);
    read.Run(deadline_ns);
    try {
      NoteRead(list, read, removals);
      RemoveUseless(list, read, deadline_ns);
    } catch (const std::bad_alloc&) {
      // All items have their ends; what is useless is found again.
    }
  } catch (const std::bad_alloc&) {
    for (size_t i = 0; i < items.size(); ++i) sink.OnEnd(i, Status::OutOfMemory());
  }
}

void RedisTier::NoteRead(std::span<const RedisReadItem> items, const RedisRead& read,
                         int64_t removals) {
  for (size_t i = 0; i < items.size(); ++i) {
    const ChunkKey& key = items[i].read->id.key;
    const RedisReadOutcome& outcome = read.outcome(i);
    if (outcome.status.ok()) {
      Remember(key, removals);
      continue;
    }
    if (outcome.damaged || outcome.incomplete || outcome.status.code() == StatusCode::kNotFound)
      Forget(key);
    if (!outcome.damaged && !outcome.incomplete) continue;
    AddEvent(outcome.damaged ? ChunkEvent::Kind::kCorrupt : ChunkEvent::Kind::kEvicted, key);
    const std::lock_guard<std::mutex> guard(mutex_);
    ++(outcome.damaged ? usage_.corrupt : usage_.evicted);
  }
}

RedisOp RedisTier::RemovalOf(const ChunkKey& key, int64_t piece_count) const {
  const std::string name = RedisHeaderName(options_.key_prefix, key);
  RedisOp op;
  op.slot = RedisSlotOf(name);
  // The header first: what has none is not there.
  op.request.Add({"UNLINK", name});
  for (int64_t i = 0; i < piece_count; ++i)
    op.request.Add({"UNLINK", RedisPieceName(options_.key_prefix, key, i)});
  return op;
}

// Best effort: the next read of it does the same.
void RedisTier::RemoveUseless(std::span<const RedisReadItem> items, const RedisRead& read,
                              int64_t deadline_ns) {
  std::vector<RedisOp> ops;
  for (size_t i = 0; i < items.size(); ++i) {
    const RedisReadOutcome& outcome = read.outcome(i);
    if (outcome.damaged || outcome.incomplete)
      ops.push_back(RemovalOf(items[i].read->id.key, outcome.pieces));
  }
  if (!ops.empty()) cluster_->Execute(ops, deadline_ns);
}

// One chunk by its key; `outcome` says what was wrong with it.
Result<std::shared_ptr<const StoredChunk>> RedisTier::ReadWhole(const ChunkKey& key,
                                                                int64_t deadline_ns,
                                                                RedisReadOutcome* outcome) {
  TierRead item;
  item.id.key = item.expected.key = key;
  item.expected.now_ms = clock_->WallMs();
  item.expected.mac_key = mac_key_;
  const RedisReadItem entry{&item, /*take_any=*/true};
  WholeChunkSink sink;
  const int64_t removals = Removals();
  RedisRead read(*cluster_, options_.key_prefix, std::span(&entry, 1), sink);
  read.Run(deadline_ns);
  NoteRead(std::span(&entry, 1), read, removals);
  RemoveUseless(std::span(&entry, 1), read, deadline_ns);
  *outcome = read.outcome(0);
  return sink.Take();
}

Result<std::shared_ptr<const StoredChunk>> RedisTier::Get(const ChunkKey& key,
                                                          int64_t deadline_ns) {
  return GuardEntry([&] {
    RedisReadOutcome outcome;
    return ReadWhole(key, deadline_ns, &outcome);
  });
}

// ---- Writing

struct RedisTier::WritePlan {
  std::vector<std::string> names{};  // the header's, then the pieces'
  std::vector<int64_t> pieces{};
  std::string header{};
  std::vector<std::string> expiry{};  // arguments of SET
  RedisOp op{};
};

// The earlier of the options' time to live and of the chunk's own end.
std::vector<std::string> RedisTier::ExpiryArguments(int64_t expires_ms) const {
  const int64_t left_ms = expires_ms - clock_->WallMs();
  if (expires_ms != 0 && (options_.ttl_ms == 0 || left_ms < options_.ttl_ms))
    return {"PXAT", std::to_string(expires_ms)};
  if (options_.ttl_ms != 0) return {"PX", std::to_string(options_.ttl_ms)};
  return {};
}

Status RedisTier::PlanWrite(const TierWrite& item, int64_t deadline_ns, WritePlan* plan) const {
  const ChunkHeader& header = item.chunk->header();
  if (header.expires_ms != 0 && header.expires_ms <= clock_->WallMs()) {
    return Status(StatusCode::kNotFound,
                  "Redis: " + ShortName(item.id.key) + " has expired before it was written");
  }
  const std::span<const std::byte> bytes = item.chunk->bytes();
  plan->pieces = CutRedisPieces(header);
  plan->header = EncodeRedisHeader(item.id.root, plan->pieces,
                                   bytes.first(static_cast<size_t>(header.header_bytes)));
  plan->names = {RedisHeaderName(options_.key_prefix, item.id.key)};
  for (size_t i = 0; i < plan->pieces.size(); ++i) {
    plan->names.push_back(
        RedisPieceName(options_.key_prefix, item.id.key, static_cast<int64_t>(i)));
  }
  plan->expiry = ExpiryArguments(header.expires_ms);
  plan->op.slot = RedisSlotOf(plan->names.front());
  plan->op.expected = {.bytes_max = 4096, .items_max = std::ssize(plan->names) + 2};

  RedisRequest& request = plan->op.request;
  request.Add({"MULTI"});
  const std::string key_count = std::to_string(plan->names.size());
  std::vector<std::string_view> arguments = {"EVAL", kMakeRoomScript, key_count};
  arguments.insert(arguments.end(), plan->names.begin(), plan->names.end());
  request.Add(arguments);
  const auto add_set = [&](const std::string& name, std::string_view value) {
    arguments = {"SET", name, value, "NX"};
    arguments.insert(arguments.end(), plan->expiry.begin(), plan->expiry.end());
    request.Add(arguments);
  };
  auto at = static_cast<size_t>(header.header_bytes);
  for (size_t i = 0; i < plan->pieces.size(); ++i) {
    const auto piece = bytes.subspan(at, static_cast<size_t>(plan->pieces[i]));
    add_set(plan->names[i + 1], {reinterpret_cast<const char*>(piece.data()), piece.size()});
    at += piece.size();
  }
  add_set(plan->names.front(), plan->header);
  request.Add({"EXEC"});
  if (options_.replicas > 0) {
    // Half of the time that is left, so that the answer still comes in time.
    const int64_t left_ms = (deadline_ns - clock_->SteadyNs()) / kNsPerMs;
    const int64_t wait_ms = std::clamp<int64_t>(left_ms / 2, 1, options_.io_timeout_ms / 2 + 1);
    request.Add({"WAIT", std::to_string(options_.replicas), std::to_string(wait_ms)});
  }
  return Status();
}

Status RedisTier::ConcludeWrite(const TierWrite& item, const WritePlan& plan, int64_t removals) {
  QUIRE_RETURN_IF_ERROR(plan.op.status);
  const size_t exec_at = plan.pieces.size() + 3;  // behind MULTI, EVAL, the pieces and the header
  const RespValue& exec = plan.op.replies[exec_at];
  if (exec.type != RespType::kArray || exec.items.size() != plan.pieces.size() + 2)
    return Status(StatusCode::kUnavailable, "Redis: it answers EXEC with something else");
  for (const RespValue& reply : exec.items) {
    if (reply.type == RespType::kError) {
      const bool is_full = reply.text.starts_with("OOM ");
      return Status(is_full ? StatusCode::kFull : StatusCode::kIoError,
                    "Redis: " + PrintableError(reply.text));
    }
  }
  Remember(item.id.key, removals);
  if (exec.items.back().type == RespType::kNull) {
    // Another one was faster; the same key is the same bytes.
    const std::lock_guard<std::mutex> guard(mutex_);
    ++usage_.deduplicated;
    return Status();
  }
  AddEvent(ChunkEvent::Kind::kStored, item.id.key);
  if (options_.replicas == 0) return Status();
  const RespValue& wait = plan.op.replies.back();
  if (wait.type == RespType::kInteger && wait.integer >= options_.replicas) return Status();
  return Status(StatusCode::kTimeout, "Redis: " + ShortName(item.id.key) + " is stored, but only " +
                                          std::to_string(wait.integer) + " of " +
                                          std::to_string(options_.replicas) + " replicas have it");
}

std::vector<Status> RedisTier::WriteAll(std::span<const TierWrite> items, int64_t deadline_ns) {
  std::vector<Status> statuses(items.size());
  // A question is cheaper than megabytes that are there already.
  const int64_t removals = Removals();
  std::vector<RedisOp> questions;
  for (const TierWrite& item : items) questions.push_back(HeaderExists(item.id.key));
  cluster_->Execute(questions, deadline_ns);
  std::vector<WritePlan> plans(items.size());
  std::vector<RedisOp> ops;
  std::vector<size_t> written;
  for (size_t i = 0; i < items.size(); ++i) {
    statuses[i] = questions[i].status;
    if (!statuses[i].ok()) continue;
    if (IsThere(questions[i])) {
      Remember(items[i].id.key, removals);
      const std::lock_guard<std::mutex> guard(mutex_);
      ++usage_.deduplicated;
      continue;
    }
    statuses[i] = PlanWrite(items[i], deadline_ns, &plans[i]);
    if (!statuses[i].ok()) continue;
    ops.push_back(std::move(plans[i].op));
    written.push_back(i);
  }
  cluster_->Execute(ops, deadline_ns);
  for (size_t n = 0; n < written.size(); ++n) {
    const size_t i = written[n];
    plans[i].op = std::move(ops[n]);
    statuses[i] = ConcludeWrite(items[i], plans[i], removals);
  }
  return statuses;
}

std::vector<Status> RedisTier::Write(std::span<const TierWrite> items, int64_t deadline_ns) {
  try {
    return WriteAll(items, deadline_ns);
  } catch (const std::bad_alloc&) {
    return std::vector<Status>(items.size(), Status::OutOfMemory());
  }
}

// ---- Control

void RedisTier::Touch(const ChunkKey&) {}

void RedisTier::SetQuota(const ChunkKey&, const ChunkQuota&) {}

bool RedisTier::Pin(const ChunkKey& key, int) {
  const ChunkId id{.key = key};
  if (Knows(id) == 1) return true;
  const int64_t until_ns = clock_->SteadyNs() + options_.connect_timeout_ms * kNsPerMs;
  const Result<int64_t> there = Prefix(std::span(&id, 1), until_ns);
  return there.ok() && *there == 1;
}

Status RedisTier::SetPriority(const ChunkKey&, int, int64_t) {
  return Status(StatusCode::kNotFound, "Redis: chunks have no priorities there");
}

// NotFound if there is no header, -1 if the header is not Quire's.
Result<int64_t> RedisTier::PieceCount(const ChunkKey& key, int64_t deadline_ns) {
  const std::string name = RedisHeaderName(options_.key_prefix, key);
  RedisOp op;
  op.slot = RedisSlotOf(name);
  op.request.Add({"GETRANGE", name, "0", std::to_string(kRedisCountBytes - 1)});
  cluster_->Execute(std::span(&op, 1), deadline_ns);
  if (op.status.code() == StatusCode::kCorrupt) return int64_t{-1};
  QUIRE_RETURN_IF_ERROR(op.status);
  const std::string& begin = op.replies.front().text;
  if (begin.empty())
    return Status(StatusCode::kNotFound, "Redis: " + ShortName(key) + " is not there");
  const std::optional<int64_t> count = RedisPieceCount(std::as_bytes(std::span(begin)));
  // What a foreign hand wrote there must not make us send millions of commands.
  const bool is_ours = count && *count <= ChunkLimits{}.section_count_max * 2;
  return is_ours ? *count : -1;
}

// What the chunk's own header says; 0: it never expires, or it is not there or damaged.
Result<int64_t> RedisTier::OwnExpiry(const ChunkKey& key, int64_t deadline_ns) {
  int64_t expires_ms = 0;
  const auto note = [&](const ChunkKey&, const RedisHeader& header) {
    expires_ms = header.chunk.expires_ms;
    return Status();
  };
  QUIRE_RETURN_IF_ERROR(VisitHeaders(std::span(&key, 1), deadline_ns, note));
  return expires_ms;
}

Status RedisTier::SetExpiry(const ChunkKey& key, int64_t expires_ms, int64_t deadline_ns) {
  return GuardEntry([&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int64_t count, PieceCount(key, deadline_ns));
    // After that nobody would read the chunk, and nobody but the server remove it.
    QUIRE_ASSIGN_OR_RETURN(const int64_t own_ms, OwnExpiry(key, deadline_ns));
    if (own_ms != 0 && (expires_ms == 0 || own_ms < expires_ms)) expires_ms = own_ms;
    RedisOp op;
    const auto add = [&](const std::string& name) {
      if (expires_ms == 0) {
        op.request.Add({"PERSIST", name});
      } else {
        op.request.Add({"PEXPIREAT", name, std::to_string(expires_ms)});
      }
    };
    // The header last: it never lives longer than its pieces, unless for ever.
    for (int64_t i = 0; i < count; ++i) add(RedisPieceName(options_.key_prefix, key, i));
    const std::string header_name = RedisHeaderName(options_.key_prefix, key);
    add(header_name);
    op.slot = RedisSlotOf(header_name);
    cluster_->Execute(std::span(&op, 1), deadline_ns);
    return op.status;
  });
}

Result<bool> RedisTier::RemoveByKey(const ChunkKey& key, int64_t piece_count, int64_t deadline_ns) {
  RedisOp op = RemovalOf(key, piece_count);
  cluster_->Execute(std::span(&op, 1), deadline_ns);
  QUIRE_RETURN_IF_ERROR(op.status);
  ForgetRemoved(key);
  const bool was_there = IsThere(op);
  if (was_there) AddEvent(ChunkEvent::Kind::kRemoved, key);
  return was_there;
}

Result<bool> RedisTier::Remove(const ChunkKey& key, int64_t deadline_ns) {
  return GuardEntry([&]() -> Result<bool> {
    const Result<int64_t> count = PieceCount(key, deadline_ns);
    if (count.ok()) return RemoveByKey(key, *count, deadline_ns);
    if (count.status().code() != StatusCode::kNotFound) return count.status();
    ForgetRemoved(key);
    return false;
  });
}

// ---- All there is

Status RedisTier::ForEachName(std::string_view tail, int64_t deadline_ns,
                              const NameVisitor& visit) {
  const std::string pattern = RedisScanPattern(options_.key_prefix, tail);
  QUIRE_ASSIGN_OR_RETURN(const std::vector<RedisAddress> masters, cluster_->Masters(deadline_ns));
  for (const RedisAddress& master : masters) {
    std::string cursor = "0";
    do {
      RedisOp op;
      op.node = master;
      op.request.Add({"SCAN", cursor, "MATCH", pattern, "COUNT", kScanCount});
      op.expected = {.bytes_max = int64_t{kScanPageMax} * 256, .items_max = kScanPageMax + 2};
      cluster_->Execute(std::span(&op, 1), deadline_ns);
      QUIRE_RETURN_IF_ERROR(op.status);
      const RespValue& page = op.replies.front();
      if (page.items.size() != 2)
        return Status(StatusCode::kUnavailable,
                      "Redis " + master.ToString() + ": it answers SCAN with something else");
      std::vector<RedisName> names;
      for (const RespValue& item : page.items[1].items) {
        const std::optional<RedisName> name = ParseRedisName(options_.key_prefix, item.text);
        if (name) names.push_back(*name);
      }
      if (!names.empty()) QUIRE_RETURN_IF_ERROR(visit(names));
      cursor = page.items[0].text;
    } while (cursor != "0");
  }
  return Status();
}

// A header that cannot be read is skipped.
Status RedisTier::VisitHeaders(std::span<const ChunkKey> keys, int64_t deadline_ns,
                               const HeaderVisitor& visit) {
  const ChunkLimits limits;
  std::vector<RedisOp> ops(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    const std::string name = RedisHeaderName(options_.key_prefix, keys[i]);
    ops[i].slot = RedisSlotOf(name);
    ops[i].request.Add({"GET", name});
    ops[i].expected.bytes_max = RedisHeaderBytesMax(limits);
  }
  cluster_->Execute(ops, deadline_ns);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (ops[i].status.code() == StatusCode::kCorrupt) continue;
    QUIRE_RETURN_IF_ERROR(ops[i].status);
    const Result<RedisHeader> header =
        DecodeRedisHeader(std::as_bytes(std::span(ops[i].replies.front().text)), limits);
    if (header.ok() && header->chunk.key == keys[i]) QUIRE_RETURN_IF_ERROR(visit(keys[i], *header));
  }
  return Status();
}

// Each chunk once, although SCAN may give a name twice.
Status RedisTier::ForEachHeader(int64_t deadline_ns, const HeaderVisitor& visit) {
  std::set<ChunkKey> visited;
  return ForEachName(":h", deadline_ns, [&](const std::vector<RedisName>& names) -> Status {
    std::vector<ChunkKey> keys;
    for (const RedisName& name : names) {
      if (name.piece < 0 && visited.insert(name.key).second) keys.push_back(name.key);
    }
    for (size_t begin = 0; begin < keys.size(); begin += kHeaderBatch) {
      const size_t count = std::min(kHeaderBatch, keys.size() - begin);
      QUIRE_RETURN_IF_ERROR(
          VisitHeaders(std::span(keys).subspan(begin, count), deadline_ns, visit));
    }
    return Status();
  });
}

Result<std::vector<ChunkListing>> RedisTier::List(int64_t deadline_ns) {
  return GuardEntry([&]() -> Result<std::vector<ChunkListing>> {
    std::vector<ChunkListing> listings;
    QUIRE_RETURN_IF_ERROR(
        ForEachHeader(deadline_ns, [&](const ChunkKey& key, const RedisHeader& header) {
          listings.push_back({.tier = TierKind::kRedis,
                              .key = key,
                              .fingerprint = header.chunk.fingerprint,
                              .tokens = std::ssize(header.chunk.tokens),
                              .bytes = header.chunk.total_bytes,
                              .created_ms = header.chunk.created_ms,
                              .expires_ms = header.chunk.expires_ms});
          return Status();
        }));
    return listings;
  });
}

Result<int64_t> RedisTier::Clear(const Digest& fingerprint, const ChunkKey& root,
                                 int64_t deadline_ns) {
  return GuardEntry([&]() -> Result<int64_t> {
    int64_t removed = 0;
    QUIRE_RETURN_IF_ERROR(
        ForEachHeader(deadline_ns, [&](const ChunkKey& key, const RedisHeader& header) -> Status {
          if (header.root != root || header.chunk.fingerprint != fingerprint) return Status();
          QUIRE_ASSIGN_OR_RETURN(const bool was_there,
                                 RemoveByKey(key, std::ssize(header.pieces), deadline_ns));
          removed += was_there ? 1 : 0;
          return Status();
        }));
    return removed;
  });
}

Result<int64_t> RedisTier::Verify(int64_t deadline_ns) {
  return GuardEntry([&]() -> Result<int64_t> {
    int64_t damaged = 0;
    const auto verify = [&](const std::vector<RedisName>& names) -> Status {
      for (const RedisName& name : names) {
        if (name.piece >= 0) continue;
        RedisReadOutcome outcome;
        const StatusCode code = ReadWhole(name.key, deadline_ns, &outcome).status().code();
        damaged += outcome.damaged || outcome.incomplete ? 1 : 0;
        if (code == StatusCode::kTimeout || code == StatusCode::kUnavailable) return outcome.status;
      }
      return Status();
    };
    QUIRE_RETURN_IF_ERROR(ForEachName(":h", deadline_ns, verify));
    return damaged;
  });
}

// Bytes of the pieces among `names` that no header speaks of, which are removed.
Result<int64_t> RedisTier::CollectAmong(const std::vector<RedisName>& names, int64_t deadline_ns) {
  std::map<ChunkKey, int64_t> counts;  // pieces that the header speaks of
  for (const RedisName& name : names) {
    if (name.piece < 0 || counts.contains(name.key)) continue;
    const Result<int64_t> count = PieceCount(name.key, deadline_ns);
    if (!count.ok() && count.status().code() != StatusCode::kNotFound) return count.status();
    counts[name.key] = count.ok() ? *count : 0;
  }
  std::vector<RedisOp> ops;
  for (const RedisName& name : names) {
    if (name.piece < 0 || name.piece < counts[name.key]) continue;
    const std::string piece = RedisPieceName(options_.key_prefix, name.key, name.piece);
    RedisOp op;
    op.slot = RedisSlotOf(piece);
    op.request.Add({"STRLEN", piece});
    op.request.Add({"UNLINK", piece});
    ops.push_back(std::move(op));
  }
  cluster_->Execute(ops, deadline_ns);
  int64_t bytes = 0;
  for (const RedisOp& op : ops) {
    QUIRE_RETURN_IF_ERROR(op.status);
    // 0 where SCAN gave the name twice, or somebody else was faster.
    bytes += op.replies[0].integer;
  }
  return bytes;
}

Result<int64_t> RedisTier::CollectGarbage(int64_t deadline_ns) {
  return GuardEntry([&]() -> Result<int64_t> {
    int64_t freed = 0;
    QUIRE_RETURN_IF_ERROR(
        ForEachName(":kv:*", deadline_ns, [&](const std::vector<RedisName>& names) -> Status {
          QUIRE_ASSIGN_OR_RETURN(const int64_t bytes, CollectAmong(names, deadline_ns));
          freed += bytes;
          return Status();
        }));
    return freed;
  });
}

TierUsage RedisTier::Usage() const {
  const bool available = cluster_->available();
  const std::lock_guard<std::mutex> guard(mutex_);
  TierUsage usage = usage_;
  usage.available = available;
  return usage;
}

void RedisTier::TakeEvents(std::vector<ChunkEvent>* events) {
  const std::lock_guard<std::mutex> guard(mutex_);
  events->insert(events->end(), events_.begin(), events_.end());
  events_.clear();
}

Result<std::unique_ptr<ChunkTier>> CreateRedisTier(const RedisTierOptions& options,
                                                   std::string mac_key,
                                                   std::shared_ptr<Clock> clock) {
  QUIRE_ASSIGN_OR_RETURN(std::unique_ptr<ChunkTier> made,
                         RedisTier::Create(options, std::move(mac_key), std::move(clock)));
  return made;
}

}  // namespace quire
