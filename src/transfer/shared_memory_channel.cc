// Bytes through memory that two processes share: a ring for each direction. The unix socket passes
// the memory, wakes a side that waits, and tells when a side is gone.
//
// The peer can write to all of it at any time. So each side keeps its own position and believes the
// other's only as far as a ring can be filled; bytes are copied out once, and the checksum is that
// of the copy. The memory cannot be made shorter under us: it is sealed.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/copied_checksum.h"
#include "base/guard.h"
#include "transfer/byte_channel.h"

namespace quire {
namespace {

// A few frames: enough that both sides work at the same time, few enough to stay in the last cache.
constexpr size_t kRingBytes = size_t{4} << 20;
static_assert((kRingBytes & (kRingBytes - 1)) == 0, "a position's place must survive 2^64");
// A side that waits for room is woken when this much is free: else for each header that is read.
constexpr size_t kRoomBytes = kRingBytes / 4;
constexpr size_t kLine = 64;
// Copied to the ring at a time. The C library takes one instruction for longer copies (rep movsb),
// which on AMD's cores is half as fast, and a fifth where both sides begin a few bytes apart within
// a line, as frames do.
constexpr size_t kCopyBytes = 2048;

// What both sides write to; a line each, so that they do not take it from each other for nothing.
struct RingControl {
  alignas(kLine) std::atomic<uint64_t> written;
  alignas(kLine) std::atomic<uint64_t> read;
  alignas(kLine) std::atomic<uint32_t> reader_waits;
  alignas(kLine) std::atomic<uint32_t> writer_waits;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "it is shared between processes");

struct Ring {
  RingControl control;
  std::byte bytes[kRingBytes];
};
constexpr size_t kSharedBytes = 2 * sizeof(Ring);
static_assert(sizeof(RingControl) == 4 * kLine, "both sides must see the same layout");
static_assert(sizeof(Ring) == sizeof(RingControl) + kRingBytes, "both sides, again");

constexpr int kSealsNeeded = F_SEAL_SHRINK | F_SEAL_GROW;

Status Failed(const char* what) {
  return Status(StatusCode::kUnavailable, std::string("shared memory: ") + what + ": " +
                                              std::generic_category().message(errno));
}

Status Refused(const char* what) {
  return Status(StatusCode::kCorrupt, std::string("shared memory: the peer ") + what);
}

// The two rings of a connection.
class SharedRings {
 public:
  SharedRings() = default;
  SharedRings(SharedRings&& other) noexcept : rings_(std::exchange(other.rings_, nullptr)) {}
  SharedRings& operator=(SharedRings&& other) noexcept {
    std::swap(rings_, other.rings_);
    return *this;
  }
  ~SharedRings() {
    if (rings_ != nullptr) ::munmap(rings_, kSharedBytes);
  }

  static Result<SharedRings> Map(int fd) {
    void* const memory = ::mmap(nullptr, kSharedBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return Failed("mmap");
    SharedRings rings;
    rings.rings_ = static_cast<Ring*>(memory);
    return rings;
  }
  bool is_open() const { return rings_ != nullptr; }
  Ring& operator[](int i) const {
    QUIRE_DCHECK(is_open());
    QUIRE_DCHECK(i == 0 || i == 1);
    return rings_[i];
  }

 private:
  Ring* rings_ = nullptr;
};

// Copies between a ring, from position `at` on, and plain memory.
template <typename F>
void ForEachPiece(Ring& ring, uint64_t at, size_t count, F&& f) {
  QUIRE_DCHECK(count <= kRingBytes) << "bytes would be written over that are not read";
  while (count > 0) {
    const size_t offset = static_cast<size_t>(at % kRingBytes);
    const size_t piece = std::min(count, kRingBytes - offset);
    f(std::span(ring.bytes + offset, piece));
    at += piece;
    count -= piece;
  }
}

class SharedMemory final : public ByteChannel {
 public:
  // The rings that this side writes and reads.
  SharedMemory(Socket socket, SharedRings rings, bool is_connector)
      : socket_(std::move(socket)), rings_(std::move(rings)), write_(is_connector ? 0 : 1) {}

  Result<size_t> Read(std::span<const std::span<std::byte>> into) override {
    return Take(into, [](std::byte* to, std::span<const std::byte> piece) {
      std::memcpy(to, piece.data(), piece.size());
    });
  }
  Result<size_t> ReadSummed(std::span<const std::span<std::byte>> into, uint32_t* crc) override {
    return Take(into, [crc](std::byte* to, std::span<const std::byte> piece) {
      *crc = CopyCrc32c(to, piece.data(), piece.size(), *crc);
    });
  }
  Result<size_t> Write(std::span<const std::span<const std::byte>> parts) override;
  void EndWrites() noexcept override { socket_.EndWrites(); }
  Wait PrepareWait(bool wants_read, bool wants_write) override;

