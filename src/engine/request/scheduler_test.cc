#include "engine/request/scheduler.h"

#include <gtest/gtest.h>

#include <deque>
#include <map>

#include "base/random.h"

namespace quire {
namespace {

using Kind = Decision::Kind;

Decision Decide(const std::vector<RunnableSample>& running, SchedulerView view) {
  view.running = running;
  return DecideNext(view);
}

SchedulerView View(int64_t budget, int64_t pages_free) {
  return {.token_budget = budget,
          .page_size = 4,
          .pages_free = pages_free,
          .sequences_free = 10,
          .running = {},
          .head = {}};
}

TEST(Scheduler, CountsPagesOfAppends) {
  EXPECT_EQ(PagesForAppend(0, 0, 4, false), 0);
  EXPECT_EQ(PagesForAppend(0, 1, 4, false), 1);
  EXPECT_EQ(PagesForAppend(0, 9, 4, false), 3);
  EXPECT_EQ(PagesForAppend(3, 1, 4, false), 0);
  EXPECT_EQ(PagesForAppend(3, 2, 4, false), 1);
  EXPECT_EQ(PagesForAppend(3, 0, 4, true), 0);
  EXPECT_EQ(PagesForAppend(3, 1, 4, true), 1);
  EXPECT_EQ(PagesForAppend(3, 2, 4, true), 2);
  EXPECT_EQ(PagesForAppend(4, 1, 4, true), 1);
  EXPECT_EQ(PagesForAppend(5, 3, 1, false), 3);
}

TEST(Scheduler, CountsPagesOfRequests) {
  EXPECT_EQ(PagesForRequest(5, 3, 1, 4), 2);
  EXPECT_EQ(PagesForRequest(5, 4, 1, 4), 3);
  EXPECT_EQ(PagesForRequest(5, 3, 3, 4), 2 + 2 * 1) << "the first page is shared";
  EXPECT_EQ(PagesForRequest(8, 4, 3, 4), 3 + 2 * 1);
  EXPECT_EQ(PagesForRequest(3, 9, 2, 4), 3 + 3);
}

TEST(Scheduler, NothingToDoIsNothing) { EXPECT_EQ(Decide({}, View(8, 10)).kind, Kind::kNothing); }

TEST(Scheduler, DecodesComeBeforePromptsAndPromptsByAge) {
  const Decision decision = Decide({{.request_id = 0, .length = 0, .pending = 5},
                                    {.request_id = 1, .length = 8, .pending = 1},
                                    {.request_id = 2, .length = 0, .pending = 9},
                                    {.request_id = 3, .length = 9, .pending = 1}},
                                   View(10, 100));
  EXPECT_EQ(decision.kind, Kind::kRun);
  EXPECT_EQ(decision.takes, (std::vector<Take>{{1, 1}, {3, 1}, {0, 5}, {2, 3}}));
}

// A prompt in work waited until most answers had ended, where these were as many as the tokens of a
// step.
TEST(Scheduler, DecodesLeaveSomethingToPrompts) {
  std::vector<RunnableSample> running;
  for (int64_t i = 0; i < 40; ++i) running.push_back({.request_id = i, .length = 8, .pending = 1});
  running.push_back({.request_id = 40, .length = 0, .pending = 100});
  const auto of_the_prompt = [&](int64_t budget) {
    const std::vector<Take> takes = Decide(running, View(budget, 1000)).takes;
    const bool has_prompt = !takes.empty() && takes.back().index == 40;
    return has_prompt ? takes.back().tokens : 0;
  };
  EXPECT_EQ(of_the_prompt(36), kPromptTokensMin);
  EXPECT_EQ(of_the_prompt(20), 10);
  EXPECT_EQ(of_the_prompt(100), 60);
  running.back().pending = 3;
  EXPECT_EQ(of_the_prompt(36), 3);
  EXPECT_EQ(std::ssize(Decide(running, View(36, 1000)).takes), 33 + 1) << "no token is left over";
}

TEST(Scheduler, APieceIsTakenWholeForItsCost) {
  const RunnableSample decode{.request_id = 1, .length = 8, .pending = 1};
  const RunnableSample prompt{.request_id = 2, .length = 0, .pending = 900};
  const RunnableSample piece{.request_id = 3, .length = 0, .pending = 60, .piece_cost = 20};
  const RunnableSample one_token{.request_id = 4, .length = 0, .pending = 1, .piece_cost = 1};
  using Takes = std::vector<Take>;
  SchedulerView view = View(50, 1000);
  view.piece_rows = 100;
  EXPECT_EQ(Decide({decode, piece, prompt}, view).takes, (Takes{{0, 1}, {1, 60}, {2, 29}}));
  EXPECT_EQ(Decide({prompt, piece}, view).takes, (Takes{{0, 50}})) << "it waits for its turn";
  EXPECT_EQ(Decide({piece, piece}, view).takes, (Takes{{0, 60}})) << "rows are used up";
  EXPECT_EQ(Decide({one_token, decode}, view).takes, (Takes{{1, 1}, {0, 1}})) << "no decode";
  view.token_budget = 10;
  EXPECT_EQ(Decide({decode, piece, prompt}, view).takes, (Takes{{0, 1}, {1, 60}}))
      << "the first prompt gets on, and nothing is left for others";
  view.token_budget = 1;
  EXPECT_EQ(Decide({decode, piece}, view).takes, (Takes{{0, 1}})) << "decodes come first";
}

TEST(Scheduler, APieceGetsAllItsPagesOrNone) {
  const RunnableSample prompt{.request_id = 1, .length = 0, .pending = 8};
  const RunnableSample piece{.request_id = 2, .length = 0, .pending = 60, .piece_cost = 20};
  SchedulerView view = View(50, 10);
  view.piece_rows = 100;
  EXPECT_EQ(Decide({prompt, piece}, view).kind, Kind::kPreempt);
  EXPECT_EQ(Decide({piece}, view).kind, Kind::kRestart);
  view.pages_evictable_max = 5;
  const Decision decision = Decide({prompt, piece}, view);
  EXPECT_EQ(decision.kind, Kind::kEvict);
  EXPECT_EQ(decision.pages, 2 + 15);
}

TEST(Scheduler, PromptsGetWhatTheTimeAllowsWhileSamplesDecode) {
  const RunnableSample decode{.request_id = 1, .length = 8, .pending = 1};
  const RunnableSample prompt{.request_id = 2, .length = 0, .pending = 900};
  const RunnableSample next{.request_id = 3, .length = 0, .pending = 900};
  SchedulerView view = View(512, 1000);
  view.step_seconds = 0.1;
  const auto takes = [&](std::vector<RunnableSample> running, double seconds_per_token) {
    view.seconds_per_token = seconds_per_token;
    return Decide(running, view).takes;
  };
  using Takes = std::vector<Take>;
  EXPECT_EQ(takes({decode, prompt, next}, 0.001), (Takes{{0, 1}, {1, 99}})) << "100 in all";
  EXPECT_EQ(takes({decode, decode, prompt}, 0.002), (Takes{{0, 1}, {1, 1}, {2, 48}}));
  EXPECT_EQ(takes({decode, prompt}, 1.0), (Takes{{0, 1}, {1, kPromptTokensMin}})) << "the least";
  EXPECT_EQ(takes({decode, prompt}, 1e-30), (Takes{{0, 1}, {1, 511}})) << "the budget";
  EXPECT_EQ(takes({decode, prompt}, 0), (Takes{{0, 1}, {1, 511}})) << "no speed is known";
  EXPECT_EQ(takes({prompt, next}, 1.0), (Takes{{0, 512}})) << "nobody decodes";
}

TEST(Scheduler, NobodyComesInWhosePromptGetsNoTime) {
  SchedulerView view = View(512, 1000);
  view.step_seconds = 0.1;
  view.seconds_per_token = 0.01;
  view.head = WaitingHead{.matched = 0, .pending = 5, .samples = 1};
  const RunnableSample decode{.request_id = 1, .length = 8, .pending = 1};
  RunnableSample prompt{.request_id = 2, .length = 0, .pending = 900};
  EXPECT_EQ(Decide({decode, prompt}, view).kind, Kind::kRun);
  prompt.pending = 5;
  EXPECT_EQ(Decide({decode, prompt}, view).kind, Kind::kAdmit);
}

TEST(Scheduler, DecodesTakeTurnsWhenTheBudgetIsSmall) {
  std::vector<RunnableSample> running;
  for (int64_t i = 0; i < 5; ++i) running.push_back({.request_id = i, .length = 1, .pending = 1});
  for (int64_t step = 1; step <= 20; ++step) {
    const Decision decision = Decide(running, View(2, 100));
    ASSERT_EQ(decision.takes.size(), 2U);
    for (const Take& take : decision.takes) running[take.index].last_step = step;
    for (const RunnableSample& sample : running) {
      EXPECT_GE(sample.last_step, step - 2) << "five samples, two at a time: three steps at most";
    }
  }
}

TEST(Scheduler, APromptIsCutToTheFreePages) {
  const Decision decision = Decide({{.length = 2, .pending = 30}}, View(100, 2));
  EXPECT_EQ(decision.takes, (std::vector<Take>{{0, 10}}));
  const Decision fork = Decide({{.length = 2, .pending = 30, .opens_page = true}}, View(100, 2));
  EXPECT_EQ(fork.takes, (std::vector<Take>{{0, 6}}));
}

TEST(Scheduler, RetainedPagesGoBeforeAnyRequestWaits) {
  SchedulerView view = View(100, 2);
  view.pages_evictable_max = 1;
  const std::vector<RunnableSample> running = {{.request_id = 0, .length = 4, .pending = 1},
                                               {.request_id = 1, .length = 0, .pending = 9}};
  const Decision decision = Decide(running, view);
  EXPECT_EQ(decision.kind, Kind::kEvict);
  EXPECT_EQ(decision.pages, 4) << "one for the decode, three for the prompt";
}

TEST(Scheduler, TheYoungestIsPreemptedWhenPagesRunOut) {
  const std::vector<RunnableSample> two = {{.request_id = 0, .length = 4, .pending = 1},
                                           {.request_id = 1, .length = 8, .pending = 1}};
  EXPECT_EQ(Decide(two, View(100, 1)).kind, Kind::kPreempt);
  const std::vector<RunnableSample> samples = {{.request_id = 7, .length = 4, .pending = 1},
                                               {.request_id = 7, .length = 8, .pending = 1}};
  EXPECT_EQ(Decide(samples, View(100, 1)).kind, Kind::kRestart) << "one request is left";
}

TEST(Scheduler, AdmissionNeedsBudgetSequencesAndPages) {
  const std::vector<RunnableSample> running = {{.request_id = 0, .length = 6, .pending = 1},
                                               {.request_id = 1, .length = 0, .pending = 12}};
  SchedulerView view = View(9, 100);
  view.head = WaitingHead{.matched = 0, .pending = 8, .samples = 2};
  EXPECT_EQ(Decide(running, view).kind, Kind::kRun) << "the prompt takes the whole budget";
  view.token_budget = 20;
  EXPECT_EQ(Decide(running, view).kind, Kind::kAdmit);
  view.sequences_free = 1;
  EXPECT_EQ(Decide(running, view).kind, Kind::kRun);
  view.sequences_free = 2;
  view.pages_free = 8;  // 3 for the prompt, 2 to grow, 2 + 1 for the newcomer and its second sample
  EXPECT_EQ(Decide(running, view).kind, Kind::kAdmit);
  view.pages_free = 7;
  EXPECT_EQ(Decide(running, view).kind, Kind::kRun);
  view.pages_evictable_max = 1;
  EXPECT_EQ(Decide(running, view).kind, Kind::kEvict);
  EXPECT_EQ(Decide(running, view).pages, 8);
  view.pages_free = 6;
  EXPECT_EQ(Decide(running, view).kind, Kind::kRun) << "evicting would not be enough";
}

TEST(Scheduler, NoRequestIsLetInAtTheCostOfItsOwnMatch) {
  const std::vector<RunnableSample> running = {{.request_id = 0, .length = 6, .pending = 1}};
  SchedulerView view = View(20, 3);
  view.head = WaitingHead{.matched = 12, .pending = 9};  // 3 pages and 1 for growth
  view.pages_evictable_max = 3;                          // the 3 that it matches
  EXPECT_EQ(Decide(running, view).kind, Kind::kRun);
  view.pages_evictable_max = 4;
  EXPECT_EQ(Decide(running, view).kind, Kind::kEvict);
  view.pages_evictable_max = 3;
  view.pages_free = 2;
  EXPECT_EQ(DecideNext(view).kind, Kind::kEvict) << "alone it has to go on somehow";
}

// A fork in the middle of a page does not write there, so its first token needs a page.
TEST(Scheduler, AMatchInTheMiddleOfAPageCostsAPage) {
  const std::vector<RunnableSample> running = {{.request_id = 0, .length = 6, .pending = 1}};
  SchedulerView view = View(20, 2);
  view.head = WaitingHead{.matched = 6, .pending = 2};  // one page, and one to grow for the other
  EXPECT_EQ(Decide(running, view).kind, Kind::kAdmit);
  view.pages_free = 1;
  EXPECT_EQ(Decide(running, view).kind, Kind::kRun);
}

TEST(Scheduler, PagesOfRunningPromptsAreSpokenFor) {
  SchedulerView view = View(8, 10);
  view.head = WaitingHead{.matched = 0, .pending = 4, .samples = 1};
  const std::vector<RunnableSample> running = {{.request_id = 0, .length = 4, .pending = 1},
                                               {.request_id = 1, .length = 0, .pending = 6}};
  EXPECT_EQ(Decide(running, view).kind, Kind::kAdmit);
  const std::vector<RunnableSample> longer = {{.request_id = 0, .length = 4, .pending = 1},
                                              {.request_id = 1, .length = 0, .pending = 27}};
  view.token_budget = 100;
  EXPECT_EQ(Decide(longer, view).kind, Kind::kRun);
}

TEST(Scheduler, AnEmptyEngineAdmitsInTheEnd) {
  SchedulerView view = View(8, 2);
  view.head = WaitingHead{.matched = 0, .pending = 9, .samples = 1};
  view.pages_evictable_max = 3;
  EXPECT_EQ(DecideNext(view).kind, Kind::kEvict);
  view.pages_evictable_max = 0;
  EXPECT_EQ(DecideNext(view).kind, Kind::kAdmit);
}

// Requests of all sizes come at random times into a small simulated cache without sharing. Every
// decision must respect its limits, and every request must end: the oldest in a bounded time,
// whatever comes behind it.
class Simulation {
 public:
  explicit Simulation(uint64_t seed) : random_(seed) {
    page_size_ = 1 + random_.Below(6);
    pages_ = 8 + random_.Below(30);
    budget_ = 1 + random_.Below(20);
    sequences_ = 1 + random_.Below(6);
  }

