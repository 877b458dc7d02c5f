// Nodes of mixtures of experts and of latent attention: rows are sorted by expert or by head, and those of each meet its own
// weights as one product.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "plan.h"

namespace octavo {
namespace {

constexpr int kManyRows = 16;  // from here on a task takes long enough to be handed out one by one

// Row `from` of x as row `to` of y, which are of one type and width.
void copy_row(const Activation& x, int from, const Activation& y, int to) {
  const int groups = y.k_pad / 32;
  switch (y.act) {
    case Act::F32: std::memcpy(y.f + to * y.ld, x.f + from * x.ld, static_cast<size_t>(y.k) * sizeof(float)); return;
    case Act::BF16:
      std::memcpy(y.h + to * y.ld, x.h + from * x.ld, static_cast<size_t>(y.k_pad) * sizeof(uint16_t));
      for (int g = 0; g < groups; g++) y.t[g * y.stride + to] = x.t[g * x.stride + from];
      return;
    case Act::A8:
    case Act::A16: {
      const int n = int8_rows(y.act);
      for (int g = 0; g < groups; g++) {
        const int64_t a = g * x.stride + n * from, b = g * y.stride + n * to;
        std::copy_n(x.q + a * 32, n * 32, y.q + b * 32);
        std::copy_n(x.s + a, n, y.s + b);
        std::copy_n(x.t + a, n, y.t + b);
        std::copy_n(x.nsum + a, n, y.nsum + b);
        std::copy_n(x.nhalf + a, n, y.nhalf + b);
      }
    }
  }
}

}  // namespace

// Every worker sorts for itself, once per routing and step: a few thousand numbers at most, and nothing to wait for.
const Program::Sorted& Program::sorted(const Node& n, const Step& step, int worker) {
  Sorted& s = workers_[static_cast<size_t>(worker)].sorted;
  if (s.routing == n.b.value) return s;
  s.routing = n.b.value;
  const int rows = rows_of(n.b, step), top_k = n.b.cols / 2;
  const float* routing = f32(n.b, step.plan);
  auto expert_of = [&](int i) {
    const float id = routing[i / top_k * ld(n.b) + i % top_k];
    return static_cast<size_t>(id >= 0 && id < static_cast<float>(n.experts) ? id : 0);  // Route writes no other
  };
  std::fill(s.starts.begin(), s.starts.end(), 0);
  for (int i = 0; i < rows * top_k; i++) s.starts[expert_of(i) + 1]++;
  for (size_t e = 0; e + 1 < s.starts.size(); e++) s.starts[e + 1] += s.starts[e];
  for (int i = 0; i < rows * top_k; i++) {
    const int place = s.starts[expert_of(i)]++;
    s.ranks[static_cast<size_t>(place)] = i;
    s.places[static_cast<size_t>(i)] = place;
  }
  for (size_t e = s.starts.size() - 1; e > 0; e--) s.starts[e] = s.starts[e - 1];
  s.starts[0] = 0;
  return s;
}

void Program::dispatch(const Node& n, const Step& step, int worker) {
  const Sorted& s = sorted(n, step, worker);
  const int rows = rows_of(n.out, step), top_k = n.b.cols / 2;
  const Activation x = activation(n.a, step.plan, rows / top_k), y = activation(n.out, step.plan, rows);
  const Range mine = share(rows, pool_->size(), worker);
  for (int row = mine.begin; row < mine.end; row++) copy_row(x, s.ranks[static_cast<size_t>(row)] / top_k, y, row);
}

// Tasks are 32 columns of one expert, in the order of experts that have rows. Few rows are shared out beforehand.
void Program::expert_linear(const Node& n, const Step& step, int worker) {
  const Sorted& s = sorted(n, step, worker);
  const int rows = rows_of(n.out, step);
  const Activation x = activation(n.a, step.plan, rows);
  const size_t each = n.weights.size() / static_cast<size_t>(n.experts);
  GemmArgs args{};
  args.epilogue = Epilogue::Store;
  args.ld_out = ld(n.out);
  auto run = [&](Range tasks) {
    int first = 0;
    for (int e = 0; e < n.experts && first < tasks.end; e++) {
      const int row = s.starts[static_cast<size_t>(e)], count = s.starts[static_cast<size_t>(e) + 1] - row;
      if (!count) continue;
      const Activation part = some_rows(x, row, count);
      args.x = &part;
      int col = 0;
      for (size_t i = 0; i < each; i++) {
        const Weight& w = weights_[static_cast<size_t>(n.weights[static_cast<size_t>(e) * each + i])];
        const int tasks_of = w.n_pad / kTaskCols;
        const int begin = std::max(tasks.begin - first, 0), end = std::min(tasks.end - first, tasks_of);
        args.w = &w;
        args.out = f32(n.out, step.plan) + row * args.ld_out + col;
        args.bias = n.vector < 0 ? nullptr : vector_of(n.vector) + e * n.out.cols + col;
        if (begin < end) kernels_.gemm[static_cast<int>(w.format)][static_cast<int>(x.act)](args, begin, end);
        first += tasks_of;
        col += w.n;
      }
    }
    return first;
  };
  const int all = std::numeric_limits<int>::max(), tasks = run({all, all});
  if (rows < kManyRows) {
    run(share(tasks, pool_->size(), worker));
    return;
  }
  std::atomic<int>& next = counters_[static_cast<size_t>(&n - spec_.nodes.data())].next;
  for (int task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) run({task, task + 1});
}

void Program::gather_expert_cols(const Node& n, const Step& step, int worker) {
  const Sorted& s = sorted(n, step, worker);
  const Range mine = share(rows_of(n.out, step), pool_->size(), worker);
  int e = 0;
  for (int row = mine.begin; row < mine.end; row++) {
    while (s.starts[static_cast<size_t>(e) + 1] <= row) e++;
    const float* order = vector_of(n.vector) + static_cast<int64_t>(e) * n.out.cols;
    const float* x = f32(n.a, step.plan) + row * ld(n.a);
    float* y = f32(n.out, step.plan) + row * ld(n.out);
    for (int c = 0; c < n.out.cols; c++) y[c] = x[static_cast<int>(order[c])];
  }
}

void Program::combine(const Node& n, const Step& step, int worker) {
  const Sorted& s = sorted(n, step, worker);
  const int rows = rows_of(n.out, step), top_k = n.b.cols / 2;
  const Range mine = share(rows, pool_->size(), worker);
  const float* x[kMaxTopK];
  for (int row = mine.begin; row < mine.end; row++) {
    for (int r = 0; r < top_k; r++)
      x[r] = f32(n.a, step.plan) + s.places[static_cast<size_t>(row * top_k + r)] * ld(n.a);
    const float* weights = f32(n.b, step.plan) + row * ld(n.b) + top_k;
    kernels_.weighted_sum(x, weights, top_k, f32(n.out, step.plan) + row * ld(n.out), n.out.cols);
  }
}

void Program::split_heads(const Node& n, const Step& step, int worker) {
  const int rows = rows_of(n.a, step), cols = n.out.cols;
  const Range mine = share(rows, pool_->size(), worker);
  for (int row = mine.begin; row < mine.end; row++)
    for (int head = 0; head < n.heads; head++)
      std::memcpy(f32(n.out, step.plan) + (int64_t{head} * rows + row) * ld(n.out),
                  f32(n.a, step.plan) + row * ld(n.a) + head * cols, static_cast<size_t>(cols) * sizeof(float));
}

// Tasks are 32 columns of one head, whose rows of x stand together.
void Program::head_linear(const Node& n, const Step& step, int worker) {
  const int rows = rows_of(n.out, step), each = n.out.cols / n.heads / kTaskCols;
  const Activation x = activation(n.a, step.plan, rows * n.heads);
  const Weight& w = weights_[static_cast<size_t>(n.weights[0])];
  GemmArgs args{};
  args.w = &w;
  args.epilogue = Epilogue::Store;
  args.out = f32(n.out, step.plan);
  args.ld_out = ld(n.out);
  const Range mine = share(each * n.heads, pool_->size(), worker);
  for (int head = mine.begin / each; head * each < mine.end; head++) {
    const Activation part = some_rows(x, head * rows, rows);
    args.x = &part;
    kernels_.gemm[static_cast<int>(w.format)][static_cast<int>(x.act)](args, std::max(mine.begin, head * each),
                                                                       std::min(mine.end, (head + 1) * each));
  }
}

void Program::concat(const Node& n, const Step& step, int worker) {
  const Range mine = share(rows_of(n.out, step), pool_->size(), worker);
  for (int row = mine.begin; row < mine.end; row++) {
    float* to = f32(n.out, step.plan) + row * ld(n.out);
    for (int head = 0; head < n.heads; head++)
      for (const Operand& x : n.ins) {
        const int cols = x.cols / n.heads;
        std::memcpy(to, f32(x, step.plan) + row * ld(x) + head * cols, static_cast<size_t>(cols) * sizeof(float));
        to += cols;
      }
  }
}

}  // namespace octavo
