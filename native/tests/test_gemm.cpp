// Every product, rounding and embedding kernel of every level against double precision on the same rounded operands.
#include "check.h"
#include "pack.h"

using namespace octavo;
using namespace octavo::check;

namespace {

struct Source {  // rows as in a file, and what they mean
  int n, k;
  size_t row_bytes;
  std::vector<uint8_t> bytes;
  std::vector<double> value;      // [n][k]
  std::vector<double> magnitude;  // [n][k]: of the parts that a kernel adds up, so never less than |value|
};

uint16_t half(float x) {  // to fp16, for 2^-14 <= |x| < 65504
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint32_t m = (u & 0x7fffffff) + 0xfff + ((u >> 13) & 1);
  return (uint16_t)((u >> 16 & 0x8000) | ((m >> 13) - (112 << 10)));
}
double half_value(uint16_t h) {
  const int e = h >> 10 & 31, m = h & 1023;
  const double v = e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
  return h & 0x8000 ? -v : v;
}
uint16_t bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

Source make_source(Format f, int n, int k, Random& random) {
  const int block[kFormats] = {4, 2, 2, 34, 18, 20};
  const bool blocks = f >= Format::W8;
  Source s{n, k, (size_t)(blocks ? k / 32 : k) * block[(int)f], {}, {}, {}};
  s.bytes.resize(n * s.row_bytes);
  s.value.resize((size_t)n * k);
  s.magnitude.resize((size_t)n * k);
  for (int i = 0; i < n; i++) {
    uint8_t* row = s.bytes.data() + i * s.row_bytes;
    for (int j = 0; j < k; j++) {
      double &v = s.value[(size_t)i * k + j], &m = s.magnitude[(size_t)i * k + j];
      if (!blocks) {
        const float x = random.normal();
        const uint16_t h = f == Format::F16 ? half(std::fabs(x) < 1e-4f ? 0.5f : x) : bf16(x);
        memcpy(row + j * block[(int)f], f == Format::F32 ? (const void*)&x : &h, block[(int)f]);
        const uint32_t wide = (uint32_t)h << 16;
        float widened;
        memcpy(&widened, &wide, 4);
        v = f == Format::F32 ? x : f == Format::F16 ? half_value(h) : widened;
        m = std::fabs(v);
        continue;
      }
      uint8_t* b = row + j / 32 * block[(int)f];
      uint16_t scale, minimum = 0;
      if (j % 32 == 0) {
        for (int c = 0; c < block[(int)f]; c++) b[c] = (uint8_t)random.next();
        scale = half((random.below(2) ? 1 : -1) * (0.001f + 0.02f * (float)random.uniform()));
        minimum = half(-0.001f - 0.2f * (float)random.uniform());
        memcpy(b, &scale, 2);
        if (f == Format::W4F) memcpy(b + 2, &minimum, 2);
      }
      memcpy(&scale, b, 2);
      if (f == Format::W4F) memcpy(&minimum, b + 2, 2);
      int q;
      if (f == Format::W8) {
        q = (int8_t)b[2 + j % 32];
      } else {
        const uint8_t byte = b[(f == Format::W4F ? 4 : 2) + j % 16];
        q = (j % 32 < 16 ? byte & 15 : byte >> 4) - (f == Format::W4 ? 8 : 0);
      }
      v = half_value(scale) * q + (f == Format::W4F ? half_value(minimum) : 0);
      m = std::fabs(half_value(scale) * q) + (f == Format::W4F ? std::fabs(half_value(minimum)) : 0);
    }
  }
  return s;
}

struct Packed {
  Guarded<uint8_t> bytes;
  Weight w;
  Packed(Format f, const Source& s) : bytes(packed_bytes(f, s.n, s.k)), w(packed_weight(f, s.n, s.k, bytes.data())) {
    bytes.zero();
    const int panels = w.n_pad / panel_cols(f);
    pack(f, s.bytes.data(), s.row_bytes, s.n, s.k, bytes.data(), panels / 2, panels);  // as two threads would
    pack(f, s.bytes.data(), s.row_bytes, s.n, s.k, bytes.data(), 0, panels / 2);
    expect(bytes.intact(), "pack %s %dx%d wrote outside", name_of(f), s.n, s.k);
  }
};

std::vector<float> random_rows(int rows, int k, Random& random) {
  std::vector<float> x((size_t)rows * k);
  for (float& v : x) v = random.normal() * (random.below(50) ? 1.f : 30.f);
  return x;
}

void round_all(const Kernels& kernels, const float* x, int k, OwnActivation& y) {
  kernels.round(x, k, y.view, 0, y.view.rows, 0, y.view.k_pad / 32);
}

GemmArgs store_args(const Weight& w, const Activation& x, float* out, int64_t ld) {
  return {&w, nullptr, &x, nullptr, Epilogue::Store, out, ld, nullptr, 0, nullptr};
}

struct Case {
  const Kernels& kernels;
  Format format;
  Act act;
  int rows, n, k;
  double worst = 0;  // error over tolerance

