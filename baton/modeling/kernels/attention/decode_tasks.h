// All of decode attention's tasks, and how threads share them (decode_attention.cpp).

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <vector>

#include "attention/decode_attention.h"

namespace {

constexpr int64_t kRun = 512;  // keys of a task, about; fixed, so that a result depends on no other sequence

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

// Calls `run` with the way in which the rows' keys lie.
template <class Run>
void with_lie(const AttentionProblem& p, Run run) {
  if (p.picks) return run(std::integral_constant<Lie, Lie::kPicked>());
  if (p.pages.addresses) return run(std::integral_constant<Lie, Lie::kPaged>());
  run(std::integral_constant<Lie, Lie::kInOrder>());
}

// Merges the results of the tasks [begin, end), all those of a sequence, for a query head of its row number `query`.
template <class Element>
void merge(const AttentionProblem& p, const Task* begin, const Task* end, int64_t query, int64_t head, const Found& found) {
  const int64_t num = p.H / kLanes, kv_head = head / p.R;
  const auto of_head = [&](auto use) {
    for (const Task* task = begin; task != end; ++task) {
      const int64_t place = task->place_of(kv_head, query * p.R + head % p.R);
      if (task->head <= kv_head && kv_head < task->end_head) use(found.softmax[place], &found.sums[place * num]);
    }
  };
  float largest = kNothing, total = 0.0f;
  of_head([&](const Softmax& softmax, const Floats*) { largest = std::max(largest, softmax.largest); });
  of_head([&](const Softmax& softmax, const Floats*) { total += std::exp2(softmax.largest - largest) * softmax.sum(); });
  Element* to = static_cast<Element*>(p.o) + ((begin->row + query) * p.N + head) * p.H;
  for (int64_t i = 0; i < num; ++i) {
    Floats all = {};
    of_head([&](const Softmax& softmax, const Floats* sums) { all += sums[i] * std::exp2(softmax.largest - largest); });
    store_floats(to + i * kLanes, all * (1.0f / total));
  }
}

// The tasks of a batch. Each thread has a range of tasks to itself and runs them in order, so that a task's keys are
// fetched while the task before it is at work. A thread that has finished its range helps with the others. The thread
// that finishes a sequence's last task merges its results.
class Tasks {
 public:
  // Divides all sequences' keys into runs: a task has all kv heads of a run; with picks, whose numbers differ, each kv
  // head has runs of its own. `height`: of Attention. Returns the number of threads for which there is work.
  int64_t divide(const AttentionProblem& p, int64_t num_threads, int64_t (*height)(int64_t)) {
    int64_t place = 0;
    tasks_.clear();
    ends_.clear();
    for (int64_t row = 0, num = 1; row < p.B; row += num) {
      num = p.num_queries(row);
      const auto add = [&](int64_t head, int64_t end_head, int64_t first, int64_t end) {
        const int64_t num_runs = (end - first + kRun - 1) / kRun;
        const int64_t width = num * p.R, rows = height(width);
        for (int64_t i = 0; i < num_runs; ++i, place += (end_head - head) * rows) {
          const int64_t from = first + (end - first) * i / num_runs, to = first + (end - first) * (i + 1) / num_runs;
          tasks_.push_back({int64_t(ends_.size()), row, num, width, rows, head, end_head, from, to, place});
        }
      };
      const int64_t length = p.lengths[row + num - 1], unseen = p.unseen ? p.unseen[2 * row] : length;
      if (p.picks) {
        for (int64_t g = 0; g < p.G; ++g) add(g, g + 1, 0, p.num_picks[row * p.G + g]);
      } else {
        add(0, p.G, 0, std::min(unseen, length));
        if (unseen < length) add(0, p.G, p.unseen[2 * row + 1], length);
      }
      ends_.push_back(int64_t(tasks_.size()));
    }
    found_.sums.resize(place * p.H / kLanes);
    found_.softmax.resize(place);
    left_ = std::vector<std::atomic<int64_t>>(ends_.size());
    next_ = std::vector<std::atomic<int64_t>>(std::min<int64_t>(num_threads, tasks_.size()));
    return int64_t(next_.size());
  }

  // Marks all tasks as not done. Called while no thread works on them.
  void rewind() {
    for (int64_t thread = 0; thread < int64_t(next_.size()); ++thread) next_[thread] = first(thread);
    for (int64_t i = 0; i < int64_t(left_.size()); ++i) left_[i] = ends_[i] - begin(i);
  }

  Found& found() { return found_; }

  // Works as thread `own` until no task is left to begin.
  template <class P, Lie kLie>
  void work(Attention<P, kLie>& attention, const AttentionProblem& p, int64_t own) {
    [[maybe_unused]] typename P::Scope scope;
    const int64_t num_ranges = int64_t(next_.size());
    for (int64_t helped = 0; helped < num_ranges; ++helped) {
      const int64_t range = (own + helped) % num_ranges, end = first(range + 1);
      for (int64_t i = next_[range]++; i < end; i = next_[range]++) {
        const Task& task = tasks_[i];
        attention.run(task, i + 1 < end ? &tasks_[i + 1] : nullptr);
        if (--left_[task.sequence] > 0) continue;
        const Task *first_task = &tasks_[begin(task.sequence)], *end_task = tasks_.data() + ends_[task.sequence];
        for (int64_t i = 0; i < task.num_queries * p.N; ++i) {
          merge<typename P::Element>(p, first_task, end_task, i / p.N, i % p.N, found_);
        }
      }
    }
  }

 private:
  int64_t first(int64_t thread) const { return int64_t(tasks_.size()) * thread / int64_t(next_.size()); }
  int64_t begin(int64_t sequence) const { return sequence ? ends_[sequence - 1] : 0; }

  std::vector<Task> tasks_;
  std::vector<int64_t> ends_;               // index behind each sequence's last task
  std::vector<std::atomic<int64_t>> left_;  // tasks of each sequence that are not done
  std::vector<std::atomic<int64_t>> next_;  // next task of each thread's range
  Found found_;
};

}  // namespace
