// Attention over the pages of a sequence (layout: KvLayer in kernels.h). A row is a query token and head; the rows of an
// item share keys and values. Rows are taken in tiles; per KV tile of 128 tokens a row tile computes scores, softmax and
// the weighted sum of values (online softmax; Milakov & Gimelshein 2018, Dao et al. 2022).
//
// Same bits whatever the rows beside a row (DESIGN 4): every score and every output element is one chain of operations in
// ascending order; tiles and splits start at absolute positions; a row rescales by its own maximum; a split starts from an
// empty state, and splits are merged in ascending order by merge_state alone.
namespace octavo::VEC_NS {

constexpr int kMaxHeadDim = 256;
constexpr int kTileRows = kMaxRowsWide > 2 ? 12 : kMaxRowsWide == 2 ? 4 : 2;
constexpr int kChains = kMaxRowsWide > 2 ? 24 : kTileRows;  // accumulators of a micro-kernel
constexpr float kLowest = -__builtin_inff();
constexpr int kQueryWords = kMaxHeadDim + 16;  // row stride of queries; not a multiple of 1024 bytes (L1 sets)

// Keys and values are read as lines of 16 words; a word of a query or probability meets a line of keys or values.
struct Bf16Kv {
  using Element = uint16_t;
  static constexpr int kPer = 2;  // elements of a word: dimensions (keys), tokens (values)
  static VEC_INLINE f32x16 dot(f32x16 acc, i32x16 line, uint32_t word) { return dot2_bf16(acc, line, word); }
  static VEC_INLINE void put(Element* p, f32x16 v) { store_bf16(p, v); }
};
struct F32Kv {
  using Element = float;
  static constexpr int kPer = 1;
  static VEC_INLINE f32x16 dot(f32x16 acc, i32x16 line, uint32_t word) {
    return fma(as_f32(line), set1(__builtin_bit_cast(float, word)), acc);
  }
  static VEC_INLINE void put(Element* p, f32x16 v) { store(p, v); }
};

VEC_INLINE int least(int a, int b) { return a < b ? a : b; }

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
VEC_INLINE void dots(f32x16 (&acc)[R][N], const uint32_t* words, const uint8_t* const (&lines)[N], int64_t at) {
  if constexpr (R > N && R * N + R > kChains + 4) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) acc[r][n] = Kv::dot(acc[r][n], load_line(lines[n] + at), words[r * Stride]);
    }
  } else {
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) acc[r][n] = Kv::dot(acc[r][n], load_line(lines[n] + at), words[r * Stride]);
    }
  }
}

// Scores of R rows with P panels of 16 tokens: out[r * kKvTile + 16 * p + token]. q[r * kQueryWords + word]. The values of
// these blocks are prefetched.
template <class Kv, int R, int P>
VEC_INLINE void score_panels(const uint32_t* q, int words, const Pages& pages, int first, float* out) {
  f32x16 acc[R][P];
  const uint8_t* keys[P];
#pragma GCC unroll 8
  for (int p = 0; p < P; p++) {
    keys[p] = pages.block(first + p);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) acc[r][p] = zero();
  }
  for (int d = 0; d < words; d++) {
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) prefetch_l2(keys[p] + (words + d) * 64);
    dots<Kv, R, P, kQueryWords>(acc, q + d, keys, d * 64);
  }
#pragma GCC unroll 8
  for (int p = 0; p < P; p++)
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) store(out + r * kKvTile + p * 16, acc[r][p]);
}

template <class Kv, int R, int P>
VEC_INLINE void score_tile_from(const uint32_t* q, int words, const Pages& pages, int first, int done, int panels,
                                float* out) {
  for (; done + P <= panels; done += P) score_panels<Kv, R, P>(q, words, pages, first + done, out + done * 16);
  if constexpr (P > 1) score_tile_from<Kv, R, P / 2>(q, words, pages, first, done, panels, out);
}

constexpr int panels_at_once(int rows) {
  return kChains >= 8 * rows ? 8 : kChains >= 4 * rows ? 4 : kChains >= 2 * rows ? 2 : 1;
}

