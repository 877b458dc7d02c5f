// What a program is held to before it runs: values, weights and caches lie within their memory, and every node fits its
// operands.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "pack.h"
#include "plan.h"

namespace octavo {
namespace {

// Products of sizes up to these stay far from where integers wrap.
constexpr int kMaxTimes = 1024;       // rows of a value per row of the step: experts of a token, or heads
constexpr int kMaxHeads = 4096;       // also layers of a KV group, and adapters
constexpr int kMaxWindow = 1 << 30;   // a position and a window have a sum
constexpr int kMaxSize = (1 << 26);   // columns, features, tokens of a step, vocabulary
constexpr int kMaxParts = (1 << 18);  // weights of one node

// Columns of a target between shrinking and expanding: one number for all nodes, which adapters are held to.
int lora_rank(const ProgramSpec& spec) {
  for (const Node& node : spec.nodes)
    if (node.op == Op::LoraShrink && !node.targets.empty())
      return node.out.cols / static_cast<int>(node.targets.size());
  return 0;
}

// The checks of one node; every message starts with the operation and its layer.
class NodeCheck {
 public:
  NodeCheck(const ProgramSpec& spec, const Node& node, const Kernels& kernels)
      : spec_(spec), node_(node), kernels_(kernels) {}

  void operator()() const {
    need(node_.heads >= 0 && node_.heads <= kMaxHeads, "has a number of heads that is not possible");
    need(node_.weights.size() <= kMaxParts && node_.targets.size() <= kMaxParts && node_.ins.size() <= kMaxParts,
         "has too many parts");
    switch (node_.op) {
      case Op::Embed: return embed();
      case Op::RmsNorm:
      case Op::LayerNorm:
      case Op::NormRound: return norm();
      case Op::Round: return round();
      case Op::Linear:
      case Op::LinearAdd:
      case Op::LinearActRound:
      case Op::LinearActMulRound: return linear();
      case Op::Rope:
      case Op::KvWrite:
      case Op::RopeKvWrite: return rope_kv();
      case Op::Attention: return attention();
      case Op::Act:
      case Op::Scale:
      case Op::Softcap:
      case Op::Clamp: return map();
      case Op::Mul: return mul();
      case Op::ActMul:
      case Op::Add: return elementwise();
      case Op::GatherRows: return gather();
      case Op::LoraShrink:
      case Op::LoraExpand: return lora();
      case Op::GatherCols: return gather_cols();
      case Op::Sample: return sample();
      case Op::LinearSample: return linear_sample();
      case Op::Concat: return concat();
      case Op::Route: return route();
      case Op::Dispatch: return dispatch();
      case Op::ExpertLinear: return expert_linear();
      case Op::GatherExpertCols: return gather_expert_cols();
      case Op::Combine: return combine();
      case Op::SplitHeads: return split_heads();
      case Op::HeadLinear: return head_linear();
    }
  }

