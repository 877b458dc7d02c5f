// The arithmetic of the bf16 instructions of AVX-512 and AMX, whatever MXCSR says: to nearest even, subnormals count as zero.
#pragma once
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <utility>

namespace octavo::bf16_model {

inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x; }
inline float widened(uint16_t bf16) { return flushed(std::bit_cast<float>(uint32_t{bf16} << 16)); }

// a * b + c. What 24 bits would hold below the least normal number is zero, also where the 23 of a subnormal round up to it.
inline float fused(float a, float b, float c) {
  const float sum = flushed(std::fma(a, b, c));
  if (std::fabs(sum) != FLT_MIN) return sum;
  if (std::fabs(a) > std::fabs(b)) std::swap(a, b);
  const bool below = std::fabs(std::fma(a * 0x1p64f, b, c * 0x1p64f)) < FLT_MIN * 0x1p64f;
  return below ? std::copysign(0.f, sum) : sum;
}

}  // namespace octavo::bf16_model
