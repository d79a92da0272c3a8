// quire.BlockMemory and quire.ChunkFetch for tvm-ffi.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <array>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "ffi/chunk_space.h"
#include "ffi/tensors.h"
#include "quire/kv_export.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

constexpr std::array<SectionKind, 3> kTokenKinds = {SectionKind::kKey, SectionKind::kValue,
                                                    SectionKind::kLatent};

SectionKind ReadKind(const tf::String& name) {
  std::string known;
  for (const SectionKind kind : kTokenKinds) {
    if (SectionKindName(kind) == std::string_view(name.data(), name.size())) return kind;
    known += (known.empty() ? "'" : ", '") + std::string(SectionKindName(kind)) + "'";
  }
  ThrowBadArgument("the kind of section '" + std::string(name) + "' is none of " + known);
}

int64_t ReadyMoment(const char* call, int64_t timeout_ms) {
  constexpr int64_t kTimeoutMsMax = 365 * 24 * 3600 * int64_t{1000};
  if (timeout_ms < 0 || timeout_ms > kTimeoutMsMax) {
    ThrowBadArgument(std::string("ChunkFetch.") + call + ": timeout_ms = " +
                     std::to_string(timeout_ms) + "; it must be at least 0 and at most a year");
  }
  return MachineTime()->SteadyNs() + timeout_ms * 1'000'000;
}

// The memory of an array [blocks, ...].
BlockMemory PlaceOf(const tf::TensorView& blocks) {
  const auto bad = [&](const std::string& what) {
    ThrowBadArgument("BlockMemory: the array " + what);
  };
  if (blocks.device().device_type != kDLCPU) bad("is not in the memory of the CPU");
  if (blocks.dtype().bits % 8 != 0 || blocks.dtype().lanes != 1)
    bad("has elements of less than a byte");
  if (blocks.ndim() < 1) bad("has no dimension; the first one counts blocks");
  const auto shape = blocks.shape();
  const auto strides = blocks.strides();
  const int64_t element = blocks.dtype().bits / 8;
  for (int i = 0; i < blocks.ndim(); ++i) {
    if (shape[i] < 1) bad("is empty");
    if (strides[i] < 0) bad("has a negative stride");
  }
  // Dimensions from the last one on that lie close together are a row.
  int64_t row = 1;
  int dim = blocks.ndim() - 1;
  for (; dim > 0 && (shape[dim] == 1 || strides[dim] == row); --dim) row *= shape[dim];
  int64_t rows = 1, row_stride = 0;
  for (; dim > 0; --dim) {
    if (shape[dim] == 1) continue;
    if (rows == 1) {
      row_stride = strides[dim];
    } else if (strides[dim] != row_stride * rows) {
      bad("has more than one gap within a block; make blocks contiguous, or give parts of it");
    }
    rows *= shape[dim];
  }
  BlockMemory place{.data = static_cast<std::byte*>(blocks.data_ptr()),
                    .block_count = shape[0],
                    .block_stride = strides[0] * element,
                    .rows = rows,
                    .row_stride = row_stride * element,
                    .row_bytes = row * element};
  place.bytes = (place.block_count - 1) * place.block_stride + (rows - 1) * place.row_stride +
                place.row_bytes;
  return place;
}

// "Allocates" the bytes of a section, which keeps its chunk.
struct SectionAllocator {
  std::shared_ptr<const StoredChunk> chunk;
  int64_t offset;
  void AllocData(DLTensor* tensor) {
    tensor->data = const_cast<std::byte*>(chunk->bytes().data() + offset);
  }
  void FreeData(DLTensor*) { chunk.reset(); }
};

}  // namespace

int64_t BlockMemoryObj::AddOrder(const tf::TensorView& offsets, int64_t run_bytes) {
  return CallChecked([&] {
    const TensorView view = ViewOf(offsets);
    if (view.rank() != 1 || view.dim(0) < 1 || !view.is_contiguous() ||
        view.dtype() != DType::kI64) {
      ThrowBadArgument(
          "BlockMemory: the offsets of an order must be int64 [n], n at least 1, not " +
          view.ToString());
    }
    Order order{.offsets = {}, .run_bytes = run_bytes};
    order.offsets.reserve(static_cast<size_t>(view.dim(0)));
    for (const int64_t offset :
         std::span(view.data_as<int64_t>(), static_cast<size_t>(view.dim(0)))) {
      if (offset < 0 || offset > std::numeric_limits<uint32_t>::max()) {
        ThrowBadArgument("BlockMemory: offset " + std::to_string(offset) +
                         " of an order does not fit 32 bits");
      }
      order.offsets.push_back(static_cast<uint32_t>(offset));
    }
    orders_.push_back(std::move(order));
    return static_cast<int64_t>(orders_.size()) - 1;
  });
}

