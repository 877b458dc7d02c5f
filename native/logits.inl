// Passes over one row of logits, and the Gumbel draw. The float64 sums run in blocks of kLogitBlock.
namespace octavo::VEC_NS {

constexpr int kLogitBlock = 256;  // float32 sums in lanes of 16 values, then float64

VEC_INLINE int vector_lanes(int i, int n) { return n - i < 16 ? n - i : 16; }

static void logit_max(const float* x, int n, LogitMax& out) {
  f32x16 most = set1(-__builtin_inff()), sum = zero();
  for (int i = 0; i < n; i += 16) {
    const int lanes = vector_lanes(i, n);
    f32x16 v = lanes == 16 ? load(x + i) : select(first_lanes(lanes), load_n(x + i, lanes), most);
    most = max(most, v);
    sum = fma(v, zero(), sum);  // NaN where v is NaN or infinite
  }
  out.max = reduce_max(most);
  out.valid = out.max - out.max == 0;
  const float check = reduce_add(sum);
  if (out.valid && check != check)  // -inf is allowed, NaN is not
    for (int i = 0; i < n; i++) out.valid &= x[i] == x[i];
  out.argmax = -1;
  const f32x16 top = set1(out.max);
  for (int i = 0; out.valid && out.argmax < 0; i += 16) {
    const int lanes = vector_lanes(i, n);
    const uint32_t hits = bits(both(first_lanes(lanes), equal(load_n(x + i, lanes), top)));
    if (hits) out.argmax = i + __builtin_ctz(hits);
  }
}

static double sum_exp(const float* x, int n, float max, float inv_temperature, float floor) {
  const f32x16 top = set1(max), scale = set1(inv_temperature), low = set1(floor);
  double sum = 0;
  for (int block = 0; block < n; block += kLogitBlock) {
    const int stop = n - block < kLogitBlock ? n : block + kLogitBlock;
    f32x16 acc = zero();
    for (int i = block; i < stop; i += 16) {
      const int lanes = vector_lanes(i, n);
      f32x16 v = load_n(x + i, lanes);
      mask16 counted = both(first_lanes(lanes), either(less(low, v), equal(low, v)));
      if (bits(counted)) acc = acc + select(counted, exp((v - top) * scale), zero());
    }
    sum += reduce_add(acc);
  }
  return sum;
}

static int collect(const float* x, int n, float threshold, int32_t* ids) {
  const f32x16 t = set1(threshold);
  int found = 0;
  for (int i = 0; i < n; i += 16) {
    const int lanes = vector_lanes(i, n);
    f32x16 v = load_n(x + i, lanes);
    uint32_t hits = bits(both(first_lanes(lanes), either(less(t, v), equal(t, v))));
    for (; hits; hits &= hits - 1) ids[found++] = i + __builtin_ctz(hits);
  }
  return found;
}

VEC_INLINE mask16 before_or_at(f32x16 x, i32x16 id, Cut cut) {
  return either(less(set1(cut.value), x), both(equal(x, set1(cut.value)), less(id, set1_i32(cut.id) + 1)));
}

static int count_before(const float* x, int n, float value, int id) {
  int count = 0;
  for (int i = 0; i < n; i += 16) {
    const int lanes = vector_lanes(i, n);
    mask16 m = before_or_at(load_n(x + i, lanes), iota() + i, Cut{value, id - 1});
    count += __builtin_popcount(bits(both(first_lanes(lanes), m)));
  }
  return count;
}

// SplitMix64's finaliser and lowbias32: see sampling/definition.py.
VEC_INLINE uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
VEC_INLINE u32x16 mix32(u32x16 x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Uniform in (0, 1) from 31 bits, ends excluded
VEC_INLINE f32x16 uniform(uint64_t row, i32x16 id) {
  u32x16 h = mix32(as_u32(id) ^ set1_u32((uint32_t)row));
  h = mix32(h + set1_u32((uint32_t)(row >> 32))) >> 1;
  return min((to_f32(as_i32(h)) + set1(0.5f)) * set1(0x1p-31f), set1(0x1.fffffep-1f));
}

VEC_INLINE f32x16 gumbel(f32x16 u) {
  // -log1p(-u): the rounding error of 1 - u cancels in the quotient (Kahan).
  f32x16 w = set1(1.f) - u, e = -log(w) * (u / (set1(1.f) - w));
  return -log(select(equal(w, set1(1.f)), u, e));
}

// A bound on exp(gap) for noise u: false only where u is above exp(gap) by more than half a per cent. gap <= 1; NaN: false.
// 2^i (1 + f) is at least 2^(i + f): the sum with 1.5 * 2^15 has log2 in units of 2^-8, which become exponent and fraction.
constexpr float kMostNoise = 22.25f;  // -log of the least u, 2^-32, and some more
VEC_INLINE mask16 below_exp(f32x16 u, f32x16 gap) {
  const f32x16 units = fma(max(set1(-kMostNoise), gap), set1(1.44269504f), set1(49152.f));
  return both(less(set1(-kMostNoise), gap), less(u, as_f32((as_u32(units) << 15) + 0x3f800000u)));
}
constexpr float kBoundSlack = 0.01f;  // of below_exp, and of what rounding may add to a sum of at most 26

static int gumbel_argmax(const float* x, int n, float max, float inv_temperature, uint64_t key, int position, Cut cut) {
  const uint64_t row = mix64(key + ((uint64_t)position + 1) * 0x9E3779B97F4A7C15u);
  const f32x16 top = set1(max), scale = set1(inv_temperature), lowest = set1(-__builtin_inff());
  float best = -__builtin_inff();
  int token = -1;
  for (int i = 0; i < n; i += 16) {
    const int lanes = vector_lanes(i, n);
    const i32x16 id = iota() + i;
    f32x16 v = load_n(x + i, lanes), z = (v - top) * scale;
    mask16 open = both(first_lanes(lanes), before_or_at(v, id, cut));
    if (!bits(open)) continue;
    // Noise is at most -log(u), so only u <= exp(z - best) can win.
    f32x16 u = uniform(row, id);
    open = both(open, below_exp(u, min(z - set1(best - kBoundSlack), set1(1.f))));
    if (!bits(open)) continue;
    f32x16 s = select(open, z + gumbel(u), lowest);
    const float most = reduce_max(s);
    if (most > best) {
      best = most;
      token = i + __builtin_ctz(bits(equal(s, set1(most))));
    }
  }
  return token;
}

}  // namespace octavo::VEC_NS
