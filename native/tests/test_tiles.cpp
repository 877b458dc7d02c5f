// The tiles as arrays (tile_model.h) against numbers in higher precision, and, where there is AMX, against the instructions.
#include "../tiles.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <vector>

#include "check.h"
#include "tile_model.h"

using namespace octavo;
using check::Guarded;
using check::Random;

namespace {

struct Shape {
  int rows, columns, words;  // of the sums; 32-bit words of a row of the left side
};
constexpr Shape kShapes[] = {{16, 16, 16}, {1, 16, 16}, {16, 1, 16}, {16, 16, 1},
                             {16, 16, 8},  {7, 5, 3},   {12, 9, 4},  {1, 1, 1}};
constexpr int64_t kStride = 72;  // bytes, more than a row has
constexpr char kBf16[] = "bf16";

// Both sides and the sums, each of 16 rows
struct Data {
  Guarded<uint8_t> left{16 * kStride}, right{16 * kStride}, sums{16 * kStride}, out{16 * kStride};
  template <class T> static T& at(Guarded<uint8_t>& of, int row, int i) {
    return reinterpret_cast<T*>(of.data() + row * kStride)[i];
  }
  template <class T, class Next> static void fill(Guarded<uint8_t>& of, Next next) {
    for (int row = 0; row < 16; row++)
      for (int i = 0; i < static_cast<int>(kStride / sizeof(T)); i++) at<T>(of, row, i) = next();
  }
};

using Product = void (*)(const Shape&, Data&);  // out = sums + left . right

// Tile 0 += tile 1 . tile 2
template <void (*kDot)(int, int, int)> void by_model(const Shape& shape, Data& d) {
  uint8_t rows[16] = {};
  uint16_t bytes[16] = {};
  const auto set = [&](int tile, int num_rows, int row_bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows), bytes[tile] = static_cast<uint16_t>(row_bytes);
  };
  set(0, shape.rows, 4 * shape.columns), set(1, shape.rows, 4 * shape.words), set(2, shape.words, 4 * shape.columns);
  tile_model::configure(rows, bytes);
  tile_model::load(0, d.sums.data(), kStride);
  tile_model::load(1, d.left.data(), kStride);
  tile_model::load(2, d.right.data(), kStride);
  kDot(0, 1, 2);
  tile_model::store(0, d.out.data(), kStride);
}

#if defined(__x86_64__) && !defined(OCTAVO_AVX512_MODEL)
template <void (*kDot)()> void by_instructions(const Shape& shape, Data& d) {
  TileShapes shapes;
  shapes.set(0, shape.rows, 4 * shape.columns).set(1, shape.rows, 4 * shape.words);
  tiles_begin(shapes.set(2, shape.words, 4 * shape.columns));
  tile_load<0>(d.sums.data(), kStride);
  tile_load<1>(d.left.data(), kStride);
  tile_load<2>(d.right.data(), kStride);
  kDot();
  tile_store<0>(d.out.data(), kStride);
  tiles_end();
}
#define BOTH(dot, ...) by_model<tile_model::__VA_ARGS__>, by_instructions<dot<0, 1, 2>>
bool has_tiles() {
  const std::vector<std::string> levels = isa_levels();
  return std::find(levels.begin(), levels.end(), "amx") != levels.end();
}
#else
#define BOTH(dot, ...) by_model<tile_model::__VA_ARGS__>, nullptr
bool has_tiles() { return false; }
#endif

float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
float of_bf16(uint16_t x) { return of_bits(uint32_t{x} << 16); }
bool same(float a, float b) { return (std::isnan(a) && std::isnan(b)) || !memcmp(&a, &b, sizeof a); }

