// Attention to bf16 keys and values in tiles of AMX: 16 rows meet 16 tokens, or 16 dimensions, in one of them. Panels are
// rows of B as they lie in memory; only the values of a last block, whose end nobody has written, are copied.
//
// Same bits whatever the rows beside a row (P1): a row's sums are chains of one dot after the other, blocks ascending. What
// a row does not see has probability 0 and adds 0 to what a dot has left, where no subnormal is (put_rows: no -0 either).
namespace octavo::VEC_NS {

struct Bf16TileKv : Bf16Kv {};

template <int N, class F> VEC_INLINE void each(F f) {
  if constexpr (N > 0) each<N - 1>(f), f(std::integral_constant<int, N - 1>{});
}

// Lane r: the lanes of row r taken together.
template <class Op> VEC_INLINE f32x16 rows_together(const float* lanes, Op op) {
  f32x16 v[kTileLanes];
  GEMM_UNROLL for (int r = 0; r < kTileLanes; r++) v[r] = load(lanes + r * 16);
  GEMM_UNROLL for (int n = 8; n; n /= 2) GEMM_UNROLL for (int i = 0; i < n; i++) v[i] =
      op(even(v[2 * i], v[2 * i + 1]), odd(v[2 * i], v[2 * i + 1]));
  return v[0];
}

// 2^x for x <= 0, and 0 below -125, where it counts for nothing. The relative error of 3e-6 is small beside bf16's.
VEC_INLINE f32x16 probability(f32x16 x) {
  const f32x16 f = above_floor(x);  // in [0, 1)
  f32x16 p = set1(1.35341672e-2f);
  p = fma(p, f, set1(5.20114619e-2f));
  p = fma(p, f, set1(2.41442756e-1f));
  p = fma(p, f, set1(6.93003835e-1f));
  p = fma(p, f, set1(1.00000259f));
  return scaled_or_zero(less(x, set1(-125.f)), p, x);
}

template <> struct RowTiles<Bf16TileKv> {
  using Kv = Bf16TileKv;
  // Four results; queries of 32 dimensions, and of 16 or probabilities of 16 tokens; keys, and fewer or values
  enum { kA = 4, kHalfA = 5, kB = 6, kHalfB = 7 };
  static constexpr int kQueryBytes = kQueryWords * 4, kScoreBytes = kKvTile * 4;
  static constexpr int kTiles = kItemRows / kTileLanes;

  // Rows in up to three tiles of as many each, which meet a panel together: the last may begin in the one before.
  struct Tiles {
    int num, rows, first[kTiles];
  };

  int shaped = 0;  // rows that the tiles are for
  ~RowTiles() {
    if (shaped) tiles_end();
  }
  void shape(int rows) {
    if (rows == shaped) return;
    TileShapes shapes;
    for (int i = 0; i < 4; i++) shapes.set(i, rows, 64);
    tiles_begin(shapes.set(kA, rows, 64).set(kHalfA, rows, 32).set(kB, 16, 64).set(kHalfB, 8, 64));
    shaped = rows;
  }

  static VEC_INLINE void fetch(const Order<Kv>& order, int piece, Lines own) {
    const Lines ahead = order.beside(piece, own);
    GEMM_UNROLL for (int i = 0; i < Order<Kv>::kLines; i++) prefetch_ahead(ahead.at + i * ahead.step);
  }

  // Scores of Q tiles of rows with P blocks of `order` from `block` on.
  template <int Q, int P>
  static VEC_INLINE void score_blocks(const uint32_t* queries, const Tiles& tiles, const Order<Kv>& order, int block,
                                      float* out) {
    const uint8_t *q[Q], *keys[P];
    each<Q>([&](auto i) { q[i] = (const uint8_t*)(queries + tiles.first[i] * kQueryWords); });
    each<P>([&](auto p) { keys[p] = order.base + order.blocks[block + p] * order.stride; });
    each<Q * P>([](auto c) { tile_zero<c>(); });
    const int whole = order.keys / 2 * 2;
    for (int piece = 0; piece < whole; piece += 2)
      each<P>([&](auto p) {
        const uint8_t* at = keys[p] + piece * 512;
        for (int i = 0; i < 2; i++) fetch(order, (block + p) * order.keys + piece + i, {at, 64});
        tile_load<kB>(at, 64);
        each<Q>([&](auto i) {
          if (Q > 1 || p == 0) tile_load<kA>(q[i] + piece * 32, kQueryBytes);
          tile_dot_bf16<i * P + p, kA, kB>();
        });
      });
    if (whole < order.keys)
      each<P>([&](auto p) {
        const uint8_t* at = keys[p] + whole * 512;
        fetch(order, (block + p) * order.keys + whole, {at, 64});
        tile_load<kHalfB>(at, 64);
        each<Q>([&](auto i) {
          if (Q > 1 || p == 0) tile_load<kHalfA>(q[i] + whole * 32, kQueryBytes);
          tile_dot_bf16<i * P + p, kHalfA, kHalfB>();
        });
      });
    each<Q>([&](auto i) {
      each<P>([&](auto p) { tile_store<i * P + p>(out + tiles.first[i] * kKvTile + p * 16, kScoreBytes); });
    });
  }
  template <int Q, int P>
  static VEC_INLINE void score_from(const uint32_t* queries, const Tiles& tiles, const Order<Kv>& order, int block,
                                    float* out) {
    for (; block + P <= order.num; block += P) score_blocks<Q, P>(queries, tiles, order, block, out + block * 16);
    if constexpr (P > 1) score_from<Q, P / 2>(queries, tiles, order, block, out);
  }

  // out[row] += probabilities of Q tiles of rows times P vectors of 16 dimensions from dim0 on.
  template <int Q, int P>
  static VEC_INLINE void add_vectors(const uint16_t* probs, const Tiles& tiles, const Order<Kv>& order, int tokens,
                                     int dim, int dim0, float* out) {
    const int64_t stride = dim * 4;
    float* sums[Q];
    each<Q>([&](auto i) {
      sums[i] = out + tiles.first[i] * dim + dim0;
      each<P>([&](auto v) { tile_load<i * P + v>(sums[i] + v * 16, stride); });
    });
    for (int block = 0; block < order.num; block++) {
      const uint8_t* lines = order.base + order.blocks[block] * order.stride + order.values + dim0 * 4;
      int64_t step = stride;
      alignas(64) uint8_t last[Order<Kv>::kLines * P * 64];
      const int written = (tokens - block * kBlock + 1) / 2;  // lines with a token
      const uint8_t* at = lines;
      if (written < Order<Kv>::kLines) {
        for (int i = 0; i < Order<Kv>::kLines; i++)
          for (int v = 0; v < P; v++)
            store_line(last + (i * P + v) * 64, i < written ? load_line(lines + i * stride + v * 64) : set1_i32(0));
        at = last, step = P * 64;
      }
      each<P>([&](auto v) {
        fetch(order, order.num * order.keys + (dim0 / 16 + v) * order.num + block, {lines, 0});
        tile_load<kHalfB>(at + v * 64, step);
        each<Q>([&](auto i) {
          if (Q > 1 || v == 0) tile_load<kHalfA>(probs + tiles.first[i] * 2 * kKvTile + block * kBlock, kScoreBytes);
          tile_dot_bf16<i * P + v, kHalfA, kHalfB>();
        });
      });
    }
    each<Q>([&](auto i) { each<P>([&](auto v) { tile_store<i * P + v>(sums[i] + v * 16, stride); }); });
  }
  template <int Q, int P>
  static VEC_INLINE void add_from(const uint16_t* probs, const Tiles& tiles, const Order<Kv>& order, int tokens,
                                  int dim, int dim0, float* out) {
    for (; dim0 + P * 16 <= dim; dim0 += P * 16) add_vectors<Q, P>(probs, tiles, order, tokens, dim, dim0, out);
    if constexpr (P > 1) add_from<Q, P / 2>(probs, tiles, order, tokens, dim, dim0, out);
  }

  // Scores of a row that it does not see become -inf.
  static VEC_INLINE void hide(float* scores, int tokens, int from, int to) {
    for (int i = 0; i < tokens; i += 16) {
      const f32x16 x = select(first_lanes(least(16, most(0, to - i))), load(scores + i), set1(kLowest));
      store(scores + i, select(first_lanes(least(16, most(0, from - i))), set1(kLowest), x));
    }
  }

  // Scores of some rows become probabilities relative to the maxima so far, bf16 in their place. factor[r]: by which what
  // was summed before shrinks.
  static VEC_INLINE void softmax(float* scores, int count, int blocks, State* states, float* factor) {
    alignas(64) float lanes[kTileLanes * 16], tops[kTileLanes];
    for (int r = 0; r < kTileLanes; r++) {
      f32x16 greatest = set1(kLowest);
      if (r < count)
        for (int i = 0; i < blocks; i++) greatest = max(greatest, load(scores + r * kKvTile + i * 16));
      store(lanes + r * 16, greatest);
    }
    const f32x16 tile_max = rows_together(lanes, [](f32x16 a, f32x16 b) { return max(a, b); });
    const int low = least(16, 2 * count), high = 2 * count - low;
    float* state = &states->max;
    const f32x16 a = load_n(state, low), b = load_n(state + low, high), before = even(a, b);
    const mask16 rises = less(before, tile_max);
    const f32x16 top = select(rises, tile_max, before);
    const f32x16 shrink = select(rises, exp2(before - tile_max), set1(1.f));
    store(factor, shrink);
    store(tops, select(equal(top, set1(kLowest)), zero(), top));  // sees nothing yet: all probabilities are 0
    for (int r = 0; r < count; r++) {
      const float* s = scores + r * kKvTile;
      uint16_t* p = (uint16_t*)(scores + r * kKvTile);
      const f32x16 from = set1(tops[r]);
      f32x16 total = zero();
      int i = 0;
      for (; i + 2 <= blocks; i += 2) {
        const f32x16 e0 = probability(load(s + i * 16) - from), e1 = probability(load(s + i * 16 + 16) - from);
        total = total + e0 + e1;
        store_bf16(p + i * 16, e0, e1);
      }
      if (i < blocks) {
        const f32x16 e = probability(load(s + i * 16) - from);
        total = total + e;
        store_bf16(p + i * 16, e);
      }
      store(lanes + r * 16, total);
    }
    const f32x16 sum = fma(odd(a, b), shrink, rows_together(lanes, [](f32x16 x, f32x16 y) { return x + y; }));
    store_n(state, zip_lo(top, sum), low);
    store_n(state + low, zip_hi(top, sum), high);
  }

  // Rows [row0, end) in Q tiles and the KV tile at token t.
  template <int Q>
  void attend_in(const AttnArgs& args, const Rows& rows, int row0, int count, const Pages& pages, int t,
                 const int32_t* next, int num_next) {
    constexpr int P = Q == 1 ? 4 : Q == 2 ? 2 : 1;
    const int key_dim = args.kv.head_dim, dim = args.kv.value_dim;
    const int *from = rows.from + row0, *to = rows.to + row0;
    int skip = kKvTile, n = 0;
    for (int r = 0; r < count; r++)
      if (from[r] < t + kKvTile && to[r] > t)
        skip = least(skip, most(0, from[r] - t)), n = most(n, least(kKvTile, to[r] - t));
    if (skip >= n) return;
    skip = skip / kBlock * kBlock;
    const int pieces = key_dim / 16, panel_bytes = key_dim * 32;
    const Order<Kv> order{.base = pages.base,
                          .stride = pages.stride,
                          .values = panel_bytes,
                          .blocks = pages.blocks + (t + skip) / kBlock,
                          .next = next,
                          .num = (n - skip + kBlock - 1) / kBlock,
                          .num_next = num_next,
                          .keys = pieces,
                          .dims = dim / 16,
                          .ahead = pieces * most(P, kAheadBytes / panel_bytes)};
    Tiles tiles{Q, (count + Q - 1) / Q, {}};
    for (int i = 0; i < Q; i++) tiles.first[i] = least(i * tiles.rows, count - tiles.rows);
    shape(tiles.rows);
    const int tokens = n - skip;
    alignas(64) float scores[Q * kTileLanes * kKvTile], factor[Q * kTileLanes];
    score_from<Q, P>(rows.queries + row0 * kQueryWords, tiles, order, 0, scores);
    const bool adjusts = args.softcap_log2e > 0 || args.slopes_log2e;
    for (int r = 0; r < count; r++) {
      const int first = least(tokens, most(0, from[r] - t - skip)), last = least(tokens, to[r] - t - skip);
      float* s = scores + r * kKvTile;
      if (adjusts && first < last)
        adjust_scores(args, rows.head[row0 + r], rows.position[row0 + r], t + skip, {0, tokens, first, last}, s);
      if (first > 0 || last < order.num * kBlock) hide(s, order.num * kBlock, first, last);
    }
    for (int r = 0; r < count; r += kTileLanes)
      softmax(scores + r * kKvTile, least(kTileLanes, count - r), order.num, rows.states + row0 + r, factor + r);
    float* out = rows.out + row0 * dim;
    for (int r = 0; r < count; r++)
      if (factor[r] != 1)
        for (int d = 0; d < dim; d += 16) store(out + r * dim + d, load(out + r * dim + d) * set1(factor[r]));
    add_from<Q, P>((const uint16_t*)scores, tiles, order, tokens, dim, 0, out);
  }

  // Rows [row, end) and the KV tile at token t. next: blocks of the tile that comes next.
  void attend(const AttnArgs& args, const Rows& rows, int row, int end, const Pages& pages, int t, const int32_t* next,
              int num_next) {
    const int count = end - row;
    if (count <= kTileLanes) attend_in<1>(args, rows, row, count, pages, t, next, num_next);
    else if (count <= 2 * kTileLanes) attend_in<2>(args, rows, row, count, pages, t, next, num_next);
    else attend_in<3>(args, rows, row, count, pages, t, next, num_next);
  }
};

}  // namespace octavo::VEC_NS
