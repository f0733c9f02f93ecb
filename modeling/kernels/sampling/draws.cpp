// Takes the largest of logits, or draws tokens from them by the Gumbel-max trick: argmax of logit / temperature + noise,
// whose noise is a function of a key and the token's id (modeling.forward.drawing says which). Torch's own operations
// would pass over a row thirty times, and take two logarithms of every token; here a token's noise is bounded by the bits
// of its hash first, and only tokens that may be the best take the logarithms: some thirty of fifty thousand.
//
// B rows of logits, R rows that draw, V vocabulary.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/simd.h"
#include "sampling/filters.h"
#include "sampling/noise.h"

namespace {

constexpr int64_t kBlock = 32 * kTokens;  // tokens whose bounds are computed together
constexpr double kSlack = 1e-6;           // more than the bounds' rounding

// The largest of a row's logits; NaN where one is NaN.
float largest_of(const float* logits, int64_t V) {
  const float least = -std::numeric_limits<float>::infinity();
  Floats most = splat(least);
  Ints is_no_number = {};
  int64_t v = 0;
  for (; v + kLanes <= V; v += kLanes) {
    const Floats here = load<Floats>(logits + v);
    most = larger(most, here);
    is_no_number |= here != here;
  }
  float largest = least;
  bool is_number = true;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (most[lane] > largest) largest = most[lane];
    is_number &= !is_no_number[lane];
  }
  for (; v < V; ++v) {
    if (logits[v] > largest) largest = logits[v];
    is_number &= logits[v] == logits[v];
  }
  return is_number ? largest : std::numeric_limits<float>::quiet_NaN();
}

struct Row {
  const float* scaled;  // [V], logits over temperature, the largest 0
  int64_t V;
  uint64_t key;
};

// The token with the best score among those that are offered to it.
class Best {
 public:
  explicit Best(const Row& row) : row_(row) {}

  bool may_be(double bound) const { return bound + kSlack > score_; }

  void offer(int64_t token) {
    const double score = noise(hash_of(row_.key, static_cast<uint64_t>(token + 1))) + row_.scaled[token];
    if (score > score_) score_ = score, token_ = token;
  }

  int64_t token() const { return token_; }

 private:
  const Row& row_;
  double score_ = kNothing;
  int64_t token_ = 0;
};

// Writes bounds of the scores of `num` tokens, at most kBlock; returns the largest.
double bound_scores(const Row& row, int64_t first, int64_t num, double* bounds) {
  Doubles most = kNothing - Doubles{};
  Longs number = {};
  for (int lane = 0; lane < kTokens; ++lane) number[lane] = first + lane + 1;
  int64_t i = 0;
  for (; i + kTokens <= num; i += kTokens, number += kTokens) {
    const Doubles scaled = __builtin_convertvector(load<Logits>(row.scaled + first + i), Doubles);
    const Doubles bound = scaled + noise_bound(hash_of(row.key, number));
    store(bounds + i, bound);
    most = bound > most ? bound : most;
  }
  double largest = kNothing;
  for (int lane = 0; lane < kTokens; ++lane)
    if (most[lane] > largest) largest = most[lane];
  for (; i < num; ++i) {
    bounds[i] = row.scaled[first + i] + noise_bound(hash_of(row.key, static_cast<uint64_t>(first + i + 1)));
    if (bounds[i] > largest) largest = bounds[i];
  }
  return largest;
}

int64_t drawn(const Row& row) {
  Best best(row);
  double bounds[kBlock];
  for (int64_t first = 0; first < row.V; first += kBlock) {
    const int64_t num = std::min(kBlock, row.V - first);
    if (!best.may_be(bound_scores(row, first, num, bounds))) continue;
    for (int64_t i = 0; i < num; ++i)
      if (best.may_be(bounds[i])) best.offer(first + i);
  }
  return best.token();
}

int64_t drawn_among(const Row& row, const std::vector<int64_t>& kept) {
  Best best(row);
  for (const int64_t token : kept)
    if (best.may_be(row.scaled[token] + noise_bound(hash_of(row.key, static_cast<uint64_t>(token + 1)))))
      best.offer(token);
  return best.token();
}

