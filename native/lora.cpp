// Low-rank deltas of adapters: h = scale * (A x), then y + B h, both by the float32 products of gemm.inl, so that the
// bits of a row depend neither on its neighbours nor on the threads (P1).
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pack.h"
#include "plan.h"

namespace octavo {
namespace {

constexpr int kChunkRows = 64;  // of one piece of work: a prompt is shared between the threads

int tasks_of(int cols) { return (cols + kTaskCols - 1) / kTaskCols; }

}  // namespace

void Program::set_adapter(int slot, std::shared_ptr<const Memory> memory, const std::vector<LoraSpec>& parts) {
  auto need = [](bool ok, const std::string& what) {
    if (!ok) throw std::invalid_argument(what);
  };
  need(slot >= 0 && slot < static_cast<int>(adapters_.size()), "there is no adapter slot " + std::to_string(slot));
  int most = 0;
  for (const Node& node : spec_.nodes)
    if (node.op == Op::LoraShrink) most = std::max(most, node.out.cols / static_cast<int>(node.targets.size()));
  Adapter adapter{memory, std::vector<LoraWeights>(memory ? spec_.targets.size() : 0)};
  for (const LoraSpec& part : parts) {
    need(memory && part.target >= 0 && part.target < static_cast<int>(spec_.targets.size()), "no such LoRA target");
    const LoraTarget& target = spec_.targets[static_cast<size_t>(part.target)];
    need(part.rank >= 1 && part.rank <= most,
         target.name + ": rank " + std::to_string(part.rank) + " is above " + std::to_string(most));
    const size_t bytes = memory->bytes(), a = packed_bytes(part.format, part.rank, target.k),
                 b = packed_bytes(part.format, target.n, part.rank);
    need(part.a % kLine == 0 && part.b % kLine == 0 && part.a <= bytes && a <= bytes - part.a && part.b <= bytes &&
             b <= bytes - part.b,
         target.name + " lies outside of the adapter's memory");
    adapter.parts[static_cast<size_t>(part.target)] = {
        packed_weight(part.format, part.rank, target.k, memory->data() + part.a),
        packed_weight(part.format, target.n, part.rank, memory->data() + part.b), part.scale};
  }
  const std::lock_guard lock(pool_->turn());
  adapters_[static_cast<size_t>(slot)] = std::move(adapter);
}

// Every row of the step once, in chunks of one adapter.
void Program::divide_adapters(const Batch& batch) {
  adapter_rows_.clear();
  if (spec_.targets.empty()) return;
  for (int row = 0; row < batch.tokens; row++) {
    const int slot = batch.adapters ? batch.adapters[row] : -1;
    const bool goes_on = row > 0 && adapter_rows_.back().slot == slot;
    if (goes_on && row - adapter_rows_.back().begin < kChunkRows) adapter_rows_.back().end = row + 1;
    else adapter_rows_.push_back({row, row + 1, slot});
  }
}

const Program::LoraWeights* Program::lora_of(const AdapterRows& rows, int target) const {
  if (rows.slot < 0) return nullptr;
  const Adapter& adapter = adapters_[static_cast<size_t>(rows.slot)];
  if (!adapter.memory || !adapter.parts[static_cast<size_t>(target)].a.data) return nullptr;
  return &adapter.parts[static_cast<size_t>(target)];
}

// Pieces of work are 32 columns of one target and one chunk of rows; columns beyond the rank are cleared.
void Program::lora_shrink(const Node& n, const Step& step) {
  const int targets = static_cast<int>(n.targets.size()), rank = n.out.cols / targets, tasks = tasks_of(rank);
  const int count = static_cast<int>(adapter_rows_.size()) * targets * tasks;
  std::atomic<int>& next = counters_[static_cast<size_t>(&n - spec_.nodes.data())].next;
  for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
    const AdapterRows& rows = adapter_rows_[static_cast<size_t>(i / (targets * tasks))];
    const int index = i / tasks % targets, task = i % tasks, first = task * kTaskCols;
    float* h = f32(n.out, step.plan) + rows.begin * ld(n.out) + index * rank;
    const LoraWeights* w = lora_of(rows, n.targets[static_cast<size_t>(index)]);
    const int end = std::min(first + kTaskCols, rank), live = w ? std::clamp(w->a.n, first, end) : first;
    if (live > first) {
      Activation x = activation(n.a, step.plan, rows.end - rows.begin);
      x.f += rows.begin * x.ld;
      GemmArgs args{};
      args.w = &w->a;
      args.x = &x;
      args.epilogue = Epilogue::Store;
      args.out = h;
      args.ld_out = ld(n.out);
      kernels_.gemm[static_cast<int>(w->a.format)][static_cast<int>(Act::F32)](args, task, task + 1);
    }
    for (int row = rows.begin; row < rows.end; row++, h += ld(n.out)) {
      for (int c = first; c < live; c++) h[c] *= w->scale;
      std::fill(h + live, h + end, 0.f);
    }
  }
}

// Threads share the columns, 32 at a time. Rows without an adapter are copied, where out is not where y lies already.
void Program::lora_expand(const Node& n, const Step& step, int worker) {
  const int targets = static_cast<int>(n.targets.size()), rank = n.a.cols / targets;
  const float *h = f32(n.a, step.plan), *y = f32(n.b, step.plan);
  float* out = f32(n.out, step.plan);
  int tasks = 0, col = 0, first = 0;
  for (int index : n.targets) tasks += tasks_of(spec_.targets[static_cast<size_t>(index)].n);
  const Range mine = share(tasks, pool_->size(), worker);
  for (int i = 0; i < targets; i++) {
    const int index = n.targets[static_cast<size_t>(i)], cols = spec_.targets[static_cast<size_t>(index)].n;
    const int begin = std::max(mine.begin - first, 0), end = std::min(mine.end - first, tasks_of(cols));
    const int from = col + begin * kTaskCols, to = col + std::min(end * kTaskCols, cols);
    if (begin < end && out != y)
      for (int row = 0; row < step.batch.tokens; row++)
        std::memcpy(out + row * ld(n.out) + from, y + row * ld(n.b) + from, static_cast<size_t>(to - from) * 4);
    for (const AdapterRows& rows : adapter_rows_) {
      const LoraWeights* w = begin < end ? lora_of(rows, index) : nullptr;
      if (!w) continue;
      Activation x{};
      x.act = Act::F32;
      x.rows = rows.end - rows.begin;
      x.k = w->b.k;
      x.k_pad = w->b.k_pad;
      x.ld = ld(n.a);
      x.f = const_cast<float*>(h) + rows.begin * x.ld + i * rank;
      GemmArgs args{};
      args.w = &w->b;
      args.x = &x;
      args.epilogue = Epilogue::Add;
      args.out = out + rows.begin * ld(n.out) + col;
      args.ld_out = ld(n.out);
      args.residual = args.out;
      args.ld_residual = args.ld_out;
      kernels_.gemm[static_cast<int>(w->b.format)][static_cast<int>(Act::F32)](args, begin, end);
    }
    first += tasks_of(cols);
    col += cols;
  }
}

}  // namespace octavo
