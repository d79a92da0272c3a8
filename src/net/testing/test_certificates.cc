#include "net/testing/test_certificates.h"

#include <cstdlib>
#include <filesystem>
#include <vector>

#include "base/check.h"
#include "net/testing/run_program.h"

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

// The request first: only `openssl x509` makes certificates whose time is over.
void MakeExpired(const std::string& folder) {
  const std::string request = folder + "/expired.csr";
  QUIRE_CHECK(RunProgram({"openssl", "req", "-new", "-key", folder + "/server.key", "-subj",
                          "/CN=quire test expired", "-addext",
                          "subjectAltName=DNS:localhost,IP:127.0.0.1", "-out", request}) == 0);
  QUIRE_CHECK(RunProgram({"openssl", "x509", "-req", "-in", request, "-CA", folder + "/ca.pem",
                          "-CAkey", folder + "/ca.key", "-days", "-1", "-copy_extensions", "copy",
                          "-out", folder + "/expired.pem"}) == 0);
}

}  // namespace

bool HaveOpenssl() {
  static const bool have = RunProgram({"openssl", "version"}) == 0;
  return have;
}

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
  MakeExpired(folder_);
  QUIRE_CHECK(RunProgram({"openssl", "ec", "-aes128", "-passout", "pass:locked", "-in",
                          client_key(), "-out", locked_key()}) == 0);
}

TestCertificates::~TestCertificates() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

}  // namespace quire
