// 16 lanes for any machine: four vectors of four floats (SSE2, NEON) in the compiler's portable vector types.
#pragma once
#define VEC_LANES 4
#include "vec_split.h"

namespace octavo::VEC_NS {

typedef int8_t i8v __attribute__((vector_size(VEC_LANES)));
typedef uint8_t u8v __attribute__((vector_size(VEC_LANES)));

constexpr int kMaxRows = 2;
constexpr int kMaxRowsWide = 1;
constexpr int kMaxRowsFloat = 2, kRowsFloat = 48, kFloatDepth = 64;
constexpr int kInterleave = 1;

VEC_INLINE f32v fma(f32v a, f32v b, f32v c) { return a * b + c; }
VEC_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return a * b + c; }
VEC_INLINE f32x16 upper_bf16(i32x16 pairs) { return as_f32(as_u32(pairs) & 0xffff0000u); }
VEC_INLINE void add_product(f32v& sum, f32v a, f32v b) { sum = fma(a, b, sum); }
VEC_INLINE void add_product(f32x16& sum, f32x16 a, f32x16 b) { sum = fma(a, b, sum); }
VEC_INLINE f32x16 max(f32x16 a, f32x16 b) { return select(less(b, a), a, b); }
VEC_INLINE f32x16 min(f32x16 a, f32x16 b) { return select(less(a, b), a, b); }

VEC_INLINE f32x16 load_n(const float* p, int n) {
  float lane[16] = {};
  for (int i = 0; i < n; i++) lane[i] = p[i];
  return load(lane);
}
VEC_INLINE void store_n(float* p, f32x16 v, int n) {
  float lane[16];
  store(lane, v);
  for (int i = 0; i < n; i++) p[i] = lane[i];
}
VEC_INLINE i32x16 max(i32x16 a, i32x16 b) { return select(less(b, a), a, b); }
VEC_INLINE uint32_t bits(mask16 m) {
  uint32_t r = 0;
  for (int i = 0; i < 16; i++) r |= (uint32_t)(m.v[i / kLanes][i % kLanes] & 1) << i;
  return r;
}
VEC_INLINE float reduce_add(f32x16 a) {
  float s[16];
  store(s, a);
  for (int h = 8; h; h /= 2)
    for (int i = 0; i < h; i++) s[i] += s[i + h];
  return s[0];
}
VEC_INLINE float reduce_max(f32x16 a) {
  float s[16];
  store(s, a);
  for (int h = 8; h; h /= 2)
    for (int i = 0; i < h; i++) s[i] = s[i] > s[i + h] ? s[i] : s[i + h];
  return s[0];
}
VEC_INLINE int32_t reduce_max(i32x16 a) {
  int32_t s[16];
  store(s, a);
  for (int h = 8; h; h /= 2)
    for (int i = 0; i < h; i++) s[i] = s[i] > s[i + h] ? s[i] : s[i + h];
  return s[0];
}
VEC_INLINE int32_t reduce_add(i32x16 a) {
  int32_t lane[16], s = 0;
  store(lane, a);
  for (int i = 0; i < 16; i++) s += lane[i];
  return s;
}

VEC_INLINE f32x16 every_second(f32x16 a, f32x16 b, int first) {
  float in[32], out[16];
  store(in, a), store(in + 16, b);
  for (int i = 0; i < 16; i++) out[i] = in[2 * i + first];
  return load(out);
}
VEC_INLINE f32x16 even(f32x16 a, f32x16 b) { return every_second(a, b, 0); }
VEC_INLINE f32x16 odd(f32x16 a, f32x16 b) { return every_second(a, b, 1); }
VEC_INLINE f32x16 zip_from(f32x16 a, f32x16 b, int first) {
  float x[16], y[16], out[16];
  store(x, a), store(y, b);
  for (int i = 0; i < 8; i++) out[2 * i] = x[first + i], out[2 * i + 1] = y[first + i];
  return load(out);
}
VEC_INLINE f32x16 zip_lo(f32x16 a, f32x16 b) { return zip_from(a, b, 0); }
VEC_INLINE f32x16 zip_hi(f32x16 a, f32x16 b) { return zip_from(a, b, 8); }

