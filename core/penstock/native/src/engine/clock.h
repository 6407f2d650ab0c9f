// Reads of a cheap clock, and their conversion to Unix time.
//
// Invariant: all ticks of one process come from one counter, constant in rate and the same on every core: the
// time-stamp counter where the processor says that it is invariant, else CLOCK_MONOTONIC. A conversion is made from
// two simultaneous reads of both clocks (anchors), the newest at the time of the conversion, so that a wrong rate
// never accumulates. Torch-free.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace penstock {

std::uint64_t monotonic_ns() noexcept;

namespace detail {
extern const bool has_invariant_tsc;
}

inline std::uint64_t ticks() noexcept {
#if defined(__x86_64__)
  if (detail::has_invariant_tsc) return __rdtsc();
#endif
  return monotonic_ns();
}

// Hints to the processor that this thread spins.
inline void relax() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Ticks in a microsecond, measured once when the library is loaded (0.2 ms); good to about 0.1 %, for spin limits.
std::uint64_t ticks_per_microsecond() noexcept;

// A straight line from ticks to Unix nanoseconds.
class Timeline {
 public:
  std::int64_t unix_ns(std::uint64_t at) const noexcept {
    return unix_ns_ + static_cast<std::int64_t>(static_cast<double>(static_cast<std::int64_t>(at - ticks_)) * ratio_);
  }
  // As far apart as the two are in `unix_ns`: rounded by itself, an end could come after what began later.
  std::uint64_t duration_ns(std::uint64_t begin, std::uint64_t end) const noexcept {
    return end <= begin ? 0 : static_cast<std::uint64_t>(unix_ns(end) - unix_ns(begin));
  }

 private:
  friend class Clock;
  std::uint64_t ticks_ = 0;
  std::int64_t unix_ns_ = 0;
  double ratio_ = 1.0;
};

// Makes timelines. Not thread-safe: its owner locks.
class Clock {
 public:
  Clock() noexcept;
  // A timeline from the newest anchor. The rate is that between this anchor and an earlier one, at least 2 ms older
  // (a call sooner than that after construction waits for it), which follows a slewed CLOCK_MONOTONIC.
  Timeline timeline() noexcept;

 private:
  struct Anchor {
    std::uint64_t ticks;
    std::uint64_t monotonic_ns;
  };
  static Anchor read() noexcept;
  Anchor base_;
};

}  // namespace penstock
