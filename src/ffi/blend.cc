// The functions quire.blend_*: quire/blend.h on tensors of tvm-ffi.
#include "quire/blend.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/errors.h"
#include "ffi/options.h"
#include "ffi/tensors.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

constexpr std::string_view kBlendPairings[] = {"half_split", "interleaved"};

// The numbers of a contiguous tensor of one dimension, which must live on.
template <typename T>
std::span<T> TensorSpan(const char* name, const tf::TensorView& tensor, DType dtype) {
  const TensorView view = ViewOf(tensor);
  if (view.rank() != 1 || !view.is_contiguous() || view.dtype() != dtype) {
    ThrowBadArgument(std::string("blend: ") + name + " must be " + std::string(DTypeName(dtype)) +
                     ", contiguous and of one dimension, not " + view.ToString());
  }
  return {view.data_as<T>(), static_cast<size_t>(view.dim(0))};
}

std::optional<std::span<const int64_t>> RowsOf(const char* name,
                                               const tf::Optional<tf::TensorView>& rows) {
  if (!rows.has_value()) return std::nullopt;
  return TensorSpan<const int64_t>(name, rows.value(), DType::kI64);
}

TensorView OptionalViewOf(const tf::Optional<tf::TensorView>& tensor) {
  return tensor.has_value() ? ViewOf(tensor.value()) : TensorView();
}

// Owns what a KeyRotation refers to.
struct OwnedRotation {
  std::vector<double> inv_freq;
  std::vector<double> old_inv_freq;
  KeyRotation rotation;

  explicit OwnedRotation(const OptionMap& fields) {
    OptionsReader reader("KeyRotation", fields);
    reader.Read("inv_freq", &inv_freq);
    reader.Read("old_inv_freq", &old_inv_freq);
    reader.ReadEnum("pairing", std::span<const std::string_view>(kBlendPairings),
                    &rotation.pairing);
    reader.Read("first_dim", &rotation.first_dim);
    reader.Read("head_dim", &rotation.head_dim);
    reader.Finish();
    rotation.inv_freq = inv_freq;
    rotation.old_inv_freq = old_inv_freq;
  }
  OwnedRotation(const OwnedRotation&) = delete;
  OwnedRotation& operator=(const OwnedRotation&) = delete;
};

BlendOptions ReadBlendOptions(const OptionMap& fields) {
  BlendOptions options;
  OptionsReader reader("blend", fields);
  std::string metric = "v_l2";
  reader.Read("metric", &metric);
  options.metric = ValueOrThrow(ParseDeviationMetric(metric));
  if (const auto layers = reader.Get<tf::Array<int64_t>>("check_layers")) {
    options.check_layers.assign(layers->begin(), layers->end());
  }
  std::vector<double> thresholds;
  reader.Read("ratios", &options.ratios);
  reader.Read("thresholds", &thresholds);
  for (const double threshold : thresholds) {
    options.thresholds.push_back(static_cast<float>(threshold));
  }
  reader.Read("link_tokens", &options.link_tokens);
  reader.Read("force_last", &options.force_last);
  reader.Read("min_tokens", &options.min_tokens);
  reader.Finish();
  return options;
}

void ShiftKeysOf(tf::TensorView keys, int64_t token_axis, tf::TensorView old_positions,
                 tf::TensorView new_positions, tf::TensorView valid, const OptionMap& rotation,
                 tf::TensorView moved) {
  const OwnedRotation owned(rotation);
  const KeyMoves moves{
      .old_positions = TensorSpan<const int64_t>("old_positions", old_positions, DType::kI64),
      .new_positions = TensorSpan<const int64_t>("new_positions", new_positions, DType::kI64),
      .valid = TensorSpan<const uint8_t>("valid", valid, DType::kU8)};
  const TensorView from = ViewOf(keys);
  const TensorView to = ViewOf(moved);
  ThrowIfError(CallChecked(
      [&] { return ShiftKeys(from, static_cast<int>(token_axis), moves, owned.rotation, to); }));
}

tf::Tensor DeviationsOf(const tf::String& metric, int64_t token_axis,
                        tf::Optional<tf::TensorView> fresh_k, tf::Optional<tf::TensorView> fresh_v,
                        tf::Optional<tf::TensorView> cached_k,
                        tf::Optional<tf::TensorView> cached_v, tf::Optional<tf::TensorView> rows,
                        tf::TensorView kinds) {
  const std::span<const uint8_t> row_kinds = TensorSpan<const uint8_t>("kinds", kinds, DType::kU8);
  const KVRows fresh{OptionalViewOf(fresh_k), OptionalViewOf(fresh_v)};
  const KVRows cached{OptionalViewOf(cached_k), OptionalViewOf(cached_v)};
  const std::optional<std::span<const int64_t>> fresh_rows = RowsOf("rows", rows);
  const tf::Tensor deviations =
      NewTensor(ToDLDataType(DType::kF32), {static_cast<int64_t>(row_kinds.size())});
  const std::span<float> out(static_cast<float*>(deviations.data_ptr()), row_kinds.size());
  ThrowIfError(CallChecked([&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const DeviationMetric parsed, ParseDeviationMetric(std::string(metric)));
    return ComputeDeviations(parsed, static_cast<int>(token_axis), fresh, cached, fresh_rows,
                             row_kinds, out);
  }));
  return deviations;
}

