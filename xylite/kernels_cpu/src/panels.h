// How the rows of a weight [N, K] are spread over panels of 32 columns of the result, and how a
// tile's result is put down.
#pragma once
#include "rows.h"

namespace xl {

constexpr ptrdiff_t STREAM_AHEAD = 8192;  // bytes to fetch ahead in a weight that is read once

static inline int64_t panels_of(int64_t n, bool gated) {
  return gated ? (n / 2 + PANEL / 2 - 1) / (PANEL / 2) : (n + PANEL - 1) / PANEL;
}

// Row of w that is column `col` of panel `panel`, or -1: gate and up rows share a panel.
static inline int64_t row_of(int64_t panel, int64_t col, int64_t n, bool gated) {
  if (!gated) {
    const int64_t r = panel * PANEL + col;
    return r < n ? r : -1;
  }
  const int64_t r = panel * (PANEL / 2) + col % (PANEL / 2);
  return r < n / 2 ? r + (col < PANEL / 2 ? 0 : n / 2) : -1;
}

// Asks for the lines that a tile's result is written to and adds: each row has others. The few
// bytes of a gated result are not worth it.
static inline void fetch_result(const Epilogue& out, int64_t row, int rows, int64_t panel) {
  if (out.act) return;
  const ptrdiff_t size = ptrdiff_t(size_of(out.out_type));
  for (int r = 0; r < rows; r++) {
    const ptrdiff_t at = (row + r) * out.columns + panel * PANEL;
    const char* o = static_cast<const char*>(out.out) + at * size;
    for (ptrdiff_t i = 0; i < PANEL * size; i += 64) {
#if defined(XL_AVX512) || defined(XL_AVX2)  // the compiler would need a flag of its own for this
      asm volatile("prefetchw %0" : : "m"(o[i]));
#else
      __builtin_prefetch(o + i, 1, 3);
#endif
    }
    if (out.residual)
      for (int i = 0; i < PANEL; i += 16) __builtin_prefetch(out.residual + at + i);
  }
}

template <bool GATED>
static void store_whole(const Epilogue& out, const float* acc, ptrdiff_t at, int rows) {
  constexpr int width = GATED ? PANEL / 2 : PANEL;
  for (int r = 0; r < rows; r++, acc += PANEL, at += out.columns)
#pragma GCC unroll 2
    for (int j = 0; j < width; j += W) {
      vf y = loadf(acc + j);
      if constexpr (GATED) y = activate(y, out.act) * loadf(acc + PANEL / 2 + j);
      if (out.residual) y = y + loadf(out.residual + at + j);
      store_as(out.out, at + j, out.out_type, y);
    }
}

// `out.store`; the usual case, a whole panel and neither bias nor cap, without the questions.
static inline void store_result(const Epilogue& out, const float* acc, int64_t row, int rows,
                                int64_t panel) {
  const int64_t first = panel * (out.act ? PANEL / 2 : PANEL);
  const int64_t end = first + (out.act ? PANEL / 2 : PANEL);
  if (out.bias || out.cap != 0.0f || end > out.columns) return out.store(acc, row, rows, panel);
  const ptrdiff_t at = row * out.columns + first;
  return out.act ? store_whole<true>(out, acc, at, rows) : store_whole<false>(out, acc, at, rows);
}

// Panel `panel` of w [N, K]: [steps, PANEL, LANE], zeros past N and K.
template <class E, int LANE>
static void pack_panel(const E* src, int64_t n, int64_t k, bool gated, int64_t panel, E* dst) {
  const int64_t steps = (k + LANE - 1) / LANE;
  for (int col = 0; col < PANEL; col++) {
    const int64_t row = row_of(panel, col, n, gated);
    const E* s = src + (row < 0 ? 0 : row) * k;
    E* d = dst + col * LANE;
    for (int64_t i = 0; i < steps; i++, d += PANEL * LANE)
      for (int l = 0; l < LANE; l++) {
        const int64_t at = i * LANE + l;
        d[l] = row >= 0 && at < k ? s[at] : E(0);
      }
  }
}

}  // namespace xl
