// Model::Pack: the file that it writes. That models compute the same with it is shown beside their
// other tests (decoder_test.cc, mixer_test.cc).
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <csignal>
#include <filesystem>

#include "model/testing/test_gguf.h"
#include "model/testing/test_model.h"
#include "model/weights/safetensors.h"

namespace quire {
namespace {

const ModelOptions kFloat32{.dtype = DType::kF32, .kernel_path = "", .runner = nullptr};
const ModelOptions kBfloat16{.dtype = DType::kBF16, .kernel_path = "", .runner = nullptr};

TEST(Pack, WritesAFileThatPacksToItself) {
  const TestFolder folder;
  WriteTestModel(folder, {.tie_word_embeddings = true, .dtype = DType::kBF16});
  const TestFolder once;
  PackTestModel(folder, DType::kBF16, once);
  const TestFolder twice;
  PackTestModel(once, DType::kBF16, twice);
  EXPECT_EQ(once.Read("model.safetensors"), twice.Read("model.safetensors"));
}

TEST(Pack, BeginsMatricesOnCacheLines) {
  const TestFolder folder;
  WriteTestModel(folder, {.hidden_size = 30, .attention_bias = true, .dtype = DType::kBF16});
  const TestFolder packed;
  PackTestModel(folder, DType::kBF16, packed);
  const std::string bytes = packed.Read("model.safetensors");
  const auto contents = ParseSafetensors(AsBytes(bytes), "model.safetensors");
  ASSERT_TRUE(contents.ok()) << contents.status().ToString();
  int matrices = 0;
  for (const StoredTensor& tensor : contents->tensors) {
    if (!tensor.name.ends_with(".packed")) continue;
    ++matrices;
    EXPECT_EQ((contents->data_offset + tensor.begin) % 64, 0) << tensor.name;
  }
  EXPECT_EQ(matrices, 2 * 4 + 1);  // of each layer qkv, o, gate and up, down; the head
}

// Llama files hold the rows of q and k as rotary pairs, and so their biases.
TEST(Pack, KeepsBiasesThatAFileHoldsAsRotaryPairs) {
  const TestModel model{.hidden_size = 256,
                        .intermediate_size = 512,
                        .num_hidden_layers = 1,
                        .head_dim = 64,
                        .attention_bias = true};
  const TestFolder folder;
  WriteGgufModel(folder, model, std::array{WeightFormat::kQ8_0});
  const TestFolder packed;
  PackTestModel(folder, DType::kF32, packed);
  const auto tokens = RandomTokens(20, model.vocab_size, 5);
  std::vector<std::vector<float>> logits;
  for (const TestFolder* source : {&folder, &packed}) {
    const auto loaded = LoadTestModel(*source, DType::kF32);
    ASSERT_NE(loaded, nullptr);
    const auto cache = CreateTestCache(*loaded, {});
    logits.push_back(RunForward(*loaded, *cache, 0, tokens));
  }
  EXPECT_TRUE(logits[0] == logits[1]);
}

TEST(Pack, RefusesToOverwriteAndToRoundWhatIsPacked) {
  const TestFolder folder;
  WriteTestModel(folder, {.dtype = DType::kF32});
  const TestFolder packed;
  PackTestModel(folder, DType::kF32, packed);
  const auto model = Model::Load(packed.path(), kBfloat16);
  EXPECT_EQ(model.status().code(), StatusCode::kBadArgument);
  EXPECT_NE(model.status().message().find("is packed as float32"), std::string::npos)
      << model.status().ToString();
  const std::string before = packed.Read("model.safetensors");
  const Status again = Model::Pack(folder.path(), kFloat32, packed.File("model.safetensors"));
  EXPECT_EQ(again.code(), StatusCode::kIoError);
  EXPECT_EQ(packed.Read("model.safetensors"), before);
  EXPECT_EQ(Model::Pack(folder.path(), kFloat32, folder.File("none/here")).code(),
            StatusCode::kIoError);
}

TEST(Pack, LeavesNoFileWhenTheDiskIsFull) {
  const TestFolder folder;
  WriteTestModel(folder, {});
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small{.rlim_cur = 4096, .rlim_max = limit.rlim_max};
  const auto ignored = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = Model::Pack(folder.path(), kFloat32, folder.File("packed.safetensors"));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, ignored);
  EXPECT_EQ(status.code(), StatusCode::kIoError) << status.ToString();
  EXPECT_FALSE(std::filesystem::exists(folder.File("packed.safetensors")));
}

}  // namespace
}  // namespace quire