void BlockMemoryObj::Add(const tf::String& kind, int64_t layer, const tf::TensorView& blocks,
                         int64_t order) {
  CallChecked([&] {
    BlockMemory place = PlaceOf(blocks);
    if (order >= static_cast<int64_t>(orders_.size()))
      ThrowBadArgument("BlockMemory: there is no order " + std::to_string(order));
    if (order >= 0) {
      const Order& found = orders_[static_cast<size_t>(order)];
      place.order = found.offsets;
      place.run_bytes = found.run_bytes;
    }
    ThrowIfError(CheckBlockMemory(place));
    const auto added = places_.emplace(std::pair(ReadKind(kind), layer), place);
    if (!added.second) {
      ThrowBadArgument("BlockMemory: layer " + std::to_string(layer) + " has two arrays of '" +
                       std::string(kind) + "'");
    }
  });
}

Result<std::shared_ptr<ChunkFetch>> ChunkFetchObj::Open() {
  const std::lock_guard lock(mutex_);
  if (fetch_ == nullptr) return Status(StatusCode::kClosed, "ChunkFetch: it was closed");
  return fetch_;
}

OptionMap ChunkFetchObj::State() {
  return latch_.Run([&]() -> Result<OptionMap> {
    QUIRE_ASSIGN_OR_RETURN(const std::shared_ptr<ChunkFetch> fetch, Open());
    const bool done = fetch->done();  // first: what is asked later is at least as new
    const bool located = fetch->located();
    const MissReason miss = located ? fetch->miss() : MissReason::kNone;
    return OptionMap{{"chunks", fetch->chunk_count()},
                     {"located", located},
                     {"found", fetch->found()},
                     {"ready", fetch->ready()},
                     {"done", done},
                     {"miss", tf::String(std::string(MissReasonName(miss)))}};
  });
}

tf::String ChunkFetchObj::Tier(int64_t i) {
  return latch_.Run([&]() -> Result<tf::String> {
    QUIRE_ASSIGN_OR_RETURN(const std::shared_ptr<ChunkFetch> fetch, Open());
    const int64_t found = fetch->found();
    if (i < 0 || i >= found) {
      return Status(StatusCode::kBadArgument, "ChunkFetch: chunk " + std::to_string(i) +
                                                  " is not in [0, " + std::to_string(found) +
                                                  "), those that were found");
    }
    return tf::String(std::string(TierName(fetch->tier(i))));
  });
}

bool ChunkFetchObj::Wait(int64_t timeout_ms) {
  const int64_t until_ns = ReadyMoment("wait", timeout_ms);
  return latch_.Run([&]() -> Result<bool> {
    QUIRE_ASSIGN_OR_RETURN(const std::shared_ptr<ChunkFetch> fetch, Open());
    return fetch->Wait(until_ns);
  });
}

bool ChunkFetchObj::WaitLayer(int64_t layer, int64_t timeout_ms) {
  const int64_t until_ns = ReadyMoment("wait_layer", timeout_ms);
  return latch_.Run([&]() -> Result<bool> {
    if (layer < 0) {
      return Status(StatusCode::kBadArgument,
                    "ChunkFetch: layer " + std::to_string(layer) + " is negative");
    }
    QUIRE_ASSIGN_OR_RETURN(const std::shared_ptr<ChunkFetch> fetch, Open());
    if (!fetch->WaitLayer(layer, until_ns).ok()) return false;
    // All chunks were located by then, so that found() is final.
    const auto there = static_cast<size_t>(fetch->found());
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < there; ++i) layers_[i] = std::max(layers_[i], layer + 1);
    return true;
  });
}

Result<std::shared_ptr<const StoredChunk>> ChunkFetchObj::Verified(ChunkFetch& fetch, int64_t i,
                                                                   int64_t layer) {
  const int64_t found = fetch.found();
  if (i < 0 || i >= found) {
    return Status(StatusCode::kBadArgument, "ChunkFetch: chunk " + std::to_string(i) +
                                                " is not in [0, " + std::to_string(found) +
                                                "), those that were found");
  }
  if (i >= fetch.ready()) {
    const std::lock_guard lock(mutex_);
    if (layer >= layers_[static_cast<size_t>(i)]) {
      return Status(StatusCode::kBadState, "ChunkFetch: layer " + std::to_string(layer) +
                                               " of chunk " + std::to_string(i) +
                                               " is not verified yet; call wait or wait_layer");
    }
  }
  return fetch.chunk(i);
}

