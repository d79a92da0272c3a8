// Attention kernels of the best path (QUIRE_KERNELS names another) over pages in random order, full
// of random values. Several layers take turns, so that keys and values come from memory and not
// from the last cache, as they do in a model. New rows are a chain or the nodes of a token tree.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "base/random.h"
#include "bench_case.h"
#include "kernels/backend.h"
#include "quire/attention_kv_cache.h"
#include "tensor/host_memory.h"

namespace quire::bench {
namespace {

struct Shape {
  DType dtype = DType::kBF16;
  int64_t kv_heads = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t v_head_dim = 0;
  bool latent = false;  // one vector per position, which is key and value
  bool tree = false;    // the new rows are nodes of a binary tree, level by level
  int64_t sequences = 0;
  int64_t prefix = 0;  // positions that all sequences share, whole segments
  int64_t own = 0;     // positions of each sequence alone, its new rows included
  int64_t rows = 0;    // new rows of each sequence
  int64_t layers = 0;
  int threads = 0;
};

Shape ReadShape(const JsonValue& request) {
  Shape shape;
  shape.dtype = Require(ParseDType(Require(request.GetString("dtype"))));
  shape.kv_heads = Require(request.GetInt("kv_heads", 1));
  shape.heads = Require(request.GetInt("heads", 1));
  shape.head_dim = Require(request.GetInt("head_dim", 1));
  shape.v_head_dim = Require(request.GetIntOr("v_head_dim", shape.head_dim, 1));
  shape.latent = Require(request.GetBoolOr("latent", false));
  shape.tree = Require(request.GetBoolOr("tree", false));
  shape.sequences = Require(request.GetInt("sequences", 1));
  shape.prefix = Require(request.GetInt("prefix", 0));
  shape.own = Require(request.GetInt("own", 1));
  shape.rows = Require(request.GetInt("rows", 1));
  shape.layers = Require(request.GetInt("layers", 1));
  shape.threads = static_cast<int>(Require(request.GetInt("threads", 1)));
  return shape;
}

class AttentionCase : public BenchCase {
 public:
  explicit AttentionCase(const Shape& shape)
      : shape_(shape),
        pool_(CreateThreadPool(shape.threads).value()),
        backend_(Require(FindBackend(""))) {
    const int64_t page_size = DefaultPageSize({.num_qo_heads = shape.heads,
                                               .num_kv_heads = shape.kv_heads,
                                               .qk_head_dim = shape.head_dim,
                                               .v_head_dim = shape.v_head_dim,
                                               .dtype = shape.dtype,
                                               .latent = shape.latent});
    layout_ = {.dtype = shape.dtype,
               .num_kv_heads = static_cast<int>(shape.kv_heads),
               .qk_head_dim = static_cast<int>(shape.head_dim),
               .v_head_dim = static_cast<int>(shape.v_head_dim),
               .page_size = static_cast<int>(page_size),
               .latent = shape.latent};
    MakePages();
    MakeSequences();
    MakeArguments();
  }

  nlohmann::json Run(const RunLimits& limits) override {
    std::vector<double> calls;
    const double begin = Now();
    while (static_cast<int64_t>(calls.size()) < limits.min_calls ||
           Now() - begin < limits.seconds) {
      args_.pages.base = pages_.data() + static_cast<size_t>(layer_) * layer_bytes();
      layer_ = (layer_ + 1) % shape_.layers;
      const double call = Now();
      backend_->attention(args_, *pool_);
      calls.push_back(Now() - call);
    }
    return {{"call", calls}};
  }

 private:
  // A sequence begins on a page of its own: prefix, own part and tree are rounded up to whole
  // pages.
  int64_t PagesOf(int64_t positions) const {
    return (positions + layout_.page_size - 1) / layout_.page_size;
  }
  int64_t tree_rows() const { return shape_.tree ? shape_.rows : 0; }
  int64_t chain_pages() const { return PagesOf(shape_.own - tree_rows()); }
  int64_t page_count() const {
    return PagesOf(shape_.prefix) + shape_.sequences * (chain_pages() + PagesOf(tree_rows()));
  }
  size_t layer_bytes() const { return static_cast<size_t>(page_count()) * layout_.page_bytes(); }

  void MakePages() {
    pages_ = Require(HostMemory::Allocate(layer_bytes() * static_cast<size_t>(shape_.layers)));
    // One block of random values, again and again: making gigabytes of them would take minutes.
    constexpr size_t kBlock = size_t{1} << 20;
    RandomSequence random(3);
    std::vector<float> block(kBlock);
    for (float& x : block) x = static_cast<float>(random.Uniform(-1, 1));
    std::vector<std::byte> stored(kBlock * static_cast<size_t>(DTypeBytes(shape_.dtype)));
    if (IsQuantised(shape_.dtype)) {
      for (std::byte& code : stored) code = static_cast<std::byte>(random.Bits() & 0x3F);
    } else {
      ConvertElements(block.data(), DType::kF32, stored.data(), shape_.dtype, kBlock);
    }
    for (size_t i = 0; i < pages_.size(); i += stored.size()) {
      std::memcpy(pages_.data() + i, stored.data(), std::min(stored.size(), pages_.size() - i));
    }
    if (IsQuantised(shape_.dtype)) FillScales();
    v_nonfinite_.assign(static_cast<size_t>(page_count()) * layout_.tiles_per_page(), 0);
  }

