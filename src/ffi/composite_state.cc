// quire.CompositeState: CompositeState for tvm-ffi, made of objects of this library.
#include "quire/composite_state.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "ffi/kv_state.h"
#include "ffi/options.h"
#include "ffi/snapshot.h"
#include "ffi/transfer.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

// "attention", if given, "recurrent" and "more_attention".
std::vector<KVStateRef> ReadParts(const OptionMap& fields, CompositeState::Parts* parts) {
  std::vector<KVStateRef> objects;
  OptionsReader reader("CompositeState", fields);
  if (const auto attention = reader.Get<KVStateRef>("attention")) {
    if (attention->defined()) parts->attention = (*attention)->attention();
    if (parts->attention == nullptr) ThrowBadArgument("CompositeState: attention is no KVCache");
    objects.push_back(*attention);
  }
  for (const KVStateRef& part :
       reader.Get<tf::Array<KVStateRef>>("more_attention").value_or(tf::Array<KVStateRef>())) {
    parts->more_attention.push_back(part.defined() ? part->attention() : nullptr);
    if (parts->more_attention.back() == nullptr) {
      ThrowBadArgument("CompositeState: attention[" + std::to_string(parts->more_attention.size()) +
                       "] is no KVCache");
    }
    objects.push_back(part);
  }
  for (const KVStateRef& part :
       reader.Get<tf::Array<KVStateRef>>("recurrent").value_or(tf::Array<KVStateRef>())) {
    parts->recurrent.push_back(part.defined() ? part->recurrent() : nullptr);
    if (parts->recurrent.back() == nullptr) {
      ThrowBadArgument("CompositeState: recurrent[" + std::to_string(parts->recurrent.size() - 1) +
                       "] is no RNNState and no RecurrentCache");
    }
    objects.push_back(part);
  }
  reader.Finish();
  return objects;
}

class CompositeStateObj : public TransferObject<CompositeState> {
 public:
  explicit CompositeStateObj(const OptionMap& fields) : CompositeStateObj(Parts(fields)) {}

  int64_t ReplayStart(int64_t seq_id, int64_t position) {
    return latch_.Run([&] { return state_->ReplayStart(seq_id, position); });
  }
  void SaveSnapshot(int64_t seq_id, const OptionMap& contents, const tf::String& path) {
    SaveStateSnapshot(&latch_, *state_, seq_id, contents, path);
  }
  OptionMap LoadSnapshot(int64_t seq_id, const OptionMap& identity, const tf::String& path,
                         bool any_numerics) {
    return LoadStateSnapshot(&latch_, *state_, seq_id, identity, path, any_numerics);
  }

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.CompositeState", CompositeStateObj, KVStateObj);

 private:
  struct Parts {
    explicit Parts(const OptionMap& fields) {
      for (const KVStateRef& object : ReadParts(fields, &parts)) {
        if (std::ranges::none_of(holds, [&](const PartHold& hold) { return hold.Is(object); }))
          holds.emplace_back(object);
      }
    }
    CompositeState::Parts parts;
    std::list<PartHold> holds;  // one of an object that is given twice, which Create refuses
  };
  explicit CompositeStateObj(Parts given)
      : TransferObject([&] { return CompositeState::Create(given.parts); }),
        holds_(std::move(given.holds)) {}

  std::list<PartHold> holds_;
};

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::ObjectDef<CompositeStateObj> object;
  DefineTransfer(object);
  object.def(tf::reflection::init<OptionMap>())
      .def("replay_start", &CompositeStateObj::ReplayStart)
      .def("save_snapshot", &CompositeStateObj::SaveSnapshot)
      .def("load_snapshot", &CompositeStateObj::LoadSnapshot);
}

}  // namespace
}  // namespace quire::ffi