Result<std::pair<std::shared_ptr<const StoredChunk>, int64_t>> ChunkFetchObj::FindSection(
    int64_t i, SectionKind wanted, int64_t layer) {
  QUIRE_ASSIGN_OR_RETURN(const std::shared_ptr<ChunkFetch> fetch, Open());
  QUIRE_ASSIGN_OR_RETURN(std::shared_ptr<const StoredChunk> chunk, Verified(*fetch, i, layer));
  const int64_t at = chunk->header().Find(wanted, layer);
  if (at < 0 || chunk->header().sections[static_cast<size_t>(at)].layer_last != layer) {
    return Status(StatusCode::kNotFound,
                  "ChunkFetch: chunk " + std::to_string(i) + " has no section '" +
                      std::string(SectionKindName(wanted)) + "' of layer " + std::to_string(layer));
  }
  return std::pair(std::move(chunk), at);
}

tf::Tensor ChunkFetchObj::Section(int64_t i, const tf::String& kind, int64_t layer) {
  const SectionKind wanted = ReadKind(kind);
  return latch_.Run([&]() -> Result<tf::Tensor> {
    QUIRE_ASSIGN_OR_RETURN(auto found, FindSection(i, wanted, layer));
    const quire::Section& section =
        found.first->header().sections[static_cast<size_t>(found.second)];
    return tf::Tensor::FromNDAlloc(SectionAllocator{found.first, section.offset},
                                   tf::ShapeView(section.dims.data(), section.dims.size()),
                                   DLDataType{kDLUInt, section.dtype.bits, 1}, DLDevice{kDLCPU, 0});
  });
}

tf::String ChunkFetchObj::SectionType(int64_t i, const tf::String& kind, int64_t layer) {
  const SectionKind wanted = ReadKind(kind);
  return latch_.Run([&]() -> Result<tf::String> {
    QUIRE_ASSIGN_OR_RETURN(const auto found, FindSection(i, wanted, layer));
    return tf::String(
        found.first->header().sections[static_cast<size_t>(found.second)].dtype.ToString());
  });
}

void ChunkFetchObj::Scatter(int64_t layer, const BlockMemoryRef& memory,
                            const tf::TensorView& blocks, int64_t first, int64_t count) {
  const std::vector<int32_t> ids = TokenIds(blocks);
  const std::vector<int64_t> numbers(ids.begin(), ids.end());
  latch_.Run([&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const std::shared_ptr<ChunkFetch> fetch, Open());
    const auto bad = [&](const std::string& what) {
      return Status(StatusCode::kBadArgument, "ChunkFetch.scatter: " + what);
    };
    const auto total = static_cast<int64_t>(numbers.size());
    if (first < 0 || count < 1 ||
        count > fetch->chunk_count() - std::min(first, fetch->chunk_count()))
      return bad(std::to_string(count) + " chunks from " + std::to_string(first) +
                 " on are not in the fetch of " + std::to_string(fetch->chunk_count()));
    if (total % count != 0)
      return bad(std::to_string(total) + " blocks do not divide among " + std::to_string(count) +
                 " chunks");
    const auto part = static_cast<size_t>(total / count);
    // Plan: everything that may fail, for all chunks, before the first byte moves.
    struct Copy {
      std::shared_ptr<const StoredChunk> chunk;
      std::span<const std::byte> bytes;
      const BlockMemory* place;
      std::span<const int64_t> blocks;
    };
    std::vector<Copy> copies;
    std::vector<int64_t> sorted = numbers;
    std::ranges::sort(sorted);
    if (std::ranges::adjacent_find(sorted) != sorted.end()) return bad("a block stands twice");
    for (int64_t i = 0; i < count; ++i) {
      QUIRE_ASSIGN_OR_RETURN(const auto chunk, Verified(*fetch, first + i, layer));
      const size_t before = copies.size();
      for (const quire::Section& section : chunk->header().sections) {
        if (section.layer_first != layer || section.layer_last != layer) continue;
        const auto at = memory->places().find({section.kind, layer});
        if (at == memory->places().end())
          return bad("the memory has no array for section '" +
                     std::string(SectionKindName(section.kind)) + "' of layer " +
                     std::to_string(layer));
        const BlockMemory& place = at->second;
        if (sorted.empty() || sorted.front() < 0 || sorted.back() >= place.block_count)
          return bad("a block is not in [0, " + std::to_string(place.block_count) + ")");
        if (section.length / place.block_bytes() != static_cast<int64_t>(part) ||
            section.length % place.block_bytes() != 0)
          return bad(std::to_string(part) + " blocks of " + std::to_string(place.block_bytes()) +
                     " bytes are not the section's " + std::to_string(section.length) + " bytes");
        copies.push_back({chunk,
                          chunk->bytes().subspan(static_cast<size_t>(section.offset),
                                                 static_cast<size_t>(section.length)),
                          &place, std::span(numbers).subspan(static_cast<size_t>(i) * part, part)});
      }
      if (copies.size() == before)
        return bad("the chunk has no section of layer " + std::to_string(layer));
    }
    for (const Copy& copy : copies)
      QUIRE_RETURN_IF_ERROR(ScatterBlocks(copy.bytes, *copy.place, copy.blocks));
    return {};
  });
}

