#include "store/redis/redis_read.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace quire {
namespace {

constexpr int64_t kNoLayer = std::numeric_limits<int64_t>::max();

std::string NameOf(const TierRead& read) {
  return "chunk " + read.id.key.digest.ToHex().substr(0, 16) + "... in Redis";
}

Status Gone(const TierRead& read, const std::string& what) {
  return Status(StatusCode::kNotFound, NameOf(read) + ": " + what);
}

Status Corrupt(const TierRead& read, std::string_view what) {
  return Status(StatusCode::kCorrupt, NameOf(read) + ": " + std::string(what));
}

int64_t EndOf(const Section& section) { return section.offset + section.length; }

}  // namespace

RedisRead::RedisRead(RedisCluster& cluster, std::string_view prefix,
                     std::span<const RedisReadItem> items, TierReadSink& sink)
    : cluster_(cluster), prefix_(prefix), items_(items), sink_(sink), states_(items.size()) {}

void RedisRead::Run(int64_t deadline_ns) {
  try {
    ReadHeaders(deadline_ns);
    ReadPieces(deadline_ns);
  } catch (const std::bad_alloc&) {
    for (size_t i = 0; i < states_.size(); ++i) {
      if (!states_[i].ended) End(i, Status::OutOfMemory());
    }
  }
}

// ---- Headers

void RedisRead::ReadHeaders(int64_t deadline_ns) {
  std::vector<RedisOp> ops(items_.size());
  for (size_t i = 0; i < items_.size(); ++i) {
    const std::string name = RedisHeaderName(prefix_, items_[i].read->id.key);
    ops[i].slot = RedisSlotOf(name);
    ops[i].request.Add({"GET", name});
    ops[i].expected.bytes_max = RedisHeaderBytesMax(items_[i].read->limits);
  }
  cluster_.Execute(ops, deadline_ns);
  for (size_t i = 0; i < items_.size(); ++i) {
    Status status = TakeHeader(i, ops[i]);
    if (status.ok()) continue;
    states_[i].outcome.damaged = status.code() == StatusCode::kCorrupt;
    End(i, status);
  }
}

Status RedisRead::TakeHeader(size_t i, const RedisOp& op) {
  const TierRead& read = *items_[i].read;
  State& state = states_[i];
  if (sink_.Cancelled(i)) return Status(StatusCode::kCancelled, NameOf(read) + ": cancelled");
  QUIRE_RETURN_IF_ERROR(op.status);
  const RespValue& reply = op.replies.front();
  if (reply.type == RespType::kNull) return Gone(read, "it is not there");
  if (reply.type != RespType::kBulk) return Corrupt(read, "its header is no string");
  const std::span<const std::byte> value = std::as_bytes(std::span(reply.text));
  Result<RedisHeader> header = DecodeRedisHeader(value, read.limits);
  if (!header.ok())
    return Status(header.status().code(),
                  NameOf(read) + ": " + std::string(header.status().message()));
  const ChunkHeader& chunk = header->chunk;
  state.outcome.pieces = std::ssize(header->pieces);
  state.outcome.bytes = chunk.total_bytes;
  state.expected = read.expected;
  if (items_[i].take_any) {
    state.expected.fingerprint = chunk.fingerprint;
    state.expected.approximate = chunk.approximate;
  } else if (header->root != read.id.root) {
    return Status(StatusCode::kIncompatible, NameOf(read) + ": it is of another salt");
  }
  QUIRE_RETURN_IF_ERROR(CheckChunk(chunk, state.expected));
  QUIRE_ASSIGN_OR_RETURN(state.memory, sink_.OnHeader(i, chunk));
  std::memcpy(state.memory.data(), value.data() + header->chunk_at,
              static_cast<size_t>(chunk.header_bytes));
  state.next_piece_at = chunk.header_bytes;
  state.piece_done.resize(header->pieces.size());
  state.header = *std::move(header);
  return Status();
}

// ---- Pieces

void RedisRead::ReadPieces(int64_t deadline_ns) {
  size_t rounds = 0;
  for (const State& state : states_) {
    if (!state.ended) rounds = std::max(rounds, state.header.pieces.size());
  }
  std::vector<int64_t> at(states_.size());
  for (size_t piece = 0; piece < rounds; ++piece) {
    for (size_t i = 0; i < states_.size(); ++i) {
      State& state = states_[i];
      if (state.ended || piece >= state.header.pieces.size()) continue;
      if (piece == 0) at[i] = state.header.chunk.header_bytes;
      const int64_t bytes = state.header.pieces[piece];
      const std::string name =
          RedisPieceName(prefix_, items_[i].read->id.key, static_cast<int64_t>(piece));
      RedisOp op;
      op.slot = RedisSlotOf(name);
      op.request.Add({"GET", name});
      op.expected.place =
          state.memory.subspan(static_cast<size_t>(at[i]), static_cast<size_t>(bytes));
      op.expected.bytes_max = kRedisPieceBytesMax;
      op.reply_bytes = bytes;
      ops_.push_back(std::move(op));
      piece_ops_.push_back({i, piece, at[i]});
      ++state.open_ops;
      at[i] += bytes;
    }
  }
  // Sections of no bytes, and chunks without pieces.
  for (size_t i = 0; i < states_.size(); ++i) {
    if (!states_[i].ended) Verify(i, states_[i].next_piece_at);
  }
  Announce();
  cluster_.Execute(ops_, deadline_ns, this);
}

void RedisRead::OnPlaced(size_t i, size_t count) {
  const PieceOp& op = piece_ops_[i];
  State& state = states_[op.item];
  if (op.piece == state.next_piece) Verify(op.item, op.at + static_cast<int64_t>(count));
}

