#include "engine/drafts/draft.h"

#include <algorithm>

namespace quire {

int64_t DraftTree::levels() const {
  std::vector<int64_t> depths(tokens.size());
  int64_t most = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    depths[i] = parents[i] == kDraftRoot ? 1 : depths[static_cast<size_t>(parents[i])] + 1;
    most = std::max(most, depths[i]);
  }
  return most;
}

// A tree has some tens of nodes, so they are looked through.
int64_t DraftTree::FindChild(int64_t parent, int32_t token) const noexcept {
  for (int64_t node = parent + 1; node < size(); ++node) {
    if (parents[static_cast<size_t>(node)] == parent && tokens[static_cast<size_t>(node)] == token)
      return node;
  }
  return kDraftRoot;
}

int64_t DraftTree::AddChild(int64_t parent, int32_t token) {
  const int64_t found = FindChild(parent, token);
  if (found != kDraftRoot) return found;
  tokens.reserve(tokens.size() + 1);
  parents.push_back(parent);
  tokens.push_back(token);
  return size() - 1;
}

void DraftTree::Truncate(int64_t size) noexcept {
  tokens.resize(static_cast<size_t>(std::min(size, this->size())));
  parents.resize(tokens.size());
}

}  // namespace quire
