// For tests: a safetensors file of tensors of any type, with any bytes.
#ifndef QUIRE_MODEL_TESTING_RAW_CHECKPOINT_H_
#define QUIRE_MODEL_TESTING_RAW_CHECKPOINT_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/testing/test_checkpoint.h"

namespace quire {

class RawCheckpoint {
 public:
  template <typename T>
  void Add(const std::string& name, const std::string& type, const std::vector<int64_t>& shape,
           const std::vector<T>& values) {
    const std::string bytes(reinterpret_cast<const char*>(values.data()),
                            values.size() * sizeof(T));
    header_[name] = {{"dtype", type},
                     {"shape", shape},
                     {"data_offsets", {data_.size(), data_.size() + bytes.size()}}};
    data_ += bytes;
  }
  void Write(const TestFolder& folder) const {
    folder.Write("model.safetensors", SafetensorsBytes(header_.dump() + " ", data_));
  }

 private:
  nlohmann::json header_ = nlohmann::json::object();
  std::string data_;
};

}  // namespace quire

#endif  // QUIRE_MODEL_TESTING_RAW_CHECKPOINT_H_
