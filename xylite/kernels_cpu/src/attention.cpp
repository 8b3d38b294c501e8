// Attention of one iteration over blocked KV, driven by the task table.
//
// KV tiles (one head of one block) lie as the register tile reads them: k [D / LANE, P, LANE],
// v [P / LANE, D, LANE]; LANE is 2 for bf16 and 1 otherwise.
//
// Keys are taken in steps of STEP_KEYS and segments of SEGMENT_KEYS, both counted from key 0 of the
// sequence. Each segment has a softmax of its own; segments are folded in ascending order. A step
// or segment in which a row sees nothing leaves the row exactly as it was. So a row's result does
// not depend on its tile, on its neighbours, on how the KV range was cut, or on threads.
#include <algorithm>
#include <vector>

#include "api.h"
#include "mm.h"
#include "rows.h"

namespace xl {

constexpr int STEP_KEYS = 128;
constexpr int SEGMENT_KEYS = 512;
constexpr float LOG2_E = 1.44269504f;
constexpr int STATE = W + 1;  // of a row: partial sums of its weights by lane, and its maximum
enum Field { SEQ, Q_ROW, NUM_ROWS, HEAD, KV_START, KV_END, PART };  // of a task
enum MergeField { M_PART = 4 };  // the first four are those of a task

// Addresses and sizes as the caller has them; the order is the C ABI.
struct AttentionCall {
  const void *q, *k, *v;  // q [G, T * group, D] in the operand type of the kernel
  void* out;              // [T, H * D]
  const int32_t *q_start, *kv_len, *num_draft, *bias_start, *block_table;
  const uint8_t* tree_mask;
  const int32_t *merges, *parts;  // parts[0] = number of merges
  int64_t tokens, kv_heads, group, block_size, head_size, table_width;
  int64_t task_fields, merge_fields;
  int64_t window;  // 0 = all
  int64_t out_type, kind;
  double scale, cap;  // cap 0 = off
  int64_t classes, cores;
  const int32_t* tasks[4];       // per tile class [W, task_fields]
  const int32_t* core_start[4];  // per tile class [cores + 1]
};

struct Tile {  // the rows of one task
  int64_t seq, q_row, rows, head, chunk, kv_len, drafts_from;
  const uint8_t* mask;  // num_draft x num_draft, or null
  int64_t num_draft, first_key, end_key;  // keys that some row may see
};

struct Partial {  // where segments of a tile that was cut go
  int64_t slot, first_segment, segments;
};

template <class T>
struct Attention {
  using A = typename T::A;
  using B = typename T::B;
  const AttentionCall& c;
  const int64_t d, p;
  std::vector<Partial> partials;
  float* slots = nullptr;
  int64_t slot_size = 0;

  explicit Attention(const AttentionCall& call)
      : c(call), d(call.head_size), p(call.block_size) {}

  int64_t num_merges() const { return c.parts[0]; }
  // first key that a query at this position sees
  int64_t first_in_window(int64_t position) const {
    return c.window ? std::max<int64_t>(position - c.window + 1, 0) : 0;
  }
  // last key that row r of the tile sees, trees aside
  int64_t last_key(const Tile& t, int64_t r) const {
    return t.kv_len - t.chunk + (t.q_row + r) / c.group;
  }

  Tile tile_of(const int32_t* f) const {
    Tile t;
    t.seq = f[SEQ];
    t.q_row = f[Q_ROW];
    t.rows = f[NUM_ROWS];
    t.head = f[HEAD];
    t.chunk = c.q_start[t.seq + 1] - c.q_start[t.seq];
    t.kv_len = c.kv_len[t.seq];
    t.mask = c.bias_start[t.seq] >= 0 ? c.tree_mask + c.bias_start[t.seq] : nullptr;
    t.num_draft = t.mask ? c.num_draft[t.seq] : 0;
    t.drafts_from = t.kv_len - t.num_draft;
    t.first_key = first_in_window(last_key(t, 0));
    // Siblings of a tree share a position: a draft token's may be that of the first draft.
    if (t.mask && c.window) t.first_key = std::min(t.first_key, first_in_window(t.drafts_from));
    t.end_key = t.mask ? t.kv_len : last_key(t, t.rows - 1) + 1;
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
    return !c.window || depth(t, draft) - depth(t, other) < c.window;
  }

