// Notes the picks of a step's rows in a layer in their pools, and finds each list's next victim
// (generate_workers/residency/sparse/pool.py defines both).
//
// A pool's lists lie one behind the other, as one number for each place: a mark, and in the lower bits a position.
// Loops over a list are so simple that compilers make vectors of them.
//
// B rows, G kv heads, K picks at most, S keys.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "common/entry.h"
#include "common/parallel.h"

namespace {

constexpr int64_t kLists = 8;  // least lists for which another thread pays

struct Pool {
  int64_t num_places;
  int64_t first, end;  // places whose tokens may be evicted
  int64_t position_bits;
  int64_t most_count;  // largest value of a counter; 0: marks are positions of steps
};

// Marks the picks of one list. `Order` is wide enough for a mark and a position.
template <class Order>
void note(Order* orders, const int32_t* picks, int64_t num_picks, int64_t position, const Pool& pool) {
  const Order bits = Order(pool.position_bits), positions = (Order(1) << bits) - 1;
  if (pool.most_count == 0) {
    for (int64_t i = 0; i < num_picks; ++i) orders[picks[i]] = Order(position) << bits | (orders[picks[i]] & positions);
    return;
  }
  Order most = 0;
  for (int64_t i = 0; i < num_picks; ++i) most = std::max(most, orders[picks[i]] += Order(1) << bits);
  if (most >> bits < pool.most_count) return;
  for (int64_t j = 0; j < pool.num_places; ++j) orders[j] = (orders[j] >> bits >> 1 << bits) | (orders[j] & positions);
}

// Returns a number that grows with a key's distance. Closeness is never above 0.
inline int32_t farness(float closeness) { return std::bit_cast<int32_t>(closeness) & INT32_MAX; }

// Returns the place of the least mark; of equal marks, that of the farthest key; of equal keys, of the earliest token.
template <class Order>
int32_t victim(const Order* orders, const float* closeness, const Pool& pool) {
  const Order bits = Order(pool.position_bits);
  Order least = std::numeric_limits<Order>::max(), earliest = least;
  for (int64_t j = pool.first; j < pool.end; ++j) least = std::min(least, Order(orders[j] >> bits));
  int32_t farthest = 0;
  for (int64_t j = pool.first; j < pool.end; ++j) {
    farthest = std::max(farthest, orders[j] >> bits == least ? farness(closeness[j]) : 0);
  }
  for (int64_t j = pool.first; j < pool.end; ++j) {
    const bool may_go = (orders[j] >> bits == least) & (farness(closeness[j]) == farthest);
    earliest = std::min(earliest, may_go ? orders[j] : std::numeric_limits<Order>::max());
  }
  return int32_t(std::find(orders + pool.first, orders + pool.end, earliest) - orders);
}

}  // namespace

// Notes keys [B][G][K], of which num [B][G] count, and writes a victim's place for each list [B][G] of rows that are full;
// entries of other rows stay. `closeness` is [B][G][S]; a row whose address is 0 has no pool.
BATON_ENTRY const char* baton_note_picks(const int32_t* keys, const int32_t* num, int64_t B, int64_t G, int64_t K,
                                         const float* closeness, int64_t S, const int64_t* addresses,
                                         const int64_t* positions, int64_t num_places, int64_t first, int64_t end,
                                         int64_t position_bits, int64_t most_count, int64_t* victims, int num_threads) {
  const Pool pool{num_places, first, end, position_bits, most_count};
  const auto run = [&]<class Order>(Order, int64_t list) {
    const int64_t row = list / G;
    if (addresses[row] == 0) return;
    const int32_t* picks = keys + list * K;
    check(0 <= num[list] && num[list] <= K, "a list has at most ", K, " picks");
    check(std::all_of(picks, picks + num[list], [&](int32_t each) { return 0 <= each && each <= num_places; }),
          "picks are places, from 0 to ", num_places);
    auto* orders = reinterpret_cast<Order*>(addresses[row]) + list % G * (num_places + 1);
    note(orders, picks, num[list], positions[row], pool);
    if (positions[row] >= num_places) victims[list] = victim(orders, closeness + list * S, pool);
  };
  return guarded([&] {
    check(0 <= first && first < end && end <= num_places, "nobody may go");
    parallel_for(B * G, kLists, num_threads, [&](int64_t from, int64_t to) {
      for (int64_t list = from; list < to; ++list) most_count ? run(int32_t(), list) : run(int64_t(), list);
    });
  });
}
