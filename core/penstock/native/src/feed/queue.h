// A bounded queue of many producers and many consumers.
//
// Order is that of `push`.  Closed, it gives what it holds and takes no more; stopped, it does neither.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

namespace penstock::feed {

template <typename T>
class Queue {
 public:
  explicit Queue(std::size_t capacity) : capacity_(capacity) {}

  // Wait for room.  False: it is closed, and `item` is lost.
  bool push(T item) {
    std::unique_lock lock(mutex_);
    room_.wait(lock, [&] { return closed_ || items_.size() < capacity_; });
    if (closed_) return false;
    items_.push_back(std::move(item));
    lock.unlock();
    filled_.notify_one();
    return true;
  }

  // Wait for an item, but not longer than `timeout`.
  std::optional<T> pop(std::chrono::duration<double> timeout) {
    std::unique_lock lock(mutex_);
    filled_.wait_for(lock, timeout, [&] { return closed_ || !items_.empty(); });
    if (items_.empty()) return std::nullopt;
    std::optional<T> item(std::move(items_.front()));
    items_.pop_front();
    lock.unlock();
    room_.notify_one();
    return item;
  }

  void close() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    filled_.notify_all();
    room_.notify_all();
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
      items_.clear();
    }
    filled_.notify_all();
    room_.notify_all();
  }

  // Closed, and nothing is left.
  bool finished() const {
    const std::lock_guard lock(mutex_);
    return closed_ && items_.empty();
  }

  std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return items_.size();
  }

 private:
  const std::size_t capacity_;
  mutable std::mutex mutex_;
  std::condition_variable filled_, room_;
  std::deque<T> items_;
  bool closed_ = false;
};

}  // namespace penstock::feed
