// quire.RecurrentCache: RecurrentCache for tvm-ffi. Tensors are borrowed for the call and never
// copied.
#include "quire/recurrent_cache.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/reflection/registry.h>

#include <array>
#include <string>
#include <string_view>

#include "ffi/recurrent_object.h"
#include "ffi/tensors.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

// In the order of RecurrentLayerKind.
constexpr std::array<std::string_view, 4> kKinds = {"linear_attention", "gated_delta",
                                                    "state_space", "convolution"};

RecurrentLayerSpec ReadRecurrentLayer(const OptionMap& fields) {
  RecurrentLayerSpec spec;
  OptionsReader reader("RecurrentCache", fields);
  reader.ReadEnum("kind", std::span<const std::string_view>(kKinds), &spec.kind);
  reader.Read("num_heads", &spec.num_heads);
  reader.Read("num_key_heads", &spec.num_key_heads);
  reader.Read("key_dim", &spec.key_dim);
  reader.Read("value_dim", &spec.value_dim);
  reader.Read("num_channels", &spec.num_channels);
  reader.Read("width", &spec.width);
  reader.Finish();
  return spec;
}

RecurrentCacheOptions ReadRecurrentOptions(const OptionMap& fields) {
  RecurrentCacheOptions options;
  OptionsReader reader("RecurrentCache", fields);
  for (const OptionMap& layer :
       reader.Get<tf::Array<OptionMap>>("layers").value_or(tf::Array<OptionMap>())) {
    options.layers.push_back(ReadRecurrentLayer(layer));
  }
  reader.Read("max_num_sequences", &options.max_num_sequences);
  reader.Read("prefill_chunk_size", &options.prefill_chunk_size);
  reader.Read("recent_checkpoints", &options.recent_checkpoints);
  reader.Read("thinned_checkpoints", &options.thinned_checkpoints);
  reader.Read("max_retained_slots", &options.max_retained_slots);
  reader.Read("max_tree_size", &options.max_tree_size);
  reader.Read("max_tree_slots", &options.max_tree_slots);
  reader.Read("max_slots", &options.max_slots);
  reader.Read("kernel_path", &options.kernel_path);
  reader.Read("poison_freed_slots", &options.poison_freed_slots);
  options.runner = reader.ReadRunner();
  reader.Finish();
  return options;
}

class RecurrentCacheObj : public RecurrentObject<RecurrentCache> {
 public:
  explicit RecurrentCacheObj(const OptionMap& fields)
      : RecurrentObject([&] { return RecurrentCache::Create(ReadRecurrentOptions(fields)); }) {}

  void LinearAttention(int64_t layer, tf::TensorView q, tf::TensorView k, tf::TensorView v,
                       tf::TensorView decay, tf::TensorView o, double sm_scale) {
    const TensorView views[] = {ViewOf(q), ViewOf(k), ViewOf(v), ViewOf(decay), ViewOf(o)};
    latch_.Run([&] {
      return state_->LinearAttention(layer, views[0], views[1], views[2], views[3], views[4],
                                     sm_scale);
    });
  }
  void GatedDelta(int64_t layer, tf::TensorView q, tf::TensorView k, tf::TensorView v,
                  tf::TensorView decay, tf::TensorView beta, tf::TensorView o, double sm_scale) {
    const TensorView views[] = {ViewOf(q),     ViewOf(k),    ViewOf(v),
                                ViewOf(decay), ViewOf(beta), ViewOf(o)};
    latch_.Run([&] {
      return state_->GatedDelta(layer, views[0], views[1], views[2], views[3], views[4], views[5],
                                sm_scale);
    });
  }
  void StateSpace(int64_t layer, tf::TensorView x, tf::TensorView dt, tf::TensorView a,
                  tf::TensorView b, tf::TensorView c, tf::Optional<tf::TensorView> d,
                  tf::TensorView o) {
    const TensorView views[] = {ViewOf(x), ViewOf(dt), ViewOf(a), ViewOf(b), ViewOf(c), ViewOf(o)};
    const TensorView d_view = d.has_value() ? ViewOf(d.value()) : TensorView();
    const TensorView* const d_pointer = d.has_value() ? &d_view : nullptr;
    latch_.Run([&] {
      return state_->StateSpace(layer, views[0], views[1], views[2], views[3], views[4], d_pointer,
                                views[5]);
    });
  }
  void Convolution(int64_t layer, tf::TensorView x, tf::TensorView weight,
                   tf::Optional<tf::TensorView> bias, bool silu, tf::TensorView o) {
    const TensorView views[] = {ViewOf(x), ViewOf(weight), ViewOf(o)};
    const TensorView bias_view = bias.has_value() ? ViewOf(bias.value()) : TensorView();
    const TensorView* const bias_pointer = bias.has_value() ? &bias_view : nullptr;
    latch_.Run([&] {
      return state_->Convolution(layer, views[0], views[1], bias_pointer, silu, views[2]);
    });
  }
  void DebugGet(int64_t layer, int64_t seq_id, tf::TensorView o) {
    const TensorView view = ViewOf(o);
    latch_.Run([&] { return state_->DebugGet(layer, seq_id, view); });
  }

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.RecurrentCache", RecurrentCacheObj, KVStateObj);
};

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::ObjectDef<RecurrentCacheObj> def;
  DefineRecurrentObject(def);
  def.def("linear_attention", &RecurrentCacheObj::LinearAttention)
      .def("gated_delta", &RecurrentCacheObj::GatedDelta)
      .def("state_space", &RecurrentCacheObj::StateSpace)
      .def("convolution", &RecurrentCacheObj::Convolution)
      .def("debug_get", &RecurrentCacheObj::DebugGet);
}

}  // namespace
}  // namespace quire::ffi
