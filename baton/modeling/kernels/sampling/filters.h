// Which tokens min-p, top-k and top-p keep of a row: those that baton.modeling.forward.drawing keeps, without sorting the row.
//
// Both top-k and top-p keep tokens, in the order of their logits, until what is kept weighs enough: each token weighs 1,
// or its probability. Most tokens' logits are so far below the largest that they cannot be among them, which few passes
// over the row show. The others are put into buckets by their logits. What is kept is all of the first buckets and a part
// of one more, which alone is sorted: larger logits first, and of equal ones lower ids.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "sampling/noise.h"

namespace {

constexpr int kBuckets = 1024;
constexpr float kDepths[] = {2, 4, 8, 16, 32};  // below the largest logit, over temperature

struct Filters {
  int64_t top_k;
  double top_p, floor;  // floor: logarithm of min-p
};

// Used by one thread, row after row.
class Keeper {
 public:
  // Returns the ids of the tokens that are kept, in no order; `scaled_V` are logits over temperature, the largest 0.
  const std::vector<int64_t>& kept(const float* scaled_V, int64_t V, const Filters& filters) {
    scaled_ = scaled_V, V_ = V;
    list_.clear();
    weights_.assign(V, 1.0);
    if (filters.top_k < V) {
      collect(static_cast<double>(filters.top_k));
      take(static_cast<double>(filters.top_k));
      if (filters.top_p < 1) take(filters.top_p * weigh(list_, filters.floor));
    } else if (filters.top_p < 1) {
      const double most = filters.top_p * weigh_all(filters.floor);
      collect(most);
      take(most);
    } else {
      for (int64_t v = 0; v < V; ++v)
        if (scaled_[v] >= filters.floor) list_.push_back(v);
    }
    const auto is_out = [&](int64_t v) { return scaled_[v] < filters.floor || !(weights_[v] > 0); };
    list_.erase(std::remove_if(list_.begin(), list_.end(), is_out), list_.end());
    return list_;
  }

 private:
  // Makes weights of all tokens probabilities, not normalised, and 0 below the floor. Returns their sum.
  double weigh_all(double floor) {
    Doubles sum = {};
    int64_t v = 0;
    for (; v + kTokens <= V_; v += kTokens) {
      const Doubles x = __builtin_convertvector(load<Logits>(scaled_ + v), Doubles);
      const Doubles weight = x < floor ? Doubles{} : exponential(x);
      store(weights_.data() + v, weight);
      sum += weight;
    }
    double total = 0;
    for (int lane = 0; lane < kTokens; ++lane) total += sum[lane];
    for (; v < V_; ++v) total += weights_[v] = weight_of(v, floor);
    return total;
  }

  double weigh(const std::vector<int64_t>& list, double floor) {
    double total = 0;
    for (const int64_t v : list) total += weights_[v] = weight_of(v, floor);
    return total;
  }

  double weight_of(int64_t v, double floor) const {
    const double x = scaled_[v];
    return x < floor ? 0.0 : exponential(x + Doubles{})[0];
  }

  // Lists the tokens whose logits are not too far below the largest, so that they weigh at least `most` if all do.
  void collect(double most) {
    depth_ = std::numeric_limits<float>::infinity();
    for (const float depth : kDepths) {
      if (weight_within(depth) < most) continue;
      depth_ = depth;
      break;
    }
    for (int64_t v = 0; v < V_; ++v)
      if (scaled_[v] >= -depth_) list_.push_back(v);
  }

  double weight_within(float depth) const {
    Doubles sum = {};
    int64_t v = 0;
    for (; v + kTokens <= V_; v += kTokens) {
      const Doubles x = __builtin_convertvector(load<Logits>(scaled_ + v), Doubles);
      sum += x >= -static_cast<double>(depth) ? load<Doubles>(weights_.data() + v) : Doubles{};
    }
    double total = 0;
    for (int lane = 0; lane < kTokens; ++lane) total += sum[lane];
    for (; v < V_; ++v)
      if (scaled_[v] >= -depth) total += weights_[v];
    return total;
  }

  // Keeps, of the list, the tokens before which there is less than `most` weight.
  void take(double most) {
    in_bucket_.assign(kBuckets, 0.0);
    for (const int64_t v : list_) in_bucket_[bucket_of(v)] += weights_[v];
    int last = 0;
    double before = 0;
    while (last < kBuckets - 1 && before + in_bucket_[last] < most) before += in_bucket_[last++];
    edge_.clear();
    for (const int64_t v : list_)
      if (bucket_of(v) == last) edge_.push_back(v);
    const auto is_behind = [&](int64_t v) { return bucket_of(v) >= last; };
    list_.erase(std::remove_if(list_.begin(), list_.end(), is_behind), list_.end());
    std::sort(edge_.begin(), edge_.end(), [this](int64_t a, int64_t b) {
      return scaled_[a] != scaled_[b] ? scaled_[a] > scaled_[b] : a < b;
    });
    for (const int64_t v : edge_) {
      if (before >= most) break;
      list_.push_back(v);
      before += weights_[v];
    }
  }

  int bucket_of(int64_t v) const {
    const float widest = 64;  // of a row that is listed whole: what lies further below is in the last bucket
    const float at = -scaled_[v] * ((kBuckets - 1) / std::min(depth_, widest));
    return at < kBuckets - 1 ? static_cast<int>(at) : kBuckets - 1;
  }

  const float* scaled_ = nullptr;
  int64_t V_ = 0;
  float depth_ = 0;
  std::vector<double> weights_, in_bucket_;
  std::vector<int64_t> list_, edge_;
};

}  // namespace
