// A forward whose rows grow fewer. The oracle is an ordinary forward: inputs of a layer are a
// function of the token and the layer, so a whole forward that is given, layer by layer, the tokens
// whose keys and values a blending one has stored must give the rows that go on the same bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/random.h"
#include "kv/cache/kv_memory.h"
#include "kv/cache/paged_kv_cache.h"
#include "kv/testing/allocation_refusal.h"
#include "kv/testing/kv_model.h"
#include "kv/testing/kv_test_forward.h"
#include "quire/kv_transfer.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;
using Rows = std::vector<int32_t>;

// What a member does in the forward under test.
struct MemberScript {
  int64_t id = 0;
  int64_t held = 0;     // tokens before the forward
  int64_t parent = -1;  // shares them with this one, which comes before
  int64_t rows = 1;
  int64_t imported = 0;                 // tokens that it loads first
  std::map<int64_t, Rows> chosen = {};  // by check layer; empty: an ordinary member
  bool blends() const { return !chosen.empty(); }
};

uint64_t FreshToken(int64_t id, int64_t position) {
  return static_cast<uint64_t>(10000 * (id + 1) + position);
}
uint64_t MovedToken(int64_t id, int64_t position) { return 5000000 + FreshToken(id, position); }

// Stored rows of a member's append rows, in the layers that ask for them.
class RowsSource final : public MovedSource {
 public:
  RowsSource(std::vector<StoredRows> layers, std::vector<TokenRange> parts)
      : layers_(std::move(layers)), parts_(std::move(parts)) {
    given_.reserve(parts_.size());
  }
  // Asked before a layer is given; its error is the answer. Null: nothing happens.
  std::function<Status(int64_t layer)> arrive;
  int64_t loads = 0;
  bool widens_keys = false;  // gives them as float32

  StoredRows& layer(int64_t layer) { return layers_[static_cast<size_t>(layer)]; }
  const std::vector<TokenRange>& parts() const { return parts_; }

  Result<std::span<const MovedRows>> Load(int64_t layer) override {
    ++loads;
    if (arrive != nullptr) QUIRE_RETURN_IF_ERROR(arrive(layer));
    const StoredRows& stored = layers_[static_cast<size_t>(layer)];
    const auto cut = [](const TestTensor& tensor, const TokenRange& range) {
      if (tensor.count() == 0) return TensorView();
      const TensorView& all = tensor.view();
      std::byte* const first =
          all.data_as<std::byte>() + range.begin * all.stride(0) * DTypeBytes(all.dtype());
      if (all.rank() == 2) return TensorView(first, all.dtype(), {range.count(), all.dim(1)});
      return TensorView(first, all.dtype(), {range.count(), all.dim(1), all.dim(2)});
    };
    const TestTensor& keys = widens_keys ? Widen(layer) : stored.k;
    given_.clear();
    for (const TokenRange& part : parts_) {
      given_.push_back({.rows = part,
                        .kv = {.k = cut(keys, part),
                               .v = cut(stored.v, part),
                               .k_scale = cut(stored.k_scale, part),
                               .v_scale = cut(stored.v_scale, part)}});
    }
    return std::span<const MovedRows>(given_);
  }

 private:
  const TestTensor& Widen(int64_t layer) {
    const StoredRows& stored = layers_[static_cast<size_t>(layer)];
    const TensorView& k = stored.k.view();
    wide_ = TestTensor(DType::kF32, {k.dim(0), k.dim(1), k.dim(2)});
    for (int64_t i = 0; i < wide_.count(); ++i) wide_.Set(i, stored.Key(i));
    return wide_;
  }

  std::vector<StoredRows> layers_;
  std::vector<TokenRange> parts_;
  std::vector<MovedRows> given_;
  TestTensor wide_;
};

// Chooses what the script says, and notes what it is given.
class ScriptHook final : public LayerHook {
 public:
  explicit ScriptHook(const MemberScript& script) : script_(script) {}
  std::function<void(int64_t layer, const FreshRows& fresh)> look;
  std::function<Result<RowSelection>(int64_t layer)> answer;

  Result<RowSelection> BeforeAttention(int64_t layer, const FreshRows& fresh) override {
    EXPECT_EQ(fresh.seq_id, script_.id);
    if (look != nullptr) look(layer, fresh);
    if (answer != nullptr) return answer(layer);
    return RowSelection{.selects = true, .rows = script_.chosen.at(layer)};
  }

 private:
  const MemberScript& script_;
};

int64_t BaseOf(const MemberScript& member) { return member.held + member.imported; }

// Append rows (of the batch) that come to each layer, and that go on from it.
struct LayerRows {
  std::vector<int64_t> in, out;
};
std::vector<LayerRows> RowsOfLayers(const std::vector<MemberScript>& members, size_t layer_count) {
  std::vector<int64_t> rows;
  for (const MemberScript& member : members) {
    const int64_t first = std::ssize(rows);
    for (int64_t r = 0; r < member.rows; ++r) rows.push_back(first + r);
  }
  std::vector<LayerRows> layers(layer_count);
  for (size_t l = 0; l < layer_count; ++l) {
    layers[l].in = rows;
    int64_t first = 0;
    for (const MemberScript& member : members) {
      const auto chosen = member.chosen.find(static_cast<int64_t>(l));
      if (chosen != member.chosen.end()) {
        std::erase_if(rows, [&](int64_t row) {
          return row >= first && row < first + member.rows &&
                 !std::ranges::binary_search(chosen->second, static_cast<int32_t>(row - first));
        });
      }
      first += member.rows;
    }
    layers[l].out = rows;
  }
  return layers;
}

// One for each append row.
Tokens FreshTokens(const std::vector<MemberScript>& members) {
  Tokens tokens;
  for (const MemberScript& member : members) {
    for (int64_t r = 0; r < member.rows; ++r)
      tokens.push_back(FreshToken(member.id, BaseOf(member) + r));
  }
  return tokens;
}
Tokens MovedTokens(const std::vector<MemberScript>& members) {
  Tokens tokens;
  for (const MemberScript& member : members) {
    for (int64_t r = 0; r < member.rows; ++r)
      tokens.push_back(MovedToken(member.id, BaseOf(member) + r));
  }
  return tokens;
}
Tokens Pick(const Tokens& tokens, const std::vector<int64_t>& rows) {
  Tokens picked;
  for (const int64_t row : rows) picked.push_back(tokens[static_cast<size_t>(row)]);
  return picked;
}

