// libquire_ucx.so. It stands on UCX and the C++ library alone.
//
// UCX keeps eager messages of an endpoint in order, but a rendezvous, whose bytes the receiver
// fetches, may be done after a later message: so pieces carry numbers. A side sends no more pieces
// than the other one has places for, and a place is free again when its piece was read. So what is
// on its way is bounded whatever either side does; what a peer says is believed as far as the
// places go.
#include "transfer/ucx_library.h"

#include <ucp/api/ucp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

namespace {

constexpr size_t kPieceBytesMax = kQuireUcxPieceBytesMax;
constexpr uint64_t kPiecesMax = kQuireUcxPiecesMax;
// Larger ones go by rendezvous: their bytes move once, to where they are wanted.
constexpr size_t kEagerBytesMax = size_t{1} << 14;
// So often the sender hears what was taken: before it has no place left.
constexpr uint64_t kTakenAtOnce = kPiecesMax / 4;
// Steps of UCX in one call: a peer that never stops sending must not hold up the thread.
constexpr int kStepsAtOnce = 256;
constexpr size_t kWaitingMax = 128;  // connections that nobody has accepted

void Say(QuireUcxText* why, const char* what, const char* reason) {
  std::snprintf(why->text, sizeof(why->text), "UCX: %s: %s", what, reason);
}
void Say(QuireUcxText* why, const char* what, ucs_status_t status) {
  Say(why, what, ucs_status_string(status));
}

// A request that UCX works on, or none.
class Request {
 public:
  Request() = default;
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;
  ~Request() { Take(nullptr); }

  // What an operation returned.
  void Take(ucs_status_ptr_t pointer) {
    if (handle_ != nullptr) ucp_request_free(handle_);
    handle_ = UCS_PTR_IS_PTR(pointer) ? pointer : nullptr;
    result_ = UCS_PTR_IS_PTR(pointer) ? UCS_INPROGRESS : UCS_PTR_STATUS(pointer);
  }
  // UCS_INPROGRESS until it is done; then how it ended.
  ucs_status_t Check() {
    if (handle_ == nullptr) return result_;
    const ucs_status_t status = ucp_request_check_status(handle_);
    if (status == UCS_INPROGRESS) return status;
    Take(nullptr);
    return result_ = status;
  }

 private:
  void* handle_ = nullptr;
  ucs_status_t result_ = UCS_OK;
};

class Context {
 public:
  ~Context() {
    if (handle_ != nullptr) ucp_cleanup(handle_);
  }
  // Null: `why` is set.
  static std::shared_ptr<Context> Make(bool is_local, QuireUcxText* why) {
    ucp_config_t* config = nullptr;
    ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
    if (status != UCS_OK) {
      Say(why, "reading the UCX_... variables", status);
      return nullptr;
    }
    const auto context = std::make_shared<Context>();
    status = Adapt(config, is_local);
    if (status == UCS_OK) {
      ucp_params_t params{};
      params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
      params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
      params.mt_workers_shared = 1;  // a listener's connections have threads of their own
      status = ucp_init(&params, config, &context->handle_);
    }
    ucp_config_release(config);
    if (status == UCS_OK) return context;
    Say(why, "it does not start; is there a transport that UCX_TLS allows?", status);
    return nullptr;
  }
  ucp_context_h get() const { return handle_; }

 private:
  // A worker listens on all devices otherwise, whatever address was asked for. What users have set
  // themselves stays.
  static ucs_status_t Adapt(ucp_config_t* config, bool is_local) {
    if (!is_local || std::getenv("UCX_NET_DEVICES") != nullptr) return UCS_OK;
    return ucp_config_modify(config, "NET_DEVICES", "lo");
  }

  ucp_context_h handle_ = nullptr;
};

class Worker {
 public:
  Worker() = default;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker() {
    if (handle_ != nullptr) ucp_worker_destroy(handle_);
  }
  bool Open(std::shared_ptr<Context> context, QuireUcxText* why) {
    context_ = std::move(context);
    ucp_worker_params_t params{};
    params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
    ucs_status_t status = ucp_worker_create(context_->get(), &params, &handle_);
    if (status == UCS_OK) status = ucp_worker_get_efd(handle_, &fd_);
    if (status != UCS_OK) Say(why, "making a worker", status);
    return status == UCS_OK;
  }
  ucp_worker_h get() const { return handle_; }
  int fd() const { return fd_; }
  // Whether something has happened.
  bool Progress() { return ucp_worker_progress(handle_) != 0; }
  // UCS_ERR_BUSY: there is something to do already.
  ucs_status_t Arm() { return ucp_worker_arm(handle_); }

