// Windows in the cache: what a next query of a sequence does not see, where sequences may be forked
// and cut, and which pages nobody needs any more.
//
// A page is kept while one of its holders' sequences can see a position of the page's range, as its
// next query: that is a function of the sequence's length, its window and the window of the layer
// group (kernels/row_view.h). Rounding to ranges makes all tokens of a range that a query sees held
// or gone together.
#ifndef QUIRE_KV_PAGES_SLIDING_WINDOW_H_
#define QUIRE_KV_PAGES_SLIDING_WINDOW_H_

#include <cstdint>

#include "kernels/row_view.h"
#include "kv/pages/block_tree.h"
#include "kv/pages/sequence_table.h"

namespace quire {

// The window of a sequence that is cut, or forked, at `length`. What had slid for good counts only
// if the cut lies behind it.
SequenceWindow WindowAt(const SequenceWindow& window, int64_t length);

// Whether all positions are held that a query at `length` of the sequence sees before it.
bool CanEndAt(const BlockTree& tree, const Sequence& sequence, int group, int64_t layer_window,
              int64_t length);

// Tokens of the path that are held in all groups. O(pages of it) if anything was ever freed.
int64_t CountHeldTokens(const BlockTree& tree, BlockIndex last);

// What the sequence, of `length` tokens, hides of the pages of a group as of its last forward (the
// window may have been switched on since), also when it is popped by `max_pop` tokens.
HiddenPages HiddenPagesOf(const Sequence& sequence, int64_t length, int64_t max_pop,
                          const PagePool& pool, int64_t layer_window);

}  // namespace quire

#endif  // QUIRE_KV_PAGES_SLIDING_WINDOW_H_
