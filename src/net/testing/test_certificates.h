// Certificates for tests of TLS, made by the program openssl.
#ifndef QUIRE_NET_TESTING_TEST_CERTIFICATES_H_
#define QUIRE_NET_TESTING_TEST_CERTIFICATES_H_

#include <string>

namespace quire {

// Whether the program that makes them is installed; tools/setup.sh does it.
bool HaveOpenssl();

// Certificates of a test authority, in files that go with the object: the server's for localhost
// and 127.0.0.1, a client's, and their keys. All PEM.
class TestCertificates {
 public:
  TestCertificates();
  ~TestCertificates();
  TestCertificates(const TestCertificates&) = delete;
  TestCertificates& operator=(const TestCertificates&) = delete;

  std::string ca() const { return folder_ + "/ca.pem"; }
  std::string server() const { return folder_ + "/server.pem"; }
  std::string server_key() const { return folder_ + "/server.key"; }
  std::string client() const { return folder_ + "/client.pem"; }
  std::string client_key() const { return folder_ + "/client.key"; }
  // The same under a password.
  std::string locked_key() const { return folder_ + "/locked.key"; }
  // As the server's, and its time was over yesterday; its key is the server's.
  std::string expired() const { return folder_ + "/expired.pem"; }

 private:
  std::string folder_;
};

}  // namespace quire

#endif  // QUIRE_NET_TESTING_TEST_CERTIFICATES_H_
