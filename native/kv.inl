// Rotary embedding, and writing keys and values into their blocks (layout: KvLayer in kernels.h).
namespace octavo::VEC_NS {

// n <= 16 pairs (x0, x1) at angles whose cosine and sine are given.
VEC_INLINE void rotate(f32x16 x0, f32x16 x1, f32x16 c, f32x16 s, f32x16& y0, f32x16& y1) {
  y0 = fma(x0, c, -(x1 * s));
  y1 = fma(x1, c, x0 * s);
}

VEC_INLINE void rope_head_neox(const float* x, float* y, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i += 16) {
    const int n = half - i < 16 ? half - i : 16;
    f32x16 y0, y1;
    rotate(load_n(x + i, n), load_n(x + half + i, n), load_n(cos + i, n), load_n(sin + i, n), y0, y1);
    store_n(y + i, y0, n);
    store_n(y + half + i, y1, n);
  }
}

VEC_INLINE void rope_head_interleaved(const float* x, float* y, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i += 16) {
    const int n = half - i < 16 ? half - i : 16, na = n < 8 ? 2 * n : 16, nb = 2 * n - na;
    f32x16 a = load_n(x + 2 * i, na), b = load_n(x + 2 * i + na, nb), y0, y1;
    rotate(even(a, b), odd(a, b), load_n(cos + i, n), load_n(sin + i, n), y0, y1);
    store_n(y + 2 * i, zip_lo(y0, y1), na);
    store_n(y + 2 * i + na, zip_hi(y0, y1), nb);
  }
}

static void rope(const RopeArgs& a, int row0, int row1, int head0, int head1) {
  const int half = a.rot / 2;
  for (int r = row0; r < row1; r++) {
    const float *cos = a.cos + (int64_t)r * half, *sin = a.sin + (int64_t)r * half;
    for (int h = head0; h < head1; h++) {
      const float* x = a.x + r * a.ldx + h * a.head_dim;
      float* y = a.out + r * a.ld_out + h * a.head_dim;
      if (a.neox) rope_head_neox(x, y, cos, sin, half);
      else rope_head_interleaved(x, y, cos, sin, half);
      if (x == y) continue;
      for (int i = 2 * half; i < a.head_dim; i++) y[i] = x[i];
    }
  }
}

VEC_INLINE uint8_t* kv_block(const KvLayer& kv, int head, int block) {
  return kv.base + head * kv.head_stride + block * kv.block_stride;
}

// Word d of a key at slot t of a panel is word d * 16 + t.
VEC_INLINE void scatter_words(uint32_t* panel, i32x16 words, int count) {
  alignas(64) int32_t w[16];
  store(w, words);
  for (int i = 0; i < count; i++) panel[i * kBlock] = (uint32_t)w[i];
}

// v[j] lane i: what was v[i] lane j
template <int S = 8> VEC_INLINE void transpose(i32x16 (&v)[16]) {
  GEMM_UNROLL for (int i = 0; i < 16; i++) if (!(i & S)) {
    const i32x16 a = v[i], b = v[i + S];
    v[i] = lower<S>(a, b), v[i + S] = upper<S>(a, b);
  }
  if constexpr (S > 1) transpose<S / 2>(v);
}

// So many keys are written token by token; more are turned, where the registers hold them, so that stores are of lines.
constexpr int kFewKeys = kParts == 1 ? 3 : kBlock;

// The first `count` of the words(i) of key i, n keys at successive slots from that of `panel` on.
template <class F> VEC_INLINE void put_words(uint32_t* panel, int n, int count, F words) {
  if (n <= kFewKeys) {
    for (int i = 0; i < n; i++) scatter_words(panel + i, words(i), count);
    return;
  }
  i32x16 v[16];
  GEMM_UNROLL for (int i = 0; i < 16; i++) v[i] = words(i < n ? i : 0);
  transpose(v);
  GEMM_UNROLL for (int i = 0; i < 16; i++) if (i < count) store_n((float*)(panel + i * kBlock), as_f32(v[i]), n);
}

// Rows from `row` on whose tokens are at successive slots of one block
VEC_INLINE int run_of(const KvWriteArgs& a, int row, int row1) {
  int n = 1;
  while (row + n < row1 && (a.positions[row] + n) % kBlock && a.slots[row + n] == a.slots[row] &&
         a.positions[row + n] == a.positions[row] + n)
    n++;
  return n;
}

// From these bits on a magnitude is infinite, or NaN, in the type that it is rounded to.
constexpr int32_t kEndF32 = 0x7f800000, kEndBf16 = 0x7f7f8000;

// Whether all of a head's values are numbers. Otherwise zeros are written for them and the key is NaN: who sees the token
// gets NaN by its score; whom it is hidden from multiplies the values by 0, which must give 0.
VEC_INLINE bool all_finite(const float* x, int dim, int32_t end) {
  i32x16 most = set1_i32(0);
  for (int d = 0; d < dim; d += 16) most = max(most, as_i32(abs(load(x + d))));
  return reduce_max(most) < end;
}
static void nan_key(uint32_t* panel, int words, uint32_t nan) {
  for (int i = 0; i < words; i++) panel[i * kBlock] = nan;
}

