// Which ways of multiplying bf16 operands this library was compiled for, and its processor has: tiles (AMX), vectors by
// the processor's dot product (VDPBF16PS). The names of features do not tell which is the faster: on AMD's Zen 4 the dot
// product is, on Intel's Sapphire Rapids widening to fp32 (modeling/kernels/choosing.py measures it).

#include <torch/library.h>

#include "common/tiles.h"

namespace {

bool has_dots() {
#ifdef __AVX512BF16__
  return true;
#else
  return false;
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(BATON_OPERATORS, m) {
  m.def("has_dots() -> bool", &has_dots);
  m.def("has_tiles() -> bool", &has_tiles);
}
