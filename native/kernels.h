// What a kernel level (generic, avx2, avx512, amx) exports: one table of functions. Kernels know neither Python nor numpy,
// do not throw, allocate or lock; all arguments were checked when the plan was compiled. Rows are half-open [row0, row1).
// Results of a row never depend on which other rows, or how many, are in the call (P1).
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

// ---------------------------------------------------------------- weights
// Packed once at load, the same bytes for every level. Columns (output features) are grouped in panels, K in units.
// Float formats, panels of 32 columns:
//   F32   [K][32] float        F16   [K][32] fp16        BF16  [K/2][32][2] bf16 (K pairs)
// Integer codes, panels of 16 columns, units of 64 or 256 K: the lines of the low bits of the codes, those of the high
// bits, then numbers (padded to whole lines), each [K / K of the number][16 columns]. A line is 64 bytes = 16 columns x
// 4 K. Of a group of 32 K (8 quads), line j holds: 8 bits: quad j; 4 bits: quad j low, j + 4 high; 2 bits: quads 4j ..
// 4j + 3, lowest first; 1 bit: all quads, lowest first.
//   W8     s (q - 128)           fp16 s of 32 K                                     GGUF Q8_0
//   W4     s (q - 8)             fp16 s of 32 K                                     Q4_0
//   W4F    s q + m               fp16 s of 32 K, fp16 m of 32 K                     Q4_1
//   W5     s (q - 16)            fp16 s of 32 K                                     Q5_0
//   W5F    s q + m               fp16 s of 32 K, fp16 m of 32 K                     Q5_1
//   W4N    s table[q]            fp16 s of 32 K                                     IQ4_NL
//   W4M    s table[q]            bf16 s of 32 K (halved: the table has doubles)     MXFP4
//   W4V    f s/2 table[q]        e4m3 s of 16 K                                     NVFP4
//   W4Z    f s (q - z)           fp16 s of 32 K, u8 z of 32 K                       GPTQ, AWQ .. groups of 32
//   W4Z64  f s (q - z)           fp16 s of 64 K, u8 z of 64 K                       GPTQ, AWQ .. groups of 64 and more
//   W4C    f (q - z)             u8 z of 256 K                                      4 bits, one scale for a column
//   W8Z64  f s (q - z)           fp16 s of 64 K, u8 z of 64 K                       8-bit GPTQ, int8
//   F8     s e4m3(q)             float s of 64 K                                    FP8
//   W2K    d a q - e b           {a, b} u4 of 16 K, fp16 d of 256 K, fp16 e         Q2_K
//   W3K    d a (q - 4)           i8 a of 16 K, fp16 d of 256 K                      Q3_K
//   W4K    d a q - e b           u8 a of 32 K, u8 b of 32 K, fp16 d of 256 K, e     Q4_K
//   W5K    d a q - e b           as W4K                                             Q5_K
//   W6K    d a (q - 32)          i8 a of 16 K, fp16 d of 256 K                      Q6_K
//   W4X    d a table[q]          i8 a of 32 K, fp16 d of 256 K                      IQ4_XS
// f: a float for each column, after all panels; the product is multiplied by it. N is padded to 32 columns, K to whole
// units of at least 64, by zero bytes (weight 0 whatever the activation).
enum class Format : uint8_t {
  F32,
  F16,
  BF16,
  W8,
  W4,
  W4F,
  W5,
  W5F,
  W4N,
  W4M,
  W4V,
  W4Z,
  W4Z64,
  W4C,
  W8Z64,
  F8,
  W2K,
  W3K,
  W4K,
  W5K,
  W6K,
  W4X
};
constexpr int kFormats = 22;

