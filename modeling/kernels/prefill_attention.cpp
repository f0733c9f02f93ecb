// Blocked attention of many queries for CPUs with AVX-512 BF16: what a prefill spends most of its time on.
//
// softmax(q k^T / sqrt(H)) v and the log-sum-exp of the scores, dense or causal (query t sees keys 0 to t), grouped
// heads. Dot products are bf16 with fp32 sums (VDPBF16PS); the softmax is online, so scores live in a tile that stays
// in the first-level cache (Dao et al., FlashAttention, 2022), and a tile that no query sees is never computed.
//
// A task is a kv head and a block of query tokens. The R heads that share the kv head are rows of one matrix: a row is
// a (token, head) pair, token by token. For each tile of keys, K and V are packed once as VDPBF16PS reads them:
//   K: 32-bit words (k[j][2p], k[j][2p+1]) as [H/2][keys]: 16 keys to a register, a row's pair is broadcast;
//   V: 32-bit words (v[2i][h], v[2i+1][h]) as [keys/2][H]: 16 channels to a register, a row's two weights are broadcast.
//
// T query tokens, S keys, N heads, G kv heads, R = N / G, H head dim. Strides are in elements.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "avx512.h"

namespace {

constexpr int kRows = 6;     // rows whose sums are held in registers at a time
constexpr int kKeys = 128;   // keys of a tile
constexpr int kTokens = 96;  // query tokens of a task, at most

struct Problem {
  const uint16_t* q;
  const uint16_t* k;
  const uint16_t* v;
  uint16_t* o;
  float* lse;
  int64_t T, S, N, G, R;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  bool causal;
  float scale;
};

// A thread's working memory for head dim H.
template <int H>
struct Scratch {
  alignas(64) uint32_t k[H / 2][kKeys];
  alignas(64) uint32_t v[kKeys / 2][H];
  alignas(64) float scores[kRows][kKeys];
  alignas(64) uint16_t weights[kRows][kKeys];
  std::vector<uint16_t> q;  // [rows][H], scaled by nothing: the scale is applied to fp32 scores
  std::vector<float> sums;  // [rows][H]: weighted values so far
  std::vector<float> largest;
  std::vector<float> total;
};

// Packs keys [first, first + count) of one kv head; the rest of the tile is zero.
template <int H>
void pack(const Problem& p, int64_t g, int64_t first, int count, Scratch<H>& s) {
  const int padded = (count + 1) & ~1;
  constexpr int kPairs = std::min(kLanes, H / 2);
  for (int j = 0; j < kKeys; j += kLanes) {
    for (int pair = 0; pair < H / 2; pair += kPairs) {
      const auto wanted = __mmask16((1u << std::min(kPairs, H / 2 - pair)) - 1);
      __m512i rows[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        const uint16_t* row = p.k + (first + j + lane) * p.k_token + g * p.k_head + 2 * pair;
        rows[lane] = j + lane < count ? _mm512_maskz_loadu_epi32(wanted, row) : _mm512_setzero_si512();
      }
      transpose(rows);
      for (int each = 0; each < std::min(kPairs, H / 2 - pair); ++each) {
        _mm512_store_si512(&s.k[pair + each][j], rows[each]);
      }
    }
  }
  for (int j = 0; j < kKeys; j += 2) {
    if (j >= padded) {
      std::fill(s.v[j / 2], s.v[j / 2] + H, 0u);
      continue;
    }
    const uint16_t* even = p.v + (first + j) * p.v_token + g * p.v_head;
    const uint16_t* odd = even + p.v_token;
    const bool has_odd = j + 1 < count;
    for (int h = 0; h < H; ++h) {
      s.v[j / 2][h] = uint32_t(even[h]) | (has_odd ? uint32_t(odd[h]) << 16 : 0u);
    }
  }
}

inline __m512bh packed(const uint32_t* words) { return reinterpret_cast<__m512bh>(_mm512_load_si512(words)); }

// scores[r][0, kKeys) = q[r] . k for kRows rows.
template <int H>
void score(const uint16_t* q, Scratch<H>& s) {
  constexpr int kWide = 4;
  for (int j = 0; j < kKeys; j += kWide * kLanes) {
    __m512 sums[kRows][kWide];
    for (auto& row : sums)
      for (auto& sum : row) sum = _mm512_setzero_ps();
    for (int pair = 0; pair < H / 2; ++pair) {
      __m512bh keys[kWide];
      for (int w = 0; w < kWide; ++w) keys[w] = packed(&s.k[pair][j + w * kLanes]);
      for (int r = 0; r < kRows; ++r) {
        const __m512bh query = broadcast(q + r * H + 2 * pair);
        for (int w = 0; w < kWide; ++w) sums[r][w] = _mm512_dpbf16_ps(sums[r][w], query, keys[w]);
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int w = 0; w < kWide; ++w) _mm512_store_ps(&s.scores[r][j + w * kLanes], sums[r][w]);
  }
}

// sums[r] = sums[r] * factors[r] + weights[r] . v for kRows rows.
template <int H>
void accumulate(float* sums, const float* factors, int num_pairs, const Scratch<H>& s) {
  constexpr int kWide = H % 64 == 0 ? 4 : H % 48 == 0 ? 3 : H % 32 == 0 ? 2 : 1;
  for (int h = 0; h < H; h += kWide * kLanes) {
    __m512 acc[kRows][kWide];
    for (int r = 0; r < kRows; ++r) {
      const __m512 factor = _mm512_set1_ps(factors[r]);
      for (int w = 0; w < kWide; ++w) acc[r][w] = _mm512_mul_ps(_mm512_loadu_ps(sums + r * H + h + w * kLanes), factor);
    }
    for (int pair = 0; pair < num_pairs; ++pair) {
      __m512bh values[kWide];
      for (int w = 0; w < kWide; ++w) values[w] = packed(&s.v[pair][h + w * kLanes]);
      for (int r = 0; r < kRows; ++r) {
        const __m512bh weight = broadcast(&s.weights[r][2 * pair]);
        for (int w = 0; w < kWide; ++w) acc[r][w] = _mm512_dpbf16_ps(acc[r][w], weight, values[w]);
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int w = 0; w < kWide; ++w) _mm512_storeu_ps(sums + r * H + h + w * kLanes, acc[r][w]);
  }
}

// All keys for the query tokens [begin, end) of kv head g.
template <int H>
void attend(const Problem& p, int64_t g, int64_t begin, int64_t end, Scratch<H>& s) {
  const int64_t num_rows = (end - begin) * p.R;
  const int64_t padded = (num_rows + kRows - 1) / kRows * kRows;
  s.q.assign(padded * H, 0);
  s.sums.assign(padded * H, 0.0f);
  s.largest.assign(padded, kNothing);
  s.total.assign(padded, 0.0f);
  for (int64_t row = 0; row < num_rows; ++row) {
    const uint16_t* from = p.q + (begin + row / p.R) * p.q_token + (g * p.R + row % p.R) * p.q_head;
    std::copy(from, from + H, &s.q[row * H]);
  }
  const int64_t num_keys = p.causal ? std::min(p.S, end) : p.S;
  for (int64_t first = 0; first < num_keys; first += kKeys) {
    const int count = int(std::min<int64_t>(kKeys, num_keys - first));
    pack<H>(p, g, first, count, s);
    for (int64_t row = 0; row < padded; row += kRows) {
      const int64_t last = std::min(row + kRows, num_rows) - 1;
      if (p.causal && begin + last / p.R < first) continue;  // no row of these sees this tile
      score<H>(&s.q[row * H], s);
      float factors[kRows];
      for (int r = 0; r < kRows; ++r) {
        const int64_t token = begin + std::min(row + r, num_rows - 1) / p.R;
        const int visible = p.causal ? int(std::clamp<int64_t>(token + 1 - first, 0, count)) : count;
        factors[r] = weigh<kKeys>(s.scores[r], s.weights[r], visible, p.scale, s.largest[row + r], s.total[row + r]);
      }
      accumulate<H>(&s.sums[row * H], factors, (count + 1) / 2, s);
    }
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t at = (begin + row / p.R) * p.N + g * p.R + row % p.R;
    const __m512 share = _mm512_set1_ps(1.0f / s.total[row]);
    for (int h = 0; h < H; h += kLanes) {
      store_bf16(p.o + at * H + h, _mm512_mul_ps(_mm512_loadu_ps(&s.sums[row * H + h]), share));
    }
    p.lse[at] = s.largest[row] + std::log(s.total[row]);
  }
}

template <int H>
void run(const Problem& p) {
  const int64_t per_task = std::clamp<int64_t>(p.T / (2 * at::get_num_threads()) + 1, 16, kTokens);
  const int64_t num_blocks = (p.T + per_task - 1) / per_task;
  at::parallel_for(0, p.G * num_blocks, 1, [&](int64_t from, int64_t to) {
    auto scratch = std::make_unique<Scratch<H>>();
    for (int64_t task = from; task < to; ++task) {
      // Causal blocks cost more the later they are: early and late ones alternate, so that threads share them fairly.
      const int64_t turn = task / p.G;
      const int64_t block = turn % 2 ? num_blocks - 1 - turn / 2 : turn / 2;
      attend<H>(p, task % p.G, block * per_task, std::min(p.T, (block + 1) * per_task), *scratch);
    }
  });
}

std::tuple<at::Tensor, at::Tensor> prefill_attention(const at::Tensor& q_TNH, const at::Tensor& k_SGH,
                                                     const at::Tensor& v_SGH, bool causal) {
  TORCH_CHECK(q_TNH.dtype() == at::kBFloat16 && k_SGH.dtype() == at::kBFloat16 && v_SGH.dtype() == at::kBFloat16,
              "prefill_attention takes bfloat16");
  TORCH_CHECK(q_TNH.stride(2) == 1 && k_SGH.stride(2) == 1 && v_SGH.stride(2) == 1, "head dim must be contiguous");
  TORCH_CHECK(k_SGH.size(0) > 0 && (!causal || k_SGH.size(0) == q_TNH.size(0)), "causal blocks are square");
  const int64_t H = q_TNH.size(2);
  auto o_TNH = at::empty(q_TNH.sizes(), q_TNH.options());
  auto lse_TN = at::empty({q_TNH.size(0), q_TNH.size(1)}, q_TNH.options().dtype(at::kFloat));
  const auto bits = [](const at::Tensor& t) { return static_cast<uint16_t*>(t.data_ptr()); };
  const Problem p{bits(q_TNH), bits(k_SGH), bits(v_SGH), bits(o_TNH), lse_TN.data_ptr<float>(),
                  q_TNH.size(0), k_SGH.size(0), q_TNH.size(1), k_SGH.size(1), q_TNH.size(1) / k_SGH.size(1),
                  q_TNH.stride(0), q_TNH.stride(1), k_SGH.stride(0), k_SGH.stride(1), v_SGH.stride(0), v_SGH.stride(1),
                  causal, 1.0f / std::sqrt(float(H))};
  switch (H) {
    case 16: run<16>(p); break;
    case 32: run<32>(p); break;
    case 64: run<64>(p); break;
    case 80: run<80>(p); break;
    case 96: run<96>(p); break;
    case 128: run<128>(p); break;
    case 256: run<256>(p); break;
    default: TORCH_CHECK(false, "head dim ", H, " is not supported");
  }
  return {o_TNH, lse_TN};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(baton, m) {
  m.def("prefill_attention(Tensor q_TNH, Tensor k_SGH, Tensor v_SGH, bool causal) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(baton, CPU, m) { m.impl("prefill_attention", &prefill_attention); }