// documents: int64 [n, 2], first row and number of rows. document_ratios: [n], below 0: none.
std::vector<BlendDocument> DocumentsOf(const tf::TensorView& documents,
                                       const tf::Array<double>& ratios) {
  const TensorView view = ViewOf(documents);
  if (view.rank() != 2 || !view.is_contiguous() || view.dtype() != DType::kI64 ||
      view.dim(1) != 2 || view.dim(0) != static_cast<int64_t>(ratios.size())) {
    ThrowBadArgument("blend: documents must be int64 [n, 2], contiguous, with n ratios, not " +
                     view.ToString() + " with " + std::to_string(ratios.size()));
  }
  std::vector<BlendDocument> found;
  for (int64_t i = 0; i < view.dim(0); ++i) {
    const int64_t* const one = view.data_as<int64_t>() + 2 * i;
    found.push_back({.first_row = one[0], .row_count = one[1]});
    const double ratio = ratios[i];
    if (!(ratio < 0)) found.back().ratio = ratio;
  }
  return found;
}

// The selected rows, int64, and their query_start_loc, int32.
tf::Array<tf::Tensor> SelectTokensOf(tf::TensorView query_start_loc, tf::TensorView kinds,
                                     tf::TensorView deviations, tf::TensorView documents,
                                     const tf::Array<double>& document_ratios,
                                     tf::Optional<tf::TensorView> candidates,
                                     const OptionMap& fields, int64_t check_index) {
  const std::vector<BlendDocument> found = DocumentsOf(documents, document_ratios);
  const BlendOptions options = ReadBlendOptions(fields);
  const SelectionBatch batch{
      .query_start_loc = TensorSpan<const int32_t>("query_start_loc", query_start_loc, DType::kI32),
      .kinds = TensorSpan<const uint8_t>("kinds", kinds, DType::kU8),
      .deviations = TensorSpan<const float>("deviations", deviations, DType::kF32),
      .documents = found,
      .candidates = RowsOf("candidates", candidates)};
  const TokenSelection selection = ValueOrThrow(
      CallChecked([&] { return SelectTokens(batch, options, static_cast<size_t>(check_index)); }));
  return {NewTensor(std::span(selection.rows)), NewTensor(std::span(selection.query_start_loc))};
}

void ScatterRowsOf(tf::TensorView some, int64_t token_axis, tf::TensorView rows,
                   tf::TensorView all) {
  const std::span<const int64_t> to = TensorSpan<const int64_t>("rows", rows, DType::kI64);
  const TensorView from = ViewOf(some);
  const TensorView out = ViewOf(all);
  ThrowIfError(
      CallChecked([&] { return ScatterRows(from, static_cast<int>(token_axis), to, out); }));
}

void GatherRowsOf(tf::TensorView all, int64_t token_axis, tf::TensorView rows,
                  tf::TensorView some) {
  const std::span<const int64_t> from = TensorSpan<const int64_t>("rows", rows, DType::kI64);
  const TensorView in = ViewOf(all);
  const TensorView out = ViewOf(some);
  ThrowIfError(
      CallChecked([&] { return GatherRows(in, static_cast<int>(token_axis), from, out); }));
}

tf::Tensor PositionsOf(tf::TensorView query_start_loc, tf::TensorView context_lengths) {
  const auto starts = TensorSpan<const int32_t>("query_start_loc", query_start_loc, DType::kI32);
  const auto contexts = TensorSpan<const int64_t>("context_lengths", context_lengths, DType::kI64);
  const auto fill = [&](std::span<const int32_t> offsets, std::span<int64_t> out) {
    ThrowIfError(CallChecked([&] { return FillPositions(offsets, contexts, out); }));
  };
  // Memory is taken for rows that will be filled alone: contexts are checked before, with requests
  // of no rows, and offsets that fall or begin elsewhere have no rows either.
  fill(std::vector<int32_t>(starts.size()), {});
  const bool ascends = starts.front() == 0 && std::ranges::is_sorted(starts);
  const int64_t row_count = ascends ? starts.back() : 0;
  const tf::Tensor positions = NewTensor(ToDLDataType(DType::kI64), {row_count});
  fill(starts, {static_cast<int64_t*>(positions.data_ptr()), static_cast<size_t>(row_count)});
  return positions;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::GlobalDef()
      .def("quire.blend_check_options",
           [](const OptionMap& options, int64_t layer_count) {
             ThrowIfError(CallChecked(
                 [&] { return CheckBlendOptions(ReadBlendOptions(options), layer_count); }));
           })
      .def("quire.blend_verdict_limits",  // the most divergence, and the least agreement
           [] {
             return tf::Array<double>{BlendVerdict::kDivergenceMost, BlendVerdict::kAgreementLeast};
           })
      .def("quire.blend_shift_keys", ShiftKeysOf)
      .def("quire.blend_deviations", DeviationsOf)
      .def("quire.blend_select_tokens", SelectTokensOf)
      .def("quire.blend_scatter_rows", ScatterRowsOf)
      .def("quire.blend_gather_rows", GatherRowsOf)
      .def("quire.blend_positions", PositionsOf);
}

}  // namespace
}  // namespace quire::ffi