 private:
  std::shared_ptr<Context> context_;
  ucp_worker_h handle_ = nullptr;
  int fd_ = -1;
};

}  // namespace

struct QuireUcxConnection {
 public:
  ~QuireUcxConnection();
  bool OpenTo(std::shared_ptr<Context> context, const sockaddr* address, socklen_t size,
              QuireUcxText* why);
  // Before OpenFrom, which takes the request, whatever it returns.
  bool Prepare(std::shared_ptr<Context> context, QuireUcxText* why);
  bool OpenFrom(ucp_conn_request_h request, QuireUcxText* why);

  int64_t Read(const iovec* into, size_t count);
  int64_t Write(const iovec* parts, size_t count);
  void EndWrites();
  bool HasLeft();
  bool PrepareWait(bool wants_read, bool wants_write);
  int fd() const { return worker_.fd(); }
  const char* why() const { return why_.text; }
  void Fail(QuireUcxFailure failure, const char* reason);

 private:
  struct Outgoing {
    uint64_t number = 0;  // the message's header
    Request request;
  };
  enum class Place : uint8_t { kFree, kOffered, kFetching, kHere };
  struct Incoming {
    Place place = Place::kFree;
    size_t bytes = 0;
    void* offer = nullptr;  // of a rendezvous, with UCX
    Request request;
  };

  bool OpenEndpoint(ucp_ep_params_t* params, QuireUcxText* why);
  static ucs_status_t OnPiece(void* self, const void* header, size_t header_bytes, void* data,
                              size_t bytes, const ucp_am_recv_param_t* param);
  static ucs_status_t OnTaken(void* self, const void* header, size_t header_bytes, void* data,
                              size_t bytes, const ucp_am_recv_param_t* param);
  static void OnFailure(void* self, ucp_ep_h endpoint, ucs_status_t status);

  void Pump();
  bool Fetch();  // whether it has begun something
  void DropRest();
  void TellTaken();
  void Check(ucs_status_t status);
  bool HasRoom();
  bool IsAllOver();
  void SendPiece(size_t bytes);
  bool has_failed() const { return failure_ != 0; }
  bool is_here() const {
    return !has_ended_ && incoming_[read_ % kPiecesMax].place == Place::kHere;
  }
  std::byte* sent_bytes(uint64_t number) {
    return bytes_.get() + number % kPiecesMax * kPieceBytesMax;
  }
  std::byte* read_bytes(uint64_t number) {
    return bytes_.get() + (kPiecesMax + number % kPiecesMax) * kPieceBytesMax;
  }
  void FinishPiece();

  std::unique_ptr<std::byte[]> bytes_;  // of both directions; the worker may use them to its end
  Worker worker_;
  ucp_ep_h endpoint_ = nullptr;
  int64_t failure_ = 0;
  QuireUcxText why_{};

  Outgoing outgoing_[kPiecesMax];
  uint64_t sent_ = 0;       // pieces
  uint64_t taken_ = 0;      // of them, by the peer
  bool wants_end_ = false;  // nothing more is written
  bool is_end_sent_ = false;

  Incoming incoming_[kPiecesMax];
  uint64_t read_ = 0;     // pieces
  size_t read_from_ = 0;  // the current piece's bytes before it are read
  uint64_t told_ = 0;     // pieces that the peer knows to be read
  Request telling_;
  bool has_ended_ = false;  // the peer's end was read
};

QuireUcxConnection::~QuireUcxConnection() {
  for (Incoming& piece : incoming_)
    if (piece.place == Place::kOffered) ucp_am_data_release(worker_.get(), piece.offer);
  if (endpoint_ != nullptr) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    Request closing;
    closing.Take(ucp_ep_close_nbx(endpoint_, &param));
    for (int i = 0; i < kStepsAtOnce && closing.Check() == UCS_INPROGRESS; ++i) worker_.Progress();
  }
}

