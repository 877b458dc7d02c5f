#include "plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "pack.h"

namespace octavo {
namespace {

constexpr const char* kNames[kOps] = {
    "embed",
    "rms_norm",
    "layer_norm",
    "round",
    "norm_round",
    "linear",
    "linear_add",
    "linear_act_round",
    "linear_act_mul_round",
    "rope",
    "kv_write",
    "rope_kv_write",
    "attention",
    "act",
    "act_mul",
    "scale",
    "softcap",
    "clamp",
    "mul",
    "add",
    "gather_rows",
    "gather_cols",
    "lora_shrink",
    "lora_expand",
    "sample",
    "concat",
    "route",
    "dispatch",
    "expert_linear",
    "gather_expert_cols",
    "combine",
    "split_heads",
    "head_linear",
    "linear_sample",
};
constexpr const char* kActNames[kActKinds] = {
    "silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "sigmoid", "tanh", "swiglu_oai",
};
constexpr float kLog2e = 1.44269504f;

}  // namespace

const char* op_name(Op op) { return kNames[static_cast<int>(op)]; }

Op op_of(const std::string& name) {
  for (int i = 0; i < kOps; i++)
    if (name == kNames[i]) return static_cast<Op>(i);
  throw std::invalid_argument("operation '" + name + "' is unknown to the native backend");
}

ActKind act_kind_of(const std::string& name) {
  for (int i = 0; i < kActKinds; i++)
    if (name == kActNames[i]) return static_cast<ActKind>(i);
  throw std::invalid_argument("activation '" + name + "' is unknown to the native backend");
}

KvLayer GroupSpec::layer(int index) const {
  KvLayer kv{};
  kv.type = type;
  kv.block_stride = static_cast<int64_t>(block_bytes());
  kv.head_stride = kv.block_stride * num_blocks;
  kv.base = memory->data() + index * kv_heads * kv.head_stride;
  kv.kv_heads = kv_heads;
  kv.head_dim = head_dim;
  kv.value_dim = value_dim;
  return kv;
}

// ---------------------------------------------------------------- compile

Program::Program(std::shared_ptr<Pool> pool, const Kernels& kernels, ProgramSpec spec)
    : pool_(std::move(pool)),
      kernels_(kernels),
      spec_(std::move(spec)),
      arena_(std::max(spec_.arena_bytes[0], spec_.arena_bytes[1]), true),
      kv_pages_(spec_.groups.size()),
      counters_(spec_.nodes.size()),
      adapters_(static_cast<size_t>(std::max(spec_.limits.max_adapters, 0))),
      workers_(static_cast<size_t>(pool_->size())) {
  check_program(spec_, kernels_);
  for (const Node& node : spec_.nodes)
    if (node.op == Op::Embed && node.ids == Ids::TokenTypes)
      spec_.limits.token_types =
          std::min(spec_.limits.token_types, spec_.weights[static_cast<size_t>(node.weights[0])].n);
  for (Node& node : spec_.nodes) {
    for (float& slope : node.slopes) slope *= kLog2e;                 // as the kernels take them
    node.window = std::min(node.window, spec_.limits.max_model_len);  // a window that is longer means the same
  }

  for (const WeightSpec& w : spec_.weights)
    weights_.push_back(packed_weight(w.format, w.n, w.k, w.memory->data() + w.offset));
  const auto tokens = static_cast<size_t>(spec_.limits.max_tokens);
  for (const RopeSpec& rope : spec_.ropes) {
    cos_.emplace_back(tokens * rope.inv_freq.size());
    sin_.emplace_back(tokens * rope.inv_freq.size());
  }
  size_t rotated = 0, attention = 0;
  for (const GroupSpec& g : spec_.groups) {
    slots_.emplace_back(tokens);
    attention = std::max(attention, attn_scratch_floats(g.value_dim));
    rotated = std::max(rotated, static_cast<size_t>(g.kv_heads) * static_cast<size_t>(kBlock * g.head_dim));
  }
  size_t ranks = 0, experts = 0;
  for (const Node& node : spec_.nodes) {
    if (node.op != Op::Dispatch && node.op != Op::ExpertLinear && node.op != Op::GatherExpertCols &&
        node.op != Op::Combine)
      continue;
    experts = std::max(experts, static_cast<size_t>(node.experts));
    const auto times = static_cast<size_t>(spec_.values[static_cast<size_t>(node.b.value)].times);
    ranks = std::max(ranks, static_cast<size_t>(node.b.cols / 2) * tokens * times);
  }
  const bool draws = !spec_.nodes.empty() && spec_.nodes.back().op == Op::LinearSample;
  const size_t rows = draws ? static_cast<size_t>(spec_.limits.max_rows) : 0;
  draw_rows_.resize(rows);
  draw_states_.resize(rows * workers_.size());
  for (Worker& w : workers_) {
    w.piece.resize(draws ? piece_logits(spec_.limits.max_rows) : 0);
    w.rotated.resize(rotated);
    w.attention.resize((attention * sizeof(float) + kLine - 1) / kLine);
    w.sorted.starts.resize(experts + 1);
    w.sorted.ranks.resize(ranks);
    w.sorted.places.resize(ranks);
  }
  for (const Node& node : spec_.nodes) {
    int index = -1;
    if (node.op == Op::Attention) {
      const auto same = [&](const AttnPlan& p) { return p.serves(node.group, node.heads, node.window, node.causal); };
      index = static_cast<int>(std::find_if(attn_plans_.begin(), attn_plans_.end(), same) - attn_plans_.begin());
      if (index == static_cast<int>(attn_plans_.size())) {
        const GroupSpec& g = spec_.groups[static_cast<size_t>(node.group)];
        const AttnPlan::Shape shape{.group = node.group,
                                    .heads = node.heads,
                                    .kv_heads = g.kv_heads,
                                    .value_dim = g.value_dim,
                                    .window = node.window,
                                    .causal = node.causal,
                                    .share = spec_.share};
        attn_plans_.emplace_back(shape, spec_.limits.max_model_len, pool_->size());
      }
    }
    attn_plan_of_.push_back(index);
  }
}

}  // namespace octavo
