// Ceilings of one core: the rate of the instruction that a kernel is made of, and of reading memory.
#pragma once
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace octavo::bench {

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The best of `repeats` runs, since other work on the machine only ever adds time.
template <class Run> double best_seconds(int repeats, Run run) {
  double best = 1e30;
  for (int i = 0; i < repeats; i++) {
    const double start = seconds();
    run();
    const double took = seconds() - start;
    best = took < best ? took : best;
  }
  return best;
}

#ifdef __x86_64__
// clang-format off
#define CEILING_ONE(op, reg, n) op " %%" reg "14, %%" reg "15, %%" reg #n "\n"
#define CEILING_TWELVE(op, reg)                                                                   \
  CEILING_ONE(op, reg, 0)                                                                         \
  CEILING_ONE(op, reg, 1)                                                                         \
  CEILING_ONE(op, reg, 2)                                                                         \
  CEILING_ONE(op, reg, 3)                                                                         \
  CEILING_ONE(op, reg, 4) CEILING_ONE(op, reg, 5) CEILING_ONE(op, reg, 6) CEILING_ONE(op, reg, 7) \
      CEILING_ONE(op, reg, 8) CEILING_ONE(op, reg, 9) CEILING_ONE(op, reg, 10) CEILING_ONE(op, reg, 11)
#define CEILING_RATE(op, reg)                                                                                  \
  (12e5 / best_seconds(20, [] {                                                                                \
     asm volatile(                                                                                             \
         "vxorps %%ymm14, %%ymm14, %%ymm14\n vxorps %%ymm15, %%ymm15, %%ymm15\n mov $100000, %%rcx\n"          \
         ".p2align 5\n 1:\n" CEILING_TWELVE(op, reg) "dec %%rcx\n jnz 1b\n" ::                                 \
             : "rcx", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
               "xmm11", "xmm14", "xmm15");                                                                     \
   }))

// AVX2 has no dot of bytes: what a group of 32 K x 8 columns takes from registers, four groups at a time. 4-bit weights
// add eight products in 16 bits; 8-bit ones are signed and widened each.
#define CEILING_U4(sum, p)                                                                                           \
  "vpmaddubsw %%ymm14, %%ymm15, %%ymm" #p "\n" CEILING_U4_NEXT(p) CEILING_U4_NEXT(p) CEILING_U4_NEXT(p)              \
      CEILING_U4_NEXT(p) CEILING_U4_NEXT(p) CEILING_U4_NEXT(p) CEILING_U4_NEXT(p)                                     \
          "vpmaddwd %%ymm14, %%ymm" #p ", %%ymm" #p "\n vpaddd %%ymm" #p ", %%ymm" #sum ", %%ymm" #sum "\n"
#define CEILING_U4_NEXT(p) \
  "vpmaddubsw %%ymm14, %%ymm15, %%ymm12\n vpaddw %%ymm12, %%ymm" #p ", %%ymm" #p "\n"
#define CEILING_S8_NEXT(sum, p)                                                                                    \
  "vpsignb %%ymm14, %%ymm15, %%ymm" #p "\n vpmaddubsw %%ymm" #p ", %%ymm15, %%ymm" #p "\n"                         \
  "vpmaddwd %%ymm14, %%ymm" #p ", %%ymm" #p "\n vpaddd %%ymm" #p ", %%ymm" #sum ", %%ymm" #sum "\n"
#define CEILING_S8(sum, p)                                                                                      \
  CEILING_S8_NEXT(sum, p) CEILING_S8_NEXT(sum, p) CEILING_S8_NEXT(sum, p) CEILING_S8_NEXT(sum, p)              \
      CEILING_S8_NEXT(sum, p) CEILING_S8_NEXT(sum, p) CEILING_S8_NEXT(sum, p) CEILING_S8_NEXT(sum, p)
#define CEILING_GROUPS(group)                                                                                  \
  (4e5 / best_seconds(20, [] {                                                                                 \
     asm volatile(                                                                                             \
         "vxorps %%ymm14, %%ymm14, %%ymm14\n vxorps %%ymm15, %%ymm15, %%ymm15\n mov $100000, %%rcx\n"          \
         ".p2align 5\n 1:\n" group(0, 4) group(1, 5) group(2, 6) group(3, 7) "dec %%rcx\n jnz 1b\n" ::         \
             : "rcx", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm12", "xmm14", "xmm15"); \
   }))
// clang-format on

// Operations a second (a multiply-add is two) of a level's best instruction for products of such weights and activations,
// twelve chains at a time; 0 where the level has no instruction of its own.
inline double peak_ops(const char* isa, Act act, Format format = Format::W8) {
  if (!strcmp(isa, "avx512"))
    return act == Act::A8     ? CEILING_RATE("vpdpbusd", "zmm") * 128
           : act == Act::BF16 ? CEILING_RATE("vdpbf16ps", "zmm") * 64
                              : CEILING_RATE("vfmadd231ps", "zmm") * 32;
  if (!strcmp(isa, "avx2"))
    return act != Act::A8         ? CEILING_RATE("vfmadd231ps", "ymm") * 16
           : format == Format::W8 ? CEILING_GROUPS(CEILING_S8) * 512
                                  : CEILING_GROUPS(CEILING_U4) * 512;
  return 0;
}
#else
inline double peak_ops(const char*, Act, Format = Format::W8) { return 0; }
#endif

// A streaming read of [p, p + n), n a multiple of 512
inline void sweep(const uint8_t* p, size_t n) {
  typedef uint64_t line __attribute__((vector_size(64), aligned(8)));
  line sum[8] = {};
  for (const uint8_t* q = p; q < p + n; q += 512)
    for (int i = 0; i < 8; i++) sum[i] ^= *(const line*)(q + 64 * i), __builtin_prefetch(q + 64 * i + 8192, 0, 3);
  for (int i = 1; i < 8; i++) sum[0] ^= sum[i];
  __asm__ volatile("" ::"r"(sum[0][0]));
}

// Its bytes a second
inline double read_rate(const uint8_t* p, size_t n, int repeats) {
  return (double)n / best_seconds(repeats, [&] { sweep(p, n); });
}

}  // namespace octavo::bench
