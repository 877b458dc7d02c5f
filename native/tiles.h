// The eight tiles of AMX (Intel SDM, TMUL): up to 16 rows of up to 64 bytes each, multiplied with each other.
//   C[m][n] += A[m][..] . B[..][n]: B has a row for each pair of bf16, or quad of bytes, of a row of A
// The compiler knows of no tile and no kernel keeps one from call to call: who uses them calls tiles_begin for the shapes, and
// tiles_end. Where there is no AMX, with OCTAVO_TILE_MODEL, they are loops over arrays that give the same bits.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef OCTAVO_TILE_MODEL
#include "tests/tile_model.h"
#endif

namespace octavo {

constexpr int kTileLanes = 16;  // most rows of a tile, and 32-bit columns

// What ldtilecfg reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
  constexpr TileShapes& set(int tile, int num_rows, int row_bytes) {
    rows[tile] = (uint8_t)num_rows, bytes[tile] = (uint16_t)row_bytes;
    return *this;
  }
};

#ifdef OCTAVO_TILE_MODEL
inline void tiles_begin(const TileShapes& shapes) { tile_model::configure(shapes.rows, shapes.bytes); }
inline void tiles_end() { tile_model::release(); }
template <int T> inline void tile_zero() { tile_model::zero(T); }
template <int T> inline void tile_load(const void* p, int64_t stride) { tile_model::load(T, p, stride); }
template <int T> inline void tile_store(void* p, int64_t stride) { tile_model::store(T, p, stride); }
template <int C, int A, int B> inline void tile_dot_bf16() { tile_model::dot_bf16(C, A, B); }
template <int C, int A, int B> inline void tile_dot_s8_s8() { tile_model::dot_bytes<int8_t, int8_t>(C, A, B); }
template <int C, int A, int B> inline void tile_dot_s8_u8() { tile_model::dot_bytes<int8_t, uint8_t>(C, A, B); }
template <int C, int A, int B> inline void tile_dot_u8_s8() { tile_model::dot_bytes<uint8_t, int8_t>(C, A, B); }
#elif defined(__x86_64__)
#define TILE_INLINE __attribute__((always_inline)) inline
TILE_INLINE void tiles_begin(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
TILE_INLINE void tiles_end() { asm volatile("tilerelease"); }
template <int T> TILE_INLINE void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
// Rows are `stride` bytes apart.
template <int T> TILE_INLINE void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
template <int T> TILE_INLINE void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
// float32 += pairs of bf16. Sums of 16 pairs are added as one: the even and the odd products each by fmas from 0 on, then
// both, all to nearest even and subnormals as 0.
template <int C, int A, int B> TILE_INLINE void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// int32 += quads of bytes, signed or not
template <int C, int A, int B> TILE_INLINE void tile_dot_s8_s8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B> TILE_INLINE void tile_dot_s8_u8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B> TILE_INLINE void tile_dot_u8_s8() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#undef TILE_INLINE
#endif

}  // namespace octavo
