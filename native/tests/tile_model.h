// The tiles of AMX as arrays, and their instructions as loops, for tests where there is none (Intel SDM, TMUL).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace octavo::tile_model {

struct Tile {
  int rows = 0, bytes = 0;
  alignas(64) uint8_t at[16][64] = {};
};
inline thread_local Tile tiles[8];

inline void configure(const uint8_t* rows, const uint16_t* bytes) {
  for (int i = 0; i < 8; i++) tiles[i] = Tile{rows[i], bytes[i], {}};
}
inline void zero(int t) { std::memset(tiles[t].at, 0, sizeof tiles[t].at); }
inline void load(int t, const void* p, int64_t stride) {
  zero(t);
  for (int r = 0; r < tiles[t].rows; r++)
    std::memcpy(tiles[t].at[r], static_cast<const uint8_t*>(p) + r * stride, static_cast<size_t>(tiles[t].bytes));
}
inline void store(int t, void* p, int64_t stride) {
  for (int r = 0; r < tiles[t].rows; r++)
    std::memcpy(static_cast<uint8_t*>(p) + r * stride, tiles[t].at[r], static_cast<size_t>(tiles[t].bytes));
}

template <class T> T element(const Tile& t, int row, int i) {
  T x;
  std::memcpy(&x, t.at[row] + i * static_cast<int>(sizeof(T)), sizeof x);
  return x;
}
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x; }
inline float bf16(const Tile& t, int row, int i) {
  const uint32_t bits = uint32_t{element<uint16_t>(t, row, i)} << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return flushed(x);
}

inline void dot_bf16(int c, int a, int b) {
  Tile& sum = tiles[c];
  for (int m = 0; m < sum.rows; m++)
    for (int n = 0; n < sum.bytes / 4; n++) {
      float even = 0, odd = 0;
      for (int k = 0; k < tiles[a].bytes / 4; k++) {
        even = flushed(std::fma(bf16(tiles[a], m, 2 * k), bf16(tiles[b], k, 2 * n), even));
        odd = flushed(std::fma(bf16(tiles[a], m, 2 * k + 1), bf16(tiles[b], k, 2 * n + 1), odd));
      }
      const float both = flushed(even + odd), out = flushed(flushed(element<float>(sum, m, n)) + both);
      std::memcpy(sum.at[m] + 4 * n, &out, sizeof out);
    }
}

template <class Left, class Right> void dot_bytes(int c, int a, int b) {
  Tile& sum = tiles[c];
  for (int m = 0; m < sum.rows; m++)
    for (int n = 0; n < sum.bytes / 4; n++) {
      auto out = element<int32_t>(sum, m, n);
      for (int k = 0; k < tiles[a].bytes; k++)
        out += int{element<Left>(tiles[a], m, k)} * int{element<Right>(tiles[b], k / 4, 4 * n + k % 4)};
      std::memcpy(sum.at[m] + 4 * n, &out, sizeof out);
    }
}

}  // namespace octavo::tile_model
