// The functions quire.*: what belongs to no object.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <span>
#include <string>

#include "ffi/errors.h"
#include "ffi/options.h"
#include "ffi/tensors.h"
#include "quire/attention_kv_cache.h"
#include "quire/engine.h"
#include "quire/kernel_paths.h"
#include "quire/kv_transfer.h"
#include "quire/model.h"
#include "quire/rope.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

tf::Array<tf::String> KernelPathNames() {
  tf::Array<tf::String> names;
  for (const std::string& name : KernelPaths()) names.push_back(tf::String(name));
  return names;
}

OptionMap RopeFrequenciesOf(const OptionMap& rope, int64_t head_dim, bool long_factors) {
  const RopeFrequencies frequencies = ValueOrThrow(CallChecked(
      [&] { return ComputeRopeFrequencies(ReadRopeOptions(rope), head_dim, long_factors); }));
  return {{"inv_freq", NewTensor(std::span(frequencies.inv_freq))},
          {"amplitude", frequencies.amplitude}};
}

// Name of each code -> kind of its exception.
tf::Map<tf::String, tf::String> ErrorKindNames() {
  tf::Map<tf::String, tf::String> names;
  for (const ErrorKind& entry : ErrorKinds()) {
    names.Set(tf::String(std::string(StatusCodeName(entry.code))),
              tf::String(std::string(entry.kind)));
  }
  return names;
}

void PackModel(const OptionMap& fields) {
  std::string directory;
  std::string path;
  ModelOptions options;
  OptionsReader reader("pack_model", fields);
  reader.Read("model_directory", &directory);
  reader.Read("path", &path);
  reader.Read("dtype", &options.dtype);
  options.runner = reader.ReadRunner();
  reader.Finish();
  ThrowIfError(CallChecked([&] { return Model::Pack(directory, options, path); }));
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::GlobalDef()
      .def("quire.version", [] { return tf::String(QUIRE_VERSION); })
      .def("quire.kernel_paths", KernelPathNames)
      .def("quire.refused_kernel_path", [] { return tf::String(RefusedKernelPath()); })
      .def("quire.default_page_size",
           [](const OptionMap& layer) { return DefaultPageSize(ReadLayerSpec(layer)); })
      .def("quire.default_staging_bytes", [] { return StagingUse::kLimitDefault; })
      .def("quire.default_sending_bytes", [] { return EngineOptions::kSendingBytesDefault; })
      .def("quire.rope_frequencies", RopeFrequenciesOf)
      .def("quire.pack_model", PackModel)
      .def("quire.error_kinds", ErrorKindNames);
}

}  // namespace
}  // namespace quire::ffi
