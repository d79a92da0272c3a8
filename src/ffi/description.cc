#include "ffi/description.h"

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>

#include <vector>

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

// A column of a table: `field` of each row.
template <typename T, typename Row, typename F>
tf::Array<T> ColumnOf(const std::vector<Row>& rows, F&& field) {
  tf::Array<T> column;
  column.reserve(static_cast<int64_t>(rows.size()));
  for (const Row& row : rows) column.push_back(T(field(row)));
  return column;
}
template <typename Row>
tf::Array<int64_t> NumbersOf(const std::vector<Row>& rows, int64_t Row::*field) {
  return ColumnOf<int64_t>(rows, [&](const Row& row) { return row.*field; });
}
template <typename Row>
tf::Array<tf::String> SaltDigests(const std::vector<Row>& rows) {
  return ColumnOf<tf::String>(rows, [](const Row& row) { return row.salt_digest; });
}

}  // namespace

tf::Map<tf::String, int64_t> StatsFields(const EngineStats& stats) {
  return {{"pages_total", stats.pages_total},
          {"pages_free", stats.pages_free},
          {"pages_in_use", stats.pages_in_use},
          {"retained_sequences", stats.retained_sequences},
          {"retained_tokens", stats.retained_tokens},
          {"retained_pages", stats.retained_pages},
          {"waiting", stats.waiting},
          {"running", stats.running},
          {"learning", stats.learning},
          {"steps", stats.steps},
          {"prompt_tokens", stats.prompt_tokens},
          {"cached_tokens", stats.cached_tokens},
          {"completion_tokens", stats.completion_tokens},
          {"computed_tokens", stats.computed_tokens},
          {"preemptions", stats.preemptions},
          {"kv_bytes", stats.kv_bytes},
          {"kv_bytes_per_token", stats.kv_bytes_per_token},
          {"weight_bytes", stats.weight_bytes},
          {"page_size", stats.page_size},
          {"states_total", stats.states_total},
          {"states_free", stats.states_free},
          {"retained_states", stats.retained_states},
          {"state_bytes", stats.state_bytes},
          {"recomputed_tokens", stats.recomputed_tokens},
          {"loading", stats.loading},
          {"loads", stats.loads},
          {"loaded_ram_tokens", stats.loaded_tokens[0]},
          {"loaded_disk_tokens", stats.loaded_tokens[1]},
          {"loaded_redis_tokens", stats.loaded_tokens[2]},
          {"load_ns", static_cast<int64_t>(stats.load_seconds * 1e9)},
          {"layer_loads", stats.layer_loads},
          {"overlap_ns", static_cast<int64_t>(stats.overlap_seconds * 1e9)},
          {"stored_chunks", stats.stored_chunks},
          {"stored_bytes", stats.stored_bytes},
          {"refused_chunks", stats.refused_chunks},
          {"remote_tokens", stats.remote_tokens},
          {"remote_bytes", stats.remote_bytes},
          {"remote_waiting", stats.remote_waiting},
          {"remote_losses", stats.remote_losses},
          {"remote_timeouts", stats.remote_timeouts},
          {"staging_bytes", stats.staging_bytes},
          {"staging_bytes_largest", stats.staging_bytes_largest},
          {"remote_overlap_ns", static_cast<int64_t>(stats.remote_overlap_seconds * 1e9)},
          {"served_peers", stats.served_peers},
          {"served_waiting", stats.served_waiting},
          {"served_prompts", stats.served_prompts},
          {"served_tokens", stats.served_tokens},
          {"served_losses", stats.served_losses},
          {"served_timeouts", stats.served_timeouts},
          {"sending_bytes", stats.sending_bytes},
          {"held_prompts", stats.held_prompts},
          {"held_pages", stats.held_pages},
          {"held_used", stats.held_used},
          {"held_overdue", stats.held_overdue},
          {"held_given_up", stats.held_given_up},
          {"drafted_tokens", stats.drafted_tokens},
          {"accepted_tokens", stats.accepted_tokens},
          {"decode_forwards", stats.decode_forwards},
          {"draft_ns", static_cast<int64_t>(stats.draft_seconds * 1e9)},
          {"blend_moved_tokens", stats.blend_moved_tokens},
          {"blend_recomputed_tokens", stats.blend_recomputed_tokens},
          {"blend_exact_tokens", stats.blend_exact_tokens},
          {"blend_kept_tokens", stats.blend_kept_tokens},
          {"blend_computed_tokens", stats.blend_computed_tokens},
          {"compute_ns_per_token", static_cast<int64_t>(stats.compute_seconds_per_token * 1e9)}};
}

OptionMap DescriptionFields(const EngineDescription& description) {
  using Block = DescribedBlock;
  using Sequence = DescribedSequence;
  using Waiting = DescribedRequest;
  const OptionMap blocks{{"parent", NumbersOf(description.blocks, &Block::parent)},
                         {"begin", NumbersOf(description.blocks, &Block::begin)},
                         {"end", NumbersOf(description.blocks, &Block::end)},
                         {"bytes", NumbersOf(description.blocks, &Block::bytes)},
                         {"sequences", NumbersOf(description.blocks, &Block::sequences)},
                         {"stored_tokens", NumbersOf(description.blocks, &Block::stored_tokens)},
                         {"salt_digest", SaltDigests(description.blocks)}};
  const OptionMap sequences{{"request_id", NumbersOf(description.sequences, &Sequence::request_id)},
                            {"sample", NumbersOf(description.sequences, &Sequence::sample)},
                            {"tokens", NumbersOf(description.sequences, &Sequence::tokens)},
                            {"block", NumbersOf(description.sequences, &Sequence::block)},
                            {"salt_digest", SaltDigests(description.sequences)}};
  const OptionMap waiting{
      {"request_id", NumbersOf(description.waiting, &Waiting::request_id)},
      {"prompt_tokens", NumbersOf(description.waiting, &Waiting::prompt_tokens)},
      {"seconds",
       ColumnOf<double>(description.waiting, [](const Waiting& waits) { return waits.seconds; })},
      {"salt_digest", SaltDigests(description.waiting)}};
  return {{"stats", StatsFields(description.stats)},
          {"blocks", blocks},
          {"sequences", sequences},
          {"waiting", waiting},
          {"cut", description.cut},
          {"visited", description.visited},
          {"salt_key", tf::Bytes(description.salt_key)}};
}

}  // namespace quire::ffi
