// The functions quire.snapshot_*: what can be said about snapshot files without an engine.
#include "ffi/snapshot.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <span>
#include <string>

#include "ffi/errors.h"
#include "ffi/tensors.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

OptionMap SnapshotDifferences(const tf::String& ours, const tf::String& theirs) {
  const SnapshotDifference difference = ValueOrThrow(
      CallChecked([&] { return DiffSnapshots(std::string(ours), std::string(theirs)); }));
  return {{"passport", tf::String(difference.passport)},
          {"common_tokens", difference.common_tokens},
          {"compared_sections", difference.compared_sections},
          {"different_sections", difference.different_sections},
          {"first_section", tf::String(difference.first_section)},
          {"same_sampler", difference.same_sampler},
          {"same_windows", difference.same_windows},
          {"same_states", difference.same_states}};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::GlobalDef()
      .def("quire.snapshot_info",
           [](const tf::String& path) {
             return SnapshotFields(
                 ValueOrThrow(CallChecked([&] { return ReadSnapshotInfo(std::string(path)); })));
           })
      .def("quire.snapshot_verify",
           [](const tf::String& path) {
             return SnapshotFields(
                 ValueOrThrow(CallChecked([&] { return VerifySnapshot(std::string(path)); })));
           })
      .def("quire.snapshot_diff", SnapshotDifferences);
}

}  // namespace

void ReadIdentityFields(OptionsReader& reader, Passport* identity) {
  reader.Read("model", &identity->model);
  reader.Read("revision", &identity->revision);
  reader.Read("tokenizer", &identity->tokenizer);
  reader.Read("adapter", &identity->adapter);
  reader.Read("block_tokens", &identity->block_tokens);
}

Passport ReadIdentity(const OptionMap& fields) {
  Passport identity;
  OptionsReader reader("snapshot", fields);
  ReadIdentityFields(reader, &identity);
  reader.Finish();
  return identity;
}

SnapshotContents ReadSnapshotContents(const OptionMap& fields) {
  SnapshotContents contents;
  OptionsReader reader("snapshot", fields);
  ReadIdentityFields(reader, &contents.identity);
  if (const auto tokens = reader.Get<tf::Tensor>("tokens"))
    contents.tokens = TokenIds(tf::TensorView(*tokens));
  if (const auto sampler = reader.Get<tf::Bytes>("sampler"))
    contents.sampler.assign(sampler->data(), sampler->size());
  if (const auto salt = reader.Get<tf::Bytes>("cache_salt"))
    contents.cache_salt.assign(salt->data(), salt->size());
  reader.Read("created_ms", &contents.created_ms);
  reader.Finish();
  return contents;
}

OptionMap SnapshotFields(const SnapshotInfo& info) {
  return {{"passport", tf::String(info.passport_json)},
          {"tokens", NewTensor(std::span(info.tokens))},
          {"sampler", tf::Bytes(info.sampler)},
          {"created_ms", info.created_ms},
          {"chunk_count", info.chunk_count},
          {"file_bytes", info.file_bytes},
          {"long_factors", info.long_factors},
          {"version", info.version},
          {"window", info.windows.window + info.windows.span},  // one of them is 0
          {"sinks", std::max(info.windows.sinks, info.windows.span_sinks)},
          {"slid", info.windows.slid},
          {"lost", info.windows.lost},
          {"state_bytes", info.state_bytes}};
}

void SaveStateSnapshot(FaultLatch* latch, const SequenceStates& states, int64_t seq_id,
                       const OptionMap& contents, const tf::String& path) {
  const SnapshotContents read = ReadSnapshotContents(contents);
  latch->Run([&] { return SaveSnapshot(states, seq_id, read, std::string(path)); });
}

OptionMap LoadStateSnapshot(FaultLatch* latch, const SequenceStates& states, int64_t seq_id,
                            const OptionMap& identity, const tf::String& path, bool any_numerics) {
  const Passport read = ReadIdentity(identity);
  return SnapshotFields(latch->Run([&] {
    return LoadSnapshot(states, seq_id, read, std::string(path), {.any_numerics = any_numerics});
  }));
}

}  // namespace quire::ffi
