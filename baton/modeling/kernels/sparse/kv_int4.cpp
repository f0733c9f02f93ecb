// KV in 4 bits: group-wise asymmetric quantisation (FlexGen; Sheng et al., 2023, section 5), and back. A packed head of
// one token's K or V holds two codes a byte, the first channel's in the high half, then of each group `step, least` in
// fp16; a channel's value is least + code * step. Read and written once: unpacking is bound by the memory it writes.
//
// Each row has an address of packed heads and one of plain heads; a row's heads lie one after the other.
//
// B rows, G kv heads, H head dim, K picks at most.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/entry.h"
#include "common/parallel.h"
#include "common/simd.h"

namespace {

constexpr int64_t kRun = 512;  // heads of a task, K's and V's
constexpr int kLastLevel = 15;

struct Format {
  int64_t H, group;
  int64_t num_groups() const { return H / group; }
  int64_t bytes() const { return H / 2 + 4 * num_groups(); }
};

struct Group {
  _Float16 step, least;
};

// Returns kLanes codes, from kLanes / 2 bytes: a register's runs of 8 lanes each take their own 32 bits.
inline Ints codes_of(const uint8_t* from) {
  const Ints in_byte = lanes() & 7;
  const Ints shifts = (in_byte >> 1) * 8 + (1 - (in_byte & 1)) * 4;
  Words words;
  if constexpr (kLanes == 16) {
    uint32_t low, high;
    std::memcpy(&low, from, 4);
    std::memcpy(&high, from + 4, 4);
    words = lanes() < 8 ? low - Words{} : high - Words{};
  } else {
    uint32_t all = 0;
    std::memcpy(&all, from, kLanes / 2);
    words = all - Words{};
  }
  return (Ints)(words >> (Words)shifts) & kLastLevel;
}

inline float load_one(const float* from) { return *from; }
inline float load_one(const uint16_t* from) { return std::bit_cast<float>(uint32_t(*from) << 16); }
inline void store_one(float* to, float value) { *to = value; }
inline void store_one(uint16_t* to, float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  *to = value == value ? uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;
}

// Unpacks a head. Inlined, because a call takes some 8 % of the time.
template <class Element>
[[gnu::always_inline]] inline void unpack(const Format& f, const uint8_t* from, Element* to) {
  for (int64_t g = 0; g < f.num_groups(); ++g) {
    Group group;
    std::memcpy(&group, from + f.H / 2 + 4 * g, 4);
    const float step = group.step, least = group.least;
    const uint8_t* codes = from + g * f.group / 2;
    int64_t i = 0;
    for (; i + kLanes <= f.group; i += kLanes) {
      store_floats(to + i, __builtin_convertvector(codes_of(codes + i / 2), Floats) * step + least);
    }
    for (; i < f.group; ++i) store_one(to + i, float(codes[i / 2] >> (i % 2 ? 0 : 4) & kLastLevel) * step + least);
    to += f.group;
  }
}

// Measures a group's least value and step. A group that cannot be kept gets the step NaN, so that it unpacks as NaN.
Group measured(const float* x, int64_t num) {
  float least = x[0], most = x[0], zero = 0.0f;  // zero: NaN if any value is NaN or infinite
  int64_t i = 0;
  if (num >= kLanes) {
    Floats low = load_floats(x), high = low, none = {};
    for (; i + kLanes <= num; i += kLanes) {
      const Floats values = load_floats(x + i);
      low = values < low ? values : low;
      high = values > high ? values : high;
      none += values * 0.0f;
    }
    least = -reduced(-low, larger);
    most = reduced(high, larger);
    zero = sum_of(none);
  }
  for (; i < num; ++i) {
    least = std::min(least, x[i]);
    most = std::max(most, x[i]);
    zero += x[i] * 0.0f;
  }
  const auto kept = _Float16(least);
  const auto step = _Float16(std::max((most - float(kept)) / kLastLevel, 0.0f));
  if (zero != 0.0f || !std::isfinite(float(kept)) || !std::isfinite(float(step))) {
    return {_Float16(std::numeric_limits<float>::quiet_NaN()), kept};
  }
  return {step, kept};
}

// Finds the nearest levels, ties to even.
void levels(const float* x, int64_t num, float least, float per_step, int32_t* to) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bit for fractions
  const Floats last = splat(kLastLevel), first = {};
  int64_t i = 0;
  for (; i + kLanes <= num; i += kLanes) {
    const Floats level = larger(first, (load_floats(x + i) - least) * per_step);
    store(to + i, (Ints)((level < last ? level : last) + kRound) & kLastLevel);
  }
  for (; i < num; ++i) {
    to[i] = int32_t(std::nearbyint(std::clamp((x[i] - least) * per_step, 0.0f, float(kLastLevel))));
  }
}

// Packs a head. `x` and `codes` are room for one head.
template <class Element>
void pack(const Format& f, const Element* from, uint8_t* to, float* x, int32_t* codes) {
  for (int64_t i = 0; i + kLanes <= f.H; i += kLanes) store_floats(x + i, load_floats(from + i));
  for (int64_t i = f.H - f.H % kLanes; i < f.H; ++i) x[i] = load_one(from + i);
  for (int64_t g = 0; g < f.num_groups(); ++g) {
    const float* values = x + g * f.group;
    const Group group = measured(values, f.group);
    std::memcpy(to + f.H / 2 + 4 * g, &group, 4);
    if (float(group.step) > 0.0f) {
      levels(values, f.group, group.least, 1.0f / float(group.step), codes + g * f.group);
    } else {  // all channels are at one level, or the group is NaN
      std::fill_n(codes + g * f.group, f.group, 0);
    }
  }
  for (int64_t i = 0; i < f.H / 2; ++i) to[i] = uint8_t(codes[2 * i] << 4 | codes[2 * i + 1]);
}

