// Rounding of activations: 32 columns at a time, so that any producer can round its own slice.
namespace octavo::VEC_NS {

// Columns [32 * group, 32 * group + 32) of `row`: a holds the first 16, b the others; columns from y.k on must be 0.
// A8: scale = max|x| / 127, q = x * (127 / max|x|) to nearest even. Where max|x| < 2^-120 all q are 0.
VEC_INLINE void put32(const Activation& y, int row, int group, f32x16 a, f32x16 b) {
  if (y.act == Act::A8) {
    // As integers, magnitudes keep their order and a NaN is the largest, so it reaches the scale.
    float m = __builtin_bit_cast(float, reduce_max(max(as_i32(abs(a)), as_i32(abs(b)))));
    if (!(m < __builtin_inff())) a = b = zero();  // NaN or infinity is in the scale; there is no such integer
    float s = m / 127.f, inverse = m >= 0x1p-120f ? 127.f / m : 0.f;
    i32x16 qa = to_i32(a * set1(inverse)), qb = to_i32(b * set1(inverse));
    int32_t first = reduce_add(qa), sum = first + reduce_add(qb);
    int64_t i = group * y.stride + row;
    store_i8(y.q + i * 32, qa);
    store_i8(y.q + i * 32 + 16, qb);
    y.s[i] = s;
    y.t[i] = s * (float)sum;
    y.nsum[i] = -sum;
    y.nhalf[i] = -first;
  } else if (y.act == Act::BF16) {
    uint16_t* h = y.h + row * y.ld + group * 32;
    store_bf16(h, a);
    store_bf16(h + 16, b);
    y.t[group * y.stride + row] = reduce_add(load_bf16(h) + load_bf16(h + 16));
  } else {
    store(y.f + row * y.ld + group * 32, a);
    store(y.f + row * y.ld + group * 32 + 16, b);
  }
}

// 16 columns of a row from `col` on; those from `cols` on read as 0.
VEC_INLINE f32x16 load_cols(const float* x, int col, int cols) {
  return col + 16 <= cols ? load(x + col) : load_n(x + col, cols > col ? cols - col : 0);
}

static void round(const float* x, int64_t ldx, const Activation& y, int row0, int row1, int g0, int g1) {
  for (int row = row0; row < row1; row++)
    for (int g = g0; g < g1; g++) {
      const float* p = x + row * ldx;
      put32(y, row, g, load_cols(p, g * 32, y.k), load_cols(p, g * 32 + 16, y.k));
    }
}

}  // namespace octavo::VEC_NS