  // Memory of one thread.
  struct Work {
    float *scores, *o, *state, *total, *total_state;
    A* prob;
    Tile next;  // the task after this one, to fetch its first keys; rows = 0: none
  };
  size_t work_bytes(int64_t rows) const {
    return sizeof(float) * size_t(MAX_ROWS * STEP_KEYS * 2 + rows * (2 * d + 2 * STATE)) + 6 * 64;
  }
  Work work(char* m, int64_t rows) const {
    Work w{};
    auto take = [&m](int64_t n) {
      float* f = reinterpret_cast<float*>(m);
      m += (n * int64_t(sizeof(float)) + 63) / 64 * 64;
      return f;
    };
    w.scores = take(MAX_ROWS * STEP_KEYS);
    w.prob = reinterpret_cast<A*>(take(MAX_ROWS * STEP_KEYS));
    w.o = take(rows * d);
    w.total = take(rows * d);
    w.state = take(rows * STATE);
    w.total_state = take(rows * STATE);
    return w;
  }

  const B* block(const void* base, const Tile& t, int64_t key) const {
    const int64_t b = c.block_table[t.seq * c.table_width + key / p];
    return static_cast<const B*>(base) + (b * c.kv_heads + t.head) * p * d;
  }

  // What to fetch while a tile of `columns` columns works on key + j: as much as that of the step
  // after it, or of the next task; only half of a wide tile if no more of its keys are needed.
  Ahead later(bool is_k, const Tile& t, const Work& w, int64_t key, int64_t j, int columns) const {
    const void* base = is_k ? c.k : c.v;
    const bool same = key + j + STEP_KEYS < t.end_key;
    const Tile& tile = same ? t : w.next;
    const int64_t at = j + (same ? key + STEP_KEYS : tile.first_key / STEP_KEYS * STEP_KEYS);
    if (!same && (!tile.rows || at >= tile.end_key)) return {block(base, t, key), 0, 0};
    const ptrdiff_t width = columns * T::STEP * ptrdiff_t(sizeof(B));
    const bool half = columns > COLS && tile.end_key - at <= COLS;
    const ptrdiff_t upper = half ? 0 : width / 2;
    if (is_k)
      return {block(base, tile, at) + at % p * T::LANE, p * T::LANE * ptrdiff_t(sizeof(B)), upper};
    return {block(base, tile, at) + at % p * d, half ? width / 2 : width, upper};
  }

  // Scores of `count` rows from row r0 against keys [key, key + keys): masked, in w.scores.
  void score(const Tile& t, const Work& w, int64_t r0, int count, int64_t key, int64_t keys) const {
    const A* q = static_cast<const A*>(c.q) +
                 ((t.head * c.tokens + c.q_start[t.seq]) * c.group + t.q_row + r0) * d;
    for (int64_t j = 0; j < keys;) {
      const B* tile = block(c.k, t, key + j) + (key + j) % p * T::LANE;
      const bool wide = count <= MAX_ROWS / 2 && keys - j >= 2 * COLS && p % (2 * COLS) == 0;
      const auto f = wide ? TILES<T>.wide[count] : TILES<T>.tile[count];
      const int columns = wide ? 2 * COLS : COLS;
      f(q, d, tile, p * T::LANE, w.scores + j, STEP_KEYS, d / T::STEP, false,
        later(true, t, w, key, j, columns));
      j += columns;
    }
    const float scale = float(c.scale), cap = float(c.cap);
    const bool all_seen = !t.mask && last_key(t, r0) >= key + keys - 1 &&
                          first_in_window(last_key(t, r0 + count - 1)) <= key;
    if (all_seen && cap == 0.0f) return;
    vi iota;
    for (int i = 0; i < W; i++) iota[i] = i;
    for (int r = 0; r < count; r++) {
      float* s = w.scores + r * STEP_KEYS;
      const int64_t draft =
          (t.q_row + r0 + r) / c.group - (t.chunk - t.num_draft);  // < 0: no draft token
      const bool tree = t.mask && draft >= 0;
      const int64_t last = tree ? t.kv_len - 1 : last_key(t, r0 + r);
      const int64_t position = tree ? t.drafts_from - 1 + depth(t, draft) : last;
      // `lo` is for keys before the drafts; a draft's place says nothing about its position
      int64_t first = first_in_window(position);
      if (tree && first > t.drafts_from) first = t.drafts_from;
      const int32_t lo = int32_t(first - key), hi = int32_t(last - key);
      for (int64_t j = 0; j < keys; j += W) {
        const bool edge = lo > j || hi < j + W - 1;
        if (cap == 0.0f && !edge) continue;
        vf x = loadf(s + j);
        if (cap != 0.0f) x = cap * vtanh(x * (scale / cap));
        const vi at = iota + int32_t(j);
        storef(s + j, ((at < lo) | (at > hi)) ? set(-INFINITY) : x);
      }
      if (tree)
        for (int64_t i = 0; i < t.num_draft; i++) {
          const int64_t at = t.drafts_from + i - key;
          if (at >= 0 && at < keys && !sees(t, draft, i)) s[at] = -INFINITY;
        }
    }
  }

