#include "kv/testing/kv_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "base/check.h"
#include "kv/testing/kv_model_codes.h"
#include "quire/kv_export.h"
#include "tensor/float8.h"
#include "tensor/half.h"

namespace quire {
namespace {

// Half the distance between neighbouring numbers near 1.
constexpr double kEpsF32 = 0x1p-24;
constexpr double kEpsF16 = 0x1p-11;
constexpr double kEpsBF16 = 0x1p-8;

// What is stored as codes is computed with as bfloat16.
DType Computed(DType stored) { return IsQuantised(stored) ? DType::kBF16 : stored; }

double HalfUlp(DType dtype) {
  if (dtype == DType::kF16) return kEpsF16;
  return dtype == DType::kBF16 ? kEpsBF16 : kEpsF32;
}

// Below the smallest normal number the distance between neighbours stays as it is.
double SmallestNormal(DType dtype) { return dtype == DType::kF16 ? 0x1p-14 : 0x1p-126; }

Status Bad(StatusCode code, const std::string& message) {
  return Status(code, "KVModel: " + message);
}

void StoreElement(const TensorView& view, int64_t offset, float value) {
  if (view.dtype() == DType::kF32) view.data_as<float>()[offset] = value;
  if (view.dtype() == DType::kF16) view.data_as<uint16_t>()[offset] = F32ToF16(value);
  if (view.dtype() == DType::kBF16) view.data_as<uint16_t>()[offset] = F32ToBf16(value);
  if (view.dtype() == DType::kI8) view.data_as<int8_t>()[offset] = static_cast<int8_t>(value);
  if (view.dtype() == DType::kF8E4M3) view.data_as<uint8_t>()[offset] = F32ToF8E4M3(value);
}

// Numbers into stored rows [token][head][dim], one token at a time.
void StoreRow(std::span<const float> from, const TensorView& rows, const TensorView& scales,
              int64_t row) {
  const auto dim = static_cast<size_t>(rows.dim(2));
  for (int64_t h = 0; h < rows.dim(1); ++h) {
    const std::span<const float> head = from.subspan(static_cast<size_t>(h) * dim, dim);
    const float scale = IsQuantised(rows.dtype()) ? CodeScale(head, rows.dtype()) : 1;
    if (IsQuantised(rows.dtype())) StoreElement(scales, row * scales.stride(0) + h, scale);
    for (size_t d = 0; d < dim; ++d) {
      StoreElement(rows, row * rows.stride(0) + h * rows.stride(1) + static_cast<int64_t>(d),
                   scale > 0 ? head[d] / scale : 0);
    }
  }
}

bool SamePageTable(const AttentionLayerSpec& a, const AttentionLayerSpec& b) {
  return a.num_kv_heads == b.num_kv_heads && a.qk_head_dim == b.qk_head_dim &&
         a.v_head_dim == b.v_head_dim && a.dtype == b.dtype && a.value_dtype() == b.value_dtype() &&
         a.window == b.window && a.rope == b.rope && a.latent == b.latent;
}

// [layers, n, D] as [layers, n, 1, D].
TensorView WithHead(const TensorView& kv) {
  if (kv.rank() != 3 || !kv.is_contiguous()) return kv;
  return TensorView(kv.data(), kv.dtype(), {kv.dim(0), kv.dim(1), int64_t{1}, kv.dim(2)});
}

// What a latent layer's key says of its value.
void TakeValue(const AttentionLayerSpec& spec, std::span<const float> key,
               std::vector<float>* value) {
  value->assign(key.begin(), key.begin() + spec.v_head_dim);
}

}  // namespace

std::vector<double> RotateReference(std::span<const double> x, const RopeFrequencies& frequencies,
                                    RopePairing pairing, int64_t position) {
  std::vector<double> y(x.begin(), x.end());
  const size_t pairs = frequencies.inv_freq.size();
  for (size_t i = 0; i < pairs; ++i) {
    const bool half_split = pairing == RopePairing::kHalfSplit;
    const size_t a = half_split ? i : 2 * i;
    const size_t b = half_split ? i + pairs : 2 * i + 1;
    const double angle = static_cast<double>(position) * frequencies.inv_freq[i];
    const double c = std::cos(angle) * frequencies.amplitude;
    const double s = std::sin(angle) * frequencies.amplitude;
    y[a] = x[a] * c - x[b] * s;
    y[b] = x[b] * c + x[a] * s;
  }
  return y;
}

// ---------------------------------------------------------------------- arguments

double KVModel::Rows::Get(int64_t row, int64_t head, int64_t d) const {
  return LoadElement(*view, At(row, head, d));
}
void KVModel::Rows::Set(int64_t row, int64_t head, int64_t d, double value) const {
  StoreElement(*view, At(row, head, d), static_cast<float>(value));
}

bool KVModel::LseFits(const TensorView& lse, int64_t heads) const {
  return lse.dtype() == DType::kF32 && lse.rank() == 2 && lse.dim(0) >= std::ssize(query_rows_) &&
         lse.dim(1) == heads && lse.stride(1) == 1;
}

Status KVModel::CheckRows(const char* name, const TensorView& view, int64_t layer, int64_t heads,
                          int64_t dim) const {
  const AttentionLayerSpec& spec = options_.layers[static_cast<size_t>(layer)];
  const bool dtype_fits = view.dtype() == DType::kF32 || view.dtype() == Computed(spec.dtype) ||
                          view.dtype() == Computed(spec.value_dtype());
  const bool by_head = view.rank() == 3 && view.dim(1) == heads && view.dim(2) == dim;
  const bool flat = view.rank() == 2 && view.dim(1) == heads * dim;
  const bool dense = view.rank() > 0 && view.stride(view.rank() - 1) == 1;
  const bool rows_fit = view.rank() > 0 && view.dim(0) >= std::ssize(query_rows_);
  if (dtype_fits && (by_head || flat) && dense && rows_fit) return Status();
  return Bad(StatusCode::kBadArgument, std::string(name) + " is " + view.ToString());
}

// ---------------------------------------------------------------------- tokens

Status KVModel::CheckRoom() {
  if (!std::exchange(finds_no_room_, false)) return Status();
  return Bad(StatusCode::kOutOfPages, "the cache finds too few free pages");
}

// What a cache may have copied when something was to come to stand at `end`.
void KVModel::NoteGathered(Sequence& sequence, int64_t end) const {
  if (!MayGather(sequence, end)) return;
  for (int64_t p = RangeOf(end); p < end; ++p)
    sequence.tokens[static_cast<size_t>(p)].gathered = calls_;
}

void KVModel::AddPlaces(Sequence& sequence, int64_t count, std::span<const TokenRange> absent) {
  ++calls_;
  NoteGathered(sequence, std::ssize(sequence.tokens));
  for (int64_t n = 0; n < count; ++n) {
    const int64_t position = std::ssize(sequence.tokens);
    Token token{std::make_shared<TokenValues>(), std::vector<char>(groups_.size(), 1), calls_};
    token.values->k.resize(options_.layers.size());
    token.values->v.resize(options_.layers.size());
    for (size_t g = 0; g < absent.size(); ++g)
      token.held[g] = position < absent[g].begin || position >= absent[g].end;
    sequence.tokens.push_back(std::move(token));
  }
}

// The levels that the tree has with these nodes as well.
int64_t KVModel::LevelsWith(const Sequence& sequence, std::span<const int64_t> parents) {
  int64_t levels = sequence.levels;
  std::vector<int64_t> depths;
  for (const Node& node : sequence.nodes) depths.push_back(node.depth);
  for (const int64_t parent : parents) {
    depths.push_back(parent < 0 ? 0 : depths[static_cast<size_t>(parent)] + 1);
    levels = std::max(levels, depths.back() + 1);
  }
  return levels;
}

// Levels are places behind the tokens.
void KVModel::AddNodes(Sequence& sequence, std::span<const int64_t> parents) {
  const int64_t levels = LevelsWith(sequence, parents);
  for (const int64_t parent : parents) {
    auto values = std::make_shared<TokenValues>();
    values->k.resize(options_.layers.size());
    values->v.resize(options_.layers.size());
    const int64_t depth = parent < 0 ? 0 : sequence.nodes[static_cast<size_t>(parent)].depth + 1;
    sequence.nodes.push_back({parent, depth, std::move(values)});
  }
  if (levels > sequence.levels) AddPlaces(sequence, levels - sequence.levels);
  sequence.levels = levels;
}

void KVModel::DropNodes(Sequence& sequence, int64_t size) {
  sequence.nodes.resize(static_cast<size_t>(size));
  int64_t levels = 0;
  for (const Node& node : sequence.nodes) levels = std::max(levels, node.depth + 1);
  sequence.tokens.resize(sequence.tokens.size() - static_cast<size_t>(sequence.levels - levels));
  sequence.levels = levels;
}

std::vector<int64_t> KVModel::Sequence::PathTo(int64_t node) const {
  std::vector<int64_t> path;
  for (; node >= 0; node = nodes[static_cast<size_t>(node)].parent) path.push_back(node);
  std::reverse(path.begin(), path.end());
  return path;
}

KVModel::Sequence KVModel::PlainTo(const Sequence& sequence, int64_t node) {
  Sequence plain = sequence;
  plain.tokens.resize(static_cast<size_t>(sequence.length()));
  plain.nodes.clear();
  plain.levels = 0;
  for (const int64_t n : sequence.PathTo(node)) {
    Token token;
    token.values = sequence.nodes[static_cast<size_t>(n)].values;
    plain.tokens.push_back(std::move(token));
  }
  return plain;
}

// The plain sequence that ends in row n of a member of the open forward.
KVModel::Sequence KVModel::SequenceOfRow(size_t member, int64_t n) const {
  const Sequence& sequence = sequences_.at(batch_[member]);
  if (sequence.nodes.empty()) return sequence;
  return PlainTo(sequence, sequence.tree_size() - batch_lengths_[member] + n);
}

// ---------------------------------------------------------------------- windows

int64_t KVModel::Windows::SlidAt(int64_t position) const {
  return window == 0 ? lost : std::max(lost, position + 1 - window);
}

bool KVModel::Windows::Sees(int64_t position, int64_t key, int64_t layer_window) const {
  if (key > position) return false;
  if (layer_window != 0 && key <= position - layer_window) return false;
  return key < sinks || key >= sinks + SlidAt(position);
}

// When a forward ends.
void KVModel::Sequence::Slide() {
  if (span != 0 && length() - span > lost) {
    lost = length() - span;
    sinks = span_sinks;
  }
  slid = SlidAt(length());
}

// What is left of the windows when the sequence ends at `end`.
void KVModel::Windows::EndAt(int64_t end) {
  if (end <= sinks) lost = 0;
  slid = std::min(slid, SlidAt(end));
  if (window == 0 && lost == 0) sinks = 0;
}

bool KVModel::IsHeld(const Sequence& sequence, int64_t position, size_t group) const {
  return sequence.tokens[static_cast<size_t>(position)].held[group] != 0;
}

bool KVModel::CanEndAt(const Sequence& sequence, int64_t length) const {
  if (length == sequence.length()) return true;
  Windows shorter = sequence;
  shorter.EndAt(length);
  if (shorter.lost > 0 && length < shorter.sinks + shorter.lost) return false;
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (int64_t p = 0; p < length; ++p) {
      if (shorter.Sees(length, p, groups_[g].window) && !IsHeld(sequence, p, g)) return false;
    }
  }
  return true;
}

