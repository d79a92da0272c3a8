#include "kv/recurrent/recurrent_cache.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "kv/testing/kv_test_forward.h"
#include "kv/testing/recurrent_test_forward.h"
#include "quire/attention_kv_cache.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;

RecurrentCacheOptions SmallOptions(int64_t recent = 2, int64_t thinned = 2) {
  RecurrentCacheOptions options;
  options.layers = AllRecurrentKinds();
  options.max_num_sequences = 4;
  options.prefill_chunk_size = 1000;
  options.recent_checkpoints = recent;
  options.thinned_checkpoints = thinned;
  options.max_retained_slots = 8;
  options.runner = std::make_shared<SerialRunner>();
  options.poison_freed_slots = true;
  return options;
}

std::unique_ptr<RecurrentCache> MakeCache(const RecurrentCacheOptions& options) {
  auto cache = RecurrentCache::Create(options);
  EXPECT_TRUE(cache.ok()) << cache.status().ToString();
  return *std::move(cache);
}

Tokens Range(uint64_t begin, uint64_t end) {
  Tokens tokens;
  for (uint64_t token = begin; token < end; ++token) tokens.push_back(token);
  return tokens;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// States and outputs of these tokens prefilled alone at once, on the scalar path.
struct Alone {
  explicit Alone(const Tokens& tokens) {
    RecurrentCacheOptions options = SmallOptions();
    options.kernel_path = "scalar";
    options.prefill_chunk_size = 10000;
    const auto cache = MakeCache(options);
    EXPECT_TRUE(cache->AddSequence(0).ok());
    if (!tokens.empty()) {
      EXPECT_TRUE(RunRecurrentForward(*cache, Ids{0}, {tokens}, &outputs).ok());
    }
    states = StatesOf(*cache, 0);
  }
  RecurrentOutputs outputs;
  std::vector<float> states;
};

// Whether `outputs` are the last `count` rows of `all`.
bool AreLastRows(const RecurrentOutputs& outputs, const RecurrentOutputs& all) {
  for (size_t l = 0; l < outputs.size(); ++l) {
    const std::vector<float> tail(all[l].end() - static_cast<std::ptrdiff_t>(outputs[l].size()),
                                  all[l].end());
    if (!SameBits(outputs[l], tail)) return false;
  }
  return true;
}

// The most that sequences and rows of a forward can ask for is there, and no slot more.
TEST(RecurrentCacheTest, EveryForwardFindsRoomAndTheWorstTakesAll) {
  // Lengths one before a checkpoint, of sequences that keep all they can.
  constexpr int64_t kBefore = 10 * kRecurrentCheckpointInterval - 1;
  for (const int64_t chunk : {1, 2, 3, 4, 5, 6, 40, 69, 70, 133, 134, 260, 261, 262, 600}) {
    SCOPED_TRACE(chunk);
    RecurrentCacheOptions options = SmallOptions(2, 1);
    options.layers.resize(1);
    options.max_num_sequences = 3;
    options.max_retained_slots = 0;
    options.prefill_chunk_size = chunk;
    const auto cache = MakeCache(options);
    for (const int64_t id : {0, 1, 2}) {
      ASSERT_TRUE(cache->AddSequence(id).ok());
      for (int64_t done = 0; done < kBefore;) {
        const int64_t count = std::min(chunk, kBefore - done);
        ASSERT_TRUE(RunRecurrentForward(
                        *cache, Ids{id},
                        {Range(static_cast<uint64_t>(done), static_cast<uint64_t>(done + count))})
                        .ok());
        done += count;
      }
    }
    // Two rows reach a checkpoint and a token behind it; each interval more reaches another.
    int64_t left = chunk;
    std::vector<int64_t> rows(static_cast<size_t>(std::min<int64_t>(3, chunk)), 1);
    left -= std::ssize(rows);
    for (int64_t& count : rows) count += left-- > 0;
    for (int64_t& count : rows) {
      for (int more = 0; more < 2 && left >= kRecurrentCheckpointInterval; ++more) {
        count += kRecurrentCheckpointInterval;
        left -= kRecurrentCheckpointInterval;
      }
    }
    Ids ids;
    for (size_t i = 0; i < rows.size(); ++i) ids.push_back(static_cast<int64_t>(i));
    ASSERT_TRUE(cache->BeginForward(ids, rows).ok());
    EXPECT_EQ(cache->slot_counts().free, 0);
    ASSERT_TRUE(cache->AbortForward().ok());
    EXPECT_TRUE(cache->CheckInvariants().ok());
  }
}

TEST(RecurrentCacheTest, OutputsAreThoseOfTheNaiveModel) {
  const Tokens tokens = Range(0, 150);
  const Alone alone(tokens);
  const RecurrentOutputs naive = NaiveOutputs(AllRecurrentKinds(), tokens);
  for (size_t l = 0; l < naive.size(); ++l) {
    ASSERT_EQ(alone.outputs[l].size(), naive[l].size());
    for (size_t i = 0; i < naive[l].size(); ++i) {
      ASSERT_NEAR(alone.outputs[l][i], naive[l][i], 1e-5 * (1 + std::abs(naive[l][i])))
          << "layer " << l << " element " << i;
    }
  }
}

TEST(RecurrentCacheTest, CutsBatchAndThreadsDoNotMatter) {
  const Tokens tokens = Range(0, 200);
  const Alone alone(tokens);
  for (const std::string& path : KernelPaths()) {
    RecurrentCacheOptions options = SmallOptions();
    options.kernel_path = path;
    options.runner = CreateThreadPool(3).value();
    const auto cache = MakeCache(options);
    for (const int64_t id : {0, 1}) ASSERT_TRUE(cache->AddSequence(id).ok());
    uint64_t begin = 0;
    for (const uint64_t count : {1u, 63u, 1u, 2u, 70u, 60u, 3u}) {
      RecurrentOutputs outputs;  // in a batch with another sequence behind it
      ASSERT_TRUE(RunRecurrentForward(
                      *cache, Ids{0, 1},
                      {Range(begin, begin + count), Range(7000 + begin, 7003 + begin)}, &outputs)
                      .ok());
      begin += count;
      const Alone prefix(Range(0, begin));
      for (size_t l = 0; l < outputs.size(); ++l) {
        outputs[l].resize(count * static_cast<size_t>(OutputSize(options.layers[l])));
      }
      EXPECT_TRUE(AreLastRows(outputs, prefix.outputs)) << path << " up to " << begin;
    }
    EXPECT_EQ(begin, 200u);
    EXPECT_TRUE(SameBits(StatesOf(*cache, 0), alone.states));
  }
}

TEST(RecurrentCacheTest, EveryPositionOfTheSpanIsReached) {
  for (const int64_t length : {5, 64, 65, 128, 191, 192, 300}) {
    const Tokens tokens = Range(0, static_cast<uint64_t>(length));
    const auto cache = MakeCache(SmallOptions());
    ASSERT_TRUE(cache->AddSequence(0).ok());
    ASSERT_TRUE(RunRecurrentForward(*cache, Ids{0}, {tokens}).ok());
    const int64_t oldest = std::max<int64_t>(0, 64 * (length / 64 - 1));
    for (int64_t position = oldest; position <= length; ++position) {
      if (length > 100 && position % 7 != 0 && position % 64 > 1) continue;
      ASSERT_TRUE(cache->ForkSequence(0, 1, position).ok()) << position << " of " << length;
      const Alone alone(Range(0, static_cast<uint64_t>(position)));
      EXPECT_TRUE(SameBits(StatesOf(*cache, 1), alone.states)) << position << " of " << length;
      ASSERT_TRUE(cache->CheckInvariants().ok()) << cache->CheckInvariants().ToString();
      ASSERT_TRUE(cache->RemoveSequence(1).ok());
    }
  }
}

TEST(RecurrentCacheTest, OlderPositionsNeedReplayAndNothingChanges) {
  const auto cache = MakeCache(SmallOptions(2, 2));
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(RunRecurrentForward(*cache, Ids{0}, {Range(0, 1000)}).ok());
  int64_t exact = 0;
  for (int64_t position = 1; position < 64 * 14; ++position) {
    const int64_t start = cache->ReplayStart(0, position).value();
    const uint64_t digest = cache->StateDigest();
    const Status status = cache->ForkSequence(0, 1, position);
    if (start == position) {
      ++exact;
      ASSERT_TRUE(status.ok()) << position;
      const Alone alone(Range(0, static_cast<uint64_t>(position)));
      EXPECT_TRUE(SameBits(StatesOf(*cache, 1), alone.states));
      ASSERT_TRUE(cache->RemoveSequence(1).ok());
    } else {
      ASSERT_EQ(status.code(), StatusCode::kNeedsReplay);
      EXPECT_NE(status.message().find("go to position " + std::to_string(start) + " "),
                std::string::npos)
          << status.ToString();
      EXPECT_EQ(cache->PopN(0, 1000 - position).code(), StatusCode::kNeedsReplay);
      ASSERT_EQ(cache->StateDigest(), digest);
    }
  }
  EXPECT_EQ(exact, 2) << "thinned checkpoints";
}

TEST(RecurrentCacheTest, GoesOnAfterPopsAsIfNothingHadBeen) {
  const auto cache = MakeCache(SmallOptions());
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(RunRecurrentForward(*cache, Ids{0}, {Range(0, 150)}).ok());
  ASSERT_TRUE(cache->PopN(0, 31).ok());
  Tokens tokens = Range(0, 119);
  for (uint64_t step = 0; step < 20; ++step) {
    RecurrentOutputs outputs;
    const Tokens more = Range(5000 + 9 * step, 5000 + 9 * step + 9);
    ASSERT_TRUE(RunRecurrentForward(*cache, Ids{0}, {more}, &outputs).ok());
    tokens.insert(tokens.end(), more.begin(), more.end());
    ASSERT_TRUE(AreLastRows(outputs, Alone(tokens).outputs));
    const size_t popped = step % 5;
    ASSERT_TRUE(cache->PopN(0, static_cast<int64_t>(popped)).ok());
    tokens.resize(tokens.size() - popped);
    ASSERT_TRUE(SameBits(StatesOf(*cache, 0), Alone(tokens).states));
    ASSERT_TRUE(cache->CheckInvariants().ok()) << cache->CheckInvariants().ToString();
  }
}

TEST(RecurrentCacheTest, ForksShareAndDoNotDisturbEachOther) {
  const auto cache = MakeCache(SmallOptions());
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(RunRecurrentForward(*cache, Ids{0}, {Range(0, 100)}).ok());
  const StateSlotCounts before = cache->slot_counts();
  ASSERT_TRUE(cache->ForkSequence(0, 1).ok());
  EXPECT_EQ(cache->slot_counts(), before) << "a fork at the end copies nothing";
  // Both write inputs behind position 100 of the block that they share.
  ASSERT_TRUE(RunRecurrentForward(*cache, Ids{0, 1}, {Range(200, 210), Range(300, 310)}).ok());
  for (const int64_t id : {0, 1}) ASSERT_TRUE(cache->PopN(id, 4).ok());
  for (const int64_t id : {0, 1}) {
    Tokens tokens = Range(0, 100);
    const Tokens own = Range(id == 0 ? 200 : 300, id == 0 ? 206 : 306);
    tokens.insert(tokens.end(), own.begin(), own.end());
    EXPECT_TRUE(SameBits(StatesOf(*cache, id), Alone(tokens).states)) << id;
  }
  ASSERT_TRUE(cache->PopN(0, 20).ok());
  EXPECT_TRUE(SameBits(StatesOf(*cache, 0), Alone(Range(0, 86)).states)) << "shared inputs stand";
  ASSERT_TRUE(cache->CheckInvariants().ok());
}

TEST(RecurrentCacheTest, NarrowInputsAreWidenedExactly) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    const auto whole = MakeCache(SmallOptions());
    const auto parts = MakeCache(SmallOptions());
    RecurrentOutputs outputs;
    RecurrentOutputs last;
    ASSERT_TRUE(whole->AddSequence(0).ok());
    ASSERT_TRUE(parts->AddSequence(0).ok());
    ASSERT_TRUE(RunRecurrentForward(*whole, Ids{0}, {Range(0, 90)}, &outputs, dtype).ok());
    ASSERT_TRUE(RunRecurrentForward(*parts, Ids{0}, {Range(0, 80)}, nullptr, dtype).ok());
    ASSERT_TRUE(parts->PopN(0, 3).ok());
    ASSERT_TRUE(RunRecurrentForward(*parts, Ids{0}, {Range(77, 90)}, &last, dtype).ok());
    EXPECT_TRUE(AreLastRows(last, outputs));
    const Alone alone(Range(0, 90));
    EXPECT_FALSE(AreLastRows(outputs, alone.outputs)) << "the dtype matters";
  }
}

