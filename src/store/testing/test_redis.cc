#include "store/testing/test_redis.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <sstream>

#include "base/check.h"

namespace quire {
namespace {

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

// A listening socket; port 0: any.
int Listen(int* port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(*port);
  socklen_t size = sizeof(address);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(fd, 64) != 0) {
    close(fd);
    return -1;
  }
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  *port = ntohs(address.sin_port);
  return fd;
}

// A port that is free, and whose port of the cluster's bus is. Both lie below those that the system
// gives to connections and to programs that ask for any: no other one takes them before the server.
int FreePort() {
  std::random_device random;  // other processes look for ports, too
  while (true) {
    int port = 10'000 + static_cast<int>(random() % 12'000);
    int bus_port = port + 10'000;
    const int first = Listen(&port);
    const int second = Listen(&bus_port);
    if (first >= 0) close(first);
    if (second >= 0) close(second);
    if (first >= 0 && second >= 0) return port;
  }
}

std::string TextOf(const redisReply* reply) {
  if (reply->type == REDIS_REPLY_INTEGER) return std::to_string(reply->integer);
  if (reply->type == REDIS_REPLY_NIL) return "(nil)";
  if (reply->type != REDIS_REPLY_ARRAY) return std::string(reply->str, reply->len);
  std::string text;
  for (size_t i = 0; i < reply->elements; ++i)
    text += (i == 0 ? "" : " ") + TextOf(reply->element[i]);
  return text;
}

}  // namespace

bool HaveRedisServer() {
  static const bool have =
      RunProgram({"redis-server", "--version"}) == 0 && RunProgram({"redis-cli", "--version"}) == 0;
  return have;
}

// ---- RedisServer

RedisServer::RedisServer(std::vector<std::string> arguments, const TestCertificates* certificates)
    : arguments_(std::move(arguments)), port_(FreePort()) {
  if (certificates != nullptr) {
    do {
      tls_port_ = FreePort();
    } while (tls_port_ == port_);
    const std::vector<std::string> tls = {"--tls-port",         std::to_string(tls_port_),
                                          "--tls-cert-file",    certificates->server(),
                                          "--tls-key-file",     certificates->server_key(),
                                          "--tls-ca-cert-file", certificates->ca(),
                                          "--tls-auth-clients", "no"};
    arguments_.insert(arguments_.begin(), tls.begin(), tls.end());
  }
  std::string folder = (std::filesystem::temp_directory_path() / "quire-redis-XXXXXX").string();
  QUIRE_CHECK(mkdtemp(folder.data()) != nullptr) << folder;
  folder_ = folder;
  socket_path_ = folder_ + "/socket";
  Start();
}

RedisServer::~RedisServer() {
  Kill();
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void RedisServer::Start() {
  int pipe_fds[2];
  QUIRE_CHECK(pipe2(pipe_fds, O_CLOEXEC) == 0);
  log_fd_ = pipe_fds[0];
  std::vector<std::string> command = {"redis-server",
                                      "--port",
                                      std::to_string(port_),
                                      "--bind",
                                      "127.0.0.1",
                                      "--unixsocket",
                                      socket_path_,
                                      "--dir",
                                      folder_,
                                      "--save",
                                      "",
                                      "--appendonly",
                                      "no",
                                      "--daemonize",
                                      "no",
                                      "--loglevel",
                                      "notice",
                                      "--logfile",
                                      ""};
  command.insert(command.end(), arguments_.begin(), arguments_.end());
  pid_ = SpawnProgram(command, pipe_fds[1]);
  close(pipe_fds[1]);
  AwaitLog("Ready to accept connections");
}

void RedisServer::AwaitLog(const std::string& text) {
  while (true) {
    const size_t at = log_.find(text);
    if (at != std::string::npos) {
      log_.erase(0, at + text.size());
      return;
    }
    char buffer[4096];
    const ssize_t size = read(log_fd_, buffer, sizeof(buffer));
    if (size < 0 && errno == EINTR) continue;
    QUIRE_CHECK(size > 0) << "redis-server ended without saying \"" << text << "\": " << log_;
    log_.append(buffer, static_cast<size_t>(size));
  }
}

void RedisServer::Signal(int signal) const { kill(pid_, signal); }

void RedisServer::Kill() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  close(log_fd_);
  log_.clear();
}

std::string RedisServer::Command(const std::vector<std::string>& arguments) const {
  redisContext* context = redisConnect("127.0.0.1", port_);
  QUIRE_CHECK(context != nullptr);
  if (context->err != 0) {
    redisFree(context);
    return "(gone)";
  }
  std::vector<const char*> argv;
  std::vector<size_t> sizes;
  for (const std::string& argument : arguments) {
    argv.push_back(argument.data());
    sizes.push_back(argument.size());
  }
  auto* reply = static_cast<redisReply*>(
      redisCommandArgv(context, static_cast<int>(argv.size()), argv.data(), sizes.data()));
  std::string text = reply == nullptr ? "(gone)" : TextOf(reply);
  if (reply != nullptr) freeReplyObject(reply);
  redisFree(context);
  return text;
}

// ---- RedisServerCluster

