// Takes the largest of logits, or draws tokens from them by the Gumbel-max trick: argmax of logit / temperature + noise,
// whose noise is a function of a key and the token's id (baton.modeling.forward.drawing says which). Torch's own operations
// would pass over a row thirty times, and take two logarithms of every token; here a token's noise is bounded by the bits
// of its hash first, and only tokens that may be the best take the logarithms: some thirty of fifty thousand.
//
// B rows of logits, R rows that draw, V vocabulary.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/entry.h"
#include "common/parallel.h"
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

// Returns the first token with the largest logit; -1 where a logit is NaN or infinity.
int64_t largest_token(const float* logits, int64_t V) {
  const float largest = largest_of(logits, V);
  if (!(largest < std::numeric_limits<float>::infinity())) return -1;
  return std::find(logits, logits + V, largest) - logits;
}

}  // namespace

// Writes the first token with the largest of each row of logits [B][V], which are `stride` numbers apart; a token is -1
// where its row has a logit that is NaN or infinity.
BATON_ENTRY const char* baton_largest_tokens(const float* logits, int64_t B, int64_t V, int64_t stride, int64_t* tokens,
                                             int num_threads) {
  return guarded([&] {
    parallel_for(B, 1, num_threads, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) tokens[b] = largest_token(logits + b * stride, V);
    });
  });
}

// Draws R tokens, each from one of the rows of logits [B][V], which are `stride` numbers apart; a token is -1 where its
// row is not a distribution.
BATON_ENTRY const char* baton_draw_tokens(const float* logits, int64_t B, int64_t V, int64_t stride, const int64_t* rows,
                                          int64_t R, const int64_t* keys, const int64_t* top_k, const double* floors,
                                          const double* top_p, const float* temperatures, int64_t* tokens,
                                          int num_threads) {
  return guarded([&] {
    for (int64_t r = 0; r < R; ++r) check(rows[r] >= 0 && rows[r] < B, "row ", rows[r], " is not among the logits");
    parallel_for(R, 1, num_threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const Filters filters{top_k[r], top_p[r], floors[r]};
        tokens[r] = token_of(logits + rows[r] * stride, V, static_cast<uint64_t>(keys[r]), temperatures[r], filters);
      }
    });
  });
}
