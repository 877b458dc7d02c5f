#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace octavo {

namespace {

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

class Refused : public std::bad_alloc {
 public:
  explicit Refused(size_t bytes)
      : text_("the system refuses to reserve " + std::to_string(bytes) +
              " bytes of address space; ulimit -v or vm.overcommit_memory may be the cause") {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// Bytes that are mapped. AddressSanitizer is told that those behind `bytes`, then a page at least, must not be touched.
size_t pages_of(size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
#ifdef __SANITIZE_ADDRESS__
  bytes += page;
#endif
  return align_up(std::max<size_t>(bytes, 1), page);
}

// Address space of pages_of(bytes), from an address on that huge pages can begin at.
uint8_t* reserve(size_t bytes, int protection, bool aligned) {
  const size_t size = pages_of(bytes);
  const size_t slack = aligned ? kHugePage : 0;
  if (size < bytes || size + slack < size) throw Refused(bytes);  // more than there are addresses
  void* p = mmap(nullptr, size + slack, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw Refused(bytes);
  auto* start = static_cast<uint8_t*>(p);
  auto* data = reinterpret_cast<uint8_t*>(align_up(reinterpret_cast<size_t>(start), aligned ? kHugePage : 1));
  if (data > start) munmap(start, static_cast<size_t>(data - start));
  const size_t tail = slack - static_cast<size_t>(data - start);
  if (tail) munmap(data + size, tail);
  return data;
}

void poison([[maybe_unused]] uint8_t* data, [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(data + bytes, pages_of(bytes) - bytes);
#endif
}

}  // namespace

Memory::Memory(size_t bytes, bool huge_pages) : bytes_(bytes) {
  const size_t size = pages_of(bytes);
  data_ = reserve(bytes, PROT_READ | PROT_WRITE, huge_pages || bytes >= kHugePage);
  madvise(data_, size, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);  // whatever the system's default; may be refused
  poison(data_, bytes);
}

Memory::Memory(int file, size_t offset, size_t bytes) : bytes_(bytes) {
  const size_t size = pages_of(bytes);
  data_ = reserve(bytes, PROT_NONE, true);
  const int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
  if (mmap(data_, size, PROT_READ | PROT_WRITE, flags, file, static_cast<off_t>(offset)) == MAP_FAILED) {
    const int error = errno;
    munmap(data_, size);
    throw std::system_error(error, std::generic_category(), "a file cannot be mapped");
  }
  madvise(data_, size, MADV_HUGEPAGE);  // pages that are read from now on, where the file system can
  poison(data_, bytes);
}

Memory::~Memory() {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(data_ + bytes_, pages_of(bytes_) - bytes_);
#endif
  munmap(data_, pages_of(bytes_));
}

bool Memory::make_huge(size_t offset, size_t bytes) {
  return !madvise(data_ + offset, bytes, MADV_HUGEPAGE) && !madvise(data_ + offset, bytes, MADV_COLLAPSE);
}

size_t Memory::touched_bytes() const {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t pages = align_up(bytes_, page) / page;
  std::vector<unsigned char> map(std::min<size_t>(pages, 65536));
  size_t resident = 0;
  for (size_t first = 0; first < pages; first += map.size()) {
    const size_t n = std::min(map.size(), pages - first);
    if (mincore(data_ + first * page, n * page, map.data())) break;
    resident += static_cast<size_t>(
        std::count_if(map.begin(), map.begin() + static_cast<ptrdiff_t>(n), [](unsigned char c) { return c & 1; }));
  }
  return resident * page;
}

}  // namespace octavo
