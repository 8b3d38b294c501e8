// Linear layers with 8-bit or 4-bit weights in groups along K, activations quantised per row and
// group at run time (activations.h).
//
// A weight is scale * (q - zero) + min with q unsigned, scale (and min, if there is one) per column
// and group. Panels of 32 columns; per group of a panel: q, then 32 scales in fp16, then 32 mins in
// fp16 if there are any, all one stream. 8 bits: [group / 4, 32, 4]. 4 bits: [group / 8, 32, 4],
// low halves hold the first 4 of 8 k, high halves the others. K is padded with q = zero, min = 0 by
// activations that are 0 there.
//
// With a the row's quantised activations, s their scale and t their sum, a group adds
// s * (scale * (sum(q a) - zero t) + min t): the sums are exact integers, the groups are added in
// ascending order in float32, then the row's outliers in ascending order. So a row's result does
// not depend on its batch here either.
#include <algorithm>

#include "activations.h"
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
  bool turned;  // each group times a Hadamard matrix, see activations.h

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

// Where a tile's activations begin: q, and per group the scale and the sum of q.
struct Rows {
  const int8_t* q;
  const float* scale;
  const int32_t* sum;
  int64_t ld_q, ld_group;
};

template <int BITS, int ROWS>
static void quant_tile(const Rows& x, const char* w, const Format& f, int col, float* c,
                       int64_t groups, bool add, const Ahead& ahead) {
  const char* soon = ahead.from;
  Lines others = ahead.others;
  const Lines* more = ahead.more;
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
    if (others.steps <= 0) others = *more++;  // at the beginning of a group, be it a bit late
    others.steps -= steps;
    const char* p = w + col * 4;
    for (int64_t s = 0; s < steps; s++, p += PANEL * 4) {
      __builtin_prefetch(soon, 0, 2);
      __builtin_prefetch(others.from, 0, 2);
      soon += ahead.advance;
      others.from += others.advance;
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

using QuantTile = void (*)(const Rows&, const char*, const Format&, int, float*, int64_t, bool,
                           const Ahead&);

template <int BITS, int... R>
static QuantTile quant_tile_of(int rows, std::integer_sequence<int, R...>) {
  static constexpr QuantTile tiles[] = {&quant_tile<BITS, R + 1>...};
  return tiles[rows - 1];
}

static QuantTile quant_tile_of(int bits, int rows) {
  using Rows = std::make_integer_sequence<int, QUANT_ROWS>;
  return bits == 8 ? quant_tile_of<8>(rows, Rows{}) : quant_tile_of<4>(rows, Rows{});
}

// Column k of a panel of the weight, as floats.
static inline void dequantize(const Format& f, const char* panel, int64_t k, float* out) {
  const int log2 = 63 - __builtin_clzll(uint64_t(f.group));
  const char* block = panel + (k >> log2) * f.group_bytes();
  const int64_t i = k & (f.group - 1);
  const char* q = block + (f.byte_of(i, 0) - i % 4);
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(block + f.q_bytes());
  const int shift = int(i % 4) * 8 + f.shift_of(i);
  const uint32_t mask = f.bits == 8 ? 255 : 15;
  for (int j = 0; j < PANEL; j += W) {
    const vi u = (vi)((*(const vu*)(q + j * 4) >> shift) & mask) - f.zero;
    vf w = to_float(u) * load_fp16(scales + j);
    if (f.has_min) w = w + load_fp16(scales + PANEL + j);
    storef(out + j, w);
  }
}

// The columns that a block's outliers need, [listed, PANEL].
static void dequantize_listed(const Format& f, const char* panel, const Activations& a,
                              int64_t block, float* columns) {
  for (int64_t i = 0; i < a.listed[block]; i++)
    dequantize(f, panel, a.columns[block * a.k + i], columns + i * PANEL);
}

// Adds what row r's outliers contribute to its sums c [PANEL].
static inline void add_outliers(const Activations& a, int64_t r, const float* columns, float* c) {
  const Outlier* o = a.outliers + r * a.most;
  const Outlier* end = o + a.count[r];
  if (o == end) return;
  vf acc[PANEL / W];
#pragma GCC unroll 8
  for (int j = 0; j < PANEL / W; j++) acc[j] = loadf(c + j * W);
  for (; o < end; o += SIDE)
#pragma GCC unroll 4
    for (int i = 0; i < SIDE; i++) {
      const vf value = set(o[i].value);
      const float* w = columns + ptrdiff_t(o[i].column) * PANEL;
#pragma GCC unroll 8
      for (int j = 0; j < PANEL / W; j++) acc[j] = fma(value, loadf(w + j * W), acc[j]);
    }
#pragma GCC unroll 8
  for (int j = 0; j < PANEL / W; j++) storef(c + j * W, acc[j]);
}

static void quant_linear(Pool& pool, const Format& f, const char* w, int64_t k, const void* x,
                         int x_type, int64_t m, const Epilogue& out, int64_t panels,
                         const Tuning& tune) {
  const int64_t ld_q = Activations::pitch(k, f.group), group_bytes = f.group_bytes();
  int64_t block = std::max<int64_t>(tune.block_bytes / ld_q / QUANT_ROWS * QUANT_ROWS,
                                    4 * QUANT_ROWS);
  const int64_t blocks = (m + block - 1) / block;
  block = (m + blocks - 1) / blocks;

  Activations a(pool, m, blocks, k, f.group, f.turned);
  a.fill(pool, x, x_type, m, block);
  const int64_t groups = a.groups;
  const size_t column_bytes = size_t(a.most_listed()) * PANEL * sizeof(float);
  int64_t parts = 1;
  if (m > QUANT_ROWS) parts = (groups * group_bytes + tune.panel_bytes - 1) / tune.panel_bytes;
  const int64_t per_part = (groups + parts - 1) / parts;
  const size_t acc_bytes = size_t(parts > 1 ? block : QUANT_ROWS) * PANEL * sizeof(float);
  pool.reserve(acc_bytes + column_bytes);

  pool.each(blocks * panels, [&](int64_t unit, int thread) {
    const int64_t panel = unit % panels, m0 = unit / panels * block;
    const int64_t rows = std::min(m - m0, block);
    const char* b = w + panel * groups * group_bytes;
    float* acc = static_cast<float*>(pool.scratch(thread, acc_bytes + column_bytes));
    float* columns = acc + acc_bytes / sizeof(float);
    const int64_t tiles = (rows + QUANT_ROWS - 1) / QUANT_ROWS;
    for (int64_t g = 0; g < groups; g += per_part) {
      const int64_t n = std::min(groups - g, per_part);
      const char* here = b + g * group_bytes;
      const int64_t steps = n * f.group / (f.bits == 8 ? 4 : 8);
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t r = rows * t / tiles;
        const int count = int(rows * (t + 1) / tiles - r);
        const int64_t at = (m0 + r) * groups + g;
        const Rows x_rows{a.q + (m0 + r) * ld_q + g * f.group, a.scale + at, a.sum + at, ld_q,
                          groups};
        const char* soon = here + STREAM_AHEAD;
        int64_t advance = group_bytes * n / steps;
        if (tiles > 1) {
          advance = (advance + tiles - 1) / tiles;
          soon = here + n * group_bytes + t * steps * advance;
        }
        float* c = acc + (parts > 1 ? r : 0) * PANEL;
        const QuantTile tile = quant_tile_of(f.bits, count);
        if (g + n == groups) fetch_result(out, m0 + r, count, panel);
        for (int j = 0; j < PANEL; j += COLS)
          tile(x_rows, here, f, j, c + j, n, g > 0,
               beside(pool.later(thread), soon, advance, steps, tiles));
        if (g + n < groups) continue;
        if (t == 0) dequantize_listed(f, b, a, unit / panels, columns);  // it is in cache now
        for (int i = 0; i < count; i++) add_outliers(a, m0 + r + i, columns, c + i * PANEL);
        store_result(out, c, m0 + r, count, panel);
      }
    }
  });
}

}  // namespace xl

