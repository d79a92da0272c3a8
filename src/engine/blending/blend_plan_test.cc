// How a blended prompt is cut, what a piece costs, which blends are equal, and what is refused: all
// pure functions of the request.
#include "engine/blending/blend_plan.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <ctime>
#include <memory>
#include <numeric>
#include <span>
#include <utility>

#include "base/guard.h"
#include "base/testing/refuse_each.h"

namespace quire {
namespace {

using Pieces = std::vector<BlendPiece>;

ModelInfo Model(int64_t layer_count = 10) {
  ModelInfo model;
  model.architecture = "Some";
  model.bos_token_id = 7;
  model.layers.resize(static_cast<size_t>(layer_count));
  return model;
}

SamplingOptions Blending(std::vector<PromptDocument> documents) {
  SamplingOptions options;
  options.blend = BlendRequest{.documents = std::move(documents), .unverified = true};
  return options;
}

std::vector<int32_t> Prompt(int64_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), 100);
  return tokens;
}

TEST(BlendPieces, ADocumentBehindTheAnchorIsTheBeginningOfThePromptItself) {
  const std::vector<PromptDocument> documents = {{10, 20}, {20, 30}};
  EXPECT_EQ(CutPieces(MovableDocuments(documents), 100), (Pieces{{20, 30}}));
  const std::vector<PromptDocument> without_anchor = {{0, 20}, {20, 30}};
  EXPECT_EQ(CutPieces(MovableDocuments(without_anchor), 100), (Pieces{{0, 30}}));
  EXPECT_EQ(CutPieces(MovableDocuments(std::vector<PromptDocument>{{10, 20}}), 100), Pieces{});
}

TEST(BlendPieces, WholeDocumentsShareAPieceAndLongOnesAreCut) {
  const std::vector<PromptDocument> documents = {{5, 10}, {10, 40}, {45, 70}, {70, 90}, {90, 260}};
  // Gaps go with the document before them.
  EXPECT_EQ(CutPieces(MovableDocuments(documents), 60),
            (Pieces{{10, 70}, {70, 90}, {90, 150}, {150, 210}, {210, 260}}));
  EXPECT_EQ(CutPieces(MovableDocuments(documents), 1000), (Pieces{{10, 260}}));
  EXPECT_EQ(CutPieces(MovableDocuments(documents), 35), (Pieces{{10, 45},
                                                                {45, 70},
                                                                {70, 90},
                                                                {90, 125},
                                                                {125, 160},
                                                                {160, 195},
                                                                {195, 230},
                                                                {230, 260}}));
}

TEST(BlendPieces, CostIsRowsTimesLayersOfAllLayers) {
  const std::vector<PromptDocument> documents = {{0, 100}};
  BlendOptions options;  // layer 1, 0.15
  // 10 layers: 100 rows in two of them, 15 in eight.
  EXPECT_EQ(PieceCost({0, 100}, documents, options, 10), (100 * 2 + 15 * 8) / 10);
  options.link_tokens = 5;
  EXPECT_EQ(PieceCost({0, 100}, documents, options, 10), (100 * 2 + 20 * 8) / 10);
  // Rows of no document are computed in all layers.
  EXPECT_EQ(PieceCost({0, 150}, documents, options, 10), (150 * 2 + 70 * 8) / 10);
  options = {.check_layers = {1, 5}, .ratios = {0.5, 0.1}};
  EXPECT_EQ(PieceCost({0, 100}, documents, options, 10), (100 * 2 + 50 * 4 + 10 * 4) / 10);
  options = {.ratios = {1.0}};
  EXPECT_EQ(PieceCost({0, 100}, documents, options, 10), 100);
  // 15 % of 10 rows are two, and what is left of a row is one.
  EXPECT_EQ(PieceCost({0, 10}, documents, BlendOptions(), 10), 4) << "(10 * 2 + 2 * 8) / 10";
}

