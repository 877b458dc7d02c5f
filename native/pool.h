// Persistent worker threads. The thread that calls run() is worker 0, so a pool of one has no thread of its own.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

// Half-open share of `n` units of worker `i` of `workers`: contiguous, sizes differ by one at most.
struct Range {
  int begin, end;
};
constexpr Range share(int n, int workers, int i) {
  return {static_cast<int>(int64_t{n} * i / workers), static_cast<int>(int64_t{n} * (i + 1) / workers)};
}

class Pool {
 public:
  // cpus: empty, or one processor per worker to pin workers 1.. to (the caller's thread is never pinned).
  // Throws std::invalid_argument for a bad size, std::system_error when a thread cannot start.
  Pool(int workers, const std::vector<int>& cpus);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }

  // Calls body(worker) on every worker and returns when all have. One run at a time; body must not throw.
  template <class Body> void run(Body&& body) {
    start([](void* b, int worker) { (*static_cast<std::remove_reference_t<Body>*>(b))(worker); }, &body);
  }

  // To be held by who runs: a pool serves one program at a time, whatever the threads that call.
  std::mutex& turn() { return turn_; }

  // Inside run(): waits until every worker has come here. What was written before is visible after.
  void barrier();

 private:
  using Entry = void (*)(void* body, int worker);
  struct alignas(64) Word {  // a line of its own: waiters poll it
    std::atomic<uint32_t> value{0};
    std::atomic<int> sleepers{0};
    void wait_change(uint32_t old, int max_wait_us);
    void set(uint32_t v);
  };
  void start(Entry entry, void* body);
  void work(int worker);
  void stop();

  int size_;
  std::mutex turn_;
  Entry entry_ = nullptr;
  void* body_ = nullptr;
  bool stopping_ = false;
  Word epoch_;  // number of runs started
  Word phase_;  // number of barriers passed
  alignas(64) std::atomic<int> arrived_{0};
  std::vector<std::thread> threads_;
};

}  // namespace octavo
