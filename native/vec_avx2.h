// 16 lanes for AVX2, FMA and F16C: two vectors of eight floats.
#pragma once
#include <immintrin.h>
#define VEC_LANES 8
#include "vec_split.h"

namespace octavo::VEC_NS {

constexpr int kMaxRows = 4;
constexpr int kMaxRowsWide = 2;
constexpr int kMaxRowsFloat = 6, kRowsFloat = 48, kFloatDepth = 64;
constexpr int kInterleave = 1;

VEC_INLINE f32v fma(f32v a, f32v b, f32v c) { return _mm256_fmadd_ps(a, b, c); }
VEC_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  VEC_EACH c.v[i] = _mm256_fmadd_ps(a.v[i], b.v[i], c.v[i]);
  return c;
}
// sum += a * b, in the register of the sum: GCC 12 lets sums move, and copies or spills them where registers are scarce.
VEC_INLINE void add_product(f32v& sum, f32v a, f32v b) {
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
}
VEC_INLINE void add_product(f32x16& sum, f32x16 a, f32x16 b) {
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum.v[0]) : "x"(a.v[0]), "x"(b.v[0]));
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum.v[1]) : "x"(a.v[1]), "x"(b.v[1]));
}
// The upper bf16 of each lane. The mask stays in memory: sums take all registers.
VEC_INLINE f32x16 upper_bf16(i32x16 pairs) {
  alignas(32) static constexpr uint32_t kUpper[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                     0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
  __asm__("vpand %1, %0, %0" : "+x"(pairs.v[0]) : "m"(kUpper));
  __asm__("vpand %1, %0, %0" : "+x"(pairs.v[1]) : "m"(kUpper));
  return as_f32(pairs);
}
VEC_INLINE f32x16 max(f32x16 a, f32x16 b) {
  VEC_EACH a.v[i] = _mm256_max_ps(a.v[i], b.v[i]);
  return a;
}
VEC_INLINE f32x16 min(f32x16 a, f32x16 b) {
  VEC_EACH a.v[i] = _mm256_min_ps(a.v[i], b.v[i]);
  return a;
}
VEC_INLINE i32x16 max(i32x16 a, i32x16 b) {
  VEC_EACH a.v[i] = (i32v)_mm256_max_epi32((__m256i)a.v[i], (__m256i)b.v[i]);
  return a;
}
VEC_INLINE uint32_t bits(mask16 m) {
  return (uint32_t)_mm256_movemask_ps((__m256)m.v[0]) | (uint32_t)_mm256_movemask_ps((__m256)m.v[1]) << 8;
}

// masks of the first n lanes
VEC_INLINE f32x16 load_n(const float* p, int n) {
  const mask16 m = first_lanes(n);
  f32x16 r;
  VEC_EACH r.v[i] = _mm256_maskload_ps(p + 8 * i, (__m256i)m.v[i]);
  return r;
}
VEC_INLINE void store_n(float* p, f32x16 v, int n) {
  const mask16 m = first_lanes(n);
  VEC_EACH _mm256_maskstore_ps(p + 8 * i, (__m256i)m.v[i], v.v[i]);
}

// The tree of vec_avx512.h: lanes i and i + 8, then 4, 2, 1.
VEC_INLINE float reduce_add(f32x16 a) {
  const __m256 s = a.v[0] + a.v[1];
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
VEC_INLINE float reduce_max(f32x16 a) {
  const __m256 s = _mm256_max_ps(a.v[0], a.v[1]);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
VEC_INLINE int32_t reduce_max(i32x16 a) {
  const __m256i s = _mm256_max_epi32((__m256i)a.v[0], (__m256i)a.v[1]);
  __m128i b = _mm_max_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
VEC_INLINE int32_t reduce_add(i32x16 a) {
  const __m256i s = _mm256_add_epi32((__m256i)a.v[0], (__m256i)a.v[1]);
  __m128i b = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  b = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}

VEC_INLINE f32v every_second(f32v a, f32v b, bool second) {
  const __m256d both = (__m256d)(second ? _mm256_shuffle_ps(a, b, 0xdd) : _mm256_shuffle_ps(a, b, 0x88));
  return (f32v)_mm256_permute4x64_pd(both, 0xd8);
}
VEC_INLINE f32x16 even(f32x16 a, f32x16 b) {
  return {every_second(a.v[0], a.v[1], false), every_second(b.v[0], b.v[1], false)};
}
VEC_INLINE f32x16 odd(f32x16 a, f32x16 b) {
  return {every_second(a.v[0], a.v[1], true), every_second(b.v[0], b.v[1], true)};
}
VEC_INLINE f32x16 zip(f32v a, f32v b) {
  const __m256 first = _mm256_unpacklo_ps(a, b), last = _mm256_unpackhi_ps(a, b);
  return {_mm256_permute2f128_ps(first, last, 0x20), _mm256_permute2f128_ps(first, last, 0x31)};
}
VEC_INLINE f32x16 zip_lo(f32x16 a, f32x16 b) { return zip(a.v[0], b.v[0]); }
VEC_INLINE f32x16 zip_hi(f32x16 a, f32x16 b) { return zip(a.v[1], b.v[1]); }

// Packing takes turns with the halves of both operands.
VEC_INLINE __m256i in_order(__m256i packed) { return _mm256_permute4x64_epi64(packed, 0xd8); }
VEC_INLINE void store_bf16(uint16_t* p, f32x16 a) {
  const u32x16 u = round_bf16(a);
  _mm256_storeu_si256((__m256i*)p, in_order(_mm256_packus_epi32((__m256i)u.v[0], (__m256i)u.v[1])));
}
VEC_INLINE void store_i16(int16_t* p, i32x16 a) {
  _mm256_storeu_si256((__m256i*)p, in_order(_mm256_packs_epi32((__m256i)a.v[0], (__m256i)a.v[1])));
}
VEC_INLINE void store_i8(int8_t* p, i32x16 a) {
  const __m256i h = in_order(_mm256_packs_epi32((__m256i)a.v[0], (__m256i)a.v[1]));
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1)));
}

VEC_INLINE f32v part_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

VEC_INLINE f32v part_bf16(const uint16_t* p) {
  return (f32v)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
// GCC 12 converts vectors of bytes one by one.
VEC_INLINE i32v part_u8(const uint8_t* p) { return (i32v)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
VEC_INLINE i32v part_i8(const int8_t* p) { return (i32v)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }

VEC_INLINE __m256i broadcast_quad(const int8_t* q) {
  int32_t quad;
  memcpy(&quad, q, 4);
  return _mm256_set1_epi32(quad);
}
// The byte form of the product adds two neighbours in 16 bits and saturates there, so that as many products meet in 16 bits
// as fit.
constexpr int at_once(int largest_product) {
  const int fit = 32767 / (2 * largest_product);
  return fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : fit;
}

// Few rows, quad by quad, so that a quad is used where it was decoded. Where weights are above 127 not even one product
// fits: activations come in two planes then, q = low + 16 high with low in 0 .. 15 and high in -8 .. 7.
template <int kLargest> struct FewRows {
  static constexpr int kPlanes = kLargest > 127 ? 2 : 1, kMostRows = kPlanes == 1 ? 4 : 2;  // of a tile
  static constexpr int quads_at_once(int plane) { return at_once(kLargest * (kPlanes == 1 ? 127 : plane ? 8 : 15)); }
  static_assert(quads_at_once(0) && quads_at_once(kPlanes - 1));

  struct Row {  // a group of it
    const int8_t* of[2];
    alignas(32) int8_t planes[kPlanes == 2 ? 64 : 0];
    VEC_INLINE void take(const int8_t* q) {
      of[0] = of[1] = q;
      if constexpr (kPlanes == 2) {
        const __m256i both = _mm256_loadu_si256((const __m256i*)q), nibble = _mm256_set1_epi8(15);
        const __m256i sign = _mm256_set1_epi8(8), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
        _mm256_store_si256((__m256i*)planes, _mm256_and_si256(both, nibble));
        _mm256_store_si256((__m256i*)planes + 1, _mm256_sub_epi8(_mm256_xor_si256(high, sign), sign));
        __asm__("" : "+m"(planes));  // to be read from memory: GCC 12 makes broadcasts out of registers in two steps
        of[0] = planes, of[1] = planes + 32;
      }
    }
  };
  struct Dot {  // of a register of weights
    i32v sum{};
    __m256i pairs[kPlanes];
    // += w, the i-th of n quads, times quad j of the row
    VEC_INLINE void add(int i, int n, i32v w, const Row& row, int j) {
      GEMM_UNROLL for (int p = 0; p < kPlanes; p++) {
        const __m256i product = _mm256_maddubs_epi16((__m256i)w, broadcast_quad(row.of[p] + 4 * j));
        pairs[p] = i % quads_at_once(p) ? _mm256_add_epi16(pairs[p], product) : product;
        __asm__("" : "+x"(pairs[p]));  // one chain: a tree of additions takes registers
        if ((i + 1) % quads_at_once(p) == 0 || i + 1 == n)
          sum += (i32v)_mm256_madd_epi16(pairs[p], _mm256_set1_epi16(p ? 16 : 1));
      }
    }
  };
};

// Many rows, a group of weights in registers
template <int kLargest> struct UnsignedWeights {
  using Quads = i32v;
  static constexpr int kOffset = 0, kAtOnce = at_once(127 * kLargest);
  static_assert(kAtOnce > 0);
  static VEC_INLINE Quads of(i32v bytes) { return bytes; }

  // Turned quads: with N quads of a row again and again in a line of 64 bytes, the load at quad i has quad
  // (i + c) % N in lane c. Where lane c of w[i] is what was lane c of w[(i + c) % N], nothing is broadcast.
  static constexpr bool kTurns = kAtOnce > 1;
  template <int N> static VEC_INLINE void turn(Quads* w) {
    static_assert(N == 8 || N == 4);
    __m256i a[N], b[N];
    GEMM_UNROLL for (int i = 0; i < N; i++) a[i] = _mm256_blend_epi32((__m256i)w[i], (__m256i)w[(i + 1) % N], 0xaa);
    GEMM_UNROLL for (int i = 0; i < N; i++) b[i] = _mm256_blend_epi32(a[i], a[(i + 2) % N], 0xcc);
    GEMM_UNROLL for (int i = 0; i < N; i++) w[i] =
        (i32v)(N == 8 ? _mm256_blend_epi32(b[i], b[(i + 4) % N], 0xf0) : b[i]);
  }
  template <int N> static VEC_INLINE void put_again(int8_t* line, const int8_t* q) {
    const __m256i quads = N == 8 ? _mm256_loadu_si256((const __m256i*)q)
                                 : _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)q));
    _mm256_store_si256((__m256i*)line, quads);
    _mm256_store_si256((__m256i*)line + 1, quads);
  }
  template <int N> static VEC_INLINE void dot_turned(i32v& sum, const Quads* w, const int8_t* line) {
    constexpr int kRun = kAtOnce < N ? kAtOnce : N;
    GEMM_UNROLL for (int i = 0; i < N; i += kRun) {
      __m256i pairs[2] = {};
      GEMM_UNROLL for (int j = i; j < i + kRun; j++) {
        const __m256i quads = _mm256_loadu_si256((const __m256i*)(line + 4 * j));
        pairs[j % 2] = _mm256_add_epi16(pairs[j % 2], _mm256_maddubs_epi16((__m256i)w[j], quads));
        __asm__("" : "+x"(pairs[j % 2]));  // two chains: a tree of additions takes registers that the scales need
      }
      sum += (i32v)_mm256_madd_epi16(_mm256_add_epi16(pairs[0], pairs[1]), _mm256_set1_epi16(1));
    }
  }
};
// |w| times the activation with the sign of w: 2 * 128 * 127 fits 16 bits, also where w is -128.
struct SignedWeights {
  static constexpr int kOffset = 128;
  static constexpr bool kTurns = false;
  struct Quads {
    __m256i w, magnitude;
  };
  static VEC_INLINE Quads of(i32v bytes) {
    const __m256i w = _mm256_xor_si256((__m256i)bytes, _mm256_set1_epi8(-128));
    return {w, _mm256_abs_epi8(w)};
  }
  template <int N> static VEC_INLINE void dot(i32v (&sum)[kInterleave], int, const Quads* w, const int8_t* q) {
    GEMM_UNROLL for (int j = 0; j < N; j++) {
      const __m256i pairs = _mm256_maddubs_epi16(w[j].magnitude, _mm256_sign_epi8(broadcast_quad(q + 4 * j), w[j].w));
      sum[0] += (i32v)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
  }
};
// Bytes 0 and 2 of each lane, signed, times 16 as 16 bits: a product, for shifts are scarce
VEC_INLINE i32v even_s8_times_16(i32v quads) {
  return (i32v)_mm256_maddubs_epi16(_mm256_set1_epi16(16), (__m256i)quads);
}
VEC_INLINE i32v lookup_u4(i32v quads, const uint8_t* table) {
  const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return (i32v)_mm256_shuffle_epi8(entries, (__m256i)quads);
}
VEC_INLINE i32x16 dot2_s16(i32x16 acc, i32x16 pairs, uint32_t pair) {
  const __m256i p = _mm256_set1_epi32((int)pair);
  VEC_EACH acc.v[i] += (i32v)_mm256_madd_epi16((__m256i)pairs.v[i], p);
  return acc;
}
VEC_INLINE f32x16 dot2_bf16(f32x16 acc, i32x16 line, uint32_t pair) {
  const __m256i both = _mm256_set1_epi32((int)pair), upper = _mm256_set1_epi32((int)0xffff0000);
  const __m256 low = (__m256)_mm256_slli_epi32(both, 16), high = (__m256)_mm256_and_si256(both, upper);
  VEC_EACH acc.v[i] = _mm256_fmadd_ps((__m256)_mm256_slli_epi32((__m256i)line.v[i], 16), low, acc.v[i]);
  VEC_EACH acc.v[i] = _mm256_fmadd_ps((__m256)_mm256_and_si256((__m256i)line.v[i], upper), high, acc.v[i]);
  return acc;
}
// lane i: bytes 2j and 2j + 1 of quads lane i, both 0..15, looked up among bf16 numbers, their bytes apart
VEC_INLINE i32v bf16_pairs_u4(i32v quads, int j, const uint16_t* table) {
  const __m128i a = _mm_loadu_si128((const __m128i*)table), b = _mm_loadu_si128((const __m128i*)table + 1);
  const __m128i byte = _mm_set1_epi16(255);
  const __m256i lows = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_and_si128(a, byte), _mm_and_si128(b, byte)));
  const __m256i highs = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8)));
  const __m256i low = _mm256_shuffle_epi8(lows, (__m256i)quads), high = _mm256_shuffle_epi8(highs, (__m256i)quads);
  const __m256 first = (__m256)_mm256_unpacklo_epi8(low, high), last = (__m256)_mm256_unpackhi_epi8(low, high);
  return (i32v)(j ? _mm256_shuffle_ps(first, last, 0xdd) : _mm256_shuffle_ps(first, last, 0x88));
}

}  // namespace octavo::VEC_NS