// Softmax of a row over its first n >= 1 tokens of a tile: probabilities relative to the maximum so far, zeros up to
// token `stop`. Returns the factor by which what was summed before shrinks.
template <class Kv>
VEC_INLINE float softmax_row(float* s, typename Kv::Element* p, int n, int stop, float& max_so_far, float& sum) {
  const int full = n / 16 * 16, rest = n % 16;
  if (rest) store(s + full, select(first_lanes(rest), load(s + full), set1(kLowest)));
  f32x16 most = load(s);
  for (int i = 16; i < n; i += 16) most = max(most, load(s + i));
  const float tile_max = reduce_max(most);
  float factor = 1;
  if (tile_max > max_so_far) {
    alignas(64) float lane[16];
    store(lane, exp2(set1(max_so_far - tile_max)));
    factor = lane[0];
    max_so_far = tile_max;
  }
  const f32x16 top = set1(max_so_far);
  f32x16 total = zero();
  int i = 0;
  for (; i < full; i += 16) {
    f32x16 e = exp2(load(s + i) - top);
    total = total + e;
    Kv::put(p + i, e);
  }
  if (rest) {
    f32x16 e = select(first_lanes(rest), exp2(load(s + i) - top), zero());
    total = total + e;
    Kv::put(p + i, e);
    i += 16;
  }
  for (; i < stop; i += 16) Kv::put(p + i, zero());
  sum = sum * factor + reduce_add(total);
  return factor;
}

// acc[r][16 * v ..] = acc * factor[r] + sum over tokens of p[r] * V for R rows and N vectors of 16 dimensions from
// dimension `dim0`. p[r * ldp + word]. `next` (may be null): blocks whose keys are prefetched.
template <class Kv, int R, int N>
VEC_INLINE void add_values(const uint32_t* p, const float* factor, int words, const Pages& pages, int first, int dim,
                           int dim0, const int32_t* next, int num_next, float* out) {
  constexpr int kWords = kBlock / Kv::kPer;  // words of a block, per row
  constexpr int ldp = kKvTile / Kv::kPer;
  f32x16 acc[R][N];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < N; v++) acc[r][v] = load(out + r * dim + dim0 + v * 16) * set1(factor[r]);
  for (int w0 = 0; w0 < words; w0 += kWords) {
    const int b = w0 / kWords, stop = least(kWords, words - w0);
    const uint8_t* values[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; v++) values[v] = pages.block(first + b) + dim * (64 / Kv::kPer) + dim0 * 4 + v * 64;
    const uint8_t* ahead = b < num_next ? pages.base + next[b] * pages.stride + dim0 * 4 : values[0];
    for (int w = 0; w < stop; w++) {
      const int64_t at = (int64_t)w * dim * 4;
#pragma GCC unroll 8
      for (int v = 0; v < N; v++) prefetch_l2(ahead + at + v * 64);
      dots<Kv, R, N, ldp>(acc, p + w0 + w, values, at);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < N; v++) store(out + r * dim + dim0 + v * 16, acc[r][v]);
}

constexpr int vectors_at_once(int rows) { return kChains >= 4 * rows ? 4 : kChains >= 2 * rows ? 2 : 1; }

template <class Kv, int R, int N>
VEC_INLINE void add_all_values(const uint32_t* p, const float* factor, int words, const Pages& pages, int first,
                               int dim, int dim0, const int32_t* next, int num_next, float* out) {
  for (; dim0 + N * 16 <= dim; dim0 += N * 16)
    add_values<Kv, R, N>(p, factor, words, pages, first, dim, dim0, next, num_next, out);
  if constexpr (N > 1) add_all_values<Kv, R, N / 2>(p, factor, words, pages, first, dim, dim0, next, num_next, out);
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
  int row0, group, dim;
  VEC_INLINE int seen(int r) const { return item.pos0 + (row0 + r) / group + 1; }  // tokens that a row sees
  VEC_INLINE int64_t column(int r) const { return (int64_t)(item.kv_head * group + (row0 + r) % group) * dim; }
  VEC_INLINE int token(int r) const { return item.tok0 + (row0 + r) / group; }
};