Status RedisRead::CheckPiece(const RedisOp& op, const PieceOp& piece, State& state) {
  const TierRead& read = *items_[piece.item].read;
  if (!op.status.ok()) {
    state.outcome.damaged = op.status.code() == StatusCode::kCorrupt;
    return op.status;
  }
  const RespValue& reply = op.replies.front();
  const std::string name =
      "piece " + std::to_string(piece.piece) + " of " + std::to_string(state.header.pieces.size());
  if (reply.type == RespType::kNull) {
    state.outcome.incomplete = true;
    return Gone(read, name + " is gone");
  }
  if (reply.in_place) return Status();
  state.outcome.damaged = true;
  return Corrupt(read, name + " has not the length that the header says");
}

void RedisRead::OnDone(size_t i) {
  const PieceOp& op = piece_ops_[i];
  State& state = states_[op.item];
  --state.open_ops;
  if (!state.doomed) {
    const Status status = CheckPiece(ops_[i], op, state);
    if (!status.ok()) {
      Doom(op.item, status);
    } else {
      state.piece_done[op.piece] = true;
      // A piece that was redirected comes behind those after it.
      while (state.next_piece < state.piece_done.size() && state.piece_done[state.next_piece]) {
        state.next_piece_at += state.header.pieces[state.next_piece];
        ++state.next_piece;
      }
      Verify(op.item, state.next_piece_at);
    }
  }
  Announce();
  EndIfQuiet(op.item);
}

bool RedisRead::Cancelled(size_t i) {
  const size_t item = piece_ops_[i].item;
  State& state = states_[item];
  if (!state.doomed && sink_.Cancelled(item)) {
    Doom(item, Status(StatusCode::kCancelled, NameOf(*items_[item].read) + ": cancelled"));
  }
  return state.doomed;
}

// ---- Sections

Status RedisRead::VerifyMac(State& state) {
  if (state.expected.mac_key.empty()) return Status();
  ChunkLimits limits;  // the header was held to the reader's own
  limits.total_bytes_max = std::ssize(state.memory);
  limits.token_count_max = std::ssize(state.header.chunk.tokens);
  limits.section_count_max = std::ssize(state.header.chunk.sections);
  return ChunkView::Open(state.memory, state.expected, limits).status();
}

// The chunk's first `bytes_there` bytes have arrived.
void RedisRead::Verify(size_t i, int64_t bytes_there) {
  State& state = states_[i];
  if (state.doomed) return;
  const ChunkHeader& chunk = state.header.chunk;
  const int64_t before = state.verified;
  while (state.verified < std::ssize(chunk.sections)) {
    const Section& section = chunk.sections[static_cast<size_t>(state.verified)];
    if (EndOf(section) > bytes_there) break;
    const Status status = CheckSection(chunk, state.verified,
                                       state.memory.subspan(static_cast<size_t>(section.offset),
                                                            static_cast<size_t>(section.length)));
    if (!status.ok()) {
      state.outcome.damaged = true;
      return Doom(i, Corrupt(*items_[i].read, status.message()));
    }
    ++state.verified;
  }
  if (bytes_there == chunk.total_bytes && !state.is_whole) {
    const Status status = VerifyMac(state);
    if (!status.ok()) {
      state.outcome.damaged = true;
      return Doom(i, status);
    }
    state.is_whole = true;
  }
  if (state.verified > before) Announce();
}

void RedisRead::AnnounceLayer(size_t i, int64_t layer) {
  State& state = states_[i];
  if (state.ended || state.doomed) return;
  const std::vector<Section>& sections = state.header.chunk.sections;
  while (state.announced < state.verified &&
         sections[static_cast<size_t>(state.announced)].layer_first == layer) {
    sink_.OnSection(i, state.announced++);
  }
}

// Tells the sink of what is verified: a layer of all items, then the next. Nothing of a chunk with
// a MAC before it is whole.
void RedisRead::Announce() {
  int64_t layer = kNoLayer;  // the first one that some item has not got
  for (const State& state : states_) {
    if (state.ended || state.doomed) continue;
    const ChunkHeader& chunk = state.header.chunk;
    if (!state.expected.mac_key.empty() && !state.is_whole) {
      layer = -1;
    } else if (state.verified < std::ssize(chunk.sections)) {
      layer = std::min(layer, chunk.sections[static_cast<size_t>(state.verified)].layer_first);
    }
  }
  while (true) {
    int64_t next = kNoLayer;  // of what is verified and not yet told
    for (const State& state : states_) {
      if (state.ended || state.doomed || state.announced == state.verified) continue;
      const auto at = static_cast<size_t>(state.announced);
      next = std::min(next, state.header.chunk.sections[at].layer_first);
    }
    if (next == kNoLayer || next > layer) break;
    for (size_t i = 0; i < states_.size(); ++i) AnnounceLayer(i, next);
  }
  for (size_t i = 0; i < states_.size(); ++i) EndIfQuiet(i);
}

// ---- Ends

void RedisRead::Doom(size_t i, Status status) {
  State& state = states_[i];
  if (state.doomed || state.ended) return;
  state.doomed = true;
  state.outcome.status = std::move(status);
}

// The sink may free an item's memory at its end, so no bytes may be on their way to it.
void RedisRead::EndIfQuiet(size_t i) {
  State& state = states_[i];
  if (state.ended || state.open_ops > 0) return;
  if (state.doomed) {
    End(i, state.outcome.status);
  } else if (state.announced == std::ssize(state.header.chunk.sections)) {
    End(i, Status());
  }
}

void RedisRead::End(size_t i, const Status& status) {
  states_[i].ended = true;
  states_[i].outcome.status = status;
  sink_.OnEnd(i, status);
}

}  // namespace quire
