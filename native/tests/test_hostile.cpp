#include <memory>
// A program of every operation with one field changed at a time, to whatever it may hold: it is refused, or runs and touches
// no memory that is not its own, which the sanitizers see.
#include <climits>
#include <functional>
#include <stdexcept>
#include <string_view>

#include "programs.h"

using namespace octavo;

namespace {

constexpr int kVocab = 96, kHidden = 64, kHeads = 4, kKvHeads = 2, kHeadDim = 16, kExperts = 4, kTopK = 2, kRank = 8;
constexpr int kMaxTokens = 20, kMaxLen = 48, kBlocks = 6, kAdapters = 2;

class EveryOperation : public check::Builder {
 public:
  // fused: draws are made beside the head's product
  explicit EveryOperation(bool fused) : Builder(kMaxTokens, kMaxLen, kVocab, 2, kKvHeads, kHeadDim, kBlocks) {
    spec.ropes.push_back({{1, 0.3, 0.1, 0.03}, 1});
    spec.limits.max_adapters = kAdapters;
    spec.targets = {{"one", 32, kHidden}, {"two", 48, kHidden}};
    const Operand x = f32("x", kHidden), y = f32("y", kHidden), rounded = value("rounded", Act::A8, kHidden);
    embeddings(x, y);
    norms(x, y, rounded);
    attention(x, rounded);
    maps(x, y, rounded);
    adapters(x);
    heads(x, y);
    experts(x, y, rounded);
    end(x, fused);
  }

 private:
  Operand f32(const char* name, int cols, int times = 1) { return value(name, Act::F32, cols, false, times); }

