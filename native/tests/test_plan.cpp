// A small model as a program, without Python: same bits over chunks and workers, and refusal of what is wrong.
#include <algorithm>
#include <functional>
#include <stdexcept>

#include "check.h"
#include "pack.h"
#include "plan.h"

using namespace octavo;

namespace {

constexpr int kVocab = 96, kHidden = 64, kHeads = 4, kKvHeads = 2, kHeadDim = 16, kInter = 96, kLayers = 2;
constexpr int kMaxTokens = 80, kMaxLen = 640, kBlocks = 60;

// Builds the spec of a decoder: every value has a place of its own, every node a barrier before it.
class Builder {
 public:
  ProgramSpec spec{};

  explicit Builder(bool poison, bool fused = false)
      : fused_(fused), memory_(std::make_shared<Memory>(size_t{1} << 20, true)) {
    spec.limits = {kMaxTokens, kMaxTokens, 4, kMaxLen, kVocab, {kBlocks}};
    spec.small_tokens = 16;
    spec.poison = poison;
    const size_t block = size_t{kHeadDim} * 64;
    const auto arena = std::make_shared<Memory>(size_t{kLayers * kKvHeads * kBlocks} * block, false);
    memset(arena->data(), 0xff, arena->bytes());
    spec.groups.push_back({arena, KvType::BF16, kLayers, kKvHeads, kHeadDim, kHeadDim, kBlocks});
    spec.ropes.push_back({{1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003}, 1});
    build();
    spec.arena_bytes[0] = spec.arena_bytes[1] = end_;
  }

 private:
  void build() {
    const int table = matrix(kVocab, kHidden);
    const Operand x = value("x", Act::F32, kHidden), h = value("h", Act::A8, kHidden);
    const Operand qkv = value("qkv", Act::F32, (kHeads + 2 * kKvHeads) * kHeadDim);
    const Operand q = value("q", Act::F32, kHeads * kHeadDim), a = value("a", Act::A8, kHeads * kHeadDim);
    const Operand m = value("m", Act::A8, kInter);
    Node& embed = add(Op::Embed, -1);
    embed.weights = {table};
    embed.out = x;
    for (int layer = 0; layer < kLayers; layer++) {
      norm(x, h, layer);
      linear(Op::Linear, h, {matrix(q.cols, kHidden), matrix((qkv.cols - q.cols), kHidden)}, qkv, layer);
      Node& rope = add(Op::RopeKvWrite, layer);
      rope.a = {qkv.value, 0, q.cols};
      rope.b = {qkv.value, q.cols, kKvHeads * kHeadDim};
      rope.c = {qkv.value, q.cols + rope.b.cols, rope.b.cols};
      rope.out = q;
      rope.rope = 0;
      state(rope, layer);
      Node& attention = add(Op::Attention, layer);
      attention.a = q;
      attention.out = a;
      attention.heads = kHeads;
      attention.scale = 0.25f;
      state(attention, layer);
      linear(Op::LinearAdd, a, {matrix(kHidden, a.cols)}, x, layer);
      norm(x, h, layer);
      linear(Op::LinearActMulRound, h, {matrix(kInter, kHidden), matrix(kInter, kHidden)}, m, layer);
      linear(Op::LinearAdd, m, {matrix(kHidden, kInter)}, x, layer);
    }
    const Operand rows = value("rows", Act::F32, kHidden, true), r = value("r", Act::A8, kHidden, true);
    const Operand logits = value("logits", Act::F32, kVocab, true);
    Node& gather = add(Op::GatherRows, -1);
    gather.a = x;
    gather.out = rows;
    Node& turned = add(Op::GatherCols, -1);
    turned.a = rows;
    turned.out = value("turned", Act::F32, kHidden, true);
    turned.vector = order();
    norm(turned.out, r, -1);
    linear(fused_ ? Op::LinearSample : Op::Linear, r, {table}, logits, -1);
    if (fused_) spec.nodes.back().scale = 1;
    else add(Op::Sample, -1).a = logits;
  }

  Node& add(Op op, int layer) {
    spec.nodes.emplace_back();
    spec.nodes.back().op = op;
    spec.nodes.back().layer = layer;
    return spec.nodes.back();
  }
  void state(Node& node, int layer) {
    node.group = 0;
    node.group_layer = layer;
    node.head_dim = kHeadDim;
  }
  int order() {
    const size_t at = place(kHidden * 4);
    for (int i = 0; i < kHidden; i++)
      reinterpret_cast<float*>(memory_->data() + at)[i] = static_cast<float>(kHidden - 1 - i);
    spec.weights.push_back({"order", memory_, at, Format::F32, 1, kHidden});
    return static_cast<int>(spec.weights.size()) - 1;
  }
  void norm(Operand x, Operand y, int layer) {
    const size_t at = place(kHidden * 4);
    for (int i = 0; i < kHidden; i++) reinterpret_cast<float*>(memory_->data() + at)[i] = 1 + 0.1f * random_.normal();
    spec.weights.push_back({"norm", memory_, at, Format::F32, 1, kHidden});
    Node& node = add(Op::NormRound, layer);
    node.a = x;
    node.out = y;
    node.vector = static_cast<int>(spec.weights.size()) - 1;
    node.eps = 1e-5f;
    node.head_dim = kHidden;
  }
  void linear(Op op, Operand x, std::vector<int> weights, Operand y, int layer) {
    Node& node = add(op, layer);
    node.a = x;
    if (op == Op::LinearAdd) node.b = y;
    node.weights = std::move(weights);
    node.out = y;
  }
  int matrix(int n, int k) {  // Q8_0 blocks with scale 2^-8
    const size_t row = static_cast<size_t>(k / 32 * 34);
    std::vector<uint8_t> source(static_cast<size_t>(n) * row);
    for (size_t i = 0; i < source.size(); i++)
      source[i] = i % 34 == 0 ? 0 : i % 34 == 1 ? 0x1c : static_cast<uint8_t>(random_.next());
    const size_t at = place(packed_bytes(Format::W8, n, k));
    pack(Format::W8, source.data(), row, n, k, memory_->data() + at, 0, (n + 31) / 32 * 2);
    spec.weights.push_back({"matrix", memory_, at, Format::W8, n, k});
    return static_cast<int>(spec.weights.size()) - 1;
  }
  size_t place(size_t bytes) {
    const size_t at = used_;
    used_ += align_up(bytes, kLine);
    return at;
  }
  Operand value(const char* name, Act act, int cols, bool logit_rows = false) {
    spec.values.push_back({name, act, logit_rows, cols, {end_, end_}});
    end_ += align_up(size_t{kMaxTokens} * static_cast<size_t>(cols + 64) * 8, kLine);
    return {static_cast<int>(spec.values.size()) - 1, 0, cols};
  }

