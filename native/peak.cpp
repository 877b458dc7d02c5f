#include "peak.h"

#include <time.h>

#include <algorithm>
#include <cstring>

#include "tiles.h"

namespace octavo {

double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

#ifdef __x86_64__
namespace {

constexpr double kTurns = 20000;  // of a loop: some tens of microseconds

// Turns a second of a loop that takes a count; the best of many, since whatever else the core does only adds time.
template <class Loop> double turns_per_second(Loop loop) {
  double best = 1e30;
  for (int i = 0; i < 100; i++) {
    const double start = thread_seconds();
    loop(static_cast<uint64_t>(kTurns));
    best = std::min(best, thread_seconds() - start);
  }
  return kTurns / best;
}

// clang-format off
#define LOOP(body)                                                                                                   \
  [](uint64_t n) {                                                                                                   \
    asm volatile(                                                                                                    \
        "vxorps %%ymm14, %%ymm14, %%ymm14\n vxorps %%ymm15, %%ymm15, %%ymm15\n .p2align 5\n 1:\n" body "dec %0\n jnz 1b\n" \
        : "+r"(n)::"xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", \
          "xmm12", "xmm14", "xmm15");                                                                                \
  }
#define ONE(op, reg, n) op " %%" reg "14, %%" reg "15, %%" reg #n "\n"
#define TWELVE(op, reg)                                                                                         \
  ONE(op, reg, 0) ONE(op, reg, 1) ONE(op, reg, 2) ONE(op, reg, 3) ONE(op, reg, 4) ONE(op, reg, 5)               \
  ONE(op, reg, 6) ONE(op, reg, 7) ONE(op, reg, 8) ONE(op, reg, 9) ONE(op, reg, 10) ONE(op, reg, 11)

// AVX2 has no dot of bytes: what a group of 32 K x 8 columns takes from registers, four groups a turn. Products of 2, 4
// or 8 quads are added in 16 bits and then widened; those of signed bytes take the sign first and are widened each.
#define FIRST(p) "vpmaddubsw %%ymm14, %%ymm15, %%ymm" #p "\n"
#define NEXT(p) "vpmaddubsw %%ymm14, %%ymm15, %%ymm12\n vpaddw %%ymm12, %%ymm" #p ", %%ymm" #p "\n"
#define WIDEN(sum, p) "vpmaddwd %%ymm14, %%ymm" #p ", %%ymm" #p "\n vpaddd %%ymm" #p ", %%ymm" #sum ", %%ymm" #sum "\n"
#define SIGNED(sum, p) "vpsignb %%ymm14, %%ymm15, %%ymm" #p "\n vpmaddubsw %%ymm" #p ", %%ymm15, %%ymm" #p "\n" WIDEN(sum, p)
#define TWO(sum, p) FIRST(p) NEXT(p) WIDEN(sum, p)
#define FOUR(sum, p) FIRST(p) NEXT(p) NEXT(p) NEXT(p) WIDEN(sum, p)
#define BY_EIGHT(sum, p) FIRST(p) NEXT(p) NEXT(p) NEXT(p) NEXT(p) NEXT(p) NEXT(p) NEXT(p) WIDEN(sum, p)
#define BY_FOUR(sum, p) FOUR(sum, p) FOUR(sum, p)
#define BY_TWO(sum, p) TWO(sum, p) TWO(sum, p) TWO(sum, p) TWO(sum, p)
#define BY_ONE(sum, p) \
  SIGNED(sum, p) SIGNED(sum, p) SIGNED(sum, p) SIGNED(sum, p) SIGNED(sum, p) SIGNED(sum, p) SIGNED(sum, p) SIGNED(sum, p)
#define GROUPS(group) LOOP(group(0, 4) group(1, 5) group(2, 6) group(3, 7))
// clang-format on

double avx2_groups(Format f) {
  switch (f) {
    case Format::W8:
    case Format::W8Z64:
    case Format::W4N:
    case Format::W4X: return turns_per_second(GROUPS(BY_ONE));
    case Format::W6K: return turns_per_second(GROUPS(BY_TWO));
    case Format::W5:
    case Format::W5F:
    case Format::W5K:
    case Format::W4M:
    case Format::W4V:
    case Format::W2K:
    case Format::W3K: return turns_per_second(GROUPS(BY_FOUR));
    default: return turns_per_second(GROUPS(BY_EIGHT));
  }
}

// Six chains of dots of whole tiles, a turn. No compiler knows the registers.
#define DOT(op, n) op " %%tmm7, %%tmm6, %%tmm" #n "\n"
#define DOTS(op) LOOP(DOT(op, 0) DOT(op, 1) DOT(op, 2) DOT(op, 3) DOT(op, 4) DOT(op, 5))
template <class Loop> double tile_turns(Loop loop) {
  TileShapes shapes;
  for (int i = 0; i < 8; i++) shapes.set(i, kTileLanes, 64);
  tiles_begin(shapes);
  const double rate = turns_per_second(loop);
  tiles_end();
  return rate;
}

}  // namespace

double peak_ops(const Kernels& kernels, Format f, Act act) {
  const bool codes = f >= Format::W8 && f != Format::F8 && act >= Act::A8;
  const int rows = int8_rows(act);
  if (!strcmp(kernels.name, "avx2")) {
    if (codes) return avx2_groups(f) * 4 * 32 * 8 * 2 / rows;
    return turns_per_second(LOOP(TWELVE("vfmadd231ps", "ymm"))) * 12 * 8 * 2;
  }
  const bool tiles = !strcmp(kernels.name, "amx");
  if (strcmp(kernels.name, "avx512") && !tiles) return 0;
  if (tiles && codes && act == Act::A8) return tile_turns(DOTS("tdpbssd")) * 6 * 16 * 16 * 64 * 2;
  if (tiles && f >= Format::BF16 && act == Act::BF16) return tile_turns(DOTS("tdpbf16ps")) * 6 * 16 * 16 * 32 * 2;
  if (codes) return turns_per_second(LOOP(TWELVE("vpdpbusd", "zmm"))) * 12 * 64 * 2 / rows;
  if (f >= Format::BF16 && act == Act::BF16) return turns_per_second(LOOP(TWELVE("vdpbf16ps", "zmm"))) * 12 * 32 * 2;
  return turns_per_second(LOOP(TWELVE("vfmadd231ps", "zmm"))) * 12 * 16 * 2;
}
#else
double peak_ops(const Kernels&, Format, Act) { return 0; }
#endif

}  // namespace octavo
