#include "kv/plan/ragged_kv.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "kv/pages/page_storage.h"

namespace quire {
namespace {

constexpr size_t kCacheLine = 64;  // kernels read whole lines

int64_t PagesFor(int64_t rows) { return (rows + kTilePositions - 1) / kTilePositions; }

// The window with positions counted from `base`, for rows and keys from there on.
SequenceWindow WindowFrom(SequenceWindow window, int64_t base) {
  const int64_t sinks_before = std::min(base, window.sinks);
  window.sinks -= sinks_before;
  if (window.window != kNoWindow) window.window -= sinks_before;
  window.slid = std::max<int64_t>(window.slid - (base - sinks_before), 0);
  return window;
}

}  // namespace

void RaggedKV::ReservePages(int64_t page_count, bool poison) {
  const size_t bytes = static_cast<size_t>(page_count) * pages_.layout.page_bytes() + kCacheLine;
  if (bytes > memory_bytes_) {
    memory_.reset();
    memory_bytes_ = 0;
    memory_.reset(new std::byte[bytes]);
    memory_bytes_ = bytes;
  }
  if (poison) std::memset(memory_.get(), kPoisonByte, memory_bytes_);
  void* base = memory_.get();
  size_t space = memory_bytes_;
  pages_.base = static_cast<std::byte*>(std::align(kCacheLine, 1, base, space));
  QUIRE_DCHECK(pages_.base != nullptr) << "a line more was allocated";
  v_nonfinite_.assign(static_cast<size_t>(page_count), 0);
  pages_.v_nonfinite = v_nonfinite_.data();
}

// The member's new nodes as a tree of their own. Room is reserved.
const TokenTreeView* RaggedKV::AddTree(const ForwardMember& member, const ForwardPlan& plan,
                                       int64_t first_page) {
  const TokenTree& tree = *member.tree;
  const size_t first_row = parents_.size();
  QUIRE_DCHECK(trees_.size() < trees_.capacity()) << "sequences point to the trees before";
  QUIRE_DCHECK(parents_.capacity() - first_row >= static_cast<size_t>(member.row_count()))
      << "trees point to the nodes before";
  for (int64_t node = member.first_node(); node < tree.size(); ++node) {
    const int64_t parent = tree.parents[static_cast<size_t>(node)] - member.first_node();
    parents_.push_back(static_cast<int32_t>(std::max<int64_t>(parent, -1)));
    depths_.push_back(tree.depths[static_cast<size_t>(node)]);
  }
  const auto [least, most] =
      std::minmax_element(depths_.begin() + static_cast<std::ptrdiff_t>(first_row), depths_.end());
  trees_.push_back({.parents = parents_.data() + first_row,
                    .depths = depths_.data() + first_row,
                    .pages = page_numbers_.data() + first_page,
                    .first_node = 0,
                    .min_depth = *least,
                    .max_depth = *most,
                    .old_levels = plan.old_levels().data() + member.first_row,
                    .new_only = true});
  return &trees_.back();
}

void RaggedKV::Prepare(KVLayout layout, const ForwardPlan& plan, bool poison) {
  const std::span<const ForwardMember> members = plan.members;
  // One tile per page: most sequences of a batch have few new tokens, each at least a page.
  layout.page_size = kTilePositions;
  pages_.layout = layout;
  targets_.clear();
  opens_tile_.clear();
  entries_.clear();
  runs_.clear();
  sequences_.clear();
  trees_.clear();
  parents_.clear();
  depths_.clear();
  for (const ForwardMember& member : members) {
    const int64_t first_page = static_cast<int64_t>(entries_.size());
    for (int64_t i = 0; i < member.row_count(); ++i) {
      const int32_t slot = static_cast<int32_t>(i % kTilePositions);
      const int32_t page = static_cast<int32_t>(first_page + i / kTilePositions);
      if (slot == 0) entries_.push_back({.start = i, .page = page});
      targets_.push_back({.page = page, .slot = slot});
      opens_tile_.push_back(slot == 0 ? 1 : 0);
    }
  }
  // Sequences point into these, as runs do into entries_ and trees into the arrays of nodes.
  runs_.reserve(members.size());
  trees_.reserve(members.size());
  parents_.reserve(targets_.size());
  depths_.reserve(targets_.size());
  page_numbers_.resize(entries_.size());
  std::iota(page_numbers_.begin(), page_numbers_.end(), 0);
  int64_t first_page = 0;
  for (const ForwardMember& member : members) {
    const int64_t rows = member.row_count();
    sequences_.push_back({.first_row = member.first_row,
                          .row_count = rows,
                          .base = 0,
                          .runs = nullptr,
                          .run_count = 0,
                          .private_segment = 0,
                          .window = WindowFrom(member.window, member.base())});
    if (member.is_tree()) {
      sequences_.back().tree = AddTree(member, plan, first_page);
    } else {
      runs_.push_back({.entries = entries_.data() + first_page,
                       .entry_count = PagesFor(rows),
                       .begin = 0,
                       .end = rows});
      sequences_.back().runs = &runs_.back();
      sequences_.back().run_count = 1;
    }
    first_page += PagesFor(rows);
  }
  QUIRE_DCHECK(std::ssize(targets_) == plan.row_count());
  QUIRE_DCHECK(first_page == std::ssize(entries_)) << "a member reads pages of another one";
  ReservePages(static_cast<int64_t>(entries_.size()), poison);
}

}  // namespace quire
