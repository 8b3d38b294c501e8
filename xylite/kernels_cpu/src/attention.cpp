// Attention of one iteration over blocked KV, driven by the task table.
//
// KV tiles (one head of one block) lie as the register tile reads them: k [D / LANE, P, LANE],
// v [P / LANE, D, LANE]; LANE is 2 for bf16 and 1 otherwise.
//
// Keys are taken in segments of SEGMENT_KEYS, counted from key 0 of the sequence. Each segment has
// a softmax of its own, and segments are folded in ascending order. Keys that a row does not see
// have weight 0 and change nothing, and a segment in which a row sees nothing leaves the row
// exactly as it was. So a row's result does not depend on its tile, on its neighbours, on how the
// KV range was cut, or on threads.
#include <algorithm>
#include <optional>
#include <vector>

#include "api.h"
#include "attention_call.h"
#include "attention_tiles.h"
#include "keys_ahead.h"
#include "rows.h"

namespace xl {

constexpr int SEGMENT_KEYS = 512;
constexpr int SCORES = SEGMENT_KEYS + W;  // of a row; no power of 2, for the sake of cache sets
constexpr int UNIT = 2 * COLS;            // keys that are read at once, at most
constexpr float LOG2_E = 1.44269504f;

// Softmaxes of some rows that are not divided yet.
struct Soft {
  float *o, *sums, *most;  // [rows, D] weighted values, [rows, W] weights by lane, [rows] maxima
};

// Where segments of a tile go that was cut, or has or is a shared prefix. A tile that has one
// segment, and so was cut in vain, has no slot (-1): the task with the first key does all of it.
struct Partial {
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

  // Memory of one thread.
  struct Work {
    float* scores;  // [MAX_ROWS, SCORES], and the weights made of them in the same place
    Soft part, total;
    Tile next;  // the task after this one, to fetch its first keys; rows = 0: none
  };
  static constexpr int64_t PROB = SCORES * int64_t(sizeof(float) / sizeof(A));  // of a row
  int64_t soft_size(int64_t rows) const { return rows * (d + W + 1); }
  size_t work_bytes(int64_t rows) const {
    return sizeof(float) * size_t(MAX_ROWS * SCORES + soft_size(MAX_ROWS) + soft_size(rows));
  }
  Soft soft(float* memory, int64_t rows) const {
    return {memory, memory + rows * d, memory + rows * (d + W)};
  }
  Work work(void* memory, int64_t rows) const {
    Work w{};
    w.scores = static_cast<float*>(memory);
    w.part = soft(w.scores + MAX_ROWS * SCORES, MAX_ROWS);
    w.total = soft(w.scores + MAX_ROWS * SCORES + soft_size(MAX_ROWS), rows);
    return w;
  }

  const B* block(const void* base, const Tile& t, int64_t key) const {
    const int64_t b = c.block_table[t.seq * c.table_width + key / p];
    return static_cast<const B*>(base) + (b * c.kv_heads + t.head) * p * d;
  }
  // How many keys are read at once from `key` on.
  int64_t unit(int64_t key, int64_t end) const {
    return std::min({int64_t(UNIT), p - key % p, end - key});
  }

  // Keys or values of the unit at `key`; in rows of `width` bytes where they lie without gaps.
  Piece k_piece(const Tile& t, int64_t key, int64_t width) const {
    const int64_t columns = columns_of(t), size = T::LANE * sizeof(B);
    const int64_t n = std::min((unit(key, t.end_key) + columns - 1) / columns * columns,
                               p - key % p);
    const char* from = reinterpret_cast<const char*>(block(c.k, t, key) + key % p * T::LANE);
    if (n == p) return {from, d / T::STEP * n * size / width, width, width};
    return {from, d / T::STEP, n * size, p * size};
  }
  Piece v_piece(const Tile& t, int64_t key, int64_t width) const {
    const int64_t n = (unit(key, t.end_key) + T::STEP - 1) / T::STEP * T::STEP;
    const int64_t bytes = n * d * int64_t(sizeof(B));
    const char* from = reinterpret_cast<const char*>(block(c.v, t, key) + key % p * d);
    return {from, (bytes + width - 1) / width, width, width};
  }