VEC_INLINE void store_bf16(uint16_t* p, f32x16 a) {
  u32x16 u = round_bf16(a);
  VEC_EACH {
    u16v h = __builtin_convertvector(u.v[i], u16v);
    memcpy(p + i * kLanes, &h, sizeof h);
  }
}
VEC_INLINE void store_i8(int8_t* p, i32x16 a) {
  VEC_EACH {
    i8v b = __builtin_convertvector(a.v[i], i8v);
    memcpy(p + i * kLanes, &b, sizeof b);
  }
}
VEC_INLINE void store_i16(int16_t* p, i32x16 a) {
  VEC_EACH {
    i16h h = __builtin_convertvector(a.v[i], i16h);
    memcpy(p + i * kLanes, &h, sizeof h);
  }
}

VEC_INLINE i32v part_u8(const uint8_t* p) {
  u8v b;
  memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, i32v);
}
VEC_INLINE i32v part_i8(const int8_t* p) {
  i8v b;
  memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, i32v);
}
VEC_INLINE f32v part_bf16(const uint16_t* p) {
  u16v h;
  memcpy(&h, p, sizeof h);
  return (f32v)(__builtin_convertvector(h, u32v) << 16);
}
// The exponent moves from bias 15 to 127 by a multiplication, which also makes subnormals normal.
VEC_INLINE f32v part_f16(const uint16_t* p) {
  u16v narrow;
  memcpy(&narrow, p, sizeof narrow);
  const u32v h = __builtin_convertvector(narrow, u32v), magnitude = h & 0x7fff;
  const u32v finite = (u32v)((f32v)(magnitude << 13) * 0x1p112f), special = magnitude << 13 | 0x7f800000u;
  const u32v is_finite = (u32v)(magnitude < 0x7c00);
  return (f32v)((finite & is_finite) | (special & ~is_finite) | (h & 0x8000) << 16);
}

// A product of a byte and a signed byte fits 16 bits, so even and odd bytes are multiplied as 16-bit lanes.
template <int kLargest> struct FewRows {
  static constexpr int kMostRows = 0;  // no kernel of their own
};
template <int kLargest> struct UnsignedWeights {
  using Quads = i32v;
  static constexpr int kOffset = 0;
  static constexpr bool kTurns = false;
  static VEC_INLINE Quads of(i32v bytes) { return bytes; }
  template <int N> static VEC_INLINE void dot(i32v (&sum)[kInterleave], int, const Quads* w, const int8_t* q) {
    GEMM_UNROLL for (int j = 0; j < N; j++) {
      int32_t quad;
      memcpy(&quad, q + 4 * j, 4);
      const i16v even_q = (i16v)(quad - i32v{}) << 8 >> 8, odd_q = (i16v)(quad - i32v{}) >> 8;
      const i32v e = (i32v)((i16v)(w[j] & 0x00ff00ff) * even_q);
      const i32v o = (i32v)((i16v)((i32v)((u32v)w[j] >> 8) & 0x00ff00ff) * odd_q);
      sum[0] += (e << 16 >> 16) + (e >> 16) + (o << 16 >> 16) + (o >> 16);
    }
  }
};
using SignedWeights = UnsignedWeights<255>;
VEC_INLINE i32v even_s8_times_16(i32v quads) { return (i32v)((i16v)quads << 8 >> 4); }
VEC_INLINE i32v lookup_u4(i32v quads, const uint8_t* table) {
  uint8_t bytes[sizeof quads];
  memcpy(bytes, &quads, sizeof bytes);
  for (uint8_t& b : bytes) b = table[b];
  memcpy(&quads, bytes, sizeof bytes);
  return quads;
}
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
// lane i: bytes 2j and 2j + 1 of quads lane i, both 0..15, looked up among 32 bf16 numbers
VEC_INLINE i32v bf16_pairs_u4(i32v quads, int j, const uint16_t* table) {
  uint8_t bytes[sizeof quads];
  uint16_t pairs[2 * kLanes];
  memcpy(bytes, &quads, sizeof bytes);
  for (int i = 0; i < 2 * kLanes; i++) pairs[i] = table[bytes[i / 2 * 4 + 2 * j + i % 2]];
  memcpy(&quads, pairs, sizeof pairs);
  return quads;
}

}  // namespace octavo::VEC_NS
