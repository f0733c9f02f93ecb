// Weights as a checkpoint stores them: codes of 4, 6 or 8 bits, with scales for groups of inputs (calls/codes.py packs
// them). Very few rows are multiplied by codes (by_codes.h). For more, weights are dequantised, strip by strip, just
// before they are multiplied: weight = scale * code + offset, rounded once to fp32. For pairs and tiles it is then
// rounded to bf16, as when a model is loaded with its weights dequantised: the product by stored weights equals, bit for
// bit, the product by the same weights in bf16. Where operands are widened to fp32 anyway, it stays as it is: to round it
// would take as long as all the rest.
//
// A unit is the codes of 32 inputs and a panel's 32 outputs. They lie in lanes, one behind the other: widened, a lane is
// an output, and takes its 32 inputs; for pairs and tiles, 64 lanes are an output's even or odd inputs, output by
// output, and take 16 inputs. A lane's codes of 4 bits are words of eight, lowest bits first. Codes of 6 bits are such
// words of the lower 4 bits, behind all of which lie words of sixteen codes' upper 2 bits. Codes of 8 bits, which have a
// sign, are bytes: for each input in turn, all lanes.

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

// Returns code number kPlace of each lane's words.
template <int kBits, int kPlace>
inline Floats code_of(Words low, [[maybe_unused]] Words high) {
#ifdef __AVX512F__
  if constexpr (kBits == 4) {  // a table takes the lowest 4 bits of each lane
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps((__m512i)(low >> (4 * kPlace)), numbers);
  }
#endif
  Words code = (low >> (4 * kPlace)) & 15;
  if constexpr (kBits == 6) code |= ((high >> (2 * kPlace)) & 3) << 4;
  return __builtin_convertvector((Ints)code, Floats);
}

// Calls take(number, codes, codes of the next kLanes lanes) for each code of half a unit that these lanes have.
template <int kBits, int kUnitLanes, class Take>
inline void take_codes(const uint8_t* unit, int half, int lane, Take take) {
  constexpr int kNumbers = kUnitCodes / 2 / kUnitLanes;  // codes of a lane
  constexpr auto kEight = std::make_integer_sequence<int, 8>();
  for (int number = 0; number < kNumbers; number += 8) {
    const int from = half * kNumbers + number;
    if constexpr (kBits == 8) {
      const auto* codes = (const int8_t*)unit + from * kUnitLanes + lane;
      unrolled(kEight, [&](auto i) {
        take(number + i, load_floats(codes + i * kUnitLanes), load_floats(codes + i * kUnitLanes + kLanes));
      });
    } else {
      Words low[2], high[2] = {};
      for (int i = 0; i < 2; ++i) {
        low[i] = load<Words>(unit + 4 * (from / 8 * kUnitLanes + lane + i * kLanes));
        if constexpr (kBits == 6) {
          high[i] = load<Words>(unit + kUnitCodes / 2 + 4 * (from / 16 * kUnitLanes + lane + i * kLanes));
          high[i] >>= from % 16 * 2;
        }
      }
      unrolled(kEight, [&](auto i) {
        take(number + i, code_of<kBits, i>(low[0], high[0]), code_of<kBits, i>(low[1], high[1]));
      });
    }
  }
}

// Fetches the codes of half a unit.
inline void fetch_half(const Codes& c, const uint8_t* unit, int half) {
  for (int64_t at = half * c.unit_bytes() / 2; at < (half + 1) * c.unit_bytes() / 2; at += 64) {
    __builtin_prefetch(unit + at, 0, 2);
  }
}

// Dequantises a panel's inputs [begin, end), multiples of kUnit, to fp32 where a lane is an output, and else to bf16.
// Meanwhile fetches the codes `ahead` bytes behind these.
template <int kBits, int kUnitLanes>
void dequantise(const Codes& c, const uint8_t* panel_codes, int64_t panel, int64_t begin, int64_t end, int64_t ahead,
                void* weights) {
  using Number = std::conditional_t<kUnitLanes == kOutputs, float, uint16_t>;
  auto* to = static_cast<Number*>(weights);
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

}  // namespace
