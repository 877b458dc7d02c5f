// Mixtures of experts: which experts a row goes to, and the weighted sum of what they made of it.
namespace octavo::VEC_NS {

// 16 scores from i on, those from n on the lowest there is.
VEC_INLINE f32x16 load_scores(const float* x, int i, int n) {
  if (i + 16 <= n) return load(x + i);
  return select(first_lanes(n - i), load_n(x + i, n - i), set1(-__builtin_inff()));
}

// p = exp(x - max x) / their sum, for n >= 1 scores. p has room for whole vectors. A NaN makes all of them NaN.
static void softmax_scores(const float* x, int n, float* p) {
  f32x16 greatest = load_scores(x, 0, n), total = zero();
  for (int i = 16; i < n; i += 16) greatest = max(greatest, load_scores(x, i, n));
  const f32x16 top = set1(reduce_max(greatest));
  for (int i = 0; i < n; i += 16) {
    f32x16 e = exp(load_scores(x, i, n) - top);
    if (i + 16 > n) e = select(first_lanes(n - i), e, zero());
    store(p + i, e);
    total = total + e;
  }
  const f32x16 inverse = set1(1.f / reduce_add(total));
  for (int i = 0; i < n; i += 16) store(p + i, load(p + i) * inverse);
}

// The first of the greatest of n numbers of which not all are taken, and takes it.
static int take_greatest(const float* x, bool* taken, int n) {
  int best = -1;
  for (int i = 0; i < n; i++)
    if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
  taken[best] = true;
  return best;
}

// Takes all experts but those of the best groups.
static void take_other_groups(const RouteArgs& a, const float* choice, bool* taken) {
  const int size = a.experts / a.groups;
  float sums[kMaxExperts];
  bool group_taken[kMaxExperts] = {};
  for (int g = 0; g < a.groups; g++) {
    sums[g] = 0;
    for (int i = 0; i < a.group_best; i++)
      sums[g] += choice[g * size + take_greatest(choice + g * size, taken + g * size, size)];
  }
  for (int i = 0; i < a.top_groups; i++) take_greatest(sums, group_taken, a.groups);
  for (int i = 0; i < a.experts; i++) taken[i] = !group_taken[i / size];
}

// The weight of the greatest score among those that are near it.
static float sparse_mixer_weight(const RouteArgs& a, const float* scores, const float* left, float top) {
  alignas(64) float near[kMaxExperts], p[kMaxExperts];
  near[0] = top;
  int n = 1;
  bool counted = false;  // the top itself
  for (int i = 0; i < a.experts; i++) {
    const float s = scores[i], magnitude = s < 0 ? -s : s, far = (top - s) / (magnitude > top ? magnitude : top);
    if (far > 2 * a.jitter || left[i] == -__builtin_inff()) continue;
    if (!counted && left[i] == top) counted = true;
    else near[n++] = left[i];
    if (n == kMaxExperts) break;
  }
  softmax_scores(near, n, p);
  return p[0];
}

static void route(const RouteArgs& a, int row0, int row1) {
  alignas(64) float p[kMaxExperts + 16], choice[kMaxExperts];
  for (int row = row0; row < row1; row++) {
    const float* scores = a.scores + row * a.ld;
    float *ids = a.out + row * a.ld_out, *weights = ids + a.top_k;
    bool taken[kMaxExperts] = {};
    if (a.scoring == Scoring::Softmax) {
      softmax_scores(scores, a.experts, p);
    } else {
      for (int i = 0; i < a.experts; i += 16) {
        f32x16 x = load_cols(scores, i, a.experts);
        if (a.scoring == Scoring::Sigmoid) x = set1(1.f) / (set1(1.f) + exp(min(set1(87.f), zero() - x)));
        store(p + i, x);
      }
    }
    for (int i = 0; i < a.experts; i++) {
      choice[i] = a.bias ? p[i] + a.bias[i] : p[i];
      if (choice[i] != choice[i]) choice[i] = -__builtin_inff();  // who has NaN gets nobody in particular
    }
    if (a.groups > 1) take_other_groups(a, choice, taken);
    float sum = 0;
    for (int r = 0; r < a.top_k; r++) {
      const int id = take_greatest(choice, taken, a.experts);
      ids[r] = (float)id;
      weights[r] = p[id];
      if (a.scoring == Scoring::SparseMixer) {
        weights[r] = sparse_mixer_weight(a, scores, choice, choice[id]);
        choice[id] = -__builtin_inff();
      }
      sum += weights[r];
    }
    if (a.scoring == Scoring::SoftmaxTop) {
      alignas(64) float top[kMaxTopK];
      softmax_scores(weights, a.top_k, top);
      sum = 0;
      for (int r = 0; r < a.top_k; r++) weights[r] = top[r], sum += top[r];
    }
    if (a.normalise)
      for (int r = 0; r < a.top_k; r++) weights[r] = weights[r] / (sum + 1e-20f);
    for (int r = 0; r < a.top_k; r++) weights[r] *= a.scale;
  }
}

static void weighted_sum(const float* const* x, const float* weights, int n, float* y, int cols) {
  for (int c = 0; c < cols; c += 16) {
    f32x16 sum = set1(weights[0]) * load_cols(x[0], c, cols);
    for (int i = 1; i < n; i++) sum = fma(set1(weights[i]), load_cols(x[i], c, cols), sum);
    if (c + 16 <= cols) store(y + c, sum);
    else store_n(y + c, sum, cols - c);
  }
}

}  // namespace octavo::VEC_NS
