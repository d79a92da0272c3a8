#include "engine/request/request.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace quire {
namespace {

// `field`: an option, or more words about one: "stop[2] length".
template <typename T>
Status OutOfRange(std::string_view field, T value, std::string_view range) {
  std::ostringstream message;
  message << "SamplingOptions::" << field << " is " << value << "; it must be " << range;
  const std::string_view option = field.substr(0, field.find_first_of(" ["));
  return Status(StatusCode::kBadArgument, message.str(), {.option = std::string(option)});
}

Status CheckTruncation(const SamplingOptions& options) {
  if (!(options.temperature >= 0.0F) || std::isinf(options.temperature)) {
    return OutOfRange("temperature", options.temperature, "finite and at least 0 (0 = greedy)");
  }
  if (options.top_k < 0) return OutOfRange("top_k", options.top_k, "at least 0 (0 = off)");
  if (!(options.top_p > 0.0F) || !(options.top_p <= 1.0F)) {
    return OutOfRange("top_p", options.top_p, "above 0 and at most 1 (1 = off)");
  }
  if (!(options.min_p >= 0.0F) || !(options.min_p <= 1.0F)) {
    return OutOfRange("min_p", options.min_p, "in [0, 1] (0 = off)");
  }
  return {};
}

Status CheckPenalties(const SamplingOptions& options) {
  if (!(options.repetition_penalty > 0.0F) || std::isinf(options.repetition_penalty)) {
    return OutOfRange("repetition_penalty", options.repetition_penalty,
                      "finite and above 0 (1 = off)");
  }
  if (!std::isfinite(options.presence_penalty)) {
    return OutOfRange("presence_penalty", options.presence_penalty, "finite");
  }
  if (!std::isfinite(options.frequency_penalty)) {
    return OutOfRange("frequency_penalty", options.frequency_penalty, "finite");
  }
  return {};
}

Status CheckLogitBias(const SamplingOptions& options, int64_t vocab_size) {
  std::vector<int32_t> tokens;
  for (const auto& [token, bias] : options.logit_bias) {
    if (token < 0 || token >= vocab_size) {
      return OutOfRange("logit_bias token", token, "in [0, " + std::to_string(vocab_size) + ")");
    }
    if (!std::isfinite(bias)) {
      return OutOfRange("logit_bias of token " + std::to_string(token), bias, "finite");
    }
    tokens.push_back(token);
  }
  std::sort(tokens.begin(), tokens.end());
  const auto twice = std::adjacent_find(tokens.begin(), tokens.end());
  if (twice != tokens.end()) return OutOfRange("logit_bias token", *twice, "there only once");
  return {};
}

Status CheckStop(const SamplingOptions& options, int64_t vocab_size) {
  const auto count = static_cast<int64_t>(options.stop.size());
  if (count > SamplingOptions::kStopSequencesMax) {
    return OutOfRange("stop count", count,
                      "at most " + std::to_string(SamplingOptions::kStopSequencesMax));
  }
  for (int64_t i = 0; i < count; ++i) {
    const std::string field = "stop[" + std::to_string(i) + "]";
    const auto length = static_cast<int64_t>(options.stop[i].size());
    if (length > SamplingOptions::kStopTokensMax) {
      return OutOfRange(field + " length", length,
                        "at most " + std::to_string(SamplingOptions::kStopTokensMax));
    }
    QUIRE_RETURN_IF_ERROR(CheckTokens("SamplingOptions::" + field, options.stop[i], vocab_size));
  }
  return {};
}

Status CheckBytes(std::string_view field, const std::string& value) {
  if (static_cast<int64_t>(value.size()) <= SamplingOptions::kCacheSaltBytesMax) return {};
  return OutOfRange(std::string(field) + " size", value.size(),
                    "at most " + std::to_string(SamplingOptions::kCacheSaltBytesMax) + " bytes");
}

Status CheckPrediction(const SamplingOptions& options, int64_t vocab_size) {
  if (options.predicted_tokens.empty()) return {};
  const auto count = static_cast<int64_t>(options.predicted_tokens.size());
  if (count > SamplingOptions::kPredictedTokensMax) {
    return OutOfRange("predicted_tokens count", count,
                      "at most " + std::to_string(SamplingOptions::kPredictedTokensMax));
  }
  if (options.speculation && options.speculation->draft != DraftKind::kNGram) {
    return Status(StatusCode::kBadArgument,
                  "SamplingOptions::predicted_tokens: guesses from them are those of n-grams, and "
                  "speculation asks for others; take kNGram, or leave speculation out",
                  {.option = "predicted_tokens"});
  }
  return CheckTokens("SamplingOptions::predicted_tokens", options.predicted_tokens, vocab_size);
}

Status CheckFilter(const SamplingOptions& options, int64_t vocab_size) {
  if (options.filter == nullptr) return {};
  if (options.filter->vocab_size() != vocab_size) {
    return OutOfRange("filter vocab_size", options.filter->vocab_size(),
                      "that of the model, " + std::to_string(vocab_size));
  }
  if (options.ignore_eos) {
    return Status(StatusCode::kBadArgument,
                  "SamplingOptions::ignore_eos is true and there is a filter, which says where the "
                  "answer ends; leave one of them out",
                  {.option = "ignore_eos"});
  }
  return {};
}

}  // namespace

