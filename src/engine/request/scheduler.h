// What the engine does next: pure decisions over numbers. No sequence, page or model is touched
// here.
//
// Rules. Requests are admitted by turns of their salts, those of one salt in the order in which
// they came (strictly: a request that does not fit yet holds up those behind it, so none starves).
// Samples that decode come before prompts, to which they leave some tokens of a step. Decodes take
// turns when the token budget is below their number; prompts are worked on oldest first, and while
// samples decode their part of a step is what the measured pace allows. A piece of a blended prompt
// is taken if its cost is left of that, or if no prompt before it got anything: it cannot be cut,
// and must get on. When pages run out, first retained KV goes, then the youngest request.
#ifndef QUIRE_ENGINE_REQUEST_SCHEDULER_H_
#define QUIRE_ENGINE_REQUEST_SCHEDULER_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace quire {

// A sample that has a sequence and tokens to compute.
struct RunnableSample {
  int64_t request_id = 0;
  int64_t length = 0;       // tokens in the cache
  int64_t pending = 0;      // tokens to compute, at least 1; exactly 1 = decoding
  bool opens_page = false;  // its next token needs a page although its last page is not full:
                            // another holder may write there
  int64_t last_step = 0;    // in which it was given tokens last
  // > 0: the pending tokens are a piece of a blended prompt, which is computed whole or not at all
  // and costs this number of tokens of the step's budget.
  int64_t piece_cost = 0;

  bool decodes() const { return pending == 1 && piece_cost == 0; }
};

// The request that is admitted next.
struct WaitingHead {
  int64_t matched = 0;  // tokens that it finds in the cache
  int64_t pending = 0;  // tokens to compute, at least 1
  int64_t samples = 1;
};

struct SchedulerView {
  int64_t token_budget = 0;  // of a step
  int64_t piece_rows = 0;    // of all pieces of a step, beside that
  // While samples decode, prompts get the tokens that are computed in `step_seconds` at this pace,
  // and at least kPromptTokensMin. 0: the pace is not known, and token_budget the only limit.
  double step_seconds = 0;
  double seconds_per_token = 0;
  int64_t page_size = 0;
  int64_t pages_free = 0;
  int64_t sequences_free = 0;
  int64_t pages_evictable_max =
      0;  // the most pages that would become free if all retained KV were given up
  // Running requests that take no part in a step, as they wait for tokens from elsewhere, or for a
  // peer to take theirs: they hold pages, and can be preempted.
  int64_t standing = 0;
  std::span<const RunnableSample> running;  // oldest request first
  std::optional<WaitingHead> head;
};

// `tokens` of running[index].
struct Take {
  int64_t index = 0;
  int64_t tokens = 0;

  bool operator==(const Take&) const = default;
};

struct Decision {
  enum class Kind : uint8_t {
    kRun,      // a forward of `takes`
    kAdmit,    // let the head of the queue in, then decide again
    kEvict,    // give up retained KV until `pages` are free, then decide again
    kPreempt,  // send the youngest running request back to the queue, then decide again
    kRestart,  // the only running request does not fit: compute it again, without shared pages,
               // then decide again
    kNothing,
  };
  Kind kind = Kind::kNothing;
  std::vector<Take> takes;
  int64_t pages = 0;
};

// A prompt gets on however slow a token is: as many as are one tile of rows.
inline constexpr int64_t kPromptTokensMin = 16;

// Pages that `tokens` more tokens take behind `length` ones.
int64_t PagesForAppend(int64_t length, int64_t tokens, int64_t page_size, bool opens_page);

// Pages that all samples of a request hold at most, computed without shared pages from elsewhere:
// the samples share the prompt's full pages, and each but one has a page of its own from the middle
// of the prompt's last page on.
int64_t PagesForRequest(int64_t prompt_tokens, int64_t max_tokens, int64_t samples,
                        int64_t page_size);

// Pages that one sample with a window holds at most while it takes a token: those of its sinks, and
// of the rest of the window, which begins anywhere in a page.
int64_t PagesForWindow(int64_t window, int64_t sinks, int64_t page_size);

Decision DecideNext(const SchedulerView& view);

}  // namespace quire

#endif  // QUIRE_ENGINE_REQUEST_SCHEDULER_H_