TEST(RecurrentCacheTest, AbortedForwardsLeaveNoTrace) {
  const auto cache = MakeCache(SmallOptions());
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(RunRecurrentForward(*cache, Ids{0}, {Range(0, 100)}).ok());
  const uint64_t digest = cache->StateDigest();
  for (const size_t count : {1u, 40u, 300u}) {
    const Tokens scrap = Range(9000, 9000 + count);
    ASSERT_TRUE(cache->BeginForward(Ids{0}, Ids{static_cast<int64_t>(count)}).ok());
    ASSERT_TRUE(RunRecurrentLayers(*cache, scrap, nullptr).ok());
    ASSERT_TRUE(cache->AbortForward().ok());
    EXPECT_EQ(cache->StateDigest(), digest);
    ASSERT_TRUE(cache->CheckInvariants().ok());
  }
  ASSERT_TRUE(cache->ForkSequence(0, 1, 70).ok());
  EXPECT_TRUE(SameBits(StatesOf(*cache, 1), Alone(Range(0, 70)).states));
  RecurrentOutputs outputs;
  ASSERT_TRUE(RunRecurrentForward(*cache, Ids{0}, {Range(100, 140)}, &outputs).ok());
  EXPECT_TRUE(AreLastRows(outputs, Alone(Range(0, 140)).outputs));
}

