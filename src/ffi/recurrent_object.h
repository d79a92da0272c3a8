// What the objects of recurrent states have in common.
#ifndef QUIRE_FFI_RECURRENT_OBJECT_H_
#define QUIRE_FFI_RECURRENT_OBJECT_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/errors.h"
#include "ffi/options.h"
#include "ffi/snapshot.h"
#include "ffi/state_chunks.h"
#include "quire/recurrent_state.h"

namespace quire::ffi {

inline std::span<const int64_t> SpanOf(const tvm::ffi::Shape& shape) {
  return {shape.data(), shape.size()};
}

// The calls of RecurrentState on a `State`, which derives from it.
template <typename State>
class RecurrentObject : public tvm::ffi::Object {
 public:
  void Clear() {
    latch_.Run([&] { return state_->Clear(); });
  }
  void AddSequence(int64_t seq_id) {
    latch_.Run([&] { return state_->AddSequence(seq_id); });
  }
  void RemoveSequence(int64_t seq_id) {
    latch_.Run([&] { return state_->RemoveSequence(seq_id); });
  }
  void ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos) {
    latch_.Run([&] { return state_->ForkSequence(parent_id, child_id, fork_pos); });
  }
  void PopN(int64_t seq_id, int64_t n) {
    latch_.Run([&] { return state_->PopN(seq_id, n); });
  }
  void SetRetained(int64_t seq_id, bool retained) {
    latch_.Run([&] { return state_->SetRetained(seq_id, retained); });
  }
  void BeginForward(const tvm::ffi::Shape& seq_ids, const tvm::ffi::Shape& append_lengths) {
    latch_.Run([&] { return state_->BeginForward(SpanOf(seq_ids), SpanOf(append_lengths)); });
  }
  void BeginTreeForward(const tvm::ffi::Shape& seq_ids, const tvm::ffi::Shape& append_lengths,
                        const tvm::ffi::Shape& parents) {
    latch_.Run([&] {
      return state_->BeginTreeForward(SpanOf(seq_ids), SpanOf(append_lengths), SpanOf(parents));
    });
  }
  void CommitAcceptedTokenTreeNodes(const tvm::ffi::Shape& seq_ids,
                                    const tvm::ffi::Shape& leaf_indices) {
    latch_.Run([&] {
      return state_->CommitAcceptedTokenTreeNodes(SpanOf(seq_ids), SpanOf(leaf_indices));
    });
  }
  int64_t GetTreeSize(int64_t seq_id) {
    return latch_.Run([&] { return state_->GetTreeSize(seq_id); });
  }
  void EndForward() {
    latch_.Run([&] { return state_->EndForward(); });
  }
  void AbortForward() {
    latch_.Run([&] { return state_->AbortForward(); });
  }
  int64_t ReplayStart(int64_t seq_id, int64_t position) {
    return latch_.Run([&] { return state_->ReplayStart(seq_id, position); });
  }
  tvm::ffi::Bytes ExportChunk(const OptionMap& fields, int64_t seq_id) {
    const ChainRequest request = ReadChainRequest(fields);
    const ChunkBuffer chunk = latch_.Run([&] { return ExportLastChunk(*state_, seq_id, request); });
    return tvm::ffi::Bytes(reinterpret_cast<const char*>(chunk.bytes().data()),
                           chunk.bytes().size());
  }
  void ImportChunks(const OptionMap& fields, int64_t seq_id,
                    const tvm::ffi::Array<tvm::ffi::Bytes>& chunks) {
    const ChainRequest request = ReadChainRequest(fields);
    std::vector<std::string_view> bytes;
    for (const tvm::ffi::Bytes& chunk : chunks) bytes.emplace_back(chunk.data(), chunk.size());
    latch_.Run([&] { return ImportChain(*state_, seq_id, request, bytes); });
  }
  void SaveSnapshot(const OptionMap& fields, int64_t seq_id, const tvm::ffi::String& path) {
    const SnapshotContents contents = ReadSnapshotContents(fields);
    latch_.Run([&] { return quire::SaveSnapshot(*state_, seq_id, contents, std::string(path)); });
  }
  OptionMap LoadSnapshot(const OptionMap& identity, int64_t seq_id, const tvm::ffi::String& path) {
    const Passport passport = ReadIdentity(identity);
    return SnapshotFields(latch_.Run(
        [&] { return quire::LoadSnapshot(*state_, seq_id, passport, std::string(path)); }));
  }
  bool HasSequence(int64_t seq_id) {
    return latch_.Run([&] { return state_->HasSequence(seq_id); });
  }
  int64_t SequenceCount() {
    return latch_.Run([&] { return state_->sequence_count(); });
  }
  int64_t RetainedSequenceCount() {
    return latch_.Run([&] { return state_->retained_sequence_count(); });
  }
  int64_t GetSequenceLength(int64_t seq_id) {
    return latch_.Run([&] { return state_->GetSequenceLength(seq_id); });
  }
  OptionMap SlotCounts() {
    const StateSlotCounts counts = latch_.Run([&] { return state_->slot_counts(); });
    return {{"total", counts.total}, {"free", counts.free}, {"retained", counts.retained}};
  }
  int64_t StorageBytes() {
    return latch_.Run([&] { return state_->storage_bytes(); });
  }
  // The digest's bits as a signed number: tvm-ffi has no unsigned ones.
  int64_t StateDigest() {
    return static_cast<int64_t>(latch_.Run([&] { return state_->StateDigest(); }));
  }
  void CheckInvariants() {
    latch_.Run([&] { return state_->CheckInvariants(); });
  }

