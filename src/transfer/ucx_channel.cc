// Bytes over UCX: what libquire_ucx.so does, as a channel.
#include "transfer/ucx_channel.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <span>
#include <utility>

#include "base/blocked_signals.h"
#include "net/socket_address.h"
#include "transfer/byte_channel.h"

namespace quire {
namespace {

constexpr const char* kLibraryName = "libquire_ucx.so";
constexpr size_t kUcxPartsMax = 64;  // of a call; more take another one

Status NoLibrary(const std::string& why) {
  return Status(StatusCode::kBadArgument,
                "ucx: " + why +
                    "; UCX must be installed (Debian 12: libucx0), and Quire built where its "
                    "headers are (libucx-dev), which makes libquire_ucx.so");
}

Status ToStatus(int64_t failure, const char* why) {
  if (failure == kQuireUcxNoMemory) return Status::OutOfMemory();
  return Status(failure == kQuireUcxCorrupt ? StatusCode::kCorrupt : StatusCode::kUnavailable, why);
}

template <typename T>
size_t ToVectors(std::span<const std::span<T>> parts, iovec* to) {
  const size_t count = std::min(parts.size(), kUcxPartsMax);
  for (size_t i = 0; i < count; ++i) {
    void* const data = const_cast<std::byte*>(parts[i].data());
    to[i] = {data, parts[i].size()};
  }
  return count;
}

class UcxStream final : public ByteChannel {
 public:
  UcxStream(const QuireUcxFunctions& ucx, QuireUcxConnection* connection)
      : ucx_(ucx), connection_(connection) {}
  ~UcxStream() override { ucx_.close(connection_); }

  Result<size_t> Read(std::span<const std::span<std::byte>> into) override {
    iovec vectors[kUcxPartsMax];
    return Counted(ucx_.read(connection_, vectors, ToVectors(into, vectors)));
  }
  Result<size_t> Write(std::span<const std::span<const std::byte>> parts) override {
    iovec vectors[kUcxPartsMax];
    return Counted(ucx_.write(connection_, vectors, ToVectors(parts, vectors)));
  }
  void EndWrites() noexcept override { ucx_.end_writes(connection_); }
  bool HasLeft() noexcept override { return ucx_.has_left(connection_); }
  Wait PrepareWait(bool wants_read, bool wants_write) override {
    const bool is_ready = ucx_.prepare_wait(connection_, wants_read, wants_write);
    return {.entry = {.fd = ucx_.fd(connection_), .wants_read = true}, .is_ready = is_ready};
  }

 private:
  Result<size_t> Counted(int64_t count) const {
    if (count < 0) return ToStatus(count, ucx_.why(connection_));
    return static_cast<size_t>(count);
  }

  const QuireUcxFunctions& ucx_;
  QuireUcxConnection* const connection_;
};

Result<std::unique_ptr<ByteChannel>> ChannelOf(const QuireUcxFunctions& ucx,
                                               QuireUcxConnection* connection) {
  auto* const channel = new (std::nothrow) UcxStream(ucx, connection);
  if (channel != nullptr) return std::unique_ptr<ByteChannel>(channel);
  ucx.close(connection);
  return Status::OutOfMemory();
}

class UcxListener final : public ByteListener {
 public:
  UcxListener(const QuireUcxFunctions& ucx, QuireUcxListener* listener)
      : ucx_(ucx), listener_(listener) {}
  ~UcxListener() override { ucx_.close_listener(listener_); }

  Result<std::unique_ptr<ByteChannel>> Accept() override {
    QuireUcxConnection* connection = nullptr;
    QuireUcxText why{};
    const int64_t count = ucx_.accept(listener_, &connection, &why);
    if (count < 0) return ToStatus(count, why.text);
    if (count == 0) return std::unique_ptr<ByteChannel>();
    return ChannelOf(ucx_, connection);
  }
  ByteChannel::Wait PrepareWait() override {
    const bool is_ready = ucx_.prepare_accept(listener_);
    return {.entry = {.fd = ucx_.listener_fd(listener_), .wants_read = true}, .is_ready = is_ready};
  }

 private:
  const QuireUcxFunctions& ucx_;
  QuireUcxListener* const listener_;
};

// The folder of the file that this code is in: libquire_ffi.so, or the program.
std::string OwnFolder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<void*>(&OpenUcxLibrary), &info) == 0) return "";
  const std::string file = info.dli_fname;
  const size_t slash = file.rfind('/');
  return slash == std::string::npos ? "" : file.substr(0, slash + 1);
}

Result<const QuireUcxFunctions*> OpenUcx() { return OpenUcxLibrary(OwnFolder()); }

}  // namespace

Result<const QuireUcxFunctions*> OpenUcxLibrary(const std::string& folder) {
  // UCX has threads and takes signals: it stays for the life of the process.
  constexpr int kFlags = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE;
  const std::string beside = folder + kLibraryName;
  const bool is_beside = !folder.empty() && ::access(beside.c_str(), F_OK) == 0;
  void* const library = ::dlopen(is_beside ? beside.c_str() : kLibraryName, kFlags);
  if (library == nullptr) return NoLibrary(::dlerror());
  const auto functions =
      reinterpret_cast<decltype(&quire_ucx_functions)>(::dlsym(library, "quire_ucx_functions"));
  const QuireUcxFunctions* const ucx = functions == nullptr ? nullptr : functions();
  if (ucx == nullptr || ucx->version != kQuireUcxVersion)
    return NoLibrary(std::string(kLibraryName) + " is of another version of Quire");
  return ucx;
}

Result<std::unique_ptr<ByteChannel>> ConnectUcx(const Endpoint& endpoint) {
  QUIRE_ASSIGN_OR_RETURN(const QuireUcxFunctions* const ucx, OpenUcx());
  const SocketAddress address = AddressOf(endpoint);
  const ScopedBlockedSignals blocked;  // UCX starts a thread
  QuireUcxText why{};
  QuireUcxConnection* const connection =
      ucx->connect(address.get(), address.size, endpoint.is_local(), &why);
  if (connection == nullptr) return Status(StatusCode::kUnavailable, why.text);
  return ChannelOf(*ucx, connection);
}

Result<std::unique_ptr<ByteListener>> ListenUcx(Endpoint* endpoint) {
  QUIRE_ASSIGN_OR_RETURN(const QuireUcxFunctions* const ucx, OpenUcx());
  const SocketAddress address = AddressOf(*endpoint);
  const ScopedBlockedSignals blocked;
  SocketAddress bound;
  QuireUcxText why{};
  QuireUcxListener* const listener =
      ucx->listen(address.get(), address.size, endpoint->is_local(), &bound.storage, &why);
  if (listener == nullptr) {
    return Status(StatusCode::kUnavailable,
                  "listening at ucx:" + endpoint->ToString() + ": " + why.text);
  }
  auto* const owner = new (std::nothrow) UcxListener(*ucx, listener);
  if (owner == nullptr) {
    ucx->close_listener(listener);
    return Status::OutOfMemory();
  }
  endpoint->port = bound.port();
  return std::unique_ptr<ByteListener>(owner);
}

}  // namespace quire
