// Work in pieces, which threads take one after the other: a thread that another process holds up takes fewer.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/parallel.h"

namespace {

// The pieces that no thread has taken yet.
class Pieces {
 public:
  explicit Pieces(int64_t count) : count_(count) {}

  // Returns the next piece's number, or -1 when all are taken.
  int64_t take() {
    const int64_t piece = next_.fetch_add(1, std::memory_order_relaxed);
    return piece < count_ ? piece : -1;
  }

 private:
  std::atomic<int64_t> next_ = 0;
  const int64_t count_;
};

// Calls work(pieces) once on each thread, on no more threads than there are pieces.
template <class Work>
void share(int64_t count, int num_threads, const Work& work) {
  Pieces pieces(count);
  parallel_for(std::min<int64_t>(num_threads, count), 1, num_threads, [&](int64_t, int64_t) { work(pieces); });
}

// Calls work(i) for each i below count, on all threads.
template <class Work>
void share_each(int64_t count, int num_threads, const Work& work) {
  share(count, num_threads, [&](Pieces& pieces) {
    for (int64_t i = pieces.take(); i >= 0; i = pieces.take()) work(i);
  });
}

}  // namespace
