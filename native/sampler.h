// Sampling of one row of logits: the native half of sampling/definition.py, which says what every step means.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels.h"

namespace octavo {

// The arrays of backends.base.SamplingArrays; ragged lists of row r are [starts[r], starts[r + 1]).
struct SamplingArrays {
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const float* repetition;
  const float* presence;
  const float* frequency;
  const uint64_t* noise_key;
  const int32_t* position;
  const int32_t* num_top;
  const int32_t* target;
  const int32_t* bias_starts;
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* history_starts;
  const int32_t* history_ids;
  const int32_t* history_counts;
};

// The arrays of backends.base.StepResult; row r of the tables starts at r * top_width.
struct SampledArrays {
  int32_t* token_ids;
  float* logprobs;
  int32_t* ranks;
  int32_t* top_ids;  // may be null where top_width is 0
  float* top_logprobs;
  int top_width;
  uint8_t* invalid;
};

// Work space of one thread; grows to the vocabulary once.
struct SampleScratch {
  std::vector<int32_t> ids;
  std::vector<std::pair<int32_t, float>> saved;  // logits to put back
};

// Draws (or scores the target of) row r from logits[vocab] into row r of out. The logits are changed meanwhile, and are
// as before on return. Ids in the arrays are < vocab; num_top <= top_width. Allocates only while the scratch grows.
void sample_row(const Kernels& kernels, const SamplingArrays& in, int r, float* logits, int vocab,
                SampleScratch& scratch, const SampledArrays& out);

}  // namespace octavo
