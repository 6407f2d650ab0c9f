// Sums of what was exchanged, and of the wall time that was waited for it, by block.
//
// While several calls are waited for, each gets its equal share of the time that passes: all waits together are never
// more than the time in which anything was waited for (as ps/counters.py has it for the calls that Python makes).
// Sums are read and changed under `hold`, whichever thread does it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

namespace penstock::ps {

struct Sums {
  std::int64_t calls = 0, sent_bytes = 0, received_bytes = 0, wait_ns = 0, merges = 0, staleness = 0;
};

// Of a thread that no step waits for: its calls are no waits.
inline thread_local bool blocks_no_step = false;

class Waits {
 public:
  // Counts the time of its life as a wait of `sums`, which is of a row that stays where it is.
  class One {
   public:
    One(Waits& all, Sums& sums) : all_(all), sums_(sums) {
      const std::lock_guard guard(all_.lock_);
      all_.share_out();
      all_.under_way_.push_back(&sums_);
    }
    One(const One&) = delete;
    One& operator=(const One&) = delete;
    ~One() {
      const std::lock_guard guard(all_.lock_);
      all_.share_out();
      all_.under_way_.erase(std::find(all_.under_way_.begin(), all_.under_way_.end(), &sums_));
    }

   private:
    Waits& all_;
    Sums& sums_;
  };

  // The sums of all are the holder's. Waits have been counted until now.
  std::unique_lock<std::mutex> hold() {
    std::unique_lock held(lock_);
    share_out();
    return held;
  }

 private:
  using Clock = std::chrono::steady_clock;

  void share_out() {
    const Clock::time_point now = Clock::now();
    if (!under_way_.empty()) {
      const auto passed = std::chrono::duration_cast<std::chrono::nanoseconds>(now - until_).count();
      for (Sums* sums : under_way_) sums->wait_ns += passed / static_cast<std::int64_t>(under_way_.size());
    }
    until_ = now;
  }

  std::mutex lock_;
  std::vector<Sums*> under_way_;
  Clock::time_point until_{};
};

}  // namespace penstock::ps
