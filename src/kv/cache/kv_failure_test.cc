// What happens when a call cannot be carried out: the state is as it was, and the same call works
// when the reason is gone. Reasons here: each single allocation of a call failing, no free page, no
// free sequence, a call in the wrong state, every bad argument, a second thread. operator new is
// replaced in this program (allocation_refusal.h), so that the n-th allocation can be refused.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/guard.h"
#include "kv/testing/allocation_refusal.h"
#include "kv/testing/kv_test_forward.h"
#include "quire/attention_kv_cache.h"
#include "quire/kv_export.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;

// Arguments that need no allocation.
template <int64_t... kValues>
constexpr std::array<int64_t, sizeof...(kValues)> kIds = {kValues...};

AttentionKVCacheOptions SmallOptions(int64_t page_size = 4) {
  return TestCacheOptions({{2, 1, 4, 4, DType::kF32}, {2, 1, 4, 4, DType::kF32}},
                          {.max_num_sequences = 8,
                           .token_capacity = 64,
                           .prefill_chunk_size = 40,
                           .page_size = page_size});
}

void Extend(AttentionKVCache& cache, const AttentionKVCacheOptions& options, int64_t id,
            int64_t count) {
  std::vector<uint64_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<uint64_t>(100 * id + i));
  const auto outputs = RunForward(cache, options.layers, Ids{id}, {tokens});
  ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
}

// A state, made again for every trial.
struct Scene {
  std::string name;
  AttentionKVCacheOptions options;
  std::function<void(AttentionKVCache&, const AttentionKVCacheOptions&)> build;
};

// Sequence 0 of 10 tokens, 1 shares 6 and has 3 more, 2 shares 8 of 1's, 3 is empty. Pages of 4.
void BuildForked(AttentionKVCache& cache, const AttentionKVCacheOptions& options) {
  ASSERT_TRUE(cache.AddSequence(0).ok());
  Extend(cache, options, 0, 10);
  ASSERT_TRUE(cache.ForkSequence(0, 1, 6).ok());
  Extend(cache, options, 1, 3);
  ASSERT_TRUE(cache.ForkSequence(1, 2, 8).ok());
  ASSERT_TRUE(cache.AddSequence(3).ok());
}

// The same, of which 0 has a window of its own, beside a long sequence that has lost tokens to one.
void BuildWindows(AttentionKVCache& cache, const AttentionKVCacheOptions& options) {
  BuildForked(cache, options);
  ASSERT_TRUE(cache.EnableSlidingWindowForSeq(0, 8, 1).ok());
  ASSERT_TRUE(cache.AddSequence(4).ok());
  ASSERT_TRUE(cache.EnableSlidingWindowForSeq(4, 9, 5).ok());
  Extend(cache, options, 4, 30);
  ASSERT_LT(cache.HeldTokens(4).value(), 30);
}

// Sequence 2's last range lies in 4 pages and its next slot is taken: the next forward has to
// gather them.
void BuildConsolidationDue(AttentionKVCache& cache, const AttentionKVCacheOptions& options) {
  ASSERT_TRUE(cache.AddSequence(3).ok());
  Extend(cache, options, 3, 16);
  ASSERT_TRUE(cache.ForkSequence(3, 4, 1).ok());
  Extend(cache, options, 4, 15);
  ASSERT_TRUE(cache.ForkSequence(4, 0, 2).ok());
  Extend(cache, options, 0, 14);
  ASSERT_TRUE(cache.ForkSequence(0, 1, 3).ok());
  Extend(cache, options, 1, 13);
  ASSERT_TRUE(cache.ForkSequence(1, 2, 4).ok());
}

std::vector<Scene> Scenes() {
  AttentionKVCacheOptions wide = SmallOptions(16);
  wide.token_capacity = 160;
  AttentionKVCacheOptions odd = SmallOptions(3);
  odd.rope.mode = RopeMode::kInline;
  AttentionKVCacheOptions groups = SmallOptions(4);
  groups.layers[1] = {2, 2, 4, 4, DType::kBF16};
  AttentionKVCacheOptions windows = SmallOptions(4);
  windows.rope.mode = RopeMode::kNormal;
  windows.layers[1].window = 12;
  AttentionKVCacheOptions latent = SmallOptions(4);
  latent.layers[1] = {2, 1, 6, 4, DType::kF32};
  latent.layers[1].latent = true;
  AttentionKVCacheOptions codes = SmallOptions(4);
  codes.layers[0].dtype = DType::kI8;
  codes.layers[0].v_dtype = DType::kF8E4M3;
  return {{"forked", SmallOptions(), BuildForked},
          {"windows", windows, BuildWindows},
          {"forked, pages of 3", odd, BuildForked},
          {"forked, two groups", groups, BuildForked},
          {"forked, a latent layer", latent, BuildForked},
          {"forked, a layer of codes", codes, BuildForked},
          {"consolidation due", wide, BuildConsolidationDue}};
}

// Whether allocations inside the call are optional: block merges are left out when there is no
// memory for them.
enum class WhenRefused : uint8_t { kFails, kMayWorkWithout };

using Call = std::function<Status(AttentionKVCache&)>;

void ExpectEachRefusalIsHarmless(const Scene& scene, const Call& prepare, const Call& call,
                                 WhenRefused when_refused = WhenRefused::kFails) {
  for (int64_t n = 0;; ++n) {
    ASSERT_LT(n, 10000) << "never succeeds";
    const auto cache = MakeTestCache(scene.options);
    scene.build(*cache, scene.options);
    Status status = prepare(*cache);
    ASSERT_TRUE(status.ok()) << status.ToString();
    const uint64_t digest = cache->StateDigest();
    bool refused = false;
    {
      RefuseAllocation refusal(n);
      status = call(*cache);
      refused = refusal.refused();
    }
    const Status sound = cache->CheckInvariants();
    ASSERT_TRUE(sound.ok()) << "allocation " << n << ": " << sound.ToString();
    if (!refused) {
      EXPECT_TRUE(status.ok()) << status.ToString();
      return;
    }
    if (status.ok()) {
      EXPECT_EQ(when_refused, WhenRefused::kMayWorkWithout) << "allocation " << n;
      continue;
    }
    ASSERT_EQ(status.code(), StatusCode::kOutOfMemory) << "allocation " << n;
    ASSERT_EQ(cache->StateDigest(), digest) << "allocation " << n;
    status = call(*cache);
    ASSERT_TRUE(status.ok()) << "again after allocation " << n << ": " << status.ToString();
    ASSERT_TRUE(cache->CheckInvariants().ok());
  }
}

Status Nothing(AttentionKVCache&) { return Status(); }

// An attention call that has failed ends its forward: done again, it begins with a new one.
Call InANewForward(const Call& begin, const Call& call) {
  return [begin, call](AttentionKVCache& cache) -> Status {
    const Status status = call(cache);
    if (status.code() != StatusCode::kBadState) return status;
    QUIRE_RETURN_IF_ERROR(cache.AbortForward());
    QUIRE_RETURN_IF_ERROR(begin(cache));
    return call(cache);
  };
}

Status BeginThree(AttentionKVCache& cache) {
  return cache.BeginForward(kIds<0, 1, 2>, kIds<3, 1, 2>);
}

Call AfterBegin(const Call& prepare) {
  return [prepare](AttentionKVCache& cache) -> Status {
    QUIRE_RETURN_IF_ERROR(BeginThree(cache));
    return prepare(cache);
  };
}

// Tensors for a forward of BeginThree, made before any allocation is refused.
struct ForwardTensors {
  explicit ForwardTensors(const AttentionLayerSpec& layer)
      : spec(layer),
        inputs(MakeTokenInputs(spec, 0, DType::kF32, std::vector<uint64_t>{1, 2, 3, 4, 5, 6})),
        o(DType::kF32, {6, spec.num_qo_heads, spec.v_head_dim}),
        lse(DType::kF32, {6, spec.num_qo_heads}),
        mask(DType::kU8, {9 + 1 + 4}) {
    for (int64_t i = 0; i < mask.count(); ++i) mask.view().data_as<uint8_t>()[i] = i % 3 != 1;
  }
  Status Fused(AttentionKVCache& cache, int64_t layer, const TensorView* hidden = nullptr) const {
    if (spec.latent)
      return cache.AttentionWithMLA(layer, inputs.q.view(), inputs.kv(), o.view(), 0.5, hidden);
    return cache.AttentionWithFusedQKV(layer, inputs.qkv.view(), o.view(), 0.5, hidden);
  }
  Status Attend(AttentionKVCache& cache, int64_t layer, const TensorView* hidden = nullptr) const {
    return cache.Attend(layer, inputs.q.view(), o.view(), &lse.view(), 0.5, hidden);
  }
  Status Shared(AttentionKVCache& cache, int64_t layer, const TensorView* hidden = nullptr) const {
    return cache.AttentionWithSharedKV(layer, inputs.q.view(), o.view(), &lse.view(), 0.5, hidden);
  }
  Status Self(AttentionKVCache& cache, int64_t layer, const TensorView* hidden = nullptr) const {
    return cache.SelfAttention(layer, inputs.q.view(), inputs.k.view(), inputs.v.view(), o.view(),
                               lse.view(), 0.5, hidden);
  }
  AttentionLayerSpec spec;
  TokenInputs inputs;
  TestTensor o, lse;
  TestTensor mask;  // [3 * 3 + 1 * 1 + 2 * 2]
};

