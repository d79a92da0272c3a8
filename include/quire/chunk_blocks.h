// Sections of chunks from and to the paged memory of engines that are not Quire: vLLM, a server in
// another language, a ring of buffers. Such memory has blocks of equal size; a chunk's section is a
// number of whole blocks, one after the other.
//
//   const BlockMemory keys{.data = base, .bytes = size, .block_count = n, .block_stride = stride,
//                          .rows = 1, .row_stride = 0, .row_bytes = page};
//   QUIRE_RETURN_IF_ERROR(ScatterBlocks(section, keys, std::array<int64_t, 2>{7, 3}));
//
// Bytes are copied as they are. Every block and every length is checked before the first byte
// moves: a call that fails has changed nothing. All functions may be called from any thread; that
// nothing else uses the blocks meanwhile is the caller's concern.
#ifndef QUIRE_CHUNK_BLOCKS_H_
#define QUIRE_CHUNK_BLOCKS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "quire/chunk.h"
#include "quire/status.h"

namespace quire {

// Block b is the rows at data + b * block_stride + r * row_stride, r < rows, of row_bytes each.
// With an order it is one row, of which a section has the runs of run_bytes at these offsets.
struct BlockMemory {
  std::byte* data = nullptr;
  int64_t bytes = 0;  // from data on that may be touched
  int64_t block_count = 0;
  int64_t block_stride = 0;  // bytes
  int64_t rows = 1;
  int64_t row_stride = 0;  // bytes
  int64_t row_bytes = 0;
  std::span<const uint32_t> order = {};  // bytes; kept by the caller
  int64_t run_bytes = 0;                 // with an order

  int64_t block_bytes() const {
    return order.empty() ? rows * row_bytes : std::ssize(order) * run_bytes;
  }
};

// BadArgument unless all blocks lie within `bytes` and runs within their row, with sizes of at
// least 1, no negative stride and no two rows or runs that overlap. With an order it takes n log n.
Status CheckBlockMemory(const BlockMemory& memory);

// Copies `blocks` of a memory that CheckBlockMemory takes, in their order, from or to a section.
// BadArgument for a block out of range and for a section that is not as long as these blocks; for
// ScatterBlocks also for a block that stands twice.
Status GatherBlocks(const BlockMemory& memory, std::span<const int64_t> blocks,
                    std::span<std::byte> section);
Status ScatterBlocks(std::span<const std::byte> section, const BlockMemory& memory,
                     std::span<const int64_t> blocks);

// The sections that a chunk of `token_count` tokens has under the passport, in the order in which
// they are written: per layer a key and a value, or a latent. BadArgument for a passport with
// recurrent layers, whose states are no rows of tokens, and for a count below 1.
Result<std::vector<SectionSpec>> TokenSections(const Passport& passport, int64_t token_count);

}  // namespace quire

#endif  // QUIRE_CHUNK_BLOCKS_H_
