#include "engine/drafts/model_draft.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "engine/prefix/open_forward.h"
#include "engine/request/request.h"

namespace quire {
namespace {

// Takes back what was appended to the jobs' tokens, whichever way Propose is left.
class TokensAsBefore {
 public:
  explicit TokensAsBefore(std::span<const DraftJob> jobs) : jobs_(jobs) {
    for (const DraftJob& job : jobs) sizes_.push_back(job.tokens->size());
  }
  TokensAsBefore(const TokensAsBefore&) = delete;
  TokensAsBefore& operator=(const TokensAsBefore&) = delete;
  ~TokensAsBefore() {
    for (size_t i = 0; i < sizes_.size(); ++i) jobs_[i].tokens->resize(sizes_[i]);
  }

 private:
  std::span<const DraftJob> jobs_;
  std::vector<size_t> sizes_;
};

}  // namespace

ModelDrafter::ModelDrafter(Parts parts)
    : model_(std::move(parts.model)),
      cache_(std::move(parts.cache)),
      recurrent_(std::move(parts.recurrent)),
      composite_(JoinStates(cache_, recurrent_)),
      state_(composite_ != nullptr ? EngineStates(composite_.get()) : EngineStates(cache_.get())),
      prefill_chunk_(parts.prefill_chunk),
      vocab_size_(std::min(parts.vocab_size, model_->info().vocab_size)) {
  logits_.reserve(static_cast<size_t>(parts.rows_max * model_->info().vocab_size));
}

void ModelDrafter::Drop(Held* held) noexcept {
  if (held->sequence_id == -1) return;
  state_.RemoveSequence(held->sequence_id);
  held->sequence_id = -1;
  held->synced = 0;
  held->chain.clear();
}

void ModelDrafter::Forget(int64_t* state) noexcept {
  const auto found = held_.find(*state);
  QUIRE_CHECK(found != held_.end()) << "draft state " << *state;
  Drop(&found->second);
  held_.erase(found);
  *state = kNoDraftState;
}

// A sequence for the job, which begins with what another sample of its request has. None as long as
// that one is still on its way through the prompt: it is run once for all.
Status ModelDrafter::Begin(const DraftJob& job, Held* held) {
  QUIRE_CHECK(held->sequence_id == -1) << "sequence " << held->sequence_id << " would be lost";
  int64_t parent = -1;
  int64_t length = 0;
  for (const auto& [state, other] : held_) {
    if (other.sequence_id == -1 || other.request_id != job.request_id) continue;
    if (other.last_use == use_ && other.synced < job.prompt_tokens) return {};
    const int64_t start =
        state_.ForkStart(other.sequence_id, std::min(other.synced, job.prompt_tokens));
    if (start <= length) continue;
    length = start;
    parent = other.sequence_id;
  }
  const int64_t id = next_sequence_id_;
  if (length > 0) {
    QUIRE_RETURN_IF_ERROR(state_.kv().ForkSequence(parent, id, length));
  } else {
    const SamplingOptions& options = *job.options;
    const int64_t span = SpanMax(job.prompt_tokens, options);
    QUIRE_RETURN_IF_ERROR(state_.AddSequence(id, NeedsLongRope(model_->info(), span)));
    // Recurrent layers see what they see.
    if (options.window != 0 && state_.attention() != nullptr)
      QUIRE_RETURN_IF_ERROR(state_.EnableWindow(id, options.window, options.sinks));
  }
  ++next_sequence_id_;
  held->sequence_id = id;
  held->synced = length;
  return {};
}

// Whether the model has the position, or, with a window, all distances up to it.
bool ModelDrafter::HasPosition(const DraftJob& job, int64_t position) const {
  const int64_t window = job.options->window;
  const int64_t positions = model_->info().max_position_embeddings;
  return position < positions || (window != 0 && window <= positions);
}

bool ModelDrafter::KnowsTokens(const DraftJob& job, Held* held) const {
  const auto behind = job.tokens->begin() + held->synced;
  held->unknown_token |= std::any_of(
      behind, job.tokens->end(), [&](int32_t token) { return token >= model_->info().vocab_size; });
  return !held->unknown_token;
}

// The first `count` of the guesses that the sequence has were right.
Status ModelDrafter::KeepGuesses(Held* held, int64_t count) {
  if (held->chain.empty()) return {};
  QUIRE_CHECK(count <= std::ssize(held->chain));
  const int64_t leaf = count - 1;  // -1: none of them
  QUIRE_RETURN_IF_ERROR(
      state_.kv().CommitAcceptedTokenTreeNodes({&held->sequence_id, 1}, {&leaf, 1}));
  held->synced += count;
  held->chain.clear();
  return {};
}

// The job's sequence with nothing but the sample's tokens; null if it has to wait for one, or its
// text cannot be fed.
Result<ModelDrafter::Held*> ModelDrafter::Align(const DraftJob& job) {
  if (*job.state == kNoDraftState) {
    held_[next_state_].request_id = job.request_id;
    *job.state = next_state_++;
  }
  Held& held = held_.at(*job.state);
  held.last_use = use_;
  if (!KnowsTokens(job, &held)) {
    Drop(&held);
    return nullptr;
  }
  if (held.sequence_id != -1) {
    QUIRE_CHECK(held.synced <= std::ssize(*job.tokens)) << "KV of tokens that are gone";
    const std::span<const int32_t> drawn =
        std::span<const int32_t>(*job.tokens).subspan(static_cast<size_t>(held.synced));
    const auto in_chain =
        std::mismatch(held.chain.begin(), held.chain.end(), drawn.begin(), drawn.end()).first;
    QUIRE_RETURN_IF_ERROR(KeepGuesses(&held, in_chain - held.chain.begin()));
    // The last token is fed for the logits behind it, also if it is there.
    const int64_t common = std::min(held.synced, static_cast<int64_t>(job.tokens->size()) - 1);
    const int64_t kept = state_.ForkStart(held.sequence_id, common);
    const Status popped = state_.kv().PopN(held.sequence_id, held.synced - kept);
    if (popped.code() == StatusCode::kOutOfMemory) return popped;
    if (popped.ok()) {
      held.synced = kept;
    } else {
      Drop(&held);  // no free state to go back to: it is fed again
    }
  }
  if (held.sequence_id == -1) QUIRE_RETURN_IF_ERROR(Begin(job, &held));
  return held.sequence_id == -1 ? nullptr : &held;
}

// Gives up the sequence that was not used for longest; false if all are those of `courses`.
bool ModelDrafter::FreeOne(std::span<const Course> courses) noexcept {
  Held* oldest = nullptr;
  for (auto& [state, held] : held_) {
    const bool is_in_use = std::any_of(courses.begin(), courses.end(),
                                       [&, h = &held](auto& course) { return course.held == h; });
    if (is_in_use || held.sequence_id == -1) continue;
    if (oldest == nullptr || held.last_use < oldest->last_use) oldest = &held;
  }
  if (oldest == nullptr) return false;
  Drop(oldest);
  return true;
}

Result<int64_t> ModelDrafter::PagesFor(std::span<const Course> courses, Feeds feeds) const {
  std::vector<int64_t> ids;
  std::vector<int64_t> lengths;
  std::vector<int64_t> parents;
  for (const Course& course : courses) {
    ids.push_back(course.held->sequence_id);
    lengths.push_back(course.tokens);
    parents.push_back(std::ssize(course.held->chain) - 1);
  }
  return feeds == Feeds::kTokens ? state_.PagesNeeded(ids, lengths)
                                 : state_.PagesNeededForTree(ids, lengths, parents);
}

// Gives up sequences of others, then courses, until the pages suffice.
Status ModelDrafter::FitPages(std::vector<Course>* courses, Feeds feeds) {
  while (!courses->empty()) {
    QUIRE_ASSIGN_OR_RETURN(const int64_t pages, PagesFor(*courses, feeds));
    if (pages <= state_.pages_free()) return {};
    if (!FreeOne(*courses)) courses->pop_back();
  }
  return {};
}

// Feeds each course its next tokens. The courses that are left have got them.
Status ModelDrafter::Forward(std::vector<Course>* courses, Feeds feeds) {
  QUIRE_RETURN_IF_ERROR(FitPages(courses, feeds));
  if (courses->empty()) return {};
  std::vector<int64_t> ids;
  std::vector<int64_t> lengths;
  std::vector<int64_t> parents;
  std::vector<int32_t> token_ids;
  std::vector<int64_t> rows;
  for (Course& course : *courses) {
    const auto first = course.job->tokens->begin() + course.held->length();
    token_ids.insert(token_ids.end(), first, first + course.tokens);
    ids.push_back(course.held->sequence_id);
    lengths.push_back(course.tokens);
    parents.push_back(std::ssize(course.held->chain) - 1);
    course.row = -1;
    if (first + course.tokens != course.job->tokens->end()) continue;
    course.row = static_cast<int64_t>(rows.size());
    rows.push_back(static_cast<int64_t>(token_ids.size()) - 1);
  }
  logits_.resize(rows.size() * static_cast<size_t>(model_->info().vocab_size));
  for (Course& course : *courses) {
    course.held->chain.reserve(course.held->chain.size() + static_cast<size_t>(course.tokens));
  }
  QUIRE_RETURN_IF_ERROR(feeds == Feeds::kTokens
                            ? state_.kv().BeginForward(ids, lengths)
                            : state_.kv().BeginTreeForward(ids, lengths, parents));
  OpenForward forward(&state_.kv());
  QUIRE_RETURN_IF_ERROR(
      model_->Forward({cache_.get(), recurrent_.get()}, token_ids, rows, logits_.data()));
  QUIRE_RETURN_IF_ERROR(forward.End());
  for (Course& course : *courses) {
    if (feeds == Feeds::kTokens) {
      course.held->synced += course.tokens;
    } else {
      course.held->chain.push_back(course.job->tokens->back());  // there is room
    }
  }
  tokens_run_ += static_cast<int64_t>(token_ids.size());
  return {};
}

// Puts a draw and the best tokens beside it into the tree; whether guesses behind it are wanted.
bool ModelDrafter::Guess(Course* course, DrawScratch* scratch) {
  const DraftJob& job = *course->job;
  const auto row_size = static_cast<size_t>(model_->info().vocab_size);
  const float* const row = logits_.data() + static_cast<size_t>(course->row) * row_size;
  const std::span<const int32_t> tokens = *job.tokens;
  const auto prompt_tokens = static_cast<size_t>(job.prompt_tokens);
  const int64_t beside = std::min(job.branches, vocab_size_);
  draw_.logprobs.resize(job.branches > 1 ? static_cast<size_t>(1 + beside) : 0);
  DrawInput input{.logits = {row, static_cast<size_t>(vocab_size_)},
                  .prompt = tokens.first(prompt_tokens),
                  .answer = tokens.subspan(prompt_tokens),
                  .options = job.options,
                  .stream = job.stream};
  if (job.filter != nullptr) {
    if (!job.filter->is_there() || !job.filter->FillMask(scratch->mask).ok()) return false;
    input.mask = scratch->mask;
  }
  DrawToken(input, scratch, &draw_);
  // Logits that are not numbers, or a filter that fails or allows nothing, give no guess; what the
  // answer is the other model decides.
  if (draw_.error != DrawError::kNone) return false;
  if (job.filter != nullptr) {
    const Result<bool> may_come = job.filter->Accept(draw_.token);
    if (!may_come.ok() || !*may_come) return false;
  }
  const int64_t drawn = job.tree->AddChild(course->parent, draw_.token);
  int64_t siblings = 1;
  for (size_t i = 1; i < draw_.logprobs.size() && siblings < job.branches; ++i) {
    if (job.tree->size() == job.guesses_max) break;
    if (draw_.logprobs[i].token == draw_.token) continue;
    job.tree->AddChild(course->parent, draw_.logprobs[i].token);
    ++siblings;
  }
  course->parent = drawn;
  return !IsEnd(model_->info(), *job.options, draw_.token) && job.tree->size() < job.guesses_max;
}

Status ModelDrafter::Propose(std::span<const DraftJob> jobs, DrawScratch* scratch) {
  ++use_;
  const TokensAsBefore as_before(jobs);
  std::vector<Course> courses;
  int64_t budget = prefill_chunk_;
  for (const DraftJob& job : jobs) {
    const auto length = static_cast<int64_t>(job.tokens->size());
    if (budget == 0 || !HasPosition(job, length)) continue;
    QUIRE_ASSIGN_OR_RETURN(Held* const held, Align(job));
    if (held == nullptr) continue;
    const int64_t tokens = std::min(budget, length - held->synced);
    budget -= tokens;
    courses.push_back({.job = &job, .held = held, .tokens = tokens});
  }
  // So there are never more nodes than are guessed in a step.
  for (auto& [state, held] : held_) QUIRE_RETURN_IF_ERROR(KeepGuesses(&held, 0));
  QUIRE_RETURN_IF_ERROR(Forward(&courses, Feeds::kTokens));
  std::erase_if(courses, [](const Course& course) { return course.row == -1; });
  for (int64_t level = 1; !courses.empty(); ++level) {
    std::vector<Course> next;
    for (Course& course : courses) {
      std::vector<int32_t>& tokens = *course.job->tokens;
      const bool goes_on = Guess(&course, scratch) && level < course.job->levels_max &&
                           HasPosition(*course.job, std::ssize(tokens));
      if (!goes_on) continue;
      tokens.push_back(course.job->tree->tokens[static_cast<size_t>(course.parent)]);
      next.push_back(course);
      next.back().tokens = 1;
    }
    courses = std::move(next);
    QUIRE_RETURN_IF_ERROR(Forward(&courses, Feeds::kGuesses));
  }
  return {};
}

void ModelDrafter::CheckInvariants() const {
  int64_t sequences = 0;
  for (const auto& [state, held] : held_) {
    if (held.sequence_id == -1) continue;
    ++sequences;
    const Result<int64_t> length = state_.GetSequenceLength(held.sequence_id);
    QUIRE_CHECK(length.ok()) << length.status().ToString();
    QUIRE_CHECK(*length == held.length()) << "draft sequence " << held.sequence_id;
  }
  QUIRE_CHECK(state_.sequence_count() == sequences) << "a draft sequence that nobody holds";
  const Status status = state_.CheckInvariants();
  QUIRE_CHECK(status.ok()) << status.ToString();
}

}  // namespace quire
