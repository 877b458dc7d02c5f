// A small model as a program, without Python: same bits over chunks and workers, and refusal of what is wrong.
#include <algorithm>
#include <functional>
#include <stdexcept>

#include "programs.h"

using namespace octavo;

namespace {

constexpr int kVocab = 96, kHidden = 64, kHeads = 4, kKvHeads = 2, kHeadDim = 16, kInter = 96, kLayers = 2;
constexpr int kMaxTokens = 80, kMaxLen = 640, kBlocks = 60;

class Decoder : public check::Builder {
 public:
  explicit Decoder(bool poison, bool fused = false)
      : Builder(kMaxTokens, kMaxLen, kVocab, kLayers, kKvHeads, kHeadDim, kBlocks) {
    spec.poison = poison;
    spec.ropes.push_back({{1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003}, 1});
    const int table = matrix(kVocab, kHidden);
    const Operand x = value("x", Act::F32, kHidden), h = value("h", Act::A8, kHidden);
    const Operand h16 = value("h16", Act::A16, kHidden);
    const Operand qkv = value("qkv", Act::F32, (kHeads + 2 * kKvHeads) * kHeadDim);
    const Operand q = value("q", Act::F32, kHeads * kHeadDim), a = value("a", Act::A8, kHeads * kHeadDim);
    const Operand m = value("m", Act::A8, kInter);
    Node& embed = add(Op::Embed);
    embed.weights = {table};
    embed.out = x;
    for (int layer = 0; layer < kLayers; layer++) {
      norm(x, h16, layer);
      linear(Op::Linear, h16, {matrix(q.cols, kHidden), matrix((qkv.cols - q.cols), kHidden)}, qkv, layer);
      Node& rope = add(Op::RopeKvWrite, {qkv.value, 0, q.cols}, q, layer);
      rope.b = {qkv.value, q.cols, kKvHeads * kHeadDim};
      rope.c = {qkv.value, q.cols + rope.b.cols, rope.b.cols};
      rope.rope = 0;
      state(rope, layer);
      Node& attention = add(Op::Attention, q, a, layer);
      attention.heads = kHeads;
      attention.scale = 0.25f;
      state(attention, layer);
      linear(Op::LinearAdd, a, {matrix(kHidden, a.cols)}, x, layer);
      norm(x, h, layer);
      linear(Op::LinearActMulRound, h, {matrix(kInter, kHidden), matrix(kInter, kHidden)}, m, layer);
      linear(Op::LinearAdd, m, {matrix(kHidden, kInter)}, x, layer);
    }
    const Operand rows = value("rows", Act::F32, kHidden, true), r = value("r", Act::A8, kHidden, true);
    const Operand logits = value("logits", Act::F32, kVocab, true), turned = value("turned", Act::F32, kHidden, true);
    add(Op::GatherRows, x, rows);
    add(Op::GatherCols, rows, turned).vector =
        vector("order", kHidden, [](int i) { return static_cast<float>(kHidden - 1 - i); });
    norm(turned, r, -1);
    linear(fused ? Op::LinearSample : Op::Linear, r, {table}, logits, -1);
    if (fused) spec.nodes.back().scale = 1;
    else add(Op::Sample).a = logits;
  }

