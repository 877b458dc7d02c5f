// The rate of the instructions that a product is made of: the ceiling that its kernel is held against.
#pragma once
#include "kernels.h"

namespace octavo {

// Operations a second of one core (a multiply-add is two) of a level's best instructions for products of such weights and
// activations, from registers, in a dozen chains; 0 where the level has no instructions of its own. By the thread's own
// time, so that other work on the machine does not count.
double peak_ops(const Kernels& kernels, Format format, Act act);

// Seconds that the calling thread has computed
double thread_seconds();

}  // namespace octavo
