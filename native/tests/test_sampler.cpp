// The sampling kernels and sample_row against a scalar float64 form of sampling/definition.py. --isa NAME: one level.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "check.h"
#include "sampler.h"

using namespace octavo;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kEps = 0x1p-24;  // unit roundoff of float32

uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
uint32_t mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}
uint32_t noise_bits(uint64_t key, int position, int id) {
  const uint64_t row = mix64(key + (static_cast<uint64_t>(position) + 1) * 0x9E3779B97F4A7C15u);
  return mix32(mix32(static_cast<uint32_t>(id) ^ static_cast<uint32_t>(row)) + static_cast<uint32_t>(row >> 32)) >> 1;
}
double gumbel(uint64_t key, int position, int id) {
  return -std::log(-std::log1p(-(noise_bits(key, position, id) + 0.5) * 0x1p-31));
}

std::vector<float> random_logits(int n, double sigma, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal(0, sigma);
  std::vector<float> x(n);
  for (float& v : x) v = static_cast<float>(normal(rng));
  return x;
}

const int kSizes[] = {1, 7, 15, 16, 17, 31, 33, 255, 257, 4099, 49152};
std::span<const int> sizes() { return std::span(kSizes).first(check::brief ? 9 : std::size(kSizes)); }
int some(int count) { return check::brief ? count / 10 : count; }

void test_passes(const Kernels& k) {
  for (int n : sizes()) {
    std::vector<float> x = random_logits(n, 3, n);
    for (int i = 0; i < n; i += 5) x[i] = std::round(x[i]);  // ties
    if (n > 20) x[7] = x[19] = -kInf;
    LogitMax top;
    k.logit_max(x.data(), n, top);
    const int best = static_cast<int>(std::max_element(x.begin(), x.end()) - x.begin());
    CHECK(top.valid && top.max == x[best] && top.argmax == best);
    for (float inverse : {1.f, 0.37f, 1e30f})
      for (float floor : {-kInf, 0.f, x[best]}) {
        double sum = 0;
        for (float v : x) sum += v >= floor ? std::exp((static_cast<double>(v) - top.max) * inverse) : 0;
        // A term: two roundings of its exponent, at most 104 where it counts, and exp2; 16 + 4 float32 additions.
        const double got = k.sum_exp(x.data(), n, top.max, inverse, floor);
        CHECK(std::abs(got - sum) <= sum * kEps * (2 * 104 + 4 + 20));
      }
    std::vector<int32_t> ids(n + 1, -7), wanted;
    for (float t : {-kInf, -1.f, 0.f, x[best], kInf}) {
      wanted.clear();
      for (int i = 0; i < n; i++)
        if (x[i] >= t) wanted.push_back(i);
      const int found = k.collect(x.data(), n, t, ids.data());
      CHECK(std::vector<int32_t>(ids.begin(), ids.begin() + found) == wanted && ids[n] == -7);
    }
    for (int id : {0, n / 2, n - 1}) {
      int before = 0;
      for (int i = 0; i < n; i++) before += x[i] > x[id] || (x[i] == x[id] && i < id);
      CHECK(k.count_before(x.data(), n, x[id], id) == before);
    }
    for (float bad : {std::nanf(""), kInf}) {
      std::vector<float> y = x;
      y[n / 2] = bad;
      k.logit_max(y.data(), n, top);
      CHECK(!top.valid);
    }
    std::vector<float> none(n, -kInf);
    k.logit_max(none.data(), n, top);
    CHECK(!top.valid);
  }
  std::printf("logit_max sum_exp collect count_before\n");
}

// The perturbed sums of the kept; the best, and how far the second is behind in units of what float32 may lose.
struct Expected {
  int token;
  bool clear;
};
Expected expected_draw(const std::vector<float>& x, float max, float inverse, uint64_t key, int position, Cut cut) {
  double best = -INFINITY, second = -INFINITY;
  int token = -1;
  for (int i = 0; i < static_cast<int>(x.size()); i++) {
    if (!(x[i] > cut.value || (x[i] == cut.value && i <= cut.id))) continue;
    const double s = static_cast<double>((x[i] - max) * inverse) + gumbel(key, position, i);
    if (s > best) second = best, best = s, token = i;
    else if (s > second) second = s;
  }
  // z <= 0, noise <= 22.2: the sum of two near the best loses a unit; log and log1p 4 units each, u 1.
  const double tolerance = 2 * kEps * (std::abs(best) + 22.2 + 12);
  return {token, best - second > tolerance};
}

