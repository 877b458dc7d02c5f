// A compiled step: the graph's nodes as a flat list of instructions over one arena, checked once, run without Python.
#pragma once
#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "attn_plan.h"
#include "batch.h"
#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace octavo {

constexpr int kPlans = 2;  // small (up to SMALL_T tokens) and full: the same nodes, other offsets and barriers

enum class Op : uint8_t {
  Embed,
  RmsNorm,
  LayerNorm,
  Round,
  NormRound,
  Linear,
  LinearAdd,
  LinearActRound,
  LinearActMulRound,
  Rope,
  KvWrite,
  RopeKvWrite,
  Attention,
  Act,
  ActMul,
  Scale,
  Softcap,
  Clamp,
  Mul,
  Add,
  GatherRows,
  GatherCols,
  LoraShrink,
  LoraExpand,
  Sample,
  Concat,
  Route,
  Dispatch,
  ExpertLinear,
  GatherExpertCols,
  Combine,
  SplitHeads,
  HeadLinear,
  LinearSample,
};
constexpr int kOps = 34;
const char* op_name(Op op);
Op op_of(const std::string& name);             // throws std::invalid_argument naming it
ActKind act_kind_of(const std::string& name);  // as op_of

// A matrix in the arena: rows T or R, or some times as many, `cols` columns of type act.
struct ValueSpec {
  std::string name;
  Act act;
  bool logit_rows;  // R rows, not T
  int cols;
  size_t offset[kPlans];
  int times = 1;  // rows per row of the step
};

// Columns [start, start + cols) of a value; value -1: not used.
struct Operand {
  int value = -1;
  int start = 0, cols = 0;
};

struct WeightSpec {
  std::string name;
  std::shared_ptr<const Memory> memory;
  size_t offset;
  Format format;
  int n, k;
  bool vector = false;  // k plain float32, not a packed matrix of one row
};

struct GroupSpec {
  std::shared_ptr<Memory> memory;  // [layer][kv head][block]
  KvType type;
  int layers, kv_heads, head_dim, value_dim, num_blocks;
  size_t block_bytes() const { return kv_block_bytes(type, head_dim, value_dim); }
  // Blocks of a head that fill whole huge pages; where they divide num_blocks, those of every head do.
  int huge_blocks() const { return static_cast<int>(kHugePage / std::gcd(kHugePage, block_bytes())); }
  KvLayer layer(int index) const;
};

struct RopeSpec {
  std::vector<double> inv_freq;
  double scale;
};

// A module that adapters may have a low-rank delta for: n output, k input features.
struct LoraTarget {
  std::string name;
  int n, k;
};

// What an adapter has for a target: A is rank x k, B is n x rank. Offsets in the adapter's memory.
struct LoraSpec {
  int target;
  Format format;
  int rank;
  size_t a, b;
  float scale;
};

enum class Ids : uint8_t { Tokens, Positions, TokenTypes };  // inputs of the batch

// Which fields a node uses is said by the checks in plan.cpp.
struct Node {
  Op op{};
  int layer = -1;            // for traces
  Operand a, b, c, out;      // q, k, v; gate, up; x, residual
  std::vector<int> weights;  // parts, side by side in the output; for LinearActMulRound gate and up
  int vector = -1;           // norm weight, bias of a linear, sinks, factors or order of columns: a weight of one row
  int bias = -1;             // of a norm
  float eps = 0, scale = 0;
  int heads = 0, group = -1, group_layer = -1;
  int window = 0;  // AttnArgs
  bool causal = true;
  float softcap = 0;            // in natural units, as are
  std::vector<float> slopes;    // per head, or none
  int rope = -1, head_dim = 0;  // columns of a norm
  std::vector<int> targets;     // of LoRA, side by side
  bool neox = true;
  bool centred = false;  // the norm is layer_norm
  ActKind act = ActKind::Silu;
  float low = 0, high = 0;  // of a clamp
  Ids ids = Ids::Tokens;    // what an embedding takes rows of, + offset
  int offset = 0;
  std::vector<Operand> ins;  // of Concat
  int experts = 0;
  RouteArgs route{};  // but for the arrays
  bool barrier[kPlans] = {true, true};
};

