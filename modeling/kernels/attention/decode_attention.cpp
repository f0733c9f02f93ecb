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

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "attention/decode_checks.h"
#include "attention/decode_tasks.h"

namespace {

template <class P, Lie kLie>
void run_tasks(const AttentionProblem& p) {
  Tasks tasks;
  const int64_t num_threads = tasks.divide(p, at::get_num_threads(), Attention<P, kLie>::height);
  tasks.rewind();
  at::parallel_for(0, num_threads, 1, [&](int64_t own, int64_t) {
    Attention<P, kLie> attention(p, tasks.found());
    tasks.work(attention, p, own);
  });
}

template <class P>
void run(const AttentionProblem& p) {
  with_lie(p, [&](auto lie) { run_tasks<P, lie>(p); });
}

void check_rows(const at::Tensor& rows, const at::Tensor& addresses_B, int64_t B) {
  TORCH_CHECK(rows.scalar_type() == at::kBFloat16 || rows.scalar_type() == at::kFloat, "rows are bfloat16 or float32");
  TORCH_CHECK(rows.dim() == 3 && rows.stride(2) == 1, "rows must be [B, heads, H], each head contiguous");
  TORCH_CHECK(rows.size(0) == B && addresses_B.numel() == B && addresses_B.is_contiguous(), "an address for each row");
}

// Copies each row's new key and value to the place after the `lengths - 1` keys that the row has.
void append_kv(const at::Tensor& k_BGH, const at::Tensor& v_BGH, const at::Tensor& addresses_B, const at::Tensor& lengths_B,
               const std::optional<at::Tensor>& pages_BC, int64_t page_tokens) {
  const int64_t B = k_BGH.size(0), G = k_BGH.size(1), size = k_BGH.element_size(), H = k_BGH.size(2) * size;
  check_rows(k_BGH, addresses_B, B);
  check_rows(v_BGH, lengths_B, B);
  check_lengths(lengths_B);
  TORCH_CHECK(v_BGH.sizes() == k_BGH.sizes() && v_BGH.dtype() == k_BGH.dtype(), "keys and values have one shape");
  const Pages pages = pages_of(lengths_B, pages_BC, page_tokens);
  for (int64_t row = 0; row < B; ++row) {
    char* to = place_of(pages, row, addresses_B.const_data_ptr<int64_t>()[row],
                        lengths_B.const_data_ptr<int64_t>()[row] - 1, G * H);
    for (const at::Tensor* from : {&k_BGH, &v_BGH}) {
      const char* heads = static_cast<const char*>(from->const_data_ptr()) + row * from->stride(0) * size;
      for (int64_t g = 0; g < G; ++g, to += H) std::copy_n(heads + g * from->stride(1) * size, H, to);
    }
  }
}

at::Tensor decode_attention(const at::Tensor& q_BNH, const at::Tensor& addresses_B, const at::Tensor& lengths_B,
                            int64_t num_kv_heads, c10::string_view product, const std::optional<at::Tensor>& picks_BGK,
                            const std::optional<at::Tensor>& num_picks_BG, const std::optional<at::Tensor>& queries_B,
                            const std::optional<at::Tensor>& unseen_B2, const std::optional<at::Tensor>& pages_BC,
                            int64_t page_tokens) {
  const int64_t B = q_BNH.size(0), N = q_BNH.size(1), H = q_BNH.size(2), G = num_kv_heads;
  check_rows(q_BNH, addresses_B, B);
  check_rows(q_BNH, lengths_B, B);
  check_lengths(lengths_B);
  TORCH_CHECK(G > 0 && N % G == 0, N, " heads do not share ", G, " kv heads");
  TORCH_CHECK(H % 16 == 0, "head dim ", H, " is no multiple of 16");
  TORCH_CHECK(picks_BGK.has_value() == num_picks_BG.has_value(), "picks come with their numbers");
  auto o_BNH = at::empty(q_BNH.sizes(), q_BNH.options());
  const auto *addresses = addresses_B.const_data_ptr<int64_t>(), *lengths = lengths_B.const_data_ptr<int64_t>();
  AttentionProblem p{q_BNH.const_data_ptr(), addresses, lengths, nullptr, nullptr, o_BNH.data_ptr(), B, N, G, N / G, H, 0,
                     q_BNH.stride(0), q_BNH.stride(1), kLog2E / std::sqrt(float(H))};
  p.pages = pages_of(lengths_B, pages_BC, page_tokens);
  p.queries = queries_of(p, queries_B);
  p.unseen = unseen_of(p, unseen_B2);
  if (picks_BGK) p = with_picks(p, *picks_BGK, *num_picks_BG, 1);
  const bool is_bf16 = q_BNH.scalar_type() == at::kBFloat16;
  with_scores(p, is_bf16, product, [&](auto way) { run<decltype(way)>(p); });
  return o_BNH;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(BATON_OPERATORS, m) {
  m.def("append_kv(Tensor k_BGH, Tensor v_BGH, Tensor addresses_B, Tensor lengths_B, "
        "Tensor? pages_BC=None, int page_tokens=0) -> ()");
  m.def("decode_attention(Tensor q_BNH, Tensor addresses_B, Tensor lengths_B, int num_kv_heads, str product, "
        "Tensor? picks_BGK=None, Tensor? num_picks_BG=None, Tensor? queries_B=None, Tensor? unseen_B2=None, "
        "Tensor? pages_BC=None, int page_tokens=0) -> Tensor");
}
TORCH_LIBRARY_IMPL(BATON_OPERATORS, CPU, m) {
  m.impl("append_kv", &append_kv);
  m.impl("decode_attention", &decode_attention);
}
