// Multiplies rows by codes, without dequantising them (codes.h): sums of code * input, as integers, for each run of inputs
// that share a scale, which are then multiplied by this scale; plus the run's sum of inputs times the offset.
//
// Inputs become integers of 16 bits, of one power of two for a row's run, at most 32 inputs. Compared with the largest
// input of the run they err by at most 2^-15, while inputs rounded to bf16 err by 2^-9 of themselves; an input that is
// bf16 already, and at least 1/128 of the largest, does not err at all. Weights are exact, while those that are
// dequantised for pairs and tiles are rounded to bf16. An instruction multiplies twice as many integers as floats.

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <utility>

#include "linear/panels.h"

namespace {

// Returns one or two words, repeated in all lanes.
template <int kNum>
inline Words repeated(const void* from) {
  if constexpr (kNum == 1) {
    return load<uint32_t>(from) - Words{};
  } else {
    typedef uint64_t Longs __attribute__((vector_size(4 * kLanes)));
    return (Words)(load<uint64_t>(from) - Longs{});
  }
}

template <class Join>
inline int32_t joined(Ints values, Join join) {
  const auto of_bits = [&](Floats a, Floats b) { return (Floats)join((Ints)a, (Ints)b); };
  return std::bit_cast<int32_t>(reduced((Floats)values, of_bits));
}

// Converts a row's normed inputs [k, k + run) to integers. Returns their scale: NaN if an input is not finite.
inline float to_integers(const LinearProblem& p, const uint16_t* row, float row_scale, int64_t k, int64_t run, Ints* to) {
  const auto larger = [](Ints a, Ints b) { return a > b ? a : b; };
  Floats inputs[kUnit / kLanes];
  Ints largest = {};
  for (int64_t i = 0; i < run / kLanes; ++i) {
    const Floats gain = p.gain ? load_floats(p.gain + k + i * kLanes) : splat(1.0f);
    inputs[i] = load_floats(row + k + i * kLanes) * row_scale * gain;
    largest = larger(largest, (Ints)inputs[i] & 0x7fffffff);
  }
  const int32_t bits = joined(largest, larger);
  const int32_t exponent = std::clamp(bits >> 23, 16, 254);  // with the bias of 127; so is the factor's
  const float factor = std::bit_cast<float>((127 + 127 + 14 - exponent) << 23);
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bit for fractions
  for (int64_t i = 0; i < run / kLanes; ++i) {
    const Ints numbers = (Ints)(inputs[i] * factor + kRound) - (Ints)splat(kRound);
    const Ints most = 32767 - Ints{};
    to[i] = numbers > most ? most : numbers < ~most ? ~most : numbers;  // those of NaN and infinity are any
  }
  return bits >= 0x7f800000 ? std::numeric_limits<float>::quiet_NaN() : 1.0f / factor;
}

// A way to multiply (panels.h) whose strips are whole panels of codes. kNum: lanes of an output.
//
// Packed activations of a block: [K / kInputs][4][rows][kNum] pairs, of the inputs that meet a pair of codes; then
// [K / run][rows][1 + kNum]: the scale of a row's run, and the sums of those inputs that meet each lane of an output.
template <int kNum>
struct ByCodes {
  using Packed = float;
  struct Scope {};
  static constexpr int kMostRows = kVectorRows;
  static constexpr int kUnitLanes = kNum * kOutputs;
  static constexpr int kInputs = kNum * kEight;
  static int64_t depth(int64_t K) { return K; }
  static int64_t size(int64_t rows, int64_t K) { return rows * K + kLanes; }

  static void pack(const LinearProblem& p, Block block, float* to) {
    typedef uint32_t Four __attribute__((vector_size(16)));
    const int64_t run = p.codes.run();
    auto* pairs = reinterpret_cast<uint32_t*>(to);
    float* of_runs = to + block.rows * p.K / 2;
    for (int r = 0; r < block.rows; ++r) {
      const uint16_t* row = p.x + (block.first + r) * p.x_row;
      const float row_scale = scale_of(p, row);
      for (int64_t k = 0; k < p.K; k += run) {
        Ints numbers[kUnit / kLanes];
        float* of_run = of_runs + (k / run * block.rows + r) * (1 + kNum);
        *of_run++ = to_integers(p, row, row_scale, k, run, numbers);
        Ints sums = {};
        for (int64_t i = 0; i < run / kLanes; ++i) sums += numbers[i];
        for (int i = 0; i < kNum; ++i) {
          const Ints of_lanes = lanes() % kNum == i ? sums : Ints{};
          of_run[i] = of_run[-1] * float(joined(of_lanes, [](Ints a, Ints b) { return a + b; }));
        }
        const auto* from = reinterpret_cast<const uint32_t*>(numbers);
        for (int64_t at = 0; at < run; at += kInputs) {
          for (int i = 0; i < kInputs / 2; i += 4) {
            const Four words = (load<Four>(from + at + i) & 0xffff) | load<Four>(from + at + i + kInputs / 2) << 16;
            uint32_t* place = pairs + ((k + at) / 2 + i) * block.rows + r * kNum;
            for (int pair = 0; pair < 4 / kNum; ++pair, place += block.rows * kNum) {
              std::memcpy(place, (const uint32_t*)&words + pair * kNum, sizeof(uint32_t) * kNum);
            }
          }
        }
      }
    }
  }