  void embeddings(Operand x, Operand y) {
    const auto embed = [&](int table, Operand out, Ids ids, int offset) {
      Node& node = add(Op::Embed);
      node.weights = {table};
      node.out = out;
      node.ids = ids;
      node.offset = offset;
    };
    embed(matrix(kVocab, kHidden), x, Ids::Tokens, 0);
    embed(float_matrix(kMaxLen + 2, kHidden), y, Ids::Positions, 2);
    add(Op::Add, x, x).b = y;
    embed(float_matrix(1, kHidden), y, Ids::TokenTypes, 0);
  }
  void norms(Operand x, Operand y, Operand rounded) {
    const auto norm = [&](Op op, Operand out, int dim, int weight, int bias) {
      Node& node = add(op, x, out);
      node.eps = 1e-5f;
      node.head_dim = dim;
      node.vector = weight;
      node.bias = bias;
      node.centred = op == Op::LayerNorm;
    };
    norm(Op::LayerNorm, y, kHidden, vector("w", kHidden, 1), vector("b", kHidden));
    norm(Op::RmsNorm, y, kHeadDim, vector("w", kHeadDim, 1), -1);
    norm(Op::NormRound, rounded, kHidden, -1, -1);
    add(Op::Round, y, rounded);
  }
  void attention(Operand x, Operand rounded) {
    const int q = kHeads * kHeadDim, kv = kKvHeads * kHeadDim;
    const Operand qkv = f32("qkv", q + 2 * kv), turned = f32("turned", q), out = value("attended", Act::BF16, q);
    Node& linear = add(Op::Linear, rounded, qkv, 0);
    linear.weights = {matrix(q, kHidden), matrix(2 * kv, kHidden)};
    linear.vector = vector("bias", q + 2 * kv);
    const auto state_of = [&](Op op, Operand to, int layer) -> Node& {
      Node& node = add(op, {qkv.value, 0, q}, to, layer);
      node.b = {qkv.value, q, kv};
      node.c = {qkv.value, q + kv, kv};
      node.rope = 0;
      state(node, layer);
      return node;
    };
    state_of(Op::Rope, turned, 0);
    state_of(Op::KvWrite, {}, 0);
    state_of(Op::RopeKvWrite, turned, 1);
    for (int layer : {0, 1}) {
      Node& node = add(Op::Attention, turned, layer ? out : turned, layer);
      state(node, layer);
      node.heads = kHeads;
      node.scale = 0.25f;
      if (!layer) continue;
      node.window = 7;
      node.softcap = 30;
      node.slopes = {1, 0.5f, 0.25f, 0.125f};
      node.vector = vector("sinks", kHeads);
    }
    Node& added = add(Op::LinearAdd, out, x, 1);
    added.weights = {float_matrix(kHidden, q)};
    added.b = x;
  }
  void maps(Operand x, Operand y, Operand rounded) {
    const Operand inner = value("inner", Act::A8, 96), wide = f32("wide", 96), one = f32("one", 1);
    add(Op::Act, x, y).act = ActKind::Gelu;
    Node& gated = add(Op::ActMul, x, y);
    gated.b = y;
    add(Op::Scale, y, y).scale = 0.5f;
    add(Op::Softcap, y, y).softcap = 10;
    Node& clamp = add(Op::Clamp, y, y);
    clamp.low = -3, clamp.high = 3;
    add(Op::Mul, y, y).vector = vector("factors", kHidden, 1);
    add(Op::Mul, y, y).b = x;
    Node& row = add(Op::Linear, x, one);
    row.weights = {float_matrix(1, kHidden)};
    add(Op::Mul, y, y).b = one;
    Node& acted = add(Op::LinearActRound, rounded, inner);
    acted.weights = {matrix(96, kHidden)};
    acted.act = ActKind::Relu2;
    Node& pair = add(Op::LinearActMulRound, rounded, inner);
    pair.weights = {matrix(96, kHidden), matrix(96, kHidden)};
    pair.vector = vector("bias", 192);
    Node& back = add(Op::Linear, inner, wide);
    back.weights = {matrix(96, 96)};
    add(Op::GatherCols, {wide.value, 32, kHidden}, y).vector =
        vector("order", kHidden, [](int i) { return static_cast<float>(kHidden - 1 - i); });
  }
  void adapters(Operand x) {
    const Operand low = f32("low", 2 * kRank), added = f32("added", 80);
    Node& linear = add(Op::Linear, x, added);
    linear.weights = {float_matrix(80, kHidden)};
    add(Op::LoraShrink, x, low).targets = {0, 1};
    Node& expand = add(Op::LoraExpand, low, added);
    expand.b = added;
    expand.targets = {0, 1};
  }
  void heads(Operand x, Operand y) {
    const Operand by_head = f32("by head", 32, 2), latent = f32("latent", 64);
    add(Op::SplitHeads, x, by_head).heads = 2;
    Node& linear = add(Op::HeadLinear, by_head, latent);
    linear.heads = 2;
    linear.weights = {float_matrix(64, 32)};
    Node& concat = add(Op::Concat);
    concat.ins = {{latent.value, 0, 32}, {x.value, 32, 32}};
    concat.heads = 2;
    concat.out = y;
  }
  void experts(Operand x, Operand y, Operand rounded) {
    const Operand scores = f32("scores", kExperts), routing = f32("routing", 2 * kTopK);
    const Operand sorted = value("sorted", Act::A8, kHidden, false, kTopK), out = f32("of experts", kHidden, kTopK);
    Node& linear = add(Op::Linear, x, scores);
    linear.weights = {float_matrix(kExperts, kHidden)};
    Node& route = add(Op::Route, scores, routing);
    route.route.experts = kExperts, route.route.top_k = kTopK;
    route.route.scoring = Scoring::Sigmoid, route.route.normalise = true, route.route.scale = 1;
    route.route.groups = 2, route.route.top_groups = 1, route.route.group_best = 1;
    route.vector = vector("correction", kExperts);
    const auto chosen = [&](Op op, Operand from, Operand to) -> Node& {
      Node& node = add(op, from, to);
      node.b = routing;
      node.experts = kExperts;
      return node;
    };
    chosen(Op::Dispatch, rounded, sorted);
    Node& product = chosen(Op::ExpertLinear, sorted, out);
    for (int i = 0; i < kExperts; i++) product.weights.push_back(matrix(kHidden, kHidden));
    product.vector = vector("bias", kExperts * kHidden);
    const Operand turned = f32("turned by expert", kHidden, kTopK);
    const auto backwards = [](int i) { return static_cast<float>(kHidden - 1 - i % kHidden); };
    chosen(Op::GatherExpertCols, out, turned).vector = vector("orders", kExperts * kHidden, backwards);
    chosen(Op::Combine, turned, y);
  }
  void end(Operand x, bool fused) {
    const Operand rows = value("rows", Act::F32, kHidden, true), logits = value("logits", Act::F32, kVocab, true);
    add(Op::GatherRows, x, rows);
    Node& linear = add(fused ? Op::LinearSample : Op::Linear, rows, logits);
    linear.weights = {float_matrix(kVocab, kHidden)};
    linear.scale = 1;
    if (!fused) add(Op::Sample).a = logits;
  }
};

using Change = std::function<void(ProgramSpec&)>;

// Collects changes of the parts of a program. `reach` finds the part in a copy of it.
class Changes {
 public:
  std::vector<Change> all;