 private:
  // copy(to, piece): a piece of the ring to its place, once.
  template <typename F>
  Result<size_t> Take(std::span<const std::span<std::byte>> into, F&& copy);
  Result<size_t> Readable();
  Result<size_t> Writable();
  // Whether Read or Write has something to do.
  bool IsReady(bool wants_read, bool wants_write) const;
  // Wakes it if it waits.
  void WakePeer(std::atomic<uint32_t>* waits);
  // Takes what the socket has: the memory at first, then wake-ups. Unavailable at its end.
  Status TakeSignals();
  Status TakeMemory(int fd);
  Ring& written() const { return rings_[write_]; }
  Ring& read() const { return rings_[1 - write_]; }

  const Socket socket_;
  Status gone_;  // why the socket tells nothing more
  SharedRings rings_;
  const int write_;
  uint64_t written_at_ = 0;  // our own positions
  uint64_t read_at_ = 0;
};

Result<size_t> SharedMemory::Readable() {
  const uint64_t count = read().control.written.load(std::memory_order_acquire) - read_at_;
  if (count > kRingBytes) return Refused("says that it has written more than there is room for");
  return static_cast<size_t>(count);
}

Result<size_t> SharedMemory::Writable() {
  const uint64_t used = written_at_ - written().control.read.load(std::memory_order_acquire);
  if (used > kRingBytes) return Refused("says that it has read more than was written");
  return kRingBytes - static_cast<size_t>(used);
}

template <typename F>
Result<size_t> SharedMemory::Take(std::span<const std::span<std::byte>> into, F&& copy) {
  if (!rings_.is_open()) {
    QUIRE_RETURN_IF_ERROR(TakeSignals());
    if (!rings_.is_open()) return size_t{0};
  }
  QUIRE_ASSIGN_OR_RETURN(size_t left, Readable());
  if (left == 0) {
    if (gone_.ok()) gone_ = TakeSignals();
    // What was written before the peer went is read first.
    QUIRE_ASSIGN_OR_RETURN(left, Readable());
    if (left == 0 && !gone_.ok()) return gone_;
  }
  size_t taken = 0;
  for (const std::span<std::byte>& place : into) {
    const size_t count = std::min(left, place.size());
    std::byte* to = place.data();
    ForEachPiece(read(), read_at_, count, [&](std::span<const std::byte> piece) {
      copy(to, piece);
      to += piece.size();
    });
    read_at_ += count;
    taken += count;
    left -= count;
  }
  if (taken == 0) return taken;
  read().control.read.store(read_at_, std::memory_order_seq_cst);
  if (kRingBytes - left >= kRoomBytes) WakePeer(&read().control.writer_waits);
  return taken;
}

Result<size_t> SharedMemory::Write(std::span<const std::span<const std::byte>> parts) {
  if (!rings_.is_open()) return size_t{0};
  QUIRE_ASSIGN_OR_RETURN(size_t left, Writable());
  // As long as there is room nothing tells that it is gone, and what it wrote is read meanwhile.
  if (left == 0 && !gone_.ok()) return gone_;
  size_t taken = 0;
  for (const std::span<const std::byte>& part : parts) {
    const size_t count = std::min(left, part.size());
    const std::byte* from = part.data();
    ForEachPiece(written(), written_at_, count, [&](std::span<std::byte> piece) {
      for (size_t at = 0; at < piece.size(); at += kCopyBytes)
        std::memcpy(piece.data() + at, from + at, std::min(kCopyBytes, piece.size() - at));
      from += piece.size();
    });
    written_at_ += count;
    taken += count;
    left -= count;
  }
  if (taken == 0) return taken;
  written().control.written.store(written_at_, std::memory_order_seq_cst);
  WakePeer(&written().control.reader_waits);
  return taken;
}

// A side says that it waits and looks again; the other one writes its position and looks whether
// the first one waits. Both in one order for all (seq_cst), so one of them sees the other.
ByteChannel::Wait SharedMemory::PrepareWait(bool wants_read, bool wants_write) {
  if (!rings_.is_open()) {
    if (!wants_read) return {};
    return {.entry = {.fd = socket_.fd(), .wants_read = true}};
  }
  if (wants_read) read().control.reader_waits.store(1, std::memory_order_seq_cst);
  if (wants_write) written().control.writer_waits.store(1, std::memory_order_seq_cst);
  Wait wait{.entry = {.fd = socket_.fd(), .wants_read = true},
            .is_ready = IsReady(wants_read, wants_write)};
  if (wait.is_ready) return wait;
  // Signals that nobody reads, and a peer that is gone, would end each wait at once.
  if (gone_.ok()) gone_ = GuardEntry([&] { return TakeSignals(); });
  if (!gone_.ok()) return {.is_ready = wants_read || wants_write};
  wait.is_ready = IsReady(wants_read, wants_write);  // what they told of
  return wait;
}

bool SharedMemory::IsReady(bool wants_read, bool wants_write) const {
  if (wants_read && read().control.written.load(std::memory_order_seq_cst) != read_at_) return true;
  if (!wants_write) return false;
  const uint64_t read_there = written().control.read.load(std::memory_order_seq_cst);
  return kRingBytes - (written_at_ - read_there) >= kRoomBytes;
}

void SharedMemory::WakePeer(std::atomic<uint32_t>* waits) {
  if (waits->load(std::memory_order_seq_cst) == 0) return;
  waits->store(0, std::memory_order_seq_cst);
  const std::byte one{1};
  const std::span<const std::byte> bytes(&one, 1);
  // It fails when the peer is gone, which the next read tells, or has signals enough to read.
  static_cast<void>(socket_.Write(std::span(&bytes, 1)));
}

Status SharedMemory::TakeSignals() {
  std::byte bytes[64];
  iovec vector = {bytes, sizeof(bytes)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t count = ::recvmsg(socket_.fd(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  Socket memory;
  for (cmsghdr* head = count < 0 ? nullptr : CMSG_FIRSTHDR(&message); head != nullptr;
       head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    // Padding has room for one more than is expected. Whatever comes is ours to close.
    for (size_t at = CMSG_LEN(0); at + sizeof(int) <= head->cmsg_len; at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, reinterpret_cast<const std::byte*>(head) + at, sizeof(fd));
      memory = Socket(fd);
    }
  }
  if (memory.is_open()) return TakeMemory(memory.fd());
  if (count > 0) return rings_.is_open() ? Status() : Refused("passes no memory");
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return Status();
  if (count == 0) return Status(StatusCode::kUnavailable, "the peer closed the connection");
  return Failed("reading from the socket");
}

Status SharedMemory::TakeMemory(int fd) {
  if (rings_.is_open()) return Refused("passes memory again");
  struct stat info {};
  if (::fstat(fd, &info) != 0) return Failed("fstat");
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSealsNeeded) != kSealsNeeded)
    return Refused("passes memory that it could make shorter");
  if (static_cast<size_t>(info.st_size) != kSharedBytes)
    return Refused("passes memory of another size; is it of another version?");
  QUIRE_ASSIGN_OR_RETURN(rings_, SharedRings::Map(fd));
  QUIRE_DCHECK(written_at_ == 0 && read_at_ == 0) << "bytes went before there were rings";
  return Status();
}

// With the first byte, so that the peer reads both at once.
Status PassMemory(const Socket& socket, int fd) {
  std::byte one{1};
  iovec vector = {&one, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* const head = CMSG_FIRSTHDR(&message);
  QUIRE_CHECK(head != nullptr) << "the control bytes have no room for a descriptor";
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(head), &fd, sizeof(fd));
  if (::sendmsg(socket.fd(), &message, MSG_NOSIGNAL) == 1) return Status();
  return Failed("passing it over the socket");
}

}  // namespace

Result<std::unique_ptr<ByteChannel>> ConnectSharedMemory(Socket socket) {
  const Socket memory(::memfd_create("quire transfer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.is_open()) return Failed("memfd_create");
  if (::ftruncate(memory.fd(), static_cast<off_t>(kSharedBytes)) != 0) return Failed("ftruncate");
  if (::fcntl(memory.fd(), F_ADD_SEALS, kSealsNeeded | F_SEAL_SEAL) != 0) return Failed("sealing");
  QUIRE_ASSIGN_OR_RETURN(SharedRings rings, SharedRings::Map(memory.fd()));
  QUIRE_RETURN_IF_ERROR(PassMemory(socket, memory.fd()));
  return std::unique_ptr<ByteChannel>(
      std::make_unique<SharedMemory>(std::move(socket), std::move(rings), true));
}

std::unique_ptr<ByteChannel> AcceptSharedMemory(Socket socket) {
  return std::make_unique<SharedMemory>(std::move(socket), SharedRings(), false);
}

}  // namespace quire
