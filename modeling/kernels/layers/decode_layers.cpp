// All layers of a generation step in one call: for each, norm and QKV projection, rotary embedding, append to the
// caches, attention, output projection and gated MLP, each by the code of the operator that does it alone (linear.cpp,
// rotary.cpp, decode_attention.cpp), so that a row's result is that of these operators, bit for bit.
//
// One call saves the time between the operators, when no memory is read, whose rate bounds a step. Threads are started
// once a step, and wait for each other where one reads what another wrote.
//
// Rows may be several tokens of one sequence, and may leave out keys or pick some, as in decode_attention.cpp; which, is
// known before the step.
//
// T tokens, a row each; L layers, D hidden, N heads, G kv heads, H head dim, I intermediate.

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <omp.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/decode_checks.h"
#include "attention/decode_tasks.h"
#include "linear/weights.h"
#include "layers/meeting.h"
#include "layers/rotary.h"

namespace {

constexpr int64_t kMostTokens = 288;  // of a step: 32 sequences with a token and eight drafts each

// Blocks in which a step's rows are multiplied by a linear layer, and the bytes that they take packed.
struct Packing {
  std::vector<Block> blocks;
  int64_t num_bytes;
};

template <class Way>
Packing packing(int64_t T, int64_t K) {
  std::vector<Block> blocks = divide<Way>(0, T, K);
  const int64_t size = blocks.back().place + Way::size(blocks.back().rows, K);
  return {std::move(blocks), size * int64_t(sizeof(typename Way::Packed))};
}

// Multiplies all rows by the panels [first, last). Each thread packs all rows for itself, so that none waits for
// another.
template <class Way>
void run_panels(const LinearProblem& p, const std::vector<Block>& blocks, void* packed, int64_t first, int64_t last) {
  if (first == last) return;
  auto* x = static_cast<typename Way::Packed*>(packed);
  for (const Block& block : blocks) Way::pack(p, block, x + block.place);
  multiply_few<Way>(p, blocks, x, first, last);
}

// A linear layer's weights, and the functions that multiply them.
struct Linear {
  LinearProblem weights;
  Packing (*packing)(int64_t, int64_t);
  void (*run)(const LinearProblem&, const std::vector<Block>&, void*, int64_t, int64_t);
};

// A layer's linear layers, in the order in which they run.
enum Part { kQkv, kOutput, kGateUp, kDown, kNumParts };
using Layer = std::array<Linear, kNumParts>;

// Input of one step.
struct Rows {
  uint16_t* hidden;           // [T][D]
  const uint16_t *cos, *sin;  // [T][H]
  const int64_t* addresses;   // [L][T], address of each row's first key; with pages, as in decode_problem.h
  const int32_t* picks;       // [L][T][G][K], or null: all keys
};

// One thread of the step's team.
struct Member {
  int64_t number, num_all;

  int64_t first(int64_t count) const { return count * number / num_all; }
  int64_t last(int64_t count) const { return count * (number + 1) / num_all; }
};

// One step of all layers. All memory is allocated in the constructor: threads that wait for each other must not throw.
// P: the product of attention.
template <class P, Lie kLie>
class Step {
 public:
  // `problem`: the first layer's, but for queries and outputs.
  Step(const std::vector<Layer>& layers, const Rows& rows, AttentionProblem problem, int num_threads)
      : layers_(layers), rows_(rows), T_(problem.B), width_((problem.N + 2 * problem.G) * problem.H), qkv_(T_ * width_),
        attended_(T_ * problem.N * problem.H), gated_(T_ * layers[0][kDown].weights.K), num_threads_(num_threads) {
    problem.q = qkv_.data();
    problem.q_row = width_;
    problem.q_head = problem.H;
    problem.o = attended_.data();
    tasks_.divide(problem, num_threads, Attention<P, kLie>::height);
    int64_t most_bytes = 0;
    for (int part = 0; part < kNumParts; ++part) {  // all layers have the shapes of the first
      packings_[part] = layers[0][part].packing(T_, layers[0][part].weights.K);
      most_bytes = std::max(most_bytes, packings_[part].num_bytes);
    }
    for (int i = 0; i < num_threads; ++i) own_.emplace_back(problem, tasks_.found(), most_bytes);
  }

  void run() {
#pragma omp parallel num_threads(num_threads_)
    {
      const Member me{omp_get_thread_num(), omp_get_num_threads()};
      for (int64_t layer = 0; layer < int64_t(layers_.size()); ++layer) run_layer(layer, me);
    }
  }

 private:
  // State that one thread has to itself.
  struct Own {
    Own(const AttentionProblem& problem, Found& found, int64_t packed_bytes)
        : problem(problem), attention(this->problem, found), packed(packed_bytes / int64_t(sizeof(Floats)) + 1) {}

