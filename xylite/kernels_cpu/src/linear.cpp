// Linear layers over packed panels, any M, and the packing itself.
//
// Packed weights [N, K]: panels of 32 columns of the result, each [steps, 32, LANE] contiguous, so
// that a panel is read as one stream and serves every M. The columns past N and k past K are 0.
#include "api.h"
#include "compact.h"
#include "mm.h"
#include "panels.h"
#include "rows.h"

namespace xl {

struct Weights {
  const void* data;
  int64_t n, k;
};

// Multiplies rows with a panel, a tile after the other; each block of k begins with tile 0.
template <class T>
struct PlainReader {
  const typename T::B* b;
  Later& later;

  PlainReader(const void* weight, int64_t panel, int64_t steps, void*, bool, Later& later)
      : b(static_cast<const typename T::B*>(weight) + panel * steps * PANEL * T::LANE),
        later(later) {}

  // c [count, PANEL] (+)= a * steps [s, s + n) of the panel; `t` of `tiles` tiles
  void tile(const typename T::A* a, ptrdiff_t lda, float* c, int count, int64_t s, int64_t n,
            int64_t t, int64_t tiles) {
    // The next bytes of the weight: far enough ahead in this stream if it is read but once, else
    // the next block of k (or the next panel), a share of it by each tile.
    constexpr ptrdiff_t step_bytes = PANEL * T::LANE * ptrdiff_t(sizeof(typename T::B));
    const char* here = reinterpret_cast<const char*>(b + s * PANEL * T::LANE);
    const char* soon = here + STREAM_AHEAD;
    ptrdiff_t advance = step_bytes;
    if (tiles > 1) {
      advance = (step_bytes + tiles - 1) / tiles;
      soon = here + n * step_bytes + t * n * advance;
    }
    for (int j = 0; j < PANEL; j += COLS)
      TILES<T>.tile[count](a, lda, b + (s * PANEL + j) * T::LANE, PANEL * T::LANE, c + j, PANEL, n,
                           s > 0, beside(later, soon, advance, n, tiles));
  }
};

template <class T, bool COMPACT>
struct PanelReader {
  using type = PlainReader<T>;
};

#if defined(XL_AVX512) && defined(__AVX512BF16__)

// Tile 0 unpacks as it multiplies, and keeps the block for the others.
struct CompactReader {
  Groups groups;
  uint16_t* kept;
  const bool keeps;
  Later& later;

  CompactReader(const void* weight, int64_t panel, int64_t steps, void* room, bool has_more,
                Later& later)
      : groups(panel_at(weight, panel), steps / GROUP_STEPS),
        kept(static_cast<uint16_t*>(room)),
        keeps(has_more),
        later(later) {}

