// What every entry point shares. All of them are plain C: pointers and integers, 0 = done, 1 = out
// of memory, 2 = this build lacks that kind of weight, 3 = a forked process without the threads.
#pragma once
#include <mutex>
#include <new>

#include "pool.h"

#define XL_API extern "C" __attribute__((visibility("default")))
// Size of the struct that an entry point takes, for the caller to compare with what it packs.
#define XL_STRUCT(entry, type) \
  XL_API int64_t entry##_bytes() { return int64_t(sizeof(type)); }

namespace xl {

// How to multiply.
enum Kind : int { K_F32 = 0, K_F16 = 1, K_BF16 = 2, K_BF16_DOT = 3, K_BF16_COMPACT = 4 };

struct Tuning {
  int64_t block_bytes;  // of activations that stay in cache
  int64_t panel_bytes;  // of a panel that stay in cache
};

struct Unsupported {};

template <class F>
static int guarded(Pool* pool, F&& f) {
  if (pool->is_foreign()) return 3;
  std::lock_guard<std::mutex> lock(pool->entry());
  try {
    f();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  } catch (const Unsupported&) {
    return 2;
  }
}

}  // namespace xl
