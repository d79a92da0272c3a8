#include "model/weights/quantised_folder.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "base/numa_nodes.h"
#include "base/round_up.h"
#include "model/weights/folder_tensors.h"
#include "tensor/host_memory.h"

namespace quire {
namespace {

// The nibble of a word that holds output i of 8 where they are interleaved.
int64_t InterleavedPlace(int64_t output) { return output % 2 * 4 + output / 2; }

uint32_t Bits(uint32_t word, int64_t place, int64_t bits) {
  return word >> (place * bits) & ((1U << bits) - 1);
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// finding the tensors

bool FolderMatrix::IsStored(const Checkpoint& checkpoint, const FolderQuantisation& quantisation,
                            const std::string& name) {
  if (quantisation.scheme == FolderScheme::kFloat8) return false;
  if (quantisation.scheme != FolderScheme::kCompressed) return checkpoint.Has(name + ".qweight");
  return checkpoint.Has(name + ".weight_packed") ||
         (checkpoint.Has(name + ".weight") && checkpoint.Has(name + ".weight_scale"));
}

Result<FolderMatrix> FolderMatrix::Open(const Checkpoint& checkpoint,
                                        const FolderQuantisation& quantisation,
                                        const std::string& name, int64_t n, int64_t k) {
  FolderMatrix matrix(checkpoint, name, n, k);
  if (k % kQuantGroup != 0) {
    return Status(StatusCode::kBadArgument,
                  matrix.name_ + " has " + std::to_string(k) +
                      " inputs and is quantised; matrices whose inputs are a multiple of " +
                      std::to_string(kQuantGroup) + " are read: save the model dequantised");
  }
  const bool is_compressed = quantisation.scheme == FolderScheme::kCompressed;
  QUIRE_RETURN_IF_ERROR(is_compressed ? matrix.FindCompressed(quantisation)
                                      : matrix.FindWords(quantisation));
  return matrix;
}

Result<CheckpointTensor> FolderMatrix::Find(const std::string& suffix, std::string_view type,
                                            std::span<const int64_t> shape) const {
  return FindTyped(*checkpoint_, name_ + suffix, type, shape);
}

// MXFP4 of kCompressed.
Status FolderMatrix::FindPowers() {
  bits_ = 4;
  has_powers_ = true;
  code_order_ = Codes::kRowBytes;
  group_inputs_ = kQuantGroup;
  group_count_ = k_ / kQuantGroup;
  const int64_t codes[] = {n_, k_ / 2};
  const int64_t scales[] = {n_, group_count_};
  QUIRE_ASSIGN_OR_RETURN(codes_, Find(".weight_packed", "U8", codes));
  QUIRE_ASSIGN_OR_RETURN(scales_, Find(".weight_scale", "U8", scales));
  return Has(".weight_g_idx") ? FindGroups(".weight_g_idx") : Status();
}

Status FolderMatrix::FindCompressed(const FolderQuantisation& quantisation) {
  if (Has(".weight_packed")) {
    QUIRE_ASSIGN_OR_RETURN(const CheckpointTensor packed,
                           checkpoint_->Find(name_ + ".weight_packed"));
    if (packed.stored->type_name == "U8") return FindPowers();
  }
  QUIRE_ASSIGN_OR_RETURN(scales_, FindScales(*checkpoint_, name_ + ".weight_scale"));
  const std::vector<int64_t>& scales = scales_->stored->shape;
  has_one_scale_ = ScaleCount(*scales_) == 1;
  group_count_ = scales.size() == 2 && !has_one_scale_ ? scales[1] : 1;
  const bool has_rows = !scales.empty() && scales[0] == n_ && scales.size() <= 2;
  if (!has_one_scale_ && (!has_rows || group_count_ < 1 || k_ % group_count_ != 0)) {
    return Status(StatusCode::kCorrupt,
                  scales_->Name() + " is " + scales_->stored->TypeAndShape() + ", its matrix is " +
                      ShapeText(std::vector<int64_t>{n_, k_}) +
                      "; scales of each output and group of inputs are expected");
  }
  group_inputs_ = k_ / group_count_;
  if (Has(".weight_packed")) {
    QUIRE_ASSIGN_OR_RETURN(const CheckpointTensor packed,
                           checkpoint_->Find(name_ + ".weight_packed"));
    const bool has_bytes = packed.stored->shape.size() == 2 && packed.stored->shape[1] == k_ / 4;
    bits_ = has_bytes ? 8 : 4;
    code_order_ = Codes::kRowWords;
    const int64_t shape[] = {n_, k_ / per_word()};
    QUIRE_ASSIGN_OR_RETURN(codes_, Find(".weight_packed", "I32", shape));
  } else {
    const int64_t shape[] = {n_, k_};
    QUIRE_ASSIGN_OR_RETURN(codes_, Find(".weight", "I8", shape));
  }
  QUIRE_RETURN_IF_ERROR(CheckGroupSize());
  const bool needs_zeros = quantisation.has_offsets && code_order_ == Codes::kRowWords;
  if (needs_zeros || Has(".weight_zero_point")) QUIRE_RETURN_IF_ERROR(FindZeros());
  return Has(".weight_g_idx") ? FindGroups(".weight_g_idx") : Status();
}

// Offsets of kCompressed: bytes as the scales lie, or words whose codes run over the outputs.
Status FolderMatrix::FindZeros() {
  QUIRE_ASSIGN_OR_RETURN(const CheckpointTensor found,
                         checkpoint_->Find(name_ + ".weight_zero_point"));
  if (found.stored->type_name == "I8") {
    zero_order_ = Zeros::kBytes;
    QUIRE_ASSIGN_OR_RETURN(zeros_, Find(".weight_zero_point", "I8", scales_->stored->shape));
    return Status();
  }
  zero_order_ = Zeros::kRowWords;
  const int64_t shape[] = {(n_ + per_word() - 1) / per_word(), group_count_};
  QUIRE_ASSIGN_OR_RETURN(zeros_, Find(".weight_zero_point", "I32", shape));
  return Status();
}

Status FolderMatrix::FindWords(const FolderQuantisation& quantisation) {
  bits_ = quantisation.bits;
  zero_raise_ = quantisation.zero_raise;
  interleaves_ = quantisation.scheme == FolderScheme::kAwq;
  code_order_ = interleaves_ ? Codes::kOutputWords : Codes::kInputWords;
  zero_order_ = Zeros::kColumnWords;
  scales_by_group_ = true;
  group_inputs_ = quantisation.group_size == 0 ? k_ : quantisation.group_size;
  group_count_ = (k_ + group_inputs_ - 1) / group_inputs_;
  QUIRE_RETURN_IF_ERROR(CheckGroupSize());
  if (n_ % per_word() != 0) {
    return Status(StatusCode::kBadArgument,
                  name_ + " has " + std::to_string(n_) + " outputs, no multiple of the " +
                      std::to_string(per_word()) +
                      " in a word of its offsets: save the model dequantised");
  }
  const int64_t codes[] = {interleaves_ ? k_ : k_ / per_word(),
                           interleaves_ ? n_ / per_word() : n_};
  const int64_t zeros[] = {group_count_, n_ / per_word()};
  const int64_t scales[] = {group_count_, n_};
  QUIRE_ASSIGN_OR_RETURN(codes_, Find(".qweight", "I32", codes));
  QUIRE_ASSIGN_OR_RETURN(zeros_, Find(".qzeros", "I32", zeros));
  QUIRE_ASSIGN_OR_RETURN(scales_, FindScales(*checkpoint_, name_ + ".scales"));
  QUIRE_ASSIGN_OR_RETURN(scales_, Find(".scales", scales_->stored->type_name, scales));
  const bool needs_groups = quantisation.is_strewn && group_count_ > 1;
  return needs_groups || Has(".g_idx") ? FindGroups(".g_idx") : Status();
}

Status FolderMatrix::FindGroups(const std::string& suffix) {
  const int64_t shape[] = {k_};
  QUIRE_ASSIGN_OR_RETURN(groups_, Find(suffix, "I32", shape));
  return Status();
}

Status FolderMatrix::CheckGroupSize() const {
  if (group_count_ == 1 || group_inputs_ % kQuantGroup == 0) return Status();
  return Status(StatusCode::kBadArgument,
                name_ + " has scales for groups of " + std::to_string(group_inputs_) +
                    " inputs; groups of a multiple of " + std::to_string(kQuantGroup) +
                    " are read: save the model dequantised");
}

// -------------------------------------------------------------------------------------------------
// its numbers

bool FolderMatrix::is_wide() const {
  return k_ % kWideInputs == 0 && (group_count_ == 1 || group_inputs_ % kWideInputs == 0);
}

WeightFormat FolderMatrix::format() const {
  if (has_powers_) return WeightFormat::kMXFP4;
  const bool has_zeros = zero_order_ != Zeros::kNone;
  if (bits_ == 8 && is_wide()) return has_zeros ? WeightFormat::kI8ZWide : WeightFormat::kI8GWide;
  if (bits_ == 8) return has_zeros ? WeightFormat::kI8Z : WeightFormat::kI8G;
  if (is_wide()) return has_zeros ? WeightFormat::kI4ZWide : WeightFormat::kI4GWide;
  return has_zeros ? WeightFormat::kI4Z : WeightFormat::kI4G;
}

float FolderMatrix::ScaleAt(int64_t output, int64_t group) const {
  int64_t at = scales_by_group_ ? group * n_ + output : output * group_count_ + group;
  if (has_one_scale_) at = 0;
  return FloatAt(*scales_, at);
}

// In the units of the format's codes: signed ones of 8 bits, 0 ... 15 of 4 bits.
int FolderMatrix::ZeroAt(int64_t output, int64_t group) const {
  const int half = bits_ == 8 ? 128 : 8;
  const int to_format = bits_ == 8 ? -half : 0;  // from 0 ... 2^bits - 1
  if (zero_order_ == Zeros::kBytes) {
    const int64_t at = has_one_scale_ ? 0 : output * group_count_ + group;
    return NumberAt<int8_t>(*zeros_, at) + half + to_format;
  }
  const int64_t row = output / per_word();
  int64_t place = output % per_word();
  if (zero_order_ == Zeros::kRowWords) {
    const auto word = NumberAt<uint32_t>(*zeros_, row * group_count_ + group);
    return static_cast<int>(Bits(word, place, bits_)) + to_format;
  }
  if (interleaves_) place = InterleavedPlace(place);
  const auto word = NumberAt<uint32_t>(*zeros_, group * (n_ / per_word()) + row);
  return static_cast<int>(Bits(word, place, bits_)) + zero_raise_ + to_format;
}

uint32_t FolderMatrix::WordAt(int64_t output, int64_t group) const {
  const auto scale = std::bit_cast<uint32_t>(ScaleAt(output, group));
  if (zero_order_ == Zeros::kNone) return scale;
  return scale | static_cast<uint32_t>(ZeroAt(output, group) + kZeroRaised);
}

Status FolderMatrix::CheckNumbers() const {
  if (zero_order_ == Zeros::kNone) return Status();
  const bool has_floats = scales_->stored->type_name == "F32";
  for (int64_t output = 0; output < n_; ++output) {
    for (int64_t group = 0; group < group_count_; ++group) {
      const int zero = ZeroAt(output, group);
      if (bits_ == 4 && (zero < 0 || zero > 16)) {
        return Status(StatusCode::kCorrupt,
                      zeros_->Name() + ": the offset of output " + std::to_string(output) + " is " +
                          std::to_string(zero - 8) + ", outside the 4 bits of the codes");
      }
      if (has_floats && (std::bit_cast<uint32_t>(ScaleAt(output, group)) & kZeroBits) != 0) {
        return Status(StatusCode::kBadArgument,
                      scales_->Name() + ": the scale of output " + std::to_string(output) +
                          " is a float32 number that neither float16 nor bfloat16 holds; beside "
                          "offsets such scales are not read: save them as float16 or bfloat16");
      }
    }
  }
  return Status();
}

Result<std::vector<int32_t>> FolderMatrix::InputOrder() const {
  std::vector<int32_t> order;
  if (!groups_) return order;
  std::vector<int64_t> next;  // of each group: the place of its next input
  for (int64_t group = 0; group < group_count_; ++group) next.push_back(group * group_inputs_);
  order.resize(static_cast<size_t>(k_));
  bool moves = false;
  for (int64_t input = 0; input < k_; ++input) {
    const auto group = NumberAt<int32_t>(*groups_, input);
    const int64_t end = std::min((group + int64_t{1}) * group_inputs_, k_);
    if (group < 0 || group >= group_count_ || next[static_cast<size_t>(group)] == end) {
      return Status(StatusCode::kCorrupt,
                    groups_->Name() + ": input " + std::to_string(input) + " is in group " +
                        std::to_string(group) + "; there are " + std::to_string(group_count_) +
                        " groups of " + std::to_string(group_inputs_) + " inputs each");
    }
    const int64_t place = next[static_cast<size_t>(group)]++;
    order[static_cast<size_t>(place)] = static_cast<int32_t>(input);
    moves = moves || place != input;
  }
  if (!moves) order.clear();
  return order;
}

// -------------------------------------------------------------------------------------------------
// packing

// Signed codes of 8 bits, 0 ... 15 of 4 bits.
void FolderMatrix::ReadCodes(int64_t output, std::span<const int32_t> order, int8_t* codes) const {
  const CheckpointTensor& tensor = *codes_;
  const int64_t per = per_word();
  const int raised = bits_ == 8 ? 128 : 0;
  const auto fill = [&](auto code_at) {
    for (int64_t i = 0; i < k_; ++i) {
      codes[i] = static_cast<int8_t>(code_at(order.empty() ? i : order[static_cast<size_t>(i)]));
    }
  };
  const auto unpack = [&](int64_t index, int64_t place) {
    return static_cast<int>(Bits(NumberAt<uint32_t>(tensor, index), place, bits_)) - raised;
  };
  switch (code_order_) {
    case Codes::kBytes:
      return fill([&](int64_t input) { return NumberAt<int8_t>(tensor, output * k_ + input); });
    case Codes::kRowBytes:
      return fill([&](int64_t input) {
        const auto both = NumberAt<uint8_t>(tensor, output * (k_ / 2) + input / 2);
        return input % 2 == 0 ? both & 15 : both >> 4;
      });
    case Codes::kRowWords:
      return fill(
          [&](int64_t input) { return unpack(output * (k_ / per) + input / per, input % per); });
    case Codes::kInputWords:
      return fill([&](int64_t input) { return unpack(input / per * n_ + output, input % per); });
    case Codes::kOutputWords:
      const int64_t place = InterleavedPlace(output % per);
      return fill([&](int64_t input) { return unpack(input * (n_ / per) + output / per, place); });
  }
}

// As the format stores a row. `codes`: room for k of them.
void FolderMatrix::WriteRow(int64_t output, std::span<const int32_t> order, int8_t* codes,
                            std::byte* row) const {
  const int64_t block = BlockInputs(format());
  ReadCodes(output, order, codes);
  for (int64_t begin = 0; begin < k_; begin += block) {
    if (has_powers_) {
      *row++ = NumberAt<std::byte>(*scales_, output * group_count_ + begin / kQuantGroup);
    } else {
      const uint32_t word = WordAt(output, begin / group_inputs_);
      std::memcpy(row, &word, sizeof(word));
      row += sizeof(word);
    }
    if (bits_ == 8) {
      std::memcpy(row, codes + begin, static_cast<size_t>(block));
      row += block;
      continue;
    }
    for (int64_t group = begin; group < begin + block; group += kQuantGroup) {
      for (int64_t i = group; i < group + kQuantGroup / 2; ++i) {
        *row++ = static_cast<std::byte>(codes[i] | codes[i + kQuantGroup / 2] << 4);
      }
    }
  }
}

Status FolderMatrix::Pack(std::span<const int32_t> order, std::byte* packed,
                          ParallelRunner& runner) const {
  QUIRE_RETURN_IF_ERROR(CheckNumbers());
  const WeightFormat to = format();
  const int64_t row_bytes = StoredRowBytes(to, k_);
  const int64_t worker_bytes = k_ + kStripOutputs * row_bytes;  // codes of a row, rows of a strip
  QUIRE_ASSIGN_OR_RETURN(
      const HostMemory buffers,
      HostMemory::Allocate(static_cast<size_t>(runner.worker_count() * worker_bytes)));
  Along(runner).ParallelFor(Strips(n_), [&](int64_t strip, int worker) {
    const int64_t first = strip * kStripOutputs;
    const int64_t count = std::min(kStripOutputs, n_ - first);
    std::byte* const buffer = buffers.data() + worker * worker_bytes;
    std::byte* const rows = buffer + k_;
    for (int64_t i = 0; i < count; ++i) {
      WriteRow(first + i, order, reinterpret_cast<int8_t*>(buffer), rows + i * row_bytes);
    }
    PackQuantisedStrip(to, rows, count, k_, packed + strip * StripBytes(to, k_));
  });
  return Status();
}

Status FolderMatrix::Read(std::span<const int32_t> order, float* values,
                          ParallelRunner& runner) const {
  QUIRE_RETURN_IF_ERROR(CheckNumbers());
  const WeightFormat from = format();
  const int64_t worker_bytes = k_ * static_cast<int64_t>(sizeof(float)) + StoredRowBytes(from, k_) +
                               k_;  // numbers, the stored row, codes; the first are aligned
  const int64_t stride = RoundUp(worker_bytes, int64_t{alignof(float)});
  QUIRE_ASSIGN_OR_RETURN(const HostMemory buffers,
                         HostMemory::Allocate(static_cast<size_t>(runner.worker_count() * stride)));
  runner.ParallelFor(n_, [&](int64_t output, int worker) {
    std::byte* const buffer = buffers.data() + worker * stride;
    auto* const numbers = reinterpret_cast<float*>(buffer);
    std::byte* const row = buffer + k_ * static_cast<int64_t>(sizeof(float));
    WriteRow(output, order, reinterpret_cast<int8_t*>(row + StoredRowBytes(from, k_)), row);
    DequantiseRow(from, row, k_, numbers);
    float* const to = values + output * k_;
    for (int64_t i = 0; i < k_; ++i) {
      to[order.empty() ? i : order[static_cast<size_t>(i)]] = numbers[i];
    }
  });
  return Status();
}

void FolderMatrix::Release() const noexcept {
  for (const auto* const tensor : {&codes_, &scales_, &zeros_, &groups_}) {
    if (*tensor) Checkpoint::Release(**tensor);
  }
}

}  // namespace quire
