// A thread's part of decode attention: a run of one sequence's keys, for all of its queries (decode_attention.cpp).

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "attention/common.h"

namespace {

constexpr int kKeys = 64;       // keys of a tile
constexpr int kHeads = 4;       // query heads whose sums are held in registers at a time
constexpr int kMostHeads = 16;  // query heads whose scores are held
constexpr int kLine = 64;       // bytes that are fetched at a time

struct AttentionProblem {
  const void* q;             // [B][N][H]
  const int64_t* addresses;  // address of each row's first key
  const int64_t* lengths;    // number of keys of each row, up to its own
  const int32_t* picks;      // [B][G][K], or null: all keys
  const int32_t* num_picks;  // [B][G]
  void* o;                   // [B][N][H]
  int64_t B, N, G, R, H, K, q_row, q_head;
  float scale;
  const int64_t* queries = nullptr;  // [B] rows from this one on that are one sequence's last tokens; null: 1 each
  const int64_t* unseen = nullptr;   // [B][2] keys between a row's first and last ones, not attended to; null: none

  int64_t num_queries(int64_t row) const { return queries ? queries[row] : 1; }
};

// Returns where a row's key number `index` begins; its value lies behind the heads of the key. `bytes`: of one key, and
// of one value.
inline char* place_of(int64_t address, int64_t index, int64_t bytes) {
  return reinterpret_cast<char*>(address) + index * 2 * bytes;
}

// The keys [first, end) of a sequence, or of the keys that a kv head picks, for the kv heads [head, end_head) and the
// queries of `num_queries` rows from `row` on. A kv head has `width` = num_queries * R query heads, those of the first
// row first. Results are kept from `place` on, query head by query head, with room for `height` of each kv head.
struct Task {
  int64_t sequence, row, num_queries, width, height, head, end_head, first, end, place;

  // Returns where the results of a query head are kept: of a kv head, its number `index` among that one's.
  int64_t place_of(int64_t kv_head, int64_t index) const { return place + (kv_head - head) * height + index; }
};

// Results of tasks: for each query head of a task, the weighted sums [H] and the softmax.
struct Found {
  std::vector<Floats> sums;
  std::vector<Softmax> softmax;
};

#ifdef __AMX_BF16__
// Scores in tiles; values, too, where many query heads share them, for they lie in the wrong order for tiles.
struct TiledScores : Fma<uint16_t> {
  using Scope = TileScope;
};
#endif

// A thread's work on tasks. kPicked: whether keys are picked.
template <class P, bool kPicked>
class Attention {
 public:
  using Element = typename P::Element;
  using Factor = typename P::Factor;

  Attention(const AttentionProblem& problem, Found& found) : p_(problem), H_(int(problem.H)), found_(found) {
    if constexpr (kInTiles) {
      int64_t most_queries = 1;
      for (int64_t row = 0; row < p_.B; row += p_.num_queries(row)) most_queries = std::max(most_queries, p_.num_queries(row));
      tiles_.resize(p_.G * num_tiles(most_queries * p_.R) * kMostHeads * H_);
      rows_.resize(kMostHeads * H_);
    } else {
      q_.resize(kHeads * H_);
    }
  }

  // Attends to all keys of a task, for all of its heads: tile by tile, so that memory is read in order. The thread's
  // next task is `next`, whose first tile is fetched meanwhile.
  void run(const Task& task, const Task* next) {
    clear(task);
    if constexpr (kInTiles) this->pack_queries(task);  // tiles do not exist on every processor
    for (int64_t first = task.first; first < task.end; first += kKeys) {
      const int count = int(std::min<int64_t>(kKeys, task.end - first));
      if (first + count < task.end) {
        look_ahead(task, first + count);
      } else if (next) {
        look_ahead(*next, next->first);
      }
      if constexpr (kInTiles) {
        this->attend_in_tiles(task, first, count);
      } else {
        attend(task, first, count);
      }
    }
  }

  // Returns the query heads for which a kv head's results need room: whole tiles, where values are multiplied in tiles.
  static int64_t height(int64_t width) {
    return kInTiles && width > kHeads ? num_tiles(width) * kMostHeads : width;
  }

