// The attention work of one step: made once, used by every layer with the same KV group, number of heads, window and direction.
#pragma once
#include <vector>

#include "batch.h"
#include "kernels.h"
#include "memory.h"

namespace octavo {

// KV tiles of one head that the items of a step read, and how many more they would be if no two sequences shared any.
struct KvTiles {
  int64_t read = 0, saved = 0;
};

class AttnPlan {
 public:
  struct Shape {
    int group;  // of the KV cache
    int heads, kv_heads, value_dim;
    int window;
    bool causal;
    bool share;  // tiles among sequences; false only to check that it changes no bit
  };

  // Reserves (touched on use) the partial results of the few items that are split among threads.
  AttnPlan(const Shape& shape, int max_model_len, int workers);

  bool serves(int group, int heads, int window, bool causal) const {
    return group == shape_.group && heads == shape_.heads && window == shape_.window && causal == shape_.causal;
  }
  void make(const Batch& batch);

  const std::vector<AttnItem>& items() const { return items_; }    // longest first
  const std::vector<AttnItem>& merges() const { return merges_; }  // after all items; mostly none
  KvTiles tiles() const { return tiles_; }                         // of the last step, all heads

 private:
  bool shares() const { return shape_.share && shape_.causal; }
  void order_sequences(const Batch& batch);
  void divide(const Batch& batch);
  int shared_tiles(const Batch& batch, int a, int b) const;
  int whole_tiles(const Batch& batch, int sequence) const;
  int first_token(const AttnPart& part) const;  // that a part reads
  int end_token(const AttnPart& part) const;    // behind those that it reads
  int first_split(const AttnItem& item) const;
  int64_t cost_of(const AttnItem& item) const;
  void split();
  void count_tiles();

  Shape shape_;
  int rows_;  // of a token
  int tile_;  // tokens of an item
  int workers_;
  Memory partials_;
  std::vector<int> order_;  // of the sequences: those with common blocks one after the other
  std::vector<AttnPart> parts_;
  std::vector<int> starts_;  // of the groups of parts that make an item for each head
  std::vector<AttnItem> items_, whole_, merges_;
  KvTiles tiles_;
};

}  // namespace octavo
