// Codes x BF16 activations, exact in both operands: a group of 32 K is decoded in L1 to numbers that bf16 holds exactly
// (integers less their zero point, e4m3), multiplied by bf16 dots, or as float32 where a level has none, and its float32
// sums are scaled once, those of each half where the format has a scale for 16 K. Included after gemm.inl.
namespace octavo::VEC_NS {

template <bool kPairs> struct GroupLinesOf : F32Lines {};
template <> struct GroupLinesOf<true> : Bf16Lines {};
using GroupLines = GroupLinesOf<kBf16Dots>;
constexpr int kLinesOfGroup = 32 / GroupLines::kDepth;

struct DecodedGroup {  // 32 K x 32 columns
  alignas(64) uint8_t lines[kLinesOfGroup * GroupLines::kBytes];
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

template <Format F> static void decode_lines(const uint8_t* task, size_t panel_bytes, int group, DecodedGroup& out) {
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
      if constexpr (kBf16Dots && kNibbles<F>) quad = quad_of_plane<4>(unit + at * 256, column, j, 0);
      else quad = prepared<F>(quad_of<F>(unit, at, column, j));
      GEMM_UNROLL for (int i = 0; i < 4; i += GroupLines::kDepth, line += GroupLines::kBytes) {
        i32v words;
        if constexpr (!kBf16Dots) words = (i32v)value_of<F>(quad, i, n.zero);
        else if constexpr (kNibbles<F>) words = pair_of_nibbles<F>(quad, i / 2);
        else words = exact_pair(value_of<F>(quad, i, n.zero), value_of<F>(quad, i + 1, n.zero));
        memcpy(line, &words, sizeof words);
      }
    }
  }
}

// Where a level multiplies float32, a code stays at its place in a word, 2^place times what it is, and the activation is
// 2^-place times what it was: their product is the same. Codes at the end of a word, where its sign would be, come down.
template <Format F>
constexpr bool kLoneNibbles = !kBf16Dots && info_of(F).low == 4 && info_of(F).high == 0 && !kIq4<F> && !kE2m1<F>;
template <Format F> constexpr int kCodeBits = kLoneNibbles<F> ? 4 : 8;
template <Format F> constexpr int bit_of(int k) { return k % 4 * 8 + (kLoneNibbles<F> && k >= 16 ? 4 : 0); }
template <Format F> constexpr int place_of(int k) {    // k: in a group
  constexpr int kBits = kZeros<F> ? 9 : kCodeBits<F>;  // less the zero: of a byte, with a sign
  return bit_of<F>(k) + kBits < 32 ? bit_of<F>(k) : 0;
}
constexpr int kLastPlace = 24;
template <Format F> VEC_INLINE f32v number_in_place(i32v codes, int k, i32v zero) {
  const int place = place_of<F>(k), bit = bit_of<F>(k);
  if (place != bit) codes = (i32v)((u32v)codes >> bit);
  if (bit + kCodeBits<F> < 32) codes &= ((1 << kCodeBits<F>)-1) << place;
  if constexpr (kZeros<F>) codes -= zero << place;
  else if constexpr (kZero<F> != 0) codes -= kZero<F> << place;
  return part_to_f32(codes);
}

