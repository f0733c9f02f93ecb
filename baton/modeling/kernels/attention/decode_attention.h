// A thread's part of decode attention: a run of one sequence's keys, for all of its queries (decode_attention.cpp).

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "attention/decode_problem.h"
#include "attention/next_tile.h"
#include "attention/packed_tile.h"

namespace {

constexpr int kHeads = 4;       // query heads whose sums are held in registers at a time
constexpr int kMostHeads = 16;  // query heads whose scores are held

// The product of keys and values that more than kHeads query heads share: they are packed for all (packed_tile.h).
template <class P>
struct Shared {
  using Product = P;
};

#ifdef __AMX_BF16__
// Scores in tiles; values only where they are packed, for they lie in the wrong order for tiles.
struct TiledScores : Fma<uint16_t> {
  using Scope = TileScope;
};

template <>
struct Shared<TiledScores> {
  using Product = Tiles;
};
#endif

// A thread's work on tasks.
template <class P, Lie kLie>
class Attention {
 public:
  using Element = typename P::Element;
  using Factor = typename P::Factor;

  Attention(const AttentionProblem& problem, Found& found)
      : p_(problem), H_(int(problem.H)), found_(found), packed_(H_), next_(H_ * int(sizeof(Element)), p_.G) {
    int64_t most_queries = 1;
    for (int64_t row = 0; row < p_.B; row += p_.num_queries(row)) most_queries = std::max(most_queries, p_.num_queries(row));
    const int64_t width = most_queries * p_.R;
    if constexpr (kInTiles) {
      tiles_.resize(p_.G * num_tiles(width) * kMostHeads * H_);
      rows_.resize(kMostHeads * H_);
    } else {
      q_.resize(width > kHeads ? p_.G * height(width) * packed_.depth() : kHeads * H_);
    }
  }

  // Attends to all keys of a task, for all of its heads: tile by tile, so that memory is read in order. The thread's
  // next task is `next`, whose first tile is fetched meanwhile.
  void run(const Task& task, const Task* next) {
    clear(task);
    if constexpr (kInTiles) {
      this->pack_queries(task);  // tiles do not exist on every processor
    } else if (task.width > kHeads) {
      pack_shared_queries(task);
    }
    for (int64_t first = task.first; first < task.end; first += kKeys) {
      const int count = int(std::min<int64_t>(kKeys, task.end - first));
      if (first + count < task.end) {
        look_ahead(task, first + count);
      } else if (next) {
        look_ahead(*next, next->first);
      }
      if constexpr (kInTiles) {
        this->attend_in_tiles(task, first, count);
      } else if (task.width > kHeads) {
        attend_shared(task, first, count);
      } else {
        attend(task, first, count);
      }
    }
  }

  // Returns the query heads for which a kv head's results need room: whole blocks, where they share keys and values.
  static int64_t height(int64_t width) { return width > kHeads ? round_up(int(width), Packed::kHeight) : width; }