using namespace xl;

XL_API int64_t xl_quant_bytes(int bits, int64_t group, int has_min, int64_t n, int64_t k,
                              int gated) {
  const Format f{bits, group, has_min != 0, 0, false};
  return panels_of(n, gated) * f.groups(k) * f.group_bytes();
}

// q [N, K] unsigned bytes, scales and mins (or null) [N, groups] fp16
XL_API int xl_quant_pack(Pool* pool, int bits, int64_t group, int zero, const uint8_t* q,
                         const uint16_t* scales, const uint16_t* mins, int64_t n, int64_t k,
                         int gated, char* out) {
  return guarded(pool, [&] {
    const Format f{bits, group, mins != nullptr, zero, false};
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

// Weights of a float type to 8 bits, turned and symmetric: scale = largest magnitude / 127, rounded
// to fp16 before it divides.
XL_API int xl_quant_from(Pool* pool, int type, const void* w, int64_t group, int64_t n, int64_t k,
                         int gated, char* out) {
  return guarded(pool, [&] {
    if (group != TURNED) throw Unsupported();
    const Format f{8, group, false, 128, true};
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
          float v[TURNED] = {}, top = 0.0f;
          for (int64_t i = 0; i < count; i++) v[i] = load_one(w, at + i, type);
          turn(v);
          for (float y : v) top = std::max(top, std::fabs(y));
          // What is not finite is in every element now: such a group shall give NaN, not numbers.
          const bool bad = v[0] * 0.0f != 0.0f;
          const uint16_t scale = fp16_of(bad ? NAN : std::min(top / 127.0f, 65504.0f));
          reinterpret_cast<uint16_t*>(block + f.q_bytes())[col] = scale;
          const float by = scale ? 1.0f / fp16_to_float(scale) : 0.0f;
          for (int64_t i = 0; i < group; i++) {
            const float y = bad ? 0.0f : std::nearbyint(v[i] * by);
            block[f.byte_of(i, col)] = char(uint8_t(128 + std::min(std::max(y, -127.0f), 127.0f)));
          }
        }
      }
    });
  });
}

