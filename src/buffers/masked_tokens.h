// From the tensors of an entry or a query to the tokens that are compared.
#ifndef QUIRE_BUFFERS_MASKED_TOKENS_H_
#define QUIRE_BUFFERS_MASKED_TOKENS_H_

#include "buffers/prefix_index.h"
#include "quire/host_tensor.h"
#include "quire/status.h"

namespace quire {

// The tokens whose roi is set; all of them if `roi` is null. `call` names the caller in messages.
// BadArgument for tokens or roi that are no vectors of one length, ids outside [-2^63, 2^63),
// element types that are neither integers nor floats of at most 64 bits, a roi with other values
// than 0 and 1.
Result<MaskedTokens> MaskTokens(const char* call, const HostTensor& tokens, const HostTensor* roi);

}  // namespace quire

#endif  // QUIRE_BUFFERS_MASKED_TOKENS_H_