Status RequirePassportOf(AttentionKVCache& cache, int64_t seq_id, const Passport& passport) {
  bool long_factors = false;
  if (cache.HasSequence(seq_id)) {
    QUIRE_ASSIGN_OR_RETURN(long_factors, cache.UsesLongRope(seq_id));
  }
  const Passport identity{.model = passport.model,
                          .revision = passport.revision,
                          .tokenizer = passport.tokenizer,
                          .adapter = passport.adapter,
                          .block_tokens = passport.block_tokens};
  QUIRE_ASSIGN_OR_RETURN(const Passport own, CachePassport(cache, identity, long_factors));
  QUIRE_ASSIGN_OR_RETURN(const std::string own_json, own.ToJson());
  QUIRE_ASSIGN_OR_RETURN(const std::string json, passport.ToJson());
  if (own_json == json) return {};
  return Status(StatusCode::kIncompatible,
                "KVCache: the chunks are of " + json + "; those of sequence " +
                    std::to_string(seq_id) + " are of " + own_json +
                    "; take the passport of a space from KVCache.chunk_passport");
}

Status ChunkFetchObj::AppendTo(AttentionKVCache& cache, int64_t seq_id, int64_t count) {
  QUIRE_ASSIGN_OR_RETURN(const std::shared_ptr<ChunkFetch> fetch, Open());
  QUIRE_RETURN_IF_ERROR(RequirePassportOf(cache, seq_id, passport_));
  int64_t length = 0;
  if (cache.HasSequence(seq_id)) {
    QUIRE_ASSIGN_OR_RETURN(length, cache.GetSequenceLength(seq_id));
  }
  if (count < 0 || count > fetch->ready() || length != first_token_) {
    return Status(StatusCode::kBadArgument,
                  "KVCache.take_chunks: " + std::to_string(count) + " chunks from position " +
                      std::to_string(first_token_) + " on are asked for; " +
                      std::to_string(fetch->ready()) + " are ready, and sequence " +
                      std::to_string(seq_id) + " has " + std::to_string(length) + " tokens");
  }
  const ChunkLimits limits = ChunkLimits::Of(passport_);
  std::vector<std::shared_ptr<const StoredChunk>> chunks;
  std::vector<ChunkView> views;
  for (int64_t i = 0; i < count; ++i) {
    chunks.push_back(fetch->chunk(i));  // the store has compared all of its header
    const ChunkHeader& header = chunks.back()->header();
    QUIRE_ASSIGN_OR_RETURN(
        ChunkView view,
        chunks.back()->View({.key = header.key, .fingerprint = header.fingerprint}, limits));
    views.push_back(std::move(view));
  }
  return ImportChunks(cache, seq_id, views);
}

void ChunkFetchObj::Cancel() {
  latch_.Run([&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const std::shared_ptr<ChunkFetch> fetch, Open());
    fetch->Cancel();
    return {};
  });
}

void ChunkFetchObj::Close() {
  std::shared_ptr<ChunkFetch> fetch;  // ends outside of the lock
  {
    const std::lock_guard lock(mutex_);
    fetch = std::exchange(fetch_, nullptr);
  }
  if (fetch != nullptr) fetch->Cancel();  // ends waits of other threads
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::ObjectDef<BlockMemoryObj>()
      .def(tf::reflection::init<>())
      .def("add_order", &BlockMemoryObj::AddOrder)
      .def("add", &BlockMemoryObj::Add);
  tf::reflection::ObjectDef<ChunkFetchObj>()
      .def("state", &ChunkFetchObj::State)
      .def("tier", &ChunkFetchObj::Tier)
      .def("wait", &ChunkFetchObj::Wait)
      .def("wait_layer", &ChunkFetchObj::WaitLayer)
      .def("section", &ChunkFetchObj::Section)
      .def("section_type", &ChunkFetchObj::SectionType)
      .def("scatter", &ChunkFetchObj::Scatter)
      .def("cancel", &ChunkFetchObj::Cancel)
      .def("close", &ChunkFetchObj::Close);
}

}  // namespace quire::ffi