  // One step of the online softmax; w.prob gets the weights, o and state go on. Scores are scaled
  // here, unless the soft cap did it.
  void soften(const Work& w, int64_t r0, int count, int64_t keys) const {
    const float scale = c.cap != 0.0 ? 1.0f : float(c.scale);
    // Two passes, so that the maxima of neighbouring rows are in flight together.
    float most[MAX_ROWS];
    for (int r = 0; r < count; r++) {
      const float* s = w.scores + r * STEP_KEYS;
      vf top = loadf(s);
      for (int64_t j = W; j < keys; j += W) top = vmax(top, loadf(s + j));
      most[r] = max_of(top) * scale;
    }
    for (int r = 0; r < count; r++) {
      const float* s = w.scores + r * STEP_KEYS;
      A* prob = w.prob + r * STEP_KEYS;
      float* state = w.state + (r0 + r) * STATE;
      const float old = state[W];
      const float m = most[r] > old ? most[r] : old;
      vf l = loadf(state);
      if (m > old) {
        const float keep = vexp_nonpositive(set(old - m))[0];
        state[W] = m;
        l = l * keep;
        float* o = w.o + (r0 + r) * d;
        for (int64_t i = 0; i < d; i += W) storef(o + i, loadf(o + i) * keep);
      }
      // nothing seen yet (-inf): every weight is 0, and NaN scores stay NaN
      const float shift = m == -INFINITY ? 0.0f : -m;
      if constexpr (sizeof(A) == 4) {
        for (int64_t j = 0; j < keys; j += W) {
          const vf e = vexp_nonpositive(fma(loadf(s + j), set(scale), set(shift)));
          l = l + e;
          storef((float*)prob + j, e);
        }
      } else {
        const vf by = set(scale * LOG2_E), from = set(shift * LOG2_E);
#pragma GCC unroll 2
        for (int64_t j = 0; j < keys; j += W) {
          const vf e = vexp2_short(fma(loadf(s + j), by, from));
          l = l + e;
          store_bf16((uint16_t*)prob + j, e);
        }
      }
      storef(state, l);
    }
  }

  void weigh(const Tile& t, const Work& w, int64_t r0, int count, int64_t key, int64_t keys) const {
    for (int64_t j = 0; j < keys;) {
      const int64_t in_block = p - (key + j) % p;
      const int64_t n = in_block < keys - j ? in_block : keys - j;
      const B* tile = block(c.v, t, key + j) + (key + j) % p * d;
      const bool wide = count <= MAX_ROWS / 2 && d % (2 * COLS) == 0;
      const auto f = wide ? TILES<T>.wide[count] : TILES<T>.tile[count];
      const int columns = wide ? 2 * COLS : COLS;
      Ahead ahead = later(false, t, w, key, j, columns);
      for (int64_t i = 0; i < d; i += columns) {
        f(w.prob + j, STEP_KEYS, tile + i * T::LANE, d * T::LANE, w.o + r0 * d + i, d,
          n / T::STEP, true, ahead);
        ahead.from = static_cast<const char*>(ahead.from) + n / T::STEP * ahead.advance;
      }
      j += n;
    }
  }

