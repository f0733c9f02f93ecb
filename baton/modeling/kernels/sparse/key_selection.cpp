// Selects the keys that each row of a generation step attends to, by partial keys (baton/modeling/forward/selection.py
// defines how). Its floor is reading every partial key once.
//
// A row's partial keys lie as [blocks][G][R][16], 16 keys a block, in bf16: a register holds one column of as many keys
// as it has lanes, so that nothing is transposed. A task is a run of a row's blocks, scored in memory's order for all
// heads; the thread that finishes a row's last run picks for that row. A list's n best are found without sorting:
// counting the scores above a bound halves the span of scores again and again, until few are left.
//
// A score that is NaN counts below the row's other scores, and does not affect other rows.
//
// B rows, N heads, G kv heads, J = N / G, R columns, K picks at most.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "common/entry.h"
#include "common/parallel.h"
#include "common/simd.h"

namespace {

constexpr int kBlock = 16;               // keys that lie together
constexpr int kParts = kBlock / kLanes;  // registers of one block's column
constexpr int kHeads = 4;                // query heads whose sums are held in registers at a time
constexpr int64_t kTasks = 4;            // tasks for each thread, at least
constexpr int kLine = 64;                // bytes that are fetched at a time
constexpr int kAhead = 4096;             // distance in bytes from the memory that is read to the memory that is fetched
constexpr float kLeast = -FLT_MAX;       // least closeness of a key; only kNone is below it
constexpr float kNone = -std::numeric_limits<float>::infinity();  // closeness of a place that holds no key

struct Problem {
  const float* q;               // [B][N][R]
  const int64_t* addresses;     // address of each row's partial keys
  const int64_t* tokens;        // tokens of each row, of which most_share is taken
  const int64_t* lengths;       // keys of each row
  int64_t num_new;              // keys at a row's end that have no partial key, and are always picked
  int64_t num_first, num_last;  // first and last keys that are always picked
  int64_t B, N, G, J, R, K;
  float alpha;
  double most_share;
  int64_t free_keys;   // keys that any row may pick by score
  int32_t* picks;      // [B][G][K]
  int32_t* num_picks;  // [B][G]
  float* closeness;    // [B][G][S]; not wanted where S is negative
  int64_t S;

  int64_t num_scored(int64_t row) const { return lengths[row] - num_new; }
  int64_t num_blocks(int64_t row) const { return (num_scored(row) + kBlock - 1) / kBlock; }

  // Most picks by score, and most picks in all.
  int64_t most_by_score(int64_t row) const {
    const auto share = int64_t(std::floor(most_share * double(tokens[row])));
    return std::min(num_scored(row), std::max(free_keys, share));
  }
  int64_t most_picks(int64_t row) const {
    const int64_t length = lengths[row], last = std::max(num_last, num_new);
    return std::min(length, most_by_score(row) + std::min(length, num_first) + std::min(length, last));
  }
};

// Returns a bit for each lane that is true.
inline uint32_t bits_of(Ints lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)lanes);
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= uint32_t(lanes[lane] & 1) << lane;
  return bits;
#endif
}

// Writes those lanes of `values` that have a bit, in order, and returns their number. May write up to a whole register.
template <class Vector, class Number>
inline int64_t compress(Number* to, Vector values, uint32_t bits) {
#ifdef __AVX512F__
  store(to, _mm512_maskz_compress_epi32(__mmask16(bits), (__m512i)values));
  return std::popcount(bits);
#else
  int64_t num = 0;
  for (; bits; bits &= bits - 1) to[num++] = values[std::countr_zero(bits)];
  return num;
#endif
}

// Returns how many lanes were true, where each true lane took 1 away.
inline int64_t counted(Ints count) {
  int64_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += count[lane];
  return sum;
}

