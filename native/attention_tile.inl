// Attention of some rows to one KV tile of 128 tokens: scores, softmax, and the weighted sum of values added to what the
// tiles before gave (online softmax; Milakov & Gimelshein 2018, Dao et al. 2022).
namespace octavo::VEC_NS {

constexpr int kTileRows = kMaxRowsWide > 2 ? 12 : kMaxRowsWide == 2 ? 6 : 2;
constexpr int kChains = kMaxRowsWide > 2 ? 24 : kTileRows;  // accumulators of a micro-kernel
constexpr float kLowest = -__builtin_inff();
#define TILE_CALL __attribute__((noinline))  // of a row and a tile: many row tiles share it

VEC_INLINE int least(int a, int b) { return a < b ? a : b; }
VEC_INLINE int most(int a, int b) { return a > b ? a : b; }
VEC_INLINE float exp2_of(float x) {
  alignas(64) float lane[16];
  store(lane, exp2(set1(x)));
  return lane[0];
}

// Blocks of one sequence and kv head.
struct Pages {
  const uint8_t* base;
  int64_t stride;
  const int32_t* blocks;
  VEC_INLINE const uint8_t* block(int i) const { return base + blocks[i] * stride; }
};

// At least so far ahead is prefetched: it covers the latency of memory, and stays in L1. Into L2 where a vector has all lanes:
// then eight panels are read side by side.
constexpr int kAheadBytes = 8192;
VEC_INLINE void prefetch_ahead(const uint8_t* p) {
  if constexpr (kParts == 1) prefetch_l2(p);
  else prefetch(p);
}

// Lines of 64 bytes, `step` bytes from one to the next.
struct Lines {
  const uint8_t* at;
  int64_t step;
};

// The order in which the lines of a tile are read, kLines at a time: the keys, panel by panel, then the values, 16 dimensions
// of all blocks and then the next 16. Those of the tile that comes next follow.
template <class Kv> struct Order {
  static constexpr int kLines = kBlock / Kv::kPer;
  const uint8_t* base;
  int64_t stride, values;  // bytes from block to block, and from the keys of a block to its values
  const int32_t *blocks, *next;
  int num, num_next;  // of blocks
  int keys, dims,
      ahead;  // pieces of kLines lines: of the keys of a block, of its values, and between reading and prefetching

  VEC_INLINE Lines keys_of(const int32_t* of, int i) const {
    const int block = i / keys, piece = i % keys;
    const uint8_t* panel = base + of[block] * stride;
    if constexpr (Kv::kScaled)
      if (!piece) prefetch_ahead(panel + 2 * values), prefetch_ahead(panel + 2 * values + 64);
    return {panel + piece * kLines * 64, 64};
  }
  VEC_INLINE Lines values_of(const int32_t* of, int n, int i) const {
    return {base + of[i % n] * stride + values + i / n * 64, dims * 64};
  }
  // What to prefetch while piece i is read: `other` where nothing is left.
  VEC_INLINE Lines beside(int i, Lines other) const {
    i += ahead;
    if (i < num * keys) return keys_of(blocks, i);
    i -= num * keys;
    if (i < num * dims) return values_of(blocks, num, i);
    i -= num * dims;
    if (i < num_next * keys) return keys_of(next, i);
    i -= num_next * keys;
    return i < num_next * dims ? values_of(next, num_next, i) : other;
  }
};

// acc[r][n] += words of row r times line n, word W and those after it.
template <class Kv, int R, int N, int Stride, int W = 0>
VEC_INLINE void dot_line(typename Kv::Sum (&acc)[R][N], int n, const uint32_t* words, const uint8_t* at) {
  if constexpr (kParts > 1 && R * N > 4) __asm__("" : "+r"(words), "+r"(at));  // no register keeps them for later
  const auto line = Kv::template line<W>(at);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) acc[r][n] = Kv::dot(acc[r][n], line, words + r * Stride + W);
  if constexpr (W + 1 < Kv::kWords) dot_line<Kv, R, N, Stride, W + 1>(acc, n, words, at);
}

// acc[r][n] += words of row r times line n, in an order whose operands fit beside the accumulators. Lines are loaded where
// they are used: GCC 12 keeps an array of them in memory.
template <class Kv, int R, int N, int Stride>
VEC_INLINE void dots(typename Kv::Sum (&acc)[R][N], const uint32_t* words, const uint8_t* const (&lines)[N],
                     int64_t at) {
  if constexpr (R > N && R * N + R > kChains + 4 && Kv::kWords == 1) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
      for (int n = 0; n < N; n++)
        acc[r][n] = Kv::dot(acc[r][n], Kv::template line<0>(lines[n] + at), words + r * Stride);
    }
  } else {
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) dot_line<Kv, R, N, Stride>(acc, n, words, lines[n] + at);
  }
}

