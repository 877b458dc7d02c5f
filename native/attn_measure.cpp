#include "attn_measure.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "attn_plan.h"
#include "bench/ceiling.h"

namespace octavo {
namespace {

constexpr int kMostLayers = 64;

}  // namespace

AttnRate attention_rate(const Kernels& kernels, const AttnLoad& load, const Memory& kv, int repeats) {
  const size_t block_bytes = kv_block_bytes(load.type, load.head_dim, load.head_dim);
  const int per = (load.context + kBlock - 1) / kBlock, common = load.prefix / kBlock, own = per - common;
  const int blocks = static_cast<int>(kv.bytes() / block_bytes);
  if (load.tokens > load.context - load.prefix || load.prefix % kKvTile || common + load.seqs * own > blocks)
    throw std::invalid_argument(std::to_string(load.seqs) + " sequences of " + std::to_string(load.context) +
                                " tokens do not fit " + std::to_string(blocks) +
                                " blocks, or their prefix is no tiles");
  std::mt19937 random(7);
  std::vector<int32_t> ids(static_cast<size_t>(common + load.seqs * own));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), random);

  std::vector<int32_t> table, positions, starts{0}, contexts;
  for (int s = 0; s < load.seqs; s++) {
    table.insert(table.end(), ids.begin(), ids.begin() + common);
    const auto first = ids.begin() + common + s * own;
    table.insert(table.end(), first, first + own);
    for (int t = load.context - load.tokens; t < load.context; t++) positions.push_back(t);
    starts.push_back(starts.back() + load.tokens);
    contexts.push_back(load.context);
  }
  Batch batch{};
  batch.tokens = starts.back();
  batch.seqs = load.seqs;
  batch.positions = positions.data();
  batch.seq_starts = starts.data();
  batch.context_lens = contexts.data();
  batch.tables = {{table.data(), per}};
  AttnPlan plan({.group = 0,
                 .heads = load.group,
                 .kv_heads = 1,
                 .value_dim = load.head_dim,
                 .window = 0,
                 .causal = true,
                 .share = load.share},
                load.context, 1);
  plan.make(batch);

  const size_t row = static_cast<size_t>(load.group) * static_cast<size_t>(load.head_dim);
  std::vector<float> q(static_cast<size_t>(batch.tokens) * row), out(q.size());
  std::normal_distribution<float> normal;
  for (float& x : q) x = normal(random);
  const Memory scratch(attn_scratch_floats(load.head_dim) * sizeof(float), false);
  AttnArgs args{};
  args.kv = {load.type, kv.data(), 0, static_cast<int64_t>(block_bytes), 1, load.head_dim, load.head_dim};
  args.q = q.data();
  args.ldq = args.ld_out = static_cast<int64_t>(row);
  args.heads = load.group;
  args.scale_log2e = 1.44269504f / std::sqrt(static_cast<float>(load.head_dim));
  args.out = out.data();
  args.scratch = reinterpret_cast<float*>(scratch.data());
  const auto attention = kernels.attention[static_cast<int>(load.type)];
  AttnRate rate{};
  const int layers = std::clamp(blocks / static_cast<int>(ids.size()), 1, kMostLayers);
  rate.seconds = bench::best_seconds(repeats, [&] {
    for (int layer = 0; layer < layers; layer++) {
      args.kv.base = kv.data() + static_cast<size_t>(layer) * ids.size() * block_bytes;
      for (const AttnItem& item : plan.items()) attention(args, item);
      for (const AttnItem& item : plan.merges()) kernels.attention_merge(args, item);
    }
  });
  rate.seconds /= layers;
  for (const AttnItem& item : plan.items())
    for (int i = 0; i < item.num_parts; i++) {
      const AttnPart& part = item.parts[i];
      const int first = std::max(item.split0 * kKvSplit, part.shared * kKvTile);
      const int end = std::min(item.split1 * kKvSplit, part.pos0 + part.ntok);
      if (first < end) rate.bytes += (end - first + kBlock - 1) / kBlock * static_cast<double>(block_bytes);
    }
  const double seen = load.tokens * (load.context - (load.tokens - 1) / 2.);
  rate.flop = 4. * load.seqs * static_cast<double>(row) * seen;
  return rate;
}

}  // namespace octavo
