// Checks of decode attention's rows, shared by the operators that run it.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "attention/decode_attention.h"

namespace {

void check_lengths(const at::Tensor& lengths) {
  const auto* first = lengths.const_data_ptr<int64_t>();
  TORCH_CHECK(std::all_of(first, first + lengths.numel(), [](int64_t length) { return length > 0; }),
              "every row has a key, its own");
}

// Returns the rows' block tables; without `pages_BC` there are none.
Pages pages_of(const at::Tensor& lengths_B, const std::optional<at::Tensor>& pages_BC, int64_t page_tokens) {
  if (!pages_BC) return {};
  const int64_t B = lengths_B.numel();
  TORCH_CHECK(pages_BC->scalar_type() == at::kLong && pages_BC->is_contiguous() && pages_BC->dim() == 2 &&
                  pages_BC->size(0) == B,
              "block tables must be [B, pages] int64, contiguous");
  TORCH_CHECK(page_tokens > 0 && (page_tokens & (page_tokens - 1)) == 0, page_tokens,
              " tokens of a page are no power of two");
  const int64_t most = pages_BC->size(1) * page_tokens;
  const auto* lengths = lengths_B.const_data_ptr<int64_t>();
  TORCH_CHECK(std::all_of(lengths, lengths + B, [&](int64_t length) { return length <= most; }),
              "a row has more keys than its block table names: ", most);
  return {pages_BC->const_data_ptr<int64_t>(), pages_BC->size(1), __builtin_ctzll(uint64_t(page_tokens))};
}

// Returns how many rows each sequence has, at the place of its first row; null: one each. `p` has addresses, lengths and
// pages.
const int64_t* queries_of(const AttentionProblem& p, const std::optional<at::Tensor>& queries_B) {
  if (!queries_B) return nullptr;
  TORCH_CHECK(queries_B->scalar_type() == at::kLong && queries_B->is_contiguous() && queries_B->numel() == p.B,
              "numbers of queries must be [B] int64, contiguous");
  const auto* queries = queries_B->const_data_ptr<int64_t>();
  for (int64_t row = 0, num = 1; row < p.B; row += num) {
    num = queries[row];
    TORCH_CHECK(num > 0 && row + num <= p.B, "a sequence has ", num, " rows from row ", row, " on");
    for (int64_t i = 1; i < num; ++i) {
      TORCH_CHECK(p.addresses[row + i] == p.addresses[row] && p.lengths[row + i] == p.lengths[row] + i,
                  "a sequence's rows are tokens that follow each other");
      const auto* table = p.pages.addresses + row * p.pages.num;
      TORCH_CHECK(!p.pages.addresses || std::equal(table, table + p.pages.num, table + i * p.pages.num),
                  "a sequence's rows have one block table");
    }
  }
  return queries;
}

// Returns the keys that each sequence leaves out, at the place of its first row; null: none.
const int64_t* unseen_of(const AttentionProblem& p, const std::optional<at::Tensor>& unseen_B2) {
  if (!unseen_B2) return nullptr;
  TORCH_CHECK(unseen_B2->scalar_type() == at::kLong && unseen_B2->is_contiguous() && unseen_B2->numel() == 2 * p.B,
              "keys that are left out must be [B, 2] int64, contiguous");
  const auto* unseen = unseen_B2->const_data_ptr<int64_t>();
  for (int64_t row = 0; row < p.B; ++row) {
    TORCH_CHECK(0 <= unseen[2 * row] && unseen[2 * row] <= unseen[2 * row + 1] && unseen[2 * row + 1] < p.lengths[row],
                "a row leaves out keys that it does not have, or its own");
  }
  return unseen;
}

// Returns the problem with the keys that rows pick, [layers][B][G][K], of the first layer; of all layers they are checked.
// `p` has lengths, B and G.
AttentionProblem with_picks(AttentionProblem p, const at::Tensor& picks, const at::Tensor& num_picks_BG, int64_t num_layers) {
  TORCH_CHECK(!p.pages.addresses, "rows in pages attend to all keys, or leave out a range: they pick none");
  TORCH_CHECK(!p.queries && !p.unseen, "rows with picks are their sequences' only ones, and leave out no other keys");
  const int64_t num_lists = p.B * p.G;
  p.K = picks.size(-1);
  TORCH_CHECK(picks.scalar_type() == at::kInt && picks.is_contiguous() && picks.numel() == num_layers * num_lists * p.K,
              "picks must be [B, G, K] int32 in each layer, contiguous");
  TORCH_CHECK(num_picks_BG.scalar_type() == at::kInt && num_picks_BG.is_contiguous() && num_picks_BG.numel() == num_lists,
              "numbers of picks must be [B, G] int32, contiguous");
  p.picks = picks.const_data_ptr<int32_t>();
  p.num_picks = num_picks_BG.const_data_ptr<int32_t>();
  for (int64_t list = 0; list < num_layers * num_lists; ++list) {
    const int32_t* keys = p.picks + list * p.K;
    const int32_t num = p.num_picks[list % num_lists];
    const int64_t length = p.lengths[list % num_lists / p.G];
    TORCH_CHECK(num > 0 && num <= p.K, "every list picks a key, and at most ", p.K);
    TORCH_CHECK(std::all_of(keys, keys + num, [&](int32_t key) { return key >= 0 && key < length; }),
                "a key is picked that its row does not have");
  }
  return p;
}

}  // namespace