Ids IdsOf(const std::vector<MemberScript>& members) {
  Ids ids;
  for (const MemberScript& member : members) ids.push_back(member.id);
  return ids;
}
Ids LengthsOf(const std::vector<MemberScript>& members) {
  Ids lengths;
  for (const MemberScript& member : members) lengths.push_back(member.rows);
  return lengths;
}

void Build(AttentionKVCache& cache, const std::vector<MemberScript>& members) {
  for (const MemberScript& member : members) {
    if (member.parent >= 0) {
      ASSERT_TRUE(cache.ForkSequence(member.parent, member.id, member.held).ok());
      continue;
    }
    ASSERT_TRUE(cache.AddSequence(member.id).ok());
    const int64_t chunk = cache.options().prefill_chunk_size;
    for (int64_t at = 0; at < member.held; at += chunk) {
      Tokens tokens;
      for (int64_t p = at; p < std::min(member.held, at + chunk); ++p)
        tokens.push_back(FreshToken(member.id, p));
      const auto outputs = RunForward(cache, cache.options().layers, Ids{member.id}, {tokens});
      ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
    }
  }
}

std::vector<StoredRows> ExportRows(AttentionKVCache& cache, int64_t id, int64_t start,
                                   int64_t count) {
  std::vector<StoredRows> layers;
  for (size_t l = 0; l < cache.options().layers.size(); ++l) {
    layers.emplace_back(cache.options().layers[l], count);
    const Status status = cache.ExportKV(id, static_cast<int64_t>(l), start, layers.back().view());
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  return layers;
}

// A forward that blends, with all that it is given.
class Blend {
 public:
  Blend(const AttentionKVCacheOptions& options, std::vector<MemberScript> members)
      : options_(options), members_(std::move(members)) {
    AttentionKVCacheOptions whole = options_;
    for (AttentionLayerSpec& layer : whole.layers) layer.window = 0;  // so that all is held
    writer_ = MakeTestCache(whole);
    Build(*writer_, members_);
    // Rows of other tokens than those that are computed, of all members at once.
    AppendAll(*writer_);
    for (const MemberScript& member : members_) {
      if (member.imported > 0) {
        imports_[member.id] = ExportRows(*writer_, member.id, member.held, member.imported);
        KVBlock block;
        for (const StoredRows& rows : imports_[member.id]) block.push_back(rows.view());
        import_blocks_[member.id] = {block};
        loads_sources_[member.id] = std::make_unique<BlockSource>(import_blocks_[member.id]);
        loads_.push_back({member.id, member.imported, loads_sources_[member.id].get()});
      }
      if (!member.blends()) continue;
      sources_[member.id] = std::make_unique<RowsSource>(
          ExportRows(*writer_, member.id, BaseOf(member), member.rows), PartsOf(member));
      hooks_[member.id] = std::make_unique<ScriptHook>(member);
      for (const auto& [layer, rows] : member.chosen) checks_[member.id].push_back(layer);
    }
    for (const MemberScript& member : members_) {
      if (!member.blends()) continue;
      blends_.push_back({.seq_id = member.id,
                         .hook = hooks_[member.id].get(),
                         .source = sources_[member.id].get(),
                         .check_layers = checks_[member.id]});
    }
  }

  const std::vector<MemberScript>& members() const { return members_; }
  const std::vector<BlendMember>& blends() const { return blends_; }
  std::vector<LayerRows> layer_rows() const {
    return RowsOfLayers(members_, options_.layers.size());
  }
  RowsSource& source(int64_t id) { return *sources_.at(id); }
  ScriptHook& hook(int64_t id) { return *hooks_.at(id); }

  std::unique_ptr<AttentionKVCache> MakeCache() const {
    auto cache = MakeTestCache(options_);
    Build(*cache, members_);
    return cache;
  }
  Status Begin(AttentionKVCache& cache) const {
    return cache.BeginBlendingForward(IdsOf(members_), LengthsOf(members_), loads_, blends_);
  }
  // Begin, all layers, End. Outputs have the rows that come to each layer.
  Result<std::vector<LayerOutputs>> Run(AttentionKVCache& cache, const ForwardStyle& style = {}) {
    QUIRE_RETURN_IF_ERROR(Begin(cache));
    std::vector<LayerOutputs> outputs(options_.layers.size());
    const Tokens tokens = FreshTokens(members_);
    const std::vector<LayerRows> rows = layer_rows();
    for (size_t l = 0; l < outputs.size(); ++l) {
      QUIRE_RETURN_IF_ERROR(RunLayer(cache, options_.layers[l], static_cast<int64_t>(l),
                                     Pick(tokens, rows[l].in), style, &outputs[l]));
      ExpectQueryRows(cache, rows[l].out);
    }
    QUIRE_RETURN_IF_ERROR(cache.CheckInvariants());
    QUIRE_RETURN_IF_ERROR(cache.EndForward());
    return outputs;
  }
  // The whole forward whose layers store what the blending one has stored.
  Result<std::vector<LayerOutputs>> RunWhole(AttentionKVCache& cache,
                                             const ForwardStyle& style = {}) {
    QUIRE_RETURN_IF_ERROR(cache.BeginLoadingForward(IdsOf(members_), LengthsOf(members_), loads_));
    std::vector<LayerOutputs> outputs(options_.layers.size());
    const Tokens fresh = FreshTokens(members_);
    const Tokens moved = MovedTokens(members_);
    const std::vector<LayerRows> rows = layer_rows();
    for (size_t l = 0; l < outputs.size(); ++l) {
      Tokens tokens = moved;
      for (const int64_t row : rows[l].in)
        tokens[static_cast<size_t>(row)] = fresh[static_cast<size_t>(row)];
      QUIRE_RETURN_IF_ERROR(
          RunLayer(cache, options_.layers[l], static_cast<int64_t>(l), tokens, style, &outputs[l]));
    }
    QUIRE_RETURN_IF_ERROR(cache.EndForward());
    return outputs;
  }
  // The rows that go on from each layer.
  void ExpectSame(const std::vector<LayerOutputs>& blended,
                  const std::vector<LayerOutputs>& whole) const {
    const std::vector<LayerRows> rows = layer_rows();
    for (size_t l = 0; l < rows.size(); ++l) {
      for (const int64_t row : rows[l].out) {
        const auto input = std::ranges::find(rows[l].in, row) - rows[l].in.begin();
        ASSERT_TRUE(std::ranges::equal(blended[l].o.rows(input, 1), whole[l].o.rows(row, 1)))
            << "o of layer " << l << ", row " << row;
        if (blended[l].lse.count() == 0) continue;
        ASSERT_TRUE(std::ranges::equal(blended[l].lse.rows(input, 1), whole[l].lse.rows(row, 1)))
            << "lse of layer " << l << ", row " << row;
      }
    }
  }

 private:
  static void ExpectQueryRows(AttentionKVCache& cache, const std::vector<int64_t>& rows) {
    const auto got = cache.GetQueryRows();
    ASSERT_TRUE(got.ok());
    EXPECT_TRUE(std::ranges::equal(*got, rows));
    EXPECT_EQ(cache.GetQueryPositions()->size(), rows.size());
  }
  // Maximal ranges of rows that some layer leaves out, cut once more, and reaching over rows that
  // go on by one now and then.
  static std::vector<TokenRange> PartsOf(const MemberScript& member) {
    std::vector<uint8_t> left_out(static_cast<size_t>(member.rows), 0);
    for (const auto& [layer, rows] : member.chosen) {
      for (int64_t r = 0; r < member.rows; ++r) {
        if (!std::ranges::binary_search(rows, static_cast<int32_t>(r)))
          left_out[static_cast<size_t>(r)] = 1;
      }
    }
    std::vector<TokenRange> parts;
    for (int64_t r = 0; r < member.rows; ++r) {
      if (left_out[static_cast<size_t>(r)] == 0 && r % 5 != 2) continue;
      if (!parts.empty() && parts.back().end == r && r % 7 != 3) {
        parts.back().end = r + 1;
      } else {
        parts.push_back({r, r + 1});
      }
    }
    return parts;
  }
  void AppendAll(AttentionKVCache& cache) const {
    Ids lengths;
    Tokens tokens;
    for (const MemberScript& member : members_) {
      lengths.push_back(member.imported + member.rows);
      for (int64_t p = member.held; p < BaseOf(member) + member.rows; ++p)
        tokens.push_back(MovedToken(member.id, p));
    }
    ASSERT_TRUE(cache.BeginForward(IdsOf(members_), lengths).ok());
    const auto outputs = FinishForward(cache, cache.options().layers, tokens);
    ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
  }

  AttentionKVCacheOptions options_;
  const std::vector<MemberScript> members_;
  std::unique_ptr<AttentionKVCache> writer_;
  std::map<int64_t, std::vector<StoredRows>> imports_;
  std::map<int64_t, std::vector<KVBlock>> import_blocks_;
  std::map<int64_t, std::unique_ptr<BlockSource>> loads_sources_;
  std::vector<LayerLoad> loads_;
  std::map<int64_t, std::unique_ptr<RowsSource>> sources_;
  std::map<int64_t, std::unique_ptr<ScriptHook>> hooks_;
  std::map<int64_t, std::vector<int64_t>> checks_;
  std::vector<BlendMember> blends_;
};

// Every member's stored tokens that both caches hold, and a step behind them.
void ExpectSameAfterwards(AttentionKVCache& a, AttentionKVCache& b, const Ids& ids) {
  for (const int64_t id : ids) {
    const int64_t length = a.GetSequenceLength(id).value();
    ASSERT_EQ(length, b.GetSequenceLength(id).value());
    ASSERT_EQ(a.HeldTokens(id).value(), b.HeldTokens(id).value());
    if (a.HeldTokens(id).value() != length) continue;
    const std::vector<StoredRows> of_a = ExportRows(a, id, 0, length);
    const std::vector<StoredRows> of_b = ExportRows(b, id, 0, length);
    for (size_t l = 0; l < of_a.size(); ++l)
      EXPECT_TRUE(of_a[l] == of_b[l]) << "stored layer " << l << " of sequence " << id;
  }
  std::vector<Tokens> next;
  for (const int64_t id : ids) next.push_back({FreshToken(id, 9000)});
  const auto out_a = RunForward(a, a.options().layers, ids, next);
  const auto out_b = RunForward(b, b.options().layers, ids, next);
  ASSERT_TRUE(out_a.ok() && out_b.ok());
  for (size_t l = 0; l < out_a->size(); ++l)
    EXPECT_TRUE(std::ranges::equal((*out_a)[l].o.bytes(), (*out_b)[l].o.bytes()))
        << "the step behind, layer " << l;
}

// Ascending rows of [0, count), about `share` of them, with runs now and then; the last one.
Rows DrawRows(RandomSequence& random, const Rows& from, double share) {
  Rows rows;
  bool on = false;
  for (const int32_t row : from) {
    if (random.Below(3) == 0) on = random.Uniform(0, 1) < share;
    if (on || row == from.back()) rows.push_back(row);
  }
  return rows;
}
Rows AllRows(int64_t count) {
  Rows rows(static_cast<size_t>(count));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}
std::map<int64_t, Rows> DrawChoices(RandomSequence& random, int64_t rows, const Ids& checks) {
  std::map<int64_t, Rows> chosen;
  Rows left = AllRows(rows);
  double share = 0.5;
  for (const int64_t layer : checks) {
    left = DrawRows(random, left, share);
    chosen[layer] = left;
    share = 0.6;
  }
  return chosen;
}

// Sharers and others, ordinary and blended.
// `at_end`: forks are where all that a window keeps is held.
std::vector<MemberScript> DrawBatch(RandomSequence& random, int64_t scale, bool at_end = false) {
  const auto some = [&](int64_t most) { return 1 + random.Below(most); };
  std::vector<MemberScript> members;
  members.push_back({.id = 0, .held = scale + some(40), .rows = 1 + random.Below(3)});
  const auto fork_at = [&](int64_t end) {
    const int64_t position = std::min<int64_t>(end, some(scale + 40));
    return at_end ? end : position;
  };
  const int64_t shared = fork_at(members[0].held);
  members.push_back({.id = 1, .held = shared, .parent = 0, .rows = some(2 * scale)});
  members.push_back({.id = 2, .held = random.Below(10), .rows = some(scale)});
  members.push_back({.id = 3, .held = fork_at(shared), .parent = 0, .rows = some(2 * scale)});
  members.push_back({.id = 4, .held = 0, .rows = some(2 * scale)});
  if (random.Below(2) == 0) members[4].imported = some(20);
  members[1].chosen = DrawChoices(random, members[1].rows, {1});
  members[3].chosen = DrawChoices(random, members[3].rows, {0, 2});
  members[4].chosen = DrawChoices(random, members[4].rows, {1, 2});
  return members;
}

struct Shape {
  std::string name;
  std::vector<AttentionLayerSpec> layers;
  int64_t page_size = 16;
  RopeMode rope = RopeMode::kNormal;
  int64_t scale = 40;  // of the batch
};

AttentionKVCacheOptions OptionsOf(const Shape& shape) {
  AttentionKVCacheOptions options =
      TestCacheOptions(shape.layers, {.max_num_sequences = 8,
                                      .token_capacity = 40 * shape.scale + 2000,
                                      .prefill_chunk_size = 8 * shape.scale + 100,
                                      .page_size = shape.page_size,
                                      .rope = shape.rope});
  return options;
}

std::vector<AttentionLayerSpec> Four(AttentionLayerSpec spec) { return {spec, spec, spec, spec}; }

std::vector<Shape> Shapes() {
  const AttentionLayerSpec plain{4, 2, 8, 8, DType::kF32};
  std::vector<Shape> shapes;
  shapes.push_back({"f32", Four(plain)});
  shapes.push_back({"bf16, long", Four({4, 2, 8, 8, DType::kBF16}), 64, RopeMode::kNormal, 350});
  shapes.push_back({"f16, pages of 4", Four({4, 4, 8, 4, DType::kF16}), 4});
  shapes.push_back({"pages of 3, inline", Four(plain), 3, RopeMode::kInline});
  shapes.push_back({"inline, long", Four({4, 2, 8, 8, DType::kBF16}), 16, RopeMode::kInline, 300});
  shapes.push_back({"int8", Four({4, 2, 8, 8, DType::kI8}), 16, RopeMode::kNormal, 60});
  AttentionLayerSpec mixed{4, 2, 8, 8, DType::kI8};
  mixed.v_dtype = DType::kF8E4M3;
  shapes.push_back({"int8 keys, fp8 values, inline", Four(mixed), 4, RopeMode::kInline});
  shapes.push_back({"fp8", Four({4, 1, 16, 8, DType::kF8E4M3}), 32});
  AttentionLayerSpec windowed = plain;
  windowed.window = 24;
  AttentionLayerSpec capped = plain;
  capped.soft_cap = 5;
  capped.head_sinks = {0.5F, -1, 2, 0};
  shapes.push_back({"windows, soft cap, sinks", {windowed, capped, windowed, capped}, 8});
  windowed.window = 300;
  shapes.push_back(
      {"windows, long", {windowed, capped, windowed, capped}, 16, RopeMode::kNormal, 300});
  AttentionLayerSpec latent{4, 1, 20, 16, DType::kBF16};
  latent.latent = true;
  shapes.push_back({"MLA", Four(latent), 16, RopeMode::kNone, 60});
  latent.dtype = DType::kI8;
  shapes.push_back({"MLA, int8, and others", {latent, plain, latent, mixed}, 16});
  return shapes;
}

class BlendingForward : public testing::TestWithParam<size_t> {};

TEST_P(BlendingForward, RowsThatGoOnAreThoseOfAWholeForward) {
  const Shape shape = Shapes()[GetParam() % Shapes().size()];
  SCOPED_TRACE(shape.name);
  RandomSequence random(77, GetParam());
  const bool has_windows = std::ranges::any_of(
      shape.layers, [](const AttentionLayerSpec& layer) { return layer.window > 0; });
  Blend blend(OptionsOf(shape), DrawBatch(random, shape.scale, has_windows));
  const bool quantised = IsQuantised(shape.layers[0].dtype);
  blend.source(1).widens_keys = quantised && random.Below(2) == 0;
  const auto cache = blend.MakeCache();
  const auto whole_cache = blend.MakeCache();
  const ForwardStyle style{.calls = random.Below(2) == 0 ? CallStyle::kFused : CallStyle::kHalves};
  const auto blended = blend.Run(*cache, style);
  ASSERT_TRUE(blended.ok()) << blended.status().ToString();
  const auto whole = blend.RunWhole(*whole_cache, style);
  ASSERT_TRUE(whole.ok()) << whole.status().ToString();
  blend.ExpectSame(*blended, *whole);
  ExpectSameAfterwards(*cache, *whole_cache, IdsOf(blend.members()));
  EXPECT_TRUE(cache->CheckInvariants().ok());
}
INSTANTIATE_TEST_SUITE_P(Seeds, BlendingForward, testing::Range<size_t>(0, 48));

// Windows of sequences, whose sinks are scored with the query turned by what has slid.
TEST(BlendingForward, SequencesMayHaveWindowsWithSinks) {
  for (const RopeMode rope : {RopeMode::kNormal, RopeMode::kInline, RopeMode::kNone}) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      AttentionLayerSpec latent{4, 1, 20, 16, DType::kF32};
      latent.latent = true;
      latent.rope.emplace().mode = RopeMode::kNormal;
      std::vector<AttentionLayerSpec> layers = Four({4, 2, 8, 8, DType::kF32});
      if (rope == RopeMode::kNone) layers = Four(latent);
      RandomSequence random(5, seed);
      Blend blend(OptionsOf({.name = "", .layers = layers, .page_size = 4, .rope = rope}),
                  DrawBatch(random, 40));
      const auto cache = blend.MakeCache();
      const auto whole_cache = blend.MakeCache();
      for (AttentionKVCache* const c : {cache.get(), whole_cache.get()}) {
        ASSERT_TRUE(c->EnableSlidingWindowForSeq(1, 30, 5).ok());
        ASSERT_TRUE(c->EnableSlidingWindowForSeq(4, 12, 3).ok());
      }
      const ForwardStyle style{.calls = seed % 2 == 0 ? CallStyle::kFused : CallStyle::kHalves};
      const auto blended = blend.Run(*cache, style);
      ASSERT_TRUE(blended.ok()) << blended.status().ToString();
      const auto whole = blend.RunWhole(*whole_cache, style);
      ASSERT_TRUE(whole.ok());
      blend.ExpectSame(*blended, *whole);
      ExpectSameAfterwards(*cache, *whole_cache, IdsOf(blend.members()));
    }
  }
}

