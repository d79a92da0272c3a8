#include "store/disk/disk_reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/huge_pages.h"
#include "chunk/chunk_layout.h"

namespace quire {
namespace {

using chunk_layout::RoundUp;

constexpr auto kAlignment = static_cast<int64_t>(kDirectAlignment);

// What the first read of a file asks for: the header of most chunks, for the price of one block.
constexpr int64_t kHeaderBytesFirst = 16 << 10;
// Files up to here are read with their header.
constexpr int64_t kSmallFileBytes = 128 << 10;
// Below it a disk is busier with requests than with bytes; layers of a chunk are put together.
constexpr int64_t kRequestBytesMin = FileTransfers::kBytesMax;
// Files that stay open at a time, of the 1024 that a process usually may have.
constexpr size_t kOpenFilesMax = 256;

int64_t RoundDown(int64_t value) { return value - value % kAlignment; }

// The bytes to ask the file for: aligned where it is read past the page cache.
std::pair<int64_t, int64_t> Extent(int64_t begin, int64_t end, bool direct) {
  if (!direct) return {begin, end};
  return {RoundDown(begin), RoundUp(end, kAlignment)};
}

Status NobodyWaits() {
  return Status(StatusCode::kCancelled, "disk: nobody waits for the chunk any more");
}

// Requests for its sections meet neither in a block of the file nor in memory, and the last one
// ends within the chunk.
bool IsAligned(const ChunkHeader& header) {
  const auto is_whole = [](int64_t value) { return value == RoundDown(value); };
  return is_whole(header.total_bytes) &&
         std::ranges::all_of(header.sections,
                             [&](const Section& section) { return is_whole(section.offset); });
}

// Bytes that no digest covers must not carry what the disk made of them, nor what memory held:
// those from `begin` to section `next`, or to the end.
void ClearUpTo(const ChunkHeader& header, int64_t begin, size_t next, std::span<std::byte> memory) {
  const int64_t end =
      next < header.sections.size() ? header.sections[next].offset : header.total_bytes;
  std::ranges::fill(memory.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
                    std::byte{0});
}

// Those behind a section.
void ClearGap(const ChunkHeader& header, size_t section, std::span<std::byte> memory) {
  const Section& entry = header.sections[section];
  ClearUpTo(header, entry.offset + entry.length, section + 1, memory);
}

void ClearGaps(const ChunkHeader& header, std::span<std::byte> memory) {
  ClearUpTo(header, header.header_bytes, 0, memory);
  for (size_t s = 0; s < header.sections.size(); ++s) ClearGap(header, s, memory);
}

}  // namespace

DiskReader::DiskReader(std::span<const TierRead> items, TierReadSink& sink)
    : sink_(sink), items_(items.size()) {
  for (size_t i = 0; i < items.size(); ++i) {
    Item& item = items_[i];
    item.read = items[i];
    ChunkExpectation& expected = item.read.expected;
    item.mac_key = expected.mac_key;
    expected.mac_key = item.mac_key;
    if (!expected.tokens) continue;
    item.tokens.assign(expected.tokens->begin(), expected.tokens->end());
    expected.tokens = item.tokens;
  }
}

void DiskReader::Run(FileSession& io, DiskFolder& folder) {
  std::unique_ptr<FileTransfers> transfers = folder.transfers().Take();
  OpenAll(io, folder, *transfers);
  if (!io.work().abandoned()) {
    Plan();
    TellVerified(io, folder);
    ReadPayload(io, folder, *transfers);
  }
  transfers->Drain(io.work());
  folder.transfers().GiveBack(std::move(transfers));
}

bool DiskReader::IsCancelled(FileSession& io, size_t index) {
  bool is_cancelled = false;
  io.work().WithCaller([&] { is_cancelled = sink_.Cancelled(index); });
  return is_cancelled;
}

void DiskReader::EndRest(const Status& status) {
  for (size_t i = 0; i < items_.size(); ++i) {
    if (items_[i].ended) continue;
    QUIRE_CHECK(!status.ok()) << "item " << i << " was neither served nor refused";
    sink_.OnEnd(i, status);
  }
}

void DiskReader::End(FileSession& io, DiskFolder& folder, size_t index, const Status& status) {
  Item& item = items_[index];
  const ChunkId& id = item.read.id;
  // Before anybody hears of it, so that a caller that asks again finds it gone.
  if (status.code() == StatusCode::kCorrupt) folder.Quarantine(io, id, item.file.stat.inode);
  if (status.code() == StatusCode::kIncompatible)
    static_cast<void>(folder.RemoveUnsigned(io, id));  // else it is there and no use to anybody
  if (status.code() == StatusCode::kNotFound && item.file.file.get() >= 0)
    folder.RemoveExpired(io, id, item.file.stat.inode);
  io.work().WithCaller([&] {
    item.ended = true;
    sink_.OnEnd(index, status);
  });
  if (item.ended) item.owner.reset();  // requests that are under way have it
}

// ---------------------------------------------------------------------- headers

void DiskReader::OpenAll(FileSession& io, DiskFolder& folder, FileTransfers& transfers) {
  size_t open_count = 0;
  for (size_t i = 0; i < items_.size() && !io.work().abandoned(); ++i) {
    Item& item = items_[i];
    if (IsCancelled(io, i)) {
      End(io, folder, i, NobodyWaits());
      continue;
    }
    auto file = folder.OpenChunk(io, item.read.id);
    if (!file.ok()) {
      End(io, folder, i, file.status());
      continue;
    }
    item.file = std::move(*file);
    item.reopens = ++open_count > kOpenFilesMax;
    while (transfers.full()) TakeHeader(io, folder, transfers);
    const int64_t size = item.file.stat.size;
    StartHeader(i, size <= kSmallFileBytes ? size : kHeaderBytesFirst, transfers);
  }
  while (!transfers.idle()) TakeHeader(io, folder, transfers);
}

void DiskReader::StartHeader(size_t index, int64_t bytes, FileTransfers& transfers) {
  Item& item = items_[index];
  item.header_wanted = bytes;
  const auto [begin, end] = Extent(0, bytes, item.file.direct);
  transfers.StartRead(item.file.file.get(), begin, end - begin, index);
}

void DiskReader::TakeHeader(FileSession& io, DiskFolder& folder, FileTransfers& transfers) {
  size_t index = 0;
  int64_t longer = 0;  // the header has more bytes than were asked for
  {
    const FileTransfers::Done done = transfers.Next(io.work());
    index = done.tag;
    longer = TakeHeaderBytes(io, folder, done);
  }
  if (longer > 0) return StartHeader(index, longer, transfers);
  if (items_[index].reopens) items_[index].file.file.Reset();
}

int64_t DiskReader::TakeHeaderBytes(FileSession& io, DiskFolder& folder,
                                    const FileTransfers::Done& done) {
  const size_t index = done.tag;
  const Item& item = items_[index];
  if (io.work().abandoned()) return 0;
  if (done.error != 0) {
    End(io, folder, index, FileError(done.error, "cannot read a chunk's header"));
    return 0;
  }
  const auto header_bytes = ChunkHeaderBytes(done.bytes, {});
  if (header_bytes.ok() && item.header_wanted < *header_bytes &&
      *header_bytes <= std::min(item.file.stat.size, FileTransfers::kBytesMax))
    return *header_bytes;
  Prepare(io, folder, index, done.bytes);
  return 0;
}

Status DiskReader::CheckPrepared(DiskFolder& folder, Item& item,
                                 std::span<const std::byte> begin) const {
  QUIRE_ASSIGN_OR_RETURN(item.header, folder.CheckHeader(item.read.id, item.file.stat, begin));
  QUIRE_RETURN_IF_ERROR(CheckChunk(item.header, item.read.expected));
  const auto within_limits = DecodeChunkHeader(begin, item.read.limits);
  if (within_limits.ok()) return Status();
  return Status(StatusCode::kIncompatible, std::string(within_limits.status().message()));
}

void DiskReader::Prepare(FileSession& io, DiskFolder& folder, size_t index,
                         std::span<const std::byte> begin) {
  Item& item = items_[index];
  Status status = CheckPrepared(folder, item, begin);
  if (status.ok()) {
    folder.NoteFound(io, item.read.id, item.header, item.file.file.get());
    io.work().WithCaller([&] {
      auto memory = sink_.OnHeader(index, item.header);
      if (!memory.ok()) {
        item.ended = true;
        sink_.OnEnd(index, memory.status());
        return;
      }
      item.memory = memory->first(static_cast<size_t>(item.header.total_bytes));
      if (IsAligned(item.header)) item.owner = sink_.OwnerOf(index);
      status = PlaceBegin(item, begin);
      item.prepared = true;
    });
  }
  if (!status.ok()) End(io, folder, index, status);
}

// Places what is complete in the first bytes of the file: the header, and sections.
Status DiskReader::PlaceBegin(Item& item, std::span<const std::byte> begin) {
  const ChunkHeader& header = item.header;
  for (const Section& section : header.sections) item.missing.push_back(section.length);
  item.is_verified.resize(item.section_count());
  item.missing_in_all = header.total_bytes;
  const auto there = std::min(static_cast<int64_t>(begin.size()), header.total_bytes);
  if (item.whole()) return PlaceBytes(item, 0, begin.first(static_cast<size_t>(there)), false);
  std::ranges::copy(begin.first(static_cast<size_t>(header.header_bytes)), item.memory.begin());
  ClearGaps(header, item.memory);
  // No byte will ever bring an empty section.
  for (size_t s = 0; s < item.section_count(); ++s)
    if (header.sections[s].length == 0) QUIRE_RETURN_IF_ERROR(VerifySection(item, s));
  for (size_t s = 0; s < item.section_count(); ++s) {
    const Section& section = header.sections[s];
    if (section.offset + section.length > there) break;
    const auto bytes =
        begin.subspan(static_cast<size_t>(section.offset), static_cast<size_t>(section.length));
    QUIRE_RETURN_IF_ERROR(PlaceBytes(item, section.offset, bytes, false));
  }
  return Status();
}

// ---------------------------------------------------------------------- the plan

void DiskReader::Plan() {
  for (size_t i = 0; i < items_.size(); ++i) {
    if (!items_[i].prepared) continue;
    for (size_t s = 0; s < items_[i].section_count(); ++s) order_.push_back({i, s});
  }
  std::ranges::stable_sort(order_, {}, [&](const Place& place) {
    return std::tuple(items_[place.item].header.sections[place.section].layer_first, place.item);
  });
  std::vector<size_t> planned_to(items_.size());
  for (const Place& place : order_) {
    if (planned_to[place.item] <= place.section)
      PlanRequest(place.item, place.section, &planned_to[place.item]);
  }
}

void DiskReader::PlanRequest(size_t index, size_t first, size_t* planned_to) {
  const Item& item = items_[index];
  const auto& sections = item.header.sections;
  *planned_to = sections.size();
  if (item.ended) return;
  if (item.whole()) {
    return AddRequests(index, item.header.total_bytes - item.missing_in_all,
                       item.header.total_bytes);
  }
  *planned_to = first + 1;
  if (item.is_verified[first]) return;
  const int64_t begin = sections[first].offset;
  int64_t end = begin + sections[first].length;
  for (size_t s = first + 1; s < sections.size(); ++s) {
    const int64_t next_end = sections[s].offset + sections[s].length;
    const bool belongs =
        sections[s].layer_first == sections[first].layer_first || end - begin < kRequestBytesMin;
    if (!belongs || next_end - begin > FileTransfers::kBytesMax) break;
    end = next_end;
    *planned_to = s + 1;
  }
  AddRequests(index, begin, end);
}

void DiskReader::AddRequests(size_t index, int64_t begin, int64_t end) {
  const Item& item = items_[index];
  const bool is_shared = item.owner != nullptr && begin == RoundDown(begin);
  const std::span<std::byte> huge = HugePagesOf(item.memory);
  const int64_t huge_begin = huge.empty() ? end : huge.data() - item.memory.data();
  const int64_t huge_end = huge_begin + std::ssize(huge);
  while (begin < end) {
    const bool in_place = is_shared && huge_begin <= begin && begin < huge_end;
    int64_t piece_end = std::min(end, RoundDown(begin) + FileTransfers::kBytesMax);
    if (is_shared && begin < huge_end)
      piece_end = std::min(piece_end, in_place ? huge_end : huge_begin);
    requests_.push_back({index, begin, piece_end, in_place});
    begin = piece_end;
  }
}

// ---------------------------------------------------------------------- the payload

void DiskReader::ReadPayload(FileSession& io, DiskFolder& folder, FileTransfers& transfers) {
  size_t next = 0;
  const auto start = [&] {
    while (next < requests_.size() &&
           !(requests_[next].in_place ? transfers.full_in_place() : transfers.full()))
      StartRequest(io, folder, next++, transfers);
  };
  start();
  while (!io.work().abandoned() && !transfers.idle()) {
    const FileTransfers::Done done = transfers.Next(io.work());
    start();  // the disk goes on while these bytes are verified
    TakeBytes(io, folder, done);
    TellVerified(io, folder);
  }
}

void DiskReader::StartRequest(FileSession& io, DiskFolder& folder, size_t number,
                              FileTransfers& transfers) {
  const Request& request = requests_[number];
  Item& item = items_[request.item];
  if (item.ended) return;
  if (IsCancelled(io, request.item)) return End(io, folder, request.item, NobodyWaits());
  if (item.file.file.get() < 0) {
    const uint64_t inode = item.file.stat.inode;
    auto file = folder.OpenChunk(io, item.read.id);
    if (!file.ok()) return End(io, folder, request.item, file.status());
    if (file->stat.inode != inode) {
      return End(io, folder, request.item,
                 Status(StatusCode::kUnavailable, "disk: the chunk was replaced meanwhile"));
    }
    item.file = std::move(*file);
  }
  const auto [begin, end] = Extent(request.begin, request.end, item.file.direct);
  ++item.under_way;
  if (!request.in_place)
    return transfers.StartRead(item.file.file.get(), begin, end - begin, number);
  const auto to = item.memory.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
  transfers.StartReadTo(to, item.owner, item.file.file.get(), begin, number);
}

void DiskReader::TakeBytes(FileSession& io, DiskFolder& folder, const FileTransfers::Done& done) {
  const Request& request = requests_[done.tag];
  Item& item = items_[request.item];
  const bool direct = item.file.direct;
  if (--item.under_way == 0 && item.reopens) item.file.file.Reset();
  if (item.ended) return;
  const int64_t skipped = request.begin - Extent(request.begin, request.end, direct).first;
  const int64_t size = request.end - request.begin;
  Status status;
  if (done.error != 0) {
    status = FileError(done.error, "cannot read a chunk");
  } else if (static_cast<int64_t>(done.bytes.size()) < skipped + size) {
    status = Status(StatusCode::kCorrupt, "disk: a chunk's file was cut while it was read");
  } else {
    const auto bytes = std::span<const std::byte>(done.bytes)
                           .subspan(static_cast<size_t>(skipped), static_cast<size_t>(size));
    io.work().WithCaller(
        [&] { status = PlaceBytes(item, request.begin, bytes, request.in_place); });
  }
  if (!status.ok()) End(io, folder, request.item, status);
}

Status DiskReader::PlaceBytes(Item& item, int64_t offset, std::span<const std::byte> bytes,
                              bool in_place) {
  const int64_t end = offset + static_cast<int64_t>(bytes.size());
  if (item.whole()) {
    if (!in_place)
      std::ranges::copy(bytes, item.memory.subspan(static_cast<size_t>(offset)).begin());
    item.missing_in_all -= static_cast<int64_t>(bytes.size());
    return item.missing_in_all == 0 ? VerifyWhole(item) : Status();
  }
  const auto& sections = item.header.sections;
  const auto first = std::ranges::upper_bound(
      sections, offset, {}, [](const Section& section) { return section.offset + section.length; });
  for (auto section = first; section != sections.end() && section->offset < end; ++section) {
    const int64_t from = std::max(offset, section->offset);
    const int64_t to = std::min(end, section->offset + section->length);
    if (from >= to) continue;
    if (!in_place)
      std::memcpy(item.memory.data() + from, bytes.data() + (from - offset),
                  static_cast<size_t>(to - from));
    const auto s = static_cast<size_t>(section - sections.begin());
    item.missing[s] -= to - from;
    if (item.missing[s] > 0) continue;
    // Another piece than the last one may have been read in place.
    if (item.owner != nullptr) ClearGap(item.header, s, item.memory);
    QUIRE_RETURN_IF_ERROR(VerifySection(item, s));
  }
  return Status();
}

Status DiskReader::VerifySection(Item& item, size_t section) {
  const Section& entry = item.header.sections[section];
  QUIRE_RETURN_IF_ERROR(CheckSection(
      item.header, static_cast<int64_t>(section),
      item.memory.subspan(static_cast<size_t>(entry.offset), static_cast<size_t>(entry.length))));
  item.is_verified[section] = true;
  return Status();
}

Status DiskReader::VerifyWhole(Item& item) {
  QUIRE_ASSIGN_OR_RETURN(const ChunkView view,
                         ChunkView::Open(item.memory, item.read.expected, item.read.limits));
  QUIRE_RETURN_IF_ERROR(view.CheckAll());
  item.is_verified.assign(item.section_count(), true);
  return Status();
}

// ---------------------------------------------------------------------- the sink

void DiskReader::TellVerified(FileSession& io, DiskFolder& folder) {
  std::vector<size_t> complete;
  io.work().WithCaller([&] {
    for (; told_ < order_.size(); ++told_) {
      const Place& place = order_[told_];
      Item& item = items_[place.item];
      if (item.ended) continue;
      if (!item.is_verified[place.section]) break;
      sink_.OnSection(place.item, static_cast<int64_t>(place.section));
      ++item.told;
    }
    for (size_t i = 0; i < items_.size(); ++i) {
      Item& item = items_[i];
      const bool is_complete = item.prepared && item.told == item.section_count() &&
                               (!item.whole() || item.missing_in_all == 0);
      if (item.ended || !is_complete) continue;
      item.ended = true;
      sink_.OnEnd(i, Status());
      complete.push_back(i);
    }
  });
  for (const size_t i : complete) {
    const ChunkId& id = items_[i].read.id;
    folder.catalog().Use(id);
    folder.catalog().SetSeen(id, {.verified = true, .synced = false});
    items_[i].file.file.Reset();
    items_[i].owner.reset();
  }
}

}  // namespace quire
