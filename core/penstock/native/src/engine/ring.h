// The trace of one thread: fixed-size records in a ring, overwritten oldest first.
//
// Invariant: one thread writes; it takes no lock, allocates nothing and never waits. Any one thread at a time may
// drain (the owner locks). `head_` counts records ever written; record i lies in cell i mod capacity. A cell being
// overwritten while it is drained is recognised by `head_` afterwards and counted as lost. Torch-free.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace penstock {

struct Event {
  std::uint64_t begin;  // ticks
  std::uint64_t end;    // ticks
  std::uint64_t step;
  std::uint64_t op;
};

class Ring {
 public:
  explicit Ring(std::size_t capacity)
      : mask_(std::bit_ceil(capacity < 2 ? std::size_t{2} : capacity) - 1), cells_(new Cell[mask_ + 1]()) {}

  void write(std::uint64_t op, std::uint64_t step, std::uint64_t begin, std::uint64_t end) noexcept {
    const std::uint64_t head = head_.load(std::memory_order_relaxed);
    Cell& cell = cells_[head & mask_];
    // Release, so that a reader of a new value here also sees the head that was published before it.
    cell.begin.store(begin, std::memory_order_release);
    cell.end.store(end, std::memory_order_release);
    cell.step.store(step, std::memory_order_release);
    cell.op.store(op, std::memory_order_release);
    head_.store(head + 1, std::memory_order_release);
  }

  std::uint64_t written() const noexcept { return head_.load(std::memory_order_relaxed); }

  // Appends what was written since the last drain to `out`, in order of writing; returns how many were lost.
  std::uint64_t drain(std::vector<Event>& out) {
    const std::uint64_t head = head_.load(std::memory_order_acquire);
    const std::uint64_t capacity = mask_ + 1;
    const std::uint64_t wanted = tail_;
    std::uint64_t first = head - wanted > capacity ? head - capacity : wanted;
    const std::size_t start = out.size();
    for (std::uint64_t i = first; i < head; ++i) {
      const Cell& cell = cells_[i & mask_];
      out.push_back(Event{cell.begin.load(std::memory_order_acquire), cell.end.load(std::memory_order_acquire),
                          cell.step.load(std::memory_order_acquire), cell.op.load(std::memory_order_acquire)});
    }
    // Whatever the writer may have touched meanwhile: all but the newest capacity - 1 (one may be half written).
    const std::uint64_t after = head_.load(std::memory_order_acquire);
    if (after != head && after + 1 > capacity && after + 1 - capacity > first) {
      const std::uint64_t safe = after + 1 - capacity < head ? after + 1 - capacity : head;
      const auto begin = out.begin() + static_cast<std::ptrdiff_t>(start);
      out.erase(begin, begin + static_cast<std::ptrdiff_t>(safe - first));
      first = safe;
    }
    tail_ = head;
    return first - wanted;
  }

 private:
  struct alignas(32) Cell {
    std::atomic<std::uint64_t> begin;
    std::atomic<std::uint64_t> end;
    std::atomic<std::uint64_t> step;
    std::atomic<std::uint64_t> op;
  };

  const std::uint64_t mask_;
  std::unique_ptr<Cell[]> cells_;
  std::uint64_t tail_ = 0;  // the drainer's
  alignas(64) std::atomic<std::uint64_t> head_{0};
};

}  // namespace penstock
