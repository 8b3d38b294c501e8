// What lies between the products: norms, rotary positions and KV rows, gated activations, argmax.
#include "api.h"
#include "rows.h"

namespace xl {

// Sum of squares of a row, in one fixed order.
static float sum_squares(const float* x, int64_t n) {
  vf a = {}, b = {};
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    const vf u = loadf(x + i), v = loadf(x + i + W);
    a = fma(u, u, a);
    b = fma(v, v, b);
  }
  float s = sum(a + b);
  for (; i < n; i++) s += x[i] * x[i];
  return s;
}

static void scale_row(const float* x, const float* w, float by, void* out, int64_t at, int out_type,
                      int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store_as(out, at + i, out_type, loadf(x + i) * by * loadf(w + i));
  for (; i < n; i++) store_one(out, at + i, out_type, x[i] * by * w[i]);
}

// One head x [d]: norm (w not null), then the first 2 * half elements turn; to out[at] and on.
// `held` has room for a head.
static void turn(const float* x, int64_t d, const float* norm, float eps, const float* cosines,
                 int64_t half, float* held, void* out, int64_t at, int type) {
  if (norm) {
    const float by = 1.0f / sqrtf(sum_squares(x, d) / float(d) + eps);
    scale_row(x, norm, by, held, 0, T_F32, d);
    x = held;
  }
  const float* sines = cosines + half;
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    const vf a = loadf(x + i), b = loadf(x + i + half);
    const vf cosine = loadf(cosines + i), sine = loadf(sines + i);
    store_as(out, at + i, type, a * cosine - b * sine);
    store_as(out, at + i + half, type, b * cosine + a * sine);
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[i + half];
    store_one(out, at + i, type, a * cosines[i] - b * sines[i]);
    store_one(out, at + i + half, type, b * cosines[i] + a * sines[i]);
  }
  for (i = 2 * half; i + W <= d; i += W) store_as(out, at + i, type, loadf(x + i));
  for (; i < d; i++) store_one(out, at + i, type, x[i]);
}

// Where element i of a token's row lies in a KV tile [D, P] or [P, D], see attention.cpp.
struct TileLayout {
  int64_t d, p, lane;
  int64_t k(int64_t off, int64_t i) const { return (i / lane * p + off) * lane + i % lane; }
  int64_t v(int64_t off, int64_t i) const { return (off / lane * d + i) * lane + off % lane; }
};

constexpr int RUN = 16;  // tokens, of which those in neighbouring slots are written together

#if defined(XL_AVX512)
// 16 rows of 16 words each, `ld` words apart, become columns, `stride` words apart.
static inline void turn_over(const char* from, int64_t ld, char* to, int64_t stride) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; r++) a[r] = _mm512_loadu_si512(from + 4 * r * ld);
#pragma GCC unroll 8
  for (int r = 0; r < 16; r += 2) {
    b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
    b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
  }
  // a[4 r + c] has, in each quarter q, column 4 q + c of rows 4 r to 4 r + 3.
#pragma GCC unroll 4
  for (int r = 0; r < 16; r += 4) {
    a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
    a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
    a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
    a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m512i even = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);  // quarters 0 and 2
    const __m512i odd = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
    const __m512i even2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    const __m512i odd2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    char* t = to + 4 * c * stride;
    _mm512_storeu_si512(t, _mm512_shuffle_i32x4(even, even2, 0x88));
    _mm512_storeu_si512(t + 16 * stride, _mm512_shuffle_i32x4(odd, odd2, 0x88));
    _mm512_storeu_si512(t + 32 * stride, _mm512_shuffle_i32x4(even, even2, 0xdd));
    _mm512_storeu_si512(t + 48 * stride, _mm512_shuffle_i32x4(odd, odd2, 0xdd));
  }
}
#endif

// rows [n, units] of SIZE bytes each become columns of to, `stride` units apart.
template <int SIZE>
static void put_columns(const char* rows, int64_t n, int64_t units, char* to, int64_t stride) {
  int64_t i = 0;
#if defined(XL_AVX512)
  if (SIZE == 4 && n == RUN)
    for (; i + 16 <= units; i += 16) turn_over(rows + 4 * i, units, to + 4 * i * stride, stride);
#endif
  for (; i < units; i++)
    for (int64_t r = 0; r < n; r++)
      memcpy(to + (i * stride + r) * SIZE, rows + (r * units + i) * SIZE, SIZE);
}

// k rows [n, D] of the tile's type, into its slots from `off` on.
static void put_k(const TileLayout& at, const void* rows, int64_t n, void* tile, int64_t off,
                  int type) {
  const char* from = static_cast<const char*>(rows);
  if (type == T_F16)
    put_columns<2>(from, n, at.d, static_cast<char*>(tile) + 2 * off, at.p);
  else  // float32, or two bf16 that stay together
    put_columns<4>(from, n, at.d / at.lane, static_cast<char*>(tile) + 4 * off, at.p);
}

