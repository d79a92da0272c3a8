// quire.tvm.KVCache: AttentionKVCache with the arguments of TVM's functions.
#ifndef QUIRE_FFI_TVM_TVM_KV_CACHE_H_
#define QUIRE_FFI_TVM_TVM_KV_CACHE_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ffi/errors.h"
#include "ffi/tvm/tvm_state.h"
#include "ffi/tvm/tvm_transfer.h"
#include "ffi/tvm/tvm_trees.h"
#include "quire/attention_kv_cache.h"

namespace quire::ffi {

// Lengths, positions and ranges count the tokens that are kept, as in TVM: what has slid out of a
// sequence's window is left out. AttentionKVCache counts absolute positions; this class translates.
// Layers are numbered as in the model, of which a pipeline stage's cache has some.
class TvmKVCacheObj : public TvmStateObj {
 public:
  struct Config {
    AttentionKVCacheOptions cache;
    bool has_sequence_windows = false;  // else EnableSlidingWindowForSeq is refused
    // As in TVM, windows of sequences are accepted but do nothing where layers have their own.
    bool has_layer_windows = false;
    std::shared_ptr<TvmTransferHub> transfer = nullptr;  // null: created without
    bool tree_commit = true;                             // TvmOptions
    bool tree_lengths = false;
    int64_t first_layer = 0;  // of its pipeline stage: callers number all layers of the model
  };
  explicit TvmKVCacheObj(Config config);

  void Clear() override;
  void AddSequence(int64_t seq_id) override;
  void RemoveSequence(int64_t seq_id) override;
  void ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos) override;
  void PopN(int64_t seq_id, int64_t n) override;
  void BeginForward(const tvm::ffi::Shape& seq_ids, const tvm::ffi::Shape& append_lengths,
                    const tvm::ffi::Optional<tvm::ffi::Shape>& parents) override;
  void EndForward() override;
  void AbortForward() override;

  bool Empty();
  int64_t GetNumAvailablePages();
  int64_t GetTotalSequenceLength();
  int64_t GetSequenceLength(int64_t seq_id);
  // A copy: an array of the cache would change with the next forward. With MLA layers absolute
  // positions: the model rotates by them what is stored, so windows must not change them.
  tvm::ffi::Tensor GetQueryPositions();
  void CommitAcceptedTokenTreeNodes(const tvm::ffi::Shape& seq_ids, const tvm::ffi::Shape& leaves);
  void EnableSlidingWindowForSeq(int64_t seq_id, int64_t window, int64_t sinks);

  void AttentionWithFusedQKV(int64_t model_layer, double sm_scale, tvm::ffi::TensorView qkv,
                             tvm::ffi::TensorView o);
  // For MLA layers. In a forward of one token per sequence TVM's CrossAttention counts the tokens
  // themselves, so that it alone is a decode step; and SelfAttention does, so that it alone is a
  // prefill of one token. Where both are called, the first one counts them and their merge is
  // right.
  void AppendMLAKV(int64_t model_layer, tvm::ffi::TensorView kv);
  void SelfAttention(int64_t model_layer, double sm_scale, tvm::ffi::TensorView q,
                     tvm::ffi::TensorView k, tvm::ffi::TensorView v, tvm::ffi::TensorView o,
                     tvm::ffi::TensorView lse);
  void CrossAttention(int64_t model_layer, double sm_scale, tvm::ffi::TensorView q,
                      tvm::ffi::TensorView o, tvm::ffi::TensorView lse);
  // k and v are not needed: the cache has those of the source layer.
  void AttentionWithSharedKV(int64_t source_layer, double sm_scale, tvm::ffi::TensorView q,
                             tvm::ffi::TensorView k, tvm::ffi::TensorView v,
                             tvm::ffi::TensorView o);
  void MergeAttnOutputInplace(tvm::ffi::TensorView o1, tvm::ffi::TensorView lse1,
                              tvm::ffi::TensorView o2, tvm::ffi::TensorView lse2);
  void DebugGetKV(int64_t seq_id, int64_t start, int64_t end, tvm::ffi::TensorView k,
                  tvm::ffi::TensorView v);

  void DebugGetKVMLA(int64_t seq_id, int64_t start, int64_t end, tvm::ffi::TensorView kv);

  // ---- Checkpoints (tvm_checkpoint.cc): the kept tokens of one sequence, a tensor per layer.
  tvm::ffi::String GetLayoutHash();
  tvm::ffi::String GetCheckpointMetadata(int64_t seq_id);
  void ExportPageGroup(int64_t seq_id, int64_t group, tvm::ffi::TensorView out);
  // The sequence is empty then, whether or not it was there, until FinishImport. Other sequences
  // stay as they are and may be used meanwhile.
  void PrepareImport(int64_t seq_id, const tvm::ffi::String& metadata);
  void ImportPageGroup(int64_t seq_id, int64_t group, tvm::ffi::TensorView in);
  void FinishImport(int64_t seq_id);