// All threads, every kernel path.
TEST(BlendingForward, EveryKernelPathAndAnyNumberOfThreadsGiveTheSame) {
  for (const std::string& path : KernelPaths()) {
    SCOPED_TRACE(path);
    RandomSequence random(6);
    AttentionKVCacheOptions options = OptionsOf(
        {.name = "", .layers = Four({4, 2, 32, 32, DType::kBF16}), .page_size = 64, .scale = 300});
    options.kernel_path = path;
    options.runner = CreateThreadPool(3).value();
    Blend blend(options, DrawBatch(random, 300));
    const auto cache = blend.MakeCache();
    const auto whole_cache = blend.MakeCache();
    const auto blended = blend.Run(*cache);
    ASSERT_TRUE(blended.ok()) << blended.status().ToString();
    const auto whole = blend.RunWhole(*whole_cache);
    ASSERT_TRUE(whole.ok());
    blend.ExpectSame(*blended, *whole);
  }
}

std::vector<MemberScript> TwoMembers() {
  return {{.id = 0, .held = 7, .rows = 40, .chosen = {{1, {3, 4, 20, 39}}, {2, {4, 39}}}},
          {.id = 1, .held = 3, .rows = 2}};
}
Shape SmallShape() { return {.name = "", .layers = Four({4, 2, 8, 8, DType::kBF16})}; }

