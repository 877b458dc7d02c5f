// Norm, rounding norm, addition, gated activation, rope and the KV write against float64, with guards around every output.
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
constexpr int kRows = 5;

void fill(Guarded<float>& x, Random& random) {
  for (size_t i = 0; i < x.size(); i++) x[i] = 2 * random.normal();
}

bool same_bits(const float* a, const float* b, size_t n) { return !memcmp(a, b, n * sizeof(float)); }

void test_norm(const Kernels& k) {
  Random random(1);
  for (int cols : {1, 7, 16, 31, 33, 64, 576, 4099}) {
    const int64_t ldx = cols + 3, ldy = cols + 1;
    Guarded<float> x(kRows * ldx), w(cols), y(kRows * ldy);
    fill(x, random), fill(w, random);
    const float eps = 1e-5f;
    k.rms_norm(x.data(), ldx, w.data(), eps, cols, y.data(), ldy, 1, kRows);
    for (int r = 0; r < kRows; r++) {
      double sum = 0;
      for (int c = 0; c < cols; c++) sum += double(x[r * ldx + c]) * x[r * ldx + c];
      for (int c = 0; c < cols && r > 0; c++) {
        const double wanted = x[r * ldx + c] / std::sqrt(sum / cols + eps) * w[c];
        CHECK(std::abs(y[r * ldy + c] - wanted) <= (4 * std::sqrt(cols) + 6) * kUnit * std::abs(wanted));
      }
      CHECK(std::isnan(y[r * ldy + cols]) && (r > 0 || std::isnan(y[0])));  // not touched
    }
    CHECK(y.intact());
    for (Act act : {Act::A8, Act::BF16, Act::F32}) {
      OwnActivation rounded(act, kRows, cols), expected(act, kRows, cols);
      const int groups = rounded.view.k_pad / 32, part = groups / 2;
      k.norm_round(x.data(), ldx, w.data(), eps, cols, rounded.view, 0, kRows, part, groups);
      k.norm_round(x.data(), ldx, w.data(), eps, cols, rounded.view, 0, kRows, 0, part);
      k.rms_norm(x.data(), ldx, w.data(), eps, cols, y.data(), ldy, 0, kRows);
      k.round(y.data(), ldy, expected.view, 0, kRows, 0, groups);
      check::expect(rounded.intact() && rounded.same_bits(expected), "norm_round %s to %s, %d columns", k.name,
                    check::name_of(act), cols);
    }
  }
  std::printf("rms_norm norm_round\n");
}

void test_elementwise(const Kernels& k) {
  Random random(2);
  for (int cols : {1, 7, 16, 31, 33, 4099}) {
    const int64_t ld = cols + 5;
    Guarded<float> a(kRows * ld), b(kRows * ld), sum(kRows * ld), product(kRows * ld);
    fill(a, random), fill(b, random);
    if (cols == 4099) a[0] = 200, a[1] = -200, a[2] = 1e30f, a[3] = -1e30f, a[4] = 0, a[5] = -88;
    k.add(a.data(), ld, b.data(), ld, sum.data(), ld, cols, 0, kRows - 1);
    k.silu_mul(a.data(), ld, b.data(), ld, product.data(), ld, cols, 0, kRows - 1);
    for (int r = 0; r < kRows - 1; r++) {
      for (int c = 0; c < cols; c++) {
        const int64_t i = r * ld + c;
        const double silu = a[i] / (1 + std::exp(-double(a[i])));
        // exp2: 4 units and its argument's rounding; sum, quotient and product 3. Below e^-87 exp2 has ended: absolute.
        const double relative = (8 + 2 * std::abs(std::min(a[i], 0.f))) * kUnit;
        CHECK(sum[i] == a[i] + b[i]);
        CHECK(std::abs(product[i] - silu * b[i]) <=
              relative * std::abs(silu * b[i]) + (a[i] < -86 ? 0x1p-120 * std::abs(double(a[i]) * b[i]) : 0));
      }
      CHECK(std::isnan(sum[r * ld + cols]) && std::isnan(product[r * ld + cols]));
    }
    CHECK(std::isnan(sum[(kRows - 1) * ld]) && sum.intact() && product.intact());
    k.add(a.data(), ld, b.data(), ld, a.data(), ld, cols, 0, kRows);  // in place
    CHECK(same_bits(a.data(), sum.data(), size_t(cols)));
  }
  std::printf("add silu_mul\n");
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
    for (int n : {1, 2, 13, 14}) {
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
      Guarded<uint8_t> memory(3 * heads * block_bytes), in_parts(3 * heads * block_bytes);
      auto args = [&](Guarded<uint8_t>& to) {
        return KvWriteArgs{{type, to.data(), int64_t(3 * block_bytes), int64_t(block_bytes), heads, dim},
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
            const float key = keys[t * ld + h * dim + d], value = values[t * ld + h * dim + d];
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
      const size_t block_bytes = kv_block_bytes(KvType::I8, dim);
      std::vector<int32_t> positions, slots;
      for (int t = 0; t < n; t++) positions.push_back(first + t), slots.push_back((first + t) / kBlock ? 0 : 2);
      Guarded<float> keys(n * ld), values(n * ld);
      fill(keys, random), fill(values, random);
      for (int d = 0; d < dim; d++) keys[d] = 0, values[d] *= 0x1p-110f;
      if (n > 1) keys[ld + 3] = NAN, values[ld + dim + 2] = -INFINITY, keys[ld + dim] = 2.5f, keys[ld + dim + 1] = 127;
      Guarded<uint8_t> memory(3 * heads * block_bytes), parts(memory.size()), expected(memory.size());
      auto args = [&](Guarded<uint8_t>& to) {
        const KvLayer kv{KvType::I8, to.data(), int64_t(3 * block_bytes), int64_t(block_bytes), heads, dim};
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
    test_norm(*kernels);
    test_elementwise(*kernels);
    test_rope(*kernels);
    test_kv_write(*kernels, KvType::BF16);
    test_kv_write(*kernels, KvType::F32);
    test_kv_write_i8(*kernels);
  }
  return check::finish();
}