Status RunAllLayers(AttentionKVCache& cache, const AttentionKVCacheOptions& options) {
  for (size_t l = 0; l < options.layers.size(); ++l) {
    const ForwardTensors t(options.layers[l]);
    QUIRE_RETURN_IF_ERROR(t.Fused(cache, static_cast<int64_t>(l)));
  }
  return Status();
}

class KVAllocationFailure : public testing::TestWithParam<size_t> {
 protected:
  const Scene scene_ = Scenes()[GetParam()];
};

TEST_P(KVAllocationFailure, ControlCalls) {
  const auto expect = [&](const char* name, const Call& call,
                          WhenRefused when_refused = WhenRefused::kFails) {
    SCOPED_TRACE(name);
    ExpectEachRefusalIsHarmless(scene_, Nothing, call, when_refused);
  };
  expect("add", [](AttentionKVCache& c) { return c.AddSequence(70); });
  expect("fork in mid-page", [](AttentionKVCache& c) { return c.ForkSequence(0, 70, 3); });
  expect("fork at the end", [](AttentionKVCache& c) { return c.ForkSequence(1, 70); });
  expect("fork at 0", [](AttentionKVCache& c) { return c.ForkSequence(1, 70, 0); });
  const WhenRefused optional = WhenRefused::kMayWorkWithout;
  expect(
      "pop own tokens", [](AttentionKVCache& c) { return c.PopN(1, 1); }, optional);
  expect(
      "pop into a shared prefix", [](AttentionKVCache& c) { return c.PopN(2, 3); }, optional);
  expect(
      "pop all", [](AttentionKVCache& c) { return c.PopN(0, c.GetSequenceLength(0).value()); },
      optional);
  for (int64_t id = 0; id < 4; ++id) {
    expect(
        "remove", [id](AttentionKVCache& c) { return c.RemoveSequence(id); }, optional);
  }
  expect("enable a window",
         [](AttentionKVCache& c) { return c.EnableSlidingWindowForSeq(3, 8, 2); });
  expect("held tokens", [](AttentionKVCache& c) { return c.HeldTokens(0).status(); });
  expect("retain", [](AttentionKVCache& c) { return c.SetRetained(0, true); });
  expect("clear", [](AttentionKVCache& c) { return c.Clear(); });
  expect("pages needed",
         [](AttentionKVCache& c) { return c.PagesNeeded(kIds<0, 1, 2>, kIds<3, 1, 2>).status(); });
  expect("begin", BeginThree);
  expect("begin of a long prompt",
         [](AttentionKVCache& c) { return c.BeginForward(kIds<3, 2>, kIds<20, 1>); });
}

TEST_P(KVAllocationFailure, CallsInAForward) {
  const auto expect = [&](const char* name, const Call& prepare, const Call& call,
                          WhenRefused when_refused = WhenRefused::kFails) {
    SCOPED_TRACE(name);
    ExpectEachRefusalIsHarmless(scene_, AfterBegin(prepare), call, when_refused);
  };
  const auto expect_attention = [&](const char* name, const Call& prepare, const Call& call) {
    SCOPED_TRACE(name);
    const Call begin = AfterBegin(prepare);
    ExpectEachRefusalIsHarmless(scene_, begin, InANewForward(begin, call));
  };
  const ForwardTensors t(scene_.options.layers[0]);
  const Call append = [&](AttentionKVCache& c) { return AppendInputs(c, t.spec, 0, t.inputs); };
  const Call run = [&](AttentionKVCache& c) { return RunAllLayers(c, scene_.options); };
  const WhenRefused optional = WhenRefused::kMayWorkWithout;
  expect("append", Nothing, append);
  for (const TensorView* const mask : {static_cast<const TensorView*>(nullptr), &t.mask.view()}) {
    SCOPED_TRACE(mask == nullptr ? "no mask" : "a mask");
    expect_attention("attend", append, [&](AttentionKVCache& c) { return t.Attend(c, 0, mask); });
    expect_attention("shared", append, [&](AttentionKVCache& c) { return t.Shared(c, 0, mask); });
    expect_attention("fused", Nothing, [&](AttentionKVCache& c) { return t.Fused(c, 0, mask); });
    expect_attention("self", Nothing, [&](AttentionKVCache& c) { return t.Self(c, 0, mask); });
  }
  expect_attention("cross", Nothing, [&](AttentionKVCache& c) {
    return c.CrossAttention(0, t.inputs.q.view(), t.o.view(), t.lse.view(), 0.5);
  });
  const ForwardTensors other(scene_.options.layers[1]);
  const Call append_other = [&](AttentionKVCache& c) {
    return AppendInputs(c, other.spec, 1, other.inputs);
  };
  expect("append to the other layer", Nothing, append_other);
  expect_attention("attend to the other layer", append_other,
                   [&](AttentionKVCache& c) { return other.Attend(c, 1, &other.mask.view()); });
  expect(
      "end", run, [](AttentionKVCache& c) { return c.EndForward(); }, optional);
  expect(
      "abort", Nothing, [](AttentionKVCache& c) { return c.AbortForward(); }, optional);
  expect(
      "abort after a layer", append, [](AttentionKVCache& c) { return c.AbortForward(); },
      optional);
  expect("clear", append, [](AttentionKVCache& c) { return c.Clear(); });
  expect("add", Nothing, [](AttentionKVCache& c) { return c.AddSequence(70); });
  expect("fork of an outsider", Nothing, [](AttentionKVCache& c) { return c.ForkSequence(3, 70); });
  expect(
      "pop of an outsider", Nothing,
      [](AttentionKVCache& c) { return c.PopN(3, c.GetSequenceLength(3).value() / 2); }, optional);
  expect("positions", Nothing, [](AttentionKVCache& c) { return c.GetQueryPositions().status(); });
  expect("plan", Nothing, [](AttentionKVCache& c) { return c.DebugPlan().status(); });
}

// The batch of the step before, whose plan is made from that one's.
// Six nodes in all, as BeginThree's rows.
Status BeginTrees(AttentionKVCache& cache) {
  return cache.BeginTreeForward(kIds<0, 1, 2>, kIds<3, 1, 2>, kIds<-1, 0, 0, -1, -1, 0>);
}
Status BeginTreesAgain(AttentionKVCache& cache) {
  return cache.BeginTreeForward(kIds<2, 1, 0>, kIds<3, 2, 1>, kIds<1, 2, 3, 0, 1, 1>);
}

