// Linear layers with 8-bit or 4-bit weights in groups along K, activations quantised per row and
// group at run time.
//
// A weight is scale * (q - zero) + min with q unsigned, scale (and min, if there is one) per column
// and group. Panels of 32 columns; per group of a panel: q, then 32 scales in fp16, then 32 mins in
// fp16 if there are any, all one stream. 8 bits: [group / 4, 32, 4]. 4 bits: [group / 8, 32, 4],
// low halves hold the first 4 of 8 k, high halves the others. K is padded with q = zero, min = 0 by
// activations that are 0 there.
//
// With a the row's quantised activations, s their scale and t their sum, a group adds
// s * (scale * (sum(q a) - zero t) + min t): the sums are exact integers, the groups are added in
// ascending order in float32. So a row's result does not depend on its batch here either.
#include <algorithm>

#include "api.h"
#include "panels.h"
#include "rows.h"

namespace xl {

#if defined(XL_AVX512)
constexpr int QUANT_ROWS = 6;  // two accumulators, integers and floats, for each row and vector
#elif defined(__aarch64__)
constexpr int QUANT_ROWS = 6;
#else
constexpr int QUANT_ROWS = 2;
#endif

struct Format {
  int bits;
  int64_t group;
  bool has_min;
  int zero;

  int64_t groups(int64_t k) const { return (k + group - 1) / group; }
  int64_t q_bytes() const { return PANEL * group * bits / 8; }
  int64_t group_bytes() const { return q_bytes() + PANEL * 2 * (has_min ? 2 : 1); }
  // byte and shift of element k of column col within a group
  int64_t byte_of(int64_t k, int64_t col) const {
    return bits == 8 ? (k / 4 * PANEL + col) * 4 + k % 4 : (k / 8 * PANEL + col) * 4 + k % 4;
  }
  int shift_of(int64_t k) const { return bits == 8 || k % 8 < 4 ? 0 : 4; }
};

// sum of 4 products of unsigned and signed bytes per lane, added to c
static inline vi dot4(vi c, vu u, int32_t s) {
#if defined(XL_AVX512) && defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)c, (__m512i)u, _mm512_set1_epi32(s));
#else
  const int32_t even = (int32_t)(((uint32_t)(int32_t)(int8_t)s & 0xffffu) |
                                 ((uint32_t)(int32_t)(int8_t)(s >> 16) << 16));
  const int32_t odd = (int32_t)(((uint32_t)(int32_t)(int8_t)(s >> 8) & 0xffffu) |
                                ((uint32_t)(int32_t)(int8_t)(s >> 24) << 16));
  const vu ue = u & 0x00ff00ffu, uo = (u >> 8) & 0x00ff00ffu;
#if defined(XL_AVX512)
  c += (vi)_mm512_madd_epi16((__m512i)ue, _mm512_set1_epi32(even));
  return c + (vi)_mm512_madd_epi16((__m512i)uo, _mm512_set1_epi32(odd));
#elif defined(XL_AVX2)
  c += (vi)_mm256_madd_epi16((__m256i)ue, _mm256_set1_epi32(even));
  return c + (vi)_mm256_madd_epi16((__m256i)uo, _mm256_set1_epi32(odd));
#else
  const vi e0 = (vi)(ue & 0xffffu), e1 = (vi)(ue >> 16), o0 = (vi)(uo & 0xffffu),
           o1 = (vi)(uo >> 16);
  return c + e0 * (int32_t)(int16_t)even + e1 * (even >> 16) + o0 * (int32_t)(int16_t)odd +
         o1 * (odd >> 16);
#endif
#endif
}

static inline vf to_float(vi v) {
#if defined(XL_AVX512)
  return (vf)_mm512_cvtepi32_ps((__m512i)v);
#else
  return __builtin_convertvector(v, vf);
#endif
}

// One row's activations: q [padded K], and per group the scale and the sum of q.
struct Activations {
  const int8_t* q;
  const float* scale;
  const int32_t* sum;
  int64_t ld_q, ld_group;
};

template <int BITS, int ROWS>
static void quant_tile(const Activations& x, const char* w, const Format& f, int col, float* c,
                       int64_t groups, bool add, const char* soon, ptrdiff_t advance) {
  vf acc[ROWS][NV];
  const int64_t group_bytes = f.group_bytes(), q_bytes = f.q_bytes();
  const int64_t steps = f.group / (BITS == 8 ? 4 : 8);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) acc[r][j] = add ? loadf(c + r * PANEL + j * W) : vf{};
  const int8_t* q = x.q;
  for (int64_t g = 0; g < groups; g++, w += group_bytes) {
    vi dot[ROWS][NV];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) dot[r][j] = seti(-f.zero * x.sum[r * x.ld_group + g]);
    const char* p = w + col * 4;
    for (int64_t s = 0; s < steps; s++, p += PANEL * 4) {
      __builtin_prefetch(soon, 0, 2);
      __builtin_prefetch(soon + 64, 0, 2);
      soon += advance;
      vu u[NV];
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) u[j] = *(const vu*)(p + j * W * 4);
      if constexpr (BITS == 8) {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          int32_t a;
          memcpy(&a, q + r * x.ld_q, 4);
#pragma GCC unroll 4
          for (int j = 0; j < NV; j++) dot[r][j] = dot4(dot[r][j], u[j], a);
        }
        q += 4;
      } else {
        vu low[NV], high[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) {
          low[j] = u[j] & 0x0f0f0f0fu;
          high[j] = (u[j] >> 4) & 0x0f0f0f0fu;
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          int32_t a, b;
          memcpy(&a, q + r * x.ld_q, 4);
          memcpy(&b, q + r * x.ld_q + 4, 4);
#pragma GCC unroll 4
          for (int j = 0; j < NV; j++)
            dot[r][j] = dot4(dot4(dot[r][j], low[j], a), high[j], b);
        }
        q += 8;
      }
    }
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(w + q_bytes) + col;
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) {
      const vf scale = load_fp16(scales + j * W);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++)
        acc[r][j] = fma(to_float(dot[r][j]), scale * x.scale[r * x.ld_group + g], acc[r][j]);
      if (f.has_min) {
        const vf min = load_fp16(scales + PANEL + j * W);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          const int64_t at = r * x.ld_group + g;
          acc[r][j] = fma(min, set(x.scale[at] * float(x.sum[at])), acc[r][j]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) storef(c + r * PANEL + j * W, acc[r][j]);
}

