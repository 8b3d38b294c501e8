// Register tiles of attention beside those of mm.h: over a run of blocks, and of one vector.
#pragma once
#include "mm.h"

namespace xl {

// Rows of b that follow one another in memory.
template <class T>
struct Run {
  const typename T::B* b;
  ptrdiff_t steps;
};

// c[ROWS x COLS] = a[ROWS x K] * b[K x COLS], b's rows in runs, `offset` elements from their start.
// The sums stay in registers from the first run to the last, and nothing else takes any: this is
// what many rows at once spend their time in.
template <class T, int ROWS>
static void run_tile(const typename T::A* a, ptrdiff_t lda, const Run<T>* runs, const Run<T>* end,
                     ptrdiff_t offset, ptrdiff_t ldb, float* c, ptrdiff_t ldc) {
#if defined(XL_AVX512) && defined(__AVX512BF16__)
  if constexpr (std::is_same<T, BF16Dot>::value) {
    __m512 acc[ROWS][NV];
    const uint16_t* p[(ROWS + 2) / 3];
#pragma GCC unroll 16
    for (int i = 0; i < (ROWS + 2) / 3; i++) p[i] = a + 3 * i * lda;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) acc[r][j] = _mm512_setzero_ps();
    for (; runs != end; runs++) {
      const uint16_t* b = runs->b + offset;
      for (ptrdiff_t s = runs->steps; s > 0; s--, b += ldb) {
        __m512i w[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) w[j] = _mm512_loadu_si512(b + 2 * j * W);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          int32_t pair;
          memcpy(&pair, p[r / 3] + (r % 3) * lda, 4);
          const __m512i x = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
          for (int j = 0; j < NV; j++)
            acc[r][j] = _mm512_dpbf16_ps(acc[r][j], (__m512bh)x, (__m512bh)w[j]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < (ROWS + 2) / 3; i++) p[i] += 2;
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) _mm512_storeu_ps(c + r * ldc + j * W, acc[r][j]);
    return;
  }
#endif
  for (bool add = false; runs != end; a += runs->steps * T::STEP, runs++, add = true) {
    const typename T::B* b = runs->b + offset;
    mm_tile<T, ROWS, NV>(a, lda, b, ldb, c, ldc, runs->steps, add, nothing(b));
  }
}

template <class T>
using RunFn = void (*)(const typename T::A*, ptrdiff_t, const Run<T>*, const Run<T>*, ptrdiff_t,
                       ptrdiff_t, float*, ptrdiff_t);

// run[r] multiplies r rows with runs of b; narrow[r] does W columns, for what is left at the
// end.
template <class T>
struct AttentionTiles {
  RunFn<T> run[MAX_ROWS + 1];
  TileFn<T> narrow[MAX_ROWS + 1];
  template <int... R>
  constexpr explicit AttentionTiles(std::integer_sequence<int, R...>)
      : run{nullptr, &run_tile<T, R + 1>...}, narrow{nullptr, &mm_tile<T, R + 1, 1>...} {}
  constexpr AttentionTiles() : AttentionTiles(std::make_integer_sequence<int, MAX_ROWS>{}) {}
};

template <class T>
constexpr AttentionTiles<T> ATTENTION_TILES{};

// What a later product reads: rows of `bytes` bytes.
struct Piece {
  const char* from;
  ptrdiff_t rows, bytes, stride;

  void fetch() {
    for (; rows > 0; rows--, from += stride)
      for (ptrdiff_t i = 0; i < bytes; i += 64) prefetch(from + i);
  }
  // What a tile that reads `width` bytes in a step, from `here` on, fetches of it in so many steps.
  // Nothing if the piece has fewer rows, or others than such: then all of it is asked for at once.
  Ahead during(ptrdiff_t steps, ptrdiff_t width, const void* here) {
    if (rows < steps || bytes != width) {
      fetch();
      return nothing(here);
    }
    const Ahead ahead{from, stride, {from + width / 2, stride, steps}};
    from += steps * stride;
    rows -= steps;
    return ahead;
  }
};

// 2^x for x <= 0 to 1e-4, enough for what is rounded to bf16; 2^-inf is 0; NaN stays NaN.
static inline vf exp2_rough(vf x) {
#if defined(XL_AVX512)
  const vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  vf p = fma(f, set(7.70672e-2f), set(2.2764482e-1f));
  p = fma(p, f, set(6.9511682e-1f));
  p = fma(p, f, set(1.0f));
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  return vexp2_short(x);
#endif
}

}  // namespace xl
