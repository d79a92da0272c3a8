// A recurrent layer of your own: Quire keeps its states, forks them and goes back in time.
#include <cstdio>
#include <vector>

#include "quire/rnn_state.h"

using quire::DType;
using quire::Status;

// The layer adds 1 to its state for each token; a real one computes it from its inputs.
Status Forward(quire::RNNState& states, int64_t sequence, int64_t tokens) {
  const std::vector<int64_t> ids{sequence};
  const std::vector<int64_t> lengths{tokens};
  std::vector<float> state(4);
  QUIRE_RETURN_IF_ERROR(states.BeginForward(ids, lengths));
  QUIRE_RETURN_IF_ERROR(states.Get(0, 0, {state.data(), DType::kF32, {1, 4}}));
  for (float& x : state) x += static_cast<float>(tokens);
  QUIRE_RETURN_IF_ERROR(states.Set(0, 0, {state.data(), DType::kF32, {1, 4}}));
  return states.EndForward();
}

Status Print(quire::RNNState& states, int64_t sequence) {
  std::vector<float> state(4);
  QUIRE_RETURN_IF_ERROR(states.DebugGet(0, 0, sequence, {state.data(), DType::kF32, {4}}));
  std::printf("sequence %lld: state %g\n", static_cast<long long>(sequence),
              static_cast<double>(state[0]));
  return Status();
}

Status Run() {
  quire::RNNStateOptions options;
  options.num_layers = 1;
  options.states = {{.shape = {4}}};
  options.max_num_sequences = 2;
  options.max_history = 3;  // the ends of the last three forwards can be reached
  QUIRE_ASSIGN_OR_RETURN(auto states, quire::RNNState::Create(options));
  QUIRE_RETURN_IF_ERROR(states->AddSequence(0));
  for (const int64_t tokens : {10, 1, 1}) QUIRE_RETURN_IF_ERROR(Forward(*states, 0, tokens));
  QUIRE_RETURN_IF_ERROR(states->ForkSequence(0, 1, 11));  // copies no state
  QUIRE_RETURN_IF_ERROR(states->PopN(0, 2));              // back to token 10
  QUIRE_RETURN_IF_ERROR(Forward(*states, 0, 5));
  QUIRE_RETURN_IF_ERROR(Print(*states, 0));
  return Print(*states, 1);
}

int main() {
  const Status status = Run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
