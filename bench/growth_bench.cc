// What months of use cost: the same step at the beginning and at the end of a long life. One small
// layer, so that bookkeeping counts.
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "bench_case.h"
#include "quire/attention_kv_cache.h"

namespace quire::bench {
namespace {

constexpr int64_t kKeyDim = 8;
constexpr int64_t kValueDim = 16;
constexpr int64_t kWindow = 512;  // of a stream
constexpr int64_t kSinks = 4;
constexpr int64_t kBlocks = 100;  // a life is timed in so many parts of equally many steps
constexpr int64_t kEdge = 10;     // of them are its beginning, and as many its end

double ResidentBytes() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> pages;
  return static_cast<double>(pages * sysconf(_SC_PAGESIZE));
}

double MedianOf(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

struct GrowthRequest {
  std::string work;  // "stream", "retained" or "removals"
  RopeMode rope = RopeMode::kNormal;
  int64_t page_size = 0;
  int64_t steps = 0;
  int threads = 1;
};

class GrowthCase : public BenchCase {
 public:
  explicit GrowthCase(GrowthRequest request)
      : request_(std::move(request)), values_(static_cast<size_t>(kValueDim), 1.0F) {}

  // One life, whatever the limits are.
  nlohmann::json Run(const RunLimits&) override {
    Create();
    if (request_.work == "stream") return Stream();
    if (request_.work == "retained") return Live([&](int64_t id) { AddRetained(id); });
    for (int64_t id = 0; id < request_.steps; ++id) AddRetained(id);
    return Live([&](int64_t id) { Require(cache_->RemoveSequence(id)); });
  }

 private:
  void Create() {
    const bool is_stream = request_.work == "stream";
    AttentionKVCacheOptions options;
    options.layers = {{.num_qo_heads = 1,
                       .num_kv_heads = 1,
                       .qk_head_dim = kKeyDim,
                       .v_head_dim = kValueDim,
                       .dtype = DType::kBF16}};
    options.max_num_sequences = 4;
    options.page_size = request_.page_size;
    options.token_capacity =
        is_stream ? 4 * kWindow + 4 * request_.page_size : request_.steps * request_.page_size;
    options.prefill_chunk_size = 16;
    options.rope.mode = request_.rope;
    options.runner = Require(CreateThreadPool(request_.threads));
    cache_.reset();
    cache_ = Require(AttentionKVCache::Create(options));
  }

  nlohmann::json Stream() {
    Require(cache_->AddSequence(0));
    Require(cache_->EnableSlidingWindowForSeq(0, kWindow, kSinks));
    for (int64_t i = 0; i < 2 * kWindow; ++i) Step(0);  // from here on it slides
    return Live([&](int64_t) { Step(0); });
  }

  void Step(int64_t id) {
    const int64_t one = 1;
    const TensorView k(values_.data(), DType::kF32, {1, 1, kKeyDim});
    const TensorView v(values_.data(), DType::kF32, {1, 1, kValueDim});
    const TensorView o(output_, DType::kF32, {1, 1, kValueDim});
    Require(cache_->BeginForward({&id, 1}, {&one, 1}));
    Require(cache_->Append(0, k, v));
    Require(cache_->Attend(0, k, o, nullptr, 1));
    Require(cache_->EndForward());
  }

  void AddRetained(int64_t id) {
    Require(cache_->AddSequence(id));
    Step(id);
    Require(cache_->SetRetained(id, true));
  }

  // Steps 0 to `steps`: seconds of one at the beginning and at the end, and the memory taken in
  // between.
  nlohmann::json Live(const std::function<void(int64_t)>& step) {
    const int64_t per_block = request_.steps / kBlocks;
    std::vector<double> seconds;
    double early_bytes = 0;
    for (int64_t block = 0; block < kBlocks; ++block) {
      const double begin = Now();
      for (int64_t i = 0; i < per_block; ++i) step(block * per_block + i);
      seconds.push_back((Now() - begin) / static_cast<double>(per_block));
      if (block == kEdge - 1) early_bytes = ResidentBytes();
    }
    const double first = MedianOf({seconds.begin(), seconds.begin() + kEdge});
    const double last = MedianOf({seconds.end() - kEdge, seconds.end()});
    return {{"begin", {first}},
            {"end", {last}},
            {"ratio", {last / first}},
            {"memory", {std::max(ResidentBytes() - early_bytes, 0.0)}}};
  }

  const GrowthRequest request_;
  std::vector<float> values_;
  float output_[kValueDim] = {};
  std::unique_ptr<AttentionKVCache> cache_;
};

}  // namespace

std::unique_ptr<BenchCase> MakeGrowthCase(const JsonValue& request) {
  GrowthRequest growth;
  growth.work = Require(request.GetString("work"));
  const std::string rope = Require(request.GetString("rope"));
  growth.rope = rope == "inline" ? RopeMode::kInline : RopeMode::kNormal;
  growth.page_size = Require(request.GetInt("page_size", 1));
  growth.steps = Require(request.GetInt("steps", kBlocks));
  growth.threads = static_cast<int>(Require(request.GetInt("threads", 1)));
  return std::make_unique<GrowthCase>(std::move(growth));
}

}  // namespace quire::bench
