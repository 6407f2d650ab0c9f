#include "table/pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <new>
#include <utility>

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

// Straight from the system: malloc would hand out memory that was used before, which is on small pages for good.
// Throws std::bad_alloc.
char* mapped(std::size_t bytes, std::size_t alignment) {
  void* got =
      mmap(nullptr, bytes + alignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) throw std::bad_alloc();
  const auto begin = reinterpret_cast<uintptr_t>(got);
  const std::size_t before = (alignment - begin % alignment) % alignment;
  char* region = static_cast<char*>(got) + before;
  if (before > 0) munmap(got, before);
  if (before < alignment) munmap(region + bytes, alignment - before);
  return region;
}

// Advice only: without huge pages the table is slower, not wrong.
void ask_for_huge_pages(char* begin, const char* end) {
  if (begin < end) static_cast<void>(madvise(begin, static_cast<std::size_t>(end - begin), MADV_HUGEPAGE));
}

}  // namespace

Pool::~Pool() {
  for (char* region : regions_) {
    penstock::table::allow(region, region_bytes());
    munmap(region, region_bytes());
  }
}

std::size_t Pool::alignment(std::size_t beside_bytes) {
  return std::bit_ceil((kRegionBytes / kPieceBytes) * (kPieceBytes + beside_bytes));
}

void Pool::add_region() {
  if (regions_.size() == room_) {
    const std::size_t room = std::max<std::size_t>(16, 2 * room_);
    auto table = std::make_unique<char*[]>(room);
    std::copy(regions_.begin(), regions_.end(), table.get());
    tables_.push_back(std::move(table));
    room_ = room;
  }
  regions_.reserve(regions_.size() + 1);  // so that a region cannot be lost
  char* region = mapped(region_bytes(), alignment(beside_bytes_));
  const std::size_t small = regions_.empty() ? kHugePage : 0;
  ask_for_huge_pages(region + small, region + kRegionBytes);
  ask_for_huge_pages(region + kRegionBytes + small, region + region_bytes());
  regions_.push_back(region);
  penstock::table::forbid(region, region_bytes());
  tables_.back()[regions_.size() - 1] = region;  // not read before a piece of it is taken
  addresses_.store(tables_.back().get(), std::memory_order_release);
  used_ = 0;
}

void Pool::forbid(uint32_t piece) const {
  const std::size_t offset = piece * kPieceBytes % kRegionBytes;
  char* region = regions_[piece / (kRegionBytes / kPieceBytes)];
  penstock::table::forbid(region + offset, kPieceBytes);
  penstock::table::forbid(beside(region, offset, beside_bytes_), beside_bytes_);
}

void Pool::allow(uint32_t piece) const {
  const std::size_t offset = piece * kPieceBytes % kRegionBytes;
  char* region = regions_[piece / (kRegionBytes / kPieceBytes)];
  penstock::table::allow(region + offset, kPieceBytes);
  penstock::table::allow(beside(region, offset, beside_bytes_), beside_bytes_);
}

uint32_t Pool::take() {
  const std::lock_guard guard(lock_);
  uint32_t piece = 0;
  if (!free_.empty()) {
    piece = free_.back();
    free_.pop_back();
  } else {
    if (used_ == kRegionBytes) add_region();
    piece = static_cast<uint32_t>(((regions_.size() - 1) * kRegionBytes + used_) / kPieceBytes);
    used_ += kPieceBytes;
  }
  allow(piece);
  return piece;
}

void Pool::give_back(uint32_t piece) {
  const std::lock_guard guard(lock_);
  free_.push_back(piece);
  forbid(piece);
}

std::size_t Pool::held_bytes() const {
  const std::lock_guard guard(lock_);
  const std::size_t pieces = regions_.empty() ? 0 : ((regions_.size() - 1) * kRegionBytes + used_) / kPieceBytes;
  return pieces * piece_bytes();
}

}  // namespace penstock::table
