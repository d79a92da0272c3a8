#include "engine/retained_snapshots.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/round_up.h"

namespace quire {
namespace {

Status CheckSnapshotFits(const SnapshotInfo& info, const std::string& path,
                         const RequestLimits& limits) {
  if (info.tokens.empty()) return {};
  const WindowSettings& windows = info.windows;
  if (windows.slid > 0 || windows.lost > 0) {
    return Status(StatusCode::kIncompatible,
                  path +
                      ": some of its tokens have slid out of a window, and requests go on "
                      "behind texts that are seen whole; save it from a sequence without one");
  }
  QUIRE_RETURN_IF_ERROR(CheckTokens(path, info.tokens, limits.model->info().vocab_size));
  const int64_t length = static_cast<int64_t>(info.tokens.size());
  const int64_t length_max = limits.length_max();
  if (length <= length_max) return {};
  return Status(StatusCode::kTooLarge, path + ": a snapshot of " + std::to_string(length) +
                                           " tokens; model and cache hold at most " +
                                           std::to_string(length_max));
}

}  // namespace

Result<int64_t> RetainedSnapshots::Save(const SnapshotContents& contents, const std::string& path) {
  QUIRE_RETURN_IF_ERROR(facts_.RequirePrefixCache("SaveSnapshot"));
  const std::string& salt = contents.cache_salt;
  PrefixMatch match = holders_.prefix_cache.Find(contents.tokens, {.salt = salt});
  const PrefixMatch long_match =
      holders_.prefix_cache.Find(contents.tokens, {.salt = salt, .long_rope = true});
  if (long_match.length > match.length) match = long_match;
  if (match.length == 0) {
    return Status(StatusCode::kNotFound, "Engine::SaveSnapshot: no KV of the beginning of these " +
                                             std::to_string(contents.tokens.size()) +
                                             " tokens is there; let a request compute them first");
  }
  QUIRE_CHECK(match.length <= std::ssize(contents.tokens));
  SnapshotContents held = contents;
  held.identity = facts_.WithNumerics(contents.identity);
  held.tokens.resize(static_cast<size_t>(match.length));
  const int64_t id = holders_.sequences.NewId();
  QUIRE_RETURN_IF_ERROR(holders_.state.kv().ForkSequence(match.sequence_id, id, match.length));
  const Status saved = quire::SaveSnapshot(states_, id, held, path);
  holders_.state.RemoveSequence(id);
  QUIRE_RETURN_IF_ERROR(saved);
  holders_.prefix_cache.Touch(match.sequence_id);
  return match.length;
}

Result<SnapshotInfo> RetainedSnapshots::Load(const Passport& identity, const std::string& path,
                                             const SnapshotLoadOptions& options) {
  QUIRE_RETURN_IF_ERROR(facts_.RequirePrefixCache("LoadSnapshot"));
  QUIRE_ASSIGN_OR_RETURN(SnapshotInfo announced, ReadSnapshotInfo(path));
  QUIRE_RETURN_IF_ERROR(CheckSnapshotFits(announced, path, facts_.limits));
  const int64_t length = static_cast<int64_t>(announced.tokens.size());
  PrefixSpace space{.salt = options.cache_salt};  // nothing throws once the cache has `id`
  const int64_t id = holders_.sequences.NewId();
  const Passport own = facts_.WithNumerics(identity);
  const auto load = [&] { return quire::LoadSnapshot(states_, id, own, path, options); };
  Result<SnapshotInfo> loaded = load();
  const int64_t pages = CeilDiv(length, facts_.options.page_size);
  const EngineStates& state = holders_.state;
  // Windows hide some of the tokens.
  const bool may_fit = state.has_windows() || state.pages_free() + state.retained_pages() >= pages;
  if (loaded.status().code() == StatusCode::kOutOfPages && may_fit) {
    // It is of the right model. Nothing is given up for a file that is damaged.
    QUIRE_RETURN_IF_ERROR(VerifySnapshot(path).status());
    holders_.prefix_cache.Evict(pages);
    loaded = load();
  }
  QUIRE_ASSIGN_OR_RETURN(const SnapshotInfo info, std::move(loaded));
  if (info.tokens != announced.tokens || info.windows != announced.windows) {
    state.RemoveSequence(id);
    return Status(StatusCode::kUnavailable, path + ": it changed while it was read; load it again");
  }
  // Nothing has slid out of it: what is computed behind it must not slide either.
  if (info.windows.window > 0 && !state.DropWindow(id)) {
    state.RemoveSequence(id);
    return Status::OutOfMemory();
  }
  space.long_rope = info.long_factors;
  holders_.prefix_cache.Retain(id, std::move(announced.tokens), space);
  if (holders_.prefix_cache.Find(info.tokens, space).length == length) return info;
  return Status(StatusCode::kOutOfPages,
                path + ": the prefix cache has no room for the states of its " +
                    std::to_string(length) + " tokens; raise EngineOptions::state_bytes");
}

}  // namespace quire