void test_draw(const Kernels& k) {
  // The same numbers are in tests/test_sampling.py.
  const uint64_t golden = 12274428000360223401u;
  CHECK(noise_bits(0, 0, 0) == 2102044300 && noise_bits(0, 0, 1) == 299490486 && noise_bits(0, 0, 49151) == 814782582);
  CHECK(noise_bits(golden, 7, 0) == 1035484563 && noise_bits(golden, 7, 1) == 1695044734 &&
        noise_bits(golden, 7, 49151) == 2000135309);
  CHECK(noise_bits(~uint64_t{0}, 0x7fffffff, 1 << 18) == 933647129);
  int clear = 0, all = 0;
  for (int n : sizes())
    for (uint64_t key = 0; key < uint64_t(some(20)); key++) {
      const std::vector<float> x = random_logits(n, key % 2 ? 3 : 0.01, n * 100 + key);
      const float max = *std::max_element(x.begin(), x.end());
      for (float inverse : {1.f, 0.5f, 20.f})
        for (Cut cut : {Cut{-kInf, n}, Cut{0.5f * max, n}, Cut{x[n / 2], n / 2}}) {
          const Expected e = expected_draw(x, max, inverse, mix64(key), 1000 + n, cut);
          const int token = k.gumbel_argmax(x.data(), n, max, inverse, mix64(key), 1000 + n, cut);
          CHECK(!e.clear || token == e.token);
          all++, clear += e.clear;
        }
    }
  CHECK(clear > 0.98 * all);
  const float one[] = {1.f};
  CHECK(k.gumbel_argmax(one, 1, 1, 1, 5, 0, Cut{2, 1}) == -1);
  // Draws of three equal tokens and one of half their probability: within 5 standard deviations.
  const float x[] = {0, 0, -std::log(2.f), 0};
  int counts[4] = {}, draws = some(40000);
  for (int i = 0; i < draws; i++) counts[k.gumbel_argmax(x, 4, 0, 1, mix64(i / 200), i % 200, Cut{-kInf, 4})]++;
  for (int i = 0; i < 4; i++) {
    const double p = i == 2 ? 1 / 7. : 2 / 7.;
    CHECK(std::abs(counts[i] - draws * p) < 5 * std::sqrt(draws * p * (1 - p)));
  }
  std::printf("gumbel_argmax\n");
}

struct Settings {
  float temperature = 1, top_p = 1, min_p = 0, repetition = 1, presence = 0, frequency = 0;
  int top_k = 0, num_top = 5, target = -1;
  std::vector<std::pair<int, float>> bias;
  std::vector<std::pair<int, int>> history;
  std::vector<uint32_t> mask;  // none where empty
  std::vector<std::pair<int, float>> dry;
  std::vector<ChainOp> chain;
  float chain_values[2] = {};  // of all of them
};

struct Result {
  int token, rank, invalid;
  float logprob;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
};

Result run(const Kernels& k, std::vector<float>& x, const Settings& s, uint64_t key, int position) {
  std::vector<int32_t> bias_ids, history_ids, history_counts;
  std::vector<float> bias_values;
  for (auto [id, v] : s.bias) bias_ids.push_back(id), bias_values.push_back(v);
  for (auto [id, c] : s.history) history_ids.push_back(id), history_counts.push_back(c);
  const int32_t bias_starts[] = {0, static_cast<int32_t>(s.bias.size())},
                history_starts[] = {0, static_cast<int32_t>(s.history.size())};
  const int32_t mask_row = s.mask.empty() ? -1 : 0;
  std::vector<int32_t> dry_ids, chain_ops;
  std::vector<float> dry_values, chain_values;
  for (auto [id, v] : s.dry) dry_ids.push_back(id), dry_values.push_back(v);
  for (ChainOp op : s.chain) {
    chain_ops.push_back(static_cast<int32_t>(op));
    chain_values.insert(chain_values.end(), s.chain_values, s.chain_values + 2);
  }
  const int32_t dry_starts[] = {0, static_cast<int32_t>(s.dry.size())},
                chain_starts[] = {0, static_cast<int32_t>(s.chain.size())};
  const SamplingArrays in{&s.temperature,
                          &s.top_k,
                          &s.top_p,
                          &s.min_p,
                          &s.repetition,
                          &s.presence,
                          &s.frequency,
                          &key,
                          &position,
                          &s.num_top,
                          &s.target,
                          bias_starts,
                          bias_ids.data(),
                          bias_values.data(),
                          history_starts,
                          history_ids.data(),
                          history_counts.data(),
                          &mask_row,
                          s.mask.data(),
                          static_cast<int>(s.mask.size()),
                          dry_starts,
                          dry_ids.data(),
                          dry_values.data(),
                          chain_starts,
                          chain_ops.data(),
                          chain_values.data()};
  const int width = std::max(0, s.num_top);
  Result out{0, 0, 0, 0, std::vector<int32_t>(width + 1, -7), std::vector<float>(width + 1, -7)};
  uint8_t invalid = 9;
  SampleScratch scratch;
  const std::vector<float> before = x;
  sample_row(k, in, 0, x.data(), static_cast<int>(x.size()), scratch,
             {&out.token, &out.logprob, &out.rank, out.top_ids.data(), out.top_logprobs.data(), width, &invalid});
  CHECK(std::equal(x.begin(), x.end(), before.begin(), [](float a, float b) { return a == b || (a != a && b != b); }));
  CHECK(out.top_ids[width] == -7 && out.top_logprobs[width] == -7);
  out.invalid = invalid;
  return out;
}

