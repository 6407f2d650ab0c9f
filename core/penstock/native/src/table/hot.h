// The keys that are pushed most, in bounded memory: a sample of the pushed keys, counted as Misra and Gries do.
//
// One of `kEvery` keys is taken, at distances that are drawn anew, so that no period of the batches shows.  A count is
// never too high, and too low by at most `lost()`.  All counts are halved after `kMemory` samples: what was pushed long
// ago fades.  Thread-safe.
// Source: J. Misra, D. Gries: Finding Repeated Elements, 1982.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

namespace penstock::table {

class HotKeys {
 public:
  static constexpr uint64_t kEvery = 64;
  static constexpr uint32_t kKept = 256;
  static constexpr uint64_t kMemory = uint64_t{1} << 18;

  struct Hot {
    uint64_t key, count;
  };
  // `samples`: of all keys together; in samples, too, `lost`: by how much a count may be too low.
  struct Found {
    std::vector<Hot> hot;
    uint64_t samples, lost;
  };

  // Keys as they are pushed, duplicates included.
  void push(const uint64_t* keys, uint64_t count) {
    const std::lock_guard guard(lock_);
    uint64_t i = next_;
    for (; i < count; i += distance()) add(keys[i]);
    next_ = i - count;
  }

  // The `most` keys with the highest counts, highest first.
  Found top(std::size_t most) const {
    const std::lock_guard guard(lock_);
    Found out{{}, samples_, lost_};
    for (const Slot& slot : slots_) {
      if (slot.count > 0) out.hot.push_back({slot.key, slot.count});
    }
    most = std::min(most, out.hot.size());
    std::partial_sort(
        out.hot.begin(), out.hot.begin() + static_cast<std::ptrdiff_t>(most), out.hot.end(),
        [](const Hot& a, const Hot& b) { return a.count != b.count ? a.count > b.count : a.key < b.key; });
    out.hot.resize(most);
    return out;
  }

 private:
  struct Slot {
    uint64_t key = 0;
    uint32_t count = 0;  // 0: free
  };
  static constexpr uint64_t kSlots = 4 * kKept;

  // From 1 to 2 * kEvery - 1, kEvery in the mean.
  uint64_t distance() {
    draw_ ^= draw_ << 13;
    draw_ ^= draw_ >> 7;
    draw_ ^= draw_ << 17;
    return 1 + static_cast<uint64_t>((static_cast<unsigned __int128>(draw_) * (2 * kEvery - 1)) >> 64);
  }

  Slot& slot_of(uint64_t key) {
    uint64_t at = key & (kSlots - 1);  // keys are mixed: low bits are as random as high ones
    while (slots_[at].count != 0 && slots_[at].key != key) at = (at + 1) & (kSlots - 1);
    return slots_[at];
  }

  void add(uint64_t key) {
    if (++samples_ > kMemory) fade();
    Slot& slot = slot_of(key);
    if (slot.count != 0) {
      ++slot.count;
    } else if (num_kept_ < kKept) {
      slot = {key, 1};
      ++num_kept_;
    } else {
      ++lost_;
      keep([](uint32_t count) { return count - 1; });
    }
  }

  void fade() {
    samples_ /= 2;
    lost_ /= 2;
    keep([](uint32_t count) { return count / 2; });
  }

  // Change all counts; free slots end searches, so those that stay are put in anew.
  template <typename Change>
  void keep(Change change) {
    const std::array<Slot, kSlots> before = slots_;
    slots_ = {};
    num_kept_ = 0;
    for (const Slot& slot : before) {
      const uint32_t count = slot.count == 0 ? 0 : change(slot.count);
      if (count == 0) continue;
      slot_of(slot.key) = {slot.key, count};
      ++num_kept_;
    }
  }

  mutable std::mutex lock_;
  std::array<Slot, kSlots> slots_{};
  uint32_t num_kept_ = 0;
  uint64_t next_ = 0;  // how many keys are passed over before the next is taken
  uint64_t samples_ = 0, lost_ = 0;
  uint64_t draw_ = 0x9E3779B97F4A7C15;
};

}  // namespace penstock::table
