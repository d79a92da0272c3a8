// CompositeState: the state of a model whose layers keep theirs in several caches: attention caches
// and recurrent states. Its parts change together or not at all.
#ifndef QUIRE_COMPOSITE_STATE_H_
#define QUIRE_COMPOSITE_STATE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "quire/attention_kv_cache.h"
#include "quire/kv_state.h"
#include "quire/recurrent_state.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

// Each call of KVState is made on all parts, or, if one of them refuses it, on none, and the error
// is that part's. The layers' calls are made on the parts. As long as a CompositeState has parts,
// the calls of KVState are not made on them directly: they would no longer hold the same sequences.
class CompositeState : public KVState {
 public:
  struct Parts {
    std::shared_ptr<AttentionKVCache> attention{};  // null: recurrent layers only
    std::vector<std::shared_ptr<RecurrentState>> recurrent{};
    // Further attention caches, for layers that have other options than a cache can give each of
    // its layers. Their sequences have the same tokens. REQUIRES: `attention`.
    std::vector<std::shared_ptr<AttentionKVCache>> more_attention{};
  };

  // REQUIRES: at least one part, none of them null or given twice, made by this library; no part
  // has sequences.
  static Result<std::unique_ptr<CompositeState>> Create(Parts parts);

  virtual const Parts& parts() const = 0;

  // As on the parts.
  virtual Status SetRetained(int64_t seq_id, bool retained) = 0;
  // The largest position <= `position` that ForkSequence and PopN reach in all parts.
  // REQUIRES: 0 <= position <= length.
  virtual Result<int64_t> ReplayStart(int64_t seq_id, int64_t position) const = 0;

  // Appends tokens to all parts: to attention KV as ImportVisibleKV (nothing without such a part;
  // with several, a block has the layers of the first, then those of the others);
  // recurrent parts, [part][tensor], as ImportState at `position`, where the sequence ends then.
  // BadArgument if parts would end elsewhere.
  virtual Status ImportState(int64_t seq_id, int64_t position, const KVImport& kv,
                             std::span<const std::vector<TensorView>> states) = 0;

  // As on AttentionKVCache; states come from the same sources when their layers are run, and are
  // those after the imported tokens, as by ImportState. OutOfPages without a free slot for each.
  // REQUIRES: one recurrent part, a RecurrentCache; at most one attention cache.
  virtual Status BeginLoadingForward(std::span<const int64_t> seq_ids,
                                     std::span<const int64_t> append_lengths,
                                     std::span<const LayerLoad> loads) = 0;

  // BadState: a recurrent state needs every token in every layer, so no row can stop before the
  // last one. Blend with models of attention alone; with others, reuse exact prefixes.
  virtual Status BeginBlendingForward(std::span<const int64_t> seq_ids,
                                      std::span<const int64_t> append_lengths,
                                      std::span<const LayerLoad> loads,
                                      std::span<const BlendMember> blends);

  // Transfers all parts: states go as layers after the attention layers (docs/transfer.md). No
  // length has pending tokens until DisaggCommitRecv, for which the states after the last one must
  // be there. The layers of several attention caches come in the order of the caches. Transfers of
  // a part alone are BadState.
  virtual KVTransfer* transfer() = 0;
  virtual bool HasSequence(int64_t seq_id) const = 0;
  virtual int64_t sequence_count() const = 0;
  virtual Result<int64_t> GetSequenceLength(int64_t seq_id) const = 0;

  // A digest of all parts.
  virtual uint64_t StateDigest() const = 0;
  virtual Status CheckInvariants() const = 0;
};

}  // namespace quire

#endif  // QUIRE_COMPOSITE_STATE_H_
