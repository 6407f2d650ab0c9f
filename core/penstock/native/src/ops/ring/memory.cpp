#include "ops/ring/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "ops/ring/ring.h"

namespace penstock::ring {
namespace {

struct Memory {
  std::uint64_t serial;
  std::size_t size;
  int descriptor;
};

struct Made {
  std::mutex lock;
  std::map<const char*, Memory> memories;  // by their begin
  std::uint64_t serial = 0;
};

Made& made() {
  static Made* all = new Made;  // outlives tensors that die at exit
  return *all;
}

[[noreturn]] void refuse(const std::string& what) {
  throw RingError(what + ": " + strerror(errno));
}

}  // namespace

char* make_memory(std::size_t size) {
  // The kernel would try, and end processes on the way.
  const auto all = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (size > all) {
    throw RingError(std::to_string(size >> 10) + " KiB of shared memory for gradients: this machine has " +
                    std::to_string(all >> 10));
  }
  const int descriptor = memfd_create("penstock-arena", MFD_CLOEXEC);
  if (descriptor < 0) refuse("shared memory for gradients cannot be had");
  // Taken now: memory that is not there would otherwise be a signal at its first use.
  if (const int error = posix_fallocate(descriptor, 0, static_cast<off_t>(size)); error != 0) {
    close(descriptor);
    errno = error;
    refuse(std::to_string(size >> 10) + " KiB of shared memory for gradients cannot be had");
  }
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0);
  if (mapped == MAP_FAILED) {
    close(descriptor);
    refuse("shared memory for gradients cannot be mapped");
  }
  auto* begin = static_cast<char*>(mapped);
  const std::lock_guard guard(made().lock);
  made().memories[begin] = {++made().serial, size, descriptor};
  return begin;
}

void free_memory(char* begin) {
  Memory memory{};
  {
    const std::lock_guard guard(made().lock);
    const auto found = made().memories.find(begin);
    if (found == made().memories.end()) return;
    memory = found->second;
    made().memories.erase(found);
  }
  munmap(begin, memory.size);
  close(memory.descriptor);
}

std::optional<Place> place_of(const void* bytes, std::size_t size) {
  const auto* first = static_cast<const char*>(bytes);
  const std::lock_guard guard(made().lock);
  auto found = made().memories.upper_bound(first);
  if (found == made().memories.begin()) return std::nullopt;
  --found;
  const auto offset = static_cast<std::size_t>(first - found->first);
  if (offset + size > found->second.size) return std::nullopt;
  return Place{found->second.serial, found->second.size, offset, found->second.descriptor};
}

Mappings::~Mappings() {
  for (const std::deque<Mapping>& mappings : of_rank_) {
    for (const Mapping& mapping : mappings) munmap(mapping.begin, mapping.size);
  }
}

const char* Mappings::at(std::uint32_t rank, pid_t pid, const Place& place) {
  std::deque<Mapping>& known = of_rank_[rank];
  for (const Mapping& mapping : known) {
    if (mapping.serial == place.serial) return mapping.begin + place.offset;
  }
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(place.descriptor);
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) refuse("the gradients of rank " + std::to_string(rank) + " cannot be opened (" + path + ")");
  void* mapped = mmap(nullptr, place.size, PROT_READ, MAP_SHARED | MAP_POPULATE, descriptor, 0);
  const int error = errno;
  close(descriptor);
  errno = error;
  if (mapped == MAP_FAILED) refuse("the gradients of rank " + std::to_string(rank) + " cannot be mapped");
  if (known.size() == kMost) {
    munmap(known.front().begin, known.front().size);
    known.pop_front();
  }
  known.push_back({place.serial, static_cast<char*>(mapped), place.size});
  return known.back().begin + place.offset;
}

}  // namespace penstock::ring
