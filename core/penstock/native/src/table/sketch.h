// How often keys without a row were seen, in bounded memory: a count-min sketch whose four counters of a key lie in one
// cache line.  One sketch a shard, used under its lock.
//
// A count is never too low while the sketch is young, and too high only where keys share all four counters: a row may
// be made early, not late.  All counts are halved after eight sightings a counter, so that old ones do not add up to
// an admission of all; a key then needs its sightings within that time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace penstock::table {

class Sketch {
 public:
  static constexpr uint32_t kMost = 255;

  explicit Sketch(uint64_t num_bytes) : lines_(std::max<uint64_t>(1, num_bytes / sizeof(Line))) {}

  // Note a sighting of the key and return how many there were.
  uint32_t seen(uint64_t key) {
    if (++sightings_ > 8 * num_bytes()) halve();
    uint8_t* counters =
        lines_[static_cast<uint64_t>((static_cast<unsigned __int128>(key << 16) * lines_.size()) >> 64)].counters;
    uint32_t least = kMost;
    for (uint32_t i = 0; i < kCounters; ++i) least = std::min<uint32_t>(least, counters[at(key, i)]);
    if (least == kMost) return kMost;
    for (uint32_t i = 0; i < kCounters; ++i) {
      if (counters[at(key, i)] == least) counters[at(key, i)] = static_cast<uint8_t>(least + 1);
    }
    return least + 1;
  }

  uint64_t num_bytes() const { return lines_.size() * sizeof(Line); }

  // All that it has counted, in `num_copied` bytes, and back.
  uint64_t num_copied() const { return sizeof sightings_ + num_bytes(); }
  void copy(uint8_t* to) const {
    std::memcpy(to, &sightings_, sizeof sightings_);
    std::memcpy(to + sizeof sightings_, lines_.data(), num_bytes());
  }
  void restore(const uint8_t* from) {
    std::memcpy(&sightings_, from, sizeof sightings_);
    std::memcpy(lines_.data(), from + sizeof sightings_, num_bytes());
  }

 private:
  static constexpr uint32_t kCounters = 4;
  struct alignas(64) Line {
    uint8_t counters[64] = {};
  };
  // Each of a key's counters lies in a quarter of the line of its own.
  static uint32_t at(uint64_t key, uint32_t i) { return 16 * i + static_cast<uint32_t>(key >> (4 * i) & 15); }
  void halve() {
    for (Line& line : lines_) {
      for (uint8_t& counter : line.counters) counter /= 2;
    }
    sightings_ /= 2;
  }

  std::vector<Line> lines_;
  uint64_t sightings_ = 0;
};

}  // namespace penstock::table
