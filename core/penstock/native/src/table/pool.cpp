#include "table/pool.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace penstock::table {
namespace {

// A piece is not used before it is taken, nor after it was given back: annotations for the sanitizer, which knows
// nothing of what is mapped here.
void forbid(void* begin, std::size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(begin, bytes);
#else
  static_cast<void>(begin), static_cast<void>(bytes);
#endif
}

void allow(void* begin, std::size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(begin, bytes);
#else
  static_cast<void>(begin), static_cast<void>(bytes);
#endif
}

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Whole huge pages straight from the system: malloc would hand out memory that was used before, which is on small pages
// for good.  Throws std::bad_alloc.
void* mapped(std::size_t bytes) {
  void* got = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) throw std::bad_alloc();
  const auto begin = reinterpret_cast<uintptr_t>(got);
  const std::size_t before = (kHugePage - begin % kHugePage) % kHugePage;
  char* region = static_cast<char*>(got) + before;
  if (before > 0) munmap(got, before);
  if (before < kHugePage) munmap(region + bytes, kHugePage - before);
  // Advice only: without huge pages the table is slower, not wrong.
  static_cast<void>(madvise(region, bytes, MADV_HUGEPAGE));
  return region;
}

}  // namespace

Pool::~Pool() {
  for (void* region : regions_) {
    allow(region, kRegionBytes);
    munmap(region, kRegionBytes);
  }
}

void* Pool::take() {
  const std::lock_guard guard(lock_);
  if (!free_.empty()) {
    void* piece = free_.back();
    free_.pop_back();
    allow(piece, kPieceBytes);
    return piece;
  }
  if (used_ == kRegionBytes) {
    regions_.reserve(regions_.size() + 1);  // so that a region cannot be lost
    regions_.push_back(mapped(kRegionBytes));
    forbid(regions_.back(), kRegionBytes);
    used_ = 0;
  }
  void* piece = static_cast<char*>(regions_.back()) + used_;
  used_ += kPieceBytes;
  allow(piece, kPieceBytes);
  return piece;
}

void Pool::give_back(void* piece) {
  const std::lock_guard guard(lock_);
  free_.push_back(piece);
  forbid(piece, kPieceBytes);
}

std::size_t Pool::held_bytes() const {
  const std::lock_guard guard(lock_);
  return regions_.empty() ? 0 : (regions_.size() - 1) * kRegionBytes + used_;
}

}  // namespace penstock::table