// Scores of keys with query heads: for each row's blocks in order, [N][kParts] registers.
class Scores {
 public:
  explicit Scores(const Problem& problem) : p_(problem), first_blocks_(p_.B + 1) {
    for (int64_t row = 0; row < p_.B; ++row) first_blocks_[row + 1] = first_blocks_[row] + p_.num_blocks(row);
    registers_ = std::make_unique_for_overwrite<Floats[]>(first_blocks_.back() * p_.N * kParts);
  }

  // Returns a block's scores for the query heads from number `head` on.
  Floats* at(int64_t row, int64_t block, int64_t head) const {
    return &registers_[((first_blocks_[row] + block) * p_.N + head) * kParts];
  }

  // Scores the blocks [first, end) of a row.
  void run(int64_t row, int64_t first, int64_t end) const {
    const auto* keys = reinterpret_cast<const uint16_t*>(p_.addresses[row]) + first * p_.G * p_.R * kBlock;
    for (int64_t block = first; block < end; ++block) {
      for (int64_t g = 0; g < p_.G; ++g, keys += p_.R * kBlock) {
        const float* q = p_.q + (row * p_.N + g * p_.J) * p_.R;
        Floats* to = at(row, block, g * p_.J);
        for (int64_t h = 0; h < p_.J; h += kHeads, q += kHeads * p_.R, to += kHeads * kParts) {
          switch (p_.J - h) {
            case 1: score<1>(q, keys, to); break;
            case 2: score<2>(q, keys, to); break;
            case 3: score<3>(q, keys, to); break;
            default: score<kHeads>(q, keys, to);
          }
        }
      }
    }
  }

 private:
  // Scores a block's keys with C query heads. Fetches later keys meanwhile: the processor's own prefetcher is late.
  template <int C>
  void score(const float* q, const uint16_t* keys, Floats* to) const {
    Floats sums[C][kParts] = {};
    for (int64_t r = 0; r < p_.R; ++r, keys += kBlock) {
      if (r % (kLine / 2 / kBlock) == 0) __builtin_prefetch(keys + kAhead / 2, 0, 3);
      for (int part = 0; part < kParts; ++part) {
        const Floats column = load_floats(keys + part * kLanes);
        for (int c = 0; c < C; ++c) sums[c][part] += column * q[c * p_.R + r];
      }
    }
    for (int c = 0; c < C; ++c) std::copy_n(sums[c], kParts, to + c * kParts);
  }

  const Problem& p_;
  std::vector<int64_t> first_blocks_;  // number of each row's first block among all
  std::unique_ptr<Floats[]> registers_;
};

// The keys of a list that are picked by score: those above `score`, and the first `num_ties` of those that equal it.
struct Cut {
  float score;
  int64_t num_ties;
};

// Finds the n best of `num` scores, of which none is above 0. The last register is filled with kNone.
class Cutter {
 public:
  // `guess`: how far below 0 the n-th best score may be.
  Cut find(const float* scores, int64_t num, int64_t n, float guess) {
    if (n == num) return {kNone, 0};
    float high = 0.0f, low = -std::clamp(guess, 1.0f, 16.0f);
    int64_t num_high = 0, num_low = above(scores, num, low);
    while (num_low < n && low > kLeast) {
      high = low, num_high = num_low;
      low = low > -kFarthest ? 2 * low : kLeast;
      num_low = low > kLeast ? above(scores, num, low) : num;
    }
    // Now num_high < n <= num_low: the n-th best is in (low, high], where kLeast itself counts as inside.
    for (int i = 0; i < kHalvings && num_low - num_high > kFew && low > kLeast; ++i) {
      const float middle = (low + high) / 2;
      const int64_t num_middle = above(scores, num, middle);
      (num_middle < n ? high : low) = middle;
      (num_middle < n ? num_high : num_low) = num_middle;
    }
    return among(scores, num, n - num_high, low > kLeast ? low : kNone, high);
  }

 private:
  static constexpr float kFarthest = 1024.0f;
  static constexpr int kHalvings = 16;
  static constexpr int64_t kFew = 64;  // scores that are looked at one by one

