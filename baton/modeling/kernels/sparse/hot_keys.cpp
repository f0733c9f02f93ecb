// Keeps the keys that rows picked lately on a device, and copies those that are missing from home memory
// (generate_workers/residency/fetched/hot_keys.py defines places and records).
//
// Each kv head of a row has a record in a layer's area: which keys are there, ascending, and in which slots.
//
// B rows, G kv heads, K picks at most, C slots at most.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/entry.h"
#include "common/parallel.h"

namespace {

constexpr int64_t kLists = 8;  // least lists for which another thread pays
constexpr int64_t kHead = 3;   // numbers of a record before its keys

// The record of one kv head: the number of keys, the number of slots that were ever used, the key that was evicted last,
// then the keys, ascending, and their slots.
struct Record {
  int32_t* num;
  int32_t* num_used;
  int32_t* hand;
  int32_t* keys;
  int32_t* slots;

  Record(int32_t* at, int64_t C) : num(at), num_used(at + 1), hand(at + 2), keys(at + kHead), slots(at + kHead + C) {}
};

struct Scratch {
  std::vector<int32_t> others, missing, free, keys, slots;
};

// Finds a slot for each of one list's `num` keys, evicting keys that are not picked, in turn. Writes the slots, and the
// places in the list of the keys that are missing.
void admit(const Record& record, const int32_t* picks, int64_t num, int64_t num_slots, int32_t* slots, Scratch& s) {
  s.others.clear(), s.missing.clear(), s.free.clear(), s.keys.clear(), s.slots.clear();
  int32_t j = 0;
  for (int32_t i = 0; i < num; ++i) {
    while (j < *record.num && record.keys[j] < picks[i]) s.others.push_back(j++);
    if (j < *record.num && record.keys[j] == picks[i]) slots[i] = record.slots[j++];
    else s.missing.push_back(i);
  }
  while (j < *record.num) s.others.push_back(j++);
  const int64_t unused = std::min<int64_t>(num_slots - *record.num_used, int64_t(s.missing.size()));
  for (int64_t i = 0; i < unused; ++i) s.free.push_back((*record.num_used)++);
  const int64_t num_evicted = int64_t(s.missing.size()) - unused;
  check(num_evicted <= int64_t(s.others.size()), num, " keys are picked, and there are ", num_slots, " slots");
  // the keys behind the one that went last go first, so that all have their turn
  const auto behind = std::partition_point(s.others.begin(), s.others.end(),
                                           [&](int32_t at) { return record.keys[at] <= *record.hand; });
  std::rotate(s.others.begin(), behind, s.others.end());
  for (int64_t i = 0; i < num_evicted; ++i) {
    s.free.push_back(record.slots[s.others[i]]);
    *record.hand = record.keys[s.others[i]];
  }
  s.others.erase(s.others.begin(), s.others.begin() + num_evicted);
  std::sort(s.others.begin(), s.others.end());
  for (size_t i = 0; i < s.missing.size(); ++i) slots[s.missing[i]] = s.free[i];
  size_t other = 0;
  for (int64_t i = 0; i < num; ++i) {
    for (; other < s.others.size() && record.keys[s.others[other]] < picks[i]; ++other) {
      s.keys.push_back(record.keys[s.others[other]]), s.slots.push_back(record.slots[s.others[other]]);
    }
    s.keys.push_back(picks[i]), s.slots.push_back(slots[i]);
  }
  for (; other < s.others.size(); ++other) {
    s.keys.push_back(record.keys[s.others[other]]), s.slots.push_back(record.slots[s.others[other]]);
  }
  *record.num = int32_t(s.keys.size());
  std::copy(s.keys.begin(), s.keys.end(), record.keys);
  std::copy(s.slots.begin(), s.slots.end(), record.slots);
}

}  // namespace

