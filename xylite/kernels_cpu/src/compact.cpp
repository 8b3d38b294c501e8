// Packing bf16 weights into compact panels, and reading rows of them.
#include "compact.h"

#include "api.h"
#include "rows.h"

namespace xl {

// Rows `ids` of a weight that is not gated, as float32.
struct CompactGatherCall {
  int64_t w, n, k, ids, count, out;
};

}  // namespace xl

#if defined(XL_AVX512) && defined(__AVX512BF16__)

namespace xl {

constexpr int64_t SAMPLED = 2048;  // weights of a panel that its window is chosen by

// The least exponent of the window that most weights are in.
static int window_of(const uint16_t* weights, int64_t count) {
  int64_t seen[256] = {0};
  // An odd stride: all columns have their turn.
  for (int64_t i = 0; i < count; i += count / SAMPLED | 1) seen[weights[i] >> 7 & 0xff]++;
  int best = 1;
  int64_t most = -1, in = 0;
  for (int e = 1; e < 256; e++) {
    in += seen[e];
    if (e > WINDOW) in -= seen[e - WINDOW];
    if (e >= WINDOW && in > most) most = in, best = e - WINDOW + 1;
  }
  return best;
}

// A panel as linear.cpp has it, in whole groups; the thread's scratch memory holds it.
static const uint16_t* plain_panel(Pool& pool, int thread, const void* src, int64_t n, int64_t k,
                                   bool gated, int64_t panel) {
  const int64_t steps = groups_of(k) * GROUP_STEPS;
  auto* to = static_cast<uint16_t*>(pool.scratch(thread, size_t(steps * STEP_WEIGHTS) * 2));
  if (k % GROUP_K) memset(to + (steps - GROUP_STEPS) * STEP_WEIGHTS, 0, size_t(WHOLE));
  pack_panel<uint16_t, 2>(static_cast<const uint16_t*>(src), n, k, gated, panel, to);
  return to;
}

// Codes of 32 weights, 1 to WINDOW; 0 of exponent 0; greater if the window lacks the exponent.
static inline __m512i codes_of(__m512i w, int least) {
  const __m512i e = _mm512_and_si512(_mm512_srli_epi16(w, 7), _mm512_set1_epi16(0xff));
  const __m512i code = _mm512_sub_epi16(e, _mm512_set1_epi16(short(least - 1)));
  const __mmask32 is_none = _mm512_cmple_epi16_mask(code, _mm512_setzero_si512());
  const __m512i beyond = _mm512_mask_mov_epi16(code, is_none, _mm512_set1_epi16(WINDOW + 1));
  return _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(e, e), beyond);
}

static bool group_fits(const uint16_t* group, int least) {
  __m512i most = _mm512_setzero_si512();
  for (int i = 0; i < GROUP_STEPS * STEP_WEIGHTS; i += 32)
    most = _mm512_max_epi16(most, codes_of(_mm512_loadu_si512(group + i), least));
  return !_mm512_cmpgt_epi16_mask(most, _mm512_set1_epi16(WINDOW));
}

// The instruction that packs bytes is the inverse of those that interleave them.
static void pack_group(const uint16_t* from, int least, uint8_t* to) {
  const __m512i sign = _mm512_set1_epi16(0x80), mantissa = _mm512_set1_epi16(0x7f);
  __m512i both = _mm512_setzero_si512();
  for (int s = 0; s < GROUP_STEPS; s++, from += STEP_WEIGHTS, to += STEP_WEIGHTS) {
    __m512i rest[2], code[2];
    for (int j = 0; j < 2; j++) {
      const __m512i w = _mm512_loadu_si512(from + 32 * j);
      rest[j] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(w, 8), sign),
                                _mm512_and_si512(w, mantissa));
      code[j] = codes_of(w, least);
    }
    _mm512_storeu_si512(to, _mm512_packus_epi16(rest[0], rest[1]));
    const __m512i codes = _mm512_packus_epi16(code[0], code[1]);
    both = _mm512_or_si512(both, s ? _mm512_slli_epi16(codes, 4) : codes);
  }
  _mm512_storeu_si512(to, both);
}

static uint16_t weight_of(const uint8_t* group, bool whole, int least, int step, int u) {
  if (whole) {
    uint16_t w;
    memcpy(&w, group + 2 * (step * STEP_WEIGHTS + u), 2);
    return w;
  }
  const int m = group[step * STEP_WEIGHTS + byte_of(u)];
  const int code = group[GROUP_STEPS * STEP_WEIGHTS + byte_of(u)] >> 4 * step & 15;
  return uint16_t((m & 0x80) << 8 | (code ? least + code - 1 : 0) << 7 | (m & 0x7f));
}

}  // namespace xl

