// Products on one thread, against ceilings measured in the same run: the peak of the dot instruction (AVX2: of the
// instructions that make one), a streaming read.
// usage: bench_gemm [--isa NAME]
#include "../tests/check.h"
#include "ceiling.h"
#include "memory.h"
#include "pack.h"

using namespace octavo;
using namespace octavo::check;

namespace {

struct Pair {
  Format format;
  Act act;
};
constexpr Pair kPairs[] = {{Format::W8, Act::A8},     {Format::W4, Act::A8},   {Format::W4F, Act::A8},
                           {Format::BF16, Act::BF16}, {Format::F16, Act::F32}, {Format::F32, Act::F32},
                           {Format::W4F, Act::BF16}};

constexpr size_t kDram = 256u << 20;  // eight times a 32 MB L3

// Seconds of one product with n x k weights of which `copies` different ones are used in turn
double product_seconds(const Kernels& kernels, Pair p, int rows, int n, int k, int copies, const uint8_t* data) {
  OwnActivation x(p.act, rows, k);
  Random random(1);
  std::vector<float> row((size_t)k);
  for (int r = 0; r < rows; r++) {
    for (float& v : row) v = random.normal();
    kernels.round(row.data() - (ptrdiff_t)r * k, k, x.view, r, r + 1, 0, x.view.k_pad / 32);
  }
  std::vector<float> y((size_t)rows * n);
  const size_t bytes = packed_bytes(p.format, n, k);
  auto all = [&] {
    for (int c = 0; c < copies; c++) {
      const Weight w = packed_weight(p.format, n, k, data + c * bytes);
      GemmArgs args{};
      args.w = &w, args.x = &x.view, args.epilogue = Epilogue::Store, args.out = y.data(), args.ld_out = n;
      kernels.gemm[(int)p.format][(int)p.act](args, 0, w.n_pad / kTaskCols);
    }
  };
  all();
  const double once = bench::best_seconds(1, all);
  return bench::best_seconds(once > 0.2 ? 3 : (int)(0.4 / once) + 3, all) / copies;
}

}  // namespace

int main(int argc, char** argv) {
  Memory memory(kDram + (1 << 20), true);
  for (size_t i = 0; i < memory.bytes() / 2; i++) {  // small positive numbers in every format, scales included
    const uint16_t bits = (uint16_t)(0x2000 + i % 251);
    memcpy(memory.data() + 2 * i, &bits, 2);
  }
  const double stream = bench::read_rate(memory.data(), kDram, 5);
  printf("streaming read %.1f GB/s\n", stream * 1e-9);
  for (const Kernels* kernels : levels(argc, argv))
    for (const Pair& p : kPairs) {
      const double peak = bench::peak_ops(kernels->name, p.act, p.format);
      printf("%s %s x %s: peak %.0f GOP/s\n", kernels->name, name_of(p.format), name_of(p.act), peak * 1e-9);
      for (int k : {576, 1536, 2048})
        for (int rows : {1, 4, 16, 64, 512}) {
          const int n = rows <= 4 ? 2048
                                  : (int)(((size_t)300 << 10) * 64 / (size_t)k / (size_t)unit_bytes(p.format)) *
                                        panel_cols(p.format) / 32 * 32;
          const size_t bytes = packed_bytes(p.format, n, k);
          const int copies = rows <= 4 ? (int)(kDram / bytes) : 1;
          const double t = product_seconds(*kernels, p, rows, n, k, copies, memory.data());
          const double ops = 2.0 * rows * n * k / t, rate = (double)bytes / t;
          printf("  k %4d rows %3d %s: %7.1f GOP/s (%3.0f %%) %6.1f GB/s (%3.0f %%)\n", k, rows,
                 copies > 1 ? "DRAM" : "L2  ", ops * 1e-9, peak > 0 ? 100 * ops / peak : 0, rate * 1e-9,
                 100 * rate / stream);
        }
    }
  return 0;
}