TEST_P(KVAllocationFailure, TokenTrees) {
  const auto expect = [&](const char* name, const Call& prepare, const Call& call,
                          WhenRefused when_refused = WhenRefused::kFails) {
    SCOPED_TRACE(name);
    ExpectEachRefusalIsHarmless(scene_, prepare, call, when_refused);
  };
  const auto grown = [&](AttentionKVCache& c) -> Status {
    QUIRE_RETURN_IF_ERROR(BeginTrees(c));
    QUIRE_RETURN_IF_ERROR(RunAllLayers(c, scene_.options));
    return c.EndForward();
  };
  const auto grown_twice = [&](AttentionKVCache& c) -> Status {
    QUIRE_RETURN_IF_ERROR(grown(c));
    QUIRE_RETURN_IF_ERROR(BeginTreesAgain(c));
    QUIRE_RETURN_IF_ERROR(RunAllLayers(c, scene_.options));
    return c.EndForward();
  };
  const WhenRefused optional = WhenRefused::kMayWorkWithout;
  expect("begin", Nothing, BeginTrees);
  expect("pages needed", Nothing, [](AttentionKVCache& c) {
    return c.PagesNeededForTree(kIds<0, 1, 2>, kIds<3, 1, 2>, kIds<-1, 0, 0, -1, -1, 0>).status();
  });
  expect("pages needed for a second round", grown, [](AttentionKVCache& c) {
    return c.PagesNeededForTree(kIds<2, 1, 0>, kIds<3, 2, 1>, kIds<1, 2, 3, 0, 1, 1>).status();
  });
  const ForwardTensors t(scene_.options.layers[1]);
  const Call masked = [&](AttentionKVCache& c) { return t.Fused(c, 1, &t.mask.view()); };
  const Call masked_self = [&](AttentionKVCache& c) { return t.Self(c, 1, &t.mask.view()); };
  expect("a mask", BeginTrees, InANewForward(BeginTrees, masked));
  expect("self piece with a mask", BeginTrees, InANewForward(BeginTrees, masked_self));
  expect("begin of a second round", grown, BeginTreesAgain);
  expect(
      "abort of a first round", BeginTrees, [](AttentionKVCache& c) { return c.AbortForward(); },
      optional);
  expect(
      "abort of a second round",
      [&](AttentionKVCache& c) -> Status {
        QUIRE_RETURN_IF_ERROR(grown(c));
        return BeginTreesAgain(c);
      },
      [](AttentionKVCache& c) { return c.AbortForward(); }, optional);
  expect(
      "commit", grown_twice,
      [](AttentionKVCache& c) {
        return c.CommitAcceptedTokenTreeNodes(kIds<1, 2, 0>, kIds<2, 4, 3>);
      },
      optional);
  expect(
      "reject", grown_twice,
      [](AttentionKVCache& c) { return c.CommitAcceptedTokenTreeNodes(kIds<2, 0>, kIds<-1, -1>); },
      optional);
  expect(
      "pop nodes", grown_twice, [](AttentionKVCache& c) { return c.PopN(2, 3); }, optional);
  expect(
      "pop nodes and tokens", grown_twice, [](AttentionKVCache& c) { return c.PopN(2, 6); },
      optional);
  expect(
      "remove", grown_twice, [](AttentionKVCache& c) { return c.RemoveSequence(0); }, optional);
  expect("fork", grown_twice, [](AttentionKVCache& c) { return c.ForkSequence(2, 70, 1); });
}

// Each number of free pages below what a round needs refuses it, and changes nothing.
TEST(KVNoRoomForTrees, BeginIsRefusedAtEveryNumberOfPages) {
  const auto build = [](AttentionKVCache& cache, const AttentionKVCacheOptions& options) {
    ASSERT_TRUE(cache.AddSequence(0).ok());
    Extend(cache, options, 0, 10);
    ASSERT_TRUE(cache.ForkSequence(0, 1, 6).ok());
    ASSERT_TRUE(cache.AddSequence(2).ok());
  };
  constexpr std::array<int64_t, 9> kChain = {-1, 0, 1, 2, 3, 4, 5, 6, 7};
  int64_t refusals = 0;
  for (int64_t capacity = 16;; capacity += 4) {
    ASSERT_LT(capacity, 100) << "never succeeds";
    AttentionKVCacheOptions options = SmallOptions(4);
    options.token_capacity = capacity;
    const auto cache = MakeTestCache(options);
    build(*cache, options);
    const uint64_t digest = cache->StateDigest();
    // Node pages: 2 and 1. Path: 1 gets its own page of [4, 8), 2 gets 2.
    std::array<int64_t, 12> parents = {-1, -1, 0};
    std::copy(kChain.begin(), kChain.end(), parents.begin() + 3);
    const Status status = cache->BeginTreeForward(kIds<1, 2>, kIds<3, 9>, parents);
    ASSERT_TRUE(cache->CheckInvariants().ok());
    if (status.ok()) break;
    ++refusals;
    ASSERT_EQ(status.code(), StatusCode::kOutOfPages) << status.ToString();
    ASSERT_EQ(cache->StateDigest(), digest);
  }
  EXPECT_GE(refusals, 6);
}

// A commit of nodes has all it needs, also where no page is free.
TEST(KVAllocationFailure, ATreeForwardAllocatesNothingAfterBegin) {
  for (const Scene& scene : Scenes()) {
    SCOPED_TRACE(scene.name);
    const auto cache = MakeTestCache(scene.options);
    scene.build(*cache, scene.options);
    const ForwardTensors first(scene.options.layers[0]);
    const ForwardTensors second(scene.options.layers[1]);
    ASSERT_TRUE(BeginTrees(*cache).ok());
    const int64_t before = AllocationsMade();
    const Status a = first.Fused(*cache, 0);
    const Status b = second.Fused(*cache, 1);
    const Status c = cache->EndForward();
    EXPECT_EQ(AllocationsMade(), before);
    EXPECT_TRUE(a.ok() && b.ok() && c.ok());
  }
}

TEST_P(KVAllocationFailure, TheSameBatchAgain) {
  const Call step = [&](AttentionKVCache& c) -> Status {
    QUIRE_RETURN_IF_ERROR(c.BeginForward(kIds<0, 1, 2>, kIds<1, 1, 1>));
    QUIRE_RETURN_IF_ERROR(RunAllLayers(c, scene_.options));
    return c.EndForward();
  };
  for (int steps = 1; steps <= 8; ++steps) {
    SCOPED_TRACE(steps);
    const Call prepare = [&](AttentionKVCache& c) {
      Status status;
      for (int i = 0; i < steps && status.ok(); ++i) status = step(c);
      return status;
    };
    ExpectEachRefusalIsHarmless(scene_, prepare, [](AttentionKVCache& c) {
      return c.BeginForward(kIds<0, 1, 2>, kIds<1, 1, 1>);
    });
  }
}

// The layers of all scenes with DebugGetKV are of equal heads and dims.
TEST_P(KVAllocationFailure, DebugCalls) {
  const AttentionLayerSpec& spec = scene_.options.layers[0];
  const AttentionLayerSpec& other = scene_.options.layers[1];
  if (other.num_kv_heads != spec.num_kv_heads) return;
  const int64_t layers = other.latent ? 1 : 2;
  const TestTensor k(DType::kF32, {layers, 2, spec.num_kv_heads, spec.qk_head_dim});
  const TestTensor v(DType::kF32, {layers, 2, spec.num_kv_heads, spec.v_head_dim});
  ExpectEachRefusalIsHarmless(scene_, Nothing, [&](AttentionKVCache& c) {
    return c.DebugGetKV(1, 1, 3, k.view(), v.view());
  });
  ExpectEachRefusalIsHarmless(scene_, Nothing, [&](AttentionKVCache& c) {
    return c.DebugSetKV(1, 1, k.view(), v.view());  // shared: copied first
  });
  if (!other.latent) return;
  const TestTensor kv(DType::kF32, {1, 2, other.qk_head_dim});
  ExpectEachRefusalIsHarmless(
      scene_, Nothing, [&](AttentionKVCache& c) { return c.DebugGetKVMLA(1, 1, 3, kv.view()); });
  ExpectEachRefusalIsHarmless(
      scene_, Nothing, [&](AttentionKVCache& c) { return c.DebugSetKVMLA(1, 1, kv.view()); });
}

// Tensors for two tokens of each layer.
std::vector<StoredRows> TwoTokens(const AttentionKVCacheOptions& options) {
  std::vector<StoredRows> rows;
  for (const AttentionLayerSpec& spec : options.layers) rows.emplace_back(spec, 2);
  return rows;
}

KVBlock BlockOf(const std::vector<StoredRows>& layers) {
  KVBlock block;
  for (const StoredRows& rows : layers) block.push_back(rows.view());
  return block;
}

TEST_P(KVAllocationFailure, ExportAndImport) {
  const std::vector<StoredRows> tensors = TwoTokens(scene_.options);
  const std::vector<KVBlock> blocks(3, BlockOf(tensors));
  for (int64_t id = 0; id < 4; ++id) {
    SCOPED_TRACE("sequence " + std::to_string(id));
    ExpectEachRefusalIsHarmless(scene_, Nothing,
                                [&](AttentionKVCache& c) { return c.ImportKV(id, blocks); });
  }
  ExpectEachRefusalIsHarmless(
      scene_, Nothing, [&](AttentionKVCache& c) { return c.ExportKV(0, 1, 3, blocks[0][1]); });
}

// Sequences 0 and 3 load three blocks each before their rows, 1 nothing.
struct LoadingThree {
  explicit LoadingThree(const AttentionKVCacheOptions& options)
      : tensors(TwoTokens(options)), blocks(3, BlockOf(tensors)), source(blocks) {}
  Status Begin(AttentionKVCache& cache) {
    const std::array<LayerLoad, 2> loads = {LayerLoad{0, 6, &source}, LayerLoad{3, 6, &source}};
    return cache.BeginLoadingForward(kIds<0, 1, 3>, kIds<3, 1, 2>, loads);
  }
  std::vector<StoredRows> tensors;
  std::vector<KVBlock> blocks;
  BlockSource source;
};

