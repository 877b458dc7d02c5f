#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>

#include "plan.h"

namespace octavo {
namespace {

// Up to this many rows a rounding pass is split by columns: otherwise threads write the same lines of the rounded rows.
constexpr int kFewRows = 64;

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

// ---------------------------------------------------------------- the step

void Program::run(const Batch& batch, const SampledArrays& out, std::vector<Span>* spans) {
  check_batch(batch, spec_.limits, out.top_width);
  const std::lock_guard lock(pool_->turn());
  const Step step{batch, out, batch.tokens <= spec_.small_tokens ? 0 : 1};
  for (size_t g = 0; g < slots_.size(); g++)
    for (int s = 0; s < batch.seqs; s++)
      for (int t = batch.seq_starts[s]; t < batch.seq_starts[s + 1]; t++)
        slots_[g][static_cast<size_t>(t)] =
            batch.tables[g].blocks[int64_t{s} * batch.tables[g].width + batch.positions[t] / kBlock];
  for (AttnPlan& plan : attn_plans_) plan.make(batch);
  for (const int index : attn_plan_of_) {
    if (index < 0) continue;
    const KvTiles tiles = attn_plans_[static_cast<size_t>(index)].tiles();
    kv_tiles_.read += tiles.read;
    kv_tiles_.saved += tiles.saved;
  }
  divide_adapters(batch);
  prepare_draws(step);
  for (Counter& c : counters_) c.next.store(0, std::memory_order_relaxed);
  if (spans) pool_->run([&](int worker) { work<true>(step, worker, spans); });
  else pool_->run([&](int worker) { work<false>(step, worker, nullptr); });
  make_huge_pages(batch);
  last_tokens_ = batch.tokens;
  last_rows_ = batch.rows;
  last_plan_ = step.plan;
}

template <bool timed> void Program::work(const Step& step, int worker, std::vector<Span>* spans) {
  double start = timed ? seconds() : 0;
  auto mark = [&](int node, double wait) {
    if (!timed || worker) return;
    const double now = seconds();
    spans->push_back({node, now - start, wait});
    start = now;
  };
  prepare(step, worker);
  pool_->barrier();
  mark(-1, 0);
  for (size_t i = 0; i < spec_.nodes.size(); i++) {
    const Node& node = spec_.nodes[i];
    if (node.barrier[step.plan]) pool_->barrier();
    const double wait = timed ? seconds() - start : 0;
    execute(node, step, worker);
    mark(static_cast<int>(i), wait);
  }
}

// Of one head, the next blocks that have all been used: a fraction of a millisecond, and no memory that was not taken before.
void Program::make_huge_pages(const Batch& batch) {
  for (size_t g = 0; g < spec_.groups.size(); g++) {
    const GroupSpec& group = spec_.groups[g];
    KvPages& pages = kv_pages_[g];
    const int per = group.huge_blocks();
    if (group.num_blocks % per) continue;
    pages.used = std::max(pages.used, 1 + *std::max_element(slots_[g].begin(), slots_[g].begin() + batch.tokens));
    if (pages.used < pages.done + per) continue;
    const size_t block = group.block_bytes();
    const auto first = static_cast<size_t>(pages.heads) * static_cast<size_t>(group.num_blocks);
    group.memory->make_huge((first + static_cast<size_t>(pages.done)) * block, static_cast<size_t>(per) * block);
    if (++pages.heads == group.layers * group.kv_heads) pages.heads = 0, pages.done += per;
  }
}

// Copies of blocks, and the cosines and sines of this step.
void Program::prepare(const Step& step, int worker) {
  const Batch& b = step.batch;
  workers_[static_cast<size_t>(worker)].sorted.routing = -1;
  if (spec_.poison) {
    const Range bytes = share(static_cast<int>(arena_.bytes() / kLine), pool_->size(), worker);
    std::memset(arena_.data() + static_cast<size_t>(bytes.begin) * kLine, 0xff,
                static_cast<size_t>(bytes.end - bytes.begin) * kLine);
  }
  for (size_t g = 0; g < spec_.groups.size(); g++) {
    if (!b.copies[g].n) continue;
    const GroupSpec& group = spec_.groups[g];
    const Range heads = share(group.layers * group.kv_heads, pool_->size(), worker);
    for (int i = heads.begin; i < heads.end; i++) {
      uint8_t* base =
          group.memory->data() + static_cast<size_t>(i) * static_cast<size_t>(group.num_blocks) * group.block_bytes();
      for (int c = 0; c < b.copies[g].n; c++) {
        const int32_t* pair = b.copies[g].pairs + 2 * c;
        if (pair[0] == pair[1]) continue;
        std::memcpy(base + static_cast<size_t>(pair[1]) * group.block_bytes(),
                    base + static_cast<size_t>(pair[0]) * group.block_bytes(), group.block_bytes());
      }
    }
  }
  const Range rows = share(b.tokens, pool_->size(), worker);
  for (size_t r = 0; r < spec_.ropes.size(); r++) {
    const RopeSpec& rope = spec_.ropes[r];
    const size_t half = rope.inv_freq.size();
    for (int t = rows.begin; t < rows.end; t++)
      for (size_t i = 0; i < half; i++) {
        const double angle = b.positions[t] * rope.inv_freq[i];
        cos_[r][static_cast<size_t>(t) * half + i] = static_cast<float>(std::cos(angle) * rope.scale);
        sin_[r][static_cast<size_t>(t) * half + i] = static_cast<float>(std::sin(angle) * rope.scale);
      }
  }
}

void Program::execute(const Node& n, const Step& step, int worker) {
  const int plan = step.plan, workers = pool_->size();
  const int rows = n.op == Op::KvWrite || n.op == Op::Sample ? step.batch.tokens : rows_of(n.out, step);
  const Range mine = share(rows, workers, worker);
  switch (n.op) {
    case Op::Embed: {
      const Weight& w = weights_[static_cast<size_t>(n.weights[0])];
      const auto embed = kernels_.embed[static_cast<int>(w.format)];
      float* y = f32(n.out, plan);
      if (n.ids == Ids::Tokens) {
        embed(w, step.batch.token_ids, y, ld(n.out), mine.begin, mine.end);
        break;
      }
      for (int r = mine.begin; r < mine.end; r++) {
        const int32_t* types = step.batch.token_types;
        const int32_t row = n.ids == Ids::Positions ? step.batch.positions[r] + n.offset : types ? types[r] : 0;
        embed(w, &row, y + r * ld(n.out), ld(n.out), 0, 1);
      }
      break;
    }
    case Op::RmsNorm:
    case Op::LayerNorm: kernels_.norm(norm_args(n, plan), f32(n.out, plan), ld(n.out), mine.begin, mine.end); break;
    case Op::Round:
    case Op::NormRound: {
      const Activation y = activation(n.out, plan, rows);
      const bool by_columns = rows <= kFewRows;
      const Range groups = by_columns ? share(y.k_pad / 32, workers, worker) : Range{0, y.k_pad / 32};
      const Range r = by_columns ? Range{0, rows} : mine;
      if (n.op == Op::Round) kernels_.round(f32(n.a, plan), ld(n.a), y, r.begin, r.end, groups.begin, groups.end);
      else kernels_.norm_round(norm_args(n, plan), y, r.begin, r.end, groups.begin, groups.end);
      break;
    }
    case Op::Linear:
    case Op::LinearAdd:
    case Op::LinearActRound:
    case Op::LinearActMulRound:
      if (rows) linear(n, step, worker);
      break;
    case Op::Rope:
    case Op::KvWrite:
    case Op::RopeKvWrite: rope_kv(n, step, worker); break;
    case Op::Attention: attention(n, step, worker); break;
    case Op::Act:
      kernels_.act[static_cast<int>(n.act)](f32(n.a, plan), ld(n.a), f32(n.out, plan), ld(n.out), n.out.cols,
                                            mine.begin, mine.end);
      break;
    case Op::ActMul:
      kernels_.act_mul[static_cast<int>(n.act)](f32(n.a, plan), ld(n.a), f32(n.b, plan), ld(n.b), f32(n.out, plan),
                                                ld(n.out), n.out.cols, mine.begin, mine.end);
      break;
    case Op::Scale:
      kernels_.scale(f32(n.a, plan), ld(n.a), &n.scale, 0, f32(n.out, plan), ld(n.out), n.out.cols, mine.begin,
                     mine.end);
      break;
    case Op::Softcap:
      kernels_.softcap(f32(n.a, plan), ld(n.a), n.softcap, f32(n.out, plan), ld(n.out), n.out.cols, mine.begin,
                       mine.end);
      break;
    case Op::Clamp:
      kernels_.clamp(f32(n.a, plan), ld(n.a), n.low, n.high, f32(n.out, plan), ld(n.out), n.out.cols, mine.begin,
                     mine.end);
      break;
    case Op::Mul: {
      const bool vector = n.vector >= 0, by_row = !vector && n.b.cols == 1;
      const float* b = vector ? vector_of(n.vector) : f32(n.b, plan);
      (by_row ? kernels_.scale : kernels_.mul)(f32(n.a, plan), ld(n.a), b, vector ? 0 : ld(n.b), f32(n.out, plan),
                                               ld(n.out), n.out.cols, mine.begin, mine.end);
      break;
    }
    case Op::Add:
      kernels_.add(f32(n.a, plan), ld(n.a), f32(n.b, plan), ld(n.b), f32(n.out, plan), ld(n.out), n.out.cols,
                   mine.begin, mine.end);
      break;
    case Op::GatherRows:
      for (int r = mine.begin; r < mine.end; r++)
        std::memcpy(f32(n.out, plan) + r * ld(n.out), f32(n.a, plan) + step.batch.logit_rows[r] * ld(n.a),
                    static_cast<size_t>(n.a.cols) * sizeof(float));
      break;
    case Op::LoraShrink: lora_shrink(n, step); break;
    case Op::LoraExpand: lora_expand(n, step, worker); break;
    case Op::GatherCols: {
      const float* order = vector_of(n.vector);
      for (int r = mine.begin; r < mine.end; r++) {
        const float* x = f32(n.a, plan) + r * ld(n.a);
        float* y = f32(n.out, plan) + r * ld(n.out);
        for (int c = 0; c < n.out.cols; c++) y[c] = x[static_cast<int>(order[c])];
      }
      break;
    }
    case Op::Sample: sample(n, step, worker); break;
    case Op::LinearSample: linear_sample(n, step, worker); break;
    case Op::Concat: concat(n, step, worker); break;
    case Op::Route: {
      RouteArgs route = n.route;
      route.scores = f32(n.a, plan), route.ld = ld(n.a);
      route.out = f32(n.out, plan), route.ld_out = ld(n.out);
      route.bias = vector_of(n.vector);
      kernels_.route(route, mine.begin, mine.end);
      break;
    }
    case Op::Dispatch: dispatch(n, step, worker); break;
    case Op::ExpertLinear: expert_linear(n, step, worker); break;
    case Op::GatherExpertCols: gather_expert_cols(n, step, worker); break;
    case Op::Combine: combine(n, step, worker); break;
    case Op::SplitHeads: split_heads(n, step, worker); break;
    case Op::HeadLinear: head_linear(n, step, worker); break;
  }
}

// ---------------------------------------------------------------- nodes of several kernel calls

// Threads split the columns of all parts together, 32 at a time.
void Program::linear(const Node& n, const Step& step, int worker) {
  const int rows = rows_of(n.out, step);
  const Activation x = activation(n.a, step.plan, rows), y = activation(n.out, step.plan, rows);
  const bool gated = n.op == Op::LinearActMulRound, fused = gated || n.op == Op::LinearActRound;
  GemmArgs args{};
  args.x = &x;
  args.epilogue = gated                   ? Epilogue::ActMulRound
                  : fused                 ? Epilogue::ActRound
                  : n.op == Op::LinearAdd ? Epilogue::Add
                                          : Epilogue::Store;
  if (gated) args.w_up = &weights_[static_cast<size_t>(n.weights[1])];
  if (fused) args.act = &y, args.kind = n.act;
  const size_t parts = fused ? 1 : n.weights.size();
  auto run = [&](Range tasks) {
    int first = 0, col = 0;
    for (size_t i = 0; i < parts; i++) {
      const Weight& w = weights_[static_cast<size_t>(n.weights[i])];
      const int count = w.n_pad / kTaskCols;
      const int begin = std::max(tasks.begin - first, 0), end = std::min(tasks.end - first, count);
      args.w = &w;
      args.out = fused ? nullptr : y.f + col;
      args.ld_out = y.ld;
      args.residual = n.op == Op::LinearAdd ? f32(n.b, step.plan) + col : nullptr;
      args.ld_residual = n.op == Op::LinearAdd ? ld(n.b) : 0;
      args.bias = n.vector < 0 ? nullptr : vector_of(n.vector) + col;
      if (begin < end) kernels_.gemm[static_cast<int>(w.format)][static_cast<int>(x.act)](args, begin, end);
      first += count;
      col += w.n;
    }
  };
  int tasks = 0;
  for (size_t i = 0; i < parts; i++) tasks += weights_[static_cast<size_t>(n.weights[i])].n_pad / kTaskCols;
  divide(n, tasks, rows, worker, run);
}

// Few rows are split by heads, more by rows, at even positions: two tokens share words of V. k is rotated aside.
void Program::rope_kv(const Node& n, const Step& step, int worker) {
  const Batch& b = step.batch;
  const int workers = pool_->size(), dim = n.head_dim;
  const bool by_heads = b.tokens < 4 * workers;
  Range rows{0, b.tokens};
  if (!by_heads) {
    rows = share(b.tokens, workers, worker);
    if (rows.begin > 0) rows.begin += b.positions[rows.begin] & 1;
    if (rows.end < b.tokens) rows.end += b.positions[rows.end] & 1;
  }
  auto heads_of = [&](int heads) { return by_heads ? share(heads, workers, worker) : Range{0, heads}; };

  RopeArgs rope{};
  size_t half = 0;
  if (n.op != Op::KvWrite) {
    half = spec_.ropes[static_cast<size_t>(n.rope)].inv_freq.size();
    rope.x = f32(n.a, step.plan);
    rope.ldx = ld(n.a);
    rope.out = f32(n.out, step.plan);
    rope.ld_out = ld(n.out);
    rope.heads = n.a.cols / dim;
    rope.head_dim = dim;
    rope.rot = 2 * static_cast<int>(half);
    rope.neox = n.neox;
    rope.cos = cos_[static_cast<size_t>(n.rope)].data();
    rope.sin = sin_[static_cast<size_t>(n.rope)].data();
    const Range heads = heads_of(rope.heads);
    kernels_.rope(rope, rows.begin, rows.end, heads.begin, heads.end);
  }
  if (n.op == Op::Rope) return;

  KvWriteArgs write{};
  write.kv = spec_.groups[static_cast<size_t>(n.group)].layer(n.group_layer);
  write.k = f32(n.b, step.plan);
  write.ldk = ld(n.b);
  write.v = f32(n.c, step.plan);
  write.ldv = ld(n.c);
  write.positions = b.positions;
  write.slots = slots_[static_cast<size_t>(n.group)].data();
  write.tokens = b.tokens;
  const Range heads = heads_of(write.kv.kv_heads);
  const auto kv_write = kernels_.kv_write[static_cast<int>(write.kv.type)];
  if (n.op == Op::KvWrite) return kv_write(write, rows.begin, rows.end, heads.begin, heads.end);

  for (int row = rows.begin, count; row < rows.end; row += count) {
    count = std::min(kBlock, rows.end - row);
    for (int i = 1; i < count; i++)  // a block's tokens are written together
      if (b.positions[row + i] % kBlock == 0 && b.positions[row + i] == b.positions[row + i - 1] + 1) count = i;
    RopeArgs part = rope;
    part.x = write.k + row * write.ldk;
    part.ldx = write.ldk;
    part.out = workers_[static_cast<size_t>(worker)].rotated.data();
    part.ld_out = int64_t{write.kv.kv_heads} * dim;
    part.heads = write.kv.kv_heads;
    part.cos += static_cast<size_t>(row) * half;
    part.sin += static_cast<size_t>(row) * half;
    kernels_.rope(part, 0, count, heads.begin, heads.end);
    KvWriteArgs rotated = write;
    rotated.k = part.out;
    rotated.ldk = part.ld_out;
    rotated.v += row * write.ldv;
    rotated.positions += row;
    rotated.slots += row;
    rotated.tokens = count;
    kv_write(rotated, 0, count, heads.begin, heads.end);
  }
}

void Program::attention(const Node& n, const Step& step, int worker) {
  const size_t index = static_cast<size_t>(&n - spec_.nodes.data());
  const AttnPlan& plan = attn_plans_[static_cast<size_t>(attn_plan_of_[index])];
  const Activation y = activation(n.out, step.plan, step.batch.tokens);
  AttnArgs args{};
  args.kv = spec_.groups[static_cast<size_t>(n.group)].layer(n.group_layer);
  args.q = f32(n.a, step.plan);
  args.ldq = ld(n.a);
  args.heads = n.heads;
  args.scale_log2e = static_cast<float>(n.scale * 1.4426950408889634);
  args.out = y.act == Act::F32 ? y.f : nullptr;
  args.ld_out = y.ld;
  args.act = y.act == Act::F32 ? nullptr : &y;
  args.window = n.window;
  args.softcap_log2e = static_cast<float>(n.softcap * 1.4426950408889634);
  args.slopes_log2e = n.slopes.empty() ? nullptr : n.slopes.data();
  args.sinks = vector_of(n.vector);
  args.scratch = workers_[static_cast<size_t>(worker)].attention.data()->floats;
  const auto kernel = kernels_.attention[static_cast<int>(args.kv.type)];
  const int count = static_cast<int>(plan.items().size());
  for (int i; (i = counters_[index].next.fetch_add(1, std::memory_order_relaxed)) < count;)
    kernel(args, plan.items()[static_cast<size_t>(i)]);
  if (args.act && y.k < y.k_pad && worker == 0)  // the padding, which no item writes
    kernels_.round(args.q, args.ldq, y, 0, y.rows, y.k / 32, y.k_pad / 32);
  if (plan.merges().empty()) return;
  pool_->barrier();
  const Range mine = share(static_cast<int>(plan.merges().size()), pool_->size(), worker);
  for (int i = mine.begin; i < mine.end; i++) kernels_.attention_merge(args, plan.merges()[static_cast<size_t>(i)]);
}

// ---------------------------------------------------------------- operands

int Program::rows_of(const Operand& x, const Step& step) const {
  const ValueSpec& v = spec_.values[static_cast<size_t>(x.value)];
  return v.times * (v.logit_rows ? step.batch.rows : step.batch.tokens);
}

float* Program::f32(const Operand& x, int plan) const {
  return reinterpret_cast<float*>(arena_.data() + spec_.values[static_cast<size_t>(x.value)].offset[plan]) + x.start;
}

const float* Program::vector_of(int weight) const {
  return weight < 0 ? nullptr : reinterpret_cast<const float*>(weights_[static_cast<size_t>(weight)].data);
}

NormArgs Program::norm_args(const Node& n, int plan) const {
  const bool per_head = n.vector >= 0 && weights_[static_cast<size_t>(n.vector)].k == n.a.cols;
  return {.x = f32(n.a, plan),
          .ldx = ld(n.a),
          .w = vector_of(n.vector),
          .b = vector_of(n.bias),
          .eps = n.eps,
          .cols = n.head_dim,
          .heads = n.a.cols / n.head_dim,
          .step = per_head ? n.head_dim : 0,
          .centred = n.centred};
}

// The layout of a rounded value follows the rows of this step, inside the place that the plan keeps for the most rows.
Activation Program::activation(const Operand& x, int plan, int rows) const {
  const ValueSpec& v = spec_.values[static_cast<size_t>(x.value)];
  uint8_t* place = arena_.data() + v.offset[plan];
  Activation a{};
  a.act = v.act;
  a.rows = rows;
  a.stride = rows * int8_rows(v.act);
  a.k = x.cols;
  a.k_pad = static_cast<int>(align_up(static_cast<size_t>(x.cols), 64));
  a.ld = v.act == Act::F32 ? v.cols : act_ld(v.act, a.k_pad);
  const size_t r = static_cast<size_t>(a.stride), k = static_cast<size_t>(a.k_pad);
  switch (v.act) {
    case Act::F32: a.f = reinterpret_cast<float*>(place) + x.start; break;
    case Act::BF16:
      a.h = reinterpret_cast<uint16_t*>(place);
      a.t = reinterpret_cast<float*>(place + align_up(r * static_cast<size_t>(a.ld) * 2, kLine));
      break;
    case Act::A8:
    case Act::A16: {
      const size_t part = align_up(r * k / 32 * 4, kLine);
      a.q = reinterpret_cast<int8_t*>(place);
      place += align_up(r * k, kLine);
      a.s = reinterpret_cast<float*>(place);
      a.t = reinterpret_cast<float*>(place + part);
      a.nsum = reinterpret_cast<int32_t*>(place + 2 * part);
      a.nhalf = reinterpret_cast<int32_t*>(place + 3 * part);
      break;
    }
  }
  return a;
}

void Program::read(int value, double* out) const {
  const int cols = spec_.values[static_cast<size_t>(value)].cols, rows = value_rows(value);
  const Activation a = activation({value, 0, cols}, last_plan_, rows);
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < cols; c++, out++) {
      const auto of_group = [&](int row) {
        const int64_t i = c / 32 * a.stride + row;
        return double{a.s[i]} * static_cast<double>(a.q[i * 32 + c % 32]);
      };
      if (a.act == Act::F32) *out = a.f[r * a.ld + c];
      if (a.act == Act::BF16) *out = std::bit_cast<float>(static_cast<uint32_t>(a.h[r * a.ld + c]) << 16);
      if (a.act == Act::A8) *out = of_group(r);
      if (a.act == Act::A16) *out = of_group(2 * r) + of_group(2 * r + 1);
    }
}

}  // namespace octavo
