// Passes over rows of float32: norm, norm and rounding, addition, gated activation.
namespace octavo::VEC_NS {

// 1 / sqrt(mean(x^2) + eps)
VEC_INLINE float rms_factor(const float* x, int cols, float eps) {
  f32x16 even_sum = zero(), odd_sum = zero();
  int i = 0;
  for (; i + 32 <= cols; i += 32) {
    f32x16 a = load(x + i), b = load(x + i + 16);
    even_sum = fma(a, a, even_sum);
    odd_sum = fma(b, b, odd_sum);
  }
  for (; i < cols; i += 16) {
    f32x16 a = load_n(x + i, cols - i < 16 ? cols - i : 16);
    even_sum = fma(a, a, even_sum);
  }
  return 1.f / __builtin_sqrtf(reduce_add(even_sum + odd_sum) / (float)cols + eps);
}

static void rms_norm(const float* x, int64_t ldx, const float* w, float eps, int cols, float* y, int64_t ldy, int row0,
                     int row1) {
  for (int r = row0; r < row1; r++) {
    const float* in = x + r * ldx;
    float* out = y + r * ldy;
    const f32x16 factor = set1(rms_factor(in, cols, eps));
    int i = 0;
    for (; i + 16 <= cols; i += 16) store(out + i, load(in + i) * factor * load(w + i));
    if (i < cols) store_n(out + i, load_n(in + i, cols - i) * factor * load_n(w + i, cols - i), cols - i);
  }
}

static void norm_round(const float* x, int64_t ldx, const float* w, float eps, int cols, const Activation& y, int row0,
                       int row1, int g0, int g1) {
  for (int r = row0; r < row1; r++) {
    const float* in = x + r * ldx;
    const f32x16 factor = set1(rms_factor(in, cols, eps));
    for (int g = g0; g < g1; g++) {
      const int i = g * 32, j = i + 16;
      f32x16 a = load_cols(in, i, cols) * factor * load_cols(w, i, cols);
      f32x16 b = load_cols(in, j, cols) * factor * load_cols(w, j, cols);
      put32(y, r, g, a, b);
    }
  }
}

static void add_rows(const float* a, int64_t lda, const float* b, int64_t ldb, float* y, int64_t ldy, int cols,
                     int row0, int row1) {
  for (int r = row0; r < row1; r++) {
    const float *pa = a + r * lda, *pb = b + r * ldb;
    float* out = y + r * ldy;
    int i = 0;
    for (; i + 16 <= cols; i += 16) store(out + i, load(pa + i) + load(pb + i));
    if (i < cols) store_n(out + i, load_n(pa + i, cols - i) + load_n(pb + i, cols - i), cols - i);
  }
}

static void silu_mul(const float* gate, int64_t ldg, const float* up, int64_t ldu, float* y, int64_t ldy, int cols,
                     int row0, int row1) {
  for (int r = row0; r < row1; r++) {
    const float *pg = gate + r * ldg, *pu = up + r * ldu;
    float* out = y + r * ldy;
    int i = 0;
    for (; i + 16 <= cols; i += 16) store(out + i, silu(load(pg + i)) * load(pu + i));
    if (i < cols) store_n(out + i, silu(load_n(pg + i, cols - i)) * load_n(pu + i, cols - i), cols - i);
  }
}

}  // namespace octavo::VEC_NS
