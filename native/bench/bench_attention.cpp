// Attention on one thread, against ceilings measured in the same run: the peak of the dot instruction, a streaming read.
// usage: bench_attention [--isa NAME]
#include <algorithm>

#include "../tests/check.h"
#include "ceiling.h"
#include "memory.h"

using namespace octavo;
using namespace octavo::check;

namespace {

constexpr size_t kDram = 256u << 20;  // eight times a 32 MB L3
constexpr int kChunk = 512, kItemTokens = 16;

struct Shape {
  int dim, group;
  KvType type = KvType::BF16;
  size_t block_bytes() const { return kv_block_bytes(type, dim, dim); }
  const char* name() const { return type == KvType::BF16 ? "bf16" : type == KvType::F32 ? "f32" : "i8"; }
};

AttnArgs args_of(Shape s, uint8_t* memory, const float* q, float* out) {
  const int64_t ld = s.dim * s.group;
  const KvLayer layer = {s.type, memory, 0, (int64_t)s.block_bytes(), 1, s.dim, s.dim};
  return {layer, q, ld, s.group, 1.44f / std::sqrt((float)s.dim), out, ld, nullptr, 0, 0, nullptr, nullptr};
}

std::vector<int32_t> shuffled(int n) {
  std::vector<int32_t> ids((size_t)n);
  Random random(7);
  for (int i = 0; i < n; i++) ids[(size_t)i] = i;
  for (int i = n; i > 1; i--) std::swap(ids[(size_t)i - 1], ids[(size_t)random.below(i)]);
  return ids;
}

std::vector<float> queries(size_t n) {
  std::vector<float> q(n);
  Random random(3);
  for (float& x : q) x = random.normal();
  return q;
}

// The last chunk of a prompt of `context` tokens; GFLOP/s counts only pairs that are seen.
void prefill(const Kernels& kernels, Shape s, int context, uint8_t* memory, double peak) {
  const std::vector<int32_t> blocks = shuffled(context / kBlock);
  const std::vector<float> q = queries((size_t)kChunk * s.group * s.dim);
  std::vector<float> out(q.size());
  const AttnArgs args = args_of(s, memory, q.data(), out.data());
  const double took = bench::best_seconds(5, [&] {
    for (int t = kChunk - kItemTokens; t >= 0; t -= kItemTokens) {
      const int pos = context - kChunk + t;
      kernels.attention[(int)s.type](args, {t, kItemTokens, pos, 0, 0, (pos + kItemTokens - 1) / kKvSplit + 1,
                                            blocks.data(), blocks.data(), kKvTile / kBlock, nullptr});
    }
  });
  const double flop = 4. * s.dim * s.group * (kChunk * (double)(context - kChunk) + kChunk * (kChunk + 1) / 2.);
  printf("  prefill %s head %3d group %2d context %5d: %6.1f GFLOP/s (%3.0f %%)\n", s.name(), s.dim, s.group, context,
         flop / took * 1e-9, peak > 0 ? 100 * flop / took / peak : 0);
}

// One token of each of many sequences, more than the caches hold.
void decode(const Kernels& kernels, Shape s, int context, uint8_t* memory, double stream) {
  const int per = (context + kBlock - 1) / kBlock, sequences = (int)(kDram / s.block_bytes() / (size_t)per);
  const std::vector<int32_t> blocks = shuffled(sequences * per);
  const std::vector<float> q = queries((size_t)s.group * s.dim);
  std::vector<float> out(q.size());
  const AttnArgs args = args_of(s, memory, q.data(), out.data());
  const double took = bench::best_seconds(3, [&] {
    for (int i = 0; i < sequences; i++) {
      const int32_t *own = &blocks[(size_t)i * per], *next = i + 1 < sequences ? own + per : nullptr;
      kernels.attention[(int)s.type](args, {0, 1, context - 1, 0, 0, (context - 1) / kKvSplit + 1, own, next,
                                            next ? std::min(per, kKvTile / kBlock) : 0, nullptr});
    }
  });
  const double rate = (double)sequences * per * (double)s.block_bytes() / took;
  printf("  decode  %s head %3d group %2d context %5d: %6.1f GB/s (%3.0f %%), %6.1f tokens/us\n", s.name(), s.dim,
         s.group, context, rate * 1e-9, 100 * rate / stream, (double)sequences * per * kBlock / took * 1e-6);
}

}  // namespace

int main(int argc, char** argv) {
  Memory memory(kDram, true);
  Random random(5);
  for (size_t i = 0; i < kDram / 2; i++) {  // bf16 from -1 to 1
    const float x = (float)(2 * random.uniform() - 1);
    memcpy(memory.data() + 2 * i, (const uint8_t*)&x + 2, 2);
  }
  const double stream = bench::read_rate(memory.data(), kDram, 5);
  printf("streaming read %.1f GB/s\n", stream * 1e-9);
  for (const Kernels* kernels : levels(argc, argv)) {
    const double peak = bench::peak_ops(kernels->name, Act::BF16);
    printf("%s: peak %.0f GFLOP/s\n", kernels->name, peak * 1e-9);
    for (KvType type : {KvType::BF16, KvType::I8}) {
      for (Shape s : {Shape{64, 3, type}, Shape{64, 8, type}, Shape{128, 4, type}})
        for (int context : {512, 1024, 4096}) prefill(*kernels, s, context, memory.data(), peak);
      for (Shape s : {Shape{64, 3, type}, Shape{64, 1, type}, Shape{128, 4, type}, Shape{128, 8, type}})
        for (int context : {320, 2048}) decode(*kernels, s, context, memory.data(), stream);
    }
  }
  return 0;
}
