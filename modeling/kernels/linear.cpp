// Linear layers that multiply in fp32, with what stands around them fused in:
//   y = x' W^T + b,  x' = x or RMSNorm(x);  then y, residual + y, or silu(gate) * up of y's two halves.
//
// Weights are bf16, or int8 with a scale for each output, and widened to fp32 in registers: 32 of them become two
// registers of floats, which R rows share. So from a few rows on the products run at the rate of fp32 FMAs, and below
// that at the rate at which memory gives the weights. Sums are fp32, in the order of k whatever the batch: a row's result
// depends on no other row.
//
// Weights are packed in panels of 32 outputs, input by input: bf16 as 16 words of two, output i of the panel's first half
// below that of its second; int8 one half behind the other. Gated: the halves are 16 gates and their 16 ups. The
// activations of up to kTileRows rows are a tile, [K][R] floats; a tile stays in the first-level cache while it meets a
// group of panels from the second.
//
// M rows, N outputs, K inputs, P panels.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "avx512.h"

namespace {

constexpr int kTileRows = 12;                // rows whose sums are held in registers, two registers each
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

// How 32 weights of one input become the floats of a panel's two halves.
struct Bf16 {
  static constexpr int kBytes = 64;
  static void widen(const uint8_t* from, __m512& first, __m512& second) {
    const __m512i words = _mm512_loadu_si512(from);
    first = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    second = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(int(0xffff0000))));
  }
};

struct Int8 {
  static constexpr int kBytes = 32;
  static void widen(const uint8_t* from, __m512& first, __m512& second) {
    const auto* halves = reinterpret_cast<const __m128i*>(from);
    first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves)));
    second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves + 1)));
  }
};

struct Tile {
  int64_t first;
  int rows;
};

inline __m512 load_bf16(const uint16_t* from, __mmask16 wanted) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(wanted, from)), 16));
}
inline __mmask16 first_lanes(int64_t count) { return __mmask16((1u << std::clamp<int64_t>(count, 0, kLanes)) - 1); }

// 1 / RMS of a row, 1 where there is no norm.
float scale_of(const Problem& p, const uint16_t* row) {
  if (!p.gain) return 1.0f;
  __m512 squares = _mm512_setzero_ps();
  for (int64_t k = 0; k < p.K; k += kLanes) {
    const __m512 x = load_bf16(row + k, first_lanes(p.K - k));
    squares = _mm512_fmadd_ps(x, x, squares);
  }
  return 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(p.K) + p.eps);
}

// A tile's activations, normed, as [K][rows].
void pack(const Problem& p, Tile tile, float* to) {
  float scales[kTileRows];
  for (int r = 0; r < tile.rows; ++r) scales[r] = scale_of(p, p.x + (tile.first + r) * p.x_row);
  for (int64_t k = 0; k < p.K; k += kLanes) {
    const __mmask16 wanted = first_lanes(p.K - k);
    const __m512 gain = p.gain ? load_bf16(p.gain + k, wanted) : _mm512_set1_ps(1.0f);
    __m512i columns[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      if (r >= tile.rows) {
        columns[r] = _mm512_setzero_si512();
        continue;
      }
      const __m512 x = load_bf16(p.x + (tile.first + r) * p.x_row + k, wanted);
      columns[r] = _mm512_castps_si512(_mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(scales[r])), gain));
    }
    transpose(columns);
    const int64_t count = std::min<int64_t>(kLanes, p.K - k);
    for (int64_t i = 0; i < count; ++i) {
      _mm512_mask_storeu_epi32(to + (k + i) * tile.rows, first_lanes(tile.rows), columns[i]);
    }
  }
}

inline __m512 silu(__m512 x) {
  const __m512 e = exp_of(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
  const __mmask16 negative = _mm512_cmplt_ps_mask(x, _mm512_setzero_ps());
  const __m512 numerator = _mm512_mask_mul_ps(x, negative, x, e);
  return _mm512_div_ps(numerator, _mm512_add_ps(e, _mm512_set1_ps(1.0f)));
}

inline void put(const Problem& p, int64_t row, int64_t column, __m512 sums) {
  const __mmask16 wanted = first_lanes(p.N - column);
  if (!wanted) return;
  if (p.residual) sums = _mm512_add_ps(sums, load_bf16(p.residual + row * p.residual_row + column, wanted));
  const auto rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sums));
  _mm256_mask_storeu_epi16(p.y + row * p.N + column, wanted, rounded);
}