// Runs the model, leaves its sums in d.out, and compares what the instructions leave there.
void compare(const char* name, const Shape& shape, Data& d, Product model, Product instructions) {
  memset(d.out.data(), 0xcc, d.out.size());
  if (has_tiles()) {
    instructions(shape, d);
    Guarded<uint8_t> found(d.out.size());
    memcpy(found.data(), d.out.data(), found.size());
    memset(d.out.data(), 0xcc, d.out.size());
    model(shape, d);
    for (int r = 0; r < 16; r++)
      for (int c = 0; c < static_cast<int>(kStride / 4); c++) {
        const float own = Data::at<float>(found, r, c), modelled = Data::at<float>(d.out, r, c);
        const bool number = name == kBf16 && r < shape.rows && c < shape.columns;
        check::expect(number ? same(own, modelled) : !memcmp(&own, &modelled, sizeof own),
                      "%s %d x %d x %d: row %d column %d is %a (%08x) of the processor, %a of the model", name,
                      shape.rows, shape.columns, shape.words, r, c, double(own), Data::at<uint32_t>(found, r, c),
                      double(modelled));
      }
  } else {
    model(shape, d);
  }
  CHECK(d.out.intact() && d.left.intact() && d.right.intact() && d.sums.intact());
}

template <class Left, class Right> void test_bytes(const char* name, Product model, Product instructions) {
  Random random(1);
  for (const Shape& shape : kShapes)
    for (int turn = 0; turn < 20; turn++) {
      Data d;
      const bool extreme = turn == 0;  // the greatest products
      Data::fill<uint8_t>(d.left, [&] { return uint8_t(extreme ? (Left(-1) < 0 ? 0x80 : 0xff) : random.next()); });
      Data::fill<uint8_t>(d.right, [&] { return uint8_t(extreme ? (Right(-1) < 0 ? 0x80 : 0xff) : random.next()); });
      Data::fill<int32_t>(d.sums, [&] { return int32_t(random.next()); });
      compare(name, shape, d, model, instructions);
      for (int r = 0; r < shape.rows; r++)
        for (int c = 0; c < shape.columns; c++) {
          int64_t sum = Data::at<int32_t>(d.sums, r, c);
          for (int k = 0; k < 4 * shape.words; k++)
            sum += int64_t{Data::at<Left>(d.left, r, k)} * int64_t{Data::at<Right>(d.right, k / 4, 4 * c + k % 4)};
          CHECK(int32_t(sum) == Data::at<int32_t>(d.out, r, c));
        }
    }
}

// Any bits, with exponents that are near each other so that sums round, near the ends of the range, or special values.
struct Numbers {
  Random& random;
  int lowest, highest;  // exponents as they are stored
  int special;          // one of so many, 0 for none
  uint32_t next() {
    constexpr uint32_t kSpecial[] = {0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xff810000,
                                     0x00010000, 0x807f0000, 0x00800000, 0x80800000, 0x7f7f0000, 0x3f800000};
    if (special && random.below(special) == 0) return kSpecial[random.below(12)];
    const auto exponent = uint32_t(lowest + random.below(highest - lowest + 1));
    return (uint32_t(random.next()) & 0x807fffffu) | exponent << 23;
  }
};

void test_bf16() {
  Random random(2);
  struct Range {
    int lowest, highest, sum_lowest, sum_highest, special;
  };
  constexpr Range kRanges[] = {{120, 130, 118, 140, 0}, {0, 254, 0, 254, 0}, {55, 75, 0, 8, 0}, {186, 192, 244, 254, 0},
                               {100, 150, 100, 150, 5}, {0, 3, 0, 3, 3},     {58, 64, 0, 2, 9}, {0, 255, 0, 255, 4}};
  for (const Range& range : kRanges)
    for (const Shape& shape : kShapes)
      for (int turn = 0; turn < 60; turn++) {
        Data d;
        Numbers side{random, range.lowest, range.highest, range.special}, sum = side;
        sum.lowest = range.sum_lowest, sum.highest = range.sum_highest;
        Data::fill<uint16_t>(d.left, [&] { return uint16_t(side.next() >> 16); });
        Data::fill<uint16_t>(d.right, [&] { return uint16_t(side.next() >> 16); });
        Data::fill<uint32_t>(d.sums, [&] { return turn % 4 ? sum.next() : 0; });
        compare(kBf16, shape, d, BOTH(tile_dot_bf16, dot_bf16));
        if (&range != kRanges) continue;
        for (int r = 0; r < shape.rows; r++)  // K + 2 roundings, each of a sum of no more than all magnitudes
          for (int c = 0; c < shape.columns; c++) {
            double exact = Data::at<float>(d.sums, r, c), magnitude = std::fabs(exact);
            for (int k = 0; k < 2 * shape.words; k++) {
              const double product = double(of_bf16(Data::at<uint16_t>(d.left, r, k))) *
                                     double(of_bf16(Data::at<uint16_t>(d.right, k / 2, 2 * c + k % 2)));
              exact += product, magnitude += std::fabs(product);
            }
            CHECK(std::fabs(Data::at<float>(d.out, r, c) - exact) <= (shape.words + 2) * 0x1p-24 * magnitude);
          }
      }
}

