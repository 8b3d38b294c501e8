// Rows of activations in float32 or bf16, and what happens to a result before it is stored.
#pragma once
#include "vec.h"

namespace xl {

enum Type : int { T_F32 = 0, T_BF16 = 1, T_F16 = 2 };
enum Act : int { ACT_NONE = 0, ACT_SILU = 1, ACT_GELU = 2 };

static inline size_t size_of(int type) { return type == T_F32 ? 4 : 2; }

static inline vf load_as(const void* p, ptrdiff_t i, int type) {
  if (type == T_F32) return loadf((const float*)p + i);
  if (type == T_BF16) return load_bf16((const uint16_t*)p + i);
  return load_fp16((const uint16_t*)p + i);
}

static inline void store_as(void* p, ptrdiff_t i, int type, vf v) {
  if (type == T_F32)
    storef((float*)p + i, v);
  else if (type == T_BF16)
    store_bf16((uint16_t*)p + i, v);
  else
    store_fp16((uint16_t*)p + i, v);
}

static inline float load_one(const void* p, ptrdiff_t i, int type) {
  if (type == T_F32) return ((const float*)p)[i];
  const uint16_t h = ((const uint16_t*)p)[i];
  return type == T_BF16 ? bf16_to_float(h) : fp16_to_float(h);
}

static inline void store_one(void* p, ptrdiff_t i, int type, float v) {
  if (type == T_F32)
    ((float*)p)[i] = v;
  else
    ((uint16_t*)p)[i] = type == T_BF16 ? bf16_of(v) : fp16_of(v);
}

// n < W elements, the rest 0
static inline vf load_some(const void* p, ptrdiff_t i, int type, int n) {
  float t[W] = {0};
  for (int j = 0; j < n; j++) t[j] = load_one(p, i + j, type);
  return loadf(t);
}

static inline void store_some(void* p, ptrdiff_t i, int type, vf v, int n) {
  float t[W];
  storef(t, v);
  for (int j = 0; j < n; j++) store_one(p, i + j, type, t[j]);
}

static inline vf activate(vf x, int act) { return act == ACT_SILU ? vsilu(x) : vgelu(x); }

// One row [k] of type `from` as type `to`, zeros up to `padded`.
static inline void convert_row(const void* src, int from, void* dst, int to, ptrdiff_t k,
                               ptrdiff_t padded) {
  ptrdiff_t i = 0;
  for (; i + W <= k; i += W) store_as(dst, i, to, load_as(src, i, from));
  for (; i < k; i++) store_one(dst, i, to, load_one(src, i, from));
  for (; i < padded; i++) store_one(dst, i, to, 0.0f);
}

// Where a linear's result goes. Columns are those of the result: with an activation, F of N = 2 F.
struct Epilogue {
  void* out;
  int out_type;
  int64_t columns;
  const float* bias;      // [N] or null
  const float* residual;  // [M, columns] or null
  int act;
  float cap;

  // acc [rows, PANEL] of panel `panel`, rows from `row` on
  void store(const float* acc, int64_t row, int rows, int64_t panel) const {
    const int width = act ? PANEL / 2 : PANEL;
    const int64_t first = panel * width;
    for (int r = 0; r < rows; r++, acc += PANEL) {
      const int64_t base = (row + r) * columns;
      for (int j = 0; j < width && first + j < columns; j += W) {
        const int n = columns - first - j < W ? int(columns - first - j) : W;
        const int64_t col = first + j;
        vf y = loadf(acc + j);
        if (bias) y = y + some(bias + col, n);
        if (act) {
          vf up = loadf(acc + PANEL / 2 + j);
          if (bias) up = up + some(bias + columns + col, n);
          y = activate(y, act) * up;
        }
        if (cap != 0.0f) y = cap * vtanh(y / cap);
        if (residual) y = y + some(residual + base + col, n);
        if (n == W)
          store_as(out, base + col, out_type, y);
        else
          store_some(out, base + col, out_type, y, n);
      }
    }
  }

 private:
  static vf some(const float* p, int n) { return n == W ? loadf(p) : load_some(p, 0, T_F32, n); }
};

static inline const void* address(int64_t p) { return reinterpret_cast<const void*>(p); }
static inline void* writable(int64_t p) { return reinterpret_cast<void*>(p); }

// What all products have in common, as the caller packs it.
struct ProductCall {
  int64_t x, x_type, m, out, out_type, bias, residual, act;
  double cap;
  int64_t block_kib, panel_kib;

  Epilogue epilogue(int64_t n) const {
    return Epilogue{writable(out), int(out_type), act ? n / 2 : n,
                    static_cast<const float*>(address(bias)),
                    static_cast<const float*>(address(residual)), int(act), float(cap)};
  }
};

}  // namespace xl
