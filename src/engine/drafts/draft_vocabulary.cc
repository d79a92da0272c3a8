#include "engine/drafts/draft_vocabulary.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "base/json.h"
#include "tensor/host_memory.h"

namespace quire {
namespace {

// Files of published tokenizers have up to 40 MB.
constexpr JsonLimits kTokenizerLimits = {.max_bytes = size_t{256} << 20};
// Ids are int32, as token ids are everywhere.
constexpr int64_t kIdMax = (int64_t{1} << 31) - 1;

using TokensById = std::map<int64_t, std::string>;

std::string_view TextOf(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

// "model": {"vocab": {token: id}}, or [[token, score]] in the order of ids; "added_tokens":
// [{"id", "content"}].
Result<TokensById> ReadTokens(const MappedFile& file, const std::string& path) {
  QUIRE_ASSIGN_OR_RETURN(const nlohmann::json text,
                         ParseJson(TextOf(file), path, kTokenizerLimits));
  const JsonValue root(text, path);
  QUIRE_ASSIGN_OR_RETURN(const JsonValue model, root.Get("model"));
  QUIRE_ASSIGN_OR_RETURN(const JsonValue vocab, model.Get("vocab"));
  TokensById tokens;
  if (vocab.json().is_object()) {
    for (const auto& [token, id] : vocab.json().items()) {
      QUIRE_ASSIGN_OR_RETURN(const int64_t at,
                             JsonValue(id, vocab.path() + "." + token).Int(0, kIdMax));
      tokens[at] = token;
    }
  } else {
    QUIRE_ASSIGN_OR_RETURN(const size_t count, vocab.ArraySize());
    for (size_t i = 0; i < count; ++i) {
      QUIRE_ASSIGN_OR_RETURN(const JsonValue piece, vocab.At(i));
      QUIRE_ASSIGN_OR_RETURN(const JsonValue token, piece.At(0));
      QUIRE_ASSIGN_OR_RETURN(tokens[static_cast<int64_t>(i)], token.String());
    }
  }
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> added, root.Find("added_tokens"));
  if (!added) return tokens;
  QUIRE_ASSIGN_OR_RETURN(const size_t count, added->ArraySize());
  for (size_t i = 0; i < count; ++i) {
    QUIRE_ASSIGN_OR_RETURN(const JsonValue token, added->At(i));
    QUIRE_ASSIGN_OR_RETURN(const int64_t id, token.GetInt("id", 0, kIdMax));
    QUIRE_ASSIGN_OR_RETURN(tokens[id], token.GetString("content"));
  }
  return tokens;
}

Status Refused(const ModelVocabulary& target, const ModelVocabulary& draft,
               const std::string& what) {
  return Status(StatusCode::kBadArgument,
                "EngineOptions::draft_model_directory: " + draft.directory + " and " +
                    target.directory + " " + what + "; give a draft model with the same tokenizer");
}

Status CompareTokens(const ModelVocabulary& target, const TokensById& of_target,
                     const ModelVocabulary& draft, const TokensById& of_draft) {
  const int64_t common = std::min(target.vocab_size, draft.vocab_size);
  bool any = false;
  for (const auto& [id, token] : of_draft) {
    if (id >= common) break;
    const auto other = of_target.find(id);
    if (other == of_target.end()) continue;
    any = true;
    if (other->second == token) continue;
    return Refused(target, draft,
                   "have other tokenizers: token " + std::to_string(id) + " is \"" + token +
                       "\" to the draft model and \"" + other->second + "\" to the other");
  }
  return any ? Status() : Refused(target, draft, "have no token in common");
}

}  // namespace

Status CheckDraftVocabulary(const ModelVocabulary& target, const ModelVocabulary& draft) {
  const std::string target_path = target.directory + "/tokenizer.json";
  const std::string draft_path = draft.directory + "/tokenizer.json";
  const Result<MappedFile> of_target = MappedFile::Open(target_path);
  const Result<MappedFile> of_draft = MappedFile::Open(draft_path);
  for (const Result<MappedFile>* const file : {&of_target, &of_draft}) {
    if (!file->ok() && file->status().code() != StatusCode::kNotFound) return file->status();
  }
  if (!of_target.ok() || !of_draft.ok()) {
    if (target.vocab_size == draft.vocab_size) return {};
    return Refused(target, draft,
                   "have vocabularies of " + std::to_string(target.vocab_size) + " and " +
                       std::to_string(draft.vocab_size) +
                       " tokens (the draft model's second), and without a tokenizer.json in both "
                       "nothing says that they are of the same tokens");
  }
  // The models of a family come with the same file.
  if (TextOf(*of_target) == TextOf(*of_draft)) return {};
  QUIRE_ASSIGN_OR_RETURN(const TokensById target_tokens, ReadTokens(*of_target, target_path));
  QUIRE_ASSIGN_OR_RETURN(const TokensById draft_tokens, ReadTokens(*of_draft, draft_path));
  return CompareTokens(target, target_tokens, draft, draft_tokens);
}

}  // namespace quire
