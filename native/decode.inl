// Packed weights and rounded activations back to float32: the strict modes' products and the embedding.
namespace octavo::VEC_NS {

constexpr int kPrefetch = 8192;  // bytes ahead in the weight stream; 4 to 8 KB measured best from DRAM
// `at`: where in a panel one is. Behind each of two that are read side by side comes the same one of the next task.
template <int kPanels> VEC_INLINE void fetch_ahead(const uint8_t* panels, size_t panel_bytes, size_t at, int bytes) {
  at += kPrefetch / kPanels;
  if (kPanels == 2 && at >= panel_bytes) at += panel_bytes;
  for (int i = 0; i < bytes; i += 64)
    for (int panel = 0; panel < kPanels; panel++) prefetch(panels + panel * panel_bytes + at + i);
}

// 64 K x 32 columns of a task: out[64][32]
template <Format F> static void decode_unit(const uint8_t* task, size_t panel_bytes, int unit, float* out, bool fetch) {
  constexpr int kBytes = 64 * unit_bytes(F) / info_of(F).unit;
  if (fetch) fetch_ahead<kTaskCols / panel_cols(F)>(task, panel_bytes, unit * kBytes, kBytes);
  if constexpr (F == Format::F32) {
    memcpy(out, task + unit * unit_bytes(F), unit_bytes(F));
  } else if constexpr (F == Format::F16) {
    const uint16_t* w = (const uint16_t*)(task + unit * unit_bytes(F));
    for (int i = 0; i < 64 * 32; i += 16) store(out + i, load_f16(w + i));
  } else if constexpr (F == Format::BF16) {
    const uint8_t* w = task + unit * unit_bytes(F);
    for (int line = 0; line < 64; line++) {  // lines 2p and 2p + 1 hold K pair p
      const u32x16 pair = as_u32(load_line(w + line * 64));
      float* o = out + line / 2 * 64 + line % 2 * 16;
      store(o, as_f32(pair << 16));
      store(o + 32, as_f32(pair & 0xffff0000u));
    }
  } else {
    for (int panel = 0; panel < 2; panel++)
      for (int g = 0; g < 2; g++)
        decode_group<F>(task + panel * panel_bytes, 2 * unit + g, out + g * 32 * 32 + panel * 16, 32);
  }
}

// Columns [k0, k0 + 64) of rows [row, row + n): out[n][64]
template <Act A> static void decode_rows(const Activation& x, int row, int n, int k0, float* out) {
  for (int r = row; r < row + n; r++, out += 64)
    if constexpr (A == Act::BF16) {
      const uint16_t* h = x.h + r * x.ld + k0;
      for (int c = 0; c < 64; c += 32) prefetch(h + 64 + c);  // the rows are not read one after the other
      for (int c = 0; c < 64; c += 16) store(out + c, load_bf16(h + c));
    } else {
      for (int c = 0; c < 64; c++) {
        const int64_t i = (k0 + c) / 32 * x.stride + r * int8_rows(A);
        if constexpr (A == Act::A8) out[c] = x.s[i] * (float)x.q[i * 32 + c % 32];
        else out[c] = x.s[i + 1] * (float)(x.q[i * 32 + c % 32] * 128 + x.q[(i + 1) * 32 + c % 32]);
      }
    }
}

// Rows ids[row] of a weight, float32
template <Format F> static void embed(const Weight& w, const int32_t* ids, float* y, int64_t ldy, int row0, int row1) {
  constexpr int kCols = panel_cols(F);
  for (int row = row0; row < row1; row++) {
    const uint8_t* panel = w.data + ids[row] / kCols * w.panel_bytes;
    const int col = ids[row] % kCols;
    float* out = y + row * ldy;
    if constexpr (F == Format::F32) {
      for (int k = 0; k < w.k; k++) out[k] = ((const float*)panel)[k * 32 + col];
    } else if constexpr (F == Format::F16 || F == Format::BF16) {
      for (int k0 = 0; k0 < w.k; k0 += 16) {
        uint16_t h[16] = {};
        for (int k = k0; k < k0 + 16 && k < w.k; k++)
          h[k - k0] = ((const uint16_t*)panel)[F == Format::F16 ? k * 32 + col : (k / 2 * 32 + col) * 2 + k % 2];
        store_n(out + k0, F == Format::F16 ? load_f16(h) : load_bf16(h), w.k - k0 < 16 ? w.k - k0 : 16);
      }
    } else {
      const float factor = w.factor ? w.factor[ids[row]] : 1;
      float group[32 * 16];
      for (int k0 = 0; k0 < w.k; k0 += 32) {
        decode_group<F>(panel, k0 / 32, group, 16);
        for (int k = k0; k < k0 + 32 && k < w.k; k++) out[k] = group[(k - k0) * 16 + col] * factor;
      }
    }
  }
}

}  // namespace octavo::VEC_NS
