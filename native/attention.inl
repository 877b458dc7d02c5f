// Attention over the pages of a sequence (layout: KvLayer in kernels.h). A row is a query token and head; the rows of an
// item share keys and values. Rows are taken in tiles; per KV tile of 128 tokens a row tile computes scores, softmax and
// the weighted sum of values (online softmax; Milakov & Gimelshein 2018, Dao et al. 2022).
//
// Same bits whatever the rows beside a row (DESIGN 4): every score and every output element is one chain of operations in
// ascending order; tiles and splits start at absolute positions; a row rescales by its own maximum; a split starts from an
// empty state, and splits are merged in ascending order by merge_state alone. A window leaves out whole tiles, then whole
// blocks before its first token, and masks the rest; sinks enter when all splits have met.
namespace octavo::VEC_NS {

constexpr int kTileRows = kMaxRowsWide > 2 ? 12 : kMaxRowsWide == 2 ? 4 : 2;
constexpr int kChains = kMaxRowsWide > 2 ? 24 : kTileRows;  // accumulators of a micro-kernel
constexpr float kLowest = -__builtin_inff();
constexpr int kQueryWords = kMaxHeadDim + 16;  // row stride of queries; not a multiple of 1024 bytes (L1 sets)

constexpr float kLog2e = 1.44269504f;

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

// acc[r][n] += word of row r times line n, in an order whose operands fit beside the accumulators. Lines are loaded where
// they are used: GCC 12 keeps an array of them in memory.
template <class Kv, int R, int N, int Stride>
VEC_INLINE void dots(typename Kv::Sum (&acc)[R][N], const uint32_t* words, const uint8_t* const (&lines)[N],
                     int64_t at) {
  if constexpr (R > N && R * N + R > kChains + 4 && Kv::kWords == 1) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) acc[r][n] = Kv::dot(acc[r][n], load_line(lines[n] + at), words + r * Stride);
    }
  } else {
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) acc[r][n] = Kv::dot(acc[r][n], load_line(lines[n] + at), words + r * Stride);
    }
  }
}

// Scores of R rows with P panels of 16 tokens: out[r * kKvTile + 16 * p + token]. q[r * kQueryWords + word], in steps of
// step[r] where it is fixed point. The values of these blocks are prefetched.
template <class Kv, int R, int P>
VEC_INLINE void score_panels(const uint32_t* q, const float* step, int dim, const Pages& pages, int first, float* out) {
  typename Kv::Sum acc[R][P];
  const uint8_t* keys[P];
  const int lines = dim / Kv::kPer;
#pragma GCC unroll 8
  for (int p = 0; p < P; p++) {
    keys[p] = pages.block(first + p);
    if constexpr (Kv::kScaled) prefetch_l2(Kv::key_scales(keys[p], dim)), prefetch_l2(Kv::value_scales(keys[p], dim));
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) acc[r][p] = Kv::none();
  }
  for (int d = 0; d < lines; d++) {
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) prefetch_l2(keys[p] + (lines + d) * 64);
    dots<Kv, R, P, kQueryWords>(acc, q + d * Kv::kWords, keys, d * 64);
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

// Scores with panels [done, panels) of the tile that starts at block `first`.
template <class Kv, int R, int P>
VEC_INLINE void score_tile_from(const uint32_t* q, const float* step, int dim, const Pages& pages, int first, int done,
                                int panels, float* out) {
  for (; done + P <= panels; done += P) score_panels<Kv, R, P>(q, step, dim, pages, first + done, out + done * 16);
  if constexpr (P > 1) score_tile_from<Kv, R, P / 2>(q, step, dim, pages, first, done, panels, out);
}

constexpr int panels_at_once(int rows) {
  return kChains >= 8 * rows ? 8 : kChains >= 4 * rows ? 4 : kChains >= 2 * rows ? 2 : 1;
}

// Tokens of a tile, counted from its start: [begin, end) are multiplied, begin at a block; a row sees [from, to).
struct Seen {
  int begin, end, from, to;
};

