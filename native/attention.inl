// Attention over the pages of sequences (layout: KvLayer in kernels.h). The rows of an item share keys and values: the
// heads of a group, tokens of a chunk, and tokens of sequences with a common prefix, as far as that goes. KV tile by KV
// tile, the rows that read it take it in row tiles; their states go from tile to tile in float32.
//
// Same bits whatever the rows beside a row (DESIGN 4): every score and every output element is one chain of operations in
// ascending order; tiles and splits start at absolute positions; a row rescales by its own maximum; a split starts from an
// empty state, and splits are merged in ascending order by merge_state alone. A window leaves out whole tiles, then whole
// blocks before its first token, and masks the rest; sinks enter when all splits have met.
namespace octavo::VEC_NS {

constexpr float kLog2e = 1.44269504f;

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

// Rows [row0, row0 + count) of an item, but for queries and states.
static void take_rows(const AttnArgs& args, const AttnItem& item, int row0, int count, Rows& rows) {
  const int group = args.heads / args.kv.kv_heads;
  rows.count = count;
  int row = -row0;  // of the part's first
  for (int i = 0; i < item.num_parts; i++) {
    const AttnPart& part = item.parts[i];
    const int part_rows = part.ntok * group;
    for (int r = most(0, row); r < least(count, row + part_rows); r++) {
      const int token = (r - row) / group, position = part.pos0 + token;
      rows.token[r] = part.tok0 + token;
      rows.head[r] = item.kv_head * group + (r - row) % group;
      rows.position[r] = position;
      rows.from[r] = args.window > 0 ? most(0, position + 1 - args.window) : 0;
      rows.to[r] = !part.context     ? position + 1
                   : args.window > 0 ? least(part.context, position + args.window)
                                     : part.context;
    }
    row += part_rows;
  }
}

template <class Kv> static void put_queries(const AttnArgs& args, Rows& rows) {
  const int dim = args.kv.head_dim;
  const f32x16 scale = set1(args.scale_log2e);
  for (int r = 0; r < rows.count; r++) {
    const float* x = args.q + rows.token[r] * args.ldq + rows.head[r] * dim;
    rows.step[r] = put_query<Kv>(
        dim, [&](int d) { return load(x + d) * scale; }, (typename Kv::Element*)(rows.queries + r * kQueryWords));
  }
}

// Normalises the rows and stores or rounds them. Where the dimension is an odd multiple of 16, a group of 32 columns is the
// end of one head and the start of the next: then there is an even number of rows for a token.
static void put_rows(const AttnArgs& args, const Rows& rows) {
  const int dim = args.kv.value_dim;
  for (int r = 0; r < rows.count; r++) {
    float shrink = 1, sum = rows.states[r].sum;
    if (args.sinks) {
      const float max = rows.states[r].max, sink = args.sinks[rows.head[r]] * kLog2e, top = sink > max ? sink : max;
      shrink = exp2_of(max - top);
      sum = sum * shrink + exp2_of(sink - top);
    }
    const f32x16 inverse = set1(shrink / sum);
    float* out = rows.out + r * dim;
    for (int d = 0; d < dim; d += 16) store(out + d, fma(load(out + d), inverse, zero()));  // no -0
  }
  if (args.out) {
    for (int r = 0; r < rows.count; r++) {
      float* to = args.out + rows.token[r] * args.ld_out + rows.head[r] * dim;
      for (int d = 0; d < dim; d += 16) store(to + d, load(rows.out + r * dim + d));
    }
    return;
  }
  const int heads = dim % 32 ? 2 : 1, width = heads * dim;
  for (int r = 0; r < rows.count; r += heads)
    for (int d = 0; d < width; d += 32) {
      const float* x = rows.out + r * dim + d;
      put32(*args.act, rows.token[r], (rows.head[r] * dim + d) / 32, x);
    }
}

// Parts [first, last) of an item read a KV tile together.
struct Run {
  int tile, first, last;
};

// What each part of an item reads of the tiles, for some of its rows.
struct Reads {
  const AttnItem& item;
  int rows[kItemParts + 1];              // where the rows of a part start
  int from[kItemParts], to[kItemParts];  // tokens
  Reads(const AttnItem& item, const Rows& all, int row0, int group) : item(item) {
    int row = -row0;
    for (int i = 0; i < item.num_parts; i++) {
      const int end = row + item.parts[i].ntok * group, r0 = least(most(row, 0), all.count), r1 = least(end, all.count);
      rows[i] = r0;
      from[i] = r0 < r1 ? all.from[r0] : 0;
      to[i] = r0 < r1 ? all.to[r1 - 1] : 0;
      row = end;
    }
    rows[item.num_parts] = all.count;
  }
  bool sees(int part, int tile) const { return from[part] < (tile + 1) * kKvTile && to[part] > tile * kKvTile; }

