// The part of the random walks in which tokens go from one cache to another (quire/kv_transfer.h):
// with other pages, in some walks with half of the heads, so that two sequences share the heads of
// one. The oracles send to one another as the caches do, over a channel of their own; then the
// receiving sequence goes on with its walk, its tokens known as if it had computed them.
#include <algorithm>
#include <set>
#include <string>

#include "base/check.h"
#include "kv/testing/kv_walker.h"

namespace quire::kv_walk {
namespace {

// Those of ranks 0 and 1 and of what they send to.
constexpr int64_t kFirstPeer = 10;
constexpr int64_t kPeerCount = 8;

// All slots of a map but one.
std::vector<int64_t> SlotsWithout(int64_t row, int64_t count) {
  std::vector<int64_t> slots = {0};
  const auto add = [&](int64_t begin, int64_t length) {
    if (length == 0) return;
    ++slots[0];
    slots.insert(slots.end(), {begin, length});
  };
  add(0, row);
  add(-1, 1);
  add(row + 1, count - row - 1);
  return slots;
}

void BreakMap(ReceiveMap* map, int64_t how) {
  if (how == 0) map->layout ^= 1;
  if (how == 1) map->kv_heads[0] = 5;
  if (how == 2) map->slots.pop_back();
  if (how == 3) map->count = 0;
  if (how == 4) ++map->count;
}

}  // namespace

// Between the walker and the channel: notes which tokens arrive.
class Walker::Sink final : public LayerSink {
 public:
  Sink(Walker* walker, std::shared_ptr<LocalChannel> channel)
      : walker_(walker), channel_(std::move(channel)) {}
  Status OnLayerAppended(int64_t layer, std::span<const SendRange> ranges) override {
    return channel_->OnLayerAppended(layer, ranges);
  }
  Status OnForwardEnded(std::span<const SendRecord> records) override {
    QUIRE_RETURN_IF_ERROR(channel_->OnForwardEnded(records));
    if (walker_ != nullptr) walker_->NoteSent(records);
    return Status();
  }
  Status OnForwardAborted(std::span<const SendRecord> records) override {
    return channel_->OnForwardAborted(records);
  }
  Status OnSendStopped(std::span<const SendRecord> records, const Status& why) override {
    return channel_->OnSendStopped(records, why);
  }

