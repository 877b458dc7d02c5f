#include "attn_plan.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace octavo {
namespace {

// Items per worker under which long contexts are split: more items than that balance by themselves.
constexpr int kFewItems = 4;
constexpr int kTileBlocks = kKvTile / kBlock;

size_t partial_floats(int rows, int value_dim) {  // of one split
  return static_cast<size_t>(rows) * static_cast<size_t>(value_dim + 2);
}

const int32_t* blocks_of(const Batch::Table& table, int sequence) {
  return table.blocks + int64_t{sequence} * table.width;
}

}  // namespace

AttnPlan::AttnPlan(const Shape& shape, int max_model_len, int workers)
    : shape_(shape),
      rows_(shape.heads / shape.kv_heads),
      tile_(std::max(1, kItemRows / rows_)),
      workers_(workers),
      partials_(static_cast<size_t>(kFewItems * workers) *
                    static_cast<size_t>((max_model_len + kKvSplit - 1) / kKvSplit) *
                    partial_floats(tile_ * rows_, shape.value_dim) * sizeof(float),
                false) {}

void AttnPlan::make(const Batch& batch) {
  items_.clear();
  merges_.clear();
  parts_.clear();
  starts_.clear();
  order_sequences(batch);
  divide(batch);
  for (int h = 0; h < shape_.kv_heads; h++)
    for (size_t g = 0; g + 1 < starts_.size(); g++) {
      AttnItem item{};
      item.parts = parts_.data() + starts_[g];
      item.num_parts = starts_[g + 1] - starts_[g];
      item.kv_head = h;
      item.split0 = first_split(item);
      for (int i = 0; i < item.num_parts; i++)
        item.split1 = std::max(item.split1, (end_token(item.parts[i]) + kKvSplit - 1) / kKvSplit);
      items_.push_back(item);
    }
  count_tiles();
  if (static_cast<int>(items_.size()) < kFewItems * workers_) split();
  std::stable_sort(items_.begin(), items_.end(),
                   [this](const AttnItem& a, const AttnItem& b) { return cost_of(a) > cost_of(b); });
  for (size_t i = 0; i + static_cast<size_t>(workers_) < items_.size(); i++) {
    const AttnItem& next = items_[i + static_cast<size_t>(workers_)];  // most likely of the same worker
    if (next.kv_head != items_[i].kv_head) continue;
    const AttnPart& part = next.parts[0];
    const int first = std::max(next.split0 * kKvSplit, first_token(part)) / kBlock;
    const int blocks = (end_token(part) + kBlock - 1) / kBlock - first;
    if (blocks <= 0) continue;
    items_[i].next_blocks = part.blocks + first;
    items_[i].num_next = std::min(kTileBlocks, blocks);
  }
}

// By their blocks, in any order that puts equal beginnings together: so trees of prefixes lie branch by branch.
void AttnPlan::order_sequences(const Batch& batch) {
  order_.resize(static_cast<size_t>(batch.seqs));
  std::iota(order_.begin(), order_.end(), 0);
  if (!shares() || batch.seqs < 2) return;
  const auto& table = batch.tables[static_cast<size_t>(shape_.group)];
  std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) {
    const int n = whole_tiles(batch, a), m = whole_tiles(batch, b);
    const auto bytes = static_cast<size_t>(std::min(n, m) * kTileBlocks) * sizeof(int32_t);
    const int differ = std::memcmp(blocks_of(table, a), blocks_of(table, b), bytes);
    return differ ? differ < 0 : n < m;
  });
}

// Tiles that all tokens of a sequence in this step see to their ends: no token of the step is in them.
int AttnPlan::whole_tiles(const Batch& batch, int sequence) const {
  return batch.positions[batch.seq_starts[sequence]] / kKvTile;
}

int AttnPlan::shared_tiles(const Batch& batch, int a, int b) const {
  const auto& table = batch.tables[static_cast<size_t>(shape_.group)];
  const int most = std::min(whole_tiles(batch, a), whole_tiles(batch, b)) * kTileBlocks;
  const int32_t* of_a = blocks_of(table, a);
  return static_cast<int>(std::mismatch(of_a, of_a + most, blocks_of(table, b)).first - of_a) / kTileBlocks;
}

