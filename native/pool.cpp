#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

constexpr int kPauses = 2000;             // about 40 us; a balanced barrier takes well under 1 us
constexpr int kBarrierWaitUs = 100;       // then sleep: the other worker lost its processor
constexpr int kBetweenRunsWaitUs = 1000;  // a wake takes 20-30 us, so stay awake while steps follow each other
constexpr int kMaxWorkers = 256;

void pause() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

void futex(std::atomic<uint32_t>& word, int op, uint32_t value) {
  static_assert(sizeof(word) == sizeof(uint32_t));
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), op | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

void Pool::Word::wait_change(uint32_t old, int max_wait_us) {
  for (int i = 0; i < kPauses; i++) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(max_wait_us);
  while (std::chrono::steady_clock::now() < deadline) {
    if (value.load(std::memory_order_acquire) != old) return;
    sched_yield();
  }
  sleepers.fetch_add(1);
  while (value.load() == old) futex(value, FUTEX_WAIT, old);
  sleepers.fetch_sub(1);
}

void Pool::Word::set(uint32_t v) {
  value.store(v);  // in one total order with sleepers: the waiter sees the value, or we see the sleeper
  if (sleepers.load()) futex(value, FUTEX_WAKE, INT_MAX);
}

Pool::Pool(int workers, const std::vector<int>& cpus) : size_(workers) {
  if (workers < 1 || workers > kMaxWorkers)
    throw std::invalid_argument("num_threads must be in 1.." + std::to_string(kMaxWorkers) + "; got " +
                                std::to_string(workers));
  if (!cpus.empty() && static_cast<int>(cpus.size()) < workers)
    throw std::invalid_argument("cpus names fewer processors than there are threads");
  threads_.reserve(static_cast<size_t>(workers));
  try {
    for (int i = 1; i < workers; i++) {
      threads_.emplace_back([this, i] { work(i); });
      if (cpus.empty()) continue;
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(static_cast<size_t>(cpus[static_cast<size_t>(i)]), &set);
      pthread_setaffinity_np(threads_.back().native_handle(), sizeof set, &set);  // a refusal costs speed only
    }
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stopping_ = true;
  epoch_.set(epoch_.value.load() + 1);
  for (auto& t : threads_) t.join();
}

void Pool::start(Entry entry, void* body) {
  entry_ = entry;
  body_ = body;
  if (size_ > 1) epoch_.set(epoch_.value.load(std::memory_order_relaxed) + 1);
  entry(body, 0);
  barrier();
}

void Pool::work(int worker) {
  for (uint32_t seen = 0;; seen++) {
    epoch_.wait_change(seen, kBetweenRunsWaitUs);
    if (stopping_) return;
    entry_(body_, worker);
    barrier();
  }
}

void Pool::barrier() {
  if (size_ == 1) return;
  const uint32_t phase = phase_.value.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.set(phase + 1);
  } else {
    phase_.wait_change(phase, kBarrierWaitUs);
  }
}

}  // namespace octavo
