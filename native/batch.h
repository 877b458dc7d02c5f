// One step's arrays, as views of numpy arrays that live until the step is done, and the check of everything in them.
#pragma once
#include <cstdint>
#include <vector>

#include "sampler.h"

namespace octavo {

struct Batch {
  int tokens, seqs, rows;       // T, S, R
  const int32_t* token_ids;     // [T]
  const int32_t* positions;     // [T]
  const int32_t* seq_starts;    // [S + 1]
  const int32_t* context_lens;  // [S]
  struct Table {
    const int32_t* blocks;  // [S][width]
    int width;
  };
  struct Copies {
    const int32_t* pairs;  // [n][2] source, destination
    int n;
  };
  std::vector<Table> tables;   // per KV group
  std::vector<Copies> copies;  // per KV group
  const int32_t* logit_rows;   // [R]
  SamplingArrays sampling;
  int num_bias, num_history, num_masks, num_dry, num_ops;  // lengths of the ragged arrays
  const int32_t* token_types = nullptr;                    // [T], or null: all 0
  const int32_t* adapters = nullptr;                       // [T] slot, -1: none; or null: none at all
};

struct Limits {
  int max_tokens, max_rows, max_seqs, max_model_len;
  int vocab;
  std::vector<int> num_blocks;  // per KV group
  int max_adapters = 0;         // slots
  int token_types = INT32_MAX;  // rows of the table of types, where there is one
};

// Throws std::invalid_argument naming the array, the index, the value and the limit.
void check_batch(const Batch& batch, const Limits& limits, int top_width);

}  // namespace octavo
