// What one connection may do before another one has its turn; the same on both sides.
#ifndef QUIRE_BUFFERS_SOCKET_TURNS_H_
#define QUIRE_BUFFERS_SOCKET_TURNS_H_

#include <cstddef>

namespace quire {

inline constexpr size_t kReadBytes = size_t{1} << 18;
// Frames written before the thread reads again: an answer must not wait until a large message is
// written.
inline constexpr int kFramesPerTurn = 4;

}  // namespace quire

#endif  // QUIRE_BUFFERS_SOCKET_TURNS_H_
