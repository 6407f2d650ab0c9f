// From text to rows: the lines of a stream one after the other, with what happens to a bad one.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "feed/blocks.h"
#include "feed/line.h"
#include "feed/rows.h"

namespace penstock::feed {

// Where reading has come to: the byte of the stream where the next line begins, and the lines before it.
struct Place {
  uint64_t offset = 0;
  uint64_t lines = 0;
};

// Counts are atomic: others look at them while it runs.
class Parser {
 public:
  explicit Parser(std::vector<Slot> slots, bool skips_bad_lines)
      : slots_(std::move(slots)), skips_bad_lines_(skips_bad_lines) {}

  // Append the lines from `place` to those that begin before byte `end` to `rows()` of the sink, and call its
  // `appended(place)` after each; false from it ends the reading.  Return the line that could not be read, if there is
  // one and bad lines are not skipped; `place` is behind the last line that was.  A last line without a line end is
  // left for `read_rest`, before which the caller can find out whether the stream has ended well.
  template <typename Sink>
  std::optional<Fault> read(int descriptor, Place& place, uint64_t end, Sink& sink) {
    Blocks blocks(descriptor, place.offset);
    rest_.clear();
    for (;;) {
      const Blocks::Block block = blocks.next();
      if (block.begin == block.end) {
        if (place.offset < end) rest_ = blocks.rest();
        return std::nullopt;
      }
      std::optional<Fault> fault;
      if (!read_block(block, place, end, sink, fault)) return fault;
    }
  }

  template <typename Sink>
  std::optional<Fault> read_rest(Place& place, Sink& sink) {
    std::optional<Fault> fault;
    if (rest_.empty()) return fault;
    const std::size_t size = rest_.size() + 1;
    rest_.append(1 + Blocks::kBehind, '\n');
    read_block({rest_.data(), rest_.data() + size, place.offset}, place, place.offset + size, sink, fault);
    rest_.clear();
    return fault;
  }

  const std::vector<Slot>& slots() const { return slots_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t skipped() const { return skipped_; }
  std::vector<Fault> take_faults() { return std::exchange(faults_, {}); }  // when nothing is being read

 private:
  static constexpr std::size_t kShownOfLine = 200;
  static constexpr std::size_t kKept = 10;  // faults that are retained, of those that are counted

  // False: nothing more is to be read.
  template <typename Sink>
  bool read_block(const Blocks::Block& block, Place& place, uint64_t end, Sink& sink, std::optional<Fault>& bad) {
    Fault fault;
    for (const char* p = block.begin; p != block.end;) {
      if (place.offset >= end) return false;
      const char* next = read_line(p, block.end, slots_, sink.rows(), fault);
      const bool good = next != nullptr;
      if (!good) [[unlikely]] {
        next = static_cast<const char*>(std::memchr(p, '\n', static_cast<std::size_t>(block.end - p))) + 1;
        fault.line = place.lines + 1;
        fault.text.assign(p, std::min<std::size_t>(static_cast<std::size_t>(next - 1 - p), kShownOfLine));
        if (!skips_bad_lines_) {
          bad = std::move(fault);
          return false;
        }
        note(std::exchange(fault, {}));
      }
      place.offset = block.offset + static_cast<uint64_t>(next - block.begin);
      ++place.lines;
      p = next;
      if (good && !sink.appended(place)) return false;
    }
    bytes_ += static_cast<uint64_t>(block.end - block.begin);
    return true;
  }

  void note(Fault fault) {
    ++skipped_;
    if (faults_.size() < kKept) faults_.push_back(std::move(fault));
  }

  std::vector<Slot> slots_;
  bool skips_bad_lines_;
  std::vector<Fault> faults_;
  std::string rest_;
  std::atomic<uint64_t> bytes_{0}, skipped_{0};
};

}  // namespace penstock::feed