  void Run(int64_t request_count) {
    int64_t submitted = 0;
    int64_t steps = 0;
    while (submitted < request_count || !waiting_.empty() || !running_.empty()) {
      ASSERT_LT(++steps, 20000) << "some request never ends";
      if (submitted < request_count && random_.Below(3) == 0) Submit(submitted++);
      Step(steps);
      if (testing::Test::HasFatalFailure()) return;
    }
  }

 private:
  struct Request {
    int64_t id;
    int64_t known;  // tokens: prompt and answer so far
    int64_t computed;
    int64_t left;  // answer tokens to come
    int64_t last_step;
  };

  int64_t PagesOf(int64_t tokens) const { return (tokens + page_size_ - 1) / page_size_; }
  int64_t PagesFree() const {
    int64_t used = 0;
    for (const Request& request : running_) used += PagesOf(request.computed);
    return pages_ - used;
  }
  void Submit(int64_t id) {
    const int64_t prompt = 1 + random_.Below(pages_ * page_size_ - 1);
    const int64_t left = 1 + random_.Below(pages_ * page_size_ - prompt);
    waiting_.push_back({id, prompt, 0, left, 0});
  }
  void Step(int64_t step) {
    for (int64_t decisions = 0;; ++decisions) {
      ASSERT_LT(decisions, 100) << "no end of planning";
      std::vector<RunnableSample> samples;
      for (const Request& request : running_) {
        samples.push_back({.request_id = request.id,
                           .length = request.computed,
                           .pending = request.known - request.computed,
                           .last_step = request.last_step});
      }
      SchedulerView view{.token_budget = budget_,
                         .page_size = page_size_,
                         .pages_free = PagesFree(),
                         .sequences_free = sequences_ - static_cast<int64_t>(running_.size()),
                         .running = samples,
                         .head = {}};
      if (!waiting_.empty())
        view.head = WaitingHead{.matched = 0, .pending = waiting_.front().known};
      const Decision decision = DecideNext(view);
      ASSERT_NE(decision.kind, Kind::kEvict);
      ASSERT_NE(decision.kind, Kind::kRestart) << "each request fits alone";
      if (decision.kind == Kind::kAdmit) {
        ASSERT_FALSE(waiting_.empty());
        ASSERT_GT(view.sequences_free, 0);
        running_.push_back(waiting_.front());
        waiting_.pop_front();
      } else if (decision.kind == Kind::kPreempt) {
        ASSERT_GT(running_.size(), 1U);
        running_.back().computed = 0;
        waiting_.push_front(running_.back());
        running_.pop_back();
      } else {
        return Forward(decision, step);
      }
    }
  }
  void Forward(const Decision& decision, int64_t step) {
    ASSERT_TRUE(decision.kind == Kind::kRun || (running_.empty() && waiting_.empty()));
    int64_t tokens = 0;
    for (const Take& take : decision.takes) {
      Request& request = running_[take.index];
      ASSERT_GE(take.tokens, 1);
      ASSERT_LE(take.tokens, request.known - request.computed);
      ASSERT_LT(request.last_step, step) << "taken twice";
      tokens += take.tokens;
      request.computed += take.tokens;
      request.last_step = step;
    }
    ASSERT_LE(tokens, budget_);
    ASSERT_GE(PagesFree(), 0);
    for (Request& request : running_) {
      if (request.computed == request.known && --request.left > 0) ++request.known;
    }
    std::erase_if(running_, [](const Request& request) { return request.left == 0; });
  }