TEST(BlendingForward, TheNaiveModelSaysTheSame) {
  const AttentionKVCacheOptions options = OptionsOf(SmallShape());
  Blend blend(options, TwoMembers());
  const auto cache = blend.MakeCache();
  KVModel model(options);
  Build(model, blend.members());
  ASSERT_TRUE(blend.Begin(*cache).ok());
  ASSERT_TRUE(blend.Begin(model).ok());
  const std::vector<LayerRows> rows = blend.layer_rows();
  const Tokens tokens = FreshTokens(blend.members());
  for (int64_t l = 0; l < 4; ++l) {
    const auto& layer = rows[static_cast<size_t>(l)];
    LayerOutputs got, wanted;
    const AttentionLayerSpec& spec = options.layers[static_cast<size_t>(l)];
    ASSERT_TRUE(RunLayer(*cache, spec, l, Pick(tokens, layer.in), {}, &got).ok());
    const Status of_model = RunLayer(model, spec, l, Pick(tokens, layer.in), {}, &wanted);
    ASSERT_TRUE(of_model.ok()) << of_model.ToString();
    EXPECT_TRUE(std::ranges::equal(*cache->GetQueryRows(), *model.GetQueryRows()));
    EXPECT_TRUE(std::ranges::equal(*cache->GetQueryPositions(), *model.GetQueryPositions()));
    size_t bound = 0;
    for (const int64_t row : layer.out) {
      const int64_t input = std::ranges::find(layer.in, row) - layer.in.begin();
      for (int64_t i = input * 32; i < (input + 1) * 32; ++i, ++bound)
        EXPECT_NEAR(got.o.Get(i), wanted.o.Get(i), model.last_bounds().o[bound]);
    }
  }
  EXPECT_TRUE(cache->EndForward().ok());
  EXPECT_TRUE(model.EndForward().ok());
}

