#include "store/disk/disk_tier.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/guard.h"
#include "base/start_thread.h"
#include "store/disk/disk_layout.h"
#include "store/disk/disk_reader.h"
#include "store/disk/read_only_file_system.h"

namespace quire {
namespace {

using disk_layout::ShortRoot;

// Batches side by side: two keep a disk busy while the threads copy and verify.
constexpr int kReadThreads = 2;
constexpr int kWriteThreads = 2;
// One for the scan and for what asks to look through the whole folder.
constexpr int kUpkeepThreads = 1;

Status CheckOptions(const DiskTierOptions& options) {
  const auto bad = [](const std::string& what) {
    return Status(StatusCode::kBadArgument, "disk tier: " + what);
  };
  if (options.directory.empty()) return bad("directory is empty");
  if (options.bytes_max < 0)
    return bad("bytes_max is " + std::to_string(options.bytes_max) + "; it must be 0 or more");
  constexpr int64_t kIoTimeoutMsMax = 86'400'000;  // a day; keeps nanoseconds in range, too
  if (options.io_timeout_ms < 1 || options.io_timeout_ms > kIoTimeoutMsMax) {
    return bad("io_timeout_ms is " + std::to_string(options.io_timeout_ms) + "; it must be 1 to " +
               std::to_string(kIoTimeoutMsMax));
  }
  return Status();
}

int64_t TimeoutNs(const DiskTierOptions& options) { return options.io_timeout_ms * kNsPerMs; }

}  // namespace

struct DiskTier::Shared {
  std::shared_ptr<Clock> clock;
  std::shared_ptr<FileSystem> files;
  int64_t io_timeout_ns = 0;
  std::unique_ptr<DiskFolder> folder{};

