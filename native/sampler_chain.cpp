// Samplers one after another over a list of candidates, in any order: the native half of `chain` in sampling/definition.py.
#include <algorithm>
#include <cmath>
#include <limits>

#include "sampler.h"

namespace octavo {
namespace {

using Candidate = SampleScratch::Candidate;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMaxInverseTemperature = 1e30f;  // sampling.definition.MAX_INVERSE_TEMPERATURE
constexpr int kFirstPiece = 32;                  // candidates sorted first where a mass is sought; then 4 times as many

bool before(const Candidate& a, const Candidate& b) { return a.x != b.x ? a.x > b.x : a.id < b.id; }

uint32_t mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Uniform in (0, 1), of no token: sampling.definition.coin.
double coin(uint64_t key, int position) {
  const uint64_t row = noise_row(key, position);
  const uint32_t h = mix32(mix32(UINT32_MAX ^ static_cast<uint32_t>(row)) + static_cast<uint32_t>(row >> 32)) >> 1;
  return (h + 0.5) * 0x1p-31;
}

struct Chain {
  const SamplingArrays& in;
  int r;
  std::vector<Candidate>& list;  // never empty, in no order
  std::vector<int32_t>& places;

  float greatest() const {
    float most = -kInf;
    for (const Candidate& c : list) most = std::max(most, c.x);
    return most;
  }

  template <class Keep> void filter(Keep keep) {
    list.erase(std::remove_if(list.begin(), list.end(), [&](const Candidate& c) { return !keep(c); }), list.end());
  }

  void keep_best() { list.assign(1, *std::min_element(list.begin(), list.end(), before)); }

  // The weight of a candidate relative to the greatest, and what they are together.
  static double weight(const Candidate& c, float most) { return std::exp(static_cast<double>(c.x - most)); }
  double mass(float most) const {
    double sum = 0;
    for (const Candidate& c : list) sum += weight(c, most);
    return sum;
  }

  // Mean of x - most under the softmax of x: log of the mass less the entropy.
  double mean_depth(float most, double all) const {
    double sum = 0;
    for (const Candidate& c : list)
      if (const double w = weight(c, most); w > 0) sum += w * static_cast<double>(c.x - most);
    return sum / all;
  }

  template <class Change> void change(int begin, int end, const int32_t* ids, Change value) {
    for (size_t i = 0; i < list.size(); i++) places[list[i].id] = static_cast<int32_t>(i);
    for (int i = begin; i < end; i++) {
      const auto place = static_cast<size_t>(places[ids[i]]);  // left by anyone where ids[i] is no candidate
      if (place < list.size() && list[place].id == ids[i]) list[place].x = value(list[place].x, i);
    }
  }

  void temperature(float range, float exponent) {
    double t = in.temperature[r];
    const float most = greatest();
    if (range > 0 && list.size() > 1) {
      const double low = std::max(0.0, t - static_cast<double>(range)), high = t + static_cast<double>(range);
      const double all = mass(most);
      const double share = (std::log(all) - mean_depth(most, all)) / std::log(static_cast<double>(list.size()));
      t = low + (high - low) * std::pow(std::clamp(share, 0.0, 1.0), static_cast<double>(exponent));
    }
    const auto used = static_cast<float>(t);
    if (used == 0) return keep_best();
    const float inverse = std::min(1 / used, kMaxInverseTemperature);
    for (Candidate& c : list) c.x = (c.x - most) * inverse;
  }

  void top_n_sigma(float n) {
    double sum = 0, squares = 0;
    int finite = 0;
    for (const Candidate& c : list)
      if (c.x > -kInf) sum += static_cast<double>(c.x), finite++;
    const double mean = sum / finite;
    for (const Candidate& c : list)
      if (c.x > -kInf) squares += (static_cast<double>(c.x) - mean) * (static_cast<double>(c.x) - mean);
    const auto floor = static_cast<float>(static_cast<double>(greatest()) - n * std::sqrt(squares / finite));
    filter([&](const Candidate& c) { return c.x >= floor; });
  }

