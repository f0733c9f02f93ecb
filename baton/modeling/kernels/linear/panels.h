// Multiplies a block of rows by a panel of weights, widened or in tiles (linear.cpp says how both are laid out); dots.h
// has a third way.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "common/simd.h"
#include "common/tiles.h"
#include "linear/codes.h"

namespace {

constexpr int kHalf = 16;        // outputs of half a panel
constexpr int kTileInputs = 32;  // the inputs of a panel for tiles and pairs are a multiple of this
// Rows whose sums are held in registers, two registers each; at most kLanes.
constexpr int kVectorRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;

using Dequantise = void (*)(const Codes&, const uint8_t* panel_codes, int64_t panel, int64_t begin, int64_t end,
                            int64_t ahead, uint16_t* to);

struct LinearProblem {
  const uint16_t* x;
  const uint8_t* panels;     // [P][K][32] bf16 or int8, or codes
  const float* scales;       // [P][32] of int8, or null
  const float* bias;         // [P][32], or null
  const uint16_t* gain;      // [K] of the norm, or null
  const uint16_t* residual;  // [M][N], or null
  uint16_t* y;
  int64_t M, N, K, P, x_row, residual_row;
  float eps;
  bool gated;
  int64_t depth = 0;        // inputs of a panel: K, filled up to a whole number of tiles where tiles multiply
  int64_t panel_bytes = 0;  // bytes of these inputs' weights, as they are stored
  Codes codes{};            // of panels that hold codes
  int64_t code_rows = 0;            // rows that are multiplied by codes as they are, at most
  Dequantise dequantise = nullptr;  // of codes, for more rows

  // Returns whether the rows are multiplied by codes as they are, and whether codes are dequantised for them.
  bool takes_codes() const { return M <= code_rows; }
  bool dequantises() const { return dequantise && !takes_codes(); }
};

// How weights of one input become floats: kLanes of a panel's first half, and of its second.
struct Bf16 {
  static constexpr int kBytes = 4 * kHalf;
  static void widen(const uint8_t* from, int part, Floats& first, Floats& second) {
    const Words words = load<Words>(from + 4 * kLanes * part);
    first = (Floats)(words << 16);
    second = (Floats)(words & 0xffff0000);
  }
};

struct Int8 {
  static constexpr int kBytes = 2 * kHalf;
  static void widen(const uint8_t* from, int part, Floats& first, Floats& second) {
    first = load_floats((const int8_t*)from + kLanes * part);
    second = load_floats((const int8_t*)from + kHalf + kLanes * part);
  }
};

// Rows that are multiplied by a panel together.
struct Block {
  int64_t first;
  int rows;
  int64_t place;  // offset of its packed activations
};

// Loads `count` numbers, with zeros behind them.
inline Floats load_some(const uint16_t* from, int64_t count) {
  if (count >= kLanes) return load_floats(from);
  uint16_t some[kLanes] = {};
  std::copy_n(from, count, some);
  return load_floats(some);
}

// Returns 1 / RMS of a row, 1 where there is no norm.
float scale_of(const LinearProblem& p, const uint16_t* row) {
  if (!p.gain) return 1.0f;
  Floats squares = {};
  for (int64_t k = 0; k < p.K; k += kLanes) {
    const Floats x = load_some(row + k, p.K - k);
    squares += x * x;
  }
  return 1.0f / std::sqrt(sum_of(squares) / float(p.K) + p.eps);
}

// Packs a block's activations, normed, as [K][rows]; may write zeros up to kLanes behind them.
void pack_floats(const LinearProblem& p, Block block, float* to) {
  float scales[kVectorRows];
  for (int r = 0; r < block.rows; ++r) scales[r] = scale_of(p, p.x + (block.first + r) * p.x_row);
  for (int64_t k = 0; k < p.K; k += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, p.K - k);
    const Floats gain = p.gain ? load_some(p.gain + k, count) : splat(1.0f);
    Words columns[kLanes] = {};
    for (int r = 0; r < block.rows; ++r) {
      columns[r] = (Words)(load_some(p.x + (block.first + r) * p.x_row + k, count) * scales[r] * gain);
    }
    transpose(columns);
    for (int64_t i = 0; i < count; ++i) store(to + (k + i) * block.rows, columns[i]);
  }
}

inline Floats silu(Floats x) {
  constexpr float kLog2E = 1.44269504f;
  const Floats e = exp2_of((x < 0.0f ? x : -x) * kLog2E);
  return (x < 0.0f ? x * e : x) / (e + 1.0f);
}