TEST_P(KVAllocationFailure, BeginOfAForwardThatLoads) {
  LoadingThree loading(scene_.options);
  ExpectEachRefusalIsHarmless(scene_, Nothing,
                              [&](AttentionKVCache& c) { return loading.Begin(c); });
}

// A source may lack memory too.
TEST_P(KVAllocationFailure, ASourceWithoutMemory) {
  LoadingThree loading(scene_.options);
  const auto cache = MakeTestCache(scene_.options);
  scene_.build(*cache, scene_.options);
  const uint64_t digest = cache->StateDigest();
  const ForwardTensors tensors(scene_.options.layers[0]);
  loading.source.arrive = [](int64_t) -> Status {
    return Status(StatusCode::kInternal, std::string(1000, 'x'));
  };
  ASSERT_TRUE(loading.Begin(*cache).ok());
  Status status;
  {
    RefuseAllocation refusal(0);
    status = tensors.Fused(*cache, 0);
  }
  EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(cache->EndForward().code(), StatusCode::kBadState);
  ASSERT_TRUE(cache->AbortForward().ok());
  EXPECT_EQ(cache->StateDigest(), digest);
}

// The first three tokens of sequence 0 as a chunk, into a sequence that is new.
TEST_P(KVAllocationFailure, Chunks) {
  const auto writer = MakeTestCache(scene_.options);
  scene_.build(*writer, scene_.options);
  ChunkFields fields;
  fields.tokens = {1, 2, 3};
  ExpectEachRefusalIsHarmless(scene_, Nothing, [&](AttentionKVCache& c) {
    // The copy of the fields is the caller's.
    return GuardEntry([&] { return ExportChunk(c, 0, 0, fields).status(); });
  });
  const ChunkBuffer chunk = ExportChunk(*writer, 0, 0, fields).value();
  const ChunkView view = ChunkView::Open(chunk.bytes(), ChunkExpectation{}, {}).value();
  ExpectEachRefusalIsHarmless(scene_, Nothing, [&](AttentionKVCache& c) {
    return ImportChunks(c, 70, std::span(&view, 1));
  });
}

INSTANTIATE_TEST_SUITE_P(Scenes, KVAllocationFailure, testing::Range<size_t>(0, Scenes().size()));

// Runs the rest of an open forward: one layer in one call, the other one in parts, and the end.
void ExpectNoAllocationUpToTheEnd(AttentionKVCache& cache) {
  const ForwardTensors first(cache.options().layers[0]);
  const ForwardTensors second(cache.options().layers[1]);
  const int64_t before = AllocationsMade();
  const Status a = first.Fused(cache, 0);
  const Status b = AppendInputs(cache, second.spec, 1, second.inputs);
  const Status c = second.Attend(cache, 1);
  const Status d = cache.EndForward();
  EXPECT_EQ(AllocationsMade(), before);
  EXPECT_TRUE(a.ok() && b.ok() && c.ok() && d.ok());
}

// What was planned in BeginForward is carried out without memory.
TEST(KVAllocationFailure, AForwardAllocatesNothingAfterBegin) {
  for (const Scene& scene : Scenes()) {
    SCOPED_TRACE(scene.name);
    const auto cache = MakeTestCache(scene.options);
    scene.build(*cache, scene.options);
    ASSERT_TRUE(BeginThree(*cache).ok());
    ExpectNoAllocationUpToTheEnd(*cache);
  }
}

// Nor does one that loads, on top of what its sources allocate.
TEST(KVAllocationFailure, AForwardThatLoadsAllocatesNothingAfterBegin) {
  for (const Scene& scene : Scenes()) {
    SCOPED_TRACE(scene.name);
    const auto cache = MakeTestCache(scene.options);
    scene.build(*cache, scene.options);
    LoadingThree loading(scene.options);
    ASSERT_TRUE(loading.Begin(*cache).ok());
    ExpectNoAllocationUpToTheEnd(*cache);
  }
}

// Calls of a serving loop. The cache is afterwards as it was before.
Status RunSmallCalls(AttentionKVCache& cache) {
  QUIRE_RETURN_IF_ERROR(BeginThree(cache));
  QUIRE_RETURN_IF_ERROR(cache.AbortForward());
  QUIRE_RETURN_IF_ERROR(cache.AddSequence(20));
  QUIRE_RETURN_IF_ERROR(cache.ForkSequence(0, 21, -1));
  QUIRE_RETURN_IF_ERROR(cache.ForkSequence(0, 22, 9));
  QUIRE_RETURN_IF_ERROR(cache.PopN(21, 1));
  QUIRE_RETURN_IF_ERROR(cache.PopN(22, 2));
  for (const int64_t id : {20, 21, 22}) QUIRE_RETURN_IF_ERROR(cache.RemoveSequence(id));
  return Status();
}

// What they have taken once is used again.
TEST(KVAllocationFailure, SmallCallsAllocateNothingTheSecondTime) {
  for (const Scene& scene : Scenes()) {
    SCOPED_TRACE(scene.name);
    const auto cache = MakeTestCache(scene.options);
    scene.build(*cache, scene.options);
    ASSERT_TRUE(RunSmallCalls(*cache).ok());
    const int64_t before = AllocationsMade();
    const Status again = RunSmallCalls(*cache);
    EXPECT_EQ(AllocationsMade(), before);
    EXPECT_TRUE(again.ok()) << again.ToString();
  }
}

TEST(KVAllocationFailure, CreateReportsOutOfMemory) {
  AttentionKVCacheOptions options = SmallOptions();
  for (int64_t n = 0;; ++n) {
    ASSERT_LT(n, 10000);
    AttentionKVCacheOptions copy = options;
    bool refused = false;
    Result<std::unique_ptr<AttentionKVCache>> cache = Status(StatusCode::kInternal, "not run");
    {
      RefuseAllocation refusal(n);
      cache = AttentionKVCache::Create(std::move(copy));
      refused = refusal.refused();
    }
    if (!refused) {
      EXPECT_TRUE(cache.ok()) << cache.status().ToString();
      return;
    }
    ASSERT_FALSE(cache.ok()) << "allocation " << n;
    ASSERT_EQ(cache.status().code(), StatusCode::kOutOfMemory) << "allocation " << n;
  }
}

// An error has a message, which needs memory too: without it the answer is OutOfMemory, never an
// exception.
TEST(KVAllocationFailure, ErrorsWithoutMemoryForTheirMessage) {
  const auto cache = MakeTestCache(SmallOptions());
  BuildForked(*cache, SmallOptions());
  const std::vector<Call> calls = {
      [](AttentionKVCache& c) { return c.AddSequence(0); },
      [](AttentionKVCache& c) { return c.AddSequence(-1); },
      [](AttentionKVCache& c) { return c.RemoveSequence(70); },
      [](AttentionKVCache& c) { return c.ForkSequence(70, 71); },
      [](AttentionKVCache& c) { return c.PopN(0, 1000); },
      [](AttentionKVCache& c) { return c.BeginForward(kIds<70>, kIds<1>); },
      [](AttentionKVCache& c) { return c.BeginForward(kIds<0>, kIds<1000>); },
      [](AttentionKVCache& c) { return c.PagesNeeded(kIds<70>, kIds<1>).status(); },
      [](AttentionKVCache& c) { return c.EndForward(); },
      [](AttentionKVCache& c) { return c.AbortForward(); },
      [](AttentionKVCache& c) { return c.GetSequenceLength(70).status(); },
      [](AttentionKVCache& c) { return c.GetQueryPositions().status(); },
      [](AttentionKVCache& c) { return c.DebugPlan().status(); },
      [](AttentionKVCache& c) { return c.SelectLongRope(70, true); },
      [](AttentionKVCache& c) { return c.Append(0, TensorView(), TensorView()); },
      [](AttentionKVCache& c) { return c.DebugGetKV(70, 0, 1, TensorView(), TensorView()); },
      [](AttentionKVCache& c) { return c.DebugSetKV(70, 0, TensorView(), TensorView()); }};
  const uint64_t digest = cache->StateDigest();
  for (size_t i = 0; i < calls.size(); ++i) {
    bool refused = true;
    for (int64_t n = 0; refused; ++n) {
      Status status;
      {
        RefuseAllocation refusal(n);
        status = calls[i](*cache);
        refused = refusal.refused();
      }
      ASSERT_FALSE(status.ok()) << "call " << i;
      if (refused) {
        EXPECT_EQ(status.code(), StatusCode::kOutOfMemory) << "call " << i;
      } else {
        EXPECT_NE(status.code(), StatusCode::kOutOfMemory) << "call " << i;
      }
      ASSERT_EQ(cache->StateDigest(), digest) << "call " << i;
    }
  }
}