// What the hook is given: the stored numbers, of the rows that have come.
TEST(BlendingForward, TheHookIsGivenWhatIsStored) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kI8}) {
    AttentionKVCacheOptions options = OptionsOf({.name = "", .layers = Four({4, 2, 8, 4, dtype})});
    Blend blend(options, TwoMembers());
    const auto cache = blend.MakeCache();
    int64_t calls = 0;
    blend.hook(0).look = [&](int64_t layer, const FreshRows& fresh) {
      ++calls;
      const Rows came = layer == 1 ? AllRows(40) : Rows{3, 4, 20, 39};
      ASSERT_EQ(fresh.positions.size(), came.size());
      ASSERT_EQ(fresh.k.dim(0), std::ssize(came));
      ASSERT_EQ(fresh.v.dim(2), 4);
      AttentionKVCacheOptions whole = options;
      const auto other = blend.MakeCache();
      ASSERT_TRUE(other->BeginForward(Ids{0}, Ids{40}).ok());
      Tokens tokens;
      for (int64_t r = 0; r < 40; ++r) tokens.push_back(FreshToken(0, 7 + r));
      ASSERT_TRUE(FinishForward(*other, options.layers, tokens).ok());
      TestTensor k(DType::kF32, {4, 40, 2, 8}), v(DType::kF32, {4, 40, 2, 4});
      ASSERT_TRUE(other->DebugGetKV(0, 7, 47, k.view(), v.view()).ok());
      for (size_t i = 0; i < came.size(); ++i) {
        EXPECT_EQ(fresh.positions[i], 7 + came[i]);
        for (int64_t d = 0; d < 16; ++d)
          EXPECT_EQ(fresh.k.data_as<float>()[static_cast<int64_t>(i) * 16 + d],
                    k.Get((layer * 40 + came[i]) * 16 + d));
        for (int64_t d = 0; d < 8; ++d)
          EXPECT_EQ(fresh.v.data_as<float>()[static_cast<int64_t>(i) * 8 + d],
                    v.Get((layer * 40 + came[i]) * 8 + d));
      }
    };
    ASSERT_TRUE(blend.Run(*cache).ok());
    EXPECT_EQ(calls, 2);
    EXPECT_EQ(blend.source(0).loads, 2);  // layers 2 and 3
  }
}

// All rows go on: an ordinary forward, and the source is not asked.
TEST(BlendingForward, WithAllRowsItIsAnOrdinaryForward) {
  std::vector<MemberScript> members = TwoMembers();
  members[0].chosen = {{1, AllRows(40)}, {2, AllRows(40)}};
  for (const bool says_so : {false, true}) {
    Blend blend(OptionsOf(SmallShape()), members);
    if (says_so)
      blend.hook(0).answer = [](int64_t) -> Result<RowSelection> { return RowSelection{}; };
    const auto cache = blend.MakeCache();
    const auto whole_cache = blend.MakeCache();
    const auto blended = blend.Run(*cache);
    ASSERT_TRUE(blended.ok());
    const auto whole = blend.RunWhole(*whole_cache);
    ASSERT_TRUE(whole.ok());
    blend.ExpectSame(*blended, *whole);
    EXPECT_EQ(blend.source(0).loads, 0);
    ExpectSameAfterwards(*cache, *whole_cache, {0, 1});
  }
}

