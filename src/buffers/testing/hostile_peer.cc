#include "buffers/testing/hostile_peer.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/checksum.h"
#include "wire/testing/test_tensor.h"

namespace quire {
namespace {

using wire::FieldWriter;
using wire::Message;
using wire::Opcode;

constexpr int64_t kStrangerBytesMax = int64_t{1} << 16;  // reliability goal R5
constexpr int64_t kStoreBytes = 1 << 16;
constexpr int64_t kQueryBytesMax = 4096;
constexpr int64_t kBudget = kStoreBytes + 4 * kQueryBytesMax;
constexpr int64_t kEntries = 3;
constexpr int64_t kSecondNs = 1'000'000'000;
constexpr int kStepsMax = 24;

}  // namespace

// One connection: makes frames, and reads the answers as a client would.
class HostilePeer::Session final : private wire::WireReceiver::Handler {
 public:
  Session(HostilePeer* peer, const std::function<int64_t(int64_t)>& choose)
      : peer_(peer),
        choose_(choose),
        reader_(this, nullptr, 1 << 20),
        session_(
            &peer->served_, std::span(kNonce), [this] { is_woken_ = true; }, now_ns_) {}

  void Run() {
    const int64_t steps = 1 + choose_(kStepsMax);
    is_tame_ = choose_(2) == 0;
    // Most sessions begin well, so that states behind the hello are reached.
    if (choose_(8) > 0) SayHello();
    for (int64_t i = 0; i < steps && !session_.is_over(); ++i) Step();
    if (session_.is_open()) ++peer_->sessions_open;
    if (choose_(2) == 0) Drain();
  }
  // A frame, as a whole or its begin.
  void FeedFrame(std::span<const std::byte> frame) {
    if (frame[kOpcodeAt] == static_cast<std::byte>(Opcode::kAcknowledge)) ++acknowledgements_;
    Feed(frame);
  }
  void Feed(std::span<const std::byte> bytes) {
    session_.Receive(bytes, now_ns_);
    CheckMemory();
  }
  void Drain() {
    while (session_.has_output()) TakeOutput(int64_t{1} << 20);
  }
  // Entries that the server may have handed over: at least those of which it said so.
  int64_t taken_least() const { return taken_; }
  int64_t taken_most() const { return acknowledgements_; }

 private:
  static constexpr size_t kOpcodeAt = 6;
  static constexpr std::byte kNonce[wire::kNonceBytes] = {};

  void Step() {
    int64_t action = choose_(20);
    // What ends every connection at once is left to the other half of the sessions.
    if (is_tame_ && action >= 11 && action <= 15) action = 2 + choose_(5);
    if (is_tame_ && action < 2) action = 19;
    switch (action) {
      case 0:
        return SayHello();
      case 1:
        return SendProof(choose_(2) == 0);
      case 2:
      case 3:
      case 4:
        return SendTake();
      case 5:
      case 6:
        return Send(Opcode::kAcknowledge, choose_(4) > 0 ? last_take_ : SomeRequest(), {}, {}, {},
                    0);
      case 7:
        return Send(Opcode::kCancel, SomeRequest(), {}, {}, {}, 0);
      case 8:
      case 9:
        return SendPut();
      case 10:
        return SendKey();
      case 11:
        return Send(static_cast<Opcode>(choose_(256)), SomeRequest(), SomeBytes(64), SomeBytes(64),
                    SomeBytes(64), static_cast<uint64_t>(choose_(1 << 20)));
      case 12:
        return Feed(SomeBytes(200));
      case 13:
        return SendSizes();
      case 14:
        return Repeat();
      case 15:
        number_ += static_cast<uint64_t>(choose_(3));
        return;
      case 16:
        return PassTime();
      case 17:
        return TakeOutput(1 + choose_(300));
      case 18:
        return Continue();
      default:
        return Drain();
    }
  }

  uint64_t SomeRequest() { return static_cast<uint64_t>(choose_(6)); }
  std::vector<std::byte> SomeBytes(int64_t most) {
    std::vector<std::byte> bytes(static_cast<size_t>(choose_(most)));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(choose_(256));
    return bytes;
  }