// Whether the next query of the sequence may look at the page range that begins there.
bool KVModel::NeedsRange(const Sequence& sequence, const Group& group, int64_t range) const {
  Windows popped = sequence;
  const int64_t end = std::max<int64_t>(sequence.length() - options_.max_pop, 0);
  popped.EndAt(end);
  Windows next;  // the window counts as of the last forward
  next.sinks = popped.sinks;
  next.lost = popped.slid;
  for (int64_t p = range; p < range + group.page_size; ++p) {
    // Behind the end lies what is yet to come; sinks stay while one of them is seen.
    const bool is_lost = p >= next.sinks && p < next.sinks + next.lost;
    if ((p >= end && !is_lost) || next.Sees(end, p, group.window)) return true;
    const int64_t first = group.window == 0 ? 0 : std::max<int64_t>(end + 1 - group.window, 0);
    if (popped.slid > 0 && p < popped.sinks && first < popped.sinks) return true;
  }
  return false;
}

// Whether another sequence needs the page range and has a token of it in common with this one. What
// has a page in common has the page's first token in common.
bool KVModel::SharesNeededRange(const Sequence& sequence, const Group& group, int64_t range) const {
  return std::ranges::any_of(sequences_, [&](const auto& entry) {
    const Sequence& other = entry.second;
    if (&other == &sequence || !NeedsRange(other, group, range)) return false;
    const size_t end = std::min({static_cast<size_t>(range + group.page_size),
                                 sequence.tokens.size(), other.tokens.size()});
    for (size_t p = static_cast<size_t>(range); p < end; ++p) {
      if (other.tokens[p].values == sequence.tokens[p].values) return true;
    }
    return false;
  });
}

bool KVModel::IsHeldBeside(int64_t seq_id, int64_t position, const Group& group) const {
  if (beside_ == nullptr) return true;
  const StoredRows row(options_.layers[static_cast<size_t>(group.first_layer)], 1);
  return beside_->ExportKV(seq_id, group.first_layer, position, row.view()).ok();
}

// Windows let go of whole page ranges.
void KVModel::FreeHidden() {
  if (forward_) return;
  for (auto& [id, sequence] : sequences_) {
    for (size_t g = 0; g < groups_.size(); ++g) {
      for (int64_t range = 0; range < sequence.length(); range += groups_[g].page_size) {
        if (NeedsRange(sequence, groups_[g], range)) continue;
        const bool may_stay = SharesNeededRange(sequence, groups_[g], range);
        const int64_t end = std::min(range + groups_[g].page_size, sequence.length());
        for (int64_t p = range; p < end; ++p) {
          char& held = sequence.tokens[static_cast<size_t>(p)].held[g];
          held = held != 0 && may_stay && IsHeldBeside(id, p, groups_[g]);
        }
      }
    }
  }
}

Status KVModel::EnableSlidingWindowForSeq(int64_t seq_id, int64_t window, int64_t sinks) {
  QUIRE_RETURN_IF_ERROR(CheckControl(seq_id));
  Sequence& sequence = sequences_.at(seq_id);
  if (!sequence.is_committed()) return Bad(StatusCode::kBadState, "is not committed");
  const bool fits = sinks >= 0 && sinks < window && window < INT64_MAX;
  if (!fits) return Bad(StatusCode::kBadArgument, "window or sinks");
  if (sequence.window + sequence.span != 0) return Bad(StatusCode::kBadState, "has a window");
  if (sequence.lost != 0 && sequence.sinks != sinks) return Bad(StatusCode::kBadState, "sinks");
  if (options_.tvm_window_span) {
    sequence.span = window;
    sequence.span_sinks = sinks;
    return Status();
  }
  sequence.window = window;
  sequence.sinks = sinks;
  return Status();
}

Status KVModel::DisableSlidingWindowForSeq(int64_t seq_id) {
  QUIRE_RETURN_IF_ERROR(CheckControl(seq_id));
  Sequence& sequence = sequences_.at(seq_id);
  if (!sequence.is_committed()) return Bad(StatusCode::kBadState, "is not committed");
  if (sequence.window + sequence.span == 0) return Bad(StatusCode::kBadState, "has no window");
  sequence.window = 0;
  sequence.span = 0;
  sequence.lost = sequence.slid;
  if (sequence.lost == 0) sequence.sinks = 0;
  FreeHidden();
  return Status();
}

Result<WindowSettings> KVModel::GetWindows(int64_t seq_id) const {
  if (!HasSequence(seq_id)) return Bad(StatusCode::kUnknownSequence, "no such sequence");
  return WindowSettings(sequences_.at(seq_id));
}

Result<int64_t> KVModel::HeldTokens(int64_t seq_id) const {
  if (!HasSequence(seq_id)) return Bad(StatusCode::kUnknownSequence, "no such sequence");
  const Sequence& sequence = sequences_.at(seq_id);
  const auto end = sequence.tokens.begin() + sequence.length();
  return sequence.tree_size() + std::count_if(sequence.tokens.begin(), end, [](const Token& token) {
           return std::ranges::count(token.held, 0) == 0;
         });
}

Result<TokenRange> KVModel::SlidRange(int64_t seq_id) const {
  if (!HasSequence(seq_id)) return Bad(StatusCode::kUnknownSequence, "no such sequence");
  const Sequence& sequence = sequences_.at(seq_id);
  if (sequence.slid == 0) return TokenRange();
  return TokenRange{sequence.sinks, sequence.sinks + sequence.slid};
}

// ---------------------------------------------------------------------- sequences

KVModel::KVModel(const AttentionKVCacheOptions& options, AttentionKVCache* beside)
    : options_(options), beside_(beside) {
  for (size_t l = 0; l < options_.layers.size(); ++l) {
    const AttentionLayerSpec& layer = options_.layers[l];
    size_t g = 0;
    const auto is_of = [&](const Group& group) {
      return SamePageTable(options_.layers[static_cast<size_t>(group.first_layer)], layer);
    };
    while (g < groups_.size() && !is_of(groups_[g])) ++g;
    if (g == groups_.size()) {
      groups_.push_back(
          {.first_layer = static_cast<int64_t>(l),
           .page_size = options_.page_size != 0 ? options_.page_size : DefaultPageSize(layer),
           .window = layer.window});
    }
    group_of_layer_.push_back(g);
    const RopeOptions& rope = layer.rope ? *layer.rope : options_.rope;
    const int64_t dim = layer.latent ? layer.qk_head_dim - layer.v_head_dim : layer.qk_head_dim;
    if (dim == 0) {
      frequencies_.emplace_back();
      continue;
    }
    frequencies_.emplace_back(ComputeRopeFrequencies(rope, dim, false).value(),
                              ComputeRopeFrequencies(rope, dim, true).value());
  }
}

