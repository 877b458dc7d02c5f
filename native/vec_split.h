// 16 lanes as kParts vectors of kLanes, in the compiler's portable vector types: the common part of vec_avx2.h and
// vec_generic.h. The includer defines VEC_NS and VEC_LANES; see vec_avx512.h for the meaning of each name.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#ifndef VEC_INLINE  // as builds for checks define it (CMakeLists.txt)
#define VEC_INLINE __attribute__((always_inline)) inline
#endif
#define GEMM_UNROLL _Pragma("GCC unroll 32")

namespace octavo::VEC_NS {

constexpr int kLanes = VEC_LANES, kParts = 16 / kLanes;
constexpr bool kBf16Dots = false;
typedef float f32v __attribute__((vector_size(VEC_LANES * 4)));
typedef int32_t i32v __attribute__((vector_size(VEC_LANES * 4)));
typedef uint32_t u32v __attribute__((vector_size(VEC_LANES * 4)));
typedef int16_t i16v __attribute__((vector_size(VEC_LANES * 4)));
typedef uint16_t u16v __attribute__((vector_size(VEC_LANES * 2)));
typedef int16_t i16h __attribute__((vector_size(VEC_LANES * 2)));

// the lanes of a mask are 0 or -1
struct f32x16 {
  f32v v[kParts];
};
struct i32x16 {
  i32v v[kParts];
};
struct u32x16 {
  u32v v[kParts];
};
struct mask16 {
  i32v v[kParts];
};

// clang-format off: a table, one operator a cell
#define VEC_EACH _Pragma("GCC unroll 4") for (int i = 0; i < kParts; i++)
#define VEC_OPERATOR(T, op) \
  VEC_INLINE T operator op(T a, T b) { VEC_EACH a.v[i] = a.v[i] op b.v[i]; return a; }
#define VEC_SCALAR(T, S, op) \
  VEC_INLINE T operator op(T a, S b) { VEC_EACH a.v[i] = a.v[i] op b; return a; }
VEC_OPERATOR(f32x16, +) VEC_OPERATOR(f32x16, -) VEC_OPERATOR(f32x16, *) VEC_OPERATOR(f32x16, /)
VEC_OPERATOR(i32x16, +) VEC_OPERATOR(i32x16, -) VEC_OPERATOR(i32x16, *)
VEC_OPERATOR(i32x16, &) VEC_OPERATOR(i32x16, |) VEC_OPERATOR(i32x16, ^)
VEC_OPERATOR(u32x16, +) VEC_OPERATOR(u32x16, -) VEC_OPERATOR(u32x16, *)
VEC_OPERATOR(u32x16, &) VEC_OPERATOR(u32x16, |) VEC_OPERATOR(u32x16, ^)
VEC_SCALAR(i32x16, int32_t, +) VEC_SCALAR(i32x16, int32_t, -) VEC_SCALAR(i32x16, int32_t, *)
VEC_SCALAR(i32x16, int32_t, &) VEC_SCALAR(i32x16, int32_t, |)
VEC_SCALAR(i32x16, int32_t, <<) VEC_SCALAR(i32x16, int32_t, >>)
VEC_SCALAR(u32x16, uint32_t, +) VEC_SCALAR(u32x16, uint32_t, -) VEC_SCALAR(u32x16, uint32_t, *)
VEC_SCALAR(u32x16, uint32_t, &) VEC_SCALAR(u32x16, uint32_t, |) VEC_SCALAR(u32x16, uint32_t, ^)
VEC_SCALAR(u32x16, int, <<) VEC_SCALAR(u32x16, int, >>)
#undef VEC_OPERATOR
#undef VEC_SCALAR
static_assert(kParts * kLanes == 16);
// clang-format on
VEC_INLINE f32x16 operator-(f32x16 a) {
  VEC_EACH a.v[i] = -a.v[i];
  return a;
}

// By part: GCC 12 copies the whole struct through the stack.
VEC_INLINE f32x16 load(const float* p) {
  f32x16 r;
  VEC_EACH memcpy(&r.v[i], p + i * kLanes, sizeof r.v[i]);
  return r;
}
VEC_INLINE i32x16 load(const int32_t* p) {
  i32x16 r;
  VEC_EACH memcpy(&r.v[i], p + i * kLanes, sizeof r.v[i]);
  return r;
}
VEC_INLINE i32x16 load_line(const void* p) { return load((const int32_t*)p); }
VEC_INLINE f32v part_f16(const uint16_t* p);
VEC_INLINE f32v part_bf16(const uint16_t* p);
VEC_INLINE f32x16 load_f16(const uint16_t* p) {
  f32x16 r;
  VEC_EACH r.v[i] = part_f16(p + i * kLanes);
  return r;
}
VEC_INLINE void store(float* p, f32x16 a) { VEC_EACH memcpy(p + i * kLanes, &a.v[i], sizeof a.v[i]); }
VEC_INLINE void store(int32_t* p, i32x16 a) { VEC_EACH memcpy(p + i * kLanes, &a.v[i], sizeof a.v[i]); }
VEC_INLINE void store_line(void* p, i32x16 a) { store((int32_t*)p, a); }
VEC_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
VEC_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

VEC_INLINE f32x16 zero() { return f32x16{}; }
VEC_INLINE f32x16 set1(float x) {
  f32x16 r;
  VEC_EACH r.v[i] = x - f32v{};
  return r;
}
VEC_INLINE i32x16 set1_i32(int32_t x) {
  i32x16 r;
  VEC_EACH r.v[i] = x - i32v{};
  return r;
}
VEC_INLINE u32x16 set1_u32(uint32_t x) {
  u32x16 r;
  VEC_EACH r.v[i] = x - u32v{};
  return r;
}
VEC_INLINE i32x16 iota() {
  const int32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(lane);
}

VEC_INLINE i32x16 as_i32(f32x16 a) {
  i32x16 r;
  VEC_EACH r.v[i] = (i32v)a.v[i];
  return r;
}
VEC_INLINE i32x16 as_i32(u32x16 a) {
  i32x16 r;
  VEC_EACH r.v[i] = (i32v)a.v[i];
  return r;
}
VEC_INLINE u32x16 as_u32(f32x16 a) {
  u32x16 r;
  VEC_EACH r.v[i] = (u32v)a.v[i];
  return r;
}
VEC_INLINE u32x16 as_u32(i32x16 a) {
  u32x16 r;
  VEC_EACH r.v[i] = (u32v)a.v[i];
  return r;
}
VEC_INLINE f32x16 as_f32(i32x16 a) {
  f32x16 r;
  VEC_EACH r.v[i] = (f32v)a.v[i];
  return r;
}
VEC_INLINE f32x16 as_f32(u32x16 a) {
  f32x16 r;
  VEC_EACH r.v[i] = (f32v)a.v[i];
  return r;
}
VEC_INLINE f32x16 to_f32(i32x16 a) {
  f32x16 r;
  VEC_EACH r.v[i] = __builtin_convertvector(a.v[i], f32v);
  return r;
}
// Adding 1.5 * 2^23 leaves the nearest even integer in the low mantissa bits.
VEC_INLINE i32x16 to_i32(f32x16 a) { return as_i32(a + set1(12582912.f)) - as_i32(set1(12582912.f)); }

VEC_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) {
  VEC_EACH a.v[i] = (f32v)((m.v[i] & (i32v)a.v[i]) | (~m.v[i] & (i32v)b.v[i]));
  return a;
}
VEC_INLINE i32x16 select(mask16 m, i32x16 a, i32x16 b) {
  VEC_EACH a.v[i] = (m.v[i] & a.v[i]) | (~m.v[i] & b.v[i]);
  return a;
}
VEC_INLINE mask16 less(f32x16 a, f32x16 b) {
  mask16 m;
  VEC_EACH m.v[i] = a.v[i] < b.v[i];
  return m;
}
VEC_INLINE mask16 equal(f32x16 a, f32x16 b) {
  mask16 m;
  VEC_EACH m.v[i] = a.v[i] == b.v[i];
  return m;
}
VEC_INLINE mask16 less(i32x16 a, i32x16 b) {
  mask16 m;
  VEC_EACH m.v[i] = a.v[i] < b.v[i];
  return m;
}
VEC_INLINE mask16 equal(i32x16 a, i32x16 b) {
  mask16 m;
  VEC_EACH m.v[i] = a.v[i] == b.v[i];
  return m;
}
VEC_INLINE mask16 both(mask16 a, mask16 b) {
  VEC_EACH a.v[i] &= b.v[i];
  return a;
}
VEC_INLINE mask16 either(mask16 a, mask16 b) {
  VEC_EACH a.v[i] |= b.v[i];
  return a;
}
VEC_INLINE mask16 first_lanes(int n) { return less(iota(), set1_i32(n)); }
VEC_INLINE f32x16 abs(f32x16 a) {
  VEC_EACH a.v[i] = (f32v)((i32v)a.v[i] & 0x7fffffff);
  return a;
}

