#include "store/testing/test_certificates.h"

#include <cstdlib>
#include <filesystem>
#include <vector>

#include "base/check.h"
#include "store/testing/test_redis.h"

namespace quire {
namespace {

// FOLDER/NAME.pem and FOLDER/NAME.key; with `more` arguments of `openssl req`.
void Make(const std::string& folder, const std::string& name,
          const std::vector<std::string>& more) {
  const std::string path = folder + "/" + name;
  std::vector<std::string> command = {"openssl",
                                      "req",
                                      "-x509",
                                      "-newkey",
                                      "ec",
                                      "-pkeyopt",
                                      "ec_paramgen_curve:P-256",
                                      "-nodes",
                                      "-days",
                                      "2",
                                      "-subj",
                                      "/CN=quire test " + name,
                                      "-keyout",
                                      path + ".key",
                                      "-out",
                                      path + ".pem"};
  command.insert(command.end(), more.begin(), more.end());
  QUIRE_CHECK(RunProgram(command) == 0) << "openssl makes no certificate for " << name;
}

}  // namespace

TestCertificates::TestCertificates() {
  std::string folder = (std::filesystem::temp_directory_path() / "quire-tls-XXXXXX").string();
  QUIRE_CHECK(mkdtemp(folder.data()) != nullptr) << folder;
  folder_ = folder;
  Make(folder_, "ca", {});
  const std::vector<std::string> signed_by = {"-CA", ca(), "-CAkey", folder_ + "/ca.key"};
  std::vector<std::string> server = signed_by;
  server.insert(server.end(), {"-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"});
  Make(folder_, "server", server);
  Make(folder_, "client", signed_by);
  QUIRE_CHECK(RunProgram({"openssl", "ec", "-aes128", "-passout", "pass:locked", "-in",
                          client_key(), "-out", locked_key()}) == 0);
}

TestCertificates::~TestCertificates() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

}  // namespace quire
