// Speculation over the real cache and the small deterministic model: answers are those of plain
// decoding, whatever is guessed, and guesses take what nobody else wants.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "engine/testing/test_server.h"

namespace quire {
namespace {

constexpr Speculation kNGrams{.draft = DraftKind::kNGram, .draft_tokens = 8, .branches = 2};
constexpr Speculation kModel{.draft = DraftKind::kModel, .draft_tokens = 6, .branches = 1};

// Texts of a few tokens that repeat themselves, more often than not.
void MakeRepetitive(FakeModel* model) {
  model->edit = [](int32_t token, int32_t position, std::span<float> logits) {
    logits[static_cast<size_t>((token + 1) % 5)] += position % 7 == 0 ? 2.0F : 6.0F;
  };
}

Answers AnswersOf(const std::vector<Job>& jobs, const Sizes& sizes, bool repetitive,
                  EngineStats* stats) {
  Server server(sizes);
  if (repetitive) MakeRepetitive(server.model);
  if (repetitive && server.draft_model != nullptr) MakeRepetitive(server.draft_model);
  for (const Job& job : jobs) server.Submit(job.prompt, job.options);
  server.Finish();
  *stats = server.engine->Stats();
  EXPECT_EQ(server.cache->out_of_pages, 0) << "pages were counted otherwise";
  return server.answers;
}

// The same schedule with and without guesses.
void ExpectSameAnswers(const std::vector<Job>& jobs, const Sizes& sizes, bool repetitive,
                       const std::string& what, EngineStats* stats) {
  Sizes plain = sizes;
  plain.speculation = {};
  plain.tree_nodes = 0;
  plain.draft_seed = {};
  EngineStats plain_stats;
  const Answers want = AnswersOf(jobs, plain, repetitive, &plain_stats);
  Answers got = AnswersOf(jobs, sizes, repetitive, stats);
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [key, answer] : want) {
    ExpectEqual(got[key], answer, what + ", request " + std::to_string(key.first));
  }
  EXPECT_EQ(plain_stats.drafted_tokens, 0);
  EXPECT_EQ(stats->completion_tokens, plain_stats.completion_tokens);
  EXPECT_LE(stats->accepted_tokens, stats->drafted_tokens);
}

TEST(Speculation, AnswersAreThoseOfPlainDecoding) {
  const std::vector<Job> jobs = RandomJobs(16, 31);
  int64_t accepted = 0;
  for (const bool repetitive : {false, true}) {
    for (const int64_t chunk : {3, 16, 200}) {
      for (const int64_t page_size : {3, 16}) {
        for (const int64_t branches : {1, 3}) {
          Sizes sizes{.page_size = page_size, .chunk = chunk, .tree_nodes = 40};
          sizes.speculation = kNGrams;
          sizes.speculation.branches = branches;
          const std::string what = "chunk " + std::to_string(chunk) + ", page size " +
                                   std::to_string(page_size) + ", branches " +
                                   std::to_string(branches);
          EngineStats stats;
          ExpectSameAnswers(jobs, sizes, repetitive, "n-grams, " + what, &stats);
          accepted += stats.accepted_tokens;
          sizes.speculation.draft = DraftKind::kModel;
          sizes.draft_seed = branches == 1 ? 0 : 5;
          ExpectSameAnswers(jobs, sizes, repetitive, "model, " + what, &stats);
          accepted += stats.accepted_tokens;
          if (HasFailure()) return;
        }
      }
    }
  }
  EXPECT_GT(accepted, 1000);
}

// A prediction that is right, one that is right in parts, and a wrong one.
TEST(Speculation, PredictionsChangeNoAnswer) {
  RandomSequence random(8);
  const Tokens prompt = RandomTokens(30, &random);
  for (const float temperature : {0.0F, 1.5F}) {
    SamplingOptions options{.max_tokens = 60, .temperature = temperature, .seed = 4, .logprobs = 2};
    const Answer want = Server().Generate(prompt, options);
    ASSERT_EQ(std::ssize(want.tokens), 60);
    Tokens parts(want.tokens.begin() + 20, want.tokens.end());
    parts.insert(parts.end(), want.tokens.begin(), want.tokens.begin() + 20);
    const std::pair<Tokens, int64_t> predictions[] = {
        {want.tokens, 50}, {parts, 40}, {RandomTokens(60, &random), 0}};
    for (const auto& [predicted, accepted] : predictions) {
      options.predicted_tokens = predicted;
      Server server({.tree_nodes = 64});
      ExpectEqual(server.Generate(prompt, options), want, "with a prediction");
      EXPECT_GE(server.engine->Stats().accepted_tokens, accepted);
    }
    options.predicted_tokens = want.tokens;
    Server guessing({.speculation = kModel, .tree_nodes = 64, .draft_seed = 9});
    ExpectEqual(guessing.Generate(prompt, options), want, "beside a draft model");
    EXPECT_GE(guessing.engine->Stats().accepted_tokens, 40) << "n-grams take its place";
  }
}

TEST(Speculation, APredictionNeedsRoomAndNGrams) {
  const Tokens prompt = {1, 2, 3};
  SamplingOptions options{.predicted_tokens = {4, 5}};
  const auto refusal = [&](const Sizes& sizes) {
    const Server server(sizes);
    const Status status = server.engine->CheckSubmit(prompt, options);
    EXPECT_TRUE(status.ok() || status.code() == StatusCode::kBadArgument);
    return std::string(status.message());
  };
  EXPECT_NE(refusal({}).find("predicted_tokens: this engine has no room"), std::string::npos);
  EXPECT_EQ(refusal({.tree_nodes = 8}), "");
  options.speculation = kModel;
  EXPECT_NE(refusal({.tree_nodes = 8}).find("predicted_tokens: guesses from them"),
            std::string::npos);
  options.speculation = {};
  options.predicted_tokens = {4, -1};
  EXPECT_NE(refusal({.tree_nodes = 8}).find("predicted_tokens[1] is token -1"), std::string::npos);
  options.predicted_tokens.assign(SamplingOptions::kPredictedTokensMax + 1, 4);
  EXPECT_NE(refusal({.tree_nodes = 8}).find("predicted_tokens count is 65537"), std::string::npos);
}

TEST(Speculation, TheSameModelIsAlwaysRight) {
  for (const float temperature : {0.0F, 1.5F}) {
    Server server({.chunk = 64, .speculation = kModel, .tree_nodes = 64, .draft_seed = 0});
    RandomSequence random(1);
    for (uint64_t i = 0; i < 4; ++i) {
      server.Submit(RandomTokens(9, &random),
                    {.max_tokens = 57, .temperature = temperature, .seed = i, .n = 2});
    }
    server.Finish();
    const EngineStats stats = server.engine->Stats();
    EXPECT_GT(stats.drafted_tokens, 0);
    EXPECT_EQ(stats.accepted_tokens, stats.drafted_tokens);
    // The first token of each answer, then seven at a time. The second samples begin a step later:
    // they wait until the draft model has run the prompt for the first ones.
    EXPECT_EQ(stats.decode_forwards, 8 * (1 + 56 / 7) + 4);
    EXPECT_EQ(stats.steps, 1 + 56 / 7 + 1) << "all samples in one forward";
    EXPECT_EQ(server.engine->model_drafter()->state_count(), 0);
  }
}

// What the draft model computes: each token once, but those that it has to take back.
TEST(Speculation, TheDraftModelKeepsInStep) {
  Server server({.chunk = 64, .speculation = kModel, .tree_nodes = 64, .draft_seed = 0});
  RandomSequence random(2);
  server.Generate(RandomTokens(40, &random), {.max_tokens = 57, .n = 4});
  // The prompt once for all samples. The draft model does not run the last right guess of a step,
  // as its own draw behind it would come too late; it is fed in the next step.
  EXPECT_LE(server.engine->model_drafter()->tokens_run(), 40 + 4 * (57 + 8));
}

TEST(Speculation, AnotherModelIsSeldomRight) {
  Server server({.chunk = 64, .speculation = kModel, .tree_nodes = 64, .draft_seed = 9});
  RandomSequence random(1);
  const Tokens prompt = RandomTokens(9, &random);
  const SamplingOptions options{.max_tokens = 200, .temperature = 2, .seed = 3};
  const Answer answer = server.Generate(prompt, options);
  ExpectEqual(answer, Server().Generate(prompt, options), "another model");
  const EngineStats stats = server.engine->Stats();
  EXPECT_GT(stats.drafted_tokens, 100);
  EXPECT_LT(stats.accepted_tokens, stats.drafted_tokens / 3);
  // Drafts that begin wrong get shorter.
  EXPECT_LT(stats.drafted_tokens, 3 * stats.decode_forwards);
}

// ---- The draft model sees what the request sees, and no token that it has not.

TEST(Speculation, TheDraftModelHasTheWindowOfTheRequest) {
  for (const int64_t sinks : {0, 5}) {
    for (const int64_t page_size : {4, 16}) {
      // Pages of two windows, for a text of hundreds of tokens beyond the model's positions.
      Server server({.page_size = page_size,
                     .chunk = 64,
                     .speculation = kModel,
                     .tree_nodes = 64,
                     .draft_seed = 0,
                     .draft_pages = 2 * PagesForWindow(24, sinks, page_size) + 64 / page_size});
      Server plain({.chunk = 64});
      for (FakeModel* model : {server.model, server.draft_model, plain.model})
        model->mutable_info().max_position_embeddings = 64;
      SamplingOptions options{.max_tokens = 400, .temperature = 0.7F, .seed = 5, .n = 2};
      options.window = 24;
      options.sinks = sinks;
      RandomSequence random(8);
      const Tokens prompt = RandomTokens(100, &random);
      server.Generate(prompt, options);
      plain.Generate(prompt, options);
      for (const int64_t sample : {0, 1}) {
        ExpectEqual(server.answers[{0, sample}], plain.answers[{0, sample}],
                    "sample " + std::to_string(sample));
      }
      const EngineStats stats = server.engine->Stats();
      EXPECT_GT(stats.drafted_tokens, 600);
      EXPECT_EQ(stats.accepted_tokens, stats.drafted_tokens) << "it saw something else";
      // Nothing is fed again because the window has slid: each token once, but a second prompt.
      EXPECT_LE(server.engine->model_drafter()->tokens_run(), 2 * (100 + 400 + 60));
    }
  }
}

// A window that is larger than the draft model's positions: guesses as far as these reach.
TEST(Speculation, GuessesEndWithTheDraftModelsPositions) {
  for (const int64_t window : {0, 100}) {
    Server server({.chunk = 64, .speculation = kModel, .tree_nodes = 64, .draft_seed = 0});
    server.draft_model->mutable_info().max_position_embeddings = 64;
    int64_t farthest = 0;
    server.draft_model->edit = [&](int32_t, int32_t position, std::span<float>) {
      farthest = std::max<int64_t>(farthest, position);
    };
    SamplingOptions options{.max_tokens = 100};
    options.window = window;
    ExpectEqual(server.Generate({1, 2, 3}, options), Server().Generate({1, 2, 3}, options), "");
    EXPECT_LT(farthest, 64);
    EXPECT_GT(farthest, 50);
  }
}

TEST(Speculation, VocabulariesMayDifferInSize) {
  RandomSequence random(11);
  for (const int64_t vocab : {50, 80}) {
    for (const int64_t branches : {1, 3}) {
      Sizes sizes{.chunk = 64,
                  .speculation = kModel,
                  .tree_nodes = 64,
                  .draft_seed = 0,
                  .draft_vocab = vocab};
      sizes.speculation.branches = branches;
      Server server(sizes);
      Server plain({.chunk = 64});
      const auto within = [](int64_t size) {
        return [size](std::span<const int32_t> tokens) {
          const bool all = std::all_of(tokens.begin(), tokens.end(),
                                       [&](int32_t token) { return token < size; });
          return all ? Status() : Status(StatusCode::kInternal, "a token that it has not");
        };
      };
      // Few tokens that the smaller one has not.
      server.model->edit = plain.model->edit = [](int32_t, int32_t, std::span<float> logits) {
        for (size_t token = 50; token < logits.size(); ++token) logits[token] -= 20;
      };
      server.model->fault = within(FakeModel::kVocabSize);
      server.draft_model->fault = within(vocab);
      // What the larger one likes best the other one has not.
      server.draft_model->edit = [&](int32_t, int32_t, std::span<float> logits) {
        if (vocab > FakeModel::kVocabSize) logits.back() += 1000;
      };
      std::vector<SamplingOptions> options(4, {.max_tokens = 60, .ignore_eos = true});
      options[1].temperature = 0.5F;
      options[2].logit_bias = {{60, -100}, {3, 1}};
      options[2].repetition_penalty = 1.2F;
      options[3].logit_bias = {{55, 100}};  // that the smaller one cannot follow
      for (size_t i = 0; i < options.size(); ++i) {
        Tokens prompt = RandomTokens(20, &random);
        for (int32_t& token : prompt) token %= 50;
        server.Submit(prompt, options[i]);
        plain.Submit(prompt, options[i]);
      }
      const Tokens unknown = {1, 2, 58, 3};  // in the prompt
      server.Submit(unknown, options[0]);
      plain.Submit(unknown, options[0]);
      server.Finish();
      plain.Finish();
      for (const auto& [key, answer] : plain.answers)
        ExpectEqual(server.answers[key], answer, "request " + std::to_string(key.first));
      const EngineStats stats = server.engine->Stats();
      EXPECT_GT(stats.accepted_tokens, 30);
      EXPECT_EQ((server.answers[{4, 0}].drafted_tokens) > 0, vocab > FakeModel::kVocabSize);
      if (vocab < FakeModel::kVocabSize) {
        EXPECT_LE((server.answers[{3, 0}].drafted_tokens), 6);
      }
      EXPECT_EQ(server.engine->model_drafter()->state_count(), 0);
    }
  }
}

TEST(Speculation, RepetitiveTextTakesFewForwards) {
  Server server({.chunk = 64, .speculation = kNGrams, .tree_nodes = 64});
  server.model->edit = [](int32_t token, int32_t, std::span<float> logits) {
    logits[static_cast<size_t>((token + 1) % 5)] += 100;
  };
  const Answer answer = server.Generate({40, 41, 42}, {.max_tokens = 200});
  ASSERT_EQ(answer.tokens.size(), 200U);
  const EngineStats stats = server.engine->Stats();
  EXPECT_LT(stats.decode_forwards, 50);
  EXPECT_GT(stats.accepted_tokens, 150);
  EXPECT_EQ(answer.drafted_tokens, stats.drafted_tokens);
  EXPECT_EQ(answer.accepted_tokens, stats.accepted_tokens);
  EXPECT_EQ(answer.decode_forwards, stats.decode_forwards);
  EXPECT_GE(stats.draft_seconds, 0);
}

// ---- Ends in the middle of an accepted path.

TEST(Speculation, AStopInTheMiddleOfAPathEndsTheAnswerThere) {
  const auto count_up = [](int32_t token, int32_t, std::span<float> logits) {
    logits[static_cast<size_t>((token + 1) % 9)] += 100;
  };
  int64_t accepted = 0;
  for (const Speculation& speculation : {kNGrams, kModel}) {
    for (int64_t length = 20; length < 40; ++length) {
      for (const bool by_stop : {true, false}) {
        SamplingOptions options{.max_tokens = by_stop ? 60 : length};
        // A stop sequence that the text meets first at `length`: what its edit says.
        const auto edit = [&](int32_t token, int32_t position, std::span<float> logits) {
          count_up(token, position, logits);
          if (by_stop && position == length) logits[50] += 1000;
        };
        if (by_stop) options.stop = {{50}, {3, 4, 5, 6, 50}};
        Sizes sizes{.chunk = 64, .speculation = speculation, .tree_nodes = 64, .draft_seed = 0};
        Server server(sizes);
        Server plain({.chunk = 64});
        server.model->edit = plain.model->edit = edit;
        server.draft_model->edit = count_up;
        const Answer answer = server.Generate({1, 2, 3}, options);
        ExpectEqual(answer, plain.Generate({1, 2, 3}, options), std::to_string(length));
        // The state behind it is that of plain decoding too.
        EXPECT_EQ(server.engine->Stats().retained_tokens, plain.engine->Stats().retained_tokens);
        EXPECT_EQ(server.engine->Stats().pages_in_use, plain.engine->Stats().pages_in_use);
        accepted += server.engine->Stats().accepted_tokens;
      }
    }
  }
  EXPECT_GT(accepted, 500);
}

TEST(Speculation, AnEndOfTextAmongTheGuessesEndsTheAnswer) {
  for (const bool ignore_eos : {false, true}) {
    Server server({.chunk = 64, .speculation = kModel, .tree_nodes = 64, .draft_seed = 0});
    Server plain({.chunk = 64});
    for (FakeModel* model : {server.model, server.draft_model, plain.model}) {
      model->mutable_info().eos_token_ids = {7};
      model->edit = [](int32_t token, int32_t, std::span<float> logits) {
        logits[static_cast<size_t>((token + 1) % 9)] += 100;
      };
    }
    const SamplingOptions options{.max_tokens = 30, .logprobs = 2, .ignore_eos = ignore_eos};
    ExpectEqual(server.Generate({8}, options), plain.Generate({8}, options), "eos");
    EXPECT_EQ(server.engine->Stats().retained_tokens, plain.engine->Stats().retained_tokens);
  }
}

// ---- Pages.

TEST(Speculation, GuessesShrinkBeforeAnythingIsPreempted) {
  RandomSequence random(4);
  const Tokens prompt = RandomTokens(10, &random);
  const SamplingOptions options{.max_tokens = 50};
  const int64_t needed = PagesForRequest(10, 50, 1, 4);
  int64_t accepted = 0;
  for (const int64_t more : {0, 1, 2, 4, 8}) {
    Server server({.pages = needed + more,
                   .chunk = 64,
                   .prefix_cache = false,
                   .speculation = kModel,
                   .tree_nodes = 64,
                   .draft_seed = 0});
    ExpectEqual(server.Generate(prompt, options), Server().Generate(prompt, options), "");
    const EngineStats stats = server.engine->Stats();
    EXPECT_EQ(stats.preemptions, 0);
    EXPECT_EQ(server.cache->out_of_pages, 0);
    EXPECT_EQ(stats.pages_free, stats.pages_total);
    EXPECT_GE(stats.accepted_tokens, accepted) << "more pages, more guesses";
    accepted = stats.accepted_tokens;
  }
  EXPECT_GT(accepted, 30);
}

// A step has fewer tokens than there are samples: nobody waits longer than the others.
TEST(Speculation, SamplesTakeTurnsInPlainStepsAndInTrees) {
  for (const Speculation& speculation : {Speculation(), kNGrams}) {
    Server server({.chunk = 4, .speculation = speculation, .tree_nodes = 4});
    MakeRepetitive(server.model);
    server.Submit({1, 2, 3, 4, 0, 1, 2, 3}, {.max_tokens = 200, .n = 8, .ignore_eos = true});
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(server.Step().ok());
    for (int round = 0; round < 6; ++round) {
      const Answers before = server.answers;
      for (int i = 0; i < 2; ++i) ASSERT_TRUE(server.Step().ok());
      for (const auto& [key, answer] : before) {
        EXPECT_GT(server.answers[key].tokens.size(), answer.tokens.size())
            << "round " << round << ", sample " << key.second;
      }
    }
    EXPECT_EQ(server.engine->Stats().drafted_tokens > 0, speculation.draft != DraftKind::kNone);
  }
}

TEST(Speculation, PreemptedRequestsGoOnAsIfNothingHadHappened) {
  const std::vector<Job> jobs = RandomJobs(24, 32);
  int64_t needed = 0;
  for (const Job& job : jobs) {
    needed = std::max(needed, PagesForRequest(static_cast<int64_t>(job.prompt.size()),
                                              job.options.max_tokens, job.options.n, 4));
  }
  int64_t preemptions = 0, accepted = 0;
  for (const Speculation& speculation : {kNGrams, kModel}) {
    for (const bool prefix_cache : {false, true}) {
      for (const int64_t more : {0, 3, 10}) {
        // The draft model is as short of pages.
        EngineStats stats;
        ExpectSameAnswers(jobs,
                          {.pages = needed + more,
                           .prefix_cache = prefix_cache,
                           .speculation = speculation,
                           .tree_nodes = 24,
                           .draft_seed = 0,
                           .draft_pages = needed},
                          true, "pages " + std::to_string(needed + more), &stats);
        preemptions += stats.preemptions;
        accepted += stats.accepted_tokens;
      }
    }
  }
  EXPECT_GT(preemptions, 10);
  EXPECT_GT(accepted, 200);
}

// ---- Which requests speculate.

TEST(Speculation, RequestsOfAllKindsShareABatch) {
  Server server({.chunk = 64, .tree_nodes = 48, .draft_seed = 0});
  Server plain({.chunk = 64});
  MakeRepetitive(server.model);
  MakeRepetitive(server.draft_model);
  MakeRepetitive(plain.model);
  std::vector<Job> jobs = RandomJobs(12, 33);
  for (size_t i = 0; i < jobs.size(); ++i) {
    jobs[i].options.max_tokens = 40;
    plain.Submit(jobs[i].prompt, jobs[i].options);
    if (i % 3 == 1) jobs[i].options.speculation = kNGrams;
    if (i % 3 == 2) jobs[i].options.speculation = kModel;
    server.Submit(jobs[i].prompt, jobs[i].options);
    ASSERT_TRUE(server.Step().ok());
  }
  server.Finish();
  plain.Finish();
  std::array<int64_t, 3> drafted{};
  for (const auto& [key, answer] : plain.answers) {
    const Answer& got = server.answers[key];
    ExpectEqual(got, answer, "request " + std::to_string(key.first));
    drafted[static_cast<size_t>(key.first % 3)] += got.drafted_tokens;
  }
  EXPECT_EQ(drafted[0], 0);
  EXPECT_GT(drafted[1], 50);
  EXPECT_GT(drafted[2], 50);
}

TEST(Speculation, RefusesWhatTheEngineHasNoRoomFor) {
  const Tokens prompt = {1, 2};
  const auto refusal = [&](const Sizes& sizes, const Speculation& speculation) {
    Server server(sizes);
    SamplingOptions options;
    options.speculation = speculation;
    const Status status = server.engine->Submit(prompt, options).status();
    EXPECT_TRUE(status.ok() || status.code() == StatusCode::kBadArgument);
    return status.ToString();
  };
  const auto has = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(refusal({}, kNGrams), "max_tree_nodes"));
  EXPECT_TRUE(has(refusal({.tree_nodes = 8}, kModel), "draft_model_directory"));
  EXPECT_TRUE(has(refusal({.tree_nodes = 8}, {.draft_tokens = 0}), "draft_tokens is 0"));
  EXPECT_TRUE(has(refusal({.tree_nodes = 8}, {.draft_tokens = 256}), "draft_tokens is 256"));
  EXPECT_TRUE(has(refusal({.tree_nodes = 8}, {.branches = 0}), "branches is 0"));
  EXPECT_TRUE(has(refusal({.tree_nodes = 8}, {.branches = 17}), "branches is 17"));
  EXPECT_EQ(refusal({.tree_nodes = 8}, kNGrams), Status().ToString());
  EXPECT_EQ(refusal({}, {}), Status().ToString());
}

