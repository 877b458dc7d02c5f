#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace octavo {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int kFewTokens = 64;                   // that are sorted rather than narrowed further
constexpr float kMaxInverseTemperature = 1e30f;  // sampling.definition.MAX_INVERSE_TEMPERATURE

// One row and its logits. The order of tokens is always logit descending, id ascending.
struct Row {
  const Kernels& kernels;
  const SamplingArrays& in;
  int r;
  float* x;
  int vocab;
  SampleScratch& scratch;

  bool before(int32_t a, int32_t b) const { return x[a] != x[b] ? x[a] > x[b] : a < b; }

  void set(int32_t id, float value) {
    scratch.saved.emplace_back(id, x[id]);
    x[id] = value;
  }

  bool has_chain() const { return in.chain_starts[r] < in.chain_starts[r + 1]; }

  // x becomes a copy in which only the tokens of the mask are left.
  void apply_mask() {
    if (in.mask_rows[r] < 0) return;
    const uint32_t* mask = in.masks + int64_t{in.mask_rows[r]} * in.mask_width;
    float* y = scratch.masked.data();
    for (int word = 0, i = 0; i < vocab; word++) {
      const uint32_t bits = word < in.mask_width ? mask[word] : 0;
      const int stop = std::min(vocab, i + 32);
      if (bits == 0) std::fill(y + i, y + stop, -kInf);
      else if (bits == UINT32_MAX) std::copy(x + i, x + stop, y + i);
      else
        for (int j = i; j < stop; j++) y[j] = bits >> (j - i) & 1 ? x[j] : -kInf;
      i = stop;
    }
    x = y;
  }

  void add_bias() {
    for (int i = in.bias_starts[r]; i < in.bias_starts[r + 1]; i++)
      set(in.bias_ids[i], x[in.bias_ids[i]] + in.bias_values[i]);
  }

  void penalize() {
    for (int i = in.history_starts[r]; i < in.history_starts[r + 1]; i++)
      set(in.history_ids[i], penalized(in, r, x[in.history_ids[i]], in.history_counts[i]));
    for (int i = in.dry_starts[r]; i < in.dry_starts[r + 1]; i++)
      set(in.dry_ids[i], x[in.dry_ids[i]] - in.dry_values[i]);
  }

  void restore() {
    for (size_t i = scratch.saved.size(); i-- > 0;) x[scratch.saved[i].first] = scratch.saved[i].second;
    scratch.saved.clear();
  }

  int count_from(float threshold) const { return kernels.count_before(x, vocab, threshold, vocab); }

  // scratch.ids = the tokens with x >= a threshold >= floor: at least `count` where there are so many, and not many more.
  // Most tokens are far below the maximum, so the threshold is sought from there.
  int collect_first(const LogitMax& top, int count, float floor) {
    float low = top.max, high = top.max, width = 1;
    int found = count_from(low);
    while (found < count && low > floor) {
      high = low;
      low = width < 1e6f ? std::max(top.max - width, floor) : floor;
      width *= 4;
      found = count_from(low);
    }
    while (found > 4 * count + 64) {
      const float middle = low + (high - low) / 2;
      if (!(low < middle && middle < high)) break;
      const int there = count_from(middle);
      if (there >= count) low = middle, found = there;
      else high = middle;
    }
    return kernels.collect(x, vocab, low, scratch.ids.data());
  }

  // The first `count` of scratch.ids[0, found) to its front, in order.
  int sort_first(int found, int count) {
    auto less = [this](int32_t a, int32_t b) { return before(a, b); };
    const auto ids = scratch.ids.begin();
    count = std::min(count, found);
    if (count < found) std::nth_element(ids, ids + count, ids + found, less);
    std::sort(ids, ids + count, less);
    return count;
  }

  double weight(int32_t id, const LogitMax& top, float inverse) const {
    return std::exp(static_cast<double>(x[id] - top.max) * static_cast<double>(inverse));
  }

  double mass_of(int found, const LogitMax& top, float inverse) const {
    double mass = 0;
    for (int i = 0; i < found; i++) mass += weight(scratch.ids[i], top, inverse);
    return mass;
  }

