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

// A way to multiply (panels.h) whose strips are whole panels of codes.
//
// Packed activations of a block: [K / 2][rows] pairs; then [K / run][rows][2]: the scale of a row's run, and the sum of
// its inputs.
struct ByCodes {
  using Packed = float;
  struct Scope {};
  static constexpr int kMostRows = kVectorRows;
  static int64_t depth(int64_t K) { return K; }
  static int64_t size(int64_t rows, int64_t K) { return rows * K + kLanes; }

  static void pack(const LinearProblem& p, Block block, float* to) {
    const int64_t run = p.codes.run();
    auto* pairs = reinterpret_cast<uint32_t*>(to);
    for (int r = 0; r < block.rows; ++r) {
      const uint16_t* row = p.x + (block.first + r) * p.x_row;
      const float row_scale = scale_of(p, row);
      float* of_run = to + block.rows * p.K / 2 + 2 * r;
      for (int64_t k = 0; k < p.K; k += run, of_run += 2 * block.rows) {
        Ints numbers[kUnit / kLanes];
        uint16_t halves[kUnit];
        of_run[0] = to_integers(p, row, row_scale, k, run, numbers);
        Ints sums = {};
        for (int64_t i = 0; i < run / kLanes; ++i) {
          sums += numbers[i];
          store(halves + i * kLanes, __builtin_convertvector(numbers[i], Halves));
        }
        of_run[1] = of_run[0] * float(joined(sums, [](Ints a, Ints b) { return a + b; }));
        for (int64_t i = 0; i < run / 2; ++i) pairs[(k / 2 + i) * block.rows + r] = load<uint32_t>(halves + 2 * i);
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
    const int64_t run = p.codes.run(), num_eights = run / kEight;
    alignas(64) float totals[R][kOutputs] = {};
    Scaling scaling;
    for (int64_t k = 0, valid = 0; k < p.K; k += run, of_run += 2 * R, pairs += run / 2 * R) {
      if (k >= valid) valid = scaling.load_from(p.codes, panel, k);
      for (int64_t at = k * strip.ahead.step; at < (k + run) * strip.ahead.step; at += 64) {
        __builtin_prefetch(strip.ahead.from + at, 0, 2);
      }
      const uint8_t* unit = strip.weights + k / kUnit * p.codes.unit_bytes();
      const int first_eight = k % kUnit / kEight;
      for (int lane = 0; lane < kOutputs; lane += 2 * kLanes) {
        Ints low[R], high[R];
        unrolled(std::make_integer_sequence<int, R>(), [&](auto r) { low[r] = high[r] = Ints{}; });
        const uint32_t* inputs = pairs;
        for (int eight = first_eight; eight < first_eight + num_eights; ++eight, inputs += kPairs * R) {
          take_pairs<kBits>(unit, eight, lane, [&](int pair, Pairs below, Pairs above) {
            for (int r = 0; r < R; ++r) {
              const auto each = (Pairs)in_register(inputs[pair * R + r] - Words{});
              low[r] = add_pairs(low[r], below, each);
              high[r] = add_pairs(high[r], above, each);
            }
          });
        }
        for (int r = 0; r < R; ++r) {
          const Floats inputs_scale = splat(of_run[2 * r]), inputs_sum = splat(of_run[2 * r + 1]);
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
      for (int part = 0; part < kHalf / kLanes; ++part) {
        Floats low[] = {load<Floats>(totals[r] + part * kLanes)};
        Floats high[] = {load<Floats>(totals[r] + kHalf + part * kLanes)};
        finish<1>(p, first + r, panel, part, low, high);
      }
    }
  }
};

}  // namespace