  explicit Changes(const ProgramSpec& spec) {
    for (size_t i = 0; i < spec.nodes.size(); i++) node(spec, i);
    for (size_t i = 0; i < spec.values.size(); i++) {
      const auto at = [i](ProgramSpec& s) -> ValueSpec& { return s.values[i]; };
      const ValueSpec& v = spec.values[i];
      each<Act>({Act::F32, Act::BF16, Act::A8, Act::A16}, [at](ProgramSpec& s) -> Act& { return at(s).act; });
      number(v.cols, [at](ProgramSpec& s) -> int& { return at(s).cols; });
      number(v.times, [at](ProgramSpec& s) -> int& { return at(s).times; });
      flip([at](ProgramSpec& s) -> bool& { return at(s).logit_rows; });
      for (int p = 0; p < kPlans; p++)
        offset(v.offset[p], [at, p](ProgramSpec& s) -> size_t& { return at(s).offset[p]; });
    }
    for (size_t i = 0; i < spec.weights.size(); i++) {
      const auto at = [i](ProgramSpec& s) -> WeightSpec& { return s.weights[i]; };
      const WeightSpec& w = spec.weights[i];
      for (int f = 0; f < kFormats; f++)
        all.push_back([at, f](ProgramSpec& s) { at(s).format = static_cast<Format>(f); });
      number(w.n, [at](ProgramSpec& s) -> int& { return at(s).n; });
      number(w.k, [at](ProgramSpec& s) -> int& { return at(s).k; });
      flip([at](ProgramSpec& s) -> bool& { return at(s).vector; });
      offset(w.offset, [at](ProgramSpec& s) -> size_t& { return at(s).offset; });
    }
    group(spec.groups[0]);
    limits(spec);
  }

 private:
  template <class T, class Reach> void each(std::vector<T> values, Reach reach) {
    for (T v : values) all.push_back([reach, v](ProgramSpec& s) { reach(s) = v; });
  }
  template <class Reach> void number(int64_t now, Reach reach) {  // what does not fit an int wraps
    std::vector<int> values;
    for (int64_t v : {int64_t{-1}, int64_t{0}, int64_t{1}, now - 1, now + 1, now / 2, now * 2, now + 16, now + 32,
                      int64_t{1} << 20, int64_t{INT_MAX}, int64_t{INT_MIN}})
      values.push_back(static_cast<int>(v));
    each<int>(values, reach);
  }
  template <class Reach> void offset(size_t now, Reach reach) {
    each<size_t>({0, now + 1, now - kLine, now + kLine, now * 2, size_t{1} << 40, ~size_t{0}, ~size_t{63}}, reach);
  }
  template <class Reach> void real(Reach reach) { each<float>({NAN, INFINITY, -1, 0, 1e30f}, reach); }
  template <class Reach> void flip(Reach reach) {
    all.push_back([reach](ProgramSpec& s) { reach(s) = !reach(s); });
  }
  template <class Reach> void list(const std::vector<int>& now, Reach reach) {
    for (size_t i = 0; i < now.size(); i++)
      each<int>({-1, now[i] + 1, now[i] - 1, 0, 3, INT_MAX},
                [reach, i](ProgramSpec& s) -> int& { return reach(s)[i]; });
    all.push_back([reach](ProgramSpec& s) { reach(s).clear(); });
    all.push_back([reach](ProgramSpec& s) { reach(s).push_back(0); });
    if (!now.empty()) all.push_back([reach](ProgramSpec& s) { reach(s).push_back(reach(s)[0]); });
    if (!now.empty()) all.push_back([reach](ProgramSpec& s) { reach(s).pop_back(); });
  }
  template <class Reach> void operand(const ProgramSpec& spec, const Operand& now, Reach reach) {
    std::vector<int> values{-1, INT_MAX, INT_MIN};
    for (size_t i = 0; i <= spec.values.size(); i++) values.push_back(static_cast<int>(i));
    each<int>(values, [reach](ProgramSpec& s) -> int& { return reach(s).value; });
    number(now.start, [reach](ProgramSpec& s) -> int& { return reach(s).start; });
    number(now.cols, [reach](ProgramSpec& s) -> int& { return reach(s).cols; });
    for (size_t i = 0; i < spec.values.size(); i++)  // the whole of another value
      all.push_back([reach, i](ProgramSpec& s) { reach(s) = {static_cast<int>(i), 0, s.values[i].cols}; });
  }

