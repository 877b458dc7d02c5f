// Integer codes x A8 in tiles. Codes less their zero are bytes of B, decoded once for many rows; the sums of a run, exact as
// in panels.inl, leave their tile for vectors that scale them, in the same order: these are the bits of avx512.
namespace octavo::VEC_NS {

// 32 K x 16 columns: rows of B, and the numbers of each run. A byte is the code less its column's zero, or less what of that
// zero leaves a signed byte: the rest, where there is one, is added to the sums.
template <int kRuns> struct alignas(64) CodeGroup {
  uint8_t lines[8][64];
  float scale[kRuns][16], minimum[kRuns][16], rest[16];
};

// Decodes a group; returns lanes other than 0 where there is a rest.
template <Format F> VEC_INLINE i32x16 decode_codes(const uint8_t* unit, int group, CodeGroup<kRuns<F>>& out) {
  const Numbers<F> numbers = numbers_of<F>(unit, group, 0);
  GEMM_UNROLL for (int run = 0; run < kRuns<F>; run++) {
    store(out.scale[run], numbers.scale[run]);
    if constexpr (kMinimum<F>) store(out.minimum[run], numbers.minimum[run]);
  }
  i32x16 zero{}, rest{};
  if constexpr (kZeros<F>) {
    zero = set1_i32(128);
    if (kLargest<F> <= 127) zero = numbers.zero > zero ? zero : numbers.zero;
    rest = numbers.zero - zero;
    store(out.rest, to_f32(rest));
    zero = as_i32(as_u32(zero) * 0x01010101u);  // to each byte
  }
  GEMM_UNROLL for (int j = 0; j < 8; j++) {
    const i32x16 quad = prepared<F>(quad_of<F>(unit, group, 0, j));
    store_line(out.lines[j], kZeros<F> ? (i32x16)((bytes)quad - (bytes)zero) : quad);
  }
  return rest;
}

// Lines of two panels that are wanted soon, a few at a time
struct LinesAhead {
  const uint8_t *at, *end;
  size_t panel_bytes;
  int step;
  VEC_INLINE void fetch() {
    for (int i = 0; i < step && at < end; i++, at += 64) prefetch(at), prefetch(at + panel_bytes);
  }
};

// Exact below 2^22. While tiles are busy, one of the two units that convert and multiply is theirs; both still add.
VEC_INLINE f32x16 to_f32_by_adding(i32x16 v) { return as_f32(as_u32(v) + set1_u32(0x4b400000)) - set1(0x1.8p23f); }

constexpr int kChunk = 16;  // groups that are decoded at a time

// What scales the sums of up to 16 rows
template <int kRuns> struct alignas(64) RowNumbers {
  float s[kChunk][16], t[kChunk][kRuns][16], nsum[kChunk][16];

  template <bool kMinimum, bool kRest> VEC_INLINE void take(const Activation& x, int64_t at, int rows, int count) {
    for (int g = 0; g < count; g++, at += x.stride) {
      const f32x16 scale = load_n(x.s + at, rows);
      store(s[g], scale);
      if constexpr (kRest) store(nsum[g], to_f32(as_i32(load_n((const float*)x.nsum + at, rows))));
      if constexpr (kMinimum && kRuns == 1) store(t[g][0], load_n(x.t + at, rows));
      if constexpr (kMinimum && kRuns == 2) {
        const i32x16 both = as_i32(load_n((const float*)x.nsum + at, rows));
        const i32x16 first = as_i32(load_n((const float*)x.nhalf + at, rows));
        store(t[g][0], scale * to_f32(-first)), store(t[g][1], scale * to_f32(first - both));
      }
    }
  }
};

// Up to 16 rows times some groups of a panel, a run a step
template <int kRuns, bool kMinimum, bool kRest> struct CodeTile {
  static void begin(int rows) {
    TileShapes shapes;
    for (int i = 0; i < 2; i++) shapes.set(i, rows, 64).set(4 + i, rows, 32 / kRuns).set(6 + i, 8 / kRuns, 64);
    tiles_begin(shapes);
  }

  template <int I>
  static VEC_INLINE void load_step(const CodeGroup<kRuns>* w, const int8_t* q, int64_t group_bytes, int step) {
    const int g = step / kRuns, run = step % kRuns;
    tile_load<4 + I>(q + g * group_bytes + run * 16, 32), tile_load<6 + I>(w[g].lines[run * 4], 64);
  }
  template <int I> static VEC_INLINE void dot() { tile_zero<I>(), tile_dot_s8_s8<I, 4 + I, 6 + I>(); }

  template <int MR>
  static VEC_INLINE void add(const CodeGroup<kRuns>* w, const RowNumbers<kRuns>& rows, const int32_t (&sums)[MR][16],
                             int step, f32x16 (&acc)[MR]) {
    const int g = step / kRuns, run = step % kRuns;
    const f32x16 scale = load(w[g].scale[run]);
    GEMM_UNROLL for (int r = 0; r < MR; r++) {
      f32x16 sum = to_f32_by_adding(load(sums[r]));
      if constexpr (kRest) sum = fma(load(w[g].rest), set1(rows.nsum[g][r]), sum);  // exact, too
      acc[r] = fma(sum, scale * set1(rows.s[g][r]), acc[r]);
      if constexpr (kMinimum) acc[r] = fma(load(w[g].minimum[run]), set1(rows.t[g][run][r]), acc[r]);
    }
  }

  // y[r * 32 ..] += the rows, at most MR and from q on, times `count` groups, an even number. Loads of a step come before the dot of the
  // step before, and its sums are stored two steps after: one right after the other takes the longer.
  template <int MR>
  GEMM_TILE static void run(const CodeGroup<kRuns>* w, const int8_t* q, int64_t group_bytes,
                            const RowNumbers<kRuns>& rows, int count, float* y, LinesAhead& ahead) {
    alignas(64) int32_t sums[2][MR][16];
    const int steps = count * kRuns;
    f32x16 acc[MR];
    GEMM_UNROLL for (int r = 0; r < MR; r++) acc[r] = load(y + r * 32);
    load_step<0>(w, q, group_bytes, 0), load_step<1>(w, q, group_bytes, 1);
    dot<0>();
    for (int i = 2; i < steps; i += 2) {
      ahead.fetch();
      load_step<0>(w, q, group_bytes, i);
      dot<1>();
      tile_store<0>(sums[0], 64);
      add(w, rows, sums[0], i - 2, acc);
      load_step<1>(w, q, group_bytes, i + 1);
      dot<0>();
      tile_store<1>(sums[1], 64);
      add(w, rows, sums[1], i - 1, acc);
    }
    dot<1>();
    tile_store<0>(sums[0], 64), tile_store<1>(sums[1], 64);
    add(w, rows, sums[0], steps - 2, acc), add(w, rows, sums[1], steps - 1, acc);
    GEMM_UNROLL for (int r = 0; r < MR; r++) store(y + r * 32, acc[r]);
  }
};

template <Format F> struct ProductTilesCodes {
  static constexpr int kRows = 128;  // 16 KB of results

  template <bool kRest>
  static void rows(const CodeGroup<kRuns<F>> (&groups)[2][kChunk], int first, int count, const Activation& x, int row,
                   int n, float* y, LinesAhead& ahead) {
    using Tile = CodeTile<kRuns<F>, kMinimum<F>, kRest>;
    RowNumbers<kRuns<F>> numbers;
    for (int r = 0; r < n; r += kTileLanes) {
      const int rows = n - r < kTileLanes ? n - r : kTileLanes;
      if (r == 0 || rows < kTileLanes) Tile::begin(rows);
      const int64_t at = first * x.stride + row + r;
      numbers.template take<kMinimum<F>, kRest>(x, at, rows, count);
      const auto run = rows > 8 ? Tile::template run<16> : Tile::template run<8>;
      for (int panel = 0; panel < 2; panel++)
        run(groups[panel], x.q + at * 32, x.stride * 32, numbers, count, y + r * 32 + panel * 16, ahead);
    }
  }

  static void run(const Weight& w, const Activation& x, int task, int row, int n, float* y) {
    constexpr int kChunkUnits = kChunk / kGroups<F>, kChunkBytes = kChunkUnits * unit_bytes(F);
    CodeGroup<kRuns<F>> groups[2][kChunk];
    const uint8_t* data = task_data(w, task);
    const int total = x.k_pad / 32, tiles = (n + kTileLanes - 1) / kTileLanes;
    clear(y, tiles * kTileLanes);
    for (int first = 0; first < total; first += kChunk) {
      const int count = total - first < kChunk ? total - first : kChunk;
      const uint8_t* chunk = data + first / kChunk * kChunkBytes;
      i32x16 rest{};
      for (int panel = 0; panel < 2; panel++)
        for (int g = 0; g < count; g++)
          rest |= decode_codes<F>(unit_of<F>(chunk + panel * w.panel_bytes, g), g % kGroups<F>, groups[panel][g]);
      const uint8_t* next = first + kChunk < total ? chunk + kChunkBytes : data + 2 * w.panel_bytes;
      const int lines = kChunkBytes / 64, calls = tiles * (count * kRuns<F> - 2) + 1;
      LinesAhead ahead{next, row == 0 ? next + kChunkBytes : next, w.panel_bytes, (lines + calls - 1) / calls};
      if (kZeros<F> && bits(equal(rest, i32x16{})) != 0xffff)
        rows<kZeros<F>>(groups, first, count, x, row, n, y, ahead);
      else rows<false>(groups, first, count, x, row, n, y, ahead);
    }
    tiles_end();
  }
};

// Fewer rows, whose tiles are not full or do not repay the decoding, are faster as avx512 multiplies them.
template <Format F>
constexpr int kFewestInTiles = kRuns<F> == 2                    ? 48
                               : F == Format::W8 || kMinimum<F> ? 20
                                                                : 14;  // measured
template <Format F> static void gemm_codes(const GemmArgs& a, int task0, int task1) {
  if (a.x->rows < kFewestInTiles<F>) kernels_avx512()->gemm[(int)F][(int)Act::A8](a, task0, task1);
  else gemm<ProductTilesCodes<F>>(a, task0, task1);
}
template <Format... F> static void put_codes(Kernels& table) {
  ((table.gemm[(int)F][(int)Act::A8] = gemm_codes<F>), ...);
}

}  // namespace octavo::VEC_NS
