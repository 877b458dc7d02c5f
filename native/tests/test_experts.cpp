// Which experts a row goes to and the weighted sum of what they made of it, against float64, at odd sizes and with ties and NaN;
// products over some rows of a larger activation.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <cstdio>
#include <vector>

#include "check.h"
#include "pack.h"

using namespace octavo;
using check::Guarded;
using check::OwnActivation;
using check::Random;

namespace {

constexpr double kUnit = 0x1p-24;
constexpr int kRows = 4;

// Ids of the best `count` by x, equal ones in ascending order, of those that are allowed.
std::vector<int> best(const std::vector<double>& x, const std::vector<bool>& allowed, int count) {
  std::vector<int> ids;
  for (size_t i = 0; i < x.size(); i++)
    if (allowed[i]) ids.push_back(int(i));
  std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return x[size_t(a)] > x[size_t(b)]; });
  ids.resize(size_t(count));
  return ids;
}

void softmax(std::vector<double>& x) {
  const double top = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (double& v : x) sum += v = std::exp(v - top);
  for (double& v : x) v /= sum;
}

struct Routed {
  std::vector<int> ids;
  std::vector<double> weights;
};

Routed expected(const RouteArgs& a, const float* scores) {
  const auto n = size_t(a.experts);
  std::vector<double> p(scores, scores + n), choice(n);
  std::vector<bool> allowed(n, true);
  if (a.scoring == Scoring::Softmax) softmax(p);
  if (a.scoring == Scoring::Sigmoid)
    for (double& v : p) v = 1 / (1 + std::exp(-v));
  for (size_t i = 0; i < n; i++) choice[i] = p[i] + (a.bias ? a.bias[i] : 0);
  if (a.groups > 1) {
    const int size = a.experts / a.groups;
    std::vector<double> sums;
    for (int g = 0; g < a.groups; g++) {
      std::vector<double> part(choice.begin() + g * size, choice.begin() + (g + 1) * size);
      std::sort(part.rbegin(), part.rend());
      double sum = 0;
      for (int i = 0; i < a.group_best; i++) sum += part[size_t(i)];
      sums.push_back(sum);
    }
    const std::vector<int> groups = best(sums, std::vector<bool>(sums.size(), true), a.top_groups);
    for (size_t i = 0; i < n; i++) allowed[i] = std::count(groups.begin(), groups.end(), int(i) / size) > 0;
  }
  Routed r{best(choice, allowed, a.top_k), {}};
  for (int id : r.ids) r.weights.push_back(p[size_t(id)]);
  if (a.scoring == Scoring::SoftmaxTop) softmax(r.weights);
  const double sum = std::accumulate(r.weights.begin(), r.weights.end(), 0.0);
  for (double& w : r.weights) w *= a.scale / (a.normalise ? sum : 1);
  return r;
}

