#include "engine/request/scheduler.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/round_up.h"

namespace quire {
namespace {

// Decodes first, those that waited longest before the others; then prompts by age.
std::vector<int64_t> OrderOfService(std::span<const RunnableSample> running) {
  std::vector<int64_t> order(running.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const bool a_decodes = running[a].decodes();
    const bool b_decodes = running[b].decodes();
    if (a_decodes != b_decodes) return a_decodes;
    return a_decodes && running[a].last_step < running[b].last_step;
  });
  return order;
}

// The most tokens, up to `wanted`, for which `pages` suffice.
int64_t TokensThatFit(const RunnableSample& sample, int64_t wanted, int64_t pages,
                      int64_t page_size) {
  QUIRE_DCHECK(sample.length >= 0 && wanted >= 0 && pages >= 0);
  const int64_t in_page = sample.length % page_size;
  const int64_t slots_behind = sample.opens_page ? -in_page : (page_size - in_page) % page_size;
  return std::clamp(slots_behind + pages * page_size, int64_t{0}, wanted);
}

// Prompt tokens of a step. Samples that decode wait for all of them.
int64_t PromptTokens(const SchedulerView& view) {
  const auto decodes = std::count_if(view.running.begin(), view.running.end(),
                                     [](const auto& sample) { return sample.decodes(); });
  if (decodes == 0 || view.seconds_per_token <= 0) return view.token_budget;
  const double tokens = view.step_seconds / view.seconds_per_token;
  if (tokens >= static_cast<double>(view.token_budget + decodes)) return view.token_budget;
  return std::max(static_cast<int64_t>(tokens) - decodes, kPromptTokensMin);
}

// Tokens of a step that samples that decode leave to prompts in work, however many they are.
int64_t KeptForPrompts(const SchedulerView& view) {
  int64_t pending = 0;
  for (const RunnableSample& sample : view.running) {
    if (!sample.decodes()) pending += sample.piece_cost > 0 ? sample.piece_cost : sample.pending;
  }
  return std::min({pending, kPromptTokensMin, view.token_budget / 2});
}

// The state of one decision: what the samples before the current one took.
struct Budget {
  int64_t tokens;
  int64_t decode_tokens;
  int64_t prompt_tokens;
  int64_t pages;
  int64_t piece_rows;
  bool any_prompt = false;  // got tokens
};

// How many of its pending tokens the budget allows the sample.
int64_t TokensAllowed(const RunnableSample& sample, const Budget& budget) {
  const int64_t of_kind = sample.decodes() ? budget.decode_tokens : budget.prompt_tokens;
  const int64_t most = std::min(budget.tokens, of_kind);
  if (sample.piece_cost == 0) return std::min(sample.pending, most);
  const bool is_allowed = sample.pending <= budget.piece_rows &&
                          (sample.piece_cost <= most || (most > 0 && !budget.any_prompt));
  return is_allowed ? sample.pending : 0;
}

void Spend(const RunnableSample& sample, int64_t tokens, Budget* budget) {
  QUIRE_DCHECK(tokens > 0);
  const int64_t cost = sample.piece_cost > 0 ? sample.piece_cost : tokens;
  budget->tokens = std::max<int64_t>(0, budget->tokens - cost);
  if (sample.decodes()) {
    budget->decode_tokens -= cost;
    return;
  }
  budget->any_prompt = true;
  budget->prompt_tokens = std::max<int64_t>(0, budget->prompt_tokens - cost);
  if (sample.piece_cost > 0) budget->piece_rows -= tokens;
  QUIRE_CHECK(budget->piece_rows >= 0) << "a piece has more rows than were left";
}

bool MoreThanOneRequest(const SchedulerView& view) {
  return view.standing > 0 || view.running.front().request_id != view.running.back().request_id;
}

Decision NoPageFor(const SchedulerView& view, int64_t pages) {
  Decision decision;
  if (view.pages_evictable_max > 0) {
    decision.kind = Decision::Kind::kEvict;
    decision.pages = pages;
  } else {
    decision.kind = MoreThanOneRequest(view) ? Decision::Kind::kPreempt : Decision::Kind::kRestart;
  }
  return decision;
}

// Whether the head may come in: its tokens must fit beside what the running samples take in this
// step, with a page to grow for each of them; a request that is admitted only to be preempted again
// wastes its prefill. (Nothing else is spoken for: where token budget is left, each running sample
// has got all its known tokens, or all pages.)
std::optional<Decision> DecideAdmission(const SchedulerView& view, const Budget& budget) {
  if (!view.head || view.head->samples > view.sequences_free) return {};
  if (budget.tokens == 0 || budget.prompt_tokens == 0) return {};
  const WaitingHead& head = *view.head;
  QUIRE_DCHECK(head.samples >= 1 && head.matched >= 0 && head.pending >= 1);
  const bool opens_page = head.matched % view.page_size != 0;  // a fork is not the writer there
  const int64_t needed = PagesForAppend(head.matched, head.pending, view.page_size, opens_page) +
                         (head.samples - 1);  // each further sample opens a page of its own
  const int64_t growth = static_cast<int64_t>(view.running.size()) + view.standing;
  const int64_t left = budget.pages - growth;
  // What the head itself is about to use is no help: given up, it would have to be computed.
  const int64_t matched_pages = PagesForAppend(0, head.matched, view.page_size, false);
  const int64_t evictable_max = view.pages_evictable_max - matched_pages;
  const bool is_alone = view.running.empty() && view.standing == 0;
  Decision decision;
  if (needed <= left || (is_alone && view.pages_evictable_max == 0)) {
    decision.kind = Decision::Kind::kAdmit;
  } else if (is_alone || needed <= left + evictable_max) {
    decision.kind = Decision::Kind::kEvict;
    decision.pages = view.pages_free + (needed - left);
  } else {
    return {};
  }
  return decision;
}

}  // namespace

