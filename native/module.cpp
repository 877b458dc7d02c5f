// The Python module: the only file that knows Python. Arrays are checked for type and contiguity here, for content below.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "attn_measure.h"
#include "cpu.h"
#include "machine.h"
#include "measure.h"
#include "pack.h"
#include "peak.h"
#include "plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

template <class T, class... Shape> using In = nb::ndarray<const T, nb::c_contig, nb::device::cpu, Shape...>;
template <class T, class... Shape> using Out = nb::ndarray<T, nb::numpy, nb::c_contig, nb::device::cpu, Shape...>;

Format format_of(const std::string& name) {
  for (int i = 0; i < kFormats; i++)
    if (name == kFormatInfo[i].name) return static_cast<Format>(i);
  throw std::invalid_argument("packed format '" + name + "' is unknown");
}

Act act_of(const std::string& name) {
  const char* names[kActs] = {"f32", "bf16", "a8", "a16"};
  for (int i = 0; i < kActs; i++)
    if (name == names[i]) return static_cast<Act>(i);
  throw std::invalid_argument("activation type '" + name + "' is unknown");
}

KvType kv_type_of(const std::string& name) {
  if (name == "bf16") return KvType::BF16;
  if (name == "f32") return KvType::F32;
  if (name == "i8") return KvType::I8;
  throw std::invalid_argument("KV type '" + name + "' is unknown");
}

Scoring scoring_of(const std::string& name) {
  const char* names[kScorings] = {"softmax", "softmax_top", "sigmoid", "sparse_mixer"};
  for (int i = 0; i < kScorings; i++)
    if (name == names[i]) return static_cast<Scoring>(i);
  throw std::invalid_argument("scoring '" + name + "' is unknown");
}

// ---------------------------------------------------------------- one step

// The array itself: an implicit conversion would be a copy that is gone before the step runs.
template <class T, int Dims> In<T, nb::ndim<Dims>> array_of(nb::handle array, const char* name) {
  In<T, nb::ndim<Dims>> a;
  if (!nb::try_cast(array, a, false))
    throw std::invalid_argument(std::string(name) + " must be a contiguous array of the type in backends.base");
  return a;
}

template <class T> const T* column(nb::handle tuple, size_t index, const char* name, int64_t size) {
  const auto a = array_of<T, 1>(nb::object(tuple[index]), name);
  if (static_cast<int64_t>(a.shape(0)) != size)
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(a.shape(0)) + " entries, expected " +
                                std::to_string(size));
  return a.data();  // owned by the batch, which outlives the call
}

int length(nb::handle tuple, size_t index) { return static_cast<int>(nb::len(nb::object(tuple[index]))); }