  void SayHello() {
    wire::ClientHello hello{.services = static_cast<uint32_t>(choose_(4))};
    if (choose_(16) == 0) hello.version_first = static_cast<uint16_t>(choose_(4));
    hello_ = hello;
    Send(Opcode::kHello, SomeRequest(), wire::EncodeFields(hello), {}, {}, 0);
    if (!peer_->served_.secret.empty() && choose_(8) > 0) {
      Drain();
      SendProof(choose_(8) > 0);
    }
  }
  void SendProof(bool is_right) {
    const Digest proof = wire::Proof(is_right ? peer_->served_.secret : "wrong",
                                     wire::kClientProofLabel, hello_, server_hello_);
    const auto bytes = std::as_bytes(std::span(proof.bytes));
    Send(Opcode::kProve, SomeRequest(), {bytes.begin(), bytes.end()}, {}, {}, 0);
  }
  void SendTake() {
    std::vector<std::byte> fields;
    const int64_t timeouts[] = {0, -1, -2, 1, kSecondNs, std::numeric_limits<int64_t>::max()};
    FieldWriter(&fields).Add(timeouts[choose_(6)]);
    std::vector<std::byte> headers;
    std::vector<std::byte> data;
    const int64_t tensors = choose_(2) == 0 ? 0 : choose_(4);
    for (int64_t i = 0; i < tensors; ++i) AddTensor(&headers, &data);
    last_take_ = is_tame_ ? last_take_ + 1 : SomeRequest();
    Send(Opcode::kTake, last_take_, fields, headers, data, data.size(), tensors);
  }
  void AddTensor(std::vector<std::byte>* headers, std::vector<std::byte>* data) {
    const int64_t ids = choose_(3);
    const HostTensor tensor = choose_(2) == 0 ? Ids(std::vector<int64_t>(ids, choose_(4)))
                                              : Mask(std::vector<uint8_t>(ids, choose_(3)));
    wire::EncodeTensorHeader("t", tensor, headers);
    data->insert(data->end(), tensor.data(), tensor.data() + tensor.bytes());
  }
  void SendPut() {
    const int64_t bytes = choose_(4) == 0 ? choose_(kStoreBytes * 2) : choose_(200);
    std::vector<std::byte> headers;
    wire::EncodeTensorHeader("", Mask(std::vector<uint8_t>(bytes, 1)), &headers);
    // Sometimes only a part, which continues or not.
    const auto now = static_cast<size_t>(choose_(2) == 0 ? bytes : choose_(bytes + 1));
    Send(Opcode::kPut, SomeRequest(), SomeBytes(8), headers, std::vector<std::byte>(now), bytes, 1);
  }
  void SendKey() {
    const Opcode opcodes[] = {Opcode::kGet,   Opcode::kDelete, Opcode::kExists,
                              Opcode::kStats, Opcode::kPing,   Opcode::kGoodbye};
    Send(opcodes[choose_(6)], SomeRequest(), SomeBytes(choose_(8) == 0 ? 600 : 8), {}, {}, 0);
  }
  // A sound header that promises whatever sizes.
  void SendSizes() {
    wire::FrameHeader header{.opcode = static_cast<uint8_t>(choose_(14)),
                             .flags = static_cast<uint8_t>(choose_(16)),
                             .request = SomeRequest(),
                             .number = number_,
                             .status = static_cast<StatusCode>(choose_(kStatusCodeCount + 2))};
    const uint64_t sizes[] = {0, 1, 200, 65536, 1 << 20, 0x7fffffff, 0xffffffff};
    header.tensor_count = static_cast<uint32_t>(sizes[choose_(7)]);
    header.head_bytes = static_cast<uint32_t>(sizes[choose_(7)]);
    header.field_bytes = static_cast<uint32_t>(sizes[choose_(7)]);
    header.data_bytes = static_cast<uint32_t>(sizes[choose_(7)]);
    header.position = choose_(2) == 0 ? sizes[choose_(7)] : ~uint64_t{0} >> choose_(4);
    std::vector<std::byte> frame(wire::kHeaderBytes);
    wire::EncodeHeader(header, std::span(frame).first<wire::kHeaderBytes>());
    ++number_;
    FeedFrame(frame);
    Feed(SomeBytes(300));
  }
  void Repeat() {
    if (!last_.empty()) FeedFrame(last_);
  }
  void PassTime() {
    const int64_t times[] = {1, kSecondNs / 2, kSecondNs, 4 * kSecondNs, 40 * kSecondNs};
    now_ns_ += times[choose_(5)];
    session_.Tick(now_ns_);
    Wake();
  }
  void Continue() {
    wire::FrameHeader header = last_header_;
    header.flags |= wire::kFlagContinued;
    if (choose_(6) == 0) header.flags |= wire::kFlagAborted;
    header.tensor_count = 0;
    const uint64_t left = last_total_ - std::min(last_total_, last_sent_);
    std::vector<std::byte> data(
        std::min<uint64_t>(left, static_cast<uint64_t>(choose_(kStoreBytes))));
    if (header.is_aborted()) data.clear();
    header.position = last_sent_ + static_cast<uint64_t>(choose_(16) == 0);
    last_sent_ += data.size();
    SendFrame(header, {}, data);
  }