  // Few rows wait for memory: their products fetch what comes next, in the order in which it is
  // read: keys of a segment, its values, keys of the next segment or task. Many rows wait for
  // arithmetic.
  static bool is_few(const Tile& t) { return t.rows <= MAX_ROWS; }
  static int columns_of(const Tile& t) { return t.rows <= MAX_ROWS / 2 ? UNIT : COLS; }
  static constexpr int64_t width_of(int columns) { return columns * T::LANE * int64_t(sizeof(B)); }
  // What follows the keys or values that end at key `at` of the segment [first, end).
  Piece after(bool is_k, const Tile& t, const Work& w, int64_t first, int64_t at,
              int64_t end) const {
    const int64_t width = width_of(columns_of(t));
    if (at < end) return is_k ? k_piece(t, at, width) : v_piece(t, at, width);
    if (is_k) return v_piece(t, first, width);
    if (at < t.stop) return k_piece(t, at, width);
    return is_few(w.next) && w.next.rows
               ? k_piece(w.next, w.next.first_key / W * W, width_of(columns_of(w.next)))
               : Piece{};
  }

  // Scores of `count` rows from row r0 against keys [key, end), up to whole vectors: in w.scores,
  // those of keys that a row does not see are -inf.
  void score(const Tile& t, const Work& w, int64_t r0, int count, int64_t key, int64_t end) const {
    const A* q = static_cast<const A*>(c.q) +
                 ((t.head * c.tokens + c.q_start[t.seq]) * c.group + t.q_row + r0) * d;
    const int64_t keys = (end - key + W - 1) / W * W, steps = d / T::STEP, ldk = p * T::LANE;
    const int columns = columns_of(t);
    const TileFn<T> few = columns == UNIT ? TILES<T>.wide[count] : TILES<T>.tile[count];
    for (int64_t j = 0, n; j < keys; j += n) {
      n = unit(key + j, key + keys);
      Piece soon = is_few(t) ? after(true, t, w, key, key + j + n, end) : Piece{};
      const B* tile = block(c.k, t, key + j) + (key + j) % p * T::LANE;
      const Run<T> run{tile, steps};
      float* to = w.scores + j;
      for (int64_t i = 0; i < n;) {
        const B* k = tile + i * T::LANE;
        // Past the last key too, as far as the block goes: what is left over fetches all at once.
        if (is_few(t) && (key + j + i) % p + columns <= p && j + i + columns <= SCORES) {
          few(q, d, k, ldk, to + i, SCORES, steps, false, soon.during(steps, width_of(columns), k));
          i += columns;
          continue;
        }
        soon.fetch();
        if (n - i >= COLS) {
          ATTENTION_TILES<T>.run[count](q, d, &run, &run + 1, i * T::LANE, ldk, to + i, SCORES);
          i += COLS;
        } else {
          ATTENTION_TILES<T>.narrow[count](q, d, k, ldk, to + i, SCORES, steps, false, nothing(k));
          i += W;
        }
      }
      soon.fetch();
    }
    if (c.cap != 0.0)
      for (int r = 0; r < count; r++)
        for (float* s = w.scores + r * SCORES; s < w.scores + r * SCORES + keys; s += W)
          storef(s, float(c.cap) * vtanh(loadf(s) * float(c.scale / c.cap)));
    if (t.mask || c.last_key(t, r0) < key + keys - 1 ||
        c.first_in_window(c.last_key(t, r0 + count - 1)) > key)
      for (int r = 0; r < count; r++) c.hide(t, r0 + r, key, keys, w.scores + r * SCORES);
  }

  // Scores become weights, not yet divided by their sum. They are scaled here, unless the soft cap
  // did it.
  void soften(const Work& w, const Soft& to, int count, int64_t keys) const {
    const float scale = c.cap != 0.0 ? 1.0f : float(c.scale);
    // Two passes, so that the maxima of neighbouring rows are in flight together.
    for (int r = 0; r < count; r++) {
      const float *s = w.scores + r * SCORES, *end = s + keys;
      vf top = loadf(end - W), other = top;
      for (; s + 2 * W <= end; s += 2 * W) {
        top = vmax(top, loadf(s));
        other = vmax(other, loadf(s + W));
      }
      to.most[r] = max_of(vmax(top, other)) * scale;
    }
    for (int r = 0; r < count; r++) {
      float* s = w.scores + r * SCORES;
      // nothing seen (-inf): every weight is 0, and NaN scores stay NaN
      const float most = to.most[r], shift = most == -INFINITY ? 0.0f : -most;
      vf l{};
      if constexpr (sizeof(A) == 4) {
        for (int64_t j = 0; j < keys; j += W) {
          const vf e = vexp_nonpositive(fma(loadf(s + j), set(scale), set(shift)));
          l = l + e;
          storef(s + j, e);
        }
      } else {  // half the size: what is written lies before what is still to be read
        const vf by = set(scale * LOG2_E), from = set(shift * LOG2_E);
#pragma GCC unroll 4
        for (int64_t j = 0; j < keys; j += W) {
          const vf e = exp2_rough(fma(loadf(s + j), by, from));
          l = l + e;
          store_bf16(reinterpret_cast<uint16_t*>(s) + j, e);
        }
      }
      storef(to.sums + r * W, l);
    }
  }

