#include "store/chunk_fetcher.h"

#include <utility>

namespace quire {

ChunkFetcher::ChunkFetcher(std::shared_ptr<StoreParts> parts) : parts_(std::move(parts)) {}
ChunkFetcher::~ChunkFetcher() { Close(); }
void ChunkFetcher::Close() noexcept {}

std::shared_ptr<ChunkFetch> ChunkFetcher::Start(const FetchRequest& request, bool to_memory) {
  auto state = std::make_shared<FetchState>(parts_, request, to_memory);
  auto handle = std::make_shared<FetchHandle>(state);
  Locate(state);
  ++started_;
  return handle;
}

// Takes chunk i from RAM if it is there: found and pinned in one step.
bool ChunkFetcher::TakeFromMemory(FetchState& fetch, int64_t i) {
  if (!parts_->has_memory()) return false;
  MissReason miss = MissReason::kNone;
  const ChunkId& id = fetch.id(i);
  FetchState::Slot slot;
  slot.chunk = parts_->memory->Take(id, parts_->clock->WallMs(), /*pin=*/true, &miss);
  if (slot.chunk == nullptr) return false;
  const PinnedChunk pin{id, TierBit(TierKind::kRam)};
  try {
    slot.pin = parts_->pins.Add(pin, /*named=*/false, parts_->clock->SteadyNs());
  } catch (...) {
    parts_->Unpin(pin);
    throw;
  }
  const std::lock_guard lock(parts_->fetch_mutex);
  fetch.Found(i, std::move(slot));
  return true;
}

void ChunkFetcher::Locate(const std::shared_ptr<FetchState>& fetch) {
  int64_t i = 0;
  while (i < fetch->count() && TakeFromMemory(*fetch, i)) ++i;
  const std::lock_guard lock(parts_->fetch_mutex);
  fetch->Located(i == fetch->count() ? MissReason::kNone : MissReason::kNotStored);
}

}  // namespace quire