  void Send(Opcode opcode, uint64_t request, std::vector<std::byte> fields,
            const std::vector<std::byte>& headers, const std::vector<std::byte>& data,
            uint64_t total, int64_t tensors = 0) {
    wire::FrameHeader header{.opcode = static_cast<uint8_t>(opcode), .request = request};
    header.tensor_count = static_cast<uint32_t>(tensors);
    header.field_bytes = static_cast<uint32_t>(fields.size());
    header.position = total;
    fields.insert(fields.end(), headers.begin(), headers.end());
    last_header_ = header;
    last_total_ = total;
    last_sent_ = data.size();
    SendFrame(header, fields, data);
  }

  void SendFrame(wire::FrameHeader header, const std::vector<std::byte>& head,
                 const std::vector<std::byte>& data) {
    header.number = number_++;
    header.head_bytes = static_cast<uint32_t>(head.size());
    header.data_bytes = static_cast<uint32_t>(data.size());
    header.head_crc = Crc32c(head.data(), head.size());
    header.data_crc = Crc32c(data.data(), data.size());
    std::vector<std::byte> frame(wire::kHeaderBytes);
    wire::EncodeHeader(header, std::span(frame).first<wire::kHeaderBytes>());
    frame.insert(frame.end(), head.begin(), head.end());
    frame.insert(frame.end(), data.begin(), data.end());
    if (!is_tame_ && choose_(12) == 0) Damage(&frame);
    const auto cut = static_cast<size_t>(choose_(static_cast<int64_t>(frame.size()) + 1));
    if (frame[kOpcodeAt] == static_cast<std::byte>(Opcode::kAcknowledge)) ++acknowledgements_;
    Feed(std::span(frame).first(cut));
    if (is_tame_ || choose_(40) > 0) Feed(std::span(frame).subspan(cut));
    Wake();
    last_ = std::move(frame);
  }
  // A bit anywhere; sometimes the header is sealed again, as an attacker would.
  void Damage(std::vector<std::byte>* frame) {
    const auto at = static_cast<size_t>(choose_(static_cast<int64_t>(frame->size())));
    (*frame)[at] ^= static_cast<std::byte>(1 << choose_(8));
    if (choose_(2) == 0) return;
    const uint32_t crc = Crc32c(frame->data(), wire::kHeaderBytes - sizeof(uint32_t));
    std::memcpy(frame->data() + wire::kHeaderBytes - sizeof(crc), &crc, sizeof(crc));
  }

  void Wake() {
    if (std::exchange(is_woken_, false)) session_.Wake(now_ns_);
  }
  void TakeOutput(int64_t most) {
    auto left = static_cast<size_t>(most);
    for (const std::span<const std::byte> part : session_.Gather()) {
      const auto taken = part.first(std::min(left, part.size()));
      const Status status = reader_.Receive(taken);
      QUIRE_CHECK(status.ok()) << status.ToString();
      left -= taken.size();
    }
    if (static_cast<size_t>(most) > left) session_.Sent(static_cast<size_t>(most) - left, now_ns_);
  }
  void CheckMemory() const {
    const int64_t bytes = session_.memory_bytes();
    QUIRE_CHECK(session_.is_open() || bytes <= kStrangerBytesMax) << bytes;
    QUIRE_CHECK(bytes <= wire::kHeadBytesMax + kBudget + kStrangerBytesMax * 4) << bytes;
  }

