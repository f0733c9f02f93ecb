// Attention of one query token a row over that row's own keys, for CPUs with AVX-512 BF16: the ragged batch of a
// generation step. Its floor is reading every key and value once; nothing is padded, copied or gathered.
//
// A row is a sequence; its KV lies as [keys][2][G][H], keys before values, and is read in that order, a tile of kKeys
// tokens at a time. A task is a run of a row's keys, so that long rows are shared among threads; runs of one row are
// merged by log-sum-exp. The R query heads that share a kv head are served from one reading:
//   scores   16 keys at a time: 32-bit words of each key are loaded, 16 x 16 of them transposed, so that a register holds
//            one pair of channels of 16 keys; a query's pair is broadcast (VDPBF16PS, fp32 sums);
//   softmax  online, a tile of kKeys at a time (Milakov and Gimelshein, 2018);
//   values   two keys' rows are interleaved to pairs of keys, a query's two weights are broadcast.
//
// B rows, N heads, G kv heads, R = N / G, H head dim.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <vector>

#include "avx512.h"

namespace {

constexpr int kKeys = 64;        // keys of a tile
constexpr int kHeads = 4;        // query heads whose sums are held in registers at a time
constexpr int64_t kRun = 512;  // keys of a task, about; fixed, so that a row's result depends on no other row

struct Problem {
  const uint16_t* q;         // [B][N][H]
  const int64_t* addresses;  // of each row's first key, and
  const int64_t* lengths;    // keys of each row
  uint16_t* o;               // [B][N][H]
  int64_t B, N, G, R, q_row, q_head;
  float scale;
};

struct Task {
  int64_t row, first, end;
};

// What a task found: [N][H] weighted sums, and [N] largest scores and totals.
struct Partials {
  std::vector<float> sums, largest, total;
};

template <int H>
struct Scratch {
  alignas(64) float scores[kHeads][kKeys];
  alignas(64) uint16_t weights[kHeads][kKeys];
};

// scores[r][0, kKeys) = q[r] . k, for `count` keys; the rest is of no meaning.
template <int H, int C>
void score(const uint16_t* q, int64_t q_head, const uint16_t* keys, int64_t stride, int count, Scratch<H>& s) {
  for (int j = 0; j < count; j += kLanes) {
    __m512 sums[C];
    for (auto& sum : sums) sum = _mm512_setzero_ps();
    for (int pair = 0; pair < H / 2; pair += kLanes) {
      const int num_pairs = std::min(kLanes, H / 2 - pair);
      const auto wanted = __mmask16((1u << num_pairs) - 1);
      __m512i words[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        const uint16_t* key = keys + std::min(j + lane, count - 1) * stride + 2 * pair;
        words[lane] = _mm512_maskz_loadu_epi32(wanted, key);
      }
      transpose(words);
      for (int each = 0; each < num_pairs; ++each) {
        const auto pairs = reinterpret_cast<__m512bh>(words[each]);
        for (int r = 0; r < C; ++r) sums[r] = _mm512_dpbf16_ps(sums[r], broadcast(q + r * q_head + 2 * (pair + each)), pairs);
      }
    }
    for (int r = 0; r < C; ++r) _mm512_store_ps(&s.scores[r][j], sums[r]);
  }
}

// sums[r] = sums[r] * factors[r] + weights[r] . v, 32 channels at a time.
template <int H, int C>
void accumulate(const uint16_t* values, int64_t stride, int count, const float* factors, float* sums,
                const Scratch<H>& s) {
  for (int h = 0; h < H; h += 2 * kLanes) {
    const int width = std::min(2 * kLanes, H - h);
    const __mmask32 wanted = width == 2 * kLanes ? ~0u : (1u << width) - 1;
    // Interleaving works within 128-bit lanes: low holds channels 0-3, 8-11, 16-19, 24-27, high the others.
    __m512 low[C], high[C];
    for (int r = 0; r < C; ++r) low[r] = high[r] = _mm512_setzero_ps();
    for (int j = 0; j < count; j += 2) {
      const uint16_t* even_row = values + j * stride + h;
      const __m512i even = _mm512_maskz_loadu_epi16(wanted, even_row);
      const __m512i odd = j + 1 < count ? _mm512_maskz_loadu_epi16(wanted, even_row + stride) : _mm512_setzero_si512();
      const auto low_pairs = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(even, odd));
      const auto high_pairs = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(even, odd));
      for (int r = 0; r < C; ++r) {
        const __m512bh weight = broadcast(&s.weights[r][j]);
        low[r] = _mm512_dpbf16_ps(low[r], weight, low_pairs);
        high[r] = _mm512_dpbf16_ps(high[r], weight, high_pairs);
      }
    }
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    for (int r = 0; r < C; ++r) {
      const __m512 factor = _mm512_set1_ps(factors[r]);
      float* to = sums + r * H + h;
      const __m512 ordered[] = {_mm512_permutex2var_ps(low[r], first, high[r]),
                                _mm512_permutex2var_ps(low[r], second, high[r])};
      for (int w = 0; w < width / kLanes; ++w) {
        _mm512_storeu_ps(to + w * kLanes, _mm512_fmadd_ps(_mm512_loadu_ps(to + w * kLanes), factor, ordered[w]));
      }
    }
  }
}