bool QuireUcxConnection::Prepare(std::shared_ptr<Context> context, QuireUcxText* why) {
  if (!worker_.Open(std::move(context), why)) return false;
  // Not zeroed: memory that is never used stays with the system.
  bytes_.reset(new std::byte[2 * kPiecesMax * kPieceBytesMax]);
  const struct {
    unsigned id;
    ucp_am_recv_callback_t call;
  } handlers[] = {{kQuireUcxPiece, &OnPiece}, {kQuireUcxTaken, &OnTaken}};
  for (const auto& handler : handlers) {
    ucp_am_handler_param_t param{};
    param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
    param.id = handler.id;
    param.cb = handler.call;
    param.arg = this;
    param.flags = UCP_AM_FLAG_WHOLE_MSG;
    const ucs_status_t status = ucp_worker_set_am_recv_handler(worker_.get(), &param);
    if (status == UCS_OK) continue;
    Say(why, "setting a handler", status);
    return false;
  }
  return true;
}

bool QuireUcxConnection::OpenEndpoint(ucp_ep_params_t* params, QuireUcxText* why) {
  params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params->err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params->err_handler = {.cb = &OnFailure, .arg = this};
  const ucs_status_t status = ucp_ep_create(worker_.get(), params, &endpoint_);
  if (status != UCS_OK) Say(why, "opening a connection", status);
  return status == UCS_OK;
}

bool QuireUcxConnection::OpenTo(std::shared_ptr<Context> context, const sockaddr* address,
                                socklen_t size, QuireUcxText* why) {
  if (!Prepare(std::move(context), why)) return false;
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr = {.addr = address, .addrlen = size};
  return OpenEndpoint(&params, why);
}

bool QuireUcxConnection::OpenFrom(ucp_conn_request_h request, QuireUcxText* why) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  return OpenEndpoint(&params, why);
}

// The first reason counts.
void QuireUcxConnection::Fail(QuireUcxFailure failure, const char* reason) {
  if (has_failed()) return;
  failure_ = failure;
  std::snprintf(why_.text, sizeof(why_.text), "UCX: %s", reason);
}

void QuireUcxConnection::Check(ucs_status_t status) {
  if (status != UCS_OK && status != UCS_INPROGRESS) Fail(kQuireUcxGone, ucs_status_string(status));
}

void QuireUcxConnection::OnFailure(void* self, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  static_cast<QuireUcxConnection*>(self)->Fail(kQuireUcxGone, ucs_status_string(status));
}

ucs_status_t QuireUcxConnection::OnPiece(void* self, const void* header, size_t header_bytes,
                                         void* data, size_t bytes,
                                         const ucp_am_recv_param_t* param) {
  auto& here = *static_cast<QuireUcxConnection*>(self);
  if (here.has_failed()) return UCS_OK;
  uint64_t number = 0;
  const auto refuse = [&](const char* reason) {
    here.Fail(kQuireUcxCorrupt, reason);
    return UCS_OK;
  };
  if (header_bytes != sizeof(number)) return refuse("the peer sends a piece without its number");
  std::memcpy(&number, header, sizeof(number));
  if (bytes > kPieceBytesMax) return refuse("the peer sends a piece that is too large");
  if (here.has_ended_) return refuse("the peer sends a piece after the end");
  if (number - here.read_ >= kPiecesMax)
    return refuse("the peer sends a piece for which there is no place");
  Incoming& piece = here.incoming_[number % kPiecesMax];
  if (piece.place != Place::kFree) return refuse("the peer sends a piece twice");
  piece.bytes = bytes;
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
    piece.offer = data;
    piece.place = Place::kOffered;
    return UCS_INPROGRESS;
  }
  // The peer may be able to write to where it lies: it is checked where it was copied to.
  if (bytes > 0) std::memcpy(here.read_bytes(number), data, bytes);
  piece.place = Place::kHere;
  return UCS_OK;
}