// Scores of R rows with P panels of 16 tokens: out[r * kKvTile + 16 * p + token]. q[r * kQueryWords + word], in steps of
// step[r] where it is fixed point. `panel`: the first, of those of `order`.
template <class Kv, int R, int P>
VEC_INLINE void score_panels(const uint32_t* q, const float* step, int dim, const Order<Kv>& order, int panel,
                             float* out) {
  constexpr int kLines = Order<Kv>::kLines;
  typename Kv::Sum acc[R][P];
  const uint8_t* keys[P];
#pragma GCC unroll 8
  for (int p = 0; p < P; p++) {
    keys[p] = order.base + order.blocks[panel + p] * order.stride;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) acc[r][p] = Kv::none();
  }
  for (int piece = 0, d = 0; piece < order.keys; piece++) {
    Lines ahead[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) ahead[p] = order.beside((panel + p) * order.keys + piece, {keys[p] + d * 64, 64});
    for (const int stop = d + kLines; d < stop; d++) {
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) prefetch_ahead(ahead[p].at), ahead[p].at += ahead[p].step;
      dots<Kv, R, P, kQueryWords>(acc, q + d * Kv::kWords, keys, d * 64);
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < P; p++)
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      float* to = out + r * kKvTile + p * 16;
      if constexpr (Kv::kScaled) store(to, to_f32(acc[r][p]) * (set1(step[r]) * load(Kv::key_scales(keys[p], dim))));
      else store(to, acc[r][p]);
    }
}

// Scores with panels [done, order.num).
template <class Kv, int R, int P>
VEC_INLINE void score_tile_from(const uint32_t* q, const float* step, int dim, const Order<Kv>& order, int done,
                                float* out) {
  for (; done + P <= order.num; done += P) score_panels<Kv, R, P>(q, step, dim, order, done, out + done * 16);
  if constexpr (P > 1) score_tile_from<Kv, R, P / 2>(q, step, dim, order, done, out);
}

constexpr int panels_at_once(int rows) {
  return kChains >= 8 * rows ? 8 : kChains >= 4 * rows ? 4 : kChains >= 2 * rows ? 2 : 1;
}

// Tokens of a tile, counted from its start: [begin, end) are multiplied, begin at a block; a row sees [from, to).
struct Seen {
  int begin, end, from, to;
};

// Softcap and ALiBi of a row at `position` on its scores of the tile at `token`.
TILE_CALL static void adjust_scores(const AttnArgs& args, int head, int position, int token, Seen seen, float* s) {
  for (int i = seen.from / 16 * 16; i < seen.to; i += 16) {
    f32x16 x = load(s + i);
    if (args.softcap_log2e > 0) x = set1(args.softcap_log2e) * tanh(x / set1(args.softcap_log2e));
    if (args.slopes_log2e) x = fma(set1(args.slopes_log2e[head]), to_f32(iota() + set1_i32(token + i - position)), x);
    store(s + i, x);
  }
}

