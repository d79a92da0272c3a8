// Test only: a filter whose rule is a function of the tokens that came and the one that may come,
// and which can be told to fail.
#ifndef QUIRE_ENGINE_TESTING_SCRIPTED_FILTER_H_
#define QUIRE_ENGINE_TESTING_SCRIPTED_FILTER_H_

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "quire/seams.h"

namespace quire {

class ScriptedFilter final : public TokenFilter {
 public:
  using Rule = std::function<bool(std::span<const int32_t> came, int32_t token)>;
  // Shared by a filter and its forks.
  struct Script {
    int64_t vocab_size = 0;
    Rule rule;
    // Asked at the beginning of each call; null: nothing fails.
    std::function<Status()> fault = nullptr;
    std::atomic<int64_t> living = 0, forks = 0, rollbacks = 0, refusals = 0;
  };

  explicit ScriptedFilter(std::shared_ptr<Script> script, std::vector<int32_t> came = {})
      : script_(std::move(script)), came_(std::move(came)), came_before_(came_.size()) {
    ++script_->living;
  }
  ~ScriptedFilter() override { --script_->living; }

  int64_t vocab_size() const noexcept override { return script_->vocab_size; }
  Result<std::unique_ptr<TokenFilter>> Fork() const override {
    QUIRE_RETURN_IF_ERROR(Fault());
    ++script_->forks;
    return std::unique_ptr<TokenFilter>(std::make_unique<ScriptedFilter>(script_, came_));
  }
  Status FillMask(std::span<uint32_t> mask) override {
    QUIRE_RETURN_IF_ERROR(Fault());
    EXPECT_EQ(std::ssize(mask), (script_->vocab_size + 31) / 32);
    for (uint32_t& word : mask) word = 0xA5A50000U;  // bits behind the vocabulary do not count
    for (int32_t token = 0; token < script_->vocab_size; ++token) {
      const uint32_t bit = uint32_t{1} << (token % 32);
      uint32_t& word = mask[static_cast<size_t>(token / 32)];
      word = script_->rule(came_, token) ? word | bit : word & ~bit;
    }
    return {};
  }
  Result<bool> Accept(int32_t token) override {
    QUIRE_RETURN_IF_ERROR(Fault());
    if (!script_->rule(came_, token)) {
      ++script_->refusals;
      return false;
    }
    came_.push_back(token);
    return true;
  }
  Status Rollback(int64_t count) override {
    QUIRE_RETURN_IF_ERROR(Fault());
    EXPECT_LE(count, std::ssize(came_) - static_cast<int64_t>(came_before_));
    ++script_->rollbacks;
    came_.resize(came_.size() - static_cast<size_t>(count));
    return {};
  }

 private:
  Status Fault() const { return script_->fault == nullptr ? Status() : script_->fault(); }

  const std::shared_ptr<Script> script_;
  std::vector<int32_t> came_;
  const size_t came_before_;
};

// Allows `part` of 16 of all tokens, others at each place and behind each text, and the end token
// only from `least` tokens on; behind `most` tokens nothing else.
inline ScriptedFilter::Rule HashRule(uint64_t seed, int64_t part, int32_t end, int64_t least,
                                     int64_t most) {
  return [=](std::span<const int32_t> came, int32_t token) {
    if (token == end) return std::ssize(came) >= least;
    if (std::ssize(came) >= most || (!came.empty() && came.back() == end)) return false;
    std::vector<int32_t> place(came.begin(), came.end());
    place.push_back(token);
    place.push_back(static_cast<int32_t>(seed));
    const uint64_t hash = Hash64(place.data(), place.size() * sizeof(int32_t));
    return static_cast<int64_t>(hash % 16) < part;
  };
}

inline std::shared_ptr<ScriptedFilter::Script> MakeScript(int64_t vocab_size,
                                                          ScriptedFilter::Rule rule) {
  auto script = std::make_shared<ScriptedFilter::Script>();
  script->vocab_size = vocab_size;
  script->rule = std::move(rule);
  return script;
}

}  // namespace quire

#endif  // QUIRE_ENGINE_TESTING_SCRIPTED_FILTER_H_