void test_route(const Kernels& k) {
  Random random(1);
  for (int experts : {1, 2, 7, 16, 33, 64, 255, 1024})
    for (Scoring scoring : {Scoring::Softmax, Scoring::SoftmaxTop, Scoring::Sigmoid})
      for (int variant = 0; variant < 4; variant++) {
        const int top_k = std::min(variant == 1 ? 1 : 8, experts), ld = experts + 3, ld_out = 2 * top_k + 1;
        Guarded<float> scores(kRows * ld), bias(experts), out(kRows * ld_out);
        for (size_t i = 0; i < scores.size(); i++) scores[i] = 3 * random.normal();
        for (int i = 0; i < experts; i++) bias[i] = random.normal();
        const int groups = variant == 3 && experts % 8 == 0 && experts > 8 ? 8 : 1;
        const RouteArgs args{scores.data(),
                             ld,
                             variant >= 2 ? bias.data() : nullptr,
                             out.data(),
                             ld_out,
                             experts,
                             groups > 1 ? std::min(top_k, experts / 8) : top_k,
                             scoring,
                             variant == 3,
                             2.5f,
                             0,
                             groups,
                             groups > 1 ? 4 : 1,
                             std::min(2, experts / groups)};
        k.route(args, 1, kRows);
        bool good = out.intact() && std::isnan(out[0]);
        for (int row = 1; row < kRows; row++) {
          const Routed want = expected(args, &scores[size_t(row * ld)]);
          const float* got = &out[size_t(row * ld_out)];
          double size = 0;
          for (int i = 0; i < experts; i++) size = std::max(size, std::abs(double(scores[size_t(row * ld + i)])));
          const double relative = (64 + 4 * std::sqrt(experts) + 8 * size) * kUnit;
          for (int r = 0; r < args.top_k; r++) {
            good &= got[r] == float(want.ids[size_t(r)]);
            good &= std::abs(got[args.top_k + r] - want.weights[size_t(r)]) <=
                    relative * std::abs(want.weights[size_t(r)]) + 1e-30;
          }
        }
        check::expect(good, "route %s %d of %d experts, scoring %d, variant %d", k.name, top_k, experts, int(scoring),
                      variant);
      }
  // Ties go to the lowest; who has a NaN goes to experts that exist.
  Guarded<float> scores(2 * 5), out(2 * 6);
  for (int i = 0; i < 5; i++) scores[size_t(i)] = i == 2 ? 0 : 1, scores[size_t(5 + i)] = i == 3 ? NAN : float(i);
  RouteArgs args{scores.data(), 5, nullptr, out.data(), 6, 5, 3, Scoring::Softmax, false, 1, 0, 1, 1, 1};
  k.route(args, 0, 2);
  CHECK(out[0] == 0 && out[1] == 1 && out[2] == 3 && out.intact());
  for (int r = 0; r < 3; r++) CHECK(out[size_t(6 + r)] == float(r) && std::isnan(out[size_t(9 + r)]));
  // Scores within 2 jitter of the top share its weight, then the same among what is left.
  scores[0] = 1, scores[1] = 0.99f, scores[2] = 0.5f, scores[3] = -3, scores[4] = 0.985f;
  args.scoring = Scoring::SparseMixer, args.top_k = 2, args.jitter = 0.01f;
  k.route(args, 0, 1);
  const double first = 1 / (1 + std::exp(0.99f - 1.0) + std::exp(0.985f - 1.0)),
               second = 1 / (1 + std::exp(0.985f - double(0.99f)));
  CHECK(out[0] == 0 && out[1] == 1 && std::abs(out[2] - first) < 1e-6 && std::abs(out[3] - second) < 1e-6);
  std::printf("route\n");
}

void test_weighted_sum(const Kernels& k) {
  Random random(2);
  for (int cols : {1, 7, 16, 31, 33, 576, 4099})
    for (int n : {1, 2, 8}) {
      Guarded<float> x(size_t(n * cols)), y { size_t(cols) };
      std::vector<float> weights;
      std::vector<const float*> rows;
      for (size_t i = 0; i < x.size(); i++) x[i] = random.normal();
      for (int i = 0; i < n; i++) weights.push_back(random.normal()), rows.push_back(&x[size_t(i * cols)]);
      k.weighted_sum(rows.data(), weights.data(), n, y.data(), cols);
      bool good = y.intact() && x.intact();
      for (int c = 0; c < cols; c++) {
        double sum = 0, size = 0;
        for (int i = 0; i < n; i++)
          sum += double(weights[size_t(i)]) * rows[size_t(i)][c],
              size += std::abs(double(weights[size_t(i)]) * rows[size_t(i)][c]);
        good &= std::abs(y[size_t(c)] - sum) <= 2 * n * kUnit * size;
      }
      check::expect(good, "weighted_sum %s %d rows of %d", k.name, n, cols);
    }
  std::printf("weighted_sum\n");
}