TEST(BlendPlan, APieceIsEnteredWhereTheExactTokensEnd) {
  const SamplingOptions options = Blending({{5, 10}, {10, 40}, {45, 70}});
  const BlendPlan plan(Model(), Prompt(80), *options.blend, {}, 40);
  EXPECT_EQ(plan.begin(), 10);
  BlendPlan::Found found;
  EXPECT_FALSE(plan.FindPiece(9, &found));
  ASSERT_TRUE(plan.FindPiece(10, &found));
  EXPECT_EQ(found.rest, (BlendPiece{10, 45}));
  ASSERT_TRUE(plan.FindPiece(44, &found));
  EXPECT_EQ(found.rest, (BlendPiece{44, 45}));
  ASSERT_TRUE(plan.FindPiece(45, &found));
  EXPECT_EQ(found.index, 1U);
  EXPECT_FALSE(plan.FindPiece(70, &found));
  EXPECT_EQ(plan.NextBorder(0), 10);
  EXPECT_EQ(plan.NextBorder(10), 45);
  EXPECT_EQ(plan.NextBorder(69), 70);
  EXPECT_EQ(plan.NextBorder(70), kExactForever);
  // What is approximate goes on between pieces.
  EXPECT_EQ(plan.BorderBefore(8), 8);
  EXPECT_EQ(plan.BorderBefore(44), 10);
  EXPECT_EQ(plan.BorderBefore(45), 45);
  EXPECT_EQ(plan.BorderBefore(69), 45);
  EXPECT_EQ(plan.BorderBefore(75), 75);
}

TEST(BlendPlan, ShortPromptsAreNotBlended) {
  SamplingOptions options = Blending({{5, 10}, {10, 40}});
  options.blend->options.min_tokens = 81;
  const BlendPlan plan(Model(), Prompt(80), *options.blend, {}, 40);
  BlendPlan::Found found;
  EXPECT_FALSE(plan.FindPiece(10, &found));
  EXPECT_EQ(plan.begin(), 80);
}

TEST(BlendPlan, ADocumentIsKnownBehindItsAnchor) {
  const std::vector<int32_t> prompt = Prompt(50);
  const SamplingOptions behind = Blending({{3, 10}, {20, 24}});
  const BlendPlan plan(Model(), prompt, *behind.blend, {}, 40);
  const BlendPlan::Chain chain = plan.ChainOf(prompt, behind.blend->documents[1]);
  EXPECT_EQ(chain.tokens(), (std::vector<int32_t>{100, 101, 102, 120, 121, 122, 123}));
  EXPECT_EQ(chain.document_begin, 3);
  EXPECT_TRUE(chain.IsOf(chain.tokens()));
  for (size_t i = 0; i < 7; ++i) {
    std::vector<int32_t> other = chain.tokens();
    ++other[i];
    EXPECT_FALSE(chain.IsOf(other)) << i;
  }
  EXPECT_FALSE(chain.IsOf(std::span(prompt).first(6)));
  // Without an anchor it is the begin token, once.
  const SamplingOptions first = Blending({{0, 2}, {2, 4}});
  const BlendPlan bare(Model(), prompt, *first.blend, {}, 40);
  EXPECT_EQ(bare.ChainOf(prompt, first.blend->documents[1]).tokens(),
            (std::vector<int32_t>{7, 102, 103}));
  const std::vector<int32_t> with_bos = {7, 1, 2, 3};
  const BlendPlan::Chain own = bare.ChainOf(with_bos, {0, 2});
  EXPECT_EQ(own.tokens(), (std::vector<int32_t>{7, 1}));
  EXPECT_EQ(own.document_begin, 0);
}

// However a chain's tokens are cut into an anchor and a document, they are learnt once.
TEST(BlendPlan, EqualChainsAreLearntOnce) {
  const auto unknown = [](const std::vector<int32_t>& prompt, const BlendRequest& request,
                          std::vector<FoundDocument> found, int64_t own_end) {
    const BlendPlan plan(Model(), prompt, request, std::move(found), 40, own_end);
    std::vector<std::vector<int32_t>> learnt;
    for (const auto& chain : plan.Unknown(prompt, 0, true, [](const auto&) { return false; }))
      learnt.push_back(chain.tokens());
    return learnt;
  };
  using Chains = std::vector<std::vector<int32_t>>;
  // Behind the begin token, and a document that begins with it.
  const std::vector<int32_t> bare = {7, 1, 2, 1, 2, 7, 1, 2, 3, 2};
  EXPECT_EQ(unknown(bare, *Blending({{0, 3}, {3, 5}, {5, 8}, {8, 10}}).blend, {}, 0),
            (Chains{{7, 1, 2}, {7, 3, 2}}));
  // The prompt's own beginning, and the same document once more.
  const std::vector<int32_t> twice = {9, 8, 1, 2, 1, 2, 8, 1, 2, 5};
  EXPECT_EQ(unknown(twice, *Blending({{2, 4}, {4, 6}, {6, 9}}).blend, {}, 0),
            (Chains{{9, 8, 1, 2}, {9, 8, 8, 1, 2}}));
  BlendRequest search;
  search.search = DocumentSearch::kAnchored;
  const auto known = std::make_shared<const std::vector<int32_t>>(twice.begin(), twice.begin() + 4);
  const auto other = std::make_shared<const std::vector<int32_t>>(std::vector<int32_t>{9, 8, 8, 1});
  EXPECT_EQ(unknown(twice, search,
                    {{.begin = 4, .end = 6, .chain = known, .from = 2, .anchor_tokens = 2},
                     {.begin = 6, .end = 8, .chain = other, .from = 2, .anchor_tokens = 2}},
                    4),
            (Chains{{9, 8, 1, 2}, {9, 8, 8, 1}}));
}