TEST(Speculation, CancelAndStopForgetWhatTheDrafterHolds) {
  Server server({.chunk = 64, .speculation = kModel, .tree_nodes = 64, .draft_seed = 0});
  RandomSequence random(7);
  const int64_t a = server.Submit(RandomTokens(9, &random), {.max_tokens = 100});
  const int64_t b = server.Submit(RandomTokens(9, &random), {.max_tokens = 100});
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(server.Step().ok());
  EXPECT_EQ(server.engine->model_drafter()->state_count(), 2);
  ASSERT_TRUE(server.engine->Cancel(a).ok());
  EXPECT_EQ(server.engine->model_drafter()->state_count(), 1);
  // Cut in the middle of what a step gave out.
  const Tokens given = server.answers[{b, 0}].tokens;
  ASSERT_GT(given.size(), 10U);
  ASSERT_TRUE(server.engine->Stop(b, 0, 10).ok());
  EXPECT_EQ(server.engine->model_drafter()->state_count(), 0);
  server.Finish();
  const Answer& answer = server.answers[{b, 0}];
  EXPECT_EQ(answer.completion_tokens, 10);
}

// ---- Faults.

TEST(Speculation, ATreeForwardThatFailsIsDecodedPlainly) {
  const Tokens prompt = {1, 2, 3};
  const SamplingOptions options{.max_tokens = 40, .temperature = 1, .seed = 4, .n = 2};
  Server plain;
  plain.Generate(prompt, options);
  for (const std::string call : {"BeginTreeForward", "CommitAcceptedTokenTreeNodes", "model"}) {
    Server server({.chunk = 64, .speculation = kModel, .tree_nodes = 64, .draft_seed = 0});
    const Status no_memory(StatusCode::kOutOfMemory, "refused");
    int64_t calls = 0;
    server.cache->fault = [&](std::string_view name) {
      return name == call && ++calls % 2 == 1 ? no_memory : Status();
    };
    server.model->fault = [&](std::span<const int32_t> tokens) {
      return call == "model" && tokens.size() > 3 && ++calls % 2 == 1 ? no_memory : Status();
    };
    server.Generate(prompt, options);
    EXPECT_GT(calls, 2) << call;
    for (const auto& [key, answer] : plain.answers) {
      ExpectEqual(server.answers[key], answer, call);
    }
    EXPECT_GT(server.engine->Stats().accepted_tokens, 0);
  }
}