// Rows [2, 2 + n) of an activation of more rows give the bits that they give alone.
void test_some_rows(const Kernels& k) {
  Random random(3);
  const int cols = 96, out_cols = 40, all = 9;
  Guarded<float> x(size_t(all * cols));
  for (size_t i = 0; i < x.size(); i++) x[i] = random.normal();
  for (Format format : {Format::F32, Format::BF16, Format::W8})
    for (Act act : {Act::F32, Act::BF16, Act::A8, Act::A16}) {
      Guarded<uint8_t> packed(packed_bytes(format, out_cols, cols));
      packed.zero();
      const size_t row_bytes = source_row_bytes(format, cols);
      std::vector<uint8_t> rows(out_cols * row_bytes);
      for (uint8_t& byte : rows) byte = uint8_t(random.below(60));  // any bytes below 60 are finite numbers
      pack(format, rows.data(), row_bytes, out_cols, cols, packed.data(), 0,
           (out_cols + 31) / 32 * 32 / panel_cols(format));
      const Weight w = packed_weight(format, out_cols, cols, packed.data());
      OwnActivation whole(act, all, cols);
      k.round(x.data(), cols, whole.view, 0, all, 0, whole.view.k_pad / 32);
      for (int n : {1, 3, 7}) {
        OwnActivation alone(act, n, cols);
        k.round(&x[size_t(2 * cols)], cols, alone.view, 0, n, 0, alone.view.k_pad / 32);
        const Activation part = some_rows(whole.view, 2, n);
        Guarded<float> a(size_t(n * out_cols)), b(a.size());
        GemmArgs args{};
        args.w = &w, args.x = &part, args.out = a.data(), args.ld_out = out_cols;
        k.gemm[int(format)][int(act)](args, 0, 2);
        args.x = &alone.view, args.out = b.data();
        k.gemm[int(format)][int(act)](args, 0, 2);
        check::expect(a.intact() && b.intact() && !memcmp(a.data(), b.data(), a.size() * 4),
                      "some rows %s %s x %s, %d rows", k.name, check::name_of(format), check::name_of(act), n);
      }
    }
  std::printf("some rows\n");
}

// Where sums underflow, too, a row has the same bits alone and among others, down to the sign of zero.
void test_underflow(const Kernels& kernels) {
  constexpr int kDepth = 192, kUnitBytes = unit_bytes(Format::F8);
  alignas(64) static uint8_t bytes[2 * kDepth / 64 * kUnitBytes] = {};  // column 0 of a task
  const float scales[] = {0x1p-100f, 1, 1};
  for (int u = 0; u < 3; u++) memcpy(bytes + u * kUnitBytes + plane_bytes(Format::F8), &scales[u], 4);
  // -1; then pairs of groups whose sums, 1.25 and -1.5 times the least normal number, meet in one tile
  bytes[0] = 0xb8;
  for (int u = 1; u < 3; u++) bytes[u * kUnitBytes] = 0x38, bytes[u * kUnitBytes + 8 * 64] = 0xb8;
  const Weight w = packed_weight(Format::F8, 32, kDepth, bytes);
  uint32_t alone = 0;
  for (int rows : {1, 9}) {
    std::vector<float> x((size_t)rows * kDepth), y((size_t)rows * 32);
    for (size_t r = 0; r < x.size(); r += kDepth)
      x[r] = 0x1p-60f, x[r + 64] = x[r + 128] = 1.25f * 0x1p-126f, x[r + 96] = x[r + 160] = 1.5f * 0x1p-126f;
    OwnActivation a(Act::BF16, rows, kDepth);
    kernels.round(x.data(), kDepth, a.view, 0, rows, 0, kDepth / 32);
    GemmArgs args{};
    args.w = &w, args.x = &a.view, args.out = y.data(), args.ld_out = 32;
    kernels.gemm[(int)Format::F8][(int)Act::BF16](args, 0, 1);
    uint32_t bits;
    memcpy(&bits, &y[0], 4);
    if (rows == 1) alone = bits;
    check::expect(bits == alone, "%s gemm f8 x bf16: %08x among others, %08x alone", kernels.name, bits, alone);
  }
  printf("%s underflow: ok\n", kernels.name);
}

}  // namespace

int main(int argc, char** argv) {
  for (const Kernels* kernels : check::levels(argc, argv)) {
    std::printf("level %s\n", kernels->name);
    test_route(*kernels);
    test_weighted_sum(*kernels);
    test_some_rows(*kernels);
    test_underflow(*kernels);
  }
  return check::finish();
}