KVModel::~KVModel() = default;

Status KVModel::Clear() {
  std::vector<int64_t> marked;
  for (const auto& [id, mark] : marks_) marked.push_back(id);
  FinishSends(batch_, Outcome::kAborted);
  for (const int64_t id : marked) StopSend(id);
  receives_.clear();
  sequences_.clear();
  before_.clear();
  forward_ = false;
  return Status();
}

Status KVModel::AddSequence(int64_t seq_id) {
  if (seq_id < 0) return Bad(StatusCode::kBadArgument, "negative id");
  if (HasSequence(seq_id)) return Bad(StatusCode::kSequenceExists, "id is taken");
  if (IsFull()) return Bad(StatusCode::kTooLarge, "too many sequences");
  sequences_[seq_id].long_factors = options_.rope.use_long_factors;
  return Status();
}

// What RemoveSequence, PopN and ForkSequence ask of the sequence that they change or read.
Status KVModel::CheckControl(int64_t seq_id) const {
  if (!HasSequence(seq_id)) return Bad(StatusCode::kUnknownSequence, "no such sequence");
  if (InBatch(seq_id)) return Bad(StatusCode::kBadState, "in the open forward");
  return Status();
}

Status KVModel::RemoveSequence(int64_t seq_id) {
  QUIRE_RETURN_IF_ERROR(CheckControl(seq_id));
  StopSend(seq_id);
  EndReceive(seq_id, 0);
  sequences_.erase(seq_id);
  FreeHidden();
  return Status();
}

Status KVModel::ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos) {
  QUIRE_RETURN_IF_ERROR(CheckControl(parent_id));
  if (child_id < 0) return Bad(StatusCode::kBadArgument, "negative child id");
  if (HasSequence(child_id)) return Bad(StatusCode::kSequenceExists, "child id is taken");
  if (IsFull()) return Bad(StatusCode::kTooLarge, "too many sequences");
  const Sequence& parent = sequences_.at(parent_id);
  const int64_t length = parent.full_length();
  if (fork_pos < -1 || fork_pos > length) return Bad(StatusCode::kBadArgument, "fork_pos");
  Sequence child = parent;
  child.retained = false;
  child.nodes.clear();
  child.levels = 0;
  child.pending = 0;
  child.receive = 0;
  child.span = 0;
  if (fork_pos < 0) fork_pos = length;
  if (fork_pos > parent.length()) return Bad(StatusCode::kBadState, "is not committed there");
  if (!CanEndAt(parent, fork_pos)) return Bad(StatusCode::kBadState, "not held");
  child.tokens.resize(static_cast<size_t>(fork_pos));
  child.EndAt(fork_pos);
  sequences_.emplace(child_id, std::move(child));
  return Status();
}

bool KVModel::CanFork(int64_t seq_id, int64_t position) const {
  if (!HasSequence(seq_id) || position < 0) return false;
  const Sequence& parent = sequences_.at(seq_id);
  return position <= parent.length() && CanEndAt(parent, position);
}

Status KVModel::PopN(int64_t seq_id, int64_t n) {
  QUIRE_RETURN_IF_ERROR(CheckControl(seq_id));
  Sequence& sequence = sequences_.at(seq_id);
  if (n < 0 || n > sequence.full_length()) return Bad(StatusCode::kBadArgument, "n");
  if (n > 0 && n < sequence.pending)
    return Bad(StatusCode::kBadState, "would end among the pending");
  const int64_t nodes = std::min(n, sequence.tree_size());
  const bool cancels = n > 0 && sequence.pending > 0;
  n -= cancels ? sequence.pending : nodes;
  const int64_t length = sequence.length();
  if (!CanEndAt(sequence, length - n)) return Bad(StatusCode::kBadState, "not held");
  DropNodes(sequence, sequence.tree_size() - nodes);
  if (cancels) EndReceive(seq_id, 0);
  const auto mark = marks_.find(seq_id);
  if (mark != marks_.end())
    mark->second.next = std::max(mark->second.begin, std::min(mark->second.next, length - n));
  if (n > 0) {
    sequence.tokens.resize(static_cast<size_t>(length - n));
    sequence.EndAt(length - n);
  }
  FreeHidden();
  return Status();
}

Status KVModel::SetRetained(int64_t seq_id, bool retained) {
  QUIRE_RETURN_IF_ERROR(CheckControl(seq_id));
  Sequence& sequence = sequences_.at(seq_id);
  if (retained && !sequence.is_committed()) return Bad(StatusCode::kBadState, "is not committed");
  if (sequence.retained && !retained && IsFull()) {
    return Bad(StatusCode::kTooLarge, "too many sequences");
  }
  sequence.retained = retained;
  return Status();
}

Status KVModel::SelectLongRope(int64_t seq_id, bool use_long_factors) {
  QUIRE_RETURN_IF_ERROR(CheckControl(seq_id));
  if (options_.rope.mode == RopeMode::kNone || !HasLongSet(options_.rope.scaling)) {
    return Bad(StatusCode::kBadState, "the cache has no long factors");
  }
  Sequence& sequence = sequences_.at(seq_id);
  const bool is_empty = sequence.tokens.empty() && sequence.nodes.empty();
  if (!is_empty) return Bad(StatusCode::kBadState, "sequence is not empty");
  sequence.long_factors = use_long_factors;
  return Status();
}

Result<bool> KVModel::UsesLongRope(int64_t seq_id) const {
  if (!HasSequence(seq_id)) return Bad(StatusCode::kUnknownSequence, "no such sequence");
  return sequences_.at(seq_id).long_factors;
}

// ---------------------------------------------------------------------- counters

int64_t KVModel::retained_sequence_count() const {
  return std::count_if(sequences_.begin(), sequences_.end(),
                       [](const auto& entry) { return entry.second.retained; });
}

int64_t KVModel::GetTotalSequenceLength() const {
  int64_t sum = 0;
  for (const auto& [id, sequence] : sequences_) sum += sequence.full_length();
  return sum;
}

int64_t KVModel::GetDistinctTokenCount() const {
  std::set<const TokenValues*> tokens;
  int64_t nodes = 0;
  for (const auto& [id, sequence] : sequences_) {
    nodes += sequence.tree_size();
    for (int64_t p = 0; p < sequence.length() + sequence.pending; ++p)
      tokens.insert(sequence.tokens[static_cast<size_t>(p)].values.get());
  }
  return std::ssize(tokens) + nodes;
}

Result<int64_t> KVModel::GetSequenceLength(int64_t seq_id) const {
  if (!HasSequence(seq_id)) return Bad(StatusCode::kUnknownSequence, "no such sequence");
  return sequences_.at(seq_id).full_length();
}

Result<int64_t> KVModel::GetTreeSize(int64_t seq_id) const {
  if (!HasSequence(seq_id)) return Bad(StatusCode::kUnknownSequence, "no such sequence");
  return sequences_.at(seq_id).tree_size();
}

Result<int64_t> KVModel::PagesNeeded(std::span<const int64_t> seq_ids,
                                     std::span<const int64_t> append_lengths) const {
  QUIRE_RETURN_IF_ERROR(CheckBatch(seq_ids, append_lengths));
  return TakenByForward(seq_ids, append_lengths).largest().least;
}

Result<int64_t> KVModel::PagesNeededForTree(std::span<const int64_t> seq_ids,
                                            std::span<const int64_t> append_lengths,
                                            std::span<const int64_t> token_tree_parents) const {
  QUIRE_RETURN_IF_ERROR(CheckTreeBatch(seq_ids, append_lengths, token_tree_parents));
  return TakenByForward(seq_ids, append_lengths, &token_tree_parents).largest().least;
}

// ---------------------------------------------------------------------- forward

Status KVModel::CheckShapeOfBatch(std::span<const int64_t> seq_ids,
                                  std::span<const int64_t> lengths) const {
  if (forward_) return Bad(StatusCode::kBadState, "a forward is open");
  if (seq_ids.empty() || seq_ids.size() != lengths.size()) {
    return Bad(StatusCode::kBadArgument, "batch is empty or of unequal sizes");
  }
  return Status();
}

Status KVModel::CheckMember(int64_t seq_id, int64_t length, std::set<int64_t>* seen,
                            int64_t* room) const {
  if (!HasSequence(seq_id)) return Bad(StatusCode::kUnknownSequence, "no such sequence");
  if (!seen->insert(seq_id).second) return Bad(StatusCode::kBadArgument, "twice in the batch");
  if (sequences_.at(seq_id).retained) return Bad(StatusCode::kBadState, "retained");
  if (length < 1) return Bad(StatusCode::kBadArgument, "length below 1");
  if (length > *room) return Bad(StatusCode::kTooLarge, "over prefill_chunk_size");
  *room -= length;
  return Status();
}

