// Servers for tests: a real redis-server, a real cluster of six, and one that says what a test
// makes it say.
#ifndef QUIRE_STORE_TESTING_TEST_REDIS_H_
#define QUIRE_STORE_TESTING_TEST_REDIS_H_

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "net/testing/run_program.h"
#include "net/testing/test_certificates.h"

namespace quire {

// Whether redis-server and redis-cli are installed.
bool HaveRedisServer();

// A process of redis-server with a folder of its own. It ends with the object.
class RedisServer {
 public:
  // `arguments` behind those for port, socket and folder. Returns when it accepts connections.
  // `certificates`: it also listens for TLS, and asks clients for no certificate.
  explicit RedisServer(std::vector<std::string> arguments = {},
                       const TestCertificates* certificates = nullptr);
  ~RedisServer();
  RedisServer(const RedisServer&) = delete;
  RedisServer& operator=(const RedisServer&) = delete;

  int port() const { return port_; }
  std::string tcp() const { return "127.0.0.1:" + std::to_string(port_); }
  std::string tls() const { return "127.0.0.1:" + std::to_string(tls_port_); }
  std::string unix_socket() const { return "unix:" + socket_path_; }
  std::string socket_path() const { return socket_path_; }
  void Signal(int signal) const;
  void Kill();   // SIGKILL, and waits for the end
  void Start();  // again, on the same port
  // Returns when the server has logged a line with this text since the last call.
  void AwaitLog(const std::string& text);
  // The reply to a command, as text; arrays with a space between the items.
  std::string Command(const std::vector<std::string>& arguments) const;

 private:
  std::string folder_;
  std::string socket_path_;
  std::vector<std::string> arguments_;
  int port_;
  int tls_port_ = 0;  // 0: none
  pid_t pid_ = -1;
  int log_fd_ = -1;
  std::string log_;
};

// Three masters with a replica each. Servers 0 to 2 begin as masters.
class RedisServerCluster {
 public:
  // `certificates`: clients and its own servers talk to its servers over TLS.
  explicit RedisServerCluster(std::vector<std::string> arguments = {},
                              const TestCertificates* certificates = nullptr);
  RedisServer& server(size_t i) { return *servers_[i]; }
  size_t size() const { return servers_.size(); }
  std::string seeds() const;
  // The server that has the slot now, as server 0 or another that runs sees it.
  size_t MasterOf(int slot);

 private:
  std::vector<std::unique_ptr<RedisServer>> servers_;
};

// Answers each command with what `answer` returns, byte for byte. kHang: with nothing; kHangUp:
// closes the connection. With a `greeting` it says that to each client, and hangs up.
class FakeRedis {
 public:
  static const std::string kHang;
  static const std::string kHangUp;
  using Answer = std::function<std::string(const std::vector<std::string>& command)>;

  explicit FakeRedis(Answer answer, std::string greeting = {});
  ~FakeRedis();
  int port() const { return port_; }
  std::string tcp() const { return "127.0.0.1:" + std::to_string(port_); }
  int64_t command_count() const { return command_count_; }

 private:
  void Accept();
  void Serve(int fd);

  const Answer answer_;
  const std::string greeting_;
  int listener_ = -1;
  int port_ = 0;
  std::atomic<int64_t> command_count_ = 0;
  std::mutex mutex_;
  bool stopping_ = false;
  std::vector<int> sockets_;
  std::vector<std::thread> threads_;
  std::thread acceptor_;
};

// RESP as a server writes it.
std::string RespBulk(const std::string& bytes);
std::string RespArray(const std::vector<std::string>& items);

}  // namespace quire

#endif  // QUIRE_STORE_TESTING_TEST_REDIS_H_