Request::Request(int64_t request_id, std::span<const int32_t> prompt, SamplingOptions sampling)
    : id(request_id),
      prompt_tokens(static_cast<int64_t>(prompt.size())),
      options(std::move(sampling)),
      samples(options.n) {
  QUIRE_DCHECK(!prompt.empty() && !samples.empty());
  for (Sample& sample : samples) sample.tokens.assign(prompt.begin(), prompt.end());
}

Sample* Request::leader() {
  const auto it = std::find_if(samples.begin(), samples.end(),
                               [](const Sample& sample) { return !sample.finished(); });
  return it == samples.end() ? nullptr : &*it;
}

int64_t Request::unfinished_count() const {
  return std::count_if(samples.begin(), samples.end(),
                       [](const Sample& sample) { return !sample.finished(); });
}

bool Request::answer_begun() const {
  const Sample* const first = leader();
  return first != nullptr && static_cast<int64_t>(first->tokens.size()) > prompt_tokens;
}

void Request::NoteFound(const Sample& sample) noexcept {
  exact_start = std::min(exact_start, sample.approximate_from);
  if (admitted_before) found_again = std::min(found_again, sample.computed);
  approximate |= sample.approximate_from != kExactForever;
  if (blend != nullptr) blend->NoteFound(sample.computed, sample.exact());
}

RequestTimes Request::TimesAt(int64_t now_ns) const noexcept {
  const auto seconds = [](int64_t from, int64_t to) {
    return static_cast<double>(to - from) * 1e-9;
  };
  RequestTimes times{.steps = steps};
  const int64_t queue_end = admitted_ns == kNotYet ? now_ns : admitted_ns;
  times.queue_seconds = seconds(submitted_ns, queue_end);
  if (admitted_ns == kNotYet) return times;
  const int64_t prompt_end = first_token_ns == kNotYet ? now_ns : first_token_ns;
  times.prompt_seconds = seconds(admitted_ns, prompt_end);
  times.decode_seconds = seconds(prompt_end, now_ns);
  return times;
}

// A document that comes layer by layer ends with the forward of the prompt, which waits no more.
double Request::DocumentSeconds() const noexcept {
  if (documents_from_ns == kNotYet) return 0;
  const bool is_admitted = admitted_ns != kNotYet;
  const int64_t until =
      is_admitted ? std::min(documents_until_ns, admitted_ns) : documents_until_ns;
  return static_cast<double>(std::max<int64_t>(0, until - documents_from_ns)) * 1e-9;
}

void Request::NoteStep(int64_t step) noexcept {
  QUIRE_DCHECK(step >= last_step) << "steps are counted up";
  if (std::exchange(last_step, step) != step) ++steps;
}

Status Request::AlignFilter(Sample* sample) const {
  if (options.filter == nullptr) return {};
  return sample->filter.Align(*options.filter, answer_of(*sample));
}

void Request::ReserveAnswers() {
  size_t held_max = 1;
  for (const std::vector<int32_t>& stop : options.stop) held_max = std::max(held_max, stop.size());
  for (Sample& sample : samples) {
    constexpr int64_t kAtOnce = 1 << 16;  // answers without an end are bounded by patience alone
    sample.tokens.reserve(prompt_tokens + std::min(options.max_tokens, kAtOnce));
    if (options.logprobs >= 0) sample.held_logprobs.reserve(held_max);
  }
}

Status CheckTokens(std::string_view what, std::span<const int32_t> tokens, int64_t vocab_size) {
  if (tokens.empty()) {
    return Status(StatusCode::kBadArgument,
                  std::string(what) + " is empty; give at least one token");
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= 0 && tokens[i] < vocab_size) continue;
    std::ostringstream message;
    message << what << "[" << i << "] is token " << tokens[i] << "; the vocabulary is [0, "
            << vocab_size << ")";
    return Status(StatusCode::kBadArgument, message.str());
  }
  return {};
}

