#include "ps/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "ps/errors.h"

namespace penstock::ps {
namespace {

constexpr std::size_t kStep = std::size_t{1} << 20;

char* map(int descriptor, std::size_t size) {
  void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return found == MAP_FAILED ? nullptr : static_cast<char*>(found);
}

}  // namespace

std::shared_ptr<Region> Region::make(std::size_t at_least, std::string& why) {
  const std::size_t size = (at_least + kStep - 1) / kStep * kStep;
  const int descriptor = memfd_create("penstock-ps", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) {
    why = std::strerror(errno);
    return nullptr;
  }
  int failed = posix_fallocate(descriptor, 0, static_cast<off_t>(size));  // returns the error
  if (failed == 0 && fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) failed = errno;
  char* data = failed == 0 ? map(descriptor, size) : nullptr;
  if (failed == 0 && data == nullptr) failed = errno;
  if (failed != 0) {
    why = std::strerror(failed);
    close(descriptor);
    return nullptr;
  }
  return std::shared_ptr<Region>(new Region(descriptor, data, size));
}

std::shared_ptr<Region> Region::received(int descriptor) {
  struct stat found{};
  const int seals = fcntl(descriptor, F_GET_SEALS);
  const bool sealed = seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
  if (!sealed || fstat(descriptor, &found) != 0 || found.st_size <= 0) {
    close(descriptor);
    throw Malformed(sealed ? "the memory that came over the socket has no size"
                           : "the memory that came over the socket is not sealed against shrinking");
  }
  const auto size = static_cast<std::size_t>(found.st_size);
  char* data = map(descriptor, size);
  if (data == nullptr) {
    const std::string why = std::strerror(errno);
    close(descriptor);
    throw Malformed("the memory that came over the socket cannot be mapped: " + why);
  }
  return std::shared_ptr<Region>(new Region(descriptor, data, size));
}

Region::~Region() {
  munmap(data_, size_);
  close(descriptor_);
}

}  // namespace penstock::ps