  // Values of keys [key, end), weighted: o [count, D].
  void weigh(const Tile& t, const Work& w, float* o, int count, int64_t key,
             int64_t end) const {
    const A* prob = reinterpret_cast<const A*>(w.scores);
    const int64_t ldv = d * T::LANE;
    if (!is_few(t)) {
      Run<T> runs[SEGMENT_KEYS / PANEL + 1], *last = runs;  // a block has PANEL keys or more
      for (int64_t at = key, n; at < end; at += n) {
        n = std::min(p - at % p, end - at);
        *last++ = {block(c.v, t, at) + at % p * d, (n + T::STEP - 1) / T::STEP};
      }
      for (int64_t i = 0; i < d; i += COLS)
        ATTENTION_TILES<T>.run[count](prob, PROB, runs, last, i * T::LANE, ldv, o + i, d);
      return;
    }
    const int columns = d % UNIT ? COLS : columns_of(t);
    const TileFn<T> few = columns == UNIT ? TILES<T>.wide[count] : TILES<T>.tile[count];
    Piece soon{};
    bool is_fetched = false;  // what follows the values
    for (int64_t at = key, n; at < end; at += n) {
      n = unit(at, end);
      const int64_t steps = (n + T::STEP - 1) / T::STEP;
      if (!is_fetched) soon = after(false, t, w, key, at + n, end);
      // A last product that is short would wait for a piece that is not: the one before fetches it.
      if (at + n < end && end - at - n < n) {
        soon.fetch();
        soon = after(false, t, w, key, end, end);
        is_fetched = true;
      }
      const B* tile = block(c.v, t, at) + at % p * d;
      for (int64_t i = 0; i < d; i += columns)
        few(prob + (at - key), PROB, tile + i * T::LANE, ldv, o + i, d, steps, at > key,
            soon.during(steps, width_of(columns), tile));
      soon.fetch();
    }
  }

  // `to` becomes the softmax over segment `index`, or, if it is not the first there, over the keys
  // it has and those.
  void segment(const Tile& t, const Work& w, int64_t index, const Soft& to, bool is_first) const {
    const int64_t tiles = (t.rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t i = 0; i < tiles; i++) {
      const int64_t r0 = t.rows * i / tiles;
      const int count = int(t.rows * (i + 1) / tiles - r0);
      const Soft mine{to.o + r0 * d, to.sums + r0 * W, to.most + r0};
      const Soft part = is_first ? mine : w.part;
      // keys that some row of these sees, from a whole vector on
      const int64_t first = t.mask ? t.first_key : c.first_in_window(c.last_key(t, r0));
      const int64_t last = t.mask ? t.end_key - 1 : c.last_key(t, r0 + count - 1);
      const int64_t key = std::max(index * SEGMENT_KEYS, first / W * W);
      const int64_t end = std::min((index + 1) * SEGMENT_KEYS, last + 1);
      if (key < end) {
        score(t, w, r0, count, key, end);
        soften(w, part, count, (end - key + W - 1) / W * W);
        weigh(t, w, part.o, count, key, end);
        if (!is_first) fold(count, mine, part);
      } else if (is_first) {
        std::fill(mine.o, mine.o + count * d, 0.0f);
        std::fill(mine.sums, mine.sums + count * W, 0.0f);
        std::fill(mine.most, mine.most + count, -INFINITY);
      }
    }
  }

