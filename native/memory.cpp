#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <string>
#include <vector>

namespace octavo {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;

class Refused : public std::bad_alloc {
 public:
  explicit Refused(size_t bytes)
      : text_("the system refuses to reserve " + std::to_string(bytes) +
              " bytes of address space; ulimit -v or vm.overcommit_memory may be the cause") {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

}  // namespace

Memory::Memory(size_t bytes, bool huge_pages) : bytes_(bytes) {
  const size_t size = align_up(std::max<size_t>(bytes, 1), static_cast<size_t>(sysconf(_SC_PAGESIZE)));
  const size_t slack = huge_pages ? kHugePage : 0;  // huge pages need their own alignment
  if (size + slack < bytes) throw Refused(bytes);   // more than there are addresses
  void* p = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw Refused(bytes);
  auto* start = static_cast<uint8_t*>(p);
  data_ = reinterpret_cast<uint8_t*>(align_up(reinterpret_cast<size_t>(start), huge_pages ? kHugePage : 1));
  if (data_ > start) munmap(start, static_cast<size_t>(data_ - start));
  const size_t tail = slack - static_cast<size_t>(data_ - start);
  if (tail) munmap(data_ + size, tail);
  madvise(data_, size, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);  // whatever the system's default; may be refused
}

Memory::~Memory() { munmap(data_, align_up(std::max<size_t>(bytes_, 1), static_cast<size_t>(sysconf(_SC_PAGESIZE)))); }

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