// ---------------------------------------------------------------------- no room

class KVNoRoom : public testing::Test {
 protected:
  KVNoRoom() { BuildForked(*cache_, options_); }
  void TakeAllPages() {
    for (int64_t id = 10; cache_->GetNumAvailablePages() > 0; ++id) {
      ASSERT_TRUE(cache_->AddSequence(id).ok());
      Extend(*cache_, options_, id,
             std::min(options_.page_size * cache_->GetNumAvailablePages(),
                      options_.prefill_chunk_size));
    }
  }
  void ExpectRefused(StatusCode code, const Status& status, uint64_t digest) {
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_EQ(cache_->StateDigest(), digest);
    EXPECT_TRUE(cache_->CheckInvariants().ok());
  }

  const AttentionKVCacheOptions options_ = SmallOptions();
  const std::unique_ptr<AttentionKVCache> cache_ = MakeTestCache(options_);
};

TEST_F(KVNoRoom, BeginWithoutPagesChangesNothingAndWorksLater) {
  TakeAllPages();
  const uint64_t digest = cache_->StateDigest();
  const Ids ids = {3};
  const Ids lengths = {1};
  EXPECT_EQ(cache_->PagesNeeded(ids, lengths).value(), 1);
  for (int i = 0; i < 3; ++i) {
    ExpectRefused(StatusCode::kOutOfPages, cache_->BeginForward(ids, lengths), digest);
  }
  ASSERT_TRUE(cache_->RemoveSequence(10).ok());
  EXPECT_TRUE(cache_->BeginForward(ids, lengths).ok());
}

TEST_F(KVNoRoom, ABatchOfWhichOnlyAPartFitsChangesNothing) {
  TakeAllPages();
  ASSERT_TRUE(cache_->PopN(10, options_.page_size).ok());
  const uint64_t digest = cache_->StateDigest();
  ExpectRefused(StatusCode::kOutOfPages,
                cache_->BeginForward(kIds<3, 10>, Ids{1, options_.page_size + 1}), digest);
  EXPECT_TRUE(cache_->BeginForward(kIds<3>, kIds<1>).ok());
}

TEST_F(KVNoRoom, TheSameBatchAgainWithoutPagesChangesNothingAndWorksLater) {
  TakeAllPages();
  Extend(*cache_, options_, 0, 1);
  Extend(*cache_, options_, 0, 1);  // its page is full now
  const uint64_t digest = cache_->StateDigest();
  for (int i = 0; i < 3; ++i) {
    ExpectRefused(StatusCode::kOutOfPages, cache_->BeginForward(kIds<0>, kIds<1>), digest);
  }
  ASSERT_TRUE(cache_->RemoveSequence(10).ok());
  Extend(*cache_, options_, 0, 1);
  EXPECT_TRUE(cache_->CheckInvariants().ok());
}

TEST_F(KVNoRoom, AppendsInPlaceNeedNoPage) {
  TakeAllPages();
  EXPECT_EQ(cache_->PagesNeeded(kIds<0>, kIds<2>).value(), 0);
  EXPECT_TRUE(cache_->BeginForward(kIds<0>, kIds<2>).ok());
}

TEST_F(KVNoRoom, ForksAndPopsNeedNoPage) {
  TakeAllPages();
  EXPECT_TRUE(cache_->ForkSequence(0, 70, 3).ok());
  EXPECT_TRUE(cache_->PopN(0, 5).ok());
  EXPECT_TRUE(cache_->PopN(70, 1).ok());
  EXPECT_TRUE(cache_->CheckInvariants().ok());
}

TEST_F(KVNoRoom, DebugSetOfASharedTokenNeedsAPage) {
  TakeAllPages();
  const uint64_t digest = cache_->StateDigest();
  const TestTensor k(DType::kF32, {2, 1, 1, 4});
  const TestTensor v(DType::kF32, {2, 1, 1, 4});
  ExpectRefused(StatusCode::kOutOfPages, cache_->DebugSetKV(1, 2, k.view(), v.view()), digest);
  EXPECT_TRUE(cache_->DebugSetKV(0, 9, k.view(), v.view()).ok()) << "a token of its own";
  ASSERT_TRUE(cache_->RemoveSequence(10).ok());
  EXPECT_TRUE(cache_->DebugSetKV(1, 2, k.view(), v.view()).ok());
}

