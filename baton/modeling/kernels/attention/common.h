// Shared by the attention kernels: ways to multiply, and the online softmax.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "common/simd.h"
#include "common/tiles.h"

namespace {

// as in baton/modeling/forward/attention.py: finite, so that merging two of them makes no NaN
constexpr float kNothing = -1e30f;
constexpr float kLog2E = 1.44269504f;

// A product has
//   Element  type in which keys, values, queries and outputs are stored;
//   Factor   type of the numbers that are broadcast: elements of a query, weights of keys;
//   kDepth   number of neighbours that are multiplied at a time, packed into one 32-bit lane;
//   add      sums + factor * packed, where `factor` points to kDepth factors;
//   spread   packs a word of stored elements: returns kSpread words, each of kDepth elements;
//   kHeight  rows of a block of products, and kSteps, which divides a block's depth (in steps of kDepth);
//   Scope    object that a thread must hold while it multiplies blocks.

// Blocks of products made of vectors.
struct OfVectors {
  static constexpr int kHeight = kRows, kSteps = 1;
  struct Scope {};
};

// Products of fp32, to which elements are widened.
template <class E>
struct Fma : OfVectors {
  using Element = E;
  using Factor = float;
  static constexpr int kDepth = 1;
  static constexpr int kSpread = 4 / sizeof(E);

  static Floats add(Floats sum, const float* factor, Words packed) { return (Floats)packed * *factor + sum; }

  static Words spread(Words word, int part) {
    if constexpr (kSpread == 1) return word;
    return part == 0 ? word << 16 : word & 0xffff0000;
  }
};

#ifdef __AVX512BF16__
// The processor's dot products of pairs of bf16.
struct Dot : OfVectors {
  using Element = uint16_t;
  using Factor = uint16_t;
  static constexpr int kDepth = 2;
  static constexpr int kSpread = 1;

  static Floats add(Floats sum, const uint16_t* factor, Words packed) {
    int32_t pair;
    std::memcpy(&pair, factor, sizeof(pair));
    return add_pairs(sum, (Words)_mm512_set1_epi32(pair), packed);
  }