// LinearSample computes, and draws from, so many logits of a row at once that those of all rows stay in L1: 2048 of them
// are 8 KB. With few rows some tasks are taken together, for a call costs as much as a tenth of one.
constexpr int piece_cols(int rows) { return kTaskCols * std::clamp(2048 / kTaskCols / std::max(rows, 1), 1, 8); }
constexpr size_t piece_logits(int max_rows) { return static_cast<size_t>(std::max(2048, max_rows * kTaskCols)); }

struct ProgramSpec {
  Limits limits;
  int small_tokens;
  std::vector<ValueSpec> values;
  std::vector<WeightSpec> weights;
  std::vector<GroupSpec> groups;
  std::vector<RopeSpec> ropes;
  std::vector<LoraTarget> targets;
  std::vector<Node> nodes;
  size_t arena_bytes[kPlans];
  bool poison;        // fill the arena with NaN before each step
  bool share = true;  // KV tiles among sequences with common blocks (AttnPlan)
};

struct Span {
  int node;              // -1: preparation
  double seconds, wait;  // of worker 0; wait is the barrier before
};

// Of a value of so many rows in the arena.
size_t value_bytes(const ValueSpec& v, size_t rows);

// Throws std::invalid_argument naming the node, or the value, weight or KV group, and what is wrong with it.
void check_program(const ProgramSpec& spec, const Kernels& kernels);

class Program {
 public:
  // Throws std::invalid_argument naming the node and what is wrong with it.
  Program(std::shared_ptr<Pool> pool, const Kernels& kernels, ProgramSpec spec);

  // Runs one step and fills `out`. With `spans`, also times every node.
  void run(const Batch& batch, const SampledArrays& out, std::vector<Span>* spans);

  const ProgramSpec& spec() const { return spec_; }
  // [rows of the last run][vocab], valid until the next run; null where there are none, or not those of every row: fused with
  // its head, Sample leaves out rows whose draw needs none (needs_logits).
  const float* logits() const;
  int logit_rows() const { return last_rows_; }
  size_t arena_bytes() const { return arena_.bytes(); }
  size_t touched_bytes() const { return arena_.touched_bytes(); }
  KvTiles kv_tiles() const { return kv_tiles_; }  // of all layers, since the start

  // The adapter of a slot from now on; no memory: nothing is. Between runs. Throws std::invalid_argument.
  void set_adapter(int slot, std::shared_ptr<const Memory> memory, const std::vector<LoraSpec>& parts);

  // For checks of single nodes: a value of the last run [rows][cols], rounded types decoded exactly.
  int value_rows(int value) const {
    const ValueSpec& v = spec_.values[static_cast<size_t>(value)];
    return v.times * (v.logit_rows ? last_rows_ : last_tokens_);
  }
  void read(int value, double* out) const;

 private:
  struct Step {  // what the workers of one run share
    const Batch& batch;
    const SampledArrays& out;
    int plan;
  };
  struct alignas(64) Counter {
    std::atomic<int> next{0};
  };
  struct LoraWeights {
    Weight a, b;  // without data where the adapter has none for the target
    float scale;
  };
  struct Adapter {
    std::shared_ptr<const Memory> memory;
    std::vector<LoraWeights> parts;  // per target
  };
  struct KvPages {  // of a KV group: huge_blocks() of each head are made huge pages once all of them have been used
    int used = 0;   // blocks: ids are handed out from 0 on
    int done = 0;   // of them, those of all heads of all layers
    int heads = 0;  // of all layers, those whose next ones are done
  };
  struct AdapterRows {  // rows [begin, end) of the step have the adapter of this slot, or none: -1
    int begin, end, slot;
  };
  // The rows that Dispatch makes of a step's: by expert, then by row.
  struct Sorted {
    int routing = -1;         // the value that this was made of, in this step
    std::vector<int> starts;  // [experts + 1] the first row of each expert
    std::vector<int> ranks;   // of each: row of the step * top_k + rank
    std::vector<int> places;  // the other way round
  };
  struct alignas(kLine) Line {
    float floats[kLine / sizeof(float)];
  };
  struct Worker {
    SampleScratch sample;
    std::vector<Line> attention;  // AttnArgs::scratch
    std::vector<float> rotated;   // some rows of k
    Sorted sorted;
    std::vector<float> piece;  // logits of some columns, all rows
  };