  // The next run from a part of a tile on; behind the last tile: none.
  Run run(int tile, int part, int last_tile) const {
    for (; tile < last_tile; tile++, part = 0)
      for (; part < item.num_parts; part++)
        if (sees(part, tile)) {
          int last = part + 1;
          while (last < item.num_parts && item.parts[last].shared > tile) last++;
          return {tile, part, last};
        }
    return {last_tile, 0, 0};
  }
};

// Rows [row0, row0 + count) of the `all` of an item.
template <class Kv> static void attend_rows(const AttnArgs& args, const AttnItem& item, int row0, int count, int all) {
  const int dim = args.kv.value_dim;
  Rows rows;
  RowTiles<Kv> tiles;
  State states[kItemRows], split_states[kItemRows];
  rows.queries = (uint32_t*)args.scratch;
  float *out = args.scratch + kItemRows * kQueryWords, *split_out = out + kItemRows * dim;
  take_rows(args, item, row0, count, rows);
  put_queries<Kv>(args, rows);
  const Reads reads(item, rows, row0, args.heads / args.kv.kv_heads);
  constexpr int kSplitTiles = kKvSplit / kKvTile;
  const int last_tile = item.split1 * kSplitTiles;
  const uint8_t* base = args.kv.base + item.kv_head * args.kv.head_stride;
  Run run = reads.run(item.split0 * kSplitTiles, 0, last_tile);
  for (int split = item.split0; split < item.split1; split++) {
    const bool whole = !item.partial && split == item.split0;
    rows.states = whole ? states : split_states;
    rows.out = whole ? out : split_out;
    for (int r = 0; r < count; r++) rows.states[r] = State{kLowest, 0};
    for (int i = 0; i < count * dim; i += 16) store(rows.out + i, zero());
    while (run.tile < least(last_tile, (split + 1) * kSplitTiles)) {
      const Run next = reads.run(run.tile, run.last, last_tile);
      const int32_t* next_blocks = item.next_blocks;
      int num_next = item.num_next;
      if (next.tile < last_tile) {
        const int first = most(next.tile * kKvTile, reads.from[next.first]) / kBlock;
        next_blocks = item.parts[next.first].blocks + first;
        num_next = (reads.to[next.first] + kBlock - 1) / kBlock - first;
      }
      const Pages pages{base, args.kv.block_stride, item.parts[run.first].blocks};
      tiles.attend(args, rows, reads.rows[run.first], reads.rows[run.last], pages, run.tile * kKvTile, next_blocks,
                   num_next);
      run = next;
    }
    for (int r = 0; r < count; r++) {
      const State& state = rows.states[r];
      const float* from = rows.out + r * dim;
      if (item.partial) {
        float* slot = item.partial + ((int64_t)(split - item.split0) * all + row0 + r) * (dim + 2);
        if (state.sum != 0)
          for (int d = 0; d < dim; d += 16) store(slot + d, load(from + d));
        slot[dim] = state.max;
        slot[dim + 1] = state.sum;
      } else if (!whole) {
        merge_state(states[r], out + r * dim, state, from, dim);
      }
    }
  }
  if (item.partial) return;
  rows.states = states;
  rows.out = out;
  put_rows(args, rows);
}

VEC_INLINE int rows_of(const AttnArgs& args, const AttnItem& item) {
  int tokens = 0;
  for (int i = 0; i < item.num_parts; i++) tokens += item.parts[i].ntok;
  return tokens * (args.heads / args.kv.kv_heads);
}

template <class Kv> static void attention(const AttnArgs& args, const AttnItem& item) {
  const int all = rows_of(args, item);
  for (int row = 0; row < all; row += kItemRows) attend_rows<Kv>(args, item, row, least(kItemRows, all - row), all);
}

[[maybe_unused]] static void attention_merge(const AttnArgs& args, const AttnItem& item) {
  const int dim = args.kv.value_dim, all = rows_of(args, item);
  Rows rows;
  State states[kItemRows];
  rows.states = states;
  rows.out = args.scratch;
  for (int row0 = 0; row0 < all; row0 += kItemRows) {
    take_rows(args, item, row0, least(kItemRows, all - row0), rows);
    for (int r = 0; r < rows.count; r++) {
      states[r] = State{};
      for (int s = 0; s < item.split1 - item.split0; s++) {
        const float* slot = item.partial + ((int64_t)s * all + row0 + r) * (dim + 2);
        merge_state(states[r], rows.out + r * dim, State{slot[dim], slot[dim + 1]}, slot, dim);
      }
    }
    put_rows(args, rows);
  }
}

}  // namespace octavo::VEC_NS
