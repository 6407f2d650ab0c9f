#include "feed/blocks.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

namespace penstock::feed {

std::size_t Blocks::fill(std::size_t from) {
  if (buffer_.size() < from + kBlock + kBehind) buffer_.resize(from + kBlock + kBehind);
  for (;;) {
    const ssize_t got = ::read(descriptor_, buffer_.data() + from, kBlock);
    if (got >= 0) return static_cast<std::size_t>(got);
    if (errno != EINTR) throw std::system_error(errno, std::generic_category(), "reading data");
  }
}

Blocks::Block Blocks::next() {
  // What is left of the last line comes first.
  const std::size_t kept = end_ - begin_;
  if (kept != 0 && begin_ != 0) std::memmove(buffer_.data(), buffer_.data() + begin_, kept);
  begin_ = 0;
  end_ = kept;
  while (!ended_) {
    const std::size_t got = fill(end_);
    const std::size_t searched = end_;
    end_ += got;
    if (got == 0) {
      ended_ = true;
      break;
    }
    const void* last = ::memrchr(buffer_.data() + searched, '\n', got);
    if (last != nullptr) {
      begin_ = static_cast<std::size_t>(static_cast<const char*>(last) - buffer_.data()) + 1;
      break;
    }
    if (end_ > kLongest) {
      throw std::length_error("there is no line end in " + std::to_string(kLongest) + " bytes from byte " +
                              std::to_string(offset_) + " on: this is no text of lines");
    }
  }
  const Block block{buffer_.data(), buffer_.data() + begin_, offset_};
  offset_ += begin_;
  return block;
}

}  // namespace penstock::feed
