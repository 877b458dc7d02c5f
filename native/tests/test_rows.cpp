// Norms, rounding norms, activations, elementwise passes, rope and the KV write against float64, with guards around every output.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "check.h"

using namespace octavo;
using check::Guarded;
using check::OwnActivation;
using check::Random;

namespace {

constexpr double kUnit = 0x1p-24;
constexpr int kRows = 19;  // sixteen at once, and others

void fill(Guarded<float>& x, Random& random) {
  for (size_t i = 0; i < x.size(); i++) x[i] = 2 * random.normal();
}

bool same_bits(const float* a, const float* b, size_t n) { return !memcmp(a, b, n * sizeof(float)); }

// Norms of `heads` spans of `cols` columns: weights and biases none, shared by the heads, or of each.
void test_norm(const Kernels& k, bool centred, int cols, int heads, int vectors, bool per_head) {
  Random random(1);
  const int64_t width = int64_t{cols} * heads, ldx = width + 3, ldy = width + 1;
  Guarded<float> x(kRows * ldx), w(per_head ? width : cols), b(w.size()), y(kRows * ldy);
  fill(x, random), fill(w, random), fill(b, random);
  for (size_t i = 0; i < x.size(); i++) x[i] += 3;
  const NormArgs a{x.data(),
                   ldx,
                   vectors > 0 ? w.data() : nullptr,
                   vectors > 1 ? b.data() : nullptr,
                   1e-5f,
                   cols,
                   heads,
                   per_head ? cols : 0,
                   centred};
  k.norm(a, y.data(), ldy, 1, kRows);
  bool good = y.intact();
  for (int r = 0; r < kRows; r++) {
    for (int h = 0; h < heads && r > 0; h++) {
      const float* in = &x[r * ldx + h * cols];
      double mean = 0, squares = 0, norm = 0;
      for (int c = 0; c < cols; c++) mean += centred ? double(in[c]) / cols : 0;
      for (int c = 0; c < cols; c++) squares += (in[c] - mean) * (in[c] - mean), norm += double(in[c]) * in[c];
      const double factor = 1 / std::sqrt(squares / cols + a.eps);
      for (int c = 0; c < cols; c++) {
        const double weight = a.w ? a.w[h * a.step + c] : 1, bias = a.b ? a.b[h * a.step + c] : 0;
        const double scaled = (in[c] - mean) * factor * weight;
        // The mean is off by 2 sqrt(n) u |x| / n, the sum of squares by 4 sqrt(n) u of itself.
        const double moved =
            centred ? 4 * kUnit * (std::sqrt(norm / cols) + std::abs(mean)) * factor * std::abs(weight) : 0;
        const double tolerance = (4 * std::sqrt(cols) + 8) * kUnit * (std::abs(scaled) + std::abs(bias)) + moved;
        good &= std::abs(y[r * ldy + h * cols + c] - (scaled + bias)) <= tolerance;
      }
    }
    good &= std::isnan(y[r * ldy + width]) && (r > 0 || std::isnan(y[0]));  // not touched
  }
  check::expect(good, "norm %s centred %d, %d heads of %d, %d vectors", k.name, centred, heads, cols, vectors);
  Guarded<float> in_place(kRows * ldx);
  memcpy(in_place.data(), x.data(), x.size() * sizeof(float));
  NormArgs same = a;
  same.x = in_place.data();
  k.norm(same, in_place.data(), ldx, 1, kRows);
  for (int r = 1; r < kRows; r++) CHECK(same_bits(&in_place[r * ldx], &y[r * ldy], size_t(width)));
  if (heads > 1) return;
  for (Act act : {Act::A8, Act::A16, Act::BF16, Act::F32}) {
    OwnActivation rounded(act, kRows, cols), expected(act, kRows, cols);
    const int groups = rounded.view.k_pad / 32, part = groups / 2;
    k.norm_round(a, rounded.view, 0, kRows, part, groups);
    k.norm_round(a, rounded.view, 0, kRows, 0, part);
    k.norm(a, y.data(), ldy, 0, kRows);
    k.round(y.data(), ldy, expected.view, 0, kRows, 0, groups);
    check::expect(rounded.intact() && rounded.same_bits(expected), "norm_round %s to %s, centred %d, %d columns",
                  k.name, check::name_of(act), centred, cols);
  }
}

void test_norms(const Kernels& k) {
  for (bool centred : {false, true}) {
    for (int cols : {1, 7, 16, 31, 33, 64, 576, 4099})
      for (int vectors : {0, 1, 2})
        if (centred || vectors < 2) test_norm(k, centred, cols, 1, vectors, false);
    for (int cols : {6, 16, 80, 128})
      for (bool per_head : {false, true}) test_norm(k, centred, cols, 3, centred ? 2 : 1, per_head);
  }
  std::printf("rms_norm layer_norm norm_round\n");
}

// Rows that are rounded sixteen at a time have the bits of single rows, among numbers that are none, all zero or tiny.
void test_round(const Kernels& k) {
  Random random(6);
  constexpr int kMany = 37;
  for (Act act : {Act::A8, Act::A16, Act::BF16, Act::F32})
    for (int cols : {32, 100, 192}) {
      const int64_t ldx = cols + 3;
      Guarded<float> x(kMany * ldx);
      fill(x, random);
      for (int c = 0; c < cols; c++) x[3 * ldx + c] = 0, x[4 * ldx + c] *= 1e-37f, x[20 * ldx + c] *= 1e-40f;
      x[7 * ldx + 5] = NAN, x[33 * ldx + 31] = INFINITY;
      OwnActivation whole(act, kMany, cols), single(act, kMany, cols);
      const int groups = whole.view.k_pad / 32;
      k.round(x.data(), ldx, whole.view, 0, kMany, 0, groups);
      for (int r = 0; r < kMany; r++) k.round(x.data(), ldx, single.view, r, r + 1, 0, groups);
      bool good = whole.intact() && whole.same_bits(single);
      const int int8 = kMany * int8_rows(act);
      for (int r = 0; r < int8 && act >= Act::A8; r++)
        for (int g = 0; g < groups; g++) {
          const size_t i = size_t(g) * size_t(int8) + size_t(r);
          int first = 0, sum = 0;
          for (size_t c = 0; c < 32; c++)
            sum += whole.view.q[i * 32 + c], first += c < 16 ? whole.view.q[i * 32 + c] : 0;
          good &= whole.view.nsum[i] == -sum && whole.view.nhalf[i] == -first;
        }
      check::expect(good, "round %s to %s, %d columns", k.name, check::name_of(act), cols);
    }
  std::printf("round\n");
}

double logistic(double x) { return 1 / (1 + std::exp(-x)); }

double meaning(ActKind kind, double x) {
  switch (kind) {
    case ActKind::Silu: return x * logistic(x);
    case ActKind::Gelu: return x / 2 * std::erfc(-x / std::sqrt(2.0));
    case ActKind::GeluTanh: return x * logistic(2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
    case ActKind::SwigluOai:
    case ActKind::GeluQuick: return x * logistic(1.702 * x);
    case ActKind::Relu: return std::max(x, 0.0);
    case ActKind::Relu2: return std::max(x, 0.0) * std::max(x, 0.0);
    case ActKind::Sigmoid: return logistic(x);
    case ActKind::Tanh: return std::tanh(x);
  }
  return NAN;
}

// exp2: 4 units; what surrounds it 6; its argument is off by 2 units of itself for negative x, where it is not damped.
double act_error(ActKind kind, double x) {
  const double m = std::abs(std::min(x, 0.0));
  const double argument = kind == ActKind::Gelu        ? m * m
                          : kind == ActKind::GeluTanh  ? 2 * m + m * m * m / 5
                          : kind == ActKind::GeluQuick ? 2 * m
                          : kind == ActKind::SwigluOai ? 2 * m
                                                       : m;
  return (14 + 3 * argument) * kUnit;
}

void test_acts(const Kernels& k) {
  Random random(2);
  for (int kind = 0; kind < kActKinds; kind++)
    for (int cols : {1, 7, 16, 31, 33, 4099}) {
      if (check::brief && cols > 33) continue;
      const ActKind act = ActKind(kind);
      const bool alone = act != ActKind::SwigluOai;
      const int64_t ld = cols + 5;
      Guarded<float> a(kRows * ld), b(kRows * ld), y(kRows * ld), product(kRows * ld);
      fill(a, random), fill(b, random);
      if (cols == 4099) {
        const float odd[] = {200, -200, 1e18f, -1e18f, 0, -88, 14, -14, 13.3f, -5.5f, 7, -7, INFINITY, NAN};
        memcpy(a.data(), odd, sizeof odd);
        for (int i = 0; i < 2000; i++) a[ld + i] = (float(i) - 1000) / 64;
      }
      CHECK((k.act[kind] != nullptr) == alone);
      if (alone) k.act[kind](a.data(), ld, y.data(), ld, cols, 0, kRows - 1);
      k.act_mul[kind](a.data(), ld, b.data(), ld, product.data(), ld, cols, 0, kRows - 1);
      bool good = y.intact() && product.intact();
      for (int r = 0; r < kRows - 1; r++) {
        for (int c = 0; c < cols; c++) {
          const int64_t i = r * ld + c;
          const double g = alone ? a[i] : std::isnan(a[i]) ? NAN : std::min(a[i], 7.f);
          const double u = alone ? b[i] : double(std::min(std::max(b[i], -7.f), 7.f)) + 1;
          const double wanted = meaning(act, g), relative = act_error(act, g);
          const double floor = 0x1p-118 * (1 + std::abs(double(a[i])));  // where exp2 ends
          auto near = [&](float got, double want, double most) {
            return std::isnan(want) ? std::isnan(got)
                                    : got == want || std::abs(got - want) <= relative * std::abs(want) + most;
          };
          if (alone) good &= near(y[i], wanted, floor);
          good &= near(product[i], wanted * u, (floor + 2 * kUnit * std::abs(wanted)) * (std::abs(u) + 1));
        }
        good &= std::isnan(product[r * ld + cols]) && std::isnan(y[r * ld + cols]);
      }
      good &= std::isnan(product[(kRows - 1) * ld]);
      check::expect(good, "activation %d %s, %d columns", kind, k.name, cols);
      if (!alone) continue;
      k.act[kind](a.data(), ld, a.data(), ld, cols, 0, kRows - 1);  // in place
      for (int r = 0; r < kRows - 1; r++) CHECK(same_bits(&a[r * ld], &y[r * ld], size_t(cols)));
    }
  std::printf("act act_mul\n");
}

void test_elementwise(const Kernels& k) {
  Random random(2);
  for (int cols : {1, 7, 16, 31, 33, 4099}) {
    const int64_t ld = cols + 5;
    const size_t size = size_t(kRows * ld);
    Guarded<float> a(size), b(size), sum(size), product(size), weighted(size), scaled(size), capped(size),
        clamped(size);
    fill(a, random), fill(b, random);
    a[ld] = NAN;
    const float cap = 1.5f;
    k.add(a.data(), ld, b.data(), ld, sum.data(), ld, cols, 0, kRows - 1);
    k.mul(a.data(), ld, b.data(), ld, product.data(), ld, cols, 0, kRows - 1);
    k.mul(a.data(), ld, b.data(), 0, weighted.data(), ld, cols, 0, kRows - 1);
    k.scale(a.data(), ld, b.data(), ld, scaled.data(), ld, cols, 0, kRows - 1);
    k.softcap(a.data(), ld, cap, capped.data(), ld, cols, 0, kRows - 1);
    k.clamp(a.data(), ld, -1, 0.5f, clamped.data(), ld, cols, 0, kRows - 1);
    for (int r = 0; r < kRows - 1; r++) {
      for (int c = 0; c < cols; c++) {
        const int64_t i = r * ld + c;
        if (std::isnan(a[i])) {
          for (Guarded<float>* y : {&sum, &product, &weighted, &scaled, &capped, &clamped}) CHECK(std::isnan((*y)[i]));
          continue;
        }
        CHECK(sum[i] == a[i] + b[i] && product[i] == a[i] * b[i] && weighted[i] == a[i] * b[c]);
        CHECK(scaled[i] == a[i] * b[r * ld] && clamped[i] == std::min(std::max(a[i], -1.f), 0.5f));
        const double wanted = cap * std::tanh(double(a[i]) / cap);
        CHECK(std::abs(capped[i] - wanted) <= 8 * kUnit * std::abs(wanted));
      }
      for (Guarded<float>* y : {&sum, &product, &weighted, &scaled, &capped, &clamped})
        CHECK(std::isnan((*y)[r * ld + cols]));
    }
    for (Guarded<float>* y : {&sum, &product, &weighted, &scaled, &capped, &clamped})
      CHECK(std::isnan((*y)[(kRows - 1) * ld]) && y->intact());
    k.add(a.data(), ld, b.data(), ld, b.data(), ld, cols, 2, kRows - 1);  // in place
    k.softcap(a.data(), ld, cap, a.data(), ld, cols, 2, kRows - 1);
    CHECK(same_bits(&b[2 * ld], &sum[2 * ld], size_t(cols)) && same_bits(&a[2 * ld], &capped[2 * ld], size_t(cols)));
  }
  std::printf("add mul scale softcap clamp\n");
}

void test_rope(const Kernels& k) {
  Random random(3);
  for (bool neox : {true, false})
    for (int dim : {16, 32, 64, 80, 96, 128, 256})
      for (int rot : {dim, dim / 2, 6, 2}) {
        const int heads = 3, half = rot / 2;
        const int64_t ld = heads * dim + 2;
        Guarded<float> x(kRows * ld), y(kRows * ld), cos(kRows * half), sin(kRows * half);
        fill(x, random);
        for (int i = 0; i < kRows * half; i++) {
          const double angle = 6.28 * random.uniform();
          cos[i] = float(std::cos(angle)), sin[i] = float(std::sin(angle));
        }
        const RopeArgs apart{x.data(), ld, y.data(), ld, heads, dim, rot, neox, cos.data(), sin.data()};
        k.rope(apart, 0, kRows, 1, heads);
        bool good = y.intact();
        for (int r = 0; r < kRows; r++)
          for (int h = 1; h < heads; h++) {
            const float *in = &x[r * ld + h * dim], *out = &y[r * ld + h * dim];
            for (int i = 0; i < half; i++) {
              const int i0 = neox ? i : 2 * i, i1 = neox ? i + half : 2 * i + 1;
              const double c = cos[r * half + i], s = sin[r * half + i];
              const double tolerance = 3 * kUnit * (std::abs(in[i0]) + std::abs(in[i1]));
              good &= std::abs(out[i0] - (in[i0] * c - in[i1] * s)) <= tolerance;
              good &= std::abs(out[i1] - (in[i1] * c + in[i0] * s)) <= tolerance;
            }
            for (int i = rot; i < dim; i++) good &= out[i] == in[i];
          }
        good &= std::isnan(y[0]) && std::isnan(y[dim - 1]) && std::isnan(y[ld - 1]);
        RopeArgs in_place = apart;
        in_place.out = x.data();
        k.rope(in_place, 0, kRows, 1, heads);
        for (int r = 0; r < kRows; r++)
          good &= same_bits(&x[r * ld + dim], &y[r * ld + dim], size_t(dim) * (heads - 1));
        check::expect(good, "rope %s dim %d rot %d neox %d", k.name, dim, rot, neox);
      }
  std::printf("rope\n");
}

uint16_t bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// Tokens [3, 3 + n) of one sequence and [0, 2) of another are a step; blocks 2 and 0, 1.
void test_kv_write(const Kernels& k, KvType type) {
  Random random(4);
  for (int dim : {16, 32, 80, 128})
    for (int n : {1, 2, 5, 13, 14, 29}) {
      const int heads = 2, tokens = n + 2;
      const int64_t ld = heads * dim + 7;
      const size_t block_bytes = size_t(type == KvType::BF16 ? 64 : 128) * dim, panel = block_bytes / 2;
      std::vector<int32_t> positions, slots;
      for (int t = 3; t < 3 + n; t++) positions.push_back(t), slots.push_back(t < 16 ? 2 : 0);
      for (int t = 0; t < 2; t++) positions.push_back(t), slots.push_back(1);
      Guarded<float> keys(tokens * ld), values(tokens * ld);
      fill(keys, random), fill(values, random);
      if (type == KvType::F32)  // no byte pair of 0xff 0xff: see below
        for (float* x : {keys.data(), values.data()})
          for (int64_t i = 0; i < tokens * ld; i++) x[i] = std::round(x[i] * 256) / 256;
      values[(tokens - 1) * ld + 5] = NAN,
                                 values[ld + dim + 3] = -INFINITY;  // head 0 of the last token, 1 of the second
      values[0] = 3.4e38f;                                          // infinite in bf16
      auto is_finite = [&](int t, int h) {
        const float* v = &values[t * ld + h * dim];
        return std::all_of(v, v + dim,
                           [type](float x) { return std::abs(x) < (type == KvType::BF16 ? 3.39e38f : INFINITY); });
      };
      Guarded<uint8_t> memory(3 * heads * block_bytes), in_parts(3 * heads * block_bytes);
      auto args = [&](Guarded<uint8_t>& to) {
        return KvWriteArgs{{type, to.data(), int64_t(3 * block_bytes), int64_t(block_bytes), heads, dim, dim},
                           keys.data(),
                           ld,
                           values.data(),
                           ld,
                           positions.data(),
                           slots.data(),
                           tokens};
      };
      const auto write = k.kv_write[int(type)];
      write(args(memory), 0, tokens, 0, heads);
      bool good = memory.intact();
      size_t written = 0;
      for (int t = 0; t < tokens; t++)
        for (int h = 0; h < heads; h++)
          for (int d = 0; d < dim; d++) {
            const uint8_t* block = memory.data() + (size_t(h) * 3 + slots[t]) * block_bytes;
            const int slot = positions[t] % kBlock;
            const bool finite = is_finite(t, h);  // else zeros under a key of NaN
            const float key = finite ? keys[t * ld + h * dim + d] : __builtin_bit_cast(float, 0x7fc00000);
            const float value = finite ? values[t * ld + h * dim + d] : 0;
            if (type == KvType::F32) {
              good &= !memcmp(block + (size_t(d) * 16 + slot) * 4, &key, 4);
              good &= !memcmp(block + panel + (size_t(slot) * dim + d) * 4, &value, 4);
              written += 8;
              continue;
            }
            const auto *k16 = (const uint16_t*)block, *v16 = (const uint16_t*)(block + panel);
            good &= k16[(d / 2 * 16 + slot) * 2 + d % 2] == bf16(key);
            good &= v16[(slot / 2 * dim + d) * 2 + slot % 2] == bf16(value);
            written += 4;
            const bool alone = slot % 2 == 0 && (t + 1 == tokens || positions[t + 1] != positions[t] + 1);
            if (alone) good &= v16[(slot / 2 * dim + d) * 2 + 1] == 0, written += 2;
          }
      // Every other byte is as before, 0xff.
      size_t changed = 0;
      for (size_t i = 0; i < memory.size(); i += 2) changed += memory[i] == 0xff && memory[i + 1] == 0xff ? 0 : 2;
      good &= changed == written;
      // As threads could cut it: single rows and heads, in any order.
      for (int t = tokens; t-- > 0;)
        for (int h = 0; h < heads; h++) write(args(in_parts), t, t + 1, h, h + 1);
      good &= !memcmp(memory.data(), in_parts.data(), memory.size());
      check::expect(good, "kv_write %s %s dim %d tokens %d", k.name, type == KvType::BF16 ? "bf16" : "f32", dim, n);
    }
  std::printf("kv_write %s\n", type == KvType::BF16 ? "bf16" : "f32");
}

// Every byte of the memory, against a scalar writer: heads of zeros, of tiny numbers, with a NaN, with an infinity too.
void test_kv_write_i8(const Kernels& k) {
  Random random(6);
  for (int dim : {16, 32, 80, 256})
    for (int n : {1, 5, 18}) {
      const int heads = 2, first = 13;
      const int64_t ld = heads * dim + 3;
      const size_t block_bytes = kv_block_bytes(KvType::I8, dim, dim);
      std::vector<int32_t> positions, slots;
      for (int t = 0; t < n; t++) positions.push_back(first + t), slots.push_back((first + t) / kBlock ? 0 : 2);
      Guarded<float> keys(n * ld), values(n * ld);
      fill(keys, random), fill(values, random);
      for (int d = 0; d < dim; d++) keys[d] = 0, values[d] *= 0x1p-110f;
      if (n > 1) keys[ld + 3] = NAN, values[ld + dim + 2] = -INFINITY, keys[ld + dim] = 2.5f, keys[ld + dim + 1] = 127;
      Guarded<uint8_t> memory(3 * heads * block_bytes), parts(memory.size()), expected(memory.size());
      auto args = [&](Guarded<uint8_t>& to) {
        const KvLayer kv{KvType::I8, to.data(), int64_t(3 * block_bytes), int64_t(block_bytes), heads, dim, dim};
        return KvWriteArgs{kv, keys.data(), ld, values.data(), ld, positions.data(), slots.data(), n};
      };
      const auto write = k.kv_write[int(KvType::I8)];
      write(args(memory), 0, n, 0, heads);
      for (int h = heads; h-- > 0;)
        for (int r = n; r-- > 0;) write(args(parts), r, r + 1, h, h + 1);
      for (int t = 0; t < n; t++)
        for (int h = 0; h < heads; h++)
          for (int v = 0; v < 2; v++) {
            uint8_t* block = expected.data() + (size_t(h) * 3 + slots[t]) * block_bytes;
            const float* x = (v ? values : keys).data() + t * ld + h * dim;
            const int slot = positions[t] % kBlock, order[] = {0, 2, 1, 3};
            float most = 0;
            for (int d = 0; d < dim; d++)
              most = std::isnan(x[d]) ? NAN : most > std::abs(x[d]) || std::isnan(most) ? most : std::abs(x[d]);
            const bool finite = most < INFINITY;
            const float scale = finite ? most / 127 : NAN;
            memcpy(block + 32 * dim + (v * kBlock + slot) * 4, &scale, 4);
            for (int d = 0; d < dim; d++) {
              const float q = finite && most >= 0x1p-100f ? std::nearbyint(x[d] * (127 / most)) : 0;
              const int at = v ? (slot / 4 * dim + d) * 4 + order[slot % 4] : (d / 4 * 16 + slot) * 4 + order[d % 4];
              block[v * 16 * dim + at] = uint8_t(int8_t(q));
            }
          }
      const bool good = memory.intact() && !memcmp(memory.data(), expected.data(), memory.size()) &&
                        !memcmp(parts.data(), expected.data(), parts.size());
      check::expect(good, "kv_write %s i8 dim %d tokens %d", k.name, dim, n);
    }
  std::printf("kv_write i8\n");
}

}  // namespace

int main(int argc, char** argv) {
  for (const Kernels* kernels : check::levels(argc, argv)) {
    std::printf("level %s\n", kernels->name);
    test_norms(*kernels);
    test_round(*kernels);
    test_acts(*kernels);
    test_elementwise(*kernels);
    test_rope(*kernels);
    test_kv_write(*kernels, KvType::BF16);
    test_kv_write(*kernels, KvType::F32);
    test_kv_write_i8(*kernels);
  }
  return check::finish();
}