  void node(const ProgramSpec& spec, size_t i) {
    const Node& n = spec.nodes[i];
    const auto at = [i](ProgramSpec& s) -> Node& { return s.nodes[i]; };
    for (int op = 0; op < kOps; op++) all.push_back([at, op](ProgramSpec& s) { at(s).op = static_cast<Op>(op); });
    for (Operand Node::* field : {&Node::a, &Node::b, &Node::c, &Node::out})
      operand(spec, n.*field, [at, field](ProgramSpec& s) -> Operand& { return at(s).*field; });
    for (size_t j = 0; j < n.ins.size(); j++)
      operand(spec, n.ins[j], [at, j](ProgramSpec& s) -> Operand& { return at(s).ins[j]; });
    for (int Node::* field : {&Node::vector, &Node::bias, &Node::heads, &Node::group, &Node::group_layer, &Node::window,
                              &Node::rope, &Node::head_dim, &Node::offset, &Node::experts})
      number(n.*field, [at, field](ProgramSpec& s) -> int& { return at(s).*field; });
    for (std::vector<int> Node::* field : {&Node::weights, &Node::targets})
      list(n.*field, [at, field](ProgramSpec& s) -> std::vector<int>& { return at(s).*field; });
    for (float Node::* field : {&Node::eps, &Node::scale, &Node::softcap, &Node::low, &Node::high})
      real([at, field](ProgramSpec& s) -> float& { return at(s).*field; });
    for (bool Node::* field : {&Node::causal, &Node::neox, &Node::centred})
      flip([at, field](ProgramSpec& s) -> bool& { return at(s).*field; });
    for (int kind = 0; kind < kActKinds; kind++)
      all.push_back([at, kind](ProgramSpec& s) { at(s).act = static_cast<ActKind>(kind); });
    each<Ids>({Ids::Tokens, Ids::Positions, Ids::TokenTypes}, [at](ProgramSpec& s) -> Ids& { return at(s).ids; });
    all.push_back([at](ProgramSpec& s) { at(s).slopes.resize(1); });
    if (n.op != Op::Route) return;
    for (int RouteArgs::* field :
         {&RouteArgs::experts, &RouteArgs::top_k, &RouteArgs::groups, &RouteArgs::top_groups, &RouteArgs::group_best})
      number(n.route.*field, [at, field](ProgramSpec& s) -> int& { return at(s).route.*field; });
    for (float RouteArgs::* field : {&RouteArgs::scale, &RouteArgs::jitter})
      real([at, field](ProgramSpec& s) -> float& { return at(s).route.*field; });
    for (int kind = 0; kind < kScorings; kind++)
      all.push_back([at, kind](ProgramSpec& s) { at(s).route.scoring = static_cast<Scoring>(kind); });
  }
  void group(const GroupSpec& g) {
    for (int GroupSpec::* field : {&GroupSpec::layers, &GroupSpec::kv_heads, &GroupSpec::head_dim,
                                   &GroupSpec::value_dim, &GroupSpec::num_blocks})
      number(g.*field, [field](ProgramSpec& s) -> int& { return s.groups[0].*field; });
    each<KvType>({KvType::BF16, KvType::F32, KvType::I8}, [](ProgramSpec& s) -> KvType& { return s.groups[0].type; });
    number(g.num_blocks, [](ProgramSpec& s) -> int& { return s.limits.num_blocks[0]; });
    all.push_back([](ProgramSpec& s) { s.limits.num_blocks.clear(); });
    all.push_back([](ProgramSpec& s) { s.groups.clear(), s.limits.num_blocks.clear(); });
  }
  void limits(const ProgramSpec& spec) {
    for (int Limits::* field : {&Limits::max_tokens, &Limits::max_rows, &Limits::max_seqs, &Limits::max_model_len,
                                &Limits::vocab, &Limits::max_adapters, &Limits::token_types})
      number(spec.limits.*field, [field](ProgramSpec& s) -> int& { return s.limits.*field; });
    number(spec.small_tokens, [](ProgramSpec& s) -> int& { return s.small_tokens; });
    for (int p = 0; p < kPlans; p++)
      offset(spec.arena_bytes[p], [p](ProgramSpec& s) -> size_t& { return s.arena_bytes[p]; });
    for (size_t i = 0; i < spec.targets.size(); i++) {
      number(spec.targets[i].n, [i](ProgramSpec& s) -> int& { return s.targets[i].n; });
      number(spec.targets[i].k, [i](ProgramSpec& s) -> int& { return s.targets[i].k; });
    }
    for (size_t size : {size_t{0}, size_t{8}, size_t{9}})
      all.push_back([size](ProgramSpec& s) { s.ropes[0].inv_freq.resize(size, 0.1); });
    for (size_t i = 0; i + 1 < spec.nodes.size(); i++)
      all.push_back([i](ProgramSpec& s) { std::swap(s.nodes[i], s.nodes[i + 1]); });
    for (size_t i = 0; i < spec.nodes.size(); i++)
      all.push_back([i](ProgramSpec& s) { s.nodes.erase(s.nodes.begin() + static_cast<ptrdiff_t>(i)); });
  }
};

// An adapter for both targets in float32.
struct Lora {
  std::shared_ptr<Memory> memory;
  std::vector<LoraSpec> parts;