 protected:
  // `make` gives a Result<std::unique_ptr<State>>.
  template <typename F>
  explicit RecurrentObject(F&& make) : state_(latch_.Run(std::forward<F>(make))) {}

  FaultLatch latch_;
  std::unique_ptr<State> state_;
};

// The same member as one of the derived class: tvm-ffi wants the object's own class.
template <typename Object, typename Base, typename R, typename... Args>
auto MemberOf(R (Base::*member)(Args...)) -> R (Object::*)(Args...) {
  return member;
}

// Registers the common methods of `Object`.
template <typename Object>
void DefineRecurrentObject(tvm::ffi::reflection::ObjectDef<Object>& def) {
  def.def(tvm::ffi::reflection::init<OptionMap>())
      .def("clear", MemberOf<Object>(&Object::Clear))
      .def("add_sequence", MemberOf<Object>(&Object::AddSequence))
      .def("remove_sequence", MemberOf<Object>(&Object::RemoveSequence))
      .def("fork_sequence", MemberOf<Object>(&Object::ForkSequence))
      .def("pop_n", MemberOf<Object>(&Object::PopN))
      .def("set_retained", MemberOf<Object>(&Object::SetRetained))
      .def("begin_forward", MemberOf<Object>(&Object::BeginForward))
      .def("begin_tree_forward", MemberOf<Object>(&Object::BeginTreeForward))
      .def("commit_accepted_token_tree_nodes",
           MemberOf<Object>(&Object::CommitAcceptedTokenTreeNodes))
      .def("get_tree_size", MemberOf<Object>(&Object::GetTreeSize))
      .def("end_forward", MemberOf<Object>(&Object::EndForward))
      .def("abort_forward", MemberOf<Object>(&Object::AbortForward))
      .def("replay_start", MemberOf<Object>(&Object::ReplayStart))
      .def("export_chunk", MemberOf<Object>(&Object::ExportChunk))
      .def("import_chunks", MemberOf<Object>(&Object::ImportChunks))
      .def("save_snapshot", MemberOf<Object>(&Object::SaveSnapshot))
      .def("load_snapshot", MemberOf<Object>(&Object::LoadSnapshot))
      .def("has_sequence", MemberOf<Object>(&Object::HasSequence))
      .def("sequence_count", MemberOf<Object>(&Object::SequenceCount))
      .def("retained_sequence_count", MemberOf<Object>(&Object::RetainedSequenceCount))
      .def("get_sequence_length", MemberOf<Object>(&Object::GetSequenceLength))
      .def("slot_counts", MemberOf<Object>(&Object::SlotCounts))
      .def("storage_bytes", MemberOf<Object>(&Object::StorageBytes))
      .def("state_digest", MemberOf<Object>(&Object::StateDigest))
      .def("check_invariants", MemberOf<Object>(&Object::CheckInvariants));
}

}  // namespace quire::ffi

#endif  // QUIRE_FFI_RECURRENT_OBJECT_H_
