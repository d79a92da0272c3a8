// What the objects of recurrent states have in common.
#ifndef QUIRE_FFI_RECURRENT_OBJECT_H_
#define QUIRE_FFI_RECURRENT_OBJECT_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/kv_state.h"
#include "ffi/options.h"
#include "ffi/snapshot.h"
#include "ffi/state_chunks.h"
#include "quire/recurrent_state.h"

namespace quire::ffi {

// The calls of RecurrentState on a `State`, which derives from it.
template <typename State>
class RecurrentObject : public StateObject<State> {
 public:
  int64_t ReplayStart(int64_t seq_id, int64_t position) {
    return this->latch_.Run([&] { return this->state_->ReplayStart(seq_id, position); });
  }
  tvm::ffi::Bytes ExportChunk(const OptionMap& fields, int64_t seq_id) {
    const ChainRequest request = ReadChainRequest(fields);
    const ChunkBuffer chunk =
        this->latch_.Run([&] { return ExportLastChunk(*this->state_, seq_id, request); });
    return tvm::ffi::Bytes(reinterpret_cast<const char*>(chunk.bytes().data()),
                           chunk.bytes().size());
  }
  void ImportChunks(const OptionMap& fields, int64_t seq_id,
                    const tvm::ffi::Array<tvm::ffi::Bytes>& chunks) {
    const ChainRequest request = ReadChainRequest(fields);
    std::vector<std::string_view> bytes;
    for (const tvm::ffi::Bytes& chunk : chunks) bytes.emplace_back(chunk.data(), chunk.size());
    this->RefuseIfPart("ImportChunks");
    this->latch_.Run([&] { return ImportChain(*this->state_, seq_id, request, bytes); });
  }
  void SaveSnapshot(int64_t seq_id, const OptionMap& contents, const tvm::ffi::String& path) {
    SaveStateSnapshot(&this->latch_, *this->state_, seq_id, contents, path);
  }
  OptionMap LoadSnapshot(int64_t seq_id, const OptionMap& identity, const tvm::ffi::String& path,
                         bool any_numerics) {
    this->RefuseIfPart("LoadSnapshot");
    return LoadStateSnapshot(&this->latch_, *this->state_, seq_id, identity, path, any_numerics);
  }
  int64_t RetainedSequenceCount() {
    return this->latch_.Run([&] { return this->state_->retained_sequence_count(); });
  }
  OptionMap SlotCounts() {
    const StateSlotCounts counts = this->latch_.Run([&] { return this->state_->slot_counts(); });
    return {{"total", counts.total}, {"free", counts.free}, {"retained", counts.retained}};
  }
  int64_t StorageBytes() {
    return this->latch_.Run([&] { return this->state_->storage_bytes(); });
  }

  std::shared_ptr<RecurrentState> recurrent() const override { return this->state_; }

 protected:
  using StateObject<State>::StateObject;
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
      .def("replay_start", MemberOf<Object>(&Object::ReplayStart))
      .def("export_chunk", MemberOf<Object>(&Object::ExportChunk))
      .def("import_chunks", MemberOf<Object>(&Object::ImportChunks))
      .def("save_snapshot", MemberOf<Object>(&Object::SaveSnapshot))
      .def("load_snapshot", MemberOf<Object>(&Object::LoadSnapshot))
      .def("retained_sequence_count", MemberOf<Object>(&Object::RetainedSequenceCount))
      .def("slot_counts", MemberOf<Object>(&Object::SlotCounts))
      .def("storage_bytes", MemberOf<Object>(&Object::StorageBytes));
}

}  // namespace quire::ffi

#endif  // QUIRE_FFI_RECURRENT_OBJECT_H_