 private:
  static constexpr bool kInTiles = !std::is_same_v<typename P::Scope, OfVectors::Scope>;

  // Returns the tiles of queries for `width` query heads that share a kv head.
  static int64_t num_tiles(int64_t width) { return (width + kMostHeads - 1) / kMostHeads; }

  // Clears the task's results.
  void clear(const Task& task) {
    const int64_t num = (task.end_head - task.head) * task.height, width = H_ / kLanes;
    std::fill_n(&found_.softmax[task.place], num, Softmax());
    std::fill_n(&found_.sums[task.place * width], num * width, Floats{});
  }

  void attend(const Task& task, int64_t first, int count) {
    for (int64_t g = task.head; g < task.end_head; ++g) {
      find(task.row, g, first, count);
      in_parts(0, task.width, [&](int64_t index, auto num) {
        load_queries<num>(task, g, index);
        for (int j = 0; j < count; j += kLanes) score<num>(j);
        weigh<num>(task, g, index, scores_, first, count);
      });
    }
  }

  // Calls part(index, number) for the query heads [first, end) of a kv head, at most kHeads at a time.
  template <class Part>
  void in_parts(int64_t first, int64_t end, Part part) {
    for (int64_t num = 0; first < end; first += num) {
      num = std::min<int64_t>(kHeads, end - first);
      switch (num) {
        case 1: part(first, std::integral_constant<int, 1>()); break;
        case 2: part(first, std::integral_constant<int, 2>()); break;
        case 3: part(first, std::integral_constant<int, 3>()); break;
        default: part(first, std::integral_constant<int, kHeads>());
      }
    }
  }

  // Makes the task's tile from key `first` on the next one to fetch: keys that lie in order, or picked keys.
  void look_ahead(const Task& task, int64_t first) {
    const int64_t num = std::min<int64_t>(kKeys, task.end - first), key_bytes = 2 * p_.G * H_ * sizeof(Element);
    if constexpr (kPicked) {
      for (int64_t j = 0; j < num; ++j) next_[j] = reinterpret_cast<const char*>(key(task.row, task.head, first + j));
      num_next_ = int(num), num_fetched_ = 0, fetched_bytes_ = 0;
    } else {
      ahead_ = reinterpret_cast<const char*>(p_.addresses[task.row]) + first * key_bytes;
      end_ahead_ = ahead_ + num * key_bytes;
    }
  }

  // Finds the addresses of the tile's keys.
  void find(int64_t row, int64_t g, int64_t first, int count) {
    for (int j = 0; j < count; ++j) keys_[j] = key(row, g, first + j);
    for (int j = count; j % kLanes; ++j) keys_[j] = keys_[count - 1];  // scored like a key, but not counted
  }

  // Returns where a kv head's key number `index` lies, among all keys or among those picked.
  const Element* key(int64_t row, int64_t g, int64_t index) const {
    const int32_t* picks = p_.picks ? p_.picks + (row * p_.G + g) * p_.K : nullptr;
    return reinterpret_cast<const Element*>(p_.addresses[row]) + g * H_ + (picks ? picks[index] : index) * 2 * p_.G * H_;
  }

  template <int C>
  void load_queries(const Task& task, int64_t g, int64_t index) {
    for (int r = 0; r < C; ++r) {
      const Element* q = query(task, g, index + r);
      for (int h = 0; h < H_; h += kLanes) store_floats(&q_[r * H_ + h], load_floats(q + h));
    }
  }

  // Returns the query of a kv head's query head number `index`.
  const Element* query(const Task& task, int64_t g, int64_t index) const {
    const int64_t row = task.row + index / p_.R, head = g * p_.R + index % p_.R;
    return static_cast<const Element*>(p_.q) + row * p_.q_row + head * p_.q_head;
  }

  // Returns how many of the `count` keys from `first` on a query head sees: none that come after its own token.
  int num_seen(const Task& task, int64_t index, int64_t first, int count) const {
    if constexpr (kPicked) return count;
    return int(std::clamp<int64_t>(p_.lengths[task.row + index / p_.R] - first, 0, count));
  }

