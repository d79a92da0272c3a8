// A language model read from a Hugging Face folder: config.json and safetensors in, logits out. It
// holds weights; all that lasts between tokens is in the KVState that is passed in.
#ifndef QUIRE_MODEL_H_
#define QUIRE_MODEL_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "quire/attention_kv_cache.h"
#include "quire/recurrent_cache.h"
#include "quire/rope.h"
#include "quire/seams.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

struct ModelOptions {
  // kF32: activations, products and KV in float32. kBF16: activations rounded to bfloat16 where
  // they enter a product or the cache, sums in float32. Weights stay in the type they have on disk
  // and are widened exactly; with kBF16 float32 weights are rounded once.
  DType dtype = DType::kBF16;
  // The type of rows that meet quantised weights: kI8 (fastest), kBF16, kF32 (docs/exactness.md).
  DType activations = DType::kI8;
  std::string kernel_path;                 // as in AttentionKVCacheOptions
  std::shared_ptr<ParallelRunner> runner;  // null = CreateThreadPool(0)
};

// Weights of one type as they are in memory.
struct WeightType {
  std::string name;  // "bfloat16", ... (DTypeName), or the format of blocks: "Q4_K", ...
  int64_t bytes = 0;
};

struct ModelInfo {
  std::string architecture;  // "LlamaForCausalLM", ...
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t max_position_embeddings = 0;
  std::vector<int64_t> eos_token_ids;  // generation_config.json, else config.json
  int64_t bos_token_id = -1;           // -1: none
  int64_t parameter_count = 0;
  int64_t weight_bytes = 0;                   // in memory, mapped or allocated
  std::vector<WeightType> weight_types = {};  // of weight_bytes; most bytes first
  // With keys and values of ModelOptions::dtype. A cache may keep them in other types: set `dtype`
  // and `v_dtype` of the layers that it is made with.
  std::vector<AttentionLayerSpec> layers;
  // As RecurrentCacheOptions takes them, in the model's order; empty for attention alone.
  std::vector<RecurrentLayerSpec> recurrent_layers = {};
  RopeOptions rope;
};

// What a model takes, known before it is loaded.
struct ModelMeasure {
  ModelInfo info;
  int64_t workspace_bytes = 0;  // of a forward, after the weights
};

// The caches whose forward a model computes in: one for each kind of layer that it has.
struct ModelState {
  ModelState(AttentionKVCache& cache) : attention(&cache) {}  // NOLINT: most models need only this
  ModelState(AttentionKVCache* attention_cache, RecurrentCache* recurrent_cache)
      : attention(attention_cache), recurrent(recurrent_cache) {}

  AttentionKVCache* attention = nullptr;  // null without attention layers
  RecurrentCache* recurrent = nullptr;    // null without recurrent layers
};

class Model {
 public:
  // The info that Load gives, and the workspace of a forward of `row_count` tokens that wants the
  // logits of `logit_row_count` of them. Reads config.json and the headers of the safetensors files
  // only and allocates nothing large; errors are those of Load, but for OutOfMemory. REQUIRES: 0 <=
  // logit_row_count <= row_count < 2^31.
  static Result<ModelMeasure> Measure(const std::string& directory, const ModelOptions& options,
                                      int64_t row_count, int64_t logit_row_count);

  // Reads `directory`. NotFound, Corrupt, BadArgument name file and field; nothing stays allocated.
  static Result<std::unique_ptr<Model>> Load(const std::string& directory,
                                             const ModelOptions& options);
  virtual ~Model() = default;

  // Writes the weights of `directory` to the new file `path` as Load with `options` would hold them
  // (docs/formats/packed.md). In a folder of its own, as model.safetensors beside the other files
  // of `directory`, it is a model that Load maps instead of copying it, with the same results.
  // Errors are those of Load; IoError: `path` exists, or cannot be written; it is not there then.
  static Status Pack(const std::string& directory, const ModelOptions& options,
                     const std::string& path);

  virtual const ModelInfo& info() const = 0;

  // One forward of the batch that is open in the caches (BeginForward done; EndForward is the
  // caller's). token_ids: [n], the new tokens in batch order. logit_rows: ascending indices into
  // [0, n), of rows that go on to the end (AttentionKVCache::GetQueryRows). logits: [rows,
  // vocab_size]. On error the forward must be aborted.
  virtual Status Forward(const ModelState& state, std::span<const int32_t> token_ids,
                         std::span<const int64_t> logit_rows, float* logits) = 0;
};

}  // namespace quire

#endif  // QUIRE_MODEL_H_