void Request::ReserveTokens(Sample* sample, int64_t count) {
  QUIRE_DCHECK(count >= 0);
  std::vector<int32_t>& tokens = sample->tokens;
  const size_t size = tokens.size() + static_cast<size_t>(count);
  if (size > tokens.capacity()) tokens.reserve(std::max(size, 2 * tokens.capacity()));
}

Status CheckSpeculation(std::string_view owner, const Speculation& speculation) {
  const auto check = [&](std::string_view field, int64_t value, int64_t most) -> Status {
    if (value >= 1 && value <= most) return {};
    std::ostringstream message;
    message << owner << "::speculation." << field << " is " << value << "; it must be in [1, "
            << most << "]";
    return Status(StatusCode::kBadArgument, message.str());
  };
  QUIRE_RETURN_IF_ERROR(
      check("draft_tokens", speculation.draft_tokens, Speculation::kDraftTokensMax));
  return check("branches", speculation.branches, Speculation::kBranchesMax);
}

Status CheckSamplingOptions(const SamplingOptions& options, int64_t vocab_size) {
  if (options.max_tokens < 0) return OutOfRange("max_tokens", options.max_tokens, "at least 0");
  if (options.n < 1) return OutOfRange("n", options.n, "at least 1");
  if (options.logprobs < -1 || options.logprobs > SamplingOptions::kLogprobsMax) {
    return OutOfRange("logprobs", options.logprobs,
                      "-1 (none) or in [0, " + std::to_string(SamplingOptions::kLogprobsMax) + "]");
  }
  QUIRE_RETURN_IF_ERROR(CheckTruncation(options));
  QUIRE_RETURN_IF_ERROR(CheckPenalties(options));
  QUIRE_RETURN_IF_ERROR(CheckLogitBias(options, vocab_size));
  QUIRE_RETURN_IF_ERROR(CheckBytes("cache_salt", options.cache_salt));
  QUIRE_RETURN_IF_ERROR(CheckBytes("turn_group", options.turn_group));
  if (options.turn_weight < 1 || options.turn_weight > SamplingOptions::kTurnWeightMax) {
    return OutOfRange("turn_weight", options.turn_weight,
                      "in [1, " + std::to_string(SamplingOptions::kTurnWeightMax) + "]");
  }
  if (options.window < 0) return OutOfRange("window", options.window, "at least 0 (0 = off)");
  if (options.sinks < 0 || options.sinks >= std::max<int64_t>(options.window, 1)) {
    return OutOfRange("sinks", options.sinks,
                      "at least 0 and below window, " + std::to_string(options.window));
  }
  if (options.speculation) {
    QUIRE_RETURN_IF_ERROR(CheckSpeculation("SamplingOptions", *options.speculation));
  }
  QUIRE_RETURN_IF_ERROR(CheckPrediction(options, vocab_size));
  QUIRE_RETURN_IF_ERROR(CheckFilter(options, vocab_size));
  return CheckStop(options, vocab_size);
}

int64_t StopMatchLength(std::span<const int32_t> answer,
                        const std::vector<std::vector<int32_t>>& stop) {
  size_t longest = 0;
  for (const std::vector<int32_t>& sequence : stop) {
    if (sequence.size() <= longest || sequence.size() > answer.size()) continue;
    if (std::equal(sequence.rbegin(), sequence.rend(), answer.rbegin())) longest = sequence.size();
  }
  return static_cast<int64_t>(longest);
}

int64_t HeldBackLength(std::span<const int32_t> answer,
                       const std::vector<std::vector<int32_t>>& stop) {
  size_t longest = 0;
  for (const std::vector<int32_t>& sequence : stop) {
    QUIRE_DCHECK(!sequence.empty()) << "CheckSamplingOptions refuses it";
    for (size_t length = std::min(sequence.size() - 1, answer.size()); length > longest; --length) {
      const auto end = answer.last(length);
      if (std::equal(end.begin(), end.end(), sequence.begin())) longest = length;
    }
  }
  return static_cast<int64_t>(longest);
}

int64_t SpanMax(int64_t prompt_tokens, const SamplingOptions& options) {
  QUIRE_DCHECK(prompt_tokens > 0 && options.max_tokens >= 0);
  const int64_t tokens_max = prompt_tokens + options.max_tokens;
  return options.window == 0 ? tokens_max : std::min(options.window, tokens_max);
}

bool NeedsLongRope(const ModelInfo& model, int64_t tokens_max) {
  return HasLongSet(model.rope.scaling) && tokens_max > model.rope.original_max_position_embeddings;
}

bool IsEnd(const ModelInfo& model, const SamplingOptions& options, int32_t token) noexcept {
  const std::vector<int64_t>& eos = model.eos_token_ids;
  return !options.ignore_eos && std::find(eos.begin(), eos.end(), token) != eos.end();
}

}  // namespace quire
