// Notes the picks of a step's rows in a layer in their pools, and finds each list's next victim
// (generate_workers/residency/sparse/pool.py defines both).
//
// A pool's lists lie one behind the other, as one number for each place: a mark, and in the lower bits a position.
// Loops over a list are so simple that compilers make vectors of them.
//
// B rows, G kv heads, K picks at most, S keys.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

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

// Returns a victim's place for each list of rows that are full; entries of other rows mean nothing.
at::Tensor note_picks(const at::Tensor& keys_BGK, const at::Tensor& num_BG, const at::Tensor& closeness_BGS,
                      const at::Tensor& addresses_B, const at::Tensor& positions_B, int64_t num_places, int64_t first,
                      int64_t end, int64_t position_bits, int64_t most_count) {
  const int64_t B = keys_BGK.size(0), G = keys_BGK.size(1), K = keys_BGK.size(2), S = closeness_BGS.size(2);
  TORCH_CHECK(keys_BGK.scalar_type() == at::kInt && num_BG.scalar_type() == at::kInt && keys_BGK.is_contiguous() &&
                  num_BG.is_contiguous() && num_BG.numel() == B * G,
              "picks must be int32, contiguous");
  TORCH_CHECK(closeness_BGS.scalar_type() == at::kFloat && closeness_BGS.is_contiguous() && S >= num_places &&
                  closeness_BGS.numel() == B * G * S,
              "closeness must be float32, contiguous, of every place");
  for (const at::Tensor& each : {addresses_B, positions_B}) {
    TORCH_CHECK(each.scalar_type() == at::kLong && each.is_contiguous() && each.numel() == B,
                "there must be an address and a position for each row, in int64");
  }
  TORCH_CHECK(0 <= first && first < end && end <= num_places, "nobody may go");
  const Pool pool{num_places, first, end, position_bits, most_count};
  const auto *addresses = addresses_B.const_data_ptr<int64_t>(), *positions = positions_B.const_data_ptr<int64_t>();
  const auto *keys = keys_BGK.const_data_ptr<int32_t>(), *num = num_BG.const_data_ptr<int32_t>();
  const auto* closeness = closeness_BGS.const_data_ptr<float>();
  auto victims_BG = at::zeros({B, G}, positions_B.options());
  auto* victims = victims_BG.data_ptr<int64_t>();
  const auto run = [&]<class Order>(Order, int64_t list) {
    const int64_t row = list / G;
    if (addresses[row] == 0) return;
    const int32_t* picks = keys + list * K;
    TORCH_CHECK(0 <= num[list] && num[list] <= K, "a list has at most ", K, " picks");
    TORCH_CHECK(std::all_of(picks, picks + num[list], [&](int32_t each) { return 0 <= each && each <= num_places; }),
                "picks are places, from 0 to ", num_places);
    auto* orders = reinterpret_cast<Order*>(addresses[row]) + list % G * (num_places + 1);
    note(orders, picks, num[list], positions[row], pool);
    if (positions[row] >= num_places) victims[list] = victim(orders, closeness + list * S, pool);
  };
  at::parallel_for(0, B * G, kLists, [&](int64_t from, int64_t to) {
    for (int64_t list = from; list < to; ++list) most_count ? run(int32_t(), list) : run(int64_t(), list);
  });
  return victims_BG;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(BATON_OPERATORS, m) {
  m.def("note_picks(Tensor keys_BGK, Tensor num_BG, Tensor closeness_BGS, Tensor addresses_B, Tensor positions_B, "
        "int num_places, int first, int end, int position_bits, int most_count) -> Tensor");
}
TORCH_LIBRARY_IMPL(BATON_OPERATORS, CPU, m) { m.impl("note_picks", &note_picks); }
