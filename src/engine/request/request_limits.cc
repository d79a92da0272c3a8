#include "engine/request/request_limits.h"

#include <algorithm>
#include <sstream>

#include "engine/request/scheduler.h"

namespace quire {

Status RequestLimits::CheckFits(int64_t prompt_tokens, const SamplingOptions& options) const {
  std::ostringstream message;
  const int64_t positions = model->info().max_position_embeddings;
  if (options.n > max_num_sequences) {
    message << "SamplingOptions::n is " << options.n << "; the engine works on at most "
            << max_num_sequences << " samples at a time (EngineOptions::max_num_sequences)";
    return Status(StatusCode::kTooLarge, message.str(), {.option = "n"});
  }
  if (options.window != 0) {
    QUIRE_RETURN_IF_ERROR(CheckWindow(prompt_tokens, options));
  } else if (prompt_tokens > positions || options.max_tokens > positions - prompt_tokens) {
    message << "Engine::Submit: a prompt of " << prompt_tokens << " tokens and max_tokens "
            << options.max_tokens << " do not fit the model's " << positions
            << " positions; shorten the prompt or lower max_tokens";
    return Status(StatusCode::kTooLarge, message.str());
  }
  int64_t pages = PagesForRequest(prompt_tokens, options.max_tokens, options.n, page_size);
  if (options.window != 0) {
    pages = std::min(pages, options.n * PagesOfWindow(options));
  }
  if (pages > pages_total) {
    message << "Engine::Submit: " << options.n << " sample(s) of " << prompt_tokens
            << " prompt tokens and max_tokens " << options.max_tokens << " need " << pages
            << " pages of " << page_size << " tokens, the cache has " << pages_total
            << "; raise EngineOptions::kv_bytes or lower max_tokens or n";
    return Status(StatusCode::kTooLarge, message.str());
  }
  return {};
}

Status RequestLimits::CheckWindow(int64_t prompt_tokens, const SamplingOptions& options) const {
  std::ostringstream message;
  const int64_t positions = model->info().max_position_embeddings;
  if (!has_attention) {
    message << "SamplingOptions::window is " << options.window << "; " << model->info().architecture
            << " has no attention layers that could have one, and its states do not grow with the "
               "text: leave it 0";
    return Status(StatusCode::kBadArgument, message.str(), {.option = "window"});
  }
  if (options.window > positions) {
    message << "SamplingOptions::window is " << options.window << "; the model has " << positions
            << " positions, so that is the most";
    return Status(StatusCode::kBadArgument, message.str(), {.option = "window"});
  }
  constexpr int64_t kMost = SamplingOptions::kEndlessTokensMax;
  if (prompt_tokens > kMost || options.max_tokens > kMost - prompt_tokens) {
    message << "Engine::Submit: a prompt of " << prompt_tokens << " tokens and max_tokens "
            << options.max_tokens << " are more than " << kMost
            << ", the most with a window; lower max_tokens";
    return Status(StatusCode::kTooLarge, message.str());
  }
  return {};
}

int64_t RequestLimits::PagesOfWindow(const SamplingOptions& options) const {
  return PagesForWindow(options.window + max_pop, options.sinks, page_size);
}

int64_t RequestLimits::length_max() const {
  return std::min(model->info().max_position_embeddings, pages_total * page_size);
}

}  // namespace quire
