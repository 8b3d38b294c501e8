// Rows of activations in 8 bits, one scale for each group of a row.
//
// A transformer's activations have channels that are ten times as large as the others, and some a
// hundred times. Such a value sets the step of its whole group, and the others lose most of their
// bits to it: on short chats, more than four fifths of the divergence that 8-bit activations cause.
// There are two ways out, by whose the weights are.
//
// Turned: where the weights are quantised here, both they and the activations are multiplied by a
// Hadamard matrix, group by group. Products stay the same, and a value that stood out is a 64th
// part of each square in its group (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456, within groups).
//
// Outliers: where the weights come as they are, or are put back into the groups of a file (4 bits),
// values beyond FAR times the root mean square of their row are left out of their group (0 there),
// and their products are added in float32.
//
// Either depends on nothing but the row.
#pragma once
#include <algorithm>

#include "pool.h"
#include "rows.h"

namespace xl {

constexpr int TURNED = 64;  // values that are turned together
constexpr int MAX_GROUP = 256;
constexpr float FAR = 4.0f;

// Lanes i and i ^ H of a vector as their sum and their difference.
template <int H>
static inline vf butterfly(vf v) {
  vf other;
#if defined(XL_AVX512)
  const __m512 x = (__m512)v;
  if constexpr (H == 8) other = (vf)_mm512_shuffle_f32x4(x, x, 0x4e);
  if constexpr (H == 4) other = (vf)_mm512_shuffle_f32x4(x, x, 0xb1);
  if constexpr (H == 2) other = (vf)_mm512_permute_ps(x, 0x4e);
  if constexpr (H == 1) other = (vf)_mm512_permute_ps(x, 0xb1);
#elif defined(XL_AVX2)
  const __m256 x = (__m256)v;
  if constexpr (H == 4) other = (vf)_mm256_permute2f128_ps(x, x, 1);
  if constexpr (H == 2) other = (vf)_mm256_permute_ps(x, 0x4e);
  if constexpr (H == 1) other = (vf)_mm256_permute_ps(x, 0xb1);
#else
  for (int i = 0; i < W; i++) other[i] = v[i ^ H];
#endif
  vf sign;
  for (int i = 0; i < W; i++) sign[i] = i & H ? -1.0f : 1.0f;
  return fma(v, sign, other);
}

// TURNED values times the Hadamard matrix, not scaled: twice gives TURNED times the values.
static inline void turn(vf* v) {
  constexpr int N = TURNED / W;
#pragma GCC unroll 4
  for (int h = N / 2; h; h /= 2)
#pragma GCC unroll 16
    for (int i = 0; i < N; i++)
      if (!(i & h)) {
        const vf a = v[i], b = v[i + h];
        v[i] = a + b;
        v[i + h] = a - b;
      }
#pragma GCC unroll 16
  for (int i = 0; i < N; i++) {
    if constexpr (W == 16) v[i] = butterfly<8>(v[i]);
    if constexpr (W >= 8) v[i] = butterfly<4>(v[i]);
    v[i] = butterfly<1>(butterfly<2>(v[i]));
  }
}

// The same in memory, scaled by 1 / 8: its own inverse.
static inline void turn(float* x) {
  vf v[TURNED / W];
  for (int i = 0; i < TURNED / W; i++) v[i] = loadf(x + i * W);
  turn(v);
  for (int i = 0; i < TURNED / W; i++) storef(x + i * W, v[i] * 0.125f);
}

// A value that is not in its group, and its column: k, then where k stands in its block's list.
struct Outlier {
  int32_t column;
  float value;
};

constexpr int SIDE = 4;  // a row's outliers, padded with zeros, are a multiple of it

// Rows [M, K], in blocks of rows that share a list of the columns their outliers need. Room for a
// row's outliers is a bound, not a choice: the squares of n values beyond FAR times the root mean
// square of k are more than n * FAR^2 / k of all.
struct Activations {
  int8_t* q;          // [M, ld_q]
  float* scale;       // [M, groups]
  int32_t* sum;       // [M, groups], of q
  int32_t* count;     // [M] outliers
  Outlier* outliers;  // [M, most], ascending k
  int32_t* columns;   // [blocks, K] lists
  int32_t* listed;    // [blocks] their lengths
  int64_t k, group, groups, blocks, most;
  bool turned;
  int64_t ld_q;