using QuantTile = void (*)(const Activations&, const char*, const Format&, int, float*, int64_t,
                           bool, const char*, ptrdiff_t);

template <int BITS, int... R>
static QuantTile quant_tile_of(int rows, std::integer_sequence<int, R...>) {
  static constexpr QuantTile tiles[] = {&quant_tile<BITS, R + 1>...};
  return tiles[rows - 1];
}

static QuantTile quant_tile_of(int bits, int rows) {
  using Rows = std::make_integer_sequence<int, QUANT_ROWS>;
  return bits == 8 ? quant_tile_of<8>(rows, Rows{}) : quant_tile_of<4>(rows, Rows{});
}

// One group of a row to 8 bits, largest magnitude to 127. A value that is not finite makes the
// scale NaN, and so the whole row's result.
static void quantize_group(const void* x, int64_t at, int type, int64_t n, int64_t group,
                           int8_t* q, float* scale, int32_t* total) {
  float v[256];
  for (int64_t i = 0; i < group; i += W)
    storef(v + i, i + W <= n ? load_as(x, at + i, type)
                             : load_some(x, at + i, type, int(n > i ? n - i : 0)));
  vf most = {}, bad = {};
  for (int64_t i = 0; i < group; i += W) {
    const vf y = loadf(v + i);
    most = vmax((vf)(bits(y) & 0x7fffffff), most);
    bad = bad + y * 0.0f;
  }
  const float top = max_of(most) + sum(bad);
  const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
  *scale = top * (1.0f / 127.0f);
  vi t = {};
  for (int64_t i = 0; i < group; i += W) {
    // adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits
    const vi r = bits(fma(loadf(v + i), set(inverse), set(0x1.8p23f))) - 0x4b400000;
    t += r;
#if defined(XL_AVX512)
    _mm_storeu_si128((__m128i*)(q + i), _mm512_cvtepi32_epi8((__m512i)r));
#else
    for (int j = 0; j < W; j++) q[i + j] = int8_t(r[j]);
#endif
  }
  int32_t s = 0;
  for (int j = 0; j < W; j++) s += t[j];
  *total = s;
}

