#include "quire/chunk_blocks.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "base/guard.h"

namespace quire {
namespace {

Status BadMemory(const std::string& what) {
  return Status(StatusCode::kBadArgument, "BlockMemory: " + what);
}

// The bytes from the first one to the end of the last one; -1 if they are more than 63 bits count.
int64_t ExtentOf(const BlockMemory& memory) {
  int64_t blocks = 0, rows = 0, extent = 0;
  const bool overflows =
      __builtin_mul_overflow(memory.block_count - 1, memory.block_stride, &blocks) ||
      __builtin_mul_overflow(memory.rows - 1, memory.row_stride, &rows) ||
      __builtin_add_overflow(blocks, rows, &extent) ||
      __builtin_add_overflow(extent, memory.row_bytes, &extent);
  return overflows ? -1 : extent;
}

// All but the order, which takes longer to check than to use.
Status CheckRows(const BlockMemory& memory) {
  if (memory.data == nullptr) return BadMemory("data is null");
  if (memory.block_count < 1 || memory.rows < 1 || memory.row_bytes < 1)
    return BadMemory("it has " + std::to_string(memory.block_count) + " blocks of " +
                     std::to_string(memory.rows) + " rows of " + std::to_string(memory.row_bytes) +
                     " bytes; all must be at least 1");
  int64_t block_bytes = 0;
  if (__builtin_mul_overflow(memory.rows, memory.row_bytes, &block_bytes))
    return BadMemory("a block has more bytes than 63 bits count");
  if (memory.rows > 1 && memory.row_stride < memory.row_bytes)
    return BadMemory("rows of " + std::to_string(memory.row_bytes) +
                     " bytes overlap at a stride of " + std::to_string(memory.row_stride));
  const int64_t extent = ExtentOf(memory);
  if (extent < 0 || extent > memory.bytes)
    return BadMemory("its blocks end behind its " + std::to_string(memory.bytes) + " bytes");
  // Blocks lie one after the other, or the rows of each lie in planes of all blocks.
  const int64_t step = memory.block_stride;
  const bool behind = step >= (memory.rows - 1) * memory.row_stride + memory.row_bytes;
  const bool in_planes =
      step >= memory.row_bytes && memory.rows > 1 && memory.row_stride / step >= memory.block_count;
  if (memory.block_count > 1 && !behind && !in_planes)
    return BadMemory("blocks overlap at a stride of " + std::to_string(step) + " bytes");
  return {};
}

Status CheckOrder(const BlockMemory& memory) {
  if (memory.order.empty()) return {};
  if (memory.rows != 1)
    return BadMemory("a block of " + std::to_string(memory.rows) +
                     " rows takes no order; it is of one row");
  if (memory.run_bytes < 1)
    return BadMemory("run_bytes is " + std::to_string(memory.run_bytes) +
                     "; it must be at least 1");
  std::vector<uint32_t> sorted(memory.order.begin(), memory.order.end());
  std::ranges::sort(sorted);
  if (memory.run_bytes > memory.row_bytes || sorted.back() > memory.row_bytes - memory.run_bytes)
    return BadMemory("the run of " + std::to_string(memory.run_bytes) + " bytes at " +
                     std::to_string(sorted.back()) + " is not within a block of " +
                     std::to_string(memory.row_bytes));
  const auto overlaps = [&](uint32_t a, uint32_t b) { return b - a < memory.run_bytes; };
  if (const auto at = std::ranges::adjacent_find(sorted, overlaps); at != sorted.end())
    return BadMemory("runs of " + std::to_string(memory.run_bytes) + " bytes overlap at " +
                     std::to_string(*at));
  return {};
}

Status CheckBlocks(const char* call, const BlockMemory& memory, std::span<const int64_t> blocks,
                   size_t section_bytes) {
  QUIRE_RETURN_IF_ERROR(CheckRows(memory));
  for (const int64_t block : blocks) {
    if (block >= 0 && block < memory.block_count) continue;
    return Status(StatusCode::kBadArgument, std::string(call) + ": block " + std::to_string(block) +
                                                " is not in [0, " +
                                                std::to_string(memory.block_count) + ")");
  }
  int64_t total = 0;
  if (__builtin_mul_overflow(static_cast<int64_t>(blocks.size()), memory.block_bytes(), &total) ||
      total != static_cast<int64_t>(section_bytes)) {
    return Status(StatusCode::kBadArgument,
                  std::string(call) + ": " + std::to_string(blocks.size()) + " blocks of " +
                      std::to_string(memory.block_bytes()) + " bytes are not the section's " +
                      std::to_string(section_bytes) + " bytes");
  }
  return {};
}

std::byte* RowOf(const BlockMemory& memory, int64_t block, int64_t row) {
  return memory.data + block * memory.block_stride + row * memory.row_stride;
}

// Calls copy(bytes) with the bytes of a run, which are a constant of the compiler's where they are
// those of one to eight bytes: a call of memcpy takes longer than such a copy.
template <typename Copy>
void WithRunBytes(int64_t run_bytes, Copy copy) {
  switch (run_bytes) {
    case 1:
      return copy(std::integral_constant<size_t, 1>());
    case 2:
      return copy(std::integral_constant<size_t, 2>());
    case 4:
      return copy(std::integral_constant<size_t, 4>());
    case 8:
      return copy(std::integral_constant<size_t, 8>());
    default:
      return copy(static_cast<size_t>(run_bytes));
  }
}

// Calls copy(place, bytes) for each piece of a block, in the order of the section.
template <typename Copy>
void ForEachPiece(const BlockMemory& memory, int64_t block, Copy copy) {
  if (memory.order.empty()) {
    for (int64_t row = 0; row < memory.rows; ++row)
      copy(RowOf(memory, block, row), static_cast<size_t>(memory.row_bytes));
    return;
  }
  WithRunBytes(memory.run_bytes, [&](auto bytes) {
    std::byte* const begin = RowOf(memory, block, 0);
    for (const uint32_t offset : memory.order) copy(begin + offset, bytes);
  });
}

}  // namespace

Status CheckBlockMemory(const BlockMemory& memory) {
  return GuardEntry([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckRows(memory));
    return CheckOrder(memory);
  });
}

