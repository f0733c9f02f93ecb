// Which ways of multiplying bf16 operands this library was compiled for, and its processor has: tiles (AMX), vectors by
// the processor's dot product (VDPBF16PS). The names of features do not tell which is the faster: on AMD's Zen 4 the dot
// product is, on Intel's Sapphire Rapids widening to fp32 (baton/modeling/kernels/choosing.py measures it).

#include "common/entry.h"
#include "common/tiles.h"

// Returns whether the processor's dot products were compiled in.
BATON_ENTRY int baton_has_dots() {
#ifdef __AVX512BF16__
  return true;
#else
  return false;
#endif
}

// Returns whether tiles were compiled in, and this process may use them.
BATON_ENTRY int baton_has_tiles() { return has_tiles(); }
