// Weights as a checkpoint stores them: codes of 4, 6 or 8 bits, with scales for groups of inputs (calls/codes.py packs
// them). Rows are multiplied by codes (by_codes.h), or, if there are more than a few, in pairs or tiles of bf16. For
// these, weights are dequantised, strip by strip, just before they are multiplied: weight = scale * code + offset,
// rounded once to fp32, and then to bf16, as when a model is loaded with its weights dequantised: the product by stored
// weights equals, bit for bit, the product by the same weights in bf16.
//
// A unit is the codes of 32 inputs and a panel's 32 outputs. They lie in lanes, one behind the other: without pairs, a
// lane is an output, and takes its 32 inputs; for pairs and tiles, 64 lanes are an output's even or odd inputs, output
// by output, and take 16 inputs. A lane's codes are divided into eights, whose codes i and i + 4 form a pair (i < 4).
//   4 bits: for each eight, all lanes, a word each: code i from bit 4 i on, so that one shift finds a pair in the lower
//           and upper half of a word
//   6 bits: such words of the lower 4 bits; behind all of them, for each two eights, all lanes, a word each of the upper
//           2 bits: of pair i of the first eight from bit 2 i on in both halves, of the second from bit 8 + 2 i on
//   8 bits: bytes with a sign: for each pair, all lanes, two each

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "common/simd.h"

namespace {

constexpr int kUnit = 32;                    // inputs of a unit
constexpr int kHalfUnit = kUnit / 2;         // inputs whose scale may differ from those of the next ones
constexpr int kOutputs = 32;                 // outputs of a panel
constexpr int kUnitCodes = kUnit * kOutputs;
constexpr int kEight = 8;                    // codes of a lane that lie together

// How codes become weights. Fields: 1: scales only, or 2: scales, then offsets. Without offsets, the offset is that which
// makes the code `zero` a weight of 0.
struct Codes {
  int64_t bits;  // 4, 6 or 8
  int64_t zero;
  int64_t fields;
  int64_t is_half;        // scales are fp16, else fp32
  int64_t group;          // inputs that share scales, a multiple of 16
  int64_t num_groups;
  const void* scales;     // [P][groups][fields][32]
  int64_t subgroup;       // inputs that share factors of the scales, a multiple of 16
  int64_t num_subgroups;
  const int8_t* factors;  // [P][subgroups][fields][32], or null: 1

  int64_t unit_bytes() const { return kUnitCodes / 8 * bits; }

  // Returns a number of inputs that are sure to share a scale, at most a unit.
  int64_t run() const { return group % kUnit || (factors && subgroup % kUnit) ? kHalfUnit : kUnit; }
};

inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__FMA__) || defined(__aarch64__)
  return a * b + c;  // contracted
#else
  Floats sums;
  for (int i = 0; i < kLanes; ++i) sums[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return sums;
#endif
}

// Loads kLanes numbers of fp16.
inline Floats load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(load<__m128i>(from));
#else
  const Words words = __builtin_convertvector(load<Halves>(from), Words);
  const Floats sized = (Floats)((words & 0x7fff) << 13) * 0x1p112f;  // the exponent's bias is 112 less
  return (Floats)((Words)sized | (words & 0x8000) << 16);
#endif
}

// Scales and offsets of half a unit, for each of its kLanesOfUnit lanes.
template <int kUnitLanes>
struct Scaling {
  alignas(64) float scales[kUnitLanes];
  alignas(64) float offsets[kUnitLanes];

  // Loads those of the inputs from `k` on. Returns the input up to which they are valid.
  int64_t load_from(const Codes& c, int64_t panel, int64_t k) {
    const int64_t group = k / c.group, of_group = (panel * c.num_groups + group) * c.fields * kOutputs;
    const int64_t subgroup = c.factors ? k / c.subgroup : 0;
    const int8_t* factors = c.factors + (panel * c.num_subgroups + subgroup) * c.fields * kOutputs;
    for (int at = 0; at < kOutputs; at += kLanes) {
      const auto field = [&](int number) {
        const int64_t place = of_group + number * kOutputs + at;
        const Floats values = c.is_half ? load_halves(static_cast<const uint16_t*>(c.scales) + place)
                                        : load<Floats>(static_cast<const float*>(c.scales) + place);
        return c.factors ? values * load_floats(factors + number * kOutputs + at) : values;
      };
      const Floats scale = field(0);
      spread(scales, at, scale);
      spread(offsets, at, c.fields == 2 ? field(1) : scale * float(-c.zero));
    }
    const int64_t end = (group + 1) * c.group;
    return c.factors ? std::min(end, (subgroup + 1) * c.subgroup) : end;
  }

