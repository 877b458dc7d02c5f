// What attention does differently for each KV type (layouts: KvLayer in kernels.h).
//
// Keys and values are read as lines of 16 lanes of 32 bits: 16 tokens of a key panel, 16 dimensions of a value panel. A
// lane holds kPer elements that meet as many of the other operand, queries or probabilities, in kWords words.
namespace octavo::VEC_NS {

struct Bf16Kv {
  using Element = uint16_t;  // of queries and probabilities
  using Sum = f32x16;
  static constexpr int kPer = 2, kWords = 1;
  static constexpr bool kScaled = false;
  static VEC_INLINE Sum none() { return zero(); }
  static VEC_INLINE Sum dot(Sum acc, i32x16 line, const uint32_t* word) { return dot2_bf16(acc, line, *word); }
  static VEC_INLINE void put(Element* p, f32x16 v) { store_bf16(p, v); }
};

struct F32Kv {
  using Element = float;
  using Sum = f32x16;
  static constexpr int kPer = 1, kWords = 1;
  static constexpr bool kScaled = false;
  static VEC_INLINE Sum none() { return zero(); }
  static VEC_INLINE Sum dot(Sum acc, i32x16 line, const uint32_t* word) {
    return fma(as_f32(line), set1(__builtin_bit_cast(float, *word)), acc);
  }
  static VEC_INLINE void put(Element* p, f32x16 v) { store(p, v); }
};

// int8 keys and values meet queries and probabilities in 16-bit fixed point, with one scale a row (and tile of tokens):
// the products are exact, and 256 of them (127 * 32767 each) fit 32 bits. The scale of a value goes into its probability.
struct I8Kv {
  using Element = int16_t;
  using Sum = i32x16;
  static constexpr int kPer = 4, kWords = 2;
  static constexpr bool kScaled = true;
  static VEC_INLINE Sum none() { return set1_i32(0); }
  static VEC_INLINE Sum dot(Sum acc, i32x16 line, const uint32_t* word) {
    return dot2_s16(dot2_s16(acc, even_s8(line), word[0]), odd_s8(line), word[1]);
  }
  static VEC_INLINE void put(Element* p, f32x16 v) { store_i16(p, to_i32(v)); }
  static VEC_INLINE const float* key_scales(const uint8_t* block, int dim) { return (const float*)(block + 32 * dim); }
  static VEC_INLINE const float* value_scales(const uint8_t* block, int dim) { return key_scales(block, dim) + kBlock; }
};

constexpr float kFixedMost = 32767;

// The greater of magnitudes x >= 0; as integers they keep their order, and a NaN is the greatest.
VEC_INLINE i32x16 greater_magnitude(i32x16 most, f32x16 x) { return max(most, as_i32(x)); }

// What numbers of at most `most` are multiplied with to become fixed point; their step is most / kFixedMost. Where there
// is no such step (NaN, infinity) the step says so.
VEC_INLINE float fixed_from(float most) { return most >= 0x1p-100f && most < __builtin_inff() ? kFixedMost / most : 0; }

// R rows of queries, 16 at a time from load(r, d), as the operand of dot; the step of each where it is fixed point.
template <class Kv, int R, class Load>
VEC_INLINE void put_queries(int dim, Load from, typename Kv::Element* to, int stride, float* step) {
  for (int r = 0; r < R; r++) {
    float factor = 1;
    if constexpr (Kv::kScaled) {
      i32x16 most = set1_i32(0);
      for (int d = 0; d < dim; d += 16) most = greater_magnitude(most, abs(from(r, d)));
      const float m = __builtin_bit_cast(float, reduce_max(most));
      factor = fixed_from(m);
      step[r] = m / kFixedMost;
    }
    for (int d = 0; d < dim; d += 16) {
      const f32x16 x = from(r, d);
      Kv::put(to + r * stride + d, Kv::kScaled ? x * set1(factor) : x);
    }
  }
}

}  // namespace octavo::VEC_NS
