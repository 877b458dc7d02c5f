// Programs of random weights without Python, and steps to run them: every value has a place of its own, every node a
// barrier before it.
#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "check.h"
#include "pack.h"
#include "plan.h"

namespace octavo::check {

class Builder {
 public:
  ProgramSpec spec{};

  // max_tokens and max_len of limits; one KV group of `layers` layers in bf16, its blocks full of NaN.
  Builder(int max_tokens, int max_len, int vocab, int layers, int kv_heads, int head_dim, int blocks)
      : memory_(std::make_shared<Memory>(kWeightBytes, true)) {
    spec.limits = {max_tokens, max_tokens, 4, max_len, vocab, {blocks}};
    spec.small_tokens = 16;
    const size_t block = kv_block_bytes(KvType::BF16, head_dim, head_dim);
    const size_t all = static_cast<size_t>(layers) * static_cast<size_t>(kv_heads) * static_cast<size_t>(blocks);
    const auto arena = std::make_shared<Memory>(all * block, false);
    memset(arena->data(), 0xff, arena->bytes());
    spec.groups.push_back({arena, KvType::BF16, layers, kv_heads, head_dim, head_dim, blocks});
  }

 protected:
  Node& add(Op op, int layer = -1) {
    spec.nodes.emplace_back();
    spec.nodes.back().op = op;
    spec.nodes.back().layer = layer;
    return spec.nodes.back();
  }
  Node& add(Op op, Operand a, Operand out, int layer = -1) {
    Node& node = add(op, layer);
    node.a = a;
    node.out = out;
    return node;
  }
  void state(Node& node, int layer) {
    node.group = 0;
    node.group_layer = layer;
    node.head_dim = spec.groups[0].head_dim;
  }
  Operand value(const char* name, Act act, int cols, bool logit_rows = false, int times = 1) {
    spec.values.push_back({name, act, logit_rows, cols, {end_, end_}, times});
    end_ += value_bytes(spec.values.back(), static_cast<size_t>(spec.limits.max_tokens) * static_cast<size_t>(times));
    spec.arena_bytes[0] = spec.arena_bytes[1] = end_;
    return {static_cast<int>(spec.values.size()) - 1, 0, cols};
  }
  int vector(const char* name, int cols, const std::function<float(int)>& element) {
    const size_t at = place(static_cast<size_t>(cols) * 4);
    for (int i = 0; i < cols; i++) reinterpret_cast<float*>(memory_->data() + at)[i] = element(i);
    spec.weights.push_back({name, memory_, at, Format::F32, 1, cols, true});
    return static_cast<int>(spec.weights.size()) - 1;
  }
  int vector(const char* name, int cols, float mean = 0) {
    return vector(name, cols, [this, mean](int) { return mean + 0.1f * random_.normal(); });
  }
  int matrix(int n, int k) {  // Q8_0 blocks with scale 2^-8
    const size_t row = static_cast<size_t>(k / 32 * 34);
    std::vector<uint8_t> source(static_cast<size_t>(n) * row);
    for (size_t i = 0; i < source.size(); i++)
      source[i] = i % 34 == 0 ? 0 : i % 34 == 1 ? 0x1c : static_cast<uint8_t>(random_.next());
    return packed(Format::W8, n, k, source.data(), row);
  }
  int float_matrix(int n, int k) {
    std::vector<float> source(static_cast<size_t>(n) * static_cast<size_t>(k));
    for (float& x : source) x = 0.1f * random_.normal();
    return packed(Format::F32, n, k, reinterpret_cast<const uint8_t*>(source.data()), static_cast<size_t>(k) * 4);
  }
  size_t place(size_t bytes) {
    const size_t at = used_;
    used_ += align_up(bytes, kLine);
    if (used_ > kWeightBytes) abort();
    return at;
  }

  std::shared_ptr<Memory> memory_;
  Random random_{11};

 private:
  static constexpr size_t kWeightBytes = size_t{1} << 20;

  int packed(Format format, int n, int k, const uint8_t* source, size_t row) {
    const size_t at = place(packed_bytes(format, n, k));
    pack(format, source, row, n, k, memory_->data() + at, 0, (n + 31) / 32 * 32 / panel_cols(format));
    spec.weights.push_back({"matrix", memory_, at, format, n, k});
    return static_cast<int>(spec.weights.size()) - 1;
  }

  size_t used_ = 0, end_ = 0;
};

// Greedy draws of all rows of a step; owns the arrays.
class Steps {
 public:
  int num_invalid = 0;         // rows without a draw, so far
  std::vector<int32_t> drawn;  // tokens, so far
  bool agree = true;           // draws with logits: not where a program writes to values that are still read

  Steps(int max_len, int vocab, int blocks) : width_((max_len + kBlock - 1) / kBlock) {
    Random random(5);
    for (int i = 0; i < width_; i++) table_.push_back((i * 7 + 3) % blocks);
    for (int i = 0; i < max_len; i++) all_.push_back(random.below(vocab));
  }

  // Runs tokens [start, start + n) of one sequence and returns the logits [n][vocab] of all of them, which draws agree with;
  // none where they are not scored and the program stores none. adapters: a slot for each token, or null.
  std::vector<float> run(Program& program, int start, int n, bool scored = true, const int32_t* adapters = nullptr) {
    const auto count = static_cast<size_t>(n);
    const std::vector<int32_t> ids(all_.begin() + start, all_.begin() + start + n), starts{0, n}, zero(count + 1),
        none(count, -1);
    const std::vector<float> zeros(count), ones(count, 1);
    const std::vector<uint64_t> keys(count);
    std::vector<int32_t> positions, rows;
    for (int i = 0; i < n; i++) positions.push_back(start + i), rows.push_back(i);
    const int32_t context = start + n;
    Batch b{};
    b.tokens = b.rows = n;
    b.seqs = 1;
    b.token_ids = ids.data();
    b.positions = positions.data();
    b.seq_starts = starts.data();
    b.context_lens = &context;
    b.tables = {{table_.data(), width_}};
    b.copies = {{nullptr, 0}};
    b.logit_rows = rows.data();
    b.adapters = adapters;
    SamplingArrays& s = b.sampling;
    s.temperature = s.min_p = s.presence = s.frequency = zeros.data();
    s.top_p = s.repetition = ones.data();
    s.noise_key = keys.data();
    s.position = positions.data();
    s.num_top = scored ? zero.data() : none.data();
    s.top_k = s.bias_starts = s.history_starts = s.dry_starts = s.chain_starts = zero.data();
    s.target = s.mask_rows = none.data();
    std::vector<int32_t> tokens(count), ranks(count);
    std::vector<float> logprobs(count);
    std::vector<uint8_t> invalid(count);
    program.run(b, {tokens.data(), logprobs.data(), ranks.data(), nullptr, nullptr, 0, invalid.data()}, nullptr);
    drawn.insert(drawn.end(), tokens.begin(), tokens.end());
    for (uint8_t none_drawn : invalid) num_invalid += none_drawn;
    std::vector<float> logits;
    if (!program.logits()) return logits;
    const int vocab = program.spec().limits.vocab;
    logits.assign(program.logits(), program.logits() + n * vocab);
    for (size_t i = 0; agree && i < count; i++) {
      const auto row = logits.begin() + static_cast<ptrdiff_t>(i) * vocab;
      CHECK(invalid[i] || row[tokens[i]] == *std::max_element(row, row + vocab));
    }
    return logits;
  }

 private:
  int width_;
  std::vector<int32_t> table_, all_;
};

}  // namespace octavo::check
