// A linear layer's weights, as a problem that has no rows yet (linear.cpp).

#pragma once

#include <cstdint>
#include <limits>
#include <string_view>

#include "common/entry.h"
#include "linear/by_codes.h"
#include "linear/dots.h"
#include "linear/panels.h"

namespace {

// Rows that are multiplied by codes, at most, where more are multiplied in tiles or pairs of dequantised weights.
constexpr int64_t kTileCodeRows = 4, kDotCodeRows = kFewRows, kAllRows = std::numeric_limits<int64_t>::max();

// Weights as entry points take them. P panels, K inputs, N outputs.
struct Weights {
  const void* panels;  // [P][J][32] of bf16 or int8, J as `depth` of the way to multiply says; or codes
  int64_t P, K, N;
  const float* scales;  // [P][32] of int8, or null
  const float* bias;    // [P][32], or null
  const void* gain;     // [K] of the norm, bf16, or null
  double eps;
  bool gated, is_int8;
  const Codes* codes;  // of panels that hold codes, or null
};

// Calls `run` with the way to multiply such weights that has this name in baton/modeling/kernels/products.py. Codes are
// dequantised for it, unless the rows are few enough for ByCodes.
template <class Run>
void with_way(const Weights& weights, std::string_view product, Run run) {
#ifdef __AMX_BF16__
  if (product == "tiles") return weights.is_int8 ? run(InTiles<Int8>()) : run(InTiles<Bf16>());
#endif
  if (product == "dot") return weights.is_int8 ? run(InPairs<Int8>()) : run(InPairs<Bf16>());
  check(product == "widened", "this kernel does not multiply as ", product);
  weights.is_int8 ? run(Widened<Int8>()) : run(Widened<Bf16>());
}

// Returns the problem without rows. What the weights point to must outlive it.
inline LinearProblem of_weights(const Weights& weights, std::string_view product) {
  LinearProblem p{};
  p.panels = static_cast<const uint8_t*>(weights.panels);
  p.scales = weights.scales, p.bias = weights.bias;
  p.gain = static_cast<const uint16_t*>(weights.gain);
  p.N = weights.N, p.K = weights.K, p.P = weights.P;
  p.eps = float(weights.eps);
  p.gated = weights.gated;
  with_way(weights, product, [&](auto way) {
    p.depth = way.depth(p.K);
    p.panel_bytes = p.depth * (weights.is_int8 ? Int8::kBytes : Bf16::kBytes);
  });
  if (weights.codes) {
    check(p.K % kUnit == 0, p.K, " inputs are not whole units of ", kUnit);
    p.codes = *weights.codes;
    check(p.codes.bits == 4 || p.codes.bits == 6 || p.codes.bits == 8, "there are no codes of ", p.codes.bits, " bits");
    const Dequantise all[] = {dequantise<4>, dequantise<6>, dequantise<8>};
    p.dequantise = all[p.codes.bits / 2 - 2];
    p.code_rows = product == "tiles" ? kTileCodeRows : product == "dot" ? kDotCodeRows : kAllRows;
    p.panel_bytes = p.depth / kUnit * p.codes.unit_bytes();
  }
  return p;
}

}  // namespace
