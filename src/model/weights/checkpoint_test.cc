#include "model/weights/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "model/testing/test_checkpoint.h"

namespace quire {
namespace {

std::string OneTensorFile(const std::string& name, float value) {
  const std::vector<TestTensor> tensors = {{name, {2}, {value, value + 1}}};
  return SafetensorsBytes(tensors);
}

void ExpectValues(const Checkpoint& checkpoint, const std::string& name, float value) {
  const auto tensor = checkpoint.Find(name);
  ASSERT_TRUE(tensor.ok()) << tensor.status().ToString();
  ASSERT_EQ(tensor->bytes.size(), 8u);
  float values[2];
  std::memcpy(values, tensor->bytes.data(), sizeof(values));
  EXPECT_EQ(values[0], value);
  EXPECT_EQ(values[1], value + 1);
}

void ExpectRefused(const TestFolder& folder, StatusCode code, std::string_view part) {
  const auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_FALSE(checkpoint.ok());
  EXPECT_EQ(checkpoint.status().code(), code) << checkpoint.status().ToString();
  EXPECT_NE(checkpoint.status().message().find(part), std::string::npos)
      << checkpoint.status().ToString();
}

constexpr std::string_view kIndex = "model.safetensors.index.json";
constexpr std::string_view kTwoShards =
    R"({"weight_map":{"a":"1.safetensors","b":"2.safetensors"}})";

TEST(Checkpoint, ReadsASingleFile) {
  const TestFolder folder;
  folder.Write("model.safetensors", OneTensorFile("a", 3));
  const auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  ExpectValues(*checkpoint, "a", 3);
  EXPECT_FALSE(checkpoint->Has("b"));
  const auto missing = checkpoint->Find("b");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound);
  EXPECT_NE(missing.status().message().find(folder.path() + ": tensor \"b\""), std::string::npos);
}

TEST(Checkpoint, ReadsShards) {
  const TestFolder folder;
  folder.Write(kIndex, kTwoShards);
  folder.Write("1.safetensors", OneTensorFile("a", 3));
  folder.Write("2.safetensors", OneTensorFile("b", 5));
  const auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  ExpectValues(*checkpoint, "a", 3);
  ExpectValues(*checkpoint, "b", 5);
}

TEST(Checkpoint, ReadsAgainAfterRelease) {
  const TestFolder folder;
  folder.Write("model.safetensors", OneTensorFile("a", 3));
  const auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok());
  Checkpoint::Release(*checkpoint->Find("a"));
  ExpectValues(*checkpoint, "a", 3);
}

// Bytes of a file's mapping that are in this process's memory.
int64_t ResidentBytes(const std::string& path) {
  std::ifstream maps("/proc/self/smaps");
  int64_t bytes = 0;
  bool is_path = false;
  for (std::string line; std::getline(maps, line);) {
    const bool is_field = line.find(": ") != line.npos;  // else the line that begins a mapping
    if (!is_field) is_path = line.ends_with(path);
    if (is_path && line.starts_with("Rss:")) bytes += 1024 * std::stoll(line.substr(4));
  }
  return bytes;
}

TEST(Checkpoint, ReleaseGivesMemoryBack) {
  const TestFolder folder;
  constexpr int64_t kCount = 1 << 20;
  const std::vector<TestTensor> tensors = {{"a", {kCount}, std::vector<float>(kCount, 1.5F)}};
  folder.Write("model.safetensors", SafetensorsBytes(tensors));
  const auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok());
  const auto tensor = checkpoint->Find("a");
  ASSERT_TRUE(tensor.ok());
  int64_t sum = 0;
  for (const std::byte byte : tensor->bytes) sum += std::to_integer<int64_t>(byte);
  EXPECT_EQ(sum, kCount * (0xC0 + 0x3F));
  const std::string path = folder.File("model.safetensors");
  EXPECT_GE(ResidentBytes(path), 4 * kCount);
  Checkpoint::Release(*tensor);
  EXPECT_LT(ResidentBytes(path), kCount);
}

// The cache of the Hugging Face hub: snapshots/<commit>/* link to ../../blobs/<digest>.
TEST(Checkpoint, FollowsTheLinksOfAHubCache) {
  const TestFolder folder;
  std::filesystem::create_directories(folder.File("blobs"));
  std::filesystem::create_directories(folder.File("snapshots/main"));
  folder.Write("blobs/0123", OneTensorFile("a", 3));
  std::filesystem::create_symlink("../../blobs/0123",
                                  folder.File("snapshots/main/model.safetensors"));
  const auto checkpoint = Checkpoint::Open(folder.File("snapshots/main"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  ExpectValues(*checkpoint, "a", 3);
}

TEST(Checkpoint, RefusesWhatIsNoRegularFile) {
  const TestFolder folder;
  std::filesystem::create_directory_symlink(folder.path(), folder.File("model.safetensors"));
  ExpectRefused(folder, StatusCode::kIoError, "model.safetensors");
  std::filesystem::remove(folder.File("model.safetensors"));
  ASSERT_EQ(mkfifo(folder.File("model.safetensors").c_str(), 0600), 0);
  ExpectRefused(folder, StatusCode::kIoError, "model.safetensors");
}

TEST(Checkpoint, NamesWhatIsMissing) {
  const TestFolder folder;
  ExpectRefused(folder, StatusCode::kNotFound, "neither model.safetensors nor");
  folder.Write(kIndex, kTwoShards);
  folder.Write("1.safetensors", OneTensorFile("a", 3));
  ExpectRefused(folder, StatusCode::kNotFound, "2.safetensors");
}

TEST(Checkpoint, RefusesAnIndexThatDoesNotFitItsFiles) {
  const TestFolder folder;
  folder.Write(kIndex, kTwoShards);
  folder.Write("1.safetensors", OneTensorFile("a", 3));
  folder.Write("2.safetensors", OneTensorFile("c", 5));
  ExpectRefused(folder, StatusCode::kCorrupt, "tensor \"b\" is not in");
  const std::vector<TestTensor> both = {{"a", {1}, {1}}, {"b", {1}, {1}}};
  folder.Write("2.safetensors", SafetensorsBytes(both));
  ExpectRefused(folder, StatusCode::kCorrupt, "tensor \"a\" is in two files");
}

TEST(Checkpoint, NamesTheFileThatIsDamaged) {
  const TestFolder folder;
  folder.Write(kIndex, kTwoShards);
  folder.Write("1.safetensors", OneTensorFile("a", 3));
  folder.Write("2.safetensors", OneTensorFile("b", 5).substr(0, 70));
  ExpectRefused(folder, StatusCode::kCorrupt, "2.safetensors: ");
}

}  // namespace
}  // namespace quire
