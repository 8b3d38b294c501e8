// Keys and values that the next layer's attention reads, for `Later`.
//
// A decode reads each key once, and waits for memory; linear layers of some ten rows wait for
// arithmetic. So while those of one layer and the next compute, they fetch what the attention
// between them will read: its tasks are those of the attention before, in another cache.
#pragma once
#include "attention_call.h"
#include "mm.h"
#include "pool.h"

namespace xl {

// Keys and values of one task.
template <class T>
static void note_task(Later& later, const AttentionCall& c, const int32_t* f) {
  constexpr int64_t size = sizeof(typename T::B), lane = T::LANE * size;
  const int64_t d = c.head_size, p = c.block_size;
  const Tile t = c.tile_of(f);
  const int64_t stop = std::min<int64_t>(t.stop, f[KV_END]);
  int64_t key = std::max<int64_t>(t.first_key, f[KV_START]) / p * p;
  for (int64_t n; key < stop && !later.is_full(); key += n) {
    n = std::min(p, stop - key);
    const int64_t block = c.block_table[t.seq * c.table_width + key / p];
    const int64_t at = (block * c.kv_heads + t.head) * p * d * size;
    const char *k = static_cast<const char*>(c.k) + at, *v = static_cast<const char*>(c.v) + at;
    if (n == p)
      later.add(k, p * d * size / Later::LINE, Later::LINE);
    else
      for (int64_t i = 0; i < n * lane; i += Later::LINE) later.add(k + i, d / T::LANE, p * lane);
    later.add(v, (n * d * size + Later::LINE - 1) / Later::LINE, Later::LINE);
  }
}

// Those of all tasks of few rows that are the thread's own, in the order in which it takes them.
template <class T>
static void note_upcoming(Pool& pool, int thread, int64_t kind) {
  const AttentionCall* c = pool.upcoming;
  if (!c || c->kind != kind || thread >= c->cores) return;
  for (int64_t i = c->classes - 1; i >= 0; i--)
    for (int64_t n = c->core_start[i][thread]; n < c->core_start[i][thread + 1]; n++) {
      const int32_t* f = c->tasks[i] + n * c->task_fields;
      if (f[NUM_ROWS] <= MAX_ROWS) note_task<T>(pool.later(thread), *c, f);
    }
}

}  // namespace xl
