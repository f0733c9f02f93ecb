// Linear layers that multiply in fp32, with what stands around them fused in:
//   y = x' W^T + b,  x' = x or RMSNorm(x);  then y, residual + y, or silu(gate) * up of y's two halves.
//
// Weights are bf16, or int8 with a scale for each output, and widened to fp32 in registers: 32 of them become two
// registers of floats, which R rows share. So from a few rows on the products run at the rate of fp32 FMAs, and below
// that at the rate at which memory gives the weights. Sums are fp32, in the order of k whatever the batch: a row's result
// depends on no other row.
//
// Weights are packed in panels of 32 outputs, input by input: bf16 as 16 words of two, output i of the panel's first half
// below that of its second; int8 one half behind the other. Gated: the halves are 16 gates and their 16 ups. A panel is
// multiplied kLanes outputs of each half at a time: a part. The activations of up to kTileRows rows are a tile, [K][R]
// floats; a tile stays in the first-level cache while it meets a group of panels from the second.
//
// M rows, N outputs, K inputs, P panels.

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "simd.h"

namespace {

constexpr int kHalf = 16;                    // outputs of a panel's half
// Rows whose sums are held in registers, two registers each; at most kLanes.
constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;
constexpr int64_t kBlockRows = 384;          // rows packed at a time
constexpr int64_t kFewRows = 48;              // are packed by one thread: waking the others takes longer
constexpr int64_t kGroupBytes = 512 * 1024;  // panels that stay in the second-level cache together

struct Problem {
  const uint16_t* x;
  const uint8_t* panels;      // [P][K][32] bf16 or int8
  const float* scales;        // [P][32] of int8, or null
  const float* bias;          // [P][32], or null
  const uint16_t* gain;       // [K] of the norm, or null
  const uint16_t* residual;   // [M][N], or null
  uint16_t* y;
  int64_t M, N, K, P, x_row, residual_row;
  float eps;
  bool gated;
  int64_t panel_bytes;
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
    first = widened(from + kLanes * part);
    second = widened(from + kHalf + kLanes * part);
  }
  // A loop, of which the compiler makes one instruction; of a conversion of vectors GCC 12 makes one for each lane.
  static Floats widened(const uint8_t* from) {
    int32_t values[kLanes];
    for (int i = 0; i < kLanes; ++i) values[i] = int8_t(from[i]);
    return __builtin_convertvector(load<Ints>(values), Floats);
  }
};

struct Tile {
  int64_t first;
  int rows;
  int64_t place;  // of its packed activations
};

// `count` numbers, zeros behind them.
inline Floats load_some(const uint16_t* from, int64_t count) {
  if (count >= kLanes) return load_floats(from);
  uint16_t some[kLanes] = {};
  std::copy_n(from, count, some);
  return load_floats(some);
}

// 1 / RMS of a row, 1 where there is no norm.
float scale_of(const Problem& p, const uint16_t* row) {
  if (!p.gain) return 1.0f;
  Floats squares = {};
  for (int64_t k = 0; k < p.K; k += kLanes) {
    const Floats x = load_some(row + k, p.K - k);
    squares += x * x;
  }
  return 1.0f / std::sqrt(sum_of(squares) / float(p.K) + p.eps);
}

// A tile's activations, normed, as [K][rows]; may write zeros up to kLanes behind them.
void pack(const Problem& p, Tile tile, float* to) {
  float scales[kTileRows];
  for (int r = 0; r < tile.rows; ++r) scales[r] = scale_of(p, p.x + (tile.first + r) * p.x_row);
  for (int64_t k = 0; k < p.K; k += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, p.K - k);
    const Floats gain = p.gain ? load_some(p.gain + k, count) : splat(1.0f);
    Words columns[kLanes] = {};
    for (int r = 0; r < tile.rows; ++r) {
      columns[r] = (Words)(load_some(p.x + (tile.first + r) * p.x_row + k, count) * scales[r] * gain);
    }
    transpose(columns);
    for (int64_t i = 0; i < count; ++i) store(to + (k + i) * tile.rows, columns[i]);
  }
}

inline Floats silu(Floats x) {
  constexpr float kLog2E = 1.44269504f;
  const Floats e = exp2_of((x < 0.0f ? x : -x) * kLog2E);
  return (x < 0.0f ? x * e : x) / (e + 1.0f);
}