static void kv_write_bf16(const KvWriteArgs& a, int row0, int row1, int head0, int head1) {
  const int dim = a.kv.head_dim, value_dim = a.kv.value_dim;
  auto is_pair = [&a](int even_row) {  // the two tokens of a V word are rows even_row, even_row + 1
    return even_row >= 0 && even_row + 1 < a.tokens && a.slots[even_row] == a.slots[even_row + 1] &&
           a.positions[even_row] % 2 == 0 && a.positions[even_row + 1] == a.positions[even_row] + 1;
  };
  for (int r = row0, n; r < row1; r += n) {
    n = run_of(a, r, row1);
    for (int h = head0; h < head1; h++) {
      uint32_t* keys = (uint32_t*)kv_block(a.kv, h, a.slots[r]) + a.positions[r] % kBlock;
      for (int d = 0; d < dim; d += 32) {  // 16 words; dim is a multiple of 16
        const float* k = a.k + r * a.ldk + h * dim + d;
        const int count = dim - d < 32 ? 8 : 16;
        put_words(keys + d / 2 * kBlock, n, count, [=, &a](int i) __attribute__((always_inline)) {
          const f32x16 lo = load(k + i * a.ldk), hi = load_n(k + i * a.ldk + 16, count == 16 ? 16 : 0);
          return bf16_pairs(even(lo, hi), odd(lo, hi));
        });
      }
    }
  }
  for (int r = row0; r < row1; r++) {
    const int slot = a.positions[r] % kBlock;
    const bool odd_slot = slot % 2, written_before = odd_slot && is_pair(r - 1), both_now = !odd_slot && is_pair(r);
    for (int h = head0; h < head1; h++) {
      uint8_t* block = kv_block(a.kv, h, a.slots[r]);
      const float* v = a.v + r * a.ldv + h * value_dim;
      const bool finite = all_finite(v, value_dim, kEndBf16);
      if (!finite) nan_key((uint32_t*)block + slot, dim / 2, 0x7fc07fc0);
      if (written_before) continue;
      const bool next = both_now && all_finite(v + a.ldv, value_dim, kEndBf16);
      int32_t* values = (int32_t*)(block + dim * kBlock * 2) + slot / 2 * value_dim;
      for (int d = 0; d < value_dim; d += 16) {
        const f32x16 own = finite ? load(v + d) : zero();
        if (odd_slot) store(values + d, (load(values + d) & 0xffff) | bf16_pairs(zero(), own));
        else store(values + d, bf16_pairs(own, next ? load(v + a.ldv + d) : zero()));
      }
    }
  }
}

static void kv_write_f32(const KvWriteArgs& a, int row0, int row1, int head0, int head1) {
  const int dim = a.kv.head_dim, value_dim = a.kv.value_dim;
  for (int r = row0; r < row1; r++) {
    const int slot = a.positions[r] % kBlock;
    for (int h = head0; h < head1; h++) {
      uint8_t* block = kv_block(a.kv, h, a.slots[r]);
      const float *k = a.k + r * a.ldk + h * dim, *v = a.v + r * a.ldv + h * value_dim;
      float* values = (float*)block + dim * kBlock + slot * value_dim;
      uint32_t* keys = (uint32_t*)block + slot;
      for (int d = 0; d < dim; d += 16) scatter_words(keys + d * kBlock, as_i32(load(k + d)), 16);
      const bool finite = all_finite(v, value_dim, kEndF32);
      if (!finite) nan_key(keys, dim, 0x7fc00000);
      for (int d = 0; d < value_dim; d += 16) store(values + d, finite ? load(v + d) : zero());
    }
  }
}

// dim numbers as int8: scale = max|x| / 127, q = x * (127 / max|x|) to nearest even. Where max|x| < 2^-100 all q are 0.
VEC_INLINE float quantise_head(const float* x, int dim, int8_t* q) {
  i32x16 most = set1_i32(0);
  for (int d = 0; d < dim; d += 16) most = max(most, as_i32(abs(load(x + d))));
  const float m = __builtin_bit_cast(float, reduce_max(most));
  const bool finite = m < __builtin_inff();  // NaN or infinity goes into the scale; there is no such integer
  const f32x16 inverse = set1(m >= 0x1p-100f ? 127.f / m : 0.f);
  for (int d = 0; d < dim; d += 16) store_i8(q + d, to_i32(finite ? load(x + d) * inverse : zero()));
  return finite ? m / 127.f : __builtin_nanf("");
}

// Element i of a word lies in its byte kWordOrder[i].
constexpr int kWordOrder[4] = {0, 2, 1, 3};

static void kv_write_i8(const KvWriteArgs& a, int row0, int row1, int head0, int head1) {
  const int dim = a.kv.head_dim;
  int8_t q[kMaxHeadDimI8];
  for (int r = row0; r < row1; r++) {
    const int slot = a.positions[r] % kBlock;
    for (int h = head0; h < head1; h++) {
      uint8_t* block = kv_block(a.kv, h, a.slots[r]);
      int8_t* keys = (int8_t*)block + slot * 4;
      int8_t* values = (int8_t*)block + dim * kBlock + slot / 4 * dim * 4 + kWordOrder[slot % 4];
      float* scales = (float*)(block + 2 * dim * kBlock);
      scales[slot] = quantise_head(a.k + r * a.ldk + h * dim, dim, q);
      for (int d = 0; d < dim; d++) keys[d / 4 * 64 + kWordOrder[d % 4]] = q[d];
      scales[kBlock + slot] = quantise_head(a.v + r * a.ldv + h * dim, dim, q);
      for (int d = 0; d < dim; d++) values[d * 4] = q[d];
    }
  }
}

}  // namespace octavo::VEC_NS
