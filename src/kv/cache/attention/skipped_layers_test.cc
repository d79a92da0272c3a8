// AttentionKVCacheOptions::allow_skipped_layers: what a forward leaves in the layers that it did
// not run. Random forwards of this kind are in kv_walk_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "kv/testing/kv_test_forward.h"
#include "quire/kv_transfer.h"
#include "quire/transfer.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;

AttentionLayerSpec Latent(DType dtype) {
  AttentionLayerSpec spec{
      .num_qo_heads = 4, .num_kv_heads = 1, .qk_head_dim = 20, .v_head_dim = 16, .dtype = dtype};
  spec.latent = true;
  return spec;
}

// Every dtype of keys and values, and a window.
AttentionKVCacheOptions MakeOptions(int64_t page_size = 7) {
  AttentionLayerSpec sliding{4, 2, 8, 8, DType::kF32};
  sliding.window = 5;
  AttentionLayerSpec mixed{4, 2, 8, 6, DType::kF16};
  mixed.v_dtype = DType::kI8;
  AttentionKVCacheOptions options = TestCacheOptions({{4, 2, 8, 8, DType::kF32},
                                                      {4, 4, 8, 4, DType::kF16},
                                                      {4, 1, 6, 8, DType::kBF16},
                                                      {4, 2, 8, 8, DType::kI8},
                                                      {4, 2, 8, 8, DType::kF8E4M3},
                                                      mixed,
                                                      sliding,
                                                      Latent(DType::kF32),
                                                      Latent(DType::kBF16),
                                                      Latent(DType::kI8)},
                                                     {.page_size = page_size});
  options.rope.rotary_dim = 4;
  options.allow_skipped_layers = true;
  return options;
}

Tokens Text(uint64_t first, size_t count) {
  Tokens tokens;
  for (size_t i = 0; i < count; ++i) tokens.push_back(first + i);
  return tokens;
}

Status RunSome(AttentionKVCache& cache, const Tokens& tokens, const std::set<int64_t>& layers,
               std::vector<LayerOutputs>* outputs = nullptr) {
  for (const int64_t l : layers) {
    LayerOutputs out;
    QUIRE_RETURN_IF_ERROR(RunLayer(cache, cache.options().layers[static_cast<size_t>(l)], l, tokens,
                                   ForwardStyle(), &out));
    if (outputs != nullptr) outputs->push_back(out);
  }
  return Status();
}

std::set<int64_t> AllBut(const AttentionKVCache& cache, const std::set<int64_t>& skipped) {
  std::set<int64_t> layers;
  for (int64_t l = 0; l < std::ssize(cache.options().layers); ++l)
    if (!skipped.contains(l)) layers.insert(l);
  return layers;
}

// A forward that appends to one sequence.
void Extend(AttentionKVCache& cache, int64_t id, const Tokens& tokens,
            const std::set<int64_t>& skipped = {}) {
  ASSERT_TRUE(cache.BeginForward(Ids{id}, Ids{std::ssize(tokens)}).ok());
  ASSERT_TRUE(RunSome(cache, tokens, AllBut(cache, skipped)).ok());
  const Status ended = cache.EndForward();
  ASSERT_TRUE(ended.ok()) << ended.ToString();
  const Status sound = cache.CheckInvariants();
  ASSERT_TRUE(sound.ok()) << sound.ToString();
}

StoredRows Stored(AttentionKVCache& cache, int64_t id, int64_t layer, int64_t start,
                  int64_t count) {
  StoredRows rows(cache.options().layers[static_cast<size_t>(layer)], count);
  const Status status = cache.ExportKV(id, layer, start, rows.view());
  EXPECT_TRUE(status.ok()) << status.ToString();
  return rows;
}

// Every byte of keys, values and scales.
bool IsZero(const StoredRows& rows) {
  const auto zero = [](const TestTensor& tensor) {
    return std::ranges::all_of(tensor.bytes(), [](std::byte b) { return b == std::byte{0}; });
  };
  return zero(rows.k) && zero(rows.v) && zero(rows.k_scale) && zero(rows.v_scale);
}

std::unique_ptr<AttentionKVCache> MakeCache(int64_t page_size = 7) {
  auto cache = MakeTestCache(MakeOptions(page_size));
  EXPECT_TRUE(cache->AddSequence(0).ok());
  return cache;
}

