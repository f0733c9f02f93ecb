// A tile of keys and values, packed once for all query heads that share them (prefill_attention.cpp,
// decode_attention.cpp).
//
// Keys and values lie in the order in which they are multiplied, kWide registers after another, each lane kDepth elements
// of one key, or of one channel of values; a query, or the keys' weights, are broadcast.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/common.h"

namespace {

// Fetches memory while a tile is at work: during(n) returns what to fetch during products of n steps, between() is called
// often between products, for each register of weights and for each of values that is packed. This one fetches nothing.
struct FetchNothing {
  Lines during(int) const { return {}; }
  void between() const {}
};

// A tile of at most kKeys keys. P: the product.
template <class P, int kKeys>
class PackedTile {
 public:
  using Element = typename P::Element;
  using Factor = typename P::Factor;
  static constexpr int kHeight = P::kHeight;         // query heads that are served at a time
  static constexpr int kDepth = P::kDepth;           // neighbours that a step multiplies
  static constexpr int kRegisters = kKeys / kLanes;  // of a query head's scores
  using Scores = Floats[kHeight][kRegisters];

  explicit PackedTile(int H) : H_(H), depth_(round_up(H, P::kDepth * P::kSteps)) {
    k_.resize(kRegisters * depth_ / P::kDepth);
    v_.resize(kKeys / P::kDepth * H_ / kLanes);
  }

  // Elements of a query as it is multiplied: H, and zeros behind them.
  int depth() const { return depth_; }

  // Packs `count` keys, of which `at` returns where number j lies; zeros in channels behind the last.
  template <class At>
  void pack_keys(int count, At at) {
    constexpr int kPerWord = 4 / sizeof(Element);
    const int num_words = H_ / kPerWord, num_steps = depth_ / P::kDepth;
    for (int j = 0; j < round_up(count, kBlock); j += kLanes) {
      Words* to = k_.data() + (j / kBlock * num_steps) * kWide + j % kBlock / kLanes;
      for (int word = 0; word < num_words; word += kLanes) {
        const int num = std::min(kLanes, num_words - word);
        Words rows[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
          rows[lane] = j + lane < count ? load_words(at(j + lane) + word * kPerWord, num) : Words{};
        }
        transpose(rows);
        for (int each = 0; each < num; ++each) {
          for (int part = 0; part < P::kSpread; ++part) {
            to[((word + each) * P::kSpread + part) * kWide] = P::spread(rows[each], part);
          }
        }
      }
    }
  }

  // Packs `count` values, of which `at` returns where number j lies; zeros behind the last, up to a whole number of
  // kSteps.
  template <class At, class Fetching>
  void pack_values(int count, At at, Fetching fetching) {
    for_parts(H_ / kLanes, [&](int from, auto width) {
      Words* to = &v_[from * (kKeys / P::kDepth)];
      const int whole = round_up(count, P::kDepth * P::kSteps);
      for (int j = 0; j < count; j += P::kDepth, to += width) {
        if constexpr (P::kDepth == 2) {
          interleave<width>(to, at(j) + from * kLanes, j + 1 < count ? at(j + 1) + from * kLanes : nullptr);
        } else {
          for (int w = 0; w < width; ++w) to[w] = (Words)load_floats(at(j) + (from + w) * kLanes);
        }
        fetching.between();
      }
      std::fill(to, &v_[from * (kKeys / P::kDepth)] + whole / P::kDepth * width, Words{});
    });
  }

  // Scores the first `count` keys for kHeight query heads; their queries are [kHeight][depth].
  template <class Fetching>
  void score(const Factor* q, int count, Scores& scores, Fetching fetching) {
    const int num_steps = depth_ / P::kDepth;
    for (int j = 0; j < count; j += kBlock) {
      multiply<P, kWide>(scores[0] + j / kLanes, kRegisters, nullptr, q, depth_, &k_[j / kBlock * num_steps * kWide],
                         num_steps, fetching.during(num_steps));
    }
  }

  // Adds the values, weighted by their `scores`, to the first `num` of kHeight query heads: to their softmax, and to
  // their sums [H]. The head r sees the first seen(r) keys, at most `count`.
  template <class Seen, class Fetching>
  void weigh(const Floats (*scores)[kRegisters], int num, int count, float scale, Softmax* softmax, Floats* sums, Seen seen,
             Fetching fetching) {
    const int whole = round_up(round_up(count, kLanes), P::kDepth * P::kSteps), stride = H_ / kLanes;
    float factors[kHeight];
    for (int r = 0; r < num; ++r) factors[r] = softmax[r].take(scores[r], seen(r), scale);
    for (int r = 0; r < num; ++r) {
      softmax[r].weigh(scores[r], weights_[r], round_up(count, kLanes), seen(r), scale, factors[r], [&] { fetching.between(); });
      std::fill(weights_[r] + round_up(count, kLanes), weights_[r] + whole, Factor());
    }
    for (int r = num; r < kHeight; ++r) {
      factors[r] = 1.0f;
      std::fill_n(weights_[r], whole, Factor());
    }
    const int num_steps = round_up(count, P::kDepth * P::kSteps) / P::kDepth;
    for_parts(stride, [&](int from, auto width) {
      multiply<P, width>(sums + from, stride, factors, weights_[0], kKeys, &v_[from * (kKeys / P::kDepth)], num_steps,
                         fetching.during(num_steps));
    });
  }

 private:
  static constexpr int kBlock = kWide * kLanes;  // keys that are scored at a time
  static_assert(kKeys % kBlock == 0);

  // Packs W registers of two values, channel by channel; `odd` may be null: zeros.
  template <int W>
  static void interleave(Words* to, const Element* even, const Element* odd) {
    int w = 0;
    for (; odd && w + 1 < W; w += 2) interleave_pairs(to + w, even + w * kLanes, odd + w * kLanes);
    for (; w < W; ++w) {
      to[w] = (Words)load_floats(even + w * kLanes) >> 16;
      if (odd) to[w] |= (Words)load_floats(odd + w * kLanes);
    }
  }

  const int H_;
  const int depth_;
  std::vector<Words> k_;  // for each block of keys, for each channel (or pair of them), the block's keys
  std::vector<Words> v_;  // for each part of the channels, for each key (or pair of them), the part's channels
  alignas(64) Factor weights_[kHeight][kKeys];
};

}  // namespace
