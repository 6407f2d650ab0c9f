// Keys of one shard of a sparse table: 64-bit key -> row number.  Cuckoo hashing in buckets of one cache line.
//
// A bucket holds five keys with their rows (12 bytes an entry and 4 of bookkeeping: 12.8 bytes a slot).  A key lies in
// its home bucket, or, if that was full, in its other one, which is in the same 32 KiB.  The home counts the keys that
// are not there (`away`): a search costs one line, and a second only where the first says so.  (Linear probing needs
// the second for as many keys, but then often a third and fourth, each a wait for memory: half as fast.)
// Any key is valid: a slot's use is counted, not marked by a special key.
//
// Growth by a tenth keeps between 82 and 90 % of the slots used: 14.2 to 15.7 bytes a row, whatever the size.  An entry
// moves eleven times in its life, each time in the order of memory; rows never move.  Shards grow one at a time, so
// only one has two indexes at once.
#pragma once

#include <cstdint>
#include <vector>

#include "table/pool.h"

namespace penstock::table {

class Index {
  static constexpr uint32_t kSlots = 5;

 public:
  static constexpr uint32_t kNone = 0xFFFFFFFF;

  struct alignas(64) Bucket {
    uint64_t keys[kSlots];
    uint32_t rows[kSlots];
    uint16_t used;
    uint16_t away;  // keys whose home is here, but which lie in their other bucket
  };
  static_assert(sizeof(Bucket) == 64);

  // `shared_bits`: leading bits that are the same in all keys of this index.
  Index(Pool& pool, uint32_t shared_bits);
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;
  ~Index();

  // The steps of a search, for callers that let others run between them; valid until the next insertion.  A key lies in
  // its home, or, if a key is `away` from there, possibly in its other bucket.
  const Bucket* home(uint64_t key) const {
    const uint64_t bucket = home_of(key);
    return &pieces_[bucket >> kShift][bucket & kMask];
  }
  static const Bucket* other(const Bucket* bucket, uint64_t key) {  // of the two buckets of a key
    const auto at = reinterpret_cast<uintptr_t>(bucket);
    return reinterpret_cast<const Bucket*>(at ^ (distance(key) * sizeof(Bucket)));
  }
  static uint32_t slot(const Bucket& here, uint64_t key) {  // kNone if it is not there
    const uint32_t hit = match(here, key);
    return hit == 0 ? kNone : static_cast<uint32_t>(__builtin_ctz(hit));
  }

  uint32_t find(uint64_t key) const {
    const Bucket* here = home(key);
    uint32_t at = slot(*here, key);
    if (at == kNone && here->away != 0) {
      here = other(here, key);
      at = slot(*here, key);
    }
    return at == kNone ? kNone : here->rows[at];
  }
  // The key must be absent.
  void insert(uint64_t key, uint32_t row);
  // The row that the key had, or kNone.
  uint32_t erase(uint64_t key);

  uint64_t size() const { return size_; }
  uint64_t num_bytes() const { return pieces_.size() * Pool::kPieceBytes; }

  template <typename Visit>  // visit(key, row)
  void each(Visit visit) const {
    for (const Bucket* piece : pieces_) {
      for (const Bucket* here = piece; here < piece + kBuckets; ++here) {
        for (uint32_t i = 0; i < here->used; ++i) visit(here->keys[i], here->rows[i]);
      }
    }
  }

 private:
  static constexpr uint32_t kShift = 9;  // buckets of a piece: 32 KiB, which are aligned to that
  static constexpr uint64_t kBuckets = uint64_t{1} << kShift, kMask = kBuckets - 1;
  static_assert(sizeof(Bucket) << kShift == Pool::kPieceBytes);

  // Bit i is set where slot i holds the key.  Without branches: which slot it is cannot be predicted.
  static uint32_t match(const Bucket& here, uint64_t key) {
    uint32_t hits = 0;
    for (uint32_t i = 0; i < kSlots; ++i) hits |= static_cast<uint32_t>(here.keys[i] == key) << i;
    return hits & ((1U << here.used) - 1);
  }
  // Between a key's buckets: 1 to 511, from bits that do not choose its home.
  static uint64_t distance(uint64_t key) { return (key & kMask) | static_cast<uint64_t>((key & kMask) == 0); }
  uint64_t home_of(uint64_t key) const {
    const uint64_t buckets = pieces_.size() << kShift;
    return static_cast<uint64_t>((static_cast<unsigned __int128>(key << shared_bits_) * buckets) >> 64);
  }
  Bucket* mutable_home(uint64_t key) { return const_cast<Bucket*>(home(key)); }
  static Bucket* mutable_other(Bucket* bucket, uint64_t key) { return const_cast<Bucket*>(other(bucket, key)); }
  static void append(Bucket& to, uint64_t key, uint32_t row);
  static void remove(Bucket& from, uint32_t slot);
  bool put(uint64_t key, uint32_t row);
  bool make_room(Bucket* home, Bucket* other);
  void move(Bucket* from, uint32_t slot);
  std::vector<Bucket*> cleared(uint64_t num_pieces);
  void grow();
  bool refill(const std::vector<Bucket*>& from);

  Pool& pool_;
  uint32_t shared_bits_;
  std::vector<Bucket*> pieces_;
  uint64_t size_ = 0;
};

}  // namespace penstock::table