  // `to` becomes the softmax over its keys and those of `part`.
  void fold(int64_t rows, const Soft& to, const Soft& part) const {
    for (int64_t r0 = 0; r0 < rows; r0 += W) {
      const int n = int(std::min<int64_t>(W, rows - r0));
      const vf none = set(-INFINITY);
      const vf x = load_some(to.most, r0, T_F32, n), y = load_some(part.most, r0, T_F32, n);
      const vf most = x > y ? x : y;
      const vf a = x == none ? vf{} : vexp_nonpositive(x - most);
      const vf b = y == none ? set(1.0f) : vexp_nonpositive(y - most);
      store_some(to.most, r0, T_F32, most, n);
      for (int64_t r = r0; r < r0 + n; r++) {
        const float by = a[r - r0], with = b[r - r0];
        fold_row(to.sums + r * W, part.sums + r * W, W, by, with);
        fold_row(to.o + r * d, part.o + r * d, d, by, with);
      }
    }
  }
  static void fold_row(float* to, const float* part, int64_t n, float by, float with) {
    for (int64_t i = 0; i < n; i += W)
      storef(to + i, fma(loadf(part + i), set(with), loadf(to + i) * by));
  }

  void finish(const Tile& t, const Soft& total) const {
    const int64_t heads = c.kv_heads * c.group;
    for (int64_t r = 0; r < t.rows; r++) {
      const int64_t row = t.q_row + r;
      const int64_t at = ((c.q_start[t.seq] + row / c.group) * heads + t.head * c.group +
                          row % c.group) * d;
      const float inverse = 1.0f / sum(loadf(total.sums + r * W));
      for (int64_t i = 0; i < d; i += W)
        store_as(c.out, at + i, int(c.out_type), loadf(total.o + r * d + i) * inverse);
    }
  }

  int64_t segment_of(int64_t key) const { return (key + SEGMENT_KEYS - 1) / SEGMENT_KEYS; }

  void run_task(const int32_t* f, const Work& w) const {
    const int64_t merge = f[PART] < 0 ? -1 : merge_of(f);
    Tile t = merge < 0 ? c.tile_of(f) : c.merge_tile(merge);
    const int64_t first = t.first_key / SEGMENT_KEYS;
    const int64_t end = segment_of(t.end_key);
    const Partial part = merge < 0 ? Partial{-1, 0, 0} : partials[size_t(merge)];
    if (part.slot < 0) {
      if (merge >= 0 && (t.first_key < f[KV_START] || t.first_key >= f[KV_END])) return;
      for (int64_t s = first; s < end; s++) segment(t, w, s, w.total, s == first);
      finish(t, w.total);
      return;
    }
    // This task computes the segments whose first key lies in its range.
    t.stop = std::min<int64_t>(t.stop, f[KV_END]);
    for (int64_t s = first; s < end; s++) {
      const int64_t key = std::max<int64_t>(s * SEGMENT_KEYS, t.first_key);
      if (key < f[KV_START] || key >= f[KV_END]) continue;
      segment(t, w, s, slot_of(part, s - part.first_segment, t.rows), true);
    }
  }

  // Where a segment of such a tile goes.
  Soft slot_of(const Partial& part, int64_t segment, int64_t rows) const {
    return soft(slots + (part.slot + segment) * slot_size, rows);
  }

  int64_t merge_of(const int32_t* f) const {  // merges are ordered by their first part
    int64_t low = 0, high = c.parts[0] + c.parts[2] - 1;
    while (low < high) {
      const int64_t mid = (low + high + 1) / 2;
      if (c.merges[mid * c.merge_fields + PART] <= f[PART])
        low = mid;
      else
        high = mid - 1;
    }
    return low;
  }

  // The result of a tile that was cut or has a shared prefix, from all its segments.
  void merge(int64_t i) const {
    const Partial& own = partials[size_t(i)];
    if (own.slot < 0) return;
    const Tile t = c.merge_tile(i);
    const int32_t* f = c.merges + i * c.merge_fields;
    Soft total{};
    const auto join = [&](const Soft& part) {
      if (total.o)
        fold(t.rows, total, part);
      else
        total = part;
    };
    if (f[M_PREFIX] >= 0) {
      const int32_t* p = c.merges + f[M_PREFIX] * c.merge_fields;
      const Partial& shared = partials[size_t(f[M_PREFIX])];
      const int64_t r = f[M_ROW] - p[M_ROW];
      for (int64_t s = 0; s < shared.segments; s++) {
        const Soft part = slot_of(shared, s, p[NUM_ROWS]);
        join({part.o + r * d, part.sums + r * W, part.most + r});
      }
    }
    for (int64_t s = 0; s < own.segments; s++) join(slot_of(own, s, t.rows));
    finish(t, total);
  }

