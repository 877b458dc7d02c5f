// What the native tests share: expectations, reproducible numbers, guarded buffers, the levels to test.
#pragma once
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cpu.h"
#include "kernels.h"

namespace octavo::check {

inline int failures = 0;

// Prints and counts a failure; a test's main returns finish().
__attribute__((format(printf, 2, 3))) inline void expect(bool ok, const char* format, ...) {
  if (ok) return;
  if (++failures > 50) return;
  va_list args;
  va_start(args, format);
  printf("FAILED: ");
  vprintf(format, args);
  printf("\n");
  va_end(args);
}

#define CHECK(condition) octavo::check::expect((condition), "%s:%d: %s", __FILE__, __LINE__, #condition)

inline int finish() {
  if (failures) printf("%d expectations failed\n", failures);
  return failures ? 1 : 0;
}

// splitmix64 (Steele, Lea, Flood 2014)
struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed) {}
  uint64_t next() {
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int below(int n) { return (int)(next() % (uint64_t)n); }
  double uniform() { return (double)(next() >> 11) * 0x1p-53; }
  float normal() {
    const double u = 1 - uniform(), v = uniform();
    return (float)(std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v));
  }
};

// n elements at a 64-byte boundary, every byte 0xff (a NaN as float or bf16), between guard words.
template <class T> class Guarded {
 public:
  explicit Guarded(size_t n) : n_(n), bytes_(n * sizeof(T)), memory_((uint8_t*)aligned_alloc(64, total())) {
    if (!memory_) abort();
    memset(memory_, kPattern, total());
    memset(memory_ + kGuard, 0xff, bytes_);
  }
  ~Guarded() { free(memory_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  T* data() { return (T*)(memory_ + kGuard); }
  T& operator[](size_t i) { return data()[i]; }
  size_t size() const { return n_; }
  void zero() { memset(memory_ + kGuard, 0, bytes_); }
  bool intact() const {
    for (size_t i = 0; i < total(); i++)
      if ((i < kGuard || i >= kGuard + bytes_) && memory_[i] != kPattern) return false;
    return true;
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr uint8_t kPattern = 0xa5;
  size_t total() const { return (bytes_ + 63) / 64 * 64 + 2 * kGuard; }
  size_t n_, bytes_;
  uint8_t* memory_;
};

// An activation with its own guarded memory, poisoned
class OwnActivation {
 public:
  OwnActivation(Act act, int rows, int k)
      : k_pad_((k + 63) / 64 * 64),
        groups_((size_t)rows * int8_rows(act) * k_pad_ / 32),
        ld_((size_t)act_ld(act, (int)k_pad_)),
        f_(act == Act::F32 ? rows * ld_ : 0),
        h_(act == Act::BF16 ? rows * ld_ : 0),
        q_(act >= Act::A8 ? groups_ * 32 : 0),
        s_(act >= Act::A8 ? groups_ : 0),
        t_(act == Act::F32 ? 0 : groups_),
        nsum_(act >= Act::A8 ? groups_ : 0),
        nhalf_(act >= Act::A8 ? groups_ : 0),
        view{act,       rows,      k,         (int)k_pad_, (int64_t)ld_, rows * int8_rows(act), f_.data(),
             h_.data(), q_.data(), s_.data(), t_.data(),   nsum_.data(), nhalf_.data()} {}
  bool intact() const {
    return f_.intact() && h_.intact() && q_.intact() && s_.intact() && t_.intact() && nsum_.intact() && nhalf_.intact();
  }
  double at(int row, int col) const {  // what a product sees
    if (view.act == Act::F32) return view.f[row * view.ld + col];
    if (view.act == Act::BF16) {
      const uint32_t bits = (uint32_t)view.h[row * view.ld + col] << 16;
      float f;
      memcpy(&f, &bits, 4);
      return f;
    }
    double sum = 0;
    for (int part = 0, n = int8_rows(view.act); part < n; part++) {
      const int64_t i = col / 32 * view.stride + row * n + part;
      sum += (double)view.s[i] * view.q[i * 32 + col % 32];
    }
    return sum;
  }
  bool same_bits(const OwnActivation& o) const {
    const size_t n = groups_ * 4;
    if (view.act >= Act::A8)
      return !memcmp(view.q, o.view.q, groups_ * 32) && !memcmp(view.s, o.view.s, n) && !memcmp(view.t, o.view.t, n) &&
             !memcmp(view.nsum, o.view.nsum, n) && !memcmp(view.nhalf, o.view.nhalf, n);
    for (int r = 0; r < view.rows; r++) {
      const bool same = view.act == Act::F32 ? !memcmp(view.f + r * view.ld, o.view.f + r * view.ld, 4 * k_pad_)
                                             : !memcmp(view.h + r * view.ld, o.view.h + r * view.ld, 2 * k_pad_);
      if (!same) return false;
    }
    return view.act == Act::F32 || !memcmp(view.t, o.view.t, n);
  }

 private:
  size_t k_pad_, groups_, ld_;
  Guarded<float> f_;
  Guarded<uint16_t> h_;
  Guarded<int8_t> q_;
  Guarded<float> s_, t_;
  Guarded<int32_t> nsum_, nhalf_;

 public:
  Activation view;
};

inline const char* name_of(Act a) {
  constexpr const char* kNames[kActs] = {"f32", "bf16", "a8", "a16"};
  return kNames[(int)a];
}
inline const char* name_of(Format f) { return info_of(f).name; }

// --quick: what is long is left out, for emulators and sanitizers, which take twenty times as long. --brief: every kernel
// is called, with little more to show, where the level's results are tested by the processor itself: emulated floats take
// hundreds of times as long.
inline bool quick = false, brief = false;

// --isa NAME, by default all that this machine has
inline std::vector<const Kernels*> levels(int argc, char** argv) {
  std::vector<const Kernels*> found;
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "--quick")) {
      quick = true;
    } else if (!strcmp(argv[i], "--brief")) {
      quick = brief = true;
    } else if (!strcmp(argv[i], "--isa") && i + 1 < argc) {
      found.push_back(&kernels_of(argv[++i]));
    } else {
      printf("usage: %s [--quick | --brief] [--isa generic|avx2|avx512|amx]\n", argv[0]);
      exit(2);
    }
  }
  if (found.empty())
    for (const std::string& name : isa_levels()) found.push_back(&kernels_of(name));
  return found;
}

}  // namespace octavo::check
