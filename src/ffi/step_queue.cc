#include "ffi/step_queue.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <bit>
#include <iterator>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include "ffi/errors.h"
#include "ffi/tensors.h"

namespace quire::ffi {

namespace tf = tvm::ffi;

namespace {

// Steps that the engine may be ahead of Python: enough that it does not wait for a thread to be
// woken, and few enough that an event loop handles all that has come in a moment.
constexpr int64_t kStepsAhead = 8;
// The most that a step waits for Python: an interpreter that stands still delays steps, and stops
// none (it may be about to destroy the engine).
constexpr int64_t kWaitNs = 100 * int64_t{1'000'000};

}  // namespace

void StepQueue::OnStep(std::vector<StepOutput> outputs) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (steps_.count >= kStepsAhead && why_.ok()) {
    const std::shared_ptr<Clock> clock = MachineTime();
    const int64_t until_ns = clock->SteadyNs() + kWaitNs;
    while (steps_.count >= kStepsAhead && why_.ok() && clock->SteadyNs() < until_ns)
      clock->Wait(changed_, lock, until_ns);
  }
  steps_.outputs.insert(steps_.outputs.end(), std::make_move_iterator(outputs.begin()),
                        std::make_move_iterator(outputs.end()));
  ++steps_.count;
  changed_.notify_all();
}

void StepQueue::OnEnd(const Status& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (why_.ok()) why_ = why;
  changed_.notify_all();
}

Result<StepQueue::Steps> StepQueue::Take() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return steps_.count > 0 || !why_.ok(); });
  if (steps_.count == 0) return why_;
  changed_.notify_all();
  return std::exchange(steps_, {});
}