  void FillScales() {
    constexpr float kScale = 1.0F / 64;  // the codes become numbers below 1
    const size_t first = layout_.scale_offset();
    const size_t count = (layout_.page_bytes() - first) / sizeof(float);
    for (size_t page = 0; page < pages_.size() / layout_.page_bytes(); ++page) {
      auto* const scales =
          reinterpret_cast<float*>(pages_.data() + page * layout_.page_bytes() + first);
      std::fill_n(scales, count, kScale);
    }
  }

  std::vector<int32_t> ShuffledPages() const {
    std::vector<int32_t> order(static_cast<size_t>(page_count()));
    std::iota(order.begin(), order.end(), 0);
    RandomSequence random(5);
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[static_cast<size_t>(random.Below(static_cast<int64_t>(i)))]);
    }
    return order;
  }

  void MakeSequences() {
    const std::vector<int32_t> order = ShuffledPages();
    const int64_t prefix_pages = PagesOf(shape_.prefix);
    const int64_t own_pages = chain_pages();
    const int64_t length = shape_.prefix + shape_.own;
    for (int64_t s = 0; s < shape_.sequences; ++s) {
      std::vector<PageEntry> table;
      for (int64_t p = 0; p < prefix_pages + own_pages; ++p) {
        const int64_t page = p < prefix_pages ? p : p + s * own_pages;
        table.push_back({p * layout_.page_size, order[static_cast<size_t>(page)]});
      }
      entries_.push_back(std::move(table));
    }
    for (const auto& table : entries_) {
      runs_.push_back({table.data(), static_cast<int64_t>(table.size()), 0, length - tree_rows()});
    }
    if (shape_.tree) {
      const int64_t chains = prefix_pages + shape_.sequences * own_pages;
      MakeTrees(std::span(order).subspan(static_cast<size_t>(chains)));
    }
    const int64_t shared_segments = shape_.prefix / kSegmentPositions;
    for (int64_t s = 0; s < shape_.sequences; ++s) {
      sequences_.push_back({.first_row = s * shape_.rows,
                            .row_count = shape_.rows,
                            .base = length - shape_.rows,
                            .runs = &runs_[static_cast<size_t>(s)],
                            .run_count = 1,
                            .private_segment = shared_segments});
      if (shape_.tree) sequences_.back().tree = &trees_[static_cast<size_t>(s)];
    }
    if (shared_segments > 0) shared_.push_back({0, shape_.sequences, 0, shared_segments});
  }

  // `pages` has those of the first tree, then of the second, ...
  void MakeTrees(std::span<const int32_t> pages) {
    for (int64_t node = 0; node < shape_.rows; ++node) {
      const int64_t parent = node == 0 ? -1 : (node - 1) / 2;
      parents_.push_back(static_cast<int32_t>(parent));
      depths_.push_back(parent < 0 ? 0 : depths_[static_cast<size_t>(parent)] + 1);
    }
    tree_pages_.assign(pages.begin(), pages.end());
    for (int64_t s = 0; s < shape_.sequences; ++s) {
      trees_.push_back({.parents = parents_.data(),
                        .depths = depths_.data(),
                        .pages = tree_pages_.data() + s * PagesOf(shape_.rows),
                        .max_depth = depths_.back()});
    }
  }

  void MakeArguments() {
    const int64_t row_count = shape_.sequences * shape_.rows;
    const int64_t q_elements = shape_.heads * shape_.head_dim;
    const int64_t o_elements = shape_.heads * shape_.v_head_dim;
    std::vector<float> values(static_cast<size_t>(row_count * q_elements));
    RandomSequence random(7);
    for (float& x : values) x = static_cast<float>(random.Normal());
    const DType dtype = ComputeDType(shape_.dtype);
    const auto bytes = static_cast<size_t>(DTypeBytes(dtype));
    q_.resize(values.size() * bytes);
    o_.resize(static_cast<size_t>(row_count * o_elements) * bytes);
    ConvertElements(values.data(), DType::kF32, q_.data(), dtype,
                    static_cast<int64_t>(values.size()));
    args_.pages = {layout_, pages_.data(), v_nonfinite_.data()};
    args_.num_qo_heads = static_cast<int>(shape_.heads);
    args_.scale_log2 = 1.44269504F / std::sqrt(static_cast<float>(shape_.head_dim));
    args_.q = {q_.data(), dtype, q_elements, shape_.head_dim};
    args_.o = {o_.data(), dtype, o_elements, shape_.v_head_dim};
    args_.row_count = row_count;
    args_.sequences = sequences_;
    args_.shared = shared_;
    scratch_ = Require(HostMemory::Allocate(backend_->attention_scratch_bytes(
        layout_, args_.num_qo_heads, row_count, shape_.sequences, shape_.threads)));
    args_.scratch = scratch_.data();
  }

  Shape shape_;
  std::shared_ptr<ParallelRunner> pool_;
  const Backend* backend_;
  KVLayout layout_;
  HostMemory pages_, scratch_;
  std::vector<uint8_t> v_nonfinite_;
  std::vector<std::vector<PageEntry>> entries_;
  std::vector<PageRun> runs_;
  std::vector<AttentionSequence> sequences_;
  std::vector<SharedSpan> shared_;
  std::vector<int32_t> parents_, depths_, tree_pages_;
  std::vector<TokenTreeView> trees_;
  std::vector<std::byte> q_, o_;
  AttentionArgs args_;
  int64_t layer_ = 0;
};

}  // namespace

std::unique_ptr<BenchCase> MakeAttentionCase(const JsonValue& request) {
  return std::make_unique<AttentionCase>(ReadShape(request));
}

}  // namespace quire::bench
