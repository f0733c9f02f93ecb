// What decode attention is to compute, and the tasks into which it is divided (decode_attention.cpp).

#pragma once

#include <cstdint>
#include <vector>

#include "attention/common.h"

namespace {

// How the keys of all rows are found: one after the other, by lists of picked ones, or in pages.
enum class Lie { kInOrder, kPicked, kPaged };

// Rows' block tables: where rows have one, key number i is token i % 2^shift of page i / 2^shift.
struct Pages {
  const int64_t* addresses = nullptr;  // [B][num] address of each page of a row in the first layer; null: no tables
  int64_t num = 0;
  int shift = 0;

  int64_t address(int64_t row, int64_t index) const { return addresses[row * num + (index >> shift)]; }
  int64_t in_page(int64_t index) const { return index & ((int64_t(1) << shift) - 1); }
};

struct AttentionProblem {
  const void* q;             // [B][N][H]
  const int64_t* addresses;  // address of each row's first key; with pages, how far the layer lies behind the first
  const int64_t* lengths;    // number of keys of each row, up to its own
  const int32_t* picks;      // [B][G][K], or null: all keys
  const int32_t* num_picks;  // [B][G]
  void* o;                   // [B][N][H]
  int64_t B, N, G, R, H, K, q_row, q_head;
  float scale;
  const int64_t* queries = nullptr;  // [B] rows from this one on that are one sequence's last tokens; null: 1 each
  const int64_t* unseen = nullptr;   // [B][2] keys between a row's first and last ones, not attended to; null: none
  Pages pages = {};

  int64_t num_queries(int64_t row) const { return queries ? queries[row] : 1; }
};

// Returns where a row's key number `index` begins; its value lies behind the heads of the key. `bytes`: of one key, and
// of one value.
inline char* place_of(int64_t address, int64_t index, int64_t bytes) {
  return reinterpret_cast<char*>(address) + index * 2 * bytes;
}

// Returns the same of a row that may have its keys in pages.
inline char* place_of(const Pages& pages, int64_t row, int64_t address, int64_t index, int64_t bytes) {
  if (!pages.addresses) return place_of(address, index, bytes);
  return place_of(address + pages.address(row, index), pages.in_page(index), bytes);
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
