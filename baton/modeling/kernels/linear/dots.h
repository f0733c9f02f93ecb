// Multiplies a block of rows by a panel of weights, pair of inputs by pair of inputs: by the processor's dot product of
// bf16 pairs where it has one (VDPBF16PS), else by two multiply-adds, so that every processor can test the rest.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "linear/panels.h"

namespace {

// Returns a pair of inputs' weights for kLanes outputs, which begin at `output` of the panel.
inline Words pair_words(Bf16, const uint8_t* weights, int output) { return load<Words>(weights + 4 * output); }

inline Words pair_words(Int8, const uint8_t* weights, int output) {
  const auto even = (Words)load_floats((const int8_t*)weights + output);
  const auto odd = (Words)load_floats((const int8_t*)weights + Int8::kBytes + output);
  return even >> 16 | odd;  // bf16 holds all 8 bits
}

// Packs a block's activations, normed and rounded, as [depth / 2][rows] pairs; may write up to kLanes behind them.
void pack_pairs(const LinearProblem& p, Block block, uint32_t* to) {
  float scales[kVectorRows];
  for (int r = 0; r < block.rows; ++r) scales[r] = scale_of(p, p.x + (block.first + r) * p.x_row);
  for (int64_t k = 0; k < p.depth; k += 2 * kLanes) {
    Words columns[kLanes] = {};
    for (int r = 0; r < block.rows; ++r) {
      const uint16_t* row = p.x + (block.first + r) * p.x_row;
      if (!p.gain && k + 2 * kLanes <= p.K) {
        columns[r] = load<Words>(row + k);
        continue;
      }
      uint16_t numbers[2 * kLanes] = {};
      for (int64_t at = k; at < std::min(p.K, k + 2 * kLanes); at += kLanes) {
        const Floats gain = p.gain ? load_some(p.gain + at, p.K - at) : splat(1.0f);
        store_floats(numbers + (at - k), load_some(row + at, p.K - at) * scales[r] * gain);
      }
      columns[r] = load<Words>(numbers);
    }
    transpose(columns);
    for (int64_t i = 0; i < kLanes; ++i) store(to + (k / 2 + i) * block.rows, columns[i]);
  }
}

// Multiplies a block's R rows by a strip of a panel. After the last strip, stores them to their place in y.
template <class Weights, int R>
void multiply_pairs(const LinearProblem& p, int64_t first, const uint32_t* x, int64_t panel, Strip strip) {
  for (int part = 0; part < kHalf / kLanes; ++part) {
    Floats low[R] = {}, high[R] = {};
    take_sums<R>(strip, part, low, high);
    for (int64_t k = strip.begin; k < strip.end; k += 2) {
      __builtin_prefetch(strip.ahead.from + k * strip.ahead.step, 0, 2);
      __builtin_prefetch(strip.ahead.from + (k + 1) * strip.ahead.step, 0, 2);
      const uint8_t* pair = strip.weights + (k - strip.begin) * Weights::kBytes;
      const Words below = pair_words(Weights(), pair, part * kLanes);
      const Words above = pair_words(Weights(), pair, part * kLanes + kHalf);
      for (int r = 0; r < R; ++r) {
        const Words each = in_register(x[k / 2 * R + r] - Words{});
        low[r] = add_pairs(low[r], below, each);
        high[r] = add_pairs(high[r], above, each);
      }
    }
    give_sums<R>(p, strip, first, panel, part, low, high);
  }
}

using MultiplyPairs = void (*)(const LinearProblem&, int64_t, const uint32_t*, int64_t, Strip);

// Returns the functions for blocks of 1, 2, ... rows.
template <class Weights, int... R>
const MultiplyPairs* multiplies_of_pairs(std::integer_sequence<int, R...>) {
  static constexpr MultiplyPairs table[] = {multiply_pairs<Weights, R + 1>...};
  return table;
}

// A way to multiply (panels.h). Panels lie as for tiles.
template <class Weights>
struct InPairs {
  using Packed = uint32_t;
  struct Scope {};
  static constexpr int kMostRows = kVectorRows;
  static int64_t depth(int64_t K) { return (K + kTileInputs - 1) / kTileInputs * kTileInputs; }
  static int64_t size(int64_t rows, int64_t K) { return rows * depth(K) / 2 + kLanes; }
  static void pack(const LinearProblem& p, Block block, uint32_t* to) { pack_pairs(p, block, to); }
  static void multiply(const LinearProblem& p, Block block, const uint32_t* x, int64_t panel, Strip strip) {
    static const MultiplyPairs* by_rows =
        multiplies_of_pairs<Weights>(std::make_integer_sequence<int, kVectorRows>()) - 1;
    by_rows[block.rows](p, block.first, x, panel, strip);
  }
};

}  // namespace
