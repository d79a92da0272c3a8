// For tests: folders and safetensors files made on the spot.
#ifndef QUIRE_MODEL_TESTING_TEST_CHECKPOINT_H_
#define QUIRE_MODEL_TESTING_TEST_CHECKPOINT_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quire/tensor.h"

namespace quire {

// A fresh folder, removed with all that is in it.
class TestFolder {
 public:
  TestFolder();
  ~TestFolder();
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string File(std::string_view name) const { return path_ + "/" + std::string(name); }
  void Write(std::string_view name, std::string_view bytes) const;
  std::string Read(std::string_view name) const;

 private:
  std::string path_;
};

struct TestTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;  // rounded to dtype when written
  DType dtype = DType::kF32;  // kF32, kF16 or kBF16
};

// `values` after rounding to `dtype`.
std::vector<float> RoundedTo(DType dtype, std::span<const float> values);

// A file of a header as given and the data after it.
std::string SafetensorsBytes(std::string_view header, std::string_view data);
// A sound file. The header is padded so that the data begins at a multiple of 8, plus
// `misalignment`.
std::string SafetensorsBytes(std::span<const TestTensor> tensors, size_t misalignment = 0);

std::span<const std::byte> AsBytes(std::string_view text);

}  // namespace quire

#endif  // QUIRE_MODEL_TESTING_TEST_CHECKPOINT_H_