VEC_INLINE f32x16 load_bf16(const uint16_t* p) {
  f32x16 r;
  VEC_EACH r.v[i] = part_bf16(p + i * kLanes);
  return r;
}
VEC_INLINE u32x16 round_bf16(f32x16 a) {  // the bf16 in the low half of each lane
  u32x16 u = as_u32(a), r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, nan = (u >> 16) | 0x40u;
  return as_u32(select(equal(a, a), as_i32(r), as_i32(nan)));
}
VEC_INLINE f32x16 rounded_bf16(f32x16 a) { return as_f32(round_bf16(a) << 16); }
VEC_INLINE i32x16 bf16_pairs(f32x16 lo, f32x16 hi) { return as_i32(round_bf16(lo) | round_bf16(hi) << 16); }
template <int S, int... I> VEC_INLINE f32v lower_part(f32v a, f32v b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I & S ? kLanes + I - S : I)...);
}
template <int S, int... I> VEC_INLINE f32v upper_part(f32v a, f32v b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I & S ? kLanes + I : I + S)...);
}
template <int S> VEC_INLINE f32x16 lower(f32x16 a, f32x16 b) {
  f32x16 r;
  VEC_EACH {
    if constexpr (S < kLanes) r.v[i] = lower_part<S>(a.v[i], b.v[i], std::make_integer_sequence<int, kLanes>());
    else r.v[i] = i & S / kLanes ? b.v[i - S / kLanes] : a.v[i];
  }
  return r;
}
template <int S> VEC_INLINE f32x16 upper(f32x16 a, f32x16 b) {
  f32x16 r;
  VEC_EACH {
    if constexpr (S < kLanes) r.v[i] = upper_part<S>(a.v[i], b.v[i], std::make_integer_sequence<int, kLanes>());
    else r.v[i] = i & S / kLanes ? b.v[i] : a.v[i + S / kLanes];
  }
  return r;
}
template <int S> VEC_INLINE i32x16 lower(i32x16 a, i32x16 b) { return as_i32(lower<S>(as_f32(a), as_f32(b))); }
template <int S> VEC_INLINE i32x16 upper(i32x16 a, i32x16 b) { return as_i32(upper<S>(as_f32(a), as_f32(b))); }
VEC_INLINE i32x16 even_s8(i32x16 line) {
  VEC_EACH line.v[i] = (i32v)((i16v)line.v[i] << 8 >> 8);
  return line;
}
VEC_INLINE i32x16 odd_s8(i32x16 line) {
  VEC_EACH line.v[i] = (i32v)((i16v)line.v[i] >> 8);
  return line;
}

}  // namespace octavo::VEC_NS