  void (*gemm() const)(const GemmArgs&, int, int) { return kernels.gemm[(int)format][(int)act]; }
  std::string what() const {
    return std::string(kernels.name) + " " + name_of(format) + " x " + name_of(act) + " rows " + std::to_string(rows) +
           " n " + std::to_string(n) + " k " + std::to_string(k);
  }

  void run() {
    Random random(0x5eed + rows * 1000003 + n * 1009 + k * 7 + (int)format);
    const Source source = make_source(format, n, k, random);
    const Packed packed(format, source);
    const std::vector<float> x = random_rows(rows, k, random);
    OwnActivation a(act, rows, k);
    round_all(kernels, x.data(), k, a);
    const int ld = n + 3, tasks = packed.w.n_pad / kTaskCols;
    Guarded<float> y((size_t)rows * ld), again((size_t)rows * ld);
    gemm()(store_args(packed.w, a.view, y.data(), ld), 0, tasks);
    expect(y.intact() && a.intact(), "%s: wrote outside", what().c_str());
    compare(source, a, y, ld);
    for (int t = tasks - 1; t >= 0; t--) gemm()(store_args(packed.w, a.view, again.data(), ld), t, t + 1);
    expect(!memcmp(y.data(), again.data(), sizeof(float) * y.size()), "%s: tasks change bits", what().c_str());
    for (int r : {0, rows / 2, rows - 1}) one_row(packed.w, x.data() + (size_t)r * k, y.data() + (size_t)r * ld);
    epilogues(packed.w, a, y, ld, random);
  }

  // |error| <= c u sqrt(K) |a| |w|, c = 4; a8 allows 1e-6 more for the products of scales
  void compare(const Source& source, const OwnActivation& a, Guarded<float>& y, int ld) {
    std::vector<double> row(k);
    for (int r = 0; r < rows; r++) {
      double norm_a = 0;
      for (int i = 0; i < k; i++) row[i] = a.at(r, i), norm_a += row[i] * row[i];
      for (int c = 0; c < n; c++) {
        double sum = 0, norm_w = 0;
        const double *w = &source.value[(size_t)c * k], *m = &source.magnitude[(size_t)c * k];
        for (int i = 0; i < k; i++) sum += row[i] * w[i], norm_w += m[i] * m[i];
        const double bound =
            (4 * 0x1p-24 * std::sqrt(k) + (act == Act::A8 ? 1e-6 : 0)) * std::sqrt(norm_a * norm_w) + 1e-37;
        const double error = std::fabs(y[(size_t)r * ld + c] - sum) / bound;
        expect(error <= 1, "%s: row %d column %d is %g, not %g", what().c_str(), r, c, y[(size_t)r * ld + c], sum);
        worst = error > worst ? error : worst;
      }
      for (int c = n; c < ld; c++) {
        uint32_t bits;
        memcpy(&bits, &y[(size_t)r * ld + c], 4);
        expect(bits == 0xffffffffu, "%s: wrote column %d", what().c_str(), c);
      }
    }
  }