// What the settings keep, best first; `edge`: the mass is so near top_p that rounding decides.
std::vector<int> expected_kept(const std::vector<float>& x, const Settings& s, bool& edge) {
  std::vector<int> ids;
  for (int i = 0; i < static_cast<int>(x.size()); i++)
    if (x[i] > -kInf) ids.push_back(i);
  std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return x[a] > x[b]; });
  const float inverse = std::min(1 / s.temperature, 1e30f);
  if (s.top_k > 0 && s.top_k < static_cast<int>(ids.size())) ids.resize(s.top_k);
  if (s.min_p > 0) {
    const float floor = static_cast<float>(static_cast<double>(x[ids[0]]) +
                                           std::log(static_cast<double>(s.min_p)) / static_cast<double>(inverse));
    while (x[ids.back()] < floor) ids.pop_back();
  }
  edge = false;
  if (s.top_p < 1) {
    auto weight = [&](int id) { return std::exp(static_cast<double>(x[id] - x[ids[0]]) * inverse); };
    double all = 0, mass = 0;
    for (int id : ids) all += weight(id);
    size_t n = 0;
    while (n < ids.size()) {
      mass += weight(ids[n++]);
      edge |= std::abs(mass / all - s.top_p) < 1e-5;
      if (mass >= s.top_p * all) break;
    }
    ids.resize(n);
  }
  return ids;
}

void test_truncation(const Kernels& k) {
  int checked = 0;
  std::mt19937 rng(5);
  auto pick = [&](auto... v) {
    const double options[] = {static_cast<double>(v)...};
    return options[rng() % sizeof...(v)];
  };
  for (int round = 0; round < some(400); round++) {
    const int n = sizes()[rng() % (sizes().size() - (round % 8 ? 1 : 0))];
    std::vector<float> x = random_logits(n, pick(0.001, 1, 3, 8), round);
    if (round % 3 == 0)
      for (float& v : x) v = std::round(v * 2) / 2;
    Settings s;
    s.temperature = static_cast<float>(pick(0.3, 1, 1.7, 1e-6));
    s.top_k = static_cast<int>(pick(0, 2, 5, 50, 1000));
    s.top_p = static_cast<float>(pick(1, 0.1, 0.5, 0.9, 0.999));
    s.min_p = static_cast<float>(pick(0, 0, 0.05, 0.5, 1));
    bool edge;
    const std::vector<int> kept = expected_kept(x, s, edge);
    if (edge) continue;
    const Cut cut{x[kept.back()], kept.back()};
    const float max = x[kept[0]], inverse = std::min(1 / s.temperature, 1e30f);
    for (uint64_t key = 1; key <= 4; key++) {
      const Expected e = expected_draw(x, max, inverse, key, round, cut);
      const Result r = run(k, x, s, key, round);
      CHECK(!r.invalid && (!e.clear || r.token == e.token));
      checked += e.clear;
    }
  }
  CHECK(checked > some(1000));
  std::printf("truncation\n");
}