// Checks of plain forwards.
Status KVModel::CheckBatch(std::span<const int64_t> seq_ids,
                           std::span<const int64_t> lengths) const {
  QUIRE_RETURN_IF_ERROR(CheckShapeOfBatch(seq_ids, lengths));
  std::set<int64_t> seen;
  int64_t room = options_.prefill_chunk_size;
  for (size_t i = 0; i < seq_ids.size(); ++i) {
    QUIRE_RETURN_IF_ERROR(CheckMember(seq_ids[i], lengths[i], &seen, &room));
    if (!sequences_.at(seq_ids[i]).is_committed())
      return Bad(StatusCode::kBadState, "is not committed");
  }
  return Status();
}

Status KVModel::BeginForward(std::span<const int64_t> seq_ids,
                             std::span<const int64_t> append_lengths) {
  return BeginLoadingForward(seq_ids, append_lengths, {});
}

Status KVModel::BeginLoadingForward(std::span<const int64_t> seq_ids,
                                    std::span<const int64_t> append_lengths,
                                    std::span<const LayerLoad> loads) {
  QUIRE_RETURN_IF_ERROR(CheckBatch(seq_ids, append_lengths));
  std::vector<int64_t> loaded(seq_ids.size());
  size_t load = 0;
  for (size_t i = 0; i < seq_ids.size() && load < loads.size(); ++i) {
    if (loads[load].seq_id != seq_ids[i]) continue;
    if (loads[load].tokens < 1) return Bad(StatusCode::kBadArgument, "nothing to import");
    loaded[i] = loads[load++].tokens;
  }
  if (load < loads.size()) return Bad(StatusCode::kBadArgument, "a load of no member");
  QUIRE_RETURN_IF_ERROR(CheckRoom());
  loads_.assign(loads.begin(), loads.end());
  for (size_t i = 0; i < seq_ids.size(); ++i) {
    Sequence& sequence = sequences_.at(seq_ids[i]);
    before_.emplace(seq_ids[i], sequence);
    AddPlaces(sequence, loaded[i] + append_lengths[i]);
  }
  OpenForward(seq_ids, append_lengths);
  return Status();
}

Status KVModel::CheckTree(const Sequence& sequence, std::span<const int64_t> parents) {
  for (size_t i = 0; i < parents.size(); ++i) {
    const int64_t node = sequence.tree_size() + static_cast<int64_t>(i);
    if (parents[i] < -1 || parents[i] >= node) return Bad(StatusCode::kBadArgument, "parent");
  }
  return Status();
}

Status KVModel::CheckTreeBatch(std::span<const int64_t> seq_ids,
                               std::span<const int64_t> append_lengths,
                               std::span<const int64_t> token_tree_parents) const {
  QUIRE_RETURN_IF_ERROR(CheckShapeOfBatch(seq_ids, append_lengths));
  std::set<int64_t> seen;
  int64_t room = options_.prefill_chunk_size;
  std::span<const int64_t> left = token_tree_parents;
  for (size_t i = 0; i < seq_ids.size(); ++i) {
    const int64_t count = std::max<int64_t>(append_lengths[i], 0);
    if (count > std::ssize(left)) return Bad(StatusCode::kBadArgument, "too few parents");
    QUIRE_RETURN_IF_ERROR(CheckMember(seq_ids[i], append_lengths[i], &seen, &room));
    const Sequence& sequence = sequences_.at(seq_ids[i]);
    if (sequence.pending > 0) return Bad(StatusCode::kBadState, "has pending tokens");
    if (sequence.tree_size() + count > options_.max_tree_size)
      return Bad(StatusCode::kTooLarge, "tree");
    QUIRE_RETURN_IF_ERROR(CheckTree(sequence, left.first(static_cast<size_t>(count))));
    left = left.subspan(static_cast<size_t>(count));
  }
  if (!left.empty()) return Bad(StatusCode::kBadArgument, "too many parents");
  return Status();
}

Status KVModel::BeginTreeForward(std::span<const int64_t> seq_ids,
                                 std::span<const int64_t> append_lengths,
                                 std::span<const int64_t> token_tree_parents) {
  QUIRE_RETURN_IF_ERROR(CheckTreeBatch(seq_ids, append_lengths, token_tree_parents));
  QUIRE_RETURN_IF_ERROR(CheckRoom());
  loads_.clear();
  std::span<const int64_t> left = token_tree_parents;
  for (size_t i = 0; i < seq_ids.size(); ++i) {
    Sequence& sequence = sequences_.at(seq_ids[i]);
    before_.emplace(seq_ids[i], sequence);
    AddNodes(sequence, left.first(static_cast<size_t>(append_lengths[i])));
    left = left.subspan(static_cast<size_t>(append_lengths[i]));
  }
  OpenForward(seq_ids, append_lengths);
  return Status();
}

// The batch has its new places.
void KVModel::OpenForward(std::span<const int64_t> seq_ids, std::span<const int64_t> lengths) {
  batch_.assign(seq_ids.begin(), seq_ids.end());
  batch_lengths_.assign(lengths.begin(), lengths.end());
  positions_.clear();
  for (size_t i = 0; i < batch_.size(); ++i) {
    const Sequence& sequence = sequences_.at(batch_[i]);
    for (int64_t n = 0; n < batch_lengths_[i]; ++n) {
      const int64_t position =
          sequence.nodes.empty()
              ? sequence.length() - batch_lengths_[i] + n
              : sequence.length() +
                    sequence
                        .nodes[static_cast<size_t>(sequence.tree_size() - batch_lengths_[i] + n)]
                        .depth;
      positions_.push_back(static_cast<int32_t>(position));
    }
  }
  query_rows_.resize(positions_.size());
  std::iota(query_rows_.begin(), query_rows_.end(), 0);
  query_positions_ = positions_;
  input_rows_ = query_rows_;
  blends_.clear();
  is_blending_ = false;
  loaded_.assign(options_.layers.size(), 0);
  appended_.assign(options_.layers.size(), 0);
  attended_.assign(options_.layers.size(), 0);
  forward_ = true;
  failed_ = false;
}

Status KVModel::CommitAcceptedTokenTreeNodes(std::span<const int64_t> seq_ids,
                                             std::span<const int64_t> leaf_indices) {
  if (forward_) return Bad(StatusCode::kBadState, "a forward is open");
  if (seq_ids.size() != leaf_indices.size()) return Bad(StatusCode::kBadArgument, "sizes");
  std::set<int64_t> seen;
  for (size_t i = 0; i < seq_ids.size(); ++i) {
    if (!HasSequence(seq_ids[i])) return Bad(StatusCode::kUnknownSequence, "no such sequence");
    if (!seen.insert(seq_ids[i]).second) return Bad(StatusCode::kBadArgument, "named twice");
    const int64_t size = sequences_.at(seq_ids[i]).tree_size();
    if (size == 0) return Bad(StatusCode::kBadState, "has no tree");
    if (leaf_indices[i] < -1 || leaf_indices[i] >= size)
      return Bad(StatusCode::kBadArgument, "leaf");
  }
  for (size_t i = 0; i < seq_ids.size(); ++i) {
    Sequence& sequence = sequences_.at(seq_ids[i]);
    size_t position = static_cast<size_t>(sequence.length());
    const std::vector<int64_t> path = sequence.PathTo(leaf_indices[i]);
    for (const int64_t node : path)
      sequence.tokens[position++].values = sequence.nodes[static_cast<size_t>(node)].values;
    sequence.levels -= std::ssize(path);  // these are tokens now
    DropNodes(sequence, 0);
    sequence.Slide();
  }
  FreeHidden();
  return Status();
}

Status KVModel::EndForward() {
  if (!forward_) return Bad(StatusCode::kBadState, "no open forward");
  if (failed_) return Bad(StatusCode::kBadState, "an attention call has failed");
  if (options_.allow_skipped_layers) {
    QUIRE_RETURN_IF_ERROR(FailAttention(FillSkippedLayers()));
  } else if (std::ranges::count(appended_, 0) + std::ranges::count(attended_, 0) > 0) {
    return Bad(StatusCode::kBadState, "a layer was not run");
  }
  for (const int64_t id : batch_) {
    Sequence& sequence = sequences_.at(id);
    if (sequence.nodes.empty()) sequence.Slide();
  }
  before_.clear();
  forward_ = false;
  FreeHidden();
  FinishSends(batch_, Outcome::kEnded);
  return Status();
}

Status KVModel::AbortForward() {
  if (!forward_) return Bad(StatusCode::kBadState, "no open forward");
  for (auto& [id, old] : before_) sequences_.at(id) = std::move(old);
  before_.clear();
  forward_ = false;
  FreeHidden();
  FinishSends(batch_, Outcome::kAborted);
  return Status();
}

Result<std::span<const int32_t>> KVModel::GetQueryPositions() const {
  if (!forward_) return Bad(StatusCode::kBadState, "no open forward");
  return std::span<const int32_t>(query_positions_);
}

// ---------------------------------------------------------------------- attention