struct FormatInfo {
  const char* name;
  int unit;       // K of a unit
  int low, high;  // bits of a code in the first and the second plane; float formats: all, 0
  int numbers;    // bytes of the numbers of a unit
  bool factors;   // f
};
constexpr FormatInfo kFormatInfo[kFormats] = {
    {"f32", 64, 32, 0, 0, false},   {"f16", 64, 16, 0, 0, false},   {"bf16", 64, 16, 0, 0, false},
    {"w8", 64, 8, 0, 64, false},    {"w4", 64, 4, 0, 64, false},    {"w4f", 64, 4, 0, 128, false},
    {"w5", 64, 4, 1, 64, false},    {"w5f", 64, 4, 1, 128, false},  {"w4n", 64, 4, 0, 64, false},
    {"w4m", 64, 4, 0, 64, false},   {"w4v", 64, 4, 0, 64, true},    {"w4z", 64, 4, 0, 96, true},
    {"w4z64", 64, 4, 0, 48, true},  {"w4c", 256, 4, 0, 16, true},   {"w8z64", 64, 8, 0, 48, true},
    {"f8", 64, 8, 0, 64, false},    {"w2k", 256, 2, 0, 320, false}, {"w3k", 256, 2, 1, 288, false},
    {"w4k", 256, 4, 0, 320, false}, {"w5k", 256, 4, 1, 320, false}, {"w6k", 256, 4, 2, 288, false},
    {"w4x", 256, 4, 0, 160, false},
};
constexpr const FormatInfo& info_of(Format f) { return kFormatInfo[(int)f]; }
constexpr int panel_cols(Format f) { return f <= Format::BF16 ? 32 : 16; }
constexpr int plane_bytes(Format f) { return info_of(f).unit * panel_cols(f) * (info_of(f).low + info_of(f).high) / 8; }
constexpr int unit_bytes(Format f) { return plane_bytes(f) + (info_of(f).numbers + 63) / 64 * 64; }  // of one panel
constexpr int kTaskCols = 32;  // a gemm task: 32 output columns, one float panel or two integer panels

struct Weight {
  Format format;
  int n, k;             // logical sizes
  int n_pad, k_pad;     // multiples of 32 and 64
  const uint8_t* data;  // 64-byte aligned; panel p starts at p * panel_bytes
  size_t panel_bytes;   // unit_bytes(format) for each unit of K
  const float* factor;  // [n_pad]: of each column, or null
};

// Columns [col, col + n) of a weight; col is a multiple of 32.
inline Weight some_columns(Weight w, int col, int n) {
  w.data += static_cast<size_t>(col / panel_cols(w.format)) * w.panel_bytes;
  if (w.factor) w.factor += col;
  w.n = n;
  w.n_pad = (n + kTaskCols - 1) / kTaskCols * kTaskCols;
  return w;
}

// ---------------------------------------------------------------- activations
enum class Act : uint8_t { F32, BF16, A8, A16 };
constexpr int kActs = 4;

// A matrix of `rows` x `k`, zero padded to k_pad columns (the rounding kernels write the padding).
//   F32   f[rows][ld] float
//   BF16  h[rows][ld] bf16, ld a multiple of 32 and not of 1024 (L1 sets), with t = sum of a group, [k_pad/32][rows]
//   A8    q[k_pad/32][rows][32] int8, with s (scale), t = s * sum(q), nsum = -sum(q), and nhalf = -sum(q of the first
//         16), each [k_pad/32][rows]
//   A16   int16 numbers v, |v| <= 127 * 128, of one scale s for 32 columns, as two rows of A8 for each row: 2r has the
//         nearest multiples of 128 (v + 64 >> 7, scale 128 s), 2r + 1 the rest (-64 .. 63, scale s)
// A view of some rows has the pointers of its first and the `stride` of the whole.
struct Activation {
  Act act;
  int rows, k, k_pad;
  int64_t ld;
  int64_t stride;  // rows of q between two groups of 32 K: more than those of x in a view of some rows
  float* f;
  uint16_t* h;
  int8_t* q;
  float* s;
  float* t;
  int32_t* nsum;
  int32_t* nhalf;
};
constexpr int int8_rows(Act a) { return a == Act::A16 ? 2 : 1; }  // of q, and all that goes with it, for each row
inline Activation some_rows(Activation x, int row, int rows) {
  x.rows = rows;
  if (x.f) x.f += row * x.ld;
  if (x.h) x.h += row * x.ld;
  row *= int8_rows(x.act);
  if (x.q) x.q += int64_t{row} * 32;
  if (x.s) x.s += row;
  if (x.t) x.t += row;
  if (x.nsum) x.nsum += row;
  if (x.nhalf) x.nhalf += row;
  return x;
}
inline int act_ld(Act a, int k_pad) { return a == Act::BF16 && k_pad % 1024 == 0 ? k_pad + 32 : k_pad; }