 private:
  template <int... L>
  static void twice(float* to, Floats values, std::integer_sequence<int, L...>) {
    store(to, __builtin_shufflevector(values, values, (L / 2)...));
    store(to + kLanes, __builtin_shufflevector(values, values, ((kLanes + L) / 2)...));
  }

  static void spread(float* to, int at, Floats values) {
    if constexpr (kUnitLanes == kOutputs) {
      store(to + at, values);
    } else {
      twice(to + 2 * at, values, std::make_integer_sequence<int, kLanes>());
    }
  }
};

// Bits by which code number kPlace of an eight's word is shifted, and its upper 2 bits.
template <int kPlace>
constexpr int kShift = 4 * kPlace;
template <int kPlace>
constexpr int kUpperShift = kPlace / 4 * 16 + kPlace % 4 * 2;

// An eight's words of 2 kLanes lanes.
struct EightWords {
  Words lower[2];
  Words upper[2] = {};  // upper 2 bits, if there are any, in the bits of a first eight
};

template <int kBits, int kUnitLanes>
inline EightWords load_words(const uint8_t* unit, int eight, int lane) {
  EightWords words;
  for (int i = 0; i < 2; ++i, lane += kLanes) {
    words.lower[i] = load<Words>(unit + 4 * (eight * kUnitLanes + lane));
    if constexpr (kBits == 6) {
      const Words both = load<Words>(unit + kUnitCodes / 2 + 4 * (eight / 2 * kUnitLanes + lane));
      words.upper[i] = both >> (eight % 2 * kEight);
    }
  }
  return words;
}

// Returns code number kPlace of each lane's word of an eight.
template <int kBits, int kPlace>
inline Floats code_of(const EightWords& words, int which) {
#ifdef __AVX512F__
  if constexpr (kBits == 4) {  // a table takes the lowest 4 bits of each lane
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps((__m512i)(words.lower[which] >> kShift<kPlace>), numbers);
  }
#endif
  Words code = (words.lower[which] >> kShift<kPlace>) & 15;
  if constexpr (kBits == 6) code |= ((words.upper[which] >> kUpperShift<kPlace>) & 3) << 4;
  return __builtin_convertvector((Ints)code, Floats);
}

// Returns pair number kPlace of each lane's word of an eight.
template <int kBits, int kPlace>
inline Pairs pair_of(const EightWords& words, int which) {
  Pairs codes = ((Pairs)words.lower[which] >> kShift<kPlace>) & 15;
  if constexpr (kBits == 6) codes |= (((Pairs)words.upper[which] >> kUpperShift<kPlace>) & 3) << 4;
  return codes;
}

// Loads pair number `pair` of an eight's codes of 8 bits, of kLanes lanes from `lane` on.
template <int kUnitLanes>
inline Pairs load_pairs(const uint8_t* unit, int eight, int pair, int lane) {
  const Bytes bytes = load<Bytes>(unit + 2 * ((eight * kEight / 2 + pair) * kUnitLanes + lane));
#if defined(__AVX512BW__)
  return (Pairs)_mm512_cvtepi8_epi16((__m256i)bytes);
#elif defined(__AVX2__)
  return (Pairs)_mm256_cvtepi8_epi16((__m128i)bytes);
#else
  typedef int16_t Wide __attribute__((vector_size(4 * kLanes)));
  return (Pairs)__builtin_convertvector(bytes, Wide);
#endif
}

// Calls take(number, codes of kLanes lanes from `lane` on, codes of the next ones) for each pair of an eight's codes.
template <int kBits, int kUnitLanes, class Take>
inline void take_pairs(const uint8_t* unit, int eight, int lane, Take take) {
  constexpr auto kPairs = std::make_integer_sequence<int, kEight / 2>();
  if constexpr (kBits == 8) {
    unrolled(kPairs, [&](auto i) {
      take(i, load_pairs<kUnitLanes>(unit, eight, i, lane), load_pairs<kUnitLanes>(unit, eight, i, lane + kLanes));
    });
  } else {
    const EightWords words = load_words<kBits, kUnitLanes>(unit, eight, lane);
    unrolled(kPairs, [&](auto i) { take(i, pair_of<kBits, i>(words, 0), pair_of<kBits, i>(words, 1)); });
  }
}

