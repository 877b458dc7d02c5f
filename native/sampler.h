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
  const int32_t* mask_rows;  // -1: none
  const uint32_t* masks;     // [G][mask_width], bit set: allowed; ids from 32 * mask_width on are not
  int mask_width;
  const int32_t* dry_starts;
  const int32_t* dry_ids;
  const float* dry_values;  // subtracted after the penalties
  const int32_t* chain_starts;
  const int32_t* chain_ops;   // ChainOp
  const float* chain_values;  // [C][2]
};

// Samplers in an order of their own: sampling/chain.py has the same numbers, definition.py what each does.
enum class ChainOp : int32_t { Penalties, Dry, Temperature, TopNSigma, TopK, MinP, Typical, TopP, Xtc };
constexpr int kChainOps = 9;

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
  struct Candidate {
    int32_t id;
    float x;
  };
  std::vector<int32_t> ids;
  std::vector<std::pair<int32_t, float>> saved;  // logits to put back
  std::vector<float> masked;                     // [vocab] logits behind a mask
  std::vector<Candidate> candidates;             // of a chain
  std::vector<int32_t> places;                   // [vocab] index of a token among the candidates, if it is one
};

// Draws (or scores the target of) row r from logits[vocab] into row r of out. The logits are changed meanwhile, and are
// as before on return. Ids in the arrays are < vocab; num_top <= top_width. Allocates only while the scratch grows.
void sample_row(const Kernels& kernels, const SamplingArrays& in, int r, float* logits, int vocab,
                SampleScratch& scratch, const SampledArrays& out);

// Draws for row r, which has a chain, from logits x[vocab] with mask and bias applied: finite greatest, no NaN. Changes x.
int draw_by_chain(const Kernels& kernels, const SamplingArrays& in, int r, float* x, int vocab, SampleScratch& scratch);

// Whether the draw of row r looks at logits again once all are known: for scores, for what is added to some tokens, and for
// what depends on the order of all.
bool needs_logits(const SamplingArrays& in, int r, int vocab);

// 0: greedy.
float inverse_temperature(const SamplingArrays& in, int r);

// The token that a row draws, of what `n` workers have seen between them: states[0], states[stride] and so on. -1: a logit
// is NaN or infinite, or none is allowed.
int end_draw(const DrawRow& row, const DrawState* states, int64_t stride, int n);

// What the noise of a row's tokens is keyed by: sampling.definition.noise_bits.
inline uint64_t noise_row(uint64_t key, int position) {
  uint64_t x = key + (static_cast<uint64_t>(position) + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// x as the penalties of row r leave it, for a token with `count` occurrences in the output.
inline float penalized(const SamplingArrays& in, int r, float x, int count) {
  x = x > 0 ? x / in.repetition[r] : x * in.repetition[r];
  if (count > 0) {
    x -= in.presence[r];
    x -= in.frequency[r] * static_cast<float>(count);
  }
  return x;
}

}  // namespace octavo