TEST(BlendPlan, TheOwnBeginningIsLearntWhereThatIsAskedFor) {
  const std::vector<int32_t> prompt = Prompt(80);
  const auto unknown = [&](const SamplingOptions& options, bool with_own) {
    const BlendPlan plan(Model(), prompt, *options.blend, {}, 40);
    std::vector<int64_t> sizes;
    for (const auto& chain : plan.Unknown(prompt, 0, with_own, [](const auto&) { return false; })) {
      sizes.push_back(chain.size());
      EXPECT_EQ(chain.is_own, with_own && sizes.size() == 1);
    }
    return sizes;
  };
  SamplingOptions options = Blending({{5, 12}, {12, 40}, {40, 50}});
  const auto behind = [&](int64_t exact) {
    const BlendPlan plan(Model(), prompt, *options.blend, {}, 40);
    return std::ssize(plan.Unknown(prompt, exact, false, [](const auto&) { return false; }));
  };
  EXPECT_EQ(behind(39), 2) << "a part of a document is exact";
  EXPECT_EQ(behind(40), 1);
  EXPECT_EQ(behind(80), 0);
  options = Blending({{5, 12}, {12, 40}});
  EXPECT_EQ(BlendPlan(Model(), prompt, *options.blend, {}, 40).own_end(), 12);
  EXPECT_EQ(unknown(options, false), (std::vector<int64_t>{5 + 28}));
  EXPECT_EQ(unknown(options, true), (std::vector<int64_t>{12, 5 + 28}));
  options.blend->learn = DocumentLearning::kOff;
  EXPECT_EQ(unknown(options, false), std::vector<int64_t>{});
  EXPECT_EQ(unknown(options, true), std::vector<int64_t>{12}) << "it is computed in any case";
  // A prompt of one document has no pieces.
  EXPECT_EQ(unknown(Blending({{5, 12}}), true), std::vector<int64_t>{12});
  // Without an anchor the first document, too, is moved.
  options = Blending({{0, 12}, {12, 40}});
  EXPECT_EQ(BlendPlan(Model(), prompt, *options.blend, {}, 40).own_end(), 0);
  EXPECT_EQ(std::ssize(unknown(options, false)), 2);
  // A search says where its own one ends.
  BlendRequest search;
  search.search = DocumentSearch::kAnchored;
  const BlendPlan found(Model(), prompt, search, {}, 40, 33);
  EXPECT_EQ(found.own_end(), 33);
  const auto own = found.Unknown(prompt, 0, true, [](const auto&) { return false; });
  ASSERT_EQ(own.size(), 1U);
  EXPECT_EQ(own[0].tokens(), std::vector<int32_t>(prompt.begin(), prompt.begin() + 33));
}

// Tokens of which the first ones may not be read: the process would end.
class GuardedTokens {
 public:
  GuardedTokens(int64_t guarded_bytes, int64_t count) : bytes_(guarded_bytes + count * 4) {
    memory_ = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(memory_, MAP_FAILED);
    tokens_ = {static_cast<int32_t*>(memory_), static_cast<size_t>(bytes_ / 4)};
    std::iota(tokens_.begin(), tokens_.end(), 0);
    EXPECT_EQ(::mprotect(memory_, static_cast<size_t>(guarded_bytes), PROT_NONE), 0);
  }
  GuardedTokens(const GuardedTokens&) = delete;
  GuardedTokens& operator=(const GuardedTokens&) = delete;
  ~GuardedTokens() { ::munmap(memory_, static_cast<size_t>(bytes_)); }
  std::span<int32_t> tokens() const { return tokens_; }

