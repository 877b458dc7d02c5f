#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace octavo {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
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

  void penalize() {
    for (int i = in.bias_starts[r]; i < in.bias_starts[r + 1]; i++)
      set(in.bias_ids[i], x[in.bias_ids[i]] + in.bias_values[i]);
    const float repetition = in.repetition[r];
    for (int i = in.history_starts[r]; i < in.history_starts[r + 1]; i++) {
      float y = x[in.history_ids[i]];
      y = y > 0 ? y / repetition : y * repetition;
      if (in.history_counts[i] > 0) {
        y -= in.presence[r];
        y -= in.frequency[r] * static_cast<float>(in.history_counts[i]);
      }
      set(in.history_ids[i], y);
    }
  }

  void restore() {
    for (size_t i = scratch.saved.size(); i-- > 0;) x[scratch.saved[i].first] = scratch.saved[i].second;
    scratch.saved.clear();
  }

  // scratch.ids = the first tokens of the order, at least `count` of those with x >= floor where there are so many;
  // at most a few times more. Widens a window below the maximum, since few tokens are near it.
  int collect_first(const LogitMax& top, int count, float floor) {
    for (float width = 4;; width *= 2) {
      const float threshold = width < 1e6f ? std::max(top.max - width, floor) : floor;
      const int found = kernels.collect(x, vocab, threshold, scratch.ids.data());
      if (found >= count || !(threshold > floor)) return found;
    }
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

  // Where top-k, min-p and top-p cut the order.
  Cut truncate(const LogitMax& top, float inverse) {
    const int top_k = in.top_k[r];
    const float min_p = in.min_p[r], top_p = in.top_p[r];
    Cut cut{-kInf, vocab};
    if (min_p > 0)
      cut.value = static_cast<float>(static_cast<double>(top.max) +
                                     std::log(static_cast<double>(min_p)) / static_cast<double>(inverse));
    int found = -1;  // number of ids collected
    if (top_k > 0 && top_k < vocab) {
      found = collect_first(top, top_k, std::max(cut.value, std::numeric_limits<float>::lowest()));
      if (found > top_k) {
        const auto ids = scratch.ids.begin();
        std::nth_element(ids, ids + (top_k - 1), ids + found, [this](int32_t a, int32_t b) { return before(a, b); });
        found = top_k;
        cut = {x[ids[top_k - 1]], ids[top_k - 1]};
      }
    }
    if (!(top_p < 1)) return cut;
    double wanted;
    if (found >= 0 || min_p > 0) {  // a share of the kept
      if (found < 0) found = kernels.collect(x, vocab, cut.value, scratch.ids.data());
      wanted = static_cast<double>(top_p) * mass_of(found, top, inverse);
    } else {
      const double all = kernels.sum_exp(x, vocab, top.max, inverse);
      wanted = static_cast<double>(top_p) * all;
      // Tokens more than log(vocab / ((1 - p) all)) below the maximum have less than 1 - p together.
      const double enough = std::log(vocab / ((1 - static_cast<double>(top_p)) * all)) + 1;
      found =
          kernels.collect(x, vocab, static_cast<float>(top.max - std::min(6.0, enough) / inverse), scratch.ids.data());
      if (enough > 6 && mass_of(found, top, inverse) < wanted) {
        const float lowest = std::numeric_limits<float>::lowest();
        found = kernels.collect(x, vocab, std::max(lowest, static_cast<float>(top.max - enough / inverse)),
                                scratch.ids.data());
      }
    }
    return cut_at_mass(found, wanted, top, inverse, cut);
  }

  // Sorts the front of scratch.ids piece by piece until the running sum reaches `wanted`.
  Cut cut_at_mass(int found, double wanted, const LogitMax& top, float inverse, Cut otherwise) {
    double mass = 0;
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
    const float temperature = in.temperature[r];
    if (temperature == 0 || in.top_k[r] == 1) return top.argmax;
    const float inverse = std::min(1 / temperature, kMaxInverseTemperature);
    return kernels.gumbel_argmax(x, vocab, top.max, inverse, in.noise_key[r], in.position[r], truncate(top, inverse));
  }

  void score(int token, const LogitMax& top, const SampledArrays& out) {
    const double log_sum = std::log(kernels.sum_exp(x, vocab, top.max, 1));
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

void sample_row(const Kernels& kernels, const SamplingArrays& in, int r, float* logits, int vocab,
                SampleScratch& scratch, const SampledArrays& out) {
  if (scratch.ids.size() < static_cast<size_t>(vocab)) scratch.ids.resize(vocab);
  Row row{kernels, in, r, logits, vocab, scratch};
  out.token_ids[r] = -1;
  out.logprobs[r] = 0;
  out.ranks[r] = 0;
  out.invalid[r] = 0;
  const bool scored = in.num_top[r] >= 0;
  int token = in.target[r];
  LogitMax top{};
  if (token >= 0 || scored) {
    kernels.logit_max(logits, vocab, top);
    if (!top.valid) {
      out.invalid[r] = 1;
      return;
    }
  }
  if (token < 0) {
    row.penalize();
    token = row.draw();
    row.restore();
  }
  if (token < 0) {
    out.invalid[r] = 1;
    return;
  }
  out.token_ids[r] = token;
  if (scored) row.score(token, top, out);
}

}  // namespace octavo