  RandomSequence random_;
  int64_t page_size_, pages_, budget_, sequences_;
  std::deque<Request> waiting_;
  std::vector<Request> running_;
};

TEST(Scheduler, EveryRequestEndsWithinTheLimits) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Simulation(seed).Run(40);
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(Scheduler, PagesForWindowIsWhatAWindowTouchesWhereverItStands) {
  for (int64_t page_size = 1; page_size <= 5; ++page_size) {
    for (int64_t window = 1; window <= 14; ++window) {
      for (int64_t sinks = 0; sinks < window; ++sinks) {
        // Pages of the tokens that the query at `position` sees, and of its own.
        int64_t most = 0;
        for (int64_t position = 0; position < 60; ++position) {
          const int64_t slid = std::max<int64_t>(position + 1 - window, 0);
          int64_t pages = 0;
          for (int64_t page = 0; page * page_size <= position; ++page) {
            bool is_seen = false;
            for (int64_t p = page * page_size; p < (page + 1) * page_size && p <= position; ++p) {
              is_seen |= p < sinks || p >= sinks + slid;
            }
            pages += is_seen;
          }
          most = std::max(most, pages);
        }
        // One more, which is freed when the forward ends.
        EXPECT_LE(most + 1, PagesForWindow(window, sinks, page_size));
        EXPECT_GE(most + 3, PagesForWindow(window, sinks, page_size));
      }
    }
  }
}

}  // namespace
}  // namespace quire
