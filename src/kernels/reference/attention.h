// Attention as a specification: plain loops in double over the stored keys and values. The oracle
// of the tests.
#ifndef QUIRE_KERNELS_REFERENCE_ATTENTION_H_
#define QUIRE_KERNELS_REFERENCE_ATTENTION_H_

#include <vector>

#include "kernels/backend.h"

namespace quire {

struct ReferenceOutput {
  // [row][query head]...
  std::vector<double> o;    // ...[v_head_dim]
  std::vector<double> lse;  // base 2, -inf for a row that sees nothing
  // Bounds that a tester needs, of the row's visible keys and values.
  std::vector<double> score_scale;  // |scale_log2| * |q| * greatest |k|, Euclidean norms
  std::vector<double> value_scale;  // ...[v_head_dim], sum of p |v| / sum of p
  std::vector<double> value_peak;   // number of keys * greatest p |v| / sum of p
};

// Query and (RopeMode::kInline) key rotated in double, nothing rounded. Reads args.pages, runs, q
// and rotary; writes nothing.
ReferenceOutput ReferenceAttention(const AttentionArgs& args);

}  // namespace quire

#endif  // QUIRE_KERNELS_REFERENCE_ATTENTION_H_
