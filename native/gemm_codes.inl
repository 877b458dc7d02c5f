// Integer codes x A8, for formats whose decoding is too long to repeat for every tile of rows: a group of 32 K is decoded
// in L1 (codes.inl) once for up to 48 rows. Included after gemm.inl.
namespace octavo::VEC_NS {

// A run of N quads of K with one scale: half a group, or all of it.
struct CodesRun {
  const uint8_t (*line)[64];
  const float *scale, *minimum;  // minimum: null where the format has none
  const int32_t* zero;
};
// The same K of some rows.
struct RowsRun {
  const int8_t* q;      // 32 bytes from row to row
  const float *s, *t;   // scales, and scales times sums
  const int32_t* nsum;  // sums, negated
};

// y[r * 32 ..] += MR rows times 16 columns. Sums are exact: |q| <= 127, values within 128 and zeros within 383, so that
// they stay below 32 * 127 * (128 + 383) < 2^21.
template <class Weights, int N, int MR>
GEMM_TILE static void tile_codes(const CodesRun& w, const RowsRun& x, float* y) {
  GEMM_UNROLL for (int p = 0; p < kParts; p++) {
    typename Weights::Quads quads[N];
    GEMM_UNROLL for (int j = 0; j < N; j++) quads[j] = Weights::of(part_of_line(w.line[j], p * kLanes));
    f32v scale, minimum{};
    i32v zero;
    memcpy(&scale, w.scale + p * kLanes, sizeof scale);
    memcpy(&zero, w.zero + p * kLanes, sizeof zero);
    if (w.minimum) memcpy(&minimum, w.minimum + p * kLanes, sizeof minimum);
    GEMM_UNROLL for (int r0 = 0; r0 < MR; r0 += kInterleave) {
      const int n = MR - r0 < kInterleave ? MR - r0 : kInterleave;
      i32v dot[kInterleave];
      GEMM_UNROLL for (int r = 0; r < kInterleave; r++) if (r < n) {
        const int32_t nsum = x.nsum[r0 + r];
        dot[r] = zero * nsum;
        if constexpr (__is_same(Weights, SignedWeights)) dot[r] = dot[r] + Weights::zero_sum(nsum);
      }
      Weights::template dot<N>(dot, n, quads, x.q + r0 * 32);
      GEMM_UNROLL for (int r = 0; r < kInterleave; r++) if (r < n) {
        float* out = y + (r0 + r) * 32 + p * kLanes;
        f32v acc;
        memcpy(&acc, out, sizeof acc);
        acc = fma(part_to_f32(dot[r]), scale * x.s[r0 + r], acc);
        if (w.minimum) acc = fma(minimum, x.t[r0 + r] - f32v{}, acc);
        memcpy(out, &acc, sizeof acc);
      }
    }
  }
}

// n rows, in tiles of powers of two: few instances of the tile
template <class Weights, int N, int MR = kMaxRows>
VEC_INLINE void add_codes(const CodesRun& w, RowsRun x, int n, float* y) {
  for (; n >= MR; n -= MR) {
    tile_codes<Weights, N, MR>(w, x, y);
    x.q += MR * 32, x.s += MR, x.t += MR, x.nsum += MR, y += MR * 32;
  }
  if constexpr (MR > 1) add_codes<Weights, N, MR / 2>(w, x, n, y);
}

template <bool Signed, int Bits> struct WeightsOf {
  using type = UnsignedWeights<Bits>;
};
template <int Bits> struct WeightsOf<true, Bits> {
  using type = SignedWeights;
};

template <Format F> struct ProductCodes {
  static constexpr int kRows = 48, kRuns = kHalves<F>, kQuads = 8 / kRuns;
  using Weights = typename WeightsOf<kSigned<F>, kRuns == 2 ? 6 : 5>::type;
  static void run(const Weight& w, const Activation& x, int task, int row, int n, float* y) {
    Codes codes;
    int32_t nsum[2][kRows];
    float t[2][kRows];
    clear(y, n);
    for (int g = 0; g < x.k_pad / 32; g++) {
      const int64_t at = g * x.stride + row;
      RowsRun rows[2] = {{x.q + at * 32, x.s + at, x.t + at, x.nsum + at}};
      if constexpr (kRuns == 2) {
        for (int r = 0; r < n; r++) {
          nsum[0][r] = x.nhalf[at + r];
          nsum[1][r] = x.nsum[at + r] - x.nhalf[at + r];
          for (int i = 0; i < 2; i++) t[i][r] = x.s[at + r] * (float)-nsum[i][r];
        }
        for (int i = 0; i < 2; i++) rows[i] = {x.q + at * 32 + i * 16, x.s + at, t[i], nsum[i]};
      }
      for (int panel = 0; panel < 2; panel++) {
        const uint8_t* data = task_data(w, task) + panel * w.panel_bytes;
        if (row == 0 && g % kGroupsOfUnit<F> == 0)
          for (int i = 0; i < unit_bytes(F); i += 64) prefetch(unit_of<F>(data, g) + kPrefetch / 2 + i);
        decode_codes<F>(data, g, codes);
        for (int i = 0; i < kRuns; i++) {
          const CodesRun run{codes.line + i * kQuads, codes.scale[i], kMinimum<F> ? codes.minimum[i] : nullptr,
                             codes.zero};
          add_codes<Weights, kQuads>(run, rows[i], n, y + panel * 16);
        }
      }
    }
  }
};

}  // namespace octavo::VEC_NS
