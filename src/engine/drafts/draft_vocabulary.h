// Whether the guesses of a draft model can be tokens of the model that it drafts for.
#ifndef QUIRE_ENGINE_DRAFTS_DRAFT_VOCABULARY_H_
#define QUIRE_ENGINE_DRAFTS_DRAFT_VOCABULARY_H_

#include <cstdint>
#include <string>

#include "quire/status.h"

namespace quire {

struct ModelVocabulary {
  std::string directory;   // that of config.json and, if there is one, tokenizer.json
  int64_t vocab_size = 0;  // rows of the embedding: often more than there are tokens
};

// BadArgument if an id means one token to the one and another to the other, by their
// tokenizer.json, or if they have no token in common. Either may have ids that the other has not.
// Without both files the sizes must be equal. Corrupt, IoError for files that cannot be read.
Status CheckDraftVocabulary(const ModelVocabulary& target, const ModelVocabulary& draft);

}  // namespace quire

#endif  // QUIRE_ENGINE_DRAFTS_DRAFT_VOCABULARY_H_