using namespace xl;

// Where the panels of a weight will begin, [panels + 1]; the last is the bytes of all.
XL_API int xl_compact_plan(Pool* pool, const void* src, int64_t n, int64_t k, int gated,
                           int64_t* starts) {
  return guarded(pool, [&] {
    const int64_t panels = panels_of(n, gated), groups = groups_of(k);
    pool->reserve(size_t(groups * WHOLE));
    pool->each(panels, [&](int64_t panel, int thread) {
      const uint16_t* w = plain_panel(*pool, thread, src, n, k, gated, panel);
      const int least = window_of(w, groups * GROUP_STEPS * STEP_WEIGHTS);
      int64_t bytes = head_bytes(groups);
      for (int64_t g = 0; g < groups; g++)
        bytes += group_fits(w + g * GROUP_STEPS * STEP_WEIGHTS, least) ? SMALL : WHOLE;
      starts[panel + 1] = bytes;
    });
    starts[0] = (panels * 8 + 63) / 64 * 64;
    for (int64_t i = 0; i < panels; i++) starts[i + 1] += starts[i];
  });
}

XL_API int xl_compact_pack(Pool* pool, const void* src, int64_t n, int64_t k, int gated,
                           const int64_t* starts, void* dst) {
  return guarded(pool, [&] {
    const int64_t panels = panels_of(n, gated), groups = groups_of(k);
    memcpy(dst, starts, size_t(panels) * 8);
    pool->reserve(size_t(groups * WHOLE));
    pool->each(panels, [&](int64_t panel, int thread) {
      const uint16_t* w = plain_panel(*pool, thread, src, n, k, gated, panel);
      const int least = window_of(w, groups * GROUP_STEPS * STEP_WEIGHTS);
      uint8_t* head = static_cast<uint8_t*>(dst) + starts[panel];
      memset(head, 0, size_t(head_bytes(groups)));
      head[0] = uint8_t(least);
      uint8_t* to = head + head_bytes(groups);
      for (int64_t g = 0; g < groups; g++, w += GROUP_STEPS * STEP_WEIGHTS) {
        if (group_fits(w, least)) {
          pack_group(w, least, to);
          to += SMALL;
        } else {
          memcpy(to, w, size_t(WHOLE));
          head[FLAGS_AT + g / 8] = uint8_t(head[FLAGS_AT + g / 8] | 1 << g % 8);
          to += WHOLE;
        }
      }
    });
  });
}

XL_API int xl_compact_gather(Pool* pool, const CompactGatherCall* call) {
  return guarded(pool, [&] {
    const void* w = address(call->w);
    const int64_t n = call->n, k = call->k, groups = groups_of(call->k);
    const auto* ids = static_cast<const int32_t*>(address(call->ids));
    auto* out = static_cast<float*>(writable(call->out));
    pool->each(call->count, [&](int64_t t, int) {
      const int64_t id = ids[t] < 0 ? 0 : ids[t] < n ? ids[t] : n - 1;
      const uint8_t* head = panel_at(w, id / PANEL);
      const int column = int(id % PANEL), least = head[0];
      float* o = out + t * k;
      const uint8_t* at = head + head_bytes(groups);
      for (int64_t g = 0; g < groups; g++) {
        const bool whole = is_whole(head, g);
        for (int i = 0; i < GROUP_K && g * GROUP_K + i < k; i++)
          o[g * GROUP_K + i] =
              bf16_to_float(weight_of(at, whole, least, i / 2, column * 2 + i % 2));
        at += whole ? WHOLE : SMALL;
        for (int i = 0; i < 4; i++) __builtin_prefetch(at + 4096 + 64 * i);
      }
    }, call->count < 32);
  });
}

#else

using namespace xl;

XL_API int xl_compact_plan(Pool*, const void*, int64_t, int64_t, int, int64_t*) { return 2; }
XL_API int xl_compact_pack(Pool*, const void*, int64_t, int64_t, int, const int64_t*, void*) {
  return 2;
}
XL_API int xl_compact_gather(Pool*, const CompactGatherCall*) { return 2; }

#endif

XL_STRUCT(xl_compact_gather, CompactGatherCall)
