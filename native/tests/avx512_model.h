// The AVX-512 instructions that vec_avx512.h uses, as loops over lanes, so that its level runs on any x86-64 with AVX2 and
// gives the same bits: included before it (CMakeLists.txt: OCTAVO_AVX512_MODEL). From the Intel SDM, volume 2.
#pragma once
#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "bf16_model.h"

namespace octavo::avx512_model {

template <class T> struct Lanes {  // a register, read and written by element
  static constexpr int kCount = 64 / sizeof(T);
  T at[kCount];
  template <class V> explicit Lanes(const V& v) {
    static_assert(sizeof(V) == sizeof at);
    memcpy(at, &v, sizeof at);
  }
  Lanes() : at{} {}
  template <class V> V as() const {
    V v;
    static_assert(sizeof(V) == sizeof at);
    memcpy(&v, at, sizeof at);
    return v;
  }
};

template <class T, class V, class F> inline V each(V a, F f) {
  Lanes<T> x(a);
  for (T& lane : x.at) lane = f(lane);
  return x.template as<V>();
}
template <class T, class V, class F> inline V each(V a, V b, F f) {
  Lanes<T> x(a), y(b);
  for (int i = 0; i < x.kCount; i++) x.at[i] = f(x.at[i], y.at[i]);
  return x.template as<V>();
}
template <class T, class V, class F> inline __mmask16 mask_of(V a, V b, F f) {
  Lanes<T> x(a), y(b);
  unsigned mask = 0;
  for (int i = 0; i < 16; i++) mask |= (unsigned)f(x.at[i], y.at[i]) << i;
  return (__mmask16)mask;
}

using namespace bf16_model;
inline uint16_t narrowed(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(flushed(x));
  return (uint16_t)(x != x ? (u >> 16) | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16);
}

inline __m512i set1(int x) {
  Lanes<int32_t> r;
  for (int32_t& lane : r.at) lane = x;
  return r.as<__m512i>();
}
inline __m512 set1(float x) {
  Lanes<float> r;
  for (float& lane : r.at) lane = x;
  return r.as<__m512>();
}
inline __m512i set4(int d, int c, int b, int a) {
  Lanes<int32_t> r;
  for (int i = 0; i < 16; i += 4) r.at[i] = a, r.at[i + 1] = b, r.at[i + 2] = c, r.at[i + 3] = d;
  return r.as<__m512i>();
}
template <class V> inline V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V> inline void store(void* p, V v) { memcpy(p, &v, sizeof v); }
inline __m512 load_masked(__mmask16 m, const float* p) {
  Lanes<float> r;
  for (int i = 0; i < 16; i++)
    if (m >> i & 1) r.at[i] = p[i];
  return r.as<__m512>();
}
inline void store_masked(float* p, __mmask16 m, __m512 v) {
  const Lanes<float> x(v);
  for (int i = 0; i < 16; i++)
    if (m >> i & 1) p[i] = x.at[i];
}
template <class To, class From> inline To cast(From v) { return Lanes<uint8_t>(v).template as<To>(); }

inline __m512 fma(__m512 a, __m512 b, __m512 c) {
  Lanes<float> x(a), y(b), z(c);
  for (int i = 0; i < 16; i++) z.at[i] = __builtin_fmaf(x.at[i], y.at[i], z.at[i]);
  return z.as<__m512>();
}
inline __m512 blend(__mmask16 m, __m512 a, __m512 b) {
  Lanes<float> x(a), y(b);
  for (int i = 0; i < 16; i++) x.at[i] = m >> i & 1 ? y.at[i] : x.at[i];
  return x.as<__m512>();
}
inline __m512 scaled(__mmask16 m, __m512 a, __m512 b) {  // a * 2^floor(b), 0 where m is not
  Lanes<float> x(a), y(b);
  for (int i = 0; i < 16; i++)
    x.at[i] = !(m >> i & 1) ? 0 : y.at[i] != y.at[i] ? y.at[i] : std::scalbn(x.at[i], (int)std::floor(y.at[i]));
  return x.as<__m512>();
}
inline __m512i int_of(__m512 v) {  // to nearest even
  Lanes<float> x(v);
  Lanes<int32_t> r;
  for (int i = 0; i < 16; i++) r.at[i] = _mm_cvtss_si32(_mm_set_ss(x.at[i]));
  return r.as<__m512i>();
}
inline __m512 float_of(__m512i v) {
  Lanes<int32_t> x(v);
  Lanes<float> r;
  for (int i = 0; i < 16; i++) r.at[i] = (float)x.at[i];
  return r.as<__m512>();
}
inline __m512i widen_u16(__m256i v) {
  uint16_t x[16];
  memcpy(x, &v, sizeof x);
  Lanes<uint32_t> r;
  for (int i = 0; i < 16; i++) r.at[i] = x[i];
  return r.as<__m512i>();
}
template <class T> inline __m512i widen_bytes(__m128i v) {  // T: uint8_t or int8_t
  T in[16];
  memcpy(in, &v, sizeof in);
  Lanes<int32_t> r;
  for (int i = 0; i < 16; i++) r.at[i] = in[i];
  return r.as<__m512i>();
}
inline __m512i four_times(__m128i v) {
  Lanes<uint8_t> r;
  for (int i = 0; i < 64; i += 16) memcpy(r.at + i, &v, 16);
  return r.as<__m512i>();
}
inline __m512 float_of_half(__m256i v) {
  __m256 part[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
  return load<__m512>(part);
}
template <class To, class Lane> inline To narrow(__m512i v) {  // the low bits of each lane
  const Lanes<int32_t> x(v);
  Lane r[16];
  for (int i = 0; i < 16; i++) r[i] = (Lane)x.at[i];
  return load<To>(r);
}
inline __m256bh bf16_of(__m512 v) {
  const Lanes<float> x(v);
  uint16_t r[16];
  for (int i = 0; i < 16; i++) r[i] = narrowed(x.at[i]);
  return load<__m256bh>(r);
}
inline __m512bh bf16_of(__m512 high, __m512 low) {
  const __m256bh part[2] = {bf16_of(low), bf16_of(high)};
  return load<__m512bh>(part);
}
inline __m512i dot_u8s8(__m512i acc, __m512i a, __m512i b) {
  Lanes<uint32_t> sum(acc);
  const Lanes<uint8_t> x(a);
  const Lanes<int8_t> y(b);
  for (int i = 0; i < 64; i++) sum.at[i / 4] += (uint32_t)(x.at[i] * y.at[i]);
  return sum.as<__m512i>();
}
inline __m512i dot_s16(__m512i acc, __m512i a, __m512i b) {
  Lanes<uint32_t> sum(acc);
  const Lanes<int16_t> x(a), y(b);
  for (int i = 0; i < 32; i++) sum.at[i / 2] += (uint32_t)(x.at[i] * y.at[i]);
  return sum.as<__m512i>();
}
inline __m512 dot_bf16(__m512 acc, __m512bh a, __m512bh b) {
  Lanes<float> sum(acc);
  const Lanes<uint16_t> x(a), y(b);
  for (int i = 0; i < 16; i++) {
    float s = flushed(sum.at[i]);
    for (int j = 1; j >= 0; j--) s = fused(widened(x.at[2 * i + j]), widened(y.at[2 * i + j]), s);
    sum.at[i] = s;
  }
  return sum.as<__m512>();
}
template <class T, int Bits> inline __m512i permute(__m512i a, __m512i index, __m512i b) {  // of the lanes of a, then b
  const Lanes<T> x(a), y(b), at(index);
  Lanes<T> r;
  for (int i = 0; i < r.kCount; i++) {
    const int from = at.at[i] & ((1 << Bits) - 1);
    r.at[i] = from < r.kCount ? x.at[from] : y.at[from - r.kCount];
  }
  return r.template as<__m512i>();
}
inline __m512i shuffle_bytes(__m512i a, __m512i index) {  // within each sixteen
  const Lanes<uint8_t> x(a), at(index);
  Lanes<uint8_t> r;
  for (int i = 0; i < 64; i++) r.at[i] = at.at[i] & 0x80 ? 0 : x.at[i / 16 * 16 + at.at[i] % 16];
  return r.as<__m512i>();
}
template <class F> inline int32_t reduced(__m512i v, F f) {
  const Lanes<int32_t> x(v);
  int32_t r = x.at[0];
  for (int i = 1; i < 16; i++) r = f(r, x.at[i]);
  return r;
}
inline __m256 half(__m512 v, int i) { return load<__m256>(Lanes<float>(v).at + 8 * i); }

}  // namespace octavo::avx512_model

// clang-format off: a table, one instruction a line
#define MODEL octavo::avx512_model
#define _mm512_setzero_ps() MODEL::set1(0.f)
#define _mm512_set1_ps(x) MODEL::set1((float)(x))
#define _mm512_set1_epi32(x) MODEL::set1((int)(x))
#define _mm512_set4_epi32(d, c, b, a) MODEL::set4(d, c, b, a)
#define _mm512_loadu_ps(p) MODEL::load<__m512>(p)
#define _mm512_loadu_si512(p) MODEL::load<__m512i>(p)
#define _mm512_maskz_loadu_ps(m, p) MODEL::load_masked(m, p)
#define _mm512_storeu_ps(p, v) MODEL::store(p, v)
#define _mm512_storeu_si512(p, v) MODEL::store(p, v)
#define _mm512_mask_storeu_ps(p, m, v) MODEL::store_masked(p, m, v)
#define _mm512_castps_si512(v) MODEL::cast<__m512i>(v)
#define _mm512_castsi512_ps(v) MODEL::cast<__m512>(v)
#define _mm512_castps512_ps256(v) MODEL::half(v, 0)
#define _mm512_extractf32x8_ps(v, i) MODEL::half(v, i)
#define _mm512_cvtepi32_ps(v) MODEL::float_of(v)
#define _mm512_cvtps_epi32(v) MODEL::int_of(v)
#define _mm512_reduce_ps(v, op) MODEL::each<float>(v, [](float x) { static_assert((op) == 1); return x - std::floor(x); })
#define _mm512_maskz_scalef_ps(m, a, b) MODEL::scaled(m, a, b)
#define _mm512_fmadd_ps(a, b, c) MODEL::fma(a, b, c)
#define _mm512_max_ps(a, b) MODEL::each<float>(a, b, [](float x, float y) { return x > y ? x : y; })
#define _mm512_min_ps(a, b) MODEL::each<float>(a, b, [](float x, float y) { return x < y ? x : y; })
#define _mm512_max_epi32(a, b) MODEL::each<int32_t>(a, b, [](int32_t x, int32_t y) { return x > y ? x : y; })
#define _mm512_abs_ps(v) MODEL::each<float>(v, [](float x) { return __builtin_fabsf(x); })
#define _mm512_cmp_ps_mask(a, b, op) MODEL::mask_of<float>(a, b, [](float x, float y) { return (op) == _CMP_LT_OQ ? x < y : x == y; })
#define _mm512_cmplt_epi32_mask(a, b) MODEL::mask_of<int32_t>(a, b, [](int32_t x, int32_t y) { return x < y; })
#define _mm512_cmpeq_epi32_mask(a, b) MODEL::mask_of<int32_t>(a, b, [](int32_t x, int32_t y) { return x == y; })
#define _mm512_mask_blend_ps(m, a, b) MODEL::blend(m, a, b)
#define _mm512_and_si512(a, b) MODEL::each<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x & y; })
#define _mm512_or_si512(a, b) MODEL::each<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x | y; })
#define _mm512_slli_epi32(v, n) MODEL::each<uint32_t>(v, [](uint32_t x) { return x << (n); })
#define _mm512_slli_epi16(v, n) MODEL::each<uint16_t>(v, [](uint16_t x) { return (uint16_t)(x << (n)); })
#define _mm512_srai_epi16(v, n) MODEL::each<int16_t>(v, [](int16_t x) { return (int16_t)(x >> (n)); })
#define _mm512_reduce_max_epi32(v) MODEL::reduced(v, [](int32_t x, int32_t y) { return x > y ? x : y; })
#define _mm512_reduce_add_epi32(v) MODEL::reduced(v, [](int32_t x, int32_t y) { return (int32_t)((uint32_t)x + (uint32_t)y); })
#define _mm512_permutex2var_ps(a, i, b) MODEL::cast<__m512>(MODEL::permute<uint32_t, 5>(MODEL::cast<__m512i>(a), i, MODEL::cast<__m512i>(b)))
#define _mm512_permutexvar_epi16(i, a) MODEL::permute<uint16_t, 5>(a, i, a)
#define _mm512_shuffle_epi8(a, i) MODEL::shuffle_bytes(a, i)
#define _mm512_cvtph_ps(v) MODEL::float_of_half(v)
#define _mm512_cvtepu16_epi32(v) MODEL::widen_u16(v)
#define _mm512_cvtepu8_epi32(v) MODEL::widen_bytes<uint8_t>(v)
#define _mm512_cvtepi8_epi32(v) MODEL::widen_bytes<int8_t>(v)
#define _mm512_broadcast_i32x4(v) MODEL::four_times(v)
#define _mm512_cvtneps_pbh(v) MODEL::bf16_of(v)
#define _mm512_cvtne2ps_pbh(high, low) MODEL::bf16_of(high, low)
#define _mm512_cvtepi32_epi8(v) MODEL::narrow<__m128i, uint8_t>(v)
#define _mm512_cvtepi32_epi16(v) MODEL::narrow<__m256i, uint16_t>(v)
#define _mm512_dpbusd_epi32(acc, a, b) MODEL::dot_u8s8(acc, a, b)
#define _mm512_dpwssd_epi32(acc, a, b) MODEL::dot_s16(acc, a, b)
#define _mm512_dpbf16_ps(acc, a, b) MODEL::dot_bf16(acc, a, b)
// clang-format on
