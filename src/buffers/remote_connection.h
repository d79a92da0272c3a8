// A client's connection to a server of buffers, for any number of threads: requests and their
// answers, heartbeat, and another connection when one is lost.
#ifndef QUIRE_BUFFERS_REMOTE_CONNECTION_H_
#define QUIRE_BUFFERS_REMOTE_CONNECTION_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "buffers/client_session.h"
#include "net/socket.h"
#include "quire/remote_buffers.h"

namespace quire {

class RemoteConnection final : private ClientSession::Owner {
 public:
  // Connected, and the hello is done. Unavailable, or what the server said.
  static Result<std::shared_ptr<RemoteConnection>> Open(
      const std::string& endpoint, const RemoteBufferOptions& options, uint32_t services,
      std::shared_ptr<Clock> clock = MachineTime());
  RemoteConnection(Endpoint endpoint, const RemoteBufferOptions& options, uint32_t services,
                   std::shared_ptr<Clock> clock, Waker waker);
  ~RemoteConnection() override;  // as Close

  // A request on its way, and the connection that it went through.
  struct Call {
    uint64_t request = 0;
    uint64_t epoch = 0;
    std::optional<Result<wire::Message>> answer{};  // guarded by the connection's mutex
    std::condition_variable answered{};
  };
  // Sends, once fewer than the server's number of requests are open. Without a connection one is
  // opened.
  Result<std::shared_ptr<Call>> Start(wire::Message message);
  // Asks for an entry until the moment `until_ns`: the server waits for as long as is left once the
  // question can be sent. Timeout if that is never. `query`: what the entry must match. REQUIRES:
  // until_ns >= 0.
  Result<std::shared_ptr<Call>> StartTake(wire::Message query, int64_t until_ns);
  // The answer; bounded as the server's signs of life are.
  Result<wire::Message> Await(const std::shared_ptr<Call>& call);
  Result<wire::Message> Request(wire::Message message);
  // Number `index` of what the server says about its buffers; 0 if it does not answer.
  int64_t Stat(size_t index);

  // After the answer to a take. Both do nothing when the connection was lost since: the server has
  // put the entry back.
  void Acknowledge(const Call& take) noexcept;
  void PutBack(const Call& take) noexcept;

  // Open requests and later ones are Closed. Twice is fine.
  void Close() noexcept;

 private:
  void OnAnswer(uint64_t request, Result<wire::Message> answer) override;
  Status EnsureOpen(std::unique_lock<std::mutex>& lock);
  // What became of the attempt after the first `over_before`.
  Status AwaitAttempt(std::unique_lock<std::mutex>& lock, uint64_t over_before);
  Status AwaitPlace(std::unique_lock<std::mutex>& lock, int64_t until_ns);
  bool is_open() const { return session_ != nullptr && session_->is_open(); }
  std::shared_ptr<Call> Send(wire::Message message, uint64_t request);

  void Run() noexcept;
  void Turn(std::unique_lock<std::mutex>& lock);
  Status Work(const PollEntry& entry, int64_t now_ns);
  Status StartSession(int64_t now_ns);
  Status ReadAndWrite(const PollEntry& entry, int64_t now_ns);
  void Lose(const Status& why) noexcept;

  const Endpoint endpoint_;
  const RemoteBufferOptions options_;
  const uint32_t services_;
  const std::shared_ptr<Clock> clock_;
  const Waker waker_;
  // Made beforehand: Close may find no memory.
  const Status closed_error_{StatusCode::kClosed, "the remote buffer was closed by this process"};

  std::mutex mutex_;                 // of all that follows
  std::condition_variable changed_;  // open, lost, closed, or a request was answered
  bool is_closed_ = false;
  bool is_wanted_ = true;       // a connection, when there is none
  uint64_t attempts_over_ = 0;  // connections that were lost or never came
  Status last_error_;
  Socket socket_;
  int64_t open_deadline_ns_ = 0;
  std::unique_ptr<ClientSession> session_;  // null while it connects
  uint64_t next_request_ = 1;
  std::map<uint64_t, std::shared_ptr<Call>> calls_;
  std::vector<std::byte> read_buffer_;
  std::thread thread_;
};

}  // namespace quire

#endif  // QUIRE_BUFFERS_REMOTE_CONNECTION_H_