// Groups of a row as a level's dots take them, and dots with codes: with an instruction for pairs, as they are; without, as
// float32, times 2^-place, or the 2^120 that weights of e4m3 are short of.
template <Format F> struct RowOfGroups {
  static constexpr int kGroupsAtOnce = 2, kDepth = GroupLines::kDepth;
  const uint16_t* h;
  alignas(64) float f[kBf16Dots ? 0 : kGroupsAtOnce * 32];

  static constexpr auto kFactors = [] {
    struct {
      alignas(64) float of[32];
    } table{};
    for (int k = 0; k < 32; k++) table.of[k] = F == F8 ? 0x1p120f : 1.f / (float)(1 << place_of<F>(k));
    return table;
  }();
  // Whether they lose nothing by it: none is large, or else so small that it would be subnormal
  static VEC_INLINE bool fits(const Activation& x, int row) {
    mask16 out = less(zero(), zero());
    for (int k = 0; k < x.k_pad; k += 16) {
      const i32x16 a = as_i32(abs(load_bf16(x.h + row * x.ld + k)));  // by bits, in which a NaN is the largest
      if constexpr (F == F8) out = either(out, less(set1_i32(__builtin_bit_cast(int32_t, 0x1p7f)), a));
      else out = either(out, both(less(set1_i32(0), a), less(a, set1_i32((1 + kLastPlace) << 23))));
    }
    return !bits(out);
  }
  VEC_INLINE explicit RowOfGroups(const uint16_t* of) : h(of) {
    if constexpr (!kBf16Dots) {
      GEMM_UNROLL for (int k = 0; k < kGroupsAtOnce * 32; k += 16)
          store(f + k, load_bf16(of + k) * load(kFactors.of + k % 32));
      __asm__("" : "+m"(f));  // to be read from memory: GCC 12 makes broadcasts out of the registers in two steps
    }
  }
  // sum += numbers k .. of the group, kDepth of them, times their activations; k is at + k % 16 + (k < 16 ? 0 : 16)
  VEC_INLINE void add(f32v& sum, i32v codes, int group, int k, int at, i32v zero) const {
    if constexpr (kBf16Dots) {
      uint32_t pair;
      memcpy(&pair, h + group * 32 + k + at, sizeof pair);
      sum = dot2_bf16(sum, exact_pair(value_of<F>(codes, k % 4, zero), value_of<F>(codes, k % 4 + 1, zero)), pair);
    } else {
      f32v w;
      if constexpr (F == F8) w = e4m3_over_2_120(codes, k % 4);
      else w = number_in_place<F>(codes, k, zero);
      add_product(sum, w, f[group * 32 + k + at] - f32v{});
    }
  }
};

