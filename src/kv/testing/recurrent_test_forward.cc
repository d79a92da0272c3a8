#include "kv/testing/recurrent_test_forward.h"

#include <cmath>

#include "base/random.h"
#include "kv/testing/kv_test_forward.h"

namespace quire {
namespace {

// Which of a token's tensors; streams of its random numbers.
enum Part : uint64_t { kQuery, kKey, kValue, kDecay, kBeta, kPartCount };
// Tensors of a layer have token numbers of their own.
constexpr uint64_t kWeightToken = uint64_t{1} << 40;

double Draw(uint64_t token, int64_t layer, Part part, int64_t i) {
  const uint64_t stream = static_cast<uint64_t>(layer) * kPartCount + part;
  return RandomUniform(token, stream, static_cast<uint64_t>(i));
}

// Inputs as a model has them: keys of about unit length, decays below 1.
double Input(const RecurrentLayerSpec& spec, uint64_t token, int64_t layer, Part part, int64_t i) {
  const double u = Draw(token, layer, part, i);
  if (part == kDecay)
    return spec.kind == RecurrentLayerKind::kStateSpace ? 0.01 + 0.3 * u : 0.7 + 0.3 * u;
  if (part == kBeta) return u;
  const bool key = part == kKey && spec.kind != RecurrentLayerKind::kConvolution;
  const double scale = key ? std::sqrt(3.0 / static_cast<double>(spec.key_dim)) : 1;
  return (2 * u - 1) * scale;
}

TestTensor Rows(const RecurrentLayerSpec& spec, std::span<const uint64_t> tokens, int64_t layer,
                Part part, std::vector<int64_t> shape, DType dtype) {
  shape.insert(shape.begin(), static_cast<int64_t>(tokens.size()));
  TestTensor tensor(dtype, shape);
  const int64_t size = tensor.count() / static_cast<int64_t>(tokens.size());
  for (int64_t i = 0; i < tensor.count(); ++i) {
    const uint64_t token = tokens[static_cast<size_t>(i / size)];
    tensor.Set(i, static_cast<float>(Input(spec, token, layer, part, i % size)));
  }
  return tensor;
}

TestTensor Weights(int64_t layer, uint64_t which, std::vector<int64_t> shape, double low,
                   double high) {
  TestTensor tensor(DType::kF32, std::move(shape));
  for (int64_t i = 0; i < tensor.count(); ++i) {
    const double u = Draw(kWeightToken + which, layer, kQuery, i);
    tensor.Set(i, static_cast<float>(low + (high - low) * u));
  }
  return tensor;
}

struct LayerTensors {
  TestTensor q, k, v, decay, beta, o;  // of a convolution: v is x, q the weights, k the bias
  TestTensor a, d;                     // of a state space; its q, k, v, decay are c, b, x, dt
};

LayerTensors MakeTensors(const RecurrentLayerSpec& spec, int64_t layer,
                         std::span<const uint64_t> tokens, DType dtype) {
  LayerTensors t;
  const int64_t row_count = static_cast<int64_t>(tokens.size());
  if (spec.kind == RecurrentLayerKind::kConvolution) {
    t.v = Rows(spec, tokens, layer, kValue, {spec.num_channels}, dtype);
    t.q = Weights(layer, 0, {spec.num_channels, spec.width}, -1, 1);
    t.k = Weights(layer, 1, {spec.num_channels}, -1, 1);
    t.o = TestTensor(DType::kF32, {row_count, spec.num_channels});
    return t;
  }
  const auto rows = [&](Part part, std::vector<int64_t> shape) {
    return Rows(spec, tokens, layer, part, std::move(shape), dtype);
  };
  t.q = rows(kQuery, {spec.num_key_heads, spec.key_dim});
  t.k = rows(kKey, {spec.num_key_heads, spec.key_dim});
  t.v = rows(kValue, {spec.num_heads, spec.value_dim});
  t.decay = rows(kDecay, {spec.num_heads});
  t.beta = rows(kBeta, {spec.num_heads});
  t.a = Weights(layer, 2, {spec.num_heads}, -2, -0.1);
  t.d = Weights(layer, 3, {spec.num_heads}, -1, 1);
  t.o = TestTensor(DType::kF32, {row_count, spec.num_heads, spec.value_dim});
  return t;
}

constexpr double kScale = 0.5;

Status CallLayer(RecurrentCache& cache, int64_t layer, const LayerTensors& t) {
  switch (cache.options().layers[static_cast<size_t>(layer)].kind) {
    case RecurrentLayerKind::kLinearAttention:
      return cache.LinearAttention(layer, t.q.view(), t.k.view(), t.v.view(), t.decay.view(),
                                   t.o.view(), kScale);
    case RecurrentLayerKind::kGatedDelta:
      return cache.GatedDelta(layer, t.q.view(), t.k.view(), t.v.view(), t.decay.view(),
                              t.beta.view(), t.o.view(), kScale);
    case RecurrentLayerKind::kStateSpace:
      return cache.StateSpace(layer, t.v.view(), t.decay.view(), t.a.view(), t.k.view(), t.q.view(),
                              &t.d.view(), t.o.view());
    case RecurrentLayerKind::kConvolution:
      break;
  }
  return cache.Convolution(layer, t.v.view(), t.q.view(), &t.k.view(), true, t.o.view());
}

}  // namespace

std::vector<RecurrentLayerSpec> AllRecurrentKinds() {
  const auto matrix = [](RecurrentLayerKind kind, int64_t heads, int64_t key_heads, int64_t key_dim,
                         int64_t value_dim) {
    return RecurrentLayerSpec{.kind = kind,
                              .num_heads = heads,
                              .num_key_heads = key_heads,
                              .key_dim = key_dim,
                              .value_dim = value_dim};
  };
  return {{.kind = RecurrentLayerKind::kConvolution, .num_channels = 19, .width = 4},
          matrix(RecurrentLayerKind::kLinearAttention, 2, 2, 4, 5),
          matrix(RecurrentLayerKind::kGatedDelta, 2, 1, 6, 17),
          matrix(RecurrentLayerKind::kStateSpace, 4, 2, 3, 4)};
}

int64_t OutputSize(const RecurrentLayerSpec& spec) {
  return spec.kind == RecurrentLayerKind::kConvolution ? spec.num_channels
                                                       : spec.num_heads * spec.value_dim;
}

Status RunRecurrentLayer(RecurrentCache& cache, int64_t layer, std::span<const uint64_t> tokens,
                         std::vector<float>* outputs, DType dtype) {
  const RecurrentLayerSpec& spec = cache.options().layers[static_cast<size_t>(layer)];
  const LayerTensors t = MakeTensors(spec, layer, tokens, dtype);
  QUIRE_RETURN_IF_ERROR(CallLayer(cache, layer, t));
  if (outputs == nullptr) return Status();
  for (int64_t i = 0; i < t.o.count(); ++i) outputs->push_back(t.o.Get(i));
  return Status();
}

Status RunRecurrentLayers(RecurrentCache& cache, std::span<const uint64_t> tokens,
                          RecurrentOutputs* outputs, DType dtype) {
  const size_t layer_count = cache.options().layers.size();
  if (outputs != nullptr) outputs->assign(layer_count, {});
  for (size_t l = 0; l < layer_count; ++l) {
    QUIRE_RETURN_IF_ERROR(RunRecurrentLayer(cache, static_cast<int64_t>(l), tokens,
                                            outputs == nullptr ? nullptr : &(*outputs)[l], dtype));
  }
  return Status();
}

Status RunRecurrentForward(RecurrentCache& cache, std::span<const int64_t> ids,
                           const std::vector<std::vector<uint64_t>>& tokens,
                           RecurrentOutputs* outputs, DType dtype) {
  std::vector<int64_t> lengths;
  std::vector<uint64_t> all;
  for (const std::vector<uint64_t>& part : tokens) {
    lengths.push_back(static_cast<int64_t>(part.size()));
    all.insert(all.end(), part.begin(), part.end());
  }
  QUIRE_RETURN_IF_ERROR(cache.BeginForward(ids, lengths));
  QUIRE_RETURN_IF_ERROR(RunRecurrentLayers(cache, all, outputs, dtype));
  return cache.EndForward();
}

std::vector<float> StatesOf(RecurrentCache& cache, int64_t seq_id) {
  std::vector<float> states;
  const std::vector<RecurrentLayerSpec>& layers = cache.options().layers;
  for (size_t l = 0; l < layers.size(); ++l) {
    const RecurrentLayerSpec& spec = layers[l];
    const TestTensor state =
        spec.kind == RecurrentLayerKind::kConvolution
            ? TestTensor(DType::kF32, {spec.width - 1, spec.num_channels})
            : TestTensor(DType::kF32, {spec.num_heads, spec.key_dim, spec.value_dim});
    const Status status = cache.DebugGet(static_cast<int64_t>(l), seq_id, state.view());
    if (!status.ok()) return {NAN};
    for (int64_t i = 0; i < state.count(); ++i) states.push_back(state.Get(i));
  }
  return states;
}

// ---------------------------------------------------------------------- in double

namespace {

std::vector<float> NaiveConvolution(const RecurrentLayerSpec& spec, const LayerTensors& t,
                                    int64_t row_count) {
  std::vector<float> outputs;
  for (int64_t row = 0; row < row_count; ++row) {
    for (int64_t c = 0; c < spec.num_channels; ++c) {
      double sum = t.k.Get(c);
      for (int64_t j = 0; j < spec.width; ++j) {
        const int64_t from = row - spec.width + 1 + j;
        if (from < 0) continue;
        sum += static_cast<double>(t.q.Get(c * spec.width + j)) *
               t.v.Get(from * spec.num_channels + c);
      }
      outputs.push_back(static_cast<float>(sum / (1 + std::exp(-sum))));
    }
  }
  return outputs;
}

// One head of a matrix state; S is [key_dim][value_dim].
struct NaiveHead {
  const RecurrentLayerSpec& spec;
  const LayerTensors& t;
  int64_t head;
  std::vector<double> s{};

