// States of recurrent layers as bytes: out of one cache and into another, alone and together with
// the keys and values of the same tokens.
#include <gtest/gtest.h>

#include <cstring>

#include "kv/testing/kv_test_bytes.h"
#include "kv/testing/kv_test_forward.h"
#include "kv/testing/recurrent_test_forward.h"
#include "quire/composite_state.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;

RecurrentCacheOptions StateOptions() {
  RecurrentCacheOptions options;
  options.layers = AllRecurrentKinds();
  options.max_num_sequences = 4;
  options.prefill_chunk_size = 1000;
  options.recent_checkpoints = 2;
  options.thinned_checkpoints = 2;
  options.max_retained_slots = 8;
  options.max_loads = 2;
  options.runner = std::make_shared<SerialRunner>();
  options.poison_freed_slots = true;
  return options;
}

std::shared_ptr<RecurrentCache> MakeStates(const RecurrentCacheOptions& options = StateOptions()) {
  auto cache = RecurrentCache::Create(options);
  EXPECT_TRUE(cache.ok()) << cache.status().ToString();
  return *std::move(cache);
}

AttentionKVCacheOptions KVOptions(int64_t page_size, int64_t window = 0) {
  AttentionLayerSpec spec{.num_qo_heads = 2,
                          .num_kv_heads = 1,
                          .qk_head_dim = 4,
                          .v_head_dim = 4,
                          .dtype = DType::kBF16};
  AttentionKVCacheOptions options = TestCacheOptions({spec, spec}, {.max_num_sequences = 4,
                                                                    .token_capacity = 400,
                                                                    .prefill_chunk_size = 1000,
                                                                    .page_size = page_size});
  options.layers[1].window = window;
  return options;
}

Tokens Range(uint64_t begin, uint64_t end) {
  Tokens tokens;
  for (uint64_t token = begin; token < end; ++token) tokens.push_back(token);
  return tokens;
}

// A composite with attention layers unless page_size is 0.
struct Joint {
  explicit Joint(int64_t page_size, int64_t window = 0) : recurrent(MakeStates()) {
    if (page_size > 0) attention = MakeTestCache(KVOptions(page_size, window));
    auto made = CompositeState::Create({.attention = attention, .recurrent = {recurrent}});
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    state = *std::move(made);
  }
  // The outputs of all layers.
  std::vector<std::byte> Forward(int64_t id, const Tokens& tokens) {
    const Status begun = state->BeginForward(Ids{id}, Ids{static_cast<int64_t>(tokens.size())});
    EXPECT_TRUE(begun.ok()) << begun.ToString();
    return Finish(tokens);
  }
  // Behind what the source gives.
  Status BeginLoading(int64_t id, ChunkSource* source, int64_t new_tokens) {
    const LayerLoad load{
        .seq_id = id, .tokens = source->tokens(), .source = source, .only_visible = true};
    return state->BeginLoadingForward(Ids{id}, Ids{new_tokens}, {&load, 1});
  }
  // Ends a forward that has begun; its recurrent layers first, as in hybrid models.
  std::vector<std::byte> Finish(const Tokens& tokens) {
    std::vector<std::byte> bytes;
    RecurrentOutputs outputs;
    EXPECT_TRUE(RunRecurrentLayers(*recurrent, tokens, &outputs).ok());
    for (const std::vector<float>& layer : outputs) {
      const auto part = std::as_bytes(std::span(layer));
      bytes.insert(bytes.end(), part.begin(), part.end());
    }
    if (attention != nullptr) {
      for (size_t l = 0; l < attention->options().layers.size(); ++l) {
        LayerOutputs layer;
        EXPECT_TRUE(RunLayer(*attention, attention->options().layers[l], static_cast<int64_t>(l),
                             tokens, {}, &layer)
                        .ok());
        bytes.insert(bytes.end(), layer.o.bytes().begin(), layer.o.bytes().end());
      }
    }
    EXPECT_TRUE(state->EndForward().ok());
    const Status sound = state->CheckInvariants();
    EXPECT_TRUE(sound.ok()) << sound.ToString();
    return bytes;
  }