  static int64_t above(const float* scores, int64_t num, float bound) {
    Ints count = {};
    for (int64_t j = 0; j < num; j += kLanes) count += load<Floats>(scores + j) > splat(bound);
    return -counted(count);
  }

  // Returns the n best of the scores in (low, high].
  Cut among(const float* scores, int64_t num, int64_t n, float low, float high) {
    few_.resize(num + kLanes);
    int64_t num_few = 0;
    for (int64_t j = 0; j < num; j += kLanes) {
      const auto values = load<Floats>(scores + j);
      num_few += compress(&few_[num_few], values, bits_of((values > splat(low)) & (values <= splat(high))));
    }
    const auto nth = few_.begin() + n - 1;
    std::nth_element(few_.begin(), nth, few_.begin() + num_few, std::greater<>());
    return {*nth, 1 + std::count(few_.begin(), nth, *nth)};
  }

  std::vector<float> few_;
};

// One thread's picking, row by row, from scores.
class Picker {
 public:
  Picker(const Problem& problem, const Scores& scores) : p_(problem), scores_(scores) {}

  void run(int64_t row) {
    const int64_t num_blocks = p_.num_blocks(row), stride = num_blocks * kBlock;
    closeness_.resize(p_.G * stride);
    int64_t num_close = 0;
    for (int64_t g = 0; g < p_.G; ++g) num_close += join(row, g, &closeness_[g * stride]);
    if (p_.S >= 0) {
      for (int64_t g = 0; g < p_.G; ++g) {
        std::copy_n(&closeness_[g * stride], p_.num_scored(row), p_.closeness + (row * p_.G + g) * p_.S);
      }
    }
    const int64_t mean = std::max<int64_t>(1, (num_close + p_.G - 1) / p_.G);
    const int64_t n = std::min(mean, p_.most_by_score(row));
    for (int64_t g = 0; g < p_.G; ++g) {
      const float* closeness = &closeness_[g * stride];
      list(row, g, closeness, cutter_.find(closeness, p_.num_scored(row), n, p_.alpha));
    }
  }

 private:
  // Stores how close each key comes to the best one, for that query head of the kv head for which it comes closest;
  // returns how many keys come closer than alpha.
  int64_t join(int64_t row, int64_t g, float* to) {
    largest_.assign(p_.J, splat(kLeast));
    each_register(row, g, [&](const Floats* scores, int64_t, Ints is_key) {
      for (int64_t h = 0; h < p_.J; ++h) largest_[h] = larger(is_key ? scores[h * kParts] : splat(kLeast), largest_[h]);
    });
    for (Floats& each : largest_) each = splat(largest_of(each));
    Ints count = {};
    each_register(row, g, [&](const Floats* scores, int64_t first, Ints is_key) {
      Floats most = splat(kLeast);
      for (int64_t h = 0; h < p_.J; ++h) most = larger(scores[h * kParts] - largest_[h], most);
      most = is_key ? most : splat(kNone);
      count += most > splat(-p_.alpha);
      store(to + first, most);
    });
    return -counted(count);
  }

  // Calls use(scores, first, is_key) for all registers of a row's keys: `scores` are those of the kv head's first query
  // head; those of the other heads follow, kParts registers apart.
  template <class Use>
  void each_register(int64_t row, int64_t g, Use use) {
    const int64_t num_blocks = p_.num_blocks(row), num = p_.num_scored(row);
    for (int64_t block = 0; block < num_blocks; ++block) {
      const Floats* scores = scores_.at(row, block, g * p_.J);
      for (int part = 0; part < kParts; ++part) {
        const int64_t first = block * kBlock + part * kLanes;
        use(scores + part, first, lanes() < int(num - first));
      }
    }
  }

