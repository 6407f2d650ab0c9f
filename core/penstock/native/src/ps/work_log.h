// What a server does with trainers' requests, and when: for the lanes of its timeline. Off until it is watched; then a
// piece of work costs two reads of the clock and an append under a lock. Bounded: what is not taken in time is counted.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace penstock::ps {

// Values of the WORK column (`penstock.protocol.frames.Work`).
enum class Work : std::uint8_t {
  kReceive = 3,  // a request, from its first byte until it is decoded
  kRound = 4,    // a trainer's step waits for those of others, and for the update
  kMerge = 5,
  kLog = 6,
  kUpdate = 7,
  kLookUp = 8,
  kAnswer = 9,
};

// Values of the THREAD column: a trainer, the rounds of all trainers, or a block from kFirstBlockLane on.
constexpr std::uint16_t kRoundsLane = 32767, kFirstBlockLane = 32768;

inline std::uint16_t lane_of(std::int64_t trainer) {
  return static_cast<std::uint16_t>(trainer >= 0 && trainer < kRoundsLane ? trainer : kRoundsLane - 1);
}

inline std::uint16_t block_lane(std::uint32_t block) {
  return static_cast<std::uint16_t>(kFirstBlockLane + (block < kFirstBlockLane ? block : kFirstBlockLane - 1));
}

// Unix time in nanoseconds.
inline std::int64_t unix_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// As `penstock.telemetry.input.EVENT`.
struct __attribute__((packed)) Worked {
  std::int64_t begin_ns, end_ns;
  std::uint8_t work;
  std::uint16_t lane;
};
static_assert(sizeof(Worked) == 19);

// Thread-safe.
class WorkLog {
 public:
  static constexpr std::size_t kMost = std::size_t{1} << 14;

  void watch(bool on) { is_watched_.store(on, std::memory_order_relaxed); }
  bool is_watched() const { return is_watched_.load(std::memory_order_relaxed); }

  // Without memory for it, or beyond kMost, it is counted only.
  void add(Work work, std::uint16_t lane, std::int64_t begin_ns, std::int64_t end_ns) noexcept {
    if (!is_watched()) return;
    const std::lock_guard guard(lock_);
    try {
      if (events_.size() < kMost) {
        events_.push_back({begin_ns, end_ns, static_cast<std::uint8_t>(work), lane});
        return;
      }
    } catch (...) {
    }
    ++num_lost_;
  }

  // The events since the last call, and how many there were besides.
  std::pair<std::vector<Worked>, std::int64_t> take() {
    const std::lock_guard guard(lock_);
    return {std::exchange(events_, {}), std::exchange(num_lost_, 0)};
  }

 private:
  std::atomic<bool> is_watched_{false};
  std::mutex lock_;
  std::vector<Worked> events_;
  std::int64_t num_lost_ = 0;
};

// Adds the time of its scope.
class Timed {
 public:
  Timed(WorkLog& log, Work work, std::uint16_t lane)
      : log_(log), work_(work), lane_(lane), begin_ns_(log.is_watched() ? unix_now_ns() : 0) {}
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;
  ~Timed() {
    if (begin_ns_ != 0) log_.add(work_, lane_, begin_ns_, unix_now_ns());
  }

 private:
  WorkLog& log_;
  const Work work_;
  const std::uint16_t lane_;
  const std::int64_t begin_ns_;
};

}  // namespace penstock::ps
