// Loops over threads, as torch divides them: every parallel region has as many threads as the caller names, because
// OpenMP's runtime ends and starts threads whenever that number changes.

#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>

namespace {

// Calls work(begin, end) for parts of [0, count), one part on each thread. Each part but the last has at least `grain`
// elements. Throws the exception of one of the calls once all calls have ended.
template <class Work>
void parallel_for(int64_t count, int64_t grain, int num_threads, const Work& work) {
  if (count <= 0) return;
  if (count <= grain || count == 1 || num_threads == 1) return work(int64_t(0), count);
  const int64_t num_parts = std::min<int64_t>(num_threads, (count + grain - 1) / grain);
  const int64_t length = (count + num_parts - 1) / num_parts;
  std::exception_ptr thrown;
#pragma omp parallel for num_threads(num_threads) schedule(static, 1)
  for (int64_t thread = 0; thread < int64_t(num_threads); ++thread) {
    const int64_t begin = thread * length, end = std::min(count, begin + length);
    if (begin >= end) continue;
    try {
      work(begin, end);
    } catch (...) {
#pragma omp critical(baton_thrown)
      thrown = std::current_exception();
    }
  }
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace
