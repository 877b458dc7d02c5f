// Elementary functions on 16 lanes, the same operations in the same order at every level. NaN in, NaN out.
namespace octavo::VEC_NS {

// 2^x for x < 127.5; x below -125 counts as -125. Relative error 2e-7. The integer part comes of adding 1.5 * 2^23 and
// goes into the exponent by an integer addition, which the floating-point pipes do not see.
VEC_INLINE f32x16 exp2(f32x16 x) {
  const f32x16 magic = set1(12582912.f);
  x = max(set1(-125.f), x);
  f32x16 shifted = x + magic, f = x - (shifted - magic);  // f in [-0.5, 0.5]
  f32x16 p = set1(1.32647272e-3f);                        // minimax of (2^f - 1) / f, exact at 0
  p = fma(p, f, set1(9.67151264e-3f));
  p = fma(p, f, set1(5.55073374e-2f));
  p = fma(p, f, set1(2.40222421e-1f));
  p = fma(p, f, set1(6.93146978e-1f));
  p = fma(p, f, set1(1.f));
  return as_f32(as_u32(p) + (as_u32(shifted) << 23));  // integers that wrap
}

VEC_INLINE f32x16 exp(f32x16 x) { return exp2(x * set1(1.44269504f)); }  // x < 88

// ln(x) for normal x > 0, relative error 2e-7 or absolute 1e-7. x = 2^e * m, m in [sqrt(1/2), sqrt(2));
// ln(m) = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.172.
VEC_INLINE f32x16 log(f32x16 x) {
  i32x16 e = (as_i32(x) - 0x3f3504f3) >> 23;
  f32x16 m = as_f32(as_i32(x) - (e << 23)), ef = to_f32(e);
  f32x16 d = m - set1(1.f), s = d / (m + set1(1.f)), s2 = s * s;
  f32x16 p = set1(2.f / 9);
  p = fma(p, s2, set1(2.f / 7));
  p = fma(p, s2, set1(2.f / 5));
  p = fma(p, s2, set1(2.f / 3));
  p = fma(p * s2, s, s + s);
  return fma(ef, set1(6.93359375e-1f),
             fma(ef, set1(-2.12194440e-4f), p));  // ln(2) in two parts, the first exact in 10 bits
}

// Relative error 2e-7: x + x^3 q(x^2) up to 0.625, minimax; from there 1 - 2 / (e^2|x| + 1) with the sign of x.
VEC_INLINE f32x16 tanh(f32x16 x) {
  const f32x16 magnitude = abs(x), t = x * x;
  f32x16 q = set1(-5.704974351e-3f);
  q = fma(q, t, set1(2.063907529e-2f));
  q = fma(q, t, set1(-5.373971115e-2f));
  q = fma(q, t, set1(1.333144215e-1f));
  q = fma(q, t, set1(-3.333328194e-1f));
  const f32x16 small = fma(x * t, q, x);
  const f32x16 e = exp2(min(set1(40.f), magnitude * set1(2.88539008f)));
  const f32x16 large = set1(1.f) - set1(2.f) / (e + set1(1.f));
  const u32x16 sign = as_u32(x) & 0x80000000u;
  return select(less(set1(0.625f), magnitude), as_f32(as_u32(large) | sign), small);
}

VEC_INLINE f32x16 silu(f32x16 x) {
  f32x16 t = min(set1(126.f), x * set1(-1.44269504f));
  return x / (set1(1.f) + exp2(t));
}

}  // namespace octavo::VEC_NS
