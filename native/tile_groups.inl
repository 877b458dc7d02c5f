// Codes x BF16 activations in tiles: the groups of gemm_groups.inl, decoded as there, with tiles for the dots of pairs. Dots of
// tiles round otherwise, so one row takes them as well as many (P1).
namespace octavo::VEC_NS {

// Whether a code, of at most 5 bits, means the same in all columns: it is looked up.
template <Format F> constexpr bool kLookedUp = kNibbles<F> || (kLargest<F> < 32 && !kZeros<F> && F != F8);
// Others, but for F8, are taken at a high byte of a word, 2^kPlace times what they are, which takes fewer instructions than to
// bring them down, and their scales make up for it: at the highest byte with their sign, or below it less the zero.
template <Format F> constexpr int kPlace = kLookedUp<F> || F == F8 ? 0 : kZeros<F> ? 16 : 24;
template <Format F, int kByte> VEC_INLINE f32x16 number_at_place(i32x16 quad, i32x16 zero) {
  constexpr int kFrom = 8 * kByte;
  if constexpr (kFrom == kPlace<F>) {
    quad &= (int)(255u << kPlace<F>);
  } else {  // by a shuffle rather than shifts, of which fewer are done at once
    constexpr unsigned kNone = 0x80808080u & ~(255u << kPlace<F>);
    const i32x16 lanes = (i32x16)_mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    const i32x16 from = (lanes & (int)(255u << kPlace<F>)) | (int)(kNone | (unsigned)kByte << kPlace<F>);
    quad = (i32x16)_mm512_shuffle_epi8((__m512i)quad, (__m512i)from);
  }
  return to_f32(kZeros<F> ? quad - (zero << kPlace<F>) : quad);
}

// Two runs of K that are multiplied one after the other: both halves of a group, or two groups, whose scales may be one.
template <Format F> struct TileRuns {
  static constexpr int kGroupsOfBoth = 2 / kRuns<F>, kDepth = 32 / kRuns<F>;  // K of a run
  static constexpr bool kOneScale = kOneOf<F, W4Z64, W4C, W8Z64, F8>;
  static constexpr int kSums = kOneScale ? 1 : 2;                  // of dots
  static constexpr bool kHalfSums = kMinimum<F> && kRuns<F> == 2;  // no activation comes with sums of 16

  struct alignas(64) Lines {  // of 32 columns
    uint8_t of[2][kDepth / 2 * Bf16Lines::kBytes];
  };
  struct alignas(64) Numbers {
    float scale[2][32], minimum[kMinimum<F> ? 2 : 0][32];
  };
  struct Factors {  // of 16 columns
    f32x16 scale[kSums], minimum[kMinimum<F> ? kSums : 0];
    VEC_INLINE Factors(const Numbers& numbers, int column) {
      GEMM_UNROLL for (int i = 0; i < kSums; i++) {
        scale[i] = load(numbers.scale[i] + column);
        if constexpr (kMinimum<F>) minimum[i] = load(numbers.minimum[i] + column);
      }
      if constexpr (F == F8) scale[0] = as_f32(as_i32(scale[0]) | as_i32(load(numbers.scale[1] + column)));  // any NaN
    }
  };

  // A quarter of both runs, of which the first group is `group`: 16 columns of a group, where there are two
  template <int kQuarter>
  static VEC_INLINE void decode(const Weight& w, const uint8_t* task, int group, Lines& lines, Numbers& numbers,
                                bool fetch) {
    if constexpr (kGroupsOfBoth == 2)
      decode_columns(w, task, group + kQuarter / 2, kQuarter / 2, kQuarter % 2, lines, numbers, fetch);
    else if constexpr (kQuarter % 2 == 0) decode_columns(w, task, group, 0, kQuarter / 2, lines, numbers, fetch);
  }

 private:
  GEMM_TILE static void decode_columns(const Weight& w, const uint8_t* task, int group, int run, int panel,
                                       Lines& lines, Numbers& numbers, bool fetch) {
    constexpr int kBytes = (unit_bytes(F) + kGroups<F> - 1) / kGroups<F>;
    const uint8_t* unit = unit_of<F>(task, group);
    const int at = group % kGroups<F>;
    if (fetch && panel == 0) fetch_ahead<2>(task, w.panel_bytes, (size_t)(unit - task + at * kBytes), kBytes);
    unit += panel * w.panel_bytes;
    const auto n = numbers_of_group<F>(unit, at, 0);
    for (int i = 0; i < kRuns<F>; i++) {
      store(numbers.scale[run + i] + panel * 16, n.scale[i] * set1(1.f / (float)(1 << kPlace<F>)));
      if constexpr (kMinimum<F>) store(numbers.minimum[run + i] + panel * 16, n.minimum[i]);
    }
    uint8_t* line = lines.of[run] + panel * 64;
    GEMM_UNROLL for (int j = 0; j < 8; j++) {
      i32v quad;
      if constexpr (kNibbles<F>) quad = quad_of_plane<4>(unit + at * 256, 0, j, 0);
      else if constexpr (kLookedUp<F>) quad = quad_of<F>(unit, at, 0, j);
      else quad = prepared<F>(quad_of<F>(unit, at, 0, j));
      i32v pairs[2];
      if constexpr (kLookedUp<F>) pairs[0] = looked_up(quad, 0), pairs[1] = looked_up(quad, 1);
      else if constexpr (kPlace<F> != 0)
        pairs[0] = exact_pair(number_at_place<F, 0>(quad, n.zero), number_at_place<F, 1>(quad, n.zero)),
        pairs[1] = exact_pair(number_at_place<F, 2>(quad, n.zero), number_at_place<F, 3>(quad, n.zero));
      else
        pairs[0] = exact_pair(value_of<F>(quad, 0, n.zero), value_of<F>(quad, 1, n.zero)),
        pairs[1] = exact_pair(value_of<F>(quad, 2, n.zero), value_of<F>(quad, 3, n.zero));
      store_line(line, pairs[0]), store_line(line + Bf16Lines::kBytes, pairs[1]);
      line += 2 * Bf16Lines::kBytes;
    }
  }
  static VEC_INLINE i32v looked_up(i32v codes, int i) {
    alignas(64) static constexpr auto kValues = [] {
      struct {
        uint16_t of[32];
      } table{};
      for (int q = 0; q <= (kNibbles<F> ? 15 : kLargest<F>); q++)
        table.of[q] = (uint16_t)(__builtin_bit_cast(uint32_t, (float)nibble_value<F>(q)) >> 16);
      return table;
    }();
    return bf16_pairs_u4(codes, i, kValues.of);
  }
};

// Dots of both runs, of up to 16 rows of tiles
template <Format F> struct TileDots {
  using Runs = TileRuns<F>;
  alignas(64) float of[Runs::kSums][2][kTileLanes][16];                  // [sum][16 columns][row]
  alignas(64) float half_sums[Runs::kHalfSums ? 2 : 0][kTileLanes][16];  // of activations, in all columns

  // Tiles: 0 to 3 dots, 4 and 5 sums of activations, 6 activations, 7 weights
  static void shape(int rows) {
    TileShapes shapes;
    for (int i = 0; i < 6; i++) shapes.set(i, rows, 64);
    shapes.set(6, rows, Runs::kDepth * 2).set(7, Runs::kDepth / 2, 64);
    tiles_begin(shapes);
  }
  template <int C> static VEC_INLINE void clear() {
    tile_zero<2 * C>(), tile_zero<2 * C + 1>();
    if constexpr (Runs::kHalfSums) tile_zero<4 + C>();
  }
  // Tile 2 C, or 2 C + 1, += x times 16 columns of a run: the first, then the second
  template <int C> static VEC_INLINE void first(const uint16_t* x, int64_t stride, const uint8_t* lines) {
    tile_load<6>(x, stride), tile_load<7>(lines, Bf16Lines::kBytes);
    tile_dot_bf16<2 * C, 6, 7>();
  }
  template <int C> static VEC_INLINE void second(const uint8_t* lines) {
    tile_load<7>(lines + 64, Bf16Lines::kBytes);
    tile_dot_bf16<2 * C + 1, 6, 7>();
    if constexpr (Runs::kHalfSums) {
      alignas(64) static constexpr auto kOnes = [] {
        struct {
          uint16_t of[32];
        } table{};
        for (uint16_t& one : table.of) one = 0x3f80;
        return table;
      }();
      tile_load<7>(kOnes.of, 0);
      tile_dot_bf16<4 + C, 6, 7>();
    }
  }
  template <int C> VEC_INLINE void take(int sum) {
    tile_store<2 * C>(of[sum][0], 64), tile_store<2 * C + 1>(of[sum][1], 64);
    if constexpr (Runs::kHalfSums) tile_store<4 + C>(half_sums[sum], 64);
  }
  // y + dots in 16 columns of a row of tiles; t: sums of its activations over a group, the next `stride` behind
  VEC_INLINE f32x16 add(f32x16 y, const typename Runs::Factors& factors, int row, int half, const float* t,
                        int64_t stride) const {
    GEMM_UNROLL for (int i = 0; i < Runs::kSums; i++) {
      y = fma(load(of[i][half][row]), factors.scale[i], y);
      if constexpr (Runs::kHalfSums) y = fma(factors.minimum[i], load(half_sums[i][row]), y);
      else if constexpr (kMinimum<F>) y = fma(factors.minimum[i], set1(t[i * stride]), y);
    }
    return y;
  }
};

template <Format F> struct ProductTilesGroups {
  using Runs = TileRuns<F>;
  using Dots = TileDots<F>;
  using Numbers = typename Runs::Numbers;
  static constexpr int kRows = 64;                         // 8 KB of results
  static constexpr int kFew = kTileLanes / 2, kSlots = 8;  // most of them

  // A tile takes as long for one row as for 16, and to store as well. So a few rows lie in it several times, each time with
  // the activations of other runs and else zeros: the dots of these runs are rows of one sum.
  static void few(const Weight& w, const Activation& x, const uint8_t* task, int row, int n, float* y) {
    const int slots = kTileLanes / n < kSlots ? kTileLanes / n : kSlots, groups = x.k_pad / 32;
    typename Runs::Lines lines[2];
    Numbers numbers[2][kSlots];
    struct {
      alignas(64) uint16_t of[2 * kTileLanes][32];
    } rows[2][Runs::kGroupsOfBoth] = {};
    Dots dots;
    auto decode = [&]<int kQuarter>(int g, int turn, Numbers& to) __attribute__((always_inline)) {
      constexpr int kGroup = kQuarter / 2;
      if (g >= groups) return;
      Runs::template decode<kQuarter>(w, task, g, lines[turn], to, row == 0);
      if constexpr (kQuarter % 2 == 0 && kGroup < Runs::kGroupsOfBoth)
        for (int r = 0; r < n; r++)
          store_line(rows[turn][kGroup].of[kTileLanes + r], load_line(x.h + (row + r) * x.ld + (g + kGroup) * 32));
    };
    Dots::shape(slots * n);
    decode.template operator()<0>(0, 0, numbers[0][0]), decode.template operator()<1>(0, 0, numbers[0][0]);
    decode.template operator()<2>(0, 0, numbers[0][0]), decode.template operator()<3>(0, 0, numbers[0][0]);
    for (int g = 0, turn = 0, set = 0; g < groups; set ^= 1) {
      const int first = g;
      Dots::template clear<0>(), Dots::template clear<1>();
      int slot = 0;
      while (slot < slots && g < groups) {
        constexpr int kSecond = Runs::kSums - 1;
        const int top = kTileLanes - slot++ * n;
        const uint16_t* x0 = rows[turn][0].of[top];
        const uint16_t* x1 = kRuns<F> == 2 ? x0 + 16 : rows[turn][Runs::kGroupsOfBoth - 1].of[top];
        const auto& of = lines[turn].of;
        Numbers& next = slot < slots ? numbers[set][slot] : numbers[set ^ 1][0];
        g += Runs::kGroupsOfBoth, turn ^= 1;
        decode.template operator()<0>(g, turn, next);
        Dots::template first<0>(x0, 64, of[0]);
        decode.template operator()<1>(g, turn, next);
        Dots::template second<0>(of[0]);
        decode.template operator()<2>(g, turn, next);
        Dots::template first<kSecond>(x1, 64, of[1]);
        decode.template operator()<3>(g, turn, next);
        Dots::template second<kSecond>(of[1]);
      }
      dots.template take<0>(0);
      if constexpr (!Runs::kOneScale) dots.template take<1>(1);
      for (int r = 0; r < n; r++) GEMM_UNROLL for (int half = 0; half < 2; half++) {
          float* to = y + r * 32 + half * 16;
          f32x16 sum = load(to);
          for (int i = 0; i < slot; i++) {
            const float* t = x.t + (first + i * Runs::kGroupsOfBoth) * x.stride + row + r;
            sum = dots.add(sum, {numbers[set][i], half * 16}, i * n + r, half, t, x.stride);
          }
          store(to, sum);
        }
    }
  }

  // Tiles do not wait for what is being decoded, nor does anything wait for them: groups are decoded ahead, dots are stored
  // after those of the next run, and scaled after those of the next tile.
  static void many(const Weight& w, const Activation& x, const uint8_t* task, int row, int n, float* y) {
    const int tiles = (n + kTileLanes - 1) / kTileLanes, rows = (n + tiles - 1) / tiles, groups = x.k_pad / 32;
    typename Runs::Lines lines[2];
    Numbers numbers[3];
    Dots dots[2];
    struct {
      int group = 0, done = 0;
      const Numbers* numbers = nullptr;
    } last;
    // All tiles have as many rows: the last has some again.
    auto first_row = [&](int done) { return done + rows <= n ? done : n - rows; };
    auto add_last = [&](const Dots& of) __attribute__((always_inline)) {
      const int first = first_row(last.done);
      GEMM_UNROLL for (int half = 0; half < 2; half++) {
        const typename Runs::Factors factors(*last.numbers, half * 16);
        for (int r = last.done; r < first + rows; r++) {
          float* to = y + r * 32 + half * 16;
          const float* t = x.t + last.group * x.stride + row + r;
          store(to, of.add(load(to), factors, r - first, half, t, x.stride));
        }
      }
    };
    constexpr bool kTurns = Runs::kOneScale;  // the tiles of sums, of which there is a pair then
    auto take_last = [&]<int T>() __attribute__((always_inline)) {
      if (last.numbers) dots[1 - T].template take<kTurns ? 1 - T : 1>(Runs::kSums - 1);
    };
    auto tile = [&]<int T>(int g, int done, const auto& of, auto decode) __attribute__((always_inline)) {
      constexpr int kFirst = kTurns ? T : 0, kSecond = kTurns ? T : 1;
      const uint16_t* h = x.h + (row + first_row(done)) * x.ld + g * 32;
      decode.template operator()<0>();
      Dots::template clear<kFirst>();
      Dots::template first<kFirst>(h, x.ld * 2, of.of[0]);
      decode.template operator()<1>();
      Dots::template second<kFirst>(of.of[0]);
      take_last.template operator()<T>();
      decode.template operator()<2>();
      if (!kTurns) Dots::template clear<kSecond>();
      Dots::template first<kSecond>(h + Runs::kDepth, x.ld * 2, of.of[1]);
      decode.template operator()<3>();
      Dots::template second<kSecond>(of.of[1]);
      if (!kTurns) dots[T].template take<0>(0);
      if (last.numbers) add_last(dots[1 - T]);
    };
    Dots::shape(rows);
    int turn = 0;
    for (int g = -Runs::kGroupsOfBoth, at = 2, at_lines = 1; g < groups; g += Runs::kGroupsOfBoth, at_lines ^= 1) {
      const int next = at == 2 ? 0 : at + 1, next_group = g + Runs::kGroupsOfBoth;
      int done = 0;
      auto decode = [&]<int kQuarter>() __attribute__((always_inline)) {
        if (done == 0 && next_group < groups)
          Runs::template decode<kQuarter>(w, task, next_group, lines[at_lines ^ 1], numbers[next], row == 0);
      };
      if (g < 0) {  // nothing to multiply yet
        decode.template operator()<0>(), decode.template operator()<1>();
        decode.template operator()<2>(), decode.template operator()<3>();
        at = next;
        continue;
      }
      for (; done < n; done += rows, turn ^= 1) {
        if (turn) tile.template operator()<1>(g, done, lines[at_lines], decode);
        else tile.template operator()<0>(g, done, lines[at_lines], decode);
        last = {g, done, &numbers[at]};
      }
      at = next;
    }
    if (turn) take_last.template operator()<1>();
    else take_last.template operator()<0>();
    add_last(dots[1 - turn]);
  }

  static void run(const Weight& w, const Activation& x, int task, int row, int n, float* y) {
    clear(y, n);
    (n <= kFew ? few : many)(w, x, task_data(w, task), row, n, y);
    tiles_end();
    // A sum that the processor flushed to -0 is +0 where rows with other runs beside it (`few`) were added as 0.
    for (int i = 0; i < 2 * n; i++) store(y + 16 * i, load(y + 16 * i) + zero());
  }
};

template <Format... F> static void put_groups(Kernels& table) {
  ((table.gemm[(int)F][(int)Act::BF16] = gemm<ProductTilesGroups<F>>), ...);
}

}  // namespace octavo::VEC_NS
