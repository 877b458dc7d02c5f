// Attention on one thread, against ceilings measured in the same run: the peak of the dot instruction, a streaming read.
// usage: bench_attention [--isa NAME]
#include <algorithm>
#include <array>

#include "../tests/check.h"
#include "attn_measure.h"
#include "ceiling.h"
#include "peak.h"

using namespace octavo;
using namespace octavo::check;

namespace {

constexpr size_t kDram = 256u << 20;  // eight times a 32 MB L3
constexpr int kChunk = 512;

struct Shape {
  int dim, group;
};

const char* name_of(KvType type) { return type == KvType::BF16 ? "bf16" : type == KvType::F32 ? "f32" : "i8"; }

void say(const char* what, const AttnLoad& load) {
  printf("  %-7s %-4s head %3d group %2d context %5d:", what, name_of(load.type), load.head_dim, load.group,
         load.context);
}

// The last chunk of a prompt of `context` tokens.
void prefill(const Kernels& kernels, KvType type, Shape s, int context, const Memory& memory, double peak) {
  const AttnLoad load{type, s.dim, s.group, 1, kChunk, context};
  const AttnRate rate = attention_rate(kernels, load, memory, 5);
  say("prefill", load);
  printf(" %6.1f GFLOP/s (%3.0f %%)\n", rate.flop / rate.seconds * 1e-9,
         peak > 0 ? 100 * rate.flop / rate.seconds / peak : 0);
}

// One token of each of many sequences, more than the caches hold.
void decode(const Kernels& kernels, KvType type, Shape s, int context, const Memory& memory, double stream) {
  const size_t bytes = (size_t(context) + kBlock - 1) / kBlock * kv_block_bytes(type, s.dim, s.dim);
  const AttnLoad load{type, s.dim, s.group, int(memory.bytes() / bytes), 1, context};
  const AttnRate rate = attention_rate(kernels, load, memory, 3);
  say("decode", load);
  printf(" %6.1f GB/s (%3.0f %%), %6.1f tokens/us\n", rate.bytes / rate.seconds * 1e-9,
         100 * rate.bytes / rate.seconds / stream, double(load.seqs) * context / rate.seconds * 1e-6);
}

// One token of each of `seqs` sequences behind a common prefix.
void shared(const Kernels& kernels, KvType type, Shape s, int seqs, int prefix, int own, const Memory& memory) {
  AttnLoad load{type, s.dim, s.group, seqs, 1, prefix + own, prefix};
  const AttnRate together = attention_rate(kernels, load, memory, 9);
  load.share = false;
  const AttnRate alone = attention_rate(kernels, load, memory, 9);
  say("shared", load);
  printf(" %2d sequences, prefix %d: %7.1f us and %6.2f MB, alone %7.1f us and %6.2f MB: %.2f times\n", seqs, prefix,
         together.seconds * 1e6, together.bytes * 1e-6, alone.seconds * 1e6, alone.bytes * 1e-6,
         alone.seconds / together.seconds);
}

}  // namespace

int main(int argc, char** argv) {
  const Memory memory(kDram, true);
  Random random(5);
  for (size_t i = 0; i < kDram / 2; i++) {  // bf16 from -1 to 1
    const float x = (float)(2 * random.uniform() - 1);
    memcpy(memory.data() + 2 * i, (const uint8_t*)&x + 2, 2);
  }
  const double stream = bench::read_rate(memory.data(), kDram, 5);
  printf("streaming read %.1f GB/s\n", stream * 1e-9);
  for (const Kernels* kernels : levels(argc, argv)) {
    const double peak = peak_ops(*kernels, Format::BF16, Act::BF16);
    printf("%s: peak %.0f GFLOP/s\n", kernels->name, peak * 1e-9);
    for (KvType type : {KvType::BF16, KvType::I8}) {
      const Shape shapes[] = {{64, 3}, {64, 8}, {80, 1}, {96, 1}, {128, 4}, {256, 4}};
      for (Shape s : shapes)
        for (int context : {512, 1024, 4096}) prefill(*kernels, type, s, context, memory, peak);
      for (Shape s : shapes)
        for (int context : {320, 2048}) decode(*kernels, type, s, context, memory, stream);
      for (Shape s : {Shape{64, 3}, Shape{128, 4}})
        for (auto [seqs, prefix, own] : {std::array{8, 256, 64}, {32, 1024, 96}, {64, 256, 64}, {8, 8192, 64}})
          shared(*kernels, type, s, seqs, prefix, own, memory);
    }
  }
  return 0;
}
