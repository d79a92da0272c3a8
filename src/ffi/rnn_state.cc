// quire.RNNState: RNNState for tvm-ffi. Tensors are borrowed for the call and never copied.
#include "quire/rnn_state.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/reflection/registry.h>

#include <string>
#include <vector>

#include "ffi/recurrent_object.h"
#include "ffi/tensors.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

RNNStateSpec ReadStateSpec(const OptionMap& fields) {
  RNNStateSpec spec;
  OptionsReader reader("RNNState", fields);
  if (const auto shape = reader.Get<tf::Shape>("shape")) {
    spec.shape.assign(shape->begin(), shape->end());
  }
  reader.Read("dtype", &spec.dtype);
  // The map keeps the tensor alive until the state has copied it.
  if (const auto initial = reader.Get<tf::Tensor>("initial")) {
    spec.initial = ViewOf(tf::TensorView(*initial));
  }
  reader.Finish();
  return spec;
}

RNNStateOptions ReadRNNStateOptions(const OptionMap& fields) {
  RNNStateOptions options;
  OptionsReader reader("RNNState", fields);
  for (const OptionMap& state :
       reader.Get<tf::Array<OptionMap>>("states").value_or(tf::Array<OptionMap>())) {
    options.states.push_back(ReadStateSpec(state));
  }
  reader.Read("num_layers", &options.num_layers);
  reader.Read("max_num_sequences", &options.max_num_sequences);
  reader.Read("max_history", &options.max_history);
  reader.Read("max_checkpoints", &options.max_checkpoints);
  reader.Read("max_retained_slots", &options.max_retained_slots);
  reader.Read("max_tree_size", &options.max_tree_size);
  reader.Read("max_tree_slots", &options.max_tree_slots);
  reader.Read("poison_freed_slots", &options.poison_freed_slots);
  reader.Read("tvm_rnn_history1", &options.tvm_rnn_history1);
  reader.Finish();
  return options;
}

class RNNStateObj : public RecurrentObject<RNNState> {
 public:
  explicit RNNStateObj(const OptionMap& fields)
      : RecurrentObject([&] { return RNNState::Create(ReadRNNStateOptions(fields)); }) {}

  void Get(int64_t layer, int64_t state, tf::TensorView o) {
    const TensorView view = ViewOf(o);
    latch_.Run([&] { return state_->Get(layer, state, view); });
  }
  void Set(int64_t layer, int64_t state, tf::TensorView data) {
    const TensorView view = ViewOf(data);
    latch_.Run([&] { return state_->Set(layer, state, view); });
  }
  void GetBefore(int64_t layer, int64_t state, const tf::Shape& rows, tf::TensorView o) {
    const TensorView view = ViewOf(o);
    latch_.Run([&] { return state_->GetBefore(layer, state, SpanOf(rows), view); });
  }
  void GetAt(int64_t layer, int64_t state, const tf::Shape& rows, tf::TensorView o) {
    const TensorView view = ViewOf(o);
    latch_.Run([&] { return state_->GetAt(layer, state, SpanOf(rows), view); });
  }
  void SetAt(int64_t layer, int64_t state, const tf::Shape& rows, tf::TensorView data) {
    const TensorView view = ViewOf(data);
    latch_.Run([&] { return state_->SetAt(layer, state, SpanOf(rows), view); });
  }
  void DebugGet(int64_t layer, int64_t state, int64_t seq_id, tf::TensorView o) {
    const TensorView view = ViewOf(o);
    latch_.Run([&] { return state_->DebugGet(layer, state, seq_id, view); });
  }

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.RNNState", RNNStateObj, KVStateObj);
};

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::ObjectDef<RNNStateObj> def;
  DefineRecurrentObject(def);
  def.def("get", &RNNStateObj::Get)
      .def("set", &RNNStateObj::Set)
      .def("get_before", &RNNStateObj::GetBefore)
      .def("get_at", &RNNStateObj::GetAt)
      .def("set_at", &RNNStateObj::SetAt)
      .def("debug_get", &RNNStateObj::DebugGet);
}

}  // namespace
}  // namespace quire::ffi
