// Rotary position embedding in place: rotates each head's first half and second half. Reads and writes memory once, in
// registers of fp32; torch's own operations would pass over it six times.
//
// T tokens, K heads, H head dim.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>

#include "layers/rotary.h"

namespace {

constexpr int64_t kGrain = 16384;  // least numbers for which another thread pays

template <class Element>
void turn_all(const Turning& p, int64_t T) {
  const int64_t tokens = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, p.K * p.H));
  at::parallel_for(0, T, tokens, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) turn<Element>(p, t);
  });
}

void check_factors(const at::Tensor& factors_TH, const at::Tensor& x_TKH) {
  TORCH_CHECK(factors_TH.dtype() == x_TKH.dtype() && factors_TH.is_contiguous() &&
                  factors_TH.numel() == x_TKH.size(0) * x_TKH.size(2),
              "cosines and sines must be [T, H], of the heads' dtype");
}

void turn_heads(at::Tensor& x_TKH, const at::Tensor& cos_TH, const at::Tensor& sin_TH) {
  TORCH_CHECK(x_TKH.scalar_type() == at::kBFloat16 || x_TKH.scalar_type() == at::kFloat,
              "heads are bfloat16 or float32");
  TORCH_CHECK(x_TKH.dim() == 3 && x_TKH.stride(2) == 1, "heads must be [T, K, H], each contiguous");
  TORCH_CHECK(x_TKH.size(2) % (2 * kLanes) == 0, "head dim ", x_TKH.size(2), " is no multiple of ", 2 * kLanes);
  check_factors(cos_TH, x_TKH);
  check_factors(sin_TH, x_TKH);
  const Turning p{x_TKH.data_ptr(), cos_TH.const_data_ptr(), sin_TH.const_data_ptr(), x_TKH.size(1), x_TKH.size(2),
                  x_TKH.stride(0), x_TKH.stride(1)};
  x_TKH.scalar_type() == at::kFloat ? turn_all<float>(p, x_TKH.size(0)) : turn_all<uint16_t>(p, x_TKH.size(0));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(BATON_OPERATORS, m) {
  m.def("turn_heads(Tensor(a!) x_TKH, Tensor cos_TH, Tensor sin_TH) -> ()");
}
TORCH_LIBRARY_IMPL(BATON_OPERATORS, CPU, m) { m.impl("turn_heads", &turn_heads); }
