// Keys of one shard of a sparse table: 64-bit key -> row number.  Cuckoo hashing in buckets of one cache line.
//
// A bucket holds seven keys with their rows, 9 bytes an entry.  A key's leading bits choose its bucket, so the bucket
// stands for them and only the others are kept: eight as a tag, the rest beside the row's number.  The eight tags of a
// bucket (the eighth byte counts) are compared at once, and the entry that a tag points to says if it is the key.
//
// A key lies in its home bucket, or, if that was full, in its other one, which is in the same 32 KiB; an entry says
// which.  The home counts the keys that are not there (`away`): a search costs one line, and a second only where the
// first says so, for 3 % of the keys.  (Linear probing needs the second for as many keys, but then often a third and
// fourth, each a wait for memory.  Five keys of 12 bytes in a bucket need it for 16 %.)
// Any key is valid: a slot's use is counted, not marked by a special key.
//
// Growth by a tenth keeps between 59 and 65 % of the slots used: 14.1 to 15.5 bytes a row, whatever the size.  An entry
// moves eleven times in its life, each time in the order of memory; rows never move.  Shards grow one at a time, so
// only one has two indexes at once.
#pragma once

#include <cstdint>
#include <vector>

#include "table/pool.h"

namespace penstock::table {

class Index {
 public:
  static constexpr uint64_t kNone = ~uint64_t{0};

  struct alignas(64) Bucket {
    uint64_t tags;        // a byte a slot; the last: slots used (3 bits), and keys `away` (5)
    uint64_t entries[7];  // from the top: the key's bits above its tag, is it away, its row's number

    uint32_t used() const { return static_cast<uint32_t>(tags >> 56) & 7; }
    bool sends_away() const { return tags >> 59 != 0; }
  };
  static_assert(sizeof(Bucket) == 64);

  // Keys of this index have the same `shared_bits` leading bits: those of the number `shared`.
  Index(Pool& pool, uint32_t shared_bits, uint64_t shared);
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;
  ~Index();

  // The steps of a search, for callers that let others run between them; valid until the next insertion.  A key lies in
  // its home, or, if that `sends_away`, possibly in its other bucket.
  const Bucket* home(Regions regions, uint64_t key) const { return bucket(regions, home_of(key)); }
  static const Bucket* other(const Bucket* bucket, uint64_t key) {  // of the two buckets of a key
    const auto at = reinterpret_cast<uintptr_t>(bucket);
    return reinterpret_cast<const Bucket*>(at ^ (distance(key >> kTagBits) * sizeof(Bucket)));
  }
  // The row's number, or kNone if the key is not there.
  uint64_t find_home(const Bucket& home, uint64_t key) const { return row_at(home, slot(home, key, wanted(key, 0))); }
  uint64_t find_away(const Bucket& other, uint64_t key) const {
    return row_at(other, slot(other, key, wanted(key, 1)));
  }
  uint64_t find(uint64_t key) const {
    const Bucket* here = home(pool_.regions(), key);
    const uint64_t row = find_home(*here, key);
    return row != kNone || !here->sends_away() ? row : find_away(*other(here, key), key);
  }

  // The key must be absent.
  void insert(uint64_t key, uint64_t row);
  // The row that the key had, or kNone.
  uint64_t erase(uint64_t key);

  uint64_t size() const { return size_; }
  uint64_t num_bytes() const { return pieces_.size() * Pool::kPieceBytes; }

  template <typename Visit>  // visit(key, row)
  void each(Visit visit) const {
    const Regions regions = pool_.regions();
    for (uint64_t at = 0; at < num_buckets_; ++at) {
      const Bucket& here = *bucket(regions, at);
      const uint64_t first = first_key(at);
      for (uint32_t i = 0; i < here.used(); ++i) {
        const uint64_t rest = here.entries[i] >> row_bits_;
        const bool away = (rest & 1) != 0;
        const uint64_t begin = away ? first_key(at ^ distance(rest >> 1)) : first;
        visit(key_from(begin, (rest >> 1) << kTagBits | (here.tags >> 8 * i & 0xFF)), here.entries[i] & row_mask());
      }
    }
  }