 private:
  const int64_t bytes_;
  void* memory_;
  std::span<int32_t> tokens_;
};

// Each was compared with all others, and copied, from the anchor's first token on: for seconds, in
// which no step was made.
TEST(BlendPlan, DocumentsAreToldApartWithoutTheirAnchor) {
  constexpr int64_t kDocuments = 2'000;
  const int64_t anchor = ::sysconf(_SC_PAGESIZE) / 4;
  const GuardedTokens guarded(anchor * 4, 2 * kDocuments);
  std::vector<PromptDocument> documents;
  for (int64_t i = 0; i < kDocuments; ++i)
    documents.push_back({anchor + 2 * i, anchor + 2 * i + 2});
  // One comes once more.
  guarded.tokens()[static_cast<size_t>(anchor + 100)] = static_cast<int32_t>(anchor + 50);
  guarded.tokens()[static_cast<size_t>(anchor + 101)] = static_cast<int32_t>(anchor + 51);
  const BlendPlan plan(Model(), guarded.tokens(), *Blending(documents).blend, {}, 40);
  int64_t asked = 0;
  const auto unknown = plan.Unknown(guarded.tokens(), 0, false, [&](const auto& chain) {
    EXPECT_EQ(chain.anchor.data(), guarded.tokens().data());
    EXPECT_EQ(chain.document_begin, anchor);
    return asked++ == 0;
  });
  EXPECT_EQ(std::ssize(unknown), kDocuments - 3) << "the own one, a known one and a second one";
}

TEST(BlendPlan, FoundDocumentsAreMovedFromWhereTheyAreKnown) {
  const std::vector<int32_t> prompt = Prompt(80);
  std::vector<int32_t> known = {1, 2, 3};  // an anchor, and the document behind it
  known.insert(known.end(), prompt.begin() + 10, prompt.begin() + 70);
  const auto chain = std::make_shared<const std::vector<int32_t>>(known);
  const std::vector<FoundDocument> found = {
      {.begin = 10, .end = 30, .chain = chain, .from = 3, .anchor_tokens = 3},
      {.begin = 40, .end = 70, .chain = chain, .from = 33, .anchor_tokens = 3}};
  BlendRequest request;
  request.search = DocumentSearch::kAnywhere;
  const BlendPlan plan(Model(), prompt, request, found, 40);
  EXPECT_EQ(plan.movable().size(), 2U) << "the first one, too, stands behind other tokens";
  EXPECT_EQ(plan.begin(), 10);
  EXPECT_EQ(plan.Usage().documents, 2);
  const BlendPlan::Chain middle = plan.MovableChain(prompt, 1);
  EXPECT_EQ(middle.tokens(), known);
  EXPECT_EQ(middle.document_begin, 33);
  EXPECT_EQ(plan.MovableChain(prompt, 0).anchor.data(), middle.anchor.data());
  EXPECT_EQ(plan.MovableChain(prompt, 0).tokens(),
            (std::vector<int32_t>{known.begin(), known.begin() + 23}));
  // Nobody computes what stands before a part for its sake.
  const auto unknown = plan.Unknown(prompt, 0, false, [](const auto&) { return false; });
  ASSERT_EQ(unknown.size(), 1U);
  EXPECT_EQ(unknown[0].tokens(), std::vector<int32_t>(known.begin(), known.begin() + 23));
  const BlendPlan nothing(Model(), prompt, request, {}, 40);
  EXPECT_EQ(nothing.begin(), 80);
  EXPECT_EQ(nothing.Usage().documents, 0);
  // The same documents behind other tokens are another blend.
  const std::string recipe = BlendRecipe(request, found, 2048);
  EXPECT_EQ(BlendRecipe(request, found, 2048), recipe);
  EXPECT_NE(BlendRecipe(request, {}, 2048), recipe);
  known[1] = 9;
  auto others = found;
  others[0].chain = std::make_shared<const std::vector<int32_t>>(known);
  EXPECT_NE(BlendRecipe(request, others, 2048), recipe);
  others = found;
  others[1].begin = 41;
  EXPECT_NE(BlendRecipe(request, others, 2048), recipe);
}