  void Step(int64_t row, std::vector<float>& outputs, size_t at) {
    const bool delta = spec.kind == RecurrentLayerKind::kGatedDelta;
    const bool space = spec.kind == RecurrentLayerKind::kStateSpace;
    const int64_t key_head = head / (spec.num_heads / spec.num_key_heads);
    const double given = t.decay.Get(row * spec.num_heads + head);
    const double decay = space ? std::exp(given * t.a.Get(head)) : given;
    s.resize(static_cast<size_t>(spec.key_dim * spec.value_dim), 0.0);
    for (double& element : s) element *= decay;
    for (int64_t c = 0; c < spec.value_dim; ++c) {
      const double v = t.v.Get((row * spec.num_heads + head) * spec.value_dim + c);
      double add = space ? v * given : v;
      for (int64_t i = 0; delta && i < spec.key_dim; ++i)
        add -= Key(t.k, row, key_head, i) * S(i, c);
      if (delta) add *= t.beta.Get(row * spec.num_heads + head);
      double o = 0;
      for (int64_t i = 0; i < spec.key_dim; ++i) {
        S(i, c) += Key(t.k, row, key_head, i) * add;
        o += Key(t.q, row, key_head, i) * S(i, c);
      }
      o = space ? o + t.d.Get(head) * v : o * kScale;
      outputs[at + static_cast<size_t>(c)] = static_cast<float>(o);
    }
  }
  double& S(int64_t i, int64_t c) { return s[static_cast<size_t>(i * spec.value_dim + c)]; }
  double Key(const TestTensor& tensor, int64_t row, int64_t key_head, int64_t i) const {
    return tensor.Get((row * spec.num_key_heads + key_head) * spec.key_dim + i);
  }
};

}  // namespace

RecurrentOutputs NaiveOutputs(const std::vector<RecurrentLayerSpec>& layers,
                              std::span<const uint64_t> tokens) {
  RecurrentOutputs all;
  const int64_t row_count = static_cast<int64_t>(tokens.size());
  for (size_t l = 0; l < layers.size(); ++l) {
    const RecurrentLayerSpec& spec = layers[l];
    const LayerTensors t = MakeTensors(spec, static_cast<int64_t>(l), tokens, DType::kF32);
    if (spec.kind == RecurrentLayerKind::kConvolution) {
      all.push_back(NaiveConvolution(spec, t, row_count));
      continue;
    }
    std::vector<float> outputs(static_cast<size_t>(row_count * OutputSize(spec)));
    for (int64_t h = 0; h < spec.num_heads; ++h) {
      NaiveHead head{spec, t, h};
      for (int64_t row = 0; row < row_count; ++row) {
        head.Step(row, outputs, static_cast<size_t>((row * spec.num_heads + h) * spec.value_dim));
      }
    }
    all.push_back(std::move(outputs));
  }
  return all;
}

}  // namespace quire
