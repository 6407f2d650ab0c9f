// Text from a file or a pipe, in blocks that end at a line end.
//
// It is read, not mapped: into a buffer that stays in the processor's cache this takes an eighth of the time of parsing
// (docs/datasets.md), of which a mapping would save a half; it serves pipes in the same way, and a file that is cut
// short meanwhile is a short read instead of a fatal signal.
// Behind a block there is room for what `numbers.h` reads beyond a line end.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace penstock::feed {

class Blocks {
 public:
  // `offset`: of the text that comes first, in the stream.
  explicit Blocks(int descriptor, uint64_t offset) : descriptor_(descriptor), offset_(offset) {}

  struct Block {
    const char* begin;
    const char* end;  // end[-1] is a line end; begin == end: there is no more that ends with one
    uint64_t offset;  // of `begin`
  };

  // Valid until the next call.  Throws std::system_error if a read fails, std::length_error for a line of more than
  // kLongest bytes.
  Block next();
  // What stands behind the last line end, once there is no more: a whole line, or half of one that was not written to
  // its end.
  std::string_view rest() const { return {buffer_.data() + begin_, end_ - begin_}; }

  static constexpr std::size_t kBlock = 256U << 10U;
  static constexpr std::size_t kLongest = 64U << 20U;
  static constexpr std::size_t kBehind = 64;  // bytes that may be read behind a block

 private:
  std::size_t fill(std::size_t from);

  int descriptor_;
  uint64_t offset_;
  std::vector<char> buffer_;
  std::size_t begin_ = 0;  // of text that was not given out
  std::size_t end_ = 0;    // of text
  bool ended_ = false;
};

}  // namespace penstock::feed
