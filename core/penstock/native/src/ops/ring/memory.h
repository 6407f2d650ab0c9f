// Memory that other processes of this host can map: what they have to sum in place lies in it. Torch-free.
//
// `make` gives memory of this process behind a memfd, so that nothing is left behind however the process ends. Another
// process opens it through /proc, at the first exchange in which it gets the address (`Mappings`). It may go at any
// time: a process that has it mapped keeps the pages, and forgets them when it has seen enough newer ones.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

namespace penstock::ring {

// Where some bytes lie, in words that another process understands. Plain data: it travels in a slot.
struct Place {
  std::uint64_t serial;  // of the memory, never used again in the process
  std::uint64_t size, offset;
  std::int64_t descriptor;
};

// Any thread. make() throws RingError where the memory cannot be had; `begin` for free() is what make() gave.
char* make_memory(std::size_t size);
void free_memory(char* begin);
// None: the bytes do not lie in such memory.
std::optional<Place> place_of(const void* bytes, std::size_t size);

// Memory of other processes, mapped for reading. One thread at a time.
class Mappings {
 public:
  explicit Mappings(std::uint32_t num_ranks) : of_rank_(num_ranks) {}
  ~Mappings();
  Mappings(const Mappings&) = delete;
  Mappings& operator=(const Mappings&) = delete;

  // Throws RingError. What it returns holds until another kMost memories of that rank were asked for.
  const char* at(std::uint32_t rank, pid_t pid, const Place& place);

 private:
  static constexpr std::size_t kMost = 4;
  struct Mapping {
    std::uint64_t serial;
    char* begin;
    std::size_t size;
  };
  std::vector<std::deque<Mapping>> of_rank_;
};

}  // namespace penstock::ring
