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

// ---------------------------------------------------------------- blocks of codes (layouts: weights/formats/codes.py)

struct Block {
  int cols, bytes;
};
constexpr Block block_of(Format f) {
  switch (f) {
    case Format::W8: return {32, 34};
    case Format::W4:
    case Format::W4N: return {32, 18};
    case Format::W4F:
    case Format::W4Z: return {32, 20};
    case Format::W5: return {32, 22};
    case Format::W5F: return {32, 24};
    case Format::W4M: return {32, 17};
    case Format::W4V:
    case Format::W4Z64: return {64, 36};
    case Format::W8Z64:
    case Format::F8: return {64, 68};
    case Format::W4C: return {256, 132};
    case Format::W2K: return {256, 84};
    case Format::W3K: return {256, 110};
    case Format::W4K: return {256, 144};
    case Format::W5K: return {256, 176};
    case Format::W6K: return {256, 210};
    case Format::W4X: return {256, 136};
    case Format::F32:
    case Format::F16:
    case Format::BF16: break;
  }
  return {1, (int)info_of(f).low / 8};
}

uint32_t load4(const uint8_t* p) {
  uint32_t v;
  memcpy(&v, p, 4);
  return v;
}
uint16_t load2(const uint8_t* p) {
  uint16_t v;
  memcpy(&v, p, 2);
  return v;
}

// 32 columns of nibbles as in Q4_0: byte i holds column i low and column i + 16 high
void nibbles(const uint8_t* p, uint32_t quad[8]) {
  for (int j = 0; j < 4; j++) quad[j] = load4(p + 4 * j) & 0x0f0f0f0f, quad[j + 4] = load4(p + 4 * j) >> 4 & 0x0f0f0f0f;
}

// The codes of columns [32 g, 32 g + 32) of a block, four of them a word.
template <Format F> void quads(const uint8_t* block, int g, uint32_t quad[8]) {
  using enum Format;
  if constexpr (F == W8) {
    for (int j = 0; j < 8; j++) quad[j] = load4(block + 2 + 4 * j) ^ 0x80808080u;  // signed to unsigned
  } else if constexpr (F == W8Z64 || F == F8) {
    for (int j = 0; j < 8; j++) quad[j] = load4(block + 4 + 32 * g + 4 * j);
  } else if constexpr (F == W4V) {  // 8 bytes for 16 columns
    for (int j = 0; j < 8; j++)
      quad[j] = load4(block + 4 + (2 * g + j / 4) * 8 + j % 2 * 4) >> j % 4 / 2 * 4 & 0x0f0f0f0f;
  } else if constexpr (F == W5 || F == W5F) {
    const uint8_t* high = block + (F == W5F ? 4 : 2);
    nibbles(high + 4, quad);
    for (int j = 0; j < 8; j++)  // four bits to the lowest of four bytes each
      quad[j] |= (((load4(high) >> 4 * j & 15) * 0x00204081u) & 0x01010101u) << 4;
  } else if constexpr (F == W4K || F == W5K) {
    const uint8_t* low = block + (F == W5K ? 48 : 16) + g / 2 * 32;
    for (int j = 0; j < 8; j++) {
      quad[j] = load4(low + 4 * j) >> g % 2 * 4 & 0x0f0f0f0f;
      if constexpr (F == W5K) quad[j] |= (load4(block + 16 + 4 * j) >> g & 0x01010101) << 4;
    }
  } else if constexpr (F == W2K || F == W3K) {
    const uint8_t* low = block + (F == W3K ? 32 : 16) + g / 4 * 32;
    for (int j = 0; j < 8; j++) {
      quad[j] = load4(low + 4 * j) >> g % 4 * 2 & 0x03030303;
      if constexpr (F == W3K) quad[j] |= (load4(block + 4 * j) >> g & 0x01010101) << 2;
    }
  } else if constexpr (F == W6K) {
    const uint8_t *low = block + g / 4 * 64 + g % 2 * 32, *high = block + 128 + g / 4 * 32;
    for (int j = 0; j < 8; j++)
      quad[j] = (load4(low + 4 * j) >> g % 4 / 2 * 4 & 0x0f0f0f0f) | (load4(high + 4 * j) >> g % 4 * 2 & 0x03030303)
                                                                         << 4;
  } else {
    constexpr int kHeader = F == W4 || F == W4N ? 2 : F == W4M ? 1 : F == W4X ? 8 : 4;
    nibbles(block + kHeader + 16 * g, quad);
  }
}

