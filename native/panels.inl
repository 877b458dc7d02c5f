// Packed integer formats as the product with A8 activations sees them (layouts: kernels.h). Panel<F>(unit, group, column)
// is 32 K x kLanes columns of one panel: group `group` of the unit, columns from `column`. It gives
//   kGroups     groups of 32 K in a unit
//   Weights     the kind of the bytes (vec_*.h); quads[j] are K quad j, made by Weights::of
//   start       what a sum starts at, given -(sum of the row's activations)
//   add         acc + the group's product: sums times scales, then minima; s is the activations' scale, t = s times sum
namespace octavo::VEC_NS {

template <Format F> struct Panel;

VEC_INLINE i32v part_of_line(const uint8_t* line, int column) {
  i32v v;
  memcpy(&v, line + column * 4, sizeof v);
  return v;
}
VEC_INLINE f32v part_to_f32(i32v v) { return __builtin_convertvector(v, f32v); }

template <> struct Panel<Format::W8> {
  static constexpr Format kFormat = Format::W8;
  static constexpr int kGroups = 2;
  using Weights = SignedWeights;
  Weights::Quads quads[8];
  f32v scale;
  VEC_INLINE Panel(const uint8_t* unit, int group, int column)
      : scale(part_f16((const uint16_t*)(unit + 1024 + group * 32) + column)) {
    GEMM_UNROLL for (int j = 0; j < 8; j++) quads[j] = Weights::of(part_of_line(unit + (group * 8 + j) * 64, column));
  }
  VEC_INLINE i32v start(int32_t nsum) const { return Weights::zero_sum(nsum); }
  VEC_INLINE f32v add(f32v acc, i32v dot, float s, float) const { return fma(part_to_f32(dot), scale * s, acc); }
};

struct Nibbles {  // the quads of W4 and its relatives
  using Weights = UnsignedWeights<4>;
  Weights::Quads quads[8];
  VEC_INLINE Nibbles(const uint8_t* lines, int column) {
    GEMM_UNROLL for (int j = 0; j < 4; j++) {
      const i32v v = part_of_line(lines + j * 64, column);
      quads[j] = Weights::of(v & 0x0f0f0f0f);
      quads[j + 4] = Weights::of((i32v)((u32v)v >> 4) & 0x0f0f0f0f);
    }
  }
};

template <> struct Panel<Format::W4> : Nibbles {
  static constexpr Format kFormat = Format::W4;
  static constexpr int kGroups = 2;
  f32v scale;
  VEC_INLINE Panel(const uint8_t* unit, int group, int column)
      : Nibbles(unit + group * 256, column), scale(part_f16((const uint16_t*)(unit + 512 + group * 32) + column)) {}
  VEC_INLINE i32v start(int32_t nsum) const { return (nsum - i32v{}) << 3; }  // zero point 8
  VEC_INLINE f32v add(f32v acc, i32v dot, float s, float) const { return fma(part_to_f32(dot), scale * s, acc); }
};

template <> struct Panel<Format::W4F> : Nibbles {
  static constexpr Format kFormat = Format::W4F;
  static constexpr int kGroups = 2;
  f32v scale, minimum;
  VEC_INLINE Panel(const uint8_t* unit, int group, int column)
      : Nibbles(unit + group * 256, column),
        scale(part_f16((const uint16_t*)(unit + 512 + group * 32) + column)),
        minimum(part_f16((const uint16_t*)(unit + 576 + group * 32) + column)) {}
  VEC_INLINE i32v start(int32_t) const { return i32v{}; }
  VEC_INLINE f32v add(f32v acc, i32v dot, float s, float t) const {
    return fma(minimum, t - f32v{}, fma(part_to_f32(dot), scale * s, acc));
  }
};

}  // namespace octavo::VEC_NS