  // Bytes from row to row of q: apart in cache sets.
  static int64_t pitch(int64_t k, int64_t group) {
    const int64_t padded = (k + group - 1) / group * group;
    return padded % 512 ? padded : padded + 64;
  }

  Activations(Pool& pool, int64_t m, int64_t blocks, int64_t k, int64_t group, bool turned)
      : k(k), group(group), groups((k + group - 1) / group), blocks(blocks),
        most(turned ? 0 : (k / int64_t(FAR * FAR) + SIDE) / SIDE * SIDE), turned(turned),
        ld_q(pitch(k, group)) {
    size_t bytes = 0;
    const auto room = [&](int64_t count, size_t size) {
      const size_t at = bytes;
      bytes += (size_t(count) * size + 63) / 64 * 64;
      return at;
    };
    const size_t at[] = {room(m * ld_q, 1), room(m * groups, 4), room(m * groups, 4), room(m, 4),
                         room(m * most, sizeof(Outlier)), room(turned ? 0 : blocks * k, 4),
                         room(turned ? 0 : blocks * k, 4), room(blocks, 4)};
    char* memory = static_cast<char*>(pool.shared(0, bytes));
    q = reinterpret_cast<int8_t*>(memory);
    scale = reinterpret_cast<float*>(memory + at[1]);
    sum = reinterpret_cast<int32_t*>(memory + at[2]);
    count = reinterpret_cast<int32_t*>(memory + at[3]);
    outliers = reinterpret_cast<Outlier*>(memory + at[4]);
    columns = reinterpret_cast<int32_t*>(memory + at[5]);
    place_ = reinterpret_cast<int32_t*>(memory + at[6]);
    listed = reinterpret_cast<int32_t*>(memory + at[7]);
  }

  // x [M, K], in blocks of `block` rows. A value that is not finite makes a scale NaN, and so the
  // whole of its row's result.
  void fill(Pool& pool, const void* x, int type, int64_t m, int64_t block) {
    const int64_t chunk = 8;
    pool.each((m + chunk - 1) / chunk, [&](int64_t u, int) {
      for (int64_t r = u * chunk; r < m && r < (u + 1) * chunk; r++) quantize(r, x, type);
    }, m * k < 8192);
    pool.each(blocks, [&](int64_t i, int) {
      list_columns(i, i * block, std::min(m, (i + 1) * block));
    }, turned);
  }

  // Length of the longest list.
  int32_t most_listed() const { return *std::max_element(listed, listed + blocks); }

 private:
  int32_t* place_;

  void quantize(int64_t r, const void* x, int type) {
    count[r] = 0;
    if (turned) {
      for (int64_t g = 0; g < groups; g++) quantize_turned(r, g, x, type);
      return;
    }
    vf squares = {};
    for (int64_t i = 0; i < k; i += W) {
      const vf v = load(x, r * k + i, type, k - i);
      squares = fma(v, v, squares);
    }
    const float limit = FAR * std::sqrt(xl::sum(squares) / float(k));
    for (int64_t g = 0; g < groups; g++) quantize_group(r, g, x, type, limit);
  }

