// The most that one thread of this processor can do: multiply-adds in chains that do not wait for
// each other, on values that stay in registers, and reading memory. bench/ops/peak.py builds this
// for the machine it runs on, and calls it on all threads at once.

#include <cstdint>

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 64;
#elif defined(__AVX2__)
constexpr int kWidth = 32;
#else
constexpr int kWidth = 16;
#endif
typedef float Floats __attribute__((vector_size(kWidth)));
typedef int64_t Ints __attribute__((vector_size(kWidth)));

// More than the latency of a multiply-add times how many can begin in a cycle, and few enough for
// 16 registers where vectors are shorter than 512 bits.
constexpr int kChains = kWidth == 64 ? 16 : 12;

// `repeats` times every chain; the sum of all chains, so that none can be left out.
template <class V, class Step>
V chains(int64_t repeats, V begin, Step step) {
  V sum[kChains];
  for (V& s : sum) s = begin;
  for (int64_t i = 0; i < repeats; ++i) {
#pragma GCC unroll 32
    for (int c = 0; c < kChains; ++c) sum[c] = step(sum[c]);
  }
  for (int c = 1; c < kChains; ++c) sum[0] += sum[c];
  return sum[0];
}

template <class V>
void keep(V value) {
  asm volatile("" : : "m"(value));
}

}  // namespace

extern "C" {

// Each of the next three: multiplications and additions of `repeats` rounds, or 0 if the processor
// lacks the instruction. Dot products stand as such, not as intrinsics, which compilers surround
// with copies of registers.

double peak_fma(int64_t repeats) {
  Floats a = {}, b = {};
  a += 0.5f;
  b += 1.0f;  // the chains approach 2
  keep(chains(repeats, b, [&](Floats s) { return s * a + b; }));
  return 2.0 * (kWidth / 4) * kChains * repeats;
}

double peak_bf16(int64_t repeats) {
#if defined(__AVX512BF16__)
  const Floats a = {}, b = {};
  keep(chains(repeats, Floats{}, [&](Floats s) {
    asm("vdpbf16ps %1, %2, %0" : "+v"(s) : "v"(a), "v"(b));
    return s;
  }));
  return 2.0 * 32 * kChains * repeats;
#else
  return 0.0 * repeats;
#endif
}

double peak_int8(int64_t repeats) {
#if defined(__AVX512VNNI__)
  const Ints a = {}, b = {};
  keep(chains(repeats, Ints{}, [&](Ints s) {
    asm("vpdpbusd %1, %2, %0" : "+v"(s) : "v"(a), "v"(b));
    return s;
  }));
  return 2.0 * 64 * kChains * repeats;
#else
  return 0.0 * repeats;
#endif
}

// Reads `bytes` from `data` in two streams, which fetch more at a time than one, `repeats` times;
// a multiple of 1024 bytes, aligned to 64.
void peak_read(const char* data, int64_t bytes, int64_t repeats) {
  const char* other = data + bytes / 2;
  Ints sum[8] = {};
  for (int64_t r = 0; r < repeats; ++r) {
    for (int64_t i = 0; i < bytes / 2; i += 8 * kWidth) {
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) sum[v] += *(const Ints*)(data + i + v * kWidth);
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) sum[v] += *(const Ints*)(other + i + v * kWidth);
    }
    asm volatile("" : : : "memory");  // each time anew
  }
  for (int v = 1; v < 8; ++v) sum[0] += sum[v];
  keep(sum[0]);
}

}  // extern "C"
