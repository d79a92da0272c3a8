// States that a caller computes in the chunk store: another process finds them on disk, a reader
// with other shapes finds nothing, and damage is a miss.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/clock.h"
#include "quire/chunk_store.h"
#include "quire/kv_export.h"
#include "quire/rnn_state.h"

namespace quire {
namespace {

constexpr int64_t kBlock = 4;
constexpr int64_t kWidth = 24;

class CallerStates : public testing::Test {
 protected:
  CallerStates()
      : folder_(std::filesystem::temp_directory_path() /
                ("caller_states_test_" + std::to_string(::getpid()) + "_" +
                 testing::UnitTest::GetInstance()->current_test_info()->name())) {}
  ~CallerStates() override { std::filesystem::remove_all(folder_); }

  static std::unique_ptr<RNNState> Make(std::vector<int64_t> shape) {
    RNNStateOptions options;
    options.num_layers = 2;
    options.states = {{.shape = std::move(shape), .dtype = DType::kF32}};
    options.max_num_sequences = 2;
    options.poison_freed_slots = true;
    return *RNNState::Create(options);
  }
  static Passport PassportOf(RNNState& state) {
    return *CachePassport(state, {.model = "caller", .block_tokens = kBlock}, false);
  }
  std::unique_ptr<ChunkStore> Open() {
    ChunkStoreOptions options;
    options.disk.directory = folder_.string();
    Result<std::unique_ptr<ChunkStore>> store = ChunkStore::Open(options);
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    return *std::move(store);
  }

  // The running sum of the tokens, in every element.
  static void Step(RNNState& state, std::span<const int32_t> tokens) {
    ASSERT_TRUE(state
                    .BeginForward(std::array<int64_t, 1>{0},
                                  std::array{static_cast<int64_t>(tokens.size())})
                    .ok());
    for (int64_t layer = 0; layer < 2; ++layer) {
      std::vector<float> values(kWidth);
      const TensorView view(values.data(), DType::kF32, {1, 4, 6});
      ASSERT_TRUE(state.Get(layer, 0, view).ok());
      for (float& value : values) {
        for (const int32_t token : tokens) value += static_cast<float>(token);
      }
      ASSERT_TRUE(state.Set(layer, 0, view).ok());
    }
    ASSERT_TRUE(state.EndForward().ok());
  }
  static std::vector<float> StateOf(RNNState& state, int64_t layer) {
    std::vector<float> values(kWidth);
    EXPECT_TRUE(state.DebugGet(layer, 0, 0, TensorView(values.data(), DType::kF32, {4, 6})).ok());
    return values;
  }

  // Puts the chunks of all tokens.
  void Store() {
    const auto state = Make({4, 6});
    const Passport passport = PassportOf(*state);
    const KeySpace keys(*passport.Fingerprint(), "tenant");
    const auto store = Open();
    ASSERT_TRUE(store->AddPassport(passport).ok());
    ASSERT_TRUE(state->AddSequence(0).ok());
    int64_t start = 0;
    std::vector<ChunkFields> chain = ChainFields(passport, keys, tokens_, /*tail=*/true).value();
    for (ChunkFields& fields : chain) {
      const int64_t count = static_cast<int64_t>(fields.tokens.size());
      Step(*state, fields.tokens);
      Result<ChunkBuffer> chunk = ExportChunk(*state, 0, start, std::move(fields));
      ASSERT_TRUE(chunk.ok()) << chunk.status().ToString();
      const auto put = store->Put(keys, *std::move(chunk), {});
      ASSERT_TRUE(put.ok()) << put.status().ToString();
      start += count;
    }
    ASSERT_TRUE(store->Flush(kNever).ok());
  }

  // Brings what is there into `state`; how many tokens.
  int64_t Load(RNNState& state, MissReason* miss = nullptr) {
    const Passport passport = PassportOf(state);
    const KeySpace keys(*passport.Fingerprint(), "tenant");
    const auto store = Open();
    EXPECT_TRUE(store->AddPassport(passport).ok());
    FetchRequest request;
    request.keys = &keys;
    request.tokens = tokens_;
    request.chunk_tokens = kBlock;
    request.tail = true;
    const auto fetch = *store->Fetch(request);
    EXPECT_TRUE(fetch->Wait(kNever));
    if (miss != nullptr) *miss = fetch->miss();
    std::vector<ChunkView> views;
    std::vector<std::shared_ptr<const StoredChunk>> chunks;
    const std::vector<ChunkFields> chain = ChainFields(passport, keys, tokens_, true).value();
    for (int64_t i = 0; i < fetch->ready(); ++i) {
      chunks.push_back(fetch->chunk(i));
      const ChunkFields& wanted = chain[static_cast<size_t>(i)];
      const ChunkExpectation expected{
          .key = wanted.key, .fingerprint = wanted.fingerprint, .tokens = std::span(wanted.tokens)};
      Result<ChunkView> view = chunks.back()->View(expected, ChunkLimits::Of(passport));
      EXPECT_TRUE(view.ok()) << view.status().ToString();
      views.push_back(*std::move(view));
    }
    const Status imported = ImportChunks(state, 0, views);
    EXPECT_TRUE(imported.ok()) << imported.ToString();
    return *state.GetSequenceLength(0);
  }

  const std::filesystem::path folder_;
  const std::vector<int32_t> tokens_ = {5, 3, 8, 1, 2, 9, 7, 4, 6, 11};
};

TEST_F(CallerStates, ComeBackFromDiskInAnotherProcess) {
  Store();
  const auto warm = Make({4, 6}), cold = Make({4, 6});
  EXPECT_EQ(Load(*warm), 10);
  ASSERT_TRUE(cold->AddSequence(0).ok());
  Step(*cold, tokens_);
  for (RNNState* const state : {warm.get(), cold.get()}) Step(*state, tokens_);
  for (const int64_t layer : {0, 1}) EXPECT_EQ(StateOf(*warm, layer), StateOf(*cold, layer));
}

TEST_F(CallerStates, OfOtherShapesAreNotFound) {
  Store();
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{6, 4}, {24}, {4, 6, 1}, {}}) {
    const auto state = Make(shape);
    MissReason miss = MissReason::kNone;
    EXPECT_EQ(Load(*state, &miss), 0);
    EXPECT_EQ(miss, MissReason::kNotStored);
  }
}

TEST_F(CallerStates, ThatAreDamagedAreMissesAndThoseBeforeThemAreServed) {
  Store();
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_)) {
    if (!entry.is_regular_file() || entry.path().extension() != ".qkv") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    std::vector<char> bytes(std::filesystem::file_size(entry.path()));
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    ChunkLimits limits;
    const auto header = DecodeChunkHeader(std::as_bytes(std::span(bytes)), limits);
    ASSERT_TRUE(header.ok()) << header.status().ToString();
    ++files;
    if (!header->tail) continue;  // the last one of the chain
    const Section& last = header->sections.back();
    file.seekp(last.offset + last.length - 1);
    file.put(static_cast<char>(bytes[static_cast<size_t>(last.offset + last.length - 1)] ^ 1));
  }
  EXPECT_EQ(files, 3);
  const auto state = Make({4, 6});
  MissReason miss = MissReason::kNone;
  EXPECT_EQ(Load(*state, &miss), 8);
  EXPECT_EQ(miss, MissReason::kCorrupt);
  EXPECT_EQ(StateOf(*state, 1), std::vector<float>(kWidth, 5 + 3 + 8 + 1 + 2 + 9 + 7 + 4));
}

}  // namespace
}  // namespace quire
