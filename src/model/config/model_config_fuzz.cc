// config.json and generation_config.json from anywhere: an answer or an error, never more. The
// first byte 0 splits the two.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "model/config/model_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t split = text.find('\0');
  const std::string_view generation = split == text.npos ? "" : text.substr(split + 1);
  const auto config = quire::ParseModelConfig(text.substr(0, split), generation, "config.json");
  if (config.ok()) {
    QUIRE_CHECK(config->num_attention_heads % config->num_key_value_heads == 0);
    QUIRE_CHECK(config->rope.rotary_dim <= config->head_dim);
  }
  return 0;
}
