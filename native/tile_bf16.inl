// BF16 weights x BF16 activations in tiles. A line of K pairs is a row of B as it lies in memory, and 32 numbers of an
// activation are a row of A; whatever the rows beside a row, its sums are those of one chain over K, 32 at a time (P1).
namespace octavo::VEC_NS {

struct ProductTilesBf16 {
  static constexpr int kRows = 64;  // 8 KB of results
  static constexpr int kLineBytes = 128, kSteps = 32;

  // y[r * 32 ..] = rows [row, row + n) of x times a task, at most 32
  static void block(const uint8_t* lines, const Activation& x, int row, int n, float* y, bool fetch) {
    const int first = n < kTileLanes ? n : kTileLanes, second = n - first;
    const int64_t x_stride = x.ld * 2, y_stride = 32 * sizeof(float);
    const uint16_t* h = x.h + row * x.ld;
    tile_zero<0>(), tile_zero<1>();
    if (second) tile_zero<2>(), tile_zero<3>();
    for (int k = 0; k < x.k_pad; k += kSteps, lines += kSteps / 2 * kLineBytes) {
      if (fetch) GEMM_UNROLL for (int i = 0; i < kSteps / 2 * kLineBytes; i += 64) prefetch(lines + kPrefetch + i);
      tile_load<6>(lines, kLineBytes), tile_load<7>(lines + 64, kLineBytes);
      tile_load<4>(h + k, x_stride);
      tile_dot_bf16<0, 4, 6>(), tile_dot_bf16<1, 4, 7>();
      if (!second) continue;
      tile_load<5>(h + kTileLanes * x.ld + k, x_stride);
      tile_dot_bf16<2, 5, 6>(), tile_dot_bf16<3, 5, 7>();
    }
    tile_store<0>(y, y_stride), tile_store<1>(y + 16, y_stride);
    y += kTileLanes * 32;
    if (second) tile_store<2>(y, y_stride), tile_store<3>(y + 16, y_stride);
  }

  static void run(const Weight& w, const Activation& x, int task, int row, int n, float* y) {
    const uint8_t* lines = task_data(w, task);
    for (int r = 0, left = n; left; r += 2 * kTileLanes) {
      const int rows = left < 2 * kTileLanes ? left : 2 * kTileLanes;
      if (r == 0 || rows < 2 * kTileLanes) {
        const int first = rows < kTileLanes ? rows : kTileLanes, second = rows - first;
        TileShapes shapes;
        shapes.set(0, first, 64).set(1, first, 64).set(4, first, 64).set(6, 16, 64).set(7, 16, 64);
        if (second) shapes.set(2, second, 64).set(3, second, 64).set(5, second, 64);
        tiles_begin(shapes);
      }
      block(lines, x, row + r, rows, y + r * 32, row + r == 0);
      left -= rows;
    }
    tiles_end();
  }
};

}  // namespace octavo::VEC_NS
