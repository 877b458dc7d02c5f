// Kernels for x86-64 with AMX (tiles, bytes and BF16) beside AVX-512 (Sapphire Rapids and later): those of avx512, but for
// products of BF16 activations, and of many rows of others.
#include <type_traits>

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
#include "gemm_groups.inl"
#include "tiles.h"
#include "tile_bf16.inl"
#include "tile_codes.inl"
#include "tile_groups.inl"
#include "attention_kv.inl"
#include "attention_tile.inl"
#include "attention_amx.inl"
#include "attention.inl"

namespace octavo {

const Kernels* kernels_amx() {
  static const Kernels table = [] {
    Kernels t = *kernels_avx512();
    t.name = "amx";
    t.round = amx::round;
    t.gemm[(int)Format::BF16][(int)Act::BF16] = amx::gemm_tiles_bf16;
    using enum Format;
    amx::put_codes<W8, W4, W4F, W5, W5F, W4N, W4M, W4V, W4Z, W4Z64, W4C, W8Z64, W2K, W3K, W4K, W5K, W6K, W4X>(t);
    amx::put_groups<W8, W4, W4F, W5, W5F, W4N, W4M, W4V, W4Z, W4Z64, W4C, W8Z64, F8, W2K, W3K, W4K, W5K, W6K, W4X>(t);
    t.attention[(int)KvType::BF16] = amx::attention<amx::Bf16TileKv>;
    return t;
  }();
  return &table;
}

}  // namespace octavo