// One row, decoded in registers: y[16 kPanels] = row of x times them. The dots of groups and columns take turns, for each
// is a chain of its own. The loop over quads is none that a compiler unrolls: it would not keep all sums in registers.
template <Format F, int kPanels>
GEMM_TILE static void row_of_panels(const uint8_t* panels, size_t panel_bytes, const Activation& x, int row, float* y,
                                    bool fetch) {
  using Row = RowOfGroups<F>;
  constexpr int kAtOnce = Row::kGroupsAtOnce, kGroupBytes = (unit_bytes(F) + kGroups<F> - 1) / kGroups<F>;
  constexpr int kColumns = kPanels * 16 / kLanes;                    // registers of them
  constexpr bool kInPlace = kLoneNibbles<F> || info_of(F).low == 8;  // a line is a quad, or two
  constexpr int kLines = kLoneNibbles<F> ? 4 : 8;                    // of a group
  constexpr int kTogether = kColumns < 4 ? kAtOnce : 1;              // groups, so that four chains take turns
  const uint16_t* h = x.h + row * x.ld;
  alignas(64) uint8_t quads[kInPlace ? 0 : kAtOnce * 8 * 128];
  f32v acc[kColumns] = {};
  i32v greatest[kColumns] = {};
  for (int g = 0; g < x.k_pad / 32; g += kAtOnce, h += kAtOnce * 32) {
    const uint8_t* unit = unit_of<F>(panels, g);
    const int first = g % kGroups<F>;
    auto unit_at = [&](int c) { return unit + c * kLanes / 16 * panel_bytes; };
    if (fetch) fetch_ahead<kPanels>(panels, panel_bytes, unit - panels + first * kGroupBytes, kAtOnce * kGroupBytes);
    const Row groups(h);
    if constexpr (!kInPlace)
      for (int i = 0; i < kAtOnce; i++)
        for (int c = 0; c < kColumns; c++) GEMM_UNROLL for (int j = 0; j < 8; j++) {
            const i32v quad = quad_of<F>(unit_at(c), first + i, c * kLanes % 16, j);
            memcpy(quads + (i * 8 + j) * 128 + c * sizeof quad, &quad, sizeof quad);
          }
    f32v dot[kAtOnce][kColumns], dots[kRuns<F>][kAtOnce][kColumns];
    i32v zeros[kAtOnce][kColumns];
    if constexpr (kZeros<F>)
      GEMM_UNROLL for (int i = 0; i < kAtOnce; i++) GEMM_UNROLL for (int c = 0; c < kColumns; c++) zeros[i][c] =
          numbers_of<F>(unit_at(c), first + i, c * kLanes % 16).zero;
    GEMM_UNROLL for (int half = 0; half < 2; half++) {
      const int run = half * kRuns<F> / 2;
      if (half == run)
        GEMM_UNROLL for (int i = 0; i < kAtOnce; i++) GEMM_UNROLL for (int c = 0; c < kColumns; c++) dot[i][c] = f32v{};
      _Pragma("GCC unroll 1") for (int j = 0; j < 4; j++) GEMM_UNROLL for (int i = 0; i < kAtOnce; i += kTogether) {
        const int line = j + (kLoneNibbles<F> ? 0 : 4 * half);
        i32v codes[kTogether][kColumns];
        GEMM_UNROLL for (int t = 0; t < kTogether; t++) GEMM_UNROLL for (int c = 0; c < kColumns; c++) codes[t][c] =
            kInPlace ? part_of_line(unit_at(c) + ((first + i + t) * kLines + line) * 64, c * kLanes % 16)
                     : part_of_line(quads + ((i + t) * kLines + line) * 128, c * kLanes);
        if constexpr (kBf16Dots)
          GEMM_UNROLL for (int t = 0; t < kTogether; t++) GEMM_UNROLL for (int c = 0; c < kColumns; c++) codes[t][c] =
              prepared<F>(codes[t][c]);
        if constexpr (F == F8)
          GEMM_UNROLL for (int t = 0; t < kTogether; t++) GEMM_UNROLL for (int c = 0; c < kColumns; c++) greatest[c] =
              e4m3_greater(greatest[c], codes[t][c]);
        GEMM_UNROLL for (int e = 0; e < 4; e += Row::kDepth) GEMM_UNROLL for (int t = 0; t < kTogether; t++)
            GEMM_UNROLL for (int c = 0; c < kColumns; c++)
                groups.add(dot[i + t][c], codes[t][c], i + t, 16 * half + e, 4 * j, zeros[i + t][c]);
      }
      GEMM_UNROLL for (int i = 0; i < kAtOnce; i++) GEMM_UNROLL for (int c = 0; c < kColumns; c++) dots[run][i][c] =
          dot[i][c];
    }
    for (int i = 0; i < kAtOnce; i++) {
      float t[kRuns<F>] = {};
      if constexpr (kMinimum<F>) {
        if constexpr (kRuns<F> == 1) t[0] = x.t[(g + i) * x.stride + row];
        else
          for (int run = 0; run < 2; run++) t[run] = reduce_add(load_bf16(h + i * 32 + run * 16));
      }
      GEMM_UNROLL for (int c = 0; c < kColumns; c++) {
        const Numbers<F> n = numbers_of<F>(unit_at(c), first + i, c * kLanes % 16);
        GEMM_UNROLL for (int run = 0; run < kRuns<F>; run++) {
          acc[c] = fma(dots[run][i][c], n.scale[run], acc[c]);
          if constexpr (kMinimum<F>) acc[c] = fma(n.minimum[run], t[run] - f32v{}, acc[c]);
        }
      }
    }
  }
  GEMM_UNROLL for (int c = 0; c < kColumns; c++) {
    if constexpr (F == F8) acc[c] = (f32v)((i32v)acc[c] | e4m3_any_nan(greatest[c]));
    memcpy(y + c * kLanes, &acc[c], sizeof(f32v));
  }
}