struct Task {
  int64_t list, begin, end;  // items [begin, end) of one list
};

// Divides lists of `numbers` items each into runs for threads to share.
template <class Number>
std::vector<Task> divide(const Number* numbers, int64_t num_lists, int64_t run) {
  std::vector<Task> tasks;
  for (int64_t list = 0; list < num_lists; ++list) {
    const int64_t num = numbers[list];
    for (int64_t begin = 0; begin < num; begin += run) tasks.push_back({list, begin, std::min(begin + run, num)});
  }
  return tasks;
}

// Calls run(task) for all tasks, on all threads.
template <class Run>
void run_tasks(const std::vector<Task>& tasks, int num_threads, Run run) {
  parallel_for(int64_t(tasks.size()), 1, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(tasks[i]);
  });
}

// Calls run(f, element) with the format, checked, and a number of the plain heads' type.
template <class Run>
const char* with_format(int64_t H, int64_t group, bool is_bf16, Run run) {
  return guarded([&] {
    check(group > 0 && group % 2 == 0 && H % group == 0, "heads of ", H, " do not fall into groups of ", group);
    const Format f{H, group};
    is_bf16 ? run(f, uint16_t()) : run(f, float());
  });
}

void check_picks(const int32_t* picks, const int32_t* num_picks, int64_t num_lists, int64_t K) {
  for (int64_t list = 0; list < num_lists; ++list, picks += K) {
    const int32_t num = num_picks[list];
    check(num >= 0 && num <= K, "a list has at most ", K, " picks");
    check(std::all_of(picks, picks + num, [](int32_t pick) { return pick >= 0; }), "picks are counted from 0");
  }
}

}  // namespace

// Unpacks each row's heads to bf16 or fp32; `from` and `to` are addresses.
BATON_ENTRY const char* baton_unpack_kv(const int64_t* from_B, const int64_t* to_B, const int64_t* heads_B, int64_t B,
                                        int64_t head_dim, int64_t group, bool is_bf16, int num_threads) {
  return with_format(head_dim, group, is_bf16, [&](const Format& f, auto element) {
    using Element = decltype(element);
    run_tasks(divide(heads_B, B, kRun), num_threads, [&](const Task& task) {
      const auto* from = reinterpret_cast<const uint8_t*>(from_B[task.list]);
      auto* to = reinterpret_cast<Element*>(to_B[task.list]);
      for (int64_t head = task.begin; head < task.end; ++head) unpack(f, from + head * f.bytes(), to + head * f.H);
    });
  });
}

// Unpacks K and V of the packed tokens that each kv head picks, to these tokens' places among all. Picks of tokens that
// are not packed are skipped. Writes how many picks were unpacked.
BATON_ENTRY const char* baton_unpack_picked_kv(const int64_t* from_B, const int64_t* to_B, const int64_t* num_tokens_B,
                                               const int32_t* picks_BGK, const int32_t* num_picks_BG, int64_t B,
                                               int64_t G, int64_t K, int64_t head_dim, int64_t group, bool is_bf16,
                                               int64_t* num_unpacked, int num_threads) {
  return with_format(head_dim, group, is_bf16, [&](const Format& f, auto element) {
    using Element = decltype(element);
    check_picks(picks_BGK, num_picks_BG, B * G, K);
    std::atomic<int64_t> num_all = 0;
    run_tasks(divide(num_picks_BG, B * G, kRun / 2), num_threads, [&](const Task& task) {
      const int64_t row = task.list / G, g = task.list % G;
      const auto* from = reinterpret_cast<const uint8_t*>(from_B[row]);
      auto* to = reinterpret_cast<Element*>(to_B[row]);
      const int32_t* picks = picks_BGK + task.list * K;
      const int64_t num_tokens = num_tokens_B[row];
      int64_t num = 0;
      for (int64_t i = task.begin; i < task.end; ++i) {
        if (picks[i] >= num_tokens) continue;
        const int64_t key = 2 * G * picks[i] + g, value = key + G;
        unpack(f, from + key * f.bytes(), to + key * f.H);
        unpack(f, from + value * f.bytes(), to + value * f.H);
        ++num;
      }
      num_all += num;
    });
    *num_unpacked = num_all;
  });
}

// Packs each row's plain heads. On the calling thread alone: pushed KV must not take the cores that compute.
BATON_ENTRY const char* baton_pack_kv(const int64_t* from_B, const int64_t* to_B, const int64_t* heads_B, int64_t B,
                                      int64_t head_dim, int64_t group, bool is_bf16) {
  return with_format(head_dim, group, is_bf16, [&](const Format& f, auto element) {
    using Element = decltype(element);
    std::vector<float> x(f.H);
    std::vector<int32_t> codes(f.H);
    for (int64_t row = 0; row < B; ++row) {
      const auto* from = reinterpret_cast<const Element*>(from_B[row]);
      auto* to = reinterpret_cast<uint8_t*>(to_B[row]);
      for (int64_t head = 0; head < heads_B[row]; ++head) {
        pack(f, from + head * f.H, to + head * f.bytes(), x.data(), codes.data());
      }
    }
  });
}