// ---------------------------------------------------------------- norms and activations
// Rms_norm, or layer_norm where centred, of each of `heads` consecutive spans of `cols` columns of a row.
struct NormArgs {
  const float* x;
  int64_t ldx;
  const float *w, *b;  // null: none. [cols] of head h starts at h * step
  float eps;
  int cols, heads;
  int64_t step;  // 0: one set for all heads
  bool centred;
};

// In the order of graph.ops.GATED_ACTS. SwigluOai is a kind of act_mul alone.
enum class ActKind : uint8_t { Silu, Gelu, GeluTanh, GeluQuick, Relu, Relu2, Sigmoid, Tanh, SwigluOai };
constexpr int kActKinds = 9;

// ---------------------------------------------------------------- gemm
enum class Epilogue : uint8_t {
  Store,        // out[row][col] = y
  Add,          // out[row][col] = residual[row][col] + y   (out may be residual)
  ActRound,     // act.put(kind(y)), 32 columns a task
  ActMulRound,  // w is the gate, w_up the up weight: act.put(kind(y_gate) * y_up), 32 columns a task
};

struct GemmArgs {
  const Weight* w;
  const Weight* w_up;  // ActMulRound only
  const Activation* x;
  const float* bias;  // [n] or null; with w_up [2n]
  Epilogue epilogue;
  float* out;  // first column of this weight in the output
  int64_t ld_out;
  const float* residual;
  int64_t ld_residual;
  const Activation* act;  // ActRound and ActMulRound: where to round to (F32 act: plain store)
  ActKind kind;
};

// ---------------------------------------------------------------- mixtures of experts
enum class Scoring : uint8_t { Softmax, SoftmaxTop, Sigmoid, SparseMixer };
constexpr int kScorings = 4;
constexpr int kMaxExperts = 1024, kMaxTopK = 64;

// What the fields mean: ops.Route.
struct RouteArgs {
  const float* scores;  // [T][ld]
  int64_t ld;
  const float* bias;  // [experts] or null
  float* out;         // [T][ld_out]: top_k ids, then top_k weights
  int64_t ld_out;
  int experts, top_k;
  Scoring scoring;
  bool normalise;
  float scale, jitter;
  int groups, top_groups, group_best;
};

// ---------------------------------------------------------------- KV cache
enum class KvType : uint8_t { BF16, F32, I8 };
constexpr int kKvTypes = 3;

// One layer: block b of kv head h starts at base + h * head_stride + b * block_stride (bytes). A block is 16 tokens:
//   BF16  K panel [D/2][16][2], then V panel [8][V][2]                                            32*(D+V) bytes
//   F32   K panel [D][16], then V panel [16][V]                                                   64*(D+V) bytes
//   I8    K panel [D/4][16][4], V panel [4][D][4], then float K scales [16] and V scales [16]     32*D + 128 bytes
// D and V, the sizes of keys and values, are multiples of 16, for I8 the same and at most 256. I8: key = scale * q of its token, values
// likewise; the four elements of a word lie in the order 0, 2, 1, 3, so that even and odd bytes are pairs of neighbours.
struct KvLayer {
  KvType type;
  uint8_t* base;
  int64_t head_stride, block_stride;
  int kv_heads, head_dim, value_dim;
};
constexpr int kMaxHeadDim = 576, kMaxHeadDimI8 = 256;

constexpr size_t kv_block_bytes(KvType type, int head_dim, int value_dim) {
  const size_t d = static_cast<size_t>(head_dim) + static_cast<size_t>(value_dim);
  return type == KvType::BF16 ? 32 * d : type == KvType::F32 ? 64 * d : 16 * d + 128;
}

constexpr int kBlock = 16, kKvTile = 128, kKvSplit = 512;

