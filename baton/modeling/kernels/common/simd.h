// Vectors as wide as the processor's registers, in the compiler's own vector types (GCC 12, Clang 15): arithmetic is
// written with + and *, multiply-adds are contracted (-ffp-contract=fast), and one source serves every processor.
//
// The flag -march decides, at compile time: 16 lanes with AVX-512, 8 with AVX2, else 4 (SSE2, NEON).

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;  // 32-bit numbers of a register
constexpr int kWide = 4;    // registers of packed operands that a block of kRows rows is multiplied with at a time:
constexpr int kRows = 6;    // the sums, the operands and a factor must fit in the registers there are
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kWide = 2;
constexpr int kRows = 6;
#else
constexpr int kLanes = 4;
constexpr int kWide = 2;
constexpr int kRows = 6;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint16_t Pairs __attribute__((vector_size(4 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(2 * kLanes)));

template <class Vector>
inline Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

template <class Vector>
inline void store(void* to, Vector vector) {
  std::memcpy(to, &vector, sizeof(vector));
}

// Keeps words in a register, so that they are loaded once, not by each instruction that uses them.
inline Words in_register(Words words) {
#if defined(__AVX512F__)
  asm("" : "+v"(words));
#elif defined(__x86_64__)
  asm("" : "+x"(words));
#endif
  return words;
}

inline Floats splat(float value) { return value - Floats{}; }

// Returns the larger number of each lane; b where either is NaN.
inline Floats larger(Floats a, Floats b) {
#ifdef __AVX512F__
  return _mm512_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// Calls run(0), run(1), ... with constants: a loop that is sure to be unrolled.
template <class Run, int... I>
inline void unrolled(std::integer_sequence<int, I...>, Run run) {
  (run(std::integral_constant<int, I>()), ...);
}

// Returns the numbers of the lanes: 0, 1, ...
template <int... L>
inline Ints lanes(std::integer_sequence<int, L...>) {
  return Ints{L...};
}
inline Ints lanes() { return lanes(std::make_integer_sequence<int, kLanes>()); }

// Widens bf16, which is the upper half of fp32.
inline Floats widened(Halves values) {
#if defined(__AVX512F__)
  const Words words = (Words)_mm512_cvtepu16_epi32((__m256i)values);
#elif defined(__AVX2__)
  const Words words = (Words)_mm256_cvtepu16_epi32((__m128i)values);
#else
  const Words words = __builtin_convertvector(values, Words);
#endif
  return (Floats)(words << 16);
}

inline Floats load_floats(const uint16_t* bf16) { return widened(load<Halves>(bf16)); }
inline Floats load_floats(const float* from) { return load<Floats>(from); }
inline Floats load_floats(const int8_t* from) {
#if defined(__AVX512F__)
  const auto values = (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  const auto values = (Ints)_mm256_cvtepi8_epi32(_mm_loadu_si64(from));
#else
  const Ints values = {from[0], from[1], from[2], from[3]};
#endif
  return __builtin_convertvector(values, Floats);
}

#ifndef __AVX512BF16__
// Rounds to the nearest bf16, ties to even, in the lower half of each lane.
inline Words rounded(Floats values) {
  const Words bits = (Words)values;
  return values == values ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : (bits >> 16) | 1;
}
#endif

// Rounds to the nearest, ties to even.
inline void store_floats(uint16_t* to, Floats values) {
#ifdef __AVX512BF16__
  store(to, _mm512_cvtneps_pbh(values));
#else
  store(to, __builtin_convertvector(rounded(values), Halves));
#endif
}
inline void store_floats(float* to, Floats values) { store(to, values); }

// Stores pairs of numbers: lane by lane, one of `even` and one of `odd`.
inline void store_pairs(uint16_t* to, Floats even, Floats odd) {
#ifdef __AVX512BF16__
  const auto both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
  store(to, _mm512_permutexvar_epi16((__m512i)(lanes() | (lanes() + kLanes) << 16), both));
#else
  store(to, rounded(even) | rounded(odd) << 16);
#endif
}

template <int D, int... L>
inline Floats rotated(Floats a, std::integer_sequence<int, L...>) {
  return __builtin_shufflevector(a, a, ((L + D) % kLanes)...);
}

// Joins all lanes into one number.
template <int D = kLanes / 2, class Join>
inline float reduced(Floats a, Join join) {
  if constexpr (D == 0) {
    return a[0];
  } else {
    return reduced<D / 2>(join(a, rotated<D>(a, std::make_integer_sequence<int, kLanes>())), join);
  }
}
// Adds the products of two pairs of bf16 to each lane's sum.
inline Floats add_pairs(Floats sum, Words a, Words b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  sum += (Floats)(a << 16) * (Floats)(b << 16);
  return sum + (Floats)(a & 0xffff0000) * (Floats)(b & 0xffff0000);
#endif
}

// Adds the products of two pairs of 16-bit integers to each lane's sum.
inline Ints add_pairs(Ints sum, Pairs a, Pairs b) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)  // in_register: otherwise the compiler adds in another order, for which registers do not do
  return (Ints)in_register((Words)sum + (Words)_mm512_madd_epi16((__m512i)a, (__m512i)b));
#elif defined(__AVX2__)
  return (Ints)in_register((Words)sum + (Words)_mm256_madd_epi16((__m256i)a, (__m256i)b));
#else
  const auto low = [](Pairs pairs) { return (Ints)((Words)pairs << 16) >> 16; };
  return sum + low(a) * low(b) + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
}

inline float sum_of(Floats a) {
  return reduced(a, [](Floats x, Floats y) { return x + y; });
}
inline float largest_of(Floats a) { return reduced(a, larger); }

// Swaps the blocks of D lanes off the diagonal of two rows.
template <int D, int... L>
inline void swap_blocks(Words& a, Words& b, std::integer_sequence<int, L...>) {
  const Words upper = __builtin_shufflevector(a, b, (L & D ? kLanes + L - D : L)...);
  b = __builtin_shufflevector(a, b, (L & D ? kLanes + L : L + D)...);
  a = upper;
}

// Stores 2 kLanes pairs: number i of `even`, and number i of `odd` above it.
template <int... I>
inline void interleave_pairs(Words* to, Pairs even, Pairs odd, std::integer_sequence<int, I...>) {
  store(to, __builtin_shufflevector(even, odd, (I / 2 + I % 2 * 2 * kLanes)...));
  store(to + 1, __builtin_shufflevector(even, odd, (I / 2 + kLanes + I % 2 * 2 * kLanes)...));
}
inline void interleave_pairs(Words* to, const uint16_t* even, const uint16_t* odd) {
  interleave_pairs(to, load<Pairs>(even), load<Pairs>(odd), std::make_integer_sequence<int, 2 * kLanes>());
}

// Transposes: rows become columns.
template <int D = 1>
inline void transpose(Words (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    if (!(i & D)) swap_blocks<D>(rows[i], rows[i + D], std::make_integer_sequence<int, kLanes>());
  }
  if constexpr (2 * D < kLanes) transpose<2 * D>(rows);
}

// Returns 2^x to fp32's precision for x <= 0; below -100 x counts as -100. The difference of x from its nearest
// integer, at most a half, goes through a polynomial (minimax, error 8e-8); the integer becomes an exponent. NaN stays
// NaN: so a score that is NaN spoils its row's sum, and with it the row.
inline Floats exp2_of(Floats x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bit for fractions
  x = larger(splat(-100.0f), x);
  const Floats shifted = x + kRound;
  const Floats f = x - (shifted - kRound);
  Floats y = f * 1.32764691e-3f + 9.67554131e-3f;
  y = y * f + 5.55071328e-2f;
  y = y * f + 2.40221197e-1f;
  y = y * f + 6.93146967e-1f;
  y = y * f + 1.00000007f;
  // a product, because adding to the bits may turn NaN into a number
  return y * (Floats)(((Words)shifted << 23) + 0x3f800000);
}

}  // namespace