namespace {

// A prompt is never empty.
bool HasUsage(const StepOutput& output) { return output.prompt_tokens > 0; }

// Python reads the columns by these names (OutputColumns), not by their places.
struct Column {
  std::string_view name;
  int64_t (*value)(const StepOutput& output);
};
constexpr Column kOutputColumns[] = {
    {"request", [](const StepOutput& o) { return o.request_id; }},
    {"sample", [](const StepOutput& o) { return o.sample; }},
    {"token_count", [](const StepOutput& o) { return std::ssize(o.tokens); }},
    {"finish_reason", [](const StepOutput& o) { return static_cast<int64_t>(o.finish_reason); }},
    {"has_usage", [](const StepOutput& o) { return int64_t{HasUsage(o)}; }},
};
int64_t TokensOf(const StepOutput& output, TierKind tier) {
  return output.cached.tiers[static_cast<size_t>(tier)];
}
int64_t Nanoseconds(double seconds) { return static_cast<int64_t>(seconds * 1e9); }
// What a request that blends says; zeros else. Deviations travel as the bits of a float64.
template <auto member>
int64_t BlendColumn(const StepOutput& output) {
  const auto value = output.blend ? *output.blend.*member : decltype(BlendUsage().*member){};
  if constexpr (std::is_same_v<decltype(value), const double>) {
    return std::bit_cast<int64_t>(value);
  } else {
    return static_cast<int64_t>(value);
  }
}
template <TierKind tier>
int64_t BlendTokensOf(const StepOutput& output) {
  return output.blend ? output.blend->loaded_tokens[static_cast<size_t>(tier)] : 0;
}
constexpr Column kUsageColumns[] = {
    {"cached_tokens", [](const StepOutput& o) { return o.cached_tokens; }},
    {"memory_tokens", [](const StepOutput& o) { return o.cached.memory; }},
    {"ram_tokens", [](const StepOutput& o) { return TokensOf(o, TierKind::kRam); }},
    {"disk_tokens", [](const StepOutput& o) { return TokensOf(o, TierKind::kDisk); }},
    {"redis_tokens", [](const StepOutput& o) { return TokensOf(o, TierKind::kRedis); }},
    {"recomputed_tokens", [](const StepOutput& o) { return o.recomputed_tokens; }},
    {"miss", [](const StepOutput& o) { return static_cast<int64_t>(o.miss); }},
    {"prefix_miss", [](const StepOutput& o) { return static_cast<int64_t>(o.prefix_miss.kind); }},
    {"miss_position", [](const StepOutput& o) { return o.prefix_miss.position; }},
    {"evicted_ms", [](const StepOutput& o) { return o.prefix_miss.evicted_ms; }},
    {"load_ns", [](const StepOutput& o) { return Nanoseconds(o.load_seconds); }},
    {"remote_tokens", [](const StepOutput& o) { return o.remote_tokens; }},
    {"remote_ns", [](const StepOutput& o) { return Nanoseconds(o.remote_seconds); }},
    {"predicted_remote_ns",
     [](const StepOutput& o) { return Nanoseconds(o.predicted_remote_seconds); }},
    {"predicted_here_ns",
     [](const StepOutput& o) { return Nanoseconds(o.predicted_here_seconds); }},
    {"drafted_tokens", [](const StepOutput& o) { return o.drafted_tokens; }},
    {"accepted_tokens", [](const StepOutput& o) { return o.accepted_tokens; }},
    {"decode_forwards", [](const StepOutput& o) { return o.decode_forwards; }},
    {"queue_ns", [](const StepOutput& o) { return Nanoseconds(o.times.queue_seconds); }},
    {"prompt_ns", [](const StepOutput& o) { return Nanoseconds(o.times.prompt_seconds); }},
    {"decode_ns", [](const StepOutput& o) { return Nanoseconds(o.times.decode_seconds); }},
    {"steps", [](const StepOutput& o) { return o.times.steps; }},
    {"blends", [](const StepOutput& o) { return int64_t{o.blend.has_value()}; }},
    {"blend.approximate", BlendColumn<&BlendUsage::approximate>},
    {"blend.documents", BlendColumn<&BlendUsage::documents>},
    {"blend.exact_tokens", BlendColumn<&BlendUsage::exact_tokens>},
    {"blend.kept_tokens", BlendColumn<&BlendUsage::kept_tokens>},
    {"blend.moved_tokens", BlendColumn<&BlendUsage::moved_tokens>},
    {"blend.recomputed_tokens", BlendColumn<&BlendUsage::recomputed_tokens>},
    {"blend.computed_tokens", BlendColumn<&BlendUsage::computed_tokens>},
    {"blend.learned_tokens", BlendColumn<&BlendUsage::learned_tokens>},
    {"blend.deviation_max", BlendColumn<&BlendUsage::deviation_max>},
    {"blend.deviation_mean", BlendColumn<&BlendUsage::deviation_mean>},
    {"blend.moved_bytes", BlendColumn<&BlendUsage::moved_bytes>},
    {"blend.move_seconds", BlendColumn<&BlendUsage::move_seconds>},
    {"blend.select_seconds", BlendColumn<&BlendUsage::select_seconds>},
    {"blend.wait_seconds", BlendColumn<&BlendUsage::wait_seconds>},
    {"blend.ram_tokens", BlendTokensOf<TierKind::kRam>},
    {"blend.disk_tokens", BlendTokensOf<TierKind::kDisk>},
    {"blend.redis_tokens", BlendTokensOf<TierKind::kRedis>},
    {"blend.miss", BlendColumn<&BlendUsage::miss>},
};

tf::Array<tf::String> NamesOf(std::span<const Column> columns) {
  tf::Array<tf::String> names;
  for (const Column& column : columns) names.push_back(tf::String(std::string(column.name)));
  return names;
}

tf::Map<tf::String, tf::Array<tf::String>> OutputColumns() {
  return {{"outputs", NamesOf(kOutputColumns)}, {"usage", NamesOf(kUsageColumns)}};
}

void AddRow(std::span<const Column> columns, const StepOutput& output, std::vector<int64_t>* to) {
  for (const Column& column : columns) to->push_back(column.value(output));
}

tf::Tensor Matrix(const std::vector<int64_t>& values, size_t columns) {
  const auto rows = static_cast<int64_t>(values.size() / columns);
  tf::Tensor matrix = NewTensor(DLDataType{kDLInt, 64, 1}, {rows, static_cast<int64_t>(columns)});
  std::copy(values.begin(), values.end(), static_cast<int64_t*>(matrix.data_ptr()));
  return matrix;
}

// The outputs of some steps as a few flat arrays, so that their cost does not grow with the number
// of requests:
//   steps     how many
//   outputs   int64 [outputs, 5], columns as OutputColumns names them
//   tokens    int32 [t], of all outputs, one after another
//   logprob_ends int64 [t]: end of each token's entries in the two arrays below
//   logprob_tokens int32, logprobs float32: the chosen token, then the best ones
//   usage     int64 [n, columns], of the outputs that have it, in their order
//   errors    texts, of those that failed, in their order
//   error_options, error_reasons: words, of the same: what each error is about
OptionMap FieldsOf(const StepQueue::Steps& steps) {
  std::vector<int64_t> rows, usage, logprob_ends;
  std::vector<int32_t> tokens, logprob_tokens;
  std::vector<float> logprobs;
  tf::Array<tf::String> errors, error_options, error_reasons;
  for (const StepOutput& output : steps.outputs) {
    AddRow(kOutputColumns, output, &rows);
    if (HasUsage(output)) AddRow(kUsageColumns, output, &usage);
    if (output.finish_reason == FinishReason::kError) {
      errors.push_back(tf::String(output.error));
      error_options.push_back(tf::String(output.error_detail.option));
      const std::string_view reason = RefusalReasonName(output.error_detail.reason);
      error_reasons.push_back(tf::String(std::string(reason)));
    }
    tokens.insert(tokens.end(), output.tokens.begin(), output.tokens.end());
    for (size_t i = 0; i < output.tokens.size(); ++i) {
      if (i < output.logprobs.size()) {
        for (const TokenLogprob& entry : output.logprobs[i]) {
          logprob_tokens.push_back(entry.token);
          logprobs.push_back(entry.logprob);
        }
      }
      logprob_ends.push_back(std::ssize(logprobs));
    }
  }
  return {{"steps", steps.count},
          {"outputs", Matrix(rows, std::size(kOutputColumns))},
          {"tokens", NewTensor(std::span(std::as_const(tokens)))},
          {"logprob_ends", NewTensor(std::span(std::as_const(logprob_ends)))},
          {"logprob_tokens", NewTensor(std::span(std::as_const(logprob_tokens)))},
          {"logprobs", NewTensor(std::span(std::as_const(logprobs)))},
          {"usage", Matrix(usage, std::size(kUsageColumns))},
          {"errors", errors},
          {"error_options", error_options},
          {"error_reasons", error_reasons}};
}

}  // namespace

OptionMap StepQueueObj::Take() {
  return CallChecked([&] { return FieldsOf(ValueOrThrow(queue_->Take())); });
}

void StepQueueObj::Close() {
  CallChecked([&] { queue_->OnEnd(Status(StatusCode::kClosed, "the engine was closed")); });
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::GlobalDef().def("quire.Engine.output_columns", OutputColumns);
  tf::reflection::ObjectDef<StepQueueObj>()
      .def("take", &StepQueueObj::Take)
      .def("close", &StepQueueObj::Close);
}

}  // namespace quire::ffi
