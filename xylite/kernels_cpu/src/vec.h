// Vectors of the machine's width, and the few operations that the kernels need.
//
// Arithmetic uses the compiler's vector types (GCC, Clang); intrinsics stand only where those do
// not reach: fused multiply-add, 16-bit floats, dot products of bf16 and int8.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define XL_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define XL_AVX2 1
#endif
#if defined(XL_AVX512) || defined(XL_AVX2)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace xl {

#if defined(XL_AVX512)
constexpr int W = 16;  // floats in a vector
constexpr int MAX_ROWS = 12;
#elif defined(XL_AVX2)
constexpr int W = 8;
constexpr int MAX_ROWS = 6;
#elif defined(__aarch64__)
constexpr int W = 4;
constexpr int MAX_ROWS = 12;
#else
constexpr int W = 4;
constexpr int MAX_ROWS = 4;
#endif
constexpr int NV = 2;           // vectors side by side in a register tile
constexpr int COLS = NV * W;    // columns of a register tile
constexpr int PANEL = 32;       // columns of a packed panel, on every machine

typedef float vf __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * W), aligned(2), may_alias));

static inline vf set(float x) { return x - vf{}; }
static inline vi seti(int32_t x) { return x - vi{}; }
static inline vf loadf(const float* p) { return *(const vf*)p; }
static inline void storef(float* p, vf v) { *(vf*)p = v; }
static inline vi bits(vf v) { return (vi)v; }