// Softcap and ALiBi of a row at `position` on its scores of the tile at `token`.
VEC_INLINE void adjust_scores(const AttnArgs& args, int head, int position, int token, Seen seen, float* s) {
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
VEC_INLINE float softmax_row(float* s, typename Kv::Element* p, Seen seen, const Pages& pages, int first, int dim,
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
// 16 dimensions from dimension `dim0`. p[r * kStride + word], in steps of step[r] where it is fixed point. `next`: blocks
// whose keys are prefetched.
template <class Kv, int R, int N>
VEC_INLINE void add_values(const uint32_t* p, const float* factor, const float* step, int begin, int end,
                           const Pages& pages, int first, int key_dim, int dim, int dim0, const int32_t* next,
                           int num_next, float* out) {
  constexpr int kLines = kBlock / Kv::kPer;  // lines of a block, per vector
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
  for (int l0 = begin / Kv::kPer; l0 < last; l0 += kLines) {
    const int b = l0 / kLines, stop = least(kLines, last - l0);
    const uint8_t* values[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; v++) values[v] = pages.block(first + b) + key_dim * (64 / Kv::kPer) + dim0 * 4 + v * 64;
    const uint8_t* ahead = b < num_next ? pages.base + next[b] * pages.stride + dim0 * 4 : values[0];
    for (int l = 0; l < stop; l++) {
      const int64_t at = (int64_t)l * dim * 4;
#pragma GCC unroll 8
      for (int v = 0; v < N; v++) prefetch_l2(ahead + at + v * 64);
      dots<Kv, R, N, kStride>(acc, p + (l0 + l) * Kv::kWords, values, at);
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
                               const Pages& pages, int first, int key_dim, int dim, int dim0, const int32_t* next,
                               int num_next, float* out) {
  for (; dim0 + N * 16 <= dim; dim0 += N * 16)
    add_values<Kv, R, N>(p, factor, step, begin, end, pages, first, key_dim, dim, dim0, next, num_next, out);
  if constexpr (N > 1)
    add_all_values<Kv, R, N / 2>(p, factor, step, begin, end, pages, first, key_dim, dim, dim0, next, num_next, out);
}

// Softmax state of a row: unnormalised output (`dim` floats elsewhere), maximum, sum. sum 0: has seen no token.
struct State {
  float max, sum;
};

// a = a and then b, the state of the split that follows. The only place where splits meet.
static void merge_state(State& a, float* out_a, const State& b, const float* out_b, int dim) {
  if (b.sum == 0) return;
  const bool first = a.sum == 0;
  const float top = first || b.max > a.max ? b.max : a.max;
  const f32x16 keep = first ? zero() : exp2(set1(a.max - top)), add = first ? set1(1.f) : exp2(set1(b.max - top));
  alignas(64) float k[16], l[16];
  store(k, keep);
  store(l, add);
  a.sum = first ? b.sum : a.sum * k[0] + b.sum * l[0];
  a.max = top;
  for (int d = 0; d < dim; d += 16)
    store(out_a + d, first ? load(out_b + d) : fma(load(out_b + d), add, load(out_a + d) * keep));
}

// Row tile: rows [row0, row0 + R) of an item, row = token * group + head of the group.
struct Tile {
  const AttnArgs& args;
  const AttnItem& item;
  int row0, group, dim;  // dim: of values
  VEC_INLINE int position(int r) const { return item.pos0 + (row0 + r) / group; }
  // The row at `position` sees the tokens [from, end).
  VEC_INLINE int from(int position) const { return args.window > 0 ? most(0, position + 1 - args.window) : 0; }
  VEC_INLINE int end(int position) const {
    if (!item.context) return position + 1;
    return args.window > 0 ? least(item.context, position + args.window) : item.context;
  }
  VEC_INLINE int head(int r) const { return item.kv_head * group + (row0 + r) % group; }
  VEC_INLINE int64_t column(int r) const { return (int64_t)head(r) * dim; }
  VEC_INLINE int token(int r) const { return item.tok0 + (row0 + r) / group; }
};

// Normalises R rows and stores or rounds them. Where it is an odd multiple of 16, a group of 32 columns is the end
// of one head and the start of the next: R and row0 are even then.
static void put_rows(const Tile& tile, int rows, const State* states, float* out) {
  const int dim = tile.dim;
  for (int r = 0; r < rows; r++) {
    float shrink = 1, sum = states[r].sum;
    if (tile.args.sinks) {
      const float sink = tile.args.sinks[tile.head(r)] * kLog2e, top = sink > states[r].max ? sink : states[r].max;
      shrink = exp2_of(states[r].max - top);
      sum = sum * shrink + exp2_of(sink - top);
    }
    const f32x16 inverse = set1(shrink / sum);
    for (int d = 0; d < dim; d += 16) store(out + r * dim + d, load(out + r * dim + d) * inverse);
  }
  if (tile.args.out)
    for (int r = 0; r < rows; r++) {
      float* to = tile.args.out + tile.token(r) * tile.args.ld_out + tile.column(r);
      for (int d = 0; d < dim; d += 16) store(to + d, load(out + r * dim + d));
    }
  else {
    const int heads = dim % 32 ? 2 : 1, width = heads * dim;
    for (int r = 0; r < rows; r += heads)
      for (int d = 0; d < width; d += 32)
        put32(*tile.args.act, tile.token(r), (int)((tile.column(r) + d) / 32), load(out + r * dim + d),
              load(out + r * dim + d + 16));
  }
}

// Tokens [begin, end) of one split for a row tile, begin at a block: out[R][dim] and states from nothing. at[r] is
// tile.position(r).
template <class Kv, int R>
static void attend_split(const Tile& tile, const int* at, const uint32_t* q, const float* q_step, const Pages& pages,
                         int begin, int end, const int32_t* next_split, int num_next_split, State* states, float* out) {
  constexpr int kTileBlocks = kKvTile / kBlock;
  const int key_dim = tile.args.kv.head_dim, dim = tile.dim;
  const bool adjusts = tile.args.softcap_log2e > 0 || tile.args.slopes_log2e;
  alignas(64) float scores[R * kKvTile];
  alignas(64) typename Kv::Element probs[R * kKvTile + 16];  // 16: GCC does not see that rows end at whole blocks
  float factor[R], step[R];
  for (int r = 0; r < R; r++) states[r] = State{kLowest, 0};
  for (int i = 0; i < R * dim; i += 16) store(out + i, zero());
  for (int t = begin / kKvTile * kKvTile; t < end; t += kKvTile) {
    const int skip = most(0, begin - t) / kBlock * kBlock, n = least(kKvTile, end - t), first = t / kBlock;
    const int panels = (n + kBlock - 1) / kBlock;
    score_tile_from<Kv, R, panels_at_once(R)>(q, q_step, key_dim, pages, first, skip / kBlock, panels, scores);
    for (int r = 0; r < R; r++) {
      const Seen seen{skip, n, most(0, tile.from(at[r]) - t), least(n, tile.end(at[r]) - t)};
      auto* p = probs + r * kKvTile;
      factor[r] = 1;
      step[r] = 0;
      if (seen.from < seen.to) {
        float* s = scores + r * kKvTile;
        if (adjusts) adjust_scores(tile.args, tile.head(r), at[r], t, seen, s);
        factor[r] = softmax_row<Kv>(s, p, seen, pages, first, key_dim, states[r].max, states[r].sum, step[r]);
      } else {
        for (int i = skip; i < n; i += 16) Kv::put(p + i, zero());
      }
    }
    const bool last = t + kKvTile >= end;
    const int32_t* next = last ? next_split : pages.blocks + first + kTileBlocks;
    const int num_next = last ? num_next_split : (end - t - kKvTile + kBlock - 1) / kBlock;
    add_all_values<Kv, R, vectors_at_once(R)>((const uint32_t*)probs, factor, step, skip, n, pages, first, key_dim, dim,
                                              0, next, num_next, out);
  }
}

template <class Kv, int R>
__attribute__((noinline)) static void attend_rows(const AttnArgs& args, const AttnItem& item, int row0) {
  const int group = args.heads / args.kv.kv_heads, key_dim = args.kv.head_dim, dim = args.kv.value_dim;
  const Tile tile{args, item, row0, group, dim};
  const Pages pages{args.kv.base + item.kv_head * args.kv.head_stride, args.kv.block_stride, item.blocks};
  alignas(64) uint32_t q[R * kQueryWords];
  alignas(64) float out[R * kMaxHeadDim], split_out[R * kMaxHeadDim];
  float q_step[R];
  State states[R], split_states[R];
  int at[R];
  for (int r = 0; r < R; r++) at[r] = tile.position(r);
  auto scaled_query = [&](int r, int d) {
    return load(args.q + tile.token(r) * args.ldq + tile.head(r) * key_dim + d) * set1(args.scale_log2e);
  };
  constexpr int kStride = kQueryWords * 4 / (int)sizeof(typename Kv::Element);
  put_queries<Kv, R>(key_dim, scaled_query, (typename Kv::Element*)q, kStride, q_step);
  const int begin = tile.from(at[0]) / kBlock * kBlock, end = tile.end(at[R - 1]);
  for (int s = item.split0; s < item.split1; s++) {
    const bool whole = !item.partial && s == item.split0;
    const int token0 = most(begin, s * kKvSplit), token1 = least(end, (s + 1) * kKvSplit);
    float* to = whole ? out : split_out;
    State* state = whole ? states : split_states;
    const bool own = s + 1 < item.split1 && token1 < end;  // this sequence goes on
    const int32_t* next = own ? item.blocks + token1 / kBlock : item.next_blocks;
    const int num_next = own ? (end - token1 + kBlock - 1) / kBlock : item.num_next;
    if (token0 < token1) attend_split<Kv, R>(tile, at, q, q_step, pages, token0, token1, next, num_next, state, to);
    else
      for (int r = 0; r < R; r++) state[r] = State{kLowest, 0};
    for (int r = 0; r < R; r++) {
      if (item.partial) {
        float* slot = item.partial + ((int64_t)(s - item.split0) * item.ntok * group + row0 + r) * (dim + 2);
        if (state[r].sum != 0)
          for (int d = 0; d < dim; d += 16) store(slot + d, load(to + r * dim + d));
        slot[dim] = state[r].max;
        slot[dim + 1] = state[r].sum;
      } else if (!whole) {
        merge_state(states[r], out + r * dim, split_states[r], split_out + r * dim, dim);
      }
    }
  }
  if (!item.partial) put_rows(tile, R, states, out);
}

using AttendRows = void (*)(const AttnArgs&, const AttnItem&, int row0);

template <class Kv, int R> constexpr AttendRows tile_of() {
  if constexpr (R <= kTileRows && R != 9 && R != 11) return attend_rows<Kv, R>;
  return nullptr;
}

template <class Kv>
constexpr AttendRows kTiles[] = {nullptr,          tile_of<Kv, 1>(), tile_of<Kv, 2>(),  tile_of<Kv, 3>(),
                                 tile_of<Kv, 4>(), tile_of<Kv, 5>(), tile_of<Kv, 6>(),  tile_of<Kv, 7>(),
                                 tile_of<Kv, 8>(), nullptr,          tile_of<Kv, 10>(), nullptr,
                                 tile_of<Kv, 12>()};

// Rows of the next tile: as many as fit, the last two about equal. Even where `left` is even (put_rows).
VEC_INLINE int next_rows(int left) {
  if (left >= 2 * kTileRows) return kTileRows;
  if (left > kTileRows) return least(kTileRows, (left + 3) / 4 * 2);
  return left == 9 ? 5 : left == 11 ? 6 : left;
}

template <class Kv> VEC_INLINE void attention(const AttnArgs& args, const AttnItem& item) {
  const int group = args.heads / args.kv.kv_heads, rows = item.ntok * group;
  for (int row = 0; row < rows;) {
    const int n = next_rows(rows - row);
    kTiles<Kv>[n](args, item, row);
    row += n;
  }
}

static void attention_bf16(const AttnArgs& args, const AttnItem& item) { attention<Bf16Kv>(args, item); }
static void attention_f32(const AttnArgs& args, const AttnItem& item) { attention<F32Kv>(args, item); }
static void attention_i8(const AttnArgs& args, const AttnItem& item) { attention<I8Kv>(args, item); }

static void attention_merge(const AttnArgs& args, int tok0, int ntok, int kv_head, const float* partial, int nsplit) {
  const int group = args.heads / args.kv.kv_heads, dim = args.kv.value_dim, rows = ntok * group;
  const AttnItem item{tok0, ntok, 0, kv_head, 0, nsplit, nullptr, nullptr, 0, nullptr};
  alignas(64) float out[2 * kMaxHeadDim];
  for (int row = 0; row < rows; row += 2) {
    const int n = least(2, rows - row);
    State states[2] = {};
    for (int r = 0; r < n; r++)
      for (int s = 0; s < nsplit; s++) {
        const float* slot = partial + ((int64_t)s * rows + row + r) * (dim + 2);
        merge_state(states[r], out + r * dim, State{slot[dim], slot[dim + 1]}, slot, dim);
      }
    put_rows(Tile{args, item, row, group, dim}, n, states, out);
  }
}

}  // namespace octavo::VEC_NS