static void quant_linear(Pool& pool, const Format& f, const char* w, int64_t k, const void* x,
                         int x_type, int64_t m, const Epilogue& out, int64_t panels,
                         const Tuning& tune) {
  const int64_t groups = f.groups(k), padded = groups * f.group;
  const int64_t ld_q = padded % 512 ? padded : padded + 64;  // rows apart in cache sets
  const size_t q_bytes = size_t(m * ld_q + 63) / 64 * 64, meta = size_t(m * groups) * 4;
  char* memory = static_cast<char*>(pool.shared(0, q_bytes + 2 * meta));
  int8_t* q = reinterpret_cast<int8_t*>(memory);
  float* scales = reinterpret_cast<float*>(memory + q_bytes);
  int32_t* sums = reinterpret_cast<int32_t*>(memory + q_bytes + meta);
  const int64_t chunk = 8;
  pool.each((m + chunk - 1) / chunk, [&](int64_t u, int) {
    for (int64_t r = u * chunk; r < m && r < (u + 1) * chunk; r++)
      for (int64_t g = 0; g < groups; g++)
        quantize_group(x, r * k + g * f.group, x_type, std::min(k - g * f.group, f.group), f.group,
                       q + r * ld_q + g * f.group, scales + r * groups + g, sums + r * groups + g);
  }, m * k < 8192);

  const int64_t group_bytes = f.group_bytes();
  int64_t block = std::max<int64_t>(tune.block_bytes / ld_q / QUANT_ROWS * QUANT_ROWS,
                                    4 * QUANT_ROWS);
  const int64_t blocks = (m + block - 1) / block;
  block = (m + blocks - 1) / blocks;
  int64_t parts = 1;
  if (m > QUANT_ROWS) parts = (groups * group_bytes + tune.panel_bytes - 1) / tune.panel_bytes;
  const int64_t per_part = (groups + parts - 1) / parts;
  const size_t acc_bytes = size_t(parts > 1 ? block : QUANT_ROWS) * PANEL * sizeof(float);
  pool.reserve(acc_bytes);

  pool.each(blocks * panels, [&](int64_t unit, int thread) {
    const int64_t panel = unit % panels, m0 = unit / panels * block;
    const int64_t rows = std::min(m - m0, block);
    const char* b = w + panel * groups * group_bytes;
    float* acc = static_cast<float*>(pool.scratch(thread, acc_bytes));
    const int64_t tiles = (rows + QUANT_ROWS - 1) / QUANT_ROWS;
    for (int64_t g = 0; g < groups; g += per_part) {
      const int64_t n = std::min(groups - g, per_part);
      const char* here = b + g * group_bytes;
      const int64_t steps = n * f.group / (f.bits == 8 ? 4 : 8);
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t r = rows * t / tiles;
        const int count = int(rows * (t + 1) / tiles - r);
        const Activations a{q + (m0 + r) * ld_q + g * f.group, scales + (m0 + r) * groups + g,
                            sums + (m0 + r) * groups + g, ld_q, groups};
        const char* soon = here + STREAM_AHEAD;
        int64_t advance = group_bytes * n / steps;
        if (tiles > 1) {
          advance = (advance + tiles - 1) / tiles;
          soon = here + n * group_bytes + t * steps * advance;
        }
        float* c = acc + (parts > 1 ? r : 0) * PANEL;
        const QuantTile tile = quant_tile_of(f.bits, count);
        for (int j = 0; j < PANEL; j += COLS)
          tile(a, here, f, j, c + j, n, g > 0, soon, advance);
        if (g + n == groups) out.store(c, m0 + r, count, panel);
      }
    }
  });
}

}  // namespace xl

using namespace xl;

static Format format_of(int bits, int64_t group, int has_min, int zero) {
  return Format{bits, group, has_min != 0, zero};
}

XL_API int64_t xl_quant_bytes(int bits, int64_t group, int has_min, int64_t n, int64_t k,
                              int gated) {
  const Format f = format_of(bits, group, has_min, 0);
  return panels_of(n, gated) * f.groups(k) * f.group_bytes();
}

// q [N, K] unsigned bytes, scales and mins (or null) [N, groups] fp16
XL_API int xl_quant_pack(Pool* pool, int bits, int64_t group, int zero, const uint8_t* q,
                         const uint16_t* scales, const uint16_t* mins, int64_t n, int64_t k,
                         int gated, char* out) {
  return guarded(pool, [&] {
    const Format f = format_of(bits, group, mins != nullptr, zero);
    const int64_t groups = f.groups(k);
    pool->each(panels_of(n, gated), [&](int64_t panel, int) {
      char* to = out + panel * groups * f.group_bytes();
      memset(to, 0, size_t(groups * f.group_bytes()));
      for (int64_t col = 0; col < PANEL; col++) {
        const int64_t row = row_of(panel, col, n, gated);
        if (row < 0) continue;  // scale 0
        for (int64_t g = 0; g < groups; g++) {
          char* block = to + g * f.group_bytes();
          for (int64_t i = 0; i < group && g * group + i < k; i++)
            block[f.byte_of(i, col)] |= char(q[row * k + g * group + i] << f.shift_of(i));
          uint16_t* s = reinterpret_cast<uint16_t*>(block + f.q_bytes());
          s[col] = scales[row * groups + g];
          if (mins) s[PANEL + col] = mins[row * groups + g];
        }
      }
    });
  });
}