// Softmax of a row over the tokens of a tile that it sees, at least one: probabilities relative to the maximum so far,
// zeros for the others. Returns the factor by which what was summed before shrinks. Where the values have scales, the
// scales go into the probabilities, which become fixed point of `step`.
template <class Kv>
TILE_CALL static float softmax_row(float* s, typename Kv::Element* p, Seen seen, const Pages& pages, int first, int dim,
                                   float& max_so_far, float& sum, float& step) {
  const int begin = seen.from / 16 * 16, full = seen.to / 16 * 16, head = seen.from % 16, rest = seen.to % 16;
  auto only_seen = [&](int i, f32x16 x, f32x16 other) __attribute__((always_inline)) {
    x = select(first_lanes(least(16, seen.to - i)), x, other);
    return select(first_lanes(most(0, seen.from - i)), other, x);
  };
  if (head) store(s + begin, only_seen(begin, load(s + begin), set1(kLowest)));
  if (rest) store(s + full, only_seen(full, load(s + full), set1(kLowest)));
  f32x16 greatest = load(s + begin);
  for (int i = begin + 16; i < seen.to; i += 16) greatest = max(greatest, load(s + i));
  const float tile_max = reduce_max(greatest);
  float factor = 1;
  if (tile_max > max_so_far) {
    factor = exp2_of(max_so_far - tile_max);
    max_so_far = tile_max;
  }
  const f32x16 top = set1(max_so_far);
  f32x16 total = zero();
  i32x16 heaviest = set1_i32(0);
  auto weigh = [&](int i, bool edge) __attribute__((always_inline)) {
    f32x16 e = exp2(load(s + i) - top);
    if (edge) e = only_seen(i, e, zero());
    total = total + e;
    if constexpr (Kv::kScaled) {
      e = e * load(Kv::value_scales(pages.block(first + i / 16), dim));
      if (edge) e = only_seen(i, e, zero());  // a scale that was never written may be NaN
      heaviest = greater_magnitude(heaviest, e);
      store(s + i, e);
    } else {
      Kv::put(p + i, e);
    }
  };
  for (int i = seen.begin; i < begin; i += 16) Kv::put(p + i, zero());
  int i = begin;
  if (head) weigh(i, true), i += 16;
  for (; i < full; i += 16) weigh(i, false);
  if (i < seen.to) weigh(i, true), i += 16;
  if constexpr (Kv::kScaled) {
    const float heavy = __builtin_bit_cast(float, reduce_max(heaviest));
    const f32x16 to_fixed = set1(fixed_from(heavy));
    step = heavy / kFixedMost;
    for (int j = begin; j < i; j += 16) Kv::put(p + j, load(s + j) * to_fixed);
  }
  for (; i < seen.end; i += 16) Kv::put(p + i, zero());
  sum = sum * factor + reduce_add(total);
  return factor;
}

// out[r][16 * v ..] = out * factor[r] + sum over tokens [begin, end) of the tile of p[r] * V, for R rows and N vectors of
// 16 dimensions from dimension `dim0`. p[r * kStride + word], in steps of step[r] where it is fixed point.
template <class Kv, int R, int N>
VEC_INLINE void add_values(const uint32_t* p, const float* factor, const float* step, int begin, int end,
                           const Order<Kv>& order, int dim, int dim0, float* out) {
  constexpr int kLines = Order<Kv>::kLines;  // of a block, per vector
  constexpr int kStride = kKvTile * (int)sizeof(typename Kv::Element) / 4;
  typename Kv::Sum acc[R][N];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < N; v++) {
      if constexpr (Kv::kScaled) acc[r][v] = Kv::none();
      else acc[r][v] = load(out + r * dim + dim0 + v * 16) * set1(factor[r]);
    }
  const int last = (end + Kv::kPer - 1) / Kv::kPer;
  for (int l0 = begin / Kv::kPer, block = 0; l0 < last; l0 += kLines, block++) {
    const int stop = least(kLines, last - l0);
    const uint8_t *panel = order.base + order.blocks[block] * order.stride + order.values + dim0 * 4, *values[N];
    Lines ahead[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; v++) {
      values[v] = panel + v * 64;
      const int piece = order.num * order.keys + (dim0 / 16 + v) * order.num + block;
      ahead[v] = order.beside(piece, {values[v], dim * 4});
    }
    for (int l = 0; l < stop; l++) {
#pragma GCC unroll 8
      for (int v = 0; v < N; v++) prefetch_ahead(ahead[v].at), ahead[v].at += ahead[v].step;
      dots<Kv, R, N, kStride>(acc, p + (l0 + l) * Kv::kWords, values, (int64_t)l * dim * 4);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < N; v++) {
      float* to = out + r * dim + dim0 + v * 16;
      if constexpr (Kv::kScaled) store(to, fma(to_f32(acc[r][v]), set1(step[r]), load(to) * set1(factor[r])));
      else store(to, acc[r][v]);
    }
}

constexpr int vectors_at_once(int rows) { return kChains >= 4 * rows ? 4 : kChains >= 2 * rows ? 2 : 1; }

template <class Kv, int R, int N>
VEC_INLINE void add_all_values(const uint32_t* p, const float* factor, const float* step, int begin, int end,
                               const Order<Kv>& order, int dim, int dim0, float* out) {
  for (; dim0 + N * 16 <= dim; dim0 += N * 16) add_values<Kv, R, N>(p, factor, step, begin, end, order, dim, dim0, out);
  if constexpr (N > 1) add_all_values<Kv, R, N / 2>(p, factor, step, begin, end, order, dim, dim0, out);
}

// Softmax state of a row: unnormalised output (`dim` floats elsewhere), maximum, sum. sum 0: has seen no token.
struct State {
  float max, sum;
};