// Rows of the source that are not read may hold anything, also in tiles that others share; one that
// is read shows in what sees it and nowhere else.
TEST(BlendingForward, NaNInMovedRowsStaysWhereItIs) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const int64_t page_size : {3, 4, 16}) {
    Shape shape = SmallShape();
    shape.page_size = page_size;
    Blend blend(OptionsOf(shape), TwoMembers());
    Blend spoilt(OptionsOf(shape), TwoMembers());
    for (int64_t l = 0; l < 4; ++l) {
      StoredRows& rows = spoilt.source(0).layer(l);
      const Rows read_never = l < 2 ? AllRows(40) : l == 2 ? Rows{3, 4, 20, 39} : Rows{4, 39};
      for (const int32_t row : read_never) {
        for (int64_t i = 0; i < 16; ++i) rows.k.Set(row * 16 + i, nan);
        for (int64_t i = 0; i < 16; ++i) rows.v.Set(row * 16 + i, nan);
      }
      if (l == 3) rows.v.Set(21 * 16, nan);  // seen by row 39 alone of those that go on
    }
    const auto cache = blend.MakeCache();
    const auto spoilt_cache = spoilt.MakeCache();
    const auto clean = blend.Run(*cache);
    const auto dirty = spoilt.Run(*spoilt_cache);
    ASSERT_TRUE(clean.ok() && dirty.ok());
    const std::vector<LayerRows> rows = blend.layer_rows();
    for (size_t l = 0; l < 3; ++l) {
      for (const int64_t row : rows[l].out) {
        const auto input = std::ranges::find(rows[l].in, row) - rows[l].in.begin();
        EXPECT_TRUE(std::ranges::equal((*clean)[l].o.rows(input, 1), (*dirty)[l].o.rows(input, 1)));
      }
    }
    const TestTensor& last = (*dirty)[3].o;  // rows 4 and 39 of sequence 0, then those of 1
    EXPECT_TRUE(std::ranges::equal((*clean)[3].o.rows(0, 1), last.rows(0, 1)));
    EXPECT_TRUE(std::isnan(last.Get(1 * 32)));
    EXPECT_FALSE(std::isnan(last.Get(1 * 32 + 1)));
    EXPECT_TRUE(std::ranges::equal((*clean)[3].o.rows(2, 2), last.rows(2, 2)));
  }
}

// ---------------------------------------------------------------------- failure

TEST(BlendingForward, AbortAfterAnyLayerLeavesTheStateAsItWas) {
  for (int64_t layers_run = 0; layers_run <= 4; ++layers_run) {
    const AttentionKVCacheOptions options = OptionsOf(SmallShape());
    Blend blend(options, TwoMembers());
    const auto cache = blend.MakeCache();
    const uint64_t digest = cache->StateDigest();
    const Tokens tokens = FreshTokens(blend.members());
    ASSERT_TRUE(blend.Begin(*cache).ok());
    for (int64_t l = 0; l < layers_run; ++l) {
      LayerOutputs outputs;
      ASSERT_TRUE(RunLayer(*cache, options.layers[0], l,
                           Pick(tokens, blend.layer_rows()[static_cast<size_t>(l)].in), {},
                           &outputs)
                      .ok());
    }
    ASSERT_TRUE(cache->AbortForward().ok());
    EXPECT_EQ(cache->StateDigest(), digest);
    EXPECT_TRUE(cache->CheckInvariants().ok());
    // The same once more, and an ordinary step, are as if it had not been.
    const auto again = blend.Run(*cache);
    ASSERT_TRUE(again.ok()) << again.status().ToString();
    const auto whole_cache = blend.MakeCache();
    const auto whole = blend.RunWhole(*whole_cache);
    ASSERT_TRUE(whole.ok());
    blend.ExpectSame(*again, *whole);
    ExpectSameAfterwards(*cache, *whole_cache, {0, 1});
  }
}

// Runs until a layer fails, expects this, and aborts.
void ExpectLayerFails(Blend& blend, int64_t at, StatusCode code, const std::string& text) {
  const auto cache = blend.MakeCache();
  const uint64_t digest = cache->StateDigest();
  const Tokens tokens = FreshTokens(blend.members());
  ASSERT_TRUE(blend.Begin(*cache).ok());
  Status status;
  for (int64_t l = 0; l < 4 && status.ok(); ++l) {
    LayerOutputs outputs;
    status = RunLayer(*cache, cache->options().layers[0], l,
                      Pick(tokens, blend.layer_rows()[static_cast<size_t>(l)].in), {}, &outputs);
    EXPECT_TRUE(!status.ok() || l < at) << l;
  }
  EXPECT_EQ(status.code(), code) << status.ToString();
  EXPECT_NE(std::string(status.message()).find(text), std::string::npos) << status.ToString();
  EXPECT_EQ(cache->EndForward().code(), StatusCode::kBadState);
  ASSERT_TRUE(cache->AbortForward().ok());
  EXPECT_EQ(cache->StateDigest(), digest);
  EXPECT_TRUE(cache->CheckInvariants().ok());
}

TEST(BlendingForward, WhatHooksAndSourcesGiveIsChecked) {
  const auto make = [] { return Blend(OptionsOf(SmallShape()), TwoMembers()); };
  const auto answer = [](Rows rows) {
    return [rows](int64_t) -> Result<RowSelection> {
      return RowSelection{.selects = true, .rows = rows};
    };
  };
  for (const Rows& rows : {Rows{}, Rows{3, 3}, Rows{4, 3}, Rows{-1}, Rows{40}}) {
    Blend blend = make();
    blend.hook(0).answer = answer(rows);
    ExpectLayerFails(blend, 1, StatusCode::kBadArgument, "the hook");
  }
  {
    Blend blend = make();  // row 5 has not come to layer 2
    blend.hook(0).answer = [](int64_t layer) -> Result<RowSelection> {
      return RowSelection{.selects = true, .rows = layer == 1 ? Rows{3, 4, 20, 39} : Rows{4, 5}};
    };
    ExpectLayerFails(blend, 2, StatusCode::kBadArgument, "row 5 after 4");
  }
  {
    Blend blend = make();
    blend.hook(0).answer = [](int64_t) -> Result<RowSelection> {
      return Status(StatusCode::kTimeout, "late");
    };
    ExpectLayerFails(blend, 1, StatusCode::kTimeout, "late");
  }
  {
    Blend blend = make();
    blend.source(0).arrive = [](int64_t layer) {
      return layer == 3 ? Status(StatusCode::kCorrupt, "digest") : Status();
    };
    ExpectLayerFails(blend, 3, StatusCode::kCorrupt, "digest");
  }
}