void test_rows(const Kernels& k) {
  std::vector<float> x = random_logits(4099, 3, 11);
  x[100] = x[2000] = *std::max_element(x.begin(), x.end()) + 1;  // two best
  double sum = 0;
  for (float v : x) sum += std::exp(static_cast<double>(v) - x[100]);
  auto logprob = [&](int id) { return static_cast<double>(x[id]) - x[100] - std::log(sum); };
  const double tolerance = kEps * (4 * 104 + 20 + 20);
  Settings greedy;
  greedy.temperature = 0;
  greedy.top_p = 0.3f;
  Result r = run(k, x, greedy, 1, 1);
  CHECK(r.token == 100 && r.rank == 1 && !r.invalid);
  CHECK(std::abs(r.logprob - logprob(100)) < tolerance);
  std::vector<int> ids(4099);
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return x[a] > x[b]; });
  for (int i = 0; i < 5; i++) {
    CHECK(r.top_ids[i] == ids[i]);
    CHECK(std::abs(r.top_logprobs[i] - logprob(ids[i])) < tolerance);
  }
  Settings first = greedy;
  first.temperature = 1.5f;
  first.top_k = 1;
  CHECK(run(k, x, first, 3, 4).token == 100);

  Settings biased = greedy;
  biased.bias = {{2000, 0.5f}};
  r = run(k, x, biased, 1, 1);
  CHECK(r.token == 2000 && r.rank == 2);  // scores are of the unmodified logits
  CHECK(std::abs(r.logprob - logprob(2000)) < tolerance);
  biased.bias = {{100, -kInf}, {2000, -kInf}};
  CHECK(run(k, x, biased, 1, 1).token == ids[2]);

  Settings penalized = greedy;
  penalized.history = {{100, 0}, {2000, 2}};
  penalized.frequency = 0.25f;
  CHECK(run(k, x, penalized, 1, 1).token == 100);  // 100 was only in the prompt
  penalized.repetition = 10;
  CHECK(run(k, x, penalized, 1, 1).token == ids[2]);
  std::vector<float> low = {-1, -2, -3};
  penalized.history = {{0, 1}};
  penalized.frequency = 0;
  penalized.repetition = 2.5f;  // below zero it multiplies: -2.5
  penalized.num_top = 3;
  CHECK(run(k, low, penalized, 1, 1).token == 1);
  penalized.repetition = 1;
  penalized.presence = 1.5f;
  CHECK(run(k, low, penalized, 1, 1).token == 1);

  Settings scored;
  scored.target = 4098;
  r = run(k, x, scored, 1, 1);
  CHECK(r.token == 4098 && std::abs(r.logprob - logprob(4098)) < tolerance);
  CHECK(r.rank == 1 + static_cast<int>(std::find(ids.begin(), ids.end(), 4098) - ids.begin()));
  Settings silent = greedy;
  silent.num_top = -1;
  r = run(k, x, silent, 1, 1);
  CHECK(r.token == 100 && r.logprob == 0 && r.rank == 0);
  Settings many = greedy;
  many.num_top = 32;
  std::vector<float> few = {1, 3, 2};
  r = run(k, few, many, 1, 1);
  CHECK(r.top_ids[0] == 1 && r.top_ids[1] == 2 && r.top_ids[2] == 0 && r.top_ids[3] == -7);

  for (const Settings& s : {greedy, first, Settings{}, scored, silent}) {
    std::vector<float> bad = x;
    bad[17] = std::nanf("");
    CHECK(run(k, bad, s, 1, 1).invalid && run(k, bad, s, 1, 1).token == -1);
  }
  Settings masked = greedy;
  for (int i = 0; i < 3; i++) masked.bias.emplace_back(i, -kInf);
  masked.num_top = 2;
  CHECK(run(k, few, masked, 1, 1).invalid);
  std::printf("sample_row\n");
}

// What every sampler keeps is held against the definition in tests/test_samplers.py; here: masks, and odd sizes.
void test_masks_and_chains(const Kernels& k) {
  for (int n : sizes()) {
    std::vector<float> x = random_logits(n, 3, n + 7);
    Settings s;
    s.temperature = 0;
    s.num_top = -1;
    s.mask.assign(static_cast<size_t>(n + 31) / 32, UINT32_MAX);  // bits past the vocabulary mean nothing
    const int best = static_cast<int>(std::max_element(x.begin(), x.end()) - x.begin());
    CHECK(run(k, x, s, 1, 1).token == best);
    s.mask.assign(s.mask.size(), 0);
    s.mask[static_cast<size_t>(n - 1) / 32] = 1u << (n - 1) % 32;
    CHECK(run(k, x, s, 1, 1).token == n - 1);
    if (n > 32) {
      s.mask.resize(1);
      s.mask[0] = 1u << 31;
      CHECK(run(k, x, s, 1, 1).token == 31);
      s.mask[0] = 0;
      CHECK(run(k, x, s, 1, 1).invalid);
    }
    Settings dry;
    dry.temperature = 0;
    dry.dry = {{best, 1e30f}};
    if (n > 1) CHECK(run(k, x, dry, 1, 1).token != best);
    for (int op = 0; op < kChainOps; op++) {  // neutral, they change no draw
      Settings chained;
      chained.num_top = -1;
      chained.chain = {static_cast<ChainOp>(op)};
      chained.chain_values[0] = static_cast<ChainOp>(op) == ChainOp::TopNSigma ? 1e6f
                                : static_cast<ChainOp>(op) == ChainOp::Typical ? 2.f
                                                                               : 0.f;
      CHECK(run(k, x, chained, 9, n).token == run(k, x, Settings{}, 9, n).token);
      chained.bias = {{best, -kInf}};
      CHECK(n == 1 ? run(k, x, chained, 9, n).invalid == 1 : run(k, x, chained, 9, n).token != best);
    }
  }
  std::printf("masks and chains\n");
}

