#include "model/testing/llama_reference.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

namespace quire {
namespace {

using Row = std::vector<double>;
using Rows = std::vector<Row>;

class Reference {
 public:
  Reference(const TestModel& model, std::span<const TestTensor> tensors, const ReferenceRope& rope)
      : model_(model), rope_(rope) {
    for (const TestTensor& tensor : tensors) tensors_[tensor.name] = &tensor;
  }

  std::vector<double> Logits(std::span<const int32_t> tokens) {
    const TestTensor& embedding = *tensors_.at("model.embed_tokens.weight");
    Rows hidden;
    for (const int32_t token : tokens) {
      const auto begin = embedding.values.begin() + token * model_.hidden_size;
      hidden.emplace_back(begin, begin + model_.hidden_size);
    }
    for (int64_t i = 0; i < model_.num_hidden_layers; ++i) {
      RunLayer("model.layers." + std::to_string(i) + ".", hidden);
    }
    std::vector<double> logits;
    for (const Row& row : hidden) {
      const char* const head = model_.tie_word_embeddings ? "model.embed_tokens" : "lm_head";
      const Row values = Linear(head, Norm("model.norm", row));
      logits.insert(logits.end(), values.begin(), values.end());
    }
    return logits;
  }

 private:
  Row Linear(const std::string& name, const Row& x) const {
    const TestTensor& weight = *tensors_.at(name + ".weight");
    const auto bias = tensors_.find(name + ".bias");
    Row y(static_cast<size_t>(weight.shape[0]));
    for (size_t i = 0; i < y.size(); ++i) {
      double sum = bias == tensors_.end() ? 0.0 : bias->second->values[i];
      for (size_t j = 0; j < x.size(); ++j) sum += double{weight.values[i * x.size() + j]} * x[j];
      y[i] = sum;
    }
    return y;
  }

  Row Norm(const std::string& name, const Row& x) const {
    double squares = 0;
    for (const double value : x) squares += value * value;
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(x.size()) + 1e-5);
    const TestTensor& weight = *tensors_.at(name + ".weight");
    Row y(x.size());
    for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale * weight.values[i];
    return y;
  }

  void Rotate(int64_t position, Row& head) const {
    const size_t half = rope_.inv_freq.size();
    for (size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * rope_.inv_freq[i];
      const double c = std::cos(angle) * rope_.amplitude;
      const double s = std::sin(angle) * rope_.amplitude;
      const double a = head[i];
      const double b = head[i + half];
      head[i] = a * c - b * s;
      head[i + half] = b * c + a * s;
    }
  }

  // The heads of one projection of one token, normalised and rotated where they should be.
  Rows Heads(const std::string& attention, const std::string& which, const Row& x,
             int64_t position) const {
    const Row all = Linear(attention + which + "_proj", x);
    Rows heads;
    for (size_t i = 0; i < all.size(); i += static_cast<size_t>(model_.head_dim)) {
      Row head(all.begin() + static_cast<int64_t>(i),
               all.begin() + static_cast<int64_t>(i) + model_.head_dim);
      if (which != "v") {
        if (tensors_.contains(attention + which + "_norm.weight")) {
          head = Norm(attention + which + "_norm", head);
        }
        Rotate(position, head);
      }
      heads.push_back(std::move(head));
    }
    return heads;
  }

  static Row Attend(const Row& q, const Rows& k, const Rows& v) {
    Row scores;
    for (const Row& key : k) {
      double score = 0;
      for (size_t i = 0; i < q.size(); ++i) score += q[i] * key[i];
      scores.push_back(score / std::sqrt(static_cast<double>(q.size())));
    }
    const double max = *std::ranges::max_element(scores);
    double sum = 0;
    Row o(q.size());
    for (size_t j = 0; j < k.size(); ++j) {
      const double p = std::exp(scores[j] - max);
      sum += p;
      for (size_t i = 0; i < o.size(); ++i) o[i] += p * v[j][i];
    }
    for (double& value : o) value /= sum;
    return o;
  }

  static void Add(const Row& x, Row& to) {
    for (size_t i = 0; i < x.size(); ++i) to[i] += x[i];
  }

  void RunLayer(const std::string& prefix, Rows& hidden) const {
    const std::string attention = prefix + "self_attn.";
    const auto kv_heads = static_cast<size_t>(model_.num_key_value_heads);
    const size_t group = static_cast<size_t>(model_.num_attention_heads) / kv_heads;
    std::vector<Rows> keys(kv_heads);
    std::vector<Rows> values(kv_heads);
    for (size_t t = 0; t < hidden.size(); ++t) {
      const Row x = Norm(prefix + "input_layernorm", hidden[t]);
      const auto position = static_cast<int64_t>(t);
      const Rows k = Heads(attention, "k", x, position);
      const Rows v = Heads(attention, "v", x, position);
      for (size_t h = 0; h < kv_heads; ++h) {
        keys[h].push_back(k[h]);
        values[h].push_back(v[h]);
      }
      Row o;
      const Rows q = Heads(attention, "q", x, position);
      for (size_t h = 0; h < q.size(); ++h) {
        const Row head = Attend(q[h], keys[h / group], values[h / group]);
        o.insert(o.end(), head.begin(), head.end());
      }
      Add(Linear(attention + "o_proj", o), hidden[t]);
      Add(Mlp(prefix + "mlp.", Norm(prefix + "post_attention_layernorm", hidden[t])), hidden[t]);
    }
  }

  Row Mlp(const std::string& mlp, const Row& x) const {
    Row gate = Linear(mlp + "gate_proj", x);
    const Row up = Linear(mlp + "up_proj", x);
    for (size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1.0 + std::exp(-gate[i])) * up[i];
    return Linear(mlp + "down_proj", gate);
  }

  const TestModel& model_;
  const ReferenceRope& rope_;
  std::map<std::string, const TestTensor*> tensors_;
};

}  // namespace

ReferenceRope PlainRope(int64_t head_dim, double theta) {
  ReferenceRope rope;
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    rope.inv_freq.push_back(
        std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim)));
  }
  return rope;
}

std::vector<double> ReferenceLogits(const TestModel& model, std::span<const TestTensor> tensors,
                                    const ReferenceRope& rope, std::span<const int32_t> tokens) {
  return Reference(model, tensors, rope).Logits(tokens);
}

}  // namespace quire
