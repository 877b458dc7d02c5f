// Products with packed weights: micro-kernels (a few rows x 16 or 32 columns over all of K) and their driver.
// Every output element has one accumulator that takes K in ascending order, whatever the rows in its tile (P1).
namespace octavo::VEC_NS {

#define GEMM_TILE __attribute__((noinline, noclone))  // registers are allocated for the tile alone

VEC_INLINE const uint8_t* task_data(const Weight& w, int task) {
  return w.data + task * (kTaskCols / panel_cols(w.format)) * w.panel_bytes;
}

// Calls add(r, rows) for n rows in tiles of nearly the same size.
template <class Tile, class Add> VEC_INLINE void for_tiles(int n, Add add) {
  for (int r = 0, rows, tiles = (n + Tile::kMostRows - 1) / Tile::kMostRows; tiles; r += rows, tiles--)
    add(r, rows = (n - r + tiles - 1) / tiles);
}

// ---------------------------------------------------------------- integer weights x A8
// Per group of 32 K: exact int32 sums, then one fma for each run. P describes the format (panels.inl).

// y[r * 32 ..] = rows [row, row + MR) of x times the 16 columns of w, sums in registers, where one holds 16 columns.
// Rows take turns in groups, so that the dots of one row hide the latency of another's.
template <class P, int MR>
GEMM_TILE static void tile_a8(const uint8_t* w, const Activation& x, int row, float* y, bool fetch) {
  constexpr int kUnit = unit_bytes(P::kFormat), kGroupsOfUnit = kGroups<P::kFormat>;
  const int64_t rows = x.stride;
  const int8_t* q = x.q + row * 32;
  const float *s = x.s + row, *t = x.t + row;
  const int32_t* nsum = x.nsum + row;
  f32v acc[MR];
  GEMM_UNROLL for (int r = 0; r < MR; r++) acc[r] = f32v{};
  for (const uint8_t* end = w + x.k_pad / 32 / kGroupsOfUnit * kUnit; w < end; w += kUnit) {
    if (fetch) GEMM_UNROLL for (int i = 0; i < kUnit; i += 64) prefetch(w + kPrefetch + i);
    for (int group = 0; group < kGroupsOfUnit; group++) {
      const P panel(w, group, 0);
      GEMM_UNROLL for (int r0 = 0; r0 < MR; r0 += kInterleave) {
        const int n = MR - r0 < kInterleave ? MR - r0 : kInterleave;
        i32v sum[kInterleave];
        GEMM_UNROLL for (int r = 0; r < kInterleave; r++) if (r < n) sum[r] = panel.start(P::begin(nsum[r0 + r]));
        P::Weights::template dot<8>(sum, n, panel.quads, q + r0 * 32);
        GEMM_UNROLL for (int r = 0; r < kInterleave; r++) if (r < n) acc[r0 + r] =
            panel.add(acc[r0 + r], sum[r], 0, s[r0 + r], t[r0 + r]);
      }
      q += rows * 32, s += rows, t += rows, nsum += rows;
    }
  }
  GEMM_UNROLL for (int r = 0; r < MR; r++) memcpy(y + r * 32, &acc[r], sizeof(f32v));
}

VEC_INLINE int32_t wrapping_difference(int32_t a, int32_t b) { return (int32_t)((uint32_t)a - (uint32_t)b); }

// Rows of a group where they lie, from index `at` of the activation on.
template <Format F> struct RowsInPlace {
  const Activation& x;
  int64_t at;
  VEC_INLINE int32_t nsum(int r, int run) const {
    if (kRuns<F> == 1) return x.nsum[at + r];
    return run ? wrapping_difference(x.nsum[at + r], x.nhalf[at + r]) : x.nhalf[at + r];
  }
  VEC_INLINE int32_t begin(int r, int run) const { return Panel<F>::begin(nsum(r, run)); }
  VEC_INLINE float s(int r) const { return x.s[at + r]; }
  VEC_INLINE float t(int r, int run) const {
    return kRuns<F> == 1 ? x.t[at + r] : s(r) * (float)wrapping_difference(0, nsum(r, run));
  }
  template <int N> VEC_INLINE void dot(i32v (&sum)[kInterleave], const Panel<F>& panel, int run) const {
    constexpr int kQuads = Panel<F>::kQuads;
    Panel<F>::Weights::template dot<kQuads>(sum, N, panel.quads + run * kQuads, x.q + at * 32 + run * 16);
  }
};

// One row of a group, made ready for many panels: its quads again and again (put_again), and of formats of two runs what
// would have to be computed of their sums for each panel.
template <Format F> struct TurnedRow {
  static constexpr int kHalves = kRuns<F> == 2 ? 2 : 0;
  alignas(64) int8_t quads[kRuns<F>][64];
  int32_t begins[kHalves];
  float sums[kHalves];
  VEC_INLINE void put(const RowsInPlace<F>& row) {
    for (int run = 0; run < kRuns<F>; run++)
      Panel<F>::Weights::template put_again<Panel<F>::kQuads>(quads[run], row.x.q + row.at * 32 + run * 16);
    for (int run = 0; run < kHalves; run++) {
      begins[run] = row.begin(0, run);
      if (kMinimum<F>) sums[run] = row.t(0, run);
    }
  }
};
template <Format F> struct RowsTurned {
  RowsInPlace<F> row;
  const TurnedRow<F>& turned;
  VEC_INLINE int32_t begin(int, int run) const { return kRuns<F> == 2 ? turned.begins[run] : row.begin(0, 0); }
  VEC_INLINE float s(int) const { return row.s(0); }
  VEC_INLINE float t(int, int run) const { return kRuns<F> == 2 ? turned.sums[run] : row.t(0, 0); }
  template <int N> VEC_INLINE void dot(i32v (&sum)[kInterleave], const Panel<F>& panel, int run) const {
    constexpr int kQuads = Panel<F>::kQuads;
    Panel<F>::Weights::template dot_turned<kQuads>(sum[0], panel.quads + run * kQuads, turned.quads[run]);
  }
};

// y[r * 32 ..] += N rows times panel
template <int N, Format F, class Rows> VEC_INLINE void add_rows(const Panel<F>& panel, const Rows& rows, float* y) {
  f32v acc[N];
  GEMM_UNROLL for (int r = 0; r < N; r++) memcpy(&acc[r], y + r * 32, sizeof(f32v));
  GEMM_UNROLL for (int run = 0; run < kRuns<F>; run++) {
    i32v sum[kInterleave];
    GEMM_UNROLL for (int r = 0; r < N; r++) sum[r] = panel.start(rows.begin(r, run));
    rows.template dot<N>(sum, panel, run);
    GEMM_UNROLL for (int r = 0; r < N; r++) acc[r] =
        panel.add(acc[r], sum[r], run, rows.s(r), kMinimum<F> ? rows.t(r, run) : 0);
  }
  GEMM_UNROLL for (int r = 0; r < N; r++) memcpy(y + r * 32, &acc[r], sizeof(f32v));
}

constexpr int kRowsInt = 64;  // rows that share what a register has of a group: 8 KB of results

// y[r * 32 ..] = rows [row, row + n) of x times kPanels panels from w on, a register's worth of columns at a time for all
// rows, so that few registers serve and decoding is shared; the sums are in L1.
template <Format F, int kPanels, bool kTurned>
GEMM_TILE static void tile_rows(const uint8_t* w, size_t panel_bytes, const Activation& x, int row, int n, float* y,
                                bool fetch) {
  constexpr int kGroupBytes = (unit_bytes(F) + kGroups<F> - 1) / kGroups<F>;
  TurnedRow<F> turned[kTurned ? kRowsInt : 0];  // 4 or 12 KB
  for (int r = 0; r < n; r++)
    for (int c = 0; c < kPanels * 16; c += 16) store(y + r * 32 + c, zero());
  for (int g = 0; g < x.k_pad / 32; g++) {
    const int group = g % kGroups<F>;
    const uint8_t* unit = unit_of<F>(w, g);
    const int64_t at = g * x.stride + row;
    if (fetch) fetch_ahead<kPanels>(w, panel_bytes, unit - w + group * kGroupBytes, kGroupBytes);
    if constexpr (kTurned)
      for (int r = 0; r < n; r++) turned[r].put({x, at + r});
    for (int c = 0; c < kPanels * 16; c += kLanes) {
      Panel<F> panel(unit + c / 16 * panel_bytes, group, c % 16);
      if constexpr (kTurned) {
        panel.turn();
        for (int r = 0; r < n; r++) add_rows<1>(panel, RowsTurned<F>{{x, at + r}, turned[r]}, y + r * 32 + c);
      } else {
        int r = 0;
        if constexpr (kInterleave > 1)
          for (; r + kInterleave <= n; r += kInterleave)
            add_rows<kInterleave>(panel, RowsInPlace<F>{x, at + r}, y + r * 32 + c);
        for (; r < n; r++) add_rows<1>(panel, RowsInPlace<F>{x, at + r}, y + r * 32 + c);
      }
    }
  }
}

// y[r * 32 ..] = rows [row, row + MR) of x times the 16 columns of a panel: what is decoded of a quad is used at once, and
// sums are in registers.
template <Format F, int MR>
GEMM_TILE static void tile_few(const uint8_t* w, const Activation& x, int row, float* y, bool fetch) {
  using Few = FewRows<kLargest<F>>;
  constexpr int kColumns = 16 / kLanes, kGroupBytes = (unit_bytes(F) + kGroups<F> - 1) / kGroups<F>;
  f32v acc[MR][kColumns] = {};
  for (int g = 0; g < x.k_pad / 32; g++) {
    const int group = g % kGroups<F>;
    const uint8_t* unit = unit_of<F>(w, g);
    const int64_t at = g * x.stride + row;
    if (fetch) fetch_ahead<1>(w, 0, unit - w + group * kGroupBytes, kGroupBytes);
    typename Few::Dot dot[kRuns<F>][MR][kColumns];
    typename Few::Row rows[MR];
    GEMM_UNROLL for (int r = 0; r < MR; r++) rows[r].take(x.q + (at + r) * 32);
    GEMM_UNROLL for (int i = 0; i < 8; i++) {
      const int j = info_of(F).low == 4 ? i / 2 + i % 2 * 4 : i;  // both quads of a line
      const int run = j * kRuns<F> / 8, n = 8 / kRuns<F>;
      GEMM_UNROLL for (int c = 0; c < kColumns; c++) {
        const i32v quad = quad_of<F>(unit, group, c * kLanes, j);
        GEMM_UNROLL for (int r = 0; r < MR; r++) dot[run][r][c].add(kRuns<F> == 2 ? j % 4 : i, n, quad, rows[r], j);
      }
    }
    const RowsInPlace<F> in{x, at};
    GEMM_UNROLL for (int c = 0; c < kColumns; c++) {
      const Numbers<F> numbers = numbers_of<F>(unit, group, c * kLanes);
      GEMM_UNROLL for (int r = 0; r < MR; r++) GEMM_UNROLL for (int run = 0; run < kRuns<F>; run++) {
        const i32v start = start_of<F, kZero<F>>(numbers, begin_of<F, kZero<F>>(in.nsum(r, run)));
        const float t = kMinimum<F> ? in.t(r, run) : 0;
        acc[r][c] = add_run<F>(numbers, acc[r][c], start + dot[run][r][c].sum, run, in.s(r), t);
      }
    }
  }
  GEMM_UNROLL for (int r = 0; r < MR; r++) GEMM_UNROLL for (int c = 0; c < kColumns; c++)
      memcpy(y + r * 32 + c * kLanes, &acc[r][c], sizeof(f32v));
}
template <Format F, int MR = FewRows<kLargest<F>>::kMostRows>
VEC_INLINE void few_rows(const uint8_t* w, const Activation& x, int row, int n, float* y, bool fetch) {
  if constexpr (MR > 1)
    if (n < MR) return few_rows<F, MR - 1>(w, x, row, n, y, fetch);
  tile_few<F, MR>(w, x, row, y, fetch);
}

// So many rows are multiplied a few at a time, each time with codes decoded again; more share what is decoded once.
template <Format F>
constexpr int kFewRows = [] {
  constexpr int kMost = FewRows<kLargest<F>>::kMostRows;
  return kMost < 4 ? kMost : kOneOf<F, W4, W4F, W4Z, W4Z64, W4C> ? kRowsInt : 6;
}();

// ---------------------------------------------------------------- float weights, MR rows x 32 columns
// Where so many sums do not fit the registers, 16 columns and then the others: all K of a tile are in L1 then.

template <int MR> constexpr int kVectors = MR <= kMaxRowsWide ? 2 : 1;

// What a line of 32 columns holds, and how it meets the activations: kDepth K, 16 columns as a Part
struct F32Lines {
  using X = float;
  using Part = f32x16;
  static constexpr int kBytes = 128, kDepth = 1, kMostRows = kMaxRowsFloat;  // of a tile
  static VEC_INLINE Part part(const uint8_t* p) { return load((const float*)p); }
  static VEC_INLINE void add(f32x16& sum, Part w, const X* x) { add_product(sum, w, set1(*x)); }
};
struct F16Lines : F32Lines {
  static constexpr int kBytes = 64;
  static VEC_INLINE Part part(const uint8_t* p) { return load_f16((const uint16_t*)p); }
};
struct Bf16Lines {  // K pairs
  using X = uint16_t;
  using Part = i32x16;
  static constexpr int kBytes = 128, kDepth = 2, kMostRows = kBf16Dots ? kMaxRowsFloat : kMaxRows;
  static VEC_INLINE Part part(const uint8_t* p) { return load_line(p); }
  static VEC_INLINE void add(f32x16& sum, Part w, const X* x) {
    uint32_t pair;
    memcpy(&pair, x, sizeof pair);
    sum = dot2_bf16(sum, w, pair);
  }
};

// Row r of a tile is reached from every third row by one of three offsets, so that few registers address all rows.
template <class T> VEC_INLINE const T* row_of(const T* const* base, int64_t ld, int r) {
  return base[r / 3] + ld * (r % 3);
}

// sums += x[MR][..] times 16 V columns of some lines
template <class Lines, int MR, int V>
VEC_INLINE void add_lines(f32x16 (&sums)[MR][V], const uint8_t* w, int lines, const typename Lines::X* x, int64_t ld,
                          bool fetch) {
  constexpr int kPart = Lines::kBytes / 2;
  const typename Lines::X* base[(MR + 2) / 3];
  GEMM_UNROLL for (int i = 0; i < (MR + 2) / 3; i++) base[i] = x + 3 * i * ld;
  for (int i = 0; i < lines; i++, w += Lines::kBytes) {
    if (fetch) GEMM_UNROLL for (int j = 0; j < V * kPart; j += 64) prefetch(w + kPrefetch + j);
    typename Lines::Part b[V];
    GEMM_UNROLL for (int v = 0; v < V; v++) b[v] = Lines::part(w + v * kPart);
    GEMM_UNROLL for (int r = 0; r < MR; r++) GEMM_UNROLL for (int v = 0; v < V; v++)
        Lines::add(sums[r][v], b[v], row_of(base, ld, r) + i * Lines::kDepth);
  }
}

// y[r * 32 ..] += x[MR][..] times some lines
template <class Lines, int MR>
GEMM_TILE static void tile_lines(const uint8_t* w, int lines, const typename Lines::X* x, int64_t ld, float* y,
                                 bool fetch) {
  constexpr int V = kVectors<MR>;
  for (int c = 0; c < 2; c += V) {
    f32x16 sums[MR][V];
    GEMM_UNROLL for (int r = 0; r < MR; r++) GEMM_UNROLL for (int v = 0; v < V; v++) sums[r][v] =
        load(y + r * 32 + (c + v) * 16);
    add_lines<Lines>(sums, w + c * Lines::kBytes / 2, lines, x, ld, fetch);
    GEMM_UNROLL for (int r = 0; r < MR; r++) GEMM_UNROLL for (int v = 0; v < V; v++)
        store(y + r * 32 + (c + v) * 16, sums[r][v]);
  }
}

template <class Lines, int MR = Lines::kMostRows>
VEC_INLINE void add_tile(const uint8_t* w, int lines, const typename Lines::X* x, int64_t ld, int n, float* y,
                         bool fetch) {
  if constexpr (MR > 1)
    if (n < MR) return add_tile<Lines, MR - 1>(w, lines, x, ld, n, y, fetch);
  tile_lines<Lines, MR>(w, lines, x, ld, y, fetch);
}

// ---------------------------------------------------------------- products: y[n][32] = rows [row, row + n) of one task

// Sums in registers where they hold 16 rows; formats that are long to decode do it once for all rows.
template <Format F> constexpr bool kSumsInRegisters = kParts == 1 && kOneOf<F, W8, W4, W4F>;

template <Format F> struct ProductA8 {
  static constexpr int kRows = kSumsInRegisters<F> ? kMaxRows : kRowsInt;
  template <int MR = kMaxRows>
  static void run(const Weight& w, const Activation& x, int task, int row, int n, float* y) {
    const uint8_t* data = task_data(w, task);
    if constexpr (kSumsInRegisters<F>) {
      if constexpr (MR > 1)
        if (n < MR) return run<MR - 1>(w, x, task, row, n, y);
      tile_a8<Panel<F>, MR>(data, x, row, y, row == 0);
      tile_a8<Panel<F>, MR>(data + w.panel_bytes, x, row, y + 16, row == 0);
    } else {
      constexpr bool kTurns = Panel<F>::Weights::kTurns;
      if constexpr (kFewRows<F> > 0)
        if (n <= kFewRows<F>) {
          for (int panel = 0; panel < 2; panel++, data += w.panel_bytes)
            for_tiles<FewRows<kLargest<F>>>(n, [&](int r, int rows) __attribute__((always_inline)) {
              few_rows<F>(data, x, row + r, rows, y + r * 32 + panel * 16, row + r == 0);
            });
          return;
        }
      if (kTurns || n >= 4) return tile_rows<F, 2, kTurns>(data, w.panel_bytes, x, row, n, y, row == 0);
      if constexpr (!kTurns)
        for (int panel = 0; panel < 2; panel++, data += w.panel_bytes)
          tile_rows<F, 1, false>(data, 0, x, row, n, y + panel * 16, row == 0);
    }
  }
};

// The two int8 rows of a row share what is decoded; their sums are added at the end.
template <Format F> struct ProductA16 {
  static constexpr int kRows = ProductA8<F>::kRows / 2;
  GEMM_TILE static void run(const Weight& w, const Activation& x, int task, int row, int n, float* y) {
    alignas(64) float both[2 * kRows * kTaskCols];
    ProductA8<F>::run(w, x, task, 2 * row, 2 * n, both);
    for (int r = 0; r < n; r++)
      for (int c = 0; c < kTaskCols; c += 16)
        store(y + r * 32 + c, load(both + r * 64 + c) + load(both + r * 64 + 32 + c));
  }
};

VEC_INLINE void clear(float* y, int n) {
  for (int i = 0; i < 2 * n; i++) store(y + 16 * i, zero());
}

// y[n][32] += rows of x from `row` on times the task's lines over K = [0, k), kFloatDepth at a time
template <class Lines>
VEC_INLINE void add_rows_of(const uint8_t* task, int k, const typename Lines::X* x, int64_t ld, int row, int n,
                            float* y) {
  for (int k0 = 0; k0 < k; k0 += kFloatDepth) {
    const int depth = k - k0 < kFloatDepth ? k - k0 : kFloatDepth;
    const uint8_t* lines = task + k0 / Lines::kDepth * Lines::kBytes;
    for_tiles<Lines>(n, [&](int r, int rows) __attribute__((always_inline)) {
      add_tile<Lines>(lines, depth / Lines::kDepth, x + (row + r) * ld + k0, ld, rows, y + r * 32, row + r == 0);
    });
  }
}

template <class Lines> struct ProductF32 {
  static constexpr int kRows = kRowsFloat;
  GEMM_TILE static void run(const Weight& w, const Activation& x, int task, int row, int n, float* y) {
    clear(y, n);
    add_rows_of<Lines>(task_data(w, task), w.k, x.f, x.ld, row, n, y);
  }
};

// Any pair: blocks of both operands are decoded to float32 in L1.
template <Format F, Act A> struct ProductDecoded {
  static constexpr int kRows = 48, kDepth = 64;  // 8 KB of weights, 12 KB of activations, 6 KB of results
  GEMM_TILE static void run(const Weight& w, const Activation& x, int task, int row, int n, float* y) {
    alignas(64) float wf[kDepth * 32], xf[A == Act::F32 ? 1 : kRows * kDepth];
    const int depth = F == Format::BF16 && A == Act::BF16 ? w.k_pad : w.k;
    clear(y, n);
    for (int k0 = 0; k0 < depth; k0 += kDepth) {
      decode_unit<F>(task_data(w, task), w.panel_bytes, k0 / 64, wf, row == 0);
      const float* xp = x.f + row * x.ld + k0;
      int64_t ld = x.ld;
      if constexpr (A != Act::F32) decode_rows<A>(x, row, n, k0, xf), xp = xf, ld = kDepth;
      const int k = depth - k0 < kDepth ? depth - k0 : kDepth;
      for_tiles<F32Lines>(n, [&](int r, int rows) __attribute__((always_inline)) {
        add_tile<F32Lines>((const uint8_t*)wf, k, xp + r * ld, ld, rows, y + r * 32, false);
      });
    }
  }
};

// With an instruction for pairs as they are; without, what is decoded has to serve some rows.
struct ProductBf16 {
  static constexpr int kRows = kRowsFloat;
  GEMM_TILE static void run(const Weight& w, const Activation& x, int task, int row, int n, float* y) {
    if (!kBf16Dots && n >= 12) return ProductDecoded<Format::BF16, Act::BF16>::run(w, x, task, row, n, y);
    clear(y, n);
    add_rows_of<Bf16Lines>(task_data(w, task), w.k_pad, x.h, x.ld, row, n, y);
  }
};

// ---------------------------------------------------------------- epilogues: 32 columns of n rows

GEMM_TILE static void finish_store(const GemmArgs& a, int col, int row, int n, const float* y) {
  const int cols = a.w->n - col;  // real columns from here on
  for (int r = 0; r < n; r++)
    for (int c = 0; c < kTaskCols && c < cols; c += 16) {
      f32x16 v = load(y + r * 32 + c);
      if (a.bias) v = v + load_cols(a.bias, col + c, a.w->n);
      float* out = a.out + (row + r) * a.ld_out + col + c;
      if (a.epilogue == Epilogue::Add) v = load_cols(a.residual + (row + r) * a.ld_residual, col + c, a.w->n) + v;
      if (c + 16 <= cols) store(out, v);
      else store_n(out, v, cols - c);
    }
}

// up: null for ActRound. The weights have a multiple of 32 columns. The results overwrite `gate`, and are rounded then.
template <ActKind K>
GEMM_TILE static void finish_act(const GemmArgs& a, int task, int row, int n, float* gate, const float* up) {
  for (int r = 0; r < n; r++) {
    for (int i = 0; i < 2; i++) {
      f32x16 g = load(gate + r * 32 + 16 * i), u = up ? load(up + r * 32 + 16 * i) : zero();
      const int col = task * kTaskCols + 16 * i;
      if (a.bias) g = g + load_cols(a.bias, col, a.w->n);
      if (a.bias && up) u = u + load_cols(a.bias + a.w->n, col, a.w->n);
      if constexpr (K != ActKind::SwigluOai)
        if (!up) {
          store(gate + r * 32 + 16 * i, act<K>(g));
          continue;
        }
      store(gate + r * 32 + 16 * i, act_mul<K>(g, u));
    }
  }
  put_rows(*a.act, row, n, task, gate, 32);
  alignas(64) static constexpr float kZeros[32] = {};
  if ((task + 1) * kTaskCols >= a.w->n_pad)  // nobody else writes the padding to 64 columns
    for (int g = task + 1; g < a.act->k_pad / 32; g++) put_rows(*a.act, row, n, g, kZeros, 0);
}

using FinishAct = void (*)(const GemmArgs&, int, int, int, float*, const float*);
constexpr FinishAct kFinishAct[kActKinds] = {
    finish_act<ActKind::Silu>,      finish_act<ActKind::Gelu>, finish_act<ActKind::GeluTanh>,
    finish_act<ActKind::GeluQuick>, finish_act<ActKind::Relu>, finish_act<ActKind::Relu2>,
    finish_act<ActKind::Sigmoid>,   finish_act<ActKind::Tanh>, finish_act<ActKind::SwigluOai>,
};

static void scale_columns(const float* factor, int n, float* y) {
  for (int r = 0; r < n; r++, y += 32)
    for (int c = 0; c < 32; c += 16) store(y + c, load(y + c) * load(factor + c));
}

// Sums y of n rows times a task, and of w_up, become output. They are overwritten.
VEC_INLINE void finish(const GemmArgs& a, int task, int row, int n, float* y, float* up) {
  if (a.w->factor) scale_columns(a.w->factor + task * kTaskCols, n, y);
  if (a.epilogue == Epilogue::ActMulRound) {
    if (a.w_up->factor) scale_columns(a.w_up->factor + task * kTaskCols, n, up);
    kFinishAct[(int)a.kind](a, task, row, n, y, up);
  } else if (a.epilogue == Epilogue::ActRound) {
    kFinishAct[(int)a.kind](a, task, row, n, y, nullptr);
  } else {
    finish_store(a, task * kTaskCols, row, n, y);
  }
}

template <class Product> static void gemm(const GemmArgs& a, int task0, int task1) {
  alignas(64) float y[Product::kRows * kTaskCols], up[Product::kRows * kTaskCols];
  const int rows = a.x->rows;
  for (int task = task0; task < task1; task++) {
    int tiles = (rows + Product::kRows - 1) / Product::kRows;
    for (int row = 0, n; row < rows; row += n, tiles--) {
      n = (rows - row + tiles - 1) / tiles;  // tiles of nearly the same size: small ones are the slowest
      Product::run(*a.w, *a.x, task, row, n, y);
      if (a.epilogue == Epilogue::ActMulRound) Product::run(*a.w_up, *a.x, task, row, n, up);
      finish(a, task, row, n, y, up);
    }
  }
}

}  // namespace octavo::VEC_NS
