#include "ffi/tvm/tvm_kv_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ffi/tensors.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

// Tokens [begin, end) of [layers, tokens, ...].
TensorView TokensOf(const tf::TensorView& tensor, int64_t begin, int64_t end) {
  DLTensor part = DLTensorOf(tensor);
  std::vector<int64_t> shape(part.shape, part.shape + part.ndim);
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t axis = shape.size(); axis-- > 0; stride *= shape[axis])
    strides[axis] = part.strides == nullptr ? stride : part.strides[axis];
  shape[1] = end - begin;
  part.byte_offset += static_cast<uint64_t>(begin * strides[1] * (part.dtype.bits / 8));
  part.shape = shape.data();
  part.strides = strides.data();
  return ValueOrThrow(TensorView::FromDLPack(part));
}

}  // namespace

TvmKVCacheObj::TvmKVCacheObj(Config config)
    : config_(std::move(config)),
      cache_(latch_.Run([&] { return AttentionKVCache::Create(config_.cache); })),
      has_latent_(std::ranges::any_of(config_.cache.layers, &AttentionLayerSpec::latent)),
      counted_(config_.cache.layers.size()) {
  if (config_.transfer != nullptr)
    transfer_ = std::make_unique<TvmTransferPeer>(config_.transfer, cache_->transfer());
}

// ---------------------------------------------------------------------- disaggregation

TvmTransferPeer& TvmKVCacheObj::RequireTransfer(const char* call) {
  if (transfer_ != nullptr) return *transfer_;
  Throw(Status(StatusCode::kBadState, std::string(call) +
                                          ": the cache was created without transfer; set argument "
                                          "7 of paged_attention_kv_cache_create"));
}

tf::Shape TvmKVCacheObj::DisaggPrepareRecv(int64_t seq_id, int64_t length) {
  const char* call = "kv_cache_disagg_prepare_recv";
  RefuseImporting(call, seq_id);
  TvmTransferPeer& transfer = RequireTransfer(call);
  const auto slots = latch_.Run([&] { return transfer.PrepareRecv(seq_id, length); });
  return tf::Shape(slots.begin(), slots.end());
}

void TvmKVCacheObj::DisaggMarkSend(int64_t seq_id, int64_t begin, const tf::Shape& map,
                                   int64_t pe_offset) {
  const char* call = "kv_cache_disagg_mark_send";
  RefuseImporting(call, seq_id);
  TvmTransferPeer& transfer = RequireTransfer(call);
  const int64_t position = PositionBehind(seq_id, begin);
  latch_.Run([&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int64_t length, cache_->GetSequenceLength(seq_id));
    return transfer.MarkSend(seq_id, position, length, TvmSpanOf(map), pe_offset);
  });
}

// ---------------------------------------------------------------------- kept tokens

TokenRange TvmKVCacheObj::SlidRange(int64_t seq_id) {
  if (!config_.has_sequence_windows) return TokenRange();
  return latch_.Run([&] { return cache_->SlidRange(seq_id); });
}

int64_t TvmKVCacheObj::PositionBehind(int64_t seq_id, int64_t kept) {
  const TokenRange slid = SlidRange(seq_id);
  return kept <= slid.begin ? kept : kept + slid.count();
}

std::vector<TvmKVCacheObj::KeptRun> TvmKVCacheObj::KeptRuns(int64_t seq_id, int64_t start,
                                                            int64_t end) {
  const TokenRange slid = SlidRange(seq_id);
  const int64_t middle = std::clamp(slid.begin, start, end);
  std::vector<KeptRun> runs;
  if (start < middle) runs.push_back({start, middle, start});
  if (middle < end) runs.push_back({middle, end, middle + slid.count()});
  return runs;
}

int64_t TvmKVCacheObj::GetSequenceLength(int64_t seq_id) {
  const int64_t length = latch_.Run([&] { return cache_->GetSequenceLength(seq_id); });
  return length - SlidRange(seq_id).count();
}

