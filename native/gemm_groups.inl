// Codes x BF16 activations, exact in both operands: a group of 32 K is decoded in L1 to numbers that bf16 holds exactly
// (integers less their zero point, e4m3), multiplied by bf16 dots, and its float32 sums are scaled once, those of each
// half where the format has a scale for 16 K. Included after gemm.inl.
namespace octavo::VEC_NS {

struct DecodedGroup {                      // 32 K x 32 columns
  alignas(64) uint8_t lines[2 * 16 * 64];  // [K pair][32 columns][2] bf16
  alignas(64) float scale[2][32], minimum[2][32];
};

// lanes of two numbers that bf16 holds exactly, as a pair
VEC_INLINE i32x16 exact_pair(f32x16 low, f32x16 high) { return as_i32(as_u32(low) >> 16 | as_u32(high)); }

template <Format F> constexpr bool kNibbles = kOneOf<F, W4, W4F, W4N, W4M, W4V, W4K, W4X>;  // of a fixed meaning

// The numbers of a group of one panel, as bf16 pairs [K pair], 128 bytes apart.
template <Format F> VEC_INLINE void decode_lines_bf16(const uint8_t* panel, int group, const Codes& c, uint8_t* line) {
  if constexpr (F == F8) {
    const uint8_t* lines = unit_of<F>(panel, group) + group % 2 * 512;
    for (int j = 0; j < 8; j++) {
      const u32x16 v = as_u32(load_line(lines + j * 64));
      for (int i = 0; i < 32; i += 16, line += 128)
        store_line(line, exact_pair(e4m3(as_i32(v >> i) & 255), e4m3(as_i32(v >> (i + 8)) & 255)));
    }
  } else if constexpr (kNibbles<F>) {
    alignas(64) static constexpr auto kNumbers = [] {
      struct {
        uint16_t of[32];
      } table{};
      for (int q = 0; q < 16; q++)
        table.of[q] = (uint16_t)(__builtin_bit_cast(uint32_t, (float)nibble_value<F>(q)) >> 16);
      return table;
    }();
    const uint8_t* low = unit_of<F>(panel, group) + group % kGroupsOfUnit<F> * 256;
    GEMM_UNROLL for (int j = 0; j < 8; j++) {
      const i32x16 v = load_line(low + j % 4 * 64), q = j < 4 ? nibble_lo(v) : nibble_hi(v);
      GEMM_UNROLL for (int i = 0; i < 2; i++, line += 128) store_line(line, bf16_pairs_u4(q, i, kNumbers.of));
    }
  } else {
    for (int j = 0; j < 8; j++)
      for (int i = 0; i < 4; i += 2, line += 128)
        store_line(line, exact_pair(to_f32(integers<F>(c, j, i)), to_f32(integers<F>(c, j, i + 1))));
  }
}

template <Format F> static void decode_bf16(const uint8_t* task, size_t panel_bytes, int group, DecodedGroup& out) {
  for (int panel = 0; panel < 2; panel++) {
    const uint8_t* data = task + panel * panel_bytes;
    Codes c;
    if constexpr (kNibbles<F> || F == F8) decode_numbers<F>(data, group, c);
    else decode_codes<F>(data, group, c);
    decode_lines_bf16<F>(data, group, c, out.lines + panel * 64);
    for (int i = 0; i < kHalves<F>; i++) {
      store(out.scale[i] + panel * 16, load(c.scale[i]));
      if constexpr (kMinimum<F>) store(out.minimum[i] + panel * 16, load(c.minimum[i]));
    }
  }
}

struct GroupRun {  // K pairs with one scale: half a group, or all of it
  const uint8_t* lines;
  int pairs;
  const float *scales, *minima;
};

// y[r * 32 ..] += the run times rows [row, row + MR): x at the run's first column, t the sums of its columns, or null
// where the format has no minima
template <int MR>
GEMM_TILE static void tile_group(const GroupRun& w, const uint16_t* x, int64_t ld, const float* t, float* y) {
  constexpr int V = kVectors<MR>;
  const uint16_t* base[(MR + 2) / 3];
  GEMM_UNROLL for (int i = 0; i < (MR + 2) / 3; i++) base[i] = x + 3 * i * ld;
  for (int c = 0; c < 2; c += V) {
    f32x16 dot[MR][V];
    GEMM_UNROLL for (int r = 0; r < MR; r++) GEMM_UNROLL for (int v = 0; v < V; v++) dot[r][v] = zero();
    for (int p = 0; p < w.pairs; p++) {
      i32x16 b[V];
      GEMM_UNROLL for (int v = 0; v < V; v++) b[v] = load_line(w.lines + p * 128 + (c + v) * 64);
      GEMM_UNROLL for (int r = 0; r < MR; r++) {
        uint32_t pair;
        memcpy(&pair, row_of(base, ld, r) + 2 * p, 4);
        GEMM_UNROLL for (int v = 0; v < V; v++) dot[r][v] = dot2_bf16(dot[r][v], b[v], pair);
      }
    }
    GEMM_UNROLL for (int v = 0; v < V; v++) {
      const int at = (c + v) * 16;
      const f32x16 scale = load(w.scales + at);
      GEMM_UNROLL for (int r = 0; r < MR; r++) {
        f32x16 sum = fma(dot[r][v], scale, load(y + r * 32 + at));
        if (t) sum = fma(load(w.minima + at), set1(t[r]), sum);
        store(y + r * 32 + at, sum);
      }
    }
  }
}

template <int MR = kMaxRowsFloat>
VEC_INLINE void add_group(const GroupRun& w, const uint16_t* x, int64_t ld, const float* t, int n, float* y) {
  if constexpr (MR > 1)
    if (n < MR) return add_group<MR - 1>(w, x, ld, t, n, y);
  tile_group<MR>(w, x, ld, t, y);
}

template <Format F> struct ProductGroups {
  static constexpr int kRows = 48;  // a group is decoded once for so many rows: 6 KB of results
  static void run(const Weight& w, const Activation& x, int task, int row, int n, float* y) {
    DecodedGroup group;
    float sums[2][kRows];
    const uint8_t* data = task_data(w, task);
    clear(y, n);
    for (int g = 0; g < x.k_pad / 32; g++) {
      if (row == 0 && g % kGroupsOfUnit<F> == 0)
        for (int panel = 0; panel < 2; panel++)
          for (int i = 0; i < unit_bytes(F); i += 64)
            prefetch(unit_of<F>(data + panel * w.panel_bytes, g) + kPrefetch / 2 + i);
      decode_bf16<F>(data, w.panel_bytes, g, group);
      const uint16_t* h = x.h + row * x.ld + g * 32;
      const float* t[2] = {kMinimum<F> ? x.t + g * x.stride + row : nullptr, nullptr};
      if constexpr (kMinimum<F> && kHalves<F> == 2)
        for (int i = 0; i < 2; i++) {
          for (int r = 0; r < n; r++) sums[i][r] = reduce_add(load_bf16(h + r * x.ld + i * 16));
          t[i] = sums[i];
        }
      for (int r = 0; r < n; r += kMaxRowsFloat) {
        const int rows = n - r < kMaxRowsFloat ? n - r : kMaxRowsFloat;
        for (int i = 0; i < kHalves<F>; i++) {
          constexpr int kPairs = 16 / kHalves<F>;
          const float* minima = kMinimum<F> ? group.minimum[i] : nullptr;
          const GroupRun run{group.lines + i * kPairs * 128, kPairs, group.scale[i], minima};
          add_group(run, h + r * x.ld + i * 16, x.ld, t[i] ? t[i] + r : nullptr, rows, y + r * 32);
        }
      }
    }
  }
};

}  // namespace octavo::VEC_NS