 private:
  void norm(Operand x, Operand y, int layer) {
    Node& node = add(Op::NormRound, x, y, layer);
    node.vector = vector("norm", kHidden, 1);
    node.eps = 1e-5f;
    node.head_dim = kHidden;
  }
  void linear(Op op, Operand x, std::vector<int> weights, Operand y, int layer) {
    Node& node = add(op, x, y, layer);
    if (op == Op::LinearAdd) node.b = y;
    node.weights = std::move(weights);
  }
};

struct Found {
  std::vector<float> logits;
  std::vector<int32_t> drawn;
};

Found run(const Kernels& kernels, int workers, const ProgramSpec& spec, const std::vector<int>& chunks,
          bool scored = true) {
  Program program(std::make_shared<Pool>(workers, std::vector<int>{}), kernels, spec);
  Found found;
  int start = 0;
  check::Steps steps(kMaxLen, kVocab, kBlocks);
  for (int n : chunks) {
    const std::vector<float> more = steps.run(program, start, n, scored);
    found.logits.insert(found.logits.end(), more.begin(), more.end());
    start += n;
  }
  CHECK(steps.num_invalid == 0);
  found.drawn = steps.drawn;
  return found;
}

void test_bits(const Kernels& kernels) {
  // Each list is of the same tokens, and with --brief of the first 160.
  const auto chunks = [](std::vector<int> list, ptrdiff_t brief) {
    if (check::brief) list.resize(size_t(brief));
    return list;
  };
  const Found expected = run(kernels, 1, Decoder(false).spec, chunks({80, 80, 80, 80, 80, 80, 80, 1}, 2));
  const auto same = [&](const Found& other) {
    return other.drawn == expected.drawn && other.logits.size() == expected.logits.size() &&
           !memcmp(other.logits.data(), expected.logits.data(), expected.logits.size() * sizeof(float));
  };
  CHECK(std::isfinite(expected.logits.back()));
  const std::vector<int> mixed = chunks({1, 16, 17, 46, 80, 79, 1, 80, 80, 80, 80, 1}, 5);
  CHECK(same(run(kernels, 3, Decoder(true).spec, mixed)));
  CHECK(same(run(kernels, 8, Decoder(false).spec, chunks({80, 80, 80, 80, 80, 80, 70, 2, 7, 1, 1}, 2))));
  CHECK(same(run(kernels, 3, Decoder(true, true).spec, mixed)));
  for (int workers : {1, 2, 8}) {
    const Found unseen = run(kernels, workers, Decoder(true, true).spec, mixed, false);
    CHECK(unseen.drawn == expected.drawn && unseen.logits.empty());
  }
}

bool refused(const std::function<void(ProgramSpec&)>& change, bool fused = false) {
  ProgramSpec spec = Decoder(false, fused).spec;
  change(spec);
  try {
    Program program(std::make_shared<Pool>(1, std::vector<int>{}), kernels_of("auto"), spec);
  } catch (const std::invalid_argument& error) { return *error.what() != 0; }
  return false;
}

Node& first(ProgramSpec& spec, Op op) {
  for (Node& node : spec.nodes)
    if (node.op == op) return node;
  abort();
}

void test_refusals() {
  CHECK(!refused([](ProgramSpec&) {}));
  CHECK(refused([](ProgramSpec& s) { s.values[0].offset[0] = s.arena_bytes[0]; }));
  CHECK(refused([](ProgramSpec& s) { s.weights[0].offset += s.weights[0].memory->bytes(); }));
  CHECK(refused([](ProgramSpec& s) { s.weights[0].k += 32; }));
  CHECK(refused([](ProgramSpec& s) { s.groups[0].head_dim = 24; }));
  CHECK(refused([](ProgramSpec& s) { s.groups[0].num_blocks++; }));
  CHECK(refused([](ProgramSpec& s) { s.limits.max_tokens = 0; }));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::Embed).out.value = 99; }));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::NormRound).out = first(s, Op::Embed).out; }));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::NormRound).vector = 0; }));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::Linear).weights.pop_back(); }));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::Linear).weights[0] = -1; }));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::LinearAdd).b.start = 32; }));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::LinearActMulRound).weights.pop_back(); }));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::RopeKvWrite).rope = 1; }));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::RopeKvWrite).group_layer = kLayers; }));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::Attention).heads = 3; }));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::GatherRows).out = first(s, Op::GatherRows).a; }));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::GatherCols).vector = first(s, Op::NormRound).vector; }));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::GatherCols).a = first(s, Op::Embed).out; }));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::Sample).a = first(s, Op::Embed).out; }));
  CHECK(!refused([](ProgramSpec&) {}, true));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::LinearSample).out = first(s, Op::Embed).out; }, true));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::LinearSample).weights = first(s, Op::LinearAdd).weights; }, true));
  CHECK(refused([](ProgramSpec& s) { first(s, Op::LinearSample).scale = 0; }, true));
  CHECK(refused([](ProgramSpec& s) { s.nodes.push_back(first(s, Op::Embed)); }, true));
}

}  // namespace

int main(int argc, char** argv) {
  for (const Kernels* kernels : check::levels(argc, argv)) {
    printf("level %s\n", kernels->name);
    test_bits(*kernels);
    puts("same bits");
  }
  test_refusals();
  puts("refusals");
  return check::finish();
}
