// What decode attention is to compute, and the tasks into which it is divided (decode_attention.cpp).

#pragma once

#include <cstdint>
#include <vector>

#include "attention/common.h"

namespace {

struct AttentionProblem {
  const void* q;             // [B][N][H]
  const int64_t* addresses;  // address of each row's first key
  const int64_t* lengths;    // number of keys of each row, up to its own
  const int32_t* picks;      // [B][G][K], or null: all keys
  const int32_t* num_picks;  // [B][G]
  void* o;                   // [B][N][H]
  int64_t B, N, G, R, H, K, q_row, q_head;
  float scale;
  const int64_t* queries = nullptr;  // [B] rows from this one on that are one sequence's last tokens; null: 1 each
  const int64_t* unseen = nullptr;   // [B][2] keys between a row's first and last ones, not attended to; null: none

  int64_t num_queries(int64_t row) const { return queries ? queries[row] : 1; }
};

// Returns where a row's key number `index` begins; its value lies behind the heads of the key. `bytes`: of one key, and
// of one value.
inline char* place_of(int64_t address, int64_t index, int64_t bytes) {
  return reinterpret_cast<char*>(address) + index * 2 * bytes;
}

// The keys [first, end) of a sequence, or of the keys that a kv head picks, for the kv heads [head, end_head) and the
// queries of `num_queries` rows from `row` on. A kv head has `width` = num_queries * R query heads, those of the first
// row first. Results are kept from `place` on, query head by query head, with room for `height` of each kv head.
struct Task {
  int64_t sequence, row, num_queries, width, height, head, end_head, first, end, place;

  // Returns where the results of a query head are kept: of a kv head, its number `index` among that one's.
  int64_t place_of(int64_t kv_head, int64_t index) const { return place + (kv_head - head) * height + index; }
};

// Results of tasks: for each query head of a task, the weighted sums [H] and the softmax.
struct Found {
  std::vector<Floats> sums;
  std::vector<Softmax> softmax;
};

}  // namespace