  Status OnBegin(const Message& message, std::span<const wire::TensorHeader>, int64_t) override {
    QUIRE_CHECK(message.is_reply);
    return {};
  }
  void OnMessage(Message message) override {
    ++peer_->answers;
    if (message.status != StatusCode::kOk) ++peer_->errors;
    if (message.opcode == Opcode::kGoodbye) ++peer_->goodbyes;
    if (message.opcode == Opcode::kHello && message.status == StatusCode::kOk) {
      server_hello_ = wire::DecodeServerHello(message.fields).value();
    }
    if (message.opcode == Opcode::kAcknowledge && message.status == StatusCode::kOk) ++taken_;
  }
  void OnBroken(const wire::FrameHeader& header, const Status& why) override {
    QUIRE_CHECK(header.is_aborted()) << why.ToString();
  }

  HostilePeer* const peer_;
  const std::function<int64_t(int64_t)>& choose_;
  int64_t now_ns_ = 0;
  bool is_tame_ = false;
  bool is_woken_ = false;
  uint64_t last_take_ = 6;
  uint64_t number_ = 0;
  wire::ClientHello hello_;
  wire::ServerHello server_hello_;
  std::vector<std::byte> last_;
  wire::FrameHeader last_header_;
  uint64_t last_total_ = 0;
  uint64_t last_sent_ = 0;
  int64_t taken_ = 0;
  int64_t acknowledgements_ = 0;
  wire::WireReceiver reader_;
  ServerSession session_;
};

HostilePeer::HostilePeer(std::string secret)
    : lookup_(LocalLookupBuffer::Create({.capacity_bytes = 1 << 20}).value()),
      store_(StoreBuffer::Create({.capacity_bytes = kStoreBytes}).value()),
      served_{.lookup = lookup_.get(),
              .store = store_.get(),
              .secret = std::move(secret),
              .requests_max = 4,
              .query_bytes_max = kQueryBytesMax,
              .heartbeat_ns = kSecondNs / 2,
              .dead_after_ns = 3 * kSecondNs,
              .lease_ns = 30 * kSecondNs,
              .budget = wire::ByteBudget(kBudget),
              .waiting = wire::ByteBudget(kQueryBytesMax)} {}

void HostilePeer::Refill() {
  for (; entries_ < kEntries; ++entries_) {
    // One of more than a frame, so that hand-overs stop in the middle.
    LookupEntry entry{.tokens = Ids({1, 2}), .roi = Ones(2), .tensors = {}};
    if (lookup_->used_bytes() == 0) entry.tensors.emplace_back("key", Floats({200'000}, 1));
    QUIRE_CHECK(lookup_->Insert(std::move(entry), Timeout(0)).ok());
  }
}

void HostilePeer::CheckNothingIsLost(int64_t taken_least, int64_t taken_most) {
  const int64_t taken = entries_ - lookup_->size();
  QUIRE_CHECK(taken >= taken_least && taken <= taken_most)
      << taken << " entries are gone, " << taken_least << " to " << taken_most << " were taken";
  entries_ -= taken;
  entries_taken += taken;
  QUIRE_CHECK(lookup_->waiting() == 0);
  QUIRE_CHECK(entries_ > 0 || lookup_->used_bytes() == 0);
  QUIRE_CHECK(served_.budget.left() == kBudget) << served_.budget.left();
  QUIRE_CHECK(served_.waiting.left() == kQueryBytesMax) << served_.waiting.left();
}

void HostilePeer::RunSession(const std::function<int64_t(int64_t)>& choose) {
  Refill();
  int64_t least = 0;
  int64_t most = 0;
  {
    Session session(this, choose);
    session.Run();
    session.Drain();
    least = session.taken_least();
    most = session.taken_most();
  }
  CheckNothingIsLost(least, most);
}

void HostilePeer::SendRaw(std::span<const std::byte> bytes) {
  Refill();
  {
    const std::function<int64_t(int64_t)> none = [](int64_t) { return int64_t{0}; };
    Session session(this, none);
    session.Feed(bytes);
    session.Drain();
  }
  // Whatever the bytes say; each frame has a header.
  CheckNothingIsLost(0, static_cast<int64_t>(bytes.size() / wire::kHeaderBytes));
}

}  // namespace quire