  // The logit of exp(-nats) times the greatest probability
  static float below(const LogitMax& top, double nats, float inverse) {
    const double lowest = std::numeric_limits<float>::lowest();
    return static_cast<float>(std::max(lowest, static_cast<double>(top.max) - nats / static_cast<double>(inverse)));
  }

  // Where top-k, min-p and top-p cut the order.
  Cut truncate(const LogitMax& top, float inverse) {
    const int top_k = in.top_k[r];
    const float min_p = in.min_p[r], top_p = in.top_p[r];
    Cut cut{-kInf, vocab};
    if (min_p > 0) cut.value = below(top, -std::log(static_cast<double>(min_p)), inverse);
    int found = -1;  // number of ids collected
    if (top_k > 0 && top_k < vocab) {
      found = collect_first(top, top_k, std::max(cut.value, std::numeric_limits<float>::lowest()));
      if (found >= top_k) {
        const auto ids = scratch.ids.begin();
        std::nth_element(ids, ids + (top_k - 1), ids + found, [this](int32_t a, int32_t b) { return before(a, b); });
        found = top_k;
        cut = {x[ids[top_k - 1]], ids[top_k - 1]};
      }
    }
    if (!(top_p < 1)) return cut;
    if (found >= 0) return cut_at_mass(found, 0, top_p * mass_of(found, top, inverse), top, inverse, cut);
    // Narrow [low, high) around the cut: what is >= high has less than the wanted mass, what is >= low has it.
    const double all = kernels.sum_exp(x, vocab, top.max, inverse, cut.value), wanted = top_p * all;
    // Tokens more than log(vocab / ((1 - p) all)) below the maximum have less than 1 - p together.
    const double enough = std::log(vocab / ((1 - static_cast<double>(top_p)) * all)) + 1;
    float low = std::max(cut.value, below(top, enough, inverse)), high = std::nextafter(top.max, kInf);
    double above = 0;
    int inside = count_from(low);  // tokens in [low, high)
    for (int before_high = 0; inside > kFewTokens;) {
      const float middle = low + (high - low) / 2;
      if (!(low < middle && middle < high)) break;
      const double mass = kernels.sum_exp(x, vocab, top.max, inverse, middle);
      const int there = count_from(middle);
      if (mass >= wanted) {
        low = middle;
        inside = there - before_high;
      } else {
        high = middle;
        inside -= there - before_high;
        before_high = there;
        above = mass;
      }
    }
    found = kernels.collect(x, vocab, low, scratch.ids.data());
    const auto ids = scratch.ids.begin();
    found = static_cast<int>(std::remove_if(ids, ids + found, [&](int32_t id) { return x[id] >= high; }) - ids);
    return cut_at_mass(found, above, wanted, top, inverse, cut);
  }

  // Sorts the front of scratch.ids piece by piece until the running sum, from `mass`, reaches `wanted`.
  Cut cut_at_mass(int found, double mass, double wanted, const LogitMax& top, float inverse, Cut otherwise) {
    auto less = [this](int32_t a, int32_t b) { return before(a, b); };
    for (int start = 0, piece = 32; start < found; start += piece, piece *= 4) {
      const auto ids = scratch.ids.begin();
      const int stop = std::min(found, start + piece);
      if (stop < found) std::nth_element(ids + start, ids + stop, ids + found, less);
      std::sort(ids + start, ids + stop, less);
      for (int i = start; i < stop; i++) {
        mass += weight(ids[i], top, inverse);
        if (mass >= wanted) return {x[ids[i]], ids[i]};
      }
    }
    return otherwise;
  }

  // -1: the row is invalid.
  int draw() {
    LogitMax top;
    kernels.logit_max(x, vocab, top);
    if (!top.valid) return -1;
    if (has_chain()) {
      if (x != scratch.masked.data()) std::copy(x, x + vocab, scratch.masked.data());
      return draw_by_chain(kernels, in, r, scratch.masked.data(), vocab, scratch);
    }
    const float inverse = inverse_temperature(in, r);
    if (inverse == 0) return top.argmax;
    return kernels.gumbel_argmax(x, vocab, top.max, inverse, in.noise_key[r], in.position[r], truncate(top, inverse));
  }

