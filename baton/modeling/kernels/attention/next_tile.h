// Fetches the keys and values that decode attention reads next, while others are at work (decode_attention.h).

#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/decode_problem.h"

namespace {

constexpr int kKeys = 64;  // keys of a tile
constexpr int kLine = 64;  // bytes that are fetched at a time

// The next tile of keys: they lie in order, in pages, or are picked. It is fetched in memory's order, between products: a head's
// keys by themselves are too far apart for the processor's own prefetcher. Into the second-level cache: the first has no
// room for a tile besides the one at work, and keeps fewer lines on their way at once.
template <Lie kLie>
class NextTile {
 public:
  // `head_bytes`: of one kv head's key, and of its value, which lies behind the keys of all `num_kv_heads`.
  NextTile(int head_bytes, int64_t num_kv_heads) : head_bytes_(head_bytes), num_kv_heads_(num_kv_heads) {}

  // Begins with a tile of `num` keys, of which `at` returns where number j lies.
  template <class At>
  void begin(int64_t num, At at) {
    const int64_t row_bytes = 2 * num_kv_heads_ * head_bytes_;
    if constexpr (kLie == Lie::kInOrder) {
      from_ = at(0);
      end_ = from_ + num * row_bytes;
    } else if constexpr (kLie == Lie::kPicked) {
      for (int64_t j = 0; j < num; ++j) keys_[j] = at(j);
      num_ = int(num), num_fetched_ = 0, fetched_bytes_ = 0;
    } else {
      num_ = 0, num_fetched_ = 0, from_ = end_ = nullptr;
      for (int64_t j = 0; j < num; ++j) {
        const char* key = at(j);
        if (!num_ || ends_[num_ - 1] != key) keys_[num_++] = key;
        ends_[num_ - 1] = key + row_bytes;
      }
      next_run();
    }
  }

  // Fetches so many bytes more, as far as there are any.
  void fetch(int num_bytes) {
    if constexpr (kLie == Lie::kPicked) {
      fetch_picked(num_bytes);
    } else {
      const char* end = std::min(from_ + num_bytes, end_);
      for (; from_ < end; from_ += kLine) __builtin_prefetch(from_, 0, 2);
      if constexpr (kLie == Lie::kPaged) next_run();
    }
  }

  // Returns so many lines, to be fetched during products.
  Lines lines(int num) {
    if constexpr (kLie == Lie::kPicked) {
      fetch_picked(num * kLine);
      return {};
    }
    const char* from = from_;
    from_ = std::min(from_ + num * kLine, end_);
    const Lines found{from, from_ > from ? kLine : 0};
    if constexpr (kLie == Lie::kPaged) next_run();
    return found;
  }

 private:
  // Goes on with the next run of keys that lie in order, when one is fetched.
  void next_run() {
    if (from_ < end_ || num_fetched_ == num_) return;
    from_ = keys_[num_fetched_];
    end_ = ends_[num_fetched_++];
  }

  // Fetches picked keys, each with its value, which lies at a distance.
  [[gnu::noinline]] void fetch_picked(int num_bytes) {
    const int to_value = int(num_kv_heads_ - 1) * head_bytes_;
    for (; num_bytes > 0 && num_fetched_ < num_; num_bytes -= kLine) {
      __builtin_prefetch(keys_[num_fetched_] + fetched_bytes_ + (fetched_bytes_ < head_bytes_ ? 0 : to_value), 0, 2);
      fetched_bytes_ += kLine;
      if (fetched_bytes_ >= 2 * head_bytes_) fetched_bytes_ = 0, ++num_fetched_;
    }
  }

  const int head_bytes_;
  const int64_t num_kv_heads_;
  const char* from_ = nullptr;  // first byte that is not fetched yet
  const char* end_ = nullptr;
  const char* keys_[kLie == Lie::kInOrder ? 1 : kKeys];  // picked keys, or first keys of runs in pages
  const char* ends_[kLie == Lie::kPaged ? kKeys : 1];    // ends of runs
  int num_ = 0, num_fetched_ = 0, fetched_bytes_ = 0;  // keys or runs, those fetched, and fetched bytes of the next key
};

// What PackedTile calls to have the next tile fetched.
template <Lie kLie>
struct FetchNext {
  NextTile<kLie>& next;
  int per_head;           // bytes that are fetched between products, for each query head
  bool during_products;

  Lines during(int num_steps) const { return during_products ? next.lines(num_steps) : Lines(); }
  void between() const { next.fetch(per_head); }
};

}  // namespace
