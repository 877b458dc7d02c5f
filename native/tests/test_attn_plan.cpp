// The attention work of random steps: every row meets each of its KV tiles once, tiles that are read for several sequences
// are the same blocks for all of them, and no bit depends on who shares what.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <tuple>
#include <vector>

#include "attn_plan.h"
#include "check.h"

using namespace octavo;
using check::Guarded;
using check::Random;

namespace {

constexpr int kTileBlocks = kKvTile / kBlock;

// A step of sequences that are leaves of a tree of prefixes, in any order: some decode, some have a chunk. All begin with
// `trunk` tokens, if any: then all decode.
struct Tree {
  std::vector<int32_t> positions, starts{0}, contexts, blocks;
  std::vector<std::vector<int32_t>> tables;
  int num_blocks = 0;
  Batch batch{};

  Tree(Random& random, int seqs, int longest, int window, int trunk = 0) {
    std::vector<std::pair<std::vector<int32_t>, int>> rows;  // blocks, tokens of the step
    std::vector<std::vector<int32_t>> trunks(1);
    for (; num_blocks * kBlock < trunk; num_blocks++) trunks[0].push_back(num_blocks);
    for (int s = 0; s < seqs; s++) {
      std::vector<int32_t> table = trunks[size_t(random.below(int(trunks.size())))];
      while (int(table.size()) * kBlock > longest) table.pop_back();
      const int more = random.below(longest - int(table.size()) * kBlock + 1), kept = int(table.size());
      for (int i = 0; i < more / kBlock; i++) table.push_back(num_blocks++);
      trunks.push_back(table);
      const int own = (int(table.size()) - kept) * kBlock + 1;  // may be written: not shared yet
      table.push_back(num_blocks++);
      rows.emplace_back(table, trunk || random.below(3) ? 1 : 1 + random.below(std::min(own, 60)));
    }
    for (size_t i = rows.size(); i > 1; i--) std::swap(rows[i - 1], rows[size_t(random.below(int(i)))]);
    size_t width = 0;
    for (auto& [table, tokens] : rows) width = std::max(width, table.size());
    for (auto& [table, tokens] : rows) {
      const int context = int(table.size() - 1) * kBlock + 1;
      for (int t = context - tokens; t < context; t++) positions.push_back(t);
      starts.push_back(starts.back() + tokens);
      contexts.push_back(context);
      if (window > 0)  // as the cache does: blocks that no token of the step sees are given back
        std::fill_n(table.begin(), std::max(0, context - tokens + 1 - window) / kBlock, 0);
      tables.push_back(table);
      table.resize(width);
      blocks.insert(blocks.end(), table.begin(), table.end());
    }
    batch.tokens = starts.back();
    batch.seqs = seqs;
    batch.positions = positions.data();
    batch.seq_starts = starts.data();
    batch.context_lens = contexts.data();
    batch.tables = {{blocks.data(), int(width)}};
  }
};

using Seen = std::map<std::tuple<int, int, int>, int>;  // token, kv head, split

void check_plan(const Tree& tree, const AttnPlan& plan, const AttnPlan::Shape& shape) {
  Seen seen;
  KvTiles tiles;
  for (const AttnItem& item : plan.items()) {
    int rows = 0;
    for (int i = 0; i < item.num_parts; i++) {
      const AttnPart& part = item.parts[i];
      rows += part.ntok * shape.heads / shape.kv_heads;
      CHECK(i > 0 || part.shared == 0);
      CHECK(i == 0 || part.shared > 0);
      CHECK(part.shared <= part.pos0 / kKvTile);
      for (int b = 0; b < part.shared * kTileBlocks; b++) CHECK(part.blocks[b] == item.parts[i - 1].blocks[b]);
      const int first = shape.window ? std::max(0, part.pos0 + 1 - shape.window) : 0, end = part.pos0 + part.ntok;
      for (int t = 0; t < part.ntok; t++) {
        CHECK(tree.positions[size_t(part.tok0 + t)] == part.pos0 + t);
        for (int s = item.split0; s < item.split1; s++) seen[{part.tok0 + t, item.kv_head, s}]++;
      }
      for (int tile = first / kKvTile; tile * kKvTile < end; tile++) {
        const int split = tile * kKvTile / kKvSplit;
        if (split < item.split0 || split >= item.split1) continue;
        (tile < part.shared ? tiles.saved : tiles.read)++;
      }
    }
    CHECK(item.num_parts <= kItemParts && (rows <= kItemRows || item.num_parts == 1));
  }
  check::expect(tiles.read == plan.tiles().read && tiles.saved == plan.tiles().saved, "tiles: %ld %ld, said %ld %ld",
                long(tiles.read), long(tiles.saved), long(plan.tiles().read), long(plan.tiles().saved));
  for (int s = 0; s < tree.batch.seqs; s++)
    for (int t = tree.starts[size_t(s)]; t < tree.starts[size_t(s) + 1]; t++)
      for (int h = 0; h < shape.kv_heads; h++) {
        const int position = tree.positions[size_t(t)];
        const int first = shape.window ? std::max(0, position + 1 - shape.window) : 0;
        for (int split = first / kKvSplit; split * kKvSplit <= position; split++) {
          const auto found = seen.find({t, h, split});
          check::expect(found != seen.end() && found->second == 1, "token %d head %d split %d is not read once", t, h,
                        split);
        }
      }
}

std::vector<float> attend(const Kernels& kernels, const AttnPlan& plan, AttnArgs args, size_t floats) {
  std::vector<float> out(floats);
  args.out = out.data();
  for (const AttnItem& item : plan.items()) kernels.attention[int(args.kv.type)](args, item);
  for (const AttnItem& item : plan.merges()) kernels.attention_merge(args, item);
  return out;
}

struct Options {
  KvType type;
  int group, dim, window = 0;
  float softcap = 0;
  bool slopes = false, sinks = false;
};

// Items of several sequences: that walk more than one split, and that have one of them.
struct Shared {
  int whole = 0, split = 0;
};

// Blocks of random finite numbers, where the plan with sharing and the one without must find the same.
Shared check_bits(const Kernels& kernels, const Options& o, Tree& tree, Random& random, int workers) {
  const int kv_heads = 2, heads = kv_heads * o.group;
  AttnPlan::Shape shape{0, heads, kv_heads, o.dim, o.window, true, true};
  const int longest = *std::max_element(tree.contexts.begin(), tree.contexts.end());
  AttnPlan shared(shape, longest, workers);
  shape.share = false;
  AttnPlan alone(shape, longest, workers);
  shared.make(tree.batch);
  alone.make(tree.batch);
  check_plan(tree, shared, shape);
  check_plan(tree, alone, shape);
  CHECK(alone.tiles().saved == 0);
  CHECK(shared.tiles().read + shared.tiles().saved == alone.tiles().read);

  const size_t block_bytes = kv_block_bytes(o.type, o.dim, o.dim), row = size_t(heads) * size_t(o.dim);
  Guarded<uint8_t> memory(size_t(kv_heads * tree.num_blocks) * block_bytes);
  for (size_t i = 0; i < memory.size(); i += block_bytes)
    for (size_t b = 0; b < block_bytes; b += 4) {
      const bool scale = o.type == KvType::I8 && b >= size_t(32 * o.dim);
      const float normal = random.normal(), x = scale ? std::fabs(normal) / 64 : normal;
      uint32_t word;
      memcpy(&word, &x, 4);
      if (o.type == KvType::BF16) word = (word & 0xffff0000u) | (word >> 16 & 0xbfff);  // magnitudes below 2
      if (o.type == KvType::I8 && !scale) word = uint32_t(random.next());
      memcpy(memory.data() + i + b, &word, 4);
    }
  std::vector<float> q(size_t(tree.batch.tokens) * row), slopes(size_t(heads), 0.07f), sinks(size_t(heads), 0.3f);
  for (float& x : q) x = random.normal();
  Guarded<float> scratch(attn_scratch_floats(o.dim));
  AttnArgs args{};
  args.kv = {o.type, memory.data(), int64_t(size_t(tree.num_blocks) * block_bytes), int64_t(block_bytes), kv_heads,
             o.dim,  o.dim};
  args.q = q.data(), args.ldq = int64_t(row), args.heads = heads;
  args.scale_log2e = 1.44269504f / std::sqrt(float(o.dim));
  args.ld_out = int64_t(row), args.window = o.window, args.softcap_log2e = o.softcap;
  args.slopes_log2e = o.slopes ? slopes.data() : nullptr;
  args.sinks = o.sinks ? sinks.data() : nullptr;
  args.scratch = scratch.data();
  const std::vector<float> one = attend(kernels, alone, args, q.size()),
                           other = attend(kernels, shared, args, q.size());
  check::expect(!memcmp(one.data(), other.data(), one.size() * 4) && scratch.intact(),
                "%s: type %d group %d dim %d window %d, %d sequences: sharing changes bits", kernels.name, int(o.type),
                o.group, o.dim, o.window, tree.batch.seqs);
  for (float x : one) CHECK(std::isfinite(x));
  Shared found;
  for (const AttnItem& item : shared.items())
    if (item.num_parts > 1) {
      found.split += item.partial != nullptr;
      found.whole += !item.partial && item.split1 - item.split0 > 1;
    }
  return found;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<const Kernels*> levels = check::levels(argc, argv);
  Random plans(1);
  for (int i = 0; i < (check::brief   ? 4
                       : check::quick ? 20
                                      : 200);
       i++) {  // plans alone: many sequences, long contexts, many threads
    const int window = i % 3 == 2 ? 1 + plans.below(900) : 0, rows = 1 + plans.below(9), workers = 1 + plans.below(40);
    const int seqs = 1 + plans.below(90), longest = 1 + plans.below(3000);
    Tree tree(plans, seqs, longest, window);
    const AttnPlan::Shape shape{0, 3 * rows, 3, 32, window, true, true};
    AttnPlan plan(shape, 4000, workers);
    plan.make(tree.batch);
    check_plan(tree, plan, shape);
  }
  std::printf("every row and tile once\n");
  for (const Kernels* kernels : levels) {
    std::printf("level %s\n", kernels->name);
    Random random(1);
    for (const Options& o : {Options{KvType::BF16, 3, 64}, Options{KvType::BF16, 1, 32, 700},
                             Options{KvType::F32, 4, 16, 0, 0, false, true}, Options{KvType::I8, 2, 32, 0, 4, true},
                             Options{KvType::BF16, 5, 80, 0, 0, true, true},
                             Options{KvType::I8, 8, 16, 800, 0, false, true}, Options{KvType::BF16, 2, 128}}) {
      if (check::brief && o.dim > 32) continue;
      Shared shared;
      Tree many(random, check::quick ? 12 : 24, 1300, o.window), few(random, 8, 1250, o.window, 1150);
      for (auto& [tree, workers] : {std::pair{&many, 1}, std::pair{&few, 4}}) {
        const Shared more = check_bits(*kernels, o, *tree, random, workers);
        shared.whole += more.whole, shared.split += more.split;
      }
      check::expect(shared.whole > 0 && shared.split > 0,
                    "type %d group %d: %d shared items over splits, %d of one split", int(o.type), o.group,
                    shared.whole, shared.split);
    }
    std::printf("shared prefixes\n");
  }
  return check::finish();
}
