#include "ffi/tvm/tvm_rnn_state.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <string>
#include <utility>
#include <vector>

#include "ffi/tensors.h"
#include "ffi/tvm/tvm_arguments.h"
#include "ffi/tvm/tvm_create.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

void CheckChain(const tf::Shape& append_lengths, const tf::Shape& parents) {
  size_t at = 0;
  for (const int64_t length : append_lengths) {
    for (int64_t i = 0; i < length; ++i, ++at) {
      if (at < parents.size() && parents[at] == i - 1) continue;
      ThrowBadArgument(
          "kv_state_begin_forward: token " + std::to_string(i) + " has " +
          (at < parents.size() ? "parent " + std::to_string(parents[at]) : "no parent") +
          "; the tokens of a recurrent state are a chain, each after the one before "
          "it, the first with parent -1");
    }
  }
  if (at == parents.size()) return;
  ThrowBadArgument("kv_state_begin_forward: " + std::to_string(parents.size()) + " parents for " +
                   std::to_string(at) + " tokens");
}

}  // namespace

TvmRNNStateObj::TvmRNNStateObj(const RNNStateOptions& options)
    : state_(latch_.Run([&] { return RNNState::Create(options); })) {}

void TvmRNNStateObj::Clear() {
  latch_.Run([&] { return state_->Clear(); });
}
void TvmRNNStateObj::AddSequence(int64_t seq_id) {
  latch_.Run([&] { return state_->AddSequence(seq_id); });
}
void TvmRNNStateObj::RemoveSequence(int64_t seq_id) {
  latch_.Run([&] { return state_->RemoveSequence(seq_id); });
}
void TvmRNNStateObj::ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos) {
  latch_.Run([&] { return state_->ForkSequence(parent_id, child_id, fork_pos); });
}
void TvmRNNStateObj::PopN(int64_t seq_id, int64_t n) {
  latch_.Run([&] { return state_->PopN(seq_id, n); });
}
void TvmRNNStateObj::BeginForward(const tf::Shape& seq_ids, const tf::Shape& append_lengths,
                                  const tf::Optional<tf::Shape>& parents) {
  if (parents.has_value()) CheckChain(append_lengths, parents.value());
  latch_.Run([&] { return state_->BeginForward(TvmSpanOf(seq_ids), TvmSpanOf(append_lengths)); });
}
void TvmRNNStateObj::EndForward() {
  latch_.Run([&] { return state_->EndForward(); });
}

void TvmRNNStateObj::AbortForward() {
  latch_.Run([&] { return state_->AbortForward(); });
}

void TvmRNNStateObj::Get(int64_t layer, int64_t state, tf::TensorView o) {
  const TensorView view = ViewOf(o);
  latch_.Run([&] { return state_->Get(layer, state, view); });
}
void TvmRNNStateObj::Set(int64_t layer, int64_t state, tf::TensorView data) {
  const TensorView view = ViewOf(data);
  latch_.Run([&] { return state_->Set(layer, state, view); });
}

tf::Tensor TvmRNNStateObj::DebugGet(int64_t layer, int64_t state, int64_t seq_id) {
  const auto& states = state_->options().states;
  if (state < 0 || state >= static_cast<int64_t>(states.size())) {
    ThrowBadArgument("rnn_state_debug_get: there is no state " + std::to_string(state) +
                     "; there are " + std::to_string(states.size()));
  }
  const RNNStateSpec& spec = states[static_cast<size_t>(state)];
  const tf::Tensor copy = NewTensor(ToDLDataType(spec.dtype), spec.shape);
  const TensorView view = ViewOf(tf::TensorView(copy));
  latch_.Run([&] { return state_->DebugGet(layer, state, seq_id, view); });
  return copy;
}

int64_t TvmRNNStateObj::StateDigest() {
  return static_cast<int64_t>(latch_.Run([&] { return state_->StateDigest(); }));
}
void TvmRNNStateObj::CheckInvariants() {
  latch_.Run([&] { return state_->CheckInvariants(); });
}

// ---------------------------------------------------------------------- creation

tf::Any CreateTvmRNNState(const TvmOptions& options, const tf::AnyView* views, int32_t count) {
  constexpr int32_t kArgumentCount = 6;
  if (count != kArgumentCount) {
    ThrowBadArgument("rnn_state_create: " + std::to_string(count) + " arguments; there are 6");
  }
  const TvmArguments arguments("rnn_state_create", views, count);
  RNNStateOptions state;
  state.num_layers = arguments.GetInt(0, "number of layers", 1);
  state.max_num_sequences = arguments.GetInt(1, "max_num_sequences", 1);
  state.max_history = arguments.GetInt(2, "max_history", 1);
  state.tvm_rnn_history1 = options.rnn_history1;
  const auto initial = arguments.Get<tf::Array<tf::Tensor>>(5, "initial values");
  if (initial.empty()) arguments.Throw(5, "(initial values) is empty; there is one per state");
  for (const int32_t callbacks : {3, 4}) {
    const auto functions = arguments.Get<tf::Array<tf::Function>>(
        callbacks, callbacks == 3 ? "get functions" : "set functions");
    if (functions.size() == initial.size()) continue;
    arguments.Throw(callbacks, "has " + std::to_string(functions.size()) + " functions for " +
                                   std::to_string(initial.size()) + " states");
  }
  for (const tf::Tensor& tensor : initial) {
    if (!tensor.defined()) arguments.Throw(5, "(initial values) has None among them");
    const TensorView view = ViewOf(tf::TensorView(tensor));
    state.states.push_back({.shape = {view.shape().begin(), view.shape().end()},
                            .dtype = view.dtype(),
                            .initial = view});
  }
  return tf::ObjectRef(tf::make_object<TvmRNNStateObj>(state));
}

}  // namespace quire::ffi
