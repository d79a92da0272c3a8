// Where KV may be reused.
#ifndef QUIRE_ENGINE_PREFIX_PREFIX_SPACE_H_
#define QUIRE_ENGINE_PREFIX_PREFIX_SPACE_H_

#include <compare>
#include <cstdint>
#include <string>

namespace quire {

// KV is reused within one space only. Salts keep tenants apart: the time that an answer takes must
// not tell what others have asked. LongRoPE has two sets of factors, and KV made with one is of no
// use to a request that computes with the other. Blended KV is that of its tokens and of how it was
// blended; nobody else may see it.
struct PrefixSpace {
  std::string salt = {};
  bool long_rope = false;
  std::string recipe = {};  // BlendRecipe; empty: exact
  // The request that alone may reuse what is approximate: its blend is not what the recipe gives.
  int64_t only_request = kAnybody;
  static constexpr int64_t kAnybody = -1;
  auto operator<=>(const PrefixSpace&) const = default;

  bool is_exact() const { return recipe.empty(); }
  PrefixSpace exact() const { return {.salt = salt, .long_rope = long_rope}; }
  bool shares_exact(const PrefixSpace& other) const {
    return salt == other.salt && long_rope == other.long_rope;
  }
};

}  // namespace quire

#endif  // QUIRE_ENGINE_PREFIX_PREFIX_SPACE_H_
