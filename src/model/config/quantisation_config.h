// `quantization_config` of a config.json: how the matrices of the folder are quantised.
#ifndef QUIRE_MODEL_CONFIG_QUANTISATION_CONFIG_H_
#define QUIRE_MODEL_CONFIG_QUANTISATION_CONFIG_H_

#include "base/json.h"
#include "model/weights/quantised_folder.h"
#include "quire/status.h"

namespace quire {

// BadArgument names the field and its value where it asks for something that is not read.
Result<FolderQuantisation> ReadQuantisation(const JsonValue& json);

}  // namespace quire

#endif  // QUIRE_MODEL_CONFIG_QUANTISATION_CONFIG_H_
