// Reserved memory is zero, aligned, and takes only what is touched; that of a file is its bytes.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <system_error>
#include <vector>

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

// Small pages that become huge ones keep what is in them; where the system has none, nothing happens.
void test_small_pages_become_huge() {
  const size_t bytes = 3 * kHugePage;
  Memory memory(bytes, false);
  CHECK(reinterpret_cast<size_t>(memory.data()) % kHugePage == 0);
  for (size_t i = 0; i < bytes; i += 64) memory.data()[i] = static_cast<uint8_t>(i >> 6);
  memory.make_huge(kHugePage, kHugePage);
  for (size_t i = 0; i < bytes; i++) CHECK(memory.data()[i] == (i % 64 ? 0 : static_cast<uint8_t>(i >> 6)));
  CHECK(memory.touched_bytes() == bytes);
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

// Written to, it differs from the file, which stays what it was.
void test_file() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), bytes = 3 * page + 5;
  char path[] = "/tmp/test_memory_XXXXXX";
  const int file = mkstemp(path);
  unlink(path);
  std::vector<uint8_t> content(page + bytes);
  for (size_t i = 0; i < content.size(); i++) content[i] = static_cast<uint8_t>(i * 31 >> 3);
  CHECK(write(file, content.data(), content.size()) == static_cast<ssize_t>(content.size()));
  Memory memory(file, page, bytes), other(file, page, bytes);
  CHECK(memory.bytes() == bytes && reinterpret_cast<size_t>(memory.data()) % (size_t{2} << 20) == 0);
  CHECK(memcmp(memory.data(), content.data() + page, bytes) == 0);
  memory.data()[7]++;
  uint8_t stored;
  CHECK(pread(file, &stored, 1, static_cast<off_t>(page + 7)) == 1 && stored == content[page + 7]);
  CHECK(other.data()[7] == stored && memory.data()[7] != stored);
  int refused = 0;
  for (const auto& [descriptor, offset] : {std::pair{file, size_t{5}}, {-1, page}}) try {
      Memory none(descriptor, offset, bytes);
    } catch (const std::system_error&) { refused++; }
  CHECK(refused == 2);
  close(file);
  CHECK(memcmp(other.data(), content.data() + page, bytes) == 0);
}

}  // namespace

int main() {
  test_reserve();
  puts("reserve");
  test_huge_pages();
  test_small_pages_become_huge();
  puts("huge pages");
  test_refused();
  puts("refusal");
  test_file();
  puts("file");
  return check::finish();
}