// One product and sums for which the order and kind of roundings are known.
void test_roundings() {
  const auto sum = [](float start, std::vector<std::pair<float, float>> factors) {
    Data d;
    memset(d.left.data(), 0, d.left.size()), memset(d.right.data(), 0, d.right.size());
    Data::at<float>(d.sums, 0, 0) = start;
    for (int k = 0; k < static_cast<int>(factors.size()); k++) {
      const float pair[] = {factors[size_t(k)].first, factors[size_t(k)].second};
      uint32_t bits[2];
      memcpy(bits, pair, sizeof bits);
      CHECK(!(bits[0] & 0xffff) && !(bits[1] & 0xffff));
      Data::at<uint16_t>(d.left, 0, k) = uint16_t(bits[0] >> 16);
      Data::at<uint16_t>(d.right, k / 2, k % 2) = uint16_t(bits[1] >> 16);
    }
    compare(kBf16, {1, 1, 16}, d, BOTH(tile_dot_bf16, dot_bf16));
    return Data::at<float>(d.out, 0, 0);
  };
  const float half = 0x1p-24f, below = FLT_MIN - 0x1p-149f;
  CHECK(sum(1, {{half, 1}, {half, 1}}) == 1 + 2 * half);                  // added to each other first
  CHECK(sum(0, {{1, 1}, {0, 0}, {half, 1}, {0, 0}}) == 1);                // even ones in turn, to the even neighbour
  CHECK(sum(0, {{1, 1}, {half, 1}, {0, 0}, {half, 1}}) == 1 + 2 * half);  // apart from the odd ones
  CHECK(sum(-1, {{1 + 0x1p-7f, 1 + 0x1p-7f}}) == 0x1p-6f + 0x1p-14f);
  CHECK(same(sum(below, {}), 0) && same(sum(-0.f, {}), 0));               // subnormals are read as 0; the sum is of +0
  CHECK(same(sum(0, {{0x1p-70f, 0x1p-70f}}), 0));                         // and never left
  CHECK(same(sum(0, {{FLT_MIN, 1}, {0, 0}, {-0x1p-75f, 0x1p-75f}}), 0));  // before their rounding to the least number
  CHECK(sum(FLT_MAX, {{0x1p120f, 0x1p-20f}}) == FLT_MAX && std::isinf(sum(FLT_MAX, {{0x1p120f, 0x1p-16f}})));
  CHECK(std::isnan(sum(0, {{INFINITY, 0}})) && std::isnan(sum(-INFINITY, {{INFINITY, 1}})));
}

}  // namespace

int main() {
  test_bytes<int8_t, int8_t>("s8 x s8", BOTH(tile_dot_s8_s8, dot_bytes<int8_t, int8_t>));
  test_bytes<int8_t, uint8_t>("s8 x u8", BOTH(tile_dot_s8_u8, dot_bytes<int8_t, uint8_t>));
  test_bytes<uint8_t, int8_t>("u8 x s8", BOTH(tile_dot_u8_s8, dot_bytes<uint8_t, int8_t>));
  puts("bytes");
  test_bf16();
  test_roundings();
  puts("bf16");
  puts(has_tiles() ? "the same bits as the processor's tiles" : "no tiles here to compare with");
  return check::finish();
}