static inline vf fma(vf a, vf b, vf c) {
#if defined(XL_AVX512)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(XL_AVX2)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

static inline vf vmax(vf a, vf b) {
#if defined(XL_AVX512)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(XL_AVX2)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

static inline vf vmin(vf a, vf b) {
#if defined(XL_AVX512)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(XL_AVX2)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// Fixed trees: the result depends on nothing but the vector.
static inline float sum(vf v) {
#if defined(XL_AVX512)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float t[W];
  storef(t, v);
  for (int n = W / 2; n; n /= 2)
    for (int i = 0; i < n; i++) t[i] += t[i + n];
  return t[0];
#endif
}

static inline float max_of(vf v) {
#if defined(XL_AVX512)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float t[W];
  storef(t, v);
  for (int n = W / 2; n; n /= 2)
    for (int i = 0; i < n; i++) t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
  return t[0];
#endif
}

// bf16 and fp16 --------------------------------------------------------------------------------

static inline float bf16_to_float(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

static inline uint16_t bf16_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);  // NaN stays NaN
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

static inline float fp16_to_float(uint16_t h) {
  uint32_t u = (uint32_t)(h & 0x7fff) << 13;
  float f;
  memcpy(&f, &u, 4);
  f *= 0x1p112f;  // moves the exponent, subnormals included
  memcpy(&u, &f, 4);
  if ((h & 0x7c00) == 0x7c00) u |= 0x7f800000u;
  u |= (uint32_t)(h & 0x8000) << 16;
  memcpy(&f, &u, 4);
  return f;
}

static inline uint16_t fp16_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  const uint16_t sign = (uint16_t)((u >> 16) & 0x8000);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
  if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);  // rounds to infinity
  if (u < 0x38800000u) {                                   // subnormal: let the adder round
    float a;
    memcpy(&a, &u, 4);
    a += 0.5f;
    memcpy(&u, &a, 4);
    return (uint16_t)(sign | (u - 0x3f000000u));
  }
  u += 0xfffu + ((u >> 13) & 1);
  return (uint16_t)(sign | ((u - 0x38000000u) >> 13));
}

static inline vf load_bf16(const uint16_t* p) {
#if defined(XL_AVX512)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(XL_AVX2)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  return (vf)(__builtin_convertvector(*(const vh*)p, vu) << 16);
#endif
}

static inline vf load_fp16(const uint16_t* p) {
#if defined(XL_AVX512)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(XL_AVX2)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  const vu h = __builtin_convertvector(*(const vh*)p, vu);
  vu u = (vu)((vf)((h & 0x7fffu) << 13) * 0x1p112f);
  u |= ((h & 0x7c00u) == 0x7c00u) ? (vu{} + 0x7f800000u) : vu{};
  return (vf)(u | ((h & 0x8000u) << 16));
#endif
}

static inline vu round_bf16(vf v) {  // the rounded value in the upper half of each lane
  const vu u = (vu)v;
  const vu r = u + 0x7fffu + ((u >> 16) & 1u);
  return ((u & 0x7fffffffu) > 0x7f800000u) ? (u | 0x400000u) : r;
}

static inline void store_bf16(uint16_t* p, vf v) {
#if defined(XL_AVX512) && defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#elif defined(XL_AVX512)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)(round_bf16(v) >> 16)));
#else
  *(vh*)p = __builtin_convertvector(round_bf16(v) >> 16, vh);
#endif
}

static inline void store_fp16(uint16_t* p, vf v) {
#if defined(XL_AVX512)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(XL_AVX2)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < W; i++) p[i] = fp16_of(v[i]);
#endif
}

// Elementary functions -------------------------------------------------------------------------

// e^z, where n = t - magic is z / ln 2 rounded; to 2 ulp
static inline vf exp_of(vf z, vf t, vf n) {
  vf r = fma(n, set(-0.693359375f), z);
  r = fma(n, set(2.12194440e-4f), r);
  vf p = set(1.9875691500e-4f);
  p = fma(p, r, set(1.3981999507e-3f));
  p = fma(p, r, set(8.3334519073e-3f));
  p = fma(p, r, set(4.1665795894e-2f));
  p = fma(p, r, set(1.6666665459e-1f));
  p = fma(p, r, set(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  return (vf)(bits(p) + (bits(t) << 23));
}

// e^x; 0 below -87.3, so that exp(-inf) is exactly 0; NaN stays NaN.
static inline vf vexp(vf x) {
  const vf magic = set(0x1.8p23f);
  const vf z = vmax(vmin(x, set(88.3f)), set(-87.3f));
  const vf t = fma(z, set(1.44269504f), magic);
  vf p = exp_of(z, t, t - magic);
  p = x < set(-87.3f) ? vf{} : p;
  p = x > set(88.3f) ? set(INFINITY) : p;
  return x != x ? x : p;
}

// The same where x is not positive, bit for bit.
static inline vf vexp_nonpositive(vf x) {
  const vf magic = set(0x1.8p23f);
  const vf z = vmax(x, set(-87.3f));
  const vf t = fma(z, set(1.44269504f), magic);
  return x != x ? x : x < set(-87.3f) ? vf{} : exp_of(z, t, t - magic);
}

// 2^x for x <= 0 to 1e-4, enough for what is rounded to bf16; 0 below -126; NaN stays NaN.
static inline vf vexp2_short(vf x) {
  const vf magic = set(0x1.8p23f);
  const vf z = vmax(set(-126.0f), x);  // the second operand where x is NaN
  const vf t = z + magic;
  const vf f = z - (t - magic);
  vf p = fma(f, set(5.500847e-2f), set(2.4221011e-1f));
  p = fma(p, f, set(6.9328288e-1f));
  p = fma(p, f, set(1.0f));
  p = (vf)(bits(p) + (bits(t) << 23));
  p = fma(z, vf{}, p);
  return x < set(-126.0f) ? vf{} : p;
}

static inline vf vsilu(vf x) { return x / (1.0f + vexp(-x)); }

static inline vf vtanh(vf x) {
  const vf a = (vf)(bits(x) & 0x7fffffff);
  const vf e = vexp(a * -2.0f);
  const vf big = (1.0f - e) / (1.0f + e);
  const vf s = x * x;  // near 0 the quotient loses digits, the series does not
  vf p = set(-5.70498872745e-3f);
  p = fma(p, s, set(2.06390887954e-2f));
  p = fma(p, s, set(-5.37397155531e-2f));
  p = fma(p, s, set(1.33314422036e-1f));
  p = fma(p, s, set(-3.33332819422e-1f));
  const vf small = fma(p * s, x, x);
  const vf signed_big = (vf)(bits(big) | (bits(x) & (int32_t)0x80000000));
  return a < 0.625f ? small : signed_big;
}

// The tanh form; 0.5 * (1 + tanh(u)) is 1 / (1 + e^-2u), which keeps its digits at both ends.
static inline vf vgelu(vf x) {
  return x / (1.0f + vexp(-1.5957691216f * fma(0.044715f * x * x, x, x)));
}

}  // namespace xl