 private:
  void need(bool ok, const std::string& what) const {
    if (!ok)
      throw std::invalid_argument(std::string(op_name(node_.op)) + " of layer " + std::to_string(node_.layer) + ": " +
                                  what);
  }
  const ValueSpec& value(const Operand& x, const char* role) const {
    need(x.value >= 0 && x.value < static_cast<int>(spec_.values.size()), std::string(role) + " is missing");
    const ValueSpec& v = spec_.values[static_cast<size_t>(x.value)];
    need(x.start >= 0 && x.cols > 0 && x.start <= v.cols && x.cols <= v.cols - x.start,
         std::string(role) + " leaves the columns of " + v.name);
    need(v.act == Act::F32 || (x.start == 0 && x.cols == v.cols),
         std::string(role) + " is a slice of the rounded " + v.name);
    return v;
  }
  const ValueSpec& f32(const Operand& x, const char* role, int64_t cols) const {
    const ValueSpec& v = value(x, role);
    need(v.act == Act::F32, std::string(role) + " must be float32");
    need(x.cols == cols,
         std::string(role) + " has " + std::to_string(x.cols) + " columns, expected " + std::to_string(cols));
    return v;
  }
  void same_rows(const ValueSpec& a, const ValueSpec& b, int times = 1) const {
    need(a.logit_rows == b.logit_rows && a.times * times == b.times, a.name + " and " + b.name + " differ in rows");
  }
  // Float32 with a row per token of the step, or per logit row.
  void tokens(const Operand& x, const char* role, int cols, bool logit_rows = false) const {
    const ValueSpec& v = f32(x, role, cols);
    need(v.logit_rows == logit_rows && v.times == 1,
         std::string(role) + " must have a row per " + (logit_rows ? "logit row" : "token"));
  }
  const WeightSpec& weight(int index) const {
    need(index >= 0 && index < static_cast<int>(spec_.weights.size()), "weight is missing");
    return spec_.weights[static_cast<size_t>(index)];
  }
  void vector(int cols) const { vector(node_.vector, cols); }
  void vector(int index, int64_t cols) const {
    const WeightSpec& w = weight(index);
    need(w.vector && w.k == cols, w.name + " must be a float32 vector of " + std::to_string(cols));
  }
  const WeightSpec& matrix(int index) const {
    const WeightSpec& w = weight(index);
    need(!w.vector, w.name + " must be a matrix");
    return w;
  }
  // The matrix of a product with x, which has `cols` columns.
  const WeightSpec& product(int index, const ValueSpec& x, int cols) const {
    const WeightSpec& w = matrix(index);
    need(w.k == cols, w.name + " has " + std::to_string(w.k) + " input features, expected " + std::to_string(cols));
    need(kernels_.gemm[static_cast<int>(w.format)][static_cast<int>(x.act)] != nullptr,
         w.name + ": no kernel for its format");
    return w;
  }