    AttentionProblem problem;
    Attention<P, kLie> attention;
    std::vector<Floats> packed;
  };

  void run_layer(int64_t number, Member me) noexcept {
    const Layer& layer = layers_[number];
    Own& own = own_[me.number];
    own.problem.addresses = rows_.addresses + number * T_;
    if (kLie == Lie::kPicked) own.problem.picks = rows_.picks + number * T_ * own.problem.G * own.problem.K;
    fetch_places(own.problem, me);
    multiply(layer, kQkv, rows_.hidden, nullptr, qkv_.data(), me);
    meeting_.wait(me.num_all);
    turn_and_append(own.problem, me);
    if (me.number == 0) tasks_.rewind();
    meeting_.wait(me.num_all);
    tasks_.work(own.attention, own.problem, me.number);
    meeting_.wait(me.num_all);
    multiply(layer, kOutput, attended_.data(), rows_.hidden, rows_.hidden, me);
    meeting_.wait(me.num_all);
    multiply(layer, kGateUp, rows_.hidden, nullptr, gated_.data(), me);
    meeting_.wait(me.num_all);
    multiply(layer, kDown, gated_.data(), rows_.hidden, rows_.hidden, me);
    meeting_.wait(me.num_all);
  }

  // A member's part of y = x W^T, plus the residual unless that is null; y may be the residual itself.
  void multiply(const Layer& layer, Part part, const uint16_t* x, const uint16_t* residual, uint16_t* y, Member me) {
    LinearProblem p = layer[part].weights;
    p.x = x, p.residual = residual, p.y = y;
    p.M = T_, p.x_row = p.K, p.residual_row = p.N;
    layer[part].run(p, packings_[part].blocks, own_[me.number].packed.data(), me.first(p.P), me.last(p.P));
  }

  void turn_and_append(const AttentionProblem& p, Member me) {
    const Turning turning{qkv_.data(), rows_.cos, rows_.sin, p.N + p.G, p.H, width_, p.H};
    const int64_t num = p.G * p.H;
    for (int64_t row = me.first(p.B); row < me.last(p.B); ++row) {
      turn<uint16_t>(turning, row);
      const uint16_t* keys = &qkv_[row * width_ + p.N * p.H];  // and the values behind them
      std::copy_n(keys, 2 * num, place(p, row));
    }
  }

  // Returns where a row's new key goes; its value goes behind it.
  static uint16_t* place(const AttentionProblem& p, int64_t row) {
    const int64_t bytes = p.G * p.H * int64_t(sizeof(uint16_t));
    return reinterpret_cast<uint16_t*>(place_of(p.pages, row, p.addresses[row], p.lengths[row] - 1, bytes));
  }

  // Called before the QKV projection: otherwise the lines of many rows would be waited for one after the other.
  static void fetch_places(const AttentionProblem& p, Member me) {
    for (int64_t row = me.first(p.B); row < me.last(p.B); ++row) {
      const uint16_t* to = place(p, row);
      for (int64_t at = 0; at < 2 * p.G * p.H; at += kLine / sizeof(uint16_t)) __builtin_prefetch(to + at, 1, 2);
    }
  }

  const std::vector<Layer>& layers_;
  const Rows rows_;
  const int64_t T_;
  const int64_t width_;  // numbers of a token's queries, keys and values
  std::vector<uint16_t> qkv_, attended_, gated_;
  const int num_threads_;
  std::array<Packing, kNumParts> packings_;
  Tasks tasks_;
  std::deque<Own> own_;
  Meeting meeting_;
};

// All layers' weights. Runs on any thread, and on several at a time.
class DecodeLayers : public torch::CustomClassHolder {
 public:
  // `linears`, `scores`: how linear layers and attention multiply, as modeling/kernels/products.py names it.
  DecodeLayers(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, std::string linears, std::string scores)
      : linears_(std::move(linears)), scores_(std::move(scores)) {
    TORCH_CHECK(num_kv_heads > 0 && num_heads % num_kv_heads == 0, num_heads, " heads do not share ", num_kv_heads,
                " kv heads");
    TORCH_CHECK((linears_ != "tiles" && scores_ != "tiles") || has_tiles(), "this process may not use AMX tiles");
    TORCH_CHECK(head_dim % (2 * kLanes) == 0, "head dim ", head_dim, " is no multiple of ", 2 * kLanes);
    heads_.N = num_heads, heads_.G = num_kv_heads, heads_.R = num_heads / num_kv_heads, heads_.H = head_dim;
    heads_.scale = kLog2E / std::sqrt(float(head_dim));
  }