// Query tokens [tok0, tok0 + ntok) of one sequence: consecutive rows of the step at consecutive positions from pos0.
struct AttnPart {
  int tok0, ntok, pos0;
  int context;            // 0: causal. Otherwise queries see what follows them, too, of so many tokens of the sequence
  const int32_t* blocks;  // block table row of the sequence; what lies before the window is never read
  int shared;             // the first so many KV tiles are the blocks of the part before, and read once for both
};

// Work of one attention call: the query heads of one kv head for the tokens of some parts, at most kItemParts of them, in
// KV splits [split0, split1). Row = query token and head: part by part, token by token, head of the group by head.
struct AttnItem {
  const AttnPart* parts;
  int num_parts;
  int kv_head;
  int split0, split1;
  const int32_t* next_blocks;  // num_next blocks of what this thread probably does next, to prefetch
  int num_next;
  float* partial;  // null: all splits are here, write the result. Otherwise floats [split1 - split0][row][V + 2]:
                   // unnormalised output, max, sum of that split only
};
constexpr int kItemRows = 48;  // whose states a call keeps at once: an item of more rows reads K and V again
constexpr int kItemParts = kItemRows;
// Row stride of queries in words; not a multiple of 1024 bytes (L1 sets)
constexpr int kQueryWords = kMaxHeadDim + 16;
constexpr size_t attn_scratch_floats(int value_dim) {
  return static_cast<size_t>(kItemRows) * (kQueryWords + 2 * static_cast<size_t>(value_dim));
}

struct AttnArgs {
  KvLayer kv;
  const float* q;  // [T][ldq], rotated, unscaled
  int64_t ldq;
  int heads;  // query heads; heads / kv_heads per kv head
  float scale_log2e;
  float* out;  // [T][ld_out] float32, or null and
  int64_t ld_out;
  const Activation* act;  // rounded output
  int window;             // tokens that a query sees, itself included; 0: all. Not causal: so many to either side
  // Scores are in units of log2(e): s = cap * tanh(q k / cap), then s += slope * (position of the key - of the query).
  float softcap_log2e;        // 0: none
  const float* slopes_log2e;  // [heads] or null (ALiBi)
  const float* sinks;         // [heads] or null: scores in natural units that take part in the sum alone
  float* scratch;             // attn_scratch_floats(value_dim) of this thread, at a line
};

struct RopeArgs {
  const float* x;
  int64_t ldx;
  float* out;
  int64_t ld_out;            // may equal x
  int heads, head_dim, rot;  // rot dimensions are rotated
  bool neox;
  const float* cos;
  const float* sin;  // [T][rot/2], made once per step from the positions
};

// The V lanes of two tokens 2i, 2i + 1 share words: where both are in the step, the call that has the even one writes
// both, so that calls may split the rows anywhere. An even token alone clears the lanes of its partner.
struct KvWriteArgs {
  KvLayer kv;
  const float* k;
  int64_t ldk;
  const float* v;
  int64_t ldv;
  const int32_t* positions;  // [T]
  const int32_t* slots;      // [T] block id of the token (its slot is position % 16)
  int tokens;                // T
};

// ---------------------------------------------------------------- sampling (native half of sampling/definition.py)
struct LogitMax {
  float max;
  int argmax;
  bool valid;
};  // argmax: lowest id of the ties; valid: max finite, no NaN

// A prefix of the order (logit descending, id ascending): what top-k, min-p and top-p keep.
struct Cut {
  float value;
  int id;
};  // keeps x > value, and x == value with token id <= id

// The draw of a row from logits that come some columns after others (draws.inl).
struct DrawRow {
  float* logits;              // [vocab] where they are wanted; null: the draw alone is, and they are not stored
  float inverse_temperature;  // 0: greedy
  uint64_t noise;             // of key and position (noise_row of sampler.h)
  const uint32_t* mask;       // SamplingArrays::masks of this row, or null
  int mask_width;
};

// A token that may have been drawn once all logits are known.
struct Contender {
  int32_t id;
  float logit, noise;
};
constexpr int kContenders = 8;

// What is known of a draw: `max` is of the allowed so far, `best` the greatest of their perturbed sums relative to it.
// Every token whose sum may round to the greatest is a contender; greedy rows have one, the lowest id of the greatest.
struct DrawState {
  float max = -__builtin_inff(), best = -__builtin_inff();
  bool finite = true;  // no logit is NaN or +inf, allowed or not
  int count = 0;
  Contender contenders[kContenders];
};

