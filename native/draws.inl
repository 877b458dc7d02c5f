// Draws from logits that are still in L1 and are not stored: each row keeps what the end of its draw needs.
//
// The draw is the argmax of fl(fl((x - max) / temperature) + noise), ties to the lowest id, as gumbel_argmax has it; but max
// is known only at the end. Sums relative to the greatest logit so far differ from those by rounding alone, so every token
// within kNear of the best sum contends, and the sums of contenders are made again once max is known (end_draw).
namespace octavo::VEC_NS {

// A sum that can win has (max - x) / temperature and noise below 26: rounded twice, an error of 26 * 2^-23, four of them
// between two sums. That more than kContenders - 1 others come so near has a probability of about kNear^7.
constexpr float kNear = 1e-4f;

VEC_INLINE mask16 lanes_of(uint32_t word) {
  const int32_t bit[16] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  const i32x16 each = load(bit);
  return equal(set1_i32((int32_t)word) & each, each);
}

VEC_INLINE mask16 allowed(const DrawRow& row, int id, int lanes) {
  mask16 m = first_lanes(lanes);
  if (!row.mask) return m;
  const uint32_t word = id / 32 < row.mask_width ? row.mask[id / 32] : 0;
  return both(m, lanes_of(word >> id % 32));
}

static void draw_greedy(const DrawRow& row, DrawState& s, const float* x, int first, int n) {
  const f32x16 lowest = set1(-__builtin_inff());
  f32x16 best = set1(s.max);
  for (int i = 0; i < n; i += 16) {
    const int lanes = vector_lanes(i, n);
    const f32x16 v = lanes == 16 ? load(x + i) : load_n(x + i, lanes);
    s.finite &= bits(less(v, set1(__builtin_inff()))) == 0xffff;
    const mask16 better = both(allowed(row, first + i, lanes), less(best, v));
    if (!bits(better)) continue;
    s.max = reduce_max(select(better, v, lowest));
    best = set1(s.max);
    s.contenders[0] = {first + i + __builtin_ctz(bits(both(better, equal(v, best)))), s.max, 0};
    s.count = 1;
  }
}

VEC_INLINE float sum_of(const DrawRow& row, const DrawState& s, const Contender& c) {
  const float z = (c.logit - s.max) * row.inverse_temperature;
  return z + c.noise;
}

static void raise_max(const DrawRow& row, DrawState& s, float max) {
  s.max = max;
  s.best = -__builtin_inff();
  for (int i = 0; i < s.count; i++) {
    const float sum = sum_of(row, s, s.contenders[i]);
    if (sum > s.best) s.best = sum;
  }
}

static void contend(const DrawRow& row, DrawState& s, Contender c) {
  const float sum = sum_of(row, s, c);
  if (!(sum >= s.best - kNear)) return;
  if (sum > s.best) s.best = sum;
  if (s.count == kContenders) {
    int kept = 0, last = 0;
    for (int i = 0; i < s.count; i++)
      if (sum_of(row, s, s.contenders[i]) >= s.best - kNear) s.contenders[kept++] = s.contenders[i];
    for (int i = 1; i < kept; i++)
      if (sum_of(row, s, s.contenders[i]) < sum_of(row, s, s.contenders[last])) last = i;
    s.count = kept;
    if (kept == kContenders) s.contenders[last] = s.contenders[--s.count];
  }
  s.contenders[s.count++] = c;
}

static void draw_perturbed(const DrawRow& row, DrawState& s, const float* x, int first, int n) {
  const f32x16 scale = set1(row.inverse_temperature), lowest = set1(-__builtin_inff());
  for (int i = 0; i < n; i += 16) {
    const int lanes = vector_lanes(i, n);
    const f32x16 v = lanes == 16 ? load(x + i) : load_n(x + i, lanes);
    s.finite &= bits(less(v, set1(__builtin_inff()))) == 0xffff;
    mask16 open = allowed(row, first + i, lanes);
    const mask16 above = both(open, less(set1(s.max), v));
    if (bits(above)) raise_max(row, s, reduce_max(select(above, v, lowest)));
    const f32x16 gap = (v - set1(s.max)) * scale - set1(s.best - kBoundSlack);
    open = both(open, less(set1(-kMostNoise), gap));
    if (!bits(open)) continue;
    const f32x16 u = uniform(row.noise, iota() + (first + i));
    uint32_t hits = bits(both(open, below_exp(u, min(gap, set1(1.f)))));
    if (!hits) continue;
    float noise[16];
    store(noise, gumbel(u));
    for (; hits; hits &= hits - 1) {
      const int lane = __builtin_ctz(hits);
      contend(row, s, {first + i + lane, x[i + lane], noise[lane]});
    }
  }
}

static void draw(const DrawArgs& a, int row0, int row1) {
  for (int r = row0; r < row1; r++) {
    const float* x = a.logits + r * a.ld;
    const DrawRow& row = a.rows[r];
    if (row.logits) memcpy(row.logits + a.first, x, (size_t)a.cols * sizeof(float));
    else if (row.inverse_temperature == 0) draw_greedy(row, a.states[r], x, a.first, a.cols);
    else draw_perturbed(row, a.states[r], x, a.first, a.cols);
  }
}

}  // namespace octavo::VEC_NS