Status KVModel::CheckAttention(int64_t layer) const {
  if (!forward_) return Bad(StatusCode::kBadState, "no open forward");
  if (failed_) return Bad(StatusCode::kBadState, "an attention call has failed");
  if (layer < 0 || layer >= static_cast<int64_t>(options_.layers.size())) {
    return Bad(StatusCode::kBadArgument, "no such layer");
  }
  return Status();
}

Status KVModel::FailAttention(Status status) {
  if (!status.ok() && forward_) failed_ = true;
  return status;
}

Status KVModel::AttentionWithFusedQKV(int64_t layer, const TensorView& qkv, const TensorView& o,
                                      double sm_scale, const TensorView* mask) {
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckAttention(layer)));
  const AttentionLayerSpec& spec = options_.layers[static_cast<size_t>(layer)];
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckKind(layer, false)));
  const int64_t hq = spec.num_qo_heads;
  const int64_t hkv = spec.num_kv_heads;
  const int64_t d = spec.qk_head_dim;
  const int64_t dv = spec.v_head_dim;
  Status shape = CheckRows("qkv", qkv, layer, 1, (hq + hkv) * d + hkv * dv);
  if (d == dv && qkv.rank() == 3) shape = CheckRows("qkv", qkv, layer, hq + 2 * hkv, d);
  QUIRE_RETURN_IF_ERROR(FailAttention(shape));
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckRows("o", o, layer, hq, dv)));
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckMask(mask)));
  if (appended_[static_cast<size_t>(layer)]) {
    return FailAttention(Bad(StatusCode::kBadState, "layer was appended already"));
  }
  const int64_t head_stride = qkv.rank() == 3 ? qkv.stride(1) : d;
  QUIRE_RETURN_IF_ERROR(FailAttention(LoadLayer(layer)));
  QUIRE_RETURN_IF_ERROR(FailAttention(AppendRows(layer, Rows{&qkv, hq * head_stride, d},
                                                 Rows{&qkv, (hq + hkv) * head_stride, dv})));
  AttendRows(layer, Sees::kUpToOwn, Rows{&qkv, 0, d}, Rotated::kNo, Rows{&o, 0, dv}, nullptr,
             sm_scale, mask);
  attended_[static_cast<size_t>(layer)] = 1;
  return Status();
}

Status KVModel::Append(int64_t layer, const TensorView& k, const TensorView& v) {
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckAttention(layer)));
  const AttentionLayerSpec& spec = options_.layers[static_cast<size_t>(layer)];
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckKind(layer, false)));
  QUIRE_RETURN_IF_ERROR(
      FailAttention(CheckRows("k", k, layer, spec.num_kv_heads, spec.qk_head_dim)));
  QUIRE_RETURN_IF_ERROR(
      FailAttention(CheckRows("v", v, layer, spec.num_kv_heads, spec.v_head_dim)));
  if (appended_[static_cast<size_t>(layer)]) {
    return FailAttention(Bad(StatusCode::kBadState, "layer was appended already"));
  }
  QUIRE_RETURN_IF_ERROR(FailAttention(LoadLayer(layer)));
  return FailAttention(
      AppendRows(layer, Rows{&k, 0, spec.qk_head_dim}, Rows{&v, 0, spec.v_head_dim}));
}

Status KVModel::CheckAttend(int64_t layer, const TensorView& q, const TensorView& o,
                            const TensorView* lse, const TensorView* mask) {
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckAttention(layer)));
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckMask(mask)));
  const AttentionLayerSpec& spec = options_.layers[static_cast<size_t>(layer)];
  QUIRE_RETURN_IF_ERROR(
      FailAttention(CheckRows("q", q, layer, spec.num_qo_heads, spec.qk_head_dim)));
  QUIRE_RETURN_IF_ERROR(
      FailAttention(CheckRows("o", o, layer, spec.num_qo_heads, spec.v_head_dim)));
  if (lse != nullptr && !LseFits(*lse, spec.num_qo_heads))
    return FailAttention(Bad(StatusCode::kBadArgument, "lse is of another shape"));
  if (!appended_[static_cast<size_t>(layer)]) {
    return FailAttention(Bad(StatusCode::kBadState, "attend before append"));
  }
  return Status();
}

Status KVModel::Attend(int64_t layer, const TensorView& q, const TensorView& o,
                       const TensorView* lse, double sm_scale, const TensorView* mask) {
  QUIRE_RETURN_IF_ERROR(CheckAttend(layer, q, o, lse, mask));
  const AttentionLayerSpec& spec = options_.layers[static_cast<size_t>(layer)];
  AttendRows(layer, Sees::kUpToOwn, Rows{&q, 0, spec.qk_head_dim},
             RotatedForAttend(static_cast<size_t>(layer)), Rows{&o, 0, spec.v_head_dim}, lse,
             sm_scale, mask);
  attended_[static_cast<size_t>(layer)] = 1;
  return Status();
}

Status KVModel::CheckKind(int64_t layer, bool latent) const {
  if (options_.layers[static_cast<size_t>(layer)].latent == latent) return Status();
  return Bad(StatusCode::kBadArgument, "a layer of the other kind");
}

Status KVModel::AppendMLAKV(int64_t layer, const TensorView& kv) {
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckAttention(layer)));
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckKind(layer, true)));
  const AttentionLayerSpec& spec = options_.layers[static_cast<size_t>(layer)];
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckRows("kv", kv, layer, 1, spec.qk_head_dim)));
  if (kv.rank() != 2) return FailAttention(Bad(StatusCode::kBadArgument, "kv has heads"));
  if (appended_[static_cast<size_t>(layer)]) {
    return FailAttention(Bad(StatusCode::kBadState, "layer was appended already"));
  }
  QUIRE_RETURN_IF_ERROR(FailAttention(LoadLayer(layer)));
  const Rows rows{&kv, 0, spec.qk_head_dim};
  return FailAttention(AppendRows(layer, rows, rows));
}

Status KVModel::AttentionWithMLA(int64_t layer, const TensorView& q_absorbed, const TensorView& kv,
                                 const TensorView& o, double sm_scale, const TensorView* mask) {
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckAttention(layer)));
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckKind(layer, true)));
  QUIRE_RETURN_IF_ERROR(FailAttention(CheckMask(mask)));
  QUIRE_RETURN_IF_ERROR(AppendMLAKV(layer, kv));
  return Attend(layer, q_absorbed, o, nullptr, sm_scale, mask);
}

Status KVModel::AttentionWithSharedKV(int64_t source_layer, const TensorView& q,
                                      const TensorView& o, const TensorView* lse, double sm_scale,
                                      const TensorView* mask) {
  QUIRE_RETURN_IF_ERROR(CheckAttend(source_layer, q, o, lse, mask));
  PackRows();
  const AttentionLayerSpec& spec = options_.layers[static_cast<size_t>(source_layer)];
  AttendRows(
      source_layer, Sees::kUpToOwn, Rows{&q, 0, spec.qk_head_dim},
      ModeOf(static_cast<size_t>(source_layer)) == RopeMode::kInline ? Rotated::kNo : Rotated::kYes,
      Rows{&o, 0, spec.v_head_dim}, lse, sm_scale, mask);
  return Status();
}

// The tokens of one block, from `position` on.
void KVModel::StoreTokens(const Sequence& sequence, size_t position, size_t layer,
                          const LayerKV& kv) const {
  for (int64_t row = 0; row < kv.k.dim(0); ++row, ++position) {
    TokenValues& values = *sequence.tokens[position].values;
    LoadRow(kv.k, kv.k_scale, row, &values.k[layer]);
    if (options_.layers[layer].latent) {
      TakeValue(options_.layers[layer], values.k[layer], &values.v[layer]);
    } else {
      LoadRow(kv.v, kv.v_scale, row, &values.v[layer]);
    }
  }
}

Status KVModel::LoadLayer(int64_t layer) {
  if (loaded_[static_cast<size_t>(layer)]) return Status();
  for (const LayerLoad& load : loads_) {
    QUIRE_ASSIGN_OR_RETURN(const auto blocks, load.source->Load(layer));
    size_t position = before_.at(load.seq_id).tokens.size();
    for (const LayerKV& kv : blocks) {
      StoreTokens(sequences_.at(load.seq_id), position, static_cast<size_t>(layer), kv);
      position += static_cast<size_t>(kv.k.dim(0));
    }
  }
  loaded_[static_cast<size_t>(layer)] = 1;
  return Status();
}

Status KVModel::FillSkippedLayers() {
  for (size_t l = 0; l < options_.layers.size(); ++l) {
    if (!appended_[l]) QUIRE_RETURN_IF_ERROR(LoadLayer(static_cast<int64_t>(l)));
  }
  for (size_t l = 0; l < options_.layers.size(); ++l) {
    if (appended_[l]) continue;
    const AttentionLayerSpec& spec = options_.layers[l];
    int64_t row = 0;
    for (size_t i = 0; i < batch_.size(); ++i) {
      for (int64_t n = 0; n < batch_lengths_[i]; ++n) {
        TokenValues& values = ValuesOfRow(i, n, row++);
        values.k[l].assign(static_cast<size_t>(spec.num_kv_heads * spec.qk_head_dim), 0.0F);
        values.v[l].assign(static_cast<size_t>(spec.num_kv_heads * spec.v_head_dim), 0.0F);
      }
    }
    appended_[l] = 1;
    SendLayer(l);
  }
  return Status();
}

