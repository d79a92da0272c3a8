// Where the walk's operations on one state are, and its naive model's: a sequence is its list of
// tokens and, per recurrent part, the set of positions whose state is held.
#include "kv/testing/composite_walker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "base/checksum.h"
#include "kv/recurrent/state_history.h"

namespace quire::composite_walk {
namespace {

constexpr int64_t kInterval = kRecurrentCheckpointInterval;

// What the caller's recurrence makes of these tokens.
int64_t CallersState(const Tokens& tokens, int64_t length, int64_t layer) {
  if (length == 0) return 0;  // the initial state
  return static_cast<int64_t>(Hash64(tokens.data(), static_cast<size_t>(length) * sizeof(uint64_t),
                                     static_cast<uint64_t>(layer)));
}

}  // namespace

WalkSetting DrawSetting(RandomSequence& random) {
  WalkSetting setting;
  const int64_t which = random.Below(6);
  setting.with_rnn = which != 1 && which != 2;
  setting.with_cache = which != 0 && which != 3;
  setting.with_attention = which >= 2;
  setting.cache_first = random.Below(2) == 0;
  setting.longest_append = random.Below(2) == 0 ? 90 : 8;
  setting.rnn.num_layers = 1 + random.Below(2);
  setting.rnn.states = {{.shape = {2}, .dtype = DType::kI64}};
  setting.rnn.max_num_sequences = 5;
  setting.rnn.max_history = 1 + random.Below(4);
  setting.rnn.max_checkpoints = random.Below(4);
  setting.rnn.max_retained_slots = 1000;
  setting.rnn.poison_freed_slots = true;
  setting.cache.layers = AllRecurrentKinds();
  setting.cache.max_num_sequences = 5;
  setting.cache.prefill_chunk_size = 300;
  setting.cache.recent_checkpoints = 1 + random.Below(3);
  setting.cache.thinned_checkpoints = random.Below(3);
  setting.cache.max_retained_slots = 1000;
  setting.cache.runner = std::make_shared<SerialRunner>();
  setting.cache.poison_freed_slots = true;
  setting.attention.layers = {{2, 1, 4, 4, DType::kF32}};
  setting.attention.max_num_sequences = 5;
  setting.attention.prefill_chunk_size = 250;
  setting.attention.page_size = 16;
  setting.attention.token_capacity = random.Below(2) == 0 ? 5000 : 400;  // few: OutOfPages
  setting.attention.runner = setting.cache.runner;
  setting.attention.poison_freed_pages = true;
  return setting;
}

WalkSetting DrawPeerSetting(const WalkSetting& setting, RandomSequence& random) {
  WalkSetting peer = setting;
  peer.longest_append = random.Below(2) == 0 ? 90 : 8;
  peer.rnn.max_history = 1 + random.Below(4);
  peer.rnn.max_checkpoints = random.Below(4);
  peer.cache.recent_checkpoints = 1 + random.Below(3);
  peer.cache.thinned_checkpoints = random.Below(3);
  peer.attention.page_size = random.Below(2) == 0 ? 16 : 4;
  peer.attention.token_capacity = random.Below(2) == 0 ? 5000 : 400;
  return peer;
}

CompositeWalk::CompositeWalk(const WalkSetting& setting, uint64_t seed)
    : random_(seed), setting_(setting), alone_(*RecurrentCache::Create(AloneOptions())) {
  CompositeState::Parts parts;
  if (setting_.with_attention) {
    attention_ = *AttentionKVCache::Create(setting_.attention);
    parts.attention = attention_;
  }
  if (setting_.with_rnn) {
    rnn_ = *RNNState::Create(setting_.rnn);
    parts.recurrent.push_back(rnn_);
    tensor_parts_.assign(static_cast<size_t>(setting_.rnn.num_layers), Part::kRnn);
  }
  if (setting_.with_cache) {
    cache_ = *RecurrentCache::Create(setting_.cache);
    parts.recurrent.push_back(cache_);
    tensor_parts_.insert(tensor_parts_.end(), setting_.cache.layers.size(), Part::kCache);
  }
  if (setting_.cache_first) {
    std::ranges::reverse(parts.recurrent);
    std::ranges::reverse(tensor_parts_);
  }
  state_ = *CompositeState::Create(parts);
}

RecurrentCacheOptions CompositeWalk::AloneOptions() const {
  RecurrentCacheOptions options = setting_.cache;
  options.prefill_chunk_size = 100000;
  return options;
}

void CompositeWalk::Step() {
  switch (random_.Below(other_ == nullptr ? 13 : 19)) {
    case 0:
    case 1:
      return Add();
    case 2:
      return Remove();
    case 3:
    case 4:
      return Fork();
    case 5:
    case 6:
      return Pop();
    case 7:
      return random_.Below(4) == 0 ? Retain() : Forward();
    case 8:
      return random_.Below(12) == 0 ? Clear() : Add();
    case 9:
    case 10:
    case 11:
    case 12:
      return Forward();
    default:
      return TransferStep();
  }
}

// Compares a status with what the model expects; true if the call worked.
bool CompositeWalk::Expect(const Status& status, StatusCode expected, uint64_t digest) {
  EXPECT_EQ(status.code(), expected) << status.ToString();
  if (status.ok()) return true;
  ++refusal_count_;
  EXPECT_EQ(state_->StateDigest(), digest) << status.ToString();
  return false;
}

bool CompositeWalk::IsMember(int64_t id) const {
  return std::find(batch_.begin(), batch_.end(), id) != batch_.end();
}

bool CompositeWalk::Full() const {
  return std::count_if(model_.begin(), model_.end(),
                       [](const auto& entry) { return !entry.second.retained; }) >= 5;
}

bool CompositeWalk::Reaches(const ModelSequence& s, int64_t position) const {
  return (!setting_.with_rnn || s.rnn.Reaches(position, s.length(), false)) &&
         (!setting_.with_cache || s.cache.Reaches(position, s.length(), true));
}

void CompositeWalk::Add() { AddId(AnyId()); }

void CompositeWalk::AddId(int64_t id) {
  const uint64_t digest = state_->StateDigest();
  const StatusCode expected = Known(id) ? StatusCode::kSequenceExists
                              : Full()  ? StatusCode::kTooLarge
                                        : StatusCode::kOk;
  if (Expect(state_->AddSequence(id), expected, digest)) model_[id] = {};
}

StatusCode CompositeWalk::OfOutsider(int64_t id) const {
  if (!Known(id)) return StatusCode::kUnknownSequence;
  return IsMember(id) ? StatusCode::kBadState : StatusCode::kOk;
}

void CompositeWalk::Remove() { RemoveId(AnyId()); }

void CompositeWalk::RemoveId(int64_t id) {
  const uint64_t digest = state_->StateDigest();
  if (!Expect(state_->RemoveSequence(id), OfOutsider(id), digest)) return;
  DropMark(id);
  EndReceiveOf(id);
  model_.erase(id);
}

void CompositeWalk::Clear() {
  ASSERT_TRUE(state_->Clear().ok());
  while (!marks_.empty()) DropMark(marks_.begin()->first);
  receives_.clear();
  model_.clear();
  batch_.clear();
}

int64_t CompositeWalk::DrawPosition(int64_t length) {
  if (random_.Below(2) == 0) return std::max<int64_t>(0, length - random_.Below(10));
  return random_.Below(length + 1);
}

void CompositeWalk::CutTo(HeldStates& held, int64_t position, bool has_inputs) {
  held.ends.erase(held.ends.upper_bound(position), held.ends.end());
  held.checkpoints.erase(held.checkpoints.upper_bound(position), held.checkpoints.end());
  if (!has_inputs || position > held.input_start) return;
  held.input_start = position;
  if (position > 0) held.checkpoints.insert(position);
}

void CompositeWalk::CutTo(ModelSequence& s, int64_t position) {
  s.tokens.resize(static_cast<size_t>(position));
  s.kv.resize(static_cast<size_t>(position));
  CutTo(s.rnn, position, false);
  CutTo(s.cache, position, true);
}

void CompositeWalk::Fork() {
  const int64_t parent = AnyId();
  const int64_t child = AnyId();
  int64_t position = Known(parent) ? DrawPosition(model_[parent].length()) : 3;
  if (random_.Below(4) == 0) position = -1;
  if (random_.Below(20) == 0) position = 100000;
  const uint64_t digest = state_->StateDigest();
  StatusCode expected = OfOutsider(parent);
  const int64_t at = position < 0 && Known(parent) ? model_[parent].length() : position;
  if (expected == StatusCode::kOk) {
    if (Known(child)) {
      expected = StatusCode::kSequenceExists;
    } else if (Full()) {
      expected = StatusCode::kTooLarge;
    } else if (position > model_[parent].length()) {
      expected = StatusCode::kBadArgument;
    } else if (!Reaches(model_[parent], at)) {
      expected = StatusCode::kNeedsReplay;
      ExpectReplayStart(parent, at);
    }
  }
  if (!Expect(state_->ForkSequence(parent, child, position), expected, digest)) return;
  ModelSequence copy = model_[parent];
  copy.retained = false;
  CutTo(copy, at);
  model_[child] = copy;
  cut_id_ = child;
}

void CompositeWalk::Pop() {
  const int64_t id = AnyId();
  PopTokens(id,
            Known(id) ? model_[id].length() - DrawPosition(model_[id].length()) : random_.Below(3));
}

void CompositeWalk::PopTokens(int64_t id, int64_t n) {
  const uint64_t digest = state_->StateDigest();
  StatusCode expected = OfOutsider(id);
  if (expected == StatusCode::kOk && !Reaches(model_[id], model_[id].length() - n)) {
    expected = StatusCode::kNeedsReplay;
    ExpectReplayStart(id, model_[id].length() - n);
  }
  if (!Expect(state_->PopN(id, n), expected, digest)) return;
  CutTo(model_[id], model_[id].length() - n);
  if (n > 0) EndReceiveOf(id);
  CutMark(id);
  cut_id_ = id;
}

void CompositeWalk::ExpectReplayStart(int64_t id, int64_t position) {
  ++replay_count_;
  int64_t start = position;
  while (!Reaches(model_[id], start)) --start;
  EXPECT_EQ(state_->ReplayStart(id, position).value(), start);
}

void CompositeWalk::Retain() {
  const int64_t id = AnyId();
  const bool retained = random_.Below(3) == 0;
  const uint64_t digest = state_->StateDigest();
  StatusCode expected = OfOutsider(id);
  if (expected == StatusCode::kOk && retained && IsPending(id)) expected = StatusCode::kBadState;
  if (expected == StatusCode::kOk && !retained && model_[id].retained && Full())
    expected = StatusCode::kTooLarge;
  if (!Expect(state_->SetRetained(id, retained), expected, digest)) return;
  ModelSequence& s = model_[id];
  if (retained && !s.retained) {
    const int64_t length = s.length();
    if (s.rnn.ends.count(length) != 0) {
      s.rnn.ends = {length};
    } else {
      s.rnn.ends.clear();
    }
    s.cache.input_start = length;
    if (length > 0) s.cache.checkpoints.insert(length);
  }
  s.retained = retained;
}

// ---- forwards

void CompositeWalk::Forward() {
  Ids ids;
  Ids lengths;
  for (int64_t i = random_.Below(3); i >= 0; --i) {
    const int64_t id = AnyId();
    if (std::find(ids.begin(), ids.end(), id) != ids.end()) continue;
    if (!Known(id) && random_.Below(10) != 0) continue;
    if (IsPending(id) && random_.Below(10) != 0) continue;
    ids.push_back(id);
    lengths.push_back(1 + random_.Below(random_.Below(3) == 0 ? setting_.longest_append : 3));
  }
  if (!ids.empty()) ForwardOf(ids, lengths);
}

void CompositeWalk::ForwardOf(const Ids& ids, const Ids& lengths) {
  const uint64_t digest = state_->StateDigest();
  const StatusCode expected = ExpectedOfForward(ids, lengths);
  if (!Expect(state_->BeginForward(ids, lengths), expected, digest)) return;
  batch_ = ids;
  if (other_ != nullptr && random_.Below(12) == 0)
    Refuse(random_.Below(std::ssize(tensor_parts_) + (setting_.with_attention ? 1 : 0)));
  std::vector<Tokens> tokens;
  Tokens all;
  for (const int64_t length : lengths) {
    tokens.emplace_back();
    for (int64_t i = 0; i < length; ++i) tokens.back().push_back(next_token_++ % 97);
    all.insert(all.end(), tokens.back().begin(), tokens.back().end());
  }
  const bool aborts = random_.Below(5) == 0;
  std::vector<std::set<int64_t>> added(ids.size());
  RunLayers(tokens, all, added, aborts);
  if (testing::Test::HasFatalFailure()) return;
  if (aborts) {
    ASSERT_TRUE(state_->AbortForward().ok());
  } else {
    ASSERT_TRUE(state_->EndForward().ok());
    for (size_t m = 0; m < ids.size(); ++m) Extend(model_[ids[m]], tokens[m], added[m]);
  }
  batch_.clear();
  for (const int64_t id : ids) FinishRows(id, !aborts);
  for (const auto& [id, mark] : marks_) {
    if (!aborts) SendStates(id);
  }
  Refuse(-1);
}

StatusCode CompositeWalk::ExpectedOfForward(const Ids& ids, const Ids& lengths) const {
  int64_t total = 0;
  for (size_t m = 0; m < ids.size(); ++m) {
    if (IsPending(ids[m])) return StatusCode::kBadState;
    total += lengths[m];
  }
  for (const int64_t id : ids) {
    if (!Known(id)) return StatusCode::kUnknownSequence;
    if (model_.at(id).retained) return StatusCode::kBadState;
  }
  if (!setting_.with_attention) return StatusCode::kOk;
  if (total > setting_.attention.prefill_chunk_size) return StatusCode::kTooLarge;
  const bool fits =
      attention_->PagesNeeded(ids, lengths).value() <= attention_->GetNumAvailablePages();
  return fits ? StatusCode::kOk : StatusCode::kOutOfPages;
}

// All layers of all parts; when the forward will be aborted, some of them only. Between them,
// control calls for others, and ends that come too early.
void CompositeWalk::RunLayers(const std::vector<Tokens>& tokens, const Tokens& all,
                              std::vector<std::set<int64_t>>& added, bool aborts) {
  const uint64_t digest = state_->StateDigest();
  Expect(state_->EndForward(), StatusCode::kBadState, digest);
  Expect(state_->BeginForward(batch_, Ids(batch_.size(), 1)), StatusCode::kBadState, digest);
  if (random_.Below(3) == 0) {
    for (int i = 0; i < 3; ++i) {
      random_.Below(2) == 0 ? Fork() : Pop();
      random_.Below(2) == 0 ? Remove() : Add();
    }
    if (other_ != nullptr) TransferInForward();
  }
  if (setting_.with_attention) {
    LayerOutputs outputs;
    ASSERT_TRUE(RunLayer(*attention_, setting_.attention.layers[0], 0, all, {}, &outputs).ok());
    for (size_t m = 0; m < batch_.size(); ++m)
      GiveRows(batch_[m], model_[batch_[m]].length() + std::ssize(tokens[m]));
  }
  if (other_ != nullptr && random_.Below(6) == 0) other_->Settle(other_->AnyEpoch());
  if (setting_.with_rnn) RunRnn(tokens, added);
  if (aborts && random_.Below(2) == 0) return;
  if (!setting_.with_cache) return;
  RecurrentOutputs outputs;
  ASSERT_TRUE(RunRecurrentLayers(*cache_, all, &outputs).ok());
  CheckOutputs(tokens, outputs);
}

void CompositeWalk::RunRnn(const std::vector<Tokens>& tokens,
                           std::vector<std::set<int64_t>>& added) {
  Ids rows;
  Ids lengths;  // of the sequence at that row
  std::vector<size_t> members;
  int64_t first_row = 0;
  for (size_t m = 0; m < tokens.size(); ++m) {
    const int64_t base = model_[batch_[m]].length();
    const int64_t count = static_cast<int64_t>(tokens[m].size());
    for (int64_t i = random_.Below(setting_.rnn.max_checkpoints + 1); i > 0 && count > 1; --i)
      added[m].insert(base + 1 + random_.Below(count - 1));
    std::set<int64_t> positions = added[m];
    positions.insert(base + count);
    for (const int64_t position : positions) {
      rows.push_back(first_row + position - base - 1);
      lengths.push_back(position);
      members.push_back(m);
    }
    first_row += count;
  }
  for (int64_t layer = 0; layer < setting_.rnn.num_layers; ++layer) {
    std::vector<int64_t> got(2 * tokens.size());
    const TensorView o(got.data(), DType::kI64, {static_cast<int64_t>(tokens.size()), 2});
    ASSERT_TRUE(rnn_->Get(layer, 0, o).ok());
    std::vector<int64_t> data;
    for (size_t i = 0; i < rows.size(); ++i) {
      Tokens whole = model_[batch_[members[i]]].tokens;
      EXPECT_EQ(got[2 * members[i]],
                CallersState(whole, static_cast<int64_t>(whole.size()), layer));
      whole.insert(whole.end(), tokens[members[i]].begin(), tokens[members[i]].end());
      data.push_back(CallersState(whole, lengths[i], layer));
      data.push_back(lengths[i]);
    }
    const TensorView view(data.data(), DType::kI64, {static_cast<int64_t>(rows.size()), 2});
    ASSERT_TRUE(rnn_->SetAt(layer, 0, rows, view).ok());
  }
}

void CompositeWalk::CheckOutputs(const std::vector<Tokens>& tokens,
                                 const RecurrentOutputs& outputs) {
  size_t row = 0;
  for (size_t m = 0; m < tokens.size(); ++m) {
    Tokens whole = model_[batch_[m]].tokens;
    whole.insert(whole.end(), tokens[m].begin(), tokens[m].end());
    RecurrentOutputs alone;
    RunAlone(whole, &alone);
    for (size_t l = 0; l < outputs.size(); ++l) {
      const size_t size = static_cast<size_t>(OutputSize(setting_.cache.layers[l]));
      const size_t count = tokens[m].size() * size;
      ASSERT_EQ(0, std::memcmp(outputs[l].data() + row * size,
                               alone[l].data() + alone[l].size() - count, count * sizeof(float)))
          << "layer " << l << " of sequence " << batch_[m];
    }
    row += tokens[m].size();
  }
}

std::vector<float> CompositeWalk::RunAlone(const Tokens& tokens, RecurrentOutputs* outputs) {
  EXPECT_TRUE(alone_->AddSequence(0).ok());
  if (!tokens.empty()) {
    EXPECT_TRUE(RunRecurrentForward(*alone_, Ids{0}, {tokens}, outputs).ok());
  }
  std::vector<float> states = StatesOf(*alone_, 0);
  EXPECT_TRUE(alone_->RemoveSequence(0).ok());
  return states;
}

void CompositeWalk::Extend(ModelSequence& s, const Tokens& tokens, const std::set<int64_t>& added) {
  const int64_t base = s.length();
  s.tokens.insert(s.tokens.end(), tokens.begin(), tokens.end());
  s.kv.insert(s.kv.end(), tokens.begin(), tokens.end());
  const int64_t end = s.length();
  s.rnn.ends.insert(end);
  while (static_cast<int64_t>(s.rnn.ends.size()) > setting_.rnn.max_history)
    s.rnn.ends.erase(s.rnn.ends.begin());
  s.rnn.checkpoints.insert(added.begin(), added.end());
  std::vector<int64_t> kept(s.rnn.checkpoints.begin(), s.rnn.checkpoints.end());
  ThinPositions(kept, setting_.rnn.max_checkpoints, end);
  s.rnn.checkpoints = {kept.begin(), kept.end()};
  ExtendCache(s.cache, base, end);
}

void CompositeWalk::ExtendCache(HeldStates& held, int64_t base, int64_t end) const {
  for (int64_t p = base + 1; p <= end; ++p) {
    if (p % kInterval == 0) held.checkpoints.insert(p);
  }
  std::vector<int64_t> recent;
  std::vector<int64_t> older;
  const size_t recent_max = static_cast<size_t>(setting_.cache.recent_checkpoints);
  const std::vector<int64_t> all(held.checkpoints.begin(), held.checkpoints.end());
  for (size_t i = 0; i < all.size(); ++i) {
    if (i + recent_max >= all.size()) {
      recent.push_back(all[i]);
    } else {
      older.push_back(all[i]);
      ThinPositions(older, setting_.cache.thinned_checkpoints, end);
    }
  }
  if (recent.size() == recent_max) held.input_start = std::max(held.input_start, recent.front());
  held.checkpoints = {older.begin(), older.end()};
  held.checkpoints.insert(recent.begin(), recent.end());
}

// ---- what can be observed of all sequences

void CompositeWalk::CheckAll() {
  ASSERT_EQ(state_->sequence_count(), static_cast<int64_t>(model_.size()));
  for (const auto& [id, s] : model_) {
    ASSERT_EQ(state_->GetSequenceLength(id).value(), s.length()) << id;
    if (setting_.with_attention) {
      CheckKV(id, s);
    }
    if (setting_.with_rnn) {
      ASSERT_EQ(rnn_->GetSequenceLength(id).value(), s.length());
      for (int64_t layer = 0; layer < setting_.rnn.num_layers; ++layer) {
        int64_t got[2] = {-1, -1};
        ASSERT_TRUE(rnn_->DebugGet(layer, 0, id, TensorView(got, DType::kI64, {2})).ok());
        ASSERT_EQ(got[0], CallersState(s.tokens, s.length(), layer)) << id;
        ASSERT_EQ(got[1], s.length());
      }
    }
  }
  if (!setting_.with_cache || model_.empty()) return;
  // One of them each time, the one that was cut if any: computing the states again takes
  // the longest.
  auto any = model_.find(cut_id_);
  if (any == model_.end()) {
    any = model_.begin();
    std::advance(any, random_.Below(static_cast<int64_t>(model_.size())));
  }
  cut_id_ = -1;
  const std::vector<float> expected = RunAlone(any->second.tokens, nullptr);
  const std::vector<float> states = StatesOf(*cache_, any->first);
  ASSERT_EQ(states.size(), expected.size());
  ASSERT_EQ(0, std::memcmp(states.data(), expected.data(), states.size() * sizeof(float)))
      << any->first;
}

void CompositeWalk::CheckKV(int64_t id, const ModelSequence& s) {
  const auto pending =
      std::ranges::find_if(receives_, [&](const auto& entry) { return entry.second.seq_id == id; });
  const int64_t reserved = pending == receives_.end() ? 0 : pending->second.map.count;
  ASSERT_EQ(attention_->GetSequenceLength(id).value(), s.length() + reserved) << id;
  if (s.length() == 0) return;
  const AttentionLayerSpec& spec = setting_.attention.layers[0];
  const StoredRows rows(spec, s.length());
  ASSERT_TRUE(attention_->ExportKV(id, 0, 0, rows.view()).ok());
  const TokenInputs inputs = MakeTokenInputs(spec, 0, spec.dtype, s.kv);
  ASSERT_TRUE(std::ranges::equal(rows.k.bytes(), inputs.k.bytes())) << id;
  ASSERT_TRUE(std::ranges::equal(rows.v.bytes(), inputs.v.bytes())) << id;
}

void CompositeWalk::Check() {
  const Status sound = state_->CheckInvariants();
  ASSERT_TRUE(sound.ok()) << sound.ToString();
  CheckAll();
  if (!testing::Test::HasFatalFailure()) CheckTransfers();
}

}  // namespace quire::composite_walk