  // Adds a tile's scores of C query heads of a kv head, from number `index` on, and its values, to their results.
  template <int C>
  void weigh(const Task& task, int64_t g, int64_t index, const Floats (*scores)[kKeys / kLanes], int64_t first, int count) {
    const int padded = (count + kLanes - 1) / kLanes * kLanes;
    const int64_t at = task.place_of(g, index);
    float factors[C];
    int seen[C];
    Softmax* softmax = &found_.softmax[at];
    for (int r = 0; r < C; ++r) seen[r] = num_seen(task, index + r, first, count);
    for (int r = 0; r < C; ++r) factors[r] = softmax[r].take(scores[r], seen[r], p_.scale);
    for (int r = 0; r < C; ++r) softmax[r].weigh(scores[r], weights_[r], padded, seen[r], p_.scale, factors[r]);
    for_parts(H_ / kLanes, [&](int from, auto width) { accumulate<C, width>(from, factors, count, at); });
  }

#ifdef __AMX_BF16__
  // tiles_: for each kv head, and each kMostHeads of its query heads, for each kTileDepth channels a tile of pairs of
  // channels: columns are the query heads of all kv heads that are scored together, zeros in those of others.
  void pack_queries(const Task& task) {
    std::fill(tiles_.begin(), tiles_.end(), Element());
    for (int64_t g = task.head; g < task.end_head; ++g) {
      for (int64_t index = 0; index < task.width; ++index) {
        const Element* q = query(task, g, index);
        Element* to = &tiles_[tile_of(task, g, index)] + 2 * (column_of(task, g) + index % kMostHeads);
        for (int h = 0; h < H_; h += 2) std::copy_n(q + h, 2, to + h / 2 * 2 * kMostHeads);
      }
    }
  }

  // Returns where the packed tiles of a kv head's query head number `index` begin.
  int64_t tile_of(const Task& task, int64_t g, int64_t index) const {
    return ((g - task.head) * num_tiles(task.width) + index / kMostHeads) * kMostHeads * H_;
  }

  // Returns the number of kv heads whose query heads have their scores in one tile. The first kv head of a tile is
  // number 0, `together`, 2 * `together`, ...
  static int64_t together(const Task& task) { return std::max<int64_t>(kMostHeads / task.width, 1); }

  // Returns the column of a kv head's first query head.
  static int64_t column_of(const Task& task, int64_t g) { return g % together(task) * task.width; }

  void attend_in_tiles(const Task& task, int64_t first, int count) {
    for (int64_t g = task.head, end = 0; g < task.end_head; g = end) {
      end = std::min(task.end_head, (g / together(task) + 1) * together(task));
      for (int64_t index = 0; index < task.width; index += kMostHeads) {
        const int64_t end_index = std::min(task.width, index + kMostHeads);
        for (int j = 0; j < count; j += kTileHeight) score_in_tiles(task, g, end, index, first, j, count);
        for (int64_t k = g; k < end; ++k) {
          find(task.row, k, first, count);
          if (task.width > kHeads) {
            weigh_in_tiles(task, k, index, int(end_index - index), first, count);
            continue;
          }
          in_parts(index, end_index, [&](int64_t from, auto num) {
            weigh<num>(task, k, from, scores_ + column_of(task, k) + from - index, first, count);
          });
        }
      }
    }
  }