  void embed() const {
    need(node_.weights.size() == 1, "takes one table");
    const WeightSpec& w = matrix(node_.weights[0]);
    need(node_.offset >= 0, "offset is negative");
    if (node_.ids == Ids::Positions)
      need(w.n - node_.offset >= spec_.limits.max_model_len, w.name + " has not a row for every position");
    else if (node_.ids == Ids::TokenTypes) need(node_.offset == 0, "token types have no offset");
    else need(w.n == spec_.limits.vocab && node_.offset == 0, w.name + " has not the vocabulary's rows");
    tokens(node_.out, "output", w.k);
  }
  void norm() const {
    const ValueSpec &x = f32(node_.a, "input", node_.a.cols), &y = value(node_.out, "output");
    const int cols = node_.a.cols, dim = node_.head_dim;
    same_rows(x, y);
    need(node_.out.cols == cols, "output and input differ in columns");
    need((node_.op == Op::NormRound) == (y.act != Act::F32), "output has the wrong type");
    need(node_.op == Op::NormRound || node_.centred == (node_.op == Op::LayerNorm), "is of the other kind");
    need(node_.eps > 0, "eps must be positive");
    need(dim > 0 && cols % dim == 0, "columns are no multiple of the head size");
    need(node_.op != Op::NormRound || dim == cols, "rounds whole rows");
    if (node_.vector >= 0) vector(weight(node_.vector).k == dim ? dim : cols);
    if (node_.bias >= 0) {
      need(node_.vector >= 0, "has a bias without a weight");
      vector(node_.bias, weight(node_.vector).k);
    }
  }
  void round() const {
    const ValueSpec& y = value(node_.out, "output");
    same_rows(f32(node_.a, "input", node_.out.cols), y);
    need(y.act != Act::F32, "output must be of a rounded type");
  }
  void linear() const {
    const ValueSpec &x = value(node_.a, "input"), &y = value(node_.out, "output");
    same_rows(x, y);
    need(!node_.weights.empty(), "has no weight");
    int64_t n = 0;
    for (int index : node_.weights) n += product(index, x, node_.a.cols).n;
    if (node_.vector >= 0) vector(node_.vector, n);
    if (node_.op == Op::LinearActMulRound) {
      need(node_.weights.size() == 2, "takes a gate and an up weight");
      const WeightSpec &gate = weight(node_.weights[0]), &up = weight(node_.weights[1]);
      need(gate.format == up.format && gate.n == up.n && gate.n % kTaskCols == 0,
           gate.name + " and " + up.name + " do not match");
      need(node_.out.cols == gate.n && y.act != Act::F32, "output has the wrong size or type");
      return;
    }
    if (node_.op == Op::LinearActRound) {
      need(node_.weights.size() == 1 && n % kTaskCols == 0, "takes one weight of a multiple of 32 columns");
      need(node_.out.cols == n && y.act != Act::F32, "output has the wrong size or type");
      need(kernels_.act[static_cast<int>(node_.act)], "there is no such activation of one input");
      return;
    }
    f32(node_.out, "output", n);
    if (node_.op == Op::LinearAdd) same_rows(f32(node_.b, "residual", n), y);
  }
  void group() const {
    need(node_.group >= 0 && node_.group < static_cast<int>(spec_.groups.size()), "KV group is missing");
    const GroupSpec& g = spec_.groups[static_cast<size_t>(node_.group)];
    need(node_.group_layer >= 0 && node_.group_layer < g.layers, "layer is not in its KV group");
    need(node_.head_dim == g.head_dim, "head size differs from the KV group's");
  }
  void rope_kv() const {
    need(node_.head_dim > 0, "head size is missing");
    if (node_.op != Op::KvWrite) {
      tokens(node_.a, "input", node_.a.cols);
      tokens(node_.out, "output", node_.a.cols);
      need(node_.a.cols % node_.head_dim == 0, "columns are no multiple of the head size");
      need(node_.rope >= 0 && node_.rope < static_cast<int>(spec_.ropes.size()), "frequencies are missing");
      const size_t half = spec_.ropes[static_cast<size_t>(node_.rope)].inv_freq.size();
      need(half > 0 && 2 * half <= static_cast<size_t>(node_.head_dim), "more frequencies than the head has pairs");
    }
    if (node_.op == Op::Rope) return;
    group();
    const GroupSpec& g = spec_.groups[static_cast<size_t>(node_.group)];
    tokens(node_.b, "k", g.kv_heads * g.head_dim);
    tokens(node_.c, "v", g.kv_heads * g.value_dim);
  }
  void attention() const {
    group();
    const GroupSpec& g = spec_.groups[static_cast<size_t>(node_.group)];
    need(node_.heads > 0 && node_.heads % g.kv_heads == 0, "query heads are no multiple of the KV heads");
    const int cols = node_.heads * g.value_dim;
    const ValueSpec& y = value(node_.out, "output");
    tokens(node_.a, "q", node_.heads * g.head_dim);
    need(!y.logit_rows && y.times == 1, "output must have a row per token");
    need(node_.out.cols == cols, "output has the wrong size");
    need(y.act == Act::F32 || cols / g.kv_heads % 32 == 0, "a rounded output needs heads in groups of 32 columns");
    need(node_.scale > 0, "scale must be positive");
    need(node_.window >= 0 && node_.window <= kMaxWindow && node_.softcap >= 0,
         "window and softcap must not be negative, window not above " + std::to_string(kMaxWindow));
    need(node_.slopes.empty() || node_.slopes.size() == static_cast<size_t>(node_.heads), "a slope per head is needed");
    if (node_.vector >= 0) vector(node_.heads);
  }
  void map() const {
    same_rows(f32(node_.a, "input", node_.out.cols), f32(node_.out, "output", node_.out.cols));
    need(node_.op != Op::Act || kernels_.act[static_cast<int>(node_.act)], "there is no such activation of one input");
    need(node_.op != Op::Softcap || node_.softcap > 0, "softcap must be positive");
    need(node_.op != Op::Clamp || node_.low <= node_.high, "low is above high");
  }
  void mul() const {
    const int cols = node_.out.cols;
    const ValueSpec& y = f32(node_.out, "output", cols);
    same_rows(f32(node_.a, "first input", cols), y);
    if (node_.vector >= 0) return vector(cols);
    same_rows(f32(node_.b, "second input", node_.b.cols == 1 ? 1 : cols), y);
  }
  void elementwise() const {
    const ValueSpec &a = f32(node_.a, "first input", node_.out.cols), &b = f32(node_.b, "second input", node_.out.cols);
    const ValueSpec& y = f32(node_.out, "output", node_.out.cols);
    same_rows(a, y);
    same_rows(b, y);
  }
  void gather() const {
    tokens(node_.a, "input", node_.out.cols);
    tokens(node_.out, "output", node_.a.cols, true);
  }
  void lora() const {
    const bool expands = node_.op == Op::LoraExpand;
    const int targets = static_cast<int>(node_.targets.size());
    need(targets > 0 && spec_.limits.max_adapters > 0, "has no target, or there are no adapters");
    int64_t n = 0;
    for (int index : node_.targets) {
      need(index >= 0 && index < static_cast<int>(spec_.targets.size()), "target is missing");
      const LoraTarget& target = spec_.targets[static_cast<size_t>(index)];
      need(expands || target.k == node_.a.cols, target.name + " has another input");
      n += target.n;
    }
    const Operand& low = expands ? node_.a : node_.out;
    need(low.cols > 0 && low.cols % targets == 0, "columns are no multiple of the targets");
    need(low.cols / targets == lora_rank(spec_), "has another rank than the first LoRA node");
    tokens(node_.a, "input", node_.a.cols);
    tokens(node_.out, "output", expands ? n : low.cols);
    if (expands) tokens(node_.b, "what is added to", n);
  }
  void gather_cols() const {
    const int cols = node_.out.cols;
    same_rows(f32(node_.a, "input", cols), f32(node_.out, "output", cols));
    order(cols, 1);
  }
  // A vector of columns for each of some orders.
  void order(int cols, int orders) const {
    const int64_t size = int64_t{orders} * cols;
    vector(node_.vector, size);
    const WeightSpec& w = weight(node_.vector);
    const auto* first = reinterpret_cast<const float*>(w.memory->data() + w.offset);
    const auto inside = [cols](float i) { return i >= 0 && i < static_cast<float>(cols) && i == std::floor(i); };
    need(cols < (1 << 24) && std::all_of(first, first + size, inside), w.name + " holds what is no column");
  }
  void linear_sample() const {
    const ValueSpec& x = value(node_.a, "input");
    const int vocab = spec_.limits.vocab;
    tokens(node_.out, "logits", vocab, true);
    same_rows(x, value(node_.out, "logits"));
    need(node_.weights.size() == 1, "takes one weight");
    const WeightSpec& w = product(node_.weights[0], x, node_.a.cols);
    need(w.n == vocab, w.name + " has another size");
    if (node_.vector >= 0) vector(vocab);
    need(node_.scale != 0 && node_.softcap >= 0, "scale must not be 0, softcap not negative");
    need(&node_ == &spec_.nodes.back(), "must come last");
  }
  void sample() const { tokens(node_.a, "logits", spec_.limits.vocab, true); }

