// Packed integer codes: what each format means (kernels.h), a group of 32 K and a register of columns at a time. `unit`
// is the unit's first byte, `group` counts its groups, `column` is the first of kLanes columns of the panel.
//   w[k][column] = scale[run] * (byte - zero) + minimum[run]; runs are halves of a group where kRuns is 2
// Bytes are the codes; those that stand for values of a table are looked up.
namespace octavo::VEC_NS {

template <Format F, Format... Set> constexpr bool kOneOf = ((F == Set) || ...);
using enum Format;
template <Format F> constexpr bool kIq4 = kOneOf<F, W4N, W4X>;
template <Format F> constexpr bool kE2m1 = kOneOf<F, W4M, W4V>;
template <Format F> constexpr bool kZeros = kOneOf<F, W4Z, W4Z64, W4C, W8Z64>;  // a zero point of each column
template <Format F> constexpr bool kMinimum = kOneOf<F, W4F, W5F, W2K, W4K, W5K>;
template <Format F> constexpr int kRuns = kOneOf<F, W2K, W3K, W6K, W4V> ? 2 : 1;
template <Format F> constexpr int kGroups = info_of(F).unit / 32;  // of a unit
// Of all columns, added to those of each
template <Format F>
constexpr int kZero = kOneOf<F, W8> || kIq4<F> ? 128
                      : kE2m1<F>               ? 12
                      : F == W4                ? 8
                      : F == W5                ? 16
                      : F == W3K               ? 4
                      : F == W6K               ? 32
                                               : 0;
template <Format F>
constexpr int kLargest = kE2m1<F>  ? 24
                         : kIq4<F> ? 241
                                   : (1 << (info_of(F).low + info_of(F).high)) - 1;

constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kE2m1Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled
template <Format F> constexpr int nibble_value(int q) {                                        // of a code of four bits
  return kIq4<F> ? kIq4Values[q] : kE2m1<F> ? kE2m1Values[q] : q - kZero<F>;
}
template <class T> struct Table16 {
  alignas(16) T of[16];
};

typedef uint8_t bytes __attribute__((vector_size(sizeof(i32v))));
VEC_INLINE i32v part_of_line(const uint8_t* line, int column) {
  i32v v;
  memcpy(&v, line + column * 4, sizeof v);
  return v;
}
VEC_INLINE f32v part_to_f32(i32v v) { return __builtin_convertvector(v, f32v); }

// Of every byte of quad j its kWidth bits in a plane, as bits from `to` on.
template <int kWidth> VEC_INLINE i32v quad_of_plane(const uint8_t* lines, int column, int j, int to) {
  constexpr int kOfByte = 8 / kWidth;  // codes in a byte: of quads that follow each other, or of j and j + 4
  const int line = kWidth == 4 ? j % 4 : j / kOfByte, from = kWidth == 4 ? j / 4 * 4 : j % kOfByte * kWidth;
  const u32v v = (u32v)part_of_line(lines + line * 64, column);
  if constexpr (kWidth == 8) return (i32v)v;
  else return (i32v)(from < to ? v << (to - from) : v >> (from - to)) & (0x01010101 * (((1 << kWidth) - 1) << to));
}

template <Format F> VEC_INLINE i32v quad_of(const uint8_t* unit, int group, int column, int j) {
  constexpr int kLow = info_of(F).low, kHigh = info_of(F).high;
  i32v quad = quad_of_plane<kLow>(unit + group * kLow * 64, column, j, 0);
  if constexpr (kHigh > 0)
    quad |= quad_of_plane<kHigh>(unit + (kGroups<F> * kLow + group * kHigh) * 64, column, j, kLow);
  if constexpr (kIq4<F> || kE2m1<F>) {
    static constexpr auto kBytes = [] {
      Table16<uint8_t> table{};
      for (int q = 0; q < 16; q++) table.of[q] = (uint8_t)(nibble_value<F>(q) + kZero<F>);
      return table;
    }();
    quad = lookup_u4(quad, kBytes.of);
  }
  return quad;
}

// FP8 e4m3fn in byte i of each lane over 2^120, 480 over it for NaN: as bf16, two at a time, then as float32. The
// exponent has a bias of 7 instead of 127; multiplied by 2^120, subnormals are right, too.
VEC_INLINE f32v e4m3_over_2_120(i32v codes, int i) {
  typedef int16_t halves __attribute__((vector_size(sizeof codes)));
  const i32v both = i % 2 ? (i32v)((halves)codes >> 4) : even_s8_times_16(codes);
  return (f32v)((i < 2 ? both << 16 : both) & (int)0x87f00000);
}
VEC_INLINE f32v e4m3(i32v codes, int i) { return e4m3_over_2_120(codes, i) * 0x1p120f; }
// Bit 7 of the bytes that are NaN
VEC_INLINE i32v e4m3_nan(i32v codes) { return (i32v)(((u32v)codes & 0x7f7f7f7fu) + 0x01010101u); }
VEC_INLINE i32v any_bit7(i32v bytes) { return (bytes & (int)0x80808080) != 0; }
// The same for many codes: of each byte the greatest magnitude, doubled, and whether any is that of NaN
VEC_INLINE i32v e4m3_greater(i32v greatest, i32v codes) {
  const bytes a = (bytes)greatest, b = (bytes)codes + (bytes)codes;
  return (i32v)(a > b ? a : b);
}
VEC_INLINE i32v e4m3_any_nan(i32v greatest) { return (i32v)((bytes)greatest == 0xfe) != 0; }

template <Format F> struct Numbers {
  f32v scale[kRuns<F>], minimum[kRuns<F>];
  i32v zero;  // where kZeros
};

template <Format F> VEC_INLINE Numbers<F> numbers_of(const uint8_t* unit, int group, int column) {
  const uint8_t* at = unit + plane_bytes(F);
  Numbers<F> n{};
  auto half = [&](int byte) { return part_f16((const uint16_t*)(at + byte) + column); };
  auto u8 = [&](int byte) { return part_u8(at + byte + column); };
  auto i8 = [&](int byte) { return part_to_f32(part_i8((const int8_t*)at + byte + column)); };
  if constexpr (kOneOf<F, W8, W4, W4F, W5, W5F, W4N, W4Z>) {
    n.scale[0] = half(group * 32);
    if constexpr (kMinimum<F>) n.minimum[0] = half(64 + group * 32);
    if constexpr (F == W4Z) n.zero = u8(64 + group * 16);
  } else if constexpr (F == W4M) {
    n.scale[0] = part_bf16((const uint16_t*)(at + group * 32) + column);
  } else if constexpr (F == W4V) {
    GEMM_UNROLL for (int i = 0; i < 2; i++) n.scale[i] = e4m3(u8((2 * group + i) * 16), 0) * 0.5f;
  } else if constexpr (F == F8) {
    memcpy(&n.scale[0], at + column * 4, sizeof(f32v));
  } else if constexpr (kOneOf<F, W4Z64, W8Z64>) {
    n.scale[0] = half(0), n.zero = u8(32);
  } else if constexpr (F == W4C) {
    n.scale[0] = f32v{} + 1, n.zero = u8(0);
  } else if constexpr (kOneOf<F, W4K, W5K>) {
    n.scale[0] = half(256) * part_to_f32(u8(group * 16));
    n.minimum[0] = -(half(288) * part_to_f32(u8(128 + group * 16)));
  } else if constexpr (F == W2K) {
    GEMM_UNROLL for (int i = 0; i < 2; i++) {
      const i32v both = u8((2 * group + i) * 16);
      n.scale[i] = half(256) * part_to_f32(both & 15);
      n.minimum[i] = -(half(288) * part_to_f32(both >> 4));
    }
  } else if constexpr (F == W4X) {
    n.scale[0] = half(128) * i8(group * 16);
  } else {
    static_assert(kOneOf<F, W3K, W6K>);
    GEMM_UNROLL for (int i = 0; i < 2; i++) n.scale[i] = half(256) * i8((2 * group + i) * 16);
  }
  return n;
}

// Numbers that the bytes of a quad stand for, less their zero; but for NaN, bf16 holds them exactly. `prepared` is done once
// for the four of a quad: values of a signed byte where no column has a zero of its own.
template <Format F> VEC_INLINE i32v prepared(i32v quad) {
  if constexpr (kZeros<F> || kZero<F> == 0) return quad;
  else return (i32v)((bytes)quad - (uint8_t)kZero<F>);
}
template <Format F> VEC_INLINE f32v value_of(i32v quad, int i, i32v zero) {
  if constexpr (F == F8) {
    return e4m3(quad, i);
  } else if constexpr (kZeros<F> || kZero<F> == 0) {
    i32v byte = (i32v)((u32v)quad >> (8 * i));
    if (i < 3) byte &= 255;
    return part_to_f32(kZeros<F> ? byte - zero : byte);
  } else {
    return part_to_f32((i32v)((u32v)quad << (24 - 8 * i)) >> 24);
  }
}

template <Format F> VEC_INLINE const uint8_t* unit_of(const uint8_t* panel, int group) {
  return panel + group / kGroups<F> * unit_bytes(F);
}

// 32 K x 16 columns as float32: K i at out + i * ld. Only the sum with a minimum rounds.
template <Format F> static void decode_group(const uint8_t* panel, int group, float* out, int ld) {
  const uint8_t* unit = unit_of<F>(panel, group);
  for (int column = 0; column < 16; column += kLanes) {
    const Numbers<F> n = numbers_of<F>(unit, group % kGroups<F>, column);
    GEMM_UNROLL for (int j = 0; j < 8; j++) {
      const i32v quad = prepared<F>(quad_of<F>(unit, group % kGroups<F>, column, j));
      const int run = kRuns<F> * j / 8;
      GEMM_UNROLL for (int i = 0; i < 4; i++) {
        f32v w = value_of<F>(quad, i, n.zero);
        if constexpr (F == F8)
          w = n.scale[0] * (f32v)((i32v)w | any_bit7(e4m3_nan((i32v)((u32v)quad >> (8 * i) & 255))));
        else w = fma(n.scale[run], w, n.minimum[run]);
        memcpy(out + (4 * j + i) * ld + column, &w, sizeof w);
      }
    }
  }
}

}  // namespace octavo::VEC_NS
