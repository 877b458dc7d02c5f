// What the native tests share: CHECK, the levels to test, and buffers that notice writes past their end.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace octavo {

inline int failures = 0;

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition) && ++octavo::failures <= 20)                                             \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);            \
  } while (0)

// n elements, 64-byte aligned, between guard bytes; ok() is false once a guard was changed. Elements start as 0xA5 bytes.
template <class T>
class Guarded {
 public:
  explicit Guarded(size_t n) : bytes_((n * sizeof(T) + 63) / 64 * 64), n_(n) {
    raw_ = static_cast<uint8_t*>(std::aligned_alloc(64, bytes_ + 128));
    std::memset(raw_, 0xA5, bytes_ + 128);
  }
  ~Guarded() { std::free(raw_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  T* data() { return reinterpret_cast<T*>(raw_ + 64); }
  T& operator[](size_t i) { return data()[i]; }
  size_t size() const { return n_; }
  bool ok() const {
    for (size_t i = 0; i < 64; i++)
      if (raw_[i] != 0xA5) return false;
    for (size_t i = 64 + n_ * sizeof(T); i < bytes_ + 128; i++)
      if (raw_[i] != 0xA5) return false;
    return true;
  }

 private:
  size_t bytes_, n_;
  uint8_t* raw_;
};

template <class T>
bool same_bits(const T* a, const T* b, size_t n) {
  return std::memcmp(a, b, n * sizeof(T)) == 0;
}

// Runs `test` for the level that --isa names, or for every level of this machine. The exit code of main.
template <class Test>
int test_levels(int argc, char** argv, Test test) {
  const char* only = argc == 3 && !std::strcmp(argv[1], "--isa") ? argv[2] : nullptr;
  if (argc != 1 && !only) {
    std::fprintf(stderr, "usage: %s [--isa generic|avx2|avx512]\n", argv[0]);
    return 2;
  }
  int levels = 0;
  for (const Kernels* k : {kernels_generic(), kernels_avx2(), kernels_avx512()}) {
    if (!k || (only && std::strcmp(only, k->name) != 0)) continue;
    std::printf("level %s\n", k->name);
    test(*k);
    levels++;
  }
  if (!levels) std::fprintf(stderr, "level %s is not there on this machine\n", only);
  if (failures) std::fprintf(stderr, "%d checks failed\n", failures);
  return failures || !levels;
}

}  // namespace octavo
