// Ceilings of one core: the rate of reading memory. Of instructions: peak.h.
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
