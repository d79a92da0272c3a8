#include "ffi/kv_state.h"

#include <tvm/ffi/reflection/registry.h>

#include <string>

namespace quire::ffi {

namespace tf = tvm::ffi;

void KVStateObj::RefuseIfPart(const char* call) const {
  if (!is_part_) return;
  Throw(Status(StatusCode::kBadState,
               std::string(call) +
                   ": this state is part of a CompositeState; make the call on that, or close it"));
}

void KVStateObj::Clear() {
  Control("Clear", [&] { return state().Clear(); });
}
void KVStateObj::AddSequence(int64_t seq_id) {
  Control("AddSequence", [&] { return state().AddSequence(seq_id); });
}
void KVStateObj::RemoveSequence(int64_t seq_id) {
  Control("RemoveSequence", [&] { return state().RemoveSequence(seq_id); });
}
void KVStateObj::ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos) {
  Control("ForkSequence", [&] { return state().ForkSequence(parent_id, child_id, fork_pos); });
}
void KVStateObj::PopN(int64_t seq_id, int64_t n) {
  Control("PopN", [&] { return state().PopN(seq_id, n); });
}
void KVStateObj::BeginForward(const tf::Shape& seq_ids, const tf::Shape& append_lengths) {
  Control("BeginForward",
          [&] { return state().BeginForward(SpanOf(seq_ids), SpanOf(append_lengths)); });
}
void KVStateObj::BeginTreeForward(const tf::Shape& seq_ids, const tf::Shape& append_lengths,
                                  const tf::Shape& parents) {
  Control("BeginTreeForward", [&] {
    return state().BeginTreeForward(SpanOf(seq_ids), SpanOf(append_lengths), SpanOf(parents));
  });
}
void KVStateObj::CommitAcceptedTokenTreeNodes(const tf::Shape& seq_ids,
                                              const tf::Shape& leaf_indices) {
  Control("CommitAcceptedTokenTreeNodes", [&] {
    return state().CommitAcceptedTokenTreeNodes(SpanOf(seq_ids), SpanOf(leaf_indices));
  });
}
int64_t KVStateObj::GetTreeSize(int64_t seq_id) {
  return latch_.Run([&] { return state().GetTreeSize(seq_id); });
}
void KVStateObj::EndForward() {
  Control("EndForward", [&] { return state().EndForward(); });
}
void KVStateObj::AbortForward() {
  Control("AbortForward", [&] { return state().AbortForward(); });
}

PartHold::PartHold(KVStateRef part) : part_(std::move(part)) {
  if (!part_->is_part_.exchange(true)) return;
  Throw(Status(StatusCode::kBadState,
               "CompositeState: a part is part of another CompositeState; close that first"));
}

PartHold::~PartHold() { part_->is_part_ = false; }

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::ObjectDef<KVStateObj>()
      .def("clear", &KVStateObj::Clear)
      .def("add_sequence", &KVStateObj::AddSequence)
      .def("remove_sequence", &KVStateObj::RemoveSequence)
      .def("fork_sequence", &KVStateObj::ForkSequence)
      .def("pop_n", &KVStateObj::PopN)
      .def("begin_forward", &KVStateObj::BeginForward)
      .def("begin_tree_forward", &KVStateObj::BeginTreeForward)
      .def("commit_accepted_token_tree_nodes", &KVStateObj::CommitAcceptedTokenTreeNodes)
      .def("get_tree_size", &KVStateObj::GetTreeSize)
      .def("end_forward", &KVStateObj::EndForward)
      .def("abort_forward", &KVStateObj::AbortForward)
      .def("set_retained", &KVStateObj::SetRetained)
      .def("has_sequence", &KVStateObj::HasSequence)
      .def("sequence_count", &KVStateObj::SequenceCount)
      .def("get_sequence_length", &KVStateObj::GetSequenceLength)
      .def("state_digest", &KVStateObj::StateDigest)
      .def("check_invariants", &KVStateObj::CheckInvariants);
}

}  // namespace quire::ffi