TEST(Speculation, ADraftModelThatFailsEndsTheRequestThatAsked) {
  Server server({.chunk = 64, .tree_nodes = 64, .draft_seed = 0});
  server.draft_model->fault = [](std::span<const int32_t>) {
    return Status(StatusCode::kInternal, "no more");
  };
  SamplingOptions options{.max_tokens = 20};
  options.speculation = kNGrams;  // which is asked in the same breath
  const int64_t other = server.Submit({4, 5, 6}, options);
  options.speculation = kModel;
  const int64_t asked = server.Submit({1, 2, 3}, options);
  server.Finish();
  const Answer& ended = server.answers[{asked, 0}];
  EXPECT_EQ(ended.reason, FinishReason::kError);
  EXPECT_NE(ended.error.find("the draft model: "), std::string::npos);
  EXPECT_NE(ended.error.find("no more"), std::string::npos);
  const Answer& neighbour = server.answers[{other, 0}];
  EXPECT_EQ(neighbour.reason, FinishReason::kLength);
}

TEST(Speculation, ADraftModelWithoutMemoryCanBeAskedAgain) {
  Server server({.chunk = 64, .speculation = kModel, .tree_nodes = 64, .draft_seed = 0});
  int64_t forwards = 0;
  server.draft_model->fault = [&](std::span<const int32_t>) {
    return ++forwards % 20 == 3 ? Status(StatusCode::kOutOfMemory, "refused") : Status();
  };
  const SamplingOptions options{.max_tokens = 60};
  const int64_t id = server.Submit({1, 2, 3}, options);
  int64_t refused = 0;
  while (!server.engine->Idle()) {
    const Status status = server.Step();
    refused += status.code() == StatusCode::kOutOfMemory;
    ASSERT_TRUE(status.ok() || status.code() == StatusCode::kOutOfMemory);
  }
  EXPECT_GT(refused, 1);
  ExpectEqual(server.answers[{id, 0}], Server().Generate({1, 2, 3}, options), "");
}

