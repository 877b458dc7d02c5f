// 16 lanes for AVX2, FMA and F16C: two vectors of eight floats.
#pragma once
#include <immintrin.h>
#define VEC_LANES 8
#include "vec_split.h"

namespace octavo::VEC_NS {

constexpr int kMaxRows = 4;
constexpr int kMaxRowsWide = 2;
constexpr int kInterleave = 1;

VEC_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  VEC_EACH c.v[i] = _mm256_fmadd_ps(a.v[i], b.v[i], c.v[i]);
  return c;
}
VEC_INLINE f32x16 max(f32x16 a, f32x16 b) {
  VEC_EACH a.v[i] = _mm256_max_ps(a.v[i], b.v[i]);
  return a;
}
VEC_INLINE f32x16 min(f32x16 a, f32x16 b) {
  VEC_EACH a.v[i] = _mm256_min_ps(a.v[i], b.v[i]);
  return a;
}
VEC_INLINE f32x16 load_f16(const uint16_t* p) {
  f32x16 r;
  VEC_EACH r.v[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8 * i)));
  return r;
}

// Even and odd bytes as 16-bit lanes: unlike the byte form of the instruction, nothing saturates.
VEC_INLINE i32x16 dot4_u8s8(i32x16 acc, i32x16 line, int32_t quad) {
  const __m256i low = _mm256_set1_epi16(0xff), q = _mm256_set1_epi32(quad);
  const __m256i even_q = _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8), odd_q = _mm256_srai_epi16(q, 8);
  VEC_EACH {
    __m256i l = (__m256i)line.v[i];
    __m256i e = _mm256_madd_epi16(_mm256_and_si256(l, low), even_q);
    __m256i o = _mm256_madd_epi16(_mm256_srli_epi16(l, 8), odd_q);
    acc.v[i] += (i32v)e + (i32v)o;
  }
  return acc;
}
// Bytes up to 15 cannot saturate the byte form.
VEC_INLINE i32x16 dot4_u4s8(i32x16 acc, i32x16 line, int32_t quad) {
  const __m256i q = _mm256_set1_epi32(quad), one = _mm256_set1_epi16(1);
  VEC_EACH acc.v[i] += (i32v)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)line.v[i], q), one);
  return acc;
}
VEC_INLINE i32x16 dot2_s16(i32x16 acc, i32x16 pairs, uint32_t pair) {
  const __m256i p = _mm256_set1_epi32((int)pair);
  VEC_EACH acc.v[i] += (i32v)_mm256_madd_epi16((__m256i)pairs.v[i], p);
  return acc;
}
VEC_INLINE f32x16 dot2_bf16(f32x16 acc, i32x16 line, uint32_t pair) {
  f32x16 low = as_f32(set1_u32(pair << 16)), high = as_f32(set1_u32(pair & 0xffff0000u));
  acc = fma(as_f32(line << 16), low, acc);
  return fma(as_f32(as_u32(line) & 0xffff0000u), high, acc);
}

}  // namespace octavo::VEC_NS