Status GatherBlocks(const BlockMemory& memory, std::span<const int64_t> blocks,
                    std::span<std::byte> section) {
  return GuardEntry([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckBlocks("GatherBlocks", memory, blocks, section.size()));
    std::byte* to = section.data();
    for (const int64_t block : blocks) {
      ForEachPiece(memory, block, [&to](const std::byte* piece, auto bytes) {
        std::memcpy(to, piece, bytes);
        to += bytes;
      });
    }
    return {};
  });
}

Status ScatterBlocks(std::span<const std::byte> section, const BlockMemory& memory,
                     std::span<const int64_t> blocks) {
  return GuardEntry([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckBlocks("ScatterBlocks", memory, blocks, section.size()));
    std::vector<int64_t> sorted(blocks.begin(), blocks.end());
    std::ranges::sort(sorted);
    if (const auto twice = std::ranges::adjacent_find(sorted); twice != sorted.end())
      return Status(StatusCode::kBadArgument, "ScatterBlocks: block " + std::to_string(*twice) +
                                                  " stands twice among the blocks");
    const std::byte* from = section.data();
    for (const int64_t block : blocks) {
      ForEachPiece(memory, block, [&from](std::byte* piece, auto bytes) {
        std::memcpy(piece, from, bytes);
        from += bytes;
      });
    }
    return {};
  });
}

Result<std::vector<SectionSpec>> TokenSections(const Passport& passport, int64_t token_count) {
  return GuardEntry([&]() -> Result<std::vector<SectionSpec>> {
    if (token_count < 1)
      return Status(StatusCode::kBadArgument, "TokenSections: token_count is " +
                                                  std::to_string(token_count) +
                                                  "; it must be at least 1");
    std::vector<SectionSpec> sections;
    for (size_t i = 0; i < passport.layers.size(); ++i) {
      const PassportLayer& layer = passport.layers[i];
      const int64_t at = passport.first_layer + static_cast<int64_t>(i);
      switch (layer.kind) {
        case StateKind::kAttention:
          sections.push_back({SectionKind::kKey,
                              at,
                              at,
                              layer.dtype,
                              {token_count, layer.kv_heads, layer.head_dim}});
          sections.push_back({SectionKind::kValue,
                              at,
                              at,
                              layer.value_dtype(),
                              {token_count, layer.kv_heads, layer.v_head_dim}});
          break;
        case StateKind::kLatent:
          sections.push_back(
              {SectionKind::kLatent, at, at, layer.dtype, {token_count, layer.head_dim}});
          break;
        case StateKind::kRecurrent:
        case StateKind::kCaller:
          return Status(StatusCode::kBadArgument,
                        "TokenSections: layer " + std::to_string(at) +
                            " of the passport is recurrent; its state is no row per token");
      }
    }
    return sections;
  });
}

}  // namespace quire
