// Multiplies very few rows by codes, without dequantising them (codes.h): sums of code * input for each group of inputs,
// which are then multiplied by the group's scale, plus the group's sum of inputs times its offset. With few rows, to
// dequantise a weight takes longer than to multiply by it.
//
// Weights are exact, while those that are dequantised for pairs and tiles are rounded to bf16.

#pragma once

#include <cstdint>
#include <utility>

#include "linear/panels.h"

namespace {

// Returns one or two numbers, repeated in all lanes.
template <int kNum>
inline Words repeated(const float* from) {
  if constexpr (kNum == 1) {
    return (Words)splat(*from);
  } else {
    typedef uint64_t Longs __attribute__((vector_size(4 * kLanes)));
    uint64_t both;
    std::memcpy(&both, from, sizeof(both));
    return (Words)(both - Longs{});
  }
}

// Numbers of packed rows: [K / kNum][rows][kNum] inputs, normed, and their sums, [K / 16][rows][kNum], kNum being the
// lanes of an output, at most 2.
inline int64_t by_codes_size(int64_t rows, int64_t K) { return rows * (K + K / kHalfUnit * 2); }

template <int kNum>
void pack_by_codes(const LinearProblem& p, float* to) {
  float* sums = to + p.M * p.K;
  std::fill_n(sums, p.M * p.K / kHalfUnit * kNum, 0.0f);
  for (int64_t r = 0; r < p.M; ++r) {
    const uint16_t* row = p.x + r * p.x_row;
    const float scale = scale_of(p, row);
    for (int64_t k = 0; k < p.K; k += kLanes) {
      const Floats gain = p.gain ? load_floats(p.gain + k) : splat(1.0f);
      const Floats values = load_floats(row + k) * scale * gain;
      for (int64_t i = 0; i < kLanes && p.M > 1; i += kNum) {
        std::memcpy(to + ((k + i) / kNum * p.M + r) * kNum, (const float*)&values + i, 4 * kNum);
      }
      if (p.M == 1) store(to + k, values);
      for (int number = 0; number < kNum; ++number) {
        const Floats some = lanes() % kNum == number ? values : Floats{};
        sums[(k / kHalfUnit * p.M + r) * kNum + number] += sum_of(some);
      }
    }
  }
}

// Multiplies all R rows by one panel, and stores them to their place in y. Fetches the codes `ahead` bytes behind.
template <int kBits, int kUnitLanes, int R>
void multiply_by_codes(const LinearProblem& p, const float* x, int64_t panel, int64_t ahead) {
  constexpr int kNum = kUnitLanes / kOutputs;
  const float* sums = x + R * p.K;
  const uint8_t* codes = p.panels + panel * p.panel_bytes;
  alignas(64) float totals[R][kUnitLanes] = {};
  Scaling<kUnitLanes> scaling;
  for (int64_t k = 0, end; k < p.K; k = end) {
    end = std::min(p.K, scaling.load_from(p.codes, panel, k));
    for (int lane = 0; lane < kUnitLanes; lane += 2 * kLanes) {
      Floats low[R] = {}, high[R] = {}, inputs[R] = {};
      for (int64_t at = k; at < end; at += kHalfUnit) {
        const uint8_t* unit = codes + at / kUnit * p.codes.unit_bytes();
        const int half = at % kUnit / kHalfUnit;
        if (lane == 0) fetch_half(p.codes, unit + ahead, half);
        take_codes<kBits, kUnitLanes>(unit, half, lane, [&](int number, Floats first, Floats second) {
          for (int r = 0; r < R; ++r) {
            const auto each = (Floats)in_register(repeated<kNum>(x + at * R + (number * R + r) * kNum));
            low[r] += first * each;
            high[r] += second * each;
          }
        });
        for (int r = 0; r < R; ++r) inputs[r] += (Floats)repeated<kNum>(sums + (at / kHalfUnit * R + r) * kNum);
      }
      for (int r = 0; r < R; ++r) {
        float* of_lanes = totals[r] + lane;
        const auto add = [&](int from, Floats codes_sum) {
          const Floats scale = load<Floats>(scaling.scales + lane + from);
          const Floats offset = load<Floats>(scaling.offsets + lane + from);
          store(of_lanes + from, load<Floats>(of_lanes + from) + scale * codes_sum + offset * inputs[r]);
        };
        add(0, low[r]);
        add(kLanes, high[r]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int output = 0; kNum == 2 && output < kOutputs; ++output) {
      totals[r][output] = totals[r][2 * output] + totals[r][2 * output + 1];
    }
    for (int part = 0; part < kHalf / kLanes; ++part) {
      Floats low[] = {load<Floats>(totals[r] + part * kLanes)}, high[] = {load<Floats>(totals[r] + kHalf + part * kLanes)};
      finish<1>(p, r, panel, part, low, high);
    }
  }
}

template <int kBits, int kUnitLanes, int... R>
constexpr ByCodes by_codes(std::integer_sequence<int, R...>) {
  return {pack_by_codes<kUnitLanes / kOutputs>, {multiply_by_codes<kBits, kUnitLanes, R + 1>...}};
}

// Multiplies all rows, at most kCodeRows, by the panels [first, last).
inline void multiply_by_codes(const LinearProblem& p, const float* packed, int64_t first, int64_t last) {
  for (int64_t panel = first; panel < last; ++panel) {
    p.by_codes->multiply[p.M - 1](p, packed, panel, panel + 1 < last ? p.panel_bytes : 0);
  }
}

}  // namespace
