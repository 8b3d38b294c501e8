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

// One head: norm (w not null), then the first 2 * half elements turn.
static void turn(float* h, int64_t d, const float* norm, float eps, const float* cosines,
                 int64_t half) {
  if (norm) {
    const float by = 1.0f / sqrtf(sum_squares(h, d) / float(d) + eps);
    scale_row(h, norm, by, h, 0, T_F32, d);
  }
  const float* sines = cosines + half;
  for (int64_t i = 0; i < half; i++) {
    const float a = h[i], b = h[i + half];
    h[i] = a * cosines[i] - b * sines[i];
    h[i + half] = b * cosines[i] + a * sines[i];
  }
}

// Where element i of a token's row lies in a KV tile [D, P] or [P, D], see attention.cpp.
struct TileLayout {
  int64_t d, p, lane;
  int64_t k(int64_t off, int64_t i) const { return (i / lane * p + off) * lane + i % lane; }
  int64_t v(int64_t off, int64_t i) const { return (off / lane * d + i) * lane + off % lane; }
};

// A token's k row into its tile. `held` has room for two rows.
static void put_k(const TileLayout& at, const float* h, void* tile, int64_t off, int type,
                  void* held) {
  convert_row(h, T_F32, held, type, at.d, at.d);
  if (type == T_F32) {
    for (int64_t i = 0; i < at.d; i++) ((float*)tile)[i * at.p + off] = ((const float*)held)[i];
  } else if (type == T_F16) {
    for (int64_t i = 0; i < at.d; i++)
      ((uint16_t*)tile)[i * at.p + off] = ((const uint16_t*)held)[i];
  } else {
    for (int64_t i = 0; i < at.d / 2; i++)
      memcpy((uint16_t*)tile + (i * at.p + off) * 2, (const uint16_t*)held + 2 * i, 4);
  }
}

// A token's v row; `next`, if given, is the row of the next slot, which shares lanes with it.
static void put_v(const TileLayout& at, const float* x, const float* next, void* tile, int64_t off,
                  int type, void* held) {
  if (type != T_BF16) {
    convert_row(x, T_F32, (char*)tile + size_t(off * at.d) * size_of(type), type, at.d, at.d);
    return;
  }
  uint16_t* row = static_cast<uint16_t*>(held);
  uint16_t* to = (uint16_t*)tile + off / 2 * at.d * 2;
  convert_row(x, T_F32, row, type, at.d, at.d);
  if (next) {
    convert_row(next, T_F32, row + at.d, type, at.d, at.d);
    for (int64_t i = 0; i < at.d; i++) {
      to[2 * i] = row[i];
      to[2 * i + 1] = row[at.d + i];
    }
  } else {
    for (int64_t i = 0; i < at.d; i++) to[2 * i + off % 2] = row[i];
  }
}

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

// qkv [tokens, (H + 2 G) D] float32; q out [G, tokens * group, D]; k and v into their KV tiles.
// slots outside the pool (negative) store nothing.
struct RopeCall {
  int64_t qkv, positions, rope, half, slots, q_norm, k_norm, q, q_type, k, v, kv_type;
  int64_t tokens, heads, kv_heads, d, p;
  double eps;
};

XL_API int xl_rope_append(Pool* pool, const RopeCall* call) {
  return guarded(pool, [&] {
    const auto* qkv = static_cast<const float*>(address(call->qkv));
    const auto* positions = static_cast<const int32_t*>(address(call->positions));
    const auto* rope = static_cast<const float*>(address(call->rope));
    const auto* slots = static_cast<const int32_t*>(address(call->slots));
    const auto* q_norm = static_cast<const float*>(address(call->q_norm));
    const auto* k_norm = static_cast<const float*>(address(call->k_norm));
    void *q = writable(call->q), *k = writable(call->k), *v = writable(call->v);
    const int q_type = int(call->q_type), kv_type = int(call->kv_type);
    const int64_t tokens = call->tokens, heads = call->heads, kv_heads = call->kv_heads;
    const int64_t d = call->d, p = call->p, half = call->half;
    const float eps = float(call->eps);
    const int64_t group = heads / kv_heads;
    const TileLayout at{d, p, kv_type == T_BF16 ? 2 : 1};
    const int64_t chunk = 16, width = (heads + 2 * kv_heads) * d;
    const size_t tile_bytes = size_t(p * d) * size_of(kv_type);
    pool->reserve(size_t(d) * 2 * sizeof(float));
    // Units by KV head and run of tokens: two threads seldom write the same line of a tile.
    pool->each((tokens + chunk - 1) / chunk * kv_heads, [&](int64_t u, int thread) {
      float* h = static_cast<float*>(pool->scratch(thread, size_t(d) * 2 * sizeof(float)));
      const int64_t g = u % kv_heads, from = u / kv_heads * chunk;
      // A token's k row touches a line for each lane of elements, in a tile that nobody has read for
      // a step: all of them are asked for while the token before is worked on.
      auto fetch = [&](int64_t t) {
        if (t >= tokens || t >= from + chunk || slots[t] < 0) return;
        if (t > from && slots[t] == slots[t - 1] + 1) return;  // mostly the same lines
        const char* tile = (const char*)k + size_t(slots[t] / p * kv_heads + g) * tile_bytes;
        for (int64_t i = 0; i < d; i += at.lane)
          __builtin_prefetch(tile + size_t(at.k(slots[t] % p, i)) * size_of(kv_type), 1);
      };
      fetch(from);
      bool v_done = false;  // with the token before
      for (int64_t t = from; t < tokens && t < from + chunk; t++) {
        fetch(t + 1);
        const float* row = qkv + t * width;
        const float* cosines = rope + int64_t(positions[t]) * 2 * half;
        for (int64_t i = 0; i < group; i++) {
          memcpy(h, row + (g * group + i) * d, size_t(d) * sizeof(float));
          turn(h, d, q_norm, eps, cosines, half);
          const size_t to = size_t(((g * tokens + t) * group + i) * d) * size_of(q_type);
          convert_row(h, T_F32, (char*)q + to, q_type, d, d);
        }
        if (slots[t] < 0) continue;
        memcpy(h, row + (heads + g) * d, size_t(d) * sizeof(float));
        turn(h, d, k_norm, eps, cosines, half);
        const int64_t off = slots[t] % p;
        const size_t tile = size_t(slots[t] / p * kv_heads + g) * tile_bytes;
        put_k(at, h, (char*)k + tile, off, kv_type, h + d);
        if (v_done) {
          v_done = false;
          continue;
        }
        v_done = kv_type == T_BF16 && off % 2 == 0 && t + 1 < tokens && t + 1 < from + chunk &&
                 slots[t + 1] == slots[t] + 1;
        const float* x = row + (heads + kv_heads + g) * d;
        put_v(at, x, v_done ? x + width : nullptr, (char*)v + tile, off, kv_type, h);
      }
    }, tokens * width < 8192);
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
