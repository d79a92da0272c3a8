#include "quire/model.h"

#include <utility>

#include "base/guard.h"
#include "kernels/backend.h"
#include "model/config/architecture.h"
#include "model/config/model_config.h"
#include "model/decoder.h"
#include "model/weights/checkpoint.h"
#include "model/weights/safetensors_writer.h"

namespace quire {
namespace {

// What stands before any weight is read.
struct ModelFolder {
  ModelConfig config;
  const Architecture* architecture;
  Checkpoint checkpoint;
  DecoderOptions options;
};

Result<ModelFolder> OpenFolder(const std::string& directory, const ModelOptions& options,
                               std::string_view call) {
  if (options.dtype != DType::kF32 && options.dtype != DType::kBF16) {
    return Status(StatusCode::kBadArgument, std::string(call) + ": dtype is " +
                                                std::string(DTypeName(options.dtype)) +
                                                "; it must be float32 or bfloat16");
  }
  if (options.activations != DType::kI8 && options.activations != DType::kBF16 &&
      options.activations != DType::kF32) {
    return Status(StatusCode::kBadArgument, std::string(call) + ": activations is " +
                                                std::string(DTypeName(options.activations)) +
                                                "; it must be int8, bfloat16 or float32");
  }
  QUIRE_ASSIGN_OR_RETURN(const Backend* const backend, FindBackend(options.kernel_path));
  QUIRE_ASSIGN_OR_RETURN(ModelConfig config, ReadModelConfig(directory));
  QUIRE_ASSIGN_OR_RETURN(const Architecture* const architecture, FindArchitecture(config));
  QUIRE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(directory));
  std::shared_ptr<ParallelRunner> runner = options.runner;
  if (runner == nullptr) {
    QUIRE_ASSIGN_OR_RETURN(runner, CreateThreadPool(0));
  }
  return ModelFolder{.config = std::move(config),
                     .architecture = architecture,
                     .checkpoint = std::move(checkpoint),
                     .options = {.dtype = options.dtype,
                                 .activations = options.activations,
                                 .backend = backend,
                                 .runner = std::move(runner)}};
}

}  // namespace

Result<std::unique_ptr<Model>> Model::Load(const std::string& directory,
                                           const ModelOptions& options) {
  return GuardEntry([&]() -> Result<std::unique_ptr<Model>> {
    QUIRE_ASSIGN_OR_RETURN(ModelFolder folder, OpenFolder(directory, options, "Model::Load"));
    QUIRE_ASSIGN_OR_RETURN(std::unique_ptr<Decoder> decoder,
                           Decoder::Create(folder.config, *folder.architecture, folder.checkpoint,
                                           std::move(folder.options)));
    return std::unique_ptr<Model>(std::move(decoder));
  });
}

Status Model::Pack(const std::string& directory, const ModelOptions& options,
                   const std::string& path) {
  return GuardEntry([&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(ModelFolder folder, OpenFolder(directory, options, "Model::Pack"));
    std::vector<TensorToWrite> tensors;
    QUIRE_ASSIGN_OR_RETURN(const std::unique_ptr<Decoder> decoder,
                           Decoder::Create(folder.config, *folder.architecture, folder.checkpoint,
                                           std::move(folder.options), &tensors));
    return WriteSafetensors(path, "quire-packed", tensors);
  });
}

Result<ModelMeasure> Model::Measure(const std::string& directory, const ModelOptions& options,
                                    int64_t row_count, int64_t logit_row_count) {
  return GuardEntry([&]() -> Result<ModelMeasure> {
    QUIRE_ASSIGN_OR_RETURN(ModelFolder folder, OpenFolder(directory, options, "Model::Measure"));
    return Decoder::Measure(folder.config, *folder.architecture, folder.checkpoint,
                            std::move(folder.options), row_count, logit_row_count);
  });
}

}  // namespace quire
