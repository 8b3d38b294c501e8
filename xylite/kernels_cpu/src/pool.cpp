#include "api.h"

#include <pthread.h>

#include <chrono>
#include <cstdlib>
#include <new>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace xl {

static inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

static int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Scratch::~Scratch() { std::free(base); }

void* Scratch::get(size_t bytes) {
  if (bytes > size) {
    std::free(base);
    size = 0;
    const size_t huge = size_t(2) << 20;
    const size_t unit = bytes >= huge ? huge : 4096;
    const size_t want = (bytes + bytes / 4 + unit - 1) / unit * unit;
    base = static_cast<char*>(std::aligned_alloc(unit, want));
    if (!base) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (unit == huge) madvise(base, want, MADV_HUGEPAGE);
#endif
    size = want;
  }
  return base;
}

// How many forks lie between the process that loaded the library and this one.
static int forks = 0;

static int count_forks() {
  static const int failed = pthread_atfork(nullptr, nullptr, [] { forks++; });
  if (failed) throw std::bad_alloc();
  return forks;
}

bool Pool::is_foreign() const { return forks != forks_; }

Pool::Pool(int threads, int spin_us)
    : scratch_(size_t(threads)),
      later_(size_t(threads)),
      spin_ns_(spin_us * 1000LL),
      forks_(count_forks()) {
  try {
    for (int i = 1; i < threads; i++) workers_.emplace_back(&Pool::work, this, i);
  } catch (...) {  // no more threads, or no memory for them
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(sleep_);
    stop_ = true;
    generation_.fetch_add(2);
  }
  wake_.notify_all();
  for (auto& w : workers_) w.join();
}

void Pool::run(Body body, void* context, bool alone) {
  if (alone || workers_.empty()) {
    body(context, 0);
    return;
  }
  body_ = body;
  context_ = context;
  generation_.fetch_add(1);  // even -> odd: open
  if (sleeping_.load()) {
    { std::lock_guard<std::mutex> lock(sleep_); }
    wake_.notify_all();
  }
  body(context, 0);
  generation_.fetch_add(1);  // closed: who comes now leaves at once
  for (int spins = 0; active_.load(); spins++) {
    if (spins < 2000)
      pause();
    else
      std::this_thread::yield();
  }
}

void Pool::work(int thread) {
  uint64_t seen = 0;
  for (;;) {
    uint64_t g = generation_.load(std::memory_order_acquire);
    if (g == seen || !(g & 1)) {
      const int64_t until = now_ns() + spin_ns_;
      int spins = 0;
      while ((g = generation_.load(std::memory_order_acquire)) == seen || !(g & 1)) {
        if (stop_) return;
        pause();
        if (++spins % 64 == 0 && now_ns() > until) {
          std::unique_lock<std::mutex> lock(sleep_);
          sleeping_.fetch_add(1);
          wake_.wait(lock, [&] {
            const uint64_t h = generation_.load();
            return stop_ || (h != seen && (h & 1));
          });
          sleeping_.fetch_sub(1);
          if (stop_) return;
          break;
        }
      }
      g = generation_.load();
      if (!(g & 1)) continue;
    }
    // Registered first, checked second; `run` closes first and looks at active_ second.
    active_.fetch_add(1);
    g = generation_.load();
    if ((g & 1) && g != seen) {
      seen = g;
      body_(context_, thread);
    }
    active_.fetch_sub(1);
    // The event loop has no core of its own: let it in now, when nobody waits for this thread. Else
    // it shares the core with this thread by time slices, which are longer than many a step.
    std::this_thread::yield();
  }
}

}  // namespace xl

XL_API xl::Pool* xl_pool_start(int threads, int spin_us) {
  try {
    return new xl::Pool(threads < 1 ? 1 : threads, spin_us);
  } catch (...) {  // no thread to be had: the caller reports it
    return nullptr;
  }
}

XL_API void xl_pool_stop(xl::Pool* pool) {
  if (!pool->is_foreign()) delete pool;
}

// Ask for huge pages behind [p, p + bytes), whole ones only.
XL_API void xl_huge_pages(void* p, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t huge = uintptr_t(2) << 20;
  const uintptr_t start = (uintptr_t(p) + huge - 1) / huge * huge;
  const uintptr_t end = (uintptr_t(p) + uintptr_t(bytes)) / huge * huge;
  if (end > start) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#else
  (void)p;
  (void)bytes;
#endif
}
