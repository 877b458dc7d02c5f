// Rounding of activations: 32 columns at a time, so that any producer can round its own slice.
namespace octavo::VEC_NS {

#define ROUND_CALL \
  __attribute__((noinline))  // a call is little beside its work, and a copy in each producer long to compile

// Columns [32 * group, 32 * group + 32) of `row`, which are at x; columns from y.k on must be 0.
// A8: scale = max|x| / 127, q = x * (127 / max|x|) to nearest even. Where max|x| < 2^-120 all q are 0. A16 likewise with
// 127 * 128 and 2^-112; so scales are normal.
constexpr float most_of(Act act) { return act == Act::A16 ? 127.f * 128 : 127.f; }
constexpr float least_of(Act act) { return act == Act::A16 ? 0x1p-112f : 0x1p-120f; }
VEC_INLINE i32x16 high_of(i32x16 v) { return (v + set1_i32(64)) >> 7; }

static VEC_INLINE void put_int8(const Activation& y, int64_t i, i32x16 a, i32x16 b, float s) {
  const int32_t first = reduce_add(a), sum = first + reduce_add(b);
  store_i8(y.q + i * 32, a);
  store_i8(y.q + i * 32 + 16, b);
  y.s[i] = s;
  y.t[i] = s * (float)sum;
  y.nsum[i] = -sum;
  y.nhalf[i] = -first;
}

static ROUND_CALL void put32(const Activation& y, int row, int group, const float* x) {
  f32x16 a = load(x), b = load(x + 16);
  if (y.act >= Act::A8) {
    // As integers, magnitudes keep their order and a NaN is the largest, so it reaches the scale.
    float m = __builtin_bit_cast(float, reduce_max(max(as_i32(abs(a)), as_i32(abs(b)))));
    if (!(m < __builtin_inff())) a = b = zero();  // NaN or infinity is in the scale; there is no such integer
    const float most = most_of(y.act), s = m / most, inverse = m >= least_of(y.act) ? most / m : 0.f;
    const i32x16 va = to_i32(a * set1(inverse)), vb = to_i32(b * set1(inverse));
    const int64_t i = group * y.stride + row * int8_rows(y.act);
    if (y.act == Act::A8) return put_int8(y, i, va, vb, s);
    const i32x16 ha = high_of(va), hb = high_of(vb);
    put_int8(y, i, ha, hb, 128 * s);
    put_int8(y, i + 1, va - (ha << 7), vb - (hb << 7), s);
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

// lane i: f(row + i) reduced by op, in the tree of reduce_add with half the shuffles
template <int S = 1, class F, class Op> VEC_INLINE auto reduce_rows(F f, Op op, int row = 0) {
  if constexpr (S == 16) {
    return f(row);
  } else {
    const auto a = reduce_rows<2 * S>(f, op, row), b = reduce_rows<2 * S>(f, op, row + S);
    return op(lower<S>(a, b), upper<S>(a, b));
  }
}

// Lanes to p[0], p[step] ..
template <class T, class V> VEC_INLINE void put_lanes(T* p, int step, V v) {
  alignas(64) T lanes[16];
  memcpy(lanes, &v, sizeof lanes);
  for (int r = 0; r < 16; r++) p[r * step] = lanes[r];
}

// As put32, of sixteen rows from `row` on whose columns are at x: what is found of a row is a lane.
static ROUND_CALL void put16x32(const Activation& y, int row, int group, const float* x, int64_t ldx) {
  const int step = int8_rows(y.act);
  int64_t i = group * y.stride + row * step;
  if (y.act == Act::BF16) {
    store(y.t + i, reduce_rows(
                       [&](int r) __attribute__((always_inline)) {
                         uint16_t* h = y.h + (row + r) * y.ld + group * 32;
                         const f32x16 a = load(x + r * ldx), b = load(x + r * ldx + 16);
                         store_bf16(h, a), store_bf16(h + 16, b);
                         return rounded_bf16(a) + rounded_bf16(b);
                       },
                       [](f32x16 a, f32x16 b) __attribute__((always_inline)) { return a + b; }));
    return;
  }
  const f32x16 m = as_f32(reduce_rows(
      [&](int r) __attribute__((always_inline)) {
        return max(as_i32(abs(load(x + r * ldx))), as_i32(abs(load(x + r * ldx + 16))));
      },
      [](i32x16 a, i32x16 b) __attribute__((always_inline)) { return max(a, b); }));
  if (bits(less(m, set1(__builtin_inff()))) != 0xffff) {
    for (int r = 0; r < 16; r++) put32(y, row + r, group, x + r * ldx);
    return;
  }
  alignas(64) float inverse[16];
  const f32x16 most = set1(most_of(y.act));
  store(inverse, select(less(m, set1(least_of(y.act))), zero(), most / m));
  f32x16 s = m / most;
  for (int part = step; part-- > 0; i++) {  // A16: 1 the multiples of 128, 0 the rest
    const i32x16 sums = reduce_rows(        // of both halves in 16 bits each
        [&](int r) __attribute__((always_inline)) {
          const f32x16 factor = set1(inverse[r]);
          i32x16 qa = to_i32(load(x + r * ldx) * factor), qb = to_i32(load(x + r * ldx + 16) * factor);
          if (step == 2) {
            const i32x16 ha = high_of(qa), hb = high_of(qb);
            qa = part ? ha : qa - (ha << 7), qb = part ? hb : qb - (hb << 7);
          }
          store_i8(y.q + (i + r * step) * 32, qa);
          store_i8(y.q + (i + r * step) * 32 + 16, qb);
          return qa + (qb << 16);
        },
        [](i32x16 a, i32x16 b) __attribute__((always_inline)) { return a + b; });
    const i32x16 first = sums << 16 >> 16, sum = first + ((sums - first) >> 16);
    const f32x16 scale = part ? s * set1(128.f) : s;
    put_lanes(y.s + i, step, scale);
    put_lanes(y.t + i, step, scale * to_f32(sum));
    put_lanes(y.nsum + i, step, set1_i32(0) - sum);
    put_lanes(y.nhalf + i, step, set1_i32(0) - first);
  }
}

// As put32, of n rows from `row` on whose columns are at x.
VEC_INLINE void put_rows(const Activation& y, int row, int n, int group, const float* x, int64_t ldx) {
  int r = 0;
  if (y.act != Act::F32)
    for (; r + 16 <= n; r += 16) put16x32(y, row + r, group, x + r * ldx, ldx);
  for (; r < n; r++) put32(y, row + r, group, x + r * ldx);
}

// 16 columns of a row from `col` on; those from `cols` on read as 0.
VEC_INLINE f32x16 load_cols(const float* x, int col, int cols) {
  return col + 16 <= cols ? load(x + col) : load_n(x + col, cols > col ? cols - col : 0);
}

static void round(const float* x, int64_t ldx, const Activation& y, int row0, int row1, int g0, int g1) {
  for (int row = row0; row < row1; row += 16) {  // whose lines the caches hold for all groups
    const int n = row1 - row < 16 ? row1 - row : 16;
    for (int g = g0; g < g1; g++) {
      const float* p = x + row * ldx;
      if (g * 32 + 32 <= y.k) put_rows(y, row, n, g, p + g * 32, ldx);
      else
        for (int r = 0; r < n; r++, p += ldx) {
          alignas(64) float last[32];
          for (int i = 0; i < 32; i += 16) store(last + i, load_cols(p, g * 32 + i, y.k));
          put32(y, row + r, g, last);
        }
    }
  }
}

}  // namespace octavo::VEC_NS
