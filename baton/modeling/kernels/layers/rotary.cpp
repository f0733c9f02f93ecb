// Rotary position embedding in place: rotates each head's first half and second half. Reads and writes memory once, in
// registers of fp32; torch's own operations would pass over it six times.
//
// T tokens, K heads, H head dim.

#include <algorithm>
#include <cstdint>

#include "common/entry.h"
#include "common/parallel.h"
#include "layers/rotary.h"

namespace {

constexpr int64_t kGrain = 16384;  // least numbers for which another thread pays

template <class Element>
void turn_all(const Turning& p, int64_t T, int num_threads) {
  const int64_t tokens = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, p.K * p.H));
  parallel_for(T, tokens, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) turn<Element>(p, t);
  });
}

}  // namespace

// Turns x [T][K][H] by cos and sin [T][H], all bf16 or all fp32. `token` and `head` are x's strides.
BATON_ENTRY const char* baton_turn_heads(void* x, const void* cos, const void* sin, int64_t T, int64_t K, int64_t H,
                                         int64_t token, int64_t head, bool is_bf16, int num_threads) {
  return guarded([&] {
    check(H % (2 * kLanes) == 0, "head dim ", H, " is not a multiple of ", 2 * kLanes);
    const Turning p{x, cos, sin, K, H, token, head};
    is_bf16 ? turn_all<uint16_t>(p, T, num_threads) : turn_all<float>(p, T, num_threads);
  });
}
