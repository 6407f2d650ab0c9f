// A CPU allocator in front of torch's own, which lets an operator's tensors be placed where a plan wants them.
//
// Invariant: it is transparent. Unless a Request is open on the calling thread, an allocation is the previous
// allocator's, after one thread-local load; its deleter is the previous one's. It is put in place once and stays:
// tensors carry their deleters, so that nothing depends on when.
// Every pointer that it gives is its own context, and raw_deleter() frees any of them: oneDNN allocates raw.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace penstock {

// Bytes that were allocated while observed: live now, the most at once, and how many allocations.
class Meter {
 public:
  void add(std::size_t nbytes) noexcept {
    const std::int64_t now = live_.fetch_add(static_cast<std::int64_t>(nbytes), std::memory_order_relaxed) +
                             static_cast<std::int64_t>(nbytes);
    std::int64_t peak = peak_.load(std::memory_order_relaxed);
    while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
    allocations_.fetch_add(1, std::memory_order_relaxed);
  }
  void subtract(std::size_t nbytes) noexcept {
    live_.fetch_sub(static_cast<std::int64_t>(nbytes), std::memory_order_relaxed);
  }
  std::int64_t live() const noexcept { return live_.load(std::memory_order_relaxed); }
  std::int64_t peak() const noexcept { return peak_.load(std::memory_order_relaxed); }
  std::uint64_t allocations() const noexcept { return allocations_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::int64_t> live_{0}, peak_{0};
  std::atomic<std::uint64_t> allocations_{0};
};

// While one is open on a thread, CPU allocations of that thread are asked of it. They nest: the innermost counts.
class Request {
 public:
  Request() noexcept;
  virtual ~Request();
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;
  virtual c10::DataPtr allocate(std::size_t nbytes) = 0;
  virtual void freed(const void* memory) noexcept {}  // an allocation of metered() died on this thread

 private:
  Request* const outer_;
};

void install_allocator();  // idempotent

c10::DataPtr allocate_plainly(std::size_t nbytes);
// Memory that other processes of this host can map, of the operator library (penstock.ring_memory). It is zero.
c10::DataPtr allocate_shared(std::size_t nbytes);
// As allocate_plainly(), counted by `meter` until it is freed, on whichever thread.
c10::DataPtr allocate_metered(std::size_t nbytes, std::shared_ptr<Meter> meter);

// Memory whose allocations are freed by `leave`, also those that were asked for raw.
void add_range(const void* begin, std::size_t nbytes, c10::DeleterFnPtr leave);
void remove_range(const void* begin);

// Counts every CPU allocation of this thread between its construction and destruction.
class MeteredRegion : public Request {
 public:
  explicit MeteredRegion(std::shared_ptr<Meter> meter) : meter_(std::move(meter)) {}
  c10::DataPtr allocate(std::size_t nbytes) override { return allocate_metered(nbytes, meter_); }

 private:
  std::shared_ptr<Meter> meter_;
};

}  // namespace penstock