// Draws from pieces of rows, by several workers, against sample_row of whole rows.
void test_pieces(const Kernels& k) {
  check::Random rng(77);
  int invalid = 0, masked = 0, noisy = 0;
  for (int round = 0; round < some(300); round++) {
    const int n = sizes()[size_t(rng.below(int(sizes().size()) - (round % 20 ? 1 : 0)))];
    std::vector<float> x = random_logits(n, round % 3 ? 3 : 0.01, round + 1000);
    const float odd[] = {std::nanf(""), kInf, -kInf};
    if (round % 4 == 0)
      for (float& v : x) v = std::round(v);  // ties
    if (round % 7 == 0)
      for (float& v : x) v = rng.below(2) ? -kInf : v;
    if (round % 5 == 0) x[static_cast<size_t>(rng.below(n))] = odd[rng.below(3)];
    if (round % 50 == 0) std::fill(x.begin(), x.end(), round % 100 ? 0.f : -kInf);
    Settings s;
    const float temperatures[] = {0, 1, 0.3f, 2, 1e-6f, 1e-35f, 1e30f};
    s.temperature = temperatures[rng.below(7)];
    s.top_k = rng.below(8) ? 0 : 1;
    s.num_top = -1;
    if (rng.below(3) == 0) {
      s.mask.resize(static_cast<size_t>(1 + rng.below((n + 31) / 32)));
      for (uint32_t& word : s.mask) word = rng.below(4) ? static_cast<uint32_t>(rng.next() & rng.next()) : 0;
      if (rng.below(3) == 0) std::fill(s.mask.begin(), s.mask.end(), UINT32_MAX);
    }
    const uint64_t key = rng.next();
    const float inverse = s.temperature == 0 || s.top_k == 1 ? 0 : std::min(1 / s.temperature, 1e30f);
    const DrawRow row{nullptr, inverse, noise_row(key, round), s.mask.empty() ? nullptr : s.mask.data(),
                      static_cast<int>(s.mask.size())};
    const Result whole = run(k, x, s, key, round);
    for (int workers : {1, 3}) {
      DrawState states[3];
      for (int first = 0, piece; first < n; first += piece) {  // a state sees pieces in ascending order
        piece = 32 * (1 + rng.below(8));
        const int cols = std::min(piece, n - first);
        check::Guarded<float> y(static_cast<size_t>(cols));
        std::copy_n(x.begin() + first, cols, y.data());
        k.draw({&row, states + rng.below(workers), y.data(), cols, first, cols}, 0, 1);
      }
      const int token = end_draw(row, states, 1, workers);
      CHECK(token == whole.token && (token < 0) == (whole.invalid != 0));
    }
    invalid += whole.invalid, masked += !s.mask.empty(), noisy += inverse > 0;
  }
  CHECK(invalid > some(20) && masked > some(50) && noisy > some(100));
  // Rows whose logits are wanted keep them, and no others.
  const std::vector<float> x = random_logits(2 * 64, 3, 1);
  check::Guarded<float> kept(100);
  const DrawRow rows[] = {{kept.data(), 1, 1, nullptr, 0}, {nullptr, 1, 1, nullptr, 0}};
  DrawState states[2];
  k.draw({rows, states, x.data(), 64, 32, 60}, 0, 2);
  CHECK(std::equal(x.begin(), x.begin() + 60, kept.data() + 32) && kept.intact() && std::isnan(kept[31]));
  CHECK(std::isnan(kept[92]) && states[0].count == 0 && states[1].count > 0);
  std::printf("draw\n");
}

}  // namespace

int main(int argc, char** argv) {
  for (const Kernels* k : check::levels(argc, argv)) {
    std::printf("level %s\n", k->name);
    test_passes(*k);
    test_draw(*k);
    test_truncation(*k);
    test_rows(*k);
    test_masks_and_chains(*k);
    test_pieces(*k);
  }
  return check::finish();
}
