#include "engine/clock.h"

#include <time.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace penstock {
namespace {

constexpr std::uint64_t kShortestBaseNs = 2'000'000;
constexpr std::uint64_t kLongestBaseNs = 1'000'000'000;

std::uint64_t read_clock(clockid_t which) noexcept {
  timespec now{};
  clock_gettime(which, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec);
}

bool find_invariant_tsc() noexcept {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(0x80000007u, &a, &b, &c, &d)) return false;
  return (d & (1u << 8)) != 0;
#else
  return false;
#endif
}

std::uint64_t measure_ticks_per_microsecond() noexcept {
  if (!detail::has_invariant_tsc) return 1000;
  const std::uint64_t begin_ns = monotonic_ns();
  const std::uint64_t begin = ticks();
  std::uint64_t now_ns = begin_ns;
  while (now_ns - begin_ns < 200'000) now_ns = monotonic_ns();
  const std::uint64_t rate = (ticks() - begin) * 1000 / (now_ns - begin_ns);
  return rate == 0 ? 1 : rate;
}

}  // namespace

namespace detail {
const bool has_invariant_tsc = find_invariant_tsc();
}

std::uint64_t monotonic_ns() noexcept {
  return read_clock(CLOCK_MONOTONIC);
}

std::uint64_t ticks_per_microsecond() noexcept {
  static const std::uint64_t rate = measure_ticks_per_microsecond();
  return rate;
}

Clock::Clock() noexcept : base_(read()) {}

Clock::Anchor Clock::read() noexcept {
  // The best of a few tries: an interrupt between the reads would shift the anchor.
  Anchor best{};
  std::uint64_t best_gap = UINT64_MAX;
  for (int i = 0; i < 5; ++i) {
    const std::uint64_t before = penstock::ticks();
    const std::uint64_t now_ns = penstock::monotonic_ns();
    const std::uint64_t gap = penstock::ticks() - before;
    if (gap < best_gap) {
      best_gap = gap;
      best = Anchor{before + gap / 2, now_ns};
    }
  }
  return best;
}

Timeline Clock::timeline() noexcept {
  Anchor now = read();
  while (now.monotonic_ns - base_.monotonic_ns < kShortestBaseNs) now = read();
  const std::uint64_t base_ns = now.monotonic_ns - base_.monotonic_ns;
  Timeline line;
  line.ratio_ = static_cast<double>(base_ns) / static_cast<double>(now.ticks - base_.ticks);
  line.ticks_ = now.ticks;
  const auto offset =
      static_cast<std::int64_t>(read_clock(CLOCK_REALTIME)) - static_cast<std::int64_t>(penstock::monotonic_ns());
  line.unix_ns_ = static_cast<std::int64_t>(now.monotonic_ns) + offset;
  // The two clocks drift apart slowly (NTP): a base no older than a second or two keeps the rate current.
  if (base_ns > kLongestBaseNs) base_ = now;
  return line;
}

}  // namespace penstock
