// Fetches the keys and values that decode attention reads next, while others are at work (decode_attention.h).

#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/common.h"

namespace {

constexpr int kKeys = 64;  // keys of a tile
constexpr int kLine = 64;  // bytes that are fetched at a time

// The next tile of keys: they lie in order, or are picked. It is fetched in memory's order, between products: a head's
// keys by themselves are too far apart for the processor's own prefetcher. Into the second-level cache: the first has no
// room for a tile besides the one at work, and keeps fewer lines on their way at once.
template <bool kPicked>
class NextTile {
 public:
  // `head_bytes`: of one kv head's key, and of its value, which lies behind the keys of all `num_kv_heads`.
  NextTile(int head_bytes, int64_t num_kv_heads) : head_bytes_(head_bytes), num_kv_heads_(num_kv_heads) {}

  // Begins with a tile of `num` keys, of which `at` returns where number j lies.
  template <class At>
  void begin(int64_t num, At at) {
    if constexpr (kPicked) {
      for (int64_t j = 0; j < num; ++j) keys_[j] = at(j);
      num_ = int(num), num_fetched_ = 0, fetched_bytes_ = 0;
    } else {
      from_ = at(0);
      end_ = from_ + num * 2 * num_kv_heads_ * head_bytes_;
    }
  }

  // Fetches so many bytes more, as far as there are any.
  void fetch(int num_bytes) {
    if constexpr (kPicked) {
      fetch_picked(num_bytes);
    } else {
      const char* end = std::min(from_ + num_bytes, end_);
      for (; from_ < end; from_ += kLine) __builtin_prefetch(from_, 0, 2);
    }
  }

  // Returns so many lines, to be fetched during products.
  Lines lines(int num) {
    if constexpr (kPicked) {
      fetch_picked(num * kLine);
      return {};
    }
    const char* from = from_;
    from_ = std::min(from_ + num * kLine, end_);
    return {from, from_ > from ? kLine : 0};
  }

 private:
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
  const char* keys_[kPicked ? kKeys : 1];
  int num_ = 0, num_fetched_ = 0, fetched_bytes_ = 0;  // keys, those fetched, and fetched bytes of the next one
};

// What PackedTile calls to have the next tile fetched.
template <bool kPicked>
struct FetchNext {
  NextTile<kPicked>& next;
  int per_head;           // bytes that are fetched between products, for each query head
  bool during_products;

  Lines during(int num_steps) const { return during_products ? next.lines(num_steps) : Lines(); }
  void between() const { next.fetch(per_head); }
};

}  // namespace