  static void multiply(const LinearProblem& p, Block block, const float* x, int64_t panel, Strip strip) {
    constexpr auto kEach = std::make_integer_sequence<int, kVectorRows>();
    static const Multiply* by_rows[] = {multiplies<4>(kEach), multiplies<6>(kEach), multiplies<8>(kEach)};
    by_rows[p.codes.bits / 2 - 2][block.rows - 1](p, block.first, x, panel, strip);
  }

 private:
  using Multiply = void (*)(const LinearProblem&, int64_t, const float*, int64_t, const Strip&);

  template <int kBits, int... R>
  static const Multiply* multiplies(std::integer_sequence<int, R...>) {
    static constexpr Multiply table[] = {multiply_rows<kBits, R + 1>...};
    return table;
  }

  // Multiplies a block's R rows by a panel, and stores them to their place in y.
  template <int kBits, int R>
  static void multiply_rows(const LinearProblem& p, int64_t first, const float* x, int64_t panel, const Strip& strip) {
    const auto* pairs = reinterpret_cast<const uint32_t*>(x);
    const float* of_run = x + R * p.K / 2;
    const int64_t run = p.codes.run(), num_eights = run / kInputs;
    alignas(64) float totals[R][kUnitLanes] = {};
    Scaling<kUnitLanes> scaling;
    for (int64_t k = 0, valid = 0; k < p.K; k += run, of_run += R * (1 + kNum), pairs += run / 2 * R) {
      if (k >= valid) valid = scaling.load_from(p.codes, panel, k);
      for (int64_t at = k * strip.ahead.step; at < (k + run) * strip.ahead.step; at += 64) {
        __builtin_prefetch(strip.ahead.from + at, 0, 2);
      }
      const uint8_t* unit = strip.weights + k / kUnit * p.codes.unit_bytes();
      const int first_eight = k % kUnit / kInputs;
      for (int lane = 0; lane < kUnitLanes; lane += 2 * kLanes) {
        Ints low[R], high[R];
        unrolled(std::make_integer_sequence<int, R>(), [&](auto r) { low[r] = high[r] = Ints{}; });
        const uint32_t* inputs = pairs;
        for (int eight = first_eight; eight < first_eight + num_eights; ++eight, inputs += kInputs / 2 * R) {
          take_pairs<kBits, kUnitLanes>(unit, eight, lane, [&](int pair, Pairs first, Pairs second) {
            for (int r = 0; r < R; ++r) {
              const auto each = (Pairs)in_register(repeated<kNum>(inputs + (pair * R + r) * kNum));
              low[r] = add_pairs(low[r], first, each);
              high[r] = add_pairs(high[r], second, each);
            }
          });
        }
        for (int r = 0; r < R; ++r) {
          const float* of_row = of_run + r * (1 + kNum);
          const Floats inputs_scale = splat(of_row[0]), inputs_sum = (Floats)repeated<kNum>(of_row + 1);
          const auto add = [&](int lanes, Ints sums) {
            const Floats scaled = __builtin_convertvector(sums, Floats) * inputs_scale;
            const Floats total = load<Floats>(totals[r] + lanes) + load<Floats>(scaling.scales + lanes) * scaled;
            store(totals[r] + lanes, total + load<Floats>(scaling.offsets + lanes) * inputs_sum);
          };
          add(lane, low[r]);
          add(lane + kLanes, high[r]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int output = 0; kNum == 2 && output < kOutputs; ++output) {
        totals[r][output] = totals[r][2 * output] + totals[r][2 * output + 1];
      }
      for (int part = 0; part < kHalf / kLanes; ++part) {
        Floats low[] = {load<Floats>(totals[r] + part * kLanes)};
        Floats high[] = {load<Floats>(totals[r] + kHalf + part * kLanes)};
        finish<1>(p, first + r, panel, part, low, high);
      }
    }
  }
};

}  // namespace