// Returns the token of a row of logits; -1 if the largest is not finite, so that they are no distribution.
int64_t token_of(const float* logits, int64_t V, uint64_t key, float temperature, const Filters& filters) {
  thread_local std::vector<float> scaled_V;
  thread_local Keeper keeper;
  const float largest = largest_of(logits, V);
  if (!std::isfinite(largest)) return -1;
  scaled_V.resize(V);
  for (int64_t v = 0; v < V; ++v) scaled_V[v] = (logits[v] - largest) / temperature;
  const Row row{scaled_V.data(), V, key};
  const bool filters_none = filters.top_k >= V && filters.top_p >= 1 && filters.floor == kNothing;
  return filters_none ? drawn(row) : drawn_among(row, keeper.kept(row.scaled, V, filters));
}

// Returns the first token with the largest logit; the first NaN where there is one.
int64_t largest_token(const float* logits, int64_t V) {
  const float largest = largest_of(logits, V);
  if (std::isnan(largest)) return std::find_if(logits, logits + V, [](float each) { return std::isnan(each); }) - logits;
  return std::find(logits, logits + V, largest) - logits;
}

template <class Number>
const Number* numbers(const at::Tensor& tensor, int64_t R, const char* what) {
  TORCH_CHECK(tensor.scalar_type() == c10::CppTypeToScalarType<Number>::value && tensor.is_contiguous() &&
                  tensor.numel() == R,
              what, " must be ", c10::CppTypeToScalarType<Number>::value, ", one for each row that draws");
  return tensor.const_data_ptr<Number>();
}

const float* checked(const at::Tensor& logits_BV) {
  TORCH_CHECK(logits_BV.dim() == 2 && logits_BV.scalar_type() == at::kFloat && logits_BV.stride(1) == 1 &&
                  logits_BV.size(1) > 0,
              "logits must be [B, V], float32, each row contiguous");
  return logits_BV.const_data_ptr<float>();
}

at::Tensor largest_tokens(const at::Tensor& logits_BV) {
  const float* logits = checked(logits_BV);
  const int64_t B = logits_BV.size(0), V = logits_BV.size(1), stride = logits_BV.stride(0);
  at::Tensor tokens_B = at::empty({B}, logits_BV.options().dtype(at::kLong));
  int64_t* tokens = tokens_B.data_ptr<int64_t>();
  at::parallel_for(0, B, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) tokens[b] = largest_token(logits + b * stride, V);
  });
  return tokens_B;
}

at::Tensor draw_tokens(const at::Tensor& logits_BV, const at::Tensor& rows_R, const at::Tensor& keys_R,
                       const at::Tensor& top_k_R, const at::Tensor& floors_R, const at::Tensor& top_p_R,
                       const at::Tensor& temperatures_R) {
  const float* logits = checked(logits_BV);
  const int64_t R = rows_R.numel(), V = logits_BV.size(1), stride = logits_BV.stride(0);
  const int64_t* rows = numbers<int64_t>(rows_R, R, "rows");
  const int64_t* keys = numbers<int64_t>(keys_R, R, "keys");
  const int64_t* top_k = numbers<int64_t>(top_k_R, R, "top_k");
  const double* floors = numbers<double>(floors_R, R, "floors");
  const double* top_p = numbers<double>(top_p_R, R, "top_p");
  const float* temperatures = numbers<float>(temperatures_R, R, "temperatures");
  for (int64_t r = 0; r < R; ++r)
    TORCH_CHECK(rows[r] >= 0 && rows[r] < logits_BV.size(0), "row ", rows[r], " is not among the logits");
  at::Tensor tokens_R = at::empty({R}, rows_R.options());
  int64_t* tokens = tokens_R.data_ptr<int64_t>();
  at::parallel_for(0, R, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const Filters filters{top_k[r], top_p[r], floors[r]};
      tokens[r] = token_of(logits + rows[r] * stride, V, static_cast<uint64_t>(keys[r]), temperatures[r], filters);
    }
  });
  return tokens_R;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(BATON_OPERATORS, m) {
  m.def("largest_tokens(Tensor logits_BV) -> Tensor");
  m.def(
      "draw_tokens(Tensor logits_BV, Tensor rows_R, Tensor keys_R, Tensor top_k_R, Tensor floors_R, Tensor top_p_R, "
      "Tensor temperatures_R) -> Tensor");
}
TORCH_LIBRARY_IMPL(BATON_OPERATORS, CPU, m) {
  m.impl("draw_tokens", &draw_tokens);
  m.impl("largest_tokens", &largest_tokens);
}
