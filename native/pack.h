// Packing of weights, once at load: from the rows of a checkpoint to the panels of kernels.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace octavo {

// Bytes of a row of k values as pack takes them. A last block may pass the end of the row.
size_t source_row_bytes(Format f, int k);

// Bytes of a packed weight of n x k, padding and factors included.
size_t packed_bytes(Format f, int n, int k);

// The weight that data[packed_bytes(f, n, k)], 64-byte aligned, holds.
Weight packed_weight(Format f, int n, int k, const uint8_t* data);

// Packs panels [panel0, panel1) of a weight of n x k into dst, the start of the whole weight, which must be zero; factors
// are left to the caller. src holds n rows, row_bytes apart, in the form of a file: plain numbers (F32, F16, BF16), or the
// blocks of weights/formats/codes.py. src needs no alignment. Panels may be packed by different threads.
void pack(Format f, const uint8_t* src, size_t row_bytes, int n, int k, uint8_t* dst, int panel0, int panel1);

}  // namespace octavo
