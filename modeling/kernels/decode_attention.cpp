// Attention of one query token a row over that row's own keys: the ragged batch of a generation step. Its floor is
// reading every key and value once; nothing is padded, copied or gathered.
//
// A row is a sequence; its KV lies as [keys][2][G][H], keys before values, in bf16 or fp32, and is read in that order, a
// tile of kKeys tokens at a time; or only those keys are read that a list of the row's kv head picks, in its order. A
// task is a run of a row's keys, so that long rows are shared among threads; runs of one row are merged by log-sum-exp.
// The R query heads that share a kv head are served from one reading:
//   scores   kLanes keys at a time: 32-bit words of each key are loaded and transposed, so that a register holds one word
//            of each of these keys, and a query's part of it is broadcast; or, in tiles, 16 keys as they lie are multiplied
//            with the queries of up to 16 heads, and only their scores are transposed;
//   softmax  online, a tile at a time;
//   values   a key's channels (in products of depth 2, two keys', interleaved) are multiplied by its weights, broadcast.
//
// B rows, N heads, G kv heads, R = N / G, H head dim, K picks at most.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "decode_attention.h"

namespace {

constexpr int64_t kRun = 512;  // keys of a task, about; fixed, so that a row's result depends on no other row

// What the tasks [begin, end) found of a query head of their row, to its output.
template <class Element>
void merge(const Problem& p, const Task* begin, const Task* end, int64_t head, const Found& found) {
  const int64_t num = p.H / kLanes;
  const auto of_head = [&](auto use) {
    for (const Task* task = begin; task != end; ++task) {
      const int64_t place = task->place + head - task->head * p.R;
      if (task->head <= head / p.R && head / p.R < task->end_head) use(found.softmax[place], &found.sums[place * num]);
    }
  };
  float largest = kNothing, total = 0.0f;
  of_head([&](const Softmax& softmax, const Floats*) { largest = std::max(largest, softmax.largest); });
  of_head([&](const Softmax& softmax, const Floats*) { total += std::exp2(softmax.largest - largest) * softmax.sum(); });
  Element* to = static_cast<Element*>(p.o) + (begin->row * p.N + head) * p.H;
  for (int64_t i = 0; i < num; ++i) {
    Floats all = {};
    of_head([&](const Softmax& softmax, const Floats* sums) { all += sums[i] * std::exp2(softmax.largest - largest); });
    store_floats(to + i * kLanes, all * (1.0f / total));
  }
}

// All rows' runs of keys, all kv heads of a run together; with picks, whose numbers differ, each kv head's own runs.
std::vector<Task> divide(const Problem& p) {
  std::vector<Task> tasks;
  int64_t place = 0;
  const auto add = [&](int64_t row, int64_t head, int64_t end_head, int64_t length) {
    const int64_t num_runs = (length + kRun - 1) / kRun;
    for (int64_t i = 0; i < num_runs; ++i, place += (end_head - head) * p.R) {
      tasks.push_back({row, head, end_head, length * i / num_runs, length * (i + 1) / num_runs, place});
    }
  };
  for (int64_t row = 0; row < p.B; ++row) {
    if (!p.picks) add(row, 0, p.G, p.lengths[row]);
    for (int64_t g = 0; p.picks && g < p.G; ++g) add(row, g, g + 1, p.num_picks[row * p.G + g]);
  }
  return tasks;
}

// Calls `work` on every thread, with a function that gives it its next task, `num_tasks` when there are no more. Each
// thread has a range of tasks to itself, one after the other, so that one's keys are fetched while those before them are
// at work; who is done helps the others.
template <class Work>
void share_in_order(int64_t num_tasks, const Work& work) {
  const int64_t num_threads = std::min<int64_t>(at::get_num_threads(), num_tasks);
  std::vector<std::atomic<int64_t>> next(num_threads);
  const auto first = [&](int64_t thread) { return num_tasks * thread / num_threads; };
  for (int64_t thread = 0; thread < num_threads; ++thread) next[thread] = first(thread);
  at::parallel_for(0, num_threads, 1, [&](int64_t own, int64_t) {
    int64_t helped = 0;
    work([&] {
      for (; helped < num_threads; ++helped) {
        const int64_t thread = (own + helped) % num_threads;
        if (const int64_t task = next[thread]++; task < first(thread + 1)) return task;
      }
      return num_tasks;
    });
  });
}

template <class P, bool kPicked>
void run_tasks(const Problem& p) {
  const std::vector<Task> tasks = divide(p);
  const auto num_tasks = int64_t(tasks.size());
  if (tasks.empty()) return;
  const int64_t num_found = tasks.back().place + (tasks.back().end_head - tasks.back().head) * p.R;
  Found found{std::vector<Floats>(num_found * p.H / kLanes), std::vector<Softmax>(num_found)};
  share_in_order(num_tasks, [&](const auto& take) {
    [[maybe_unused]] typename P::Scope scope;
    Attention<P, kPicked> attention(p, found);
    for (int64_t i = take(); i < num_tasks; i = take()) attention.run(tasks[i], i + 1 < num_tasks ? &tasks[i + 1] : nullptr);
  });
  for (const Task *begin = tasks.data(), *last = begin + num_tasks; begin != last;) {
    const Task* end = std::find_if(begin, last, [&](const Task& task) { return task.row != begin->row; });
    for (int64_t head = 0; head < p.N; ++head) merge<typename P::Element>(p, begin, end, head, found);
    begin = end;
  }
}

template <class P>
void run(const Problem& p) {
  p.picks ? run_tasks<P, true>(p) : run_tasks<P, false>(p);
}

void check_rows(const at::Tensor& rows, const at::Tensor& addresses_B, int64_t B) {
  TORCH_CHECK(rows.scalar_type() == at::kBFloat16 || rows.scalar_type() == at::kFloat, "rows are bfloat16 or float32");
  TORCH_CHECK(rows.dim() == 3 && rows.stride(2) == 1, "rows must be [B, heads, H], each head contiguous");
  TORCH_CHECK(rows.size(0) == B && addresses_B.numel() == B && addresses_B.is_contiguous(), "an address for each row");
}

void check_lengths(const at::Tensor& lengths_B) {
  const auto* lengths = lengths_B.const_data_ptr<int64_t>();
  TORCH_CHECK(std::all_of(lengths, lengths + lengths_B.numel(), [](int64_t length) { return length > 0; }),
              "every row has a key, its own");
}

void check_picks(const Problem& p) {
  for (int64_t list = 0; list < p.B * p.G; ++list) {
    const int32_t* picks = p.picks + list * p.K;
    const int32_t num = p.num_picks[list];
    TORCH_CHECK(num > 0 && num <= p.K, "every list picks a key, and at most ", p.K);
    TORCH_CHECK(std::all_of(picks, picks + num, [&](int32_t key) { return key >= 0 && key < p.lengths[list / p.G]; }),
                "a key is picked that its row does not have");
  }
}

// Each row's new key and value, to the place after the `lengths - 1` that it has.
void append_kv(const at::Tensor& k_BGH, const at::Tensor& v_BGH, const at::Tensor& addresses_B,
               const at::Tensor& lengths_B) {
  const int64_t B = k_BGH.size(0), G = k_BGH.size(1), size = k_BGH.element_size(), H = k_BGH.size(2) * size;
  check_rows(k_BGH, addresses_B, B);
  check_rows(v_BGH, lengths_B, B);
  check_lengths(lengths_B);
  TORCH_CHECK(v_BGH.sizes() == k_BGH.sizes() && v_BGH.dtype() == k_BGH.dtype(), "keys and values have one shape");
  for (int64_t row = 0; row < B; ++row) {
    const int64_t place = lengths_B.const_data_ptr<int64_t>()[row] - 1;
    char* to = reinterpret_cast<char*>(addresses_B.const_data_ptr<int64_t>()[row]) + place * 2 * G * H;
    for (const at::Tensor* from : {&k_BGH, &v_BGH}) {
      const char* heads = static_cast<const char*>(from->const_data_ptr()) + row * from->stride(0) * size;
      for (int64_t g = 0; g < G; ++g, to += H) std::copy_n(heads + g * from->stride(1) * size, H, to);
    }
  }
}

at::Tensor decode_attention(const at::Tensor& q_BNH, const at::Tensor& addresses_B, const at::Tensor& lengths_B,
                            int64_t num_kv_heads, c10::string_view product, const std::optional<at::Tensor>& picks_BGK,
                            const std::optional<at::Tensor>& num_picks_BG) {
  const int64_t B = q_BNH.size(0), N = q_BNH.size(1), H = q_BNH.size(2), G = num_kv_heads;
  check_rows(q_BNH, addresses_B, B);
  check_rows(q_BNH, lengths_B, B);
  check_lengths(lengths_B);
  TORCH_CHECK(G > 0 && N % G == 0, N, " heads do not share ", G, " kv heads");
  TORCH_CHECK(H % 16 == 0, "head dim ", H, " is no multiple of 16");
  TORCH_CHECK(picks_BGK.has_value() == num_picks_BG.has_value(), "picks come with their numbers");
  auto o_BNH = at::empty(q_BNH.sizes(), q_BNH.options());
  Problem p{q_BNH.const_data_ptr(), addresses_B.const_data_ptr<int64_t>(), lengths_B.const_data_ptr<int64_t>(),
            nullptr, nullptr, o_BNH.data_ptr(), B, N, G, N / G, H, 0, q_BNH.stride(0), q_BNH.stride(1),
            kLog2E / std::sqrt(float(H))};
  if (picks_BGK) {
    p.K = picks_BGK->size(2);
    TORCH_CHECK(picks_BGK->is_contiguous() && picks_BGK->numel() == B * G * p.K, "picks must be [B, G, K]");
    TORCH_CHECK(num_picks_BG->is_contiguous() && num_picks_BG->numel() == B * G, "numbers of picks must be [B, G]");
    p.picks = picks_BGK->const_data_ptr<int32_t>();
    p.num_picks = num_picks_BG->const_data_ptr<int32_t>();
    check_picks(p);
  }
  const bool is_bf16 = q_BNH.scalar_type() == at::kBFloat16;
#ifdef __AMX_BF16__
  const bool fit_tiles = is_bf16 && H % kTileDepth == 0 && p.R <= kMostHeads;
  if (product == "tiles" && fit_tiles) return run<TiledScores>(p), o_BNH;
#endif
  with_product(is_bf16, product == "tiles" ? "widened" : product, [&](auto way) { run<decltype(way)>(p); });
  return o_BNH;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(BATON_OPERATORS, m) {
  m.def("append_kv(Tensor k_BGH, Tensor v_BGH, Tensor addresses_B, Tensor lengths_B) -> ()");
  m.def("decode_attention(Tensor q_BNH, Tensor addresses_B, Tensor lengths_B, int num_kv_heads, str product, "
        "Tensor? picks_BGK=None, Tensor? num_picks_BG=None) -> Tensor");
}
TORCH_LIBRARY_IMPL(BATON_OPERATORS, CPU, m) {
  m.impl("append_kv", &append_kv);
  m.impl("decode_attention", &decode_attention);
}
