// Checks of decode attention's rows, shared by the operators that run it.

#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/decode_attention.h"
#include "common/entry.h"

namespace {

// Which keys rows attend to, as entry points take it. B rows, G kv heads.
struct RowKeys {
  const int64_t* lengths;    // [B] keys of each row, up to its own
  const int32_t* picks;      // [layers][B][G][K], or null: all keys
  const int32_t* num_picks;  // [B][G]
  int64_t K;
  const int64_t* queries;  // [B], or null, as in AttentionProblem
  const int64_t* unseen;   // [B][2], or null
  const int64_t* pages;    // [B][num_pages], or null
  int64_t num_pages, page_tokens;
};

// Returns the rows' block tables; without pages there are none.
Pages pages_of(const RowKeys& keys, int64_t B) {
  if (!keys.pages) return {};
  const int64_t tokens = keys.page_tokens, most = keys.num_pages * tokens;
  check(tokens > 0 && (tokens & (tokens - 1)) == 0, tokens, " tokens of a page are no power of two");
  check(std::all_of(keys.lengths, keys.lengths + B, [&](int64_t length) { return length <= most; }),
        "a row has more keys than its block table names: ", most);
  return {keys.pages, keys.num_pages, __builtin_ctzll(uint64_t(tokens))};
}

// Checks how many rows each sequence has, at the place of its first row. `p` has addresses, lengths and pages.
void check_queries(const AttentionProblem& p) {
  for (int64_t row = 0, num = 1; row < p.B; row += num) {
    num = p.queries[row];
    check(num > 0 && row + num <= p.B, "a sequence has ", num, " rows from row ", row, " on");
    for (int64_t i = 1; i < num; ++i) {
      check(p.addresses[row + i] == p.addresses[row] && p.lengths[row + i] == p.lengths[row] + i,
            "a sequence's rows are tokens that follow each other");
      const auto* table = p.pages.addresses + row * p.pages.num;
      check(!p.pages.addresses || std::equal(table, table + p.pages.num, table + i * p.pages.num),
            "a sequence's rows have one block table");
    }
  }
}

// Checks the keys that each sequence leaves out, at the place of its first row.
void check_unseen(const AttentionProblem& p) {
  for (int64_t row = 0; row < p.B; ++row) {
    const int64_t first = p.unseen[2 * row], end = p.unseen[2 * row + 1];
    check(0 <= first && first <= end && end < p.lengths[row],
          "a row leaves out keys that it does not have, or its own");
  }
}

// Checks the keys that rows pick in all layers.
void check_picks(const AttentionProblem& p, int64_t num_layers) {
  check(!p.pages.addresses, "rows in pages attend to all keys, or leave out a range: they pick none");
  check(!p.queries && !p.unseen, "rows with picks are their sequences' only ones, and leave out no other keys");
  const int64_t num_lists = p.B * p.G;
  for (int64_t list = 0; list < num_layers * num_lists; ++list) {
    const int32_t* keys = p.picks + list * p.K;
    const int32_t num = p.num_picks[list % num_lists];
    const int64_t length = p.lengths[list % num_lists / p.G];
    check(num > 0 && num <= p.K, "every list picks a key, and at most ", p.K);
    check(std::all_of(keys, keys + num, [&](int32_t key) { return key >= 0 && key < length; }),
          "a key is picked that its row does not have");
  }
}

// Returns the problem with the keys that rows attend to, checked; of picks, those of the first layer. `p` has addresses,
// B and G.
AttentionProblem with_keys(AttentionProblem p, const RowKeys& keys, int64_t num_layers) {
  check(std::all_of(keys.lengths, keys.lengths + p.B, [](int64_t length) { return length > 0; }),
        "every row has a key, its own");
  p.lengths = keys.lengths, p.pages = pages_of(keys, p.B);
  p.queries = keys.queries, p.unseen = keys.unseen;
  p.picks = keys.picks, p.num_picks = keys.num_picks, p.K = keys.picks ? keys.K : 0;
  if (p.queries) check_queries(p);
  if (p.unseen) check_unseen(p);
  if (p.picks) check_picks(p, num_layers);
  return p;
}

}  // namespace