inline void put(const Problem& p, int64_t row, int64_t column, Floats sums) {
  const int64_t count = p.N - column;
  if (count <= 0) return;
  if (p.residual) sums += load_some(p.residual + row * p.residual_row + column, count);
  uint16_t* to = p.y + row * p.N + column;
  if (count >= kLanes) return store_floats(to, sums);
  uint16_t some[kLanes];
  store_floats(some, sums);
  std::copy_n(some, count, to);
}

// What is done to a panel's sums of a tile.
template <int R>
void finish(const Problem& p, Tile tile, int64_t panel, int part, Floats (&low)[R], Floats (&high)[R]) {
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
      put(p, tile.first + r, panel * kHalf + part * kLanes, silu(low[r]) * high[r]);
    } else {
      put(p, tile.first + r, at, low[r]);
      put(p, tile.first + r, at + kHalf, high[r]);
    }
  }
}

// What is fetched meanwhile: `step` bytes an input.
struct Ahead {
  const uint8_t* from;
  int64_t step;
};

// A tile's R rows times one panel, to their place in y.
template <class Weights, int R>
void multiply(const Problem& p, Tile tile, const float* x, int64_t panel, Ahead ahead) {
  const uint8_t* weights = p.panels + panel * p.panel_bytes;
  for (int part = 0; part < kHalf / kLanes; ++part) {
    Floats low[R] = {}, high[R] = {};
    for (int64_t k = 0; k < p.K; ++k) {
      __builtin_prefetch(ahead.from + k * ahead.step, 0, 2);
      Floats first, second;
      Weights::widen(weights + k * Weights::kBytes, part, first, second);
      for (int r = 0; r < R; ++r) {
        const auto each = (Floats)in_register((Words)splat(x[k * R + r]));
        low[r] += first * each;
        high[r] += second * each;
      }
    }
    finish<R>(p, tile, panel, part, low, high);
  }
}

using Multiply = void (*)(const Problem&, Tile, const float*, int64_t, Ahead);

// By the tile's rows, from 1.
template <class Weights, int... R>
const Multiply* multiplies(std::integer_sequence<int, R...>) {
  static constexpr Multiply table[] = {multiply<Weights, R + 1>...};
  return table;
}

// Tiles of nearly equal height.
std::vector<Tile> divide(int64_t begin, int64_t end, int64_t K) {
  const int64_t rows = end - begin, num_tiles = (rows + kTileRows - 1) / kTileRows;
  std::vector<Tile> tiles;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t first = rows * i / num_tiles, last = rows * (i + 1) / num_tiles;
    tiles.push_back({begin + first, int(last - first), first * K + i * kLanes});
  }
  return tiles;
}

// work(i) for each i below count, on all threads.
template <class Work>
void share(int64_t count, const Work& work) {
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), count), 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) work(i);
  });
}

// Few rows: each panel comes from memory for them alone, and the tiles that it meets share the fetching of the next.
template <class Weights>
void run_few(const Problem& p, const Multiply* by_rows, const std::vector<Tile>& tiles, const float* packed) {
  const int64_t num_tiles = int64_t(tiles.size()), per_tile = p.K / num_tiles * Weights::kBytes;
  const int64_t num_runs = std::min<int64_t>(at::get_num_threads(), p.P);
  share(num_runs, [&](int64_t run) {
    const int64_t last = p.P * (run + 1) / num_runs;
    for (int64_t panel = p.P * run / num_runs; panel < last; ++panel) {
      const uint8_t* next = p.panels + std::min(panel + 1, last - 1) * p.panel_bytes;
      for (int64_t i = 0; i < num_tiles; ++i) {
        const Ahead ahead{next + i * per_tile, Weights::kBytes / num_tiles};
        by_rows[tiles[i].rows](p, tiles[i], packed + tiles[i].place, panel, ahead);
      }
    }
  });
}

// Many rows: a group of panels stays in the second-level cache while all tiles of a block pass.
template <class Weights>
void run_many(const Problem& p, const Multiply* by_rows, const std::vector<Tile>& tiles, const float* packed) {
  const int64_t in_cache = std::max<int64_t>(1, kGroupBytes / p.panel_bytes);
  const int64_t per_group = std::clamp<int64_t>(p.P / (4 * at::get_num_threads()), 1, in_cache);
  share((p.P + per_group - 1) / per_group, [&](int64_t group) {
    const int64_t last = std::min(p.P, (group + 1) * per_group);
    for (const Tile& tile : tiles) {
      for (int64_t panel = group * per_group; panel < last; ++panel) {
        by_rows[tile.rows](p, tile, packed + tile.place, panel, {p.panels + panel * p.panel_bytes, 0});
      }
    }
  });
}

