// Ready instructions of one worker: its owner pushes and pops at the back, thieves take from the front.
//
// Invariant: `size()` is exact after any operation that happened before; a push is ordered before a later read of
// `Engine`'s count of parked workers (both sequentially consistent), which is what lets a worker park.
// A lock, not a Chase-Lev deque: any thread may push (affinity, host operators), and an uncontended exchange costs
// less than the fence a lock-free pop needs. Torch-free.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "engine/clock.h"

namespace penstock {

constexpr std::uint32_t kNone = UINT32_MAX;

class SpinLock {
 public:
  void lock() noexcept {
    for (int spins = 0; locked_.exchange(true, std::memory_order_acquire);) {
      while (locked_.load(std::memory_order_relaxed)) {
        // The holder may have been preempted: give it the core.
        if (++spins < 64)
          relax();
        else
          std::this_thread::yield();
      }
    }
  }
  void unlock() noexcept { locked_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> locked_{false};
};

class ReadyQueue {
 public:
  // Makes room for `capacity` instructions. Only between runs.
  void reserve(std::size_t capacity) {
    lock_.lock();  // a worker that saw the last run's last instruction may look in late
    if (capacity > items_.size()) items_.resize(capacity);
    lock_.unlock();
  }

  std::uint32_t size() const noexcept { return size_.load(std::memory_order_seq_cst); }
  bool looks_empty() const noexcept { return size_.load(std::memory_order_relaxed) == 0; }

  void push(std::uint32_t instruction) noexcept {
    lock_.lock();
    items_[index(head_ + count_)] = instruction;
    ++count_;
    size_.store(count_, std::memory_order_seq_cst);
    lock_.unlock();
  }

  std::uint32_t pop_back() noexcept {
    if (looks_empty()) return kNone;
    lock_.lock();
    std::uint32_t instruction = kNone;
    if (count_ != 0) {
      --count_;
      instruction = items_[index(head_ + count_)];
      size_.store(count_, std::memory_order_relaxed);
    }
    lock_.unlock();
    return instruction;
  }

  std::uint32_t pop_front() noexcept {
    if (looks_empty()) return kNone;
    lock_.lock();
    std::uint32_t instruction = kNone;
    if (count_ != 0) {
      instruction = items_[head_];
      head_ = index(head_ + 1);
      --count_;
      size_.store(count_, std::memory_order_relaxed);
    }
    lock_.unlock();
    return instruction;
  }

  // Takes the one at position `choice` modulo the number waiting.
  std::uint32_t pop_any(std::uint64_t choice) noexcept {
    if (looks_empty()) return kNone;
    lock_.lock();
    std::uint32_t instruction = kNone;
    if (count_ != 0) {
      std::uint32_t& chosen = items_[index(head_ + choice % count_)];
      --count_;
      instruction = chosen;
      chosen = items_[index(head_ + count_)];
      size_.store(count_, std::memory_order_relaxed);
    }
    lock_.unlock();
    return instruction;
  }

 private:
  std::size_t index(std::size_t position) const noexcept {
    return position < items_.size() ? position : position - items_.size();
  }

  SpinLock lock_;
  std::atomic<std::uint32_t> size_{0};  // count_, readable without the lock
  std::vector<std::uint32_t> items_;    // a ring: a run never holds more instructions than the plan has
  std::size_t head_ = 0;
  std::uint32_t count_ = 0;
};

}  // namespace penstock
