#include "attn_plan.h"

#include <algorithm>

namespace octavo {
namespace {

// Rows (token, query head) of an item: some row tiles of 12, so that they share K and V in the caches.
constexpr int kItemRows = 48;
// Items per worker under which long contexts are split: more items than that balance by themselves.
constexpr int kFewItems = 4;

}  // namespace

AttnPlan::AttnPlan(int group, int heads, int window, bool causal, int kv_heads, int value_dim, int max_model_len,
                   int workers)
    : group_(group),
      heads_(heads),
      window_(window),
      kv_heads_(kv_heads),
      value_dim_(value_dim),
      tile_(std::max(1, kItemRows / (heads / kv_heads))),
      workers_(workers),
      causal_(causal),
      partial_floats_(static_cast<size_t>(tile_) * static_cast<size_t>(heads / kv_heads) *
                      static_cast<size_t>(value_dim + 2)),
      max_splits_((max_model_len + kKvSplit - 1) / kKvSplit),
      partials_(
          static_cast<size_t>(kFewItems * workers) * static_cast<size_t>(max_splits_) * partial_floats_ * sizeof(float),
          false) {}

void AttnPlan::make(const Batch& batch) {
  items_.clear();
  merges_.clear();
  const auto& table = batch.tables[static_cast<size_t>(group_)];
  for (int h = 0; h < kv_heads_; h++)
    for (int s = 0; s < batch.seqs; s++)
      for (int t = batch.seq_starts[s]; t < batch.seq_starts[s + 1]; t += tile_) {
        AttnItem item{};
        item.tok0 = t;
        item.ntok = std::min(tile_, batch.seq_starts[s + 1] - t);
        item.pos0 = batch.positions[t];
        item.kv_head = h;
        item.blocks = table.blocks + int64_t{s} * table.width;
        item.context = causal_ ? 0 : batch.context_lens[s];
        item.split0 = first_token(item) / kKvSplit;
        item.split1 = (end_token(item) + kKvSplit - 1) / kKvSplit;
        items_.push_back(item);
      }
  if (static_cast<int>(items_.size()) < kFewItems * workers_) split();
  std::stable_sort(items_.begin(), items_.end(),
                   [this](const AttnItem& a, const AttnItem& b) { return cost_of(a) > cost_of(b); });
  for (size_t i = 0; i + static_cast<size_t>(workers_) < items_.size(); i++) {
    const AttnItem& next = items_[i + static_cast<size_t>(workers_)];  // most likely of the same worker
    if (next.kv_head != items_[i].kv_head) continue;
    const int first = first_token(next) / kBlock;
    items_[i].next_blocks = next.blocks + first;
    items_[i].num_next = std::min(kKvTile / kBlock, (end_token(next) + kBlock - 1) / kBlock - first);
  }
}

int AttnPlan::first_token(const AttnItem& item) const {
  return std::max(item.split0 * kKvSplit, window_ > 0 ? std::max(0, item.pos0 + 1 - window_) : 0);
}

int AttnPlan::end_token(const AttnItem& item) const {
  const int last = item.pos0 + item.ntok;
  if (causal_) return last;
  return window_ > 0 ? std::min(item.context, last - 1 + window_) : item.context;
}

int64_t AttnPlan::cost_of(const AttnItem& item) const {
  const int end = std::min(end_token(item), item.split1 * kKvSplit);
  return int64_t{end - first_token(item)} * (item.ntok + 4);  // 4: reading K and V costs as much as a few tokens
}

// One item per split of each, and a merge of what they leave; the same bits as one item walking all splits.
void AttnPlan::split() {
  whole_.swap(items_);
  items_.clear();
  auto* partial = reinterpret_cast<float*>(partials_.data());
  for (const AttnItem& item : whole_) {
    if (item.split1 - item.split0 == 1) {
      items_.push_back(item);
      continue;
    }
    const size_t floats =
        static_cast<size_t>(item.ntok) * static_cast<size_t>(heads_ / kv_heads_) * static_cast<size_t>(value_dim_ + 2);
    merges_.push_back({item.tok0, item.ntok, item.kv_head, item.split1 - item.split0, partial});
    for (int s = item.split0; s < item.split1; s++, partial += floats) {
      items_.push_back(item);
      items_.back().split0 = s;
      items_.back().split1 = s + 1;
      items_.back().partial = partial;
    }
  }
}

}  // namespace octavo
