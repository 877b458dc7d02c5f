#include "pack.h"

#include <cstring>

namespace octavo {
namespace {

int up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// One float panel: columns [col, end) of T from row-major rows. Pairs puts two K of a column side by side.
template <class T, bool Pairs> void pack_floats(const uint8_t* src, size_t row_bytes, int cols, int k, uint8_t* dst) {
  constexpr int kStep = 64 / sizeof(T);  // a line of the source at a time, so that the panel is written in order
  for (int k0 = 0; k0 < k; k0 += kStep)
    for (int c = 0; c < cols; c++) {
      const int n = k - k0 < kStep ? k - k0 : kStep;
      T line[kStep];
      memcpy(line, src + c * row_bytes + k0 * sizeof(T), n * sizeof(T));
      for (int i = 0; i < n; i++) {
        const int at = Pairs ? ((k0 + i) / 2 * 32 + c) * 2 + i % 2 : (k0 + i) * 32 + c;
        memcpy(dst + at * sizeof(T), &line[i], sizeof(T));
      }
    }
}

// One integer panel. A source block is [scale][minimum][values]; four bytes of values are one column of a line: for
// nibbles GGUF's byte i holds K i and i + 16, which is the packed order as well.
template <Format F> void pack_blocks(const uint8_t* src, size_t row_bytes, int cols, int k, uint8_t* dst) {
  constexpr int kHeader = F == Format::W4F ? 4 : 2, kLines = F == Format::W8 ? 8 : 4;
  constexpr int kBlock = kHeader + 4 * kLines;
  for (int g = 0; g < k / 32; g++) {
    uint8_t* unit = dst + g / 2 * unit_bytes(F);
    uint8_t *lines = unit + g % 2 * kLines * 64, *scales = unit + kLines * 128 + g % 2 * 32;
    for (int c = 0; c < cols; c++) {
      const uint8_t* block = src + c * row_bytes + g * kBlock;
      memcpy(scales + c * 2, block, 2);
      if (F == Format::W4F) memcpy(scales + 64 + c * 2, block + 2, 2);
      for (int j = 0; j < kLines; j++) {
        uint32_t quad;
        memcpy(&quad, block + kHeader + 4 * j, 4);
        if (F == Format::W8) quad ^= 0x80808080u;  // signed to unsigned with zero point 128
        memcpy(lines + j * 64 + c * 4, &quad, 4);
      }
    }
  }
}

}  // namespace

size_t packed_bytes(Format f, int n, int k) {
  return (size_t)(up(n, 32) / panel_cols(f)) * (size_t)(up(k, 64) / 64) * (size_t)unit_bytes(f);
}

Weight packed_weight(Format f, int n, int k, const uint8_t* data) {
  return {f, n, k, up(n, 32), up(k, 64), data, (size_t)(up(k, 64) / 64) * (size_t)unit_bytes(f)};
}

void pack(Format f, const uint8_t* src, size_t row_bytes, int n, int k, uint8_t* dst, int panel0, int panel1) {
  const Weight w = packed_weight(f, n, k, dst);
  const int width = panel_cols(f);
  for (int p = panel0; p < panel1 && p * width < n; p++) {
    const uint8_t* rows = src + (size_t)p * width * row_bytes;
    const int cols = n - p * width < width ? n - p * width : width;
    uint8_t* to = dst + p * w.panel_bytes;
    switch (f) {
      case Format::F32: pack_floats<uint32_t, false>(rows, row_bytes, cols, k, to); break;
      case Format::F16: pack_floats<uint16_t, false>(rows, row_bytes, cols, k, to); break;
      case Format::BF16: pack_floats<uint16_t, true>(rows, row_bytes, cols, k, to); break;
      case Format::W8: pack_blocks<Format::W8>(rows, row_bytes, cols, k, to); break;
      case Format::W4: pack_blocks<Format::W4>(rows, row_bytes, cols, k, to); break;
      case Format::W4F: pack_blocks<Format::W4F>(rows, row_bytes, cols, k, to); break;
    }
  }
}

}  // namespace octavo
