// TLS in a build without OpenSSL: refused.
#include "net/tls_session.h"

namespace quire {

Result<std::shared_ptr<const TlsContext>> TlsContext::Create(const TlsOptions& options) {
  return Status(StatusCode::kBadArgument,
                options.prefix + ": this build has no TLS; configure it with -DQUIRE_TLS=ON");
}

}  // namespace quire
