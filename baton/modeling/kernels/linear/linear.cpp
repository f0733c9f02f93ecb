// Linear layers, fused with the norm before them and the gate or residual behind them:
//   y = x' W^T + b,  x' = x or RMSNorm(x);  then y, residual + y, or silu(gate) * up of y's two halves.
//
// Weights are bf16, or int8 with a scale for each output, or codes (codes.h). They are multiplied in one of three ways:
// widened to fp32 in registers, so that from a few rows on the products run at the rate of fp32 FMAs, or, of codes, as
// integers (by_codes.h); in pairs of bf16 by the processor's dot product, up to twice as fast (dots.h); or in tiles of
// bf16 where the processor has AMX (tiles.h), several times as fast. With fewer rows all run at the rate at which memory
// gives the weights. Sums are fp32, in the order of k whatever the batch, and a way is never mixed with another, so that
// a row's result depends on no other row: except that where rows are multiplied in pairs or tiles, for which codes are
// dequantised just before, few rows are multiplied by codes as integers (weights.h says how many).
//
// Weights are packed in panels of 32 outputs; gated, 16 gates and their 16 ups: a panel's halves. Within a panel they
// lie input by input: int8 one half behind the other; bf16 that is widened as 16 words of two, output i of the first
// half below that of the second; bf16 for pairs and tiles pair of inputs by pair of inputs, in 32 words of two, K filled
// up with zeros. A block of rows' activations is packed as well (widened: [K][rows] floats; pairs: [K / 2][rows] words
// of two bf16; tiles: [K / 32][16][32] bf16 for each 16 rows), and stays in the first-level cache while it meets a group of panels from the second.
//
// M rows, N outputs, K inputs, P panels.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "common/entry.h"
#include "common/sharing.h"
#include "linear/weights.h"

namespace {

constexpr int64_t kPackedBytes = 8 << 20;    // bytes of rows packed at a time, at most, if these are more than a task's
constexpr int64_t kTaskRows = 384;           // rows that a thread multiplies by a group of panels, at most
constexpr int64_t kGroupBytes = 512 * 1024;  // bytes of panels that stay in the second-level cache together

// Returns how many panels a thread multiplies many rows by before it takes the next ones: as many as stay in the cache, at
// least three times a thread where there are enough, and so many that all threads end at about the same time.
int64_t panels_of_a_group(const LinearProblem& p, int64_t panel_bytes, int64_t num_threads) {
  const int64_t in_cache = std::max<int64_t>(1, kGroupBytes / panel_bytes);
  const auto longest = [&](int64_t each) {
    const int64_t num_groups = (p.P + each - 1) / each;
    return (num_groups + num_threads - 1) / num_threads * each;
  };
  int64_t best = std::clamp<int64_t>(p.P / (3 * num_threads), 1, in_cache);
  for (int64_t each = best; each >= 1; --each) {
    if (longest(each) < longest(best)) best = each;
  }
  return best;
}

// Multiplies few rows: each thread has panels of its own.
template <class Way>
void run_few(const LinearProblem& p, const std::vector<Block>& blocks, const typename Way::Packed* packed,
             int num_threads) {
  const int64_t num_runs = std::min<int64_t>(num_threads, p.P);
  share_each(num_runs, num_threads, [&](int64_t run) {
    multiply_few<Way>(p, blocks, packed, p.P * run / num_runs, p.P * (run + 1) / num_runs);
  });
}

// Multiplies many rows. A task is a group of panels, which stays in the second-level cache while the rows of a part pass.
// Codes are dequantised there first.
template <class Way>
void run_many(const LinearProblem& p, const std::vector<Block>& blocks, const typename Way::Packed* packed,
              int num_threads) {
  const bool dequantises = p.dequantises();
  const int64_t panel_bytes = dequantises ? p.depth * Bf16::kBytes : p.panel_bytes, num_blocks = int64_t(blocks.size());
  const int64_t per_group = panels_of_a_group(p, panel_bytes, num_threads);
  const int64_t num_groups = (p.P + per_group - 1) / per_group;
  const int64_t num_parts = (num_blocks * Way::kMostRows + kTaskRows - 1) / kTaskRows;
  share(num_groups * num_parts, num_threads, [&](Pieces& tasks) {
    [[maybe_unused]] typename Way::Scope scope;
    const std::unique_ptr<Floats[]> room(dequantises ? new Floats[per_group * panel_bytes / sizeof(Floats)] : nullptr);
    auto* dequantised = reinterpret_cast<uint16_t*>(room.get());
    int64_t dequantised_group = -1;
    for (int64_t task = tasks.take(); task >= 0; task = tasks.take()) {
      const int64_t group = task / num_parts, part = task % num_parts;
      const int64_t first = group * per_group, last = std::min(p.P, first + per_group);
      const uint8_t* weights = room ? reinterpret_cast<uint8_t*>(dequantised) : p.panels + first * panel_bytes;
      for (int64_t panel = first; room && group != dequantised_group && panel < last; ++panel) {
        p.dequantise(p.codes, p.panels + panel * p.panel_bytes, panel, 0, p.depth, 0,
                     dequantised + (panel - first) * p.depth * kOutputs);
      }
      dequantised_group = group;
      for (int64_t i = num_blocks * part / num_parts; i < num_blocks * (part + 1) / num_parts; ++i) {
        for (int64_t panel = first; panel < last; ++panel) {
          const Strip whole{weights + (panel - first) * panel_bytes, 0, p.depth, nullptr, {weights, 0}};
          Way::multiply(p, blocks[i], packed + blocks[i].place, panel, whole);
        }
      }
    }
  });
}

template <class Way>
void run(const LinearProblem& p, int num_threads) {
  if (p.M == 0) return;
  using Packed = typename Way::Packed;
  const int64_t row_bytes = Way::size(Way::kMostRows, p.K) * int64_t(sizeof(Packed)) / Way::kMostRows;
  const int64_t most_rows = std::max(kTaskRows, kPackedBytes / row_bytes), num_passes = (p.M + most_rows - 1) / most_rows;
  for (int64_t pass = 0; pass < num_passes; ++pass) {
    const std::vector<Block> blocks = divide<Way>(p.M * pass / num_passes, p.M * (pass + 1) / num_passes, p.K);
    const std::unique_ptr<Packed[]> packed(new Packed[blocks.back().place + Way::size(blocks.back().rows, p.K)]);
    const auto pack = [&](int64_t i) { Way::pack(p, blocks[i], packed.get() + blocks[i].place); };
    if (p.M <= kFewRows) {
      for (int64_t i = 0; i < int64_t(blocks.size()); ++i) pack(i);
      run_few<Way>(p, blocks, packed.get(), num_threads);
    } else {
      share_each(int64_t(blocks.size()), num_threads, pack);
      run_many<Way>(p, blocks, packed.get(), num_threads);
    }
  }
}

}  // namespace

