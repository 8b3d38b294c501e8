// Threads that stay: one per core, the caller is the first of them.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "ahead.h"

namespace xl {

constexpr int MAX_RUNS = 64;

// Memory that only grows, one piece per thread and one shared; contents do not survive `get`.
struct Scratch {
  char* base = nullptr;
  size_t size = 0;
  ~Scratch();
  void* get(size_t bytes);
};

class Pool {
 public:
  Pool(int threads, int spin_us);
  ~Pool();

  using Body = void (*)(void* context, int thread);

  // body(context, thread) on the caller and on every worker that is awake in time; returns when
  // all that began have ended. The body takes its work from a shared counter, so a worker that is
  // late or asleep costs nothing. A second caller at the same time runs alone, as thread 0 of
  // scratch memory of its own.
  void run(Body body, void* context, bool alone = false);

  // f(unit, thread) for every unit in [0, units). Each thread begins with a run of neighbours of
  // its own; who is done takes from the others' runs.
  template <class F>
  void each(int64_t units, F&& f, bool alone = false) {
    struct alignas(64) Run {
      std::atomic<int64_t> next;
      int64_t end;
    };
    struct Job {
      F& f;
      int count;
      Run runs[MAX_RUNS];
    } job{f, threads() < MAX_RUNS ? threads() : MAX_RUNS, {}};
    if (alone || units <= 1) job.count = 1;
    for (int i = 0; i < job.count; i++) {
      job.runs[i].next = units * i / job.count;
      job.runs[i].end = units * (i + 1) / job.count;
    }
    run(
        [](void* c, int thread) {
          Job& j = *static_cast<Job*>(c);
          for (int i = 0; i < j.count; i++) {
            Run& r = j.runs[(thread + i) % j.count];
            for (int64_t u; (u = r.next.fetch_add(1, std::memory_order_relaxed)) < r.end;)
              j.f(u, thread);
          }
        },
        &job, job.count == 1);
  }

  int threads() const { return int(scratch_.size()); }
  void* scratch(int thread, size_t bytes) { return scratch_[size_t(thread)].get(bytes); }
  void reserve(size_t bytes) {  // so that no worker allocates
    for (auto& s : scratch_) s.get(bytes);
  }
  Later& later(int thread) { return later_[size_t(thread)]; }
  void* shared(int slot, size_t bytes) { return shared_[slot].get(bytes); }

  // This process was forked from the one that made the pool: its threads are not here, and its
  // locks may be held by some that never come back.
  bool is_foreign() const;

  // Held for the length of one entry point: scratch memory belongs to the holder.
  std::mutex& entry() { return entry_; }

 private:
  void work(int thread);
  void stop();  // and wait for all workers

  std::vector<Scratch> scratch_;
  std::vector<Later> later_;
  Scratch shared_[4];
  std::vector<std::thread> workers_;
  std::mutex entry_;
  std::mutex sleep_;
  std::condition_variable wake_;
  const int64_t spin_ns_;
  const int forks_;  // of this process's ancestors, when the pool was made

  alignas(64) std::atomic<uint64_t> generation_{0};  // odd while a job is open
  alignas(64) std::atomic<int> active_{0};
  std::atomic<int> sleeping_{0};
  Body body_ = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> stop_{false};
};

}  // namespace xl