  // Softmax of one segment: w.o [rows, D] not yet divided, w.state [rows, STATE].
  void segment(const Tile& t, const Work& w, int64_t index) const {
    for (int64_t i = 0; i < t.rows * d; i++) w.o[i] = 0.0f;
    for (int64_t r = 0; r < t.rows; r++) {
      for (int i = 0; i < W; i++) w.state[r * STATE + i] = 0.0f;
      w.state[r * STATE + W] = -INFINITY;
    }
    int64_t end = (index + 1) * SEGMENT_KEYS;
    if (t.end_key < end) end = t.end_key;
    int64_t key = index * SEGMENT_KEYS;
    if (t.first_key > key) key = t.first_key / STEP_KEYS * STEP_KEYS;
    const int64_t tiles = (t.rows + MAX_ROWS - 1) / MAX_ROWS;
    for (; key < end; key += STEP_KEYS)
      for (int64_t i = 0; i < tiles; i++) {
        const int64_t r0 = t.rows * i / tiles;
        const int count = int(t.rows * (i + 1) / tiles - r0);
        // keys that some row of these sees, whole panels of them
        int64_t seen = (t.mask ? end : last_key(t, r0 + count - 1) + 1) - key;
        if (seen <= 0) continue;
        if (seen > STEP_KEYS) seen = STEP_KEYS;
        const int64_t keys = (seen + PANEL - 1) / PANEL * PANEL;
        score(t, w, r0, count, key, keys);
        soften(w, r0, count, keys);
        weigh(t, w, r0, count, key, keys);
      }
  }

  // (total, total_state) becomes the softmax over its keys and the segment's.
  void fold(int64_t rows, float* total, float* total_state, const float* o,
            const float* state) const {
    for (int64_t r = 0; r < rows; r++, total_state += STATE, state += STATE) {
      const float m = total_state[W], n = state[W];
      const float most = m > n ? m : n;
      const float a = m == -INFINITY ? 0.0f : vexp_nonpositive(set(m - most))[0];
      const float b = n == -INFINITY ? 1.0f : vexp_nonpositive(set(n - most))[0];
      total_state[W] = most;
      storef(total_state, fma(loadf(state), set(b), loadf(total_state) * a));
      for (int64_t i = r * d; i < (r + 1) * d; i += W)
        storef(total + i, fma(loadf(o + i), set(b), loadf(total + i) * a));
    }
  }

  void clear(int64_t rows, float* total, float* total_state) const {
    for (int64_t i = 0; i < rows * d; i++) total[i] = 0.0f;
    for (int64_t r = 0; r < rows; r++) {
      for (int i = 0; i < W; i++) total_state[r * STATE + i] = 0.0f;
      total_state[r * STATE + W] = -INFINITY;
    }
  }

  void finish(const Tile& t, const float* total, const float* total_state) const {
    const int64_t heads = c.kv_heads * c.group;
    for (int64_t r = 0; r < t.rows; r++) {
      const int64_t row = t.q_row + r;
      const int64_t at = ((c.q_start[t.seq] + row / c.group) * heads + t.head * c.group +
                          row % c.group) * d;
      const float inverse = 1.0f / sum(loadf(total_state + r * STATE));
      for (int64_t i = 0; i < d; i += W)
        store_as(c.out, at + i, int(c.out_type), loadf(total + r * d + i) * inverse);
    }
  }

  int64_t segment_of(int64_t key) const { return (key + SEGMENT_KEYS - 1) / SEGMENT_KEYS; }

  void run_task(const int32_t* f, const Work& w) const {
    const Tile t = tile_of(f);
    const int64_t first = t.first_key / SEGMENT_KEYS;
    const int64_t end = segment_of(t.end_key);
    const Partial whole{0, 0, 1};
    const Partial& part = f[PART] < 0 ? whole : partials[size_t(merge_of(f))];
    if (part.segments == 1) {  // not cut, or cut in vain: the task with the first key does it
      if (f[PART] >= 0 && t.first_key < f[KV_START]) return;
      if (f[PART] >= 0 && t.first_key >= f[KV_END]) return;
      clear(t.rows, w.total, w.total_state);
      for (int64_t s = first; s < end; s++) {
        segment(t, w, s);
        fold(t.rows, w.total, w.total_state, w.o, w.state);
      }
      finish(t, w.total, w.total_state);
      return;
    }
    // A cut tile: this task computes the segments whose first key lies in its range.
    for (int64_t s = first; s < end; s++) {
      const int64_t key = std::max<int64_t>(s * SEGMENT_KEYS, t.first_key);
      if (key < f[KV_START] || key >= f[KV_END]) continue;
      segment(t, w, s);
      float* to = slots + (part.slot + s - part.first_segment) * slot_size;
      memcpy(to, w.o, size_t(t.rows * d) * sizeof(float));
      memcpy(to + t.rows * d, w.state, size_t(t.rows * STATE) * sizeof(float));
    }
  }

