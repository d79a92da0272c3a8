#include "kv/pages/sequence_table.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "base/random.h"

namespace quire {
namespace {

int32_t Add(SequenceTable& table, int64_t id) {
  table.ReserveOne();
  return table.Insert(id);
}

TEST(SequenceTable, FindsWhatWasInsertedAndNothingElse) {
  SequenceTable table;
  EXPECT_EQ(table.Find(0), SequenceTable::kAbsent);
  const int32_t five = Add(table, 5);
  const int32_t zero = Add(table, 0);
  EXPECT_NE(five, zero);
  EXPECT_EQ(table.Find(5), five);
  EXPECT_EQ(table.Find(0), zero);
  EXPECT_EQ(table.Find(1), SequenceTable::kAbsent);
  EXPECT_EQ(table.count(), 2);
  table.Erase(five);
  EXPECT_EQ(table.Find(5), SequenceTable::kAbsent);
  EXPECT_EQ(table.Find(0), zero);
  table.Clear();
  EXPECT_EQ(table.Find(0), SequenceTable::kAbsent);
  EXPECT_EQ(table.count(), 0);
}

TEST(SequenceTable, ANewSequenceIsEmptyEvenInAReusedPlace) {
  SequenceTable table;
  const int32_t first = Add(table, 1);
  table[first].last = 3;
  table[first].long_factors = true;
  table[first].batch = 9;
  table.Erase(first);
  const int32_t second = Add(table, 2);
  EXPECT_EQ(second, first);
  EXPECT_EQ(table[second].last, kNoBlock);
  EXPECT_FALSE(table[second].long_factors);
  EXPECT_EQ(table[second].batch, 0u);
}

// Against std::map. Ids are multiples of large powers of two as well as small: chains of probing
// get long and wrap.
TEST(SequenceTable, AgreesWithAMapOverManyChanges) {
  SequenceTable table;
  std::map<int64_t, int32_t> model;
  RandomSequence random(1);
  for (int step = 0; step < 20000; ++step) {
    const int64_t id = random.Below(300) << (random.Below(2) * 40);
    const auto found = model.find(id);
    ASSERT_EQ(table.Find(id), found == model.end() ? SequenceTable::kAbsent : found->second);
    if (found == model.end()) {
      model[id] = Add(table, id);
    } else if (random.Below(3) != 0) {
      table.Erase(found->second);
      model.erase(found);
    }
  }
  ASSERT_EQ(table.count(), static_cast<int64_t>(model.size()));
  std::vector<int32_t> sorted;
  for (const auto& [id, index] : model) {
    ASSERT_EQ(table.Find(id), index);
    sorted.push_back(index);
  }
  EXPECT_EQ(table.SortedById(), sorted);
}

}  // namespace
}  // namespace quire