// One tile of the task's keys for C heads, from `head` on.
template <int H, int C>
void attend(const Problem& p, const uint16_t* q, const uint16_t* keys, int count, int64_t at, Partials& out,
            Scratch<H>& s) {
  const int64_t stride = 2 * p.G * H;
  score<H, C>(q, p.q_head, keys, stride, count, s);
  float factors[C];
  for (int r = 0; r < C; ++r) {
    factors[r] = weigh<kKeys>(s.scores[r], s.weights[r], count, p.scale, out.largest[at + r], out.total[at + r]);
  }
  accumulate<H, C>(keys + p.G * H, stride, count, factors, &out.sums[at * H], s);
}

// All keys of a task, for all heads.
template <int H>
void attend_all(const Problem& p, const Task& task, int64_t place, Partials& out, Scratch<H>& s) {
  const auto* row = reinterpret_cast<const uint16_t*>(p.addresses[task.row]);
  for (int64_t first = task.first; first < task.end; first += kKeys) {
    const int count = int(std::min<int64_t>(kKeys, task.end - first));
    for (int64_t head = 0, taken = 0; head < p.N; head += taken) {
      taken = std::min<int64_t>(kHeads, p.R - head % p.R);
      const uint16_t* q = p.q + task.row * p.q_row + head * p.q_head;
      const uint16_t* keys = row + first * 2 * p.G * H + head / p.R * H;
      const int64_t at = place * p.N + head;
      switch (taken) {
        case 1: attend<H, 1>(p, q, keys, count, at, out, s); break;
        case 2: attend<H, 2>(p, q, keys, count, at, out, s); break;
        case 3: attend<H, 3>(p, q, keys, count, at, out, s); break;
        default: attend<H, kHeads>(p, q, keys, count, at, out, s);
      }
    }
  }
}

// What the tasks [begin, end) found of one row, to its outputs.
template <int H>
void merge(const Problem& p, int64_t row, int64_t begin, int64_t end, const Partials& from) {
  for (int64_t head = 0; head < p.N; ++head) {
    float largest = kNothing, total = 0.0f;
    for (int64_t i = begin; i < end; ++i) largest = std::max(largest, from.largest[i * p.N + head]);
    alignas(64) float sums[H] = {};
    for (int64_t i = begin; i < end; ++i) {
      const float weight = std::exp(from.largest[i * p.N + head] - largest);
      total += weight * from.total[i * p.N + head];
      const __m512 weights = _mm512_set1_ps(weight);
      for (int h = 0; h < H; h += kLanes) {
        const __m512 sum = _mm512_loadu_ps(&from.sums[(i * p.N + head) * H + h]);
        _mm512_store_ps(sums + h, _mm512_fmadd_ps(sum, weights, _mm512_load_ps(sums + h)));
      }
    }
    const __m512 share = _mm512_set1_ps(1.0f / total);
    uint16_t* to = p.o + (row * p.N + head) * H;
    for (int h = 0; h < H; h += kLanes) store_bf16(to + h, _mm512_mul_ps(_mm512_load_ps(sums + h), share));
  }
}

// All rows' runs of keys.
std::vector<Task> divide(const Problem& p) {
  std::vector<Task> tasks;
  for (int64_t row = 0; row < p.B; ++row) {
    const int64_t length = p.lengths[row], num_runs = (length + kRun - 1) / kRun;
    for (int64_t i = 0; i < num_runs; ++i) tasks.push_back({row, length * i / num_runs, length * (i + 1) / num_runs});
  }
  return tasks;
}

