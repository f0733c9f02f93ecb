// A token's heads turned in place by their rotary factors (rotary.cpp).

#pragma once

#include <cstdint>

#include "common/simd.h"

namespace {

struct Turning {
  void* x;          // [T][K][H]
  const void* cos;  // [T][H]
  const void* sin;  // [T][H], negative in the first half
  int64_t K, H, token, head;
};

template <class Element>
void turn(const Turning& p, int64_t t) {
  const int64_t half = p.H / 2;
  const Element* cos = static_cast<const Element*>(p.cos) + t * p.H;
  const Element* sin = static_cast<const Element*>(p.sin) + t * p.H;
  for (int64_t k = 0; k < p.K; ++k) {
    Element* low = static_cast<Element*>(p.x) + t * p.token + k * p.head;
    Element* high = low + half;
    for (int64_t i = 0; i < half; i += kLanes) {
      const Floats a = load_floats(low + i), b = load_floats(high + i);
      store_floats(low + i, a * load_floats(cos + i) + b * load_floats(sin + i));
      store_floats(high + i, b * load_floats(cos + half + i) + a * load_floats(sin + half + i));
    }
  }
}

}  // namespace