  void concat() const {
    const ValueSpec& y = f32(node_.out, "output", node_.out.cols);
    int64_t cols = 0;
    for (const Operand& x : node_.ins) {
      same_rows(f32(x, "input", x.cols), y);
      need(node_.heads > 0 && x.cols % node_.heads == 0, "columns are no multiple of the heads");
      cols += x.cols;
    }
    need(cols == node_.out.cols, "output and inputs differ in columns");
  }
  void route() const {
    const RouteArgs& r = node_.route;
    need(r.experts > 0 && r.experts <= kMaxExperts && r.top_k > 0 && r.top_k <= std::min(r.experts, kMaxTopK),
         std::to_string(r.top_k) + " of " + std::to_string(r.experts) + " experts: at most " +
             std::to_string(kMaxTopK) + " of " + std::to_string(kMaxExperts) + " are possible");
    need(r.groups > 0 && r.experts % r.groups == 0 && r.top_groups > 0 && r.top_groups <= r.groups &&
             r.group_best > 0 && r.group_best <= r.experts / r.groups && r.top_k <= r.experts / r.groups * r.top_groups,
         "groups of experts disagree");
    same_rows(f32(node_.a, "scores", r.experts), f32(node_.out, "output", 2 * r.top_k));
    if (node_.vector >= 0) vector(r.experts);
  }
  void split_heads() const {
    need(node_.heads > 0, "has no heads");
    same_rows(f32(node_.a, "input", node_.heads * node_.out.cols), f32(node_.out, "output", node_.out.cols),
              node_.heads);
  }
  void head_linear() const {
    const ValueSpec &x = value(node_.a, "input"), &y = f32(node_.out, "output", node_.out.cols);
    need(node_.heads > 0 && node_.weights.size() == 1, "takes one weight for some heads");
    same_rows(y, x, node_.heads);
    const WeightSpec& w = product(node_.weights[0], x, node_.a.cols);
    need(w.n == node_.out.cols, w.name + " has another size");
    need(w.n % (node_.heads * kTaskCols) == 0, w.name + ": the columns of a head are no multiple of 32");
  }
  // Experts of each row of the step, which one Route before this node has chosen among as many as this node has.
  int routing(const ValueSpec& rows) const {
    const ValueSpec& chosen = f32(node_.b, "routing", node_.b.cols);
    same_rows(chosen, rows);
    const Node* route = nullptr;
    for (const Node& other : spec_.nodes) {
      if (other.out.value != node_.b.value) continue;
      need(other.op == Op::Route && !route && &other < &node_, chosen.name + " is not the result of one route");
      route = &other;
    }
    need(route && node_.experts == route->route.experts && node_.b.start == route->out.start &&
             node_.b.cols == 2 * route->route.top_k,
         chosen.name + " is not the routing of " + std::to_string(node_.experts) + " experts");
    return route->route.top_k;
  }
  void dispatch() const {
    const ValueSpec &x = value(node_.a, "input"), &y = value(node_.out, "output");
    need(x.act == y.act && node_.a.cols == node_.out.cols, "output and input differ");
    same_rows(x, y, routing(x));
  }
  void expert_linear() const {
    const ValueSpec &x = value(node_.a, "input"), &y = f32(node_.out, "output", node_.out.cols);
    same_rows(x, y);
    const ValueSpec& r = value(node_.b, "routing");
    same_rows(r, y, routing(r));
    const auto experts = static_cast<size_t>(node_.experts), each = node_.weights.size() / experts;
    need(each > 0 && node_.weights.size() == each * experts, "has not as many weights for each expert");
    for (size_t e = 0; e < experts; e++) {
      int64_t n = 0;
      for (size_t i = 0; i < each; i++) n += product(node_.weights[e * each + i], x, node_.a.cols).n;
      need(n == node_.out.cols, "expert " + std::to_string(e) + " has " + std::to_string(n) + " output features");
    }
    if (node_.vector >= 0) vector(node_.vector, int64_t{node_.experts} * node_.out.cols);
  }
  void gather_expert_cols() const {
    const int cols = node_.out.cols;
    same_rows(f32(node_.a, "input", cols), f32(node_.out, "output", cols));
    const ValueSpec& r = value(node_.b, "routing");
    same_rows(r, value(node_.out, "output"), routing(r));
    order(cols, node_.experts);
  }
  void combine() const {
    const ValueSpec &x = f32(node_.a, "input", node_.out.cols), &y = f32(node_.out, "output", node_.out.cols);
    same_rows(y, x, routing(y));
  }

