// Blocked attention of many queries, which takes most of a prefill's time.
//
// softmax(q k^T / sqrt(H)) v and the log-sum-exp of the scores, grouped heads, bf16 or fp32, sums in fp32. Keys and
// values come in pieces, each where it lies: dense, but for the last where that is causal (query t sees its keys 0 to
// t). The softmax is online, so scores live in a tile that stays in the first-level cache (Dao et al., FlashAttention,
// 2022), and a tile that no query sees is never computed.
//
// A task is a kv head and a block of query tokens. The R heads that share the kv head are rows of one matrix: a row is
// a (token, head) pair, token by token. For each tile of keys, K and V are packed once for all rows (packed_tile.h).
//
// T query tokens, S keys, N heads, G kv heads, R = N / G, H head dim. Strides are in elements.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention/packed_tile.h"
#include "common/entry.h"
#include "common/sharing.h"

namespace {

constexpr int kKeys = 128;         // keys of a tile
constexpr int64_t kTaskRows = 288;  // rows that share the packing of a tile, at most; their sums stay in the second-level
                                    // cache

// A piece's keys and values, which lie together.
struct Piece {
  const void* k;
  const void* v;
  int64_t S;
  bool causal;
};

struct Problem {
  const void* q;
  std::vector<Piece> pieces;
  void* o;
  float* lse;
  int64_t T, N, G, R, H;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  float scale;
};

// A task: the query tokens [begin, end) of kv head g.
struct Task {
  int64_t g, begin, end;
};

template <class P>
class Attention {
 public:
  using Element = typename P::Element;
  using Factor = typename P::Factor;

  explicit Attention(const Problem& problem) : p_(problem), H_(int(problem.H)), tile_(H_) {}

  // Attends to all keys for the task's queries.
  void run(const Task& task) {
    begin(task);
    for (const Piece& piece : p_.pieces) {
      const int64_t num_keys = piece.causal ? std::min(piece.S, task.end) : piece.S;
      for (int64_t first = 0; first < num_keys; first += kKeys) {
        const int count = int(std::min<int64_t>(kKeys, num_keys - first));
        const auto* keys = static_cast<const Element*>(piece.k) + first * p_.k_token + task.g * p_.k_head;
        const auto* values = static_cast<const Element*>(piece.v) + first * p_.v_token + task.g * p_.v_head;
        tile_.pack_keys(count, [&](int j) { return keys + j * p_.k_token; });
        tile_.pack_values(count, [&](int j) { return values + j * p_.v_token; }, FetchNothing());
        for (int64_t row = 0; row < num_rows_; row += P::kHeight) attend(piece, task, row, first, count);
      }
    }
    finish(task);
  }

 private:
  void begin(const Task& task) {
    num_rows_ = (task.end - task.begin) * p_.R;
    const int64_t padded = (num_rows_ + P::kHeight - 1) / P::kHeight * P::kHeight;
    q_.assign(padded * tile_.depth(), Factor());
    sums_.assign(padded * H_ / kLanes, Floats{});
    softmax_.assign(padded, Softmax());
    for (int64_t row = 0; row < num_rows_; ++row) {
      const auto* from = static_cast<const Element*>(p_.q) + (task.begin + row / p_.R) * p_.q_token +
                         (task.g * p_.R + row % p_.R) * p_.q_head;
      for (int h = 0; h < H_; h += kLanes) store_floats(&q_[row * tile_.depth() + h], load_floats(from + h));
    }
  }

