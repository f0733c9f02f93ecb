// Weights as a checkpoint stores them: codes of 4, 6 or 8 bits, with scales for groups of inputs (calls/codes.py packs
// them). Rows are multiplied by codes (by_codes.h), or, if there are more than a few, in pairs or tiles of bf16. For
// these, weights are dequantised, strip by strip, just before they are multiplied: weight = scale * code + offset,
// rounded once to fp32, and then to bf16, as when a model is loaded with its weights dequantised: the product by stored
// weights equals, bit for bit, the product by the same weights in bf16.
//
// A unit is the codes of 32 inputs and a panel's 32 outputs. Its inputs are divided into eights, and these into pairs. A
// lane is an output.
//   4 bits: for each eight, all lanes, a word each: pair i from bit 4 i on, its first code in the lower half of the word
//           and its second code in the upper half, so that one shift finds both
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
constexpr int kEight = 8;                    // inputs whose codes of 4 bits are a word
constexpr int kPairs = kEight / 2;

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

// Scales and offsets of a panel's outputs.
struct Scaling {
  alignas(64) float scales[kOutputs];
  alignas(64) float offsets[kOutputs];

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
      store(scales + at, scale);
      store(offsets + at, c.fields == 2 ? field(1) : scale * float(-c.zero));
    }
    const int64_t end = (group + 1) * c.group;
    return c.factors ? std::min(end, (subgroup + 1) * c.subgroup) : end;
  }
};

// An eight's words of kLanes lanes.
struct EightWords {
  Words lower;
  Words upper = {};  // upper 2 bits, if there are any, in the bits of a first eight
};

template <int kBits>
inline EightWords load_words(const uint8_t* unit, int eight, int lane) {
  EightWords words{load<Words>(unit + 4 * (eight * kOutputs + lane))};
  if constexpr (kBits == 6) {
    const Words both = load<Words>(unit + kUnitCodes / 2 + 4 * (eight / 2 * kOutputs + lane));
    words.upper = both >> (eight % 2 * kEight);
  }
  return words;
}

// Returns a pair of each lane's word of an eight.
template <int kBits>
inline Pairs pair_of(const EightWords& words, int pair) {
  Pairs codes = ((Pairs)words.lower >> 4 * pair) & 15;
  if constexpr (kBits == 6) codes |= (((Pairs)words.upper >> 2 * pair) & 3) << 4;
  return codes;
}

// Loads a pair of an eight's codes of 8 bits, of kLanes lanes from `lane` on.
inline Pairs load_pairs(const uint8_t* unit, int eight, int pair, int lane) {
  const Bytes bytes = load<Bytes>(unit + 2 * ((eight * kPairs + pair) * kOutputs + lane));
#if defined(__AVX512BW__)
  return (Pairs)_mm512_cvtepi8_epi16((__m256i)bytes);
#elif defined(__AVX2__)
  return (Pairs)_mm256_cvtepi8_epi16((__m128i)bytes);
#else
  typedef int16_t Wide __attribute__((vector_size(4 * kLanes)));
  return (Pairs)__builtin_convertvector(bytes, Wide);
#endif
}

// Calls take(pair, codes of kLanes lanes from `lane` on, codes of the next ones) for each pair of an eight's codes.
template <int kBits, class Take>
inline void take_pairs(const uint8_t* unit, int eight, int lane, Take take) {
  constexpr auto kEach = std::make_integer_sequence<int, kPairs>();
  if constexpr (kBits == 8) {
    const auto load = [&](int pair, int lane) { return load_pairs(unit, eight, pair, lane); };
    unrolled(kEach, [&](auto i) { take(i, load(i, lane), load(i, lane + kLanes)); });
  } else {
    const EightWords words = load_words<kBits>(unit, eight, lane), next = load_words<kBits>(unit, eight, lane + kLanes);
    unrolled(kEach, [&](auto i) { take(i, pair_of<kBits>(words, i), pair_of<kBits>(next, i)); });
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
  Scaling scaling;
  int64_t valid = 0;
  for (int64_t k = begin; k < end; k += kHalfUnit, to += kHalfUnit * kOutputs) {
    const uint8_t* unit = panel_codes + k / kUnit * c.unit_bytes();
    const int half = k % kUnit / kHalfUnit;
    fetch_half(c, unit + ahead, half);
    if (k >= valid) valid = scaling.load_from(c, panel, k);
    for (int eight = 0; eight < kHalfUnit / kEight; ++eight) {
      const auto put = [&](int pair, int lane, Pairs codes) {
        const Floats scale = load<Floats>(scaling.scales + lane), offset = load<Floats>(scaling.offsets + lane);
        const Floats even = __builtin_convertvector((Ints)((Words)codes << 16) >> 16, Floats);
        const Floats odd = __builtin_convertvector((Ints)codes >> 16, Floats);
        store_pairs(to + 2 * ((eight * kPairs + pair) * kOutputs + lane), multiply_add(scale, even, offset),
                    multiply_add(scale, odd, offset));
      };
      for (int lane = 0; lane < kOutputs; lane += 2 * kLanes) {
        take_pairs<kBits>(unit, half * kHalfUnit / kEight + eight, lane, [&](int pair, Pairs first, Pairs second) {
          put(pair, lane, first);
          put(pair, lane + kLanes, second);
        });
      }
    }
  }
}

// Returns the code of one input of a unit. `output`: of the panel.
inline int code_at(const Codes& c, const uint8_t* unit, int64_t input, int64_t output) {
  const int64_t eight = input / kEight, pair = input % kEight / 2, is_odd = input % 2;
  const auto word = [&](int64_t at) { return load<uint32_t>(unit + 4 * (at * kOutputs + output)) >> 16 * is_odd; };
  if (c.bits == 8) return (int8_t)unit[2 * ((eight * kPairs + pair) * kOutputs + output) + is_odd];
  const int lower = word(eight) >> 4 * pair & 15;
  if (c.bits == 4) return lower;
  const uint32_t upper = word(kUnit / kEight + eight / 2) >> (eight % 2 * kEight);
  return lower | (upper >> 2 * pair & 3) << 4;
}

}  // namespace
