#include "kv/testing/state_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <sstream>

#include "base/testing/fake_clock.h"

namespace quire {
namespace {

constexpr const char* kStateNames[kStateCount] = {
    "idle", "chain", "tree", "uncommitted", "loading", "pending", "failed", "retained", "sending"};

// Arguments that outlive a call.
template <int64_t... kValues>
constexpr std::array<int64_t, sizeof...(kValues)> kIds = {kValues...};

}  // namespace

char LetterOf(const Status& status) {
  constexpr std::pair<StatusCode, char> kLetters[] = {
      {StatusCode::kOk, 'o'},          {StatusCode::kBadState, 'S'},
      {StatusCode::kBadArgument, 'A'}, {StatusCode::kNotFound, 'N'},
      {StatusCode::kNeedsReplay, 'R'}, {StatusCode::kIncompatible, 'I'},
      {StatusCode::kTimeout, 'T'},     {StatusCode::kCancelled, 'C'},
      {StatusCode::kTooLarge, 'L'},    {StatusCode::kFull, 'F'},
      {StatusCode::kOutOfMemory, 'M'}, {StatusCode::kIoError, 'E'},
      {StatusCode::kClosed, 'X'},      {StatusCode::kUnknownSequence, 'U'}};
  for (const auto& [code, letter] : kLetters) {
    if (status.code() == code) return letter;
  }
  return '?';
}

std::string MethodOf(const std::string& call) { return call.substr(0, call.find(':')); }

// Declarations begin at a line's start; a class ends where another begins.
std::set<std::string> MethodsOf(const std::string& header, const std::string& name,
                                const std::string& keyword) {
  const std::string begins = keyword + " ";
  std::ifstream file(std::string(QUIRE_PUBLIC_HEADERS) + "/" + header);
  EXPECT_TRUE(file.good()) << header;
  std::set<std::string> methods;
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("class ") || line.starts_with("struct ")) {
      std::istringstream words(line);
      std::string kind, declared;
      words >> kind >> declared;
      inside = declared == name;
    }
    const size_t begin = line.find_first_not_of(' ');
    if (!inside || begin == std::string::npos) continue;
    if (line.compare(begin, begins.size(), begins) != 0) continue;
    const size_t end = line.find('(');
    const size_t first = line.find_last_of(" ~>", end) + 1;
    if (line[first - 1] != '~') methods.insert(line.substr(first, end - first));
  }
  EXPECT_FALSE(methods.empty()) << name << " in " << header;
  return methods;
}

namespace {

void ExpectCell(const SceneFactory& make, const TableRow& row, int column, char expected) {
  const auto scene = make(static_cast<At>(column));
  ASSERT_NE(scene, nullptr);
  TableCalls calls = scene->Calls();
  const TableCall& call = calls.at(row.call);
  if (call.prepare != nullptr) call.prepare();
  const uint64_t digest = scene->StateDigest();
  const Status status = call.run();
  EXPECT_EQ(LetterOf(status), expected) << status.ToString();
  const bool kept = status.ok() || scene->StateDigest() == digest;
  EXPECT_TRUE(kept) << "a refused call has changed the state: " << status.ToString();
  const Status sound = scene->CheckInvariants();
  EXPECT_TRUE(sound.ok()) << sound.ToString();
  const Status cleared = scene->state().Clear();
  EXPECT_TRUE(cleared.ok()) << cleared.ToString();
  EXPECT_TRUE(scene->IsEmpty());
}

}  // namespace

void AddStateCalls(KVState& s, TableCalls* calls) {
  TableCalls& c = *calls;
  c["Clear"] = {[&] { return s.Clear(); }};
  c["AddSequence"] = {[&] { return s.AddSequence(kNew); }};
  c["RemoveSequence"] = {[&] { return s.RemoveSequence(kSubject); }};
  c["RemoveSequence: another"] = {[&] { return s.RemoveSequence(kOther); }};
  c["ForkSequence"] = {[&] { return s.ForkSequence(kSubject, kNew, -1); }};
  c["ForkSequence: at its tokens' end"] = {
      [&] { return s.ForkSequence(kSubject, kNew, kSubjectLength); }};
  c["ForkSequence: another"] = {[&] { return s.ForkSequence(kOther, kNew, -1); }};
  c["PopN"] = {[&] { return s.PopN(kSubject, kNewRows); }};
  c["PopN: nothing"] = {[&] { return s.PopN(kSubject, 0); }};
  c["PopN: another"] = {[&] { return s.PopN(kOther, kOtherLength); }};
  c["BeginForward"] = {[&] { return s.BeginForward(kIds<kSubject>, kIds<2>); }};
  c["BeginForward: another"] = {[&] { return s.BeginForward(kIds<kOther>, kIds<2>); }};
  c["BeginTreeForward"] = {
      [&] { return s.BeginTreeForward(kIds<kSubject>, kIds<2>, kIds<-1, 0>); }};
  c["BeginTreeForward: another"] = {
      [&] { return s.BeginTreeForward(kIds<kOther>, kIds<2>, kIds<-1, 0>); }};
  c["CommitAcceptedTokenTreeNodes"] = {
      [&] { return s.CommitAcceptedTokenTreeNodes(kIds<kSubject>, kIds<1>); }};
  c["CommitAcceptedTokenTreeNodes: none"] = {
      [&] { return s.CommitAcceptedTokenTreeNodes(kIds<kSubject>, kIds<-1>); }};
  c["GetTreeSize"] = {[&] { return Answered(s.GetTreeSize(kSubject)); }};
  c["EndForward"] = {[&] { return s.EndForward(); }};
  c["AbortForward"] = {[&] { return s.AbortForward(); }};
}