// Rounded to bf16 as what is stored, a in the lower half of each lane and b in the upper.
static inline vu pair_bf16(vf a, vf b) {
#if defined(XL_AVX512) && defined(__AVX512BF16__)
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)a));
  const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)b));
  return (vu)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
#else
  return (round_bf16(a) >> 16) | (round_bf16(b) & 0xffff0000u);
#endif
}

// v rows x [n, D], `stride` apart, into the slots from `off` on. `held` has room for a head.
static void put_v(const TileLayout& at, const float* x, int64_t stride, int64_t n, void* tile,
                  int64_t off, int type, void* held) {
  if (type != T_BF16) {
    for (int64_t r = 0; r < n; r++)
      convert_row(x + r * stride, T_F32, (char*)tile + size_t((off + r) * at.d) * size_of(type),
                  type, at.d, at.d);
    return;
  }
  for (int64_t r = 0; r < n; r++, x += stride) {
    const int64_t slot = off + r;
    uint16_t* to = static_cast<uint16_t*>(tile) + slot / 2 * at.d * 2;
    if (slot % 2 == 0 && r + 1 < n) {  // with the next one, with which it shares lanes
      for (int64_t i = 0; i < at.d; i += W)
        *(vu*)(to + 2 * i) = pair_bf16(loadf(x + i), loadf(x + stride + i));
      r++;
      x += stride;
      continue;
    }
    uint16_t* row = static_cast<uint16_t*>(held);
    convert_row(x, T_F32, row, type, at.d, at.d);
    for (int64_t i = 0; i < at.d; i++) to[2 * i + slot % 2] = row[i];
  }
}

// qkv [tokens, (H + 2 G) D] float32; q out [G, tokens * group, D]; k and v into their KV tiles.
// slots outside the pool (negative) store nothing.
struct RopeCall {
  int64_t qkv, positions, rope, half, slots, q_norm, k_norm, q, q_type, k, v, kv_type;
  int64_t tokens, heads, kv_heads, d, p;
  double eps;
};

// A run of tokens, `each` KV heads of it.
struct RopeUnit {
  const RopeCall& c;
  const TileLayout at;
  const int64_t from, end, g0, each;
  float* held;  // a head, and then k rows [each, RUN, D] of the tiles' type
  const int64_t width = (c.heads + 2 * c.kv_heads) * c.d;
  const float* qkv = static_cast<const float*>(address(c.qkv));
  const int32_t* slots = static_cast<const int32_t*>(address(c.slots));
  const int type = int(c.kv_type);

  static size_t bytes(const RopeCall& c, int64_t each) {
    return size_t(c.d) * size_t(1 + each * RUN) * sizeof(float);
  }
  char* k_row(int64_t g, int64_t t) const {
    return (char*)(held + c.d) + size_t((g * RUN + t - from) * c.d) * size_of(type);
  }
  char* tile(int64_t pool, int64_t slot, int64_t g) const {
    const int64_t index = slot / c.p * c.kv_heads + g0 + g;
    return static_cast<char*>(writable(pool)) + size_t(index * c.p * c.d) * size_of(type);
  }

  // A token's k row touches a line for each lane of elements, in a tile that nobody has read for a
  // step: all of them are asked for while the token before is worked on.
  void fetch(int64_t t) const {
    if (t >= end || slots[t] < 0) return;
    if (t > from && slots[t] == slots[t - 1] + 1) return;  // mostly the same lines
    for (int64_t g = 0; g < each; g++) {
      const char* to = tile(c.k, slots[t], g);
      for (int64_t i = 0; i < c.d; i += at.lane)
        __builtin_prefetch(to + size_t(at.k(slots[t] % c.p, i)) * size_of(type), 1);
    }
  }

  void turn_heads(int64_t t) const {
    const float* row = qkv + t * width;
    const int64_t place = static_cast<const int32_t*>(address(c.positions))[t];
    const float* cosines = static_cast<const float*>(address(c.rope)) + place * 2 * c.half;
    const auto* q_norm = static_cast<const float*>(address(c.q_norm));
    const auto* k_norm = static_cast<const float*>(address(c.k_norm));
    const int64_t group = c.heads / c.kv_heads;
    for (int64_t h = g0 * group; h < (g0 + each) * group; h++) {
      const int64_t to = ((h / group * c.tokens + t) * group + h % group) * c.d;
      turn(row + h * c.d, c.d, q_norm, float(c.eps), cosines, c.half, held, writable(c.q), to,
           int(c.q_type));
    }
    for (int64_t g = 0; g < each; g++)
      turn(row + (c.heads + g0 + g) * c.d, c.d, k_norm, float(c.eps), cosines, c.half, held,
           k_row(g, t), 0, type);
  }