// The values of new token n of the batch's member i.
KVModel::TokenValues& KVModel::ValuesOfRow(size_t i, int64_t n, int64_t row) const {
  const Sequence& sequence = sequences_.at(batch_[i]);
  if (sequence.nodes.empty())
    return *sequence.tokens[static_cast<size_t>(positions_[static_cast<size_t>(row)])].values;
  const int64_t node = sequence.tree_size() - batch_lengths_[i] + n;
  return *sequence.nodes[static_cast<size_t>(node)].values;
}

Status KVModel::AppendRows(int64_t layer, const Rows& k, const Rows& v) {
  PackRows();
  QUIRE_RETURN_IF_ERROR(StoreMoved(layer));
  const size_t l = static_cast<size_t>(layer);
  const AttentionLayerSpec& spec = options_.layers[l];
  int64_t row = 0;
  for (size_t i = 0; i < batch_.size(); ++i) {
    const Sequence& sequence = sequences_.at(batch_[i]);
    const RopeFrequencies& frequencies = FrequenciesOf(sequence, l);
    for (int64_t n = 0; n < batch_lengths_[i]; ++n, ++row) {
      const int64_t input = InputOf(row);
      if (input < 0) continue;
      const int64_t position = positions_[static_cast<size_t>(row)];
      TokenValues& values = ValuesOfRow(i, n, row);
      std::vector<double> key(static_cast<size_t>(spec.qk_head_dim));
      for (int64_t h = 0; h < spec.num_kv_heads; ++h) {
        for (int64_t d = 0; d < spec.qk_head_dim; ++d)
          key[static_cast<size_t>(d)] = k.Get(input, h, d);
        if (ModeOf(l) == RopeMode::kNormal) {
          key = RotateReference(key, frequencies, options_.rope.pairing, position);
        }
        AppendStored(std::vector<float>(key.begin(), key.end()), spec.dtype, &values.k[l]);
        if (spec.latent) {
          TakeValue(spec, values.k[l], &values.v[l]);
          continue;
        }
        std::vector<float> value;
        for (int64_t d = 0; d < spec.v_head_dim; ++d)
          value.push_back(static_cast<float>(v.Get(input, h, d)));
        AppendStored(std::move(value), spec.value_dtype(), &values.v[l]);
      }
    }
  }
  appended_[l] = 1;
  SendLayer(l);
  return Choose(layer);
}

double KVModel::StoredKeyBound(int64_t layer, double value) const {
  if (ModeOf(static_cast<size_t>(layer)) != RopeMode::kNormal) return 0;
  const DType dtype = options_.layers[static_cast<size_t>(layer)].dtype;
  // One unit in the last place where the two roundings fall apart, and the float32 rotation's own
  // error; no element that tests store is above kLargestKey.
  constexpr double kLargestKey = 16;
  const double rotation = kLargestKey * 8 * kEpsF32;
  // One code, and the last bit of the scale.
  if (dtype == DType::kI8) return kLargestKey / 127 + std::abs(value) * 0x1p-15 + rotation;
  if (dtype == DType::kF8E4M3)
    return std::abs(value) * (0x1p-3 + 0x1p-15) + kLargestKey / 448 * 0x1p-9 + rotation;
  return 2 * HalfUlp(dtype) * (std::abs(value) + SmallestNormal(dtype)) + rotation;
}

// Keys of all tokens of the sequence as attention sees them: [token][kv head][D].
KVModel::TokenRows KVModel::KeysOf(const Sequence& sequence, size_t layer) const {
  const size_t dk = static_cast<size_t>(options_.layers[layer].qk_head_dim);
  TokenRows keys;
  for (size_t j = 0; j < sequence.tokens.size(); ++j) {
    const std::vector<float>& stored = sequence.tokens[j].values->k[layer];
    keys.emplace_back(stored.begin(), stored.end());
    if (ModeOf(layer) != RopeMode::kInline) continue;
    for (size_t at = 0; at < stored.size(); at += dk) {
      const std::vector<double> turned =
          RotateReference(std::span(keys[j]).subspan(at, dk), FrequenciesOf(sequence, layer),
                          options_.rope.pairing, static_cast<int64_t>(j));
      std::copy(turned.begin(), turned.end(), keys[j].begin() + static_cast<ptrdiff_t>(at));
    }
  }
  return keys;
}

KVModel::TokenRows KVModel::ValuesOf(const Sequence& sequence, size_t layer) {
  TokenRows values;
  for (const Token& token : sequence.tokens) {
    const std::vector<float>& stored = token.values->v[layer];
    values.emplace_back(stored.begin(), stored.end());
  }
  return values;
}

// How far a kernel's q.k may be off, relative to the product of their norms.
double KVModel::ScoreError(const AttentionLayerSpec& spec) const {
  // Both rotations and the chain over the head dimension in float32.
  double error = static_cast<double>(2 * spec.qk_head_dim + 16) * kEpsF32;
  // q, and a key that is rotated at use, are rounded to bfloat16 where products are taken in pairs.
  if (Computed(spec.dtype) == DType::kBF16) error += 2 * kEpsBF16;
  if (options_.rope.mode != RopeMode::kNormal || spec.latent) return error;
  // A rotated key may have been rounded to the other neighbour when it was stored: for codes by a
  // step of the head's largest element, which is no more than its norm.
  const double root = std::sqrt(static_cast<double>(spec.qk_head_dim));
  if (spec.dtype == DType::kI8) return error + root / 127;
  if (spec.dtype == DType::kF8E4M3) return error + 0x1p-3 + root * 0x1p-9 / 448;
  return error + 2 * HalfUlp(spec.dtype);
}

// One row and query head: softmax of the scores over the visible keys, values weighted by it.
void KVModel::AttendHead(const HeadArguments& head, double* lse, std::span<double> o) {
  const AttentionLayerSpec& spec = *head.spec;
  const size_t dk = static_cast<size_t>(spec.qk_head_dim);
  std::fill(o.begin(), o.end(), 0.0);
  if (head.visible.empty() && head.head_sink == nullptr) {
    *lse = -std::numeric_limits<double>::infinity();
    last_bounds_.o.insert(last_bounds_.o.end(), o.size(), 0.0);
    last_bounds_.lse.push_back(0.0);
    return;
  }
  std::vector<double> scores;
  double largest = -std::numeric_limits<double>::infinity();
  double worst = 0;  // error of any score
  const double query_norm =
      std::inner_product(head.query.begin(), head.query.end(), head.query.begin(), 0.0);
  for (const size_t j : head.visible) {
    const bool is_sink = static_cast<int64_t>(j) < head.sink_end;
    const std::vector<double>& query = is_sink ? head.sink_query : head.query;
    double sum = 0;
    double key_norm = 0;
    for (size_t d = 0; d < dk; ++d) {
      const double key = (*head.keys)[j][head.kv_head * dk + d];
      sum += query[d] * key;
      key_norm += key * key;
    }
    double score = sum * head.sm_scale;
    if (spec.soft_cap > 0) score = spec.soft_cap * std::tanh(score / spec.soft_cap);
    scores.push_back(score);
    largest = std::max(largest, score);
    // Norms, not elements: a rotated element's error is relative to the pair that it was made from.
    const double size = std::sqrt(query_norm * key_norm) * std::abs(head.sm_scale);
    worst = std::max(worst, size * ScoreError(spec));
  }
  worst += spec.soft_cap * 8 * kEpsF32;
  double total = 0;
  if (head.head_sink != nullptr) {
    largest = std::max(largest, static_cast<double>(*head.head_sink));
    total = std::exp(static_cast<double>(*head.head_sink) - largest);
  }
  const size_t dv = o.size();
  std::vector<double> size(dv);
  double peak = 0;
  for (size_t i = 0; i < head.visible.size(); ++i) {
    const size_t j = head.visible[i];
    const double p = std::exp(scores[i] - largest);
    total += p;
    for (size_t d = 0; d < dv; ++d) {
      const double value = (*head.values)[j][head.kv_head * dv + d];
      o[d] += p * value;
      size[d] += p * std::abs(value);
      peak = std::max(peak, p * std::abs(value));
    }
  }
  *lse = (largest + std::log(total)) / std::log(2.0);
  // Weights of int8 values are integers: half a step of the largest for each key.
  const double step = spec.value_dtype() == DType::kI8
                          ? 0.501 / 32767 * static_cast<double>(head.visible.size()) * peak / total
                          : 0;
  // exp2 of float32 arguments of some tens, the chain over keys, and p rounded to bfloat16 above
  // the fraction.
  const double weights = std::expm1(2 * worst) +
                         (static_cast<double>(head.visible.size()) + 256) * kEpsF32 +
                         (Computed(spec.value_dtype()) == DType::kBF16 ? 2 * kEpsBF16 : 0);
  for (size_t d = 0; d < dv; ++d) {
    o[d] /= total;
    last_bounds_.o.push_back(weights * size[d] / total + step +
                             HalfUlp(head.output_dtype) * 2 * std::abs(o[d]) +
                             SmallestNormal(head.output_dtype) * kEpsF16);
  }
  last_bounds_.lse.push_back((worst + weights) * 2 + std::abs(*lse) * 4 * kEpsF32);
}

