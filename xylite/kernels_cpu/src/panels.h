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

}  // namespace xl
