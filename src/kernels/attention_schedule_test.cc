// Every (row, head, segment) is computed exactly once, in ascending order per row, within the
// bounds of scratch.
#include "kernels/attention_schedule.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "base/random.h"

namespace quire {
namespace {

struct Plan {
  AttentionArgs args;
  std::vector<AttentionSequence> sequences;
  std::vector<SharedSpan> shared;

  Plan(int kv_heads, int group) {
    args.pages.layout = {DType::kBF16, kv_heads, 128, 128, 16};
    args.num_qo_heads = kv_heads * group;
  }
  void Add(int64_t rows, int64_t base, int64_t private_segment = 0) {
    sequences.push_back({args.row_count, rows, base, nullptr, 0, private_segment, nullptr, 0});
    args.row_count += rows;
  }
};

// Walks the whole schedule; `next` is the segment that each (kv head, query row) must see next.
void Walk(Plan plan, int workers, int64_t* wave_count = nullptr) {
  plan.args.sequences = plan.sequences;
  plan.args.shared = plan.shared;
  const size_t bytes = AttentionSchedule::ScratchBytes(
      plan.args.pages.layout, plan.args.num_qo_heads, plan.args.row_count,
      static_cast<int64_t>(plan.sequences.size()), workers);
  std::vector<std::byte> memory(bytes + 64);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  std::byte* scratch = memory.data() + (64 - address % 64) % 64;
  AttentionSchedule schedule(plan.args, workers, scratch);
  const int64_t total = schedule.total_rows();
  std::map<std::pair<int64_t, int64_t>, int64_t> next;
  std::map<std::pair<int64_t, int64_t>, int> finished;
  const auto advance = [&](const AttentionUnit& unit, int64_t begin, int64_t end, bool finishes) {
    ASSERT_LE(unit.row_count() * unit.head_count(), kUnitRows);
    ASSERT_GE(unit.row_begin, 0);
    ASSERT_LE(unit.row_end, total);
    ASSERT_EQ(unit.sequence, schedule.SequenceOf(unit.row_begin));
    for (int64_t h = unit.head_begin; h < unit.head_end; ++h) {
      for (int64_t r = unit.row_begin; r < unit.row_end; ++r) {
        int64_t& segment = next[{h, r}];
        ASSERT_EQ(segment, begin) << "head " << h << ", row " << r;
        segment = end;
        if (finishes) ++finished[{h, r}];
      }
    }
  };
  while (schedule.NextGroup()) {
    while (schedule.NextWave()) {
      if (wave_count != nullptr) ++*wave_count;
      size_t used = 0;
      size_t piece = 0;
      for (const AttentionWavePart& part : schedule.parts()) {
        const AttentionUnit& unit = schedule.unit(part.unit);
        ASSERT_EQ(part.arena, used);
        used +=
            static_cast<size_t>(part.segment_end - part.segment_begin) * schedule.SlotFloats(unit);
        int64_t segment = part.segment_begin;
        for (; piece < schedule.pieces().size() &&
               &schedule.parts()[static_cast<size_t>(schedule.pieces()[piece].part)] == &part;
             ++piece) {
          ASSERT_EQ(schedule.pieces()[piece].segment_begin, segment);
          segment = schedule.pieces()[piece].segment_end;
        }
        ASSERT_EQ(segment, part.segment_end);
        advance(unit, part.segment_begin, part.segment_end, schedule.final_group() && part.last);
      }
      ASSERT_EQ(piece, schedule.pieces().size());
      const auto* end = reinterpret_cast<const std::byte*>(schedule.arena() + used);
      ASSERT_LE(end, scratch + bytes);
    }
    for (const AttentionUnit& unit : schedule.whole_units()) {
      advance(unit, unit.segment_begin, unit.segment_end, schedule.final_group());
    }
  }
  for (size_t s = 0; s < plan.sequences.size(); ++s) {
    const int64_t begin = schedule.plan_row_begin()[s];
    for (int64_t r = 0; r < plan.sequences[s].row_count; ++r) {
      const int64_t seen = plan.sequences[s].base + r + 1;
      for (int64_t g = 0; g < schedule.group_size(); ++g) {
        for (int64_t h = 0; h < plan.args.pages.layout.num_kv_heads; ++h) {
          const std::pair<int64_t, int64_t> key = {h, (begin + r) * schedule.group_size() + g};
          ASSERT_GE(next[key] * kSegmentPositions, seen);
          ASSERT_EQ(finished[key], 1);
        }
      }
    }
  }
}

TEST(AttentionSchedule, CoversEveryRowOnce) {
  RandomSequence random(1);
  for (int round = 0; round < 25; ++round) {
    const int kv_heads = static_cast<int>(random.Below(12)) + 1;
    const int group = static_cast<int>(random.Below(20)) + 1;
    Plan plan(kv_heads, group);
    const int64_t count = random.Below(12);
    for (int64_t i = 0; i < count; ++i) {
      plan.Add(random.Below(3) == 0 ? random.Below(300) : random.Below(4),
               random.Below(4) == 0 ? random.Below(100000) : random.Below(600));
    }
    Walk(plan, static_cast<int>(random.Below(20)) + 1);
  }
}

TEST(AttentionSchedule, SharedSpansComeFirstAndByDepth) {
  for (const int64_t rows : {1, 5, 100}) {
    for (const int workers : {1, 2, 16}) {
      Plan plan(4, 3);
      plan.Add(rows, 256 * 9, 6);
      plan.Add(rows + 1, 256 * 8 + 5, 6);
      plan.Add(2, 256 * 7, 2);
      plan.Add(1, 90);
      plan.Add(3, 256 * 40, 30);
      plan.Add(1, 256 * 40, 30);
      plan.shared = {{0, 3, 0, 2}, {4, 2, 0, 30}, {0, 2, 2, 6}};
      Walk(plan, workers);
    }
  }
}

TEST(AttentionSchedule, OneLongSequenceIsCutInBoundedWaves) {
  Plan plan(8, 4);
  plan.Add(1, 1000 * 256);
  int64_t waves = 0;
  Walk(plan, 2, &waves);
  EXPECT_GT(waves, 5);
  const size_t bytes = AttentionSchedule::ScratchBytes(plan.args.pages.layout, 32, 1, 1, 2);
  EXPECT_LT(bytes, size_t{4} << 20) << "whatever the length";
  waves = 0;
  Walk(plan, 1, &waves);
  EXPECT_EQ(waves, 0) << "one worker has nobody to share with";
}

TEST(AttentionSchedule, ManyEqualSequencesAreNotCut) {
  Plan plan(8, 4);
  for (int i = 0; i < 32; ++i) plan.Add(1, 4096);
  int64_t waves = 0;
  Walk(plan, 2, &waves);
  EXPECT_EQ(waves, 0);
}

}  // namespace
}  // namespace quire