 private:
  static constexpr bool kInTiles = !std::is_same_v<typename P::Scope, OfVectors::Scope>;
  using Packed = PackedTile<typename Shared<P>::Product, kKeys>;
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
      with_number(task.width, [&](auto num) {
        load_queries<num>(task, g);
        for (int j = 0; j < count; j += kLanes) score<num>(j);
        weigh<num>(task, g, scores_, first, count);
      });
    }
  }

  // Calls part(number) with the number of query heads of a kv head, at most kHeads.
  template <class Part>
  void with_number(int64_t num, Part part) {
    switch (num) {
      case 1: part(std::integral_constant<int, 1>()); break;
      case 2: part(std::integral_constant<int, 2>()); break;
      case 3: part(std::integral_constant<int, 3>()); break;
      default: part(std::integral_constant<int, kHeads>());
    }
  }

  // Copies the queries of all query heads to q_: for each kv head [height][depth].
  void pack_shared_queries(const Task& task) {
    for (int64_t g = task.head; g < task.end_head; ++g) {
      for (int64_t index = 0; index < task.width; ++index) load_query(task, g, index, shared_query(task, g, index));
    }
  }

  Factor* shared_query(const Task& task, int64_t g, int64_t index) {
    return &q_[((g - task.head) * task.height + index) * packed_.depth()];
  }

  // Does as `attend` where more than kHeads query heads share keys and values.
  void attend_shared(const Task& task, int64_t first, int count) {
    for (int64_t g = task.head; g < task.end_head; ++g) {
      find(task.row, g, first, count);
      packed_.pack_keys(count, [&](int j) { return keys_[j]; });
      pack_values(task, count);
      for (int64_t index = 0; index < task.width; index += Packed::kHeight) {
        packed_.score(shared_query(task, g, index), count, shared_scores_, fetching(task));
        weigh_shared(task, g, index, shared_scores_, int(std::min<int64_t>(Packed::kHeight, task.width - index)), first, count);
      }
    }
  }

  // Packs the values of the tile's keys.
  void pack_values(const Task& task, int count) {
    packed_.pack_values(count, [&](int j) { return keys_[j] + p_.G * H_; }, fetching(task));  // values lie behind keys
  }

  // Adds a tile's scores of `num` query heads of a kv head, from number `index` on, and its packed values, to their
  // results.
  void weigh_shared(const Task& task, int64_t g, int64_t index, const Floats (*scores)[kKeys / kLanes], int num,
                    int64_t first, int count) {
    const int64_t at = task.place_of(g, index);
    packed_.weigh(scores, num, count, p_.scale, &found_.softmax[at], &found_.sums[at * H_ / kLanes],
                  [&](int r) { return num_seen(task, index + r, first, count); },
                  fetching(task));
  }

  // Makes the task's tile from key `first` on the next one to fetch.
  void look_ahead(const Task& task, int64_t first) {
    const int64_t num = std::min<int64_t>(kKeys, task.end - first);
    next_.begin(num, [&](int64_t j) { return reinterpret_cast<const char*>(key(task.row, task.head, first + j)); });
  }

  // Fetches as many bytes of the next tile as `count` elements take, which were read of this one.
  void fetch(int count) { next_.fetch(count * int(sizeof(Element))); }

  // Returns what fetches the next tile while packed keys and values of a task are at work: in many small parts, for few
  // lines can be on their way at once, and a product waits behind them.
  FetchNext<kLie> fetching(const Task& task) {
    const int all = 2 * kKeys * H_ * int(sizeof(Element)), num_steps = (packed_.depth() + kKeys) / Packed::kDepth;
    const int during = kInTiles ? all / 4 : int(task.height) / Packed::kHeight * num_steps * kLine;
    const int num_turns = int(task.width) * kKeys / kLanes + kKeys / Packed::kDepth;
    return {next_, std::max(all - during, 0) / num_turns + kLine / 2, !kInTiles};
  }

  // Finds the addresses of the tile's keys.
  void find(int64_t row, int64_t g, int64_t first, int count) {
    for (int j = 0; j < count; ++j) keys_[j] = key(row, g, first + j);
    for (int j = count; j % kLanes; ++j) keys_[j] = keys_[count - 1];  // scored like a key, but not counted
  }

  // Returns where a kv head's key number `index` lies, among all keys or among those picked.
  const Element* key(int64_t row, int64_t g, int64_t index) const {
    int64_t address = p_.addresses[row];
    if constexpr (kLie == Lie::kPicked) index = p_.picks[(row * p_.G + g) * p_.K + index];
    if constexpr (kLie == Lie::kPaged) address += p_.pages.address(row, index), index = p_.pages.in_page(index);
    return reinterpret_cast<const Element*>(address) + g * H_ + index * 2 * p_.G * H_;
  }

  template <int C>
  void load_queries(const Task& task, int64_t g) {
    for (int r = 0; r < C; ++r) load_query(task, g, r, &q_[r * H_]);
  }

  void load_query(const Task& task, int64_t g, int64_t index, Factor* to) {
    const Element* q = query(task, g, index);
    for (int h = 0; h < H_; h += kLanes) store_floats(to + h, load_floats(q + h));
  }

  // Returns the query of a kv head's query head number `index`.
  const Element* query(const Task& task, int64_t g, int64_t index) const {
    const int64_t row = task.row + index / p_.R, head = g * p_.R + index % p_.R;
    return static_cast<const Element*>(p_.q) + row * p_.q_row + head * p_.q_head;
  }

  // Returns how many of the `count` keys from `first` on a query head sees: none that come after its own token.
  int num_seen(const Task& task, int64_t index, int64_t first, int count) const {
    if constexpr (kLie == Lie::kPicked) return count;
    return int(std::clamp<int64_t>(p_.lengths[task.row + index / p_.R] - first, 0, count));
  }

  // Adds a tile's scores of all C query heads of a kv head, and its values, to their results.
  template <int C>
  void weigh(const Task& task, int64_t g, const Floats (*scores)[kKeys / kLanes], int64_t first, int count) {
    const int padded = round_up(count, kLanes);
    const int64_t at = task.place_of(g, 0);
    float factors[C];
    int seen[C];
    Softmax* softmax = &found_.softmax[at];
    for (int r = 0; r < C; ++r) seen[r] = num_seen(task, r, first, count);
    for (int r = 0; r < C; ++r) factors[r] = softmax[r].take(scores[r], seen[r], p_.scale);
    for (int r = 0; r < C; ++r) softmax[r].weigh(scores[r], weights_[r], padded, seen[r], p_.scale, factors[r], [] {});
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
          const auto* scores = scores_ + column_of(task, k);
          if (task.width <= kHeads) {
            with_number(task.width, [&](auto num) { weigh<num>(task, k, scores, first, count); });
            continue;
          }
          if (index == 0) pack_values(task, count);  // several turns are those of one kv head
          weigh_shared(task, k, index, scores, int(end_index - index), first, count);
        }
      }
    }
  }

  // Scores the keys [j, j + 16) of a tile for the kv heads [g, end), at most kMostHeads query heads of each from number
  // `index` on.
  void score_in_tiles(const Task& task, int64_t g, int64_t end, int64_t index, int64_t first, int j, int count) {
    bool lie_in_order = kLie != Lie::kPicked && j + kTileHeight <= count;
    if constexpr (kLie == Lie::kPaged) {
      lie_in_order &= p_.pages.in_page(first + j) + kTileHeight <= int64_t(1) << p_.pages.shift;
    }
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
      fetch(task.width > kHeads ? kTileHeight * H_ / 2 : kTileHeight * H_);
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
        next_.fetch(4 * kLanes);
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

  // sums[r] = sums[r] * factors[r] + weights[r] . v, for W registers of channels.
  template <int C, int W>
  void accumulate(int from, const float* factors, int count, int64_t at) {
    Floats* to = &found_.sums[at * H_ / kLanes + from];
    Floats sums[C][W];
    for (int r = 0; r < C; ++r) {
      for (int w = 0; w < W; ++w) sums[r][w] = to[r * H_ / kLanes + w] * factors[r];
    }
    for (int j = 0; j < count; j += P::kDepth) {
      fetch(P::kDepth * W * kLanes);
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
  Packed packed_;
  std::vector<Factor> q_;       // queries of the heads at work
  std::vector<Element> tiles_;  // queries of all heads
  std::vector<Element> rows_;   // copies of keys that do not lie in order
  const Element* keys_[kKeys];
  NextTile<kLie> next_;
  alignas(64) Floats scores_[kMostHeads][kKeys / kLanes];
  alignas(64) Factor weights_[kHeads][kKeys];
  alignas(64) typename Packed::Scores shared_scores_;
};

}  // namespace