  void score(int token, const LogitMax& top, const SampledArrays& out) {
    const double log_sum = std::log(kernels.sum_exp(x, vocab, top.max, 1, -kInf));
    auto logprob = [&](int32_t id) {
      return static_cast<float>(static_cast<double>(x[id]) - static_cast<double>(top.max) - log_sum);
    };
    out.logprobs[r] = logprob(token);
    out.ranks[r] = 1 + kernels.count_before(x, vocab, x[token], token);
    const int count = std::min(in.num_top[r], vocab);
    if (count == 0) return;
    const int found = sort_first(collect_first(top, count, -kInf), count);
    for (int i = 0; i < found; i++) {
      out.top_ids[r * out.top_width + i] = scratch.ids[i];
      out.top_logprobs[r * out.top_width + i] = logprob(scratch.ids[i]);
    }
  }
};

}  // namespace

bool needs_logits(const SamplingArrays& in, int r, int vocab) {
  const auto has = [r](const int32_t* starts) { return starts[r] < starts[r + 1]; };
  if (in.num_top[r] >= 0) return true;
  if (in.target[r] >= 0) return false;
  if (has(in.bias_starts) || has(in.history_starts) || has(in.dry_starts) || has(in.chain_starts)) return true;
  const bool truncated = (in.top_k[r] > 0 && in.top_k[r] < vocab) || in.top_p[r] < 1 || in.min_p[r] > 0;
  return truncated && inverse_temperature(in, r) > 0;
}

float inverse_temperature(const SamplingArrays& in, int r) {
  const bool greedy = in.temperature[r] == 0 || in.top_k[r] == 1;
  return greedy ? 0 : std::min(1 / in.temperature[r], kMaxInverseTemperature);
}

int end_draw(const DrawRow& row, const DrawState* states, int64_t stride, int n) {
  float max = -kInf, best = -kInf;
  for (int i = 0; i < n; i++) {
    if (!states[i * stride].finite) return -1;
    max = std::max(max, states[i * stride].max);
  }
  int token = -1;
  for (int i = 0; i < n; i++)
    for (int j = 0; j < states[i * stride].count; j++) {
      const Contender& c = states[i * stride].contenders[j];
      const float z = (c.logit - max) * row.inverse_temperature;
      const float sum = row.inverse_temperature > 0 ? z + c.noise : c.logit;
      if (token < 0 || sum > best || (sum == best && c.id < token)) best = sum, token = c.id;
    }
  return token;
}

void sample_row(const Kernels& kernels, const SamplingArrays& in, int r, float* logits, int vocab,
                SampleScratch& scratch, const SampledArrays& out) {
  if (scratch.ids.size() < static_cast<size_t>(vocab)) {
    scratch.ids.resize(vocab);
    scratch.masked.resize(vocab);
    scratch.places.resize(vocab);
    scratch.candidates.reserve(vocab);
  }
  Row row{kernels, in, r, logits, vocab, scratch};
  out.token_ids[r] = -1;
  out.logprobs[r] = 0;
  out.ranks[r] = 0;
  out.invalid[r] = 0;
  const bool scored = in.num_top[r] >= 0;
  int token = in.target[r];
  LogitMax top{};
  if (token >= 0 || scored || in.mask_rows[r] >= 0) {  // what a mask hides counts, too: the definition has it so
    kernels.logit_max(logits, vocab, top);
    if (!top.valid) {
      out.invalid[r] = 1;
      return;
    }
  }
  if (token < 0) {
    row.apply_mask();
    row.add_bias();
    if (!row.has_chain()) row.penalize();
    token = row.draw();
    row.restore();
    row.x = logits;
  }
  if (token < 0) {
    out.invalid[r] = 1;
    return;
  }
  out.token_ids[r] = token;
  if (scored) row.score(token, top, out);
}

}  // namespace octavo
