// Speed of the kernels, for `octavo bench kernels` and the test that guards it.
#pragma once
#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace octavo {

struct Product {
  Format format;
  Act act;
  int rows, n, k;  // [rows][k] times [n][k]
  int copies;      // packed weights that follow one another in memory and are taken in turn
};

// Seconds of one product, columns split between the workers: the best of `repeats` passes over all copies after one that
// does not count. Where the pool is one thread, seconds that it computed, so that other work on the machine does not count.
// `weights` holds numbers that are neither NaN nor subnormal in the format. Throws std::invalid_argument where the sizes
// are not positive, or the copies do not fit in the memory.
double product_seconds(Pool& pool, const Kernels& kernels, const Memory& weights, const Product& product, int repeats);

}  // namespace octavo