TEST(RecurrentCacheTest, RetainedSequencesKeepCheckpointsOnly) {
  const auto cache = MakeCache(SmallOptions(2, 2));
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(RunRecurrentForward(*cache, Ids{0}, {Range(0, 200)}).ok());
  ASSERT_TRUE(cache->SetRetained(0, true).ok());
  EXPECT_EQ(cache->slot_counts().retained, 4);  // 64, 128, 192, 200
  EXPECT_EQ(cache->ForkSequence(0, 1, 199).code(), StatusCode::kNeedsReplay);
  EXPECT_EQ(cache->ReplayStart(0, 199).value(), 192);
  ASSERT_TRUE(cache->ForkSequence(0, 1, 192).ok());
  RecurrentOutputs outputs;
  ASSERT_TRUE(RunRecurrentForward(*cache, Ids{1}, {Range(192, 230)}, &outputs).ok());
  EXPECT_TRUE(AreLastRows(outputs, Alone(Range(0, 230)).outputs));
  ASSERT_TRUE(cache->ForkSequence(0, 2).ok());
  ASSERT_TRUE(RunRecurrentForward(*cache, Ids{2}, {Range(200, 260)}, &outputs).ok());
  ASSERT_TRUE(cache->PopN(2, 57).ok()) << "replays from 200, where its inputs begin";
  EXPECT_TRUE(SameBits(StatesOf(*cache, 2), Alone(Range(0, 203)).states));
  ASSERT_TRUE(cache->CheckInvariants().ok()) << cache->CheckInvariants().ToString();
}

