// What the caller of attention gives, the rows of a task, and the keys that each of them sees.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace xl {

class Pool;

enum Field { SEQ, Q_ROW, NUM_ROWS, HEAD, KV_START, KV_END, PART };  // of a task
enum MergeField { M_ROW = 8, M_PREFIX };  // the first seven are those of a task

struct Tile {  // the rows of one task
  int64_t seq, q_row, rows, head, chunk, kv_len, drafts_from;
  const uint8_t* mask;  // num_draft x num_draft, or null
  int64_t num_draft, first_key, end_key;  // keys that some row may see
  int64_t stop;                           // where this task ends, end_key unless the tile was cut
};

// Addresses and sizes as the caller has them; the order is the C ABI.
struct AttentionCall {
  const void *q, *k, *v;  // q [G, T * group, D] in the operand type of the kernel
  void* out;              // [T, H * D]
  const int32_t *q_start, *kv_len, *num_draft, *bias_start, *block_table;
  const uint8_t* tree_mask;
  const int32_t *merges, *parts;  // parts = number of merges, rows, merges of shared prefixes
  int64_t tokens, kv_heads, group, block_size, head_size, table_width;
  int64_t task_fields, merge_fields;
  int64_t window;  // 0 = all
  int64_t out_type, kind;
  double scale, cap;  // cap 0 = off
  int64_t classes, cores;
  const int32_t* tasks[4];       // per tile class [W, task_fields]
  const int32_t* core_start[4];  // per tile class [cores + 1]

  // first key that a query at this position sees
  int64_t first_in_window(int64_t position) const {
    return window ? std::max<int64_t>(position - window + 1, 0) : 0;
  }
  // last key that row r of the tile sees, trees aside
  int64_t last_key(const Tile& t, int64_t r) const {
    return t.kv_len - t.chunk + (t.q_row + r) / group;
  }

  Tile tile_of(const int32_t* f) const {
    Tile t;
    t.seq = f[SEQ];
    t.q_row = f[Q_ROW];
    t.rows = f[NUM_ROWS];
    t.head = f[HEAD];
    t.chunk = q_start[t.seq + 1] - q_start[t.seq];
    t.kv_len = kv_len[t.seq];
    t.mask = bias_start[t.seq] >= 0 ? tree_mask + bias_start[t.seq] : nullptr;
    t.num_draft = t.mask ? num_draft[t.seq] : 0;
    t.drafts_from = t.kv_len - t.num_draft;
    t.first_key = first_in_window(last_key(t, 0));
    // Siblings of a tree share a position: a draft token's may be that of the first draft.
    if (t.mask && window) t.first_key = std::min(t.first_key, first_in_window(t.drafts_from));
    t.end_key = t.stop = t.mask ? t.kv_len : last_key(t, t.rows - 1) + 1;
    return t;
  }

  // Of a tile that was cut or has a shared prefix, or is one.
  Tile merge_tile(int64_t i) const {
    const int32_t* f = merges + i * merge_fields;
    Tile t = tile_of(f);
    if (i >= parts[0]) {  // its rows see all of its keys
      t.mask = nullptr;
      t.end_key = t.stop = f[KV_END];
    } else if (f[M_PREFIX] >= 0) {
      t.first_key = f[KV_START];
    }
    return t;
  }

  // Of a tree: how deep a draft is, the first ones 1; and whether one sees another.
  int64_t depth(const Tile& t, int64_t draft) const {
    int64_t n = 0;
    for (int64_t i = 0; i < t.num_draft; i++) n += t.mask[draft * t.num_draft + i] != 0;
    return n;
  }
  bool sees(const Tile& t, int64_t draft, int64_t other) const {
    if (!t.mask[draft * t.num_draft + other]) return false;
    return !window || depth(t, draft) - depth(t, other) < window;
  }

  // Scores s of row r against keys [key, key + keys): -inf for what it does not see.
  void hide(const Tile& t, int64_t r, int64_t key, int64_t keys, float* s) const {
    const int64_t draft = (t.q_row + r) / group - (t.chunk - t.num_draft);  // < 0: no draft token
    const bool tree = t.mask && draft >= 0;
    const int64_t last = tree ? t.kv_len - 1 : last_key(t, r);
    int64_t first = first_in_window(tree ? t.drafts_from - 1 + depth(t, draft) : last);
    // `first` is for keys before the drafts; a draft's place says nothing about its position
    if (tree) first = std::min(first, t.drafts_from);
    for (int64_t j = 0; j < std::min(first - key, keys); j++) s[j] = -INFINITY;
    for (int64_t j = std::max<int64_t>(last + 1 - key, 0); j < keys; j++) s[j] = -INFINITY;
    if (tree)
      for (int64_t i = 0; i < t.num_draft; i++) {
        const int64_t at = t.drafts_from + i - key;
        if (at >= 0 && at < keys && !sees(t, draft, i)) s[at] = -INFINITY;
      }
  }
};

// Attention of one iteration, and notes for `Later` of what `upcoming` will read: the attention of
// the next layer, or null. Returns what entry points return.
int attention(Pool* pool, const AttentionCall* call, const AttentionCall* upcoming);

}  // namespace xl
