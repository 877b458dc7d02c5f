// Packed integer formats as the product with A8 activations sees them: 32 K x kLanes columns of one panel, decoded to bytes
// in registers. A run is K that share their numbers: all of the group, or each half (kRuns in codes.inl).
namespace octavo::VEC_NS {

template <Format F> struct WeightsOf {
  using type = UnsignedWeights<kLargest<F>>;
};
template <Format F>
  requires(kLargest<F> > 127)
struct WeightsOf<F> {
  using type = SignedWeights;
};

// What the sum of a run starts at, where kRest of the zero of all columns is left to it: first what the row says, given the
// sum of its activations negated. Sums are exact: |q| <= 127, values within 128 and zeros within 255, so that they stay
// below 32 * 127 * (128 + 255) < 2^21; what a program left of another value in their place wraps.
template <Format F, int kRest> VEC_INLINE int32_t begin_of(int32_t nsum) {
  return kZeros<F> ? nsum : (int32_t)((uint32_t)nsum * (uint32_t)kRest);
}
template <Format F, int kRest> VEC_INLINE i32v start_of(const Numbers<F>& numbers, int32_t begun) {
  if constexpr (kZeros<F>) return (numbers.zero + kRest) * begun;
  else if constexpr (kRest != 0) return begun - i32v{};
  else return i32v{};
}
// acc + the run's product, given its sum, the activations' scale s, and t = s times their sum
template <Format F> VEC_INLINE f32v add_run(const Numbers<F>& numbers, f32v acc, i32v sum, int run, float s, float t) {
  acc = fma(part_to_f32(sum), numbers.scale[run] * s, acc);
  return kMinimum<F> ? fma(numbers.minimum[run], t - f32v{}, acc) : acc;
}

template <Format F> struct Panel {
  static constexpr Format kFormat = F;
  static constexpr int kQuads = 8 / kRuns<F>;  // of a run
  using Weights = typename WeightsOf<F>::type;
  static constexpr int kRest = kZero<F> - Weights::kOffset;  // of the zero, when the dots are done
  typename Weights::Quads quads[8];
  Numbers<F> numbers;

  VEC_INLINE Panel(const uint8_t* unit, int group, int column) : numbers(numbers_of<F>(unit, group, column)) {
    GEMM_UNROLL for (int j = 0; j < 8; j++) quads[j] = Weights::of(quad_of<F>(unit, group, column, j));
  }
  VEC_INLINE void turn() {
    GEMM_UNROLL for (int run = 0; run < kRuns<F>; run++) Weights::template turn<kQuads>(quads + run * kQuads);
  }
  static VEC_INLINE int32_t begin(int32_t nsum) { return begin_of<F, kRest>(nsum); }
  VEC_INLINE i32v start(int32_t begun) const { return start_of<F, kRest>(numbers, begun); }
  VEC_INLINE f32v add(f32v acc, i32v sum, int run, float s, float t) const {
    return add_run<F>(numbers, acc, sum, run, s, t);
  }
};

}  // namespace octavo::VEC_NS
