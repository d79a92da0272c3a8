#include "engine/blending/blend_pieces.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace quire {
namespace {

// The part of a document that is in the piece.
int64_t CommonTokens(const BlendPiece& piece, const PromptDocument& document) {
  return std::max<int64_t>(
      0, std::min(piece.end, document.end) - std::max(piece.begin, document.begin));
}

}  // namespace

std::span<const PromptDocument> MovableDocuments(std::span<const PromptDocument> documents) {
  const bool has_anchor = !documents.empty() && documents.front().begin > 0;
  return has_anchor ? documents.subspan(1) : documents;
}

std::vector<BlendPiece> CutPieces(std::span<const PromptDocument> movable, int64_t piece_max) {
  QUIRE_CHECK(piece_max >= 1);
  std::vector<BlendPiece> all;
  for (size_t i = 0; i < movable.size(); ++i) {
    const int64_t begin = movable[i].begin;
    const int64_t end = i + 1 < movable.size() ? movable[i + 1].begin : movable[i].end;
    if (!all.empty() && end - all.back().begin <= piece_max) {
      all.back().end = end;
      continue;
    }
    for (int64_t at = begin; at < end; at += piece_max) {
      all.push_back({at, std::min(end, at + piece_max)});
    }
  }
  return all;
}

int64_t PieceCost(const BlendPiece& piece, std::span<const PromptDocument> documents,
                  const BlendOptions& options, int64_t layer_count) {
  int64_t in_documents = 0;
  for (const PromptDocument& document : documents) in_documents += CommonTokens(piece, document);
  int64_t work = piece.count() * (options.check_layers.front() + 1);
  for (size_t i = 0; i < options.check_layers.size(); ++i) {
    const bool is_last = i + 1 == options.check_layers.size();
    const int64_t next = is_last ? layer_count - 1 : options.check_layers[i + 1];
    double selected = static_cast<double>(piece.count() - in_documents);
    for (const PromptDocument& document : documents) {
      const int64_t tokens = CommonTokens(piece, document);
      if (tokens == 0) continue;
      const double ratio = document.ratio.value_or(options.ratios[i]);
      const auto rows = static_cast<double>(tokens);
      selected += std::min(rows, static_cast<double>(options.link_tokens) + ratio * rows);
    }
    work += static_cast<int64_t>(std::ceil(selected)) * (next - options.check_layers[i]);
  }
  return std::clamp<int64_t>((work + layer_count - 1) / layer_count, 1, piece.count());
}

}  // namespace quire
