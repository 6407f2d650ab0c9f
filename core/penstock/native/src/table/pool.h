// Memory for indexes and rows of all shards of a table, in pieces of 32 KiB cut from regions of huge pages.
//
// Random rows of a large table miss the translation cache at every access if they lie on small pages: huge pages make
// them 3.7 times as fast (measured: random cache lines of 1 GiB).  Asked for shard by shard, huge pages would stay half
// empty; pieces of all shards share them.  Thread-safe.  Pieces that are given back are used again, not returned to the
// system before the table goes.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

namespace penstock::table {

class Pool {
 public:
  static constexpr std::size_t kPieceBytes = 32 << 10;

  Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool();

  // A piece, aligned to its size.  Its content is anything.  Throws std::bad_alloc.
  void* take();
  void give_back(void* piece);

  std::size_t held_bytes() const;  // cut from regions so far: pieces taken now, and pieces given back

 private:
  static constexpr std::size_t kRegionBytes = 32 << 20;

  mutable std::mutex lock_;
  std::vector<void*> regions_;
  std::vector<void*> free_;
  std::size_t used_ = kRegionBytes;  // of the newest region
};

}  // namespace penstock::table
