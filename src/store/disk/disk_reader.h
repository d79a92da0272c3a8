// DiskReader: one batch of chunks on its way from files to a sink.
//
// Headers are read first, then sections in requests of up to a MiB, several at once, in the order
// in which compute wants them: the first layer of all chunks, then the next. What arrives is
// verified in its place: it is read there if the sink shares the memory, sections begin where
// direct reads may, and huge pages can lie there, else it is copied from the queue's memory. To
// small pages, each of which is a piece of its own, a virtual disk reads at half the speed; a copy
// costs a quarter of that (docs/notes/speed.md). A chunk with a MAC is told whole.
#ifndef QUIRE_STORE_DISK_DISK_READER_H_
#define QUIRE_STORE_DISK_DISK_READER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "store/disk/disk_folder.h"
#include "store/tier/chunk_tier.h"

namespace quire {

class DiskReader {
 public:
  // Copies what it needs of the items: the reader may outlive its caller. `sink` is used only while
  // the caller is there.
  DiskReader(std::span<const TierRead> items, TierReadSink& sink);

  // On a thread of a lane.
  void Run(FileSession& io, DiskFolder& folder);
  // By the caller once it gave the work up: ends what is not ended.
  void EndRest(const Status& status);

 private:
  struct Item {
    TierRead read{};
    std::vector<int32_t> tokens{};
    std::string mac_key{};
    DiskFolder::ChunkFile file{};
    int64_t header_wanted = 0;  // bytes that the read of the header asked for
    ChunkHeader header{};
    std::span<std::byte> memory{};
    std::shared_ptr<const void> owner{};  // of the memory; not null: it is read to
    std::vector<int64_t> missing{};       // bytes of each section that are not in place
    std::vector<bool> is_verified{};      // each section
    int64_t missing_in_all = 0;           // with a MAC: of the whole chunk
    size_t told = 0;                      // sections
    int under_way = 0;                    // requests
    bool reopens = false;                 // too many files are open for this one to stay so
    bool prepared = false;
    bool ended = false;  // set only while the caller is there

    bool whole() const { return !mac_key.empty(); }
    size_t section_count() const { return header.sections.size(); }
  };
  // Bytes [begin, end) of an item's file.
  struct Request {
    size_t item = 0;
    int64_t begin = 0, end = 0;
    bool in_place = false;
  };
  struct Place {
    size_t item = 0, section = 0;
  };

  void OpenAll(FileSession& io, DiskFolder& folder, FileTransfers& transfers);
  void StartHeader(size_t index, int64_t bytes, FileTransfers& transfers);
  void TakeHeader(FileSession& io, DiskFolder& folder, FileTransfers& transfers);
  // How many bytes of the header are to be asked for again; 0 = none.
  int64_t TakeHeaderBytes(FileSession& io, DiskFolder& folder, const FileTransfers::Done& done);
  void Prepare(FileSession& io, DiskFolder& folder, size_t index, std::span<const std::byte> begin);
  Status CheckPrepared(DiskFolder& folder, Item& item, std::span<const std::byte> begin) const;
  Status PlaceBegin(Item& item, std::span<const std::byte> begin);

  void Plan();
  void PlanRequest(size_t index, size_t first, size_t* planned_to);
  void AddRequests(size_t index, int64_t begin, int64_t end);

  void ReadPayload(FileSession& io, DiskFolder& folder, FileTransfers& transfers);
  void StartRequest(FileSession& io, DiskFolder& folder, size_t number, FileTransfers& transfers);
  void TakeBytes(FileSession& io, DiskFolder& folder, const FileTransfers::Done& done);
  Status PlaceBytes(Item& item, int64_t offset, std::span<const std::byte> bytes, bool in_place);
  Status VerifySection(Item& item, size_t section);
  Status VerifyWhole(Item& item);

  bool IsCancelled(FileSession& io, size_t index);
  void TellVerified(FileSession& io, DiskFolder& folder);
  void End(FileSession& io, DiskFolder& folder, size_t index, const Status& status);

  TierReadSink& sink_;
  std::vector<Item> items_;
  std::vector<Place> order_;  // of all sections, as the sink hears of them
  size_t told_ = 0;
  std::vector<Request> requests_;
};

}  // namespace quire

#endif  // QUIRE_STORE_DISK_DISK_READER_H_
