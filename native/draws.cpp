// The end of a step: draws of stored logits, and draws made piece by piece beside the product that gives the logits.
#include <algorithm>

#include "plan.h"

namespace octavo {
// Which rows of this step keep their logits, and what the draws of the others go by.
void Program::prepare_draws(const Step& step) {
  const Batch& b = step.batch;
  const Node& last = spec_.nodes.back();
  last_stored_ = true;
  if (last.op != Op::LinearSample) return;
  const SamplingArrays& in = b.sampling;
  next_draw_.next.store(0, std::memory_order_relaxed);
  for (int r = 0; r < b.rows; r++) {
    const bool stored = needs_logits(in, r, spec_.limits.vocab), masked = in.mask_rows[r] >= 0 && in.target[r] < 0;
    draw_rows_[static_cast<size_t>(r)] = {
        .logits = stored ? f32(last.out, step.plan) + r * ld(last.out) : nullptr,
        .inverse_temperature = in.target[r] >= 0 ? 0 : inverse_temperature(in, r),
        .noise = noise_row(in.noise_key[r], in.position[r]),
        .mask = masked ? in.masks + int64_t{in.mask_rows[r]} * in.mask_width : nullptr,
        .mask_width = in.mask_width,
    };
    last_stored_ &= stored;
  }
}

void Program::sample(const Node& n, const Step& step, int worker) {
  std::atomic<int>& next = counters_[static_cast<size_t>(&n - spec_.nodes.data())].next;
  float* logits = f32(n.a, step.plan);
  for (int r; (r = next.fetch_add(1, std::memory_order_relaxed)) < step.batch.rows;)
    sample_row(kernels_, step.batch.sampling, r, logits + r * ld(n.a), spec_.limits.vocab,
               workers_[static_cast<size_t>(worker)].sample, step.out);
}

void Program::linear_sample(const Node& n, const Step& step, int worker) {
  const int rows = step.batch.rows;
  if (!rows) return;
  Worker& mine = workers_[static_cast<size_t>(worker)];
  const int most = piece_cols(rows) / kTaskCols;
  const Weight& w = weights_[static_cast<size_t>(n.weights[0])];
  const Activation x = activation(n.a, step.plan, rows);
  const auto gemm = kernels_.gemm[static_cast<int>(w.format)][static_cast<int>(x.act)];
  float* piece = mine.piece.data();
  DrawState* states = draw_states_.data() + static_cast<size_t>(worker) * static_cast<size_t>(spec_.limits.max_rows);
  std::fill_n(states, rows, DrawState{});
  DrawArgs draw{draw_rows_.data(), states, piece, most * kTaskCols, 0, 0};
  divide(n, w.n_pad / kTaskCols, rows, worker, [&](Range tasks) {
    for (int task = tasks.begin; task < tasks.end; task += most) {
      const int count = std::min(most, tasks.end - task);
      draw.first = task * kTaskCols;
      draw.cols = std::min(w.n - draw.first, count * kTaskCols);
      const Weight part = some_columns(w, draw.first, draw.cols);
      GemmArgs args{};
      args.w = &part;
      args.x = &x;
      args.bias = n.vector < 0 ? nullptr : vector_of(n.vector) + draw.first;
      args.out = piece;
      args.ld_out = draw.ld;
      gemm(args, 0, count);
      if (n.scale != 1) kernels_.scale(piece, draw.ld, &n.scale, 0, piece, draw.ld, draw.cols, 0, rows);
      if (n.softcap > 0) kernels_.softcap(piece, draw.ld, n.softcap, piece, draw.ld, draw.cols, 0, rows);
      kernels_.draw(draw, 0, rows);
    }
  });
  pool_->barrier();
  for (int r; (r = next_draw_.next.fetch_add(1, std::memory_order_relaxed)) < rows;) {
    const auto row = static_cast<size_t>(r);
    if (float* logits = draw_rows_[row].logits) {
      sample_row(kernels_, step.batch.sampling, r, logits, spec_.limits.vocab, mine.sample, step.out);
      continue;
    }
    const int token = end_draw(draw_rows_[row], draw_states_.data() + r, spec_.limits.max_rows, pool_->size());
    const int target = step.batch.sampling.target[r];
    step.out.invalid[r] = token < 0;
    step.out.token_ids[r] = token >= 0 && target >= 0 ? target : token;
    step.out.logprobs[r] = 0;
    step.out.ranks[r] = 0;
  }
}

const float* Program::logits() const {
  const Node& last = spec_.nodes.back();
  if (!last_stored_) return nullptr;
  return last.op == Op::Sample         ? f32(last.a, last_plan_)
         : last.op == Op::LinearSample ? f32(last.out, last_plan_)
                                       : nullptr;
}

}  // namespace octavo