inline void put(const LinearProblem& p, int64_t row, int64_t column, Floats sums) {
  const int64_t count = p.N - column;
  if (count <= 0) return;
  if (p.residual) sums += load_some(p.residual + row * p.residual_row + column, count);
  uint16_t* to = p.y + row * p.N + column;
  if (count >= kLanes) return store_floats(to, sums);
  uint16_t some[kLanes];
  store_floats(some, sums);
  std::copy_n(some, count, to);
}

// Applies scale, bias, gate and residual to a panel's sums of a block, and stores them.
template <int R>
void finish(const LinearProblem& p, int64_t first, int64_t panel, int part, Floats (&low)[R], Floats (&high)[R]) {
  const int64_t at = panel * 2 * kHalf + part * kLanes;
  const auto of_outputs = [&](const float* values, int half, float otherwise) {
    return values ? load<Floats>(values + at + half * kHalf) : splat(otherwise);
  };
  const Floats low_scale = of_outputs(p.scales, 0, 1.0f), low_bias = of_outputs(p.bias, 0, 0.0f);
  const Floats high_scale = of_outputs(p.scales, 1, 1.0f), high_bias = of_outputs(p.bias, 1, 0.0f);
  for (int r = 0; r < R; ++r) {
    low[r] = low[r] * low_scale + low_bias;
    high[r] = high[r] * high_scale + high_bias;
    if (p.gated) {
      put(p, first + r, panel * kHalf + part * kLanes, silu(low[r]) * high[r]);
    } else {
      put(p, first + r, at, low[r]);
      put(p, first + r, at + kHalf, high[r]);
    }
  }
}

// Memory to fetch during the products: `step` bytes an input.
struct Ahead {
  const uint8_t* from;
  int64_t step;
};

// A panel's inputs [begin, end), which a block of rows is multiplied by.
struct Strip {
  const uint8_t* weights;  // of these inputs
  int64_t begin, end;
  float* sums;             // [rows][32], of the inputs before; and then of these, unless they are the panel's last
  Ahead ahead;
};

template <int R>
void take_sums(const Strip& strip, int part, Floats (&low)[R], Floats (&high)[R]) {
  for (int r = 0; r < R && strip.begin > 0; ++r) {
    low[r] = load<Floats>(strip.sums + r * kOutputs + part * kLanes);
    high[r] = load<Floats>(strip.sums + r * kOutputs + kHalf + part * kLanes);
  }
}

// Keeps the sums for the next strip, or finishes them after the last.
template <int R>
void give_sums(const LinearProblem& p, const Strip& strip, int64_t first, int64_t panel, int part, Floats (&low)[R],
               Floats (&high)[R]) {
  if (strip.end == p.depth) return finish<R>(p, first, panel, part, low, high);
  for (int r = 0; r < R; ++r) {
    store(strip.sums + r * kOutputs + part * kLanes, low[r]);
    store(strip.sums + r * kOutputs + kHalf + part * kLanes, high[r]);
  }
}

// Multiplies a block's R rows by a strip of a panel. After the last strip, stores them to their place in y.
template <class Weights, int R>
void multiply_floats(const LinearProblem& p, int64_t first, const float* x, int64_t panel, Strip strip) {
  for (int part = 0; part < kHalf / kLanes; ++part) {
    Floats low[R] = {}, high[R] = {};
    take_sums<R>(strip, part, low, high);
    for (int64_t k = strip.begin; k < strip.end; ++k) {
      __builtin_prefetch(strip.ahead.from + k * strip.ahead.step, 0, 2);
      Floats below, above;
      Weights::widen(strip.weights + (k - strip.begin) * Weights::kBytes, part, below, above);
      for (int r = 0; r < R; ++r) {
        const auto each = (Floats)in_register((Words)splat(x[k * R + r]));
        low[r] += below * each;
        high[r] += above * each;
      }
    }
    give_sums<R>(p, strip, first, panel, part, low, high);
  }
}

using MultiplyFloats = void (*)(const LinearProblem&, int64_t, const float*, int64_t, Strip);

// Returns the functions for blocks of 1, 2, ... rows.
template <class Weights, int... R>
const MultiplyFloats* multiplies(std::integer_sequence<int, R...>) {
  static constexpr MultiplyFloats table[] = {multiply_floats<Weights, R + 1>...};
  return table;
}

