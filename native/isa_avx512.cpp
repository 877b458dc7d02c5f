// Kernels for x86-64 with AVX-512 F, BW, VL, DQ, VNNI and BF16 (Zen 4, Cooper Lake, Sapphire Rapids and later).
#define VEC_NS avx512
#include "vec_avx512.h"
#include "isa.inl"

namespace octavo {

static constexpr Kernels kTable = avx512::make_table("avx512");
const Kernels* kernels_avx512() { return &kTable; }

}  // namespace octavo