struct GroupRun {  // lines with one scale: those of half a group, or all of it
  const uint8_t* lines;
  int count;
  const float *scales, *minima;
};

// y[r * 32 ..] += the run times rows [row, row + MR): x at the run's first column, t the sums of its columns, or null
// where the format has no minima
template <int MR>
GEMM_TILE static void tile_group(const GroupRun& w, const GroupLines::X* x, int64_t ld, const float* t, float* y) {
  constexpr int V = kVectors<MR>;
  for (int c = 0; c < 2; c += V) {
    f32x16 dot[MR][V];
    GEMM_UNROLL for (int r = 0; r < MR; r++) GEMM_UNROLL for (int v = 0; v < V; v++) dot[r][v] = zero();
    add_lines<GroupLines>(dot, w.lines + c * 64, w.count, x, ld, false);
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

template <int MR = GroupLines::kMostRows>
VEC_INLINE void add_group(const GroupRun& w, const GroupLines::X* x, int64_t ld, const float* t, int n, float* y) {
  if constexpr (MR > 1)
    if (n < MR) return add_group<MR - 1>(w, x, ld, t, n, y);
  tile_group<MR>(w, x, ld, t, y);
}

template <Format F> struct ProductGroups {
  static constexpr int kRows = 48;  // a group is decoded once for so many rows: 6 KB of results
  GEMM_TILE static void run(const Weight& w, const Activation& x, int task, int row, int n, float* y) {
    const uint8_t* data = task_data(w, task);
    if (n == 1 && (kBf16Dots || RowOfGroups<F>::fits(x, row))) {
      constexpr int kPanels = kBf16Dots || kLoneNibbles<F> ? 2 : 1;  // others are read faster one after the other
      for (int panel = 0; panel < 2; panel += kPanels)
        row_of_panels<F, kPanels>(data + panel * w.panel_bytes, w.panel_bytes, x, row, y + panel * 16, row == 0);
      return;
    }
    DecodedGroup group;
    float sums[2][kRows];
    alignas(64) float decoded[kBf16Dots ? 1 : kRows * 64];
    clear(y, n);
    for (int g = 0; g < x.k_pad / 32; g++) {
      constexpr int kGroupBytes = (unit_bytes(F) + kGroups<F> - 1) / kGroups<F>;
      constexpr int kLines = kLinesOfGroup / kRuns<F>;
      if (row == 0)
        fetch_ahead<2>(data, w.panel_bytes, unit_of<F>(data, g) - data + g % kGroups<F> * kGroupBytes, kGroupBytes);
      decode_lines<F>(data, w.panel_bytes, g, group);
      const uint16_t* h = x.h + row * x.ld + g * 32;
      const float* t[2] = {kMinimum<F> ? x.t + g * x.stride + row : nullptr, nullptr};
      if constexpr (kMinimum<F> && kRuns<F> == 2)
        for (int i = 0; i < 2; i++) {
          for (int r = 0; r < n; r++) sums[i][r] = reduce_add(load_bf16(h + r * x.ld + i * 16));
          t[i] = sums[i];
        }
      const GroupLines::X* in;
      int64_t ld;
      if constexpr (kBf16Dots) {
        in = h, ld = x.ld;
      } else {
        if (g % 2 == 0) decode_rows<Act::BF16>(x, row, n, g * 32, decoded);
        in = decoded + g % 2 * 32, ld = 64;
      }
      for_tiles<GroupLines>(n, [&](int r, int rows) __attribute__((always_inline)) {
        for (int i = 0; i < kRuns<F>; i++) {
          const GroupRun run{group.lines + i * kLines * GroupLines::kBytes, kLines, group.scale[i],
                             kMinimum<F> ? group.minimum[i] : nullptr};
          add_group(run, in + r * ld + i * 16, ld, t[i] ? t[i] + r : nullptr, rows, y + r * 32);
        }
      });
    }
  }
};

}  // namespace octavo::VEC_NS