int64_t TvmKVCacheObj::GetTotalSequenceLength() {
  int64_t total = latch_.Run([&] { return cache_->GetTotalSequenceLength(); });
  for (const int64_t id : sequences_) total -= SlidRange(id).count();
  return total;
}

// ---------------------------------------------------------------------- sequences

void TvmKVCacheObj::Clear() {
  latch_.Run([&] { return cache_->Clear(); });
  windows_.clear();
  imports_.clear();
  trees_.Clear();
  sequences_.clear();
}

void TvmKVCacheObj::ReserveSequence() {
  if (config_.has_sequence_windows && sequences_.size() == sequences_.capacity())
    sequences_.reserve(2 * sequences_.size() + 1);
}

void TvmKVCacheObj::NoteSequence(int64_t seq_id) noexcept {
  if (!config_.has_sequence_windows) return;
  sequences_.insert(std::ranges::lower_bound(sequences_, seq_id), seq_id);
}

void TvmKVCacheObj::AddSequence(int64_t seq_id) {
  ReserveSequence();
  latch_.Run([&] { return cache_->AddSequence(seq_id); });
  NoteSequence(seq_id);
}

void TvmKVCacheObj::RemoveSequence(int64_t seq_id) {
  latch_.Run([&] { return cache_->RemoveSequence(seq_id); });
  if (config_.has_sequence_windows) sequences_.erase(std::ranges::lower_bound(sequences_, seq_id));
  windows_.erase(seq_id);
  imports_.erase(seq_id);
  trees_.Drop(seq_id, 0);
}

void TvmKVCacheObj::ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos) {
  RefuseImporting("kv_state_fork_sequence", parent_id);
  if (fork_pos >= 0) {
    const int64_t kept = GetSequenceLength(parent_id);
    if (fork_pos > kept) {
      ThrowBadArgument("kv_state_fork_sequence: sequence " + std::to_string(parent_id) +
                       " of length " + std::to_string(kept) + " cannot be forked at " +
                       std::to_string(fork_pos));
    }
    fork_pos = PositionBehind(parent_id, fork_pos);
  }
  ReserveSequence();
  const auto window = windows_.find(parent_id);
  std::map<int64_t, SequenceWindowArguments> inherited;
  if (window != windows_.end() && !config_.cache.tvm_window_span)
    inherited.emplace(child_id, window->second);
  latch_.Run([&] { return cache_->ForkSequence(parent_id, child_id, fork_pos); });
  windows_.merge(inherited);
  NoteSequence(child_id);
}

void TvmKVCacheObj::PopN(int64_t seq_id, int64_t n) {
  RefuseImporting("kv_state_popn", seq_id);
  const int64_t kept = GetSequenceLength(seq_id);
  if (n < 0 || n > kept) {
    ThrowBadArgument("kv_state_popn: sequence " + std::to_string(seq_id) + " of length " +
                     std::to_string(kept) + " cannot lose " + std::to_string(n) + " tokens");
  }
  const int64_t length = kept + SlidRange(seq_id).count();
  const int64_t end = PositionBehind(seq_id, kept - n);
  latch_.Run([&] { return cache_->PopN(seq_id, length - end); });
  DropNodes(seq_id);
}

void TvmKVCacheObj::DropNodes(int64_t seq_id) {
  if (trees_.empty()) return;
  trees_.Drop(seq_id, latch_.Run([&] { return cache_->GetTreeSize(seq_id); }));
}

void TvmKVCacheObj::CommitAcceptedTokenTreeNodes(const tf::Shape& seq_ids,
                                                 const tf::Shape& leaves) {
  std::vector<int64_t> nodes(leaves.begin(), leaves.end());
  std::vector<KeptNodes> kept;
  for (size_t i = 0; i < std::min(nodes.size(), seq_ids.size()); ++i)
    nodes[i] = LeafToCommit(seq_ids[i], nodes[i], kept);
  latch_.Run([&] { return cache_->CommitAcceptedTokenTreeNodes(TvmSpanOf(seq_ids), nodes); });
  for (const int64_t id : seq_ids) trees_.Drop(id, 0);
  // They are at most as many as the nodes whose pages are free now.
  for (const KeptNodes& tokens : kept) {
    latch_.Run([&] { return cache_->ImportKV(tokens.seq_id, std::span(&tokens.block, 1)); });
  }
}