  int64_t merge_of(const int32_t* f) const {  // merges are ordered by their first part
    int64_t low = 0, high = num_merges() - 1;
    while (low < high) {
      const int64_t mid = (low + high + 1) / 2;
      if (c.merges[mid * c.merge_fields + M_PART] <= f[PART])
        low = mid;
      else
        high = mid - 1;
    }
    return low;
  }

  Tile merge_tile(int64_t i) const {
    return tile_of(c.merges + i * c.merge_fields);
  }

  void run(Pool& pool) {
    int64_t rows = 1;
    std::vector<std::atomic<int64_t>> next(size_t(c.classes * c.cores));
    for (int64_t i = 0; i < c.classes; i++) {
      for (int64_t core = 0; core < c.cores; core++) next[size_t(i * c.cores + core)] = 0;
      for (int64_t t = 0; t < c.core_start[i][c.cores]; t++)
        if (c.tasks[i][t * c.task_fields + NUM_ROWS] > rows) rows = c.tasks[i][t * c.task_fields + NUM_ROWS];
    }
    int64_t count = 0;
    for (int64_t i = 0; i < num_merges(); i++) {
      const Tile t = merge_tile(i);
      const int64_t first = t.first_key / SEGMENT_KEYS;
      partials.push_back({count, first, segment_of(t.end_key) - first});
      if (partials.back().segments > 1) count += partials.back().segments;
    }
    slot_size = rows * (d + STATE);
    if (count) slots = static_cast<float*>(pool.shared(1, size_t(count * slot_size) * 4));
    pool.reserve(work_bytes(rows));

    // Each thread runs its cores' tasks in the table's order, largest tiles first, then helps.
    int64_t total = 0;
    for (int64_t i = 0; i < c.classes; i++) total += c.core_start[i][c.cores];
    struct Job {
      Attention* self;
      Pool* pool;
      std::vector<std::atomic<int64_t>>* next;
      int64_t rows;
    } job{this, &pool, &next, rows};
    pool.run(
        [](void* context, int thread) {
          Job& j = *static_cast<Job*>(context);
          const AttentionCall& c = j.self->c;
          Work w = j.self->work(
              static_cast<char*>(j.pool->scratch(thread, j.self->work_bytes(j.rows))), j.rows);
          for (int64_t k = 0; k < c.cores; k++) {
            const int64_t core = (thread + k) % c.cores;
            for (int64_t i = c.classes - 1; i >= 0; i--) {
              const int32_t* start = c.core_start[i] + core;
              for (int64_t n; (n = start[0] + (*j.next)[size_t(i * c.cores + core)]++) < start[1];) {
                const int32_t* task = c.tasks[i] + n * c.task_fields;
                w.next.rows = 0;
                if (n + 1 < start[1]) w.next = j.self->tile_of(task + c.task_fields);
                j.self->run_task(task, w);
              }
            }
          }
        },
        &job, total <= 1);

    if (count) pool.each(num_merges(), [&](int64_t i, int thread) {
      if (partials[size_t(i)].segments == 1) return;
      const Tile t = merge_tile(i);
      const Work w = work(static_cast<char*>(pool.scratch(thread, work_bytes(rows))), rows);
      clear(t.rows, w.total, w.total_state);
      for (int64_t s = 0; s < partials[size_t(i)].segments; s++) {
        const float* from = slots + (partials[size_t(i)].slot + s) * slot_size;
        fold(t.rows, w.total, w.total_state, from, from + t.rows * d);
      }
      finish(t, w.total, w.total_state);
    });
  }
};

}  // namespace xl

using namespace xl;

XL_API int xl_attention(Pool* pool, const AttentionCall* call) {
  return guarded(pool, [&] {
    switch (call->kind) {
      case K_F32:
        return Attention<F32>(*call).run(*pool);
      case K_F16:
        return Attention<F16>(*call).run(*pool);
      case K_BF16:
        return Attention<BF16>(*call).run(*pool);
#if defined(__AVX512BF16__)
      case K_BF16_DOT:
        return Attention<BF16Dot>(*call).run(*pool);
#endif
      default:
        throw Unsupported();
    }
  });
}

XL_STRUCT(xl_attention, AttentionCall)
