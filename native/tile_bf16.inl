// BF16 weights x BF16 activations in tiles. A line of K pairs is a row of B as it lies in memory, and 32 numbers of an
// activation are a row of A; whatever the rows beside a row, its sums are those of one chain over K, 32 at a time (P1).
namespace octavo::VEC_NS {

constexpr int kBlockRows = 2 * kTileLanes;          // of a block, beside the 32 columns of a task
constexpr int kStepBytes = 16 * Bf16Lines::kBytes;  // 32 K of a task

// Tiles: 0 to 3 sums, 4 and 5 activations of 16 rows each, 6 and 7 weights of 16 columns each
inline void begin_tiles_of(int rows) {
  const int first = rows < kTileLanes ? rows : kTileLanes, second = rows - first;
  TileShapes shapes;
  shapes.set(0, first, 64).set(1, first, 64).set(4, first, 64).set(6, 16, 64).set(7, 16, 64);
  if (second) shapes.set(2, second, 64).set(3, second, 64).set(5, second, 64);
  tiles_begin(shapes);
}

// y[r * 32 ..] = rows [row, row + n) of x times the lines of a task, n as begin_tiles_of was told. ahead: bytes to prefetch,
// of a stream from memory more than of one from L2.
template <bool kSecond>
GEMM_TILE static void tile_block(const uint8_t* lines, const Activation& x, int row, float* y, int ahead) {
  const int64_t x_stride = x.ld * 2, y_stride = 32 * sizeof(float);
  const uint16_t *h = x.h + row * x.ld, *end = h + x.k_pad, *h2 = h + kTileLanes * x.ld;
  tile_zero<0>(), tile_zero<1>();
  if (kSecond) tile_zero<2>(), tile_zero<3>();
  for (; h < end; h += 32, h2 += 32, lines += kStepBytes) {
    GEMM_UNROLL for (int i = 0; i < kStepBytes / 2; i += 64) prefetch(lines + ahead + i);
    tile_load<6>(lines, Bf16Lines::kBytes), tile_load<4>(h, x_stride);
    tile_dot_bf16<0, 4, 6>();
    tile_load<7>(lines + 64, Bf16Lines::kBytes);
    tile_dot_bf16<1, 4, 7>();
    GEMM_UNROLL for (int i = kStepBytes / 2; i < kStepBytes; i += 64) prefetch(lines + ahead + i);
    if (!kSecond) continue;
    tile_load<5>(h2, x_stride);
    tile_dot_bf16<2, 5, 6>(), tile_dot_bf16<3, 5, 7>();
  }
  tile_store<0>(y, y_stride), tile_store<1>(y + 16, y_stride);
  y += kTileLanes * 32;
  if (kSecond) tile_store<2>(y, y_stride), tile_store<3>(y + 16, y_stride);
}

// What the epilogue of a block will read and write is on its way while tiles multiply.
static void fetch_for_finish(const GemmArgs& a, int task, int row, int n) {
  const int col = task * kTaskCols;
  for (int r = row; r < row + n; r++) {
    if (a.act) {
      if (a.act->act == Act::BF16) prefetch(a.act->h + r * a.act->ld + col);
      continue;
    }
    for (int i = col; i < col + kTaskCols; i += 16) {
      prefetch(a.out + r * a.ld_out + i);
      if (a.epilogue == Epilogue::Add) prefetch(a.residual + r * a.ld_residual + i);
    }
  }
}

// A block of rows stays in L1 while some tasks pass, which stay in L2 for all blocks.
static void gemm_tiles_bf16(const GemmArgs& a, int task0, int task1) {
  constexpr int kMostTasks = 8, kBytes = 1 << 20;
  const Activation& x = *a.x;
  const int of_task = x.k_pad / 2 * Bf16Lines::kBytes * (a.epilogue == Epilogue::ActMulRound ? 2 : 1);
  const int most = of_task > kBytes ? 1 : kBytes / of_task < kMostTasks ? kBytes / of_task : kMostTasks;
  alignas(64) float y[kBlockRows * kTaskCols], up[kBlockRows * kTaskCols];
  int shaped = 0;
  for (int first = task0, count; first < task1; first += count) {
    count = task1 - first < most ? task1 - first : most;
    for (int row = 0; row < x.rows; row += kBlockRows) {
      const int n = x.rows - row < kBlockRows ? x.rows - row : kBlockRows;
      if (n != shaped) begin_tiles_of(shaped = n);
      const auto block = n > kTileLanes ? tile_block<true> : tile_block<false>;
      const int ahead = row == 0 ? kPrefetch : kStepBytes;
      for (int task = first; task < first + count; task++) {
        if (row) fetch_for_finish(a, task, row, n);
        block(task_data(*a.w, task), x, row, y, ahead);
        if (a.epilogue == Epilogue::ActMulRound) block(task_data(*a.w_up, task), x, row, up, ahead);
        finish(a, task, row, n, y, up);
      }
    }
  }
  tiles_end();
}

}  // namespace octavo::VEC_NS