  // Does as `weigh` for up to kMostHeads query heads at once: pairs of keys' values are interleaved as tiles want them.
  void weigh_in_tiles(const Task& task, int64_t g, int64_t index, int num, int64_t first, int count) {
    const Floats(*scores)[kKeys / kLanes] = scores_ + column_of(task, g);
    const int padded = round_up(count, kLanes), whole = round_up(count, kTileDepth);
    const int64_t at = task.place_of(g, index), row = H_ / kLanes;
    float factors[kMostHeads];
    int seen[kMostHeads];
    Softmax* softmax = &found_.softmax[at];
    for (int r = 0; r < num; ++r) seen[r] = num_seen(task, index + r, first, count);
    for (int r = 0; r < num; ++r) factors[r] = softmax[r].take(scores[r], seen[r], p_.scale);
    for (int r = 0; r < num; ++r) {
      softmax[r].weigh(scores[r], halves_[r], padded, seen[r], p_.scale, factors[r]);
      std::fill(halves_[r] + padded, halves_[r] + whole, uint16_t());
    }
    for (int r = num; r < kMostHeads; ++r) {
      factors[r] = 1.0f;
      std::fill_n(halves_[r], whole, uint16_t());
    }
    for_parts(int(row), [&](int from, auto width) {
      for (int j = 0; j < whole; j += 2) {
        for (int w = 0; w < width; ++w) values_[j / 2 * width + w] = pair_of_values(j, count, from + w);
        fetch<Element>(2 * width * kLanes);
      }
      multiply_tiles<width>(&found_.sums[at * row + from], int(row), factors, halves_[0], kKeys, values_, whole / 2);
    });
  }

  // Returns kLanes channels, register number `part` of a value, of the tile's keys j and j + 1, channel by channel; zeros
  // for keys beyond `count`.
  Words pair_of_values(int j, int count, int part) const {
    const int64_t channel = p_.G * H_ + part * kLanes;  // values lie behind keys
    const Words low = j < count ? (Words)load_floats(keys_[j] + channel) >> 16 : Words{};
    return low | (j + 1 < count ? (Words)load_floats(keys_[j + 1] + channel) : Words{});
  }

  // Scores the keys [j, j + 16) of a tile for the kv heads [g, end), at most kMostHeads query heads of each from number
  // `index` on.
  void score_in_tiles(const Task& task, int64_t g, int64_t end, int64_t index, int64_t first, int j, int count) {
    const bool lie_in_order = !p_.picks && j + kTileHeight <= count;
    alignas(64) float scores[kTileHeight][kMostHeads];
    Words columns[kLanes] = {};
    for (; g < end; ++g) {
      const int num = std::min(kTileHeight, count - j);
      for (int i = 0; i < num && !lie_in_order; ++i) std::copy_n(key(task.row, g, first + j + i), H_, &rows_[i * H_]);
      const Element* keys = lie_in_order ? key(task.row, g, first + j) : rows_.data();
      const int64_t stride = (lie_in_order ? 2 * p_.G * H_ : H_) * sizeof(Element);
      const Element* q = &tiles_[tile_of(task, g, index)];
      settle_memory();
      _tile_zero(0);
      for (int h = 0; h < H_; h += kTileDepth) {
        _tile_loadd(1, keys + h, stride);
        _tile_loadd(2, q + h * kMostHeads, 4 * kMostHeads);
        _tile_dpbf16ps(0, 1, 2);
      }
      fetch<Element>(kTileHeight * H_);
      _tile_stored(0, scores, sizeof(scores[0]));
      settle_memory();
      const int own = int(column_of(task, g));  // the other columns are 0, or NaN where a key holds NaN
      const Ints is_own = (lanes() >= own) & (lanes() < own + int(task.width));
      for (int i = 0; i < kTileHeight; ++i) columns[i] = is_own ? load<Words>(scores[i]) : columns[i];
    }
    transpose(columns);
    for (int head = 0; head < kMostHeads; ++head) scores_[head][j / kLanes] = (Floats)columns[head];
  }
#endif

  // Scores the keys [j, j + kLanes).
  template <int C>
  void score(int j) {
    constexpr int kPerWord = 4 / sizeof(Element);
    Floats sums[C][2] = {};  // two sums each, added to in turn: a multiply-add waits for the one before
    const auto add = [&](int word, auto num) {
      Words words[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) words[lane] = load_words(keys_[j + lane] + word * kPerWord, num);
      transpose(words);
      unrolled(std::make_integer_sequence<int, num>(), [&](int each) {
        fetch<uint32_t>(kLanes);
        for (int part = 0; part < P::kSpread; ++part) {
          const int step = each * P::kSpread + part;
          const Words operand = P::spread(words[each], part);
          for (int r = 0; r < C; ++r) {
            const Factor* q = &q_[r * H_ + word * kPerWord + step * P::kDepth];
            sums[r][step % 2] = P::add(sums[r][step % 2], q, operand);
          }
        }
      });
    };
    int word = 0;
    for (; word + kLanes <= H_ / kPerWord; word += kLanes) add(word, std::integral_constant<int, kLanes>());
    if (word < H_ / kPerWord) add(word, std::integral_constant<int, kLanes / 2>());
    for (int r = 0; r < C; ++r) scores_[r][j / kLanes] = sums[r][0] + sums[r][1];
  }