// Finds the place of each pick [B][G][K] in its row's area: `places` [B][G][K]; of the missing ones it writes pairs of key
// and place [B][G][K][2], and their number [B][G]. A row's latest keys, from latest[b] on, lie at the area's start, in
// order; the others in slots, of which row b may use num_slots[b], behind the first `num_latest` places. `is_fresh`:
// whether nothing of the layer is there but the row's own key, that before num_tokens[b]. `records`: addresses.
BATON_ENTRY const char* baton_admit_picks(const int32_t* picks_BGK, const int32_t* num_BG, int64_t B, int64_t G,
                                          int64_t K, const int64_t* records_B, const int64_t* num_slots_B,
                                          const int64_t* latest_B, const int64_t* num_tokens_B, const bool* is_fresh_B,
                                          int64_t num_latest, int64_t most_slots, int32_t* places_BGK,
                                          int32_t* missing_BGK2, int32_t* num_missing_BG, int num_threads) {
  const int64_t C = most_slots;
  const auto run = [&](int64_t begin, int64_t end) {
    Scratch scratch;
    for (int64_t list = begin; list < end; ++list) {
      const int64_t row = list / G, num_slots = num_slots_B[row];
      auto* at = reinterpret_cast<int32_t*>(records_B[row]) + list % G * (kHead + 2 * C);
      const Record record(at, C);
      check(num_slots <= C, "a row has at most ", C, " slots");
      const bool is_fresh = is_fresh_B[row];
      if (is_fresh) *record.num = *record.num_used = *record.hand = 0;
      const int64_t latest = latest_B[row], own = num_tokens_B[row] - 1, num = num_BG[list];
      const auto* picks = picks_BGK + list * K;
      auto *places = places_BGK + list * K, *missing = missing_BGK2 + list * K * 2;
      check(num >= 0 && num <= K, "a list has at most ", K, " picks");
      check(own - latest < num_latest, "the latest keys have ", num_latest, " places");
      const int64_t num_early = std::lower_bound(picks, picks + num, latest) - picks;
      admit(record, picks, num_early, num_slots, places, scratch);
      int64_t num_missing = 0;
      const auto miss = [&](int64_t i) {
        missing[2 * num_missing] = picks[i];
        missing[2 * num_missing++ + 1] = places[i];
      };
      for (int64_t i = 0; i < num_early; ++i) places[i] += int32_t(num_latest);
      for (const int32_t i : scratch.missing) miss(i);
      for (int64_t i = num_early; i < num; ++i) {
        check(picks[i] <= own, "a key is picked that its row does not have");
        places[i] = int32_t(picks[i] - latest);
        if (is_fresh && picks[i] != own) miss(i);
      }
      num_missing_BG[list] = int32_t(num_missing);
    }
  };
  return guarded([&] { parallel_for(B * G, kLists, num_threads, run); });
}

// Copies K and V of keys to their places: pairs of key and place for each kv head. On the calling thread alone.
BATON_ENTRY const char* baton_copy_heads(const int64_t* from_B, const int64_t* to_B, const int32_t* pairs_BGK2,
                                  const int32_t* num_BG, int64_t B, int64_t G, int64_t K, int64_t head_bytes) {
  for (int64_t list = 0; list < B * G; ++list) {
    const auto* from = reinterpret_cast<const char*>(from_B[list / G]) + list % G * head_bytes;
    auto* to = reinterpret_cast<char*>(to_B[list / G]) + list % G * head_bytes;
    const int32_t* pairs = pairs_BGK2 + list * K * 2;
    for (int64_t i = 0; i < num_BG[list]; ++i) {
      const int64_t key = 2 * G * pairs[2 * i] * head_bytes, place = 2 * G * pairs[2 * i + 1] * head_bytes;
      std::copy_n(from + key, head_bytes, to + place);
      std::copy_n(from + key + G * head_bytes, head_bytes, to + place + G * head_bytes);
    }
  }
  return nullptr;
}

// Copies `num_bytes` of each row. On the calling thread alone.
BATON_ENTRY const char* baton_copy_rows(const int64_t* from_B, const int64_t* to_B, int64_t B, int64_t num_bytes) {
  for (int64_t row = 0; row < B; ++row) {
    std::copy_n(reinterpret_cast<const char*>(from_B[row]), num_bytes, reinterpret_cast<char*>(to_B[row]));
  }
  return nullptr;
}