// Writes y [M][N] of x [M][K] and, unless null, residual [M][N], all bf16; rows are `x_row` and `residual_row` numbers
// apart. The other arguments are those of Weights.
BATON_ENTRY const char* baton_linear(const void* x, int64_t M, int64_t x_row, const void* panels, int64_t P, int64_t K,
                                     int64_t N, const float* scales, const float* bias, const void* gain, double eps,
                                     bool gated, bool is_int8, const Codes* codes, const void* residual,
                                     int64_t residual_row, void* y, const char* product, int num_threads) {
  return guarded([&] {
    const Weights weights{panels, P, K, N, scales, bias, gain, eps, gated, is_int8, codes};
    LinearProblem p = of_weights(weights, product);
    p.x = static_cast<const uint16_t*>(x), p.M = M, p.x_row = x_row;
    p.residual = static_cast<const uint16_t*>(residual), p.residual_row = residual_row;
    p.y = static_cast<uint16_t*>(y);
    if (p.takes_codes()) return run<ByCodes>(p, num_threads);
    with_way(weights, product, [&](auto way) { run<decltype(way)>(p, num_threads); });
  });
}

// Writes the weights `rows` [T] of the outputs, dequantised, to y [T][K] of fp32. A row is its place among the panels'.
BATON_ENTRY const char* baton_dequantised_rows(const void* panels, int64_t K, const Codes* codes, const int64_t* rows,
                                               int64_t T, float* y, const char* product, int num_threads) {
  return guarded([&] {
    const int64_t panel_bytes = K / kUnit * codes->unit_bytes();
    const bool is_rounded = std::string_view(product) != "widened";
    share_each(T, num_threads, [&](int64_t t) {
      const int64_t panel = rows[t] / kOutputs, output = rows[t] % kOutputs;
      const uint8_t* units = static_cast<const uint8_t*>(panels) + panel * panel_bytes;
      float* to = y + t * K;
      Scaling scaling;
      for (int64_t k = 0, valid = 0; k < K; ++k) {
        if (k >= valid) valid = scaling.load_from(*codes, panel, k);
        const int code = code_at(*codes, units + k / kUnit * codes->unit_bytes(), k % kUnit, output);
        to[k] = __builtin_fmaf(scaling.scales[output], float(code), scaling.offsets[output]);
      }
      for (int64_t k = 0; is_rounded && k < K; k += kLanes) {
        uint16_t rounded[kLanes];
        store_floats(rounded, load<Floats>(to + k));
        store(to + k, load_floats(rounded));
      }
    });
  });
}