TEST(RecurrentCacheTest, TooFewSlotsAreSaid) {
  RecurrentCacheOptions options = SmallOptions(2, 2);
  options.max_slots = 4;
  const auto cache = MakeCache(options);
  for (const int64_t id : {0, 1}) ASSERT_TRUE(cache->AddSequence(id).ok());
  ASSERT_TRUE(RunRecurrentForward(*cache, Ids{0}, {Range(0, 100)}).ok());  // 64 and 100
  ASSERT_TRUE(RunRecurrentForward(*cache, Ids{1}, {Range(0, 10)}).ok());
  const uint64_t digest = cache->StateDigest();
  const Status status = cache->BeginForward(Ids{0, 1}, Ids{1, 1});
  EXPECT_EQ(status.code(), StatusCode::kOutOfPages) << status.ToString();
  EXPECT_EQ(cache->StateDigest(), digest);
  ASSERT_TRUE(RunRecurrentForward(*cache, Ids{0}, {Range(100, 101)}).ok());
  ASSERT_TRUE(cache->ForkSequence(0, 2, 90).ok());  // the last free slot
  EXPECT_EQ(cache->ForkSequence(0, 3, 91).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(cache->PopN(0, 3).code(), StatusCode::kOutOfPages);
  ASSERT_TRUE(cache->RemoveSequence(1).ok());
  ASSERT_TRUE(cache->PopN(0, 3).ok());
  EXPECT_TRUE(SameBits(StatesOf(*cache, 0), Alone(Range(0, 98)).states));
  ASSERT_TRUE(cache->CheckInvariants().ok());
}

TEST(RecurrentCacheTest, CallsInTheWrongState) {
  const auto cache = MakeCache(SmallOptions());
  ASSERT_TRUE(cache->AddSequence(0).ok());
  const Tokens tokens = Range(0, 3);
  for (int64_t layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(RunRecurrentLayer(*cache, layer, tokens, nullptr).code(), StatusCode::kBadState);
  }
  ASSERT_TRUE(cache->BeginForward(Ids{0}, Ids{3}).ok());
  EXPECT_EQ(cache->BeginForward(Ids{0}, Ids{3}).code(), StatusCode::kBadState);
  for (int64_t layer = 0; layer < 4; ++layer) {
    const Status status = cache->EndForward();
    EXPECT_EQ(status.code(), StatusCode::kBadState);
    EXPECT_NE(status.message().find("layer " + std::to_string(layer)), std::string::npos);
    ASSERT_TRUE(RunRecurrentLayer(*cache, layer, tokens, nullptr).ok());
  }
  std::vector<float> again;
  std::vector<float> first;
  ASSERT_TRUE(RunRecurrentLayer(*cache, 2, tokens, &first).ok());
  ASSERT_TRUE(RunRecurrentLayer(*cache, 2, tokens, &again).ok());
  EXPECT_TRUE(SameBits(first, again)) << "a layer may be run again";
  ASSERT_TRUE(cache->EndForward().ok());
  EXPECT_TRUE(SameBits(StatesOf(*cache, 0), Alone(tokens).states));
  EXPECT_EQ(cache->BeginForward(Ids{0}, Ids{1001}).code(), StatusCode::kTooLarge);
  EXPECT_EQ(cache->BeginForward(Ids{0}, Ids{0}).code(), StatusCode::kBadArgument);
}

TEST(RecurrentCacheTest, BadTensors) {
  const auto cache = MakeCache(SmallOptions());
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(cache->BeginForward(Ids{0}, Ids{3}).ok());
  const uint64_t digest = cache->StateDigest();
  const TestTensor q(DType::kF32, {3, 2, 4});
  const TestTensor v(DType::kF32, {3, 2, 5});
  const TestTensor decay(DType::kF32, {2});
  const auto refused = [&](const TensorView& q_view, const TensorView& k, const TensorView& v_view,
                           const TensorView& d, const TensorView& o, int64_t layer = 1,
                           double scale = 1) {
    const Status status = cache->LinearAttention(layer, q_view, k, v_view, d, o, scale);
    return status.code() == StatusCode::kBadArgument && cache->StateDigest() == digest;
  };
  const TestTensor few(DType::kF32, {2, 2, 4});
  const TestTensor ints(DType::kI32, {3, 2, 4});
  EXPECT_TRUE(refused(few.view(), q.view(), v.view(), decay.view(), v.view()));
  EXPECT_TRUE(refused(q.view(), ints.view(), v.view(), decay.view(), v.view()));
  EXPECT_TRUE(refused(q.view(), v.view(), v.view(), decay.view(), v.view()));
  EXPECT_TRUE(refused(q.view(), q.view(), q.view(), decay.view(), v.view()));
  EXPECT_TRUE(refused(q.view(), q.view(), v.view(), q.view(), v.view()));
  EXPECT_TRUE(refused(q.view(), q.view(), v.view(), decay.view(), q.view()));
  EXPECT_TRUE(refused(q.view(), q.view(), v.view(), decay.view(), v.view(), 0)) << "other kind";
  EXPECT_TRUE(refused(q.view(), q.view(), v.view(), decay.view(), v.view(), 4));
  EXPECT_TRUE(refused(q.view(), q.view(), v.view(), decay.view(), v.view(), -1));
  EXPECT_TRUE(refused(q.view(), q.view(), v.view(), decay.view(), v.view(), 1, NAN));
  const TensorView null(static_cast<void*>(nullptr), DType::kF32, {3, 2, 4});
  EXPECT_TRUE(refused(null, q.view(), v.view(), decay.view(), v.view()));
  EXPECT_TRUE(
      cache->LinearAttention(1, q.view(), q.view(), v.view(), decay.view(), v.view(), 1).ok());
}

TEST(RecurrentCacheTest, BadOptions) {
  const auto refused = [](auto&& change) {
    RecurrentCacheOptions options = SmallOptions();
    change(options);
    return RecurrentCache::Create(options).status().code() == StatusCode::kBadArgument &&
           (!options.kernel_path.empty() ||
            MeasureRecurrentCache(options).status().code() == StatusCode::kBadArgument);
  };
  using Options = RecurrentCacheOptions;
  EXPECT_TRUE(refused([](Options& o) { o.layers.clear(); }));
  EXPECT_TRUE(refused([](Options& o) { o.layers[0].width = 1; }));
  EXPECT_TRUE(refused([](Options& o) { o.layers[0].num_channels = 0; }));
  EXPECT_TRUE(refused([](Options& o) { o.layers[1].num_heads = 3; }));
  EXPECT_TRUE(refused([](Options& o) { o.layers[1].num_key_heads = 0; }));
  EXPECT_TRUE(refused([](Options& o) { o.layers[1].key_dim = int64_t{1} << 30; }));
  EXPECT_TRUE(refused([](Options& o) { o.layers[1].value_dim = -1; }));
  EXPECT_TRUE(refused([](Options& o) { o.max_num_sequences = 0; }));
  EXPECT_TRUE(refused([](Options& o) { o.max_num_sequences = int64_t{1} << 31; }));
  EXPECT_TRUE(refused([](Options& o) { o.prefill_chunk_size = 0; }));
  EXPECT_TRUE(refused([](Options& o) { o.recent_checkpoints = 0; }));
  EXPECT_TRUE(refused([](Options& o) { o.recent_checkpoints = int64_t{1} << 30; }));
  EXPECT_TRUE(refused([](Options& o) { o.thinned_checkpoints = -1; }));
  EXPECT_TRUE(refused([](Options& o) { o.max_slots = -1; }));
  EXPECT_TRUE(refused([](Options& o) { o.kernel_path = "none"; }));
}

// The resident memory of this process, in bytes.
int64_t ResidentBytes() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

// Room for many sequences costs addresses; memory is taken by those that there are.
TEST(RecurrentCacheTest, MemoryIsTakenWhenAStateIsFirstWritten) {
  RecurrentCacheOptions options;
  options.layers = {{.num_heads = 64, .num_key_heads = 1, .key_dim = 64, .value_dim = 64}};
  options.max_num_sequences = 200;
  options.prefill_chunk_size = 512;
  options.runner = std::make_shared<SerialRunner>();
  const int64_t before = ResidentBytes();
  const auto cache = MakeCache(options);
  ASSERT_GT(cache->storage_bytes(), int64_t{1} << 30);
  // One after the other, each in the slots that the one before gave back.
  for (int64_t id = 0; id < 20; ++id) {
    ASSERT_TRUE(cache->AddSequence(id).ok());
    ASSERT_TRUE(RunRecurrentForward(*cache, Ids{id}, {Range(0, 70)}).ok());
    ASSERT_TRUE(cache->RemoveSequence(id).ok());
  }
  EXPECT_LT(ResidentBytes() - before, int64_t{100} << 20);
}

TEST(RecurrentCacheTest, MemoryIsKnownBeforehand) {
  RecurrentCacheOptions options = SmallOptions();
  options.prefill_chunk_size = 100;
  const RecurrentMemory memory = MeasureRecurrentCache(options).value();
  const auto cache = MakeCache(options);
  EXPECT_EQ(cache->storage_bytes(), memory.storage_bytes);
  // What four sequences keep; in a forward of 100 rows their ends, a checkpoint of each and one
  // more; what may be retained.
  EXPECT_EQ(cache->slot_counts().total, 4 * (1 + 2 + 2) + (4 + 4 + 1) + 8);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(RunRecurrentForward(*cache, Ids{0}, {Range(0, 100)}).ok());
  EXPECT_EQ(dynamic_cast<SlottedRecurrentCache&>(*cache).scratch_bytes(), memory.scratch_bytes);
}

// Also in a forward, and of token trees.
TEST(RecurrentCacheTest, ClearGivesAllMemoryBack) {
  RecurrentCacheOptions options = SmallOptions();
  options.max_tree_size = options.max_tree_slots = 8;
  const auto owner = MakeCache(options);
  auto& cache = dynamic_cast<SlottedRecurrentCache&>(*owner);
  ASSERT_EQ(cache.table_bytes(), 0);
  for (const bool in_forward : {false, true, false}) {
    for (const int64_t id : {0, 1, 2}) ASSERT_TRUE(cache.AddSequence(id).ok());
    ASSERT_TRUE(RunRecurrentForward(cache, Ids{0, 1}, {Range(0, 300), Range(5, 90)}).ok());
    ASSERT_TRUE(cache.ForkSequence(0, 3, 200).ok());
    const std::vector<int64_t> one = {2}, two_nodes = {2}, parents = {-1, 0};
    ASSERT_TRUE(cache.BeginTreeForward(one, two_nodes, parents).ok());
    if (!in_forward) {
      ASSERT_TRUE(cache.AbortForward().ok());
    }
    EXPECT_GT(cache.table_bytes(), 0);
    EXPECT_GT(cache.scratch_bytes(), 0);
    ASSERT_TRUE(cache.Clear().ok());
    EXPECT_EQ(cache.table_bytes(), 0);
    EXPECT_EQ(cache.scratch_bytes(), 0);
    EXPECT_EQ(cache.slot_counts().free, cache.slot_counts().total);
    EXPECT_TRUE(cache.CheckInvariants().ok());
  }
}

}  // namespace
}  // namespace quire