int64_t PagesForAppend(int64_t length, int64_t tokens, int64_t page_size, bool opens_page) {
  QUIRE_DCHECK(length >= 0 && tokens >= 0 && page_size > 0);
  if (tokens == 0) return 0;
  const int64_t held = opens_page ? length / page_size : CeilDiv(length, page_size);
  return CeilDiv(length + tokens, page_size) - held;
}

int64_t PagesForRequest(int64_t prompt_tokens, int64_t max_tokens, int64_t samples,
                        int64_t page_size) {
  const int64_t whole = CeilDiv(prompt_tokens + max_tokens, page_size);
  return whole + (samples - 1) * (whole - prompt_tokens / page_size);
}

int64_t PagesForWindow(int64_t window, int64_t sinks, int64_t page_size) {
  QUIRE_DCHECK(sinks >= 0 && sinks < window);
  return CeilDiv(sinks, page_size) + CeilDiv(window - sinks, page_size) + 2;
}

Decision DecideNext(const SchedulerView& view) {
  QUIRE_CHECK(view.token_budget >= 1);
  QUIRE_CHECK(view.page_size >= 1);
  QUIRE_CHECK(view.sequences_free >= 0) << "more samples are in work than there is room for";
  QUIRE_CHECK(view.pages_evictable_max >= 0);
  Decision run;
  Budget budget{.tokens = view.token_budget,
                .decode_tokens = view.token_budget - KeptForPrompts(view),
                .prompt_tokens = PromptTokens(view),
                .pages = view.pages_free,
                .piece_rows = view.piece_rows};
  for (const int64_t index : OrderOfService(view.running)) {
    const RunnableSample& sample = view.running[index];
    QUIRE_CHECK(sample.pending >= 1);
    const int64_t wanted = TokensAllowed(sample, budget);
    int64_t taken = TokensThatFit(sample, wanted, budget.pages, view.page_size);
    if (sample.piece_cost > 0 && taken < wanted) taken = 0;
    if (taken < wanted && (taken == 0 || view.pages_evictable_max > 0)) {
      const int64_t used = view.pages_free - budget.pages;
      const int64_t needed =
          PagesForAppend(sample.length, wanted, view.page_size, sample.opens_page);
      return NoPageFor(view, used + needed);
    }
    budget.pages -= PagesForAppend(sample.length, taken, view.page_size, sample.opens_page);
    if (taken == 0) continue;
    QUIRE_CHECK(budget.pages >= 0) << "a step takes pages that are not free";
    QUIRE_CHECK(sample.piece_cost == 0 || taken == sample.pending) << "a piece is cut";
    Spend(sample, taken, &budget);
    run.takes.push_back({.index = index, .tokens = taken});
  }
  if (std::optional<Decision> admission = DecideAdmission(view, budget)) return *admission;
  run.kind = run.takes.empty() ? Decision::Kind::kNothing : Decision::Kind::kRun;
  return run;
}

}  // namespace quire