  // Attends to one tile, of `count` keys from `first` on, for kHeight rows.
  void attend(const Piece& piece, const Task& task, int64_t row, int64_t first, int count) {
    const auto visible = [&](int64_t each) {
      const int64_t token = task.begin + std::min(each, num_rows_ - 1) / p_.R;
      return piece.causal ? int(std::clamp<int64_t>(token + 1 - first, 0, count)) : count;
    };
    const int seen = visible(row + P::kHeight - 1), num = int(std::min<int64_t>(P::kHeight, num_rows_ - row));
    if (seen == 0) return;
    tile_.score(&q_[row * tile_.depth()], seen, scores_, FetchNothing());
    tile_.weigh(scores_, num, seen, p_.scale, &softmax_[row], &sums_[row * H_ / kLanes],
                [&](int64_t r) { return visible(row + r); }, FetchNothing());
  }

  void finish(const Task& task) {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const int64_t at = (task.begin + row / p_.R) * p_.N + task.g * p_.R + row % p_.R;
      const float share = 1.0f / softmax_[row].sum();
      for (int h = 0; h < H_; h += kLanes) {
        store_floats(static_cast<Element*>(p_.o) + at * H_ + h, sums_[(row * H_ + h) / kLanes] * share);
      }
      p_.lse[at] = softmax_[row].lse();
    }
  }

  const Problem& p_;
  const int H_;
  PackedTile<P, kKeys> tile_;
  int64_t num_rows_ = 0;
  std::vector<Factor> q_;     // [rows][depth], not scaled: the scale is applied to fp32 scores
  std::vector<Floats> sums_;  // [rows][H]: weighted values so far
  std::vector<Softmax> softmax_;
  alignas(64) typename PackedTile<P, kKeys>::Scores scores_;
};

template <class P>
void run(const Problem& p, int num_threads) {
  const int64_t most = std::max<int64_t>(kTaskRows / p.R, 16);
  const int64_t num_parts = num_threads > 1 ? 2 * num_threads : 1;
  const int64_t per_task = std::clamp<int64_t>(p.T / num_parts + 1, 16, most);
  const int64_t num_blocks = (p.T + per_task - 1) / per_task;
  share(p.G * num_blocks, num_threads, [&](Pieces& tasks) {
    [[maybe_unused]] typename P::Scope scope;
    Attention<P> attention(p);
    for (int64_t task = tasks.take(); task >= 0; task = tasks.take()) {
      const int64_t block = num_blocks - 1 - task % num_blocks;  // short ones last: causal blocks cost more the later they are
      attention.run({task / num_blocks, p.T * block / num_blocks, p.T * (block + 1) / num_blocks});
    }
  });
}

}  // namespace

// Attends with q [T][N][H] to `num_pieces` pieces, of which piece i has `lengths[i]` keys [S][G][H] at keys[i] and values
// at values[i]; with `causal` the last has T. Writes o [T][N][H] and lse [T][N]. `strides` are those of tokens and heads
// of queries, keys and values, the same in all pieces.
BATON_ENTRY const char* baton_prefill_attention(const void* q, const void* const* keys, const void* const* values,
                                                const int64_t* lengths, int64_t num_pieces, void* o, float* lse,
                                                int64_t T, int64_t N, int64_t G, int64_t H, const int64_t* strides,
                                                bool causal, bool is_bf16, const char* product, int num_threads) {
  return guarded([&] {
    check(H % 16 == 0, "head dim ", H, " is not a multiple of 16");
    check(G > 0 && N % G == 0, N, " heads do not share ", G, " kv heads");
    check(num_pieces > 0, "every piece has keys and values");
    std::vector<Piece> pieces;
    for (int64_t i = 0; i < num_pieces; ++i) {
      const bool is_causal = causal && i + 1 == num_pieces;
      check(lengths[i] > 0 && (!is_causal || lengths[i] == T), "causal pieces are square");
      pieces.push_back({keys[i], values[i], lengths[i], is_causal});
    }
    const Problem p{q, std::move(pieces), o, lse, T, N, G, N / G, H, strides[0], strides[1],
                    strides[2], strides[3], strides[4], strides[5], kLog2E / std::sqrt(float(H))};
    with_product(is_bf16, product, [&](auto way) { run<decltype(way)>(p, num_threads); });
  });
}
