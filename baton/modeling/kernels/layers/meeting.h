// A barrier where the threads of a step wait for each other.

#pragma once

#include <atomic>
#include <cstdint>

namespace {

class Meeting {
 public:
  // Returns when `num_threads` threads have called; all see what each wrote before. Spins as long as the others are
  // likely to come at once; then sleeps, because another process may have their processor.
  void wait(int num_threads) {
    const uint32_t number = number_.load(std::memory_order_relaxed);  // cannot change before this thread has come
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
      arrived_.store(0, std::memory_order_relaxed);
      number_.fetch_add(1, std::memory_order_seq_cst);  // before notify_all looks for sleeping threads
      number_.notify_all();
      return;
    }
    for (int i = 0; i < kAwake; ++i) {
      if (number_.load(std::memory_order_acquire) != number) return;
#ifdef __x86_64__
      __builtin_ia32_pause();
#endif
    }
    number_.wait(number, std::memory_order_acquire);
  }

 private:
  static constexpr int kAwake = 2000;  // iterations of the spin loop: some 100 us

  alignas(64) std::atomic<int> arrived_ = 0;
  alignas(64) std::atomic<uint32_t> number_ = 0;
};

}  // namespace