// Logits [row][ld] of the tokens [first, first + cols); first is a multiple of 32.
struct DrawArgs {
  const DrawRow* rows;
  DrawState* states;
  const float* logits;
  int64_t ld;
  int first, cols;
};

struct Kernels {
  const char* name;
  // output columns of tasks [task0, task1), all rows of x; table[format][act], never null
  void (*gemm[kFormats][kActs])(const GemmArgs&, int task0, int task1);
  // x[row][0..k) -> y; columns of groups [g0, g1) of 32
  void (*round)(const float* x, int64_t ldx, const Activation& y, int row0, int row1, int g0, int g1);
  void (*norm)(const NormArgs&, float* y, int64_t ldy, int row0, int row1);  // y may be x
  // norm of whole rows and round: groups [g0, g1) only, the factor from the whole row
  void (*norm_round)(const NormArgs&, const Activation& y, int row0, int row1, int g0, int g1);
  // Element by element over [row][cols]; y may be any of the inputs.
  void (*add)(const float* a, int64_t lda, const float* b, int64_t ldb, float* y, int64_t ldy, int cols, int row0,
              int row1);
  void (*mul)(const float* a, int64_t lda, const float* b, int64_t ldb, float* y, int64_t ldy, int cols, int row0,
              int row1);
  void (*act[kActKinds])(const float* x, int64_t ldx, float* y, int64_t ldy, int cols, int row0, int row1);
  void (*act_mul[kActKinds])(const float* gate, int64_t ldg, const float* up, int64_t ldu, float* y, int64_t ldy,
                             int cols, int row0, int row1);
  // x[row] * factors[row * ldf]: one number per row, or where ldf is 0 for all
  void (*scale)(const float* x, int64_t ldx, const float* factors, int64_t ldf, float* y, int64_t ldy, int cols,
                int row0, int row1);
  void (*softcap)(const float* x, int64_t ldx, float cap, float* y, int64_t ldy, int cols, int row0, int row1);
  void (*clamp)(const float* x, int64_t ldx, float low, float high, float* y, int64_t ldy, int cols, int row0,
                int row1);
  void (*route)(const RouteArgs&, int row0, int row1);
  // y = weights[0] * x[0] + weights[1] * x[1] + ..., n of them in this order
  void (*weighted_sum)(const float* const* x, const float* weights, int n, float* y, int cols);
  void (*embed[kFormats])(const Weight& w, const int32_t* ids, float* y, int64_t ldy, int row0, int row1);
  void (*rope)(const RopeArgs&, int row0, int row1, int head0, int head1);
  void (*kv_write[kKvTypes])(const KvWriteArgs&, int row0, int row1, int head0, int head1);
  void (*attention[kKvTypes])(const AttnArgs&, const AttnItem&);
  // the result of an item whose splits, all of them, have left their partial states, in order
  void (*attention_merge)(const AttnArgs&, const AttnItem&);
  void (*logit_max)(const float* x, int n, LogitMax& out);
  // sum of exp((x - max) * inv_temperature) over x >= floor, float64 over fixed blocks
  double (*sum_exp)(const float* x, int n, float max, float inv_temperature, float floor);
  // token ids with x >= threshold, ascending, into ids[n]; returns their number
  int (*collect)(const float* x, int n, float threshold, int32_t* ids);
  // number of tokens that come before (value, id) in the order of Cut
  int (*count_before)(const float* x, int n, float value, int id);
  // argmax over the kept of (x[i] - max) * inv_temperature + gumbel(key, position, i), ties to the lowest id;
  // -1: none is kept
  int (*gumbel_argmax)(const float* x, int n, float max, float inv_temperature, uint64_t key, int position, Cut cut);
  // Takes the tokens into the states of rows [row0, row1), or stores their logits. A state sees tokens in ascending order.
  void (*draw)(const DrawArgs&, int row0, int row1);
};

// The tables themselves: kernels_of (cpu.h) tells which of them this machine can run.
const Kernels* kernels_generic();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_amx();

}  // namespace octavo
