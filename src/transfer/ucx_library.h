// What libquire_ucx.so gives: the bytes of a connection over UCX. It is a library of its own, so
// that Quire needs UCX where somebody asks for it, and nowhere else. C types alone: the two may be
// compiled by different compilers.
//
// The bytes go as active messages, in pieces that are numbered (docs/formats/transfer-wire.md).
// Nothing here throws.
#ifndef QUIRE_TRANSFER_UCX_LIBRARY_H_
#define QUIRE_TRANSFER_UCX_LIBRARY_H_

#include <sys/socket.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

extern "C" {

struct QuireUcxConnection;
struct QuireUcxListener;

// Active messages.
enum QuireUcxMessage : unsigned {
  kQuireUcxPiece = 1,  // bytes; none: the end
  kQuireUcxTaken = 2,  // how many pieces the receiver has taken
};
constexpr size_t kQuireUcxPieceBytesMax = size_t{1} << 18;
constexpr uint64_t kQuireUcxPiecesMax = 16;  // on their way in one direction

// What read, write and accept return below 0. `why` says more.
enum QuireUcxFailure : int64_t {
  kQuireUcxGone = -1,     // the peer has gone, or was not reached
  kQuireUcxCorrupt = -2,  // the peer breaks the protocol
  kQuireUcxNoMemory = -3,
};

struct QuireUcxText {
  char text[192];
};

constexpr uint32_t kQuireUcxVersion = 1;

// One thread at a time for each connection and each listener. `is_local`: the address is of this
// machine, and others are not to reach the connection.
struct QuireUcxFunctions {
  uint32_t version;

  // Begins to connect. Null: `why` is set.
  QuireUcxConnection* (*connect)(const sockaddr* address, socklen_t size, bool is_local,
                                 QuireUcxText* why);
  // `bound` is the address with the port that was taken. Null: `why` is set.
  QuireUcxListener* (*listen)(const sockaddr* address, socklen_t size, bool is_local,
                              sockaddr_storage* bound, QuireUcxText* why);
  // 1 and a connection; 0: nobody waits; a failure of one connection.
  int64_t (*accept)(QuireUcxListener* listener, QuireUcxConnection** connection, QuireUcxText* why);
  int (*listener_fd)(QuireUcxListener* listener);
  // Whether accept has something to do. If not, the descriptor can be read when it may have.
  bool (*prepare_accept)(QuireUcxListener* listener);
  void (*close_listener)(QuireUcxListener* listener);  // its connections go on

  // As ByteChannel of byte_channel.h.
  int64_t (*read)(QuireUcxConnection* connection, const iovec* into, size_t count);
  int64_t (*write)(QuireUcxConnection* connection, const iovec* parts, size_t count);
  const char* (*why)(QuireUcxConnection* connection);  // after a failure
  void (*end_writes)(QuireUcxConnection* connection);
  bool (*has_left)(QuireUcxConnection* connection);
  int (*fd)(QuireUcxConnection* connection);
  bool (*prepare_wait)(QuireUcxConnection* connection, bool wants_read, bool wants_write);
  void (*close)(QuireUcxConnection* connection);
};

// The one symbol of the library.
const QuireUcxFunctions* quire_ucx_functions();

}  // extern "C"

#endif  // QUIRE_TRANSFER_UCX_LIBRARY_H_