  const ProgramSpec& spec_;
  const Node& node_;
  const Kernels& kernels_;
};

void check_memory(const ProgramSpec& spec) {
  auto need = [](bool ok, const std::string& what) {
    if (!ok) throw std::invalid_argument(what);
  };
  auto sized = [](int n, int most) { return n >= 1 && n <= most; };
  const Limits& l = spec.limits;
  need(sized(l.max_tokens, kMaxSize) && sized(l.max_rows, kMaxSize) && sized(l.max_seqs, kMaxSize) &&
           sized(l.max_model_len, kMaxSize) && sized(l.vocab, kMaxSize) && sized(spec.small_tokens, kMaxSize) &&
           l.max_adapters >= 0 && l.max_adapters <= kMaxHeads,
       "limits must be positive and not above " + std::to_string(kMaxSize));
  for (const ValueSpec& v : spec.values)
    for (int p = 0; p < kPlans; p++) {
      const int tokens = p ? l.max_tokens : std::min(l.max_tokens, spec.small_tokens);
      need(sized(v.cols, kMaxSize) && sized(v.times, kMaxTimes), v.name + " has no columns, no rows or too many");
      const size_t rows = static_cast<size_t>(v.logit_rows ? std::min(l.max_rows, tokens) : tokens),
                   bytes = value_bytes(v, rows * static_cast<size_t>(v.times));
      need(v.offset[p] % kLine == 0 && v.offset[p] <= spec.arena_bytes[p] && bytes <= spec.arena_bytes[p] - v.offset[p],
           v.name + " lies outside of the arena");
    }
  for (const WeightSpec& w : spec.weights) {
    need(sized(w.n, kMaxSize) && sized(w.k, kMaxSize) && (!w.vector || (w.n == 1 && w.format == Format::F32)),
         w.name + " has no possible size");
    const size_t bytes = w.vector ? static_cast<size_t>(w.k) * 4 : packed_bytes(w.format, w.n, w.k);
    need(w.memory && w.offset % kLine == 0 && w.offset <= w.memory->bytes() && bytes <= w.memory->bytes() - w.offset,
         w.name + " lies outside of its memory");
  }
  for (const LoraTarget& target : spec.targets)
    need(sized(target.n, kMaxSize) && sized(target.k, kMaxSize), target.name + " has no possible size");
  need(l.num_blocks.size() == spec.groups.size(), "a block count per KV group is needed");
  for (size_t i = 0; i < spec.groups.size(); i++) {
    const GroupSpec& g = spec.groups[i];
    const std::string name = "KV group " + std::to_string(i);
    const int most = g.type == KvType::I8 ? kMaxHeadDimI8 : kMaxHeadDim;
    for (int dim : {g.head_dim, g.value_dim})
      need(dim > 0 && dim % 16 == 0 && dim <= most,
           name + ": head size " + std::to_string(dim) + " must be a multiple of 16, at most " + std::to_string(most));
    need(g.type != KvType::I8 || g.value_dim == g.head_dim, name + ": int8 keys and values must have one size");
    need(sized(g.layers, kMaxHeads) && sized(g.kv_heads, kMaxHeads) && g.num_blocks > 0,
         name + " has no possible size");
    const size_t blocks =
        static_cast<size_t>(g.layers) * static_cast<size_t>(g.kv_heads) * static_cast<size_t>(g.num_blocks);
    need(g.memory && g.memory->bytes() % g.block_bytes() == 0 && g.memory->bytes() / g.block_bytes() == blocks,
         name + ": its memory has the wrong size");
    need(l.num_blocks[i] == g.num_blocks, name + ": another number of blocks is promised to batches");
  }
}

}  // namespace

size_t value_bytes(const ValueSpec& v, size_t r) {
  const size_t k_pad = align_up(static_cast<size_t>(v.cols), 64);
  switch (v.act) {
    case Act::F32: return align_up(r * static_cast<size_t>(v.cols) * 4, kLine);
    case Act::BF16:
      return align_up(r * static_cast<size_t>(act_ld(v.act, static_cast<int>(k_pad))) * 2, kLine) +
             align_up(r * k_pad / 32 * 4, kLine);
    case Act::A8:
    case Act::A16:
      r *= static_cast<size_t>(int8_rows(v.act));
      return align_up(r * k_pad, kLine) + 4 * align_up(r * k_pad / 32 * 4, kLine);
  }
  return 0;
}

void check_program(const ProgramSpec& spec, const Kernels& kernels) {
  check_memory(spec);
  for (const Node& node : spec.nodes) NodeCheck(spec, node, kernels)();
}

}  // namespace octavo