void KVModel::TurnQuery(const Sequence& sequence, size_t layer, int64_t position, Rotated rotated,
                        HeadArguments* head) const {
  RopeFrequencies frequencies = FrequenciesOf(sequence, layer);
  const AttentionLayerSpec& spec = options_.layers[layer];
  const RopePairing pairing = (spec.rope ? *spec.rope : options_.rope).pairing;
  const int64_t slid = sequence.SlidAt(position);
  const std::vector<double> query = head->query;
  if (spec.latent) {  // the rope part is the last one
    frequencies.amplitude = 1;
    const int64_t rope_dim = spec.qk_head_dim - spec.v_head_dim;
    const std::vector<double> part(query.end() - rope_dim, query.end());
    const std::vector<double> turned = RotateReference(part, frequencies, pairing, -slid);
    std::copy(turned.begin(), turned.end(), head->sink_query.end() - rope_dim);
    return;
  }
  if (rotated == Rotated::kYes) {
    frequencies.amplitude = 1;  // it is in the query already
    head->sink_query = RotateReference(query, frequencies, pairing, -slid);
  } else {
    head->query = RotateReference(query, frequencies, pairing, position);
    head->sink_query = RotateReference(query, frequencies, pairing, position - slid);
  }
}

int64_t KVModel::BaseOf(size_t member) const {
  const Sequence& sequence = sequences_.at(batch_[member]);
  return sequence.length() - (sequence.nodes.empty() ? batch_lengths_[member] : 0);
}

std::vector<int64_t> KVModel::NewTokensUpTo(size_t member, int64_t n) const {
  const Sequence& sequence = sequences_.at(batch_[member]);
  std::vector<int64_t> tokens;
  if (sequence.nodes.empty()) {
    tokens.resize(static_cast<size_t>(n + 1));
    std::iota(tokens.begin(), tokens.end(), 0);
    return tokens;
  }
  const int64_t first = sequence.tree_size() - batch_lengths_[member];
  for (const int64_t node : sequence.PathTo(first + n))
    tokens.push_back(std::max<int64_t>(node - first, -1));
  return tokens;
}

Status KVModel::CheckMask(const TensorView* mask) const {
  if (mask == nullptr) return Status();
  if (is_blending_) return Bad(StatusCode::kBadState, "a mask in a forward that blends");
  int64_t count = 0;
  for (const int64_t length : batch_lengths_) count += length * length;
  if (mask->dtype() == DType::kU8 && mask->rank() == 1 && mask->dim(0) == count &&
      mask->is_contiguous())
    return Status();
  return Bad(StatusCode::kBadArgument, "mask");
}

bool KVModel::MaskShows(const TensorView* mask, size_t member, int64_t n, int64_t token) const {
  if (mask == nullptr) return true;
  int64_t first = 0;
  for (size_t m = 0; m < member; ++m) first += batch_lengths_[m] * batch_lengths_[m];
  return mask->data_as<uint8_t>()[first + n * batch_lengths_[member] + token] != 0;
}

void KVModel::AttendRows(int64_t layer, Sees sees, const Rows& q, Rotated rotated, const Rows& o,
                         const TensorView* lse, double sm_scale, const TensorView* mask) {
  const size_t l = static_cast<size_t>(layer);
  const AttentionLayerSpec& spec = options_.layers[l];
  const int64_t group_size = spec.num_qo_heads / spec.num_kv_heads;
  std::vector<double> query(static_cast<size_t>(spec.qk_head_dim));
  std::vector<double> output(static_cast<size_t>(spec.v_head_dim));
  last_bounds_ = Bounds();
  int64_t row = 0;
  for (size_t i = 0; i < batch_.size(); ++i) {
    Sequence sequence = SequenceOfRow(i, 0);
    const bool is_tree = !sequences_.at(batch_[i]).nodes.empty();
    TokenRows keys = KeysOf(sequence, l);
    TokenRows values = ValuesOf(sequence, l);
    const int64_t base = BaseOf(i);
    for (int64_t n = 0; n < batch_lengths_[i]; ++n, ++row) {
      const int64_t input = InputOf(row);
      if (input < 0 || !GoesOn(row)) continue;
      if (is_tree) {
        sequence = SequenceOfRow(i, n);
        keys = KeysOf(sequence, l);
        values = ValuesOf(sequence, l);
      }
      const int64_t position = positions_[static_cast<size_t>(row)];
      const std::vector<int64_t> new_tokens = NewTokensUpTo(i, n);
      const auto is_shown = [&](int64_t p) {
        const int64_t token = p < base ? -1 : new_tokens[static_cast<size_t>(p - base)];
        return token < 0 || (sees == Sees::kUpToOwn && MaskShows(mask, i, n, token));
      };
      for (int64_t h = 0; h < spec.num_qo_heads; ++h) {
        for (size_t d = 0; d < query.size(); ++d)
          query[d] = q.Get(input, h, static_cast<int64_t>(d));
        HeadArguments head{.spec = &spec,
                           .kv_head = static_cast<size_t>(h / group_size),
                           .visible = {},
                           .sink_end = sequence.sinks,
                           .query = query,
                           .sink_query = query,
                           .sm_scale = sm_scale,
                           .head_sink = spec.head_sinks.empty()
                                            ? nullptr
                                            : &spec.head_sinks[static_cast<size_t>(h)],
                           .keys = &keys,
                           .values = &values,
                           .output_dtype = o.view->dtype()};
        for (int64_t p = 0; p <= position; ++p) {
          if (sequence.Sees(position, p, spec.window) && is_shown(p))
            head.visible.push_back(static_cast<size_t>(p));
        }
        TurnQuery(sequence, l, position, rotated, &head);
        double log_sum = 0;
        AttendHead(head, &log_sum, output);
        for (size_t d = 0; d < output.size(); ++d)
          o.Set(input, h, static_cast<int64_t>(d), output[d]);
        if (lse != nullptr) {
          lse->data_as<float>()[input * lse->stride(0) + h] = static_cast<float>(log_sum);
        }
      }
    }
  }
}

// ---------------------------------------------------------------------- debugging

Status KVModel::CheckDebugRows(const char* name, const TensorView& view, int64_t count, Stored of,
                               bool of_latent) const {
  const AttentionLayerSpec* first = nullptr;
  int64_t layer_count = 0;
  for (const AttentionLayerSpec& layer : options_.layers) {
    if (layer.latent != of_latent) continue;
    if (first == nullptr) first = &layer;
    ++layer_count;
    const bool same = layer.num_kv_heads == first->num_kv_heads &&
                      layer.qk_head_dim == first->qk_head_dim &&
                      layer.v_head_dim == first->v_head_dim;
    const DType stored = of == Stored::kKeys ? layer.dtype : layer.value_dtype();
    const bool dtype_fits =
        view.dtype() == DType::kF32 || (view.dtype() == stored && !IsQuantised(stored));
    if (!same || !dtype_fits) return Bad(StatusCode::kBadArgument, "layers differ");
  }
  if (first == nullptr) return Bad(StatusCode::kBadArgument, "no layers of that kind");
  const int64_t dim = of == Stored::kKeys ? first->qk_head_dim : first->v_head_dim;
  const bool shape_fits = view.rank() == 4 && view.stride(3) == 1 && view.dim(0) == layer_count &&
                          view.dim(1) == count && view.dim(2) == first->num_kv_heads &&
                          view.dim(3) == dim;
  if (shape_fits) return Status();
  return Bad(StatusCode::kBadArgument, std::string(name) + " is " + view.ToString());
}

// Bits go through float32, so a signalling NaN comes out quiet.
Status KVModel::ExportKV(int64_t seq_id, int64_t layer, int64_t start, const LayerKV& to) {
  if (!HasSequence(seq_id)) return Bad(StatusCode::kUnknownSequence, "no such sequence");
  const Sequence& sequence = sequences_.at(seq_id);
  const int64_t count = to.k.rank() == 3 ? to.k.dim(0) : 0;
  if (start >= 0 && count > sequence.length() - start && !sequence.is_committed())
    return Bad(StatusCode::kBadState, "is not committed");
  if (start < 0 || count < 1 || count > sequence.length() - start)
    return Bad(StatusCode::kBadArgument, "range");
  if (layer < 0 || layer >= static_cast<int64_t>(options_.layers.size()))
    return Bad(StatusCode::kBadArgument, "layer");
  const size_t l = static_cast<size_t>(layer);
  for (int64_t p = start; p < start + count; ++p) {
    if (!IsHeld(sequence, p, group_of_layer_[l])) return Bad(StatusCode::kBadArgument, "not held");
  }
  for (int64_t p = 0; p < count; ++p) {
    const TokenValues& values = *sequence.tokens[static_cast<size_t>(start + p)].values;
    StoreRow(values.k[l], to.k, to.k_scale, p);
    if (!options_.layers[l].latent) StoreRow(values.v[l], to.v, to.v_scale, p);
  }
  return Status();
}

