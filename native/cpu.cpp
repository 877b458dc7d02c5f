#include "cpu.h"

#include <stdexcept>

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

#ifdef __x86_64__
struct Cpuid {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Cpuid(unsigned leaf, unsigned sub) {
    if (leaf <= __get_cpuid_max(leaf & 0x80000000u, nullptr)) __cpuid_count(leaf, sub, a, b, c, d);
  }
};

bool all_bits(unsigned value, std::initializer_list<int> bits) {
  for (int bit : bits)
    if (!(value >> bit & 1)) return false;
  return true;
}

unsigned xcr0() {                                // register states that the system saves on a context switch
  if (!all_bits(Cpuid(1, 0).c, {27})) return 0;  // OSXSAVE
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

bool has_avx2() {
  const Cpuid one(1, 0), seven(7, 0);
  return all_bits(xcr0(), {1, 2})          // SSE and AVX state
         && all_bits(one.c, {12, 28, 29})  // FMA, AVX, F16C
         && all_bits(seven.b, {5, 8});     // AVX2, BMI2
}

#ifdef OCTAVO_AVX512_MODEL
bool has_avx512() { return has_avx2(); }
bool has_amx() { return has_avx2(); }
#elif !defined(OCTAVO_NO_AVX512)
bool has_avx512() {
  const Cpuid seven(7, 0), sub1(7, 1);
  return has_avx2() && all_bits(xcr0(), {5, 6, 7})  // opmask, upper halves, zmm16..31
         && all_bits(seven.b, {16, 17, 30, 31})     // F, DQ, BW, VL
         && all_bits(seven.c, {1, 11})              // VBMI, VNNI
         && all_bits(sub1.a, {5});                  // BF16
}

// Linux gives a process the state of tiles when it asks (6.x Documentation/arch/x86/xstate.rst).
bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
bool has_amx() {
  static const bool has = has_avx512() && all_bits(xcr0(), {17, 18})  // tile configuration and data
                          && all_bits(Cpuid(7, 0).d, {22, 24, 25})    // BF16, TILE, INT8
                          && may_use_tiles();
  return has;
}
#endif

const Kernels* avx2() { return has_avx2() ? kernels_avx2() : nullptr; }
#ifdef OCTAVO_NO_AVX512
const Kernels* avx512() { return nullptr; }
const Kernels* amx() { return nullptr; }
#else
const Kernels* avx512() { return has_avx512() ? kernels_avx512() : nullptr; }
const Kernels* amx() { return has_amx() ? kernels_amx() : nullptr; }
#endif
#else
const Kernels* avx2() { return nullptr; }
const Kernels* avx512() { return nullptr; }
const Kernels* amx() { return nullptr; }
#endif

std::vector<const Kernels*> levels() {
  std::vector<const Kernels*> found;
  for (const Kernels* k : {kernels_generic(), avx2(), avx512(), amx()})
    if (k) found.push_back(k);
  return found;
}

}  // namespace

std::vector<std::string> isa_levels() {
  std::vector<std::string> names;
  for (const Kernels* k : levels()) names.push_back(k->name);
  return names;
}

const Kernels& kernels_of(const std::string& isa) {
  const auto found = levels();
  if (isa == "auto") return *found.back();
  std::string names;
  for (const Kernels* k : found) {
    if (isa == k->name) return *k;
    names += names.empty() ? k->name : std::string(", ") + k->name;
  }
  throw std::invalid_argument("isa '" + isa + "' cannot run here; this machine has: " + names);
}

}  // namespace octavo
