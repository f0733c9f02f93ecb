// Attention of a few query tokens a sequence over its own keys: the ragged batch of a generation step. Its floor is
// reading every key and value once; nothing is padded, copied or gathered.
//
// A row is a query token. Its sequence's KV lies as [keys][2][G][H], keys before values, in bf16 or fp32, and is read in
// that order, a tile of kKeys tokens at a time. A sequence's rows, its last tokens, follow each other; each sees the keys
// up to its own. A row may leave out keys: those between its first and its last ones, or, if it is its sequence's only
// row, all that a list of the kv head does not pick. They are not read. Instead of lying in one piece the keys of all
// rows may lie in pages, which each row's block table names; results are the same, bit for bit. A task is a run of a sequence's keys, so that
// long sequences are shared among threads; runs of one sequence are merged by log-sum-exp. The R query heads of all rows
// that share a kv head are served from one reading:
//   scores   kLanes keys at a time: 32-bit words of each key are loaded and transposed, so that a register holds one word
//            of each of these keys, and a query's part of it is broadcast; or, in tiles, 16 keys as they lie are multiplied
//            with the queries of up to 16 heads, and only their scores are transposed;
//   softmax  online, a tile at a time;
//   values   a key's channels (in products of depth 2, two keys', interleaved) are multiplied by its weights, broadcast.
//
// B rows, N heads, G kv heads, R = N / G, H head dim, K picks at most. decode_checks.h has what rows must fulfil.

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "attention/decode_checks.h"
#include "attention/decode_tasks.h"
#include "common/entry.h"
#include "common/parallel.h"

namespace {

template <class P, Lie kLie>
void run_tasks(const AttentionProblem& p, int num_threads) {
  Tasks tasks;
  const int64_t num_own = tasks.divide(p, num_threads, Attention<P, kLie>::height);
  tasks.rewind();
  parallel_for(num_own, 1, num_threads, [&](int64_t own, int64_t) {
    Attention<P, kLie> attention(p, tasks.found());
    tasks.work(attention, p, own);
  });
}

template <class P>
void run(const AttentionProblem& p, int num_threads) {
  with_lie(p, [&](auto lie) { run_tasks<P, lie>(p, num_threads); });
}

}  // namespace

// Copies each row's new key and value to the place after the `lengths - 1` keys that the row has. `bytes`: of a head.
// `strides`: bytes between rows and heads of k, then of v.
BATON_ENTRY const char* baton_append_kv(const char* k, const char* v, const int64_t* strides, int64_t B, int64_t G,
                                        int64_t bytes, const int64_t* addresses, const int64_t* lengths,
                                        const int64_t* pages, int64_t num_pages, int64_t page_tokens) {
  return guarded([&] {
    const RowKeys keys{lengths, nullptr, nullptr, 0, nullptr, nullptr, pages, num_pages, page_tokens};
    AttentionProblem p{};
    p.addresses = addresses, p.B = B, p.G = G;
    p = with_keys(p, keys, 1);
    for (int64_t row = 0; row < B; ++row) {
      char* to = place_of(p.pages, row, addresses[row], lengths[row] - 1, G * bytes);
      for (const auto& [heads, row_bytes, head_bytes] : {std::tuple(k, strides[0], strides[1]), {v, strides[2], strides[3]}}) {
        for (int64_t g = 0; g < G; ++g, to += bytes) std::copy_n(heads + row * row_bytes + g * head_bytes, bytes, to);
      }
    }
  });
}

// Attends with q [B][N][H], whose rows and heads are `q_row` and `q_head` numbers apart, and writes o [B][N][H]. The
// arguments from `lengths` on are those of RowKeys.
BATON_ENTRY const char* baton_decode_attention(const void* q, int64_t q_row, int64_t q_head, void* o,
                                               const int64_t* addresses, int64_t B, int64_t N, int64_t G, int64_t H,
                                               const int64_t* lengths, const int32_t* picks, const int32_t* num_picks,
                                               int64_t K, const int64_t* queries, const int64_t* unseen,
                                               const int64_t* pages, int64_t num_pages, int64_t page_tokens,
                                               bool is_bf16, const char* product, int num_threads) {
  return guarded([&] {
    check(G > 0 && N % G == 0, N, " heads do not share ", G, " kv heads");
    check(H % 16 == 0, "head dim ", H, " is not a multiple of 16");
    AttentionProblem p{q, addresses, lengths, nullptr, nullptr, o, B, N, G, N / G, H, 0, q_row, q_head,
                       kLog2E / std::sqrt(float(H))};
    p = with_keys(p, {lengths, picks, num_picks, K, queries, unseen, pages, num_pages, page_tokens}, 1);
    with_scores(p, is_bf16, product, [&](auto way) { run<decltype(way)>(p, num_threads); });
  });
}