// REQUIRES: tensors of the right shapes.
Status KVModel::ImportKV(int64_t seq_id, std::span<const KVBlock> blocks) {
  std::vector<int64_t> tokens;
  for (const KVBlock& block : blocks) tokens.push_back(block[0].k.dim(0));
  return Import(seq_id, {.blocks = blocks, .tokens = tokens}, false);
}

Status KVModel::ImportVisibleKV(int64_t seq_id, const KVImport& import) {
  return Import(seq_id, import, true);
}

Status KVModel::Import(int64_t seq_id, const KVImport& import, bool leaves_out) {
  if (forward_) return Bad(StatusCode::kBadState, "a forward is open");
  if (!HasSequence(seq_id)) return Bad(StatusCode::kUnknownSequence, "no such sequence");
  if (!sequences_.at(seq_id).is_committed()) return Bad(StatusCode::kBadState, "is not committed");
  const int64_t count = std::accumulate(import.tokens.begin(), import.tokens.end(), int64_t{0});
  if (count < 1) return Bad(StatusCode::kBadArgument, "nothing to import");
  const int64_t end = sequences_.at(seq_id).length() + count;
  std::vector<TokenRange> absent(groups_.size());
  for (size_t g = 0; leaves_out && g < groups_.size(); ++g)
    absent[g] = HiddenTokens(import.windows, groups_[g].window, end);
  const size_t old_length = sequences_.at(seq_id).tokens.size();
  QUIRE_RETURN_IF_ERROR(CheckRoom());
  Sequence& sequence = sequences_.at(seq_id);
  AddPlaces(sequence, count, absent);
  if (leaves_out && !(import.windows == WindowSettings())) {
    static_cast<WindowSettings&>(sequence) = import.windows;
  } else {
    sequence.Slide();
  }
  for (size_t l = 0; l < options_.layers.size(); ++l) {
    int64_t position = static_cast<int64_t>(old_length);
    const TokenRange hidden = absent[group_of_layer_[l]];
    for (size_t b = 0; b < import.blocks.size(); ++b) {
      int64_t row = 0;
      for (const int64_t block_end = position + import.tokens[b]; position < block_end;
           ++position) {
        if (hidden.begin <= position && position < hidden.end) continue;
        StoreTokens(sequence, static_cast<size_t>(position), l,
                    SomeTokens(import.blocks[b][l], row++, 1));
      }
    }
  }
  FreeHidden();
  return Status();
}

Status KVModel::GetDebug(int64_t seq_id, int64_t start, int64_t end, const TensorView& k,
                         const TensorView* v) const {
  if (!HasSequence(seq_id)) return Bad(StatusCode::kUnknownSequence, "no such sequence");
  const bool latent = v == nullptr;
  const Sequence& sequence = sequences_.at(seq_id);
  const int64_t committed = sequence.length();
  const int64_t length = committed + sequence.tree_size();
  if (start >= 0 && end > length && sequence.pending > 0)
    return Bad(StatusCode::kBadState, "has pending tokens");
  if (start < 0 || start >= end || end > length) return Bad(StatusCode::kBadArgument, "range");
  for (size_t l = 0; l < options_.layers.size(); ++l) {
    if (options_.layers[l].latent != latent) continue;
    for (int64_t p = start; p < std::min(end, committed); ++p) {
      if (!IsHeld(sequence, p, group_of_layer_[l]))
        return Bad(StatusCode::kBadArgument, "not held");
    }
  }
  QUIRE_RETURN_IF_ERROR(CheckDebugRows("k", k, end - start, Stored::kKeys, latent));
  if (!latent) QUIRE_RETURN_IF_ERROR(CheckDebugRows("v", *v, end - start, Stored::kValues, false));
  int64_t layer = 0;  // of the tensors
  for (size_t l = 0; l < options_.layers.size(); ++l) {
    const AttentionLayerSpec& spec = options_.layers[l];
    if (spec.latent != latent) continue;
    const auto store = [&](const TensorView& to, const std::vector<float>& row, int64_t p,
                           int64_t dim) {
      for (size_t i = 0; i < row.size(); ++i) {
        const int64_t h = static_cast<int64_t>(i) / dim;
        const int64_t d = static_cast<int64_t>(i) % dim;
        StoreElement(to, layer * to.stride(0) + (p - start) * to.stride(1) + h * to.stride(2) + d,
                     row[i]);
      }
    };
    for (int64_t p = start; p < end; ++p) {
      const TokenValues& values = p < committed
                                      ? *sequence.tokens[static_cast<size_t>(p)].values
                                      : *sequence.nodes[static_cast<size_t>(p - committed)].values;
      store(k, values.k[l], p, spec.qk_head_dim);
      if (!latent) store(*v, values.v[l], p, spec.v_head_dim);
    }
    ++layer;
  }
  return Status();
}

Status KVModel::DebugGetKV(int64_t seq_id, int64_t start, int64_t end, const TensorView& k,
                           const TensorView& v) {
  return GetDebug(seq_id, start, end, k, &v);
}
Status KVModel::DebugGetKVMLA(int64_t seq_id, int64_t start, int64_t end, const TensorView& kv) {
  return GetDebug(seq_id, start, end, WithHead(kv), nullptr);
}
Status KVModel::DebugSetKV(int64_t seq_id, int64_t start, const TensorView& k,
                           const TensorView& v) {
  return SetDebug(seq_id, start, k, &v);
}
Status KVModel::DebugSetKVMLA(int64_t seq_id, int64_t start, const TensorView& kv) {
  return SetDebug(seq_id, start, WithHead(kv), nullptr);
}

Status KVModel::SetDebug(int64_t seq_id, int64_t start, const TensorView& k, const TensorView* v) {
  if (!HasSequence(seq_id)) return Bad(StatusCode::kUnknownSequence, "no such sequence");
  if (InBatch(seq_id)) return Bad(StatusCode::kBadState, "in the open forward");
  Sequence& sequence = sequences_.at(seq_id);
  if (!sequence.is_committed()) return Bad(StatusCode::kBadState, "is not committed");
  const int64_t length = static_cast<int64_t>(sequence.tokens.size());
  const int64_t count = k.rank() == 4 ? k.dim(1) : 0;
  if (start < 0 || count < 1 || count > length - start)
    return Bad(StatusCode::kBadArgument, "range");
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (int64_t p = start; p < length; ++p) {
      if (!IsHeld(sequence, p, g)) return Bad(StatusCode::kBadArgument, "not held");
    }
  }
  const bool latent = v == nullptr;
  QUIRE_RETURN_IF_ERROR(CheckDebugRows("k", k, count, Stored::kKeys, latent));
  if (!latent) QUIRE_RETURN_IF_ERROR(CheckDebugRows("v", *v, count, Stored::kValues, false));
  // What others see of the tokens from `start` on stays as it is.
  if (IsShared(seq_id, start)) {
    QUIRE_RETURN_IF_ERROR(CheckRoom());
    ++calls_;
    for (int64_t p = start; p < length; ++p) {
      Token& token = sequence.tokens[static_cast<size_t>(p)];
      token.values = std::make_shared<TokenValues>(*token.values);
      token.call = calls_;
    }
    NoteGathered(sequence, start);
  }
  for (int64_t p = start; p < start + count; ++p) {
    const Token& token = sequence.tokens[static_cast<size_t>(p)];
    int64_t layer = -1;  // of the tensors
    for (size_t l = 0; l < options_.layers.size(); ++l) {
      if (options_.layers[l].latent != latent) continue;
      ++layer;
      const auto set = [&](const TensorView& from, DType dtype, std::vector<float>* to) {
        to->clear();
        for (int64_t h = 0; h < from.dim(2); ++h) {
          const int64_t first =
              layer * from.stride(0) + (p - start) * from.stride(1) + h * from.stride(2);
          std::vector<float> head;
          for (int64_t d = 0; d < from.dim(3); ++d) head.push_back(LoadElement(from, first + d));
          AppendStored(head, dtype, to);
        }
      };
      set(k, options_.layers[l].dtype, &token.values->k[l]);
      if (latent) {
        TakeValue(options_.layers[l], token.values->k[l], &token.values->v[l]);
      } else {
        set(*v, options_.layers[l].value_dtype(), &token.values->v[l]);
      }
    }
  }
  FreeHidden();
  return Status();
}

// A token is shared only together with all before it, so one answers for what is behind it.
bool KVModel::IsShared(int64_t seq_id, int64_t position) const {
  const auto at = static_cast<size_t>(position);
  const TokenValues* const values = sequences_.at(seq_id).tokens[at].values.get();
  return std::ranges::any_of(sequences_, [&](const auto& other) {
    return other.first != seq_id && other.second.length() > position &&
           other.second.tokens[at].values.get() == values;
  });
}

}  // namespace quire
