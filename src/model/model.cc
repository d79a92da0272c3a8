#include "quire/model.h"

#include <utility>

#include "base/guard.h"
#include "kernels/backend.h"
#include "model/architecture.h"
#include "model/checkpoint.h"
#include "model/decoder.h"
#include "model/model_config.h"

namespace quire {
namespace {

Result<std::unique_ptr<Model>> LoadModel(const std::string& directory,
                                         const ModelOptions& options) {
  if (options.dtype != DType::kF32 && options.dtype != DType::kBF16) {
    return Status(StatusCode::kBadArgument, "Model::Load: dtype is " +
                                                std::string(DTypeName(options.dtype)) +
                                                "; it must be float32 or bfloat16");
  }
  QUIRE_ASSIGN_OR_RETURN(const Backend* const backend, FindBackend(options.kernel_path));
  QUIRE_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(directory));
  QUIRE_ASSIGN_OR_RETURN(const Architecture* const architecture, FindArchitecture(config));
  QUIRE_RETURN_IF_ERROR(CheckNoWindow(*architecture, config));
  QUIRE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(directory));
  DecoderOptions decoder_options{
      .dtype = options.dtype,
      .backend = backend,
      .runner = options.runner != nullptr ? options.runner : CreateThreadPool(0)};
  QUIRE_ASSIGN_OR_RETURN(
      std::unique_ptr<Decoder> decoder,
      Decoder::Create(config, *architecture, std::move(checkpoint), std::move(decoder_options)));
  return std::unique_ptr<Model>(std::move(decoder));
}

}  // namespace

Result<std::unique_ptr<Model>> Model::Load(const std::string& directory,
                                           const ModelOptions& options) {
  return GuardEntry([&] { return LoadModel(directory, options); });
}

}  // namespace quire
