// Tables of what every public call answers in every state of its object: one row per call, one
// letter per state. A cell is tried on an object of its own; what is refused, and every question,
// changes nothing that can be observed, and whatever the answer, the object is sound and Clear
// leaves it empty. A table without a row for a call of the interface fails.
#ifndef QUIRE_KV_TESTING_STATE_TABLE_H_
#define QUIRE_KV_TESTING_STATE_TABLE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "quire/kv_state.h"
#include "quire/kv_transfer.h"

namespace quire {

// The columns, in their order. They say what has happened to sequence kSubject.
enum class At : uint8_t {
  kIdle,         // nothing
  kChain,        // it is in the open forward
  kTree,         // the same, with nodes
  kUncommitted,  // it has nodes, no forward is open
  kLoading,      // it is in the open forward and loads tokens
  kPending,      // it waits for tokens of another cache
  kFailed,       // it is in the open forward, of which a layer's call was refused
  kRetained,     // it is retained
  kSending,      // it has an active mark
};
inline constexpr int kStateCount = 9;

// Sequences of every scene.
inline constexpr int64_t kSubject = 0;   // kSubjectLength tokens
inline constexpr int64_t kOther = 1;     // as many as it may fork, in no batch
inline constexpr int64_t kEmpty = 2;     // no tokens
inline constexpr int64_t kArrived = 3;   // with a transfer: two pending tokens, all of them here
inline constexpr int64_t kNew = 9;       // absent
inline constexpr int64_t kUnknown = 77;  // absent
inline constexpr int64_t kSubjectLength = 5;
inline constexpr int64_t kOtherLength = 6;
inline constexpr int64_t kNewRows = 2;  // of kSubject in an open forward

// One way to make a call.
struct TableCall {
  std::function<Status()> run;
  // Is made before, whatever it answers; the row is about what follows.
  std::function<void()> prepare = nullptr;
};
// By name: that of the method, or "Method: how it is called".
using TableCalls = std::map<std::string, TableCall>;

// An object in one of the states, and the calls on it.
class TableScene {
 public:
  virtual ~TableScene() = default;
  virtual KVState& state() = 0;
  virtual uint64_t StateDigest() const = 0;
  virtual Status CheckInvariants() const = 0;
  virtual bool IsEmpty() const = 0;  // holds no sequence, page or slot
  virtual TableCalls Calls() = 0;
};
using SceneFactory = std::function<std::unique_ptr<TableScene>(At)>;

// `outcomes`: a letter per column, as LetterOf gives them; -: the object has no such state.
struct TableRow {
  const char* call;
  const char* outcomes;
};

// o: Ok; S: BadState; A: BadArgument; N: NotFound; U: UnknownSequence; R: NeedsReplay;
// I: Incompatible; T: Timeout; C: Cancelled; L: TooLarge; F: Full; M: OutOfMemory; E: IoError;
// X: Closed; ?: another code, which is no outcome of a row.
char LetterOf(const Status& status);
// "Method" of a row's name "Method: how it is called".
std::string MethodOf(const std::string& call);
// The methods of a class in a header of include/quire whose declarations begin with `keyword`, as
// "virtual"; destructors left out.
std::set<std::string> MethodsOf(const std::string& header, const std::string& name,
                                const std::string& keyword);

// Those of KVState; of a batch, they are about kSubject and `others`.
void AddStateCalls(KVState& state, TableCalls* calls);
// Those of KVTransfer. Epochs: `arrived`, all of whose tokens are there, and `own`, that of
// kSubject, or one that was never given. `map`: for kSubject's tokens, of another object.
struct TransferArguments {
  KVTransfer* transfer;
  uint64_t arrived;
  uint64_t own;
  const ReceiveMap* map;
};
void AddTransferCalls(const TransferArguments& arguments, TableCalls* calls);

// Virtual methods of classes, [header in include/quire, class]; destructors left out.
using Interfaces = std::span<const std::pair<const char*, const char*>>;
void ExpectTable(const SceneFactory& make, std::span<const TableRow> rows, Interfaces interfaces);

// A value is as good as Ok.
inline Status Answered(const Status& status) { return status; }
template <typename T>
Status Answered(const Result<T>& result) {
  return result.status();
}

}  // namespace quire

#endif  // QUIRE_KV_TESTING_STATE_TABLE_H_