  // next_layer: the attention that comes after this one, if that is known
  void run(Pool& pool, const Attention* next_layer) {
    int64_t rows = 1;
    std::vector<std::atomic<int64_t>> next(size_t(c.classes * c.cores));
    for (int64_t i = 0; i < c.classes; i++) {
      for (int64_t core = 0; core < c.cores; core++) next[size_t(i * c.cores + core)] = 0;
      for (int64_t t = 0; t < c.core_start[i][c.cores]; t++)
        rows = std::max<int64_t>(rows, c.tasks[i][t * c.task_fields + NUM_ROWS]);
    }
    int64_t count = 0;
    for (int64_t i = 0; i < c.parts[0] + c.parts[2]; i++) {
      const Tile t = c.merge_tile(i);
      const int64_t first = t.first_key / SEGMENT_KEYS, n = segment_of(t.end_key) - first;
      const bool in_vain =
          n == 1 && i < c.parts[0] && c.merges[i * c.merge_fields + M_PREFIX] < 0;
      partials.push_back({in_vain ? -1 : count, first, n});
      if (!in_vain) count += n;
    }
    slot_size = soft_size(rows);
    if (count) slots = static_cast<float*>(pool.shared(1, size_t(count * slot_size) * 4));
    pool.reserve(work_bytes(rows));
    for (int i = 0; i < pool.threads(); i++) pool.later(i).clear();

    // Each thread runs its cores' tasks in the table's order, largest tiles first, then helps.
    int64_t total = 0;
    for (int64_t i = 0; i < c.classes; i++) total += c.core_start[i][c.cores];
    struct Job {
      Attention* self;
      Pool* pool;
      std::vector<std::atomic<int64_t>>* next;
      int64_t rows;
      const Attention* next_layer;
    } job{this, &pool, &next, rows, next_layer};
    pool.run(
        [](void* context, int thread) {
          Job& j = *static_cast<Job*>(context);
          const AttentionCall& c = j.self->c;
          Work w = j.self->work(j.pool->scratch(thread, j.self->work_bytes(j.rows)), j.rows);
          for (int64_t k = 0; k < c.cores; k++) {
            const int64_t core = (thread + k) % c.cores;
            for (int64_t i = c.classes - 1; i >= 0; i--) {
              const int32_t* start = c.core_start[i] + core;
              std::atomic<int64_t>& next = (*j.next)[size_t(i * c.cores + core)];
              for (int64_t n; (n = start[0] + next++) < start[1];) {
                const int32_t* task = c.tasks[i] + n * c.task_fields;
                w.next.rows = 0;
                if (n + 1 < start[1]) {
                  const int32_t* after = task + c.task_fields;
                  w.next = c.tile_of(after);
                  if (after[PART] >= 0)
                    w.next.first_key = std::max<int64_t>(w.next.first_key, after[KV_START]);
                }
                j.self->run_task(task, w);
              }
            }
          }
          if (j.next_layer) note_keys(j.pool->later(thread), *j.next_layer, thread);
        },
        &job, total <= 1);

    if (count) pool.each(c.parts[0], [&](int64_t i, int) { merge(i); });
  }
};

template <class T>
static void run_attention(Pool& pool, const AttentionCall& call, const AttentionCall* upcoming) {
  std::optional<Attention<T>> next;
  if (upcoming && upcoming->kind == call.kind) next.emplace(*upcoming);
  Attention<T>(call).run(pool, next ? &*next : nullptr);
}

int attention(Pool* pool, const AttentionCall* call, const AttentionCall* upcoming) {
  return guarded(pool, [&] {
    switch (call->kind) {
      case K_F32:
        return run_attention<F32>(*pool, *call, upcoming);
      case K_F16:
        return run_attention<F16>(*pool, *call, upcoming);
      case K_BF16:
        return run_attention<BF16>(*pool, *call, upcoming);
#if defined(__AVX512BF16__)
      case K_BF16_DOT:
        return run_attention<BF16Dot>(*pool, *call, upcoming);
#endif
      default:
        throw Unsupported();
    }
  });
}

}  // namespace xl

using namespace xl;

XL_API int xl_attention(Pool* pool, const AttentionCall* call) {
  return attention(pool, call, nullptr);
}

XL_STRUCT(xl_attention, AttentionCall)