 private:
  Walker* const walker_;  // null: of the model, which is told the same
  const std::shared_ptr<LocalChannel> channel_;
};

// ---------------------------------------------------------------------- two caches

Walkers::Walkers(uint64_t seed) {
  walkers_.push_back(std::make_unique<Walker>(MakeSetting(seed)));
  const std::optional<WalkSetting> other = MakeOtherSetting(seed);
  if (!other) return;
  walkers_.push_back(std::make_unique<Walker>(*other, uint64_t{1} << 40));
  walkers_[0]->SendTo(walkers_[1].get());
  walkers_[1]->SendTo(walkers_[0].get());
}

std::string Walkers::Step(const WalkOp& op) {
  const bool of_both = op.kind == Kind::kTransfer || op.kind == Kind::kSend ||
                       op.kind == Kind::kReceive || op.kind == Kind::kSwitch;
  if (of_both && walkers_.size() == 1) return "";
  if (op.kind == Kind::kSwitch) {
    current_ = 1 - current_;
    return "";
  }
  std::string error =
      of_both ? walkers_[current_]->StepOfTransfer(op) : walkers_[current_]->Step(op);
  for (size_t i = 0; i < walkers_.size() && error.empty(); ++i) {
    if (of_both) error = walkers_[i]->Compare();
    if (!error.empty() && i != current_) error = "of the other cache: " + error;
  }
  return error;
}

std::string Walkers::Finish() {
  std::string error;
  for (const auto& walker : walkers_) {
    if (error.empty()) error = walker->Finish();
  }
  return error;
}

void Walker::SendTo(Walker* other) {
  other_ = other;
  for (auto& channel : channels_) channel = CreateLocalChannel();
  ConnectPeers();
  for (AttentionKVCache* cache : {cache_.get(), static_cast<AttentionKVCache*>(&model_)}) {
    const size_t side = SideOf(*cache);
    const Status status = cache->transfer()->SetLayerSink(
        std::make_shared<Sink>(side == 0 ? this : nullptr, channels_[side]));
    QUIRE_CHECK(status.ok()) << status.ToString();
  }
}

void Walker::ConnectPeers() {
  AttentionKVCache* const peers[] = {other_->cache_.get(), &other_->model_};
  for (size_t side = 0; side < 2; ++side) {
    for (int64_t peer = kFirstPeer; peer < kFirstPeer + kPeerCount; ++peer) {
      const Status status = channels_[side]->Connect(peer, peers[side]->transfer());
      QUIRE_CHECK(status.ok()) << status.ToString();
    }
  }
}

std::string Walker::StepOfTransfer(const WalkOp& op) {
  if (op.kind == Kind::kTransfer) return Transfer(op);
  return op.kind == Kind::kSend ? Send(op) : Receive(op);
}

// ---------------------------------------------------------------------- what arrived

void Walker::NoteSent(std::span<const SendRecord> records) {
  for (const SendRecord& record : records) {
    const auto found = other_->incoming_.find(record.epoch);
    if (found == other_->incoming_.end()) continue;  // all of it had no slot there
    Incoming& incoming = found->second;
    const Outgoing& outgoing = outgoing_.at(record.seq_id);
    const History& history = history_.at(record.seq_id);
    for (int64_t row = record.first_row; row < record.first_row + record.count; ++row) {
      KnownToken token = history[static_cast<size_t>(outgoing.begin + row)];
      auto& place = incoming.tokens[static_cast<size_t>(row)];
      if (setting_.halved_layers != 0) {
        place[static_cast<size_t>(outgoing.rank % 2)] = token;
        continue;
      }
      if (const uint32_t halved = other_->setting_.halved_layers; halved != 0) {
        token.number = HalfToken(token.number, halved, (record.peer - kFirstPeer) % 2);
        token.has_lost_inputs |= token.set != nullptr;  // its heads were not set apart
      }
      place[0] = token;
    }
  }
}

bool Walker::HasToken(const Incoming& incoming, int64_t row) const {
  const auto& place = incoming.tokens[static_cast<size_t>(row)];
  return place[0].has_value() && (other_->setting_.halved_layers == 0 || place[1].has_value());
}

KnownToken Walker::TokenOf(const Incoming& incoming, int64_t row) const {
  const auto& place = incoming.tokens[static_cast<size_t>(row)];
  KnownToken token = *place[0];
  const uint32_t halved = other_->setting_.halved_layers;
  if (halved == 0) return token;
  const KnownToken& second = *place[1];
  const uint64_t whole = WholeToken(token.number);
  token.has_lost_inputs |= second.has_lost_inputs || token.set != nullptr ||
                           second.set != nullptr || token.latent_set != second.latent_set ||
                           token.number != HalfToken(whole, halved, 0) ||
                           second.number != HalfToken(whole, halved, 1);
  token.number = whole;
  return token;
}

std::string Walker::CompareProgress(int64_t id) {
  const Result<SendProgress> ours = cache_->transfer()->GetSendProgress(id);
  const Result<SendProgress> models = model_.GetSendProgress(id);
  if (std::string error = Compare("GetSendProgress", ours.status(), models.status());
      !error.empty())
    return error;
  if (!ours.ok()) return "";
  if (ours->begin != models->begin || ours->count != models->count ||
      ours->active != models->active)
    return "what sequence " + std::to_string(id) + " sends differs";
  const std::string error = Compare("the mark", ours->failure, models->failure);
  return error.empty() ? Differ("tokens sent", ours->sent, models->sent) : error;
}

// Forgets what is over.
std::string Walker::CompareIncoming() {
  for (auto at = incoming_.begin(); at != incoming_.end();) {
    const auto& [epoch, incoming] = *at;
    const Result<ReceiveProgress> ours = cache_->transfer()->GetReceiveProgress(epoch);
    const Result<ReceiveProgress> models = model_.GetReceiveProgress(incoming.maps[1].epoch);
    std::string error = Compare("GetReceiveProgress", ours.status(), models.status());
    if (error.empty() && ours.ok()) {
      if (ours->layer_rows != models->layer_rows) error = "complete rows differ";
      if (error.empty()) error = Differ("tokens to receive", ours->count, models->count);
      if (error.empty()) error = Differ("tokens to commit", ours->complete, models->complete);
      if (error.empty()) error = Compare("receiving", ours->failure, models->failure);
    }
    for (const int64_t n : {int64_t{0}, incoming.maps[0].count / 2, incoming.maps[0].count}) {
      const Status waited = cache_->transfer()->WaitReceived(epoch, n, *MachineTime(), 0);
      const Status expected = model_.WaitReceived(incoming.maps[1].epoch, n, *MachineTime(), 0);
      if (error.empty()) error = Compare("WaitReceived", waited, expected);
    }
    if (!error.empty()) return error + ", of epoch " + std::to_string(epoch);
    at = ours.ok() ? std::next(at) : incoming_.erase(at);
  }
  return "";
}

// ---------------------------------------------------------------------- calls

std::string Walker::Reserve(int64_t id, int64_t count, uint64_t* epoch) {
  Incoming incoming;
  incoming.id = id;
  *epoch = 0;
  QUIRE_WALK_TAKE("DisaggPrepareRecv", status, model_.TakenByReceive(id, count),
                  [&](AttentionKVCache& c) {
                    const Result<ReceiveMap> map = c.transfer()->DisaggPrepareRecv(id, count);
                    if (map.ok()) incoming.maps[SideOf(c)] = *map;
                    return map.status();
                  });
  if (!status.ok()) return "";
  const ReceiveMap& map = incoming.maps[0];
  const ReceiveMap& model = incoming.maps[1];
  if (map.first_position != model.first_position || map.count != count ||
      map.kv_heads != model.kv_heads)
    return "the map is not the model's";
  const Result<std::vector<int64_t>> slots = DecodeSlots(map.slots, count);
  if (!slots.ok() || std::ssize(*slots) != count) return "the map has no slot for each token";
  const std::set<int64_t> apart(slots->begin(), slots->end());
  if (std::ssize(apart) != count || *apart.begin() < 0) return "the map has a slot twice, or none";
  incoming.tokens.resize(static_cast<size_t>(count));
  *epoch = map.epoch;
  incoming_.emplace(map.epoch, std::move(incoming));
  return "";
}

// Mostly as is; now and then something is wrong with it, or a token is not to be stored.
std::string Walker::MarkSend(int64_t id, const Outgoing& outgoing, RandomSequence& random,
                             bool* marked) {
  *marked = false;
  int64_t begin = outgoing.begin;
  std::array<std::vector<ReceiveMap>, 2> maps;
  const int64_t wrong = random.Below(80);
  const int64_t left_out = wrong == 5 || wrong == 6 ? random.Below(4) : -1;
  for (const uint64_t epoch : outgoing.epochs) {
    const Incoming& incoming = other_->incoming_.at(epoch);
    for (size_t side = 0; side < 2; ++side) {
      ReceiveMap map = incoming.maps[side];
      BreakMap(&map, wrong);
      if (left_out >= 0 && left_out < map.count) map.slots = SlotsWithout(left_out, map.count);
      maps[side].push_back(std::move(map));
    }
  }
  if (wrong == 7) begin = random.Below(2) - 1;
  for (std::vector<ReceiveMap>& side : maps) {
    if (wrong == 8) side.pop_back();
    if (wrong == 9 && !side.empty()) side.push_back(side[0]);
  }
  const int64_t rank = wrong == 10 ? -1 : outgoing.rank;
  const int64_t first_row = wrong == 11 ? 100 * random.Below(2) - 1 : outgoing.first_row;
  QUIRE_WALK_CALL("DisaggMarkSend", status, [&](AttentionKVCache& c) {
    return c.transfer()->DisaggMarkSend(id, begin, maps[SideOf(c)], kFirstPeer, rank, first_row);
  });
  if (!status.ok()) return "";
  outgoing_[id] = outgoing;
  outgoing_[id].begin = begin;
  *marked = true;
  return "";
}

std::string Walker::Unmark(int64_t id) {
  QUIRE_WALK_CALL("DisaggUnmarkSend", status,
                  [&](AttentionKVCache& c) { return c.transfer()->DisaggUnmarkSend(id); });
  return "";
}

std::string Walker::Detach(int64_t id, int64_t* sent) {
  int64_t rows[2] = {0, 0};
  QUIRE_WALK_CALL("DisaggDetachSend", status, [&](AttentionKVCache& c) {
    const Result<int64_t> result = c.transfer()->DisaggDetachSend(id);
    if (result.ok()) rows[SideOf(c)] = *result;
    return result.status();
  });
  *sent = status.ok() ? rows[0] : -1;
  return Differ("tokens that a mark has sent", rows[0], rows[1]);
}

// What it answers with may be the end of the mark, which changes the state.
std::string Walker::Flush(int64_t id) {
  const Status ours = cache_->transfer()->DisaggFlushSend(id);
  ++seen_["DisaggFlushSend"][ours.code()];
  return Compare("DisaggFlushSend", ours, model_.DisaggFlushSend(id));
}

std::string Walker::Cancel(uint64_t epoch) {
  const auto found = incoming_.find(epoch);
  const uint64_t models = found == incoming_.end() ? epoch : found->second.maps[1].epoch;
  QUIRE_WALK_CALL("DisaggCancelRecv", status, [&](AttentionKVCache& c) {
    return c.transfer()->DisaggCancelRecv(SideOf(c) == 0 ? epoch : models);
  });
  return CompareIncoming();
}

std::string Walker::Commit(uint64_t epoch, int64_t n) {
  const auto found = incoming_.find(epoch);
  const uint64_t models = found == incoming_.end() ? epoch : found->second.maps[1].epoch;
  QUIRE_WALK_CALL("DisaggCommitRecv", status, [&](AttentionKVCache& c) {
    return c.transfer()->DisaggCommitRecv(SideOf(c) == 0 ? epoch : models, n);
  });
  if (!status.ok()) return "";
  const Incoming& incoming = found->second;
  for (int64_t row = 0; row < n; ++row) {
    if (!HasToken(incoming, row)) return "a token is complete that was never sent";
    history_.at(incoming.id).push_back(TokenOf(incoming, row));
    joined_tokens_ += other_->setting_.halved_layers != 0;
  }
  received_tokens_ += n;
  past_features_[incoming.id].AddIf(n > 0, Feature::kReceived);
  return CompareIncoming();
}

// ---------------------------------------------------------------------- what is drawn

bool Walker::rotates_keys() const {
  return setting_.options.rope.mode == RopeMode::kNormal || CountOf(true) > 0;
}

// Neither a tree nor pending tokens, nor retained, nor in the open forward.
bool Walker::IsPlain(int64_t id) const {
  return retained_.count(id) == 0 && trees_.count(id) == 0 && !(open_ && before_.count(id) != 0) &&
         *model_.GetSequenceLength(id) == std::ssize(history_.at(id));
}

// Mostly one that may send, where it has half of the heads together with another one.
int64_t Walker::DrawSender(size_t senders, RandomSequence& random) const {
  std::vector<int64_t> plain;
  for (const auto& [id, history] : history_) {
    if (IsPlain(id) && !SendersLike(id, senders).empty()) plain.push_back(id);
  }
  if (plain.empty() || random.Below(12) == 0) return PickId(static_cast<uint32_t>(random.Bits()));
  return plain[static_cast<size_t>(random.Below(std::ssize(plain)))];
}

// From there on a sequence's tokens are held in all layers.
int64_t Walker::FirstHeld(int64_t id) {
  int64_t first = std::ssize(history_.at(id));
  const auto is_held = [&](int64_t position) {
    for (size_t l = 0; l < layers_.size(); ++l) {
      const StoredRows rows(layers_[l], 1);
      if (!model_.ExportKV(id, static_cast<int64_t>(l), position, rows.view()).ok()) return false;
    }
    return true;
  };
  if (!setting_.has_windows || !IsPlain(id)) return 0;
  while (first > 0 && is_held(first - 1)) --first;
  return first;
}

std::string Walker::AddReceiver(bool long_factors, RandomSequence& random,
                                std::vector<int64_t>* ids) {
  const bool full = model_.sequence_count() - model_.retained_sequence_count() ==
                    setting_.options.max_num_sequences;
  if (full && !history_.empty()) {
    const int64_t victim = PickId(16 * static_cast<uint32_t>(random.Below(1000)) + 1);
    const bool is_needed = std::ranges::find(*ids, victim) != ids->end();
    if (std::string error = is_needed ? "" : RemoveId(victim); !error.empty()) return error;
  }
  int64_t id = 0;
  while (id < setting_.id_count && history_.count(id) != 0) ++id;
  if (id == setting_.id_count) return "";
  if (std::string error = Add({Kind::kAdd, static_cast<uint32_t>(id), 1, 0}); !error.empty())
    return error;
  if (history_.count(id) == 0) return "";
  ids->push_back(id);
  if (long_factors_.at(id) == long_factors || !HasLongSet(setting_.options.rope.scaling)) return "";
  QUIRE_WALK_CALL("SelectLongRope", status,
                  [&](AttentionKVCache& c) { return c.SelectLongRope(id, long_factors); });
  if (status.ok()) long_factors_[id] = long_factors;
  return "";
}

// Sequences for the sender's tokens: mostly what is there and long; where this cache has half of
// the heads, two of equal length.
std::string Walker::DrawReceivers(int64_t from, int64_t held, RandomSequence& random,
                                  std::vector<int64_t>* ids) {
  const int64_t length = std::ssize(other_->history_.at(from));
  const size_t wanted = setting_.halved_layers != 0 ? 2 : 1;
  const auto length_of = [&](int64_t id) { return std::ssize(history_.at(id)); };
  std::vector<int64_t> fitting;
  for (const auto& [id, history] : history_) {
    const bool fits = IsPlain(id) && long_factors_.at(id) == other_->long_factors_.at(from) &&
                      (!rotates_keys() || (held <= length_of(id) && length_of(id) <= length));
    if (fits) fitting.push_back(id);
  }
  if (!fitting.empty() && random.Below(8) < 5) {
    const bool takes_longest = random.Below(2) == 0;
    int64_t id = fitting[static_cast<size_t>(random.Below(std::ssize(fitting)))];
    if (takes_longest) id = *std::ranges::max_element(fitting, {}, length_of);
    for (const int64_t other : fitting) {
      if (ids->size() + 1 < wanted && other != id && length_of(other) == length_of(id))
        ids->push_back(other);
    }
    ids->push_back(id);
    if (ids->size() == wanted) return "";
    ids->clear();
  }
  if (rotates_keys() && held > 0 && random.Below(8) != 0) return "";
  std::string error;
  for (size_t i = 0; i < wanted && error.empty(); ++i)
    error = AddReceiver(other_->long_factors_.at(from), random, ids);
  if (ids->size() != wanted) ids->clear();
  return error;
}

// Senders of this cache that together have all heads of tokens: `from` alone, or with the one that
// has the other half of most of them.
std::vector<int64_t> Walker::SendersLike(int64_t from, size_t count) const {
  if (count == 1) return {from};
  const auto number = [&](const KnownToken& token) { return WholeToken(token.number); };
  const History& history = history_.at(from);
  int64_t best = -1;
  int64_t most = 0;
  for (const auto& [id, other] : history_) {
    if (id == from || !IsPlain(id) || other.empty() || history.empty()) continue;
    if (other[0].number == history[0].number) continue;  // the same half
    const auto meet = std::ranges::mismatch(history, other, {}, number, number);
    const int64_t common = meet.in1 - history.begin();
    if (common > most) {
      best = id;
      most = common;
    }
  }
  if (best < 0) return {};
  // The first is to have the first half.
  const bool is_second =
      history[0].number != HalfToken(number(history[0]), setting_.halved_layers, 0);
  if (is_second) return {best, from};
  return {from, best};
}

// Leaves two halves of the same tokens alone.
std::string Walker::PopToCommon(const std::vector<int64_t>& ids, bool* done) {
  const auto number = [](const KnownToken& token) { return WholeToken(token.number); };
  const History& first = history_.at(ids[0]);
  const int64_t common =
      std::ranges::mismatch(first, history_.at(ids.back()), {}, number, number).in1 - first.begin();
  *done = true;
  for (const int64_t id : ids) {
    const int64_t n = std::ssize(history_.at(id)) - common;
    if (std::string error = PopTokens(id, n); !error.empty()) return error;
    *done &= std::ssize(history_.at(id)) == common;  // else what a query would see has slid away
  }
  return "";
}

// Nothing is open here any more, mostly.
std::string Walker::Settle(RandomSequence& random) {
  if (!open_ || random.Below(10) == 0) return "";
  const auto draw = [&] { return static_cast<uint32_t>(random.Bits()); };
  return call_failed_ ? Abort() : RunRest({Kind::kForward, draw(), draw(), draw()});
}

// A mark of it is not full.
bool Walker::IsSending(int64_t id) const {
  const Result<SendProgress> progress = model_.GetSendProgress(id);
  return progress.ok() && progress->active;
}

// Tokens of one that is marked: mostly a plain forward, else nodes of a tree, or loaded ones, which
// by themselves would seldom meet a mark.
std::string Walker::SendingForward(int64_t id, RandomSequence& random) {
  const auto draw = [&] { return static_cast<uint32_t>(random.Bits()); };
  const WalkOp op = {Kind::kForward, draw(), draw(), draw()};
  // Few at a time where there are windows, so that more of them slide before the map is full.
  const int64_t most =
      std::min<int64_t>(setting_.has_windows ? 4 : 12, setting_.options.prefill_chunk_size);
  const Batch batch = {{id}, {1 + random.Below(most)}};
  const int64_t kind = random.Below(8);
  if (kind == 0) return LoadFromFork(id, true, random, op);
  if (kind < 3 || trees_.count(id) != 0) {
    std::string error = TreeOf(batch, random, op);
    if (error.empty() && !open_ && trees_.count(id) != 0) error = TreeOf(batch, random, op);
    if (!error.empty() || open_ || random.Below(4) == 0) return error;
    return CommitTrees({Kind::kCommit, draw(), draw(), draw()});
  }
  std::string error = BeginBatch(batch, op);
  return error.empty() && open_ ? RunRest(op) : error;
}

// The sequences' next tokens, computed or only flushed.
std::string Walker::SendSome(const std::vector<int64_t>& ids, RandomSequence& random) {
  const int64_t forwards = ids.size() == 1 ? random.Below(setting_.has_windows ? 8 : 4) : 0;
  std::string error;
  for (int64_t i = 0; i < forwards && error.empty() && history_.count(ids[0]) != 0; ++i) {
    error = SendingForward(ids[0], random);
    if (error.empty() && open_) error = Settle(random);
  }
  for (const int64_t id : ids) {
    if (error.empty() && (forwards == 0 || random.Below(4) == 0)) error = Flush(id);
  }
  return error;
}

std::string Walker::Transfer(const WalkOp& op) {
  RandomSequence random(op.a, op.b);
  const auto draw = [&] { return static_cast<uint32_t>(random.Bits()); };
  std::string error = Settle(random);
  if (error.empty()) error = other_->Settle(random);
  if (!error.empty()) return error;
  if (random.Below(24) == 0) {  // whatever comes
    uint64_t epoch = 0;
    return Reserve(PickId(draw()), random.Below(4) - 1, &epoch);
  }
  const size_t sender_count = other_->setting_.halved_layers != 0 ? 2 : 1;
  const int64_t from = other_->DrawSender(sender_count, random);
  if (other_->history_.count(from) == 0) return "";
  if (!other_->IsPlain(from) && random.Below(4) != 0) return "";
  const std::vector<int64_t> senders = other_->SendersLike(from, sender_count);
  if (senders.empty()) return other_->Transfer(op);  // first there must be such
  const bool joins = senders.size() == 2;
  bool agree = true;
  if (joins) error = other_->PopToCommon(senders, &agree);
  if (!error.empty() || !agree) return error;
  std::vector<int64_t> receivers;
  const int64_t held = other_->FirstHeld(from);
  error = DrawReceivers(from, held, random, &receivers);
  if (!error.empty() || receivers.empty()) return error;

  for (size_t i = 0; setting_.halved_layers != 0 && i < receivers.size(); ++i) {
    if (history_.at(receivers[i]).empty()) halves_[receivers[i]] = static_cast<int64_t>(i);
  }
  const int64_t length = std::ssize(other_->history_.at(from));
  const int64_t first = std::ssize(history_.at(receivers[0]));
  const int64_t begin = rotates_keys() ? first : held + random.Below(length - held + 1);
  const int64_t behind = random.Below(3) == 0 ? 60 : 12;
  const int64_t left = random.Below(4) == 0 ? 0 : 1 + random.Below(behind);
  const int64_t count = std::max<int64_t>(1, std::max<int64_t>(length - begin, 0) + left);
  std::vector<uint64_t> epochs;
  for (const int64_t id : receivers) {
    epochs.push_back(0);
    error = Reserve(id, count, &epochs.back());
    if (!error.empty()) return error;
    if (epochs.back() != 0) continue;
    for (const uint64_t epoch : epochs) {
      if (error.empty() && epoch != 0) error = Cancel(epoch);
    }
    return error.empty() && setting_.evicts ? Remove(op) : error;
  }
  std::vector<int64_t> marked;
  for (size_t i = 0; i < senders.size() && error.empty(); ++i) {
    const int64_t rank = 2 * random.Below(2) + static_cast<int64_t>(i);
    bool done = false;
    error = other_->MarkSend(senders[i], {begin, rank, epochs}, random, &done);
    if (done) marked.push_back(senders[i]);
  }
  if (error.empty() && !marked.empty()) error = other_->SendSome(marked, random);
  if (error.empty()) error = CompareIncoming();
  for (const int64_t id : marked) {  // from here on the two halves may go apart
    if (error.empty() && (joins || random.Below(3) == 0)) error = other_->Unmark(id);
  }
  if (!error.empty() || (!marked.empty() && random.Below(4) == 0)) return error;
  for (const uint64_t epoch : epochs) {
    if (error.empty()) error = FinishReceive(epoch, random);
  }
  return error;
}

// Commits what has come, mostly.
std::string Walker::FinishReceive(uint64_t epoch, RandomSequence& random) {
  const auto found = incoming_.find(epoch);
  if (found == incoming_.end() || random.Below(12) == 0) return Cancel(epoch);
  const std::vector<int64_t> rows =
      model_.GetReceiveProgress(found->second.maps[1].epoch)->layer_rows;
  int64_t complete = 0;
  while (complete < std::ranges::min(rows) && HasToken(found->second, complete)) ++complete;
  const int64_t style = random.Below(10);
  if (style == 0) return Commit(epoch, complete + 1);
  if (style == 1) return Commit(epoch, random.Below(2) == 0 ? -1 : found->second.maps[0].count + 1);
  return Commit(epoch, style == 2 ? random.Below(complete + 1) : complete);
}

std::string Walker::Receive(const WalkOp& op) {
  RandomSequence random(op.a, op.b);
  if (incoming_.empty() || random.Below(16) == 0) {  // an epoch that there never was
    const uint64_t epoch = uint64_t{1} << 60;
    return random.Below(2) == 0 ? Cancel(epoch) : Commit(epoch, 1);
  }
  const auto found = std::next(incoming_.begin(), random.Below(std::ssize(incoming_)));
  return FinishReceive(found->first, random);
}

// The mark goes without a word; another one goes on where it was.
std::string Walker::Resume(int64_t id, RandomSequence& random) {
  int64_t sent = 0;
  std::string error = Detach(id, &sent);
  if (!error.empty() || sent < 0 || setting_.halved_layers != 0) return error;
  Outgoing outgoing = outgoing_.at(id);
  const bool is_there = std::ranges::all_of(
      outgoing.epochs, [&](uint64_t epoch) { return other_->incoming_.count(epoch) != 0; });
  if (!is_there || random.Below(8) == 0) return error;
  outgoing.first_row = sent;
  bool marked = false;
  return MarkSend(id, outgoing, random, &marked);
}

std::string Walker::Send(const WalkOp& op) {
  RandomSequence random(op.a, op.b);
  std::vector<int64_t> ids;
  for (const auto& [id, outgoing] : outgoing_) ids.push_back(id);
  const int64_t id = ids.empty() || random.Below(16) == 0
                         ? PickId(static_cast<uint32_t>(random.Bits()))
                         : ids[static_cast<size_t>(random.Below(std::ssize(ids)))];
  const int64_t kind = random.Below(8);
  if (kind == 1) return Unmark(id);
  if (kind == 5) return Resume(id, random);
  if (kind == 2) {
    QUIRE_WALK_CALL("SetLayerSink", status, [&](AttentionKVCache& c) {
      const size_t side = SideOf(c);
      return c.transfer()->SetLayerSink(
          std::make_shared<Sink>(side == 0 ? this : nullptr, channels_[side]));
    });
    return "";
  }
  if (kind == 3) {  // nobody is there
    for (const auto& channel : channels_) {
      for (int64_t peer = kFirstPeer; peer < kFirstPeer + kPeerCount; ++peer)
        static_cast<void>(channel->Disconnect(peer));
    }
    const std::string error = Flush(id);
    ConnectPeers();
    return error;
  }
  if (kind == 4 && outgoing_.count(id) != 0 &&
      setting_.halved_layers == 0) {  // the same mark once more
    const Outgoing outgoing = outgoing_.at(id);
    const bool is_there = std::ranges::all_of(
        outgoing.epochs, [&](uint64_t epoch) { return other_->incoming_.count(epoch) != 0; });
    bool marked = false;
    return is_there ? MarkSend(id, outgoing, random, &marked) : "";
  }
  return Flush(id);
}

}  // namespace quire::kv_walk