  // The list of a block, once its rows [first, end) are quantised.
  void list_columns(int64_t block, int64_t first, int64_t end) {
    listed[block] = 0;
    if (turned || std::all_of(count + first, count + end, [](int32_t c) { return !c; })) return;
    int32_t* list = columns + block * k;
    int32_t* place = place_ + block * k;  // of a column in the list
    int32_t n = 0;
    memset(place, 0xff, size_t(k) * 4);
    for (int64_t r = first; r < end; r++) {
      Outlier* o = outliers + r * most;
      for (int i = 0; i < count[r]; i++) {
        int32_t& at = place[o[i].column];
        if (at < 0) {
          at = n;
          list[n++] = o[i].column;
        }
        o[i].column = at;
      }
      for (; count[r] % SIDE; count[r]++) o[count[r]] = {0, 0.0f};
    }
    listed[block] = n;
  }

  static vf load(const void* x, int64_t at, int type, int64_t left) {
    return left >= W ? load_as(x, at, type) : load_some(x, at, type, int(left > 0 ? left : 0));
  }

  static vf magnitude(vf v) { return (vf)(bits(v) & 0x7fffffff); }

  void quantize_turned(int64_t r, int64_t g, const void* x, int type) {
    constexpr int N = TURNED / W;
    const int64_t first = g * TURNED;
    vf v[N], top_of = {};
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) v[i] = load(x, r * k + first + i * W, type, k - first - i * W);
    turn(v);
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) top_of = vmax(magnitude(v[i]), top_of);
    // what is not finite is now in every element
    const float top = max_of(top_of) + v[0][0] * 0.0f;
    scale[r * groups + g] = top * (0.125f / 127.0f);
    round(r, g, v, N, top);
  }

  void quantize_group(int64_t r, int64_t g, const void* x, int type, float limit) {
    const int64_t first = g * group;
    const int n = int(group / W);
    vf v[MAX_GROUP / W], top_of = {}, bad = {};
    for (int i = 0; i < n; i++) {
      v[i] = load(x, r * k + first + i * W, type, k - first - i * W);
      top_of = vmax(magnitude(v[i]), top_of);
      bad = bad + v[i] * 0.0f;
    }
    float top = max_of(top_of);
    if (top > limit) top = take_outliers(r, first, v, n, limit);
    top += xl::sum(bad);
    scale[r * groups + g] = top * (1.0f / 127.0f);
    round(r, g, v, n, top);
  }

  // Moves what is beyond the limit from v to the row's outliers; the largest magnitude left.
  float take_outliers(int64_t r, int64_t first, vf* v, int n, float limit) {
    vf left = {};
    for (int i = 0; i < n; i++) {
      if (max_of(magnitude(v[i])) > limit) {
        float y[W];
        storef(y, v[i]);
        for (int j = 0; j < W; j++) {
          if (!(std::fabs(y[j]) > limit) || count[r] == most) continue;
          outliers[r * most + count[r]++] = {int32_t(first + i * W + j), y[j]};
          y[j] = 0.0f;
        }
        v[i] = loadf(y);
      }
      left = vmax(magnitude(v[i]), left);
    }
    return max_of(left);
  }

  // n vectors, the largest magnitude `top` to 127.
  void round(int64_t r, int64_t g, const vf* v, int n, float top) {
    const vf inverse = set(top > 0.0f ? 127.0f / top : 0.0f);
    int8_t* to = q + r * ld_q + g * group;
    vi total = {};
    for (int i = 0; i < n; i++) {
      // adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits
      const vi y = bits(fma(v[i], inverse, set(0x1.8p23f))) - 0x4b400000;
      total += y;
#if defined(XL_AVX512)
      _mm_storeu_si128((__m128i*)(to + i * W), _mm512_cvtepi32_epi8((__m512i)y));
#else
      for (int j = 0; j < W; j++) to[i * W + j] = int8_t(y[j]);
#endif
    }
#if defined(XL_AVX512)
    sum[r * groups + g] = _mm512_reduce_add_epi32((__m512i)total);
#else
    int32_t s = 0;
    for (int j = 0; j < W; j++) s += total[j];
    sum[r * groups + g] = s;
#endif
  }
};

}  // namespace xl