void AddTransferCalls(const TransferArguments& a, TableCalls* calls) {
  TableCalls& c = *calls;
  KVTransfer& t = *a.transfer;
  const ReceivePart part{.first_row = 0, .count = 1, .first_head = 0, .head_count = 1};
  const auto store = [&t, part](uint64_t epoch) -> Status {
    QUIRE_ASSIGN_OR_RETURN(const ReceiveView view, t.View(epoch, 0, part));
    for (const TensorView* tensor : {&view.rows.k, &view.rows.v}) {
      if (tensor->rank() > 0) std::fill_n(tensor->data_as<float>(), tensor->element_count(), 0.5F);
    }
    return t.Store(epoch, 0, part, view, DigestOfHeads(view.rows, 0, 1));
  };
  c["DisaggPrepareRecv"] = {[&t] { return Answered(t.DisaggPrepareRecv(kSubject, 2)); }};
  c["DisaggPrepareRecv: another"] = {[&t] { return Answered(t.DisaggPrepareRecv(kOther, 2)); }};
  c["DisaggCommitRecv"] = {[&t, a] { return t.DisaggCommitRecv(a.own, 2); }};
  c["DisaggCommitRecv: another"] = {[&t, a] { return t.DisaggCommitRecv(a.arrived, 2); }};
  c["DisaggCommitRecv: nothing"] = {[&t, a] { return t.DisaggCommitRecv(a.own, 0); }};
  c["DisaggCancelRecv"] = {[&t, a] { return t.DisaggCancelRecv(a.own); }};
  c["DisaggCancelRecv: another"] = {[&t, a] { return t.DisaggCancelRecv(a.arrived); }};
  c["View"] = {[&t, a, part] { return Answered(t.View(a.own, 0, part)); }};
  c["View: another"] = {[&t, a, part] { return Answered(t.View(a.arrived, 0, part)); }};
  c["Store"] = {[a, store] { return store(a.own); }};
  c["Store: another"] = {[a, store] { return store(a.arrived); }};
  c["Complete"] = {[&t, a, part, store]() -> Status {
    QUIRE_RETURN_IF_ERROR(store(a.own));
    return t.Complete(a.own, 0, part);
  }};
  c["Complete: another"] = {[&t, a, part] { return t.Complete(a.arrived, 0, part); }};
  const Status lost(StatusCode::kIoError, "the channel is gone");
  c["FailReceive"] = {[&t, a, lost] { return t.FailReceive(a.own, lost); }};
  c["FailReceive: another"] = {[&t, a, lost] { return t.FailReceive(a.arrived, lost); }};
  c["GetReceiveProgress"] = {[&t, a] { return Answered(t.GetReceiveProgress(a.own)); }};
  c["GetReceiveProgress: another"] = {
      [&t, a] { return Answered(t.GetReceiveProgress(a.arrived)); }};
  c["WaitReceived"] = {[&t, a] {
    const auto clock = std::make_shared<FakeClock>();
    return t.WaitReceived(a.own, 2, *clock, 0);
  }};
  c["WaitReceived: another"] = {[&t, a] {
    const auto clock = std::make_shared<FakeClock>();
    return t.WaitReceived(a.arrived, 2, *clock, std::numeric_limits<int64_t>::max());
  }};
  c["staging"] = {[&t] {
    return t.staging().limit > 0 ? Status() : Status(StatusCode::kInternal, "there is none");
  }};
  c["SetStagingLimit"] = {[&t] { return t.SetStagingLimit(1 << 16); }};
  c["SetLayerSink"] = {[&t] { return t.SetLayerSink(nullptr); }};
  c["DisaggMarkSend"] = {
      [&t, a] { return t.DisaggMarkSend(kSubject, 0, std::span(a.map, 1), 6, 0); }};
  c["DisaggMarkSend: another"] = {
      [&t, a] { return t.DisaggMarkSend(kOther, 0, std::span(a.map, 1), 6, 0); }};
  c["DisaggUnmarkSend"] = {[&t] { return t.DisaggUnmarkSend(kSubject); }};
  c["DisaggDetachSend"] = {[&t] { return Answered(t.DisaggDetachSend(kSubject)); }};
  c["DisaggFlushSend"] = {[&t] { return t.DisaggFlushSend(kSubject); }};
  c["GetSendProgress"] = {[&t] { return Answered(t.GetSendProgress(kSubject)); }};
}

void ExpectTable(const SceneFactory& make, std::span<const TableRow> rows, Interfaces interfaces) {
  std::set<std::string> expected, found, calls;
  for (const auto& [header, name] : interfaces) expected.merge(MethodsOf(header, name, "virtual"));
  for (const TableRow& row : rows) {
    EXPECT_TRUE(calls.insert(row.call).second) << row.call << " is there twice";
    found.insert(MethodOf(row.call));
  }
  EXPECT_EQ(found, expected) << "rows, and what the headers declare";
  std::set<std::string> made;
  for (const auto& [name, call] : make(At::kIdle)->Calls()) made.insert(name);
  ASSERT_EQ(calls, made) << "rows, and calls that are tried";
  for (const TableRow& row : rows) {
    std::istringstream outcomes(row.outcomes);
    for (int column = 0; column < kStateCount; ++column) {
      SCOPED_TRACE(std::string(row.call) + ", " + kStateNames[column]);
      char expected_letter = 0;
      ASSERT_TRUE(outcomes >> expected_letter);
      if (expected_letter != '-') ExpectCell(make, row, column, expected_letter);
    }
  }
}

}  // namespace quire
