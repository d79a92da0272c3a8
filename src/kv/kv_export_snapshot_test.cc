// Snapshots of a whole sequence: restored bit for bit, never from a damaged file.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "chunk/snapshot_file.h"
#include "kv/kv_test_forward.h"
#include "quire/snapshot.h"

namespace quire {
namespace {

using Tokens = std::vector<uint64_t>;

AttentionKVCacheOptions SmallOptions(int64_t page_size) {
  const AttentionLayerSpec spec{.num_qo_heads = 2,
                                .num_kv_heads = 1,
                                .qk_head_dim = 4,
                                .v_head_dim = 4,
                                .dtype = DType::kBF16};
  AttentionKVCacheOptions options;
  options.layers = {spec, spec};
  options.max_num_sequences = 4;
  options.token_capacity = 128;
  options.prefill_chunk_size = 64;
  options.page_size = page_size;
  options.rope.mode = RopeMode::kNormal;
  options.runner = std::make_shared<SerialRunner>();
  options.poison_freed_pages = true;
  return options;
}

std::unique_ptr<AttentionKVCache> MakeCache(AttentionKVCacheOptions options) {
  Result<std::unique_ptr<AttentionKVCache>> cache = AttentionKVCache::Create(std::move(options));
  EXPECT_TRUE(cache.ok()) << cache.status().ToString();
  return *std::move(cache);
}

std::vector<std::byte> Forward(AttentionKVCache& cache, int64_t id, const Tokens& tokens) {
  const auto outputs =
      RunForward(cache, cache.options().layers, std::vector<int64_t>{id}, {tokens});
  EXPECT_TRUE(outputs.ok()) << outputs.status().ToString();
  std::vector<std::byte> bytes;
  if (!outputs.ok()) return bytes;
  for (const LayerOutputs& layer : *outputs)
    bytes.insert(bytes.end(), layer.o.bytes().begin(), layer.o.bytes().end());
  return bytes;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void WriteByte(const std::string& path, size_t at, char byte) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(at)).put(byte);
}

// A cache with a sequence of 11 tokens, saved in chunks of 4, 4 and 3.
class SnapshotTest : public testing::Test {
 protected:
  SnapshotTest() : cache_(MakeCache(SmallOptions(16))) {
    folder_ = std::filesystem::temp_directory_path() /
              ("quire_snapshot_test_" + std::to_string(::getpid()) + "_" +
               testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
    path_ = folder_ / "sequence.quire";
    contents_.identity.model = "small";
    contents_.identity.revision = "r1";
    contents_.identity.block_tokens = 4;
    contents_.sampler = std::string("\0opaque\xff", 8);
    contents_.created_ms = 12345;
    for (uint64_t i = 0; i < 11; ++i) {
      tokens_.push_back(i + 1);
      contents_.tokens.push_back(static_cast<int32_t>(i + 1));
    }
    EXPECT_TRUE(cache_->AddSequence(3).ok());
    Forward(*cache_, 3, tokens_);
    Save(path_);
  }
  ~SnapshotTest() override { std::filesystem::remove_all(folder_); }

  void Save(const std::string& path) {
    const Status status = SaveSnapshot(*cache_, 3, contents_, path);
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  StatusCode LoadCode(AttentionKVCache& cache, int64_t id = 5) {
    return LoadSnapshot(cache, id, contents_.identity, path_).status().code();
  }

  std::filesystem::path folder_;
  std::string path_;
  std::unique_ptr<AttentionKVCache> cache_;
  Tokens tokens_;
  SnapshotContents contents_;
};

TEST_F(SnapshotTest, ComesBackAcrossPageSizes) {
  const std::vector<std::byte> cold = Forward(*cache_, 3, {77, 78});
  for (const int64_t page_size : {1, 3, 16, 64}) {
    const auto cache = MakeCache(SmallOptions(page_size));
    const auto info = LoadSnapshot(*cache, 5, contents_.identity, path_);
    ASSERT_TRUE(info.ok()) << info.status().ToString();
    EXPECT_EQ(info->tokens, contents_.tokens);
    EXPECT_EQ(info->sampler, contents_.sampler);
    EXPECT_EQ(*cache->GetSequenceLength(5), 11);
    EXPECT_TRUE(cold == Forward(*cache, 5, {77, 78})) << page_size;
    EXPECT_TRUE(cache->CheckInvariants().ok());
  }
}

TEST_F(SnapshotTest, SaysWhatIsInIt) {
  for (const auto& info : {ReadSnapshotInfo(path_), VerifySnapshot(path_)}) {
    ASSERT_TRUE(info.ok()) << info.status().ToString();
    EXPECT_EQ(info->passport.model, "small");
    EXPECT_EQ(info->passport.block_tokens, 4);
    EXPECT_EQ(*info->passport.ToJson(), info->passport_json);
    EXPECT_EQ(info->tokens, contents_.tokens);
    EXPECT_EQ(info->sampler, contents_.sampler);
    EXPECT_EQ(info->created_ms, 12345);
    EXPECT_EQ(info->chunk_count, 3);
    EXPECT_EQ(info->file_bytes, static_cast<int64_t>(std::filesystem::file_size(path_)));
    EXPECT_FALSE(info->long_factors);
  }
}

TEST_F(SnapshotTest, TheSameSequenceIsTheSameFile) {
  const std::string first = ReadFile(path_);
  Save(path_);
  EXPECT_EQ(ReadFile(path_), first);
  // From another page size too.
  const auto other = MakeCache(SmallOptions(3));
  ASSERT_EQ(LoadCode(*other), StatusCode::kOk);
  const std::string copy = folder_ / "copy.quire";
  ASSERT_TRUE(SaveSnapshot(*other, 5, contents_, copy).ok());
  EXPECT_EQ(ReadFile(copy), first);
}

TEST_F(SnapshotTest, AnEmptySequenceHasASnapshotToo) {
  ASSERT_TRUE(cache_->AddSequence(0).ok());
  SnapshotContents empty;
  ASSERT_TRUE(SaveSnapshot(*cache_, 0, empty, path_).ok());
  const auto cache = MakeCache(SmallOptions(16));
  const auto info = LoadSnapshot(*cache, 5, empty.identity, path_);
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_TRUE(info->tokens.empty());
  EXPECT_TRUE(info->sampler.empty());
  EXPECT_EQ(*cache->GetSequenceLength(5), 0);
}

TEST_F(SnapshotTest, TheChoiceOfRopeFactorsComesBack) {
  AttentionKVCacheOptions options = SmallOptions(16);
  options.rope.scaling = RopeScaling::kLongRope;
  options.rope.factor = 4;
  options.rope.original_max_position_embeddings = 8;
  options.rope.short_factors = {1, 1.5};
  options.rope.long_factors = {2, 3};
  for (const bool long_factors : {false, true}) {
    const auto writer = MakeCache(options);
    ASSERT_TRUE(writer->AddSequence(0).ok());
    ASSERT_TRUE(writer->SelectLongRope(0, long_factors).ok());
    Forward(*writer, 0, tokens_);
    ASSERT_TRUE(SaveSnapshot(*writer, 0, contents_, path_).ok());
    EXPECT_EQ(ReadSnapshotInfo(path_)->long_factors, long_factors);
    const auto reader = MakeCache(options);
    ASSERT_EQ(LoadCode(*reader), StatusCode::kOk);
    EXPECT_EQ(*reader->UsesLongRope(5), long_factors);
    EXPECT_TRUE(Forward(*writer, 0, {9}) == Forward(*reader, 5, {9}));
  }
}

// ---- Damage

// One bit in each byte of the file: what is restored is right, or nothing is.
TEST_F(SnapshotTest, NoFlippedBitIsRestored) {
  const std::string good = ReadFile(path_);
  const std::vector<std::byte> cold = Forward(*cache_, 3, {77});
  const auto cache = MakeCache(SmallOptions(16));
  const uint64_t digest = cache->StateDigest();
  size_t restored = 0;
  for (size_t at = 0; at < good.size(); ++at) {
    WriteByte(path_, at, static_cast<char>(good[at] ^ 1 << at % 8));
    const auto info = LoadSnapshot(*cache, 5, contents_.identity, path_);
    if (info.ok()) {
      ASSERT_EQ(info->tokens, contents_.tokens) << at;
      ASSERT_EQ(info->sampler, contents_.sampler) << at;
      ASSERT_TRUE(cold == Forward(*cache, 5, {77})) << at;
      ASSERT_TRUE(cache->RemoveSequence(5).ok());
      ++restored;
    } else {
      ASSERT_TRUE(info.status().code() == StatusCode::kCorrupt ||
                  info.status().code() == StatusCode::kTooLarge)
          << at << ' ' << info.status().ToString();
      ASSERT_FALSE(VerifySnapshot(path_).ok()) << at;
    }
    ASSERT_EQ(cache->StateDigest(), digest) << at;
    WriteByte(path_, at, good[at]);
  }
  // The padding behind sections is read by nobody: 3 x 4 sections and the sampler.
  EXPECT_EQ(restored, 8u * (64 - 32) + 4u * (64 - 24) + (64 - 8));
}

TEST_F(SnapshotTest, NoCutFileIsRestored) {
  const auto cache = MakeCache(SmallOptions(16));
  const uintmax_t whole = std::filesystem::file_size(path_);
  std::filesystem::resize_file(path_, whole + 1);
  EXPECT_EQ(LoadCode(*cache), StatusCode::kCorrupt);
  std::filesystem::resize_file(path_, whole);
  EXPECT_TRUE(VerifySnapshot(path_).ok());
  for (uintmax_t size = whole; size-- > 0;) {
    std::filesystem::resize_file(path_, size);
    EXPECT_EQ(LoadCode(*cache), StatusCode::kCorrupt) << size;
    EXPECT_EQ(ReadSnapshotInfo(path_).status().code(), StatusCode::kCorrupt) << size;
  }
  EXPECT_TRUE(cache->Empty());
}

// ---- Foreign snapshots

TEST_F(SnapshotTest, AnotherModelIsNamed) {
  const auto cache = MakeCache(SmallOptions(16));
  Passport identity = contents_.identity;
  identity.revision = "r2";
  const Status status = LoadSnapshot(*cache, 5, identity, path_).status();
  EXPECT_EQ(status.code(), StatusCode::kIncompatible);
  EXPECT_NE(status.message().find("revision: \"r2\" here, \"r1\" there"), std::string_view::npos)
      << status.ToString();
  AttentionKVCacheOptions other = SmallOptions(16);
  other.rope.theta = 500000;
  EXPECT_EQ(LoadCode(*MakeCache(other)), StatusCode::kIncompatible);
  other = SmallOptions(16);
  other.layers[1].dtype = DType::kF16;
  EXPECT_EQ(LoadCode(*MakeCache(other)), StatusCode::kIncompatible);
  // How the snapshot is cut is its own business.
  identity = contents_.identity;
  identity.block_tokens = 256;
  EXPECT_TRUE(LoadSnapshot(*cache, 5, identity, path_).ok());
}

TEST_F(SnapshotTest, OtherKernelsOnlyWhenAskedFor) {
  AttentionKVCacheOptions options = SmallOptions(16);
  options.kernel_path = KernelPaths().back();
  if (options.kernel_path == cache_->options().kernel_path) GTEST_SKIP() << "one path only";
  const auto cache = MakeCache(options);
  EXPECT_EQ(LoadCode(*cache), StatusCode::kIncompatible);
  EXPECT_TRUE(LoadSnapshot(*cache, 5, contents_.identity, path_, {.any_numerics = true}).ok());
}

TEST_F(SnapshotTest, FailuresLeaveTheCacheAlone) {
  const uint64_t digest = cache_->StateDigest();
  EXPECT_EQ(LoadCode(*cache_, 3), StatusCode::kSequenceExists);
  EXPECT_EQ(LoadSnapshot(*cache_, 5, contents_.identity, path_ + "x").status().code(),
            StatusCode::kNotFound);
  EXPECT_EQ(LoadSnapshot(*cache_, 5, contents_.identity, folder_).status().code(),
            StatusCode::kIoError);
  EXPECT_EQ(cache_->StateDigest(), digest);
  AttentionKVCacheOptions small = SmallOptions(1);
  small.token_capacity = 6;
  const auto cache = MakeCache(small);
  const uint64_t empty = cache->StateDigest();
  EXPECT_EQ(LoadCode(*cache), StatusCode::kOutOfPages);
  EXPECT_EQ(cache->StateDigest(), empty);
}

TEST_F(SnapshotTest, AFailedSaveLeavesNoFile) {
  const std::string good = ReadFile(path_);
  SnapshotContents wrong = contents_;
  wrong.tokens.pop_back();
  EXPECT_EQ(SaveSnapshot(*cache_, 3, wrong, path_).code(), StatusCode::kBadArgument);
  EXPECT_EQ(SaveSnapshot(*cache_, 4, contents_, path_).code(), StatusCode::kUnknownSequence);
  wrong = contents_;
  wrong.identity.model = "\xff";
  EXPECT_EQ(SaveSnapshot(*cache_, 3, wrong, path_).code(), StatusCode::kBadArgument);
  // The sampler is the last thing that is written.
  wrong = contents_;
  wrong.sampler.resize((size_t{64} << 20) + 1);
  EXPECT_EQ(SaveSnapshot(*cache_, 3, wrong, path_).code(), StatusCode::kTooLarge);
  EXPECT_EQ(SaveSnapshot(*cache_, 3, contents_, folder_ / "no" / "folder").code(),
            StatusCode::kNotFound);
  EXPECT_EQ(SaveSnapshot(*cache_, 3, contents_, folder_).code(), StatusCode::kIoError);
  EXPECT_EQ(ReadFile(path_), good);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
}

// ---- Comparison

TEST_F(SnapshotTest, DifferencesAreFound) {
  const std::string copy = folder_ / "copy.quire";
  Save(copy);
  const Result<SnapshotDifference> same = DiffSnapshots(path_, copy);
  ASSERT_TRUE(same.ok()) << same.status().ToString();
  EXPECT_EQ(*same, (SnapshotDifference{.common_tokens = 11, .compared_sections = 12}));

  // Another value of the last token, another sampler.
  TestTensor k(DType::kBF16, {2, 1, 1, 4});
  for (int64_t i = 0; i < k.count(); ++i) k.Set(i, static_cast<float>(i));
  TestTensor v = k;
  ASSERT_TRUE(cache_->DebugSetKV(3, 10, k.view(), v.view()).ok());
  contents_.sampler = "other";
  Save(copy);
  const Result<SnapshotDifference> last = DiffSnapshots(path_, copy);
  ASSERT_TRUE(last.ok());
  EXPECT_EQ(last->common_tokens, 11);
  EXPECT_EQ(last->compared_sections, 12);
  EXPECT_EQ(last->different_sections, 4);
  EXPECT_EQ(last->first_section, "layer 0 key of tokens 8 to 10");
  EXPECT_FALSE(last->same_sampler);

  // Other tokens from position 5 on.
  ASSERT_TRUE(cache_->PopN(3, 6).ok());
  Forward(*cache_, 3, {50, 51});
  contents_.tokens.resize(5);
  contents_.tokens.insert(contents_.tokens.end(), {50, 51});
  contents_.identity.revision = "r2";
  Save(copy);
  const Result<SnapshotDifference> shorter = DiffSnapshots(path_, copy);
  ASSERT_TRUE(shorter.ok());
  EXPECT_EQ(shorter->common_tokens, 5);
  EXPECT_EQ(shorter->compared_sections, 4);
  EXPECT_EQ(shorter->different_sections, 0);
  EXPECT_EQ(shorter->passport, "revision: \"r1\" here, \"r2\" there");
}

}  // namespace
}  // namespace quire
