// Packed integer codes, a group of 32 K of one panel at a time, decoded in L1: what each format means (kernels.h).
// Decoded bytes are codes 0 .. 63, or where kSigned says so values -128 .. 127 as bytes of 128 more. Then
//   w[k][column] = scale[half of the group] * (value - zero[column]) + minimum[half], halves only where kHalves is 2.
namespace octavo::VEC_NS {

struct Codes {
  alignas(64) uint8_t line[8][64];  // K quad j of 16 columns
  float scale[2][16], minimum[2][16];
  int32_t zero[16];
};

template <Format F, Format... Set> constexpr bool kOneOf = ((F == Set) || ...);
using enum Format;
template <Format F> constexpr bool kSigned = kOneOf<F, W8, W8Z64, W4N, W4M, W4V, W4X>;
template <Format F> constexpr bool kTable = kOneOf<F, W4N, W4M, W4V, W4X>;
template <Format F> constexpr int kHalves = kOneOf<F, W2K, W3K, W6K, W4V> ? 2 : 1;
template <Format F> constexpr bool kMinimum = kOneOf<F, W4F, W5F, W2K, W4K, W5K>;
template <Format F> constexpr int kZeroPoint = F == W4 ? 8 : F == W5 ? 16 : F == W3K ? 4 : F == W6K ? 32 : 0;

constexpr int8_t kIq4Nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled
template <Format F> constexpr int nibble_value(int q) {                                  // of a code of four bits
  return !kTable<F> ? q - kZeroPoint<F> : kOneOf<F, W4N, W4X> ? kIq4Nl[q] : kE2m1[q];
}

// FP8 e4m3fn in the low byte of each lane, exact: subnormals are integers times 2^-9, 0x7f and 0xff are NaN.
VEC_INLINE f32x16 e4m3(i32x16 code) {
  const i32x16 magnitude = code & 0x7f;
  const f32x16 normal = as_f32((magnitude << 20) + (120 << 23));  // exponent bias 7 to 127
  const f32x16 finite = select(less(magnitude, set1_i32(8)), to_f32(magnitude) * set1(0x1p-9f), normal);
  const f32x16 value = select(less(magnitude, set1_i32(0x7f)), finite, set1(__builtin_nanf("")));
  return as_f32(as_u32(value) | as_u32(code & 0x80) << 24);
}

template <Format F> constexpr int kGroupsOfUnit = info_of(F).unit / 32;
template <Format F> VEC_INLINE const uint8_t* unit_of(const uint8_t* panel, int group) {
  return panel + group / kGroupsOfUnit<F> * unit_bytes(F);
}

// The lines of a group as decoded bytes.
template <Format F> VEC_INLINE void decode_lines(const uint8_t* panel, int group, i32x16 (&line)[8]) {
  constexpr int kLow = info_of(F).low, kHigh = info_of(F).high;
  const int g = group % kGroupsOfUnit<F>;
  const uint8_t* low = unit_of<F>(panel, group) + g * kLow * 64;
  const uint8_t* high = unit_of<F>(panel, group) + (kGroupsOfUnit<F> * kLow + g * kHigh) * 64;
  if constexpr (kLow == 8) {
    GEMM_UNROLL for (int j = 0; j < 8; j++) line[j] = load_line(low + j * 64);
  } else if constexpr (kLow == 4) {
    GEMM_UNROLL for (int j = 0; j < 4; j++) {
      const i32x16 v = load_line(low + j * 64);
      line[j] = nibble_lo(v), line[j + 4] = nibble_hi(v);
    }
  } else {
    GEMM_UNROLL for (int j = 0; j < 8; j++) line[j] =
        as_i32(as_u32(load_line(low + j / 4 * 64)) >> (2 * (j % 4))) & 0x03030303;
  }
  if constexpr (kHigh == 2)
    GEMM_UNROLL for (int j = 0; j < 8; j++) line[j] =
        line[j] | (as_i32(as_u32(load_line(high + j / 4 * 64)) >> (2 * (j % 4))) & 0x03030303) << kLow;
  if constexpr (kHigh == 1)
    GEMM_UNROLL for (int j = 0; j < 8; j++) line[j] = line[j] | (as_i32(as_u32(load_line(high)) >> j) & 0x01010101)
                                                                    << kLow;
  if constexpr (kTable<F>) {
    alignas(16) static constexpr auto kBytes = [] {
      struct {
        uint8_t of[16];
      } table{};
      for (int q = 0; q < 16; q++) table.of[q] = (uint8_t)(nibble_value<F>(q) + 128);
      return table;
    }();
    GEMM_UNROLL for (int j = 0; j < 8; j++) line[j] = lookup_u4(line[j], kBytes.of);
  }
}

// Scales, minima and zeros of a group.
template <Format F> VEC_INLINE void decode_numbers(const uint8_t* panel, int group, Codes& out) {
  const int g = group % kGroupsOfUnit<F>;
  const uint8_t* numbers = unit_of<F>(panel, group) + plane_bytes(F);
  i32x16 zero = set1_i32(kZeroPoint<F>);
  auto half = [&](int at) { return load_f16((const uint16_t*)(numbers + at)); };
  auto u8 = [&](int at) { return load_u8(numbers + at); };
  if constexpr (kOneOf<F, W8, W4, W4F, W5, W5F, W4N, W4Z>) {
    store(out.scale[0], half(g * 32));
    if constexpr (kMinimum<F>) store(out.minimum[0], half(64 + g * 32));
    if constexpr (F == W4Z) zero = u8(64 + g * 16);
  } else if constexpr (F == W4M) {
    store(out.scale[0], load_bf16((const uint16_t*)(numbers + g * 32)));
  } else if constexpr (F == W4V) {
    for (int i = 0; i < 2; i++) store(out.scale[i], e4m3(u8((2 * g + i) * 16)) * set1(0.5f));
  } else if constexpr (F == F8) {
    store(out.scale[0], load((const float*)numbers));
  } else if constexpr (kOneOf<F, W4Z64, W8Z64>) {
    store(out.scale[0], half(0));
    zero = u8(32) - (kSigned<F> ? 128 : 0);
  } else if constexpr (kOneOf<F, W4K, W5K>) {
    store(out.scale[0], half(256) * to_f32(u8(g * 16)));
    store(out.minimum[0], -(half(288) * to_f32(u8(128 + g * 16))));
  } else if constexpr (F == W2K) {
    for (int i = 0; i < 2; i++) {
      const i32x16 both = u8((2 * g + i) * 16);
      store(out.scale[i], half(256) * to_f32(both & 15));
      store(out.minimum[i], -(half(288) * to_f32(both >> 4)));
    }
  } else if constexpr (F == W4X) {
    store(out.scale[0], half(128) * to_f32(load_i8((const int8_t*)numbers + g * 16)));
  } else {
    static_assert(kOneOf<F, W3K, W6K>);
    for (int i = 0; i < 2; i++)
      store(out.scale[i], half(256) * to_f32(load_i8((const int8_t*)numbers + (2 * g + i) * 16)));
  }
  store(out.zero, zero);
}

template <Format F> static void decode_codes(const uint8_t* panel, int group, Codes& out) {
  i32x16 line[8];
  decode_lines<F>(panel, group, line);
  GEMM_UNROLL for (int j = 0; j < 8; j++) store_line(out.line[j], line[j]);
  decode_numbers<F>(panel, group, out);
}

// Byte i of each lane of line j less the zeros.
template <Format F> VEC_INLINE i32x16 integers(const Codes& c, int j, int i) {
  const i32x16 bytes = as_i32(as_u32(load_line(c.line[j])) >> (8 * i)) & 255;
  return bytes - (kSigned<F> ? 128 : 0) - load(c.zero);
}

// 32 K x 16 columns as float32: K i at out + i * ld. Only the sum with a minimum rounds.
template <Format F> static void decode_group(const uint8_t* panel, int group, float* out, int ld) {
  if constexpr (F == F8) {
    const uint8_t* unit = unit_of<F>(panel, group);
    const f32x16 scale = load((const float*)(unit + plane_bytes(F)));
    for (int j = 0; j < 8; j++) {
      const u32x16 line = as_u32(load_line(unit + (group % 2 * 8 + j) * 64));
      for (int i = 0; i < 4; i++) store(out + (4 * j + i) * ld, scale * e4m3(as_i32(line >> (8 * i)) & 255));
    }
  } else {
    Codes c;
    decode_codes<F>(panel, group, c);
    for (int j = 0; j < 8; j++) {
      const f32x16 scale = load(c.scale[kHalves<F> * j / 8]);
      for (int i = 0; i < 4; i++) {
        const f32x16 minimum = kMinimum<F> ? load(c.minimum[kHalves<F> * j / 8]) : zero();
        store(out + (4 * j + i) * ld, fma(scale, to_f32(integers<F>(c, j, i)), minimum));
      }
    }
  }
}

}  // namespace octavo::VEC_NS