  // Puts of one chunk at the same time: the second waits for the first and finds it there.
  std::mutex claims_mutex{};
  std::condition_variable claims_changed{};
  std::set<ChunkId> claims{};
};

// What a batch of puts needs when its caller has left.
struct DiskTier::WriteJob {
  struct Item {
    DiskFolder::NewChunk chunk{};
    const StoredChunk* source = nullptr;  // used only while the caller is there
    std::optional<Status> status{};       // set while the caller is there
  };
  std::vector<Item> items{};
};

DiskTier::DiskTier(std::shared_ptr<Shared> shared, const DiskTierOptions& options)
    : shared_(std::move(shared)),
      reads_(shared_->clock, kReadThreads, TimeoutNs(options)),
      writes_(shared_->clock, kWriteThreads, TimeoutNs(options)),
      upkeep_(shared_->clock, kUpkeepThreads, TimeoutNs(options)) {}

template <typename T, typename F>
Result<T> DiskTier::Call(IoLane& lane, int64_t deadline_ns, F call) {
  return GuardEntry([&]() -> Result<T> {
    auto answer = std::make_shared<std::optional<Result<T>>>();
    QUIRE_RETURN_IF_ERROR(lane.Run(
        [answer, shared = shared_, call = std::move(call)](IoWork& work) {
          FileSession io(*shared->files, work);
          answer->emplace(call(io, *shared));
        },
        deadline_ns));
    return std::move(**answer);
  });
}

Result<std::unique_ptr<DiskTier>> DiskTier::Open(DiskTierSetup setup) {
  return GuardEntry([&]() -> Result<std::unique_ptr<DiskTier>> {
    QUIRE_RETURN_IF_ERROR(CheckOptions(setup.disk));
    while (setup.disk.directory.size() > 1 && setup.disk.directory.ends_with('/'))
      setup.disk.directory.pop_back();
    auto shared = std::make_shared<Shared>();
    shared->clock = setup.clock ? setup.clock : MachineTime();
    shared->files = setup.files ? setup.files : CreateMachineFileSystem(setup.disk.use_uring);
    if (setup.disk.use == FolderUse::kLook)
      shared->files = CreateReadOnlyFileSystem(std::move(shared->files));
    shared->io_timeout_ns = TimeoutNs(setup.disk);
    QUIRE_ASSIGN_OR_RETURN(std::unique_ptr<DiskTier> tier, ThreadOrStatus("the disk tier", [&] {
                             return std::unique_ptr<DiskTier>(new DiskTier(shared, setup.disk));
                           }));
    const auto opened = tier->Call<bool>(
        tier->upkeep_, kNever, [setup](FileSession& io, Shared& with) -> Result<bool> {
          QUIRE_ASSIGN_OR_RETURN(
              with.folder, DiskFolder::Open(io, with.files, with.clock, setup.disk, setup.eviction,
                                            setup.mac_key));
          return true;
        });
    QUIRE_RETURN_IF_ERROR(opened.status());
    tier->scan_ = tier->upkeep_.Start([shared](IoWork& work) {
      FileSession io(*shared->files, work);
      // If the folder cannot be read, or there is no memory, the next read or write says so.
      (void)GuardEntry([&] { return shared->folder->Scan(io); });
      shared->folder->catalog().EndScan();
    });
    return tier;
  });
}

Status DiskTier::AwaitScan(int64_t deadline_ns) { return upkeep_.Await(*scan_, deadline_ns); }

Status DiskTier::AddPassport(const Digest& fingerprint, std::string_view passport_json) {
  return Call<bool>(writes_, kNever,
                    [fingerprint, json = std::string(passport_json)](FileSession& io,
                                                                     Shared& with) -> Result<bool> {
                      QUIRE_RETURN_IF_ERROR(with.folder->AddPassport(io, fingerprint, json));
                      return true;
                    })
      .status();
}

Result<std::vector<std::string>> DiskTier::Passports(int64_t deadline_ns) {
  return Call<std::vector<std::string>>(upkeep_, deadline_ns, [](FileSession& io, Shared& with) {
    return with.folder->Passports(io);
  });
}

int DiskTier::Knows(const ChunkId& id) const {
  const auto known = shared_->folder->catalog().Find(ShortRoot(id));
  if (!known) return -1;
  const bool is_over = known->expires_ms != 0 && known->expires_ms <= shared_->clock->WallMs();
  return is_over ? -1 : 1;
}

// A file that this process has not seen synced may be another one's, which did not sync it.
bool DiskTier::IsStored(const ChunkId& id) const {
  if (Knows(id) != 1) return false;
  return !shared_->folder->syncs() || shared_->folder->catalog().seen(ShortRoot(id)).synced;
}

std::optional<ChunkWorth> DiskTier::Worth(const ChunkId& id) const {
  const auto known = shared_->folder->catalog().Find(ShortRoot(id));
  if (!known) return std::nullopt;
  return ChunkWorth{known->recompute_seconds, known->priority};
}

Result<int64_t> DiskTier::Prefix(std::span<const ChunkId> ids, int64_t deadline_ns) {
  std::vector<ChunkId> wanted;
  for (const ChunkId& id : ids) wanted.push_back(ShortRoot(id));
  return Call<int64_t>(
      reads_, deadline_ns,
      [wanted = std::move(wanted)](FileSession& io, Shared& with) -> Result<int64_t> {
        int64_t count = 0;
        for (const ChunkId& id : wanted) {
          if (io.work().abandoned()) break;
          QUIRE_ASSIGN_OR_RETURN(const bool is_there, with.folder->Find(io, id));
          if (!is_there) break;
          ++count;
        }
        return count;
      });
}

void DiskTier::Read(std::span<const TierRead> items, int64_t deadline_ns, TierReadSink& sink) {
  std::shared_ptr<DiskReader> reader;
  const Status status = GuardEntry([&]() -> Status {
    std::vector<TierRead> wanted(items.begin(), items.end());
    for (TierRead& item : wanted) item.id = ShortRoot(item.id);
    reader = std::make_shared<DiskReader>(wanted, sink);
    return reads_.Run(
        [reader, shared = shared_](IoWork& work) {
          FileSession io(*shared->files, work);
          reader->Run(io, *shared->folder);
        },
        deadline_ns);
  });
  if (reader) return reader->EndRest(status);
  for (size_t i = 0; i < items.size(); ++i) sink.OnEnd(i, status);
}

void DiskTier::RunWrites(IoWork& work, Shared& shared, WriteJob& job) {
  FileSession io(*shared.files, work);
  for (WriteJob::Item& item : job.items) {
    if (work.abandoned()) return;
    const ChunkId& id = item.chunk.id;
    item.chunk.copy = [&](int64_t offset, std::span<std::byte> to) {
      return work.WithCaller([&] {
        const auto from = item.source->bytes().subspan(static_cast<size_t>(offset), to.size());
        std::ranges::copy(from, to.begin());
      });
    };
    {
      std::unique_lock<std::mutex> lock(shared.claims_mutex);
      const int64_t until_ns = shared.clock->SteadyNs() + shared.io_timeout_ns;
      if (!WaitUntil(*shared.clock, shared.claims_changed, lock, until_ns,
                     [&] { return !shared.claims.contains(id); })) {
        work.WithCaller([&] {
          item.status = Status(StatusCode::kTimeout, "disk: another put of the chunk hangs");
        });
        continue;
      }
      shared.claims.insert(id);
    }
    Status status = GuardEntry([&] { return shared.folder->Store(io, item.chunk); });
    work.WithCaller([&] { item.status = std::move(status); });
    const std::lock_guard<std::mutex> guard(shared.claims_mutex);
    shared.claims.erase(id);
    shared.claims_changed.notify_all();
  }
}

std::vector<Status> DiskTier::Write(std::span<const TierWrite> items, int64_t deadline_ns) {
  auto job = std::make_shared<WriteJob>();
  for (const TierWrite& write : items) {
    WriteJob::Item item;
    item.source = write.chunk;
    item.chunk = {
        ShortRoot(write.id), write.chunk->header(), {write.recompute_seconds, write.priority}, {}};
    job->items.push_back(std::move(item));
  }
  const Status ran = writes_.Run(
      [job, shared = shared_](IoWork& work) { RunWrites(work, *shared, *job); }, deadline_ns);
  // What ended before the deadline is stored, or not, whatever became of the rest.
  std::vector<Status> statuses;
  for (const WriteJob::Item& item : job->items) statuses.push_back(item.status.value_or(ran));
  return statuses;
}

void DiskTier::Touch(const ChunkKey& key) {
  DiskCatalog& catalog = shared_->folder->catalog();
  if (const auto id = catalog.FindKey(key)) catalog.Use(*id);
}

bool DiskTier::Pin(const ChunkKey& key, int change) {
  return shared_->folder->catalog().Pin(key, change);
}

Status DiskTier::SetExpiry(const ChunkKey& key, int64_t expires_ms, int64_t deadline_ns) {
  if (expires_ms < 0) {
    return Status(StatusCode::kBadArgument,
                  "disk: expiry is " + std::to_string(expires_ms) + "; it must be 0 or more");
  }
  return Call<bool>(writes_, deadline_ns,
                    [key, expires_ms](FileSession& io, Shared& with) -> Result<bool> {
                      QUIRE_ASSIGN_OR_RETURN(const ChunkId id, with.folder->FindKey(io, key));
                      QUIRE_RETURN_IF_ERROR(with.folder->SetExpiry(io, id, expires_ms));
                      return true;
                    })
      .status();
}

Status DiskTier::SetPriority(const ChunkKey& key, int priority, int64_t deadline_ns) {
  return Call<bool>(writes_, deadline_ns,
                    [key, priority](FileSession& io, Shared& with) -> Result<bool> {
                      QUIRE_ASSIGN_OR_RETURN(const ChunkId id, with.folder->FindKey(io, key));
                      QUIRE_RETURN_IF_ERROR(with.folder->SetPriority(io, id, priority));
                      return true;
                    })
      .status();
}

void DiskTier::SetQuota(const ChunkKey& root, const ChunkQuota& quota) {
  shared_->folder->catalog().SetQuota(ShortRoot(root), quota);
}

Result<bool> DiskTier::Remove(const ChunkKey& key, int64_t deadline_ns) {
  return Call<bool>(writes_, deadline_ns, [key](FileSession& io, Shared& with) -> Result<bool> {
    const Result<ChunkId> id = with.folder->Locate(io, key);
    if (id.status().code() == StatusCode::kNotFound) return false;
    QUIRE_RETURN_IF_ERROR(id.status());
    return with.folder->Remove(io, *id, ChunkEvent::Kind::kRemoved);
  });
}

Result<int64_t> DiskTier::Clear(const Digest& fingerprint, const ChunkKey& root,
                                int64_t deadline_ns) {
  return Call<int64_t>(writes_, deadline_ns,
                       [fingerprint, root = ShortRoot(root)](FileSession& io, Shared& with) {
                         return with.folder->Clear(io, fingerprint, root);
                       });
}

Result<std::vector<ChunkListing>> DiskTier::List(int64_t deadline_ns) {
  return Call<std::vector<ChunkListing>>(
      upkeep_, deadline_ns, [](FileSession& io, Shared& with) -> Result<std::vector<ChunkListing>> {
        QUIRE_RETURN_IF_ERROR(with.folder->Scan(io));
        std::vector<ChunkListing> listings;
        for (const IndexedChunk& chunk : with.folder->catalog().All()) {
          listings.push_back({TierKind::kDisk, chunk.id.key, chunk.id.fingerprint, chunk.tokens,
                              chunk.first_token, chunk.bytes, chunk.created_ms, chunk.expires_ms});
        }
        return listings;
      });
}

Result<std::shared_ptr<const StoredChunk>> DiskTier::Get(const ChunkKey& key, int64_t deadline_ns) {
  using Chunk = std::shared_ptr<const StoredChunk>;
  return Call<Chunk>(reads_, deadline_ns, [key](FileSession& io, Shared& with) -> Result<Chunk> {
    QUIRE_ASSIGN_OR_RETURN(const ChunkId id, with.folder->FindKey(io, key));
    return with.folder->ReadWhole(io, id);
  });
}

Result<int64_t> DiskTier::Verify(int64_t deadline_ns) {
  return Call<int64_t>(upkeep_, deadline_ns,
                       [](FileSession& io, Shared& with) { return with.folder->Verify(io); });
}

Result<int64_t> DiskTier::CollectGarbage(int64_t deadline_ns) {
  return Call<int64_t>(upkeep_, deadline_ns, [](FileSession& io, Shared& with) {
    return with.folder->CollectGarbage(io);
  });
}

void DiskTier::Close() noexcept {
  for (IoLane* lane : {&reads_, &writes_, &upkeep_}) lane->Stop();
}

TierUsage DiskTier::Usage() const {
  TierUsage usage = shared_->folder->catalog().Usage();
  usage.available = reads_.responds() && writes_.responds();
  return usage;
}

void DiskTier::TakeEvents(std::vector<ChunkEvent>* events) {
  shared_->folder->catalog().TakeEvents(events);
}

}  // namespace quire
