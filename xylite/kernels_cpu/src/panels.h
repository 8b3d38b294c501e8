// How the rows of a weight [N, K] are spread over panels of 32 columns of the result.
#pragma once
#include "vec.h"

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