// A tile's R rows times one panel, to their place in y.
template <class Weights, int R>
void multiply(const Problem& p, Tile tile, const float* x, int64_t panel) {
  const uint8_t* weights = p.panels + panel * p.panel_bytes;
  __m512 low[R], high[R];
  for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_setzero_ps();
  for (int64_t k = 0; k < p.K; ++k) {
    __m512 first, second;
    Weights::widen(weights + k * Weights::kBytes, first, second);
    for (int r = 0; r < R; ++r) {
      const __m512 each = _mm512_set1_ps(x[k * R + r]);
      low[r] = _mm512_fmadd_ps(each, first, low[r]);
      high[r] = _mm512_fmadd_ps(each, second, high[r]);
    }
  }
  const __m512 one = _mm512_set1_ps(1.0f), none = _mm512_setzero_ps();
  const float* scales = p.scales ? p.scales + panel * 2 * kLanes : nullptr;
  const float* bias = p.bias ? p.bias + panel * 2 * kLanes : nullptr;
  const __m512 low_scale = scales ? _mm512_loadu_ps(scales) : one, low_bias = bias ? _mm512_loadu_ps(bias) : none;
  const __m512 high_scale = scales ? _mm512_loadu_ps(scales + kLanes) : one;
  const __m512 high_bias = bias ? _mm512_loadu_ps(bias + kLanes) : none;
  for (int r = 0; r < R; ++r) {
    low[r] = _mm512_fmadd_ps(low[r], low_scale, low_bias);
    high[r] = _mm512_fmadd_ps(high[r], high_scale, high_bias);
    if (p.gated) {
      put(p, tile.first + r, panel * kLanes, _mm512_mul_ps(silu(low[r]), high[r]));
    } else {
      put(p, tile.first + r, panel * 2 * kLanes, low[r]);
      put(p, tile.first + r, panel * 2 * kLanes + kLanes, high[r]);
    }
  }
}

using Multiply = void (*)(const Problem&, Tile, const float*, int64_t);

// By the tile's rows, from 1.
template <class Weights, int... R>
const Multiply* multiplies(std::integer_sequence<int, R...>) {
  static constexpr Multiply table[] = {multiply<Weights, R + 1>...};
  return table;
}

// Tiles of nearly equal height.
std::vector<Tile> divide(int64_t begin, int64_t end) {
  const int64_t rows = end - begin, num_tiles = (rows + kTileRows - 1) / kTileRows;
  std::vector<Tile> tiles;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t first = rows * i / num_tiles, last = rows * (i + 1) / num_tiles;
    tiles.push_back({begin + first, int(last - first)});
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

template <class Weights>
void run(Problem p) {
  p.panel_bytes = p.K * Weights::kBytes;
  const Multiply* multiply_by_rows = multiplies<Weights>(std::make_integer_sequence<int, kTileRows>()) - 1;
  std::vector<float> packed(std::min(p.M, kBlockRows) * p.K);
  const int64_t in_cache = std::max<int64_t>(1, kGroupBytes / p.panel_bytes);
  const int64_t per_group = std::clamp<int64_t>(p.P / (4 * at::get_num_threads()), 1, in_cache);
  const int64_t num_groups = (p.P + per_group - 1) / per_group;
  for (int64_t begin = 0; begin < p.M; begin += kBlockRows) {
    const std::vector<Tile> tiles = divide(begin, std::min(p.M, begin + kBlockRows));
    const auto place = [&](const Tile& tile) { return packed.data() + (tile.first - begin) * p.K; };
    const auto pack_tile = [&](int64_t i) { pack(p, tiles[i], place(tiles[i])); };
    if (p.M <= kFewRows) {
      for (int64_t i = 0; i < int64_t(tiles.size()); ++i) pack_tile(i);
    } else {
      share(int64_t(tiles.size()), pack_tile);
    }
    share(num_groups, [&](int64_t group) {
      const int64_t last = std::min(p.P, (group + 1) * per_group);
      for (const Tile& tile : tiles) {
        for (int64_t panel = group * per_group; panel < last; ++panel) {
          multiply_by_rows[tile.rows](p, tile, place(tile), panel);
        }
      }
    });
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
                  panels_PKL.size(2) == 2 * kLanes,
              "the weights are packed for another number of inputs");
  TORCH_CHECK(panels_PKL.dtype() == at::kBFloat16 || (panels_PKL.dtype() == at::kChar && scales),
              "weights are bfloat16, or int8 with scales");
  const int64_t M = x_MK.size(0), K = x_MK.size(1), P = panels_PKL.size(0);
  TORCH_CHECK(N <= P * (gated ? 1 : 2) * kLanes, "the weights have fewer outputs than ", N);
  if (residual_MN) {
    TORCH_CHECK(residual_MN->dtype() == at::kBFloat16 && residual_MN->sizes() == at::IntArrayRef({M, N}) &&
                    residual_MN->stride(1) == 1,
                "residual must be bfloat16 rows like the result");
  }
  auto y_MN = at::empty({M, N}, x_MK.options());
  const Problem p{static_cast<const uint16_t*>(x_MK.const_data_ptr()),
       static_cast<const uint8_t*>(panels_PKL.const_data_ptr()), data<float>(scales, at::kFloat, P * 2 * kLanes),
       data<float>(bias, at::kFloat, P * 2 * kLanes), data<uint16_t>(gain_K, at::kBFloat16, K),
       residual_MN ? static_cast<const uint16_t*>(residual_MN->const_data_ptr()) : nullptr,
       static_cast<uint16_t*>(y_MN.data_ptr()), M, N, K, P, x_MK.stride(0), residual_MN ? residual_MN->stride(0) : 0,
       float(eps), gated, 0};
  panels_PKL.dtype() == at::kChar ? run<Int8>(p) : run<Bf16>(p);
  return y_MN;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(baton, m) {
  m.def(
      "linear(Tensor x_MK, Tensor panels_PKL, int N, Tensor? scales, Tensor? bias, Tensor? gain_K, float eps, Tensor? residual_MN, "
      "bool gated) -> Tensor");
}

TORCH_LIBRARY_IMPL(baton, CPU, m) { m.impl("linear", &linear); }
