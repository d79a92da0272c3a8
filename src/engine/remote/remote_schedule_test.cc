// Two engines that compute prompts for each other or one for the other, stepped in a random order,
// with requests that come, are cancelled and are preempted: every answer has the bits of an engine
// alone, and in the end all pages are back on both sides.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/testing/soak.h"
#include "engine/testing/remote_pair.h"

namespace quire {
namespace {

struct Kind {
  std::string name;
  Sizes sizes;
  bool windows = false;  // some requests have one
};
void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

std::vector<Kind> Kinds() {
  const Speculation ngram = {.draft = DraftKind::kNGram, .draft_tokens = 4};
  const Speculation model = {.draft = DraftKind::kModel, .draft_tokens = 4};
  return {{"Plain", {}},
          {"Windows", {}, true},
          {"LayerWindow", {.layer_window = 6}},
          {"LongRope", {.long_rope = true}},
          {"Recurrent", {.recurrent = true}},
          {"NGram", {.speculation = ngram, .tree_nodes = 16}},
          {"DraftModel", {.speculation = model, .tree_nodes = 16, .draft_seed = 0}},
          {"RecurrentNGram", {.speculation = ngram, .tree_nodes = 16, .recurrent = true}}};
}

// What all walks of a test have come to.
struct Totals {
  int64_t remote = 0, losses = 0, preempted_here = 0, preempted_there = 0, cancelled = 0;
  int64_t cached_there = 0, served = 0;
};

class RemoteSchedule : public testing::TestWithParam<Kind> {
 protected:
  Sizes SizesOf(RandomSequence* random, bool is_small) const {
    Sizes sizes = GetParam().sizes;
    sizes.page_size = 2 + random->Below(6);
    sizes.chunk = 6 + random->Below(20);
    if (is_small) sizes.pages = 96 / sizes.page_size + 6;
    sizes.sequences = 4 + random->Below(5);
    return sizes;
  }
  std::vector<Job> Jobs(int count, uint64_t seed, bool is_small) const {
    std::vector<Job> jobs = RandomJobs(count, seed);
    RandomSequence random(seed, 2);
    for (Job& job : jobs) {
      job.options.ignore_eos = true;
      job.options.max_tokens += 12;
      if (is_small) job.options.n = 1;
      if (random.Below(3) == 0) job.options.cache_salt = "tenant";
      if (!GetParam().windows || random.Below(2) == 0) continue;
      job.options.window = 8 + random.Below(10);
      job.options.sinks = random.Below(3);
    }
    return jobs;
  }
  Answer Want(const Job& job, int64_t sample) const {
    Sizes sizes = GetParam().sizes;
    sizes.prefix_cache = false;
    sizes.speculation = {};
    sizes.draft_seed = {};
    Server server(sizes);
    const int64_t id = server.Submit(job.prompt, job.options);
    server.Finish();
    return server.answers[{id, sample}];
  }

  // A step of each side, or a call, until all have answers.
  void Walk(uint64_t seed, bool both_ways, Totals* totals);

  TestFolder folder_;
  int next_socket_ = 0;
};

// One of the two engines and what was asked of it.
struct Side {
  explicit Side(const Sizes& sizes, const std::vector<Job>& all) : server(sizes), jobs(all) {}

  void SubmitNext() {
    if (next == jobs.size()) return;
    ids[server.Submit(jobs[next].prompt, jobs[next].options)] = next;
    ++next;
  }
  void CancelOne(RandomSequence* random) {
    if (ids.empty()) return;
    auto place = ids.begin();
    std::advance(place, random->Below(std::ssize(ids)));
    if (!server.engine->Cancel(place->first).ok()) return;  // it has ended
    cancelled.insert(place->first);
    server.engine->CheckInvariants();
  }
  bool done() const { return next == jobs.size() && server.engine->Idle(); }

  Server server;
  std::vector<Job> jobs;
  size_t next = 0;
  std::map<int64_t, size_t> ids;  // to jobs
  std::set<int64_t> cancelled;
};

void RemoteSchedule::Walk(uint64_t seed, bool both_ways, Totals* totals) {
  RandomSequence random(seed, 1);
  const bool is_small = random.Below(2) == 0;
  Side here(SizesOf(&random, is_small), Jobs(10, seed, is_small));
  Side there(SizesOf(&random, is_small), Jobs(both_ways ? 8 : 4, seed + 1, is_small));
  const auto endpoint = [&] {
    return "unix:" + folder_.File("s" + std::to_string(next_socket_++));
  };
  PrefillPeerOptions use{.when = RemotePrefill::kAlways};
  use.addresses = {Serve(&there.server, endpoint())};
  Attach(&here.server, use);
  if (both_ways) {
    use.addresses = {Serve(&here.server, endpoint())};
    Attach(&there.server, use);
  }
  for (int64_t turn = 0; !here.done() || !there.done(); ++turn) {
    ASSERT_LT(turn, 200'000) << "no progress";
    Side& side = random.Below(2) == 0 ? here : there;
    const EngineStats stats = side.server.engine->Stats();
    // A step that has only peers to wait for takes real time.
    const bool waits = stats.running > 0 && stats.running == stats.remote_waiting;
    if (waits && random.Below(16) != 0) continue;
    const int64_t act = random.Below(12);
    if (act < 3) {
      side.SubmitNext();
    } else if (act == 3 && random.Below(4) == 0) {
      side.CancelOne(&random);
    } else if (!side.server.engine->Idle()) {
      const Status stepped = side.server.Step();
      ASSERT_TRUE(stepped.ok()) << stepped.ToString();
    }
  }
  for (const Side* const side : {&here, &there}) {
    for (const auto& [key, answer] : side->server.answers) {
      if (side->cancelled.contains(key.first)) continue;
      const Job& job = side->jobs[side->ids.at(key.first)];
      ExpectEqual(answer, Want(job, key.second), "sample " + std::to_string(key.second));
    }
    ExpectAllPagesBack(side->server);
    const EngineStats stats = side->server.engine->Stats();
    totals->remote += stats.remote_tokens;
    totals->losses += stats.remote_losses;
    totals->served += stats.served_tokens;
    totals->cancelled += std::ssize(side->cancelled);
  }
  totals->preempted_here += here.server.engine->Stats().preemptions;
  totals->preempted_there += there.server.engine->Stats().preemptions;
}

TEST_P(RemoteSchedule, OneComputesForTheOther) {
  Totals totals;
  const auto seeds = static_cast<uint64_t>(RoundsOf(12));
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE(seed);
    Walk(SoakSeed(seed), false, &totals);
    if (HasFatalFailure()) return;
  }
  if (!IsOrdinaryRun()) return;
  EXPECT_GT(totals.remote, 300);
  EXPECT_GE(totals.served, totals.remote);
  EXPECT_GT(totals.preempted_here, 0);
  // Windows that slide give pages back.
  if (!GetParam().windows) {
    EXPECT_GT(totals.preempted_there, 0);
  }
  EXPECT_GT(totals.cancelled, 0);
}

TEST_P(RemoteSchedule, BothComputeForEachOther) {
  Totals totals;
  for (uint64_t seed = 100; seed < 104; ++seed) {
    SCOPED_TRACE(seed);
    Walk(SoakSeed(seed), true, &totals);
    if (HasFatalFailure()) return;
  }
  if (!IsOrdinaryRun()) return;
  EXPECT_GT(totals.remote, 300);
}

INSTANTIATE_TEST_SUITE_P(Kinds, RemoteSchedule, testing::ValuesIn(Kinds()),
                         [](const auto& made) { return made.param.name; });

}  // namespace
}  // namespace quire
