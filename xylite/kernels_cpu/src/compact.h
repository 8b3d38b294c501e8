// Panels of bf16 weights in three quarters of their bytes, exactly.
//
// Nearly all exponents of a panel's weights are among 15 neighbours. So weights are taken 2 steps
// (128 of them) at a time, a group, and written as sign and mantissa, a byte each, and half a byte
// that says which exponent: 192 bytes. A group with any other exponent stays as it was, 256 bytes.
// Unpacked, a panel is what linear.cpp has for bf16, bit for bit.
//
// A packed weight: where its panels begin [panels] int64, then the panels, each a head (the least
// exponent; from byte 8 a bit for each group, 1 = as it was) and its groups, in ascending k.
#pragma once
#include "mm.h"
#include "panels.h"

namespace xl {

constexpr int GROUP_STEPS = 2;
constexpr int STEP_WEIGHTS = PANEL * 2;  // of a step: 2 k of each column
constexpr int GROUP_K = GROUP_STEPS * 2;
constexpr ptrdiff_t SMALL = GROUP_STEPS * STEP_WEIGHTS * 3 / 2;  // bytes of a group
constexpr ptrdiff_t WHOLE = GROUP_STEPS * STEP_WEIGHTS * 2;
constexpr int WINDOW = 15;  // exponents: codes 1 to 15; code 0 is exponent 0
constexpr int FLAGS_AT = 8;

static inline ptrdiff_t groups_of(int64_t k) { return (k + GROUP_K - 1) / GROUP_K; }

static inline ptrdiff_t head_bytes(ptrdiff_t groups) {
  return (FLAGS_AT + (groups + 7) / 8 + 63) / 64 * 64;
}

static inline bool is_whole(const uint8_t* head, ptrdiff_t group) {
  return head[FLAGS_AT + group / 8] >> group % 8 & 1;
}

// Where weight u of a step lies among the step's bytes: as the instructions that interleave bytes
// within 16 want it.
static inline int byte_of(int u) { return u % 32 / 8 * 16 + u / 32 * 8 + u % 8; }

static inline const uint8_t* panel_at(const void* weight, int64_t panel) {
  return static_cast<const uint8_t*>(weight) + static_cast<const int64_t*>(weight)[panel];
}

#if defined(XL_AVX512) && defined(__AVX512BF16__)

// Reads the groups of a panel, one after the other.
struct Groups {
  const uint8_t* at;  // the next one
  const uint8_t* head;
  ptrdiff_t index = 0;
  __m512i upper, last;  // of a code: its exponent's upper 7 bits; its last bit, as bit 7

  Groups(const uint8_t* panel, ptrdiff_t groups) : at(panel + head_bytes(groups)), head(panel) {
    const __m128i codes = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i e = _mm_maskz_add_epi8(0xfffe, codes, _mm_set1_epi8(char(panel[0] - 1)));
    const __m128i sign = _mm_set1_epi8(char(0x80));
    upper = _mm512_broadcast_i32x4(_mm_andnot_si128(sign, _mm_srli_epi16(e, 1)));
    last = _mm512_broadcast_i32x4(_mm_and_si128(sign, _mm_slli_epi16(e, 7)));
  }

  // The weights of the next group: [step][first or second half of the columns].
  inline __attribute__((always_inline)) void next(__m512i w[GROUP_STEPS][2]) {
    if (__builtin_expect(is_whole(head, index), 0)) {
      for (int i = 0; i < 4; i++) w[i / 2][i % 2] = _mm512_loadu_si512(at + 64 * i);
      at += WHOLE;
    } else {
      const __m512i low = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(char(0x80));
      const __m512i codes = _mm512_loadu_si512(at + GROUP_STEPS * STEP_WEIGHTS);
      for (int s = 0; s < GROUP_STEPS; s++) {
        const __m512i m = _mm512_loadu_si512(at + s * STEP_WEIGHTS);
        const __m512i c = _mm512_and_si512(s ? _mm512_srli_epi16(codes, 4) : codes, low);
        // upper | (m & sign), last | (m & ~sign)
        const __m512i u = _mm512_shuffle_epi8(upper, c), l = _mm512_shuffle_epi8(last, c);
        const __m512i high = _mm512_ternarylogic_epi32(u, m, sign, 0xf8);
        const __m512i rest = _mm512_ternarylogic_epi32(l, m, sign, 0xf4);
        w[s][0] = _mm512_unpacklo_epi8(rest, high);
        w[s][1] = _mm512_unpackhi_epi8(rest, high);
      }
      at += SMALL;
    }
    index++;
  }
};

// mm_tile over whole groups, a panel wide. KEEP: what it unpacks goes to `kept`, for other rows,
// and it fetches `others` beside the weights: whole groups too, that add up to `steps`.
template <int ROWS, bool KEEP>
static void unpacking_tile(const uint16_t* a, ptrdiff_t lda, Groups& groups, float* c,
                           ptrdiff_t ldc, ptrdiff_t steps, bool add, uint16_t* kept,
                           const Lines* others) {
  static_assert(COLS == PANEL, "");
  Groups g = groups;
  vf acc[ROWS][NV];
  const uint16_t* p[(ROWS + 2) / 3];
#pragma GCC unroll 16
  for (int i = 0; i < (ROWS + 2) / 3; i++) p[i] = a + 3 * i * lda;
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) acc[r][j] = add ? loadf(c + r * ldc + j * W) : vf{};
  for (ptrdiff_t at = 0; at < steps; others++) {
    const ptrdiff_t end = at + others->steps;
    const char* other = others->from;
    for (; at < end; at += GROUP_STEPS) {
      for (int j = 0; j < 3; j++) prefetch(g.at + STREAM_AHEAD + 64 * j);
      __m512i w[GROUP_STEPS][2];
      g.next(w);
#pragma GCC unroll 2
      for (int s = 0; s < GROUP_STEPS; s++) {
        if (KEEP) {
          __builtin_prefetch(other, 0, 2);
          other += others->advance;
          _mm512_storeu_si512(kept, w[s][0]);
          _mm512_storeu_si512(kept + STEP_WEIGHTS / 2, w[s][1]);
          kept += STEP_WEIGHTS;
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          // As in mm_tile, which has four registers less for weights and tables.
          if constexpr (ROWS > 7) asm volatile("" ::: "memory");
          int32_t pair;
          memcpy(&pair, &p[r / 3][(r % 3) * lda + 2 * (at + s)], 4);
          const __m512i x = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
          for (int j = 0; j < NV; j++)
            acc[r][j] = (vf)_mm512_dpbf16_ps((__m512)acc[r][j], (__m512bh)x, (__m512bh)w[s][j]);
        }
      }
    }
  }
  groups.at = g.at;
  groups.index = g.index;
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) storef(c + r * ldc + j * W, acc[r][j]);
}

using UnpackingTile = void (*)(const uint16_t*, ptrdiff_t, Groups&, float*, ptrdiff_t, ptrdiff_t,
                               bool, uint16_t*, const Lines*);

template <bool KEEP>
struct UnpackingTiles {
  UnpackingTile tile[MAX_ROWS + 1];
  template <int... R>
  constexpr explicit UnpackingTiles(std::integer_sequence<int, R...>)
      : tile{nullptr, &unpacking_tile<R + 1, KEEP>...} {}
  constexpr UnpackingTiles() : UnpackingTiles(std::make_integer_sequence<int, MAX_ROWS>{}) {}
};

template <bool KEEP>
constexpr UnpackingTiles<KEEP> UNPACKING{};

#endif

}  // namespace xl
