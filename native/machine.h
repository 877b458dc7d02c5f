// What the machine does at this moment, all threads together: reading memory, and meeting at a barrier.
#pragma once
#include "memory.h"
#include "pool.h"

namespace octavo {

// Bytes a second of a streaming read by all workers, each of its share: the best of three. Meaningful where `memory` was
// written and is far larger than the caches. Throws std::invalid_argument where there is less than 512 bytes a worker.
double read_rate(Pool& pool, const Memory& memory);

// Seconds of a barrier of all workers: the best of three means.
double barrier_seconds(Pool& pool);

}  // namespace octavo
