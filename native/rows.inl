// Norms of rows, or of the heads of rows, in float32; and with rounding.
namespace octavo::VEC_NS {

// What a norm has learned of its columns: y = (x - mean) * factor.
struct Moments {
  f32x16 mean, factor;
};

// The sum over columns of f(16 of them); f gives 0 where there are none.
template <class F> VEC_INLINE float sum_columns(int cols, F f) {
  f32x16 even_sum = zero(), odd_sum = zero();
  int i = 0;
  for (; i + 32 <= cols; i += 32) {
    even_sum = f(i, even_sum);
    odd_sum = f(i + 16, odd_sum);
  }
  for (; i < cols; i += 16) even_sum = f(i, even_sum);
  return reduce_add(even_sum + odd_sum);
}

// The first lanes of v, as many as there are columns from i on
VEC_INLINE f32x16 present(f32x16 v, int i, int cols) {
  return i + 16 <= cols ? v : select(less(iota(), set1_i32(cols - i)), v, zero());
}

VEC_INLINE Moments moments(const NormArgs& a, const float* x) {
  const int cols = a.cols;
  f32x16 mean = zero();
  if (a.centred)
    mean = set1(sum_columns(cols, [=](int i, f32x16 sum) { return sum + load_cols(x, i, cols); }) / (float)cols);
  const float squares = sum_columns(cols, [=](int i, f32x16 sum) {
    f32x16 v = load_cols(x, i, cols);
    if (a.centred) v = present(v - mean, i, cols);
    return fma(v, v, sum);
  });
  return {mean, set1(1.f / __builtin_sqrtf(squares / (float)cols + a.eps))};
}

// 16 columns from i on of a head: w and b are its vectors, or null.
VEC_INLINE f32x16 normed(const NormArgs& a, const Moments& m, const float* x, const float* w, const float* b, int i) {
  f32x16 v = load_cols(x, i, a.cols);
  v = a.centred ? present((v - m.mean) * m.factor, i, a.cols) : v * m.factor;
  if (w) v = v * load_cols(w, i, a.cols);
  if (b) v = v + load_cols(b, i, a.cols);
  return v;
}

static void norm(const NormArgs& a, float* y, int64_t ldy, int row0, int row1) {
  for (int r = row0; r < row1; r++)
    for (int h = 0; h < a.heads; h++) {
      const float* x = a.x + r * a.ldx + h * a.cols;
      const float *w = a.w ? a.w + h * a.step : nullptr, *b = a.b ? a.b + h * a.step : nullptr;
      float* out = y + r * ldy + h * a.cols;
      const Moments m = moments(a, x);
      for (int i = 0; i < a.cols; i += 16)
        store_n(out + i, normed(a, m, x, w, b, i), a.cols - i < 16 ? a.cols - i : 16);
    }
}

static void norm_round(const NormArgs& a, const Activation& y, int row0, int row1, int g0, int g1) {
  alignas(64) float normal[16 * 32];
  Moments m[16];
  for (int row = row0; row < row1; row += 16) {
    const int n = row1 - row < 16 ? row1 - row : 16;
    const float* x = a.x + row * a.ldx;
    for (int r = 0; r < n; r++) m[r] = moments(a, x + r * a.ldx);
    for (int g = g0; g < g1; g++) {
      for (int r = 0; r < n; r++)
        for (int c = 0; c < 32; c += 16)
          store(normal + r * 32 + c, normed(a, m[r], x + r * a.ldx, a.w, a.b, g * 32 + c));
      put_rows(y, row, n, g, normal, 32);
    }
  }
}

}  // namespace octavo::VEC_NS
