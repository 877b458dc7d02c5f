// The kernels of one level and their table. An isa_*.cpp names VEC_NS and includes its vec_*.h before this.
#include "kernels.h"
#include "math.inl"
#include "round.inl"
#include "decode.inl"
#include "panels.inl"
#include "gemm.inl"
#include "gemm_groups.inl"
#include "rows.inl"
#include "kv.inl"
#include "attention_kv.inl"
#include "attention.inl"
#include "logits.inl"

namespace octavo::VEC_NS {

#define DECODED(F, A) gemm<ProductDecoded<Format::F, Act::A>>
static constexpr Kernels make_table(const char* name) {
  return {
      .name = name,
      .gemm = {{gemm<ProductF32<Format::F32>>, DECODED(F32, BF16), DECODED(F32, A8)},
               {gemm<ProductF32<Format::F16>>, DECODED(F16, BF16), DECODED(F16, A8)},
               {DECODED(BF16, F32), gemm<ProductBf16>, DECODED(BF16, A8)},
               {DECODED(W8, F32), gemm<ProductGroups<Format::W8>>, gemm<ProductA8<Format::W8>>},
               {DECODED(W4, F32), gemm<ProductGroups<Format::W4>>, gemm<ProductA8<Format::W4>>},
               {DECODED(W4F, F32), gemm<ProductGroups<Format::W4F>>, gemm<ProductA8<Format::W4F>>}},
      .round = VEC_NS::round,
      .rms_norm = rms_norm,
      .norm_round = norm_round,
      .add = add_rows,
      .silu_mul = silu_mul,
      .embed = {embed<Format::F32>, embed<Format::F16>, embed<Format::BF16>, embed<Format::W8>, embed<Format::W4>,
                embed<Format::W4F>},
      .rope = rope,
      .kv_write = {kv_write_bf16, kv_write_f32, kv_write_i8},
      .attention = {attention_bf16, attention_f32, attention_i8},
      .attention_merge = attention_merge,
      .logit_max = logit_max,
      .sum_exp = sum_exp,
      .collect = collect,
      .count_before = count_before,
      .gumbel_argmax = gumbel_argmax,
  };
}
#undef DECODED

}  // namespace octavo::VEC_NS
