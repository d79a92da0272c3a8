// What happens when a call on a recurrent or composite state cannot be carried out: the state is as
// it was, and the same call works when the reason is gone. Each single allocation of each call is
// refused in turn; each half of a composite is made to refuse a call.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kv/testing/allocation_refusal.h"
#include "kv/testing/kv_test_bytes.h"
#include "kv/testing/kv_test_forward.h"
#include "kv/testing/recurrent_test_forward.h"
#include "quire/composite_state.h"
#include "quire/rnn_state.h"

namespace quire {
namespace {

using Tokens = std::vector<uint64_t>;

// Arguments that need no allocation.
template <int64_t... kValues>
constexpr std::array<int64_t, sizeof...(kValues)> kIds = {kValues...};

Tokens Range(uint64_t begin, uint64_t end) {
  Tokens tokens;
  for (uint64_t token = begin; token < end; ++token) tokens.push_back(token);
  return tokens;
}

// All parts, or those that reach every position; each with sequences 0 of 100 tokens, 1 that shares
// 70 and has 10 more, 2 that is empty.
class Scene {
 public:
  explicit Scene(bool with_rnn = true) {
    RNNStateOptions rnn;
    rnn.num_layers = 1;
    rnn.states = {{.shape = {1}}};
    rnn.max_num_sequences = 6;
    rnn.max_history = 2;
    rnn.max_checkpoints = 3;
    rnn.max_retained_slots = 20;
    rnn.poison_freed_slots = true;
    rnn_ = *RNNState::Create(rnn);
    RecurrentCacheOptions recurrent;
    recurrent.layers = AllRecurrentKinds();
    recurrent.max_num_sequences = 6;
    recurrent.prefill_chunk_size = 400;
    recurrent.recent_checkpoints = 2;
    recurrent.thinned_checkpoints = 2;
    recurrent.max_retained_slots = 20;
    recurrent.runner = std::make_shared<SerialRunner>();
    recurrent.poison_freed_slots = true;
    cache_ = *RecurrentCache::Create(recurrent);
    AttentionKVCacheOptions attention =
        TestCacheOptions({{2, 1, 4, 4, DType::kF32}}, {.max_num_sequences = 6,
                                                       .token_capacity = 512,
                                                       .prefill_chunk_size = 300,
                                                       .page_size = 16,
                                                       .rope = RopeMode::kNone});
    attention.runner = recurrent.runner;
    attention_ = *AttentionKVCache::Create(attention);
    CompositeState::Parts parts{.attention = attention_, .recurrent = {cache_}};
    if (with_rnn) parts.recurrent.push_back(rnn_);
    with_rnn_ = with_rnn;
    state_ = *CompositeState::Create(parts);
    Build();
  }

  CompositeState& state() { return *state_; }
  RNNState& rnn() { return *rnn_; }
  RecurrentCache& cache() { return *cache_; }
  AttentionKVCache& attention() { return *attention_; }

  Status RunLayers(const Tokens& tokens, int64_t batch) {
    LayerOutputs outputs;
    QUIRE_RETURN_IF_ERROR(
        RunLayer(*attention_, attention_->options().layers[0], 0, tokens, {}, &outputs));
    QUIRE_RETURN_IF_ERROR(RunRecurrentLayers(*cache_, tokens, nullptr));
    if (!with_rnn_) return Status();
    const std::vector<float> values(static_cast<size_t>(batch), 1.5F);
    return rnn_->Set(0, 0, TensorView(values.data(), DType::kF32, {batch, 1}));
  }

 private:
  void Build() {
    for (const int64_t id : {0, 2}) ASSERT_TRUE(state_->AddSequence(id).ok());
    ASSERT_TRUE(state_->BeginForward(kIds<0>, kIds<100>).ok());
    const float value = 7;
    const TensorView view(&value, DType::kF32, {1, 1});
    if (with_rnn_) {
      ASSERT_TRUE(rnn_->SetAt(0, 0, kIds<69>, view).ok());
    }
    ASSERT_TRUE(RunLayers(Range(0, 100), 1).ok());
    ASSERT_TRUE(state_->EndForward().ok());
    ASSERT_TRUE(state_->ForkSequence(0, 1, 70).ok());
    ASSERT_TRUE(state_->BeginForward(kIds<1>, kIds<10>).ok());
    ASSERT_TRUE(RunLayers(Range(200, 210), 1).ok());
    ASSERT_TRUE(state_->EndForward().ok());
  }