TEST(SkippedLayers, HoldZeroBytesInEveryDtype) {
  for (const int64_t page_size : {1, 7, 16, 64}) {
    auto cache = MakeCache(page_size);
    for (int64_t l = 0; l < std::ssize(cache->options().layers); ++l) {
      SCOPED_TRACE("layer " + std::to_string(l) + ", pages of " + std::to_string(page_size));
      ASSERT_TRUE(cache->Clear().ok());
      ASSERT_TRUE(cache->AddSequence(0).ok());
      Extend(*cache, 0, Text(1, 3));        // opens a tile
      Extend(*cache, 0, Text(4, 2), {l});   // in it
      Extend(*cache, 0, Text(6, 40), {l});  // and others
      Extend(*cache, 0, Text(46, 1));
      if (cache->options().layers[static_cast<size_t>(l)].window > 0) continue;  // gone by now
      EXPECT_FALSE(IsZero(Stored(*cache, 0, l, 0, 3)));
      EXPECT_TRUE(IsZero(Stored(*cache, 0, l, 3, 42)));
      EXPECT_FALSE(IsZero(Stored(*cache, 0, l, 45, 1)));
    }
  }
}

TEST(SkippedLayers, AreRefusedWithoutTheOption) {
  AttentionKVCacheOptions options = MakeOptions();
  options.allow_skipped_layers = false;
  auto cache = MakeTestCache(options);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(cache->BeginForward(Ids{0}, Ids{2}).ok());
  ASSERT_TRUE(RunSome(*cache, Text(1, 2), AllBut(*cache, {4})).ok());
  const Status ended = cache->EndForward();
  EXPECT_EQ(ended.code(), StatusCode::kBadState);
  EXPECT_NE(ended.message().find("layer 4 lacks its Append"), std::string::npos);
  ASSERT_TRUE(RunSome(*cache, Text(1, 2), {4}).ok());
  EXPECT_TRUE(cache->EndForward().ok());
}

// What a later forward sees is a token whose key and value are zero.
TEST(SkippedLayers, AreSeenAsZerosByLaterForwards) {
  auto skips = MakeCache();
  AttentionKVCacheOptions options = MakeOptions();
  auto stores = MakeTestCache(options);
  ASSERT_TRUE(stores->AddSequence(0).ok());
  Extend(*skips, 0, Text(1, 9), {0});
  // The same with zeros that the caller stores.
  ASSERT_TRUE(stores->BeginForward(Ids{0}, Ids{9}).ok());
  ASSERT_TRUE(RunSome(*stores, Text(1, 9), AllBut(*stores, {0})).ok());
  TestTensor k(DType::kF32, {9, 2, 8});
  for (int64_t i = 0; i < k.count(); ++i) k.Set(i, 0.0F);
  ASSERT_TRUE(stores->Append(0, k.view(), k.view()).ok());
  ASSERT_TRUE(stores->EndForward().ok());
  std::vector<LayerOutputs> a, b;
  for (auto& [cache, outputs] : {std::pair{skips.get(), &a}, std::pair{stores.get(), &b}}) {
    ASSERT_TRUE(cache->BeginForward(Ids{0}, Ids{3}).ok());
    ASSERT_TRUE(RunSome(*cache, Text(10, 3), AllBut(*cache, {}), outputs).ok());
    ASSERT_TRUE(cache->EndForward().ok());
  }
  for (size_t l = 0; l < a.size(); ++l)
    EXPECT_TRUE(std::ranges::equal(a[l].o.bytes(), b[l].o.bytes())) << "layer " << l;
}

