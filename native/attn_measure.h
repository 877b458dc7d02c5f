// Attention on one thread, timed layer after layer as in a step, so that no cache holds what the next one reads: what
// benchmarks hold against the machine's ceilings.
#pragma once
#include "kernels.h"
#include "memory.h"

namespace octavo {

// A step of `seqs` sequences with one KV head. Each has `context` tokens in randomly placed blocks, the last `tokens` of
// which are computed; the first `prefix`, whole KV tiles, are in the same blocks for all.
struct AttnLoad {
  KvType type;
  int head_dim, group;  // query heads of the KV head
  int seqs, tokens, context, prefix = 0;
  bool share = true;  // AttnPlan::Shape
};

struct AttnRate {
  double seconds;  // of a layer, the mean over as many as `kv` has room for; the best of some runs
  double bytes;    // of keys and values that the items read
  double flop;     // of scores and weighted values that are seen
};

// `kv` holds finite bf16 numbers, of which every block is a part. Throws std::invalid_argument where it has too few blocks.
AttnRate attention_rate(const Kernels& kernels, const AttnLoad& load, const Memory& kv, int repeats);

}  // namespace octavo
