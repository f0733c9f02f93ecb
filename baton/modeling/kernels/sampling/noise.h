// Noise of tokens, a function of a key and the token's id alone (baton.modeling.forward.drawing says which), and exponentials:
// for one number, and for a register of them.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/simd.h"

namespace {

constexpr int kTokens = kLanes / 2;  // tokens of a register
typedef uint64_t Longs __attribute__((vector_size(8 * kTokens)));
typedef double Doubles __attribute__((vector_size(8 * kTokens)));
typedef float Logits __attribute__((vector_size(4 * kTokens)));

constexpr uint64_t kStep = 0x9E3779B97F4A7C15;  // SplitMix64, as in baton.modeling.forward.drawing
constexpr int kNoiseBits = 52;
constexpr uint64_t kOne = uint64_t{1} << kNoiseBits;
constexpr double kNothing = -std::numeric_limits<double>::infinity();

// Whole numbers below 2^52 as doubles; the functions below are for one number and for registers of them.
inline double real(uint64_t value) {
  const uint64_t bits = value | (uint64_t{1075} << kNoiseBits);
  double wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide - static_cast<double>(kOne);
}
inline Doubles real(Longs values) {
  return (Doubles)(values | (uint64_t{1075} << kNoiseBits)) - static_cast<double>(kOne);
}
inline uint64_t bits_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline Longs bits_of(Doubles values) { return (Longs)values; }

// The hashes of tokens, by their numbers from 1 on; uniform noise u in (0, 1) is (hash + 1/2) / 2^52.
template <class Whole>
inline Whole hash_of(uint64_t key, Whole number) {
  Whole value = number * kStep + key;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return (value ^ (value >> 31)) >> (64 - kNoiseBits);
}

// At least -log(-log u): -log u is at least 1 - u, and that at least the power of two below it.
template <class Whole>
inline auto noise_bound(Whole hash) {
  const auto rest = real(kOne - 1 - hash) + 0.5;  // (1 - u) * 2^52
  return (1075.0 - real(bits_of(rest) >> kNoiseBits)) * 0.6931471805599454;  // the exponent is biased by 1023
}

inline double noise(uint64_t hash) {
  const double uniform = (static_cast<double>(hash) + 0.5) * 0x1p-52;
  return -std::log(-std::log(uniform));
}

// exp of numbers that are not above 0, within two units of the last place; 0 below -708.
inline Doubles exponential(Doubles x) {
  constexpr double kRounds = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number in the lowest bits
  const Doubles shifted = x * 1.4426950408889634 + kRounds;
  const Doubles whole = shifted - kRounds;
  const Doubles r = (x - whole * 0.693147180369123816490) - whole * 1.90821492927058770002e-10;
  Doubles sum = 1.0 / 479001600 + Doubles{};  // Taylor, to the twelfth power; |r| is at most ln(2) / 2
  for (const double factor : {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                              1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
    sum = sum * r + factor;
  const Doubles scaled = (Doubles)(bits_of(sum) + (bits_of(shifted) << kNoiseBits));
  return x < -708.0 ? Doubles{} : scaled;
}

}  // namespace
