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
#include "tile_codes.inl"

namespace octavo {

const Kernels* kernels_amx() {
  static const Kernels table = [] {
    Kernels t = *kernels_avx512();
    t.name = "amx";
    t.round = amx::round;
    t.gemm[(int)Format::BF16][(int)Act::BF16] = amx::gemm<amx::ProductTilesBf16>;
    amx::put_codes<Format::W8, Format::W4, Format::W4F, Format::W5, Format::W5F, Format::W4N, Format::W4M, Format::W4V,
                   Format::W4Z, Format::W4Z64, Format::W4C, Format::W8Z64, Format::W2K, Format::W3K, Format::W4K,
                   Format::W5K, Format::W6K, Format::W4X>(t);
    return t;
  }();
  return &table;
}

}  // namespace octavo
