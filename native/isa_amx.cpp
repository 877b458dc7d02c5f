// Kernels for x86-64 with AMX (tiles, bytes and BF16) beside AVX-512 (Sapphire Rapids and later): those of avx512, but for
// products of BF16 activations, and of many rows of others.
#define VEC_NS amx
#include "vec_avx512.h"
#include "kernels.h"
#include "math.inl"
#include "acts.inl"
#include "round.inl"
#include "codes.inl"
#include "decode.inl"
#include "panels.inl"
#include "gemm.inl"
#include "tiles.h"
#include "tile_bf16.inl"

namespace octavo {

const Kernels* kernels_amx() {
  static const Kernels table = [] {
    Kernels t = *kernels_avx512();
    t.name = "amx";
    t.round = amx::round;
    t.gemm[(int)Format::BF16][(int)Act::BF16] = amx::gemm<amx::ProductTilesBf16>;
    return t;
  }();
  return &table;
}

}  // namespace octavo