// Calls take(number, codes of kLanes lanes from `lane` on, codes of the next ones) for each of an eight's codes.
template <int kBits, int kUnitLanes, class Take>
inline void take_codes(const uint8_t* unit, int eight, int lane, Take take) {
  if constexpr (kBits == 8) {
    const auto even = [](Pairs codes) { return __builtin_convertvector((Ints)((Words)codes << 16) >> 16, Floats); };
    const auto odd = [](Pairs codes) { return __builtin_convertvector((Ints)codes >> 16, Floats); };
    take_pairs<kBits, kUnitLanes>(unit, eight, lane, [&](int number, Pairs first, Pairs second) {
      take(number, even(first), even(second));
      take(number + kEight / 2, odd(first), odd(second));
    });
  } else {
    const EightWords words = load_words<kBits, kUnitLanes>(unit, eight, lane);
    unrolled(std::make_integer_sequence<int, kEight>(), [&](auto i) {
      take(i, code_of<kBits, i>(words, 0), code_of<kBits, i>(words, 1));
    });
  }
}

// Fetches the codes of half a unit.
inline void fetch_half(const Codes& c, const uint8_t* unit, int half) {
  for (int64_t at = half * c.unit_bytes() / 2; at < (half + 1) * c.unit_bytes() / 2; at += 64) {
    __builtin_prefetch(unit + at, 0, 2);
  }
}

// Dequantises a panel's inputs [begin, end), multiples of kUnit, for pairs and tiles. Meanwhile fetches the codes `ahead`
// bytes behind these.
template <int kBits>
void dequantise(const Codes& c, const uint8_t* panel_codes, int64_t panel, int64_t begin, int64_t end, int64_t ahead,
                uint16_t* to) {
  constexpr int kUnitLanes = 2 * kOutputs;  // and an eight is its codes of half a unit
  Scaling<kUnitLanes> scaling;
  int64_t valid = 0;
  for (int64_t k = begin; k < end; k += kHalfUnit, to += kHalfUnit * kOutputs) {
    const uint8_t* unit = panel_codes + k / kUnit * c.unit_bytes();
    const int half = k % kUnit / kHalfUnit;
    fetch_half(c, unit + ahead, half);
    if (k >= valid) valid = scaling.load_from(c, panel, k);
    for (int lane = 0; lane < kUnitLanes; lane += 2 * kLanes) {
      const Floats scales[] = {load<Floats>(scaling.scales + lane), load<Floats>(scaling.scales + lane + kLanes)};
      const Floats offsets[] = {load<Floats>(scaling.offsets + lane), load<Floats>(scaling.offsets + lane + kLanes)};
      take_codes<kBits, kUnitLanes>(unit, half, lane, [&](int number, Floats first, Floats second) {
        store_both(to + number * kUnitLanes + lane, multiply_add(scales[0], first, offsets[0]),
                   multiply_add(scales[1], second, offsets[1]));
      });
    }
  }
}

// Returns the code of one input of a unit. `output`: of the panel; `num`: lanes of an output.
inline int code_at(const Codes& c, const uint8_t* unit, int64_t input, int64_t output, int num) {
  const int64_t lanes = num * kOutputs, lane = output * num + input % num, number = input / num;
  const int64_t eight = number / kEight, place = number % kEight;
  const auto word = [&](int64_t at) { return load<uint32_t>(unit + 4 * at); };
  if (c.bits == 8) return (int8_t)unit[2 * ((eight * kEight / 2 + place % 4) * lanes + lane) + place / 4];
  const int lower = word(eight * lanes + lane) >> 4 * place & 15;
  if (c.bits == 4) return lower;
  const uint32_t upper = word(kUnitCodes / 8 + eight / 2 * lanes + lane) >> (eight % 2 * kEight);
  return lower | (upper >> (place / 4 * 16 + place % 4 * 2) & 3) << 4;
}

}  // namespace
