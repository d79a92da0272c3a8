#include "engine/drafts/draft_vocabulary.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "model/testing/test_checkpoint.h"

namespace quire {
namespace {

// Tokens a, b and c, as byte-pair tokenizers have them, and an added one.
constexpr const char* kSmall =
    R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}},
        "added_tokens": [{"id": 3, "content": "<end>"}]})";

class DraftVocabulary : public testing::Test {
 protected:
  static void Write(const TestFolder& folder, const std::string& text) {
    std::ofstream(folder.File("tokenizer.json")) << text;
  }
  Status Check(int64_t target_size, int64_t draft_size) const {
    return CheckDraftVocabulary({target_.path(), target_size}, {draft_.path(), draft_size});
  }
  // What the refusal of this draft tokenizer says.
  std::string Refusal(const std::string& draft, int64_t draft_size = 8) const {
    Write(target_, kSmall);
    Write(draft_, draft);
    const Status status = Check(8, draft_size);
    EXPECT_FALSE(status.ok());
    return status.ToString();
  }

  TestFolder target_;
  TestFolder draft_;
};

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(DraftVocabulary, OneTokenizerWithPaddingOfAnySize) {
  Write(target_, kSmall);
  Write(draft_, kSmall);
  for (const int64_t size : {4, 8, 100}) {
    EXPECT_TRUE(Check(8, size).ok());
    EXPECT_TRUE(Check(size, 8).ok());
  }
}

TEST_F(DraftVocabulary, TokensThatOnlyOneHasDoNotMatter) {
  Write(target_, kSmall);
  // Written otherwise, with a token more and one less.
  Write(draft_, R"({"added_tokens": null, "model": {"vocab": {"c": 2, "a": 0, "b": 1, "d": 4}}})");
  EXPECT_TRUE(Check(8, 8).ok());
  // As pieces with scores, the ids being their places.
  Write(draft_, R"({"model": {"type": "Unigram", "vocab": [["a", 0], ["b", -1.5], ["c", -2]]}})");
  EXPECT_TRUE(Check(8, 8).ok());
  // Another token where the draft model has no row, and none can be guessed.
  Write(draft_, R"({"model": {"vocab": {"a": 0, "b": 1, "z": 2}}})");
  EXPECT_TRUE(Check(8, 2).ok());
  EXPECT_FALSE(Check(8, 3).ok());
}

TEST_F(DraftVocabulary, OtherTokensAreRefusedByName) {
  const std::string other = Refusal(R"({"model": {"vocab": {"a": 0, "x": 1, "c": 2}}})");
  for (const std::string part : {"token 1 ", "\"x\"", "\"b\"", "draft_model_directory"})
    EXPECT_TRUE(Has(other, part)) << other;
  const std::string added =
      Refusal(R"({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 3, "content": "<pad>"}]})");
  EXPECT_TRUE(Has(added, "token 3 ")) << added;
  EXPECT_TRUE(Has(Refusal(R"({"model": {"vocab": {"q": 6}}})"), "no token in common"));
  EXPECT_TRUE(Has(Refusal(R"({"model": {"vocab": {}}})"), "no token in common"));
}

TEST_F(DraftVocabulary, WithoutBothTokenizersTheSizesMustBeEqual) {
  EXPECT_TRUE(Check(8, 8).ok());
  const std::string neither = Check(8, 9).ToString();
  for (const std::string part : {" 8 ", " 9 ", "tokenizer.json"})
    EXPECT_TRUE(Has(neither, part)) << neither;
  Write(target_, kSmall);
  EXPECT_TRUE(Check(8, 8).ok());
  EXPECT_FALSE(Check(8, 9).ok());
}

TEST_F(DraftVocabulary, FilesThatAreNoTokenizersAreRefused) {
  for (const char* const text :
       {"", "{", "[]", "{}", R"({"model": {}})", R"({"model": {"vocab": 3}})",
        R"({"model": {"vocab": {"a": -1}}})", R"({"model": {"vocab": {"a": 4294967296}}})",
        R"({"model": {"vocab": {"a": "0"}}})", R"({"model": {"vocab": [["a"], []]}})",
        R"({"model": {"vocab": [[0, "a"]]}})",
        R"({"model": {"vocab": {"a": 0}}, "added_tokens": 3})",
        R"({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 3}]})"}) {
    EXPECT_TRUE(Has(Refusal(text), draft_.path())) << text;
  }
}

}  // namespace
}  // namespace quire
