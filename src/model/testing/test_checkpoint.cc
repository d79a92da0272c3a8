#include "model/testing/test_checkpoint.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "tensor/half.h"

namespace quire {
namespace {

std::string ElementBytes(const TestTensor& tensor) {
  std::string bytes;
  for (const float value : tensor.values) {
    char element[4];
    if (tensor.dtype == DType::kF32) {
      std::memcpy(element, &value, 4);
    } else {
      const uint16_t half = tensor.dtype == DType::kF16 ? F32ToF16(value) : F32ToBf16(value);
      std::memcpy(element, &half, 2);
    }
    bytes.append(element, static_cast<size_t>(DTypeBytes(tensor.dtype)));
  }
  return bytes;
}

std::string_view StoredName(DType dtype) {
  if (dtype == DType::kF32) return "F32";
  return dtype == DType::kF16 ? "F16" : "BF16";
}

}  // namespace

TestFolder::TestFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "quire_test_XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) ADD_FAILURE() << "mkdtemp " << pattern;
  path_ = pattern;
}

TestFolder::~TestFolder() { std::filesystem::remove_all(path_); }

void TestFolder::Write(std::string_view name, std::string_view bytes) const {
  std::ofstream file(File(name), std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  ASSERT_TRUE(file.good()) << File(name);
}

std::string TestFolder::Read(std::string_view name) const {
  std::ifstream file(File(name), std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  EXPECT_TRUE(file.good()) << File(name);
  return bytes;
}

std::vector<float> RoundedTo(DType dtype, std::span<const float> values) {
  std::vector<float> rounded(values.begin(), values.end());
  for (float& value : rounded) {
    if (dtype == DType::kF16) value = F16ToF32(F32ToF16(value));
    if (dtype == DType::kBF16) value = Bf16ToF32(F32ToBf16(value));
  }
  return rounded;
}

std::string SafetensorsBytes(std::string_view header, std::string_view data) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(uint64_t{header.size()} >> (8 * i) & 0xFF);
  return bytes.append(header).append(data);
}

std::string SafetensorsBytes(std::span<const TestTensor> tensors, size_t misalignment) {
  nlohmann::json header = nlohmann::json::object();
  header["__metadata__"] = {{"format", "pt"}};
  std::string data;
  for (const TestTensor& tensor : tensors) {
    const std::string elements = ElementBytes(tensor);
    header[tensor.name] = {{"dtype", StoredName(tensor.dtype)},
                           {"shape", tensor.shape},
                           {"data_offsets", {data.size(), data.size() + elements.size()}}};
    data += elements;
  }
  std::string text = header.dump();
  while (text.size() % 8 != misalignment) text += ' ';
  return SafetensorsBytes(text, data);
}

std::span<const std::byte> AsBytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace quire