  std::shared_ptr<RecurrentCache> recurrent;
  std::shared_ptr<AttentionKVCache> attention;
  std::unique_ptr<CompositeState> state;
};

std::vector<std::vector<float>> StatesAt(RecurrentCache& cache, int64_t id, int64_t position) {
  std::vector<std::vector<float>> states;
  const auto& layers = cache.options().layers;
  for (size_t l = 0; l < layers.size(); ++l) {
    const RecurrentLayerSpec& spec = layers[l];
    const bool is_convolution = spec.kind == RecurrentLayerKind::kConvolution;
    const std::vector<int64_t> dims =
        is_convolution ? std::vector<int64_t>{spec.width - 1, spec.num_channels}
                       : std::vector<int64_t>{spec.num_heads, spec.key_dim, spec.value_dim};
    size_t count = 1;
    for (const int64_t dim : dims) count *= static_cast<size_t>(dim);
    states.emplace_back(count);
    const Status status = cache.ExportState(static_cast<int64_t>(l), id, position,
                                            TensorView(states[l].data(), DType::kF32, dims));
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  return states;
}

std::vector<TensorView> Views(const RecurrentCache& cache,
                              std::vector<std::vector<float>>& states) {
  std::vector<TensorView> views;
  for (size_t l = 0; l < states.size(); ++l) {
    const RecurrentLayerSpec& spec = cache.options().layers[l];
    const bool is_convolution = spec.kind == RecurrentLayerKind::kConvolution;
    views.push_back(is_convolution ? TensorView(states[l].data(), DType::kF32,
                                                {spec.width - 1, spec.num_channels})
                                   : TensorView(states[l].data(), DType::kF32,
                                                {spec.num_heads, spec.key_dim, spec.value_dim}));
  }
  return views;
}

// A recurrent state of another library.
class ForeignState final : public RecurrentState {
 public:
  Status Clear() override { return {}; }
  Status AddSequence(int64_t) override { return {}; }
  Status RemoveSequence(int64_t) override { return {}; }
  Status ForkSequence(int64_t, int64_t, int64_t) override { return {}; }
  Status PopN(int64_t, int64_t) override { return {}; }
  Status BeginForward(std::span<const int64_t>, std::span<const int64_t>) override { return {}; }
  Status BeginTreeForward(std::span<const int64_t>, std::span<const int64_t>,
                          std::span<const int64_t>) override {
    return {};
  }
  Status CommitAcceptedTokenTreeNodes(std::span<const int64_t>, std::span<const int64_t>) override {
    return {};
  }
  Result<int64_t> GetTreeSize(int64_t) const override { return int64_t{0}; }
  Status EndForward() override { return {}; }
  Status AbortForward() override { return {}; }
  Status SetRetained(int64_t, bool) override { return {}; }
  Result<int64_t> ReplayStart(int64_t, int64_t position) const override { return position; }
  Status ExportState(int64_t, int64_t, int64_t, const TensorView&) override { return {}; }
  Status ImportState(int64_t, int64_t, std::span<const TensorView>) override { return {}; }
  bool HasSequence(int64_t) const override { return true; }
  int64_t sequence_count() const override { return 1; }
  int64_t retained_sequence_count() const override { return 0; }
  Result<int64_t> GetSequenceLength(int64_t) const override { return int64_t{4}; }
  StateSlotCounts slot_counts() const override { return {}; }
  int64_t storage_bytes() const override { return 0; }
  uint64_t StateDigest() const override { return 0; }
  Status CheckInvariants() const override { return {}; }
};

TEST(RecurrentExport, AStateOfAnotherLibraryIsRefused) {
  ForeignState foreign;
  ChunkFields fields;
  fields.tokens = {1, 2, 3, 4};
  EXPECT_EQ(ExportChunk(foreign, 0, 0, fields).status().code(), StatusCode::kBadArgument);
  EXPECT_EQ(CachePassport(foreign, {}, false).status().code(), StatusCode::kBadArgument);
}

TEST(RecurrentExport, AStateGoesOnInAnotherCacheExactly) {
  const auto writer = MakeStates();
  ASSERT_TRUE(writer->AddSequence(0).ok());
  ASSERT_TRUE(RunRecurrentForward(*writer, Ids{0}, {Range(1, 150)}).ok());
  for (const int64_t position : {64, 128, 149}) {
    SCOPED_TRACE(position);
    auto states = StatesAt(*writer, 0, position);
    const auto reader = MakeStates();
    ASSERT_TRUE(reader->AddSequence(5).ok());
    ASSERT_TRUE(RunRecurrentForward(*reader, Ids{5}, {Range(500, 530)}).ok());  // forgotten
    const Status imported = reader->ImportState(5, position, Views(*reader, states));
    ASSERT_TRUE(imported.ok()) << imported.ToString();
    EXPECT_EQ(*reader->GetSequenceLength(5), position);
    EXPECT_TRUE(reader->CheckInvariants().ok());
    ASSERT_TRUE(writer->ForkSequence(0, 1, position).ok());
    RecurrentOutputs cold, warm;
    for (const Tokens& more : {Range(200, 201), Range(201, 290)}) {
      ASSERT_TRUE(RunRecurrentForward(*writer, Ids{1}, {more}, &cold).ok());
      ASSERT_TRUE(RunRecurrentForward(*reader, Ids{5}, {more}, &warm).ok());
      EXPECT_TRUE(cold == warm);
    }
    EXPECT_EQ(StatesOf(*writer, 1), StatesOf(*reader, 5));
    // Behind the import every position is reached again, before it the beginning alone.
    EXPECT_EQ(*reader->ReplayStart(5, position + 50), position + 50);
    EXPECT_EQ(*reader->ReplayStart(5, position), position);
    EXPECT_EQ(*reader->ReplayStart(5, position - 1), 0);
    ASSERT_TRUE(writer->RemoveSequence(1).ok());
    EXPECT_TRUE(reader->CheckInvariants().ok());
  }
}

TEST(RecurrentExport, OnlyWhatIsHeldComesOut) {
  const auto cache = MakeStates();
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(RunRecurrentForward(*cache, Ids{0}, {Range(1, 100)}).ok());
  auto states = StatesAt(*cache, 0, 99);
  const auto code = [&](int64_t layer, int64_t id, int64_t position) {
    return cache->ExportState(layer, id, position, Views(*cache, states)[0]).code();
  };
  EXPECT_EQ(code(0, 0, 64), StatusCode::kOk);
  EXPECT_EQ(code(0, 0, 63), StatusCode::kNeedsReplay);
  EXPECT_EQ(code(0, 0, 100), StatusCode::kBadArgument);
  EXPECT_EQ(code(0, 0, -1), StatusCode::kBadArgument);
  EXPECT_EQ(code(9, 0, 64), StatusCode::kBadArgument);
  EXPECT_EQ(code(0, 1, 64), StatusCode::kUnknownSequence);
  EXPECT_EQ(code(0, 0, 0), StatusCode::kOk);
  EXPECT_EQ(states[0], std::vector<float>(states[0].size(), 0)) << "the initial state";
}

TEST(RecurrentExport, ARefusedImportChangesNothing) {
  RecurrentCacheOptions options = StateOptions();
  options.max_slots = 7;
  const auto cache = MakeStates(options);
  for (const int64_t id : {0, 1}) ASSERT_TRUE(cache->AddSequence(id).ok());
  ASSERT_TRUE(RunRecurrentForward(*cache, Ids{0}, {Range(1, 100)}).ok());
  auto states = StatesAt(*cache, 0, 99);
  const std::vector<TensorView> views = Views(*cache, states);
  const uint64_t digest = cache->StateDigest();
  EXPECT_EQ(cache->ImportState(0, 99, views).code(), StatusCode::kBadArgument);
  EXPECT_EQ(cache->ImportState(2, 99, views).code(), StatusCode::kUnknownSequence);
  EXPECT_EQ(cache->ImportState(1, 9, std::span(views).first(1)).code(), StatusCode::kBadArgument);
  EXPECT_EQ(cache->StateDigest(), digest);
  // Two states are held, by one and by forks of it, and five more are free.
  int64_t id = 2;
  while (cache->slot_counts().free > 0) {
    ASSERT_TRUE(cache->AddSequence(id).ok());
    if (cache->ImportState(id, 40 + id, views).code() == StatusCode::kOutOfPages) break;
    ASSERT_TRUE(cache->SetRetained(id, true).ok());
    ++id;
  }
  ASSERT_EQ(cache->slot_counts().free, 0);
  const uint64_t full = cache->StateDigest();
  EXPECT_EQ(cache->ImportState(1, 9, views).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(cache->StateDigest(), full);
  EXPECT_EQ(cache->ImportState(2, 90, views).code(), StatusCode::kBadState) << "retained";
  EXPECT_TRUE(cache->CheckInvariants().ok());
}

// A chain of chunks of 40 tokens, computed by a composite.
TestChain ComputeChain(Joint& writer, size_t count) {
  EXPECT_TRUE(writer.state->AddSequence(0).ok());
  TestChain chain(*writer.state, {.model = "test", .block_tokens = 40});
  for (uint64_t end = 41; end <= 40 * count + 1; end += 40) {
    writer.Forward(0, Range(end - 40, end));
    const Status added = chain.Add(*writer.state, 0, 40);
    EXPECT_TRUE(added.ok()) << added.ToString();
  }
  return chain;
}

TEST(CompositeExport, ChunksHoldBothAndGoOnExactly) {
  for (const int64_t page_size : {0, 16}) {
    for (const int64_t window : {0, 7}) {
      Joint writer(page_size, window);
      const TestChain chain = ComputeChain(writer, 4);
      for (size_t count = 1; count <= 4; ++count) {
        SCOPED_TRACE(std::to_string(page_size) + " " + std::to_string(count));
        const int64_t length = 40 * static_cast<int64_t>(count);
        Joint reader(page_size == 0 ? 0 : 5, window);
        const Status imported = ImportChunks(*reader.state, 3, chain.Views(count));
        ASSERT_TRUE(imported.ok()) << imported.ToString();
        EXPECT_EQ(*reader.state->GetSequenceLength(3), length);
        Joint cold(page_size, window);
        ASSERT_TRUE(cold.state->AddSequence(3).ok());
        cold.Forward(3, Range(1, static_cast<uint64_t>(length) + 1));
        for (const Tokens& more : {Range(900, 901), Range(901, 980)})
          ASSERT_TRUE(cold.Forward(3, more) == reader.Forward(3, more));
      }
    }
  }
}

// Everything that can be seen of the sequence is what it is behind an import, then a forward.
TEST(CompositeExport, LoadedLayerByLayerTheyAreAnImport) {
  for (const int64_t page_size : {0, 16}) {
    for (const int64_t window : {0, 7}) {
      Joint writer(page_size, window);
      const TestChain chain = ComputeChain(writer, 5);
      for (const size_t held : {size_t{0}, size_t{1}, size_t{2}}) {
        for (size_t count = held + 1; count <= 5; count += 2) {
          for (const uint64_t fresh : {1, 24, 25, 100, page_size == 0 ? 300 : 99}) {
            SCOPED_TRACE(std::to_string(page_size) + " " + std::to_string(held) + " " +
                         std::to_string(count) + " " + std::to_string(fresh));
            const std::vector<ChunkView> views = chain.Views(count);
            const auto rest = std::span(views).subspan(held);
            Joint loading(page_size == 0 ? 0 : 5, window);
            Joint imported(page_size == 0 ? 0 : 5, window);
            for (Joint* const joint : {&loading, &imported}) {
              ASSERT_TRUE(joint->state->AddSequence(3).ok());
              if (held == 0) continue;
              ASSERT_TRUE(ImportChunks(*joint->state, 3, std::span(views).first(held)).ok());
            }
            ASSERT_TRUE(ImportChunks(*imported.state, 3, rest).ok());
            const Tokens tokens = Range(900, 900 + fresh);
            const auto want = imported.Forward(3, tokens);
            ChunkSource source(*loading.state, rest, 40 * static_cast<int64_t>(held));
            const Status begun =
                loading.BeginLoading(3, &source, static_cast<int64_t>(tokens.size()));
            ASSERT_TRUE(begun.ok()) << begun.ToString();
            ASSERT_TRUE(loading.state->CheckInvariants().ok());
            ASSERT_TRUE(loading.Finish(tokens) == want);
            const int64_t length = *imported.state->GetSequenceLength(3);
            EXPECT_EQ(*loading.state->GetSequenceLength(3), length);
            EXPECT_EQ(loading.recurrent->slot_counts(), imported.recurrent->slot_counts());
            for (int64_t position = 0; position <= length; ++position) {
              ASSERT_EQ(*loading.recurrent->ReplayStart(3, position),
                        *imported.recurrent->ReplayStart(3, position));
            }
            // Back to somewhere behind the load, and on.
            const int64_t back = window == 0 ? std::min<int64_t>(length, 11) : 0;
            for (Joint* const joint : {&loading, &imported}) {
              const int64_t reached = *joint->state->ReplayStart(3, length - back);
              ASSERT_TRUE(joint->state->PopN(3, length - reached).ok());
            }
            for (const Tokens& more : {Range(70, 71), Range(71, 150)})
              ASSERT_TRUE(imported.Forward(3, more) == loading.Forward(3, more));
          }
        }
      }
    }
  }
}

// In a batch, behind a fork, with other sequences that load nothing.
TEST(CompositeExport, ForwardsLoadSomeOfTheirSequences) {
  Joint writer(16);
  const TestChain chain = ComputeChain(writer, 3);
  const std::vector<ChunkView> views = chain.Views(3);
  Joint loading(16);
  Joint imported(16);
  for (Joint* const joint : {&loading, &imported}) {
    ASSERT_TRUE(ImportChunks(*joint->state, 1, std::span(views).first(1)).ok());
    joint->Forward(1, Range(500, 507));
    ASSERT_TRUE(joint->state->ForkSequence(1, 2, 40).ok());
    ASSERT_TRUE(joint->state->AddSequence(4).ok());
  }
  ChunkSource behind(*loading.state, std::span(views).subspan(1), 40);
  ChunkSource whole(*loading.state, views, 0);
  const std::vector<LayerLoad> loads = {
      {.seq_id = 4, .tokens = 120, .source = &whole, .only_visible = true},
      {.seq_id = 2, .tokens = 80, .source = &behind, .only_visible = true}};
  const Status begun = loading.state->BeginLoadingForward(Ids{4, 1, 2}, Ids{3, 2, 4}, loads);
  ASSERT_TRUE(begun.ok()) << begun.ToString();
  ASSERT_TRUE(ImportChunks(*imported.state, 2, std::span(views).subspan(1)).ok());
  ASSERT_TRUE(ImportChunks(*imported.state, 4, views).ok());
  ASSERT_TRUE(imported.state->BeginForward(Ids{4, 1, 2}, Ids{3, 2, 4}).ok());
  ASSERT_TRUE(loading.Finish(Range(800, 809)) == imported.Finish(Range(800, 809)));
  for (const int64_t id : {1, 2, 4}) {
    ASSERT_TRUE(loading.Forward(id, Range(900, 930)) == imported.Forward(id, Range(900, 930)));
  }
}

// Whatever does not come: nothing has happened, and the next try works.
TEST(CompositeExport, AStateThatDoesNotComeLeavesNothingBehind) {
  Joint writer(16, 7);
  const TestChain chain = ComputeChain(writer, 3);
  const std::vector<ChunkView> views = chain.Views(3);
  const auto rest = std::span(views).subspan(1);
  Joint loading(16, 7);
  Joint imported(16, 7);
  for (Joint* const joint : {&loading, &imported})
    ASSERT_TRUE(ImportChunks(*joint->state, 3, std::span(views).first(1)).ok());
  const uint64_t digest = loading.state->StateDigest();
  ChunkSource source(*loading.state, rest, 40);
  const Tokens tokens = Range(900, 905);
  const int64_t layers = 2 + std::ssize(loading.recurrent->options().layers);
  for (int64_t failing = 0; failing < layers; ++failing) {
    SCOPED_TRACE(failing);
    source.arrive = [&](int64_t layer) {
      return layer == failing ? Status(StatusCode::kCorrupt, "damaged") : Status();
    };
    ASSERT_TRUE(loading.BeginLoading(3, &source, 5).ok());
    EXPECT_EQ(*loading.state->GetSequenceLength(3), 125);
    Status status = RunRecurrentLayers(*loading.recurrent, tokens, nullptr);
    for (int64_t l = 0; l < 2 && status.ok(); ++l) {
      LayerOutputs outputs;
      status = RunLayer(*loading.attention, loading.attention->options().layers[0], l, tokens, {},
                        &outputs);
    }
    EXPECT_EQ(status.code(), StatusCode::kCorrupt) << status.ToString();
    EXPECT_NE(status.ToString().find("sequence 3 was not loaded"), std::string::npos);
    EXPECT_EQ(loading.state->EndForward().code(), StatusCode::kBadState);
    ASSERT_TRUE(loading.state->AbortForward().ok());
    EXPECT_EQ(loading.state->StateDigest(), digest);
    ASSERT_TRUE(loading.state->CheckInvariants().ok());
  }
  source.arrive = nullptr;
  ASSERT_TRUE(loading.BeginLoading(3, &source, 5).ok());
  ASSERT_TRUE(ImportChunks(*imported.state, 3, rest).ok());
  EXPECT_TRUE(loading.Finish(tokens) == imported.Forward(3, tokens));
}

TEST(CompositeExport, LoadsThatAreRefusedChangeNothing) {
  Joint writer(16);
  const TestChain chain = ComputeChain(writer, 2);
  const std::vector<ChunkView> views = chain.Views(2);
  Joint joint(16);
  ASSERT_TRUE(joint.state->AddSequence(3).ok());
  joint.Forward(3, Range(1, 41));
  const uint64_t digest = joint.state->StateDigest();
  ChunkSource source(*joint.state, std::span(views).subspan(1), 40);
  const LayerLoad good{.seq_id = 3, .tokens = 40, .source = &source, .only_visible = true};
  const auto refused = [&](const LayerLoad& load, const Ids& ids, const Ids& lengths) {
    const Status status = joint.state->BeginLoadingForward(ids, lengths, {&load, 1});
    EXPECT_EQ(joint.state->StateDigest(), digest);
    EXPECT_TRUE(joint.state->CheckInvariants().ok());
    return status.code();
  };
  LayerLoad load = good;
  load.tokens = 0;
  EXPECT_EQ(refused(load, {3}, {1}), StatusCode::kBadArgument);
  load = good;
  load.source = nullptr;
  EXPECT_EQ(refused(load, {3}, {1}), StatusCode::kBadArgument);
  load = good;
  load.seq_id = 9;
  EXPECT_EQ(refused(load, {3}, {1}), StatusCode::kBadArgument);
  load = good;
  load.tokens = int64_t{1} << 31;
  EXPECT_EQ(refused(load, {3}, {1}), StatusCode::kTooLarge);
  EXPECT_EQ(refused(good, {3}, {0}), StatusCode::kBadArgument);
  EXPECT_EQ(refused(good, {3}, {1001}), StatusCode::kTooLarge);
  EXPECT_EQ(refused(good, {3}, {400}), StatusCode::kOutOfPages) << "the attention part's";
  // A source without states.
  std::vector<KVBlock> blocks(1);
  BlockSource rows(blocks);
  load = good;
  load.source = &rows;
  ASSERT_TRUE(joint.state->BeginLoadingForward(Ids{3}, Ids{1}, {&load, 1}).ok());
  EXPECT_EQ(RunRecurrentLayers(*joint.recurrent, Range(1, 2), nullptr).code(),
            StatusCode::kBadState);
  ASSERT_TRUE(joint.state->AbortForward().ok());
  EXPECT_EQ(joint.state->StateDigest(), digest);
}

TEST(CompositeExport, TogetherOrNotAtAll) {
  Joint writer(16);
  TestChain chain = ComputeChain(writer, 2);
  EXPECT_EQ(chain.Add(*writer.state, 0, 40).code(), StatusCode::kBadArgument);
  Joint reader(16);
  ASSERT_TRUE(reader.state->AddSequence(1).ok());
  reader.Forward(1, Range(1, 41));
  const uint64_t digest = reader.state->StateDigest();
  // A state that is damaged: only of the last chunk it is asked for.
  const ChunkHeader header = chain.Views(2)[1].header();
  const int64_t index = header.Find(SectionKind::kRecurrentState, 2);
  ASSERT_GE(index, 0);
  const auto at = static_cast<size_t>(header.sections[static_cast<size_t>(index)].offset);
  chain.bytes(1)[at] ^= std::byte{1};
  EXPECT_EQ(ImportChunks(*reader.state, 2, chain.Views(2)).code(), StatusCode::kCorrupt);
  EXPECT_EQ(reader.state->StateDigest(), digest);
  EXPECT_TRUE(ImportChunks(*reader.state, 2, chain.Views(1)).ok());
  ASSERT_TRUE(reader.state->RemoveSequence(2).ok());
  chain.bytes(1)[at] ^= std::byte{1};
  // Parts that would end at different positions, and pages that do not suffice.
  auto states = StatesAt(*writer.recurrent, 0, 80);
  const std::vector<TensorView> views = Views(*writer.recurrent, states);
  EXPECT_EQ(reader.state->ImportState(1, 80, {}, std::span(&views, 1)).code(),
            StatusCode::kBadArgument);
  EXPECT_EQ(reader.state->ImportState(1, 80, {}, {}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(reader.state->StateDigest(), digest);
  AttentionKVCacheOptions few = KVOptions(16);
  few.token_capacity = 48;
  Joint small(0);
  small.attention = MakeTestCache(few);
  small.recurrent = MakeStates();
  small.state =
      *CompositeState::Create({.attention = small.attention, .recurrent = {small.recurrent}});
  const uint64_t empty = small.state->StateDigest();
  EXPECT_EQ(ImportChunks(*small.state, 2, chain.Views(2)).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(small.state->StateDigest(), empty);
  EXPECT_TRUE(ImportChunks(*small.state, 2, chain.Views(1)).ok());
  EXPECT_TRUE(small.state->CheckInvariants().ok());
}

TEST(CompositeExport, PassportsNameTheShapesOfStates) {
  const Joint joint(16, 7);
  const Result<Passport> passport = CachePassport(*joint.state, {.model = "test"}, false);
  ASSERT_TRUE(passport.ok()) << passport.status().ToString();
  const std::vector<RecurrentLayerSpec>& layers = joint.recurrent->options().layers;
  ASSERT_EQ(passport->layers.size(), 2 + layers.size());
  EXPECT_EQ(passport->layers[1].window, 7);
  EXPECT_EQ(passport->layers[0].kind, StateKind::kAttention);
  for (size_t l = 0; l < layers.size(); ++l) {
    const PassportLayer& layer = passport->layers[2 + l];
    EXPECT_EQ(layer.kind, StateKind::kRecurrent);
    EXPECT_EQ(layer.dtype, ElementType(DType::kF32));
    const bool is_convolution = layers[l].kind == RecurrentLayerKind::kConvolution;
    EXPECT_EQ(layer.kv_heads, is_convolution ? 1 : layers[l].num_heads);
    EXPECT_EQ(layer.head_dim, is_convolution ? layers[l].width - 1 : layers[l].key_dim);
    EXPECT_EQ(layer.v_head_dim, is_convolution ? layers[l].num_channels : layers[l].value_dim);
  }
  const Result<Passport> again = Passport::FromJson(*passport->ToJson());
  ASSERT_TRUE(again.ok()) << again.status().ToString();
  EXPECT_EQ(*again, *passport);
}

}  // namespace
}  // namespace quire