template <int H>
void run(const Problem& p) {
  const std::vector<Task> tasks = divide(p);
  const auto num_tasks = int64_t(tasks.size());
  Partials partials{std::vector<float>(num_tasks * p.N * H), std::vector<float>(num_tasks * p.N, kNothing),
                    std::vector<float>(num_tasks * p.N)};
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), num_tasks), 1, [&](int64_t, int64_t) {
    Scratch<H> scratch;
    for (int64_t i = next++; i < num_tasks; i = next++) attend_all<H>(p, tasks[i], i, partials, scratch);
  });
  for (int64_t begin = 0, end = 0; begin < num_tasks; begin = end) {
    while (end < num_tasks && tasks[end].row == tasks[begin].row) ++end;
    merge<H>(p, tasks[begin].row, begin, end, partials);
  }
}

void check_rows(const at::Tensor& rows, const at::Tensor& addresses_B, int64_t B) {
  TORCH_CHECK(rows.dtype() == at::kBFloat16 && rows.dim() == 3 && rows.stride(2) == 1, "rows must be bfloat16");
  TORCH_CHECK(rows.size(0) == B && addresses_B.numel() == B && addresses_B.is_contiguous(), "an address for each row");
}

void check_lengths(const at::Tensor& lengths_B) {
  const auto* lengths = lengths_B.const_data_ptr<int64_t>();
  TORCH_CHECK(std::all_of(lengths, lengths + lengths_B.numel(), [](int64_t length) { return length > 0; }),
              "every row has a key, its own");
}

// Each row's new key and value, to the place after the `lengths - 1` that it has.
void append_kv(const at::Tensor& k_BGH, const at::Tensor& v_BGH, const at::Tensor& addresses_B,
               const at::Tensor& lengths_B) {
  const int64_t B = k_BGH.size(0), G = k_BGH.size(1), H = k_BGH.size(2);
  check_rows(k_BGH, addresses_B, B);
  check_rows(v_BGH, lengths_B, B);
  check_lengths(lengths_B);
  TORCH_CHECK(v_BGH.sizes() == k_BGH.sizes(), "keys and values have one shape");
  for (int64_t row = 0; row < B; ++row) {
    const int64_t place = lengths_B.const_data_ptr<int64_t>()[row] - 1;
    auto* to = reinterpret_cast<uint16_t*>(addresses_B.const_data_ptr<int64_t>()[row]) + place * 2 * G * H;
    for (const at::Tensor* from : {&k_BGH, &v_BGH}) {
      const auto* heads = static_cast<const uint16_t*>(from->const_data_ptr()) + row * from->stride(0);
      for (int64_t g = 0; g < G; ++g, to += H) std::copy_n(heads + g * from->stride(1), H, to);
    }
  }
}

at::Tensor decode_attention(const at::Tensor& q_BNH, const at::Tensor& addresses_B, const at::Tensor& lengths_B,
                            int64_t num_kv_heads) {
  const int64_t B = q_BNH.size(0), N = q_BNH.size(1), H = q_BNH.size(2);
  check_rows(q_BNH, addresses_B, B);
  check_rows(q_BNH, lengths_B, B);
  check_lengths(lengths_B);
  TORCH_CHECK(num_kv_heads > 0 && N % num_kv_heads == 0, N, " heads do not share ", num_kv_heads, " kv heads");
  auto o_BNH = at::empty(q_BNH.sizes(), q_BNH.options());
  const Problem p{static_cast<const uint16_t*>(q_BNH.const_data_ptr()), addresses_B.const_data_ptr<int64_t>(),
                  lengths_B.const_data_ptr<int64_t>(), static_cast<uint16_t*>(o_BNH.data_ptr()),
                  B, N, num_kv_heads, N / num_kv_heads, q_BNH.stride(0), q_BNH.stride(1), 1.0f / std::sqrt(float(H))};
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
  return o_BNH;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(baton, m) {
  m.def("append_kv(Tensor k_BGH, Tensor v_BGH, Tensor addresses_B, Tensor lengths_B) -> ()");
  m.def("decode_attention(Tensor q_BNH, Tensor addresses_B, Tensor lengths_B, int num_kv_heads) -> Tensor");
}
TORCH_LIBRARY_IMPL(baton, CPU, m) {
  m.impl("append_kv", &append_kv);
  m.impl("decode_attention", &decode_attention);
}