// The six-bit sub-scales and sub-minima of Q4_K and Q5_K.
void sub_k4(const uint8_t* s, int g, uint8_t& scale, uint8_t& minimum) {
  if (g < 4) {
    scale = s[g] & 63, minimum = s[g + 4] & 63;
  } else {
    scale = static_cast<uint8_t>((s[g + 4] & 15) | s[g - 4] >> 6 << 4);
    minimum = static_cast<uint8_t>(s[g + 4] >> 4 | s[g] >> 6 << 4);
  }
}

// The numbers of a block: into those of its unit, `at` columns of K from the start, for panel column c.
template <Format F> void numbers(const uint8_t* block, int at, int c, uint8_t* out) {
  using enum Format;
  auto half = [&](int to, int from) { memcpy(out + to + 2 * c, block + from, 2); };
  auto byte = [&](int to, unsigned value) { out[to + c] = static_cast<uint8_t>(value); };
  const int g = at / 32;
  if constexpr (F == W8 || F == W4 || F == W4N || F == W5) {
    half(g * 32, 0);
  } else if constexpr (F == W4F || F == W5F) {
    half(g * 32, 0), half(64 + g * 32, 2);
  } else if constexpr (F == W4M) {  // 2^(e - 128) as bf16, the smallest two subnormal
    const unsigned e = block[0];
    const uint16_t scale = static_cast<uint16_t>(e < 2 ? 0x20u << e : (e - 1) << 7);
    memcpy(out + g * 32 + 2 * c, &scale, 2);
  } else if constexpr (F == W4V) {
    for (int i = 0; i < 4; i++) byte(i * 16, (block[i] & 0x7f) == 0x7f ? 0 : block[i] & 0x7f);
  } else if constexpr (F == W4Z) {
    half(g * 32, 0), byte(64 + g * 16, block[2]);
  } else if constexpr (F == W4Z64 || F == W8Z64) {
    half(0, 0), byte(32, block[2]);
  } else if constexpr (F == W4C) {
    byte(0, block[0]);
  } else if constexpr (F == F8) {
    memcpy(out + 4 * c, block, 4);
  } else if constexpr (F == W2K) {
    for (int i = 0; i < 16; i++) byte(i * 16, block[i]);
    half(256, 80), half(288, 82);
  } else if constexpr (F == W3K) {
    for (int i = 0; i < 16; i++) {
      const unsigned low = block[96 + i % 8] >> i / 8 * 4 & 15, high = block[104 + i % 4] >> i / 4 * 2 & 3;
      byte(i * 16, (low | high << 4) - 32);
    }
    half(256, 108);
  } else if constexpr (F == W4K || F == W5K) {
    for (int i = 0; i < 8; i++) {
      uint8_t scale, minimum;
      sub_k4(block + 4, i, scale, minimum);
      byte(i * 16, scale), byte(128 + i * 16, minimum);
    }
    half(256, 0), half(288, 2);
  } else if constexpr (F == W6K) {
    for (int i = 0; i < 16; i++) byte(i * 16, block[192 + i]);
    half(256, 208);
  } else {
    static_assert(F == W4X);
    for (int i = 0; i < 8; i++)
      byte(i * 16, ((block[4 + i / 2] >> i % 2 * 4 & 15u) | (load2(block + 2) >> 2 * i & 3u) << 4) - 32u);
    half(128, 0);
  }
}