// Weights of a float type to 8 bits, symmetric: scale = largest magnitude / 127, rounded to fp16
// before it divides.
XL_API int xl_quant_from(Pool* pool, int type, const void* w, int64_t group, int64_t n, int64_t k,
                         int gated, char* out) {
  return guarded(pool, [&] {
    const Format f = format_of(8, group, 0, 128);
    const int64_t groups = f.groups(k);
    pool->each(panels_of(n, gated), [&](int64_t panel, int) {
      char* to = out + panel * groups * f.group_bytes();
      memset(to, 0, size_t(groups * f.group_bytes()));
      for (int64_t col = 0; col < PANEL; col++) {
        const int64_t row = row_of(panel, col, n, gated);
        if (row < 0) continue;
        for (int64_t g = 0; g < groups; g++) {
          char* block = to + g * f.group_bytes();
          const int64_t at = row * k + g * group, count = std::min(k - g * group, group);
          float top = 0.0f;
          for (int64_t i = 0; i < count; i++)
            top = std::max(top, std::fabs(load_one(w, at + i, type)));
          const uint16_t scale = fp16_of(std::min(top / 127.0f, 65504.0f));
          reinterpret_cast<uint16_t*>(block + f.q_bytes())[col] = scale;
          const float by = scale ? 1.0f / fp16_to_float(scale) : 0.0f;
          for (int64_t i = 0; i < count; i++) {
            const float y = std::nearbyint(load_one(w, at + i, type) * by);
            block[f.byte_of(i, col)] = char(uint8_t(128 + std::min(std::max(y, -127.0f), 127.0f)));
          }
        }
      }
    });
  });
}

// Rows `ids` of quantised, not gated weights as float32.
struct QuantGatherCall {
  int64_t bits, group, has_min, zero, w, n, k, ids, count, out;
};

XL_API int xl_quant_gather(Pool* pool, const QuantGatherCall* call) {
  return guarded(pool, [&] {
    const int bits = int(call->bits), has_min = int(call->has_min), zero = int(call->zero);
    const int64_t group = call->group, n = call->n, k = call->k, count = call->count;
    const auto* w = static_cast<const char*>(address(call->w));
    const auto* ids = static_cast<const int32_t*>(address(call->ids));
    auto* out = static_cast<float*>(writable(call->out));
    const Format f = format_of(bits, group, has_min, zero);
    const int64_t groups = f.groups(k);
    pool->each(count, [&](int64_t t, int) {
      const int64_t id = ids[t] < 0 ? 0 : ids[t] < n ? ids[t] : n - 1, col = id % PANEL;
      for (int64_t i = 0; i < k; i += bits == 8 ? 4 : 8)  // a line each
        __builtin_prefetch(w + (id / PANEL * groups + i / group) * f.group_bytes() +
                           f.byte_of(i % group, col));
      for (int64_t i = 0; i < k; i++) {
        const char* block = w + (id / PANEL * groups + i / group) * f.group_bytes();
        const uint16_t* s = reinterpret_cast<const uint16_t*>(block + f.q_bytes());
        const int q = uint8_t(block[f.byte_of(i % group, col)]) >> f.shift_of(i % group) &
                      (bits == 8 ? 255 : 15);
        out[t * k + i] = fp16_to_float(s[col]) * float(q - zero) +
                         (has_min ? fp16_to_float(s[PANEL + col]) : 0.0f);
      }
    }, count < 32);
  });
}

struct QuantLinearCall {
  int64_t bits, group, has_min, zero, w, n, k;
  ProductCall product;
};

XL_API int xl_quant_linear(Pool* pool, const QuantLinearCall* call) {
  return guarded(pool, [&] {
    const ProductCall& p = call->product;
    if (p.m == 0 || call->n == 0) return;
    const Tuning tune{QUANT_ROWS, p.block_kib * 1024, p.panel_kib * 1024};
    const Format f{int(call->bits), call->group, call->has_min != 0, int(call->zero)};
    quant_linear(*pool, f, static_cast<const char*>(address(call->w)), call->k, address(p.x),
                 int(p.x_type), p.m, p.epilogue(call->n), panels_of(call->n, p.act != ACT_NONE),
                 tune);
  });
}