ucs_status_t QuireUcxConnection::OnTaken(void* self, const void* header, size_t header_bytes,
                                         void* /*data*/, size_t bytes,
                                         const ucp_am_recv_param_t* /*param*/) {
  auto& here = *static_cast<QuireUcxConnection*>(self);
  uint64_t taken = 0;
  if (header_bytes == sizeof(taken)) std::memcpy(&taken, header, sizeof(taken));
  const bool is_legal = header_bytes == sizeof(taken) && bytes == 0;
  if (!is_legal || taken - here.taken_ > here.sent_ - here.taken_) {
    here.Fail(kQuireUcxCorrupt, "the peer says that it has taken what was not sent");
  } else {
    here.taken_ = taken;
  }
  return UCS_OK;
}

bool QuireUcxConnection::Fetch() {
  bool has_begun = false;
  for (uint64_t number = read_; number != read_ + kPiecesMax && !has_failed(); ++number) {
    Incoming& piece = incoming_[number % kPiecesMax];
    if (piece.place == Place::kOffered) {
      ucp_request_param_t param{};
      piece.place = Place::kFetching;
      piece.request.Take(ucp_am_recv_data_nbx(worker_.get(), std::exchange(piece.offer, nullptr),
                                              read_bytes(number), piece.bytes, &param));
      has_begun = true;
    }
    if (piece.place != Place::kFetching) continue;
    const ucs_status_t status = piece.request.Check();
    Check(status);
    if (status == UCS_OK) piece.place = Place::kHere;
  }
  return has_begun;
}

void QuireUcxConnection::Pump() {
  for (int i = 0; i < kStepsAtOnce; ++i) {
    bool is_moving = worker_.Progress();
    is_moving |= Fetch();
    if (!is_moving) break;
  }
  for (Outgoing& piece : outgoing_) Check(piece.request.Check());
  if (wants_end_) DropRest();
  if (wants_end_ && !is_end_sent_ && HasRoom()) {
    is_end_sent_ = true;
    SendPiece(0);
  }
  TellTaken();
}

// What comes after this side's end is read by nobody; the peer must hear that it was taken.
void QuireUcxConnection::DropRest() {
  while (is_here()) FinishPiece();
}

// The current piece is read.
void QuireUcxConnection::FinishPiece() {
  Incoming& piece = incoming_[read_ % kPiecesMax];
  has_ended_ = piece.bytes == 0;
  piece.place = Place::kFree;
  read_from_ = 0;
  ++read_;
}

void QuireUcxConnection::TellTaken() {
  const uint64_t due = has_ended_ || wants_end_ ? 1 : kTakenAtOnce;
  if (has_failed() || read_ - told_ < due) return;
  const ucs_status_t before = telling_.Check();
  Check(before);
  if (before != UCS_OK) return;
  told_ = read_;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  telling_.Take(
      ucp_am_send_nbx(endpoint_, kQuireUcxTaken, &told_, sizeof(told_), nullptr, 0, &param));
  Check(telling_.Check());
}

bool QuireUcxConnection::HasRoom() {
  return !has_failed() && sent_ - taken_ < kPiecesMax &&
         outgoing_[sent_ % kPiecesMax].request.Check() == UCS_OK;
}

// REQUIRES: HasRoom(); the bytes are at sent_bytes(sent_).
void QuireUcxConnection::SendPiece(size_t bytes) {
  Outgoing& piece = outgoing_[sent_ % kPiecesMax];
  piece.number = sent_;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = bytes > kEagerBytesMax ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER;
  piece.request.Take(ucp_am_send_nbx(endpoint_, kQuireUcxPiece, &piece.number, sizeof(piece.number),
                                     sent_bytes(sent_), bytes, &param));
  ++sent_;
  Check(piece.request.Check());
}