int64_t TvmKVCacheObj::LeafToCommit(int64_t seq_id, int64_t leaf, std::vector<KeptNodes>& kept) {
  if (!config_.tree_lengths)
    return leaf == -1 && config_.tree_commit ? trees_.KeptLeaf(seq_id) : leaf;
  const std::vector<int64_t> nodes = trees_.KeptByTvm(seq_id, leaf);
  if (nodes.empty()) return leaf;
  if (trees_.IsPath(seq_id, nodes)) return nodes.back();
  kept.push_back(ReadNodes(seq_id, nodes));
  return -1;
}

namespace {

// Rows `rows` of one layer of [layers, count, ...], whose rows have `row_bytes` bytes.
std::vector<std::byte> RowsOf(const std::vector<std::byte>& all, size_t row_bytes, int64_t count,
                              size_t layer, std::span<const int64_t> rows) {
  std::vector<std::byte> some(rows.size() * row_bytes);
  const std::byte* const first = all.data() + layer * static_cast<size_t>(count) * row_bytes;
  for (size_t i = 0; i < rows.size(); ++i)
    std::memcpy(some.data() + i * row_bytes, first + static_cast<size_t>(rows[i]) * row_bytes,
                row_bytes);
  return some;
}

}  // namespace

TvmKVCacheObj::KeptNodes TvmKVCacheObj::ReadNodes(int64_t seq_id, std::span<const int64_t> nodes) {
  KeptNodes kept;
  kept.seq_id = seq_id;
  kept.layers.resize(config_.cache.layers.size());
  kept.block.resize(config_.cache.layers.size());
  const int64_t size = latch_.Run([&] { return cache_->GetTreeSize(seq_id); });
  const int64_t end = latch_.Run([&] { return cache_->GetSequenceLength(seq_id); });
  for (const bool latent : {false, true}) {
    const auto& layers = config_.cache.layers;
    const int64_t layer_count = std::ranges::count(layers, latent, &AttentionLayerSpec::latent);
    if (layer_count == 0) continue;
    // All layers of a kind are alike, and values are as wide as keys but in latent layers, which
    // store none.
    const AttentionLayerSpec& spec =
        *std::ranges::find(layers, latent, &AttentionLayerSpec::latent);
    const auto row_bytes =
        static_cast<size_t>(spec.num_kv_heads * spec.qk_head_dim * DTypeBytes(spec.dtype));
    std::vector<std::byte> k(static_cast<size_t>(layer_count * size) * row_bytes);
    std::vector<std::byte> v(latent ? 0 : k.size());
    const auto view = [&](std::vector<std::byte>& bytes) {
      return TensorView(bytes.data(), spec.dtype,
                        {layer_count, size, spec.num_kv_heads, spec.qk_head_dim});
    };
    latch_.Run([&] {
      if (!latent) return cache_->DebugGetKV(seq_id, end - size, end, view(k), view(v));
      return cache_->DebugGetKVMLA(
          seq_id, end - size, end,
          TensorView(k.data(), spec.dtype, {layer_count, size, spec.qk_head_dim}));
    });
    size_t row = 0;  // of k and v
    for (size_t l = 0; l < layers.size(); ++l) {
      if (layers[l].latent != latent) continue;
      LayerTokens& tokens = kept.layers[l];
      tokens.k = RowsOf(k, row_bytes, size, row, nodes);
      if (!latent) tokens.v = RowsOf(v, row_bytes, size, row, nodes);
      const auto part = [&](std::vector<std::byte>& bytes) {
        return TensorView(bytes.data(), spec.dtype,
                          {std::ssize(nodes), spec.num_kv_heads, spec.qk_head_dim});
      };
      kept.block[l].k = part(tokens.k);
      if (!latent) kept.block[l].v = part(tokens.v);
      ++row;
    }
  }
  return kept;
}