 private:
  static constexpr uint32_t kSlots = 7, kTagBits = 8, kMostAway = 31;
  static constexpr uint32_t kShift = 9;  // buckets of a piece: 32 KiB, which are aligned to that
  static constexpr uint64_t kBuckets = uint64_t{1} << kShift, kMask = kBuckets - 1;
  static_assert(sizeof(Bucket) << kShift == Pool::kPieceBytes);

  // Between a key's buckets: 1 to 511, from bits that do not choose its home and are not its tag.
  static uint64_t distance(uint64_t rest) { return (rest & kMask) | static_cast<uint64_t>((rest & kMask) == 0); }
  const Bucket* bucket(Regions regions, uint64_t at) const {
    return reinterpret_cast<const Bucket*>(regions.piece(pieces_[at >> kShift])) + (at & kMask);
  }
  uint64_t home_of(uint64_t key) const {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(key << shared_bits_) * num_buckets_) >> 64);
  }
  // The first of the keys, without the shared bits, whose home the bucket is.
  uint64_t first_key(uint64_t bucket) const {
    return static_cast<uint64_t>(((static_cast<unsigned __int128>(bucket) << (64 - shared_bits_)) + num_buckets_ - 1) /
                                 num_buckets_);
  }
  // The key at or after the first one of its home with these low bits.  A home has fewer keys than they have values.
  uint64_t key_from(uint64_t first, uint64_t low) const {
    const uint64_t mask = (uint64_t{1} << low_bits()) - 1;
    return shared_ | (first + ((low - first) & mask));
  }
  uint32_t low_bits() const { return 63 + kTagBits - row_bits_; }
  uint64_t row_mask() const { return (uint64_t{1} << row_bits_) - 1; }

  // The entry of a key, without its row.  Bits of the key that its home stands for are shifted out.
  uint64_t wanted(uint64_t key, uint64_t away) const { return (((key >> kTagBits) << 1) | away) << row_bits_; }
  // Which slot has the entry; kSlots if none has.  Tags first: all at once, and without branches, for which of them it
  // is cannot be predicted.  A byte after an equal one may seem equal; its entry is not.
  uint32_t slot(const Bucket& here, uint64_t key, uint64_t entry) const {
    constexpr uint64_t kOnes = 0x0101010101010101;
    const uint64_t differ = here.tags ^ (key & 0xFF) * kOnes;
    uint64_t equal = (differ - kOnes) & ~differ & (kOnes << 7) & ((uint64_t{1} << 8 * here.used()) - 1);
    while (equal != 0) {
      const auto at = static_cast<uint32_t>(__builtin_ctzll(equal)) >> 3;
      if ((here.entries[at] ^ entry) >> row_bits_ == 0) [[likely]]
        return at;
      equal &= equal - 1;
    }
    return kSlots;
  }
  uint64_t row_at(const Bucket& here, uint32_t slot) const {
    return slot == kSlots ? kNone : here.entries[slot] & row_mask();
  }

  Bucket* mutable_home(uint64_t key) { return const_cast<Bucket*>(home(pool_.regions(), key)); }
  static Bucket* mutable_other(Bucket* bucket, uint64_t key) { return const_cast<Bucket*>(other(bucket, key)); }
  // The other bucket of the key in a slot.
  Bucket* other_of(Bucket* bucket, uint32_t slot) const;
  static void append(Bucket& to, uint64_t tag, uint64_t entry);
  static void remove(Bucket& from, uint32_t slot);
  static void count_away(Bucket& home, bool more);
  bool put(uint64_t key, uint64_t row);
  bool make_room(Bucket* home, Bucket* other);
  void move(Bucket* from, uint32_t slot);
  void resize(uint64_t num_pieces);
  void grow();
  bool refill(const Index& from);

  Pool& pool_;
  uint32_t shared_bits_;
  uint32_t row_bits_ = 0;  // of an entry; the more buckets, the more of the key they stand for
  uint64_t num_buckets_ = 0;
  std::vector<uint32_t> pieces_;
  uint64_t shared_;  // the leading bits that all keys have
  uint64_t size_ = 0;
};

}  // namespace penstock::table
