// Every product, rounding and embedding kernel of every level against double precision on the same rounded operands.
#include "check.h"
#include "pack.h"

using namespace octavo;
using namespace octavo::check;

namespace {

float f32_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
uint16_t half(float x) {  // to fp16, for 2^-14 <= |x| < 65504
  const uint32_t u = bits_of(x), m = (u & 0x7fffffff) + 0xfff + ((u >> 13) & 1);
  return (uint16_t)((u >> 16 & 0x8000) | ((m >> 13) - (112 << 10)));
}
double half_value(uint16_t h) {
  const int e = h >> 10 & 31, m = h & 1023;
  const double v = e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
  return h & 0x8000 ? -v : v;
}
double e4m3_value(int code) {
  const int e = code >> 3 & 15, m = code & 7;
  const double v = e ? std::ldexp(8 + m, e - 10) : std::ldexp(m, -9);
  return code & 0x80 ? -v : v;
}
uint16_t bf16(float x) {
  const uint32_t u = bits_of(x);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

constexpr int kIq4Nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// A packed weight of random numbers, written and read element by element as kernels.h words it; or all codes those of the
// largest values.
class Packed {
 public:
  std::vector<double> value;      // [n][k]
  std::vector<double> magnitude;  // [n][k]: of the parts that a kernel adds up, so never less than |value|
  Weight w;

  Packed(Format f, int n, int k, Random& random, bool largest = false)
      : value((size_t)n * k),
        magnitude((size_t)n * k),
        random_(random),
        largest_(largest),
        bytes_(packed_bytes(f, n, k)) {
    bytes_.zero();
    w = packed_weight(f, n, k, bytes_.data());
    for (int row = 0; row < n; row++)
      for (int col = 0; col < k; col++) {
        double &v = value[(size_t)row * k + col], &m = magnitude[(size_t)row * k + col];
        if (f <= Format::BF16) m = std::fabs(v = put_float(row, col));
        else put_code(row, col, v, m);
      }
    if (!w.factor) return;
    for (int row = 0; row < n; row++) {
      const float factor = 0.1f + 2 * (float)random.uniform();
      const_cast<float*>(w.factor)[row] = factor;
      for (int col = 0; col < k; col++) {
        value[(size_t)row * k + col] *= factor;
        magnitude[(size_t)row * k + col] *= factor;
      }
    }
  }
  bool intact() const { return bytes_.intact(); }

 private:
  double put_float(int row, int col) {
    const float x = random_.normal();
    uint8_t* panel = bytes_.data() + row / 32 * w.panel_bytes;
    const int at = col * 32 + row % 32;
    if (w.format == Format::F32) return ((float*)panel)[at] = x;
    if (w.format == Format::F16) return half_value(((uint16_t*)panel)[at] = half(std::fabs(x) < 1e-4f ? 0.5f : x));
    return f32_of((uint32_t)(((uint16_t*)panel)[(col / 2 * 32 + row % 32) * 2 + col % 2] = bf16(x)) << 16);
  }

  // Number `kind` of columns [k, k + per), at `at` in the numbers of its unit; made where the first of them is met.
  double number(int row, int col, char kind, int at, int per) {
    const int unit = info_of(w.format).unit, in_unit = col % unit;
    uint8_t* numbers =
        bytes_.data() + row / 16 * w.panel_bytes + (size_t)(col / unit) * unit_bytes(w.format) + plane_bytes(w.format);
    const int index = in_unit / per * 16 + row % 16;
    const bool make = in_unit % per == 0;
    const float small = (random_.below(2) ? 1 : -1) * (0.001f + 0.02f * (float)random_.uniform());
    auto at16 = [&]() -> uint16_t& { return ((uint16_t*)(numbers + at))[index]; };
    switch (kind) {
      case 'h':
        if (make) at16() = half(small);
        return half_value(at16());
      case 'b':
        if (make) at16() = bf16(small);
        return f32_of((uint32_t)at16() << 16);
      case 'f':
        if (make) ((float*)(numbers + at))[index] = small;
        return ((float*)(numbers + at))[index];
      case 'e':
        if (make) numbers[at + index] = (uint8_t)random_.below(0x7f);
        return e4m3_value(numbers[at + index]);
      case 'z':
        if (make) numbers[at + index] = (uint8_t)(!largest_ ? random_.next() : info_of(w.format).low == 8 ? 128 : 8);
        return numbers[at + index];
      default:
        if (make) numbers[at + index] = (uint8_t)random_.next();
        return kind == 'i' ? (int8_t)numbers[at + index] : numbers[at + index];
    }
  }

  int put_bits(int row, int col) {
    const FormatInfo& info = info_of(w.format);
    uint8_t* unit = bytes_.data() + row / 16 * w.panel_bytes + (size_t)(col / info.unit) * unit_bytes(w.format);
    const int group = col % info.unit / 32, quad = col % 32 / 4;
    int code = 0, shift = 0;
    for (int width : {info.low, info.high}) {
      if (!width) continue;
      const int line = width == 8 ? quad : width == 4 ? quad % 4 : width == 2 ? quad / 4 : 0;
      const int low = width == 8 ? 0 : width == 4 ? quad / 4 * 4 : width == 2 ? quad % 4 * 2 : quad;
      int part = random_.below(1 << width);
      if (largest_) part = w.format == Format::W4M || w.format == Format::W4V ? 7 : (1 << width) - 1;
      if (w.format == Format::F8 && (part & 0x7f) == 0x7f) part = 0;  // no NaN
      unit[(group * width + line) * 64 + row % 16 * 4 + col % 4] |= (uint8_t)(part << low);
      code |= part << shift;
      shift += width;
      unit += info.unit / 32 * width * 64;
    }
    return code;
  }

  void put_code(int row, int col, double& v, double& m) {
    using enum Format;
    const int q = put_bits(row, col);
    auto num = [&](char kind, int at, int per) { return number(row, col, kind, at, per); };
    double scale = 0, minimum = 0, integer = q;
    switch (w.format) {
      case W8: scale = num('h', 0, 32), integer = q - 128; break;
      case W4: scale = num('h', 0, 32), integer = q - 8; break;
      case W5: scale = num('h', 0, 32), integer = q - 16; break;
      case W4F:
      case W5F: scale = num('h', 0, 32), minimum = num('h', 64, 32); break;
      case W4N: scale = num('h', 0, 32), integer = kIq4Nl[q]; break;
      case W4M: scale = num('b', 0, 32), integer = kE2m1[q]; break;
      case W4V: scale = num('e', 0, 16) / 2, integer = kE2m1[q]; break;
      case W4Z: scale = num('h', 0, 32), integer = q - num('z', 64, 32); break;
      case W4Z64:
      case W8Z64: scale = num('h', 0, 64), integer = q - num('z', 32, 64); break;
      case W4C: scale = 1, integer = q - num('z', 0, 256); break;
      case F8: scale = num('f', 0, 64), integer = e4m3_value(q); break;
      case W2K: {
        const int both = (int)num('u', 0, 16);
        scale = num('h', 256, 256) * (both & 15), minimum = -num('h', 288, 256) * (both >> 4);
        break;
      }
      case W3K: scale = num('i', 0, 16) * num('h', 256, 256), integer = q - 4; break;
      case W4K:
      case W5K: scale = num('u', 0, 32) * num('h', 256, 256), minimum = -num('u', 128, 32) * num('h', 288, 256); break;
      case W6K: scale = num('i', 0, 16) * num('h', 256, 256), integer = q - 32; break;
      case W4X: scale = num('i', 0, 32) * num('h', 128, 256), integer = kIq4Nl[q]; break;
      default: break;
    }
    v = scale * integer + minimum;
    m = std::fabs(scale * integer) + std::fabs(minimum);
  }

  Random& random_;
  bool largest_;
  Guarded<uint8_t> bytes_;
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
  return {&w, nullptr, &x, nullptr, Epilogue::Store, out, ld, nullptr, 0, nullptr, {}};
}

struct Case {
  const Kernels& kernels;
  Format format;
  Act act;
  int rows, n, k;
  bool largest;      // codes and activations: sums that are kept in few bits are at their bounds
  double worst = 0;  // error over tolerance

  void (*gemm() const)(const GemmArgs&, int, int) { return kernels.gemm[(int)format][(int)act]; }
  std::string what() const {
    return std::string(kernels.name) + " " + name_of(format) + " x " + name_of(act) + " rows " + std::to_string(rows) +
           " n " + std::to_string(n) + " k " + std::to_string(k);
  }

  void run() {
    Random random(0x5eed + rows * 1000003 + n * 1009 + k * 7 + (int)format);
    const Packed packed(format, n, k, random, largest);
    std::vector<float> x = random_rows(rows, k, random);
    for (size_t i = 0; largest && i < x.size(); i++) x[i] = i / (size_t)k % 2 ? -1.f : 1.f;
    OwnActivation a(act, rows, k);
    round_all(kernels, x.data(), k, a);
    const int ld = n + 3, tasks = packed.w.n_pad / kTaskCols;
    Guarded<float> y((size_t)rows * ld), again((size_t)rows * ld);
    gemm()(store_args(packed.w, a.view, y.data(), ld), 0, tasks);
    expect(y.intact() && a.intact(), "%s: wrote outside", what().c_str());
    compare(packed, a, y, ld);
    for (int t = tasks - 1; t >= 0; t--) gemm()(store_args(packed.w, a.view, again.data(), ld), t, t + 1);
    expect(!memcmp(y.data(), again.data(), sizeof(float) * y.size()), "%s: tasks change bits", what().c_str());
    for (int r : {0, rows / 2, rows - 1}) one_row(packed.w, x.data() + (size_t)r * k, y.data() + (size_t)r * ld);
    for (float factor : {0x1p-104f, 0x1p-100f}) two_rows(packed.w, x.data(), factor);
    epilogues(packed.w, a, y, ld, random);
  }

  // |error| <= c u sqrt(K) |a| |w|, c = 4; a8 allows 1e-6 more for the products of scales
  void compare(const Packed& source, const OwnActivation& a, Guarded<float>& y, int ld) {
    std::vector<double> row(k);
    for (int r = 0; r < rows; r++) {
      double norm_a = 0;
      for (int i = 0; i < k; i++) row[i] = a.at(r, i), norm_a += row[i] * row[i];
      for (int c = 0; c < n; c++) {
        double sum = 0, norm_w = 0;
        const double *w = &source.value[(size_t)c * k], *m = &source.magnitude[(size_t)c * k];
        for (int i = 0; i < k; i++) sum += row[i] * w[i], norm_w += m[i] * m[i];
        const double bound =
            (4 * 0x1p-24 * std::sqrt(k) + (act >= Act::A8 ? 1e-6 : 0)) * std::sqrt(norm_a * norm_w) + 1e-37;
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

  // Alone; and 2^10 times as large, which no rounding sees.
  void one_row(const Weight& w, const float* x, const float* expected) {
    for (float factor : {1.f, 0x1p10f}) {
      std::vector<float> large(x, x + k);
      for (float& v : large) v *= factor;
      OwnActivation a(act, 1, k);
      round_all(kernels, large.data(), k, a);
      Guarded<float> y(n);
      gemm()(store_args(w, a.view, y.data(), n), 0, w.n_pad / kTaskCols);
      bool same = y.intact();
      for (int c = 0; c < n; c++) same &= y[c] == expected[c] * factor;
      expect(same, "%s: a row alone, times %g, has other bits", what().c_str(), factor);
    }
  }

  // A row beside itself, times a factor; and alone, where small activations must not lose bits on the way.
  void two_rows(const Weight& w, const float* x, float factor) {
    std::vector<float> both((size_t)2 * k);
    for (int i = 0; i < 2 * k; i++) both[i] = x[i % k] * factor;
    Guarded<float> y((size_t)2 * n), alone(n);
    for (int r : {2, 1}) {
      OwnActivation a(act, r, k);
      round_all(kernels, both.data(), k, a);
      gemm()(store_args(w, a.view, r == 2 ? y.data() : alone.data(), n), 0, w.n_pad / kTaskCols);
    }
    const bool same =
        !memcmp(y.data(), alone.data(), sizeof(float) * n) && !memcmp(y.data() + n, alone.data(), sizeof(float) * n);
    expect(same && y.intact() && alone.intact(), "%s: a row times %g has other bits alone", what().c_str(), factor);
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

    const Packed up(format, n, k, random);
    std::vector<float> gate_y((size_t)rows * n), up_y((size_t)rows * n), product((size_t)rows * n);
    gemm()(store_args(w, a.view, gate_y.data(), n), 0, tasks);
    gemm()(store_args(up.w, a.view, up_y.data(), n), 0, tasks);
    kernels.act_mul[int(ActKind::Silu)](gate_y.data(), n, up_y.data(), n, product.data(), n, n, 0, rows);
    for (Act out : {Act::F32, Act::BF16, Act::A8, Act::A16}) {
      GemmArgs f = {&w, &up.w, &a.view, nullptr, Epilogue::ActMulRound, nullptr, 0, nullptr, 0, nullptr, ActKind::Silu};
      act_round(f, product, out);
    }
    if (n % kTaskCols) return;  // other activations and biases
    std::vector<float> biases = random_rows(1, 2 * n, random);
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < n; c++) gate_y[(size_t)r * n + c] += biases[c], up_y[(size_t)r * n + c] += biases[n + c];
    kernels.act_mul[int(ActKind::GeluTanh)](gate_y.data(), n, up_y.data(), n, product.data(), n, n, 0, rows);
    GemmArgs f = {&w, &up.w,   &a.view, biases.data(), Epilogue::ActMulRound, nullptr,
                  0,  nullptr, 0,       nullptr,       ActKind::GeluTanh};
    act_round(f, product, Act::A8);
    kernels.act[int(ActKind::Sigmoid)](gate_y.data(), n, product.data(), n, n, 0, rows);
    f.w_up = nullptr, f.epilogue = Epilogue::ActRound, f.kind = ActKind::Sigmoid;
    act_round(f, product, Act::BF16);
  }

  // The epilogue of `f` against the rounding of `expected`
  void act_round(GemmArgs f, const std::vector<float>& expected, Act out) {
    const int tasks = f.w->n_pad / kTaskCols;
    OwnActivation separate(out, rows, n), fused(out, rows, n);
    round_all(kernels, expected.data(), n, separate);
    f.act = &fused.view;
    gemm()(f, tasks / 2, tasks);
    gemm()(f, 0, tasks / 2);
    expect(fused.intact(), "%s: an activation wrote outside", what().c_str());
    expect(fused.same_bits(separate), "%s: activation %d to %s differs from separate passes", what().c_str(),
           int(f.kind), name_of(out));
  }
};

void test_gemm(const Kernels& kernels, Format format, Act act) {
  int shapes = 0;
  double worst = 0;
  // a row of codes is whole groups, or whole blocks where numbers are shared by more
  using enum Format;
  const bool by64 = format == W4V || format == W4Z64 || format == W8Z64 || format == F8;
  const int whole = info_of(format).unit == 256 ? 256 : by64 ? 64 : format <= BF16 ? 1 : 32;
  auto run = [&](int rows, int n, int k, bool largest = false) {
    Case c{kernels, format, act, rows, n, (k + whole - 1) / whole * whole, largest};
    c.run();
    worst = c.worst > worst ? c.worst : worst;
    shapes++;
  };
  if (brief) {  // a kernel for each number of rows up to 6, and for many, with columns and K that end within a block
    for (int rows : {2, 3, 4, 5, 6}) run(rows, 16, 32);
    run(1, 33, 96), run(17, 32, 64);
  } else if (format <= W4F) {
    for (int rows : {1, 2, 3, 7, 16, 17, 31}) run(rows, 16, 32), run(rows, 33, 96), run(rows, 96, 64);
    for (int rows = 4; rows < 16; rows++) run(rows, 32, 64);
    run(33, 48, 128), run(50, 1, 64), run(7, 96, 576);
    if (!quick) run(3, 4099, 64), run(2, 32, 4096), run(100, 32, 192), run(41, 32, 1088);
  } else {
    run(1, 33, 96), run(31, 96, 64);  // tiles of 16, 8, 4, 2 and 1 rows
    for (int rows = 2; rows < 7; rows++) run(rows, 32, 64);
    if (!quick) run(50, 1, 64), run(3, 259, 64), run(2, 32, 4096), run(100, 32, 192), run(41, 32, 1088);
  }
  if (format >= W8 && !brief)
    for (int rows : {2, 4, 8, 25}) run(rows, 32, 64, true);
  if (format < W8 && !brief)
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
          const float most = act == Act::A16 ? 127 * 128 : 127;
          const float m = scale_of(group, 32), inverse = m > 0 ? most / m : 0.f;
          int sums[2] = {}, firsts[2] = {};  // of the first 16; the second is of what A16 leaves to its second row
          for (int i = 0; i < 32; i++) {
            const int q = (int)std::nearbyint(group[i] * inverse);
            const int high = act == Act::A16 ? (int)std::floor((q + 64) / 128.0) : q, low = q - 128 * high;
            sums[0] += high, firsts[0] += i < 16 ? high : 0;
            sums[1] += low, firsts[1] += i < 16 ? low : 0;
            const uint32_t bits = (uint32_t)bf16(group[i]) << 16;
            float rounded;
            memcpy(&rounded, &bits, 4);
            const double expected = act == Act::F32 ? group[i] : act == Act::BF16 ? rounded : (double)(m / most) * q;
            right &= y.at(r, c0 + i) == expected;
          }
          for (int part = 0, n = int8_rows(act); part < n && act >= Act::A8; part++) {
            const int64_t i = c0 / 32 * y.view.stride + r * n + part;
            const float s = m / most * (act == Act::A16 && part == 0 ? 128 : 1);
            right &= y.view.nhalf[i] == -firsts[part] && y.view.nsum[i] == -sums[part] &&
                     y.view.t[i] == s * (float)sums[part];
          }
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
    if (k == 96 && format > Format::W4F) continue;  // not all have groups of 32
    if (info_of(format).unit == 256) k = (k + 255) / 256 * 256;
    const Packed packed(format, n, k, random);
    const int32_t ids[] = {48, 0, 15, 16, 31, 32, 7, 48};
    Guarded<float> y((size_t)8 * (k + 1));
    kernels.embed[(int)format](packed.w, ids, y.data(), k + 1, 0, 8);
    bool right = y.intact();
    for (int r = 0; r < 8; r++)
      for (int c = 0; c < k; c++) {
        const size_t i = (size_t)ids[r] * k + c;
        right &= std::fabs(y[(size_t)r * (k + 1) + c] - packed.value[i]) <=
                 (packed.w.factor ? 2 : 1) * 0x1p-24 * packed.magnitude[i];
      }
    expect(right, "%s embed %s k %d: wrong values", kernels.name, name_of(format), k);
  }
  printf("%s embed %s: ok\n", kernels.name, name_of(format));
}

// Columns with a NaN are NaN in every row, whatever else is there; others keep their bits.
void test_f8_nan(const Kernels& kernels) {
  constexpr int kCols = 48, kDepth = 128;
  Random random(13);
  const Packed packed(Format::F8, kCols, kDepth, random);
  std::vector<uint8_t> bytes(packed_bytes(Format::F8, kCols, kDepth) + 64);
  auto* aligned = (uint8_t*)(((uintptr_t)bytes.data() + 63) / 64 * 64);
  memcpy(aligned, packed.w.data, packed_bytes(Format::F8, kCols, kDepth));
  auto put = [&](int col, int k, uint8_t code) {
    aligned[col / 16 * packed.w.panel_bytes + k / 64 * unit_bytes(Format::F8) + k % 64 / 4 * 64 + col % 16 * 4 +
            k % 4] = code;
  };
  put(5, 3, 0x7f), put(20, 64, 0xff), put(47, 127, 0x7f);
  for (Act act : {Act::F32, Act::BF16, Act::A8, Act::A16})
    for (int rows : {1, 6}) {
      const std::vector<float> x = random_rows(rows, kDepth, random);
      OwnActivation a(act, rows, kDepth);
      round_all(kernels, x.data(), kDepth, a);
      std::vector<float> plain((size_t)rows * kCols), y(plain.size());
      const Weight weights[] = {packed.w, packed_weight(Format::F8, kCols, kDepth, aligned)};
      for (int i = 0; i < 2; i++) {
        GemmArgs args{};
        args.w = &weights[i], args.x = &a.view, args.out = (i ? y : plain).data(), args.ld_out = kCols;
        kernels.gemm[(int)Format::F8][(int)act](args, 0, weights[i].n_pad / kTaskCols);
      }
      bool right = true;
      for (size_t i = 0; i < y.size(); i++) {
        const size_t c = i % kCols;
        right &= c == 5 || c == 20 || c == 47 ? std::isnan(y[i]) : y[i] == plain[i];
      }
      expect(right, "%s gemm f8 x %s, %d rows: NaN in the wrong columns", kernels.name, name_of(act), rows);
    }
  printf("%s NaN of f8: ok\n", kernels.name);
}

}  // namespace

int main(int argc, char** argv) {
  for (const Kernels* kernels : levels(argc, argv)) {
    for (int f = 0; f < kFormats; f++)
      for (int a = 0; a < kActs; a++) test_gemm(*kernels, (Format)f, (Act)a);
    for (int a = 0; a < kActs; a++) test_round(*kernels, (Act)a);
    for (int f = 0; f < kFormats; f++) test_embed(*kernels, (Format)f);
    test_f8_nan(*kernels);
  }
  return finish();
}