  void tile(const uint16_t* a, ptrdiff_t lda, float* c, int count, int64_t s, int64_t n, int64_t t,
            int64_t tiles) {
    if (t == 0) {
      const UnpackingTile f = keeps ? UNPACKING<true>.tile[count] : UNPACKING<false>.tile[count];
      const Lines idle{reinterpret_cast<const char*>(groups.at), 0, n};
      f(a, lda, groups, c, PANEL, n, s > 0, kept,
        tiles > 2 && !later.is_empty() ? later.take(n, idle.from) : &idle);
      return;
    }
    const ptrdiff_t advance = (SMALL / GROUP_STEPS + tiles - 2) / (tiles - 1);
    const char* soon = reinterpret_cast<const char*>(groups.at) + (t - 1) * n * advance;
    TILES<BF16Dot>.tile[count](a, lda, kept, STEP_WEIGHTS, c, PANEL, n, s > 0,
                               beside(later, soon, advance, n, tiles));
  }
};

template <>
struct PanelReader<BF16Dot, true> {
  using type = CompactReader;
};

#endif

// COMPACT: the weight's panels are those of compact.h.
template <class T, bool COMPACT = false>
static void multiply(Pool& pool, const Weights& w, const void* x, int x_type, int64_t m,
                     const Epilogue& out, int64_t panels, const Tuning& tune) {
  using A = typename T::A;
  constexpr int a_type = sizeof(A) == 4 ? T_F32 : T_BF16;
  constexpr int unit_k = COMPACT ? GROUP_K : T::STEP;
  const int64_t padded = (w.k + unit_k - 1) / unit_k * unit_k;
  const int64_t row_bytes = padded * int64_t(sizeof(A));

  // The rows as the kernel reads them. Rows a multiple of 4 KiB apart would share cache sets.
  const A* a = static_cast<const A*>(x);
  int64_t lda = w.k;
  if (x_type != a_type || padded != w.k || (m > 4 && row_bytes % 4096 == 0)) {
    lda = (padded + 31) / 32 * 32;
    if (lda * int64_t(sizeof(A)) % 4096 == 0) lda += 32;
    A* copy = static_cast<A*>(pool.shared(0, size_t(m * lda) * sizeof(A)));
    const int64_t chunk = 16;
    pool.each((m + chunk - 1) / chunk, [&](int64_t u, int) {
      const int64_t end = m < (u + 1) * chunk ? m : (u + 1) * chunk;
      for (int64_t r = u * chunk; r < end; r++)
        convert_row((const char*)x + r * w.k * int64_t(size_of(x_type)), x_type, copy + r * lda,
                    a_type, w.k, padded);
    }, m * w.k < 16384);
    a = copy;
  }

  const int64_t steps = padded / T::STEP;
  // A block of rows stays in cache while panels pass; a block of k of a panel while rows pass.
  int64_t block = tune.block_bytes / row_bytes / MAX_ROWS * MAX_ROWS;
  if (block < 2 * MAX_ROWS) block = 2 * MAX_ROWS;
  const int64_t blocks = (m + block - 1) / block;
  block = ((m + blocks - 1) / blocks + MAX_ROWS - 1) / MAX_ROWS * MAX_ROWS;
  const int64_t step_bytes = PANEL * T::LANE * int64_t(sizeof(typename T::B));
  int64_t k_blocks = 1;
  if (m > MAX_ROWS) k_blocks = (steps * step_bytes + tune.panel_bytes - 1) / tune.panel_bytes;
  int64_t k_steps = (steps + k_blocks - 1) / k_blocks;
  if (COMPACT) k_steps = (k_steps + GROUP_STEPS - 1) / GROUP_STEPS * GROUP_STEPS;
  const size_t acc_bytes = size_t(k_blocks > 1 ? block : MAX_ROWS) * PANEL * sizeof(float);
  // An unpacked block of a panel, for all tiles but the first.
  const size_t kept_bytes = COMPACT && m > MAX_ROWS ? size_t(k_steps * step_bytes) : 0;
  pool.reserve(acc_bytes + kept_bytes);

  pool.each(blocks * panels, [&](int64_t unit, int thread) {
    const int64_t panel = unit % panels;
    const int64_t m0 = unit / panels * block;
    if (m0 >= m) return;  // rounding up may leave the last block empty
    const int64_t rows = m - m0 < block ? m - m0 : block;
    float* acc = static_cast<float*>(pool.scratch(thread, acc_bytes + kept_bytes));
    const int64_t tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    using Reader = typename PanelReader<T, COMPACT>::type;
    Reader reader(w.data, panel, steps, reinterpret_cast<char*>(acc) + acc_bytes, tiles > 1,
                  pool.later(thread));
    for (int64_t s = 0; s < steps; s += k_steps) {
      const int64_t n = steps - s < k_steps ? steps - s : k_steps;
      const bool last = s + n == steps;
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t r = rows * t / tiles;
        const int count = int(rows * (t + 1) / tiles - r);
        float* c = acc + (k_blocks > 1 ? r : 0) * PANEL;
        if (last) fetch_result(out, m0 + r, count, panel);
        reader.tile(a + (m0 + r) * lda + s * T::STEP, lda, c, count, s, n, t, tiles);
        if (last) store_result(out, c, m0 + r, count, panel);
      }
    }
  });
}

}  // namespace xl

using namespace xl;