  bool fused_;
  check::Random random_{11};
  std::shared_ptr<Memory> memory_;
  size_t used_ = 0, end_ = 0;
};

// Steps of one sequence with greedy draws; owns the arrays.
struct Sequence {
  std::vector<int32_t> ids, positions, starts, rows, table;
  int32_t context = 0;

  Sequence() {
    check::Random random(5);
    for (int i = 0; i < kMaxLen / kBlock; i++) table.push_back((i * 7 + 3) % kBlocks);
    for (int i = 0; i < kMaxLen; i++) all_.push_back(random.below(kVocab));
  }

  // Runs tokens [start, start + n) and appends the draws of all of them and, where they are scored, their logits.
  void run(Program& program, int start, int n, bool scored, std::vector<float>& logits, std::vector<int32_t>& drawn) {
    ids.assign(all_.begin() + start, all_.begin() + start + n);
    positions.clear();
    rows.clear();
    for (int i = 0; i < n; i++) positions.push_back(start + i), rows.push_back(i);
    starts = {0, n};
    context = start + n;
    const auto count = static_cast<size_t>(n);
    const std::vector<float> zeros(count), ones(count, 1);
    const std::vector<int32_t> izeros(count + 1), none(count, -1);
    const std::vector<int32_t>& num_top = scored ? izeros : none;
    const std::vector<uint64_t> keys(count);
    Batch b{n,
            1,
            n,
            ids.data(),
            positions.data(),
            starts.data(),
            &context,
            {{table.data(), kMaxLen / kBlock}},
            {{nullptr, 0}},
            rows.data(),
            {},
            0,
            0,
            0,
            0,
            0};
    b.sampling = {zeros.data(),  izeros.data(), ones.data(), zeros.data(),     ones.data(),
                  zeros.data(),  zeros.data(),  keys.data(), positions.data(), num_top.data(),
                  none.data(),   izeros.data(), nullptr,     nullptr,          izeros.data(),
                  nullptr,       nullptr,       none.data(), nullptr,          0,
                  izeros.data(), nullptr,       nullptr,     izeros.data(),    nullptr,
                  nullptr};
    std::vector<int32_t> tokens(count), ranks(count);
    std::vector<float> logprobs(count);
    std::vector<uint8_t> invalid(count);
    program.run(b, {tokens.data(), logprobs.data(), ranks.data(), nullptr, nullptr, 0, invalid.data()}, nullptr);
    drawn.insert(drawn.end(), tokens.begin(), tokens.end());
    if (!program.logits()) return CHECK(!scored);
    logits.insert(logits.end(), program.logits(), program.logits() + n * kVocab);
    for (int i = 0; i < n; i++) {
      const float* row = program.logits() + i * kVocab;
      CHECK(!invalid[static_cast<size_t>(i)] &&
            row[tokens[static_cast<size_t>(i)]] == *std::max_element(row, row + kVocab));
    }
  }

 private:
  std::vector<int32_t> all_;
};

struct Found {
  std::vector<float> logits;
  std::vector<int32_t> drawn;
};

Found run(const Kernels& kernels, int workers, const ProgramSpec& spec, const std::vector<int>& chunks,
          bool scored = true) {
  Program program(std::make_shared<Pool>(workers, std::vector<int>{}), kernels, spec);
  Sequence sequence;
  Found found;
  int start = 0;
  for (int n : chunks) sequence.run(program, start, n, scored, found.logits, found.drawn), start += n;
  return found;
}

void test_bits(const Kernels& kernels) {
  const Found expected = run(kernels, 1, Builder(false).spec, {80, 80, 80, 80, 80, 80, 80, 1});
  const auto same = [&](const Found& other) {
    return other.drawn == expected.drawn && other.logits.size() == expected.logits.size() &&
           !memcmp(other.logits.data(), expected.logits.data(), expected.logits.size() * sizeof(float));
  };
  CHECK(std::isfinite(expected.logits.back()));
  const std::vector<int> mixed = {1, 16, 17, 46, 80, 79, 1, 80, 80, 80, 80, 1};
  CHECK(same(run(kernels, 3, Builder(true).spec, mixed)));
  CHECK(same(run(kernels, 8, Builder(false).spec, {80, 80, 80, 80, 80, 80, 70, 2, 7, 1, 1})));
  CHECK(same(run(kernels, 3, Builder(true, true).spec, mixed)));
  for (int workers : {1, 2, 8}) {
    const Found unseen = run(kernels, workers, Builder(true, true).spec, mixed, false);
    CHECK(unseen.drawn == expected.drawn && unseen.logits.empty());
  }
}

bool refused(const std::function<void(ProgramSpec&)>& change, bool fused = false) {
  ProgramSpec spec = Builder(false, fused).spec;
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
