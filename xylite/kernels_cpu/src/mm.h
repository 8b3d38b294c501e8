// The register tile: c[rows x COLS] (+)= a[rows x K] * b[K x COLS], for every type of weight.
//
// Each element of c is one chain of fused multiply-adds over ascending k (bf16 dot: over ascending
// pairs of k), whatever the number of rows, and a chain may be put down in memory and taken up
// again. So a result does not depend on M, on tile sizes or on threads.
#pragma once
#include <type_traits>
#include <utility>

#include "ahead.h"
#include "vec.h"

namespace xl {

// Weights come 2 k at a time where their type has 16 bits and a dot product: one 32-bit lane holds
// k and k + 1 of a column. `STEP` is the k per row of b, `A` the type of the other operand.

struct F32 {
  using A = float;
  using B = float;
  static constexpr int STEP = 1;
  static constexpr int LANE = 1;  // elements of B per column and step
};

struct F16 {
  using A = float;
  using B = uint16_t;
  static constexpr int STEP = 1;
  static constexpr int LANE = 1;
};

struct BF16 {  // widened in registers, fp32 arithmetic
  using A = float;
  using B = uint16_t;
  static constexpr int STEP = 2;
  static constexpr int LANE = 2;
};

struct BF16Dot {  // bf16 x bf16 summed in fp32 by the machine's own instruction
  using A = uint16_t;
  using B = uint16_t;
  static constexpr int STEP = 2;
  static constexpr int LANE = 2;
};

static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// lda, ldb in elements; b's row s starts at b + s * ldb; steps counts rows of b.
template <class T, int ROWS, int NV>
static void mm_tile(const typename T::A* a, ptrdiff_t lda, const typename T::B* b, ptrdiff_t ldb,
                    float* c, ptrdiff_t ldc, ptrdiff_t steps, bool add, Ahead ahead) {
  const char* soon = ahead.from;
  vf acc[ROWS][NV];
  // Explicit row pointers in threes: few registers, simple addresses.
  const typename T::A* p[(ROWS + 2) / 3];
#pragma GCC unroll 16
  for (int i = 0; i < (ROWS + 2) / 3; i++) p[i] = a + 3 * i * lda;
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) acc[r][j] = add ? loadf(c + r * ldc + j * W) : vf{};

  Lines others = ahead.others;
  const Lines* more = ahead.more;
  for (ptrdiff_t s = 0; s < steps;) {
    const ptrdiff_t end = std::min(steps - s, others.steps) + s;
    const char* other = others.from;
#pragma GCC unroll 2
    for (; s < end; s++) {
#pragma GCC unroll 4
      for (int j = 0; j < NV / 2; j++) {
        if (ahead.is_near) {
          prefetch(soon + 64 * j);
          prefetch(other + 64 * j);
        } else {
          __builtin_prefetch(soon + 64 * j, 0, 2);
          __builtin_prefetch(other + 64 * j, 0, 2);
        }
      }
      soon += ahead.advance;
      other += others.advance;
      if constexpr (std::is_same<T, F32>::value || std::is_same<T, F16>::value) {
        vf w[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) {
          if constexpr (std::is_same<T, F32>::value)
            w[j] = loadf(b + j * W);
          else
            w[j] = load_fp16(b + j * W);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          const vf x = set(p[r / 3][(r % 3) * lda + s]);
#pragma GCC unroll 4
          for (int j = 0; j < NV; j++) acc[r][j] = fma(x, w[j], acc[r][j]);
        }
      } else if constexpr (std::is_same<T, BF16>::value) {
        vf even[NV], odd[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) {
          const vu w = *(const vu*)(b + 2 * j * W);
          even[j] = (vf)(w << 16);
          odd[j] = (vf)(w & 0xffff0000u);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          const vf x = set(p[r / 3][(r % 3) * lda + 2 * s]);
#pragma GCC unroll 4
          for (int j = 0; j < NV; j++) acc[r][j] = fma(x, even[j], acc[r][j]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          const vf x = set(p[r / 3][(r % 3) * lda + 2 * s + 1]);
#pragma GCC unroll 4
          for (int j = 0; j < NV; j++) acc[r][j] = fma(x, odd[j], acc[r][j]);
        }
      } else {
#if defined(XL_AVX512) && defined(__AVX512BF16__)
        __m512i w[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) w[j] = _mm512_loadu_si512(b + 2 * j * W);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          // Else the compiler loads all rows first, which takes registers from the sums.
          if constexpr (ROWS * (NV + 1) + NV > 32) asm volatile("" ::: "memory");
          int32_t pair;
          memcpy(&pair, &p[r / 3][(r % 3) * lda + 2 * s], 4);
          const __m512i x = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
          for (int j = 0; j < NV; j++)
            acc[r][j] = (vf)_mm512_dpbf16_ps((__m512)acc[r][j], (__m512bh)x, (__m512bh)w[j]);
        }
#endif
      }
      b += ldb;
    }
    if (s < steps) others = *more++;
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) storef(c + r * ldc + j * W, acc[r][j]);
}

template <class T>
using TileFn = void (*)(const typename T::A*, ptrdiff_t, const typename T::B*, ptrdiff_t, float*,
                        ptrdiff_t, ptrdiff_t, bool, Ahead);

// tile[r] multiplies r rows, 1 <= r <= MAX_ROWS: M is padded to nothing. wide[r] does so for twice
// the columns, r <= MAX_ROWS / 2: few rows are too few chains to fill the pipelines.
template <class T>
struct Tiles {
  TileFn<T> tile[MAX_ROWS + 1];
  TileFn<T> wide[MAX_ROWS / 2 + 1];
  template <int... R, int... Q>
  constexpr Tiles(std::integer_sequence<int, R...>, std::integer_sequence<int, Q...>)
      : tile{nullptr, &mm_tile<T, R + 1, NV>...}, wide{nullptr, &mm_tile<T, Q + 1, 2 * NV>...} {}
  constexpr Tiles()
      : Tiles(std::make_integer_sequence<int, MAX_ROWS>{},
              std::make_integer_sequence<int, MAX_ROWS / 2>{}) {}
};

template <class T>
constexpr Tiles<T> TILES{};

}  // namespace xl