  // ---- Disaggregation. The pending tokens count from the first forward on that follows their
  // arrival; a forward before it is BadState.
  tvm::ffi::Shape DisaggPrepareRecv(int64_t seq_id, int64_t length);
  void DisaggMarkSend(int64_t seq_id, int64_t begin, const tvm::ffi::Shape& map, int64_t pe_offset);

  // ---- For tests.
  int64_t StateDigest();
  void CheckInvariants();

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.tvm.KVCache", TvmKVCacheObj, TvmStateObj);

 private:
  struct SequenceWindowArguments {
    int64_t window = 0;
    int64_t sinks = 0;
  };
  // Tokens, contiguous, as ImportKV takes them; of an unfinished import, empty until the group was
  // imported.
  struct LayerTokens {
    std::vector<std::byte> k, v;
  };
  struct Import {
    int64_t length = 0;
    int64_t held = 0;  // tokens of it that the exporting cache held in all layers
    SequenceWindowArguments window;
    std::vector<LayerTokens> layers;
  };

  // Tokens [from, to) of the kept ones, which stand from `position` on.
  struct KeptRun {
    int64_t from, to, position;
  };
  // The call that has counted a layer's new tokens in a forward of one token per sequence.
  enum class Counted : uint8_t { kByNobody, kBySelf, kByCross };

  const AttentionLayerSpec& layer(int64_t index) const {
    return cache_->options().layers[static_cast<size_t>(index)];
  }
  // Empty without asking where nothing can slide.
  TokenRange SlidRange(int64_t seq_id);
  // Makes the next NoteSequence succeed.
  void ReserveSequence();
  void NoteSequence(int64_t seq_id) noexcept;
  // Forgets the nodes of its tree that the cache has no more.
  void DropNodes(int64_t seq_id);
  // What is stored of nodes of a sequence's tree, to become its tokens once the tree is gone.
  struct KeptNodes {
    int64_t seq_id = 0;
    std::vector<LayerTokens> layers;
    KVBlock block;  // views of `layers`
  };
  // The leaf that the cache is to commit for `leaf`. With tvm_tree_lengths, what it cannot express
  // as a path is read to `kept`, and the leaf is -1.
  int64_t LeafToCommit(int64_t seq_id, int64_t leaf, std::vector<KeptNodes>& kept);
  KeptNodes ReadNodes(int64_t seq_id, std::span<const int64_t> nodes);
  // The position that stands behind `kept` kept tokens.
  int64_t PositionBehind(int64_t seq_id, int64_t kept);
  // The kept tokens [start, end).
  std::vector<KeptRun> KeptRuns(int64_t seq_id, int64_t start, int64_t end);
  void CheckKeptRange(const char* call, int64_t seq_id, int64_t start, int64_t end);
  // The number of the model's layer in this cache.
  int64_t LocalLayer(const char* call, int64_t model_layer) const;
  // Null for other layers, and in forwards of more than a token per sequence.
  Counted* CountedOf(int64_t layer);
  TvmTransferPeer& RequireTransfer(const char* call);
  void RefuseImporting(const char* call, int64_t seq_id) const;
  Import& FindImport(const char* call, int64_t seq_id);
  void CheckGroup(const char* call, int64_t group) const;
  std::vector<int64_t> GroupShape(int64_t group, int64_t length) const;
  TensorView CheckGroupTensor(const char* call, int64_t group, int64_t length,
                              const tvm::ffi::TensorView& tensor) const;
  std::string Geometry() const;
  Import ReadMetadata(const std::string& text) const;

  FaultLatch latch_;
  const Config config_;
  std::unique_ptr<AttentionKVCache> cache_;
  const bool has_latent_;
  std::unique_ptr<TvmTransferPeer> transfer_;  // leaves before the cache goes
  std::map<int64_t, SequenceWindowArguments> windows_;
  std::map<int64_t, Import> imports_;
  TvmTrees trees_;
  std::vector<int64_t> sequences_;  // ids, sorted; where windows of sequences may slide
  // Of the open forward.
  tvm::ffi::Shape batch_, batch_lengths_;
  bool one_token_each_ = false;   // asked for MLA layers alone
  std::vector<Counted> counted_;  // [layer]
  std::vector<uint8_t> hidden_;   // a mask that hides all new tokens
};

}  // namespace quire::ffi

#endif  // QUIRE_FFI_TVM_TVM_KV_CACHE_H_