  // Adds the next linear layer: of each layer its parts in turn. Arguments are those of the operator `linear`.
  void add(const at::Tensor& panels_PKL, int64_t K, int64_t N, const std::optional<at::Tensor>& scales,
           const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& gain_K, double eps, bool gated) {
    Linear linear{of_weights(panels_PKL, K, N, {scales, bias, gain_K, eps, gated}, linears_), nullptr, nullptr};
    with_way(panels_PKL.dtype() == at::kChar, linears_, [&](auto way) {
      linear.packing = packing<decltype(way)>;
      linear.run = run_panels<decltype(way)>;
    });
    for (const auto& each : {std::optional(panels_PKL), scales, bias, gain_K}) {
      if (each) held_.push_back(*each);
    }
    added_.push_back(linear);
    if (added_.size() < kNumParts) return;
    Layer layer;
    std::move(added_.begin(), added_.end(), layer.begin());
    added_.clear();
    check(layer);
    layers_.push_back(layer);
  }

  // Runs all layers in place. The rows' new keys and values go to their caches.
  void run(const at::Tensor& hidden_TD, const at::Tensor& cos_TH, const at::Tensor& sin_TH,
           const at::Tensor& addresses_LT, const at::Tensor& lengths_T, const std::optional<at::Tensor>& queries_T,
           const std::optional<at::Tensor>& unseen_T2, const std::optional<at::Tensor>& picks_LTGK,
           const std::optional<at::Tensor>& num_picks_TG, const std::optional<at::Tensor>& pages_TC, int64_t page_tokens) {
    const int64_t T = hidden_TD.size(0), L = int64_t(layers_.size());
    TORCH_CHECK(L > 0 && added_.empty(), "layers are not complete");
    TORCH_CHECK(T > 0 && T <= kMostTokens, "not for ", T, " rows: at most ", kMostTokens);
    TORCH_CHECK(picks_LTGK.has_value() == num_picks_TG.has_value(), "picks come with their numbers");
    Rows rows{
        of<uint16_t>(hidden_TD, at::kBFloat16, T * layers_[0][kQkv].weights.K, "hidden states"),
        of<uint16_t>(cos_TH, at::kBFloat16, T * heads_.H, "cosines"),
        of<uint16_t>(sin_TH, at::kBFloat16, T * heads_.H, "sines"),
        of<int64_t>(addresses_LT, at::kLong, L * T, "addresses"), nullptr};
    AttentionProblem problem = heads_;
    problem.addresses = rows.addresses, problem.lengths = of<int64_t>(lengths_T, at::kLong, T, "lengths"), problem.B = T;
    check_lengths(lengths_T);
    problem.pages = pages_of(lengths_T, pages_TC, page_tokens);
    problem.queries = queries_of(problem, queries_T);
    problem.unseen = unseen_of(problem, unseen_T2);
    if (picks_LTGK) problem = with_picks(problem, *picks_LTGK, *num_picks_TG, L);
    rows.picks = problem.picks;
    const int num_threads = at::in_parallel_region() ? 1 : at::get_num_threads();
    with_scores(heads_, true, scores_, [&](auto way) {
      using P = decltype(way);
      with_lie(problem, [&](auto lie) { Step<P, lie>(layers_, rows, problem, num_threads).run(); });
    });
  }

 private:
  void check(const Layer& layer) const {
    const Layer& first = layers_.empty() ? layer : layers_[0];
    const int64_t D = first[kQkv].weights.K, I = first[kDown].weights.K, width = heads_.N * heads_.H;
    const auto fits = [&](Part part, int64_t K, int64_t N) {
      const LinearProblem& weights = layer[part].weights;
      return weights.K == K && weights.N == N && weights.gated == (part == kGateUp);
    };
    TORCH_CHECK(fits(kQkv, D, width + 2 * heads_.G * heads_.H) && fits(kOutput, width, D) && fits(kGateUp, D, I) &&
                    fits(kDown, I, D),
                "layer ", layers_.size(), " does not fit the heads or the layers before it");
  }

  template <class Number>
  static Number* of(const at::Tensor& tensor, at::ScalarType type, int64_t size, const char* name) {
    TORCH_CHECK(tensor.scalar_type() == type && tensor.is_contiguous() && tensor.numel() == size, name, " must be ", size,
                " of ", type, ", contiguous");
    return static_cast<Number*>(tensor.data_ptr());
  }

  const std::string linears_, scores_;
  AttentionProblem heads_{};
  std::vector<Linear> added_;  // linear layers of a layer that is not complete
  std::vector<Layer> layers_;
  std::vector<at::Tensor> held_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(BATON_OPERATORS, m) {
  m.class_<DecodeLayers>("DecodeLayers")
      .def(torch::init<int64_t, int64_t, int64_t, std::string, std::string>())
      .def("add", &DecodeLayers::add)
      .def("run", &DecodeLayers::run);
}
