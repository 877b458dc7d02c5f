// What attention does differently for each KV type (layouts: KvLayer in kernels.h).
//
// Keys and values are read as lines of 16 lanes of 32 bits: 16 tokens of a key panel, 16 dimensions of a value panel. A
// lane holds kPer elements that meet as many of the other operand, queries or probabilities, in kWords words.
namespace octavo::VEC_NS {

template <bool kDots> struct Bf16KvOf {  // pairs are widened: the same products, added in the same order
  using Element = float;                 // of queries and probabilities, rounded to bf16
  using Sum = f32x16;
  static constexpr int kPer = 2, kWords = 2;
  static constexpr bool kScaled = false;
  static VEC_INLINE Sum none() { return zero(); }
  template <int W> static VEC_INLINE f32x16 line(const uint8_t* p) {
    if constexpr (W == 0) return as_f32(load_line(p) << 16);
    else return upper_bf16(load_line(p));
  }
  static VEC_INLINE Sum dot(Sum acc, f32x16 line, const uint32_t* word) {
    add_product(acc, line, set1(__builtin_bit_cast(float, *word)));
    return acc;
  }
  static VEC_INLINE void put(Element* p, f32x16 v) { store(p, rounded_bf16(v)); }
};

template <> struct Bf16KvOf<true> {  // a level with a dot of pairs
  using Element = uint16_t;
  using Sum = f32x16;
  static constexpr int kPer = 2, kWords = 1;
  static constexpr bool kScaled = false;
  static VEC_INLINE Sum none() { return zero(); }
  template <int> static VEC_INLINE i32x16 line(const uint8_t* p) { return load_line(p); }
  static VEC_INLINE Sum dot(Sum acc, i32x16 line, const uint32_t* word) { return dot2_bf16(acc, line, *word); }
  static VEC_INLINE void put(Element* p, f32x16 v) { store_bf16(p, v); }
};
using Bf16Kv = Bf16KvOf<kBf16Dots>;

struct F32Kv {
  using Element = float;
  using Sum = f32x16;
  static constexpr int kPer = 1, kWords = 1;
  static constexpr bool kScaled = false;
  static VEC_INLINE Sum none() { return zero(); }
  template <int> static VEC_INLINE f32x16 line(const uint8_t* p) { return as_f32(load_line(p)); }
  static VEC_INLINE Sum dot(Sum acc, f32x16 line, const uint32_t* word) {
    add_product(acc, line, set1(__builtin_bit_cast(float, *word)));
    return acc;
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
  template <int W> static VEC_INLINE i32x16 line(const uint8_t* p) {
    if constexpr (W == 0) return even_s8(load_line(p));
    else return odd_s8(load_line(p));
  }
  static VEC_INLINE Sum dot(Sum acc, i32x16 line, const uint32_t* word) { return dot2_s16(acc, line, *word); }
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

// A query, 16 numbers at a time from(d), as the operand of dot. Returns its step where it is fixed point.
template <class Kv, class Load> VEC_INLINE float put_query(int dim, Load from, typename Kv::Element* to) {
  float factor = 1, step = 0;
  if constexpr (Kv::kScaled) {
    i32x16 most = set1_i32(0);
    for (int d = 0; d < dim; d += 16) most = greater_magnitude(most, abs(from(d)));
    const float m = __builtin_bit_cast(float, reduce_max(most));
    factor = fixed_from(m);
    step = m / kFixedMost;
  }
  for (int d = 0; d < dim; d += 16) Kv::put(to + d, Kv::kScaled ? from(d) * set1(factor) : from(d));
  return step;
}

}  // namespace octavo::VEC_NS
