// Snapshots of a whole sequence: restored bit for bit, never from a damaged file.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <iterator>

#include "chunk/snapshot_file.h"
#include "kv/testing/kv_test_bytes.h"
#include "kv/testing/kv_test_forward.h"
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
  return TestCacheOptions({spec, spec}, {.max_num_sequences = 4,
                                         .token_capacity = 128,
                                         .prefill_chunk_size = 64,
                                         .page_size = page_size});
}

// A cache with a sequence of 11 tokens, saved in chunks of 4, 4 and 3.
class SnapshotTest : public testing::Test {
 protected:
  SnapshotTest() : cache_(MakeTestCache(SmallOptions(16))) {
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
    ForwardBytes(*cache_, 3, tokens_);
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
  const std::vector<std::byte> cold = ForwardBytes(*cache_, 3, {77, 78});
  for (const int64_t page_size : {1, 3, 16, 64}) {
    const auto cache = MakeTestCache(SmallOptions(page_size));
    const auto info = LoadSnapshot(*cache, 5, contents_.identity, path_);
    ASSERT_TRUE(info.ok()) << info.status().ToString();
    EXPECT_EQ(info->tokens, contents_.tokens);
    EXPECT_EQ(info->sampler, contents_.sampler);
    EXPECT_EQ(*cache->GetSequenceLength(5), 11);
    EXPECT_TRUE(cold == ForwardBytes(*cache, 5, {77, 78})) << page_size;
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
  const std::string first = ReadWholeFile(path_);
  Save(path_);
  EXPECT_EQ(ReadWholeFile(path_), first);
  // From another page size too.
  const auto other = MakeTestCache(SmallOptions(3));
  ASSERT_EQ(LoadCode(*other), StatusCode::kOk);
  const std::string copy = folder_ / "copy.quire";
  ASSERT_TRUE(SaveSnapshot(*other, 5, contents_, copy).ok());
  EXPECT_EQ(ReadWholeFile(copy), first);
}

TEST_F(SnapshotTest, AnEmptySequenceHasASnapshotToo) {
  ASSERT_TRUE(cache_->AddSequence(0).ok());
  SnapshotContents empty;
  ASSERT_TRUE(SaveSnapshot(*cache_, 0, empty, path_).ok());
  const auto cache = MakeTestCache(SmallOptions(16));
  const auto info = LoadSnapshot(*cache, 5, empty.identity, path_);
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_TRUE(info->tokens.empty());
  EXPECT_TRUE(info->sampler.empty());
  EXPECT_EQ(*cache->GetSequenceLength(5), 0);
}

TEST_F(SnapshotTest, TheChoiceOfRopeFactorsComesBack) {
  for (const RopeScaling scaling : {RopeScaling::kLongRope, RopeScaling::kDynamic}) {
    AttentionKVCacheOptions options = SmallOptions(16);
    options.rope.scaling = scaling;
    options.rope.factor = 4;
    options.rope.original_max_position_embeddings = 8;
    options.rope.short_factors = {1, 1.5};
    options.rope.long_factors = {2, 3};
    for (const bool long_factors : {false, true}) {
      const auto writer = MakeTestCache(options);
      ASSERT_TRUE(writer->AddSequence(0).ok());
      ASSERT_TRUE(writer->SelectLongRope(0, long_factors).ok());
      ForwardBytes(*writer, 0, tokens_);
      ASSERT_TRUE(SaveSnapshot(*writer, 0, contents_, path_).ok());
      EXPECT_EQ(ReadSnapshotInfo(path_)->long_factors, long_factors);
      const auto reader = MakeTestCache(options);
      ASSERT_EQ(LoadCode(*reader), StatusCode::kOk);
      EXPECT_EQ(*reader->UsesLongRope(5), long_factors);
      EXPECT_TRUE(ForwardBytes(*writer, 0, {9}) == ForwardBytes(*reader, 5, {9}));
    }
  }
}

// ---- Damage

// One bit in each byte of the file: what is restored is right, or nothing is.
TEST_F(SnapshotTest, NoFlippedBitIsRestored) {
  const std::string good = ReadWholeFile(path_);
  const std::vector<std::byte> cold = ForwardBytes(*cache_, 3, {77});
  const auto cache = MakeTestCache(SmallOptions(16));
  const uint64_t digest = cache->StateDigest();
  size_t restored = 0;
  for (size_t at = 0; at < good.size(); ++at) {
    WriteByteAt(path_, at, static_cast<char>(good[at] ^ 1 << at % 8));
    const auto info = LoadSnapshot(*cache, 5, contents_.identity, path_);
    if (info.ok()) {
      ASSERT_EQ(info->tokens, contents_.tokens) << at;
      ASSERT_EQ(info->sampler, contents_.sampler) << at;
      ASSERT_TRUE(cold == ForwardBytes(*cache, 5, {77})) << at;
      ASSERT_TRUE(cache->RemoveSequence(5).ok());
      ++restored;
    } else {
      ASSERT_TRUE(info.status().code() == StatusCode::kCorrupt ||
                  info.status().code() == StatusCode::kTooLarge)
          << at << ' ' << info.status().ToString();
      ASSERT_FALSE(VerifySnapshot(path_).ok()) << at;
    }
    ASSERT_EQ(cache->StateDigest(), digest) << at;
    WriteByteAt(path_, at, good[at]);
  }
  // The padding behind sections is read by nobody: 3 x 4 sections and the sampler.
  EXPECT_EQ(restored, 8u * (64 - 32) + 4u * (64 - 24) + (64 - 8));
}

TEST_F(SnapshotTest, NoCutFileIsRestored) {
  const auto cache = MakeTestCache(SmallOptions(16));
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
  const auto cache = MakeTestCache(SmallOptions(16));
  Passport identity = contents_.identity;
  identity.revision = "r2";
  const Status status = LoadSnapshot(*cache, 5, identity, path_).status();
  EXPECT_EQ(status.code(), StatusCode::kIncompatible);
  EXPECT_NE(status.message().find("revision: \"r2\" here, \"r1\" there"), std::string_view::npos)
      << status.ToString();
  AttentionKVCacheOptions other = SmallOptions(16);
  other.rope.theta = 500000;
  EXPECT_EQ(LoadCode(*MakeTestCache(other)), StatusCode::kIncompatible);
  other = SmallOptions(16);
  other.layers[1].dtype = DType::kF16;
  EXPECT_EQ(LoadCode(*MakeTestCache(other)), StatusCode::kIncompatible);
  // How the snapshot is cut is its own business.
  identity = contents_.identity;
  identity.block_tokens = 256;
  EXPECT_TRUE(LoadSnapshot(*cache, 5, identity, path_).ok());
}

TEST_F(SnapshotTest, OtherKernelsOnlyWhenAskedFor) {
  AttentionKVCacheOptions options = SmallOptions(16);
  options.kernel_path = KernelPaths().back();
  if (options.kernel_path == cache_->options().kernel_path) GTEST_SKIP() << "one path only";
  const auto cache = MakeTestCache(options);
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
  const auto cache = MakeTestCache(small);
  const uint64_t empty = cache->StateDigest();
  EXPECT_EQ(LoadCode(*cache), StatusCode::kOutOfPages);
  EXPECT_EQ(cache->StateDigest(), empty);
}

TEST_F(SnapshotTest, AFailedSaveLeavesNoFile) {
  const std::string good = ReadWholeFile(path_);
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
  EXPECT_EQ(ReadWholeFile(path_), good);
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
  ForwardBytes(*cache_, 3, {50, 51});
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

// ---- Windows, codes and states

AttentionKVCacheOptions WindowOptions(int64_t page_size, int64_t layer_window,
                                      DType dtype = DType::kBF16, bool has_latents = false) {
  AttentionKVCacheOptions options = SmallOptions(page_size);
  if (has_latents) {
    options.layers[1].latent = true;
    options.layers[1].qk_head_dim = 6;
  }
  for (AttentionLayerSpec& layer : options.layers) layer.dtype = dtype;
  options.layers[1].window = layer_window;
  return options;
}

// A sequence whose window is `window` with `sinks`, 0 for none, and is switched off again behind 20
// tokens if `switched_off`; saved after `length` tokens.
struct WindowCase {
  const char* name;
  int64_t layer_window, window, sinks;
  bool switched_off;
  int64_t length;
  DType dtype = DType::kBF16;
  bool has_latents = false;
};
constexpr WindowCase kWindowCases[] = {
    {"LayerWindow", 6, 0, 0, false, 30},
    {"SequenceWindow", 0, 9, 0, false, 30},
    {"Sinks", 0, 9, 3, false, 30},
    {"SinksAndLayerWindow", 7, 9, 3, false, 30},
    {"SwitchedOff", 0, 9, 2, true, 34},
    {"NotYetSlid", 0, 50, 3, false, 12},
    {"Codes", 6, 9, 3, false, 30, DType::kI8},
    {"Latents", 0, 9, 3, false, 30, DType::kBF16, true},
    {"LatentsOfCodes", 6, 0, 0, false, 30, DType::kF8E4M3, true},
    {"EmptyWithAWindow", 0, 9, 2, false, 0},
    {"ShorterThanItsSinks", 0, 9, 5, false, 3},
};

class WindowSnapshot : public SnapshotTest, public testing::WithParamInterface<WindowCase> {
 protected:
  AttentionKVCacheOptions Options(int64_t page_size) const {
    return WindowOptions(page_size, GetParam().layer_window, GetParam().dtype,
                         GetParam().has_latents);
  }
  // The sequence 0 in a new cache.
  std::unique_ptr<AttentionKVCache> Compute(int64_t page_size) const {
    const WindowCase& test = GetParam();
    auto cache = MakeTestCache(Options(page_size));
    EXPECT_TRUE(cache->AddSequence(0).ok());
    if (test.window > 0) {
      EXPECT_TRUE(cache->EnableSlidingWindowForSeq(0, test.window, test.sinks).ok());
    }
    for (int64_t n = 0; n < test.length; ++n) {
      if (test.switched_off && n == 20) {
        EXPECT_TRUE(cache->DisableSlidingWindowForSeq(0).ok());
      }
      ForwardBytes(*cache, 0, {static_cast<uint64_t>(n + 1)});
    }
    return cache;
  }
  void SetUp() override {
    contents_.tokens.clear();
    for (int64_t n = 0; n < GetParam().length; ++n)
      contents_.tokens.push_back(static_cast<int32_t>(n + 1));
    cache_ = Compute(4);
    const Status saved = SaveSnapshot(*cache_, 0, contents_, path_);
    ASSERT_TRUE(saved.ok()) << saved.ToString();
  }
};

TEST_P(WindowSnapshot, GoesOnExactlyAcrossPageSizes) {
  for (const int64_t page_size : {1, 3, 16}) {
    SCOPED_TRACE(page_size);
    const auto cold = Compute(page_size);
    const auto cache = MakeTestCache(Options(page_size));
    const auto info = LoadSnapshot(*cache, 5, contents_.identity, path_);
    ASSERT_TRUE(info.ok()) << info.status().ToString();
    EXPECT_EQ(info->tokens, contents_.tokens);
    EXPECT_EQ(info->version, 2);
    EXPECT_EQ(*cache->GetWindows(5), *cold->GetWindows(0));
    EXPECT_EQ(*cache->SlidRange(5), *cold->SlidRange(0));
    for (uint64_t n = 0; n < 14; ++n) {
      ASSERT_TRUE(ForwardBytes(*cold, 0, {60 + n}) == ForwardBytes(*cache, 5, {60 + n})) << n;
      ASSERT_TRUE(cache->CheckInvariants().ok());
    }
    // Prompts of several tokens, and another window where it was switched off.
    if (GetParam().switched_off) {
      for (const auto& [each, id] : {std::pair(cold.get(), 0), std::pair(cache.get(), 5)})
        ASSERT_TRUE(each->EnableSlidingWindowForSeq(id, 7, GetParam().sinks).ok());
    }
    const Tokens more = {80, 81, 82, 83, 84, 85, 86, 87};
    ASSERT_TRUE(ForwardBytes(*cold, 0, more) == ForwardBytes(*cache, 5, more));
    EXPECT_EQ(*cache->GetWindows(5), *cold->GetWindows(0));
    EXPECT_TRUE(cache->CheckInvariants().ok());
  }
}

TEST_P(WindowSnapshot, IsTheSameFileFromAnyCache) {
  const std::string copy = folder_ / "copy.quire";
  ASSERT_TRUE(SaveSnapshot(*Compute(16), 0, contents_, copy).ok());
  EXPECT_EQ(ReadWholeFile(copy), ReadWholeFile(path_));
  const auto reader = MakeTestCache(Options(3));
  ASSERT_EQ(LoadCode(*reader), StatusCode::kOk);
  ASSERT_TRUE(SaveSnapshot(*reader, 5, contents_, copy).ok());
  EXPECT_EQ(ReadWholeFile(copy), ReadWholeFile(path_));
  const auto same = DiffSnapshots(path_, copy);
  ASSERT_TRUE(same.ok()) << same.status().ToString();
  EXPECT_TRUE(same->same_windows);
  EXPECT_EQ(same->different_sections, 0);
}

TEST_P(WindowSnapshot, NoFlippedBitIsRestored) {
  const std::string good = ReadWholeFile(path_);
  const std::vector<std::byte> cold = ForwardBytes(*cache_, 0, {77});
  const auto cache = MakeTestCache(Options(16));
  const uint64_t digest = cache->StateDigest();
  for (size_t at = 0; at < good.size(); at += at < 300 ? 1 : 13) {
    WriteByteAt(path_, at, static_cast<char>(good[at] ^ 1 << at % 8));
    const auto info = LoadSnapshot(*cache, 5, contents_.identity, path_);
    if (info.ok()) {
      ASSERT_TRUE(cold == ForwardBytes(*cache, 5, {77})) << at;
      ASSERT_TRUE(cache->RemoveSequence(5).ok());
    } else {
      ASSERT_TRUE(info.status().code() == StatusCode::kCorrupt ||
                  info.status().code() == StatusCode::kTooLarge)
          << at << ' ' << info.status().ToString();
    }
    ASSERT_EQ(cache->StateDigest(), digest) << at;
    WriteByteAt(path_, at, good[at]);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, WindowSnapshot, testing::ValuesIn(kWindowCases),
                         [](const auto& test) { return std::string(test.param.name); });

// What hides nothing is a file of version 1, as builds before windows wrote it.
TEST_F(SnapshotTest, WithoutAnythingHiddenTheFileIsOfVersionOne) {
  EXPECT_EQ(ReadSnapshotInfo(path_)->version, 1);
  EXPECT_EQ(ReadWholeFile(path_)[8], 1);
  const auto cache = MakeTestCache(WindowOptions(16, 40));
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ForwardBytes(*cache, 0, tokens_);
  ASSERT_TRUE(SaveSnapshot(*cache, 0, contents_, path_).ok());
  EXPECT_EQ(ReadSnapshotInfo(path_)->version, 1) << "the window is wider than the sequence";
  EXPECT_EQ(LoadCode(*MakeTestCache(WindowOptions(3, 40))), StatusCode::kOk);
  const Status other =
      LoadSnapshot(*MakeTestCache(WindowOptions(3, 41)), 5, contents_.identity, path_).status();
  EXPECT_EQ(other.code(), StatusCode::kIncompatible);
  EXPECT_NE(other.message().find("window"), std::string_view::npos) << other.ToString();
}

// Numbers that no window can have, behind sound checksums.
TEST_F(SnapshotTest, ForgedWindowsAreRefused) {
  const auto cache = MakeTestCache(WindowOptions(4, 0));
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(cache->EnableSlidingWindowForSeq(0, 6, 2).ok());
  ForwardBytes(*cache, 0, tokens_);
  const WindowSettings sound = *cache->GetWindows(0);
  const auto try_with = [&](const std::function<void(WindowSettings&)>& change) {
    WindowSettings windows = sound;
    change(windows);
    std::vector<KVBlock> blocks(1, KVBlock(2));
    const int64_t tokens = 11;
    const uint64_t digest = cache->StateDigest();
    EXPECT_TRUE(cache->AddSequence(1).ok());
    const Status status =
        cache->ImportVisibleKV(1, {.blocks = blocks, .tokens = {&tokens, 1}, .windows = windows});
    EXPECT_TRUE(cache->RemoveSequence(1).ok());
    EXPECT_EQ(cache->StateDigest(), digest);
    return status.code();
  };
  const std::function<void(WindowSettings&)> changes[] = {
      [](auto& w) { w.window = -1; },       [](auto& w) { w.window = w.sinks; },
      [](auto& w) { w.sinks = 12; },        [](auto& w) { w.lost = -1; },
      [](auto& w) { w.lost = w.slid + 1; }, [](auto& w) { w.slid = 10; },
      [](auto& w) { w.slid = 9; },          [](auto& w) { w.span = 5; },
      [](auto& w) { w.span_sinks = 1; },    [](auto&) {},  // rows are missing
  };
  for (const auto& change : changes) EXPECT_EQ(try_with(change), StatusCode::kBadArgument);
  EXPECT_TRUE(cache->CheckInvariants().ok());
}

TEST_F(SnapshotTest, TheWindowOfTVMComesBack) {
  AttentionKVCacheOptions options = SmallOptions(4);
  options.tvm_window_span = true;
  const auto compute = [&](int64_t count) {
    auto cache = MakeTestCache(options);
    EXPECT_TRUE(cache->AddSequence(0).ok());
    EXPECT_TRUE(cache->EnableSlidingWindowForSeq(0, 7, 2).ok());
    for (int64_t n = 0; n < count; ++n) ForwardBytes(*cache, 0, {static_cast<uint64_t>(n + 1)});
    return cache;
  };
  const auto writer = compute(11);
  ASSERT_TRUE(SaveSnapshot(*writer, 0, contents_, path_).ok());
  const auto reader = MakeTestCache(options);
  ASSERT_EQ(LoadCode(*reader), StatusCode::kOk);
  EXPECT_EQ(*reader->GetWindows(5), *writer->GetWindows(0));
  for (uint64_t n = 0; n < 9; ++n)
    ASSERT_TRUE(ForwardBytes(*writer, 0, {50 + n}) == ForwardBytes(*reader, 5, {50 + n})) << n;
  // A cache whose windows mean something else.
  EXPECT_EQ(LoadCode(*MakeTestCache(SmallOptions(4))), StatusCode::kBadArgument);
}

}  // namespace
}  // namespace quire