void TvmKVCacheObj::EnableSlidingWindowForSeq(int64_t seq_id, int64_t window, int64_t sinks) {
  const char* call = "attention_kv_cache_enable_sliding_window_for_seq";
  RefuseImporting(call, seq_id);
  if (!config_.has_sequence_windows && !config_.has_layer_windows) {
    Throw(Status(StatusCode::kBadState,
                 std::string(call) + ": the cache was created without support_sliding_window"));
  }
  if (config_.has_layer_windows) {
    GetSequenceLength(seq_id);  // UnknownSequence
    if (sinks >= 0 && sinks < window) return;
    ThrowBadArgument(std::string(call) + ": a window of " + std::to_string(window) +
                     " tokens cannot have " + std::to_string(sinks) +
                     " sinks; sinks are 0 or more and fewer than the window");
  }
  std::map<int64_t, SequenceWindowArguments> entry;
  entry[seq_id] = {window, sinks};
  latch_.Run([&] { return cache_->EnableSlidingWindowForSeq(seq_id, window, sinks); });
  windows_.merge(entry);
}

bool TvmKVCacheObj::Empty() {
  return latch_.Run([&] { return cache_->Empty(); });
}

int64_t TvmKVCacheObj::GetNumAvailablePages() {
  return latch_.Run([&] { return cache_->GetNumAvailablePages(); });
}

// ---------------------------------------------------------------------- forwards

void TvmKVCacheObj::BeginForward(const tf::Shape& seq_ids, const tf::Shape& append_lengths,
                                 const tf::Optional<tf::Shape>& parents) {
  const char* call = "kv_state_begin_forward";
  const std::span<const int64_t> ids = TvmSpanOf(seq_ids);
  const std::span<const int64_t> lengths = TvmSpanOf(append_lengths);
  for (const int64_t id : ids) RefuseImporting(call, id);
  if (transfer_ != nullptr) latch_.Run([&] { return transfer_->TakeOver(call, ids); });
  std::vector<uint8_t> hidden(has_latent_ ? ids.size() : 0);
  if (parents.has_value()) {
    TvmTrees::Round round = trees_.Plan(ids, lengths, TvmSpanOf(*parents));
    latch_.Run([&] { return cache_->BeginTreeForward(ids, lengths, TvmSpanOf(*parents)); });
    trees_.Add(std::move(round));
  } else {
    latch_.Run([&] { return cache_->BeginForward(ids, lengths); });
  }
  batch_ = seq_ids;
  batch_lengths_ = append_lengths;
  hidden_.swap(hidden);
  if (!has_latent_) return;
  one_token_each_ = std::ranges::count(lengths, 1) == std::ssize(lengths);
  std::ranges::fill(counted_, Counted::kByNobody);
}

void TvmKVCacheObj::AbortForward() {
  latch_.Run([&] { return cache_->AbortForward(); });
  for (const int64_t id : batch_) DropNodes(id);
}

void TvmKVCacheObj::EndForward() {
  latch_.Run([&] { return cache_->EndForward(); });
}

tf::Tensor TvmKVCacheObj::GetQueryPositions() {
  const auto absolute = latch_.Run([&] { return cache_->GetQueryPositions(); });
  if (has_latent_) return NewTensor(absolute);
  std::vector<int32_t> kept(absolute.begin(), absolute.end());
  size_t row = 0;
  for (size_t i = 0; i < batch_.size(); ++i) {
    const auto slid = static_cast<int32_t>(SlidRange(batch_[i]).count());
    for (int64_t j = 0; j < batch_lengths_[i]; ++j) kept[row++] -= slid;
  }
  return NewTensor(std::span<const int32_t>(kept));
}