  explicit Lora(const std::vector<LoraTarget>& targets) {
    size_t end = 0;
    for (size_t i = 0; i < targets.size(); i++) {
      const size_t a = packed_bytes(Format::F32, kRank, targets[i].k),
                   b = packed_bytes(Format::F32, targets[i].n, kRank);
      parts.push_back({static_cast<int>(i), Format::F32, kRank, end, end + a, 2});
      end += a + b;
    }
    memory = std::make_shared<Memory>(end, false);
    for (size_t i = 0; i < end / sizeof(float); i++) reinterpret_cast<float*>(memory->data())[i] = 0.01f;
  }
};

// The value lies at the end of the arena: what is written behind it is seen.
void put_last(ProgramSpec& spec, size_t index) {
  ValueSpec& v = spec.values[index];
  const size_t rows = static_cast<size_t>(spec.limits.max_tokens) * static_cast<size_t>(v.times);
  for (int p = 0; p < kPlans; p++) {
    v.offset[p] = spec.arena_bytes[p];
    spec.arena_bytes[p] += value_bytes(v, rows);
  }
}

bool runs(const std::shared_ptr<Pool>& pool, const Kernels& kernels, const ProgramSpec& spec, const Lora& lora) {
  std::vector<int32_t> slots(kMaxTokens, -1);
  for (size_t i = 0; i < slots.size(); i++) slots[i] = static_cast<int32_t>(i / 3 % 3) - 1;
  check::Steps steps(kMaxLen, kVocab, kBlocks);
  steps.agree = false;
  std::unique_ptr<Program> program;
  try {
    program = std::make_unique<Program>(pool, kernels, spec);
  } catch (const std::bad_alloc&) {
    return false;
  }  // sizes that are consistent, and too large for this machine
  catch (const std::invalid_argument& error) {
    return *error.what() == 0;
  }
  try {
    program->set_adapter(0, lora.memory, lora.parts);
    for (int n : {kMaxTokens, 5}) steps.run(*program, n == kMaxTokens ? 0 : kMaxTokens, n, n == 5, slots.data());
  } catch (const std::invalid_argument& error) { return *error.what() == 0; }
  return true;
}

// Every `stride`-th change.
void test_changes(bool fused, size_t stride) {
  const Kernels& kernels = kernels_of("auto");
  const auto pool = std::make_shared<Pool>(2, std::vector<int>{});
  const ProgramSpec spec = EveryOperation(fused).spec;
  const Lora lora(spec.targets);
  CHECK(runs(pool, kernels, spec, lora));
  const std::vector<Change> changes = Changes(spec).all;
  size_t accepted = 0, refused = 0;
  for (size_t i = fused ? 0 : stride / 2; i < changes.size(); i += stride) {
    ProgramSpec changed = EveryOperation(fused).spec;
    put_last(changed, i % spec.values.size());
    changes[i](changed);
    (runs(pool, kernels, changed, lora) ? accepted : refused)++;
  }
  printf("%zu changed programs ran, %zu were refused\n", accepted, refused);
  CHECK(accepted > changes.size() / stride / 4 && refused > changes.size() / stride / 4);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view extent = argc > 1 ? argv[1] : "";
  const size_t stride = extent == "--all" ? 1 : extent == "--brief" ? 970 : 97;
  for (bool fused : {true, false}) test_changes(fused, stride);
  puts("changed programs");
  return check::finish();
}
