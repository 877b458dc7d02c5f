// The pool: every worker runs every body, barriers order memory, sleepers wake, dynamic work is done once.
#include <chrono>
#include <thread>

#include "check.h"
#include "pool.h"

using namespace octavo;

namespace {

void test_share() {
  for (int n : {0, 1, 2, 7, 31, 33, 4099})
    for (int workers : {1, 2, 3, 7, 64}) {
      int next = 0;
      for (int i = 0; i < workers; i++) {
        const Range r = share(n, workers, i);
        CHECK(r.begin == next && r.end >= r.begin && r.end - r.begin <= n / workers + 1);
        next = r.end;
      }
      CHECK(next == n);
    }
}

// Each worker adds its neighbour's last value: only right where barriers order all writes and reads.
void test_barrier(int workers) {
  Pool pool(workers, {});
  const int rounds = workers <= 2 ? 2000 : 100;  // more workers than cores take turns
  std::vector<int> value(static_cast<size_t>(workers) * 16, 1);
  for (int run = 0; run < 3; run++) {
    pool.run([&](int worker) {
      for (int i = 0; i < rounds; i++) {
        const int neighbour = value[static_cast<size_t>((worker + 1) % workers) * 16];
        pool.barrier();
        value[static_cast<size_t>(worker) * 16] = neighbour + 1;
        pool.barrier();
      }
    });
  }
  for (int w = 0; w < workers; w++) CHECK(value[static_cast<size_t>(w) * 16] == 3 * rounds + 1);
}

// Longer than any wait before sleep: between runs, and inside one while a worker is late.
void test_sleep() {
  Pool pool(3, {});
  std::atomic<int> count{0};
  for (int i = 0; i < 5; i++) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    pool.run([&](int worker) {
      if (worker == i % 3) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      pool.barrier();
      count++;
    });
  }
  CHECK(count == 15);
}

void test_uneven() {
  Pool pool(4, {});
  std::vector<int> done(1000);
  std::atomic<int> next{0};
  pool.run([&](int) {
    for (int i; (i = next.fetch_add(1)) < 1000;) done[static_cast<size_t>(i)]++;
  });
  for (int d : done) CHECK(d == 1);
}

void test_refusals() {
  for (int workers : {0, -1, 257}) {
    bool refused = false;
    try {
      Pool pool(workers, {});
    } catch (const std::invalid_argument&) { refused = true; }
    CHECK(refused);
  }
}

}  // namespace

int main() {
  test_share();
  for (int workers : {1, 2, 3, 8}) test_barrier(workers);
  puts("barrier");
  test_sleep();
  puts("sleep and wake");
  test_uneven();
  puts("uneven work");
  test_refusals();
  return check::finish();
}