// `batch` and its `sampling` are the named tuples of backends.base, fields in that order.
Batch batch_of(nb::handle batch) {
  Batch b{};
  b.tokens = length(batch, 0);
  b.seqs = length(batch, 3);
  b.rows = length(batch, 6);
  b.token_ids = column<int32_t>(batch, 0, "token_ids", b.tokens);
  b.positions = column<int32_t>(batch, 1, "positions", b.tokens);
  b.seq_starts = column<int32_t>(batch, 2, "seq_starts", b.seqs + 1);
  b.context_lens = column<int32_t>(batch, 3, "context_lens", b.seqs);
  for (nb::handle h : batch[4]) {
    const auto a = array_of<int32_t, 2>(h, "block_tables");
    if (static_cast<int>(a.shape(0)) != b.seqs)
      throw std::invalid_argument("block_tables must have a row per sequence");
    b.tables.push_back({a.data(), static_cast<int>(a.shape(1))});
  }
  for (nb::handle h : batch[5]) {
    const auto a = array_of<int32_t, 2>(h, "copies");
    if (a.shape(1) != 2) throw std::invalid_argument("copies must have two columns");
    b.copies.push_back({a.data(), static_cast<int>(a.shape(0))});
  }
  b.logit_rows = column<int32_t>(batch, 6, "logit_rows", b.rows);
  const nb::object s = batch[7];
  const int64_t rows = b.rows;
  SamplingArrays& in = b.sampling;
  in.temperature = column<float>(s, 0, "sampling.temperature", rows);
  in.top_k = column<int32_t>(s, 1, "sampling.top_k", rows);
  in.top_p = column<float>(s, 2, "sampling.top_p", rows);
  in.min_p = column<float>(s, 3, "sampling.min_p", rows);
  in.repetition = column<float>(s, 4, "sampling.repetition", rows);
  in.presence = column<float>(s, 5, "sampling.presence", rows);
  in.frequency = column<float>(s, 6, "sampling.frequency", rows);
  in.noise_key = column<uint64_t>(s, 7, "sampling.noise_key", rows);
  in.position = column<int32_t>(s, 8, "sampling.position", rows);
  in.num_top = column<int32_t>(s, 9, "sampling.num_top", rows);
  in.target = column<int32_t>(s, 10, "sampling.target", rows);
  b.num_bias = length(s, 12);
  in.bias_starts = column<int32_t>(s, 11, "sampling.bias_starts", rows + 1);
  in.bias_ids = column<int32_t>(s, 12, "sampling.bias_ids", b.num_bias);
  in.bias_values = column<float>(s, 13, "sampling.bias_values", b.num_bias);
  b.num_history = length(s, 15);
  in.history_starts = column<int32_t>(s, 14, "sampling.history_starts", rows + 1);
  in.history_ids = column<int32_t>(s, 15, "sampling.history_ids", b.num_history);
  in.history_counts = column<int32_t>(s, 16, "sampling.history_counts", b.num_history);
  in.mask_rows = column<int32_t>(s, 17, "sampling.mask_rows", rows);
  const auto masks = array_of<uint32_t, 2>(nb::object(s[18]), "sampling.masks");
  in.masks = masks.data();
  in.mask_width = static_cast<int>(masks.shape(1));
  b.num_masks = static_cast<int>(masks.shape(0));
  b.num_dry = length(s, 20);
  in.dry_starts = column<int32_t>(s, 19, "sampling.dry_starts", rows + 1);
  in.dry_ids = column<int32_t>(s, 20, "sampling.dry_ids", b.num_dry);
  in.dry_values = column<float>(s, 21, "sampling.dry_values", b.num_dry);
  b.num_ops = length(s, 23);
  in.chain_starts = column<int32_t>(s, 22, "sampling.chain_starts", rows + 1);
  in.chain_ops = column<int32_t>(s, 23, "sampling.chain_ops", b.num_ops);
  const auto values = array_of<float, 2>(nb::object(s[24]), "sampling.chain_values");
  if (static_cast<int>(values.shape(0)) != b.num_ops || values.shape(1) != 2)
    throw std::invalid_argument("sampling.chain_values must have two columns and a row per operation");
  in.chain_values = values.data();
  b.token_types = length(batch, 9) ? column<int32_t>(batch, 9, "token_types", b.tokens) : nullptr;
  b.adapters = length(batch, 8) ? column<int32_t>(batch, 8, "adapters", b.tokens) : nullptr;
  return b;
}

// A batch that was looked through, and the arrays that it is in: whoever holds one may change what is in them.
struct StepArrays {
  nb::object owner;
  Batch batch;
  int most_top() const {
    const int* top = batch.sampling.num_top;
    return batch.rows ? std::max(0, *std::max_element(top, top + batch.rows)) : 0;
  }
};

std::vector<std::tuple<int, double, double>> run(Program& program, const StepArrays& arrays,
                                                 Out<int32_t, nb::ndim<1>> ids, Out<float, nb::ndim<1>> logprobs,
                                                 Out<int32_t, nb::ndim<1>> ranks, Out<int32_t, nb::ndim<2>> top_ids,
                                                 Out<float, nb::ndim<2>> top_logprobs, Out<bool, nb::ndim<1>> invalid,
                                                 bool timed) {
  const Batch& b = arrays.batch;
  const auto rows = static_cast<size_t>(b.rows);
  for (size_t n :
       {ids.shape(0), logprobs.shape(0), ranks.shape(0), top_ids.shape(0), top_logprobs.shape(0), invalid.shape(0)})
    if (n != rows) throw std::invalid_argument("result arrays must have a row per logit row");
  if (top_ids.shape(1) != top_logprobs.shape(1))
    throw std::invalid_argument("top_ids and top_logprobs differ in columns");
  const SampledArrays out{ids.data(),
                          logprobs.data(),
                          ranks.data(),
                          top_ids.data(),
                          top_logprobs.data(),
                          static_cast<int>(top_ids.shape(1)),
                          reinterpret_cast<uint8_t*>(invalid.data())};
  std::vector<Span> spans;
  {
    nb::gil_scoped_release unlocked;
    program.run(b, out, timed ? &spans : nullptr);
  }
  std::vector<std::tuple<int, double, double>> result;
  for (const Span& s : spans) result.emplace_back(s.node, s.seconds, s.wait);
  return result;
}