int64_t QuireUcxConnection::Read(const iovec* into, size_t count) {
  Pump();
  size_t taken = 0;
  for (size_t i = 0; i < count; ++i) {
    size_t filled = 0;
    while (filled < into[i].iov_len && is_here()) {
      const size_t bytes = incoming_[read_ % kPiecesMax].bytes;
      const size_t size = std::min(into[i].iov_len - filled, bytes - read_from_);
      if (size > 0) {
        std::memcpy(static_cast<std::byte*>(into[i].iov_base) + filled,
                    read_bytes(read_) + read_from_, size);
      }
      filled += size;
      read_from_ += size;
      if (read_from_ == bytes) FinishPiece();
    }
    taken += filled;
  }
  TellTaken();
  if (taken > 0) return static_cast<int64_t>(taken);
  if (has_failed() || !has_ended_) return failure_;
  // No failure: this side still has its own end to send.
  std::snprintf(why_.text, sizeof(why_.text), "UCX: the peer closed the connection");
  return kQuireUcxGone;
}

int64_t QuireUcxConnection::Write(const iovec* parts, size_t count) {
  Pump();
  size_t part = 0;
  size_t from = 0;  // of the part
  size_t taken = 0;
  while (part < count && HasRoom()) {
    size_t bytes = 0;
    while (part < count && bytes < kPieceBytesMax) {
      const size_t size = std::min(parts[part].iov_len - from, kPieceBytesMax - bytes);
      if (size > 0) {
        std::memcpy(sent_bytes(sent_) + bytes,
                    static_cast<const std::byte*>(parts[part].iov_base) + from, size);
      }
      bytes += size;
      from += size;
      if (from < parts[part].iov_len) continue;
      ++part;
      from = 0;
    }
    if (bytes == 0) break;  // a piece of none would be the end
    SendPiece(bytes);
    taken += bytes;
  }
  return taken > 0 ? static_cast<int64_t>(taken) : failure_;
}

void QuireUcxConnection::EndWrites() {
  wants_end_ = true;
  Pump();
}

// The peer has all, and has said its own end: until then it may wait for our word.
bool QuireUcxConnection::IsAllOver() {
  return has_failed() || (is_end_sent_ && taken_ == sent_ && has_ended_ && told_ == read_ &&
                          telling_.Check() != UCS_INPROGRESS);
}

bool QuireUcxConnection::HasLeft() {
  Pump();
  return IsAllOver();
}

bool QuireUcxConnection::PrepareWait(bool wants_read, bool wants_write) {
  // Not for ever: a peer that never stops sending would keep the thread here.
  for (int i = 0; i < kStepsAtOnce; ++i) {
    Pump();
    const bool can_read = is_here() || has_ended_ || has_failed();
    if ((wants_read && can_read) || (wants_write && (HasRoom() || has_failed()))) return true;
    if (wants_end_ && IsAllOver()) return true;
    const ucs_status_t status = worker_.Arm();
    if (status == UCS_OK) return false;
    if (status != UCS_ERR_BUSY) Check(status);
  }
  return true;
}

struct QuireUcxListener {
 public:
  ~QuireUcxListener();
  bool Open(const sockaddr* address, socklen_t size, bool is_local, sockaddr_storage* bound,
            QuireUcxText* why);
  int64_t Accept(QuireUcxConnection** connection, QuireUcxText* why);
  bool Prepare();
  int fd() const { return worker_.fd(); }

 private:
  static void OnRequest(ucp_conn_request_h request, void* self);
  void Pump();

  std::shared_ptr<Context> context_;
  Worker worker_;
  ucp_listener_h handle_ = nullptr;
  ucp_conn_request_h waiting_[kWaitingMax] = {};  // the oldest first
  size_t waiting_count_ = 0;
};

QuireUcxListener::~QuireUcxListener() {
  if (handle_ == nullptr) return;
  for (size_t i = 0; i < waiting_count_; ++i) ucp_listener_reject(handle_, waiting_[i]);
  ucp_listener_destroy(handle_);
}

bool QuireUcxListener::Open(const sockaddr* address, socklen_t size, bool is_local,
                            sockaddr_storage* bound, QuireUcxText* why) {
  context_ = Context::Make(is_local, why);
  if (context_ == nullptr || !worker_.Open(context_, why)) return false;
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr = {.addr = address, .addrlen = size};
  params.conn_handler = {.cb = &OnRequest, .arg = this};
  ucs_status_t status = ucp_listener_create(worker_.get(), &params, &handle_);
  if (status == UCS_OK) {
    ucp_listener_attr_t attributes{};
    attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
    status = ucp_listener_query(handle_, &attributes);
    *bound = attributes.sockaddr;
  }
  if (status != UCS_OK) Say(why, "listening", status);
  return status == UCS_OK;
}

