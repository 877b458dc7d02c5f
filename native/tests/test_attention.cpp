// Attention over pages against float64, and its bits: decode = prefill, any chunks, partials = whole, rounded = float. With
// windows, blocks before the window have table entries that nothing could read.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <vector>

#include "check.h"

using namespace octavo;
using check::Guarded;
using check::OwnActivation;
using check::Random;

namespace {

constexpr double kUnit = 0x1p-24, kBf16Unit = 0x1p-8;

float bf16(float x) {  // to nearest even
  uint32_t u;
  memcpy(&u, &x, 4);
  u = (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
  memcpy(&x, &u, 4);
  return x;
}

constexpr int32_t kNoBlock = 1 << 30;

struct Features {
  int window = 0;  // 0: none
  float softcap = 0;
  bool slopes = false, sinks = false;
  bool both = false;  // not causal
};

const char* name_of(KvType type) { return type == KvType::BF16 ? "bf16" : type == KvType::F32 ? "f32" : "i8"; }

// One sequence of `context` tokens in randomly placed blocks of poisoned memory, and its float32 queries, keys, values.
struct Sequence {
  KvType type;
  Features features;
  int context, group, dim, vdim, heads;
  static constexpr int kKvHeads = 2, kHead = 1;  // only kv head 1 is attended to
  std::vector<float> q, k, v;                    // [context][heads or kv heads][dim, of v vdim]
  std::vector<double> keys, values;              // of kv head kHead as they are stored
  std::vector<float> slopes, sinks;              // [heads]
  std::vector<int32_t> blocks, visible, slots, positions;
  AttnPart part;
  Guarded<float> scratch;
  Guarded<uint8_t> memory;
  KvLayer layer;
  float scale;

  Sequence(KvType type, Features features, int context, int group, int dim, int vdim, uint64_t seed)
      : type(type),
        features(features),
        context(context),
        group(group),
        dim(dim),
        vdim(vdim),
        heads(group * kKvHeads),
        q(size_t(context) * heads * dim),
        k(size_t(context) * kKvHeads * dim),
        v(size_t(context) * kKvHeads * vdim),
        keys(size_t(context) * dim),
        values(size_t(context) * vdim),
        slopes(heads),
        sinks(heads),
        blocks((context + kBlock - 1) / kBlock),
        slots(context),
        positions(context),
        scratch(attn_scratch_floats(vdim)),
        memory(size_t(kKvHeads) * (blocks.size() + 3) * block_bytes()) {
    Random random(seed);
    for (float& x : q) x = random.normal();
    for (float& x : k) x = 1.5f * random.normal();
    for (float& x : v) x = random.normal();
    for (float& x : slopes) x = 0.02f + 0.2f * float(random.uniform());
    for (float& x : sinks) x = 3 * random.normal();
    for (int t = 0; t < context; t++) {
      store(&k[(size_t(t) * kKvHeads + kHead) * dim], dim, 127, &keys[size_t(t) * dim]);
      store(&v[(size_t(t) * kKvHeads + kHead) * vdim], vdim, 127, &values[size_t(t) * vdim]);
    }
    std::vector<int32_t> ids(blocks.size() + 3);
    std::iota(ids.begin(), ids.end(), 0);
    for (size_t i = ids.size(); i > 1; i--) std::swap(ids[i - 1], ids[random.below(int(i))]);
    std::copy_n(ids.begin(), blocks.size(), blocks.begin());
    for (int t = 0; t < context; t++) slots[t] = blocks[t / kBlock], positions[t] = t;
    layer = {type, memory.data(), int64_t(ids.size() * block_bytes()), int64_t(block_bytes()), kKvHeads, dim, vdim};
    scale = 1.44269504f / std::sqrt(float(dim));
  }
  size_t block_bytes() const { return kv_block_bytes(type, dim, vdim); }

  // A head as it is stored; in fixed point of `steps` steps each way where the cache is int8.
  void store(const float* x, int dim, float steps, double* to) const {
    float most = 0;
    for (int d = 0; d < dim; d++) most = std::max(most, std::abs(x[d]));
    for (int d = 0; d < dim; d++)
      to[d] = type == KvType::F32    ? x[d]
              : type == KvType::BF16 ? bf16(x[d])
                                     : double(most / steps) * std::nearbyint(x[d] * (steps / most));
  }

  void write(const Kernels& kernels, int begin, int end) {  // as a step of the tokens [begin, end)
    const int64_t ld = kKvHeads * dim, ldv = kKvHeads * vdim;
    const KvWriteArgs args{
        layer, k.data() + begin * ld, ld, v.data() + begin * ldv, ldv, &positions[begin], &slots[begin], end - begin};
    kernels.kv_write[int(type)](args, 0, end - begin, 0, kKvHeads);
  }

  int from(int token) const { return features.window ? std::max(0, token + 1 - features.window) : 0; }
  int end(int token) const {
    if (!features.both) return token + 1;
    return features.window ? std::min(context, token + features.window) : context;
  }

  // Step rows start at token `first`. Valid until the next call.
  AttnItem item(int begin, int end, int first) {
    visible = blocks;
    std::fill_n(visible.begin(), from(begin) / kBlock, kNoBlock);
    const int split0 = from(begin) / kKvSplit, split1 = (this->end(end - 1) + kKvSplit - 1) / kKvSplit;
    part = {begin - first, end - begin, begin, features.both ? context : 0, &visible[0], 0};
    return {&part, 1, kHead, split0, split1, blocks.data(), 1, nullptr};
  }
  AttnArgs args(int first, float* out, const Activation* act) {
    const int64_t ld = heads * dim;
    AttnArgs a{};
    a.kv = layer, a.q = q.data() + first * ld, a.ldq = ld, a.heads = heads, a.scale_log2e = scale;
    a.out = out, a.ld_out = heads * vdim, a.act = act;
    a.window = features.window;
    a.softcap_log2e = features.softcap * 1.44269504f;
    a.slopes_log2e = features.slopes ? slopes.data() : nullptr;
    a.sinks = features.sinks ? sinks.data() : nullptr;
    a.scratch = scratch.data();
    return a;
  }

  // Row (token, query head of the group) in float64 from what the cache holds, and the error that rounding allows.
  void expected(int token, int g, std::vector<double>& y, std::vector<double>& tolerance) const {
    const int head = kHead * group + g, begin = from(token), n = end(token) - begin;
    std::vector<double> p(n), query(dim);
    std::vector<float> scaled(dim);
    for (int d = 0; d < dim; d++) scaled[d] = q[(size_t(token) * heads + head) * dim + d] * scale;
    store(scaled.data(), dim, 32767, query.data());
    const double cap = double(features.softcap) * 1.44269504f;
    double top = -INFINITY, worst = 0;
    for (int i = 0; i < n; i++) {
      const double* key = &keys[size_t(begin + i) * dim];
      double s = 0, qq = 0, kk = 0;
      for (int d = 0; d < dim; d++) s += query[d] * key[d], qq += query[d] * query[d], kk += key[d] * key[d];
      double error = 4 * kUnit * std::sqrt(dim * qq * kk);
      if (cap > 0) s = cap * std::tanh(s / cap), error += 8 * kUnit * std::abs(s);
      if (features.slopes) s += double(slopes[head]) * (begin + i - token), error += 2 * kUnit * std::abs(s);
      p[i] = s;
      top = std::max(top, s);
      worst = std::max(worst, error);
    }
    const double sink = features.sinks ? double(sinks[head]) * 1.44269504f : -INFINITY;
    double sum = std::exp2(sink - top);
    for (double& s : p) sum += s = std::exp2(s - top);
    // A probability: two scores and their difference, 4 units of exp2, and its rounding. The sums: 4 sqrt(n) units.
    const double relative = std::log(2) * (2 * worst + 2 * kUnit * 64) + 8 * kUnit +
                            (type == KvType::BF16 ? kBf16Unit : 0) + 8 * kUnit * std::sqrt(double(n));
    double heaviest = 0;  // int8: what a probability weighs is rounded to half a step of the greatest weight
    for (int i = 0; i < n; i++)
      for (int d = 0; d < vdim; d++)
        heaviest = std::max(heaviest, p[i] * std::abs(values[size_t(begin + i) * vdim + d]));
    const double steps = type == KvType::I8 ? 4 * std::sqrt(double(n)) * heaviest / 2 / 32767 : 0;
    for (int d = 0; d < vdim; d++) {
      double a = 0, b = 0;
      for (int i = 0; i < n; i++) {
        const double x = p[i] * values[size_t(begin + i) * vdim + d];
        a += x, b += std::abs(x);
      }
      y[d] = a / sum;
      tolerance[d] = (relative * b + steps) / sum;
    }
  }
};

void test_sequence(const Kernels& kernels, KvType type, Features f, int context, int group, int key_dim, int dim,
                   uint64_t seed) {
  Sequence s(type, f, context, group, key_dim, dim, seed);
  Random random(seed + 1);
  const int first = std::max(0, context - 21), rows = context - first;  // the last 21 tokens are the step
  const size_t row_floats = size_t(s.heads) * dim, floats = rows * row_floats;
  if (first) s.write(kernels, 0, first);
  s.write(kernels, first, context);
  char what[99];
  snprintf(what, sizeof what, "%s window %d cap %g%s%s%s", name_of(type), f.window, double(f.softcap),
           f.slopes ? " slopes" : "", f.sinks ? " sinks" : "", f.both ? " both sides" : "");

  Guarded<float> whole(floats);
  memset(whole.data(), 0, floats * 4);
  kernels.attention[int(type)](s.args(first, whole.data(), nullptr), s.item(first, context, first));
  std::vector<double> y(dim), tolerance(dim);
  for (int t : {0, rows / 2, rows - 1})
    for (int g : {0, group - 1}) {
      s.expected(first + t, g, y, tolerance);
      const float* got = whole.data() + t * row_floats + size_t(Sequence::kHead * group + g) * dim;
      bool good = true;
      for (int d = 0; d < dim; d++) good &= std::abs(got[d] - y[d]) <= tolerance[d];
      check::expect(good, "attention %s %s context %d group %d dim %d token %d head %d", kernels.name, what, context,
                    group, dim, t, g);
    }
  auto same = [&](const Guarded<float>& other, const float* data, const char* name) {
    check::expect(other.intact() && !memcmp(whole.data(), data, floats * 4),
                  "%s: attention %s %s context %d group %d dim %d", name, kernels.name, what, context, group, dim);
  };
  CHECK(whole.intact());

  Guarded<float> decoded(floats);  // one token an item
  memset(decoded.data(), 0, floats * 4);
  for (int t = first; t < context; t++)
    kernels.attention[int(type)](s.args(first, decoded.data(), nullptr), s.item(t, t + 1, first));
  same(decoded, decoded.data(), "one by one");

  // Chunks in the order of a real prefill: what comes later, and is not seen, is still poison.
  Guarded<float> chunked(floats);
  memset(chunked.data(), 0, floats * 4);
  memset(s.memory.data(), 0xff, s.memory.size());
  if (first) s.write(kernels, 0, first);
  if (f.both) s.write(kernels, first, context);
  for (int t = first; t < context;) {
    const int end = std::min(context, t + 1 + random.below(9));
    if (!f.both) s.write(kernels, t, end);
    kernels.attention[int(type)](s.args(first, chunked.data(), nullptr), s.item(t, end, first));
    t = end;
  }
  same(chunked, chunked.data(), "chunks");

  Guarded<float> merged(floats);
  memset(merged.data(), 0, floats * 4);
  AttnItem item = s.item(first, context, first);
  const int splits = item.split1 - item.split0;
  Guarded<float> partial(size_t(splits) * rows * group * (dim + 2));
  const AttnArgs to_merged = s.args(first, merged.data(), nullptr);
  for (int split = splits; split-- > 0;) {  // the order of items is free
    AttnItem one = item;
    one.split0 += split, one.split1 = one.split0 + 1;
    one.partial = partial.data() + size_t(split) * rows * group * (dim + 2);
    kernels.attention[int(type)](to_merged, one);
  }
  AttnItem all = item;
  all.partial = partial.data();
  kernels.attention_merge(to_merged, all);
  CHECK(partial.intact() && s.scratch.intact());
  same(merged, merged.data(), "partials");

  if (group * dim % 32) return;
  for (Act act : {Act::A8, Act::A16, Act::BF16, Act::F32}) {
    OwnActivation direct(act, rows, int(row_floats)), from_parts(act, rows, int(row_floats)),
        rounded(act, rows, int(row_floats));
    kernels.attention[int(type)](s.args(first, nullptr, &direct.view), item);
    kernels.attention_merge(s.args(first, nullptr, &from_parts.view), all);
    const int g0 = Sequence::kHead * group * dim / 32, g1 = g0 + group * dim / 32;
    kernels.round(whole.data(), int64_t(row_floats), rounded.view, 0, rows, g0, g1);
    check::expect(direct.intact() && direct.same_bits(rounded) && from_parts.same_bits(rounded),
                  "rounded: attention %s %s to %s context %d group %d dim %d", kernels.name, what, check::name_of(act),
                  context, group, dim);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Features features[] = {{.window = 1},
                               {.window = 7, .sinks = true},
                               {.softcap = 3},
                               {.slopes = true},
                               {.window = 40},
                               {.window = 16, .slopes = true},
                               {.sinks = true},
                               {.window = 130, .softcap = 5},
                               {.window = 600, .sinks = true},
                               {.both = true},
                               {.window = 65, .both = true}};
  for (const Kernels* kernels : check::levels(argc, argv)) {
    std::printf("level %s\n", kernels->name);
    for (KvType type : {KvType::BF16, KvType::F32, KvType::I8}) {
      uint64_t seed = 1;
      for (int dim : {16, 32, 64, 80, 96, 128, 256})
        for (int context : {1, 15, 16, 17, 127, 129, 511, 513, 1100}) {
          if (context > 129 && dim > 64 && dim != 80) continue;  // what is long costs enough at four head sizes
          if (check::quick && ((dim != 16 && dim != 80) || context == 15 || context == 16 || context == 511 ||
                               context > (dim == 16 ? 513 : 129)))
            continue;
          if (check::brief && context != 17 && context != 129) continue;
          const int groups[] = {1, 3, 4, 8, 2, 5, 7, 16};
          test_sequence(*kernels, type, {}, context, groups[seed % 8], dim, dim, seed);
          test_sequence(*kernels, type, features[seed % std::size(features)], context, groups[seed % 8], dim, dim,
                        seed);
          seed += seed % 9 == 0 ? 2 : 1;
        }
      // Each feature over several tiles and splits, rows that start in different tiles.
      for (const Features& f : features)
        for (int context : {149, 533, 1040})
          if (!check::quick || (context == (f.window == 40 ? 533 : 149) && (!check::brief || type == KvType::BF16)))
            test_sequence(*kernels, type, f, context, 3, 32, 32, seed++);
      // Keys wider than values, as in latent attention: one key head for all query heads.
      for (auto [dim, vdim] : {std::pair{48, 32}, std::pair{144, 80}, std::pair{576, 512}})
        for (int context : {1, 17, 149})
          if (type != KvType::I8 && (!check::quick || (dim == 48 && context == 17)))
            test_sequence(*kernels, type, {}, context, context == 17 ? 16 : 5, dim, vdim, seed++);
      std::printf("attention %s kv_write attention_merge\n", name_of(type));
    }
  }
  return check::finish();
}
