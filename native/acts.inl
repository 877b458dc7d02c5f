// Activations on 16 lanes, as `graph.ops.ACTS` defines them, and the passes over rows made of them. NaN in, NaN out.
namespace octavo::VEC_NS {

// x / (1 + 2^y)
VEC_INLINE f32x16 over_1_plus_exp2(f32x16 x, f32x16 y) { return x / (set1(1.f) + exp2(min(set1(126.f), y))); }

// x Phi(x). Phi(-|x|) = e^(-x^2 / 2) s q(s), s = 1 / (1 + |x| / 4), q of degree 8 for |x| <= 14, where the rest is under
// 2^-120 of x. Relative error 5e-7, and 2^-22 x^2 where x is negative: the rounding of the exponent.
VEC_INLINE f32x16 gelu(f32x16 x) {
  const f32x16 a = min(set1(14.f), abs(x)), s = set1(1.f) / fma(set1(0.25f), a, set1(1.f));
  f32x16 q = set1(2.572335355e-2f);
  q = fma(q, s, set1(-1.528087189e-1f));
  q = fma(q, s, set1(2.961206988e-1f));
  q = fma(q, s, set1(-2.057821069e-1f));
  q = fma(q, s, set1(2.017576729e-1f));
  q = fma(q, s, set1(3.292808285e-2f));
  q = fma(q, s, set1(1.037466633e-1f));
  q = fma(q, s, set1(9.851684464e-2f));
  q = fma(q, s, set1(9.979748133e-2f));
  const f32x16 tail = exp2(a * a * set1(-7.21347520e-1f)) * (q * s);
  return x * select(less(x, zero()), tail, set1(1.f) - tail);
}

template <ActKind K> VEC_INLINE f32x16 act(f32x16 x) {
  constexpr float kLog2e = 1.44269504f;
  if constexpr (K == ActKind::Silu) return silu(x);
  if constexpr (K == ActKind::Gelu) return gelu(x);
  if constexpr (K == ActKind::GeluTanh) {  // -2 log2(e) sqrt(2 / pi) (x + 0.044715 x^3)
    const f32x16 c = set1(-2.30220820f);
    return over_1_plus_exp2(x, x * fma(c * set1(0.044715f), x * x, c));
  }
  if constexpr (K == ActKind::GeluQuick) return over_1_plus_exp2(x, x * set1(-1.702f * kLog2e));
  if constexpr (K == ActKind::Relu) return max(zero(), x);
  if constexpr (K == ActKind::Relu2) return max(zero(), x) * max(zero(), x);
  if constexpr (K == ActKind::Sigmoid) return over_1_plus_exp2(set1(1.f), x * set1(-kLog2e));
  if constexpr (K == ActKind::Tanh) return tanh(x);
}

template <ActKind K> VEC_INLINE f32x16 act_mul(f32x16 gate, f32x16 up) {
  if constexpr (K == ActKind::SwigluOai) {
    const f32x16 limited = max(set1(-7.f), min(set1(7.f), up));
    return act<ActKind::GeluQuick>(min(set1(7.f), gate)) * (limited + set1(1.f));
  } else {
    return act<K>(gate) * up;
  }
}

}  // namespace octavo::VEC_NS