// The rows that a call works on at once, and their states in the split that it is in.
struct Rows {
  int count;
  int token[kItemRows], head[kItemRows], position[kItemRows];
  int from[kItemRows], to[kItemRows];  // the tokens that a row sees
  float step[kItemRows];               // of its query, where that is fixed point
  uint32_t* queries;                   // [row][kQueryWords]
  State* states;
  float* out;  // [row][value dimension]
};

// Rows [row0, row0 + R) and the tile that starts at token t. next: blocks of the tile that comes next.
template <class Kv, int R>
TILE_CALL static void attend_tile(const AttnArgs& args, const Rows& rows, int row0, const Pages& pages, int t,
                                  const int32_t* next, int num_next) {
  const int key_dim = args.kv.head_dim, dim = args.kv.value_dim, first = t / kBlock;
  const int *from = rows.from + row0, *to = rows.to + row0;
  int skip = kKvTile, n = 0;
  for (int r = 0; r < R; r++)
    if (from[r] < t + kKvTile && to[r] > t)
      skip = least(skip, most(0, from[r] - t)), n = most(n, least(kKvTile, to[r] - t));
  if (skip >= n) return;
  skip = skip / kBlock * kBlock;
  const bool adjusts = args.softcap_log2e > 0 || args.slopes_log2e;
  const uint32_t* q = rows.queries + row0 * kQueryWords;
  alignas(64) float scores[R * kKvTile];
  alignas(64) typename Kv::Element probs[R * kKvTile + 16];  // 16: GCC does not see that rows end at whole blocks
  float factor[R], step[R];
  const int begin = skip / kBlock, pieces = key_dim / 16, panel_bytes = key_dim * (64 / Kv::kPer);
  const Order<Kv> order{.base = pages.base,
                        .stride = pages.stride,
                        .values = panel_bytes,
                        .blocks = pages.blocks + first + begin,
                        .next = next,
                        .num = (n + kBlock - 1) / kBlock - begin,
                        .num_next = num_next,
                        .keys = pieces,
                        .dims = dim / 16,
                        .ahead = pieces * most(panels_at_once(R), kAheadBytes / panel_bytes)};
  score_tile_from<Kv, R, panels_at_once(R)>(q, rows.step + row0, key_dim, order, 0, scores + skip);
  for (int r = 0; r < R; r++) {
    const Seen seen{skip, n, most(0, from[r] - t), least(n, to[r] - t)};
    auto* p = probs + r * kKvTile;
    factor[r] = 1;
    step[r] = 0;
    if (seen.from < seen.to) {
      float* s = scores + r * kKvTile;
      State& state = rows.states[row0 + r];
      if (adjusts) adjust_scores(args, rows.head[row0 + r], rows.position[row0 + r], t, seen, s);
      factor[r] = softmax_row<Kv>(s, p, seen, pages, first, key_dim, state.max, state.sum, step[r]);
    } else {
      for (int i = skip; i < n; i += 16) Kv::put(p + i, zero());
    }
  }
  add_all_values<Kv, R, vectors_at_once(R)>((const uint32_t*)probs, factor, step, skip, n, order, dim, 0,
                                            rows.out + row0 * dim);
}

// Rows meet KV tiles in row tiles of a few of them.
template <class Kv> struct RowTiles {
  using Attend = void (*)(const AttnArgs&, const Rows&, int row0, const Pages&, int t, const int32_t* next,
                          int num_next);

  template <int R> static constexpr Attend of() {
    if constexpr (R <= kTileRows && R != 9 && R != 11) return attend_tile<Kv, R>;
    return nullptr;
  }
  static constexpr Attend kOf[] = {nullptr, of<1>(), of<2>(), of<3>(),  of<4>(), of<5>(), of<6>(),
                                   of<7>(), of<8>(), nullptr, of<10>(), nullptr, of<12>()};

  // Rows of the next row tile: as many as fit, the last two about equal.
  static VEC_INLINE int next_rows(int left) {
    if (left >= 2 * kTileRows) return kTileRows;
    if (left > kTileRows) return least(kTileRows, (left + 3) / 4 * 2);
    return left == 9 ? 5 : left == 11 ? 6 : left;
  }

  // Rows [row, end) and the tile at token t. next: blocks of the tile that comes next.
  VEC_INLINE void attend(const AttnArgs& args, const Rows& rows, int row, int end, const Pages& pages, int t,
                         const int32_t* next, int num_next) {
    while (row < end) {
      const int n = next_rows(end - row);
      kOf[n](args, rows, row, pages, t, next, row + n == end ? num_next : 0);
      row += n;
    }
  }
};

}  // namespace octavo::VEC_NS