int64_t TvmKVCacheObj::LocalLayer(const char* call, int64_t model_layer) const {
  const int64_t end = config_.first_layer + std::ssize(config_.cache.layers);
  if (model_layer >= config_.first_layer && model_layer < end)
    return model_layer - config_.first_layer;
  ThrowBadArgument(std::string(call) + ": the cache has no layer " + std::to_string(model_layer) +
                   "; it has those from " + std::to_string(config_.first_layer) + " to " +
                   std::to_string(end - 1));
}

void TvmKVCacheObj::AttentionWithFusedQKV(int64_t model_layer, double sm_scale, tf::TensorView qkv,
                                          tf::TensorView o) {
  const int64_t layer = LocalLayer("attention_kv_cache_attention_with_fused_qkv", model_layer);
  const TensorView qkv_view = ViewOf(qkv);
  const TensorView o_view = ViewOf(o);
  latch_.Run([&] { return cache_->AttentionWithFusedQKV(layer, qkv_view, o_view, sm_scale); });
}

void TvmKVCacheObj::AppendMLAKV(int64_t model_layer, tf::TensorView kv) {
  const int64_t layer = LocalLayer("attention_kv_cache_append_mla_kv", model_layer);
  const TensorView kv_view = ViewOf(kv);
  latch_.Run([&] { return cache_->AppendMLAKV(layer, kv_view); });
}

TvmKVCacheObj::Counted* TvmKVCacheObj::CountedOf(int64_t layer) {
  const auto index = static_cast<size_t>(layer);
  if (!one_token_each_ || !config_.cache.layers[index].latent) return nullptr;
  return &counted_[index];
}

void TvmKVCacheObj::SelfAttention(int64_t model_layer, double sm_scale, tf::TensorView q,
                                  tf::TensorView k, tf::TensorView v, tf::TensorView o,
                                  tf::TensorView lse) {
  const int64_t layer = LocalLayer("attention_kv_cache_self_attention", model_layer);
  const TensorView q_view = ViewOf(q);
  const TensorView k_view = ViewOf(k);
  const TensorView v_view = ViewOf(v);
  const TensorView o_view = ViewOf(o);
  const TensorView lse_view = ViewOf(lse);
  Counted* const counted = CountedOf(layer);
  const bool empty = counted != nullptr && *counted == Counted::kByCross;
  const TensorView nothing(hidden_.data(), DType::kU8, {std::ssize(hidden_)});
  latch_.Run([&] {
    return cache_->SelfAttention(layer, q_view, k_view, v_view, o_view, lse_view, sm_scale,
                                 empty ? &nothing : nullptr);
  });
  if (counted != nullptr && !empty) *counted = Counted::kBySelf;
}

void TvmKVCacheObj::CrossAttention(int64_t model_layer, double sm_scale, tf::TensorView q,
                                   tf::TensorView o, tf::TensorView lse) {
  const int64_t layer = LocalLayer("attention_kv_cache_cross_attention", model_layer);
  const TensorView q_view = ViewOf(q);
  const TensorView o_view = ViewOf(o);
  const TensorView lse_view = ViewOf(lse);
  Counted* const counted = CountedOf(layer);
  if (counted == nullptr || *counted == Counted::kBySelf) {
    latch_.Run([&] { return cache_->CrossAttention(layer, q_view, o_view, lse_view, sm_scale); });
    return;
  }
  latch_.Run([&] { return cache_->Attend(layer, q_view, o_view, &lse_view, sm_scale); });
  *counted = Counted::kByCross;
}

