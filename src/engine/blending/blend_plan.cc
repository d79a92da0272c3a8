#include "engine/blending/blend_plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <iomanip>
#include <sstream>
#include <utility>

#include "base/checksum.h"

namespace quire {
namespace {

Status BadBlend(const std::string& field, const std::string& why) {
  return Status(StatusCode::kBadArgument, "SamplingOptions::blend." + field + ": " + why,
                {.option = "blend"});
}

// Whether all that is moved is computed again.
bool IsExact(const BlendRequest& request) {
  const auto is_one = [](double ratio) { return ratio >= 1; };
  const BlendOptions& options = request.options;
  return std::ranges::all_of(options.ratios, is_one) &&
         std::ranges::all_of(options.thresholds, [](float threshold) { return threshold == 0; }) &&
         std::ranges::all_of(request.documents, [&](const PromptDocument& document) {
           return is_one(document.ratio.value_or(1));
         });
}

Status CheckVerdict(const BlendRequest& request) {
  if (request.unverified || IsExact(request)) return {};
  const std::string force =
      "; a ratio of 1 is exact, and BlendRequest::unverified (blend_unverified of an engine in "
      "Python) forces it";
  if (!request.verdict) {
    return Status(StatusCode::kBadArgument,
                  "SamplingOptions::blend: nobody has measured what blending costs this model with "
                  "this type of KV; run quire blend eval" +
                      force,
                  {"blend", RefusalReason::kUnverifiedBlend});
  }
  if (request.verdict->passes()) return {};
  std::ostringstream why;
  why << std::fixed << std::setprecision(3)
      << "SamplingOptions::blend: it costs this model too much: a divergence of "
      << request.verdict->divergence << " nats (at most " << BlendVerdict::kDivergenceMost
      << "), the same token in " << std::setprecision(1) << 100 * request.verdict->agreement
      << " % (at least " << 100 * BlendVerdict::kAgreementLeast << " %)" << force;
  return Status(StatusCode::kBadArgument, why.str(), {"blend", RefusalReason::kUnverifiedBlend});
}

Status CheckPromptDocuments(const BlendRequest& request, int64_t prompt_tokens) {
  const std::span<const PromptDocument> documents = request.documents;
  const bool searches = request.search != DocumentSearch::kOff;
  if (searches && !documents.empty()) {
    return BadBlend("search", "it finds the documents, and " + std::to_string(documents.size()) +
                                  " are named; leave one of them out");
  }
  if (!searches && documents.empty()) {
    return BadBlend("documents", "there are none; say which tokens of the prompt are documents");
  }
  if (std::ssize(documents) > SamplingOptions::kBlendDocumentsMax) {
    return BadBlend("documents", "there are " + std::to_string(documents.size()) + "; at most " +
                                     std::to_string(SamplingOptions::kBlendDocumentsMax));
  }
  int64_t end = 0;
  for (size_t i = 0; i < documents.size(); ++i) {
    const PromptDocument& document = documents[i];
    const std::string name = "documents[" + std::to_string(i) + "]";
    std::ostringstream range;
    range << "[" << document.begin << ", " << document.end << ")";
    if (document.begin < end) {
      return BadBlend(name, range.str() + " begins before token " + std::to_string(end) +
                                "; documents ascend and do not overlap");
    }
    if (document.end <= document.begin) return BadBlend(name, range.str() + " is empty");
    if (document.end > prompt_tokens) {
      return BadBlend(name, range.str() + " ends behind the prompt, which has " +
                                std::to_string(prompt_tokens) + " tokens");
    }
    if (document.ratio && !(*document.ratio >= 0 && *document.ratio <= 1)) {
      return BadBlend(name + ".ratio", std::to_string(*document.ratio) + " is not in [0, 1]");
    }
    end = document.end;
  }
  return {};
}

using HashPair = std::array<uint64_t, 2>;

// Sums over the tokens before each part in its chain. A chain may have thousands of parts in a
// prompt, and millions of tokens: it is gone through once. So a hash depends on the places of the
// chain's other parts, too, which recipes have as well.
std::vector<HashPair> HashesBefore(std::span<const FoundDocument> found) {
  std::vector<const FoundDocument*> parts;
  for (const FoundDocument& document : found) parts.push_back(&document);
  std::sort(parts.begin(), parts.end(), [](const FoundDocument* a, const FoundDocument* b) {
    return a->chain != b->chain ? std::less<>()(a->chain.get(), b->chain.get()) : a->from < b->from;
  });
  std::vector<HashPair> hashes(found.size());
  const std::vector<int32_t>* chain = nullptr;
  HashPair sum = {};
  int64_t at = 0;
  for (const FoundDocument* part : parts) {
    if (part->chain.get() != chain) {
      chain = part->chain.get();
      sum = {1, 2};
      at = 0;
    }
    const auto tokens =
        std::span(*chain).subspan(static_cast<size_t>(at), static_cast<size_t>(part->from - at));
    // Parts at one place have one sum, whichever comes first.
    for (uint64_t& hash : sum) {
      if (!tokens.empty()) hash = Hash64(tokens.data(), tokens.size_bytes(), hash);
    }
    at = part->from;
    hashes[static_cast<size_t>(part - found.data())] = sum;
  }
  return hashes;
}

}  // namespace

Status CheckBlend(const ModelInfo& model, int64_t prompt_tokens, const SamplingOptions& options,
                  int64_t piece_max) {
  if (!options.blend) return {};
  if (!model.recurrent_layers.empty() || model.layers.empty()) {
    return Status(StatusCode::kBadArgument,
                  "SamplingOptions::blend: " + model.architecture +
                      " has recurrent layers, in which every token must be computed, so nothing "
                      "can be saved; leave it out: an exact beginning of the prompt is reused",
                  {.option = "blend"});
  }
  if (piece_max == 0) {
    return Status(StatusCode::kBadArgument,
                  "SamplingOptions::blend: EngineOptions::blend_piece is 0, so this engine has no "
                  "room for blended prompts; make it with 2048",
                  {"blend", RefusalReason::kNoBlendRoom});
  }
  if (options.window != 0) {
    return Status(StatusCode::kBadArgument,
                  "SamplingOptions::blend: window is " + std::to_string(options.window) +
                      "; endless text cannot be blended: leave one of them out",
                  {.option = "blend"});
  }
  const Status status =
      CheckBlendOptions(options.blend->options, static_cast<int64_t>(model.layers.size()));
  if (!status.ok()) return BadBlend("options", std::string(status.message()));
  QUIRE_RETURN_IF_ERROR(CheckPromptDocuments(*options.blend, prompt_tokens));
  return CheckVerdict(*options.blend);
}

std::string BlendRecipe(const BlendRequest& request, std::span<const FoundDocument> found,
                        int64_t piece_max) {
  std::ostringstream text;
  text.exceptions(std::ios::badbit);  // without memory it would end early, as another one may
  const auto bits = [&](double value) { text << std::bit_cast<uint64_t>(value + 0.0) << ' '; };
  const BlendOptions& options = request.options;
  text << "piece " << piece_max << " metric " << static_cast<int>(options.metric) << " links "
       << options.link_tokens << " least " << options.min_tokens << " layers ";
  for (size_t i = 0; i < options.check_layers.size(); ++i) {
    text << options.check_layers[i] << ' ';
    bits(options.ratios[i]);
    bits(options.thresholds.empty() ? 0 : static_cast<double>(options.thresholds[i]));
  }
  text << "documents ";
  for (const PromptDocument& document : request.documents) {
    text << document.begin << ' ' << document.end << ' ';
    bits(document.ratio.value_or(-1));
  }
  // Prefix caches compare the tokens of the prompt; what stood before a known document is not among
  // them.
  const std::vector<HashPair> before = HashesBefore(found);
  for (size_t i = 0; i < found.size(); ++i) {
    text << "found " << found[i].begin << ' ' << found[i].end << " behind " << found[i].from;
    for (const uint64_t hash : before[i]) text << ' ' << hash;
    text << ' ';
  }
  return text.str();
}

BlendPlan::BlendPlan(const ModelInfo& model, std::span<const int32_t> prompt,
                     const BlendRequest& request, std::vector<FoundDocument> found,
                     int64_t piece_max, int64_t found_own_end)
    : request_(request),
      found_(std::move(found)),
      own_end_(found_own_end),
      prompt_tokens_(static_cast<int64_t>(prompt.size())),
      layer_count_(static_cast<int64_t>(model.layers.size())) {
  if (model.bos_token_id >= 0) bos_.push_back(static_cast<int32_t>(model.bos_token_id));
  if (found_.empty()) {
    const auto movable = MovableDocuments(request_.documents);
    movable_.assign(movable.begin(), movable.end());
    if (movable_.size() < request_.documents.size()) own_end_ = request_.documents.front().end;
  }
  std::set<std::span<const int32_t>, EndsFirst> anchors;  // of which each is kept once
  for (const FoundDocument& document : found_) {
    movable_.push_back({document.begin, document.end});
    const std::span<const int32_t> chain = *document.chain;
    const auto anchor = chain.first(static_cast<size_t>(document.anchor_tokens));
    found_anchors_.push_back(*anchors.insert(anchor).first);
  }
  document_count_ = std::ssize(found_.empty() ? request_.documents : movable_);
  if (prompt_tokens_ >= request.options.min_tokens) pieces_ = CutPieces(movable_, piece_max);
  counts_.resize(pieces_.size());
}

int64_t BlendPlan::begin() const {
  return pieces_.empty() ? prompt_tokens_ : pieces_.front().begin;
}

bool BlendPlan::FindPiece(int64_t position, Found* found) const {
  const auto piece =
      std::upper_bound(pieces_.begin(), pieces_.end(), position,
                       [](int64_t at, const BlendPiece& each) { return at < each.end; });
  if (piece == pieces_.end() || position < piece->begin) return false;
  found->index = static_cast<size_t>(piece - pieces_.begin());
  found->rest = {position, piece->end};
  found->cost = PieceCost(found->rest, movable_, options(), layer_count_);
  return true;
}

int64_t BlendPlan::NextBorder(int64_t length) const {
  for (const BlendPiece& piece : pieces_) {
    if (piece.begin > length) return piece.begin;
    if (piece.end > length) return piece.end;
  }
  return kExactForever;
}

int64_t BlendPlan::BorderBefore(int64_t length) const {
  for (const BlendPiece& piece : pieces_) {
    if (piece.begin < length && length < piece.end) return piece.begin;
  }
  return length;
}

std::vector<int32_t> BlendPlan::Chain::tokens() const {
  std::vector<int32_t> joined(anchor.begin(), anchor.end());
  joined.insert(joined.end(), rest.begin(), rest.end());
  return joined;
}

bool BlendPlan::Chain::IsOf(std::span<const int32_t> tokens) const {
  if (std::ssize(tokens) != size()) return false;
  return std::ranges::equal(tokens.last(rest.size()), rest) &&
         std::ranges::equal(tokens.first(anchor.size()), anchor);
}

bool BlendPlan::ChainOrder::operator()(const Chain& a, const Chain& b) const {
  if (a.size() != b.size()) return a.size() < b.size();
  const bool begin_alike = a.anchor.data() == b.anchor.data() && a.anchor.size() == b.anchor.size();
  if (begin_alike) return EndsFirst()(a.rest, b.rest);
  const auto from_end = [](const Chain& chain, size_t i) {
    const std::span<const int32_t> part = i < chain.rest.size() ? chain.rest : chain.anchor;
    return part[part.size() - 1 - (i < chain.rest.size() ? i : i - chain.rest.size())];
  };
  for (size_t i = 0; i < static_cast<size_t>(a.size()); ++i) {
    const int32_t x = from_end(a, i);
    const int32_t y = from_end(b, i);
    if (x != y) return x < y;
  }
  return false;
}

BlendPlan::Chain BlendPlan::ChainOf(std::span<const int32_t> prompt,
                                    const PromptDocument& document) const {
  const auto part = [&](int64_t begin, int64_t end) {
    return prompt.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
  };
  auto anchor = part(0, request_.documents.front().begin);
  const auto tokens = part(document.begin, document.end);
  const bool needs_bos = anchor.empty() && !bos_.empty() && tokens.front() != bos_.front();
  if (needs_bos) anchor = bos_;
  return {.anchor = anchor, .rest = tokens, .document_begin = std::ssize(anchor)};
}

BlendPlan::Chain BlendPlan::MovableChain(std::span<const int32_t> prompt, size_t index) const {
  if (found_.empty()) return ChainOf(prompt, movable_[index]);
  const FoundDocument& document = found_[index];
  const std::span<const int32_t> chain = *document.chain;
  return {.anchor = found_anchors_[index],
          .rest = chain.subspan(static_cast<size_t>(document.anchor_tokens),
                                static_cast<size_t>(document.chain_end() - document.anchor_tokens)),
          .document_begin = document.from};
}

BlendPlan::Chain BlendPlan::OwnChain(std::span<const int32_t> prompt) const {
  Chain own{.rest = prompt.first(static_cast<size_t>(own_end_))};
  if (found_.empty() && !request_.documents.empty()) own = ChainOf(prompt, request_.documents[0]);
  own.document_begin = own_end_;
  own.is_own = true;
  return own;
}

void BlendPlan::NoteFound(int64_t length, int64_t exact) noexcept {
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (pieces_[i].end > length || pieces_[i].end <= exact) counts_[i] = {};
  }
}

BlendUsage BlendPlan::Usage() const noexcept {
  BlendUsage usage{.documents = document_count_};
  double sum = 0;
  for (const PieceCounts& piece : counts_) {
    usage.moved_tokens += piece.moved;
    usage.recomputed_tokens += piece.recomputed;
    usage.moved_bytes += piece.moved_bytes;
    usage.deviation_max = std::max(usage.deviation_max, piece.deviation_max);
    sum += piece.deviation_sum;
    usage.move_seconds += static_cast<double>(piece.move_ns) * 1e-9;
    usage.select_seconds += static_cast<double>(piece.select_ns) * 1e-9;
  }
  if (usage.left_tokens() > 0)
    usage.deviation_mean = sum / static_cast<double>(usage.left_tokens());
  return usage;
}

}  // namespace quire
