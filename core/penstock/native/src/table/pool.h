// Memory for the indexes or the rows of all shards of a table, in pieces of 32 KiB cut from regions of huge pages.
//
// Random rows of a large table miss the translation cache at every access if they lie on small pages: huge pages make
// them 3.7 times as fast (measured: random cache lines of 1 GiB).  Asked for shard by shard, huge pages would stay half
// empty; pieces of all shards share them.  Only a pool's first 2 MiB are on small pages: most tables are small.
// Thread-safe.  Pieces that are given back are used again, not returned to the system before the table goes.
//
// A piece has a number for life; `Regions` finds its address with one read of a table that stays in the first cache
// (8 bytes for 32 MiB; a pointer for each piece would be 160 KB for 10^7 rows of 16 floats).
//
// A pool may have more memory for each of its pieces `beside` it: a region is its pieces, then what is beside each,
// aligned so that one is found from an address in the other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace penstock::table {

// Addresses of pieces, as of some moment: valid for the pieces taken before.
class Regions {
 public:
  static constexpr uint32_t kPieceBits = 15, kRegionBits = 25;  // 32 KiB and 32 MiB

  explicit Regions(char* const* regions) : regions_(regions) {}
  char* piece(uint64_t number) const {
    constexpr uint32_t kShift = kRegionBits - kPieceBits;
    return regions_[number >> kShift] + ((number & ((uint64_t{1} << kShift) - 1)) << kPieceBits);
  }

 private:
  char* const* regions_;
};

class Pool {
 public:
  static constexpr std::size_t kPieceBytes = std::size_t{1} << Regions::kPieceBits;

  explicit Pool(std::size_t beside_bytes) : beside_bytes_(beside_bytes) {}
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool();

  // The number of a piece, aligned to its size.  Its content is anything.  Throws std::bad_alloc.
  uint32_t take();
  void give_back(uint32_t piece);

  // Regions begin at multiples of this.
  static std::size_t alignment(std::size_t beside_bytes);
  // What is beside the piece at this address of a region that begins there.
  static char* beside(char* region, std::size_t offset, std::size_t beside_bytes) {
    return region + (std::size_t{1} << Regions::kRegionBits) + (offset >> Regions::kPieceBits) * beside_bytes;
  }

  // Valid for a piece whose number was read under a lock that the thread which took it held since.
  Regions regions() const { return Regions(addresses_.load(std::memory_order_acquire)); }

  std::size_t piece_bytes() const { return kPieceBytes + beside_bytes_; }  // a piece and what is beside it
  std::size_t held_bytes() const;  // cut from regions so far: pieces taken now, and pieces given back

 private:
  static constexpr std::size_t kRegionBytes = std::size_t{1} << Regions::kRegionBits;

  std::size_t region_bytes() const { return (kRegionBytes / kPieceBytes) * piece_bytes(); }
  void add_region();
  void forbid(uint32_t piece) const;
  void allow(uint32_t piece) const;

  std::size_t beside_bytes_;
  mutable std::mutex lock_;
  std::vector<char*> regions_;
  std::vector<std::unique_ptr<char*[]>> tables_;  // each twice as long as the one before; readers may be in any
  std::atomic<char* const*> addresses_{nullptr};  // the last
  std::size_t room_ = 0;                          // of that
  std::vector<uint32_t> free_;
  std::size_t used_ = kRegionBytes;  // of the newest region
};

}  // namespace penstock::table
