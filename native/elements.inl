// Operations element by element over the rows of matrices.
namespace octavo::VEC_NS {

// y = f(16 columns of x, those of b) over rows; b may be x
template <class F>
VEC_INLINE void each(const float* x, int64_t ldx, const float* b, int64_t ldb, float* y, int64_t ldy, int cols,
                     int row0, int row1, F f) {
  for (int r = row0; r < row1; r++) {
    const float *px = x + r * ldx, *pb = b + r * ldb;
    float* out = y + r * ldy;
    int i = 0;
    for (; i + 16 <= cols; i += 16) store(out + i, f(load(px + i), load(pb + i)));
    if (i < cols) store_n(out + i, f(load_n(px + i, cols - i), load_n(pb + i, cols - i)), cols - i);
  }
}

template <ActKind K>
static void act_rows(const float* x, int64_t ldx, float* y, int64_t ldy, int cols, int row0, int row1) {
  each(x, ldx, x, ldx, y, ldy, cols, row0, row1, [](f32x16 a, f32x16) { return act<K>(a); });
}

template <ActKind K>
static void act_mul_rows(const float* gate, int64_t ldg, const float* up, int64_t ldu, float* y, int64_t ldy, int cols,
                         int row0, int row1) {
  each(gate, ldg, up, ldu, y, ldy, cols, row0, row1, [](f32x16 a, f32x16 b) { return act_mul<K>(a, b); });
}

static void add_rows(const float* a, int64_t lda, const float* b, int64_t ldb, float* y, int64_t ldy, int cols,
                     int row0, int row1) {
  each(a, lda, b, ldb, y, ldy, cols, row0, row1, [](f32x16 p, f32x16 q) { return p + q; });
}

static void mul_rows(const float* a, int64_t lda, const float* b, int64_t ldb, float* y, int64_t ldy, int cols,
                     int row0, int row1) {
  each(a, lda, b, ldb, y, ldy, cols, row0, row1, [](f32x16 p, f32x16 q) { return p * q; });
}

static void scale_rows(const float* x, int64_t ldx, const float* factors, int64_t ldf, float* y, int64_t ldy, int cols,
                       int row0, int row1) {
  for (int r = row0; r < row1; r++) {
    const f32x16 factor = set1(factors[r * ldf]);
    each(x, ldx, x, ldx, y, ldy, cols, r, r + 1, [=](f32x16 a, f32x16) { return a * factor; });
  }
}

static void softcap_rows(const float* x, int64_t ldx, float cap, float* y, int64_t ldy, int cols, int row0, int row1) {
  const f32x16 c = set1(cap);
  each(x, ldx, x, ldx, y, ldy, cols, row0, row1, [=](f32x16 a, f32x16) { return c * tanh(a / c); });
}

static void clamp_rows(const float* x, int64_t ldx, float low, float high, float* y, int64_t ldy, int cols, int row0,
                       int row1) {
  const f32x16 l = set1(low), h = set1(high);
  each(x, ldx, x, ldx, y, ldy, cols, row0, row1, [=](f32x16 a, f32x16) { return max(l, min(h, a)); });
}

}  // namespace octavo::VEC_NS
