// The attention work of one step: made once, used by every layer with the same KV group, number of heads, window and direction.
#pragma once
#include <vector>

#include "batch.h"
#include "kernels.h"
#include "memory.h"

namespace octavo {

struct AttnMerge {  // all splits of one tile of rows
  int tok0, ntok, kv_head, nsplit;
  const float* partial;
};

class AttnPlan {
 public:
  // Reserves (touched on use) the partial results of the few items that are split among threads.
  AttnPlan(int group, int heads, int window, bool causal, int kv_heads, int value_dim, int max_model_len, int workers);

  bool serves(int group, int heads, int window, bool causal) const {
    return group == group_ && heads == heads_ && window == window_ && causal == causal_;
  }
  void make(const Batch& batch);

  const std::vector<AttnItem>& items() const { return items_; }     // longest first
  const std::vector<AttnMerge>& merges() const { return merges_; }  // after all items; mostly none

 private:
  int first_token(const AttnItem& item) const;  // that an item reads, in the first of its splits
  int end_token(const AttnItem& item) const;    // behind those that it reads
  int64_t cost_of(const AttnItem& item) const;
  void split();

  int group_, heads_, window_, kv_heads_, value_dim_, tile_, workers_;
  bool causal_;
  size_t partial_floats_;  // of one split of one tile
  int max_splits_;
  Memory partials_;
  std::vector<AttnItem> items_, whole_;
  std::vector<AttnMerge> merges_;
};

}  // namespace octavo
