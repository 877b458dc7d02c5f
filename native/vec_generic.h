// 16 lanes for any machine: four vectors of four floats (SSE2, NEON) in the compiler's portable vector types.
#pragma once
#define VEC_LANES 4
#include "vec_split.h"

namespace octavo::VEC_NS {

constexpr int kMaxRows = 2;
constexpr int kMaxRowsWide = 1;
constexpr int kInterleave = 1;

VEC_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return a * b + c; }
VEC_INLINE f32x16 max(f32x16 a, f32x16 b) { return select(less(b, a), a, b); }
VEC_INLINE f32x16 min(f32x16 a, f32x16 b) { return select(less(a, b), a, b); }

// The exponent moves from bias 15 to 127 by a multiplication, which also makes subnormals normal.
VEC_INLINE f32x16 load_f16(const uint16_t* p) {
  u32x16 h = widen_u16(p), magnitude = h & 0x7fffu;
  f32x16 finite = as_f32(magnitude << 13) * set1(0x1p112f), special = as_f32((magnitude << 13) | 0x7f800000u);
  mask16 is_finite = less(as_i32(magnitude), set1_i32(0x7c00));
  return as_f32(as_u32(select(is_finite, finite, special)) | (h & 0x8000u) << 16);
}

// A product of a byte and a signed byte fits 16 bits, so even and odd bytes are multiplied as 16-bit lanes.
VEC_INLINE i32x16 dot4_u8s8(i32x16 acc, i32x16 line, int32_t quad) {
  i32x16 q = set1_i32(quad);
  VEC_EACH {
    i16v even_q = (i16v)q.v[i] << 8 >> 8, odd_q = (i16v)q.v[i] >> 8;
    i32v e = (i32v)((i16v)(line.v[i] & 0x00ff00ff) * even_q);
    i32v o = (i32v)((i16v)((i32v)((u32v)line.v[i] >> 8) & 0x00ff00ff) * odd_q);
    acc.v[i] += (e << 16 >> 16) + (e >> 16) + (o << 16 >> 16) + (o >> 16);
  }
  return acc;
}
VEC_INLINE i32x16 dot4_u4s8(i32x16 acc, i32x16 line, int32_t quad) { return dot4_u8s8(acc, line, quad); }
VEC_INLINE i32x16 dot2_s16(i32x16 acc, i32x16 pairs, uint32_t pair) {
  const int32_t low = (int16_t)(pair & 0xffff), high = (int16_t)(pair >> 16);
  VEC_EACH acc.v[i] += (pairs.v[i] << 16 >> 16) * low + (pairs.v[i] >> 16) * high;
  return acc;
}
VEC_INLINE f32x16 dot2_bf16(f32x16 acc, i32x16 line, uint32_t pair) {
  f32x16 low = as_f32(set1_u32(pair << 16)), high = as_f32(set1_u32(pair & 0xffff0000u));
  acc = fma(as_f32(line << 16), low, acc);
  return fma(as_f32(as_u32(line) & 0xffff0000u), high, acc);
}

}  // namespace octavo::VEC_NS