  void top_k(int k) {
    if (k <= 0 || static_cast<size_t>(k) >= list.size()) return;
    std::nth_element(list.begin(), list.begin() + k, list.end(), before);
    list.resize(static_cast<size_t>(k));
  }

  void min_p(float p) {
    if (!(p > 0)) return;
    const auto floor = static_cast<float>(static_cast<double>(greatest()) + std::log(static_cast<double>(p)));
    filter([&](const Candidate& c) { return c.x >= floor; });
  }

  // The fewest in the order of `less` whose mass reaches p of all. Sorts piece by piece.
  template <class Less> void keep_mass(float p, Less less) {
    const float most = greatest();
    const double wanted = static_cast<double>(p) * mass(most);
    double sum = 0;
    const size_t n = list.size();
    for (size_t start = 0, piece = kFirstPiece; start < n; start += piece, piece *= 4) {
      const size_t stop = std::min(n, start + piece);
      const auto at = list.begin();
      if (stop < n) std::nth_element(at + start, at + stop, list.end(), less);
      std::sort(at + start, at + stop, less);
      for (size_t i = start; i < stop; i++) {
        sum += weight(list[i], most);
        if (sum >= wanted) return list.resize(i + 1);
      }
    }
  }

  void typical(float p) {
    const float most = greatest();
    const double typical_depth = mean_depth(most, mass(most));
    auto distance = [&](const Candidate& c) { return std::abs(static_cast<double>(c.x - most) - typical_depth); };
    keep_mass(p, [&](const Candidate& a, const Candidate& b) {
      const double left = distance(a), right = distance(b);
      return left != right ? left < right : before(a, b);
    });
  }

  void xtc(float probability, float threshold) {
    if (coin(in.noise_key[r], in.position[r]) >= static_cast<double>(probability)) return;
    const float most = greatest();
    const double least = static_cast<double>(threshold) * mass(most);
    const Candidate* last = nullptr;
    for (const Candidate& c : list)
      if (weight(c, most) >= least && (last == nullptr || before(*last, c))) last = &c;
    if (last == nullptr) return;
    const Candidate spared = *last;
    filter([&](const Candidate& c) { return !before(c, spared); });
  }

  void apply(ChainOp op, float a, float b) {
    switch (op) {
      case ChainOp::Penalties:
        return change(in.history_starts[r], in.history_starts[r + 1], in.history_ids,
                      [&](float x, int i) { return penalized(in, r, x, in.history_counts[i]); });
      case ChainOp::Dry:
        return change(in.dry_starts[r], in.dry_starts[r + 1], in.dry_ids,
                      [&](float x, int i) { return x - in.dry_values[i]; });
      case ChainOp::Temperature: return temperature(a, b);
      case ChainOp::TopNSigma: return top_n_sigma(a);
      case ChainOp::TopK: return top_k(in.top_k[r]);
      case ChainOp::MinP: return min_p(in.min_p[r]);
      case ChainOp::Typical: return typical(a);
      case ChainOp::TopP: return in.top_p[r] < 1 ? keep_mass(in.top_p[r], before) : void();
      case ChainOp::Xtc: return xtc(a, b);
    }
  }
};

}  // namespace

int draw_by_chain(const Kernels& kernels, const SamplingArrays& in, int r, float* x, int vocab,
                  SampleScratch& scratch) {
  scratch.candidates.clear();
  for (int i = 0; i < vocab; i++)
    if (x[i] > -kInf) scratch.candidates.push_back({i, x[i]});
  Chain chain{in, r, scratch.candidates, scratch.places};
  for (int i = in.chain_starts[r]; i < in.chain_starts[r + 1]; i++)
    chain.apply(static_cast<ChainOp>(in.chain_ops[i]), in.chain_values[2 * i], in.chain_values[2 * i + 1]);
  std::fill(x, x + vocab, -kInf);
  for (const Candidate& c : scratch.candidates) x[c.id] = c.x;
  return kernels.gumbel_argmax(x, vocab, chain.greatest(), 1, in.noise_key[r], in.position[r], Cut{-kInf, vocab});
}

}  // namespace octavo
