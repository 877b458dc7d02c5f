// 16 lanes for AVX-512 (F, BW, VL, DQ, VNNI, BF16). Every vec_*.h defines the same names in octavo::VEC_NS:
//   f32x16 i32x16 u32x16   + - * / (float), + - * & | ^ << >> (integers), by element; mask16 from less() and equal()
// Loads and stores need no alignment; the _n forms touch only the first n lanes (0 <= n <= 16; the others load as 0).
#pragma once
#pragma GCC diagnostic push  // GCC 12's header leaves the pass-through operand of unmasked forms undefined (bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#include <cstdint>
#include <cstring>

#ifndef VEC_INLINE  // as builds for checks define it (CMakeLists.txt)
#define VEC_INLINE __attribute__((always_inline)) inline
#endif
#define GEMM_UNROLL _Pragma("GCC unroll 32")

namespace octavo::VEC_NS {

using f32x16 = __m512;
// GCC 12 keeps arrays of __m512i that a dot updates in memory; arrays of this type stay in registers.
typedef int i32x16 __attribute__((vector_size(64), may_alias));
typedef unsigned u32x16 __attribute__((vector_size(64), may_alias));
using mask16 = __mmask16;
#ifndef OCTAVO_FEW_ROWS
constexpr int kMaxRows = 16;      // rows of a tile 16 columns wide that fit the registers
constexpr int kMaxRowsWide = 12;  // rows of a tile 32 columns wide
#else  // the same bits in fewer shapes, where a compiler takes minutes: under sanitizers and in models of processors
constexpr int kMaxRows = 5;
constexpr int kMaxRowsWide = 3;
#endif
constexpr int kMaxRowsFloat = kMaxRowsWide;  // rows of a float tile, 16 columns at a time where 32 are too wide
constexpr int kRowsFloat = kMaxRowsFloat, kFloatDepth = 1 << 30;  // rows that share a block of kFloatDepth K in L1
constexpr int kInterleave = 4;                                    // rows whose integer dots are issued in turn
// A level's own vector, the part of 16 lanes that a register holds: here all of them.
constexpr int kLanes = 16, kParts = 1;
constexpr bool kBf16Dots = true;  // dot2_bf16 is one instruction
using f32v = f32x16;
using i32v = i32x16;
using u32v = u32x16;

VEC_INLINE mask16 first_lanes(int n) { return (mask16)_bzhi_u32(0xffff, (unsigned)n); }

VEC_INLINE f32x16 zero() { return _mm512_setzero_ps(); }
VEC_INLINE f32x16 set1(float x) { return _mm512_set1_ps(x); }
VEC_INLINE i32x16 set1_i32(int32_t x) { return (i32x16)_mm512_set1_epi32(x); }
VEC_INLINE u32x16 set1_u32(uint32_t x) { return (u32x16)_mm512_set1_epi32((int)x); }
VEC_INLINE i32x16 iota() { return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

VEC_INLINE f32x16 load(const float* p) { return _mm512_loadu_ps(p); }
VEC_INLINE f32x16 load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
VEC_INLINE i32x16 load(const int32_t* p) { return (i32x16)_mm512_loadu_si512(p); }
VEC_INLINE i32x16 load_line(const void* p) { return (i32x16)_mm512_loadu_si512(p); }
VEC_INLINE void store(float* p, f32x16 v) { _mm512_storeu_ps(p, v); }
VEC_INLINE void store_n(float* p, f32x16 v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
VEC_INLINE void store(int32_t* p, i32x16 v) { _mm512_storeu_si512(p, (__m512i)v); }
VEC_INLINE void store_line(void* p, i32x16 v) { _mm512_storeu_si512(p, (__m512i)v); }
VEC_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
VEC_INLINE void prefetch_l2(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

VEC_INLINE i32x16 as_i32(f32x16 v) { return (i32x16)_mm512_castps_si512(v); }
VEC_INLINE i32x16 as_i32(u32x16 v) { return (i32x16)v; }
VEC_INLINE u32x16 as_u32(f32x16 v) { return (u32x16)_mm512_castps_si512(v); }
VEC_INLINE u32x16 as_u32(i32x16 v) { return (u32x16)v; }
VEC_INLINE f32x16 as_f32(i32x16 v) { return _mm512_castsi512_ps((__m512i)v); }
VEC_INLINE f32x16 as_f32(u32x16 v) { return _mm512_castsi512_ps((__m512i)v); }
VEC_INLINE f32x16 to_f32(i32x16 v) { return _mm512_cvtepi32_ps((__m512i)v); }
VEC_INLINE i32x16 to_i32(f32x16 v) { return (i32x16)_mm512_cvtps_epi32(v); }  // to nearest even, |v| < 2^22

VEC_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
VEC_INLINE void add_product(f32x16& sum, f32x16 a, f32x16 b) { sum = fma(a, b, sum); }      // sum += a * b
VEC_INLINE f32x16 upper_bf16(i32x16 pairs) { return as_f32(as_u32(pairs) & 0xffff0000u); }  // of each lane
VEC_INLINE f32x16 max(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }                   // a > b ? a : b
VEC_INLINE f32x16 min(f32x16 a, f32x16 b) { return _mm512_min_ps(a, b); }                   // a < b ? a : b
VEC_INLINE i32x16 max(i32x16 a, i32x16 b) { return (i32x16)_mm512_max_epi32((__m512i)a, (__m512i)b); }
VEC_INLINE f32x16 abs(f32x16 v) { return _mm512_abs_ps(v); }

VEC_INLINE mask16 less(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
VEC_INLINE mask16 equal(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
VEC_INLINE mask16 less(i32x16 a, i32x16 b) { return _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b); }
VEC_INLINE mask16 equal(i32x16 a, i32x16 b) { return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b); }
VEC_INLINE mask16 both(mask16 a, mask16 b) { return (mask16)(a & b); }
VEC_INLINE mask16 either(mask16 a, mask16 b) { return (mask16)(a | b); }
VEC_INLINE uint32_t bits(mask16 m) { return m; }                                                  // bit i is lane i
VEC_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) { return _mm512_mask_blend_ps(m, b, a); }  // m ? a : b

VEC_INLINE f32x16 above_floor(f32x16 v) { return _mm512_reduce_ps(v, 1); }  // v - floor(v)
// p * 2^floor(x), and 0 in the lanes of m
VEC_INLINE f32x16 scaled_or_zero(mask16 m, f32x16 p, f32x16 x) { return _mm512_maskz_scalef_ps((__mmask16)~m, p, x); }

// The same tree in every level: lanes i and i + 8, then 4, 2, 1.
VEC_INLINE float reduce_add(f32x16 v) {
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
VEC_INLINE float reduce_max(f32x16 v) {
  __m256 a = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
VEC_INLINE int32_t reduce_max(i32x16 v) { return _mm512_reduce_max_epi32((__m512i)v); }
VEC_INLINE int32_t reduce_add(i32x16 v) { return _mm512_reduce_add_epi32((__m512i)v); }

// a b as 32 elements 0..31: the even ones, the odd ones; and back: a0 b0 a1 b1 ..
VEC_INLINE f32x16 even(f32x16 a, f32x16 b) { return _mm512_permutex2var_ps(a, (__m512i)(iota() * 2), b); }
VEC_INLINE f32x16 odd(f32x16 a, f32x16 b) { return _mm512_permutex2var_ps(a, (__m512i)(iota() * 2 + 1), b); }
VEC_INLINE f32x16 zip_lo(f32x16 a, f32x16 b) {
  return _mm512_permutex2var_ps(a, (__m512i)((iota() >> 1) + ((iota() & 1) << 4)), b);
}
VEC_INLINE f32x16 zip_hi(f32x16 a, f32x16 b) {
  return _mm512_permutex2var_ps(a, (__m512i)((iota() >> 1) + ((iota() & 1) << 4) + 8), b);
}

// lane i: i & S ? b[i - S] : a[i], and i & S ? b[i] : a[i + S]
template <int S> VEC_INLINE f32x16 lower(f32x16 a, f32x16 b) {
  return _mm512_permutex2var_ps(a, (__m512i)(iota() + (iota() & S) / S * (16 - S)), b);
}
template <int S> VEC_INLINE f32x16 upper(f32x16 a, f32x16 b) {
  return _mm512_permutex2var_ps(a, (__m512i)(iota() + S + (iota() & S) / S * (16 - S)), b);
}
template <int S> VEC_INLINE i32x16 lower(i32x16 a, i32x16 b) { return as_i32(lower<S>(as_f32(a), as_f32(b))); }
template <int S> VEC_INLINE i32x16 upper(i32x16 a, i32x16 b) { return as_i32(upper<S>(as_f32(a), as_f32(b))); }

VEC_INLINE f32x16 load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
VEC_INLINE f32x16 load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
// A register's worth of numbers
VEC_INLINE f32v part_f16(const uint16_t* p) { return load_f16(p); }
VEC_INLINE f32v part_bf16(const uint16_t* p) { return load_bf16(p); }
VEC_INLINE i32v part_u8(const uint8_t* p) { return (i32v)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
VEC_INLINE i32v part_i8(const int8_t* p) { return (i32v)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
// To nearest even, NaN kept; subnormals may become zero, as they do inside the bf16 dot.
VEC_INLINE void store_bf16(uint16_t* p, f32x16 v) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v)); }
VEC_INLINE void store_bf16(uint16_t* p, f32x16 a, f32x16 b) {
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}
// lane i: lo[i] as bf16 in the low half, hi[i] in the high half
VEC_INLINE i32x16 bf16_pairs(f32x16 lo, f32x16 hi) {
  __m512i l = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(lo));
  __m512i h = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(hi));
  return (i32x16)_mm512_or_si512(l, _mm512_slli_epi32(h, 16));
}
VEC_INLINE f32x16 rounded_bf16(f32x16 v) {  // as float32
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v)), 16));
}
VEC_INLINE void store_i8(int8_t* p, i32x16 v) {  // lanes in -128..127
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
}
VEC_INLINE void store_i16(int16_t* p, i32x16 v) {  // lanes in -32768..32767
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)v));
}