  std::shared_ptr<RNNState> rnn_;
  std::shared_ptr<RecurrentCache> cache_;
  std::shared_ptr<AttentionKVCache> attention_;
  std::unique_ptr<CompositeState> state_;
  bool with_rnn_ = true;
};

using Call = std::function<Status(Scene&)>;

void ExpectEachRefusalIsHarmless(const char* name, const Call& prepare, const Call& call,
                                 bool with_rnn = true) {
  SCOPED_TRACE(name);
  for (int64_t n = 0;; ++n) {
    ASSERT_LT(n, 1000) << "never succeeds";
    Scene scene(with_rnn);
    const Status prepared = prepare(scene);
    ASSERT_TRUE(prepared.ok()) << prepared.ToString();
    const uint64_t digest = scene.state().StateDigest();
    Status status;
    bool refused = false;
    {
      const RefuseAllocation refusal(n);
      status = call(scene);
      refused = refusal.refused();
    }
    const Status sound = scene.state().CheckInvariants();
    ASSERT_TRUE(sound.ok()) << "allocation " << n << ": " << sound.ToString();
    if (!refused) {
      EXPECT_TRUE(status.ok()) << status.ToString();
      return;
    }
    if (status.ok()) continue;  // attention's block merges are left out without memory
    ASSERT_EQ(status.code(), StatusCode::kOutOfMemory) << "allocation " << n;
    ASSERT_EQ(scene.state().StateDigest(), digest) << "allocation " << n;
    status = call(scene);
    ASSERT_TRUE(status.ok()) << "again after allocation " << n << ": " << status.ToString();
    ASSERT_TRUE(scene.state().CheckInvariants().ok());
  }
}

Status Nothing(Scene&) { return Status(); }

TEST(RecurrentAllocationFailure, ControlCalls) {
  const auto expect = [](const char* name, const Call& call) {
    ExpectEachRefusalIsHarmless(name, Nothing, call);
  };
  expect("add", [](Scene& s) { return s.state().AddSequence(70); });
  expect("fork", [](Scene& s) { return s.state().ForkSequence(0, 70); });
  expect("fork at a checkpoint", [](Scene& s) { return s.state().ForkSequence(0, 70, 70); });
  expect("fork at 0", [](Scene& s) { return s.state().ForkSequence(0, 70, 0); });
  expect("pop", [](Scene& s) { return s.state().PopN(1, 10); });
  expect("remove", [](Scene& s) { return s.state().RemoveSequence(1); });
  expect("retain", [](Scene& s) { return s.state().SetRetained(0, true); });
  expect("clear", [](Scene& s) { return s.state().Clear(); });
  expect("replay start", [](Scene& s) { return s.state().ReplayStart(0, 50).status(); });
  expect("begin", [](Scene& s) { return s.state().BeginForward(kIds<0, 1, 2>, kIds<3, 1, 2>); });
  expect("begin of a long prompt",
         [](Scene& s) { return s.state().BeginForward(kIds<2, 1>, kIds<250, 30>); });
}

TEST(RecurrentAllocationFailure, Replays) {
  ExpectEachRefusalIsHarmless(
      "fork with a replay", Nothing, [](Scene& s) { return s.state().ForkSequence(0, 70, 90); },
      false);
  ExpectEachRefusalIsHarmless(
      "pop with a replay", Nothing, [](Scene& s) { return s.state().PopN(1, 3); }, false);
}

// Keys, values and states of 100 tokens as a chunk, into a new sequence.
TEST(RecurrentAllocationFailure, Chunks) {
  Scene writer;
  TestChain chain(writer.state(), {.model = "test", .block_tokens = 100});
  ASSERT_TRUE(chain.Add(writer.state(), 0, 100).ok());
  const std::vector<ChunkView> views = chain.Views(1);
  ExpectEachRefusalIsHarmless("import", Nothing,
                              [&](Scene& scene) { return ImportChunks(scene.state(), 5, views); });
}

// A source that is not asked.
class SilentSource final : public LayerSource {
 public:
  Result<std::span<const LayerKV>> Load(int64_t) override {
    return Status(StatusCode::kTimeout, "silent");
  }
};

TEST(RecurrentAllocationFailure, LoadsOfAForward) {
  SilentSource source;
  const LayerLoad load{.seq_id = 2, .tokens = 100, .source = &source, .only_visible = true};
  ExpectEachRefusalIsHarmless(
      "begin with a load", Nothing,
      [&](Scene& s) {
        return s.state().BeginLoadingForward(kIds<0, 2>, kIds<30, 130>, {&load, 1});
      },
      false);
}

TEST(RecurrentAllocationFailure, CallsInAForward) {
  const Call begin = [](Scene& s) { return s.state().BeginForward(kIds<0, 1>, kIds<30, 2>); };
  const Tokens tokens = Range(300, 332);
  const Call begin_and_run = [&](Scene& s) {
    const Status status = begin(s);
    return status.ok() ? s.RunLayers(tokens, 2) : status;
  };
  const float value = 3;
  const TensorView one(&value, DType::kF32, {1, 1});
  float both[2] = {1, 2};
  const TensorView two(both, DType::kF32, {2, 1});
  const auto expect = [&](const char* name, const Call& call) {
    ExpectEachRefusalIsHarmless(name, begin, call);
  };
  expect("set", [&](Scene& s) { return s.rnn().Set(0, 0, two); });
  expect("get", [&](Scene& s) { return s.rnn().Get(0, 0, two); });
  expect("set a checkpoint", [&](Scene& s) { return s.rnn().SetAt(0, 0, kIds<5>, one); });
  expect("abort", [](Scene& s) { return s.state().AbortForward(); });
  expect("fork of an outsider", [](Scene& s) { return s.state().ForkSequence(2, 70); });
  expect("add", [](Scene& s) { return s.state().AddSequence(70); });
  expect("clear", [](Scene& s) { return s.state().Clear(); });
  ExpectEachRefusalIsHarmless("end", begin_and_run,
                              [](Scene& s) { return s.state().EndForward(); });
}

TEST(RecurrentAllocationFailure, LayersTakeNothing) {
  Scene scene;
  ASSERT_TRUE(scene.cache().BeginForward(kIds<0>, kIds<3>).ok());
  const std::vector<float> x(3 * 19, 1.0F);
  const std::vector<float> weight(19 * 4, 0.5F);
  std::vector<float> o(3 * 19);
  const TensorView x_view(x.data(), DType::kF32, {3, 19});
  const TensorView weight_view(weight.data(), DType::kF32, {19, 4});
  const TensorView o_view(o.data(), DType::kF32, {3, 19});
  const int64_t before = AllocationsMade();
  ASSERT_TRUE(scene.cache().Convolution(0, x_view, weight_view, nullptr, true, o_view).ok());
  EXPECT_EQ(AllocationsMade(), before);
}

// ---------------------------------------------------------------------- one half refuses

// The call must fail with the code and leave all parts as they were.
void ExpectRefused(Scene& scene, StatusCode code, const Status& status, uint64_t digest) {
  EXPECT_EQ(status.code(), code) << status.ToString();
  EXPECT_EQ(scene.state().StateDigest(), digest);
  const Status sound = scene.state().CheckInvariants();
  EXPECT_TRUE(sound.ok()) << sound.ToString();
}

TEST(CompositeFailure, AttentionLacksPages) {
  Scene scene;
  const uint64_t digest = scene.state().StateDigest();
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(scene.state().BeginForward(kIds<2>, kIds<250>).ok());
    ASSERT_TRUE(scene.state().AbortForward().ok());
  }
  EXPECT_EQ(scene.state().StateDigest(), digest);
  ASSERT_TRUE(scene.state().BeginForward(kIds<2>, kIds<250>).ok());
  ASSERT_TRUE(scene.RunLayers(Range(0, 250), 1).ok());
  ASSERT_TRUE(scene.state().EndForward().ok());
  const uint64_t full = scene.state().StateDigest();
  ExpectRefused(scene, StatusCode::kOutOfPages, scene.state().BeginForward(kIds<2>, kIds<250>),
                full);
  ExpectRefused(scene, StatusCode::kTooLarge, scene.state().BeginForward(kIds<2>, kIds<301>), full);
}

TEST(CompositeFailure, AttentionLacksALayer) {
  Scene scene;
  ASSERT_TRUE(scene.state().BeginForward(kIds<0>, kIds<2>).ok());
  const float value = 2;
  ASSERT_TRUE(scene.rnn().Set(0, 0, TensorView(&value, DType::kF32, {1, 1})).ok());
  ASSERT_TRUE(RunRecurrentLayers(scene.cache(), Range(1, 3), nullptr).ok());
  const uint64_t digest = scene.state().StateDigest();
  ExpectRefused(scene, StatusCode::kBadState, scene.state().EndForward(), digest);
  LayerOutputs outputs;
  const AttentionLayerSpec& spec = scene.attention().options().layers[0];
  ASSERT_TRUE(RunLayer(scene.attention(), spec, 0, Range(1, 3), {}, &outputs).ok());
  ASSERT_TRUE(scene.state().EndForward().ok());
}

TEST(CompositeFailure, ARecurrentPartLacksALayer) {
  Scene scene;
  ASSERT_TRUE(scene.state().BeginForward(kIds<0>, kIds<2>).ok());
  LayerOutputs outputs;
  const AttentionLayerSpec& spec = scene.attention().options().layers[0];
  ASSERT_TRUE(RunLayer(scene.attention(), spec, 0, Range(1, 3), {}, &outputs).ok());
  const uint64_t digest = scene.state().StateDigest();
  ExpectRefused(scene, StatusCode::kBadState, scene.state().EndForward(), digest);
  const float value = 2;
  ASSERT_TRUE(scene.rnn().Set(0, 0, TensorView(&value, DType::kF32, {1, 1})).ok());
  const uint64_t set = scene.state().StateDigest();
  ExpectRefused(scene, StatusCode::kBadState, scene.state().EndForward(), set);
  ASSERT_TRUE(scene.state().AbortForward().ok());
  EXPECT_EQ(scene.state().GetSequenceLength(0).value(), 100);
  EXPECT_EQ(scene.attention().GetSequenceLength(0).value(), 100);
}

TEST(CompositeFailure, OnePartNeedsReplay) {
  Scene scene;
  const uint64_t digest = scene.state().StateDigest();
  EXPECT_EQ(scene.cache().ReplayStart(0, 90).value(), 90);
  EXPECT_EQ(scene.rnn().ReplayStart(0, 90).value(), 70);
  EXPECT_EQ(scene.state().ReplayStart(0, 90).value(), 70);
  const Status status = scene.state().ForkSequence(0, 5, 90);
  ExpectRefused(scene, StatusCode::kNeedsReplay, status, digest);
  EXPECT_NE(status.message().find("go to position 70 "), std::string::npos) << status.ToString();
  ExpectRefused(scene, StatusCode::kNeedsReplay, scene.state().PopN(0, 10), digest);
}

TEST(CompositeFailure, PartsMustBeEmptyAndDistinct) {
  Scene scene;
  const auto code = [](CompositeState::Parts parts) {
    return CompositeState::Create(std::move(parts)).status().code();
  };
  RNNStateOptions options;
  options.num_layers = 1;
  options.states = {{.shape = {1}}};
  options.max_num_sequences = 2;
  const std::shared_ptr<RNNState> empty = *RNNState::Create(options);
  const std::shared_ptr<RNNState> used = *RNNState::Create(options);
  ASSERT_TRUE(used->AddSequence(0).ok());
  EXPECT_EQ(code({.attention = nullptr, .recurrent = {}}), StatusCode::kBadArgument);
  EXPECT_EQ(code({.attention = nullptr, .recurrent = {nullptr}}), StatusCode::kBadArgument);
  EXPECT_EQ(code({.attention = nullptr, .recurrent = {empty, empty}}), StatusCode::kBadArgument);
  EXPECT_EQ(code({.attention = nullptr, .recurrent = {used}}), StatusCode::kBadArgument);
  EXPECT_EQ(code({.attention = nullptr, .recurrent = {empty}}), StatusCode::kOk);
}

}  // namespace
}  // namespace quire
