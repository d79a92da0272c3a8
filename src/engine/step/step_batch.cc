#include "engine/step/step_batch.h"

#include "engine/request/scheduler.h"

namespace quire {

int64_t PagesOfLoads(const StepBatch& batch, int64_t page_size) {
  int64_t pages = 0;
  for (const StepWork& work : batch) {
    const int64_t length = work.sample->computed;
    pages += PagesForAppend(length, work.loaded(), page_size, length % page_size != 0);
  }
  return pages;
}

}  // namespace quire