  void one_row(const Weight& w, const float* x, const float* expected) {
    OwnActivation a(act, 1, k);
    round_all(kernels, x, k, a);
    Guarded<float> y(n);
    gemm()(store_args(w, a.view, y.data(), n), 0, w.n_pad / kTaskCols);
    expect(!memcmp(y.data(), expected, sizeof(float) * n), "%s: a row alone has other bits", what().c_str());
  }

  void epilogues(const Weight& w, const OwnActivation& a, Guarded<float>& plain, int ld, Random& random) {
    const int tasks = w.n_pad / kTaskCols;
    std::vector<float> bias = random_rows(1, n, random), residual = random_rows(rows, n, random);
    Guarded<float> biased((size_t)rows * n), added((size_t)rows * n);
    GemmArgs args = store_args(w, a.view, biased.data(), n);
    args.bias = bias.data();
    gemm()(args, 0, tasks);
    memcpy(added.data(), residual.data(), sizeof(float) * residual.size());
    args.epilogue = Epilogue::Add, args.out = added.data();
    args.residual = added.data(), args.ld_residual = n;
    gemm()(args, 0, tasks);
    bool same = biased.intact() && added.intact();
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < n; c++) {
        const size_t i = (size_t)r * n + c;
        same &= biased[i] == plain[(size_t)r * ld + c] + bias[c] && added[i] == residual[i] + biased[i];
      }
    expect(same, "%s: bias or residual differ from separate passes", what().c_str());

    const Source up_source = make_source(format, n, k, random);
    const Packed up(format, up_source);
    std::vector<float> gate_y((size_t)rows * n), up_y((size_t)rows * n), product((size_t)rows * n);
    gemm()(store_args(w, a.view, gate_y.data(), n), 0, tasks);
    gemm()(store_args(up.w, a.view, up_y.data(), n), 0, tasks);
    kernels.silu_mul(gate_y.data(), n, up_y.data(), n, product.data(), n, n, 0, rows);
    for (Act out : {Act::F32, Act::BF16, Act::A8}) {
      OwnActivation separate(out, rows, n), fused(out, rows, n);
      round_all(kernels, product.data(), n, separate);
      GemmArgs f = {&w, &up.w, &a.view, nullptr, Epilogue::SiluMulRound, nullptr, 0, nullptr, 0, &fused.view};
      gemm()(f, tasks / 2, tasks);
      gemm()(f, 0, tasks / 2);
      expect(fused.intact(), "%s: silu_mul_round wrote outside", what().c_str());
      expect(fused.same_bits(separate), "%s: silu_mul_round to %s differs from separate passes", what().c_str(),
             name_of(out));
    }
  }
};

void test_gemm(const Kernels& kernels, Format format, Act act) {
  int shapes = 0;
  double worst = 0;
  auto run = [&](int rows, int n, int k) {
    Case c{kernels, format, act, rows, n, k};
    c.run();
    worst = c.worst > worst ? c.worst : worst;
    shapes++;
  };
  for (int rows : {1, 2, 3, 7, 16, 17, 31}) run(rows, 16, 32), run(rows, 33, 96), run(rows, 96, 64);
  for (int rows = 4; rows < 16; rows++) run(rows, 32, 64);
  run(33, 48, 128), run(50, 1, 64), run(7, 96, 576);
  if (!quick) run(3, 4099, 64), run(2, 32, 4096), run(100, 32, 192);
  if (format < Format::W8)
    for (int k : {1, 7, 33, 65}) run(5, 31, k), run(1, 1, k);
  printf("%s gemm %s x %s: %d shapes, worst error %.3f of its bound\n", kernels.name, name_of(format), name_of(act),
         shapes, worst);
}

float scale_of(const float* x, int n) {
  float m = 0;
  for (int i = 0; i < n; i++) m = std::fabs(x[i]) > m ? std::fabs(x[i]) : m;
  return m;
}

