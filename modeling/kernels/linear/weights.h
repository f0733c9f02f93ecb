// A linear layer's tensors, checked, as a problem that has no rows yet (linear.cpp).

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "linear/dots.h"
#include "linear/panels.h"

namespace {

// Returns a vector's data, null where there is none.
template <class T>
const T* data(const std::optional<at::Tensor>& vector, at::ScalarType type, int64_t size) {
  if (!vector) return nullptr;
  TORCH_CHECK(vector->dtype() == type && vector->is_contiguous() && vector->numel() == size, "expected ", size, " of ",
              type);
  return static_cast<const T*>(vector->const_data_ptr());
}

// Calls `run` with the way to multiply such weights that has this name in modeling/kernels/products.py.
template <class Run>
void with_way(bool is_int8, std::string_view product, Run run) {
#ifdef __AMX_BF16__
  if (product == "tiles") return is_int8 ? run(InTiles<Int8>()) : run(InTiles<Bf16>());
#endif
  if (product == "dot") return is_int8 ? run(InPairs<Int8>()) : run(InPairs<Bf16>());
  TORCH_CHECK(product == "widened", "this kernel does not multiply as ", product);
  is_int8 ? run(Widened<Int8>()) : run(Widened<Bf16>());
}

// Operations around the products: scales, bias, norm and gate.
struct Around {
  const std::optional<at::Tensor>&scales, &bias, &gain_K;
  double eps;
  bool gated;
};

// Returns the problem without rows. The tensors must outlive it.
inline LinearProblem of_weights(const at::Tensor& panels_PKL, int64_t K, int64_t N, const Around& around,
                                std::string_view product) {
  const int64_t unit = product == "widened" ? 1 : kTileInputs, P = panels_PKL.size(0);
  TORCH_CHECK(panels_PKL.dim() == 3 && panels_PKL.is_contiguous() && panels_PKL.size(2) == 2 * kHalf &&
                  panels_PKL.size(1) == (K + unit - 1) / unit * unit,
              "the weights are packed for another number of inputs");
  TORCH_CHECK(panels_PKL.dtype() == at::kBFloat16 || (panels_PKL.dtype() == at::kChar && around.scales),
              "weights are bfloat16, or int8 with scales");
  TORCH_CHECK(N <= P * (around.gated ? 1 : 2) * kHalf, "the weights have fewer outputs than ", N);
  LinearProblem p{};
  p.panels = static_cast<const uint8_t*>(panels_PKL.const_data_ptr());
  p.scales = data<float>(around.scales, at::kFloat, P * 2 * kHalf);
  p.bias = data<float>(around.bias, at::kFloat, P * 2 * kHalf);
  p.gain = data<uint16_t>(around.gain_K, at::kBFloat16, K);
  p.N = N, p.K = K, p.P = P;
  p.eps = float(around.eps);
  p.gated = around.gated;
  with_way(panels_PKL.dtype() == at::kChar, product, [&](auto way) {
    p.depth = way.depth(K);
    p.panel_bytes = p.depth * way.kInputBytes;
  });
  return p;
}

}  // namespace