  // Writes a kv head's picks, in order.
  void list(int64_t row, int64_t g, const float* closeness, const Cut& cut) {
    const int64_t num = p_.num_scored(row), length = p_.lengths[row];
    const int end_first = int(std::min(p_.num_first, num)), last = int(std::max<int64_t>(0, length - p_.num_last));
    int32_t* picks = p_.picks + (row * p_.G + g) * p_.K;
    int64_t num_picks = 0, num_ties = cut.num_ties;
    for (int64_t j = 0; j < num; j += kLanes) {
      const auto values = load<Floats>(closeness + j);
      const Ints keys = lanes() + int(j);
      const Ints is_always = (keys < end_first) | ((keys >= last) & (keys < int(num)));
      uint32_t bits = bits_of((values > splat(cut.score)) | is_always);
      if (num_ties > 0) {
        uint32_t ties = bits_of(values == splat(cut.score));
        while (std::popcount(ties) > num_ties) ties ^= std::bit_floor(ties);
        num_ties -= std::popcount(ties);
        bits |= ties;
      }
      num_picks += compress(picks + num_picks, keys, bits);
    }
    for (int64_t key = num; key < length; ++key) picks[num_picks++] = int32_t(key);
    p_.num_picks[row * p_.G + g] = int32_t(num_picks);
  }

  const Problem& p_;
  const Scores& scores_;
  Cutter cutter_;
  std::vector<float> closeness_;  // [G][keys], padded to whole blocks with kNone
  std::vector<Floats> largest_;   // [J]
};

void select(const Problem& p, int num_threads) {
  const int64_t num_runs = (kTasks * num_threads + p.B - 1) / p.B;
  const Scores scores(p);
  std::atomic<int64_t> next = 0;
  std::vector<std::atomic<int64_t>> num_left(p.B);  // runs that are not scored yet
  for (auto& each : num_left) each = num_runs;
  parallel_for(num_threads, 1, num_threads, [&](int64_t, int64_t) {
    Picker picker(p, scores);
    for (int64_t task = next++; task < p.B * num_runs; task = next++) {
      const int64_t row = task / num_runs, run = task % num_runs, num_blocks = p.num_blocks(row);
      scores.run(row, num_blocks * run / num_runs, num_blocks * (run + 1) / num_runs);
      if (--num_left[row] == 0) picker.run(row);
    }
  });
}

// Returns the problem, checked, without the lists that it is to write.
Problem checked(Problem p) {
  check(p.free_keys > 0, "a row may pick no key");
  check(p.G > 0 && p.N % p.G == 0, p.N, " heads do not share ", p.G, " kv heads");
  p.J = p.N / p.G;
  for (int64_t row = 0; row < p.B; ++row) {
    check(p.lengths[row] > 0 && p.num_scored(row) >= 0, "every row has a key, its own");
    check(p.S < 0 || p.num_scored(row) <= p.S, "closeness has no room for every key");
    p.K = std::max(p.K, p.most_picks(row));
  }
  p.K = (p.K + 2 * kBlock - 1) / kBlock * kBlock;  // lists are written register by register
  return p;
}

}  // namespace

// Selects keys for q [B][N][R] and writes lists of `K` picks [B][G][K], their numbers [B][G], and closeness [B][G][S]
// unless S is negative. Where `picks` is null it only writes the room that a list needs to `K`.
BATON_ENTRY const char* baton_select_keys(const float* q, const int64_t* addresses, const int64_t* lengths,
                                          const int64_t* tokens, int64_t B, int64_t N, int64_t G, int64_t R,
                                          int64_t num_new, double alpha, double most_share, int64_t free_keys,
                                          int64_t num_first, int64_t num_last, float* closeness, int64_t S,
                                          int32_t* picks, int32_t* num_picks, int64_t* K, int num_threads) {
  return guarded([&] {
    const Problem p = checked({q, addresses, tokens, lengths, num_new, num_first, num_last, B, N, G, 0, R, 0,
                               float(alpha), most_share, free_keys, picks, num_picks, closeness, S});
    *K = p.K;
    if (picks && B > 0) select(p, num_threads);
  });
}
