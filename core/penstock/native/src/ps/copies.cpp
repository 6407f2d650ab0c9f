#include "ps/copies.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "ops/copy_row.h"

namespace penstock::ps {
namespace {

constexpr std::size_t kWorthIt = std::size_t{256} << 10;  // waking a thread takes as long as copying some 100 KiB
constexpr std::size_t kChunk = std::size_t{64} << 10;

void copy(const Copy& one) {
  const Runs& from = one.from;
  if (from.count * from.bytes == 0) return;  // its addresses may be null
  if (from.stride == from.bytes || from.count == 1) {
    std::memcpy(one.to, from.data, from.count * from.bytes);
    return;
  }
  for (std::size_t i = 0; i < from.count; ++i) {
    ops::copy_row(one.to + i * from.bytes, from.data + i * from.stride, static_cast<std::int64_t>(from.bytes));
  }
}

// A thread that is there takes the next copy; the caller waits for those that another thread has taken.
struct Work {
  explicit Work(std::vector<Copy> given) : copies(std::move(given)) {}

  void take_part() {
    for (std::size_t i = next++; i < copies.size(); i = next++) {
      copy(copies[i]);
      if (++num_done == copies.size()) num_done.notify_all();
    }
  }

  void wait() {
    for (std::size_t done = num_done; done != copies.size(); done = num_done) num_done.wait(done);
  }

  const std::vector<Copy> copies;
  std::atomic<std::size_t> next{0}, num_done{0};
};

// One thread of the process. Its work is dropped when it is done: it may come too late for it.
class Helper {
 public:
  // Null where this process has one core.
  static Helper* of_process() {
    static Helper* const all = has_cores() ? new Helper : nullptr;  // outlives threads that still copy at exit
    return all;
  }

  // False: it has other work.
  bool offer(const std::shared_ptr<Work>& work) {
    {
      const std::lock_guard guard(lock_);
      if (offered_ != nullptr || is_busy_ || !starts()) return false;
      offered_ = work;
    }
    changed_.notify_one();
    return true;
  }

  void withdraw(const std::shared_ptr<Work>& work) {
    const std::lock_guard guard(lock_);
    if (offered_ == work) offered_ = nullptr;
  }

 private:
  // Under the lock. False where no thread can be made.
  bool starts() {
    if (is_started_) return true;
    try {
      std::thread([this] { run(); }).detach();
    } catch (const std::system_error&) {
      return false;
    }
    return is_started_ = true;
  }

  static bool has_cores() {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) > 1;
  }

  void run() {
    std::unique_lock held(lock_);
    while (true) {
      changed_.wait(held, [this] { return offered_ != nullptr; });
      const std::shared_ptr<Work> work = std::exchange(offered_, nullptr);
      is_busy_ = true;
      held.unlock();
      work->take_part();
      held.lock();
      is_busy_ = false;
    }
  }

  std::mutex lock_;
  std::condition_variable changed_;
  std::shared_ptr<Work> offered_;
  bool is_busy_ = false, is_started_ = false;
};

// Adds one, cut into parts of at most about kChunk.
void add_parts(std::vector<Copy>& to, const Copy& one) {
  const Runs& from = one.from;
  if (from.count * from.bytes == 0) return;
  if (from.stride == from.bytes || from.count == 1) {
    const std::size_t all = from.count * from.bytes;
    for (std::size_t begin = 0; begin < all; begin += kChunk) {
      const std::size_t length = std::min(kChunk, all - begin);
      to.push_back({{from.data + begin, 1, length, length}, one.to + begin});
    }
    return;
  }
  const std::size_t step = std::max<std::size_t>(kChunk / from.bytes, 1);
  for (std::size_t begin = 0; begin < from.count; begin += step) {
    const std::size_t count = std::min(step, from.count - begin);
    to.push_back({{from.data + begin * from.stride, count, from.bytes, from.stride}, one.to + begin * from.bytes});
  }
}

}  // namespace

void copy_runs(const std::vector<Runs>& from, char* to) {
  for (const Runs& one : from) {
    copy({one, to});
    to += one.count * one.bytes;
  }
}

void copy_all(std::vector<Copy> copies) {
  std::size_t all = 0;
  for (const Copy& one : copies) all += one.from.count * one.from.bytes;
  Helper* const helper = all < kWorthIt ? nullptr : Helper::of_process();
  if (helper == nullptr) {
    for (const Copy& one : copies) copy(one);
    return;
  }
  std::vector<Copy> parts;
  for (const Copy& one : copies) add_parts(parts, one);
  const auto work = std::make_shared<Work>(std::move(parts));
  const bool is_offered = helper->offer(work);
  work->take_part();
  if (is_offered) helper->withdraw(work);
  work->wait();
}

}  // namespace penstock::ps
