// What the objects of recurrent states have in common.
#ifndef QUIRE_FFI_RECURRENT_OBJECT_H_
#define QUIRE_FFI_RECURRENT_OBJECT_H_

#include <tvm/ffi/reflection/registry.h>

#include <cstdint>
#include <memory>

#include "ffi/kv_state.h"
#include "ffi/options.h"
#include "quire/recurrent_state.h"

namespace quire::ffi {

// The calls of RecurrentState on a `State`, which derives from it.
template <typename State>
class RecurrentObject : public StateObject<State> {
 public:
  int64_t ReplayStart(int64_t seq_id, int64_t position) {
    return this->latch_.Run([&] { return this->state_->ReplayStart(seq_id, position); });
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
      .def("retained_sequence_count", MemberOf<Object>(&Object::RetainedSequenceCount))
      .def("slot_counts", MemberOf<Object>(&Object::SlotCounts))
      .def("storage_bytes", MemberOf<Object>(&Object::StorageBytes));
}

}  // namespace quire::ffi

#endif  // QUIRE_FFI_RECURRENT_OBJECT_H_
