// What the attention kernels share: AVX-512 with bf16 dot products and fp32 sums.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr int kLanes = 16;  // fp32 of a register
constexpr float kNothing = -1e30f;  // as in modeling/attention.py: finite, so that merging two of them makes no NaN

// Rows of 16 words become columns.
inline void transpose(__m512i (&rows)[kLanes]) {
  __m512i t[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    for (int half = 0; half < 2; ++half) {
      t[8 * half + i] = _mm512_shuffle_i32x4(rows[8 * half + i], rows[8 * half + i + 4], 0x88);
      t[8 * half + i + 4] = _mm512_shuffle_i32x4(rows[8 * half + i], rows[8 * half + i + 4], 0xdd);
    }
  }
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

inline __m512bh broadcast(const uint16_t* pair) {
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(*reinterpret_cast<const int32_t*>(pair)));
}

inline void store_bf16(uint16_t* to, __m512 values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)));
}

// exp(x) for x <= 0: 2^n times a polynomial of the rest; the error is far below what bf16 weights round away.
inline __m512 exp_of(__m512 x) {
  x = _mm512_mul_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(1.44269504f));
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 y = _mm512_set1_ps(1.3333558e-3f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, n);
}

// The online softmax of one row's tile of kKeys scores, of which `visible` count: weights in bf16, and what the row's
// earlier sums are to be multiplied with.
template <int kKeys>
float weigh(const float* scores, uint16_t* weights, int visible, float scale, float& largest, float& total) {
  const __m512 scales = _mm512_set1_ps(scale);
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const auto shown = [&](int j) { return _mm512_cmplt_epi32_mask(lanes, _mm512_set1_epi32(visible - j)); };
  __m512 most = _mm512_set1_ps(kNothing);
  for (int j = 0; j < kKeys; j += kLanes) most = _mm512_mask_max_ps(most, shown(j), most, _mm512_load_ps(scores + j));
  const float now = std::max(largest, _mm512_reduce_max_ps(most) * scale);
  const __m512 shift = _mm512_set1_ps(now);
  __m512 sum = _mm512_setzero_ps();
  for (int j = 0; j < kKeys; j += 2 * kLanes) {
    __m512 halves[2];
    for (int w = 0; w < 2; ++w) {
      const __m512 x = _mm512_fmsub_ps(_mm512_load_ps(scores + j + w * kLanes), scales, shift);
      halves[w] = _mm512_maskz_mov_ps(shown(j + w * kLanes), exp_of(x));
      sum = _mm512_add_ps(sum, halves[w]);
    }
    _mm512_store_si512(weights + j, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(halves[1], halves[0])));
  }
  const float factor = std::exp(largest - now);
  largest = now;
  total = total * factor + _mm512_reduce_add_ps(sum);
  return factor;
}

}  // namespace