void test_round(const Kernels& kernels, Act act) {
  Random random(7);
  for (int k : {1, 7, 31, 32, 33, 64, 96, 576, 4099})
    for (int rows : {1, 3, 17}) {
      std::vector<float> x = random_rows(rows, k, random);
      if (k > 40) std::fill(x.begin(), x.begin() + 32, 0.f), x[40] = 1e-30f;
      OwnActivation y(act, rows, k), parts(act, rows, k);
      round_all(kernels, x.data(), k, y);
      for (int g = y.view.k_pad / 32 - 1; g >= 0; g--)
        for (int r = 0; r < rows; r++) kernels.round(x.data(), k, parts.view, r, r + 1, g, g + 1);
      expect(y.intact() && parts.intact(), "%s round %s k %d: wrote outside", kernels.name, name_of(act), k);
      expect(y.same_bits(parts), "%s round %s k %d: parts differ", kernels.name, name_of(act), k);
      bool right = true;
      for (int r = 0; r < rows; r++)
        for (int c0 = 0; c0 < y.view.k_pad; c0 += 32) {
          float group[32] = {};
          for (int c = c0; c < c0 + 32 && c < k; c++) group[c - c0] = x[(size_t)r * k + c];
          const float m = scale_of(group, 32), inverse = m > 0 ? 127.f / m : 0.f;
          int sum = 0;
          for (int i = 0; i < 32; i++) {
            const int q = (int)std::nearbyint(group[i] * inverse);
            sum += q;
            const uint32_t bits = (uint32_t)bf16(group[i]) << 16;
            float rounded;
            memcpy(&rounded, &bits, 4);
            const double expected = act == Act::F32 ? group[i] : act == Act::BF16 ? rounded : (double)(m / 127.f) * q;
            right &= y.at(r, c0 + i) == expected;
          }
          const size_t i = (size_t)(c0 / 32) * rows + r;
          if (act == Act::A8) right &= y.view.nsum[i] == -sum && y.view.t[i] == m / 127.f * (float)sum;
        }
      expect(right, "%s round %s k %d rows %d: wrong values", kernels.name, name_of(act), k, rows);
    }
  for (float bad : {NAN, INFINITY}) {  // must not vanish, nor reach other groups
    std::vector<float> x(64, 1.f);
    x[37] = bad;
    OwnActivation y(act, 1, 64);
    round_all(kernels, x.data(), 64, y);
    expect(!std::isfinite(y.at(0, 37)) && std::fabs(y.at(0, 5) - 1) < 1e-6, "%s round %s: %g", kernels.name,
           name_of(act), bad);
  }
  printf("%s round %s: ok\n", kernels.name, name_of(act));
}

void test_embed(const Kernels& kernels, Format format) {
  Random random(11);
  for (int k : {64, 96, 576}) {
    const int n = 49;
    const Source source = make_source(format, n, k, random);
    const Packed packed(format, source);
    const int32_t ids[] = {48, 0, 15, 16, 31, 32, 7, 48};
    Guarded<float> y((size_t)8 * (k + 1));
    kernels.embed[(int)format](packed.w, ids, y.data(), k + 1, 0, 8);
    bool right = y.intact();
    for (int r = 0; r < 8; r++)
      for (int c = 0; c < k; c++) {
        const size_t i = (size_t)ids[r] * k + c;
        right &= std::fabs(y[(size_t)r * (k + 1) + c] - source.value[i]) <= 0x1p-24 * source.magnitude[i];
      }
    expect(right, "%s embed %s k %d: wrong values", kernels.name, name_of(format), k);
  }
  printf("%s embed %s: ok\n", kernels.name, name_of(format));
}

}  // namespace

int main(int argc, char** argv) {
  for (const Kernels* kernels : levels(argc, argv)) {
    for (int f = 0; f < kFormats; f++)
      for (int a = 0; a < kActs; a++) test_gemm(*kernels, (Format)f, (Act)a);
    for (int a = 0; a < kActs; a++) test_round(*kernels, (Act)a);
    for (int f = 0; f < kFormats; f++) test_embed(*kernels, (Format)f);
  }
  return finish();
}