// ---------------------------------------------------------------- packing

constexpr int kPackPanels = 8;  // of one piece of work: a few hundred kilobytes

void pack_weight(Pool& pool, Memory& memory, size_t offset, const std::string& format_name,
                 In<uint8_t, nb::ndim<2>> data, int k) {
  const Format format = format_of(format_name);
  const int n = static_cast<int>(data.shape(0));
  if (n < 1 || k < 1 || offset % kLine || offset + packed_bytes(format, n, k) > memory.bytes())
    throw std::invalid_argument("a packed weight of " + std::to_string(n) + " x " + std::to_string(k) +
                                " does not fit its place");
  if (data.shape(1) != source_row_bytes(format, k))
    throw std::invalid_argument(std::to_string(data.shape(1)) + " bytes are not a row of " + std::to_string(k) +
                                " values for " + format_name);
  const int panels = static_cast<int>(align_up(static_cast<size_t>(n), kTaskCols)) / panel_cols(format);
  const uint8_t* source = data.data();
  const size_t row_bytes = data.shape(1);
  nb::gil_scoped_release unlocked;
  const std::lock_guard lock(pool.turn());
  std::atomic<int> next{0};
  pool.run([&](int) {
    for (int p; (p = next.fetch_add(kPackPanels, std::memory_order_relaxed)) < panels;)
      pack(format, source, row_bytes, n, k, memory.data() + offset, p, std::min(p + kPackPanels, panels));
  });
}

// Rows of a packed weight as float32 [n][k], by the kernels of a level: what the products multiply with.
void unpack_weight(const std::string& isa, const Memory& memory, size_t offset, const std::string& format_name,
                   Out<float, nb::ndim<2>> out) {
  const Format format = format_of(format_name);
  const auto n = static_cast<int>(out.shape(0)), k = static_cast<int>(out.shape(1));
  if (n < 1 || k < 1 || offset % kLine || offset + packed_bytes(format, n, k) > memory.bytes())
    throw std::invalid_argument("a packed weight of " + std::to_string(n) + " x " + std::to_string(k) +
                                " does not lie at its place");
  const Weight w = packed_weight(format, n, k, memory.data() + offset);
  std::vector<int32_t> rows(static_cast<size_t>(n));
  for (int i = 0; i < n; i++) rows[static_cast<size_t>(i)] = i;
  kernels_of(isa).embed[static_cast<int>(format)](w, rows.data(), out.data(), k, 0, n);
}

void check_value(const Program& program, int value) {
  if (value < 0 || value >= static_cast<int>(program.spec().values.size()))
    throw std::invalid_argument("no such value");
}

