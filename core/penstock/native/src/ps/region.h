// Memory that a process fills and another reads: a memfd, sealed by its maker against shrinking, since memory that
// shrinks under a reader kills it. It vanishes with the last descriptor and mapping.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace penstock::ps {

class Region {
 public:
  // Whole MiB, whose pages exist: writing to them cannot fail later. Null where memory is short or cannot be sealed,
  // with the reason in `why`.
  static std::shared_ptr<Region> make(std::size_t at_least, std::string& why);

  // Maps what came over a socket, and takes the descriptor over. Throws Malformed if it could shrink.
  static std::shared_ptr<Region> received(int descriptor);

  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  char* data() const { return data_; }
  std::size_t size() const { return size_; }
  int descriptor() const { return descriptor_; }

 private:
  Region(int descriptor, char* data, std::size_t size) : descriptor_(descriptor), data_(data), size_(size) {}

  int descriptor_;
  char* data_;
  std::size_t size_;
};

}  // namespace penstock::ps