// A call's format, if it is one that activations.h has room for and shifts by.
template <class Call>
static Format format_of(const Call& call) {
  const int64_t group = call.group;
  if (group < W || group > MAX_GROUP || (group & (group - 1)) || (call.turned && group != TURNED))
    throw Unsupported();
  return Format{int(call.bits), group, call.has_min != 0, int(call.zero), call.turned != 0};
}

// Rows `ids` of quantised, not gated weights as float32.
struct QuantGatherCall {
  int64_t bits, group, has_min, zero, turned, w, n, k, ids, count, out;
};

XL_API int xl_quant_gather(Pool* pool, const QuantGatherCall* call) {
  return guarded(pool, [&] {
    const int bits = int(call->bits), has_min = int(call->has_min), zero = int(call->zero);
    const int64_t group = call->group, n = call->n, k = call->k, count = call->count;
    const auto* w = static_cast<const char*>(address(call->w));
    const auto* ids = static_cast<const int32_t*>(address(call->ids));
    auto* out = static_cast<float*>(writable(call->out));
    const Format f = format_of(*call);
    const int64_t groups = f.groups(k);
    pool->each(count, [&](int64_t t, int) {
      const int64_t id = ids[t] < 0 ? 0 : ids[t] < n ? ids[t] : n - 1, col = id % PANEL;
      for (int64_t i = 0; i < k; i += bits == 8 ? 4 : 8)  // a line each
        __builtin_prefetch(w + (id / PANEL * groups + i / group) * f.group_bytes() +
                           f.byte_of(i % group, col));
      for (int64_t g = 0; g < groups; g++) {
        const char* block = w + (id / PANEL * groups + g) * f.group_bytes();
        const uint16_t* s = reinterpret_cast<const uint16_t*>(block + f.q_bytes());
        const float scale = fp16_to_float(s[col]);
        const float min = has_min ? fp16_to_float(s[PANEL + col]) : 0.0f;
        float v[MAX_GROUP];
        for (int64_t i = 0; i < group; i++) {
          const int q =
              uint8_t(block[f.byte_of(i, col)]) >> f.shift_of(i) & (bits == 8 ? 255 : 15);
          v[i] = scale * float(q - zero) + min;
        }
        if (f.turned) turn(v);
        memcpy(out + t * k + g * group, v, size_t(std::min(k - g * group, group)) * sizeof(float));
      }
    }, count < 32);
  });
}

struct QuantLinearCall {
  int64_t bits, group, has_min, zero, turned, w, n, k;
  ProductCall product;
};

XL_API int xl_quant_linear(Pool* pool, const QuantLinearCall* call) {
  return guarded(pool, [&] {
    const ProductCall& p = call->product;
    if (p.m == 0 || call->n == 0) return;
    const Tuning tune{p.block_kib * 1024, p.panel_kib * 1024};
    const Format f = format_of(*call);
    quant_linear(*pool, f, static_cast<const char*>(address(call->w)), call->k, address(p.x),
                 int(p.x_type), p.m, p.epilogue(call->n), panels_of(call->n, p.act != ACT_NONE),
                 tune);
  });
}

XL_STRUCT(xl_quant_gather, QuantGatherCall)
XL_STRUCT(xl_quant_linear, QuantLinearCall)