  // Neighbouring slots of a block together; how many tokens that were, from t on.
  int64_t append(int64_t t) const {
    if (slots[t] < 0) return 1;
    const int64_t off = slots[t] % c.p;
    int64_t n = 1;
    while (t + n < end && off + n < c.p && slots[t + n] == slots[t] + n) n++;
    for (int64_t g = 0; g < each; g++) {
      put_k(at, k_row(g, t), n, tile(c.k, slots[t], g), off, type);
      const float* x = qkv + t * width + (c.heads + c.kv_heads + g0 + g) * c.d;
      put_v(at, x, width, n, tile(c.v, slots[t], g), off, type, held);
    }
    return n;
  }

  void run() const {
    fetch(from);
    for (int64_t t = from; t < end; t++) {
      fetch(t + 1);
      turn_heads(t);
    }
    for (int64_t t = from; t < end;) t += append(t);
  }
};

}  // namespace xl

using namespace xl;

// total = x + residual, out = total / rms(total) * w; all [rows, n]. Both null: total is x, float32.
struct NormCall {
  int64_t x, x_type, residual, w, total, out, out_type, rows, n;
  double eps;
};

XL_API int xl_add_rms_norm(Pool* pool, const NormCall* call) {
  return guarded(pool, [&] {
    const void* x = address(call->x);
    const auto* residual = static_cast<const float*>(address(call->residual));
    const auto* w = static_cast<const float*>(address(call->w));
    auto* total = static_cast<float*>(writable(call->total));
    void* out = writable(call->out);
    const int x_type = int(call->x_type), out_type = int(call->out_type);
    const int64_t rows = call->rows, n = call->n;
    const float eps = float(call->eps);
    const int64_t chunk = 8;
    pool->each((rows + chunk - 1) / chunk, [&](int64_t u, int) {
      for (int64_t r = u * chunk; r < rows && r < (u + 1) * chunk; r++) {
        if (!total) {
          const float* t = (const float*)x + r * n;
          scale_row(t, w, 1.0f / sqrtf(sum_squares(t, n) / float(n) + eps), out, r * n, out_type, n);
          continue;
        }
        float* t = total + r * n;
        const float* add = residual ? residual + r * n : nullptr;
        int64_t i = 0;
        for (; i + W <= n; i += W) {
          const vf v = load_as(x, r * n + i, x_type);
          storef(t + i, add ? v + loadf(add + i) : v);
        }
        for (; i < n; i++) {
          const float v = load_one(x, r * n + i, x_type);
          t[i] = add ? v + add[i] : v;
        }
        const float by = 1.0f / sqrtf(sum_squares(t, n) / float(n) + eps);
        scale_row(t, w, by, out, r * n, out_type, n);
      }
    }, rows * n < 16384);
  });
}

XL_API int xl_rope_append(Pool* pool, const RopeCall* call) {
  return guarded(pool, [&] {
    const RopeCall& c = *call;
    const TileLayout at{c.d, c.p, c.kv_type == T_BF16 ? 2 : 1};
    // Rows of qkv in order; where tokens are few, each KV head is a unit of its own.
    const bool many = c.tokens > 4 * RUN;
    const int64_t length = many ? RUN : 4, parts = many ? 1 : c.kv_heads;
    const int64_t each = c.kv_heads / parts;
    const size_t bytes = RopeUnit::bytes(c, each);
    pool->reserve(bytes);
    pool->each((c.tokens + length - 1) / length * parts, [&](int64_t u, int thread) {
      const int64_t from = u / parts * length;
      const int64_t end = from + length < c.tokens ? from + length : c.tokens;
      auto* held = static_cast<float*>(pool->scratch(thread, bytes));
      RopeUnit{c, at, from, end, u % parts * each, each, held}.run();
    }, c.tokens * (c.heads + 2 * c.kv_heads) * c.d < 2048);
  });
}

// Row q_start[i + 1] - 1 of x to row i of out.
struct LastRowsCall {
  int64_t x, row_bytes, q_start, count, out;
};

XL_API int xl_last_rows(Pool* pool, const LastRowsCall* call) {
  return guarded(pool, [&] {
    const auto* q_start = static_cast<const int32_t*>(address(call->q_start));
    const auto* x = static_cast<const char*>(address(call->x));
    auto* out = static_cast<char*>(writable(call->out));
    for (int64_t i = 0; i < call->count; i++)
      memcpy(out + i * call->row_bytes, x + (q_start[i + 1] - 1) * call->row_bytes,
             size_t(call->row_bytes));
  });
}

