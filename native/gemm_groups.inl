// Integer weights x BF16 activations, exact in both operands: a group of 32 K is decoded in L1 to integers less their
// zero point, which bf16 holds exactly, multiplied by bf16 dots, and its float32 sum is scaled once. Included after gemm.inl.
namespace octavo::VEC_NS {

struct DecodedGroup {                      // 32 K x 32 columns
  alignas(64) uint8_t lines[2 * 16 * 64];  // [K pair][32 columns][2] bf16
  alignas(64) float scale[32], minimum[32];
};

template <Format F>
VEC_INLINE void decode_group(const uint8_t* task, size_t panel_bytes, int group, DecodedGroup& out) {
  constexpr int kLines = F == Format::W8 ? 8 : 4, kZero = kZeroPoint[(int)F];
  alignas(64) static const uint16_t kIntegers[32] = {
#define BF16_OF(i) (uint16_t)(__builtin_bit_cast(uint32_t, (float)((i) - kZero)) >> 16)
      BF16_OF(0), BF16_OF(1), BF16_OF(2),  BF16_OF(3),  BF16_OF(4),  BF16_OF(5),  BF16_OF(6),  BF16_OF(7),
      BF16_OF(8), BF16_OF(9), BF16_OF(10), BF16_OF(11), BF16_OF(12), BF16_OF(13), BF16_OF(14), BF16_OF(15),
#undef BF16_OF
  };
  for (int panel = 0; panel < 2; panel++) {
    const uint8_t* unit = task + panel * panel_bytes + group / 2 * unit_bytes(F);
    const uint16_t* scales = (const uint16_t*)(unit + 128 * kLines + group % 2 * 32);
    store(out.scale + panel * 16, load_f16(scales));
    if constexpr (F == Format::W4F) store(out.minimum + panel * 16, load_f16(scales + 32));
    uint8_t* line = out.lines + panel * 64;
    GEMM_UNROLL for (int quad = 0; quad < 8; quad++) {
      i32x16 v = load_line(unit + (group % 2 * kLines + quad % kLines) * 64);
      if constexpr (F != Format::W8) v = quad < 4 ? nibble_lo(v) : nibble_hi(v);
      GEMM_UNROLL for (int i = 0; i < 2; i++, line += 128) {
        if constexpr (F != Format::W8) {
          store_line(line, bf16_pairs_u4(v, i, kIntegers));
        } else {
          const i32x16 low = (as_i32(as_u32(v) >> (16 * i)) & 255) - kZero;
          const i32x16 high = (as_i32(as_u32(v) >> (16 * i + 8)) & 255) - kZero;
          store_line(line, as_i32(as_u32(to_f32(low)) >> 16 | as_u32(to_f32(high))));
        }
      }
    }
  }
}

// y[r * 32 ..] += one group of rows [row, row + MR): x at the group's first column, t the sums of the group's columns
template <Format F, int MR>
GEMM_TILE static void tile_group(const DecodedGroup& w, const uint16_t* x, int64_t ld, const float* t, float* y) {
  constexpr int V = kVectors<MR>;
  const uint16_t* base[(MR + 2) / 3];
  GEMM_UNROLL for (int i = 0; i < (MR + 2) / 3; i++) base[i] = x + 3 * i * ld;
  for (int c = 0; c < 2; c += V) {
    f32x16 dot[MR][V];
    GEMM_UNROLL for (int r = 0; r < MR; r++) GEMM_UNROLL for (int v = 0; v < V; v++) dot[r][v] = zero();
    for (int p = 0; p < 16; p++) {
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
      const f32x16 scale = load(w.scale + at);
      GEMM_UNROLL for (int r = 0; r < MR; r++) {
        f32x16 sum = fma(dot[r][v], scale, load(y + r * 32 + at));
        if constexpr (F == Format::W4F) sum = fma(load(w.minimum + at), set1(t[r]), sum);
        store(y + r * 32 + at, sum);
      }
    }
  }
}

template <Format F, int MR = kMaxRowsFloat>
VEC_INLINE void add_group(const DecodedGroup& w, const uint16_t* x, int64_t ld, const float* t, int n, float* y) {
  if constexpr (MR > 1)
    if (n < MR) return add_group<F, MR - 1>(w, x, ld, t, n, y);
  tile_group<F, MR>(w, x, ld, t, y);
}

template <Format F> struct ProductGroups {
  static constexpr int kRows = 48;  // a group is decoded once for so many rows: 6 KB of results
  static void run(const Weight& w, const Activation& x, int task, int row, int n, float* y) {
    DecodedGroup group;
    const uint8_t* data = task_data(w, task);
    clear(y, n);
    for (int g = 0; g < x.k_pad / 32; g++) {
      if (row == 0 && g % 2 == 0)
        for (int panel = 0; panel < 2; panel++)
          for (int i = 0; i < unit_bytes(F); i += 64)
            prefetch(data + panel * w.panel_bytes + g / 2 * unit_bytes(F) + kPrefetch / 2 + i);
      decode_group<F>(data, w.panel_bytes, g, group);
      for (int r = 0; r < n; r += kMaxRowsFloat) {
        const int rows = n - r < kMaxRowsFloat ? n - r : kMaxRowsFloat;
        const float* t = x.t + (int64_t)g * x.rows + row + r;
        add_group<F>(group, x.h + (row + r) * x.ld + g * 32, x.ld, t, rows, y + r * 32);
      }
    }
  }
};

}  // namespace octavo::VEC_NS