void TvmKVCacheObj::AttentionWithSharedKV(int64_t source_layer, double sm_scale, tf::TensorView q,
                                          tf::TensorView k, tf::TensorView v, tf::TensorView o) {
  const int64_t layer = LocalLayer("attention_kv_cache_attention_with_shared_kv", source_layer);
  const TensorView q_view = ViewOf(q);
  const TensorView o_view = ViewOf(o);
  for (const tf::TensorView* given : {&k, &v}) {
    const TensorView view = ViewOf(*given);
    if (view.rank() == 3 && q_view.rank() == 3 && view.dim(0) == q_view.dim(0)) continue;
    ThrowBadArgument(
        "attention_kv_cache_attention_with_shared_kv: k and v must be [n, Hkv, D] of "
        "as many rows as q, " +
        q_view.ToString() + ", not " + view.ToString());
  }
  latch_.Run(
      [&] { return cache_->AttentionWithSharedKV(layer, q_view, o_view, nullptr, sm_scale); });
}

void TvmKVCacheObj::MergeAttnOutputInplace(tf::TensorView o1, tf::TensorView lse1,
                                           tf::TensorView o2, tf::TensorView lse2) {
  const TensorView o1_view = ViewOf(o1);
  const TensorView lse1_view = ViewOf(lse1);
  const TensorView o2_view = ViewOf(o2);
  const TensorView lse2_view = ViewOf(lse2);
  latch_.Run(
      [&] { return cache_->MergeAttnOutputInplace(o1_view, lse1_view, o2_view, lse2_view); });
}

// ---------------------------------------------------------------------- debugging

void TvmKVCacheObj::CheckKeptRange(const char* call, int64_t seq_id, int64_t start, int64_t end) {
  const int64_t kept = GetSequenceLength(seq_id);
  if (start >= 0 && start < end && end <= kept) return;
  ThrowBadArgument(std::string(call) + ": [" + std::to_string(start) + ", " + std::to_string(end) +
                   ") is no range of tokens of sequence " + std::to_string(seq_id) + " of length " +
                   std::to_string(kept));
}

void TvmKVCacheObj::DebugGetKV(int64_t seq_id, int64_t start, int64_t end, tf::TensorView k,
                               tf::TensorView v) {
  const char* call = "attention_kv_cache_debug_get_kv";
  CheckKeptRange(call, seq_id, start, end);
  for (const tf::TensorView* tensor : {&k, &v}) {
    if (tensor->ndim() == 4 && tensor->size(1) == end - start) continue;
    ThrowBadArgument(std::string(call) + ": k and v must be [layers, " +
                     std::to_string(end - start) + ", Hkv, D], not " + ViewOf(*tensor).ToString());
  }
  for (const KeptRun& run : KeptRuns(seq_id, start, end)) {
    const TensorView k_part = TokensOf(k, run.from - start, run.to - start);
    const TensorView v_part = TokensOf(v, run.from - start, run.to - start);
    const int64_t position_end = run.position + run.to - run.from;
    latch_.Run(
        [&] { return cache_->DebugGetKV(seq_id, run.position, position_end, k_part, v_part); });
  }
}

void TvmKVCacheObj::DebugGetKVMLA(int64_t seq_id, int64_t start, int64_t end, tf::TensorView kv) {
  const char* call = "attention_kv_cache_debug_get_kv_mla";
  CheckKeptRange(call, seq_id, start, end);
  if (kv.ndim() != 3 || kv.size(1) != end - start) {
    ThrowBadArgument(std::string(call) + ": kv must be [MLA layers, " +
                     std::to_string(end - start) + ", D], not " + ViewOf(kv).ToString());
  }
  for (const KeptRun& run : KeptRuns(seq_id, start, end)) {
    const TensorView part = TokensOf(kv, run.from - start, run.to - start);
    const int64_t position_end = run.position + run.to - run.from;
    latch_.Run([&] { return cache_->DebugGetKVMLA(seq_id, run.position, position_end, part); });
  }
}

int64_t TvmKVCacheObj::StateDigest() {
  return static_cast<int64_t>(latch_.Run([&] { return cache_->StateDigest(); }));
}

void TvmKVCacheObj::CheckInvariants() {
  latch_.Run([&] { return cache_->CheckInvariants(); });
}

}  // namespace quire::ffi
