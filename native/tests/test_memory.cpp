// Reserved memory is zero, aligned, and takes only what is touched.
#include <new>
#include <string>

#include "check.h"
#include "memory.h"

using namespace octavo;

namespace {

void test_reserve() {
  const size_t bytes = size_t{1} << 34;  // more than most machines have free
  Memory memory(bytes, false);
  CHECK(memory.bytes() == bytes && reinterpret_cast<size_t>(memory.data()) % 4096 == 0);
  CHECK(memory.touched_bytes() == 0);
  for (size_t at : {size_t{0}, bytes / 2, bytes - 1}) {
    CHECK(memory.data()[at] == 0);
    memory.data()[at] = 1;
  }
  CHECK(memory.touched_bytes() > 0 && memory.touched_bytes() <= 3 * size_t{65536});
}

void test_huge_pages() {
  for (size_t bytes : {size_t{1}, size_t{4097}, (size_t{2} << 20) + 1, size_t{5} << 20}) {
    Memory memory(bytes, true);
    CHECK(reinterpret_cast<size_t>(memory.data()) % (size_t{2} << 20) == 0);
    memset(memory.data(), 7, bytes);
    CHECK(memory.touched_bytes() >= bytes);
  }
}

void test_refused() {
  for (size_t bytes : {size_t{1} << 60, ~size_t{0}}) {
    std::string text;
    try {
      Memory memory(bytes, true);
    } catch (const std::bad_alloc& e) { text = e.what(); }
    CHECK(text.find("refuses to reserve " + std::to_string(bytes) + " bytes") != std::string::npos);
  }
}

}  // namespace

int main() {
  test_reserve();
  puts("reserve");
  test_huge_pages();
  puts("huge pages");
  test_refused();
  puts("refusal");
  return check::finish();
}