RedisServerCluster::RedisServerCluster(std::vector<std::string> arguments,
                                       const TestCertificates* certificates) {
  arguments.insert(
      arguments.end(),
      {"--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-node-timeout",
       "5000", "--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"});
  std::vector<std::string> create = {"redis-cli"};
  if (certificates != nullptr) {
    arguments.insert(arguments.end(), {"--tls-cluster", "yes", "--tls-replication", "yes"});
    create.insert(create.end(), {"--tls", "--cacert", certificates->ca()});
  }
  create.insert(create.end(), {"--cluster", "create"});
  for (int i = 0; i < 6; ++i) {
    servers_.push_back(std::make_unique<RedisServer>(arguments, certificates));
    create.push_back(certificates != nullptr ? servers_.back()->tls() : servers_.back()->tcp());
  }
  create.insert(create.end(), {"--cluster-replicas", "1", "--cluster-yes"});
  QUIRE_CHECK(RunProgram(create) == 0) << "redis-cli --cluster create failed";
  // A failover to a replica that has nothing yet would lose everything.
  for (size_t i = 3; i < servers_.size(); ++i) servers_[i]->AwaitLog("Finished with success");
  for (const auto& server : servers_) {
    while (server->Command({"CLUSTER", "INFO"}).find("cluster_state:ok") == std::string::npos)
      server->AwaitLog("Cluster state changed: ok");
  }
}

std::string RedisServerCluster::seeds() const {
  std::string seeds;
  for (const auto& server : servers_) seeds += (seeds.empty() ? "" : ",") + server->tcp();
  return seeds;
}

size_t RedisServerCluster::MasterOf(int slot) {
  for (size_t i = 0; i < servers_.size(); ++i) {
    // The servers that would answer a question about the slot with data, not with MOVED.
    const std::string text = servers_[i]->Command({"CLUSTER", "NODES"});
    size_t line_at = 0;
    while (line_at < text.size()) {
      const size_t end = text.find('\n', line_at);
      const std::string line = text.substr(line_at, end - line_at);
      line_at = end == std::string::npos ? text.size() : end + 1;
      if (line.find("myself,master") == std::string::npos) continue;
      const size_t connected_at = line.find(" connected");
      if (connected_at == std::string::npos) continue;
      // "0-99 200 300-399"
      std::istringstream ranges(line.substr(connected_at + 10));
      for (std::string range; ranges >> range;) {
        const int first = std::stoi(range);
        const size_t dash = range.find('-');
        const int last = dash == std::string::npos ? first : std::stoi(range.substr(dash + 1));
        if (first <= slot && slot <= last) return i;
      }
    }
  }
  QUIRE_CHECK(false) << "no server has slot " << slot;
  return 0;
}

// ---- FakeRedis

const std::string FakeRedis::kHang = "(hang)";
const std::string FakeRedis::kHangUp = "(hang up)";

FakeRedis::FakeRedis(Answer answer, std::string greeting)
    : answer_(std::move(answer)), greeting_(std::move(greeting)) {
  listener_ = Listen(&port_);
  QUIRE_CHECK(listener_ >= 0);
  acceptor_ = std::thread([this] { Accept(); });
}

FakeRedis::~FakeRedis() {
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    stopping_ = true;
    for (const int fd : sockets_) shutdown(fd, SHUT_RDWR);
  }
  shutdown(listener_, SHUT_RDWR);
  acceptor_.join();
  for (std::thread& thread : threads_) thread.join();
  for (const int fd : sockets_) close(fd);
  close(listener_);
}

void FakeRedis::Accept() {
  while (true) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) return;
    const std::lock_guard<std::mutex> guard(mutex_);
    sockets_.push_back(fd);
    if (stopping_) return;
    threads_.emplace_back([this, fd] { Serve(fd); });
  }
}

void FakeRedis::Serve(int fd) {
  if (!greeting_.empty()) {
    static_cast<void>(send(fd, greeting_.data(), greeting_.size(), MSG_NOSIGNAL));
    shutdown(fd, SHUT_RDWR);
    return;
  }
  std::string buffer;
  const auto need = [&](size_t size) {
    while (buffer.size() < size) {
      char bytes[65536];
      const ssize_t count = recv(fd, bytes, sizeof(bytes), 0);
      if (count <= 0) return false;
      buffer.append(bytes, static_cast<size_t>(count));
    }
    return true;
  };
  const auto line = [&](std::string* text) {
    while (buffer.find("\r\n") == std::string::npos) {
      if (!need(buffer.size() + 1)) return false;
    }
    const size_t end = buffer.find("\r\n");
    *text = buffer.substr(0, end);
    buffer.erase(0, end + 2);
    return true;
  };
  std::string text;
  while (line(&text)) {
    std::vector<std::string> command(static_cast<size_t>(std::stoi(text.substr(1))));
    for (std::string& argument : command) {
      if (!line(&text)) return;
      const auto size = static_cast<size_t>(std::stoll(text.substr(1)));
      if (!need(size + 2)) return;
      argument = buffer.substr(0, size);
      buffer.erase(0, size + 2);
    }
    ++command_count_;
    const std::string answer = answer_(command);
    if (answer == kHang) continue;
    if (answer == kHangUp) {
      shutdown(fd, SHUT_RDWR);
      return;
    }
    size_t sent = 0;
    while (sent < answer.size()) {
      const ssize_t count = send(fd, answer.data() + sent, answer.size() - sent, MSG_NOSIGNAL);
      if (count <= 0) return;
      sent += static_cast<size_t>(count);
    }
  }
}

std::string RespBulk(const std::string& bytes) {
  return "$" + std::to_string(bytes.size()) + "\r\n" + bytes + "\r\n";
}

std::string RespArray(const std::vector<std::string>& items) {
  std::string text = "*" + std::to_string(items.size()) + "\r\n";
  for (const std::string& item : items) text += item;
  return text;
}

}  // namespace quire