  // Fetches as many bytes of the next tile as were read of this one, between products and in memory's order: a head's
  // keys by themselves are too far apart for the processor's own prefetcher. Into the second-level cache: the first has
  // no room for a tile besides the one at work, and keeps fewer lines on their way at once.
  template <class Number>
  void fetch(int count) {
    if constexpr (kPicked) {
      fetch_picked(count * int(sizeof(Number)));
    } else {
      const char* end = std::min(ahead_ + count * sizeof(Number), end_ahead_);
      for (; ahead_ < end; ahead_ += kLine) __builtin_prefetch(ahead_, 0, 2);
    }
  }

  // Fetches picked keys of the next tile, each with its value, which lies at a distance.
  [[gnu::noinline]] void fetch_picked(int num_bytes) {
    const int head_bytes = H_ * int(sizeof(Element)), to_value = int(p_.G - 1) * head_bytes;
    for (; num_bytes > 0 && num_fetched_ < num_next_; num_bytes -= kLine) {
      __builtin_prefetch(next_[num_fetched_] + fetched_bytes_ + (fetched_bytes_ < head_bytes ? 0 : to_value), 0, 2);
      fetched_bytes_ += kLine;
      if (fetched_bytes_ >= 2 * head_bytes) fetched_bytes_ = 0, ++num_fetched_;
    }
  }

  // sums[r] = sums[r] * factors[r] + weights[r] . v, for W registers of channels.
  template <int C, int W>
  void accumulate(int from, const float* factors, int count, int64_t at) {
    Floats* to = &found_.sums[at * H_ / kLanes + from];
    Floats sums[C][W];
    for (int r = 0; r < C; ++r) {
      for (int w = 0; w < W; ++w) sums[r][w] = to[r * H_ / kLanes + w] * factors[r];
    }
    for (int j = 0; j < count; j += P::kDepth) {
      fetch<Element>(P::kDepth * W * kLanes);
      for (int w = 0; w < W; ++w) {
        const int64_t channel = p_.G * H_ + (from + w) * kLanes;  // values lie behind keys
        Words operand = (Words)load_floats(keys_[j] + channel);
        if constexpr (P::kDepth == 2) {
          operand = operand >> 16 | (j + 1 < count ? (Words)load_floats(keys_[j + 1] + channel) : Words{});
        }
        for (int r = 0; r < C; ++r) sums[r][w] = P::add(sums[r][w], &weights_[r][j], operand);
      }
    }
    for (int r = 0; r < C; ++r) {
      for (int w = 0; w < W; ++w) to[r * H_ / kLanes + w] = sums[r][w];
    }
  }

  const AttentionProblem& p_;
  const int H_;
  Found& found_;
  std::vector<Factor> q_;       // queries of the heads at work
  std::vector<Element> tiles_;  // queries of all heads
  std::vector<Element> rows_;   // copies of keys that do not lie in order
  const Element* keys_[kKeys];
  const char* ahead_ = nullptr;  // first byte of the next tile that is not fetched yet
  const char* end_ahead_ = nullptr;
  const char* next_[kKeys];  // keys of the next tile, where they are picked
  // number of keys in next_, of those fetched, and fetched bytes of the next one
  int num_next_ = 0, num_fetched_ = 0, fetched_bytes_ = 0;
  alignas(64) Floats scores_[kMostHeads][kKeys / kLanes];
  alignas(64) Factor weights_[kHeads][kKeys];
  alignas(64) uint16_t halves_[kInTiles ? kMostHeads : 1][kKeys];  // weights in bf16
  alignas(64) Words values_[kInTiles ? kKeys / 2 * kWide : 1];  // of a tile's keys, interleaved in pairs
};

}  // namespace
