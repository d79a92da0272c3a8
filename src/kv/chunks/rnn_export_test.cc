// States that a caller computes (RNNState) in chunks and snapshots: of any shape and type, alone
// and beside all other kinds of state, and refused where the reader's are of other shapes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/checksum.h"
#include "kv/testing/kv_test_bytes.h"
#include "kv/testing/kv_test_forward.h"
#include "kv/testing/recurrent_test_forward.h"
#include "quire/composite_state.h"
#include "quire/rnn_state.h"
#include "quire/snapshot.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;
using Bytes = std::vector<std::byte>;

Tokens Range(uint64_t begin, uint64_t end) {
  Tokens tokens;
  for (uint64_t token = begin; token < end; ++token) tokens.push_back(token);
  return tokens;
}

// Every rank that there is, types of every size.
RNNStateOptions CallerOptions() {
  RNNStateOptions options;
  options.num_layers = 2;
  options.states = {{.shape = {}, .dtype = DType::kI64},
                    {.shape = {3, 5}, .dtype = DType::kF32},
                    {.shape = {2, 1, 3, 2}, .dtype = DType::kBF16},
                    {.shape = {2, 3, 1, 2, 2}, .dtype = DType::kI8}};
  options.max_num_sequences = 4;
  options.max_history = 3;
  options.max_checkpoints = 2;
  options.max_retained_slots = 8;
  options.poison_freed_slots = true;
  return options;
}

std::shared_ptr<RNNState> MakeCallerStates(const RNNStateOptions& options = CallerOptions()) {
  auto made = RNNState::Create(options);
  EXPECT_TRUE(made.ok()) << made.status().ToString();
  return *std::move(made);
}

int64_t StateCount(const RNNState& rnn) {
  return static_cast<int64_t>(rnn.options().states.size());
}
int64_t TensorCount(const RNNState& rnn) { return rnn.options().num_layers * StateCount(rnn); }

TensorView ViewOf(const RNNState& rnn, int64_t tensor, Bytes& bytes) {
  const RNNStateSpec& spec = rnn.options().states[static_cast<size_t>(tensor % StateCount(rnn))];
  int64_t size = DTypeBytes(spec.dtype);
  for (const int64_t dim : spec.shape) size *= dim;
  bytes.resize(static_cast<size_t>(size), std::byte{0xEE});
  return TensorView(bytes.data(), spec.dtype, spec.shape);
}

// The caller's arithmetic: bytes that depend on all before them, on the token and on whose they
// are.
void Advance(Bytes& state, uint64_t token, int64_t tensor) {
  const uint64_t seed = Hash64(&token, sizeof(token), static_cast<uint64_t>(tensor));
  for (size_t i = 0; i < state.size(); ++i) {
    const uint64_t mixed = Hash64(state.data(), state.size(), seed + i);
    state[i] = static_cast<std::byte>(mixed);
  }
}

// The naive model: the state behind tokens is computed from the beginning.
Bytes StateBehind(const RNNState& rnn, int64_t tensor, const Tokens& tokens) {
  Bytes state;
  ViewOf(rnn, tensor, state);
  std::ranges::fill(state, std::byte{0});
  for (const uint64_t token : tokens) Advance(state, token, tensor);
  return state;
}

// Sets all states of a forward of one sequence; also those behind its token `checkpoint`, if any.
void RunCallerLayers(RNNState& rnn, const Tokens& tokens, int64_t checkpoint = -1) {
  for (int64_t tensor = 0; tensor < TensorCount(rnn); ++tensor) {
    const int64_t layer = tensor / StateCount(rnn), state = tensor % StateCount(rnn);
    Bytes bytes;
    const TensorView view = ViewOf(rnn, tensor, bytes);
    std::vector<int64_t> shape(view.shape().begin(), view.shape().end());
    shape.insert(shape.begin(), 1);
    const TensorView row(bytes.data(), view.dtype(), shape);
    ASSERT_TRUE(rnn.Get(layer, state, row).ok());
    for (size_t t = 0; t < tokens.size(); ++t) {
      Advance(bytes, tokens[t], tensor);
      if (static_cast<int64_t>(t) == checkpoint) {
        const Status set = rnn.SetAt(layer, state, Ids{checkpoint}, row);
        ASSERT_TRUE(set.ok()) << set.ToString();
      }
    }
    ASSERT_TRUE(rnn.Set(layer, state, row).ok());
  }
}