// Rows src copied to slots dst of one KV pool [N, G, tile]; all are read before any is written.
XL_API int xl_move_slots(Pool* pool, void* k, void* v, int kv_type, const int32_t* src,
                         const int32_t* dst, int64_t count, int64_t kv_heads, int64_t d,
                         int64_t p) {
  return guarded(pool, [&] {
    const TileLayout at{d, p, kv_type == T_BF16 ? 2 : 1};
    const int64_t row = kv_heads * d;
    const size_t size = size_of(kv_type);
    char* held = static_cast<char*>(pool->shared(0, size_t(2 * count * row) * size));
    for (int back = 0; back < 2; back++)
      for (int64_t n = 0; n < count; n++) {
        const int64_t slot = (back ? dst : src)[n], off = slot % p;
        for (int64_t g = 0; g < kv_heads; g++) {
          const int64_t tile = (slot / p * kv_heads + g) * p * d;
          for (int64_t i = 0; i < d; i++) {
            const int64_t at_k = tile + at.k(off, i), at_v = tile + at.v(off, i);
            char* hk = held + size_t((2 * n) * row + g * d + i) * size;
            char* hv = held + size_t((2 * n + 1) * row + g * d + i) * size;
            char *pk = (char*)k + size_t(at_k) * size, *pv = (char*)v + size_t(at_v) * size;
            memcpy(back ? pk : hk, back ? hk : pk, size);
            memcpy(back ? pv : hv, back ? hv : pv, size);
          }
        }
      }
  });
}

// act(x[:, :n]) * x[:, n:] of x [rows, 2 n]
XL_API int xl_gated_act(Pool* pool, const void* x, int x_type, int act, void* out, int out_type,
                        int64_t rows, int64_t n) {
  return guarded(pool, [&] {
    pool->each(rows, [&](int64_t r, int) {
      const int64_t gate = r * 2 * n, up = gate + n;
      int64_t i = 0;
      for (; i + W <= n; i += W)
        store_as(out, r * n + i, out_type,
                 activate(load_as(x, gate + i, x_type), act) * load_as(x, up + i, x_type));
      if (i < n) {
        const int left = int(n - i);
        store_some(out, r * n + i, out_type,
                   activate(load_some(x, gate + i, x_type, left), act) *
                       load_some(x, up + i, x_type, left),
                   left);
      }
    }, rows * n < 16384);
  });
}

// 1 for each row [rows, n] without infinities and NaN: these times 0 are NaN, and so is their sum.
XL_API int xl_finite(Pool* pool, const void* x, int type, int64_t rows, int64_t n, int64_t stride,
                     uint8_t* out) {
  return guarded(pool, [&] {
    pool->each(rows, [&](int64_t r, int) {
      int64_t i = r * stride;
      const int64_t end = i + n;
      vf a = {}, b = {};
      for (; i + 2 * W <= end; i += 2 * W) {
        a = fma(load_as(x, i, type), set(0.0f), a);
        b = fma(load_as(x, i + W, type), set(0.0f), b);
      }
      float s = sum(a + b);
      for (; i < end; i++) s += load_one(x, i, type) * 0.0f;
      out[r] = s == s;
    }, rows * n < 65536);
  });
}

static inline bool any(vi flags) {
#if defined(XL_AVX512)
  return _mm512_movepi32_mask((__m512i)flags);
#else
  int32_t all = 0;
  for (int i = 0; i < W; i++) all |= flags[i];
  return all;
#endif
}

// The first largest of each row [rows, n], a NaN above all.
XL_API int xl_argmax(Pool* pool, const float* x, int64_t rows, int64_t n, int64_t stride,
                     int64_t* out) {
  return guarded(pool, [&] {
    pool->each(rows, [&](int64_t r, int) {
      const float* p = x + r * stride;
      vf most = set(-INFINITY);
      vi unordered = {};
      int64_t i = 0;
      for (; i + W <= n; i += W) {
        const vf v = loadf(p + i);
        most = vmax(v, most);
        unordered |= v != v;
      }
      float best = max_of(most);
      bool nan = false;
      for (int j = 0; j < W; j++) nan |= unordered[j] != 0;
      for (; i < n; i++) {
        nan |= p[i] != p[i];
        if (p[i] > best) best = p[i];
      }
      int64_t at = 0;
      if (nan)
        while (p[at] == p[at]) at++;
      else {
        for (; at + W <= n && !any(loadf(p + at) == best); at += W) continue;
        while (at < n - 1 && p[at] != best) at++;
      }
      out[r] = at;
    }, rows < 2);
  });
}

XL_STRUCT(xl_add_rms_norm, NormCall)
XL_STRUCT(xl_rope_append, RopeCall)
XL_STRUCT(xl_last_rows, LastRowsCall)
