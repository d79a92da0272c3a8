#include "kernels/testing/attention_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "kernels/row_view.h"
#include "tensor/half.h"

namespace quire {
namespace {

constexpr uint8_t kPoison = 0xFF;  // bytes of a NaN in every element type
constexpr size_t kGuardBytes = 256;

uint64_t Mix(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

void StoreElement(float value, DType dtype, std::byte* to) {
  if (dtype == DType::kF32) {
    std::memcpy(to, &value, sizeof value);
  } else {
    const uint16_t bits = dtype == DType::kBF16 ? F32ToBf16(value) : F32ToF16(value);
    std::memcpy(to, &bits, sizeof bits);
  }
}

// 64-byte aligned memory full of poison, with a guard after it.
class PoisonedMemory {
 public:
  explicit PoisonedMemory(size_t bytes) : bytes_(bytes), memory_(bytes + 64 + kGuardBytes) {
    std::memset(memory_.data(), kPoison, memory_.size());
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    data_ = memory_.data() + (64 - address % 64) % 64;
  }
  std::byte* data() { return data_; }
  void CheckGuard() const {
    for (const std::byte* p = data_ + bytes_; p < memory_.data() + memory_.size(); ++p) {
      QUIRE_CHECK(*p == std::byte{kPoison}) << "written " << p - data_ - bytes_ << " bytes behind";
    }
  }

 private:
  size_t bytes_;
  std::vector<std::byte> memory_;
  std::byte* data_;
};

}  // namespace

float TokenValue(int64_t content, int64_t position, int kind, int head, int dim) {
  const uint64_t token =
      Mix(static_cast<uint64_t>(content) * 1000003 + static_cast<uint64_t>(position));
  const uint64_t bits =
      Mix(token ^ Mix(static_cast<uint64_t>(kind) << 40 | static_cast<uint64_t>(head) << 20 |
                      static_cast<uint64_t>(dim)));
  const float uniform = static_cast<float>(static_cast<int64_t>(bits >> 40) - (1 << 23)) * 0x1p-23F;
  return uniform * 1.7320508F;
}

AttentionCase::AttentionCase(const CaseSpec& spec)
    : spec_(spec), random_state_(Mix(spec.layout_seed)) {
  args_.pages.layout = {spec.dtype,     spec.kv_heads,    spec.qk_dim, spec.v_dim,
                        spec.page_size, spec.value_dtype, spec.latent};
  args_.num_qo_heads = spec.kv_heads * spec.group;
  args_.cached_only = spec.cached_only;
  args_.layer_window = spec.layer_window;
  args_.soft_cap = spec.soft_cap;
  for (int h = 0; spec.head_sinks && h < args_.num_qo_heads; ++h)
    head_sinks_.push_back(2.0F * TokenValue(0, 0, 3, h, 0));
  args_.head_sinks_log2 = head_sinks_.empty() ? nullptr : head_sinks_.data();
  args_.scale_log2 = spec.sharpness * 1.44269504F / std::sqrt(static_cast<float>(spec.qk_dim));
  BuildPages();
  BuildPlan();
  BuildQueries();
  FreeUnseenPages();
}

// Entries of which no row sees a position lose their page, as when a window has slid past them.
void AttentionCase::FreeUnseenPages() {
  std::map<const PageEntry*, bool> seen;  // by any row of any sequence
  for (const AttentionSequence& sequence : sequences_) {
    for (int64_t i = 0; i < sequence.run_count; ++i) {
      const PageRun& run = sequence.runs[i];
      int64_t entry = 0;
      for (int64_t p = run.begin; p < run.end; ++p) {
        while (entry + 1 < run.entry_count && run.entries[entry + 1].start <= p) ++entry;
        bool& is_seen = seen[run.entries + entry];
        for (int64_t r = 0; r < sequence.row_count && !is_seen; ++r)
          is_seen = Sees(ViewOf(args_, sequence, r), p);
      }
    }
  }
  for (const auto& [key, store] : stores_) {
    for (PageEntry& entry : store->entries) {
      const auto found = seen.find(&entry);
      if (found != seen.end() && !found->second) entry.page = -1;
    }
  }
}

uint64_t AttentionCase::Random() { return Mix(random_state_++); }

// Room for a page per page range and fork.
int64_t AttentionCase::PageCountMax() const {
  int64_t count = 0;
  for (const SequenceSpec& sequence : spec_.sequences) {
    const int64_t length = std::max<int64_t>(sequence.base + sequence.rows, 0);
    const double forks = spec_.fork_probability * static_cast<double>(length) * 1.5 + 16;
    count += length / spec_.page_size + static_cast<int64_t>(forks) + 4;
  }
  return count;
}

void AttentionCase::BuildPages() {
  const KVLayout& layout = args_.pages.layout;
  const auto count = static_cast<size_t>(PageCountMax());
  pages_.assign(count * layout.page_bytes(), std::byte{kPoison});
  v_nonfinite_.assign(count * static_cast<size_t>(layout.tiles_per_page()), 1);
  is_open_.assign(v_nonfinite_.size(), 0);
  free_pages_.resize(count);
  std::iota(free_pages_.begin(), free_pages_.end(), 0);
  for (size_t i = count; i > 1; --i) std::swap(free_pages_[i - 1], free_pages_[Random() % i]);
  args_.pages.base = pages_.data();
  args_.pages.v_nonfinite = v_nonfinite_.data();
  for (size_t s = 0; s < spec_.sequences.size(); ++s) {
    const SequenceSpec& sequence = spec_.sequences[s];
    std::vector<PageRun> runs;
    int64_t begin = 0;
    const auto add = [&](int64_t content, int64_t end) {
      if (begin >= end) return;
      const Store& store = StoreOf(content, begin, end);
      runs.insert(runs.end(), store.runs.begin(), store.runs.end());
      begin = end;
    };
    for (const SequenceSpec::Prefix& prefix : sequence.prefixes) {
      add(prefix.content, prefix.end_segment * kSegmentPositions);
    }
    // Content of its own is never shared, even if two sequences have the same.
    const int64_t end = sequence.base + sequence.rows;
    if (begin < end) {
      const Store& store = StoreOf(-1 - static_cast<int64_t>(s), begin, end);
      runs.insert(runs.end(), store.runs.begin(), store.runs.end());
    }
    runs_.push_back(runs);
  }
}

const AttentionCase::Store& AttentionCase::StoreOf(int64_t content, int64_t begin, int64_t end) {
  std::unique_ptr<Store>& found = stores_[{content, begin}];
  if (found != nullptr) return *found;
  found = std::make_unique<Store>();
  Store& store = *found;
  const bool is_private = content < 0;
  store.content = is_private ? spec_.sequences[static_cast<size_t>(-1 - content)].content : content;
  store.begin = begin;
  store.end = end;
  std::vector<std::pair<int64_t, int64_t>> cuts;  // run begin, entry
  for (int64_t p = begin; p < end; ++p) {
    const bool starts_range = p == begin || p % spec_.page_size == 0;
    const bool forks = Uniform() < spec_.fork_probability;
    if (starts_range || forks) {
      // Now and then an entry goes on in the page of the entry before.
      const bool same_page = !starts_range && Random() % 4 == 0;
      int32_t page = 0;
      if (same_page) {
        page = store.entries.back().page;
      } else {
        QUIRE_CHECK(!free_pages_.empty());
        page = free_pages_.back();
        free_pages_.pop_back();
      }
      store.entries.push_back({p, page});
    }
    if (p == begin || Uniform() < spec_.run_probability) {
      cuts.emplace_back(p, static_cast<int64_t>(store.entries.size()) - 1);
    }
    WriteToken({store.entries.back().page, static_cast<int32_t>(p % spec_.page_size)},
               store.content, p);
  }
  for (size_t i = 0; i < cuts.size(); ++i) {
    const int64_t run_end = i + 1 < cuts.size() ? cuts[i + 1].first : end;
    // Entries after the run's end may follow; the run is clipped.
    const int64_t count = static_cast<int64_t>(store.entries.size()) - cuts[i].second;
    const int64_t needed =
        std::count_if(store.entries.begin() + cuts[i].second, store.entries.end(),
                      [&](const PageEntry& e) { return e.start < run_end; });
    store.runs.push_back({store.entries.data() + cuts[i].second, i % 2 == 0 ? needed : count,
                          cuts[i].first, run_end});
  }
  if (is_private && spec_.junk != 0.0F) WriteJunk(store);
  return store;
}

void AttentionCase::WriteToken(const AppendTarget& target, int64_t content, int64_t position) {
  std::vector<float> k;
  std::vector<float> v;
  for (int head = 0; head < spec_.kv_heads; ++head) {
    for (int d = 0; d < spec_.qk_dim; ++d) k.push_back(TokenValue(content, position, 0, head, d));
    for (int d = 0; d < spec_.v_dim; ++d) v.push_back(TokenValue(content, position, 1, head, d));
  }
  for (const Special& special : spec_.specials) {
    if (special.content != content || special.position != position) continue;
    (special.in_value && !spec_.latent ? v : k)[0] = special.value;
  }
  uint8_t& is_open = is_open_[static_cast<size_t>(target.page) *
                                  static_cast<size_t>(args_.pages.layout.tiles_per_page()) +
                              static_cast<size_t>(target.slot / kTilePositions)];
  WriteSlot(args_.pages, target, DType::kF32, k.data(), v.data(), is_open == 0);
  is_open = 1;
}

// Tokens of somebody else after the end of the last page, as after a fork or PopN.
void AttentionCase::WriteJunk(const Store& store) {
  const int32_t page = store.entries.back().page;
  for (int64_t p = store.end; p % spec_.page_size != 0; ++p) {
    const std::vector<float> k(static_cast<size_t>(spec_.kv_heads * spec_.qk_dim), spec_.junk);
    const std::vector<float> v(static_cast<size_t>(spec_.kv_heads * spec_.v_dim), spec_.junk);
    const AppendTarget target = {page, static_cast<int32_t>(p % spec_.page_size)};
    uint8_t& is_open = is_open_[static_cast<size_t>(page) *
                                    static_cast<size_t>(args_.pages.layout.tiles_per_page()) +
                                static_cast<size_t>(target.slot / kTilePositions)];
    WriteSlot(args_.pages, target, DType::kF32, k.data(), v.data(), is_open == 0);
    is_open = 1;
  }
}

void AttentionCase::BuildPlan() {
  const size_t count = spec_.sequences.size();
  plan_order_.resize(count);
  std::iota(plan_order_.begin(), plan_order_.end(), size_t{0});
  const auto key = [&](size_t s) {  // sharers adjacent, at every depth
    std::vector<int64_t> contents;
    for (const SequenceSpec::Prefix& prefix : spec_.sequences[s].prefixes) {
      contents.push_back(prefix.content);
    }
    return contents;
  };
  std::stable_sort(plan_order_.begin(), plan_order_.end(),
                   [&](size_t a, size_t b) { return key(a) < key(b); });
  // Rows of q in an order of their own: the caller's batch order.
  std::vector<size_t> row_order(count);
  std::iota(row_order.begin(), row_order.end(), size_t{0});
  for (size_t i = count; i > 1; --i) std::swap(row_order[i - 1], row_order[Random() % i]);
  std::vector<int64_t> first_row(count);
  for (const size_t s : row_order) {
    first_row[s] = args_.row_count;
    args_.row_count += spec_.sequences[s].rows;
  }
  for (const size_t s : plan_order_) {
    const SequenceSpec& spec = spec_.sequences[s];
    sequences_.push_back({first_row[s], spec.rows, spec.base, runs_[s].data(),
                          static_cast<int64_t>(runs_[s].size()), 0, nullptr, 0, spec.window});
  }
  for (size_t depth = 0; spec_.use_spans && depth < 8; ++depth) {
    for (size_t i = 0; i < count;) {
      const SequenceSpec& first = spec_.sequences[plan_order_[i]];
      size_t end = i + 1;
      if (first.prefixes.size() <= depth) {
        i = end;
        continue;
      }
      const auto same = [&](size_t j) {
        const SequenceSpec& other = spec_.sequences[plan_order_[j]];
        if (other.prefixes.size() <= depth) return false;
        for (size_t k = 0; k <= depth; ++k) {
          if (other.prefixes[k].content != first.prefixes[k].content) return false;
        }
        return true;
      };
      while (end < count && same(end)) ++end;
      const int64_t begin_segment = depth == 0 ? 0 : first.prefixes[depth - 1].end_segment;
      const bool adjacent = sequences_[i].private_segment == begin_segment;
      if (end - i >= 2 && adjacent) {
        spans_.push_back({static_cast<int64_t>(i), static_cast<int64_t>(end - i), begin_segment,
                          first.prefixes[depth].end_segment});
        for (size_t j = i; j < end; ++j) {
          sequences_[j].private_segment = first.prefixes[depth].end_segment;
        }
      }
      i = end;
    }
  }
  std::stable_sort(spans_.begin(), spans_.end(), [](const SharedSpan& a, const SharedSpan& b) {
    return a.segment_begin < b.segment_begin;
  });
  args_.sequences = sequences_;
  args_.shared = spans_;
}

// The same rows as tiles.
void AttentionCase::BuildInlineAngles(size_t half) {
  const size_t positions = cos_table_.size() / half;
  const size_t tile_count = (positions + kTilePositions - 1) / kTilePositions;
  const size_t tile = 2 * kTilePositions * half;
  inline_tiles_.assign(tile_count * tile, 0);
  inline_leaves_.assign((tile_count + kAngleLeafTiles - 1) / kAngleLeafTiles, {});
  inline_leaf_view_.clear();
  for (const AngleLeaf& leaf : inline_leaves_) inline_leaf_view_.push_back(&leaf);
  inline_angles_ = {.leaves = inline_leaf_view_.data(), .pair_count = static_cast<int64_t>(half)};
  for (size_t t = 0; t < tile_count; ++t)
    inline_leaves_[t / kAngleLeafTiles].tiles[t % kAngleLeafTiles] = &inline_tiles_[t * tile];
  for (size_t p = 0; p < positions; ++p) {
    float* const cos = &inline_tiles_[p / kTilePositions * tile + p % kTilePositions * half];
    std::copy_n(&cos_table_[p * half], half, cos);
    std::copy_n(&sin_table_[p * half], half, cos + kTilePositions * half);
  }
}

void AttentionCase::BuildQueries() {
  const auto half = static_cast<size_t>(spec_.rotary_dim / 2);
  int64_t length = 1;
  for (const SequenceSpec& s : spec_.sequences) length = std::max(length, s.base + s.rows);
  for (int64_t p = 0; p < length; ++p) {
    for (size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(p) *
                           std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half));
      cos_table_.push_back(static_cast<float>(std::cos(angle)));
      sin_table_.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  const int heads = args_.num_qo_heads;
  const auto element_bytes = static_cast<size_t>(DTypeBytes(spec_.q_dtype));
  // A gap after each head and each row: strides are not what the shape suggests.
  args_.q.dtype = spec_.q_dtype;
  args_.q.head_stride = spec_.qk_dim + 3;
  args_.q.row_stride = heads * args_.q.head_stride + 5;
  q_.assign(static_cast<size_t>(args_.row_count * args_.q.row_stride) * element_bytes,
            std::byte{kPoison});
  args_.q.data = q_.data();
  angle_rows_.assign(static_cast<size_t>(args_.row_count), {cos_table_.data(), sin_table_.data()});
  sink_angle_rows_ = angle_rows_;
  for (size_t i = 0; i < sequences_.size(); ++i) {
    const int64_t content = spec_.sequences[plan_order_[i]].content;
    for (int64_t r = 0; r < sequences_[i].row_count; ++r) {
      const int64_t row = sequences_[i].first_row + r;
      const int64_t position = sequences_[i].base + r;
      for (int head = 0; head < heads; ++head) {
        for (int d = 0; d < spec_.qk_dim; ++d) {
          StoreElement(TokenValue(content, position, 2, head, d), spec_.q_dtype,
                       q_.data() + static_cast<size_t>(row * args_.q.row_stride +
                                                       head * args_.q.head_stride + d) *
                                       element_bytes);
        }
      }
      if (position < 0) continue;
      const size_t angle = static_cast<size_t>(position) * half;
      angle_rows_[static_cast<size_t>(row)] = {cos_table_.data() + angle,
                                               sin_table_.data() + angle};
      const int64_t slid = SlidAt(sequences_[i].window, position);
      const size_t sink_angle = static_cast<size_t>(position - slid) * half;
      sink_angle_rows_[static_cast<size_t>(row)] = {cos_table_.data() + sink_angle,
                                                    sin_table_.data() + sink_angle};
    }
  }
  const bool rotates_sinks = spec_.rotates_sinks && half > 0;
  args_.sink_angles = rotates_sinks ? sink_angle_rows_.data() : nullptr;
  args_.rotary = {angle_rows_.data(), spec_.rotary_dim, spec_.interleaved};
  if (spec_.latent) {
    args_.rotary.angles = nullptr;
    args_.rotary.first_dim = spec_.v_dim;
  }
  if (!spec_.inline_keys) return;
  BuildInlineAngles(half);
  for (AttentionSequence& sequence : sequences_) {
    sequence.inline_angles = &inline_angles_;
  }
}

CaseOutput AttentionCase::Run(const Backend& backend, ParallelRunner& runner) const {
  return RunPlan(args_, backend, runner);
}

CaseOutput AttentionCase::RunWith(const float* q, const Backend& backend,
                                  ParallelRunner& runner) const {
  AttentionArgs args = args_;
  args.q = {q, DType::kF32, int64_t{args.num_qo_heads} * spec_.qk_dim, spec_.qk_dim};
  return RunPlan(args, backend, runner);
}

CaseOutput AttentionCase::RunRows(const Backend& backend, ParallelRunner& runner, int64_t begin,
                                  int64_t count) const {
  QUIRE_CHECK(sequences_.size() == 1);
  AttentionSequence part = sequences_[0];
  part.first_row += begin;
  part.base += begin;
  part.row_count = count;
  AttentionArgs args = args_;
  args.sequences = {&part, 1};
  return RunPlan(args, backend, runner);
}

CaseOutput AttentionCase::RunPlan(AttentionArgs args, const Backend& backend,
                                  ParallelRunner& runner) const {
  const std::span<const AttentionSequence> sequences = args.sequences;
  const auto heads = static_cast<size_t>(args.num_qo_heads);
  const auto rows = static_cast<size_t>(args.row_count);
  const auto v_dim = static_cast<size_t>(spec_.v_dim);
  const auto element_bytes = static_cast<size_t>(DTypeBytes(spec_.o_dtype));
  args.o.dtype = spec_.o_dtype;
  args.o.head_stride = spec_.v_dim;
  args.o.row_stride = static_cast<int64_t>(heads * v_dim);
  PoisonedMemory o(rows * heads * v_dim * element_bytes);
  PoisonedMemory lse(rows * heads * sizeof(float));
  PoisonedMemory scratch(backend.attention_scratch_bytes(
      args.pages.layout, args.num_qo_heads, args.row_count,
      static_cast<int64_t>(args.sequences.size()), runner.worker_count()));
  args.o.data = o.data();
  args.lse = reinterpret_cast<float*>(lse.data());
  args.lse_row_stride = static_cast<int64_t>(heads);
  args.scratch = scratch.data();
  backend.attention(args, runner);
  o.CheckGuard();
  lse.CheckGuard();
  scratch.CheckGuard();
  CaseOutput output;
  output.o.resize(sequences.size());
  output.lse.resize(sequences.size());
  for (size_t i = 0; i < sequences.size(); ++i) {
    const size_t row_bytes = heads * v_dim * element_bytes;
    const auto first = static_cast<size_t>(sequences[i].first_row);
    const auto count = static_cast<size_t>(sequences[i].row_count);
    output.o[plan_order_[i]].assign(o.data() + first * row_bytes,
                                    o.data() + (first + count) * row_bytes);
    output.lse[plan_order_[i]].assign(args.lse + first * heads, args.lse + (first + count) * heads);
  }
  return output;
}

}  // namespace quire
