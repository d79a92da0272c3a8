#include "kv/control/control_call.h"

namespace quire {

const char* ControlCall::name() const {
  if (entry != nullptr) return entry;
  switch (kind) {
    case Kind::kClear:
      return "Clear";
    case Kind::kAdd:
      return "AddSequence";
    case Kind::kRemove:
      return "RemoveSequence";
    case Kind::kFork:
      return "ForkSequence";
    case Kind::kPop:
      return "PopN";
    case Kind::kRetain:
      return "SetRetained";
    case Kind::kBegin:
      return loads.empty() ? "BeginForward" : "BeginLoadingForward";
    case Kind::kEnd:
      return "EndForward";
    case Kind::kBeginTree:
      return "BeginTreeForward";
    case Kind::kCommitTree:
      return "CommitAcceptedTokenTreeNodes";
    case Kind::kImport:
      return "ImportState";
    case Kind::kAbort:
      break;
  }
  return "AbortForward";
}

}  // namespace quire
