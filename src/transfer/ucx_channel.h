// Where connections over UCX find libquire_ucx.so. They are made by byte_channel.h.
#ifndef QUIRE_TRANSFER_UCX_CHANNEL_H_
#define QUIRE_TRANSFER_UCX_CHANNEL_H_

#include <string>

#include "quire/status.h"
#include "transfer/ucx_library.h"

namespace quire {

// The library in `folder`, which ends with a slash; if it is not there, or the folder is "", the
// one that the system's loader finds. BadArgument, with what to install.
Result<const QuireUcxFunctions*> OpenUcxLibrary(const std::string& folder);

}  // namespace quire

#endif  // QUIRE_TRANSFER_UCX_CHANNEL_H_