XL_API int64_t xl_packed_bytes(int type, int64_t n, int64_t k, int gated) {
  const int64_t lane = type == T_BF16 ? 2 : 1;
  return panels_of(n, gated) * ((k + lane - 1) / lane) * lane * PANEL * int64_t(size_of(type));
}

XL_API int xl_pack(Pool* pool, int type, const void* src, int64_t n, int64_t k, int gated,
                       void* dst) {
  return guarded(pool, [&] {
    const int64_t panels = panels_of(n, gated);
    const int64_t bytes = panels ? xl_packed_bytes(type, n, k, gated) / panels : 0;
    pool->each(panels, [&](int64_t p, int) {
      char* d = static_cast<char*>(dst) + p * bytes;
      if (type == T_F32)
        pack_panel<uint32_t, 1>((const uint32_t*)src, n, k, gated, p, (uint32_t*)d);
      else if (type == T_BF16)
        pack_panel<uint16_t, 2>((const uint16_t*)src, n, k, gated, p, (uint16_t*)d);
      else
        pack_panel<uint16_t, 1>((const uint16_t*)src, n, k, gated, p, (uint16_t*)d);
    });
  });
}

// Rows `ids` of packed, not gated weights, as float32.
struct GatherCall {
  int64_t type, w, n, k, ids, count, out;
};

XL_API int xl_gather(Pool* pool, const GatherCall* call) {
  return guarded(pool, [&] {
    const int type = int(call->type);
    const void* w = address(call->w);
    const int64_t n = call->n, k = call->k, count = call->count;
    const auto* ids = static_cast<const int32_t*>(address(call->ids));
    auto* out = static_cast<float*>(writable(call->out));
    const int64_t lane = type == T_BF16 ? 2 : 1;
    const int64_t steps = (k + lane - 1) / lane;
    pool->each(count, [&](int64_t t, int) {
      const int64_t id = ids[t] < 0 ? 0 : ids[t] < n ? ids[t] : n - 1;
      const int64_t base = id / PANEL * steps * PANEL * lane + id % PANEL * lane;
      const char* row = static_cast<const char*>(w) + base * int64_t(size_of(type));
      const int64_t stride = PANEL * lane * int64_t(size_of(type));
      for (int64_t i = 0; i < steps; i++) __builtin_prefetch(row + i * stride);  // a line each
      float* o = out + t * k;
      for (int64_t i = 0; i < k; i++)
        o[i] = load_one(w, base + i / lane * PANEL * lane + i % lane, type);
    }, count < 32);
  });
}

struct LinearCall {
  int64_t kind, w, n, k;
  ProductCall product;
};

XL_API int xl_linear(Pool* pool, const LinearCall* call) {
  return guarded(pool, [&] {
    const ProductCall& p = call->product;
    if (p.m == 0 || call->n == 0) return;
    const Epilogue e = p.epilogue(call->n);
    const Weights weights{address(call->w), call->n, call->k};
    const Tuning tune{p.block_kib * 1024, p.panel_kib * 1024};
    const int64_t panels = panels_of(call->n, p.act != ACT_NONE);
    const void* x = address(p.x);
    const int x_type = int(p.x_type);
    switch (call->kind) {
      case K_F32:
        return multiply<F32>(*pool, weights, x, x_type, p.m, e, panels, tune);
      case K_F16:
        return multiply<F16>(*pool, weights, x, x_type, p.m, e, panels, tune);
      case K_BF16:
        return multiply<BF16>(*pool, weights, x, x_type, p.m, e, panels, tune);
#if defined(__AVX512BF16__)
      case K_BF16_DOT:
        return multiply<BF16Dot>(*pool, weights, x, x_type, p.m, e, panels, tune);
      case K_BF16_COMPACT:
        return multiply<BF16Dot, true>(*pool, weights, x, x_type, p.m, e, panels, tune);
#endif
      default:
        throw Unsupported();
    }
  });
}

XL_STRUCT(xl_gather, GatherCall)
XL_STRUCT(xl_linear, LinearCall)