TEST(Speculation, LogitsThatAreNoNumbersInAGuessedRowEndTheSampleThere) {
  Server server({.chunk = 64, .speculation = kModel, .tree_nodes = 64, .draft_seed = 0});
  Server plain({.chunk = 64});
  for (FakeModel* model : {server.model, plain.model}) {
    model->edit = [](int32_t, int32_t position, std::span<float> logits) {
      if (position == 25) logits[0] = std::nanf("");
    };
  }
  const SamplingOptions options{.max_tokens = 60};
  const Answer got = server.Generate({1, 2, 3}, options);
  const Answer want = plain.Generate({1, 2, 3}, options);
  ExpectEqual(got, want, "");
  EXPECT_EQ(got.reason, FinishReason::kError);
  EXPECT_EQ(got.error, want.error);
}

// A sanity check beside the equality above: frequencies of the second token, which is drawn at a
// guess's parent, against its probabilities.
TEST(Speculation, SampledTokensAreDistributedAsTheirProbabilities) {
  Server server(
      {.chunk = 64, .sequences = 64, .speculation = kModel, .tree_nodes = 1024, .draft_seed = 3});
  std::vector<double> expected(FakeModel::kVocabSize);
  std::vector<double> counts(FakeModel::kVocabSize);
  const SamplingOptions best{.max_tokens = 1, .logprobs = 61};
  const int64_t rounds = 40, n = 64;
  for (int64_t round = 0; round < rounds; ++round) {
    // The first token is made certain, so that the second has one distribution.
    server.model->edit = [](int32_t, int32_t position, std::span<float> logits) {
      if (position == 2) logits[17] += 1000;
    };
    const int64_t id = server.Submit(
        {1, 2, 3},
        {.max_tokens = 4, .temperature = 1, .seed = static_cast<uint64_t>(round), .n = n});
    server.Finish();
    for (int64_t i = 0; i < n; ++i) ++counts[server.answers[{id, i}].tokens[1]];
  }
  const Answer known = server.Generate({1, 2, 3, 17}, best);
  double chi2 = 0;
  for (size_t i = 1; i < known.logprobs[0].size(); ++i) {
    const auto& [token, logprob] = known.logprobs[0][i];
    const double mean = std::exp(logprob) * static_cast<double>(rounds * n);
    chi2 += (counts[token] - mean) * (counts[token] - mean) / mean;
  }
  // 60 degrees of freedom: above 110 once in 10^4; the seeds are fixed.
  EXPECT_LT(chi2, 110);
  EXPECT_GT(server.engine->Stats().drafted_tokens, 1000);
}

}  // namespace
}  // namespace quire
