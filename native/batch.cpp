#include "batch.h"

#include <stdexcept>
#include <string>

#include "kernels.h"

namespace octavo {
namespace {

// `value` in [low, high), or the error that says which.
void require(const char* array, int index, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value < high) return;
  throw std::invalid_argument(std::string(array) + "[" + std::to_string(index) + "] is " + std::to_string(value) +
                              ", must be in [" + std::to_string(low) + ", " + std::to_string(high) + ")");
}

void require_size(const char* what, int value, int low, int high) {
  if (value < low || value > high)
    throw std::invalid_argument("a step with " + std::to_string(value) + " " + what + "; this program takes " +
                                std::to_string(low) + " to " + std::to_string(high));
}

void check_starts(const char* array, const int32_t* starts, int rows, int total) {
  require(array, 0, starts[0], 0, 1);
  for (int r = 0; r < rows; r++) require(array, r + 1, starts[r + 1], starts[r], int64_t{total} + 1);
  require(array, rows, starts[rows], total, int64_t{total} + 1);
}

void check_sequences(const Batch& b, const Limits& limits) {
  require("seq_starts", 0, b.seq_starts[0], 0, 1);
  for (int s = 0; s < b.seqs; s++) {
    const int begin = b.seq_starts[s], end = b.seq_starts[s + 1], context = b.context_lens[s];
    require("seq_starts", s + 1, end, begin + 1, int64_t{b.tokens} + 1);
    require("context_lens", s, context, end - begin, int64_t{limits.max_model_len} + 1);
    for (int t = begin; t < end; t++) require("positions", t, b.positions[t], context - end + t, context - end + t + 1);
  }
  require("seq_starts", b.seqs, b.seq_starts[b.seqs], b.tokens, b.tokens + 1);
}

void check_blocks(const Batch& b, const Limits& limits) {
  for (size_t g = 0; g < limits.num_blocks.size(); g++) {
    const int blocks = limits.num_blocks[g];
    for (int i = 0; i < 2 * b.copies[g].n; i++) require("copies", i / 2, b.copies[g].pairs[i], 0, blocks);
    const auto& table = b.tables[g];
    for (int s = 0; s < b.seqs; s++) {
      const int used = (b.context_lens[s] + kBlock - 1) / kBlock;
      if (used > table.width)
        throw std::invalid_argument("block_tables has " + std::to_string(table.width) + " columns, sequence " +
                                    std::to_string(s) + " needs " + std::to_string(used));
      for (int i = 0; i < used; i++) require("block_tables", s, table.blocks[int64_t{s} * table.width + i], 0, blocks);
    }
  }
}

void check_sampling(const Batch& b, const Limits& limits, int top_width) {
  const SamplingArrays& in = b.sampling;
  for (int r = 0; r < b.rows; r++) {
    require("logit_rows", r, b.logit_rows[r], r ? b.logit_rows[r - 1] + 1 : 0, b.tokens);
    require("sampling.num_top", r, in.num_top[r], -1, int64_t{top_width} + 1);
    require("sampling.target", r, in.target[r], -1, limits.vocab);
    require("sampling.top_k", r, in.top_k[r], 0, int64_t{INT32_MAX} + 1);
    require("sampling.position", r, in.position[r], 0, int64_t{INT32_MAX} + 1);
  }
  if (top_width > limits.vocab)
    throw std::invalid_argument("num_top is larger than the vocabulary of " + std::to_string(limits.vocab));
  const int most_words = (limits.vocab + 31) / 32;
  require("sampling.masks: columns", 0, in.mask_width, 0, int64_t{most_words} + 1);
  for (int r = 0; r < b.rows; r++) require("sampling.mask_rows", r, in.mask_rows[r], -1, b.num_masks);
  check_starts("sampling.dry_starts", in.dry_starts, b.rows, b.num_dry);
  check_starts("sampling.chain_starts", in.chain_starts, b.rows, b.num_ops);
  for (int i = 0; i < b.num_dry; i++) require("sampling.dry_ids", i, in.dry_ids[i], 0, limits.vocab);
  for (int i = 0; i < b.num_ops; i++) require("sampling.chain_ops", i, in.chain_ops[i], 0, kChainOps);
  check_starts("sampling.bias_starts", in.bias_starts, b.rows, b.num_bias);
  check_starts("sampling.history_starts", in.history_starts, b.rows, b.num_history);
  for (int i = 0; i < b.num_bias; i++) require("sampling.bias_ids", i, in.bias_ids[i], 0, limits.vocab);
  for (int i = 0; i < b.num_history; i++) require("sampling.history_ids", i, in.history_ids[i], 0, limits.vocab);
}

}  // namespace

void check_batch(const Batch& b, const Limits& limits, int top_width) {
  require_size("tokens", b.tokens, 1, limits.max_tokens);
  require_size("sequences", b.seqs, 1, limits.max_seqs);
  require_size("logit rows", b.rows, 0, limits.max_rows);
  require_size("block tables", static_cast<int>(b.tables.size()), static_cast<int>(limits.num_blocks.size()),
               static_cast<int>(limits.num_blocks.size()));
  require_size("lists of copies", static_cast<int>(b.copies.size()), static_cast<int>(limits.num_blocks.size()),
               static_cast<int>(limits.num_blocks.size()));
  for (int t = 0; t < b.tokens; t++) require("token_ids", t, b.token_ids[t], 0, limits.vocab);
  for (int t = 0; b.token_types && t < b.tokens; t++)
    require("token_types", t, b.token_types[t], 0, limits.token_types);
  for (int t = 0; b.adapters && t < b.tokens; t++) require("adapters", t, b.adapters[t], -1, limits.max_adapters);
  check_sequences(b, limits);
  check_blocks(b, limits);
  check_sampling(b, limits, top_width);
}

}  // namespace octavo