  Activation activation(const Operand& x, int plan, int rows) const;
  float* f32(const Operand& x, int plan) const;
  const float* vector_of(int weight) const;  // null: -1
  NormArgs norm_args(const Node& node, int plan) const;
  int64_t ld(const Operand& x) const { return spec_.values[static_cast<size_t>(x.value)].cols; }
  int rows_of(const Operand& x, const Step& step) const;

  template <bool timed> void work(const Step& step, int worker, std::vector<Span>* spans);
  void prepare(const Step& step, int worker);
  void make_huge_pages(const Batch& batch);
  void execute(const Node& node, const Step& step, int worker);
  void linear(const Node& node, const Step& step, int worker);
  void rope_kv(const Node& node, const Step& step, int worker);
  void attention(const Node& node, const Step& step, int worker);
  template <class Body> void divide(const Node& node, int tasks, int rows, int worker, Body&& body);
  void prepare_draws(const Step& step);  // from here on in draws.cpp
  void sample(const Node& node, const Step& step, int worker);
  void linear_sample(const Node& node, const Step& step, int worker);
  void divide_adapters(const Batch& batch);                               // from here on in lora.cpp
  const LoraWeights* lora_of(const AdapterRows& rows, int target) const;  // null: nothing is added
  void lora_shrink(const Node& node, const Step& step);
  void lora_expand(const Node& node, const Step& step, int worker);
  void concat(const Node& node, const Step& step, int worker);  // from here on in experts.cpp
  void dispatch(const Node& node, const Step& step, int worker);
  void expert_linear(const Node& node, const Step& step, int worker);
  void gather_expert_cols(const Node& node, const Step& step, int worker);
  void combine(const Node& node, const Step& step, int worker);
  void split_heads(const Node& node, const Step& step, int worker);
  void head_linear(const Node& node, const Step& step, int worker);
  const Sorted& sorted(const Node& node, const Step& step, int worker);

  std::shared_ptr<Pool> pool_;
  const Kernels& kernels_;
  ProgramSpec spec_;
  Memory arena_;
  std::vector<Weight> weights_;
  std::deque<AttnPlan> attn_plans_;  // one per KV group, number of heads, window and direction
  std::vector<int> attn_plan_of_;    // per node
  KvTiles kv_tiles_;
  std::vector<std::vector<float>> cos_, sin_;  // per rope [T][rot / 2]
  std::vector<std::vector<int32_t>> slots_;    // per group [T] block of the token
  std::vector<KvPages> kv_pages_;              // per group
  std::vector<Counter> counters_;              // per node: next attention item, task of columns, or row to sample
  Counter next_draw_;                          // of a node that counts tasks before
  std::vector<DrawRow> draw_rows_;             // of this step, where draws are made beside the head's product
  std::vector<DrawState> draw_states_;         // [worker][max_rows]
  std::vector<Adapter> adapters_;              // per slot
  std::vector<AdapterRows> adapter_rows_;      // of this step
  std::vector<Worker> workers_;
  int last_tokens_ = 0, last_rows_ = 0, last_plan_ = 0;
  bool last_stored_ = false;  // the logits of every row
};

// Threads split `tasks`. With many rows the last quarter goes to who comes first: the other processes of the machine slow
// one worker more than another. body(range) gets ascending ranges.
template <class Body> void Program::divide(const Node& node, int tasks, int rows, int worker, Body&& body) {
  constexpr int kManyRows = 16;  // from here on a task takes long enough to be handed out one by one
  const int fixed = rows < kManyRows ? tasks : tasks - tasks / 4;
  body(share(fixed, pool_->size(), worker));
  std::atomic<int>& next = counters_[static_cast<size_t>(&node - spec_.nodes.data())].next;
  for (int task = tasks; fixed < tasks && (task = fixed + next.fetch_add(1, std::memory_order_relaxed)) < tasks;)
    body(Range{task, task + 1});
}

}  // namespace octavo
