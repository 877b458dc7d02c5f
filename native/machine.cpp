#include "machine.h"

#include <stdexcept>

#include "bench/ceiling.h"

namespace octavo {
namespace {

constexpr int kRepeats = 3;
constexpr int kBarriers = 100;  // where other work takes the processors, each may cost milliseconds
constexpr int kStep = 512;      // what a sweep reads at a time

}  // namespace

double read_rate(Pool& pool, const Memory& memory) {
  const std::lock_guard lock(pool.turn());
  const int workers = pool.size();
  const size_t share = memory.bytes() / static_cast<size_t>(workers) / kStep * kStep;
  if (share == 0) throw std::invalid_argument("the memory to read is too small for its threads");
  const double seconds = bench::best_seconds(kRepeats, [&] {
    pool.run([&](int worker) { bench::sweep(memory.data() + share * static_cast<size_t>(worker), share); });
  });
  return static_cast<double>(share) * workers / seconds;
}

double barrier_seconds(Pool& pool) {
  const std::lock_guard lock(pool.turn());
  return bench::best_seconds(kRepeats,
                             [&] {
                               pool.run([&](int) {
                                 for (int i = 0; i < kBarriers; i++) pool.barrier();
                               });
                             }) /
         kBarriers;
}

}  // namespace octavo
