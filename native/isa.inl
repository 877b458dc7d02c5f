// The kernels of one level and their table. An isa_*.cpp names VEC_NS and includes its vec_*.h before this.
#include "kernels.h"
#include "math.inl"
#include "acts.inl"
#include "elements.inl"
#include "round.inl"
#include "codes.inl"
#include "decode.inl"
#include "panels.inl"
#include "gemm.inl"
#include "gemm_groups.inl"
#include "rows.inl"
#include "experts.inl"
#include "kv.inl"
#include "attention_kv.inl"
#include "attention_tile.inl"
#include "attention.inl"
#include "logits.inl"
#include "draws.inl"

namespace octavo::VEC_NS {

#define DECODED(F, A) gemm<ProductDecoded<Format::F, Act::A>>
#define CODES(F) \
  {DECODED(F, F32), gemm<ProductGroups<Format::F>>, gemm<ProductA8<Format::F>>, gemm<ProductA16<Format::F>>}
#define ALL_ACTS(F)                                                                                  \
  F<ActKind::Silu>, F<ActKind::Gelu>, F<ActKind::GeluTanh>, F<ActKind::GeluQuick>, F<ActKind::Relu>, \
      F<ActKind::Relu2>, F<ActKind::Sigmoid>, F<ActKind::Tanh>
static constexpr Kernels make_table(const char* name) {
  return {
      .name = name,
      .gemm = {{gemm<ProductF32<F32Lines>>, DECODED(F32, BF16), DECODED(F32, A8), DECODED(F32, A16)},
               {gemm<ProductF32<F16Lines>>, DECODED(F16, BF16), DECODED(F16, A8), DECODED(F16, A16)},
               {DECODED(BF16, F32), gemm<ProductBf16>, DECODED(BF16, A8), DECODED(BF16, A16)},
               CODES(W8),
               CODES(W4),
               CODES(W4F),
               CODES(W5),
               CODES(W5F),
               CODES(W4N),
               CODES(W4M),
               CODES(W4V),
               CODES(W4Z),
               CODES(W4Z64),
               CODES(W4C),
               CODES(W8Z64),
               {DECODED(F8, F32), gemm<ProductGroups<Format::F8>>, DECODED(F8, A8), DECODED(F8, A16)},
               CODES(W2K),
               CODES(W3K),
               CODES(W4K),
               CODES(W5K),
               CODES(W6K),
               CODES(W4X)},
      .round = VEC_NS::round,
      .norm = norm,
      .norm_round = norm_round,
      .add = add_rows,
      .mul = mul_rows,
      .act = {ALL_ACTS(act_rows), nullptr},
      .act_mul = {ALL_ACTS(act_mul_rows), act_mul_rows<ActKind::SwigluOai>},
      .scale = scale_rows,
      .softcap = softcap_rows,
      .clamp = clamp_rows,
      .route = route,
      .weighted_sum = weighted_sum,
      .embed = {embed<F32>, embed<F16>, embed<BF16>, embed<W8>,  embed<W4>,    embed<W4F>, embed<W5>,    embed<W5F>,
                embed<W4N>, embed<W4M>, embed<W4V>,  embed<W4Z>, embed<W4Z64>, embed<W4C>, embed<W8Z64>, embed<F8>,
                embed<W2K>, embed<W3K>, embed<W4K>,  embed<W5K>, embed<W6K>,   embed<W4X>},
      .rope = rope,
      .kv_write = {kv_write_bf16, kv_write_f32, kv_write_i8},
      .attention = {attention<Bf16Kv>, attention<F32Kv>, attention<I8Kv>},
      .attention_merge = attention_merge,
      .logit_max = logit_max,
      .sum_exp = sum_exp,
      .collect = collect,
      .count_before = count_before,
      .gumbel_argmax = gumbel_argmax,
      .draw = draw,
  };
}
#undef DECODED
#undef CODES
#undef ALL_ACTS

}  // namespace octavo::VEC_NS