// Weights as bytes in 0 .. kLargest, one quad of K a lane. Dots take them less kOffset.
template <int kLargest> struct FewRows {
  static constexpr int kMostRows = 0;  // no kernel of their own
};
template <int kLargest> struct UnsignedWeights {
  using Quads = i32v;
  static constexpr int kOffset = 0;
  static constexpr bool kTurns = false;
  static VEC_INLINE Quads of(i32v bytes) { return bytes; }
  // sum[r] += N quads of weights times those of row r, which are at q + 32 r; the rows' dots are issued in turn
  template <int N> static VEC_INLINE void dot(i32v (&sum)[kInterleave], int rows, const Quads* w, const int8_t* q) {
    GEMM_UNROLL for (int j = 0; j < N; j++) GEMM_UNROLL for (int r = 0; r < kInterleave; r++) if (r < rows) {
      int32_t quad;
      memcpy(&quad, q + r * 32 + 4 * j, 4);
      sum[r] = (i32v)_mm512_dpbusd_epi32((__m512i)sum[r], (__m512i)w[j], _mm512_set1_epi32(quad));
    }
  }
};
// Bytes up to 255.
using SignedWeights = UnsignedWeights<255>;
// bytes 0 and 2, or 1 and 3, of each lane as signed 16-bit pairs
VEC_INLINE i32x16 even_s8(i32x16 line) { return (i32x16)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)line, 8), 8); }
VEC_INLINE i32x16 odd_s8(i32x16 line) { return (i32x16)_mm512_srai_epi16((__m512i)line, 8); }
// acc[i] += both products of the signed 16-bit pair in lane i with pair; none of the sums may leave 32 bits
VEC_INLINE i32x16 dot2_s16(i32x16 acc, i32x16 pairs, uint32_t pair) {
  return (i32x16)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)pairs, _mm512_set1_epi32((int)pair));
}
// acc[i] += both bf16 products of line lane i with pair
VEC_INLINE f32x16 dot2_bf16(f32x16 acc, i32x16 line, uint32_t pair) {
  return _mm512_dpbf16_ps(acc, (__m512bh)line, (__m512bh)_mm512_set1_epi32((int)pair));
}
// lane i: bytes 2j and 2j + 1 of quads lane i, both 0..15, looked up among 32 bf16 numbers
VEC_INLINE i32v bf16_pairs_u4(i32v quads, int j, const uint16_t* table) {
  const __m512i bytes = _mm512_set1_epi32(j ? (int)0x80038002 : (int)0x80018000);  // 0x80: a zero byte
  const __m512i lanes = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
  const __m512i index = _mm512_shuffle_epi8(
      (__m512i)quads, _mm512_or_si512(bytes, _mm512_and_si512(lanes, _mm512_set1_epi32(0x00ff00ff))));
  return (i32x16)_mm512_permutexvar_epi16(index, _mm512_loadu_si512(table));
}
// bytes 0 and 2 of each lane, signed, times 16 as 16 bits
VEC_INLINE i32v even_s8_times_16(i32v quads) {
  return (i32v)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)quads, 8), 4);
}
// every byte of quads, 0..15, looked up among 16
VEC_INLINE i32v lookup_u4(i32v quads, const uint8_t* table) {
  const __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return (i32v)_mm512_shuffle_epi8(entries, (__m512i)quads);
}

}  // namespace octavo::VEC_NS
