// Kernels for x86-64 with AVX2, FMA and F16C.
#define VEC_NS avx2
#include "vec_avx2.h"
#include "isa.inl"

namespace octavo {

static constexpr Kernels kTable = avx2::make_table("avx2");
const Kernels* kernels_avx2() { return &kTable; }

}  // namespace octavo
