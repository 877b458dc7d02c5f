// Codes x BF16 activations, exact in both operands: a group of 32 K is decoded in L1 to numbers that bf16 holds exactly
// (integers less their zero point, e4m3), multiplied by bf16 dots, and its float32 sums are scaled once, those of each
// half where the format has a scale for 16 K. Included after gemm.inl.
namespace octavo::VEC_NS {

struct DecodedGroup {                      // 32 K x 32 columns
  alignas(64) uint8_t lines[2 * 16 * 64];  // [K pair][32 columns][2] bf16
  alignas(64) float scale[2][32], minimum[2][32];
};

// a pair of numbers that bf16 holds exactly
VEC_INLINE i32v exact_pair(f32v first, f32v second) { return (i32v)((u32v)first >> 16 | (u32v)second); }

template <Format F>
constexpr bool kNibbles = info_of(F).low == 4 && info_of(F).high == 0 && !kZeros<F>;  // of a fixed meaning
template <Format F> VEC_INLINE i32v pair_of_nibbles(i32v codes, int i) {
  alignas(64) static constexpr auto kValues = [] {
    struct {
      uint16_t of[32];
    } table{};
    for (int q = 0; q < 16; q++)
      table.of[q] = (uint16_t)(__builtin_bit_cast(uint32_t, (float)nibble_value<F>(q)) >> 16);
    return table;
  }();
  return bf16_pairs_u4(codes, i, kValues.of);
}

template <Format F> VEC_INLINE Numbers<F> numbers_of_group(const uint8_t* unit, int group, int column) {
  Numbers<F> n = numbers_of<F>(unit, group, column);
  if constexpr (F == F8) {  // a NaN makes the whole sum one
    i32v nan{};
    GEMM_UNROLL for (int j = 0; j < 8; j++) nan |= e4m3_nan(quad_of<F>(unit, group, column, j));
    n.scale[0] = (f32v)((i32v)n.scale[0] | any_bit7(nan));
  }
  return n;
}

template <Format F> static void decode_bf16(const uint8_t* task, size_t panel_bytes, int group, DecodedGroup& out) {
  for (int c = 0; c < 32; c += kLanes) {
    const uint8_t* unit = unit_of<F>(task + c / 16 * panel_bytes, group);
    const int at = group % kGroups<F>, column = c % 16;
    const Numbers<F> n = numbers_of_group<F>(unit, at, column);
    for (int run = 0; run < kRuns<F>; run++) {
      memcpy(out.scale[run] + c, &n.scale[run], sizeof(f32v));
      if constexpr (kMinimum<F>) memcpy(out.minimum[run] + c, &n.minimum[run], sizeof(f32v));
    }
    uint8_t* line = out.lines + c * 4;
    GEMM_UNROLL for (int j = 0; j < 8; j++) {
      i32v quad;
      if constexpr (kNibbles<F>) quad = quad_of_plane<4>(unit + at * 256, column, j, 0);
      else quad = prepared<F>(quad_of<F>(unit, at, column, j));
      GEMM_UNROLL for (int i = 0; i < 2; i++, line += 128) {
        i32v pair;
        if constexpr (kNibbles<F>) pair = pair_of_nibbles<F>(quad, i);
        else pair = exact_pair(value_of<F>(quad, 2 * i, n), value_of<F>(quad, 2 * i + 1, n));
        memcpy(line, &pair, sizeof pair);
      }
    }
  }
}

// The activations of some groups of a row as a level's dots take them, and dots with pairs of weights that bf16 holds: with
// an instruction for pairs, as they are; without, as float32, and those of e4m3 times the 2^120 that its weights are short of.
template <Format F> struct RowOfGroups {
  static constexpr bool kPairs = kParts == 1, kShort = !kPairs && F == F8;
  static constexpr int kGroupsAtOnce = 2;
  const uint16_t* h;
  alignas(64) float f[kPairs ? 0 : kGroupsAtOnce * 32];

  // Whether no activation of the row is too large for it: 2^7 times 2^120 is finite
  static VEC_INLINE bool fits(const Activation& x, int row) {
    if constexpr (!kShort) return true;
    f32x16 most = zero();
    for (int k = 0; k < x.k_pad; k += 16) {
      const f32x16 a = abs(load_bf16(x.h + row * x.ld + k));
      most = as_f32(max(as_i32(most), as_i32(a)));  // by bits, in which a NaN is the largest
    }
    return reduce_max(as_i32(most)) <= __builtin_bit_cast(int32_t, 0x1p7f);
  }
  VEC_INLINE explicit RowOfGroups(const uint16_t* of) : h(of) {
    if constexpr (!kPairs) {
      GEMM_UNROLL for (int k = 0; k < kGroupsAtOnce * 32; k += 16)
          store(f + k, kShort ? load_bf16(of + k) * set1(0x1p120f) : load_bf16(of + k));
      __asm__("" : "+m"(f));  // to be read from memory: GCC 12 makes broadcasts out of the registers in two steps
    }
  }
  // acc + weights 2 pair and 2 pair + 1 of a quad times activations k and k + 1
  template <class V> VEC_INLINE V dot(V acc, i32v quad, int pair, int k, const Numbers<F>& n) const {
    f32v w[2];
    GEMM_UNROLL for (int i = 0; i < 2; i++) {
      if constexpr (kShort) w[i] = e4m3_over_2_120(quad, 2 * pair + i);
      else w[i] = value_of<F>(quad, 2 * pair + i, n);
    }
    if constexpr (kPairs) {
      uint32_t both;
      memcpy(&both, h + k, sizeof both);
      return dot2_bf16(acc, exact_pair(w[0], w[1]), both);
    } else {
      return fma(w[1], f[k + 1] - f32v{}, fma(w[0], f[k] - f32v{}, acc));
    }
  }
};

// One row, decoded in registers: y[16] = row of x times a panel. The dots of groups and columns take turns, for each is a
// chain of its own.
template <Format F>
GEMM_TILE static void row_of_panel(const uint8_t* panel, const Activation& x, int row, float* y, bool fetch) {
  using Row = RowOfGroups<F>;
  constexpr int kAtOnce = Row::kGroupsAtOnce, kGroupBytes = (unit_bytes(F) + kGroups<F> - 1) / kGroups<F>;
  const uint16_t* h = x.h + row * x.ld;
  f32v acc[kParts] = {};
  for (int g = 0; g < x.k_pad / 32; g += kAtOnce, h += kAtOnce * 32) {
    const uint8_t* unit = unit_of<F>(panel, g);
    if (fetch)
      for (int i = 0; i < kAtOnce * kGroupBytes; i += 64) prefetch(unit + kPrefetch + g % kGroups<F> * kGroupBytes + i);
    const Row groups(h);
    f32v dot[kAtOnce][kRuns<F>][kParts] = {};
    Numbers<F> n[kAtOnce][kParts];
    GEMM_UNROLL for (int i = 0; i < kAtOnce; i++) GEMM_UNROLL for (int p = 0; p < kParts; p++) n[i][p] =
        numbers_of_group<F>(unit, g % kGroups<F> + i, p * kLanes);
    GEMM_UNROLL for (int j = 0; j < 8; j++) GEMM_UNROLL for (int i = 0; i < kAtOnce; i++)
        GEMM_UNROLL for (int p = 0; p < kParts; p++) {
      const i32v quad = prepared<F>(quad_of<F>(unit, g % kGroups<F> + i, p * kLanes, j));
      f32v& sum = dot[i][kRuns<F> * j / 8][p];
      GEMM_UNROLL for (int e = 0; e < 2; e++) sum = groups.dot(sum, quad, e, i * 32 + j * 4 + 2 * e, n[i][p]);
    }
    GEMM_UNROLL for (int i = 0; i < kAtOnce; i++) GEMM_UNROLL for (int run = 0; run < kRuns<F>; run++) {
      float t = 0;
      if constexpr (kMinimum<F>)
        t = kRuns<F> == 1 ? x.t[(g + i) * x.stride + row] : reduce_add(load_bf16(h + i * 32 + run * 16));
      GEMM_UNROLL for (int p = 0; p < kParts; p++) {
        acc[p] = fma(dot[i][run][p], n[i][p].scale[run], acc[p]);
        if constexpr (kMinimum<F>) acc[p] = fma(n[i][p].minimum[run], t - f32v{}, acc[p]);
      }
    }
  }
  GEMM_UNROLL for (int p = 0; p < kParts; p++) memcpy(y + p * kLanes, &acc[p], sizeof(f32v));
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
    const uint8_t* data = task_data(w, task);
    if (n == 1 && RowOfGroups<F>::fits(x, row)) {
      row_of_panel<F>(data, x, row, y, row == 0);
      row_of_panel<F>(data + w.panel_bytes, x, row, y + 16, row == 0);
      return;
    }
    DecodedGroup group;
    float sums[2][kRows];
    clear(y, n);
    for (int g = 0; g < x.k_pad / 32; g++) {
      constexpr int kGroupBytes = (unit_bytes(F) + kGroups<F> - 1) / kGroups<F>;
      if (row == 0)
        for (int panel = 0; panel < 2; panel++)
          for (int i = 0; i < kGroupBytes; i += 64)
            prefetch(unit_of<F>(data + panel * w.panel_bytes, g) + kPrefetch / 2 + g % kGroups<F> * kGroupBytes + i);
      decode_bf16<F>(data, w.panel_bytes, g, group);
      const uint16_t* h = x.h + row * x.ld + g * 32;
      const float* t[2] = {kMinimum<F> ? x.t + g * x.stride + row : nullptr, nullptr};
      if constexpr (kMinimum<F> && kRuns<F> == 2)
        for (int i = 0; i < 2; i++) {
          for (int r = 0; r < n; r++) sums[i][r] = reduce_add(load_bf16(h + r * x.ld + i * 16));
          t[i] = sums[i];
        }
      for (int r = 0; r < n; r += kMaxRowsFloat) {
        const int rows = n - r < kMaxRowsFloat ? n - r : kMaxRowsFloat;
        for (int i = 0; i < kRuns<F>; i++) {
          constexpr int kPairs = 16 / kRuns<F>;
          const float* minima = kMinimum<F> ? group.minimum[i] : nullptr;
          const GroupRun run{group.lines + i * kPairs * 128, kPairs, group.scale[i], minima};
          add_group(run, h + r * x.ld + i * 16, x.ld, t[i] ? t[i] + r : nullptr, rows, y + r * 32);
        }
      }
    }
  }
};

}  // namespace octavo::VEC_NS
