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

#include <omp.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "attention/decode_checks.h"
#include "attention/decode_tasks.h"
#include "common/entry.h"
#include "linear/weights.h"
#include "layers/meeting.h"
#include "layers/rotary.h"

namespace {

// Blocks in which a step's rows are multiplied by a linear layer, and the bytes that they take packed.
struct Packing {
  std::vector<Block> blocks;
  int64_t num_bytes = 0;
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

// A linear layer's weights, and the functions that multiply them unless codes are multiplied as they are. Layers may
// store weights differently.
struct Linear {
  LinearProblem weights;
  Packing (*packing)(int64_t, int64_t);
  void (*run_blocks)(const LinearProblem&, const std::vector<Block>&, void*, int64_t, int64_t);
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
      const int64_t K = layers[0][part].weights.K;
      packings_[part] = layers[0][part].packing(T_, K);
      const auto takes_codes = [&](const Layer& layer) { return T_ <= layer[part].weights.code_rows; };
      if (std::any_of(layers.begin(), layers.end(), takes_codes)) of_codes_[part] = packing<ByCodes>(T_, K);
      most_bytes = std::max({most_bytes, packings_[part].num_bytes, of_codes_[part].num_bytes});
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
    void* packed = own_[me.number].packed.data();
    if (p.takes_codes()) {
      run_panels<ByCodes>(p, of_codes_[part].blocks, packed, me.first(p.P), me.last(p.P));
    } else {
      layer[part].run_blocks(p, packings_[part].blocks, packed, me.first(p.P), me.last(p.P));
    }
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
  std::array<Packing, kNumParts> packings_, of_codes_;
  Tasks tasks_;
  std::deque<Own> own_;
  Meeting meeting_;
};

// All layers' weights. Runs on any thread, and on several at a time.
class DecodeLayers {
 public:
  // `linears`, `scores`: how linear layers and attention multiply, as baton/modeling/kernels/products.py names it.
  DecodeLayers(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, std::string linears, std::string scores)
      : linears_(std::move(linears)), scores_(std::move(scores)) {
    check(num_kv_heads > 0 && num_heads % num_kv_heads == 0, num_heads, " heads do not share ", num_kv_heads,
          " kv heads");
    check((linears_ != "tiles" && scores_ != "tiles") || has_tiles(), "this process may not use AMX tiles");
    check(head_dim % (2 * kLanes) == 0, "head dim ", head_dim, " is not a multiple of ", 2 * kLanes);
    heads_.N = num_heads, heads_.G = num_kv_heads, heads_.R = num_heads / num_kv_heads, heads_.H = head_dim;
    heads_.scale = kLog2E / std::sqrt(float(head_dim));
  }

  // Adds the next linear layer: of each layer its parts in turn. What the weights point to must outlive this object.
  void add(const Weights& weights) {
    Linear linear{of_weights(weights, linears_), nullptr, nullptr};
    with_way(weights, linears_, [&](auto way) {
      linear.packing = packing<decltype(way)>;
      linear.run_blocks = run_panels<decltype(way)>;
    });
    added_.push_back(linear);
    if (added_.size() < kNumParts) return;
    Layer layer;
    std::move(added_.begin(), added_.end(), layer.begin());
    added_.clear();
    check_fit(layer);
    layers_.push_back(layer);
  }

  // Runs all layers in place for T rows. The rows' new keys and values go to their caches.
  void run(int64_t T, Rows rows, const RowKeys& keys, int num_threads) const {
    const int64_t L = int64_t(layers_.size());
    check(L > 0 && added_.empty(), "layers are not complete");
    check(T > 0 && T <= kMostFewRows, "not for ", T, " rows: at most ", kMostFewRows);
    AttentionProblem problem = heads_;
    problem.addresses = rows.addresses, problem.B = T;
    problem = with_keys(problem, keys, L);
    rows.picks = problem.picks;
    with_scores(heads_, true, scores_, [&](auto way) {
      using P = decltype(way);
      with_lie(problem, [&](auto lie) { Step<P, lie>(layers_, rows, problem, num_threads).run(); });
    });
  }

 private:
  void check_fit(const Layer& layer) const {
    const Layer& first = layers_.empty() ? layer : layers_[0];
    const int64_t D = first[kQkv].weights.K, I = first[kDown].weights.K, width = heads_.N * heads_.H;
    const auto fits = [&](Part part, int64_t K, int64_t N) {
      const LinearProblem& weights = layer[part].weights;
      return weights.K == K && weights.N == N && weights.gated == (part == kGateUp);
    };
    check(fits(kQkv, D, width + 2 * heads_.G * heads_.H) && fits(kOutput, width, D) && fits(kGateUp, D, I) &&
              fits(kDown, I, D),
          "layer ", layers_.size(), " does not fit the heads or the layers before it");
  }

  const std::string linears_, scores_;
  AttentionProblem heads_{};
  std::vector<Linear> added_;  // linear layers of a layer that is not complete
  std::vector<Layer> layers_;
};

}  // namespace

// Makes an object without layers, to be freed by baton_decode_layers_free.
BATON_ENTRY const char* baton_decode_layers_new(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                                const char* linears, const char* scores, void** made) {
  return guarded([&] { *made = new DecodeLayers(num_heads, num_kv_heads, head_dim, linears, scores); });
}

BATON_ENTRY void baton_decode_layers_free(void* layers) { delete static_cast<DecodeLayers*>(layers); }

// The arguments are those of Weights.
BATON_ENTRY const char* baton_decode_layers_add(void* layers, const void* panels, int64_t P, int64_t K, int64_t N,
                                                const float* scales, const float* bias, const void* gain, double eps,
                                                bool gated, bool is_int8, const Codes* codes) {
  return guarded([&] {
    static_cast<DecodeLayers*>(layers)->add({panels, P, K, N, scales, bias, gain, eps, gated, is_int8, codes});
  });
}

// Runs T rows: hidden [T][D] in place, cos and sin [T][H], all bf16; addresses [L][T]. The arguments from `lengths` on
// are those of RowKeys.
BATON_ENTRY const char* baton_decode_layers_run(const void* layers, void* hidden, const void* cos, const void* sin,
                                                const int64_t* addresses, int64_t T, const int64_t* lengths,
                                                const int32_t* picks, const int32_t* num_picks, int64_t K,
                                                const int64_t* queries, const int64_t* unseen, const int64_t* pages,
                                                int64_t num_pages, int64_t page_tokens, int num_threads) {
  return guarded([&] {
    const Rows rows{static_cast<uint16_t*>(hidden), static_cast<const uint16_t*>(cos), static_cast<const uint16_t*>(sin),
                    addresses, nullptr};
    const RowKeys keys{lengths, picks, num_picks, K, queries, unseen, pages, num_pages, page_tokens};
    static_cast<const DecodeLayers*>(layers)->run(T, rows, keys, num_threads);
  });
}
