// Guesses from the sample's own text (prompt lookup) and from SamplingOptions::predicted_tokens:
// what followed at earlier places where prompt and answer ended like now.
#ifndef QUIRE_ENGINE_DRAFTS_NGRAM_DRAFT_H_
#define QUIRE_ENGINE_DRAFTS_NGRAM_DRAFT_H_

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/drafts/draft.h"

namespace quire {

// Where the runs of a growing text stand in it. Each token is looked at once, so the work of an
// answer grows with its length; a lookup looks at a bounded number of places.
class NGramIndex {
 public:
  // Shorter ends than two tokens are found everywhere and foretell little; runs of four and more
  // are told apart by how far they agree.
  static constexpr int64_t kLeast = 2;
  static constexpr int64_t kMost = 4;
  static constexpr int64_t kPlacesMax = 16;     // that a lookup compares, latest first
  static constexpr int64_t kAgreementMax = 32;  // tokens that it compares at a place

  // REQUIRES: `text` begins with what was extended to before. After bad_alloc it can be called
  // again.
  void Extend(std::span<const int32_t> text);
  // Positions in `text` behind which another end like its own lies, the longest agreement first,
  // then the latest; at most `count`. REQUIRES: Extend(text).
  std::vector<int64_t> FindContinuations(std::span<const int32_t> text, int64_t count) const;

 private:
  static constexpr size_t kLengths = kMost - kLeast + 1;
  static uint64_t Key(std::span<const int32_t> text, int64_t end, int64_t length);

  // For each run's hash the last position behind it, and for each position the one before with the
  // same hash; 0: none. Hashes may collide: places are compared.
  std::unordered_map<uint64_t, int32_t> last_;
  std::vector<std::array<int32_t, kLengths>> previous_;  // [position behind a run]
};

class NGramDrafter final : public Drafter {
 public:
  Status Propose(std::span<const DraftJob> jobs, DrawScratch* scratch) override;
  void Forget(int64_t* state) noexcept override;
  int64_t state_count() const override { return static_cast<int64_t>(known_.size()); }
  void CheckInvariants() const override {}

  // Older tokens of a longer text are forgotten, half of these at a time: an index takes some 120
  // bytes for each, and endless texts have no last one.
  static constexpr int64_t kTextMax = int64_t{1} << 18;

 private:
  // What is known of a sample. text: with a prediction, the end of the prompt and the prediction
  // behind it, as if they had been said before, then the sample's own text, of which `own` tokens
  // are there; else empty, and the index is that of the sample's tokens.
  struct Known {
    NGramIndex index;
    std::vector<int32_t> text;
    int64_t own = 0;
    int64_t begin = 0;  // tokens before it are forgotten
  };
  static std::span<const int32_t> TextOf(const DraftJob& job, Known* known);

  std::unordered_map<int64_t, Known> known_;
  int64_t next_state_ = 0;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_DRAFTS_NGRAM_DRAFT_H_