// Each part had the whole chain before it hashed: 4 000 of one document of 2 000 000 tokens took
// seconds, in which no step was made.
TEST(BlendRecipe, HashesEachChainOnce) {
  constexpr int64_t kParts = 4'000;
  constexpr int64_t kApart = 500;
  const auto chain = std::make_shared<const std::vector<int32_t>>(Prompt(kParts * kApart + 16));
  std::vector<FoundDocument> found;
  for (int64_t i = 0; i < kParts; ++i) {  // in an order that is none in the document
    const int64_t from = (i * 1'237 % kParts) * kApart;
    found.push_back({.begin = 20 * i, .end = 20 * i + 16, .chain = chain, .from = from});
  }
  found.back().from = found.front().from;  // one comes twice
  const std::clock_t begin = std::clock();
  const std::string recipe = BlendRecipe({}, found, 2048);
  EXPECT_LT(std::clock() - begin, CLOCKS_PER_SEC);
  const auto recipe_of = [&](auto&& change) {
    std::vector<int32_t> tokens = *chain;
    change(&tokens);
    const auto other = std::make_shared<const std::vector<int32_t>>(std::move(tokens));
    std::vector<FoundDocument> parts = found;
    for (FoundDocument& part : parts) part.chain = other;
    return BlendRecipe({}, parts, 2048);
  };
  EXPECT_EQ(recipe_of([](auto*) {}), recipe);
  for (const int64_t changed :
       {int64_t{0}, kApart - 1, kParts * kApart / 2, (kParts - 1) * kApart - 1}) {
    EXPECT_NE(recipe_of([&](auto* tokens) { ++(*tokens)[static_cast<size_t>(changed)]; }), recipe);
  }
  // Behind the last part's begin it is the prompt's tokens that are compared.
  EXPECT_EQ(recipe_of([](auto* tokens) { ++tokens->back(); }), recipe);
}

TEST(BlendRecipe, TellsBlendsApartThatMayGiveOtherKV) {
  const BlendRequest request{.documents = {{5, 10}, {10, 40}}};
  const std::string recipe = BlendRecipe(request, {}, 2048);
  EXPECT_EQ(BlendRecipe(request, {}, 2048), recipe);
  EXPECT_NE(BlendRecipe(request, {}, 1024), recipe);
  const auto differs = [&](auto&& change) {
    BlendRequest other = request;
    change(other);
    return BlendRecipe(other, {}, 2048) != recipe;
  };
  EXPECT_TRUE(differs([](auto& r) { r.documents[1].end = 41; }));
  EXPECT_TRUE(differs([](auto& r) { r.documents[1].ratio = 0.0; }));
  EXPECT_TRUE(differs([](auto& r) { r.documents.pop_back(); }));
  EXPECT_TRUE(differs([](auto& r) { r.options.ratios = {0.16}; }));
  EXPECT_TRUE(differs([](auto& r) { r.options.check_layers = {2}; }));
  EXPECT_TRUE(differs([](auto& r) { r.options.metric = DeviationMetric::kKL2; }));
  EXPECT_TRUE(differs([](auto& r) { r.options.link_tokens = 0; }));
  EXPECT_TRUE(differs([](auto& r) { r.options.min_tokens = 1; }));
  EXPECT_TRUE(differs([](auto& r) { r.options.thresholds = {0.5F}; }));
  // These give the same.
  EXPECT_FALSE(differs([](auto& r) { r.options.thresholds = {0.0F}; }));
  EXPECT_FALSE(differs([](auto& r) { r.options.force_last = false; }));
}

// One that was cut off for want of memory would be that of other blends, too.
TEST(BlendRecipe, IsWhole) {
  const BlendRequest request{.documents = std::vector<PromptDocument>(40, {5, 10})};
  const std::string recipe = BlendRecipe(request, {}, 2048);
  RefuseEach("recipe", StatusCode::kOk, [&] {
    return GuardEntry([&]() -> Status {
      EXPECT_EQ(BlendRecipe(request, {}, 2048), recipe);
      return {};
    });
  });
}

TEST(CheckBlend, NamesWhatIsWrong) {
  const auto error = [](const SamplingOptions& options, const ModelInfo& model = Model(),
                        int64_t piece_max = 2048) {
    const Status status = CheckBlend(model, 50, options, piece_max);
    EXPECT_EQ(status.code(), StatusCode::kBadArgument);
    return std::string(status.message());
  };
  const auto has = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(CheckBlend(Model(), 50, Blending({{5, 10}, {10, 50}}), 2048).ok());
  EXPECT_TRUE(CheckBlend(Model(), 50, SamplingOptions(), 0).ok()) << "exact requests need nothing";
  EXPECT_TRUE(has(error(Blending({})), "documents: there are none"));
  EXPECT_TRUE(
      has(error(Blending({{5, 10}, {9, 12}})), "documents[1]: [9, 12) begins before token 10"));
  EXPECT_TRUE(has(error(Blending({{20, 30}, {5, 10}})), "documents[1]"));
  EXPECT_TRUE(has(error(Blending({{5, 5}})), "[5, 5) is empty"));
  EXPECT_TRUE(has(error(Blending({{5, 51}})), "ends behind the prompt, which has 50 tokens"));
  EXPECT_TRUE(has(error(Blending({{5, 10, 1.5}})), "documents[0].ratio"));
  SamplingOptions options = Blending({{5, 10}});
  options.blend->options.check_layers = {1, 3};
  options.blend->options.ratios = {0.1, 0.2};
  EXPECT_TRUE(has(error(options), "blend.options"));
  options.blend->options.check_layers = {10};
  options.blend->options.ratios = {0.1};
  EXPECT_TRUE(has(error(options), "10")) << "a layer that the model lacks";
  options = Blending({{5, 10}});
  EXPECT_TRUE(has(error(options, Model(), 0), "blend_piece is 0"));
  options.window = 20;
  EXPECT_TRUE(has(error(options), "window is 20"));
  ModelInfo hybrid = Model();
  hybrid.recurrent_layers.resize(1);
  EXPECT_TRUE(has(error(Blending({{5, 10}}), hybrid), "recurrent"));
  options = Blending({{5, 10}});
  options.blend->search = DocumentSearch::kAnchored;
  EXPECT_TRUE(has(error(options), "search: it finds the documents, and 1 are named"));
  options.blend->documents.clear();
  EXPECT_TRUE(CheckBlend(Model(), 50, options, 2048).ok());
}

TEST(CheckBlend, WhatMayBeApproximateNeedsAVerdict) {
  const auto check = [](auto&& change) {
    SamplingOptions options = Blending({{5, 10}, {10, 20}});
    options.blend->unverified = false;
    change(*options.blend);
    const Status status = CheckBlend(Model(), 50, options, 2048);
    EXPECT_TRUE(status.ok() || status.code() == StatusCode::kBadArgument);
    return std::string(status.message());
  };
  const std::string missing = check([](auto&) {});
  EXPECT_NE(missing.find("nobody has measured what blending costs this model"), std::string::npos);
  EXPECT_EQ(check([](auto& r) { r.unverified = true; }), "");
  EXPECT_EQ(check([](auto& r) { r.verdict = BlendVerdict{0.3, 0.75}; }), "");
  for (const BlendVerdict& bad :
       {BlendVerdict{0.31, 0.9}, BlendVerdict{0.1, 0.74}, BlendVerdict{NAN, 0.9}}) {
    const std::string refusal = check([&](auto& r) { r.verdict = bad; });
    EXPECT_NE(refusal.find("it costs this model too much"), std::string::npos) << refusal;
    EXPECT_EQ(check([&](auto& r) { r.verdict = bad, r.unverified = true; }), "");
  }
  // What is exact needs none; a budget below 1 or a threshold leaves rows as they were moved.
  EXPECT_EQ(check([](auto& r) { r.options.ratios = {1.0}; }), "");
  EXPECT_EQ(check([](auto& r) {
              r.options.ratios = {1.0};
              r.options.thresholds = {0.5F};
            }),
            missing);
  EXPECT_EQ(check([](auto& r) {
              r.options.ratios = {1.0};
              r.documents[1].ratio = 0.5;
            }),
            missing);
  EXPECT_EQ(check([](auto& r) {
              r.options.check_layers = {1, 3};
              r.options.ratios = {1.0, 0.9};
            }),
            missing);
}

}  // namespace
}  // namespace quire
