// The tiles of AMX as arrays, and their instructions as loops, for tests where there is none (Intel SDM, TMUL).
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "bf16_model.h"

namespace octavo::tile_model {

using namespace bf16_model;

struct Tile {
  int rows = 0, bytes = 0;
  alignas(64) uint8_t at[16][64] = {};
};
inline thread_local Tile tiles[8];

// What the processor refuses ends the process here, too.
inline void expect(bool possible) {
  if (!possible) std::abort();
}
inline void configure(const uint8_t* rows, const uint16_t* bytes) {  // of all eight
  for (int i = 0; i < 8; i++) {
    expect(rows[i] <= 16 && bytes[i] <= 64 && !rows[i] == !bytes[i]);
    tiles[i] = Tile{rows[i], bytes[i], {}};
  }
}
inline void release() {
  for (Tile& tile : tiles) tile = {};
}
inline void zero(int t) {
  expect(tiles[t].rows > 0 && tiles[t].bytes > 0);
  std::memset(tiles[t].at, 0, sizeof tiles[t].at);
}
inline void load(int t, const void* p, int64_t stride) {
  zero(t);
  for (int r = 0; r < tiles[t].rows; r++)
    std::memcpy(tiles[t].at[r], static_cast<const uint8_t*>(p) + r * stride, static_cast<size_t>(tiles[t].bytes));
}
inline void store(int t, void* p, int64_t stride) {
  expect(tiles[t].rows > 0 && tiles[t].bytes > 0);
  for (int r = 0; r < tiles[t].rows; r++)
    std::memcpy(static_cast<uint8_t*>(p) + r * stride, tiles[t].at[r], static_cast<size_t>(tiles[t].bytes));
}

template <class T> T element(const Tile& t, int row, int i) {
  T x;
  std::memcpy(&x, t.at[row] + i * static_cast<int>(sizeof(T)), sizeof x);
  return x;
}
inline void expect_product(int c, int a, int b) {
  expect(tiles[c].rows > 0 && tiles[c].bytes > 0 && c != a && c != b && a != b);
  expect(tiles[c].rows == tiles[a].rows && tiles[c].bytes == tiles[b].bytes && tiles[a].bytes == tiles[b].rows * 4);
}

inline void dot_bf16(int c, int a, int b) {
  expect_product(c, a, b);
  Tile& sum = tiles[c];
  for (int m = 0; m < sum.rows; m++)
    for (int n = 0; n < sum.bytes / 4; n++) {
      float even = 0, odd = 0;
      for (int k = 0; k < tiles[a].bytes / 4; k++) {
        const auto product = [&](int i, float sum) {
          return fused(widened(element<uint16_t>(tiles[a], m, 2 * k + i)),
                       widened(element<uint16_t>(tiles[b], k, 2 * n + i)), sum);
        };
        even = product(0, even), odd = product(1, odd);
      }
      const float both = flushed(even + odd), out = flushed(flushed(element<float>(sum, m, n)) + both);
      std::memcpy(sum.at[m] + 4 * n, &out, sizeof out);
    }
}

template <class Left, class Right> void dot_bytes(int c, int a, int b) {
  expect_product(c, a, b);
  Tile& sum = tiles[c];
  for (int m = 0; m < sum.rows; m++)
    for (int n = 0; n < sum.bytes / 4; n++) {
      auto out = element<uint32_t>(sum, m, n);  // which wraps
      for (int k = 0; k < tiles[a].bytes; k++)
        out += static_cast<uint32_t>(int{element<Left>(tiles[a], m, k)} *
                                     int{element<Right>(tiles[b], k / 4, 4 * n + k % 4)});
      std::memcpy(sum.at[m] + 4 * n, &out, sizeof out);
    }
}

}  // namespace octavo::tile_model
