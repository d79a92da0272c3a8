#include "engine/request_intake.h"

#include <string>
#include <utility>

#include "base/guard.h"
#include "quire/rope.h"

namespace quire {

Status RequestIntake::Check(std::span<const int32_t> prompt, const SamplingOptions& options) const {
  return GuardEntry([&]() -> Status {
    const int64_t vocab_size = owners_.facts.model->info().vocab_size;
    QUIRE_RETURN_IF_ERROR(CheckTokens("Engine::Submit: prompt", prompt, vocab_size));
    QUIRE_RETURN_IF_ERROR(CheckSamplingOptions(options, vocab_size));
    QUIRE_RETURN_IF_ERROR(owners_.holders.speculator.CheckCanSpeculate(options));
    QUIRE_RETURN_IF_ERROR(owners_.traffic.remote.CheckPeer(options.prefill_peer));
    if (options.blend && !options_.prefix_cache) {
      return Status(StatusCode::kBadArgument,
                    "SamplingOptions::blend: this engine keeps no KV between requests, so no "
                    "document is known (EngineOptions::prefix_cache)",
                    {"blend", RefusalReason::kKeepsNoKV});
    }
    QUIRE_RETURN_IF_ERROR(CheckBlend(owners_.facts.model->info(),
                                     static_cast<int64_t>(prompt.size()), options,
                                     options_.blend_piece));
    return owners_.facts.limits.CheckFits(static_cast<int64_t>(prompt.size()), options);
  });
}

Result<int64_t> RequestIntake::Submit(std::span<const int32_t> prompt,
                                      const SamplingOptions& options) {
  QUIRE_RETURN_IF_ERROR(Check(prompt, options));
  // An EngineLoop has room for a request when it takes it: what is preempted, or comes from peers,
  // until the engine gets it must not turn it away.
  if (requests_.waiting_new() >= options_.max_waiting) {
    return Status(StatusCode::kFull, "Engine::Submit: " + std::to_string(requests_.waiting_new()) +
                                         " requests wait (EngineOptions::max_waiting); "
                                         "step the engine and submit again");
  }
  auto request = std::make_unique<Request>(next_id_, prompt, options);
  request->speculation = options.speculation.value_or(options_.speculation);
  if (!options.predicted_tokens.empty()) request->speculation.draft = DraftKind::kNGram;
  request->submitted_ns = owners_.clock.SteadyNs();
  // Settled before the first token is computed, because stored keys cannot be turned again. So
  // which factors positions use depends on the request alone.
  request->space = {.salt = options.cache_salt,
                    .long_rope = NeedsLongRope(owners_.facts.model->info(),
                                               SpanMax(request->prompt_tokens, options))};
  if (options.blend) owners_.blender.Plan(request.get(), prompt);
  owners_.traffic.store.Prefetch(request.get());
  if (request->blend == nullptr) {
    requests_.Add(std::move(request));
  } else {
    owners_.blender.Add(std::move(request));
  }
  return next_id_++;
}

Status RequestIntake::AddJob(const std::shared_ptr<PrefillJob>& job) {
  QUIRE_ASSIGN_OR_RETURN(const SamplingOptions options, PrefillTraffic::OptionsOf(*job));
  QUIRE_RETURN_IF_ERROR(Check(job->job.tokens, options));
  // A sequence with such factors would be refused by the cache, and with it each step from then on.
  if (job->job.long_rope && !HasLongSet(owners_.facts.model->info().rope.scaling)) {
    return Status(StatusCode::kBadArgument,
                  "the job is for LongRoPE's long factors, and the model here has one set of "
                  "factors; compute it elsewhere");
  }
  if (requests_.waiting_asked() >= options_.max_waiting) {
    return Status(StatusCode::kFull, std::to_string(requests_.waiting_asked()) +
                                         " requests wait (EngineOptions::max_waiting)");
  }
  auto request = std::make_unique<Request>(next_id_, job->job.tokens, options);
  request->submitted_ns = owners_.clock.SteadyNs();
  request->space = PrefillTraffic::SpaceOf(job->job);
  request->job = job;
  owners_.traffic.store.Prefetch(request.get());
  requests_.Add(std::move(request));
  ++next_id_;
  return {};
}

}  // namespace quire
