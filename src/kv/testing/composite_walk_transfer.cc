// The part of the composite walks in which tokens and states go from one state to another
// (CompositeState::transfer()), and its model: which rows and states a reservation has and of which
// tokens, and how far a mark is. Keys and values go as the attention part's layers are run, states
// when a forward has ended.
#include <gtest/gtest.h>

#include <algorithm>

#include "kv/testing/composite_walker.h"

namespace quire::composite_walk {
namespace {

constexpr int64_t kPeer = 7;

void BreakMap(ReceiveMap* map, int64_t how) {
  if (how == 0) map->layout ^= 1;
  if (how == 1) map->kv_heads.back() = 5;
  if (how == 2) map->kv_heads.pop_back();
  if (how == 3) map->slots.pop_back();
  if (how == 4) map->count = 0;
}

// All slots of a map but one.
std::vector<int64_t> SlotsWithout(int64_t row, int64_t count) {
  std::vector<int64_t> slots = {row > 0 ? 2 : 1};
  if (row > 0) slots.insert(slots.end(), {0, row});
  slots.insert(slots.end(), {-1, 1});
  if (row + 1 == count) return slots;
  ++slots[0];
  slots.insert(slots.end(), {row + 1, count - row - 1});
  return slots;
}

}  // namespace

void CompositeWalk::ConnectTo(CompositeWalk* other) {
  other_ = other;
  ASSERT_TRUE(channel_->Connect(kPeer, other->state_->transfer()).ok());
  ASSERT_TRUE(state_->transfer()->SetLayerSink(sink_).ok());
}

CompositeWalk::~CompositeWalk() { static_cast<void>(channel_->Disconnect(kPeer)); }

// ---------------------------------------------------------------------- what is drawn

void CompositeWalk::TransferStep() {
  switch (random_.Below(8)) {
    case 0:
      Reserve(AnyId(), random_.Below(10) - 1);
      return;
    case 1:
      return MarkSend(AnyId(), other_->AnyEpoch());
    case 2: {
      const int64_t kind = random_.Below(5);
      if (kind == 0) return Unmark(AnyMarked());
      if (kind == 4) return Resume(AnyMarked());
      return kind == 1 ? MarkAgain(AnyMarked()) : Flush(AnyMarked());
    }
    case 3:
    case 4:
      return Settle(AnyEpoch());
    default:
      return Transfer();
  }
}

// One sequence to the other state: a reservation, a mark, forwards that mostly end where the map
// does, a commit.
void CompositeWalk::Transfer() {
  const int64_t from = AnyId();
  if (!Known(from) || model_[from].retained || IsPending(from)) return Forward();
  const int64_t to = other_->DrawReceiver(model_[from].length());
  if (to < 0) return;
  const int64_t begin = other_->model_[to].length();
  const int64_t stored = std::max<int64_t>(model_[from].length() - begin, 0);
  const uint64_t epoch =
      other_->Reserve(to, stored + random_.Below(random_.Below(3) == 0 ? 60 : 6));
  if (epoch == 0) return;
  MarkSend(from, epoch);
  for (int64_t i = random_.Below(4); i > 0 && Known(from); --i) {
    const auto mark = marks_.find(from);
    const int64_t left = mark == marks_.end() ? 0 : mark->second.end - model_[from].length();
    const bool fills = left > 0 && left < 100 && random_.Below(2) == 0;
    ForwardOf({from}, {fills ? left : 1 + random_.Below(5)});
    if (testing::Test::HasFatalFailure()) return;
  }
  if (random_.Below(4) == 0) Flush(from);
  if (random_.Below(4) != 0) other_->Settle(epoch);
}

// Mostly one that has tokens, and as many as the sender has or fewer.
int64_t CompositeWalk::DrawReceiver(int64_t longest) {
  std::vector<int64_t> fitting;
  for (const auto& [id, s] : model_) {
    if (!s.retained && !IsPending(id) && s.length() <= longest) fitting.push_back(id);
  }
  if (!fitting.empty() && random_.Below(4) != 0)
    return fitting[static_cast<size_t>(random_.Below(std::ssize(fitting)))];
  if (Full()) RemoveId(AnyId());
  const int64_t id = AnyId();
  if (Known(id)) return -1;
  AddId(id);
  return Known(id) ? id : -1;
}

uint64_t CompositeWalk::AnyEpoch() {
  if (receives_.empty() || random_.Below(12) == 0) return ended_epoch_;
  return std::next(receives_.begin(), random_.Below(std::ssize(receives_)))->first;
}

int64_t CompositeWalk::AnyMarked() {
  if (marks_.empty() || random_.Below(12) == 0) return AnyId();
  return std::next(marks_.begin(), random_.Below(std::ssize(marks_)))->first;
}

// Commits what has come, mostly.
void CompositeWalk::Settle(uint64_t epoch) {
  const auto found = receives_.find(epoch);
  const int64_t kind = random_.Below(10);
  if (kind == 0) return Cancel(epoch);
  if (found == receives_.end() || kind < 3) return Commit(epoch, random_.Below(10) - 1);
  const int64_t rows = found->second.arrivals.back().rows();
  if (rows > 0) Commit(epoch, rows);
}

// All that a forward forbids, and what it does not.
void CompositeWalk::TransferInForward() {
  const uint64_t digest = state_->StateDigest();
  KVTransfer& transfer = *state_->transfer();
  const int64_t id = AnyMarked();
  const ReceiveMap map;
  Reserve(id, 3);
  Expect(transfer.SetLayerSink(sink_), StatusCode::kBadState, digest);
  Expect(transfer.DisaggMarkSend(id, 0, std::span(&map, 1), kPeer, 0), StatusCode::kBadState,
         digest);
  Unmark(id);
  Flush(id);
  Commit(AnyEpoch(), 1 + random_.Below(5));
  if (random_.Below(3) == 0) Cancel(AnyEpoch());
}

// ---------------------------------------------------------------------- receiving

bool CompositeWalk::IsPending(int64_t id) const {
  return std::ranges::any_of(receives_,
                             [&](const auto& entry) { return entry.second.seq_id == id; });
}

StatusCode CompositeWalk::ExpectedOfReserve(int64_t id, int64_t count) const {
  if (!batch_.empty()) return StatusCode::kBadState;
  if (!Known(id)) return StatusCode::kUnknownSequence;
  if (IsPending(id)) return StatusCode::kBadState;
  if (count < 1) return StatusCode::kBadArgument;
  const ModelSequence& s = model_.at(id);
  if (s.retained) return StatusCode::kBadState;
  if (!setting_.with_attention) return StatusCode::kOk;
  const int64_t page = setting_.attention.page_size;
  const int64_t pages = (s.length() + count - 1) / page - s.length() / page + 1;
  const bool fits = pages <= attention_->GetNumAvailablePages();
  return fits ? StatusCode::kOk : StatusCode::kOutOfPages;
}

uint64_t CompositeWalk::Reserve(int64_t id, int64_t count) {
  const uint64_t digest = state_->StateDigest();
  const StatusCode expected = ExpectedOfReserve(id, count);
  const Result<ReceiveMap> map = state_->transfer()->DisaggPrepareRecv(id, count);
  if (!Expect(map.status(), expected, digest)) return 0;
  EXPECT_EQ(map->first_position, model_[id].length());
  EXPECT_EQ(map->count, count);
  const std::vector<int64_t> heads(tensor_parts_.size() + (setting_.with_attention ? 1 : 0), 1);
  EXPECT_EQ(map->kv_heads, heads);
  ModelReceive& receive = receives_[map->epoch];
  receive.seq_id = id;
  receive.first_position = model_[id].length();
  receive.map = *map;
  receive.rows.resize(static_cast<size_t>(count));
  receive.arrivals.resize(tensor_parts_.size());
  return map->epoch;
}

StatusCode CompositeWalk::ExpectedOfCommit(uint64_t epoch, int64_t n) const {
  if (!batch_.empty() && n != 0) return StatusCode::kBadState;
  const auto found = receives_.find(epoch);
  if (found == receives_.end()) return StatusCode::kNotFound;
  const ModelReceive& receive = found->second;
  if (n < 0 || n > receive.map.count) return StatusCode::kBadArgument;
  if (n == 0) return StatusCode::kOk;
  const bool has_states = std::ranges::all_of(
      receive.arrivals, [&](const ModelArrival& arrival) { return arrival.rows() == n; });
  const bool has_rows = !setting_.with_attention ||
                        std::ranges::all_of(std::span(receive.rows).first(static_cast<size_t>(n)),
                                            [](const auto& row) { return row.has_value(); });
  return has_states && has_rows ? StatusCode::kOk : StatusCode::kBadState;
}

void CompositeWalk::Commit(uint64_t epoch, int64_t n) {
  const uint64_t digest = state_->StateDigest();
  const StatusCode expected = ExpectedOfCommit(epoch, n);
  if (!Expect(state_->transfer()->DisaggCommitRecv(epoch, n), expected, digest)) return;
  if (n == 0) return EndReceive(epoch);
  const ModelReceive& receive = receives_[epoch];
  ModelSequence& s = model_[receive.seq_id];
  // Its earlier states are forgotten: they could be of other tokens.
  s.tokens = receive.arrivals[0].tokens;
  s.rnn = {.ends = {s.length()}, .checkpoints = {}};
  s.cache = {.ends = {}, .checkpoints = {s.length()}, .input_start = s.length()};
  for (int64_t row = 0; row < n; ++row)
    s.kv.push_back(receive.rows[static_cast<size_t>(row)].value_or(0));
  cut_id_ = receive.seq_id;
  ++committed_count_;
  EndReceive(epoch);
}

void CompositeWalk::Cancel(uint64_t epoch) {
  const uint64_t digest = state_->StateDigest();
  const StatusCode expected = receives_.count(epoch) != 0 ? StatusCode::kOk : StatusCode::kNotFound;
  if (Expect(state_->transfer()->DisaggCancelRecv(epoch), expected, digest)) EndReceive(epoch);
}

void CompositeWalk::EndReceive(uint64_t epoch) {
  receives_.erase(epoch);
  ended_epoch_ = epoch;
}

void CompositeWalk::EndReceiveOf(int64_t id) {
  std::erase_if(receives_, [&](const auto& entry) { return entry.second.seq_id == id; });
}

// ---------------------------------------------------------------------- marks

StatusCode CompositeWalk::ExpectedOfMark(int64_t id, int64_t begin, const ReceiveMap& map,
                                         size_t map_count) const {
  if (!Known(id)) return StatusCode::kUnknownSequence;
  if (map_count != 1 || begin < 0) return StatusCode::kBadArgument;
  const std::vector<int64_t> heads(tensor_parts_.size() + (setting_.with_attention ? 1 : 0), 1);
  if (map.kv_heads != heads) return StatusCode::kIncompatible;
  const uint64_t layout = other_->receives_.at(map.epoch).map.layout;
  if (!setting_.with_attention && map.layout != layout) return StatusCode::kIncompatible;
  if (map.first_position != begin) return StatusCode::kIncompatible;
  if (map.count < 1) return StatusCode::kBadArgument;
  const Result<std::vector<int64_t>> slots = DecodeSlots(map.slots, map.count);
  if (!slots.ok() || std::ssize(*slots) != map.count) return StatusCode::kBadArgument;
  return map.layout == layout ? StatusCode::kOk : StatusCode::kIncompatible;
}

// Mostly as the map is; now and then something is wrong with it, or a token is not to be stored.
void CompositeWalk::MarkSend(int64_t id, uint64_t epoch, int64_t first_row) {
  const auto found = other_->receives_.find(epoch);
  if (found == other_->receives_.end()) return;
  const bool is_taken = std::ranges::any_of(marks_, [&](const auto& entry) {
    return entry.first != id && entry.second.epoch == epoch && entry.second.active();
  });
  if (is_taken) return;  // two senders that share a reservation send the same tokens
  ReceiveMap map = found->second.map;
  const int64_t wrong = random_.Below(80);
  BreakMap(&map, wrong);
  const int64_t left_out = wrong == 5 || wrong == 6 ? random_.Below(map.count) : -1;
  if (left_out >= 0) map.slots = SlotsWithout(left_out, map.count);
  const int64_t begin = wrong == 7 ? random_.Below(2) - 1 : map.first_position;
  std::vector<ReceiveMap> maps = {map};
  if (wrong == 8) maps.clear();
  if (wrong == 9) maps.push_back(map);
  const uint64_t digest = state_->StateDigest();
  StatusCode expected = ExpectedOfMark(id, begin, map, maps.size());
  if (wrong == 10) first_row = -1;
  if (wrong == 11) first_row = map.count;
  if (expected == StatusCode::kOk && (first_row < 0 || first_row >= map.count))
    expected = StatusCode::kBadArgument;
  if (!Expect(state_->transfer()->DisaggMarkSend(id, begin, maps, kPeer, 0, first_row), expected,
              digest))
    return;
  const auto old = marks_.find(id);
  if (old != marks_.end() && old->second.epoch == epoch) marks_.erase(old);  // it goes on
  DropMark(id);
  marks_[id] = {.begin = begin,
                .end = begin + map.count,
                .epoch = epoch,
                .left_out = left_out,
                .next = begin + first_row,
                .sent = first_row == 0 ? 0 : begin + first_row,
                .has_rows = setting_.with_attention};
}

// To the same reservation, from an earlier end on: what was sent before is sent again.
void CompositeWalk::MarkAgain(int64_t id) {
  const auto found = marks_.find(id);
  if (found == marks_.end() || ReceiverOf(found->second) == nullptr) return Flush(id);
  const ModelMark mark = found->second;
  const int64_t length = model_[id].length();
  const int64_t least = std::min(mark.begin, length);
  PopTokens(id, length - least - random_.Below(std::min(length, mark.end - 1) - least + 1));
  MarkSend(id, mark.epoch);
  const int64_t left = mark.end - model_[id].length();
  if (left > 0 && left < 100 && random_.Below(2) == 0) ForwardOf({id}, {left});
}

void CompositeWalk::Unmark(int64_t id) {
  const uint64_t digest = state_->StateDigest();
  const StatusCode expected = !batch_.empty()         ? StatusCode::kBadState
                              : !Known(id)            ? StatusCode::kUnknownSequence
                              : marks_.count(id) == 0 ? StatusCode::kNotFound
                                                      : StatusCode::kOk;
  if (Expect(state_->transfer()->DisaggUnmarkSend(id), expected, digest)) DropMark(id);
}

// The mark goes without a word to its receiver, and another one goes on where it was.
void CompositeWalk::Resume(int64_t id) {
  const uint64_t digest = state_->StateDigest();
  const auto found = marks_.find(id);
  const StatusCode expected = !batch_.empty()         ? StatusCode::kBadState
                              : !Known(id)            ? StatusCode::kUnknownSequence
                              : found == marks_.end() ? StatusCode::kNotFound
                                                      : found->second.failure;
  const Result<int64_t> sent = state_->transfer()->DisaggDetachSend(id);
  if (!Expect(sent.status(), expected, digest)) return;
  const ModelMark mark = found->second;
  const int64_t states = std::max<int64_t>(mark.sent - mark.begin, 0);
  EXPECT_EQ(*sent, setting_.with_attention ? std::min(states, mark.next - mark.begin) : states);
  marks_.erase(found);
  if (random_.Below(8) != 0) MarkSend(id, mark.epoch, *sent);
}

// What it answers with may be the end of the mark, which changes the state. Now and then nobody is
// connected.
void CompositeWalk::Flush(int64_t id) {
  is_cut_off_ = batch_.empty() && random_.Below(16) == 0;
  if (is_cut_off_) {
    ASSERT_TRUE(channel_->Disconnect(kPeer).ok());
  }
  const Status status = state_->transfer()->DisaggFlushSend(id);
  EXPECT_EQ(status.code(), FlushModel(id)) << status.ToString();
  if (!is_cut_off_) return;
  is_cut_off_ = false;
  ASSERT_TRUE(channel_->Connect(kPeer, other_->state_->transfer()).ok());
}

StatusCode CompositeWalk::FlushModel(int64_t id) {
  if (!batch_.empty()) return StatusCode::kBadState;
  if (!Known(id)) return StatusCode::kUnknownSequence;
  const auto found = marks_.find(id);
  if (found == marks_.end()) return StatusCode::kNotFound;
  if (setting_.with_attention) {
    GiveRows(id, model_[id].length());
    FinishRows(id, true);
  }
  SendStates(id);
  return found->second.failure;
}

// It goes, and with it what its receiver could still hope for.
void CompositeWalk::DropMark(int64_t id) {
  const auto found = marks_.find(id);
  if (found == marks_.end()) return;
  if (found->second.active()) Stop(found->second, StatusCode::kCancelled);
  marks_.erase(found);
}

// The sequence was cut: what is computed again is sent again.
void CompositeWalk::CutMark(int64_t id) {
  const auto found = marks_.find(id);
  if (found == marks_.end()) return;
  ModelMark& mark = found->second;
  const int64_t length = model_[id].length();
  mark.next = std::max(mark.begin, std::min(mark.next, length));
  if (length < mark.sent) mark.sent = 0;
}

// ---------------------------------------------------------------------- sending

// Null: the reservation is over.
ModelReceive* CompositeWalk::ReceiverOf(const ModelMark& mark) {
  const auto found = other_->receives_.find(mark.epoch);
  return found == other_->receives_.end() ? nullptr : &found->second;
}

// The outcome of what is given to the channel.
StatusCode CompositeWalk::ViewOutcome(const ModelMark& mark) {
  if (is_cut_off_) return StatusCode::kUnavailable;
  return ReceiverOf(mark) == nullptr ? StatusCode::kNotFound : StatusCode::kOk;
}

// The sink does not take what is given of this layer; -1: it takes all.
void CompositeWalk::Refuse(int64_t layer) {
  refused_layer_ = sink_->layer = layer;
  sink_->refusal = layer < 0 ? Status() : Status(StatusCode::kUnavailable, "refused");
}

StatusCode CompositeWalk::GiveOutcome(const ModelMark& mark, int64_t layer) {
  return layer == refused_layer_ ? StatusCode::kUnavailable : ViewOutcome(mark);
}

void CompositeWalk::Stop(ModelMark& mark, StatusCode why) {
  ModelReceive* const receive = ReceiverOf(mark);
  if (receive != nullptr && !is_cut_off_ && receive->failure == StatusCode::kOk)
    receive->failure = why;
  mark.failure = why;
}

// A layer of keys and values was appended to: those up to `end` are given, and count no more until
// the forward ends.
void CompositeWalk::GiveRows(int64_t id, int64_t end) {
  const auto found = marks_.find(id);
  if (found == marks_.end() || found->second.failure != StatusCode::kOk) return;
  ModelMark& mark = found->second;
  end = std::min(end, mark.end);
  if (mark.next >= end) return;
  mark.given = end;
  for (int64_t p = mark.next; p < end; ++p) {
    if (p - mark.begin == mark.left_out) continue;
    mark.failure = GiveOutcome(mark, 0);
    if (mark.failure != StatusCode::kOk) return;
    ReceiverOf(mark)->rows[static_cast<size_t>(p - mark.begin)].reset();
  }
}

void CompositeWalk::FinishRows(int64_t id, bool ended) {
  const auto found = marks_.find(id);
  if (found == marks_.end() || found->second.given == 0) return;
  ModelMark& mark = found->second;
  const int64_t given = std::exchange(mark.given, 0);
  const bool counts = ended && mark.failure == StatusCode::kOk;
  if (counts && is_cut_off_) mark.failure = StatusCode::kUnavailable;
  for (int64_t p = mark.next; p < given && counts; ++p) {
    if (mark.failure != StatusCode::kOk || p - mark.begin == mark.left_out) continue;
    mark.failure = ViewOutcome(mark);  // it may be over since the rows were given
    if (mark.failure != StatusCode::kOk) break;
    ReceiverOf(mark)->rows[static_cast<size_t>(p - mark.begin)] =
        model_[id].kv[static_cast<size_t>(p)];
  }
  if (mark.failure != StatusCode::kOk) {
    ++stopped_count_;
    Stop(mark, mark.failure);
  } else if (counts) {
    mark.next = given;
  }
}

// Without computing it from inputs.
bool CompositeWalk::HoldsState(Part part, const ModelSequence& s, int64_t position) const {
  return (part == Part::kRnn ? s.rnn : s.cache).Reaches(position, s.length(), false);
}

// Those at the sequence's end, or at the map's if it is behind that: one tensor after the other,
// and they count together.
void CompositeWalk::SendStates(int64_t id) {
  ModelMark& mark = marks_.at(id);
  if (!mark.active()) return;
  const ModelSequence& s = model_.at(id);
  const int64_t position = std::min(s.length(), mark.end);
  if (position <= std::max(mark.begin, mark.sent)) return;
  const int64_t row = position - 1 - mark.begin;
  const int64_t first_layer = setting_.with_attention ? 1 : 0;
  for (size_t t = 0; t < tensor_parts_.size() && row != mark.left_out; ++t) {
    const StatusCode outcome = HoldsState(tensor_parts_[t], s, position)
                                   ? GiveOutcome(mark, first_layer + static_cast<int64_t>(t))
                                   : StatusCode::kNeedsReplay;
    if (outcome != StatusCode::kOk) {
      ++stopped_count_;
      return Stop(mark, outcome);
    }
    ReceiverOf(mark)->arrivals[t] = {.row = row};
  }
  if (row != mark.left_out && ReceiverOf(mark) != nullptr) {
    for (ModelArrival& arrival : ReceiverOf(mark)->arrivals) {
      arrival.complete = true;
      arrival.tokens.assign(s.tokens.begin(), s.tokens.begin() + position);
    }
  }
  mark.sent = position;
}

// ---------------------------------------------------------------------- what can be observed

StatusCode CompositeWalk::ExpectedOfWait(const ModelReceive& receive, int64_t n) const {
  const StatusCode not_here =
      receive.failure == StatusCode::kOk ? StatusCode::kTimeout : receive.failure;
  if (n < 0 || n > receive.map.count) return StatusCode::kBadArgument;
  for (int64_t row = 0; row < n && setting_.with_attention; ++row) {
    if (!receive.rows[static_cast<size_t>(row)].has_value()) return not_here;
  }
  const bool has_states = std::ranges::all_of(
      receive.arrivals, [&](const ModelArrival& arrival) { return arrival.rows() >= n; });
  return has_states ? StatusCode::kOk : not_here;
}

void CompositeWalk::CheckReceive(uint64_t epoch, const ModelReceive& receive) {
  const KVTransfer& transfer = *state_->transfer();
  const Result<ReceiveProgress> progress = transfer.GetReceiveProgress(epoch);
  ASSERT_TRUE(progress.ok()) << progress.status().ToString();
  ASSERT_EQ(progress->count, receive.map.count);
  ASSERT_EQ(progress->failure.code(), receive.failure) << progress->failure.ToString();
  std::vector<int64_t> rows;
  if (setting_.with_attention) {
    rows.push_back(
        std::ranges::count_if(receive.rows, [](const auto& row) { return row.has_value(); }));
  }
  for (const ModelArrival& arrival : receive.arrivals) rows.push_back(arrival.rows());
  ASSERT_EQ(progress->layer_rows, rows);
  int64_t complete = receive.arrivals[0].rows();
  for (const ModelArrival& arrival : receive.arrivals) {
    if (arrival.rows() != complete) complete = 0;
  }
  for (int64_t row = 0; row < complete && setting_.with_attention; ++row) {
    if (!receive.rows[static_cast<size_t>(row)].has_value()) complete = 0;
  }
  ASSERT_EQ(progress->complete, complete);
  for (const int64_t n :
       {int64_t{0}, int64_t{1}, rows.back(), receive.map.count, receive.map.count + 1}) {
    const Status waited = transfer.WaitReceived(epoch, n, *MachineTime(), 0);
    ASSERT_EQ(waited.code(), ExpectedOfWait(receive, n)) << n << ": " << waited.ToString();
  }
}

void CompositeWalk::CheckMark(int64_t id, const ModelMark& mark) {
  const Result<SendProgress> progress = state_->transfer()->GetSendProgress(id);
  ASSERT_TRUE(progress.ok()) << progress.status().ToString();
  ASSERT_EQ(progress->failure.code(), mark.failure) << progress->failure.ToString();
  ASSERT_EQ(progress->active, mark.active())
      << "sent " << progress->sent << " of " << progress->count << " from " << progress->begin
      << "; the model: rows to " << mark.next << ", states at " << mark.sent;
  ASSERT_EQ(progress->begin, mark.begin);
  ASSERT_EQ(progress->count, mark.end - mark.begin);
  if (mark.failure != StatusCode::kOk) return;
  int64_t sent = std::max<int64_t>(mark.sent - mark.begin, 0);
  if (setting_.with_attention) sent = std::min(sent, mark.next - mark.begin);
  ASSERT_EQ(progress->sent, sent);
}

void CompositeWalk::CheckTransfers() {
  for (const auto& [epoch, receive] : receives_) {
    SCOPED_TRACE("epoch " + std::to_string(epoch));
    CheckReceive(epoch, receive);
  }
  for (const auto& [id, mark] : marks_) {
    SCOPED_TRACE("mark of " + std::to_string(id));
    CheckMark(id, mark);
  }
  const KVTransfer& transfer = *state_->transfer();
  ASSERT_EQ(transfer.GetReceiveProgress(ended_epoch_).status().code(), StatusCode::kNotFound);
  ASSERT_EQ(transfer.WaitReceived(ended_epoch_, 1, *MachineTime(), 0).code(),
            StatusCode::kCancelled);
}

}  // namespace quire::composite_walk