void QuireUcxListener::OnRequest(ucp_conn_request_h request, void* self) {
  auto& here = *static_cast<QuireUcxListener*>(self);
  if (here.waiting_count_ == kWaitingMax) {
    ucp_listener_reject(here.handle_, request);
  } else {
    here.waiting_[here.waiting_count_++] = request;
  }
}

void QuireUcxListener::Pump() {
  for (int i = 0; i < kStepsAtOnce && worker_.Progress(); ++i) continue;
}

int64_t QuireUcxListener::Accept(QuireUcxConnection** connection, QuireUcxText* why) {
  Pump();
  if (waiting_count_ == 0) return 0;
  auto made = std::make_unique<QuireUcxConnection>();
  const ucp_conn_request_h request = waiting_[0];
  std::copy(waiting_ + 1, waiting_ + waiting_count_, waiting_);
  --waiting_count_;
  if (!made->Prepare(context_, why)) {
    ucp_listener_reject(handle_, request);
    return kQuireUcxGone;
  }
  if (!made->OpenFrom(request, why)) return kQuireUcxGone;
  *connection = made.release();
  return 1;
}

bool QuireUcxListener::Prepare() {
  for (int i = 0; i < kStepsAtOnce; ++i) {
    Pump();
    if (waiting_count_ > 0) return true;
    if (worker_.Arm() == UCS_OK) return false;
  }
  return true;
}

namespace {

void SayNoMemory(QuireUcxText* why) { Say(why, "a connection", "there is no memory for it"); }

QuireUcxConnection* Connect(const sockaddr* address, socklen_t size, bool is_local,
                            QuireUcxText* why) {
  try {
    auto connection = std::make_unique<QuireUcxConnection>();
    const std::shared_ptr<Context> context = Context::Make(is_local, why);
    if (context == nullptr || !connection->OpenTo(context, address, size, why)) return nullptr;
    return connection.release();
  } catch (const std::bad_alloc&) {
    SayNoMemory(why);
    return nullptr;
  }
}

QuireUcxListener* Listen(const sockaddr* address, socklen_t size, bool is_local,
                         sockaddr_storage* bound, QuireUcxText* why) {
  try {
    auto listener = std::make_unique<QuireUcxListener>();
    return listener->Open(address, size, is_local, bound, why) ? listener.release() : nullptr;
  } catch (const std::bad_alloc&) {
    SayNoMemory(why);
    return nullptr;
  }
}

int64_t Accept(QuireUcxListener* listener, QuireUcxConnection** connection, QuireUcxText* why) {
  try {
    return listener->Accept(connection, why);
  } catch (const std::bad_alloc&) {
    SayNoMemory(why);
    return kQuireUcxNoMemory;
  }
}

constexpr QuireUcxFunctions kFunctions = {
    .version = kQuireUcxVersion,
    .connect = &Connect,
    .listen = &Listen,
    .accept = &Accept,
    .listener_fd = [](QuireUcxListener* listener) { return listener->fd(); },
    .prepare_accept = [](QuireUcxListener* listener) { return listener->Prepare(); },
    .close_listener = [](QuireUcxListener* listener) { delete listener; },
    .read = [](QuireUcxConnection* connection, const iovec* into,
               size_t count) { return connection->Read(into, count); },
    .write = [](QuireUcxConnection* connection, const iovec* parts,
                size_t count) { return connection->Write(parts, count); },
    .why = [](QuireUcxConnection* connection) { return connection->why(); },
    .end_writes = [](QuireUcxConnection* connection) { connection->EndWrites(); },
    .has_left = [](QuireUcxConnection* connection) { return connection->HasLeft(); },
    .fd = [](QuireUcxConnection* connection) { return connection->fd(); },
    .prepare_wait =
        [](QuireUcxConnection* connection, bool wants_read, bool wants_write) {
          return connection->PrepareWait(wants_read, wants_write);
        },
    .close = [](QuireUcxConnection* connection) { delete connection; },
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const QuireUcxFunctions* quire_ucx_functions() {
  return &kFunctions;
}