// A source that gives whatever it was made with.
class FixedSource final : public MovedSource {
 public:
  std::vector<MovedRows> rows;
  Result<std::span<const MovedRows>> Load(int64_t) override {
    return std::span<const MovedRows>(rows);
  }
};

TEST(BlendingForward, MovedRowsMustBeAllThatAreLeftOut) {
  const AttentionLayerSpec spec{4, 2, 8, 8, DType::kBF16};
  const StoredRows all(spec, 40);
  const auto part = [&](int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    const auto cut = [&](const TestTensor& t) {
      return TensorView(t.view().data(), t.view().dtype(), {std::max<int64_t>(count, 0), 2, 8});
    };
    return MovedRows{.rows = {begin, end}, .kv = {.k = cut(all.k), .v = cut(all.v)}};
  };
  const auto try_rows = [&](std::vector<MovedRows> rows) -> Status {
    const auto cache = MakeTestCache(OptionsOf(SmallShape()));
    EXPECT_TRUE(cache->AddSequence(0).ok());
    MemberScript script{.id = 0, .rows = 40, .chosen = {{0, {5, 39}}}};
    ScriptHook hook(script);
    FixedSource source;
    source.rows = std::move(rows);
    const Ids checks{0};
    const BlendMember blend{0, &hook, &source, checks};
    EXPECT_TRUE(cache->BeginBlendingForward(Ids{0}, Ids{40}, {}, {&blend, 1}).ok());
    LayerOutputs outputs;
    const Tokens tokens = FreshTokens({script});
    EXPECT_TRUE(RunLayer(*cache, spec, 0, tokens, {}, &outputs).ok());
    return RunLayer(*cache, spec, 1, {tokens.data(), 2}, {}, &outputs);
  };
  EXPECT_TRUE(try_rows({part(0, 40)}).ok());
  EXPECT_TRUE(try_rows({part(0, 5), part(6, 39)}).ok());
  EXPECT_TRUE(try_rows({part(0, 10), part(10, 40)}).ok());
  for (const auto& bad : std::vector<std::vector<MovedRows>>{{},
                                                             {part(0, 38)},
                                                             {part(1, 40)},
                                                             {part(0, 10), part(11, 40)},
                                                             {part(0, 10), part(9, 40)},
                                                             {part(10, 40), part(0, 10)},
                                                             {part(0, 41)},
                                                             {part(0, 40), part(40, 40)}}) {
    EXPECT_EQ(try_rows(bad).code(), StatusCode::kBadArgument);
  }
  MovedRows odd = part(0, 40);
  odd.rows = {0, 39};  // fewer rows than tokens
  EXPECT_EQ(try_rows({odd}).code(), StatusCode::kBadArgument);
}

TEST(BlendingForward, BeginRefusesWhatCannotBeBlended) {
  const AttentionKVCacheOptions options = OptionsOf(SmallShape());
  const auto cache = MakeTestCache(options);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(cache->AddSequence(1).ok());
  MemberScript script{.id = 0, .rows = 4, .chosen = {{1, {3}}}};
  ScriptHook hook(script);
  FixedSource source;
  const uint64_t digest = cache->StateDigest();
  const auto begin = [&](AttentionKVCache& c, std::vector<BlendMember> blends) {
    return c.BeginBlendingForward(Ids{0, 1}, Ids{4, 1}, {}, blends).code();
  };
  const Ids good{1}, none{}, twice{1, 1}, falling{2, 1}, absent{4}, negative{-1};
  for (const Ids* const checks : {&none, &twice, &falling, &absent, &negative})
    EXPECT_EQ(begin(*cache, {{0, &hook, &source, *checks}}), StatusCode::kBadArgument);
  EXPECT_EQ(begin(*cache, {{0, nullptr, &source, good}}), StatusCode::kBadArgument);
  EXPECT_EQ(begin(*cache, {{0, &hook, nullptr, good}}), StatusCode::kBadArgument);
  EXPECT_EQ(begin(*cache, {{7, &hook, &source, good}}), StatusCode::kBadArgument);
  EXPECT_EQ(begin(*cache, {{1, &hook, &source, good}, {0, &hook, &source, good}}),
            StatusCode::kBadArgument);
  EXPECT_EQ(begin(*cache, {{0, &hook, &source, good}, {0, &hook, &source, good}}),
            StatusCode::kBadArgument);
  EXPECT_EQ(cache->StateDigest(), digest);
  AttentionKVCacheOptions skipping = options;
  skipping.allow_skipped_layers = true;
  const auto other = MakeTestCache(skipping);
  ASSERT_TRUE(other->AddSequence(0).ok());
  ASSERT_TRUE(other->AddSequence(1).ok());
  EXPECT_EQ(begin(*other, {{0, &hook, &source, good}}), StatusCode::kBadState);
  // In the forward: masks, pieces, another order of layers.
  const auto fails = [&](const std::function<Status()>& call) {
    ASSERT_EQ(begin(*cache, {{0, &hook, &source, good}}), StatusCode::kOk);
    EXPECT_EQ(call().code(), StatusCode::kBadState);
    ASSERT_TRUE(cache->AbortForward().ok());
  };
  const TokenInputs inputs =
      MakeTokenInputs(options.layers[0], 0, DType::kF32, Tokens{1, 2, 3, 4, 5});
  TestTensor o(DType::kF32, {5, 4, 8}), lse(DType::kF32, {5, 4}), mask(DType::kU8, {17});
  fails([&] {
    return cache->AttentionWithFusedQKV(0, inputs.qkv.view(), o.view(), 1, &mask.view());
  });
  fails([&] {
    return cache->SelfAttention(0, inputs.q.view(), inputs.k.view(), inputs.v.view(), o.view(),
                                lse.view(), 1);
  });
  fails([&] { return cache->CrossAttention(0, inputs.q.view(), o.view(), lse.view(), 1); });
  fails([&] { return cache->Append(1, inputs.k.view(), inputs.v.view()); });
  fails([&] {
    EXPECT_TRUE(cache->Append(0, inputs.k.view(), inputs.v.view()).ok());
    EXPECT_TRUE(cache->Append(1, inputs.k.view(), inputs.v.view()).ok());
    return cache->Attend(0, inputs.q.view(), o.view(), nullptr, 1);
  });
  EXPECT_EQ(cache->StateDigest(), digest);
}

