// The serving engine: many requests over one model and one KV cache, token ids in, token ids out.
//
// Exact: nothing that the scheduler does (batching, chunking, prefix reuse, preemption) can be seen in an answer.
// Threads: one thread at a time calls the engine (checked); it computes on the model's runner.
#ifndef QUIRE_ENGINE_H_
#define QUIRE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "quire/model.h"
#include "quire/seams.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

struct EngineOptions {
  std::string model_directory;
  DType dtype = DType::kBF16;   // see ModelOptions
  int threads = 0;              // 0 = one per core; ignored when runner is given
  std::shared_ptr<ParallelRunner> runner;
  std::string kernel_path;
  int64_t page_size = 0;        // 0 = default
  int64_t prefill_chunk = 512;  // most new tokens of one step
  int64_t max_num_sequences = 64;
  int64_t kv_bytes = 0;         // bytes of KV pages; 0 = as much as one sequence of max_position_embeddings, at most a
                                // quarter of the machine's memory
};

// How the next token is drawn. Defaults are greedy. A draw is a function of (logits, history, seed, position) only.
struct SamplingOptions {
  int64_t max_tokens = 128;
  float temperature = 0.0F;  // 0 = greedy
  int64_t top_k = 0;         // 0 = off
  float top_p = 1.0F;
  float min_p = 0.0F;
  float repetition_penalty = 1.0F;  // over prompt and answer
  float presence_penalty = 0.0F;    // over the answer
  float frequency_penalty = 0.0F;   // over the answer
  std::vector<std::pair<int32_t, float>> logit_bias;
  uint64_t seed = 0;
  int64_t n = 1;          // samples; sample i draws with stream i of the seed
  int64_t logprobs = -1;  // -1: none; 0: of the chosen token; k: also of the k best
  bool ignore_eos = false;
  std::vector<std::vector<int32_t>> stop;  // token sequences; the match is cut from the answer
};

enum class FinishReason : uint8_t { kNone, kStop, kLength, kCancelled, kError };

struct TokenLogprob {
  int32_t token;
  float logprob;  // natural log of the softmax of the model's logits, before sampling options
};

// What one step gave to one sample of one request.
struct StepOutput {
  int64_t request_id = 0;
  int64_t sample = 0;
  std::vector<int32_t> tokens;  // new ones
  std::vector<std::vector<TokenLogprob>> logprobs;  // per new token: the chosen one, then the best ones
  FinishReason finish_reason = FinishReason::kNone;
  std::string error;            // kError
  // Of the whole request; set with a finish_reason.
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t completion_tokens = 0;
};

struct EngineStats {
  int64_t pages_total = 0, pages_free = 0, pages_in_use = 0;
  int64_t waiting = 0, running = 0;
  int64_t steps = 0, prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0, preemptions = 0;
  int64_t kv_bytes = 0, kv_bytes_per_token = 0, weight_bytes = 0, page_size = 0;
};

class Engine {
 public:
  static Result<std::unique_ptr<Engine>> Create(const EngineOptions& options);
  virtual ~Engine() = default;

  virtual const ModelInfo& model_info() const = 0;
  virtual const std::string& kernel_path() const = 0;

  // Queues a request; its id. BadArgument for ids outside the vocabulary, an empty prompt or options out of range;
  // TooLarge if prompt + max_tokens can never fit the cache or the model's positions.
  virtual Result<int64_t> Submit(std::span<const int32_t> prompt, const SamplingOptions& options) = 0;
  // Ends a request; its pages are free when Cancel returns. UnknownSequence if it is not there (any more).
  virtual Status Cancel(int64_t request_id) = 0;
  // One forward for whatever is due, and its outputs. Empty outputs and ok when nothing is left to do.
  virtual Result<std::vector<StepOutput>> Step() = 0;
  virtual bool Idle() const = 0;

  // Logits of every token of every prompt, computed together in one batch (in chunks). logits[i]: [prompts[i].size(),
  // vocab_size], the caller's.
  virtual Status Logits(std::span<const std::span<const int32_t>> prompts, std::span<float* const> logits) = 0;

  virtual EngineStats Stats() const = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_H_
