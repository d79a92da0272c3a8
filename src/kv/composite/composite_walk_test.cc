// Seeded random walks over composite states and a naive model of them: a sequence is its list of
// tokens and, per recurrent part, the set of positions whose state is held. After each operation
// everything that can be observed is compared: statuses, lengths, what ForkSequence and PopN reach,
// the caller's states (a function of the tokens), keys and values, and, bit for bit, outputs and
// states of Quire's own layers against the same tokens prefilled alone. After a failed call the
// digest must be the one before it.
//
// The parts of a walk are drawn too: with and without attention, an RNNState, a RecurrentCache; a
// composite of one part is that part alone. Half of the walks have a second state, with other pages
// and histories: tokens and states go to and fro, and a receiving sequence goes on with its walk.
//
// Soak runs shift all seeds (base/testing/soak.h).
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "base/testing/soak.h"
#include "kv/testing/composite_walker.h"

namespace quire::composite_walk {
namespace {

struct Figures {
  int64_t replays = 0, refusals = 0, commits = 0, stops = 0;
};

void RunWalk(uint64_t seed, int step_count, Figures* figures) {
  RandomSequence random(seed);
  const WalkSetting setting = DrawSetting(random);
  std::vector<std::unique_ptr<CompositeWalk>> walks;
  walks.push_back(std::make_unique<CompositeWalk>(setting, random.Bits()));
  if (seed % 2 == 1) {
    const WalkSetting peer = DrawPeerSetting(setting, random);
    walks.push_back(std::make_unique<CompositeWalk>(peer, random.Bits()));
    walks[0]->ConnectTo(walks[1].get());
    walks[1]->ConnectTo(walks[0].get());
  }
  for (int step = 0; step < step_count; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    walks[static_cast<size_t>(random.Below(std::ssize(walks)))]->Step();
    for (const auto& walk : walks) {
      if (!testing::Test::HasFailure()) walk->Check();
    }
    if (testing::Test::HasFailure()) return;
  }
  for (const auto& walk : walks) {
    figures->replays += walk->replay_count();
    figures->refusals += walk->refusal_count();
    figures->commits += walk->committed_count();
    figures->stops += walk->stopped_count();
  }
}

TEST(CompositeWalkTest, RandomWalks) {
  constexpr uint64_t kWalks = 80;
  constexpr int kSteps = 200;
  Figures figures;
  for (uint64_t seed = SoakSeed(0); seed < SoakSeed(kWalks); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RunWalk(seed, kSteps, &figures);
    if (HasFailure()) return;
  }
  ReportFigure("operations", kWalks * kSteps);
  EXPECT_GT(figures.replays, 100) << "positions that are not held are met";
  EXPECT_GT(figures.refusals, 1000);
  EXPECT_GT(figures.commits, 100);
  EXPECT_GT(figures.stops, 50) << "marks that fail";
}

}  // namespace
}  // namespace quire::composite_walk