// `width` bits from `shift` on of the quads of a group, into its lines for panel column c.
void plane(const uint32_t quad[8], int width, int shift, int c, uint8_t* lines) {
  const uint32_t mask = 0x01010101u * ((1u << width) - 1);
  for (int line = 0; line < width; line++) {
    uint32_t word = 0;
    for (int i = 0; i < 8 / width; i++) {
      const int j = width == 4 ? line + 4 * i : line * (8 / width) + i;
      word |= (quad[j] >> shift & mask) << i * width;
    }
    memcpy(lines + line * 64 + 4 * c, &word, 4);
  }
}

template <Format F> void pack_blocks(const uint8_t* src, size_t row_bytes, int cols, int k, uint8_t* dst) {
  constexpr FormatInfo kInfo = info_of(F);
  constexpr Block kBlock = block_of(F);
  constexpr int kGroups = kInfo.unit / 32;
  for (int k0 = 0; k0 < k; k0 += kBlock.cols) {
    uint8_t* unit = dst + k0 / kInfo.unit * unit_bytes(F);
    for (int c = 0; c < cols; c++) {
      const uint8_t* block = src + static_cast<size_t>(c) * row_bytes + k0 / kBlock.cols * kBlock.bytes;
      for (int g = 0; g < kBlock.cols / 32; g++) {
        uint32_t quad[8];
        quads<F>(block, g, quad);
        const int at = k0 % kInfo.unit / 32 + g;
        plane(quad, kInfo.low, 0, c, unit + at * kInfo.low * 64);
        if constexpr (kInfo.high > 0)
          plane(quad, kInfo.high, kInfo.low, c, unit + (kGroups * kInfo.low + at * kInfo.high) * 64);
      }
      numbers<F>(block, k0 % kInfo.unit, c, unit + plane_bytes(F));
    }
  }
}

}  // namespace

size_t source_row_bytes(Format f, int k) {
  const Block b = block_of(f);
  return static_cast<size_t>(up(k, b.cols) / b.cols) * static_cast<size_t>(b.bytes);
}

size_t packed_bytes(Format f, int n, int k) {
  const size_t factors = info_of(f).factors ? static_cast<size_t>(up(n, 32)) * sizeof(float) : 0;
  return static_cast<size_t>(up(n, 32) / panel_cols(f)) * packed_weight(f, n, k, nullptr).panel_bytes + factors;
}

Weight packed_weight(Format f, int n, int k, const uint8_t* data) {
  const int unit = info_of(f).unit;
  Weight w{f, n, k, up(n, 32), up(k, 64), data, static_cast<size_t>(up(k, unit) / unit * unit_bytes(f)), nullptr};
  if (data && info_of(f).factors)
    w.factor = reinterpret_cast<const float*>(data + static_cast<size_t>(w.n_pad / panel_cols(f)) * w.panel_bytes);
  return w;
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
      case Format::BF16:
        pack_floats<uint16_t, true>(rows, row_bytes, cols, k, to);
        break;
        // clang-format off: a table
#define BLOCKS(F) case Format::F: pack_blocks<Format::F>(rows, row_bytes, cols, k, to); break;
      BLOCKS(W8) BLOCKS(W4) BLOCKS(W4F) BLOCKS(W5) BLOCKS(W5F) BLOCKS(W4N) BLOCKS(W4M) BLOCKS(W4V) BLOCKS(W4Z)
      BLOCKS(W4Z64) BLOCKS(W4C) BLOCKS(W8Z64) BLOCKS(F8) BLOCKS(W2K) BLOCKS(W3K) BLOCKS(W4K) BLOCKS(W5K) BLOCKS(W6K)
      BLOCKS(W4X)
#undef BLOCKS
        // clang-format on
    }
  }
}

}  // namespace octavo
