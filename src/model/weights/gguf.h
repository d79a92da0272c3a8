// The tensors of a GGUF file, versions 2 and 3, by the names and in the shapes that a Hugging Face
// checkpoint has. What is read here comes from outside: every length is compared with what the file
// still holds before it sizes or moves anything.
#ifndef QUIRE_MODEL_WEIGHTS_GGUF_H_
#define QUIRE_MODEL_WEIGHTS_GGUF_H_

#include <cstddef>
#include <span>
#include <string_view>

#include "model/weights/safetensors.h"
#include "quire/status.h"

namespace quire {

// Checks a whole file but for the values of its weights. Corrupt, TooLarge: `file` (for messages),
// the object and what is wrong with it. BadArgument: an architecture whose tensors are not known.
// After success the tensors lie in the file, are disjoint, and have distinct names; those of a type
// that Quire does not compute with have neither dtype nor format, and no bytes.
Result<StoredTensors> ParseGguf(std::span<const std::byte> bytes, std::string_view file);

}  // namespace quire

#endif  // QUIRE_MODEL_WEIGHTS_GGUF_H_
