#include "measure.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "pack.h"
#include "peak.h"

namespace octavo {
namespace {

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// At a line, as matrices of a plan are: tiles take half as long again to load rows that cross one.
template <class T> struct AtLine {
  using value_type = T;
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{kLine})); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{kLine}); }
  bool operator==(const AtLine&) const = default;
};
template <class T> using Numbers = std::vector<T, AtLine<T>>;

// Rounded rows of numbers between -1 and 1
class Rows {
 public:
  Rows(const Kernels& kernels, Act act, int rows, int k) {
    const int k_pad = static_cast<int>(align_up(static_cast<size_t>(k), 64)), ld = act_ld(act, k_pad);
    const int stride = rows * int8_rows(act);
    const size_t groups = static_cast<size_t>(stride) * static_cast<size_t>(k_pad) / 32;
    if (act == Act::F32) f_.resize(static_cast<size_t>(rows) * static_cast<size_t>(ld));
    if (act == Act::BF16) h_.resize(static_cast<size_t>(rows) * static_cast<size_t>(ld));
    if (act >= Act::A8) q_.resize(groups * 32), s_.resize(groups), nsum_.resize(groups), nhalf_.resize(groups);
    if (act != Act::F32) t_.resize(groups);
    view_ = {act,       rows,      k,         k_pad,     ld,           stride,       f_.data(),
             h_.data(), q_.data(), s_.data(), t_.data(), nsum_.data(), nhalf_.data()};
    std::vector<float> values(static_cast<size_t>(rows) * static_cast<size_t>(k));
    uint32_t state = 1;
    for (float& v : values) {
      state = state * 1664525u + 1013904223u;  // Numerical Recipes
      v = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
    }
    kernels.round(values.data(), k, view_, 0, rows, 0, k_pad / 32);
  }
  const Activation& view() const { return view_; }

 private:
  Numbers<float> f_, s_, t_;
  Numbers<uint16_t> h_;
  Numbers<int8_t> q_;
  Numbers<int32_t> nsum_, nhalf_;
  Activation view_;
};

}  // namespace

double product_seconds(Pool& pool, const Kernels& kernels, const Memory& weights, const Product& p, int repeats) {
  auto need = [](bool ok, const std::string& what) {
    if (!ok) throw std::invalid_argument(what);
  };
  need(p.rows > 0 && p.n > 0 && p.k > 0 && p.copies > 0 && repeats > 0, "a product to measure has sizes from 1 on");
  const size_t bytes = align_up(packed_bytes(p.format, p.n, p.k), kLine), copies = static_cast<size_t>(p.copies);
  need(bytes <= weights.bytes() / copies, std::to_string(copies) + " packed weights of " + std::to_string(bytes) +
                                              " bytes are not in " + std::to_string(weights.bytes()));
  const Rows x(kernels, p.act, p.rows, p.k);
  std::vector<float> out(static_cast<size_t>(p.rows) * static_cast<size_t>(p.n));
  const auto gemm = kernels.gemm[static_cast<int>(p.format)][static_cast<int>(p.act)];
  auto pass = [&](int worker) {
    for (size_t c = 0; c < copies; c++) {
      const Weight w = packed_weight(p.format, p.n, p.k, weights.data() + c * bytes);
      GemmArgs args{};
      args.w = &w, args.x = &x.view(), args.epilogue = Epilogue::Store, args.out = out.data(), args.ld_out = p.n;
      const Range tasks = share(w.n_pad / kTaskCols, pool.size(), worker);
      gemm(args, tasks.begin, tasks.end);
    }
  };
  const std::lock_guard lock(pool.turn());
  const auto clock = pool.size() == 1 ? thread_seconds : wall_seconds;
  double best = 1e30;
  for (int i = 0; i <= repeats; i++) {
    const double start = clock();
    pool.run(pass);
    if (i > 0) best = std::min(best, clock() - start);
  }
  return best / p.copies;
}

}  // namespace octavo