TEST(KVNoRoomToConsolidate, BeginIsRefused) {
  AttentionKVCacheOptions options = SmallOptions(16);
  options.token_capacity = 16 * 3;  // four pages, all taken by the scene
  const auto cache = MakeTestCache(options);
  BuildConsolidationDue(*cache, options);
  ASSERT_EQ(cache->GetNumAvailablePages(), 0);
  EXPECT_EQ(cache->PagesNeeded(kIds<2>, kIds<1>).value(), 1);
  const uint64_t digest = cache->StateDigest();
  EXPECT_EQ(cache->BeginForward(kIds<2>, kIds<1>).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(cache->StateDigest(), digest);
  ASSERT_TRUE(cache->RemoveSequence(1).ok());
  EXPECT_TRUE(cache->BeginForward(kIds<2>, kIds<1>).ok()) << "its slot is free now";
  EXPECT_EQ(cache->GetNumAvailablePages(), 0);
}

TEST_F(KVNoRoom, NoSequenceMoreThanTheLimit) {
  for (int64_t id = 20; cache_->sequence_count() < options_.max_num_sequences; ++id) {
    ASSERT_TRUE(cache_->AddSequence(id).ok());
  }
  const uint64_t digest = cache_->StateDigest();
  ExpectRefused(StatusCode::kTooLarge, cache_->AddSequence(70), digest);
  ExpectRefused(StatusCode::kTooLarge, cache_->ForkSequence(0, 70), digest);
  ASSERT_TRUE(cache_->RemoveSequence(20).ok());
  EXPECT_TRUE(cache_->ForkSequence(0, 70).ok());
}

TEST_F(KVNoRoom, RetainedSequencesDoNotCount) {
  for (int64_t id = 20; cache_->sequence_count() < options_.max_num_sequences; ++id) {
    ASSERT_TRUE(cache_->AddSequence(id).ok());
  }
  ASSERT_TRUE(cache_->SetRetained(0, true).ok());
  EXPECT_TRUE(cache_->SetRetained(0, true).ok()) << "it is already";
  EXPECT_EQ(cache_->retained_sequence_count(), 1);
  EXPECT_TRUE(cache_->ForkSequence(0, 70).ok()) << "the fork takes the free place";
  EXPECT_EQ(cache_->retained_sequence_count(), 1) << "and is active";
  EXPECT_EQ(cache_->sequence_count(), options_.max_num_sequences + 1);

  const uint64_t digest = cache_->StateDigest();
  ExpectRefused(StatusCode::kTooLarge, cache_->SetRetained(0, false), digest);
  ExpectRefused(StatusCode::kTooLarge, cache_->ForkSequence(0, 71), digest);
  ASSERT_TRUE(cache_->RemoveSequence(70).ok());
  EXPECT_TRUE(cache_->SetRetained(0, false).ok());
  EXPECT_TRUE(cache_->SetRetained(0, false).ok()) << "it is already, and nothing more is needed";
  ASSERT_TRUE(cache_->SetRetained(0, true).ok());
  ASSERT_TRUE(cache_->RemoveSequence(0).ok());
  EXPECT_EQ(cache_->retained_sequence_count(), 0);
}

TEST_F(KVNoRoom, RetainedPagesAreFreeOnceTheirSequencesAreRemoved) {
  ASSERT_TRUE(cache_->SetRetained(0, true).ok());
  ASSERT_TRUE(cache_->SetRetained(1, true).ok());
  PageCounts counts = cache_->page_counts();
  EXPECT_EQ(counts.retained_only, 2) << "the last pages of 0 and of 1, which 2 does not see";
  EXPECT_EQ(counts.shared, 3);
  ASSERT_TRUE(cache_->SetRetained(2, true).ok());
  counts = cache_->page_counts();
  EXPECT_EQ(counts.retained_only, 5);
  EXPECT_EQ(counts.free + counts.retained_only, counts.total);
  TakeAllPages();
  EXPECT_EQ(cache_->page_counts().free, 0);
  for (int64_t id = 0; id < 3; ++id) ASSERT_TRUE(cache_->RemoveSequence(id).ok());
  EXPECT_EQ(cache_->GetNumAvailablePages(), 5);
  EXPECT_EQ(cache_->page_counts().retained_only, 0);
}

// ---------------------------------------------------------------------- wrong state

// The state machine of kv-state.md 2.2. Sequences 0, 1, 2 are the batch, 3 is outside it.
struct StateRow {
  const char* name;
  StatusCode idle;
  StatusCode forward;
  Call call;
};

const ForwardTensors& SmallTensors() {
  static const ForwardTensors tensors(SmallOptions().layers[0]);
  return tensors;
}

const KVBlock& TwoTokenBlock() {
  static const std::vector<StoredRows> tensors = TwoTokens(SmallOptions());
  static const KVBlock block = BlockOf(tensors);
  return block;
}

std::vector<StateRow> StateTable() {
  constexpr StatusCode kOk = StatusCode::kOk;
  constexpr StatusCode kBad = StatusCode::kBadState;
  static const TestTensor k(DType::kF32, {2, 1, 1, 4});
  static const TestTensor v(DType::kF32, {2, 1, 1, 4});
  return {
      {"Clear", kOk, kOk, [](AttentionKVCache& c) { return c.Clear(); }},
      {"AddSequence", kOk, kOk, [](AttentionKVCache& c) { return c.AddSequence(70); }},
      {"Remove outsider", kOk, kOk, [](AttentionKVCache& c) { return c.RemoveSequence(3); }},
      {"Remove member", kOk, kBad, [](AttentionKVCache& c) { return c.RemoveSequence(1); }},
      {"PopN outsider", kOk, kOk, [](AttentionKVCache& c) { return c.PopN(3, 0); }},
      {"PopN member", kOk, kBad, [](AttentionKVCache& c) { return c.PopN(1, 1); }},
      {"Fork outsider", kOk, kOk, [](AttentionKVCache& c) { return c.ForkSequence(3, 70); }},
      {"Fork member", kOk, kBad, [](AttentionKVCache& c) { return c.ForkSequence(1, 70); }},
      {"Retain outsider", kOk, kOk, [](AttentionKVCache& c) { return c.SetRetained(3, true); }},
      {"Retain member", kOk, kBad, [](AttentionKVCache& c) { return c.SetRetained(1, true); }},
      {"BeginForward", kOk, kBad,
       [](AttentionKVCache& c) { return c.BeginForward(kIds<3>, kIds<1>); }},
      {"PagesNeeded", kOk, kBad,
       [](AttentionKVCache& c) { return c.PagesNeeded(kIds<3>, kIds<1>).status(); }},
      {"BeginTreeForward", kOk, kBad,
       [](AttentionKVCache& c) { return c.BeginTreeForward(kIds<3>, kIds<1>, kIds<-1>); }},
      {"Commit of no tree", kOk, kBad,
       [](AttentionKVCache& c) { return c.CommitAcceptedTokenTreeNodes({}, {}); }},
      {"EndForward", kBad, kBad, [](AttentionKVCache& c) { return c.EndForward(); }},
      {"AbortForward", kBad, kOk, [](AttentionKVCache& c) { return c.AbortForward(); }},
      {"fused", kBad, kOk,
       [](AttentionKVCache& c) {
         return c.AttentionWithFusedQKV(0, SmallTensors().inputs.qkv.view(),
                                        SmallTensors().o.view(), 0.5);
       }},
      {"Append", kBad, kOk,
       [](AttentionKVCache& c) {
         return c.Append(1, SmallTensors().inputs.k.view(), SmallTensors().inputs.v.view());
       }},
      {"Attend before Append", kBad, kBad,
       [](AttentionKVCache& c) {
         return c.Attend(1, SmallTensors().inputs.q.view(), SmallTensors().o.view(), nullptr, 0.5);
       }},
      {"GetQueryPositions", kBad, kOk,
       [](AttentionKVCache& c) { return c.GetQueryPositions().status(); }},
      {"DebugPlan", kBad, kOk, [](AttentionKVCache& c) { return c.DebugPlan().status(); }},
      {"GetSequenceLength", kOk, kOk,
       [](AttentionKVCache& c) { return c.GetSequenceLength(1).status(); }},
      {"UsesLongRope", kOk, kOk, [](AttentionKVCache& c) { return c.UsesLongRope(1).status(); }},
      {"ExportKV", kOk, kOk,
       [](AttentionKVCache& c) { return c.ExportKV(1, 0, 1, TwoTokenBlock()[0]); }},
      {"ImportKV", kOk, kBad,
       [](AttentionKVCache& c) { return c.ImportKV(3, std::span(&TwoTokenBlock(), 1)); }},
      {"BeginLoadingForward", kOk, kBad,
       [](AttentionKVCache& c) {
         static BlockSource source(std::span(&TwoTokenBlock(), 1));
         const LayerLoad load = {3, 2, &source};
         return c.BeginLoadingForward(kIds<3>, kIds<1>, std::span(&load, 1));
       }},
      {"DebugGetKV", kOk, kOk,
       [](AttentionKVCache& c) { return c.DebugGetKV(1, 0, 1, k.view(), v.view()); }},
  };
}

class KVStateMachine : public testing::TestWithParam<size_t> {};

TEST_P(KVStateMachine, AnswersAsTheTableSays) {
  const StateRow row = StateTable()[GetParam()];
  SCOPED_TRACE(row.name);
  for (const bool in_forward : {false, true}) {
    const AttentionKVCacheOptions options = SmallOptions();
    const auto cache = MakeTestCache(options);
    BuildForked(*cache, options);
    if (in_forward) {
      ASSERT_TRUE(BeginThree(*cache).ok());
    }
    const uint64_t digest = cache->StateDigest();
    const Status status = row.call(*cache);
    EXPECT_EQ(status.code(), in_forward ? row.forward : row.idle) << status.ToString();
    if (!status.ok()) {
      EXPECT_EQ(cache->StateDigest(), digest);
    }
    EXPECT_TRUE(cache->CheckInvariants().ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Table, KVStateMachine, testing::Range<size_t>(0, StateTable().size()));

TEST(KVStateMachine, ARetainedSequenceIsInNoBatch) {
  const AttentionKVCacheOptions options = SmallOptions();
  const auto cache = MakeTestCache(options);
  BuildForked(*cache, options);
  ASSERT_TRUE(cache->SetRetained(1, true).ok());
  const uint64_t digest = cache->StateDigest();
  EXPECT_EQ(cache->BeginForward(kIds<0, 1>, kIds<1, 1>).code(), StatusCode::kBadState);
  EXPECT_EQ(cache->PagesNeeded(kIds<0, 1>, kIds<1, 1>).status().code(), StatusCode::kBadState);
  EXPECT_EQ(cache->StateDigest(), digest);
  ASSERT_TRUE(cache->SetRetained(1, false).ok());
  EXPECT_TRUE(cache->BeginForward(kIds<0, 1>, kIds<1, 1>).ok());
}

TEST(KVStateMachine, EndBeforeAllLayersKeepsTheForwardOpen) {
  const AttentionKVCacheOptions options = SmallOptions();
  const auto cache = MakeTestCache(options);
  BuildForked(*cache, options);
  ASSERT_TRUE(BeginThree(*cache).ok());
  const ForwardTensors& t = SmallTensors();
  ASSERT_TRUE(cache->AttentionWithFusedQKV(0, t.inputs.qkv.view(), t.o.view(), 0.5).ok());
  EXPECT_EQ(cache->EndForward().code(), StatusCode::kBadState);
  ASSERT_TRUE(cache->Append(1, t.inputs.k.view(), t.inputs.v.view()).ok());
  EXPECT_EQ(cache->EndForward().code(), StatusCode::kBadState);
  ASSERT_TRUE(cache->Attend(1, t.inputs.q.view(), t.o.view(), nullptr, 0.5).ok());
  EXPECT_TRUE(cache->EndForward().ok());
  EXPECT_EQ(cache->EndForward().code(), StatusCode::kBadState);
  EXPECT_EQ(cache->GetSequenceLength(0).value(), 13);
}

TEST(KVStateMachine, AfterAFailedAttentionCallOnlyAbortAndClearAreLegal) {
  for (const bool clear : {false, true}) {
    const AttentionKVCacheOptions options = SmallOptions();
    const auto cache = MakeTestCache(options);
    BuildForked(*cache, options);
    ASSERT_TRUE(BeginThree(*cache).ok());
    const ForwardTensors& t = SmallTensors();
    EXPECT_EQ(cache->Append(5, t.inputs.k.view(), t.inputs.v.view()).code(),
              StatusCode::kBadArgument);
    EXPECT_EQ(cache->Append(0, t.inputs.k.view(), t.inputs.v.view()).code(), StatusCode::kBadState);
    EXPECT_EQ(cache->EndForward().code(), StatusCode::kBadState);
    ASSERT_TRUE(clear ? cache->Clear().ok() : cache->AbortForward().ok());
    if (clear) continue;
    ASSERT_TRUE(BeginThree(*cache).ok());
    ASSERT_TRUE(RunAllLayers(*cache, options).ok());
    EXPECT_TRUE(cache->EndForward().ok());
  }
}

// Calls the cache back from a second thread while the first is inside an attention call.
class CallingBackRunner final : public ParallelRunner {
 public:
  int worker_count() const noexcept override { return 1; }
  void Run(int64_t count, Task task, void* context) noexcept override {
    if (call_back) {
      const auto call = std::exchange(call_back, nullptr);
      std::thread(call).join();
    }
    for (int64_t i = 0; i < count; ++i) task(context, i, 0);
  }
  std::function<void()> call_back;
};

TEST(KVStateMachine, ASecondThreadMeanwhileGetsBadState) {
  AttentionKVCacheOptions options = SmallOptions();
  const auto runner = std::make_shared<CallingBackRunner>();
  options.runner = runner;
  const auto cache = MakeTestCache(options);
  BuildForked(*cache, options);
  ASSERT_TRUE(BeginThree(*cache).ok());
  const ForwardTensors& t = SmallTensors();
  const TestTensor k(DType::kF32, {2, 1, 1, 4});
  const TestTensor v(DType::kF32, {2, 1, 1, 4});
  const std::vector<std::pair<const char*, Call>> calls = {
      {"Clear", [](AttentionKVCache& c) { return c.Clear(); }},
      {"AddSequence", [](AttentionKVCache& c) { return c.AddSequence(70); }},
      {"RemoveSequence", [](AttentionKVCache& c) { return c.RemoveSequence(3); }},
      {"ForkSequence", [](AttentionKVCache& c) { return c.ForkSequence(3, 70); }},
      {"PopN", [](AttentionKVCache& c) { return c.PopN(3, 0); }},
      {"BeginForward", [](AttentionKVCache& c) { return c.BeginForward(kIds<3>, kIds<1>); }},
      {"EndForward", [](AttentionKVCache& c) { return c.EndForward(); }},
      {"AbortForward", [](AttentionKVCache& c) { return c.AbortForward(); }},
      {"Append",
       [&](AttentionKVCache& c) { return c.Append(1, t.inputs.k.view(), t.inputs.v.view()); }},
      {"DebugGetKV",
       [&](AttentionKVCache& c) { return c.DebugGetKV(1, 0, 1, k.view(), v.view()); }},
      {"DebugSetKV", [&](AttentionKVCache& c) { return c.DebugSetKV(3, 0, k.view(), v.view()); }}};
  std::vector<StatusCode> codes;
  runner->call_back = [&] {
    for (const auto& [name, call] : calls) codes.push_back(call(*cache).code());
  };
  ASSERT_TRUE(cache->AttentionWithFusedQKV(0, t.inputs.qkv.view(), t.o.view(), 0.5).ok());
  ASSERT_EQ(codes.size(), calls.size());
  for (size_t i = 0; i < codes.size(); ++i) {
    EXPECT_EQ(codes[i], StatusCode::kBadState) << calls[i].first;
  }
  ASSERT_TRUE(cache->AttentionWithFusedQKV(1, t.inputs.qkv.view(), t.o.view(), 0.5).ok());
  EXPECT_TRUE(cache->EndForward().ok());
  EXPECT_TRUE(cache->CheckInvariants().ok());
}

// ---------------------------------------------------------------------- bad arguments

struct BadCall {
  const char* name;
  StatusCode code;
  Call call;
};

TEST(KVBadArguments, EveryOneIsRefusedAndChangesNothing) {
  const AttentionKVCacheOptions options = SmallOptions();
  const auto cache = MakeTestCache(options);
  BuildForked(*cache, options);
  const TestTensor k(DType::kF32, {2, 2, 1, 4});
  const TestTensor v(DType::kF32, {2, 2, 1, 4});
  const TestTensor other(DType::kF32, {2, 2, 1, 5});
  const TestTensor half(DType::kF16, {2, 2, 1, 4});
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  constexpr StatusCode kUnknown = StatusCode::kUnknownSequence;
  constexpr StatusCode kBad = StatusCode::kBadArgument;
  const auto get = [](int64_t id, int64_t start, int64_t end, const TestTensor& a,
                      const TestTensor& b) {
    return [=](AttentionKVCache& c) { return c.DebugGetKV(id, start, end, a.view(), b.view()); };
  };
  const auto set = [](int64_t id, int64_t start, const TestTensor& a, const TestTensor& b) {
    return [=](AttentionKVCache& c) { return c.DebugSetKV(id, start, a.view(), b.view()); };
  };
  const auto begin = [](Ids ids, Ids lengths) {
    return [=](AttentionKVCache& c) { return c.BeginForward(ids, lengths); };
  };
  const auto fork = [](int64_t parent, int64_t child, int64_t position) {
    return [=](AttentionKVCache& c) { return c.ForkSequence(parent, child, position); };
  };
  const std::vector<BadCall> rows = {
      {"add negative", kBad, [](AttentionKVCache& c) { return c.AddSequence(-1); }},
      {"add twice", StatusCode::kSequenceExists,
       [](AttentionKVCache& c) { return c.AddSequence(0); }},
      {"remove unknown", kUnknown, [](AttentionKVCache& c) { return c.RemoveSequence(70); }},
      {"remove negative", kUnknown, [](AttentionKVCache& c) { return c.RemoveSequence(-1); }},
      {"fork unknown", kUnknown, fork(70, 71, 0)},
      {"fork onto itself", StatusCode::kSequenceExists, fork(0, 0, 1)},
      {"fork onto another", StatusCode::kSequenceExists, fork(0, 1, 1)},
      {"fork to negative", kBad, fork(0, -5, 1)},
      {"fork below -1", kBad, fork(0, 70, -2)},
      {"fork behind the end", kBad, fork(0, 70, 11)},
      {"fork far away", kBad, fork(0, 70, kHuge)},
      {"pop unknown", kUnknown, [](AttentionKVCache& c) { return c.PopN(70, 1); }},
      {"pop negative", kBad, [](AttentionKVCache& c) { return c.PopN(0, -1); }},
      {"pop too many", kBad, [](AttentionKVCache& c) { return c.PopN(0, 11); }},
      {"pop far too many", kBad, [](AttentionKVCache& c) { return c.PopN(0, kHuge); }},
      {"retain unknown", kUnknown, [](AttentionKVCache& c) { return c.SetRetained(70, true); }},
      {"begin empty", kBad, begin({}, {})},
      {"begin unequal", kBad, begin({0, 1}, {1})},
      {"begin unknown", kUnknown, begin({0, 70}, {3, 3})},
      {"begin twice", kBad, begin({0, 0}, {1, 1})},
      {"begin length 0", kBad, begin({0, 1}, {1, 0})},
      {"begin negative length", kBad, begin({0, 1}, {1, -1})},
      {"begin over the chunk", StatusCode::kTooLarge, begin({0}, {41})},
      {"begin over the chunk together", StatusCode::kTooLarge, begin({0, 1}, {20, 21})},
      {"begin overflow", StatusCode::kTooLarge, begin({0, 1}, {kHuge, kHuge})},
      {"pages overflow", StatusCode::kTooLarge,
       [](AttentionKVCache& c) {
         return c.PagesNeeded(kIds<0, 1>, Ids{kHuge, kHuge}).status();
       }},
      {"length unknown", kUnknown,
       [](AttentionKVCache& c) { return c.GetSequenceLength(70).status(); }},
      {"get unknown", kUnknown, get(70, 0, 2, k, v)},
      {"get negative", kBad, get(0, -1, 1, k, v)},
      {"get nothing", kBad, get(0, 2, 2, k, v)},
      {"get reversed", kBad, get(0, 4, 2, k, v)},
      {"get behind the end", kBad, get(0, 9, 11, k, v)},
      {"get another count", kBad, get(0, 0, 3, k, v)},
      {"get another dim", kBad, get(0, 0, 2, other, v)},
      {"get another dim of v", kBad, get(0, 0, 2, k, other)},
      {"get another dtype", kBad, get(0, 0, 2, half, v)},
      {"set unknown", kUnknown, set(70, 0, k, v)},
      {"set negative", kBad, set(0, -1, k, v)},
      {"set behind the end", kBad, set(0, 9, k, v)},
      {"set far away", kBad, set(0, kHuge, k, v)},
      {"set another dim", kBad, set(0, 0, k, other)},
      {"set another dtype", kBad, set(0, 0, k, half)},
      {"set nothing", kBad, set(0, 0, TestTensor(), TestTensor())},
      {"long rope unknown", kUnknown,
       [](AttentionKVCache& c) { return c.SelectLongRope(70, true); }},
  };
  const uint64_t digest = cache->StateDigest();
  for (const BadCall& row : rows) {
    const Status status = row.call(*cache);
    EXPECT_EQ(status.code(), row.code) << row.name << ": " << status.ToString();
    EXPECT_FALSE(status.message().empty()) << row.name;
    EXPECT_EQ(cache->StateDigest(), digest) << row.name;
  }
  EXPECT_TRUE(cache->CheckInvariants().ok());
}

TEST(KVBadArguments, LongRopeIsChosenWhileEmpty) {
  AttentionKVCacheOptions options = SmallOptions();
  options.rope.scaling = RopeScaling::kLongRope;
  options.rope.original_max_position_embeddings = 32;
  options.rope.short_factors = {1, 1};
  options.rope.long_factors = {2, 3};
  const auto cache = MakeTestCache(options);
  BuildForked(*cache, options);
  EXPECT_EQ(cache->SelectLongRope(0, true).code(), StatusCode::kBadState);
  EXPECT_TRUE(cache->SelectLongRope(3, true).ok());
}

TEST(KVBadArguments, TensorsOfAttentionCalls) {
  const AttentionKVCacheOptions options = SmallOptions();
  const ForwardTensors& t = SmallTensors();
  const auto tensor = [](std::vector<int64_t> shape, DType dtype = DType::kF32) {
    return TestTensor(dtype, std::move(shape));
  };
  const TensorView transposed = [] {
    static float data[6 * 2 * 4];
    int64_t shape[] = {6, 2, 4};
    int64_t strides[] = {8, 1, 2};
    DLTensor dl{};
    dl.data = data;
    dl.device = {kDLCPU, 0};
    dl.ndim = 3;
    dl.dtype = ToDLDataType(DType::kF32);
    dl.shape = shape;
    dl.strides = strides;
    return TensorView::FromDLPack(dl).value();
  }();
  const auto fused = [](int64_t layer, const TensorView& qkv, const TensorView& o) {
    return [=](AttentionKVCache& c) { return c.AttentionWithFusedQKV(layer, qkv, o, 0.5); };
  };
  const auto append = [](int64_t layer, const TensorView& k, const TensorView& v) {
    return [=](AttentionKVCache& c) { return c.Append(layer, k, v); };
  };
  const auto attend = [&t](const TensorView& q, const TensorView& o, const TensorView& lse) {
    return [=, &t](AttentionKVCache& c) {
      QUIRE_RETURN_IF_ERROR(c.Append(0, t.inputs.k.view(), t.inputs.v.view()));
      return c.Attend(0, q, o, &lse, 0.5);
    };
  };
  const TestTensor few = tensor({5, 16});
  const TestTensor wide = tensor({6, 17});
  const TestTensor heads = tensor({6, 3, 4});
  const TestTensor few_o = tensor({5, 2, 4});
  const TestTensor other_o = tensor({6, 2, 5});
  const TestTensor integers = tensor({6, 16}, DType::kI32);
  const TestTensor half = tensor({6, 16}, DType::kF16);
  const TestTensor few_k = tensor({5, 1, 4});
  const TestTensor other_k = tensor({6, 2, 4});
  const TestTensor half_lse = tensor({6, 2}, DType::kF16);
  const TestTensor other_lse = tensor({6, 3});
  const TensorView qkv = t.inputs.qkv.view();
  const TensorView q = t.inputs.q.view();
  const TensorView k = t.inputs.k.view();
  const TensorView v = t.inputs.v.view();
  const TensorView o = t.o.view();
  const TensorView lse = t.lse.view();
  const std::vector<std::pair<const char*, Call>> rows = {
      {"layer -1", fused(-1, qkv, o)},
      {"layer 2", fused(2, qkv, o)},
      {"too few rows", fused(0, few.view(), o)},
      {"too wide", fused(0, wide.view(), o)},
      {"another number of heads", fused(0, heads.view(), o)},
      {"too few rows of o", fused(0, qkv, few_o.view())},
      {"another dim of o", fused(0, qkv, other_o.view())},
      {"integers", fused(0, integers.view(), o)},
      {"neither float32 nor the layer's dtype", fused(0, half.view(), o)},
      {"o strided in its last dimension", fused(0, qkv, transposed)},
      {"empty view", fused(0, TensorView(), o)},
      {"append to layer 2", append(2, k, v)},
      {"too few rows of k", append(0, few_k.view(), v)},
      {"too few rows of v", append(0, k, few_k.view())},
      {"another number of heads of k", append(0, other_k.view(), v)},
      {"another number of heads of v", append(0, k, other_k.view())},
      {"another shape of q", attend(k, o, lse)},
      {"another dim of o", attend(q, other_o.view(), lse)},
      {"lse of another dtype", attend(q, o, half_lse.view())},
      {"lse of another shape", attend(q, o, other_lse.view())},
      {"q strided in its last dimension", attend(transposed, o, lse)},
  };
  for (const auto& [name, call] : rows) {
    const auto cache = MakeTestCache(options);
    BuildForked(*cache, options);
    const uint64_t idle = cache->StateDigest();
    ASSERT_TRUE(BeginThree(*cache).ok());
    const Status status = call(*cache);
    EXPECT_EQ(status.code(), StatusCode::kBadArgument) << name << ": " << status.ToString();
    ASSERT_TRUE(cache->AbortForward().ok()) << name;
    EXPECT_EQ(cache->StateDigest(), idle) << name;
  }
}

TEST(KVBadArguments, OptionsOutOfRange) {
  using Spoil = std::function<void(AttentionKVCacheOptions&)>;
  const std::vector<std::pair<const char*, Spoil>> rows = {
      {"layers", [](auto& o) { o.layers.clear(); }},
      {"num_qo_heads", [](auto& o) { o.layers[0].num_qo_heads = 0; }},
      {"num_qo_heads", [](auto& o) { o.layers[1].num_kv_heads = 3; }},
      {"num_kv_heads", [](auto& o) { o.layers[1].num_kv_heads = -1; }},
      {"qk_head_dim", [](auto& o) { o.layers[0].qk_head_dim = 0; }},
      {"v_head_dim", [](auto& o) { o.layers[0].v_head_dim = -4; }},
      {"dtype", [](auto& o) { o.layers[0].dtype = DType::kI32; }},
      {"window", [](auto& o) { o.layers[0].window = -1; }},
      {"soft_cap", [](auto& o) { o.layers[0].soft_cap = -1; }},
      {"soft_cap", [](auto& o) { o.layers[0].soft_cap = std::nan(""); }},
      {"head_sinks", [](auto& o) { o.layers[0].head_sinks = {1.0F}; }},
      {"max_num_sequences", [](auto& o) { o.max_num_sequences = 0; }},
      {"token_capacity", [](auto& o) { o.token_capacity = 0; }},
      {"prefill_chunk_size", [](auto& o) { o.prefill_chunk_size = 0; }},
      {"page_size", [](auto& o) { o.page_size = -1; }},
      {"abacus", [](auto& o) { o.kernel_path = "abacus"; }},
      {"rotary_dim", [](auto& o) { o.rope.rotary_dim = 3; }},
      {"theta", [](auto& o) { o.rope.theta = -1; }},
  };
  for (const auto& [field, spoil] : rows) {
    AttentionKVCacheOptions options = SmallOptions();
    spoil(options);
    const auto cache = AttentionKVCache::Create(options);
    ASSERT_FALSE(cache.ok()) << field;
    EXPECT_EQ(cache.status().code(), StatusCode::kBadArgument) << cache.status().ToString();
    EXPECT_NE(cache.status().message().find(field), std::string::npos)
        << field << " is not named: " << cache.status().ToString();
  }
}

TEST(KVBadArguments, MoreMemoryThanThereIs) {
  AttentionKVCacheOptions options = SmallOptions();
  options.token_capacity = int64_t{1} << 30;
  options.layers[0].num_qo_heads = options.layers[0].num_kv_heads = 4096;
  options.layers[0].qk_head_dim = options.layers[0].v_head_dim = 4096;
  const auto cache = AttentionKVCache::Create(options);
  ASSERT_FALSE(cache.ok());
  EXPECT_EQ(cache.status().code(), StatusCode::kOutOfMemory) << cache.status().ToString();
}

}  // namespace
}  // namespace quire
