// What the next layer's attention reads, for `Later`.
//
// A decode reads each key once, and waits for memory; linear layers of some thirty rows wait for
// arithmetic. So those between two attentions fetch what the second one will read. In a replay its
// call is known by then, with the table of tasks and the cache of its layer.
#pragma once
#include "attention_tiles.h"
#include "pool.h"

namespace xl {

static inline void add_piece(Later& later, const Piece& piece) {
  if (piece.stride == piece.bytes)
    later.add(piece.from, piece.rows * piece.bytes / Later::LINE, Later::LINE);
  else
    for (ptrdiff_t i = 0; i < piece.bytes; i += Later::LINE)
      later.add(piece.from + i, piece.rows, piece.stride);
}

// Notes what a core's tasks of few rows will read, in the order in which they are taken.
template <class Attention>
static void note_keys(Later& later, const Attention& next, int64_t core) {
  const AttentionCall& c = next.c;
  // Linear layers of so few rows read weights all the time.
  if (c.tokens <= MAX_ROWS || core >= c.cores) return;
  for (int64_t i = c.classes - 1; i >= 0; i--)
    for (int64_t n = c.core_start[i][core]; n < c.core_start[i][core + 1]; n++) {
      const int32_t* f = c.tasks[i] + n * c.task_fields;
      const Tile t = c.tile_of(f);
      if (!Attention::is_few(t)) continue;
      const int64_t width = Attention::width_of(Attention::columns_of(t));
      const int64_t end = std::min<int64_t>(t.stop, f[KV_END]);
      int64_t key = std::max<int64_t>(t.first_key, f[KV_START]) / W * W;
      for (; key < end; key += next.unit(key, end)) {
        if (later.is_full()) return;
        add_piece(later, next.k_piece(t, key, width));
        add_piece(later, next.v_piece(t, key, width));
      }
    }
}

}  // namespace xl
