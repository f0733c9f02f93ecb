// All of decode attention's tasks, and how threads share them (decode_attention.cpp).

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <vector>

#include "attention/decode_attention.h"

namespace {

constexpr int64_t kRun = 512;  // keys of a task, about; fixed, so that a row's result depends on no other row

// Calls `run` with the product for rows of this kind: by name as `with_product` does, with scores in tiles where they
// fit.
template <class Run>
void with_scores(const AttentionProblem& p, bool is_bf16, std::string_view name, Run run) {
#ifdef __AMX_BF16__
  const bool fit_tiles = is_bf16 && p.H % kTileDepth == 0 && p.R <= kMostHeads;
  if (name == "tiles" && fit_tiles) return run(TiledScores());
#endif
  with_product(is_bf16, name == "tiles" ? "widened" : name, run);
}

// Merges the results of the tasks [begin, end) of one query head of their row, into its output.
template <class Element>
void merge(const AttentionProblem& p, const Task* begin, const Task* end, int64_t head, const Found& found) {
  const int64_t num = p.H / kLanes;
  const auto of_head = [&](auto use) {
    for (const Task* task = begin; task != end; ++task) {
      const int64_t place = task->place + head - task->head * p.R;
      if (task->head <= head / p.R && head / p.R < task->end_head) use(found.softmax[place], &found.sums[place * num]);
    }
  };
  float largest = kNothing, total = 0.0f;
  of_head([&](const Softmax& softmax, const Floats*) { largest = std::max(largest, softmax.largest); });
  of_head([&](const Softmax& softmax, const Floats*) { total += std::exp2(softmax.largest - largest) * softmax.sum(); });
  Element* to = static_cast<Element*>(p.o) + (begin->row * p.N + head) * p.H;
  for (int64_t i = 0; i < num; ++i) {
    Floats all = {};
    of_head([&](const Softmax& softmax, const Floats* sums) { all += sums[i] * std::exp2(softmax.largest - largest); });
    store_floats(to + i * kLanes, all * (1.0f / total));
  }
}

// The tasks of a batch. Each thread has a range of tasks to itself and runs them in order, so that a task's keys are
// fetched while the task before it is at work. A thread that has finished its range helps with the others. The thread
// that finishes a row's last task merges the row's results.
class Tasks {
 public:
  // Divides all rows' keys into runs: a task has all kv heads of a run; with picks, whose numbers differ, each kv head
  // has runs of its own. Returns the number of threads for which there is work.
  int64_t divide(const AttentionProblem& p, int64_t num_threads) {
    int64_t place = 0;
    tasks_.clear();
    const auto add = [&](int64_t row, int64_t head, int64_t end_head, int64_t length) {
      const int64_t num_runs = (length + kRun - 1) / kRun;
      for (int64_t i = 0; i < num_runs; ++i, place += (end_head - head) * p.R) {
        tasks_.push_back({row, head, end_head, length * i / num_runs, length * (i + 1) / num_runs, place});
      }
    };
    ends_.clear();
    for (int64_t row = 0; row < p.B; ++row) {
      if (!p.picks) add(row, 0, p.G, p.lengths[row]);
      for (int64_t g = 0; p.picks && g < p.G; ++g) add(row, g, g + 1, p.num_picks[row * p.G + g]);
      ends_.push_back(int64_t(tasks_.size()));
    }
    found_.sums.resize(place * p.H / kLanes);
    found_.softmax.resize(place);
    left_ = std::vector<std::atomic<int64_t>>(p.B);
    next_ = std::vector<std::atomic<int64_t>>(std::min<int64_t>(num_threads, tasks_.size()));
    return int64_t(next_.size());
  }

  // Marks all tasks as not done. Called while no thread works on them.
  void rewind() {
    for (int64_t thread = 0; thread < int64_t(next_.size()); ++thread) next_[thread] = first(thread);
    for (int64_t row = 0; row < int64_t(left_.size()); ++row) left_[row] = ends_[row] - begin(row);
  }

  Found& found() { return found_; }

  // Works as thread `own` until no task is left to begin.
  template <class P, bool kPicked>
  void work(Attention<P, kPicked>& attention, const AttentionProblem& p, int64_t own) {
    [[maybe_unused]] typename P::Scope scope;
    const int64_t num_ranges = int64_t(next_.size());
    for (int64_t helped = 0; helped < num_ranges; ++helped) {
      const int64_t range = (own + helped) % num_ranges, end = first(range + 1);
      for (int64_t i = next_[range]++; i < end; i = next_[range]++) {
        const Task& task = tasks_[i];
        attention.run(task, i + 1 < end ? &tasks_[i + 1] : nullptr);
        if (--left_[task.row] == 0) {
          const Task *begin_row = &tasks_[begin(task.row)], *end_row = tasks_.data() + ends_[task.row];
          for (int64_t head = 0; head < p.N; ++head) merge<typename P::Element>(p, begin_row, end_row, head, found_);
        }
      }
    }
  }

 private:
  int64_t first(int64_t thread) const { return int64_t(tasks_.size()) * thread / int64_t(next_.size()); }
  int64_t begin(int64_t row) const { return row ? ends_[row - 1] : 0; }

  std::vector<Task> tasks_;
  std::vector<int64_t> ends_;               // index behind each row's last task
  std::vector<std::atomic<int64_t>> left_;  // tasks of each row that are not done
  std::vector<std::atomic<int64_t>> next_;  // next task of each thread's range
  Found found_;
};

}  // namespace
