// A range of memory: reserved at once and touched on use (weights, KV cache, temporaries), or the bytes of a file.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

constexpr size_t kLine = 64;  // alignment of every matrix
constexpr size_t align_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

constexpr size_t kHugePage = size_t{2} << 20;

// Zero filled, from a multiple of kHugePage on where it is as long. Huge pages suit what is read as a whole (weights); with small pages only what is used takes memory.
class Memory {
 public:
  Memory(size_t bytes, bool huge_pages);  // throws std::bad_alloc, saying so, when the space is refused
  // Bytes [offset, offset + bytes) of an open file, shared with all processes that map them; what is written to them
  // stays here. `offset` is a multiple of the page size. Throws std::system_error.
  Memory(int file, size_t offset, size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // Makes huge pages of small ones, with what is in them; whole huge pages from `data` on. False where the system does not.
  bool make_huge(size_t offset, size_t bytes);
  size_t touched_bytes() const;  // resident now, by the kernel's page map

 private:
  uint8_t* data_;
  size_t bytes_;
};

}  // namespace octavo
