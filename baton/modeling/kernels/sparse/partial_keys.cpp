// Makes partial keys, and stores them as key_selection.cpp reads them (baton/modeling/forward/selection.py defines them).
//
// On the calling thread alone: pushed keys come while the slots' lock is held, beside generation on the same cores; a
// pool of threads would take time from generation. kBlock keys of a head are transposed, so that a register holds one
// column of as many keys as it has lanes: sums over a head's columns then need none over lanes, a basis that only
// selects columns copies them, and either result is in the order in which it is stored.
//
// T tokens, G kv heads, H head dim, R columns of partial keys.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/entry.h"
#include "common/simd.h"

namespace {

constexpr int kBlock = 16;               // keys that lie together
constexpr int kParts = kBlock / kLanes;  // registers of one block's column
constexpr int kColumns = kLanes / 2;

// Loads `count` numbers, with zeros behind them.
template <class Number>
inline Floats load_some(const Number* from, int64_t count) {
  if (count >= kLanes) return load_floats(from);
  Number some[kLanes] = {};
  std::copy_n(from, count, some);
  return load_floats(some);
}

// Keys as they lie in memory: a head's columns follow each other.
template <class Number>
struct Keys {
  const Number* data;
  int64_t token_stride, head_stride, H;

  // Transposes `count` keys, from number `first` on, to [H][kBlock]; the last key stands for missing ones.
  void turn(int64_t first, int64_t count, int64_t g, float* to) const {
    const Number* from = data + first * token_stride + g * head_stride;
    for (int64_t h = 0; h < H; h += kLanes) {
      const int64_t num_rows = std::min<int64_t>(kLanes, H - h);
      for (int part = 0; part < kParts; ++part) {
        Words rows[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
          const int64_t token = std::min<int64_t>(part * kLanes + lane, count - 1);
          rows[lane] = (Words)load_some(from + token * token_stride + h, H - h);
        }
        transpose(rows);
        for (int64_t i = 0; i < num_rows; ++i) store(to + (h + i) * kBlock + part * kLanes, rows[i]);
      }
    }
  }
};

// The projection to a kv head's partial keys: a product with [H][R], or, where that only selects, a copy of columns.
struct Basis {
  const float* matrices;
  const int64_t* columns;  // [G][R], or null
  int64_t H, R, head_stride, row_stride;

  // Projects keys [H][kBlock] to [R][kBlock].
  void project(int64_t g, const float* keys, uint16_t* to) const {
    if (columns) {
      select(columns + g * R, keys, to);
    } else if (R < kColumns) {
      multiply<1>(matrices + g * head_stride, keys, to);
    } else {
      multiply<kColumns>(matrices + g * head_stride, keys, to);
    }
  }

 private:
  void select(const int64_t* from, const float* keys, uint16_t* to) const {
    for (int64_t r = 0; r < R; ++r, to += kBlock) {
      const float* column = keys + from[r] * kBlock;
      for (int i = 0; i < kBlock; i += kLanes) store_floats(to + i, load_floats(column + i));
    }
  }

  // Computes C columns at a time; the last ones overlap those before.
  template <int C>
  void multiply(const float* matrix, const float* keys, uint16_t* to) const {
    for (int64_t r = 0; r < R; r += C) {
      const int64_t first = std::min(r, R - C);
      Floats sums[C][kParts] = {};
      for (int64_t h = 0; h < H; ++h) {
        for (int part = 0; part < kParts; ++part) {
          const Floats column = load_floats(keys + h * kBlock + part * kLanes);
          for (int c = 0; c < C; ++c) sums[c][part] += column * matrix[h * row_stride + first + c];
        }
      }
      for (int c = 0; c < C; ++c) {
        for (int part = 0; part < kParts; ++part) {
          store_floats(to + (first + c) * kBlock + part * kLanes, sums[c][part]);
        }
      }
    }
  }
};

// Where each token's partial key is stored: an address, and the key's number among those that lie there.
struct Places {
  const int64_t *addresses, *numbers;
  bool is_run;  // only the first token's place is given, and the others follow it

  int64_t number(int64_t token) const { return is_run ? numbers[0] + token : numbers[token]; }

  // Returns the place of the first column's number; each column is kBlock numbers behind the one before.
  uint16_t* at(int64_t token, int64_t g, int64_t G, int64_t R) const {
    auto* keys = reinterpret_cast<uint16_t*>(addresses[is_run ? 0 : token]);
    return keys + (number(token) / kBlock * G + g) * R * kBlock + number(token) % kBlock;
  }

  // Returns how many tokens from number `first` on are made at once: of a run, those of one block.
  int64_t count(int64_t first, int64_t num_tokens) const {
    return std::min(is_run ? kBlock - number(first) % kBlock : kBlock, num_tokens - first);
  }
};

template <class Number>
void run(const Keys<Number>& keys, int64_t T, int64_t G, const Basis& basis, const Places& places) {
  const int64_t H = basis.H, R = basis.R;
  std::vector<float> turned(H * kBlock);
  std::vector<uint16_t> partial(R * kBlock);
  for (int64_t first = 0, count; first < T; first += count) {
    count = places.count(first, T);
    for (int64_t g = 0; g < G; ++g) {
      keys.turn(first, count, g, turned.data());
      if (places.is_run && count == kBlock) {
        basis.project(g, turned.data(), places.at(first, g, G, R));
        continue;
      }
      basis.project(g, turned.data(), partial.data());
      for (int64_t i = 0; i < count; ++i) {
        uint16_t* to = places.at(first + i, g, G, R);
        for (int64_t r = 0; r < R; ++r) to[r * kBlock] = partial[r * kBlock + i];
      }
    }
  }
}

}  // namespace

// Projects k [T][G][H], bf16 or fp32, by basis [G][H][R] or, unless null, by columns [G][R]. `strides`: between k's tokens
// and heads, and the basis' heads and rows. Addresses and numbers: one for each token; with `is_run` for the first.
BATON_ENTRY const char* baton_project_keys(const void* k, const int64_t* strides, int64_t T, int64_t G, int64_t H,
                                           int64_t R, const float* matrices, const int64_t* columns,
                                           const int64_t* addresses, const int64_t* numbers, bool is_run,
                                           bool is_bf16) {
  return guarded([&] {
    const auto is_one = [&](int64_t column) { return column >= 0 && column < H; };
    check(!columns || std::all_of(columns, columns + G * R, is_one), "no head has such a column");
    const Places places{addresses, numbers, is_run};
    check(std::all_of(numbers, numbers + (is_run ? 1 : T), [](int64_t each) { return each >= 0; }),
          "a number is 0 or more");
    const Basis basis{matrices, columns, H, R, strides[2], strides[3]};
    const auto with = [&](auto number) {
      const Keys<decltype(number)> keys{static_cast<const decltype(number)*>(k), strides[0], strides[1], H};
      run(keys, T, G, basis, places);
    };
    is_bf16 ? with(uint16_t()) : with(float());
  });
}