// The rows of layers that share the keys and values of a check layer are those that go on.
TEST(BlendingForward, SharedKeysAreReadByTheRowsThatGoOn) {
  const AttentionKVCacheOptions options = OptionsOf(SmallShape());
  Blend blend(options, {{.id = 0, .held = 20, .rows = 30, .chosen = {{0, {2, 17, 29}}}}});
  const auto cache = blend.MakeCache();
  const auto whole = blend.MakeCache();
  const Tokens tokens = FreshTokens(blend.members());
  const Tokens left{tokens[2], tokens[17], tokens[29]};
  LayerOutputs outputs;
  ASSERT_TRUE(blend.Begin(*cache).ok());
  ASSERT_TRUE(whole->BeginForward(Ids{0}, Ids{30}).ok());
  ASSERT_TRUE(RunLayer(*cache, options.layers[0], 0, tokens, {}, &outputs).ok());
  ASSERT_TRUE(RunLayer(*whole, options.layers[0], 0, tokens, {}, &outputs).ok());
  const TokenInputs few = MakeTokenInputs(options.layers[0], 3, DType::kF32, left);
  const TokenInputs all = MakeTokenInputs(options.layers[0], 3, DType::kF32, tokens);
  TestTensor o(DType::kF32, {3, 4, 8}), whole_o(DType::kF32, {30, 4, 8});
  const Status status = cache->AttentionWithSharedKV(0, few.q.view(), o.view(), nullptr, 0.3);
  ASSERT_TRUE(status.ok()) << status.ToString();
  ASSERT_TRUE(whole->AttentionWithSharedKV(0, all.q.view(), whole_o.view(), nullptr, 0.3).ok());
  EXPECT_TRUE(std::ranges::equal(o.rows(0, 1), whole_o.rows(2, 1)));
  EXPECT_TRUE(std::ranges::equal(o.rows(1, 1), whole_o.rows(17, 1)));
  EXPECT_TRUE(std::ranges::equal(o.rows(2, 1), whole_o.rows(29, 1)));
}

TEST(BlendingForward, EveryAllocationOfBeginMayFail) {
  const AttentionKVCacheOptions options = OptionsOf(SmallShape());
  Blend blend(options, TwoMembers());
  const Ids ids = IdsOf(blend.members()), lengths = LengthsOf(blend.members());
  int64_t refusals = 0;
  for (int64_t n = 0;; ++n) {
    ASSERT_LT(n, 1000) << "never succeeds";
    const auto cache = blend.MakeCache();
    const uint64_t digest = cache->StateDigest();
    Status status;
    bool refused = false;
    {
      RefuseAllocation refusal(n);
      status = cache->BeginBlendingForward(ids, lengths, {}, blend.blends());
      refused = refusal.refused();
    }
    ASSERT_TRUE(cache->CheckInvariants().ok());
    if (!refused) {
      ASSERT_TRUE(status.ok()) << status.ToString();
      // Layers take no memory but the hook's answer.
      ASSERT_TRUE(cache->AbortForward().ok());
      EXPECT_EQ(cache->StateDigest(), digest);
      break;
    }
    ++refusals;
    EXPECT_EQ(status.code(), StatusCode::kOutOfMemory) << status.ToString();
    EXPECT_EQ(cache->StateDigest(), digest);
  }
  EXPECT_GT(refusals, 10);
}

// A forward takes no more than was planned for it.
TEST(BlendingForward, MemoryIsWithinThePlan) {
  Shape shape = SmallShape();
  shape.scale = 300;
  const AttentionKVCacheOptions options = OptionsOf(shape);
  MemberScript script{.id = 0, .rows = options.prefill_chunk_size};
  for (int32_t r = 1; r < script.rows; r += 2) script.chosen[1].push_back(r);  // the most runs
  script.chosen[1].push_back(static_cast<int32_t>(script.rows - 1));
  script.chosen[1].erase(std::unique(script.chosen[1].begin(), script.chosen[1].end()),
                         script.chosen[1].end());
  Blend blend(options, {script});
  const auto cache = blend.MakeCache();
  const KVMemory memory = MeasureKVCache(options, 1).value();
  ASSERT_TRUE(blend.Run(*cache).ok());
  const auto& paged = static_cast<const PagedKVCache&>(*cache);
  EXPECT_LE(paged.figures().scratch_bytes + paged.figures().blend_bytes,
            memory.scratch_bytes + memory.blend_bytes);
  EXPECT_GT(paged.figures().blend_bytes, 0);
}

TEST(BlendingForward, ThePlanNamesRunsAndWhatTheyShare) {
  const AttentionKVCacheOptions options = OptionsOf(SmallShape());
  Blend blend(options, {{.id = 0, .held = 250, .rows = 40, .chosen = {{0, {2, 3, 17, 39}}}}});
  const auto cache = blend.MakeCache();
  ASSERT_TRUE(blend.Begin(*cache).ok());
  LayerOutputs outputs;
  ASSERT_TRUE(
      RunLayer(*cache, options.layers[0], 0, FreshTokens(blend.members()), {}, &outputs).ok());
  const std::string plan = cache->DebugPlan().value();
  EXPECT_NE(plan.find("4 of 40 rows go on\n"
                      "sequence 0: rows [2, 4) read as [2, 4), private from segment 0\n"
                      "sequence 0: rows [17, 18) read as [17, 18), private from segment 1\n"
                      "sequence 0: rows [39, 40) read as [39, 40), private from segment 1\n"
                      "segments [0, 1) are shared by runs [1, 3)\n"),
            std::string::npos)
      << plan;
}

}  // namespace
}  // namespace quire
