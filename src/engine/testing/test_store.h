// Test only: servers over one fake chunk store, whose time is fake.
#ifndef QUIRE_ENGINE_TESTING_TEST_STORE_H_
#define QUIRE_ENGINE_TESTING_TEST_STORE_H_

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "engine/testing/fake_chunk_store.h"
#include "engine/testing/test_server.h"

namespace quire {

inline constexpr int64_t kMs = 1'000'000;
inline constexpr size_t kDisk = static_cast<size_t>(TierKind::kDisk);

class EngineStore : public testing::Test {
 protected:
  EngineStore() {
    options_.chunk_tokens = 8;
    options_.load_timeout_ms = 100;
    options_.clock = clock_;
    identity_.model = "fake";
  }
  ~EngineStore() override { EXPECT_EQ(store_->live_fetches, 0) << "a fetch that nobody ended"; }

  std::unique_ptr<Server> Make(Sizes sizes = {}, bool attach = true) {
    sizes.clock = clock_;
    auto server = std::make_unique<Server>(sizes);
    if (attach) Attach(server.get());
    return server;
  }
  void Attach(Server* server) {
    const Status attached = server->engine->AttachStore(store_, identity_, options_);
    ASSERT_TRUE(attached.ok()) << attached.ToString();
  }
  static Tokens Text(int64_t count, uint64_t seed = 1) {
    RandomSequence random(seed);
    return RandomTokens(count, &random);
  }
  static SamplingOptions Greedy(int64_t max_tokens, const std::string& salt = "") {
    return {.max_tokens = max_tokens, .logprobs = 0, .ignore_eos = true, .cache_salt = salt};
  }
  static Answer Cold(const Tokens& prompt, const SamplingOptions& options, bool long_rope = false) {
    return Server({.prefix_cache = false, .long_rope = long_rope}).Generate(prompt, options);
  }

  std::shared_ptr<FakeClock> clock_ = std::make_shared<FakeClock>();
  std::shared_ptr<FakeChunkStore> store_ = std::make_shared<FakeChunkStore>(clock_);
  StoreUseOptions options_;
  Passport identity_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_TESTING_TEST_STORE_H_
