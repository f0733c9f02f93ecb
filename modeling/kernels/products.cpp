// How bf16 operands are best multiplied on this processor: in tiles (AMX), where there are such; vectors by the
// processor's dot product (VDPBF16PS), or widened to fp32.
//
// All give the same products, summed in fp32. Of vectors AMD's Zen 4 multiplies twice as many a second by the former,
// Intel's Sapphire Rapids nearly twice as many by the latter; the names of features do not tell, so it is measured once.

#include <torch/library.h>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include <algorithm>
#include <chrono>

#include "tiles.h"

namespace {

#ifdef __AVX512BF16__
constexpr int kChains = 12;  // independent sums: more than the latency of any multiplier times their number
constexpr int kLength = 128;
constexpr int kTries = 200; // the fastest counts, so that other work on the core does not

// Seconds of kChains * kLength steps, all operands in registers.
template <class Step>
double seconds(Step step) {
  const auto start = std::chrono::steady_clock::now();
  __m512 sums[kChains];
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  for (int i = 0; i < kLength; ++i) {
#pragma GCC unroll 12
    for (auto& sum : sums) {
      step(sum);
      asm volatile("" : "+v"(sum));  // so that every step is taken
    }
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Widening itself is shared by many products, and costs next to nothing.
bool widens() {
  const __m512 factor = _mm512_set1_ps(0.5f);
  const auto pairs = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f003f00));
  double dotted = 1.0, widened = 1.0;
  for (int i = 0; i < kTries; ++i) {
    dotted = std::min(dotted, seconds([&](__m512& sum) { sum = _mm512_dpbf16_ps(sum, pairs, pairs); }));
    widened = std::min(widened, seconds([&](__m512& sum) {
      sum = _mm512_fmadd_ps(factor, factor, sum);
      asm volatile("" : "+v"(sum));
      sum = _mm512_fmadd_ps(factor, factor, sum);
    }));
  }
  return widened < dotted;
}
#else
bool widens() { return true; }
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(BATON_OPERATORS, m) { 
  m.def("widens() -> bool", &widens);
  m.def("has_tiles() -> bool", &has_tiles);
}