template <class Weights>
void run(Problem p) {
  p.panel_bytes = p.K * Weights::kBytes;
  const Multiply* by_rows = multiplies<Weights>(std::make_integer_sequence<int, kTileRows>()) - 1;
  std::vector<float> packed(std::min(p.M, kBlockRows) * (p.K + kLanes));
  for (int64_t begin = 0; begin < p.M; begin += kBlockRows) {
    const std::vector<Tile> tiles = divide(begin, std::min(p.M, begin + kBlockRows), p.K);
    const auto pack_tile = [&](int64_t i) { pack(p, tiles[i], packed.data() + tiles[i].place); };
    if (p.M <= kFewRows) {
      for (int64_t i = 0; i < int64_t(tiles.size()); ++i) pack_tile(i);
      run_few<Weights>(p, by_rows, tiles, packed.data());
    } else {
      share(int64_t(tiles.size()), pack_tile);
      run_many<Weights>(p, by_rows, tiles, packed.data());
    }
  }
}

// A vector's data, null where there is none.
template <class T>
const T* data(const std::optional<at::Tensor>& vector, at::ScalarType type, int64_t size) {
  if (!vector) return nullptr;
  TORCH_CHECK(vector->dtype() == type && vector->is_contiguous() && vector->numel() == size, "expected ", size, " of ",
              type);
  return static_cast<const T*>(vector->const_data_ptr());
}

at::Tensor linear(const at::Tensor& x_MK, const at::Tensor& panels_PKL, int64_t N,
                  const std::optional<at::Tensor>& scales, const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& gain_K, double eps,
                  const std::optional<at::Tensor>& residual_MN, bool gated) {
  TORCH_CHECK(x_MK.dtype() == at::kBFloat16 && x_MK.dim() == 2 && x_MK.stride(1) == 1, "x must be bfloat16 rows");
  TORCH_CHECK(panels_PKL.dim() == 3 && panels_PKL.is_contiguous() && panels_PKL.size(1) == x_MK.size(1) &&
                  panels_PKL.size(2) == 2 * kHalf,
              "the weights are packed for another number of inputs");
  TORCH_CHECK(panels_PKL.dtype() == at::kBFloat16 || (panels_PKL.dtype() == at::kChar && scales),
              "weights are bfloat16, or int8 with scales");
  const int64_t M = x_MK.size(0), K = x_MK.size(1), P = panels_PKL.size(0);
  TORCH_CHECK(N <= P * (gated ? 1 : 2) * kHalf, "the weights have fewer outputs than ", N);
  if (residual_MN) {
    TORCH_CHECK(residual_MN->dtype() == at::kBFloat16 && residual_MN->sizes() == at::IntArrayRef({M, N}) &&
                    residual_MN->stride(1) == 1,
                "residual must be bfloat16 rows like the result");
  }
  auto y_MN = at::empty({M, N}, x_MK.options());
  const Problem p{static_cast<const uint16_t*>(x_MK.const_data_ptr()),
       static_cast<const uint8_t*>(panels_PKL.const_data_ptr()), data<float>(scales, at::kFloat, P * 2 * kHalf),
       data<float>(bias, at::kFloat, P * 2 * kHalf), data<uint16_t>(gain_K, at::kBFloat16, K),
       residual_MN ? static_cast<const uint16_t*>(residual_MN->const_data_ptr()) : nullptr,
       static_cast<uint16_t*>(y_MN.data_ptr()), M, N, K, P, x_MK.stride(0), residual_MN ? residual_MN->stride(0) : 0,
       float(eps), gated, 0};
  panels_PKL.dtype() == at::kChar ? run<Int8>(p) : run<Bf16>(p);
  return y_MN;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(BATON_OPERATORS, m) {
  m.def(
      "linear(Tensor x_MK, Tensor panels_PKL, int N, Tensor? scales, Tensor? bias, Tensor? gain_K, float eps, Tensor? residual_MN, "
      "bool gated) -> Tensor");
}

TORCH_LIBRARY_IMPL(BATON_OPERATORS, CPU, m) { m.impl("linear", &linear); }