// A way to multiply has
//   Packed          type in which activations are packed;
//   kMostRows       most rows of a block;
//   depth           inputs of a panel;
//   size            numbers that a block's packed activations take;
//   pack, multiply  pack a block's activations; multiply a block by a strip of a panel;
//   Scope           object that a thread must hold while it multiplies.
template <class Weights>
struct Widened {
  using Packed = float;
  struct Scope {};
  static constexpr int kMostRows = kVectorRows;
  static int64_t depth(int64_t K) { return K; }
  static int64_t size(int64_t rows, int64_t K) { return rows * K + kLanes; }
  static void pack(const LinearProblem& p, Block block, float* to) { pack_floats(p, block, to); }
  static void multiply(const LinearProblem& p, Block block, const float* x, int64_t panel, Strip strip) {
    static const MultiplyFloats* by_rows = multiplies<Weights>(std::make_integer_sequence<int, kVectorRows>()) - 1;
    by_rows[block.rows](p, block.first, x, panel, strip);
  }
};

#ifdef __AMX_BF16__
// Returns a panel's next kTileDepth inputs as two tiles' rows, each row one half of the outputs behind the other.
const uint16_t* as_pairs(Bf16, const uint8_t* weights, uint16_t*) { return reinterpret_cast<const uint16_t*>(weights); }

const uint16_t* as_pairs(Int8, const uint8_t* weights, uint16_t* to) {
  for (int k = 0; k < kTileDepth; k += 2, weights += 2 * Int8::kBytes) {
    for (int half = 0; half < 2; ++half) {
      const auto even = (Words)load_floats((const int8_t*)weights + half * kHalf);
      const auto odd = (Words)load_floats((const int8_t*)weights + Int8::kBytes + half * kHalf);
      store(to + (k + half) * 2 * kHalf, even >> 16 | odd);  // bf16 holds all 8 bits
    }
  }
  return to;
}

template <class Weights>
struct InTiles {
  using Packed = uint16_t;
  using Scope = TileScope;
  static constexpr int kMostRows = 2 * kTileHeight;
  static constexpr int kNumbers = kTileHeight * kTileDepth;
  static int64_t depth(int64_t K) { return (K + kTileDepth - 1) / kTileDepth * kTileDepth; }
  static int64_t size(int64_t rows, int64_t K) { return (rows + kTileHeight - 1) / kTileHeight * kTileHeight * depth(K); }

  static void pack(const LinearProblem& p, Block block, uint16_t* to) {
    std::fill_n(to, size(block.rows, p.K), 0);
    for (int r = 0; r < block.rows; ++r) {
      const uint16_t* row = p.x + (block.first + r) * p.x_row;
      uint16_t* place = to + r / kTileHeight * kTileHeight * p.depth + r % kTileHeight * kTileDepth;
      const float scale = scale_of(p, row);
      for (int64_t k = 0; k < p.K; k += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, p.K - k);
        const Floats gain = p.gain ? load_some(p.gain + k, count) : splat(1.0f);
        store_floats(place + k / kTileDepth * kNumbers + k % kTileDepth, load_some(row + k, count) * scale * gain);
      }
    }
  }

  static void multiply(const LinearProblem& p, Block block, const uint16_t* x, int64_t panel, Strip strip) {
    x += strip.begin / kTileDepth * kNumbers;
    const uint16_t* below = x + kTileHeight * p.depth;  // rows from number 16 on
    const bool is_tall = block.rows > kTileHeight;
    alignas(64) uint16_t pairs[2 * kNumbers];
    alignas(64) float own_sums[kMostRows][kOutputs];
    float* sums = strip.begin > 0 || strip.end < p.depth ? strip.sums : own_sums[0];
    take_tiles(strip.begin == 0, sums, is_tall);
    for (int64_t k = strip.begin; k < strip.end; k += kTileDepth, x += kNumbers, below += kNumbers) {
      for (int64_t at = k * strip.ahead.step; at < (k + kTileDepth) * strip.ahead.step; at += 64) {
        __builtin_prefetch(strip.ahead.from + at, 0, 2);
      }
      const uint16_t* both = as_pairs(Weights(), strip.weights + (k - strip.begin) * Weights::kBytes, pairs);
      settle_memory();  // weights are streamed: only activations shall stay in the first-level cache
      _tile_loadd(4, x, 2 * kTileDepth);
      _tile_stream_loadd(6, both, 4 * kTileDepth);
      _tile_dpbf16ps(0, 4, 6);
      _tile_stream_loadd(7, both + 2 * kHalf, 4 * kTileDepth);
      _tile_dpbf16ps(1, 4, 7);
      if (!is_tall) continue;
      _tile_loadd(5, below, 2 * kTileDepth);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, kSumsBytes);
    _tile_stored(1, sums + kHalf, kSumsBytes);
    if (is_tall) {
      _tile_stored(2, sums + kTileHeight * kOutputs, kSumsBytes);
      _tile_stored(3, sums + kTileHeight * kOutputs + kHalf, kSumsBytes);
    }
    settle_memory();
    if (strip.end < p.depth) return;
    for (int r = 0; r < block.rows; ++r) {
      Floats low[] = {load<Floats>(sums + r * kOutputs)}, high[] = {load<Floats>(sums + r * kOutputs + kHalf)};
      finish<1>(p, block.first + r, panel, 0, low, high);
    }
  }

 private:
  static constexpr int kSumsBytes = 4 * kOutputs;

  // Sets the tiles of sums: to 0, or to the sums of the strips before.
  static void take_tiles(bool is_first, const float* sums, bool is_tall) {
    if (is_first) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      return;
    }
    settle_memory();
    _tile_loadd(0, sums, kSumsBytes);
    _tile_loadd(1, sums + kHalf, kSumsBytes);
    if (!is_tall) return;
    _tile_loadd(2, sums + kTileHeight * kOutputs, kSumsBytes);
    _tile_loadd(3, sums + kTileHeight * kOutputs + kHalf, kSumsBytes);
  }
};
#endif

