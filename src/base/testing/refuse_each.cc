#include "base/testing/refuse_each.h"

#include <gtest/gtest.h>

#include <utility>

#include "base/testing/replaced_new.h"

namespace quire {
namespace {

// Allocations of this thread that may still succeed; negative: all.
thread_local int64_t allocations_left = -1;
thread_local bool allocation_refused = false;
thread_local bool refuses_all = false;

}  // namespace

bool RefusesAllocation(size_t) noexcept {
  if (refuses_all) return true;
  if (allocations_left < 0 || allocations_left-- != 0) return false;
  allocation_refused = true;
  return true;
}

void RefuseEach(const std::string& name, StatusCode expected, const std::function<Status()>& call) {
  SCOPED_TRACE(name);
  int64_t refusals = 0;
  for (;; ++refusals) {
    allocation_refused = false;
    allocations_left = refusals;
    const Status status = call();
    allocations_left = -1;
    if (!allocation_refused) {
      EXPECT_EQ(status.code(), expected) << status.ToString();
      break;
    }
    ASSERT_EQ(status.code(), StatusCode::kOutOfMemory) << "allocation " << refusals;
  }
  EXPECT_GT(refusals, 0) << "the call allocates nothing";
}

void RefuseFromHere() { refuses_all = true; }

bool AllocationRefused() { return allocation_refused; }

AllocationsAllowed::AllocationsAllowed() : left_(std::exchange(allocations_left, -1)) {}
AllocationsAllowed::~AllocationsAllowed() { allocations_left = left_; }

}  // namespace quire
