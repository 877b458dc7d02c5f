// What this machine can run: instruction sets, by CPUID and by what the operating system saves (XCR0).
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace octavo {

// Kernel levels this build and machine can run, lowest first: "generic", "avx2", "avx512", "amx".
std::vector<std::string> isa_levels();

// The kernel table of a level; "auto" is the highest. Throws std::invalid_argument naming the level and those available.
const Kernels& kernels_of(const std::string& isa);

}  // namespace octavo