constexpr int64_t kFewRows = 48;        // rows packed by one thread, because waking others would take longer
constexpr int64_t kMostFewRows = 288;   // of a generation step: 32 sequences with a token and eight drafts each
constexpr int64_t kStripInputs = 128;   // dequantised at a time for few rows: they stay in the first-level cache

// Divides rows into blocks of nearly equal height.
template <class Way>
std::vector<Block> divide(int64_t begin, int64_t end, int64_t K) {
  const int64_t rows = end - begin, num_blocks = (rows + Way::kMostRows - 1) / Way::kMostRows;
  std::vector<Block> blocks;
  int64_t place = 0;
  for (int64_t i = 0; i < num_blocks; ++i) {
    const int64_t first = rows * i / num_blocks, last = rows * (i + 1) / num_blocks;
    blocks.push_back({begin + first, int(last - first), place});
    place += Way::size(last - first, K);
  }
  return blocks;
}

// Multiplies few rows by the panels [first, last), whose codes are dequantised strip by strip.
template <class Way>
void multiply_few_codes(const LinearProblem& p, const std::vector<Block>& blocks, const typename Way::Packed* packed,
                        int64_t first, int64_t last) {
  alignas(64) uint16_t weights[kStripInputs * kOutputs];
  const auto* bytes = reinterpret_cast<const uint8_t*>(weights);
  alignas(64) float sums[(kMostFewRows + Way::kMostRows) * kOutputs];
  for (int64_t panel = first; panel < last; ++panel) {
    const uint8_t* codes = p.panels + panel * p.panel_bytes;
    const int64_t ahead = panel + 1 < last ? p.panel_bytes : 0;
    for (int64_t begin = 0; begin < p.depth; begin += kStripInputs) {
      const int64_t end = std::min(p.depth, begin + kStripInputs);
      p.dequantise(p.codes, codes, panel, begin, end, ahead, weights);
      for (int64_t i = 0; i < int64_t(blocks.size()); ++i) {
        const Strip strip{bytes, begin, end, sums + i * Way::kMostRows * kOutputs, {bytes, 0}};
        Way::multiply(p, blocks[i], packed + blocks[i].place, panel, strip);
      }
    }
  }
}

// Multiplies few rows by the panels [first, last). Each panel comes from memory for these rows alone; the blocks that
// it meets share the fetching of the next panel.
template <class Way>
void multiply_few(const LinearProblem& p, const std::vector<Block>& blocks, const typename Way::Packed* packed,
                  int64_t first, int64_t last) {
  [[maybe_unused]] typename Way::Scope scope;
  if (p.dequantises()) return multiply_few_codes<Way>(p, blocks, packed, first, last);
  const int64_t num_blocks = int64_t(blocks.size()), input_bytes = p.panel_bytes / p.depth;
  for (int64_t panel = first; panel < last; ++panel) {
    const uint8_t* next = p.panels + std::min(panel + 1, last - 1) * p.panel_bytes;
    for (int64_t i = 0; i < num_blocks; ++i) {
      const Ahead ahead{next + p.depth / num_blocks * i * input_bytes, input_bytes / num_blocks};
      const Strip whole{p.panels + panel * p.panel_bytes, 0, p.depth, nullptr, ahead};
      Way::multiply(p, blocks[i], packed + blocks[i].place, panel, whole);
    }
  }
}

}  // namespace
