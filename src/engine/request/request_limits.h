// What an engine can hold of a request, whatever else there is: facts that never change while it
// lives, so threads may ask at any time.
#ifndef QUIRE_ENGINE_REQUEST_REQUEST_LIMITS_H_
#define QUIRE_ENGINE_REQUEST_REQUEST_LIMITS_H_

#include <cstdint>
#include <string>

#include "quire/engine.h"
#include "quire/model.h"
#include "quire/status.h"

namespace quire {

struct RequestLimits {
  const Model* model = nullptr;
  bool has_attention = false;
  int64_t max_pop = 0;  // tokens behind a window that the cache keeps for pops
  int64_t max_num_sequences = 0;
  int64_t page_size = 0;
  int64_t pages_total = 0;

  // TooLarge for a prompt, max_tokens or n that can never fit; BadArgument for a window that the
  // model cannot have.
  Status CheckFits(int64_t prompt_tokens, const SamplingOptions& options) const;
  // The pages of one sample's window.
  int64_t PagesOfWindow(const SamplingOptions& options) const;
  // The most tokens of one sequence that sees all of them.
  int64_t length_max() const;

 private:
  Status CheckWindow(int64_t prompt_tokens, const SamplingOptions& options) const;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_REQUEST_REQUEST_LIMITS_H_