// Parts of at most so many tokens as make the rows of an item. Those with fewer join the one before with which they share
// tiles, as long as there is work enough for all threads.
void AttnPlan::divide(const Batch& batch) {
  const auto& table = batch.tables[static_cast<size_t>(shape_.group)];
  auto add = [&](int sequence, int token, int count, int shared) {
    AttnPart part{};
    part.tok0 = token;
    part.ntok = count;
    part.pos0 = batch.positions[token];
    part.context = shape_.causal ? 0 : batch.context_lens[sequence];
    part.blocks = blocks_of(table, sequence);
    part.shared = shared;
    if (!shared) starts_.push_back(static_cast<int>(parts_.size()));
    parts_.push_back(part);
  };
  int64_t splits = 0;
  for (int s = 0; s < batch.seqs; s++) {
    splits += (batch.context_lens[s] + kKvSplit - 1) / kKvSplit;
    for (int t = batch.seq_starts[s]; t + tile_ <= batch.seq_starts[s + 1]; t += tile_) add(s, t, tile_, 0);
  }
  const auto together = splits * shape_.kv_heads / (int64_t{kFewItems} * workers_);
  int before = -1, tokens = 0, count = 0;  // of the item that may take more: its last sequence, tokens, parts
  for (const int s : order_) {
    const int rest = (batch.seq_starts[s + 1] - batch.seq_starts[s]) % tile_;
    if (!rest) continue;
    const bool fits = shares() && before >= 0 && tokens + rest <= tile_ && count < together;
    const int shared = fits ? shared_tiles(batch, before, s) : 0;
    if (!shared) tokens = count = 0;
    add(s, batch.seq_starts[s + 1] - rest, rest, shared);
    before = s;
    tokens += rest;
    count++;
  }
  starts_.push_back(static_cast<int>(parts_.size()));
}

int AttnPlan::first_token(const AttnPart& part) const {
  return shape_.window > 0 ? std::max(0, part.pos0 + 1 - shape_.window) : 0;
}

int AttnPlan::end_token(const AttnPart& part) const {
  const int last = part.pos0 + part.ntok;
  if (shape_.causal) return last;
  return shape_.window > 0 ? std::min(part.context, last - 1 + shape_.window) : part.context;
}

int AttnPlan::first_split(const AttnItem& item) const {
  int first = first_token(item.parts[0]);
  for (int i = 1; i < item.num_parts; i++) first = std::min(first, first_token(item.parts[i]));
  return first / kKvSplit;
}

int64_t AttnPlan::cost_of(const AttnItem& item) const {
  int64_t cost = 0;
  for (int i = 0; i < item.num_parts; i++) {
    const AttnPart& part = item.parts[i];
    const int first = std::max(first_token(part), item.split0 * kKvSplit);
    const int end = std::min(end_token(part), item.split1 * kKvSplit);
    const int own = std::max(first, part.shared * kKvTile);
    // 4: reading K and V costs as much as a few tokens
    cost += int64_t{std::max(0, end - first)} * part.ntok + int64_t{std::max(0, end - own)} * 4;
  }
  return cost;
}

// One item per split of each, and a merge of what they leave; the same bits as one item walking all splits.
void AttnPlan::split() {
  whole_.swap(items_);
  items_.clear();
  auto* partial = reinterpret_cast<float*>(partials_.data());
  for (const AttnItem& whole : whole_) {
    if (whole.split1 - whole.split0 == 1) {
      items_.push_back(whole);
      continue;
    }
    int tokens = 0;
    for (int i = 0; i < whole.num_parts; i++) tokens += whole.parts[i].ntok;
    merges_.push_back(whole);
    merges_.back().partial = partial;
    for (int s = whole.split0; s < whole.split1; s++, partial += partial_floats(tokens * rows_, shape_.value_dim)) {
      items_.push_back(whole);
      items_.back().split0 = s;
      items_.back().split1 = s + 1;
      items_.back().partial = partial;
    }
  }
}

void AttnPlan::count_tiles() {
  tiles_ = {};
  for (size_t i = 0; i < parts_.size(); i++) {
    const int first = first_token(parts_[i]) / kKvTile, end = (end_token(parts_[i]) + kKvTile - 1) / kKvTile;
    const int saved = std::max(0, parts_[i].shared - first);
    tiles_.read += end - first - saved;
    tiles_.saved += saved;
  }
  tiles_.read *= shape_.kv_heads;
  tiles_.saved *= shape_.kv_heads;
}

}  // namespace octavo
