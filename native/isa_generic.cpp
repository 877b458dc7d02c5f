// Kernels for any machine.
#define VEC_NS generic
#include "vec_generic.h"
#include "isa.inl"

namespace octavo {

static constexpr Kernels kTable = generic::make_table("generic");
const Kernels* kernels_generic() { return &kTable; }

}  // namespace octavo