  static Words spread(Words word, int) { return word; }
};
#endif

#ifdef __AMX_BF16__
// Dot products of pairs of bf16, in tiles.
struct Tiles : Dot {
  static constexpr int kHeight = kTileHeight, kSteps = kTileDepth / kDepth;
  using Scope = TileScope;
};
#endif

// Calls `run` with the product for elements of this size. For bf16 it is chosen by the name that
// baton/modeling/kernels/products.py gives it, if it was compiled.
template <class Run>
void with_product(bool is_bf16, std::string_view name, Run run) {
  if (!is_bf16) return run(Fma<float>());
#ifdef __AMX_BF16__
  if (name == "tiles") return run(Tiles());
#endif
#ifdef __AVX512BF16__
  if (name != "widened") return run(Dot());
#endif
  run(Fma<uint16_t>());
}

inline int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

// Loads `num` words (kLanes, or half of that) from memory.
inline Words load_words(const void* from, int num) {
  if (num == kLanes) return load<Words>(from);
  Words words = {};
  std::memcpy(&words, from, sizeof(words) / 2);
  return words;
}

// Calls `run` with the first register and the number of registers of each part of a row of `num` registers. Parts have
// at most kWide registers and are as even as they can be, so that each keeps many sums going.
template <class Run>
void for_parts(int num, Run run) {
  const int num_parts = (num + kWide - 1) / kWide;
  for (int part = 0; part < num_parts; ++part) {
    const int from = num * part / num_parts;
    switch (num * (part + 1) / num_parts - from) {
      case 1: run(from, std::integral_constant<int, 1>()); break;
      case 2: run(from, std::integral_constant<int, 2>()); break;
      case 3: run(from, std::integral_constant<int, 3>()); break;
      default: run(from, std::integral_constant<int, kWide>());
    }
  }
}

// Memory to fetch during products: `step` bytes after each step.
struct Lines {
  const char* from = nullptr;
  int step = 0;
};

// sums[r] = sums[r] * scales[r] + sum over i < num_steps of factors[r * stride + i * kDepth] * packed[i], for kHeight
// rows of W registers, `row` registers apart. Not inlined, so that the compiler gives all registers to this loop.
template <class P, int W>
[[gnu::noinline]] void multiply_vectors(Floats* to, int row, const float* scales, const typename P::Factor* factors,
                                int64_t stride, const Words* packed, int num_steps, Lines lines) {
  Floats sums[kRows][W];
  for (int r = 0; r < kRows; ++r) {
    for (int w = 0; w < W; ++w) sums[r][w] = scales ? to[r * row + w] * scales[r] : Floats{};
  }
  for (int i = 0; i < num_steps; ++i, factors += P::kDepth, packed += W, lines.from += lines.step) {
    __builtin_prefetch(lines.from, 0, 2);
    Words operands[W];
    for (int w = 0; w < W; ++w) operands[w] = in_register(packed[w]);
    for (int r = 0; r < kRows; ++r) {
      for (int w = 0; w < W; ++w) sums[r][w] = P::add(sums[r][w], factors + r * stride, operands[w]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int w = 0; w < W; ++w) to[r * row + w] = sums[r][w];
  }
}

#ifdef __AMX_BF16__
template <int W>
[[gnu::noinline]] void multiply_tiles(Floats* to, int row, const float* scales, const uint16_t* factors, int64_t stride,
                                      const Words* packed, int num_steps) {
  static_assert(W <= 4);
  const int64_t to_bytes = row * sizeof(Floats), factor_bytes = stride * sizeof(*factors);
  for (int r = 0; scales && r < kTileHeight; ++r) {
    if (scales[r] == 1.0f) continue;  // most often, and tiles wait for what was stored
    for (int w = 0; w < W; ++w) to[r * row + w] *= scales[r];
  }
  settle_memory();
  if (scales) {
    _tile_loadd(0, to, to_bytes);
    if constexpr (W > 1) _tile_loadd(1, to + 1, to_bytes);
    if constexpr (W > 2) _tile_loadd(2, to + 2, to_bytes);
    if constexpr (W > 3) _tile_loadd(3, to + 3, to_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int i = 0; i < num_steps; i += Tiles::kSteps, factors += kTileDepth, packed += Tiles::kSteps * W) {
    _tile_loadd(4, factors, factor_bytes);
    _tile_loadd(5, packed, W * sizeof(Words));
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (W > 1) _tile_loadd(6, packed + 1, W * sizeof(Words));
    if constexpr (W > 1) _tile_dpbf16ps(1, 4, 6);
    if constexpr (W > 2) _tile_loadd(7, packed + 2, W * sizeof(Words));
    if constexpr (W > 2) _tile_dpbf16ps(2, 4, 7);
    if constexpr (W > 3) _tile_loadd(5, packed + 3, W * sizeof(Words));
    if constexpr (W > 3) _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, to, to_bytes);
  if constexpr (W > 1) _tile_stored(1, to + 1, to_bytes);
  if constexpr (W > 2) _tile_stored(2, to + 2, to_bytes);
  if constexpr (W > 3) _tile_stored(3, to + 3, to_bytes);
  settle_memory();
}
#endif

template <class P, int W>
void multiply(Floats* to, int row, const float* scales, const typename P::Factor* factors, int64_t stride,
              const Words* packed, int num_steps, Lines lines) {
#ifdef __AMX_BF16__
  if constexpr (std::is_same_v<P, Tiles>) return multiply_tiles<W>(to, row, scales, factors, stride, packed, num_steps);
#endif
  multiply_vectors<P, W>(to, row, scales, factors, stride, packed, num_steps, lines);
}

// The state of a row's online softmax (Milakov and Gimelshein, 2018), in powers of two: score * scale * log2(e).
struct Softmax {
  float largest = kNothing;
  Floats total = {};  // sum of the weights, lane by lane

  // Takes in a row's scores of a tile, of which the first `visible` count. Returns the factor for the row's earlier
  // sums. Separate from `weigh`, because this loop waits for a row's largest score, and other rows' can be found
  // meanwhile.
  float take(const Floats* scores, int visible, float scale) {
    const int whole = visible / kLanes;
    Floats most = splat(kNothing);
    for (int j = 0; j < whole; ++j) most = larger(most, scores[j]);
    if (visible % kLanes) most = larger(most, lanes() < visible % kLanes ? scores[whole] : splat(kNothing));
    const float before = largest;
    largest = std::max(before, largest_of(most) * scale);
    return largest == before ? 1.0f : std::exp2(before - largest);
  }

  // Stores the weights of `count` scores last taken, a multiple of kLanes; 0 for those that are not visible. Calls
  // between() after each register.
  template <class Factor, class Between>
  void weigh(const Floats* scores, Factor* weights, int count, int visible, float scale, float factor, Between between) {
    const int whole = visible / kLanes;
    Floats sum = total * factor;
    for (int j = 0; j < whole; ++j) {
      const Floats weight = exp2_of(scores[j] * scale - largest);
      store_floats(weights + j * kLanes, weight);
      sum += weight;
      between();
    }
    for (int j = whole; j < count / kLanes; ++j) {
      Floats weight = {};
      if (j * kLanes < visible) weight = lanes() < visible - j * kLanes ? exp2_of(scores[j] * scale - largest) : weight;
      store_floats(weights + j * kLanes, weight);
      sum += weight;
      between();
    }
    total = sum;
  }

  float sum() const { return sum_of(total); }

  // Returns the natural logarithm of the sum of exponentials of the scores.
  float lse() const { return largest / kLog2E + std::log(sum()); }
};

}  // namespace