void Forward(RNNState& rnn, int64_t id, const Tokens& tokens, int64_t checkpoint = -1) {
  const Status begun = rnn.BeginForward(Ids{id}, Ids{static_cast<int64_t>(tokens.size())});
  ASSERT_TRUE(begun.ok()) << begun.ToString();
  RunCallerLayers(rnn, tokens, checkpoint);
  const Status ended = rnn.EndForward();
  ASSERT_TRUE(ended.ok()) << ended.ToString();
}

void ExpectStates(RNNState& rnn, int64_t id, const Tokens& tokens) {
  for (int64_t tensor = 0; tensor < TensorCount(rnn); ++tensor) {
    Bytes bytes;
    const TensorView view = ViewOf(rnn, tensor, bytes);
    ASSERT_TRUE(rnn.DebugGet(tensor / StateCount(rnn), tensor % StateCount(rnn), id, view).ok());
    EXPECT_TRUE(bytes == StateBehind(rnn, tensor, tokens)) << "tensor " << tensor;
  }
}

// Its tensors at a position, as ImportState takes them.
struct Exported {
  std::vector<Bytes> bytes;
  std::vector<TensorView> views;
};
Exported ExportAll(RNNState& rnn, int64_t id, int64_t position) {
  Exported all;
  all.bytes.resize(static_cast<size_t>(TensorCount(rnn)));
  for (int64_t tensor = 0; tensor < TensorCount(rnn); ++tensor) {
    all.views.push_back(ViewOf(rnn, tensor, all.bytes[static_cast<size_t>(tensor)]));
    const Status status = rnn.ExportState(tensor, id, position, all.views.back());
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  return all;
}

TEST(RnnExport, AStateGoesOnInAnotherObjectExactly) {
  const auto writer = MakeCallerStates();
  ASSERT_TRUE(writer->AddSequence(0).ok());
  Forward(*writer, 0, Range(1, 8), 3);
  Forward(*writer, 0, Range(8, 11));
  for (const uint64_t position : {4, 7, 10}) {  // a checkpoint, an end before, the end
    SCOPED_TRACE(position);
    const Exported states = ExportAll(*writer, 0, static_cast<int64_t>(position));
    const auto reader = MakeCallerStates();
    ASSERT_TRUE(reader->AddSequence(5).ok());
    Forward(*reader, 5, Range(500, 503));  // forgotten
    const Status imported = reader->ImportState(5, static_cast<int64_t>(position), states.views);
    ASSERT_TRUE(imported.ok()) << imported.ToString();
    EXPECT_TRUE(reader->CheckInvariants().ok());
    EXPECT_EQ(*reader->GetSequenceLength(5), static_cast<int64_t>(position));
    Tokens tokens = Range(1, position + 1);
    ExpectStates(*reader, 5, tokens);
    Forward(*reader, 5, {77, 78});
    tokens.insert(tokens.end(), {77, 78});
    ExpectStates(*reader, 5, tokens);
    EXPECT_EQ(*reader->ReplayStart(5, static_cast<int64_t>(position)),
              static_cast<int64_t>(position));
    EXPECT_EQ(*reader->ReplayStart(5, static_cast<int64_t>(position) - 1), 0);
  }
}

TEST(RnnExport, OnlyWhatIsHeldComesOut) {
  const auto rnn = MakeCallerStates();
  ASSERT_TRUE(rnn->AddSequence(0).ok());
  Forward(*rnn, 0, Range(1, 8));
  Bytes bytes;
  const auto code = [&](int64_t tensor, int64_t id, int64_t position) {
    return rnn->ExportState(tensor, id, position, ViewOf(*rnn, 1, bytes)).code();
  };
  EXPECT_EQ(code(1, 0, 7), StatusCode::kOk);
  EXPECT_EQ(code(1, 0, 6), StatusCode::kNeedsReplay);
  EXPECT_EQ(code(1, 0, 8), StatusCode::kBadArgument);
  EXPECT_EQ(code(1, 0, -1), StatusCode::kBadArgument);
  EXPECT_EQ(code(8, 0, 7), StatusCode::kBadArgument);
  EXPECT_EQ(code(-1, 0, 7), StatusCode::kBadArgument);
  EXPECT_EQ(code(2, 0, 7), StatusCode::kBadArgument) << "of another shape";
  EXPECT_EQ(code(1, 1, 7), StatusCode::kUnknownSequence);
  EXPECT_EQ(code(1, 0, 0), StatusCode::kOk);
  EXPECT_EQ(bytes, StateBehind(*rnn, 1, {})) << "the initial state";
}

TEST(RnnExport, ARefusedImportChangesNothing) {
  const auto rnn = MakeCallerStates();
  for (const int64_t id : {0, 1}) ASSERT_TRUE(rnn->AddSequence(id).ok());
  Forward(*rnn, 0, Range(1, 8));
  Exported states = ExportAll(*rnn, 0, 7);
  const uint64_t digest = rnn->StateDigest();
  EXPECT_EQ(rnn->ImportState(0, 7, states.views).code(), StatusCode::kBadArgument) << "as long";
  EXPECT_EQ(rnn->ImportState(2, 9, states.views).code(), StatusCode::kUnknownSequence);
  EXPECT_EQ(rnn->ImportState(1, 9, std::span(states.views).first(7)).code(),
            StatusCode::kBadArgument);
  std::swap(states.views[1], states.views[2]);
  EXPECT_EQ(rnn->ImportState(1, 9, states.views).code(), StatusCode::kBadArgument);
  std::swap(states.views[1], states.views[2]);
  ASSERT_TRUE(rnn->SetRetained(1, true).ok());
  EXPECT_EQ(rnn->ImportState(1, 9, states.views).code(), StatusCode::kBadState);
  ASSERT_TRUE(rnn->SetRetained(1, false).ok());
  ASSERT_TRUE(rnn->BeginForward(Ids{0}, Ids{1}).ok());
  EXPECT_EQ(rnn->ImportState(1, 9, states.views).code(), StatusCode::kBadState);
  ASSERT_TRUE(rnn->AbortForward().ok());
  EXPECT_EQ(rnn->StateDigest(), digest);
  EXPECT_TRUE(rnn->CheckInvariants().ok());
  ExpectStates(*rnn, 0, Range(1, 8));
}

TEST(RnnExport, ChunksOfACallersStatesAloneGoOnExactly) {
  const auto writer = MakeCallerStates();
  ASSERT_TRUE(writer->AddSequence(0).ok());
  TestChain chain(*writer, {.model = "test", .block_tokens = 4});
  for (uint64_t end = 5; end <= 13; end += 4) {
    Forward(*writer, 0, Range(end - 4, end));
    const Status added = chain.Add(*writer, 0, 4);
    ASSERT_TRUE(added.ok()) << added.ToString();
  }
  for (size_t count = 1; count <= 3; ++count) {
    SCOPED_TRACE(count);
    const auto reader = MakeCallerStates();
    const Status imported = ImportChunks(*reader, 3, chain.Views(count));
    ASSERT_TRUE(imported.ok()) << imported.ToString();
    Tokens tokens = Range(1, 4 * count + 1);
    ExpectStates(*reader, 3, tokens);
    Forward(*reader, 3, {50});
    tokens.push_back(50);
    ExpectStates(*reader, 3, tokens);
  }
  const auto reader = MakeCallerStates();
  EXPECT_TRUE(ImportChunks(*reader, 3, {}).ok());
  EXPECT_EQ(*reader->GetSequenceLength(3), 0);
}

// Attention with and without a window, Quire's recurrent layers and a caller's states, twice.
struct AllKinds {
  explicit AllKinds(int64_t page_size, const RNNStateOptions& options = CallerOptions())
      : first(MakeCallerStates(options)), second(MakeCallerStates()) {
    RecurrentCacheOptions recurrent;
    recurrent.layers = AllRecurrentKinds();
    recurrent.max_num_sequences = 4;
    recurrent.prefill_chunk_size = 64;
    recurrent.runner = std::make_shared<SerialRunner>();
    recurrent.poison_freed_slots = true;
    cache = *RecurrentCache::Create(recurrent);
    const AttentionLayerSpec spec{.num_qo_heads = 2,
                                  .num_kv_heads = 1,
                                  .qk_head_dim = 4,
                                  .v_head_dim = 4,
                                  .dtype = DType::kBF16};
    AttentionKVCacheOptions kv;
    kv.layers = {spec, spec};
    kv.layers[1].window = 5;
    kv.max_num_sequences = 4;
    kv.token_capacity = 128;
    kv.prefill_chunk_size = 64;
    kv.page_size = page_size;
    kv.runner = recurrent.runner;
    kv.poison_freed_pages = true;
    attention = MakeTestCache(kv);
    state = *CompositeState::Create({.attention = attention, .recurrent = {first, cache, second}});
  }
  // The outputs of all layers that have any.
  Bytes Run(int64_t id, const Tokens& tokens) {
    const Status begun = state->BeginForward(Ids{id}, Ids{static_cast<int64_t>(tokens.size())});
    EXPECT_TRUE(begun.ok()) << begun.ToString();
    Bytes bytes;
    RecurrentOutputs outputs;
    EXPECT_TRUE(RunRecurrentLayers(*cache, tokens, &outputs).ok());
    for (const std::vector<float>& layer : outputs) {
      const auto part = std::as_bytes(std::span(layer));
      bytes.insert(bytes.end(), part.begin(), part.end());
    }
    for (int64_t l = 0; l < 2; ++l) {
      LayerOutputs layer;
      const AttentionLayerSpec& spec = attention->options().layers[static_cast<size_t>(l)];
      EXPECT_TRUE(RunLayer(*attention, spec, l, tokens, {}, &layer).ok());
      bytes.insert(bytes.end(), layer.o.bytes().begin(), layer.o.bytes().end());
    }
    for (const auto& rnn : {first, second}) RunCallerLayers(*rnn, tokens);
    const Status ended = state->EndForward();
    EXPECT_TRUE(ended.ok()) << ended.ToString();
    EXPECT_TRUE(state->CheckInvariants().ok());
    return bytes;
  }

  std::shared_ptr<RNNState> first, second;
  std::shared_ptr<RecurrentCache> cache;
  std::shared_ptr<AttentionKVCache> attention;
  std::unique_ptr<CompositeState> state;
};

TEST(RnnExport, ChunksHoldAllKindsOfState) {
  AllKinds writer(16);
  ASSERT_TRUE(writer.state->AddSequence(0).ok());
  TestChain chain(*writer.state, {.model = "test", .block_tokens = 10});
  for (uint64_t end = 11; end <= 31; end += 10) {
    writer.Run(0, Range(end - 10, end));
    const Status added = chain.Add(*writer.state, 0, 10);
    ASSERT_TRUE(added.ok()) << added.ToString();
  }
  for (size_t count = 1; count <= 3; ++count) {
    SCOPED_TRACE(count);
    AllKinds reader(7), cold(16);
    const Status imported = ImportChunks(*reader.state, 3, chain.Views(count));
    ASSERT_TRUE(imported.ok()) << imported.ToString();
    const Tokens tokens = Range(1, 10 * count + 1);
    ASSERT_TRUE(cold.state->AddSequence(3).ok());
    cold.Run(3, tokens);
    for (const auto& rnn : {reader.first, reader.second}) ExpectStates(*rnn, 3, tokens);
    for (const Tokens& more : {Tokens{900}, Range(901, 920)})
      ASSERT_TRUE(cold.Run(3, more) == reader.Run(3, more));
  }
}

TEST(RnnExport, ADamagedStateLeavesAllPartsAsTheyWere) {
  AllKinds writer(16);
  ASSERT_TRUE(writer.state->AddSequence(0).ok());
  TestChain chain(*writer.state, {.model = "test", .block_tokens = 10});
  writer.Run(0, Range(1, 11));
  ASSERT_TRUE(chain.Add(*writer.state, 0, 10).ok());
  AllKinds reader(16);
  const uint64_t digest = reader.state->StateDigest();
  const ChunkHeader header = chain.Views(1)[0].header();
  int64_t states = 0;
  for (const Section& section : header.sections) {
    if (section.kind != SectionKind::kRecurrentState) continue;
    ++states;
    const auto at = static_cast<size_t>(section.offset + section.length - 1);
    chain.bytes(0)[at] ^= std::byte{0x80};
    EXPECT_EQ(ImportChunks(*reader.state, 2, chain.Views(1)).code(), StatusCode::kCorrupt);
    EXPECT_EQ(reader.state->StateDigest(), digest);
    chain.bytes(0)[at] ^= std::byte{0x80};
  }
  EXPECT_EQ(states, 8 + 8 + static_cast<int64_t>(writer.cache->options().layers.size()));
  EXPECT_TRUE(ImportChunks(*reader.state, 2, chain.Views(1)).ok());
}

// Every reader but the first is another one: none of the writer's chunks is for it.
TEST(RnnExport, OtherShapesTypesAndCountsAreAMiss) {
  const auto writer = MakeCallerStates();
  ASSERT_TRUE(writer->AddSequence(0).ok());
  Forward(*writer, 0, Range(1, 5));
  TestChain chain(*writer, {.model = "test", .block_tokens = 4});
  ASSERT_TRUE(chain.Add(*writer, 0, 4).ok());
  const std::vector<ChunkView> views = chain.Views(1);
  const auto fingerprint = [](RNNState& rnn) {
    return *CachePassport(rnn, {.model = "test", .block_tokens = 4}, false)->Fingerprint();
  };
  EXPECT_EQ(fingerprint(*MakeCallerStates()), views[0].header().fingerprint);
  std::vector<RNNStateOptions> others(6, CallerOptions());
  others[0].states[1].shape = {5, 3};
  others[1].states[1].dtype = DType::kI32;      // as wide
  others[2].states[3].shape = {3, 2, 1, 2, 2};  // equal where sections have four dimensions
  others[3].states[0].shape = {1};
  others[4].num_layers = 1;
  others[5].states.pop_back();
  for (const RNNStateOptions& options : others) {
    const auto reader = MakeCallerStates(options);
    EXPECT_NE(fingerprint(*reader), views[0].header().fingerprint);
  }
  // Also without the passport, as far as sections tell.
  for (const size_t i : {0U, 1U, 3U}) {
    const auto reader = MakeCallerStates(others[i]);
    const Status status = ImportChunks(*reader, 1, views);
    EXPECT_EQ(status.code(), StatusCode::kIncompatible) << i << status.ToString();
    EXPECT_FALSE(reader->HasSequence(1));
  }
}

TEST(RnnExport, PassportsNameTheShapes) {
  const AllKinds all(16);
  const Result<Passport> passport = CachePassport(*all.state, {.model = "test"}, false);
  ASSERT_TRUE(passport.ok()) << passport.status().ToString();
  const size_t own = all.cache->options().layers.size();
  ASSERT_EQ(passport->layers.size(), 2 + 8 + own + 8);
  for (size_t i = 0; i < 8; ++i) {
    for (const size_t begin : {size_t{2}, 2 + 8 + own}) {
      const PassportLayer& layer = passport->layers[begin + i];
      const RNNStateSpec& spec = all.first->options().states[i % 4];
      EXPECT_EQ(layer.kind, StateKind::kCaller);
      EXPECT_EQ(layer.dtype, ElementType(spec.dtype));
      EXPECT_EQ(layer.state_shape, spec.shape);
    }
  }
  const Result<Passport> again = Passport::FromJson(*passport->ToJson());
  ASSERT_TRUE(again.ok()) << again.status().ToString();
  EXPECT_EQ(*again, *passport);
}

TEST(RnnExport, SnapshotsComeBackExactlyOrNotAtAll) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("quire_rnn_export_" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  const std::string path = folder / "sequence.quire";
  SnapshotContents contents;
  contents.identity = {.model = "test", .block_tokens = 4};
  for (int32_t token = 1; token <= 11; ++token) contents.tokens.push_back(token);
  // Alone: there is no KV, only what belongs to no token.
  const auto writer = MakeCallerStates();
  ASSERT_TRUE(writer->AddSequence(0).ok());
  Forward(*writer, 0, Range(1, 12));
  Status saved = SaveSnapshot(*writer, 0, contents, path);
  ASSERT_TRUE(saved.ok()) << saved.ToString();
  const auto reader = MakeCallerStates();
  auto info = LoadSnapshot(*reader, 5, contents.identity, path);
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_EQ(info->tokens, contents.tokens);
  EXPECT_GT(info->state_bytes, 0);
  ExpectStates(*reader, 5, Range(1, 12));
  EXPECT_TRUE(VerifySnapshot(path).ok());
  RNNStateOptions other = CallerOptions();
  other.states[1].shape = {15};
  const auto foreign = MakeCallerStates(other);
  const uint64_t digest = foreign->StateDigest();
  EXPECT_EQ(LoadSnapshot(*foreign, 5, contents.identity, path).status().code(),
            StatusCode::kIncompatible);
  EXPECT_EQ(foreign->StateDigest(), digest);
  // Every bit of the file counts.
  const std::string bytes = ReadWholeFile(path);
  const auto victim = MakeCallerStates();
  const uint64_t empty = victim->StateDigest();
  for (size_t at = 0; at < bytes.size(); at += 61) {
    WriteByteAt(path, at, static_cast<char>(bytes[at] ^ 0x10));
    const auto damaged = LoadSnapshot(*victim, 5, contents.identity, path);
    if (damaged.ok()) {  // between sections nobody reads
      ExpectStates(*victim, 5, Range(1, 12));
      ASSERT_TRUE(victim->RemoveSequence(5).ok());
    }
    EXPECT_EQ(victim->StateDigest(), empty) << at;
    WriteByteAt(path, at, bytes[at]);
  }
  // With all kinds of state beside it.
  AllKinds all(16), restored(3);
  ASSERT_TRUE(all.state->AddSequence(0).ok());
  all.Run(0, Range(1, 12));
  saved = SaveSnapshot(*all.state, 0, contents, path);
  ASSERT_TRUE(saved.ok()) << saved.ToString();
  info = LoadSnapshot(*restored.state, 9, contents.identity, path);
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  for (const auto& rnn : {restored.first, restored.second}) ExpectStates(*rnn, 9, Range(1, 12));
  EXPECT_TRUE(all.Run(0, Range(50, 60)) == restored.Run(9, Range(50, 60)));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace quire