TEST(SkippedLayers, OfForksLeaveTheParentAsItIs) {
  auto cache = MakeCache();
  Extend(*cache, 0, Text(1, 10));
  const StoredRows before = Stored(*cache, 0, 3, 0, 10);
  ASSERT_TRUE(cache->ForkSequence(0, 1, 9).ok());
  Extend(*cache, 1, Text(50, 4), {0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  EXPECT_TRUE(Stored(*cache, 0, 3, 0, 10) == before);
  EXPECT_TRUE(Stored(*cache, 1, 3, 0, 9) == Stored(*cache, 0, 3, 0, 9));
  EXPECT_TRUE(IsZero(Stored(*cache, 1, 3, 9, 4)));
  Extend(*cache, 0, Text(11, 1));
  EXPECT_FALSE(IsZero(Stored(*cache, 0, 3, 10, 1)));
}

TEST(SkippedLayers, OfTreesAreCommittedAsZeros) {
  auto cache = MakeCache();
  Extend(*cache, 0, Text(1, 6));
  for (const std::set<int64_t>& skipped : {std::set<int64_t>{1, 3, 8}, std::set<int64_t>{3}}) {
    ASSERT_TRUE(cache->BeginTreeForward(Ids{0}, Ids{3}, Ids{-1, 0, 0}).ok());
    ASSERT_TRUE(RunSome(*cache, Text(20, 3), AllBut(*cache, skipped)).ok());
    ASSERT_TRUE(cache->EndForward().ok());
    ASSERT_TRUE(cache->CommitAcceptedTokenTreeNodes(Ids{0}, Ids{2}).ok());
  }
  EXPECT_TRUE(IsZero(Stored(*cache, 0, 1, 6, 2)));
  EXPECT_FALSE(IsZero(Stored(*cache, 0, 1, 8, 2)));
  EXPECT_TRUE(IsZero(Stored(*cache, 0, 3, 6, 4)));
  EXPECT_TRUE(IsZero(Stored(*cache, 0, 8, 6, 2)));
  EXPECT_FALSE(IsZero(Stored(*cache, 0, 8, 8, 2)));
  Extend(*cache, 0, Text(30, 1));
}

// The receiver has the sender's bytes in every layer, and all of them.
TEST(SkippedLayers, AreSentAsZeros) {
  auto sender = MakeCache();
  auto receiver = MakeCache(16);
  const std::shared_ptr<LocalChannel> channel = CreateLocalChannel();
  ASSERT_TRUE(channel->Connect(3, receiver->transfer()).ok());
  ASSERT_TRUE(sender->transfer()->SetLayerSink(channel).ok());
  const ReceiveMap map = receiver->transfer()->DisaggPrepareRecv(0, 12).value();
  ASSERT_TRUE(sender->transfer()->DisaggMarkSend(0, 0, std::span(&map, 1), 3, 0).ok());
  Extend(*sender, 0, Text(1, 4), {6});  // of which the window hides what comes later
  Extend(*sender, 0, Text(5, 8), {0, 3, 7, 9});
  const SendProgress sent = sender->transfer()->GetSendProgress(0).value();
  EXPECT_EQ(sent.sent, 12);
  EXPECT_TRUE(sent.failure.ok()) << sent.failure.ToString();
  ASSERT_TRUE(receiver->transfer()->DisaggCommitRecv(map.epoch, map.count).ok());
  for (int64_t l = 0; l < std::ssize(sender->options().layers); ++l) {
    if (sender->options().layers[static_cast<size_t>(l)].window > 0) continue;
    EXPECT_TRUE(Stored(*sender, 0, l, 0, 12) == Stored(*receiver, 0, l, 0, 12)) << "layer " << l;
  }
  EXPECT_TRUE(IsZero(Stored(*receiver, 0, 9, 4, 8)));
}

// Imported tokens of a skipped layer are loaded; a source that fails leaves the forward open.
TEST(SkippedLayers, LoadWhatTheyImport) {
  AttentionKVCacheOptions options = TestCacheOptions(
      {{4, 2, 8, 8, DType::kF32}, {4, 2, 8, 8, DType::kI8}, {4, 2, 8, 8, DType::kF16}}, {});
  options.allow_skipped_layers = true;
  auto writer = MakeTestCache(options);
  ASSERT_TRUE(writer->AddSequence(0).ok());
  Extend(*writer, 0, Text(1, 5));
  std::vector<StoredRows> rows;
  KVBlock block;
  for (int64_t l = 0; l < 3; ++l) rows.push_back(Stored(*writer, 0, l, 0, 5));
  for (const StoredRows& layer : rows) block.push_back(layer.view());
  BlockSource source(std::span<const KVBlock>(&block, 1));
  auto cache = MakeTestCache(options);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  const uint64_t digest = cache->StateDigest();
  const std::vector<LayerLoad> loads = {{.seq_id = 0, .tokens = 5, .source = &source}};
  for (const bool fails : {true, false}) {
    source.arrive = [&](int64_t layer) {
      return fails && layer == 2 ? Status(StatusCode::kTimeout, "late") : Status();
    };
    ASSERT_TRUE(cache->BeginLoadingForward(Ids{0}, Ids{2}, loads).ok());
    ASSERT_TRUE(RunSome(*cache, Text(6, 2), {0}).ok());
    const Status ended = cache->EndForward();
    EXPECT_EQ(ended.code(), fails ? StatusCode::kTimeout : StatusCode::kOk) << ended.ToString();
    if (!fails) break;
    EXPECT_NE(ended.message().find("EndForward: layer 2 of sequence 0"), std::string::npos);
    EXPECT_EQ(cache->EndForward().code(), StatusCode::kBadState);
    ASSERT_TRUE(cache->AbortForward().ok());
    EXPECT_EQ(cache->StateDigest(), digest);
  }
  for (int64_t l = 0; l < 3; ++l)
    EXPECT_TRUE(Stored(*cache, 0, l, 0, 5) == rows[static_cast<size_t>(l)]) << "layer " << l;
  EXPECT_FALSE(IsZero(Stored(*cache, 0, 0, 5, 2)));
  EXPECT_TRUE(IsZero(Stored(*cache, 0, 1, 5, 2)));
  EXPECT_TRUE(IsZero(Stored(*cache, 0, 2, 5, 2)));
}

// DebugGetKV of a tree that grows over several forwards: committed tokens, then nodes in order.
TEST(DebugGetKV, ReadsTheNodesOfATreeInTheirOrder) {
  const AttentionLayerSpec plain{4, 2, 8, 8, DType::kF32};
  AttentionKVCacheOptions options = TestCacheOptions({plain, plain, Latent(DType::kF16)},
                                                     {.page_size = 3, .rope = RopeMode::kNone});
  auto cache = MakeTestCache(options);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  Extend(*cache, 0, Text(1, 5));
  Tokens tokens = Text(1, 5);
  int64_t size = 0;
  for (const int64_t count : {1, 2, 4, 8, 16}) {
    Ids parents;
    for (int64_t n = size; n < size + count; ++n) parents.push_back(n == 0 ? -1 : (n - 1) / 2);
    const Tokens nodes = Text(100 + static_cast<uint64_t>(size), static_cast<size_t>(count));
    ASSERT_TRUE(cache->BeginTreeForward(Ids{0}, Ids{count}, parents).ok());
    ASSERT_TRUE(RunSome(*cache, nodes, {0, 1, 2}).ok());
    ASSERT_TRUE(cache->EndForward().ok());
    tokens.insert(tokens.end(), nodes.begin(), nodes.end());
    size += count;
    for (const auto& [start, end] : {std::pair<int64_t, int64_t>{0, 5 + size},
                                     {3, 5 + size},
                                     {5, 5 + size},
                                     {4 + size, 5 + size},
                                     {2, 5}}) {
      TestTensor k(DType::kF32, {2, end - start, 2, 8}), v(DType::kF32, {2, end - start, 2, 8});
      TestTensor kv(DType::kF16, {1, end - start, 20});
      ASSERT_TRUE(cache->DebugGetKV(0, start, end, k.view(), v.view()).ok());
      ASSERT_TRUE(cache->DebugGetKVMLA(0, start, end, kv.view()).ok());
      const Tokens range(tokens.begin() + start, tokens.begin() + end);
      for (int64_t l = 0; l < 2; ++l) {
        const TokenInputs inputs = MakeTokenInputs(plain, l, DType::kF32, range);
        EXPECT_TRUE(std::ranges::equal(k.rows(l, 1), inputs.k.bytes())) << start << " " << end;
        EXPECT_TRUE(std::ranges::equal(v.rows(l, 1), inputs.v.bytes())) << start << " " << end;
      }
      const TokenInputs inputs = MakeTokenInputs(Latent(DType::kF16), 2, DType::kF16, range);
      EXPECT_TRUE(std::ranges::equal(kv.bytes(), inputs.k.bytes())) << start << " " << end;
    }
    TestTensor over(DType::kF32, {2, size + 6, 2, 8});
    EXPECT_EQ(cache->DebugGetKV(0, 0, size + 6, over.view(), over.view()).code(),
              StatusCode::kBadArgument);
  }
}

}  // namespace
}  // namespace quire