// Normalises R rows and stores or rounds them. Where head_dim is an odd multiple of 16, a group of 32 columns is the end
// of one head and the start of the next: R and row0 are even then.
static void put_rows(const Tile& tile, int rows, const State* states, float* out) {
  const int dim = tile.dim;
  for (int r = 0; r < rows; r++) {
    const f32x16 inverse = set1(1.f / states[r].sum);
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

// One split [token0, token1) of a row tile: out[R][dim] and states from nothing.
template <class Kv, int R>
static void attend_split(int dim, const uint32_t* q, const int* seen, const Pages& pages, int token0, int token1,
                         const int32_t* next_split, int num_next_split, State* states, float* out) {
  alignas(64) float scores[R * kKvTile];
  alignas(64) uint32_t probs[R * kKvTile / Kv::kPer];
  float factor[R];
  for (int r = 0; r < R; r++) states[r] = State{kLowest, 0};
  for (int i = 0; i < R * dim; i += 16) store(out + i, zero());
  for (int t = token0; t < token1; t += kKvTile) {
    const int n = least(kKvTile, token1 - t), first = t / kBlock, panels = (n + kBlock - 1) / kBlock;
    score_tile_from<Kv, R, panels_at_once(R)>(q, dim / Kv::kPer, pages, first, 0, panels, scores);
    for (int r = 0; r < R; r++) {
      const int own = least(n, seen[r] - t);
      auto* p = (typename Kv::Element*)probs + r * kKvTile;
      factor[r] = 1;
      if (own > 0) factor[r] = softmax_row<Kv>(scores + r * kKvTile, p, own, n, states[r].max, states[r].sum);
      else
        for (int i = 0; i < n; i += 16) Kv::put(p + i, zero());
    }
    const bool last = t + kKvTile >= token1;
    const int32_t* next = last ? next_split : pages.blocks + first + kKvTile / kBlock;
    const int num_next = !next  ? 0
                         : last ? least(panels, num_next_split)
                                : (least(kKvTile, token1 - t - kKvTile) + kBlock - 1) / kBlock;
    add_all_values<Kv, R, vectors_at_once(R)>(probs, factor, (n + Kv::kPer - 1) / Kv::kPer, pages, first, dim, 0, next,
                                              num_next, out);
  }
}

template <class Kv, int R>
__attribute__((noinline)) static void attend_rows(const AttnArgs& args, const AttnItem& item, int row0) {
  const int group = args.heads / args.kv.kv_heads, dim = args.kv.head_dim;
  const Tile tile{args, item, row0, group, dim};
  const Pages pages{args.kv.base + item.kv_head * args.kv.head_stride, args.kv.block_stride, item.blocks};
  alignas(64) uint32_t q[R * kQueryWords];
  alignas(64) float out[R * kMaxHeadDim], split_out[R * kMaxHeadDim];
  State states[R], split_states[R];
  int seen[R];
  for (int r = 0; r < R; r++) {
    const float* from = args.q + tile.token(r) * args.ldq + tile.column(r);
    seen[r] = tile.seen(r);
    for (int d = 0; d < dim; d += 16)
      Kv::put((typename Kv::Element*)(q + r * kQueryWords) + d, load(from + d) * set1(args.scale_log2e));
  }
  const int end = seen[R - 1];
  for (int s = item.split0; s < item.split1; s++) {
    const bool whole = !item.partial && s == 0;
    const int token0 = s * kKvSplit, token1 = least(end, token0 + kKvSplit);
    float* to = whole ? out : split_out;
    State* state = whole ? states : split_states;
    const bool own = s + 1 < item.split1 && token1 < end;  // this sequence goes on
    const int32_t* next = own ? item.blocks + token1 / kBlock : item.next_blocks;
    const int num_next = own ? (end - token1 + kBlock - 1) / kBlock : kKvTile / kBlock;
    if (token0 < end) attend_split<Kv, R>(dim, q, seen, pages, token0, token1, next, num_next, state, to);
    else
      for (int r = 0; r < R; r++) state[r] = State{kLowest, 0};
    for (int r = 0; r < R; r++) {
      if (item.partial) {
        float* slot = item.partial + ((int64_t)(s - item.split0) * item.ntok * group + row0 + r) * (dim + 2);
        if (state[r].sum != 0)
          for (int d = 0; d < dim; d += 16) store(slot + d, load(to + r * dim + d));
        slot[dim] = state[r].max;
        slot[dim + 1] = state[r].sum;
      } else if (s > 0) {
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

static void attention_merge(const AttnArgs& args, int tok0, int ntok, int kv_head, const float* partial, int nsplit) {
  const int group = args.heads / args.kv.kv_heads, dim = args.kv.head_dim, rows = ntok * group;
  const AttnItem item{tok0, ntok, 0, kv_head, 0, nsplit, nullptr, nullptr, nullptr};
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