template <class T> nb::ndarray<nb::numpy, T, nb::ndim<2>> view(T* data, int rows, int cols, nb::handle owner) {
  return nb::ndarray<nb::numpy, T, nb::ndim<2>>(data, {static_cast<size_t>(rows), static_cast<size_t>(cols)}, owner);
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("isa_levels", &isa_levels);
  m.def(
      "packed_bytes", [](const std::string& format, int n, int k) { return packed_bytes(format_of(format), n, k); },
      "format"_a, "n"_a, "k"_a);
  m.def(
      "kv_block_bytes",
      [](const std::string& type, int head_dim, int value_dim) {
        return kv_block_bytes(kv_type_of(type), head_dim, value_dim);
      },
      "kv_type"_a, "head_dim"_a, "value_dim"_a);
  m.def("unpack", &unpack_weight, "isa"_a, "memory"_a, "offset"_a, "format"_a, "out"_a.noconvert());
  m.def("pack", &pack_weight, "pool"_a, "memory"_a, "offset"_a, "format"_a, "data"_a.noconvert(), "k"_a);

  m.def("read_rate", &read_rate, "pool"_a, "memory"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("barrier_seconds", &barrier_seconds, "pool"_a, nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "peak_ops",
      [](const std::string& isa, const std::string& format, const std::string& act) {
        return peak_ops(kernels_of(isa), format_of(format), act_of(act));
      },
      "isa"_a, "format"_a, "act"_a);
  m.def(
      "product_seconds",
      [](Pool& pool, const std::string& isa, const Memory& weights, const std::string& format, const std::string& act,
         int rows, int n, int k, int copies, int repeats) {
        const Product product{format_of(format), act_of(act), rows, n, k, copies};
        const nb::gil_scoped_release unlocked;
        return product_seconds(pool, kernels_of(isa), weights, product, repeats);
      },
      "pool"_a, "isa"_a, "weights"_a, "format"_a, "act"_a, "rows"_a, "n"_a, "k"_a, "copies"_a, "repeats"_a);

  m.def(
      "attention_rate",
      [](const std::string& isa, const Memory& kv, const std::string& type, int head_dim, int group, int seqs,
         int tokens, int context, int repeats) {
        const AttnLoad load{kv_type_of(type), head_dim, group, seqs, tokens, context};
        const nb::gil_scoped_release unlocked;
        const AttnRate rate = attention_rate(kernels_of(isa), load, kv, repeats);
        return std::tuple(rate.seconds, rate.bytes, rate.flop);
      },
      "isa"_a, "kv"_a, "kv_type"_a, "head_dim"_a, "group"_a, "seqs"_a, "tokens"_a, "context"_a, "repeats"_a);

  nb::class_<Pool>(m, "Pool")
      .def(nb::init<int, const std::vector<int>&>(), "num_threads"_a, "cpus"_a)
      .def_prop_ro("num_threads", &Pool::size);

  nb::class_<Memory>(m, "Memory")
      .def(nb::init<size_t, bool>(), "num_bytes"_a, "huge_pages"_a)
      .def_static(
          "of_file",
          [](int file, size_t offset, size_t bytes) { return std::make_shared<Memory>(file, offset, bytes); }, "file"_a,
          "offset"_a, "num_bytes"_a)
      .def_prop_ro("num_bytes", &Memory::bytes)
      .def_prop_ro("touched_bytes", &Memory::touched_bytes)
      .def(
          "view",
          [](nb::handle_t<Memory> self, size_t offset, size_t bytes) {
            const Memory& memory = *nb::inst_ptr<Memory>(self);
            if (offset + bytes < offset || offset + bytes > memory.bytes())
              throw std::invalid_argument("the view leaves the memory");
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(memory.data() + offset, {bytes}, self);
          },
          "offset"_a, "num_bytes"_a);

  nb::class_<Operand>(m, "Operand")
      .def(
          "__init__", [](Operand* self, int value, int start, int cols) { new (self) Operand{value, start, cols}; },
          "value"_a, "start"_a, "cols"_a);

  nb::class_<Node>(m, "Node")
      .def(
          "__init__",
          [](Node* self, const std::string& op, int layer) {
            new (self) Node;
            self->op = op_of(op);
            self->layer = layer;
          },
          "op"_a, "layer"_a)
      .def_rw("a", &Node::a)
      .def_rw("b", &Node::b)
      .def_rw("c", &Node::c)
      .def_rw("out", &Node::out)
      .def_rw("weights", &Node::weights)
      .def_rw("vector", &Node::vector)
      .def_rw("bias", &Node::bias)
      .def_rw("centred", &Node::centred)
      .def_prop_rw(
          "act", [](const Node& n) { return static_cast<int>(n.act); },
          [](Node& n, const std::string& kind) { n.act = act_kind_of(kind); })
      .def_rw("low", &Node::low)
      .def_rw("high", &Node::high)
      .def_prop_rw(
          "ids", [](const Node& n) { return static_cast<int>(n.ids); },
          [](Node& n, const std::string& name) {
            n.ids = name == "positions"     ? Ids::Positions
                    : name == "token_types" ? Ids::TokenTypes
                    : name == "token_ids"   ? Ids::Tokens
                                            : throw std::invalid_argument("an embedding of " + name + " is unknown");
          })
      .def_rw("offset", &Node::offset)
      .def_rw("eps", &Node::eps)
      .def_rw("scale", &Node::scale)
      .def_rw("heads", &Node::heads)
      .def_rw("head_dim", &Node::head_dim)
      .def_rw("group", &Node::group)
      .def_rw("group_layer", &Node::group_layer)
      .def_rw("rope", &Node::rope)
      .def_rw("neox", &Node::neox)
      .def_rw("window", &Node::window)
      .def_rw("causal", &Node::causal)
      .def_rw("softcap", &Node::softcap)
      .def_rw("slopes", &Node::slopes)
      .def_rw("targets", &Node::targets)
      .def_rw("ins", &Node::ins)
      .def_rw("experts", &Node::experts)
      .def(
          "set_route",
          [](Node& n, int experts, int top_k, const std::string& scoring, bool normalise, float scale, float jitter,
             int groups, int top_groups, int group_best) {
            n.route = {nullptr,   0,     nullptr, nullptr, 0,          experts,   top_k, scoring_of(scoring),
                       normalise, scale, jitter,  groups,  top_groups, group_best};
          },
          "experts"_a, "top_k"_a, "scoring"_a, "normalise"_a, "scale"_a, "jitter"_a, "groups"_a, "top_groups"_a,
          "group_best"_a)
      .def(
          "set_barriers",
          [](Node& n, bool small, bool full) {
            n.barrier[0] = small;
            n.barrier[1] = full;
          },
          "small"_a, "full"_a);

  nb::class_<ProgramSpec>(m, "ProgramSpec")
      .def(
          "__init__",
          [](ProgramSpec* self, int max_tokens, int max_rows, int max_seqs, int max_model_len, int vocab,
             int small_tokens, bool poison, bool share) {
            new (self) ProgramSpec{};
            self->limits = {max_tokens, max_rows, max_seqs, max_model_len, vocab, {}};
            self->small_tokens = small_tokens;
            self->poison = poison;
            self->share = share;
          },
          "max_tokens"_a, "max_rows"_a, "max_seqs"_a, "max_model_len"_a, "vocab"_a, "small_tokens"_a, "poison"_a,
          "share"_a)
      .def(
          "add_value",
          [](ProgramSpec& s, const std::string& name, const std::string& act, bool logit_rows, int times, int cols,
             size_t small, size_t full) {
            s.values.push_back({name, act_of(act), logit_rows, cols, {small, full}, times});
            return s.values.size() - 1;
          },
          "name"_a, "act"_a, "logit_rows"_a, "times"_a, "cols"_a, "small_offset"_a, "full_offset"_a)
      .def(
          "add_weight",
          [](ProgramSpec& s, const std::string& name, std::shared_ptr<Memory> memory, size_t offset,
             const std::string& format, int n, int k) {
            s.weights.push_back({name, std::move(memory), offset, format_of(format), n, k});
            return s.weights.size() - 1;
          },
          "name"_a, "memory"_a, "offset"_a, "format"_a, "n"_a, "k"_a)
      .def(
          "add_vector",
          [](ProgramSpec& s, const std::string& name, std::shared_ptr<Memory> memory, size_t offset, int k) {
            s.weights.push_back({name, std::move(memory), offset, Format::F32, 1, k, true});
            return s.weights.size() - 1;
          },
          "name"_a, "memory"_a, "offset"_a, "k"_a)
      .def(
          "add_group",
          [](ProgramSpec& s, std::shared_ptr<Memory> memory, const std::string& type, int layers, int kv_heads,
             int head_dim, int value_dim, int num_blocks) {
            s.groups.push_back(
                {std::move(memory), kv_type_of(type), layers, kv_heads, head_dim, value_dim, num_blocks});
            s.limits.num_blocks.push_back(num_blocks);
            return s.groups.size() - 1;
          },
          "memory"_a, "kv_type"_a, "layers"_a, "kv_heads"_a, "head_dim"_a, "value_dim"_a, "num_blocks"_a)
      .def(
          "add_rope",
          [](ProgramSpec& s, std::vector<double> inv_freq, double scale) {
            s.ropes.push_back({std::move(inv_freq), scale});
            return s.ropes.size() - 1;
          },
          "inv_freq"_a, "scale"_a)
      .def(
          "set_max_adapters", [](ProgramSpec& s, int n) { s.limits.max_adapters = n; }, "n"_a)
      .def(
          "add_target",
          [](ProgramSpec& s, const std::string& name, int n, int k) {
            s.targets.push_back({name, n, k});
            return s.targets.size() - 1;
          },
          "name"_a, "n"_a, "k"_a)
      .def(
          "add_node", [](ProgramSpec& s, const Node& node) { s.nodes.push_back(node); }, "node"_a)
      .def(
          "set_arena",
          [](ProgramSpec& s, size_t small, size_t full) {
            s.arena_bytes[0] = small;
            s.arena_bytes[1] = full;
          },
          "small_bytes"_a, "full_bytes"_a);

  nb::class_<StepArrays>(m, "StepArrays")
      .def(
          "__init__",
          [](StepArrays* self, nb::object batch) {
            Batch found = batch_of(batch);
            new (self) StepArrays{std::move(batch), std::move(found)};
          },
          "batch"_a)
      .def_prop_ro("rows", [](const StepArrays& a) { return a.batch.rows; })
      .def_prop_ro("most_top", &StepArrays::most_top);

  nb::class_<Program>(m, "Program")
      .def(
          "__init__",
          [](Program* self, std::shared_ptr<Pool> pool, const std::string& isa, const ProgramSpec& spec) {
            new (self) Program(std::move(pool), kernels_of(isa), spec);
          },
          "pool"_a, "isa"_a, "spec"_a)
      .def_prop_ro("arena_bytes", &Program::arena_bytes)
      .def_prop_ro("touched_bytes", &Program::touched_bytes)
      .def_prop_ro("kv_tiles", [](const Program& p) { return std::tuple(p.kv_tiles().read, p.kv_tiles().saved); })
      .def(
          "set_adapter",
          [](Program& p, int slot, std::shared_ptr<Memory> memory,
             const std::vector<std::tuple<int, std::string, int, size_t, size_t, float>>& parts) {
            std::vector<LoraSpec> specs;
            for (const auto& [target, format, rank, a, b, scale] : parts)
              specs.push_back({target, format_of(format), rank, a, b, scale});
            p.set_adapter(slot, std::move(memory), specs);
          },
          "slot"_a, "memory"_a.none(), "parts"_a)
      .def("run", &run, "arrays"_a, "token_ids"_a.noconvert(), "logprobs"_a.noconvert(), "ranks"_a.noconvert(),
           "top_ids"_a.noconvert(), "top_logprobs"_a.noconvert(), "invalid"_a.noconvert(), "timed"_a)
      .def("logits",
           [](nb::handle_t<Program> self) {
             const Program& p = *nb::inst_ptr<Program>(self);
             if (!p.logits()) throw std::invalid_argument("the last run stored no logits, or not of every row");
             return view(p.logits(), p.logit_rows(), p.spec().limits.vocab, self);
           })
      .def(
          "value_rows",
          [](const Program& p, int value) {
            check_value(p, value);
            return p.value_rows(value);
          },
          "value"_a)
      .def(
          "read",
          [](const Program& p, int value, Out<double, nb::ndim<2>> out) {
            check_value(p, value);
            if (static_cast<int>(out.shape(0)) != p.value_rows(value) ||
                static_cast<int>(out.shape(1)) != p.spec().values[static_cast<size_t>(value)].cols)
              throw std::invalid_argument("the last run left another shape");
            p.read(value, out.data());
          },
          "value"_a, "out"_a.noconvert());
}

}  // namespace octavo
