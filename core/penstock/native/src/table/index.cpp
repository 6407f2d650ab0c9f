#include "table/index.h"

#include <bit>
#include <cstring>
#include <utility>

namespace penstock::table {

Index::Index(Pool& pool, uint32_t shared_bits, uint64_t shared)
    : pool_(pool), shared_bits_(shared_bits), shared_(shared_bits == 0 ? 0 : shared << (64 - shared_bits)) {
  resize(1);
}

Index::~Index() {
  for (const uint32_t piece : pieces_) pool_.give_back(piece);
}

// From no bucket to those of so many pieces, all of them empty.
void Index::resize(uint64_t num_pieces) {
  pieces_.reserve(num_pieces);  // so that a piece cannot be lost
  while (pieces_.size() < num_pieces) {
    pieces_.push_back(pool_.take());
    std::memset(pool_.regions().piece(pieces_.back()), 0, Pool::kPieceBytes);
  }
  num_buckets_ = num_pieces << kShift;
  // A home has at most 2^(low bits) keys.  An entry holds those bits but the tag, and one more; the row has the others.
  const uint32_t low_bits = 64 - shared_bits_ - (static_cast<uint32_t>(std::bit_width(num_buckets_)) - 1);
  row_bits_ = 63 + kTagBits - low_bits;
}

void Index::append(Bucket& to, uint64_t tag, uint64_t entry) {
  const uint32_t at = to.used();
  to.tags = (to.tags & ~(uint64_t{0xFF} << 8 * at)) | tag << 8 * at;
  to.tags += uint64_t{1} << 56;
  to.entries[at] = entry;
}

void Index::remove(Bucket& from, uint32_t slot) {
  const uint32_t last = from.used() - 1;
  const uint64_t tag = from.tags >> 8 * last & 0xFF;
  from.tags = (from.tags & ~(uint64_t{0xFF} << 8 * slot)) | tag << 8 * slot;
  from.tags -= uint64_t{1} << 56;
  from.entries[slot] = from.entries[last];
}

// At the most that can be counted it stays there: then searches go on to the other bucket, whether or not they need to.
void Index::count_away(Bucket& home, bool more) {
  if (home.tags >> 59 == kMostAway) return;
  home.tags += more ? uint64_t{1} << 59 : -(uint64_t{1} << 59);
}

Index::Bucket* Index::other_of(Bucket* bucket, uint32_t slot) const {
  return mutable_other(bucket, bucket->entries[slot] >> (row_bits_ + 1) << kTagBits);
}

void Index::insert(uint64_t key, uint64_t row) {
  if ((size_ + 1) * 100 > num_buckets_ * kSlots * 65) grow();
  // A number too long for an entry, or a piece that happens to be full, at 10^-7 or less.
  while (row > row_mask() || !put(key, row)) grow();
  ++size_;
}

bool Index::put(uint64_t key, uint64_t row) {
  Bucket* home = mutable_home(key);
  Bucket* second = mutable_other(home, key);
  if (home->used() == kSlots && second->used() == kSlots && !make_room(home, second)) return false;
  const bool away = home->used() == kSlots;
  if (away) count_away(*home, true);
  append(away ? *second : *home, key & 0xFF, wanted(key, away ? 1 : 0) | row);
  return true;
}

// Move the entry to the other of its buckets, which has room.
void Index::move(Bucket* from, uint32_t slot) {
  const uint64_t away = uint64_t{1} << row_bits_;
  const uint64_t entry = from->entries[slot];
  Bucket* to = other_of(from, slot);
  const bool leaves_home = (entry & away) == 0;
  count_away(leaves_home ? *from : *to, leaves_home);
  append(*to, from->tags >> 8 * slot & 0xFF, entry ^ away);
  remove(*from, slot);
}

// Free a slot in one of two full buckets: breadth first over the buckets to which their entries could move.
bool Index::make_room(Bucket* home, Bucket* other) {
  constexpr uint32_t kMost = 512;
  struct Step {
    Bucket* bucket;
    uint32_t before;  // the step from which an entry would move here
    uint32_t slot;    // its slot there
  };
  Step steps[kMost];
  steps[0] = {home, 0, 0};
  steps[1] = {other, 1, 0};
  uint32_t known = 2;
  for (uint32_t at = 0; at < known; ++at) {
    for (uint32_t slot = 0; slot < kSlots && known < kMost; ++slot) {
      Bucket* to = other_of(steps[at].bucket, slot);
      steps[known++] = {to, at, slot};
      if (to->used() == kSlots) continue;
      // From the end of the way to its beginning: each move frees the slot that the one before it fills.
      for (uint32_t last = known - 1; last >= 2; last = steps[last].before) {
        const Step& from = steps[steps[last].before];
        if (other_of(from.bucket, steps[last].slot) != steps[last].bucket) return false;
        move(from.bucket, steps[last].slot);
      }
      return true;
    }
  }
  return false;
}

uint64_t Index::erase(uint64_t key) {
  Bucket* home = mutable_home(key);
  Bucket* here = home;
  uint32_t at = slot(*here, key, wanted(key, 0));
  if (at == kSlots && home->sends_away()) {
    here = mutable_other(home, key);
    at = slot(*here, key, wanted(key, 1));
  }
  if (at == kSlots) return kNone;
  const uint64_t row = here->entries[at] & row_mask();
  if (here != home) count_away(*home, false);
  remove(*here, at);
  --size_;
  return row;
}

void Index::grow() {
  uint64_t wanted = pieces_.size();
  while (true) {
    wanted += wanted / 10 + 1;
    Index larger(pool_, shared_bits_, 0);
    larger.shared_ = shared_;
    larger.resize(wanted);
    if (!larger.refill(*this)) continue;
    pieces_.swap(larger.pieces_);
    num_buckets_ = larger.num_buckets_;
    row_bits_ = larger.row_bits_;
    return;
  }
}

// First all that fit into their homes, then the others: fewest keys are away.
bool Index::refill(const Index& from) {
  std::vector<std::pair<uint64_t, uint64_t>> rest;
  from.each([&](uint64_t key, uint64_t row) {
    Bucket* home = mutable_home(key);
    if (home->used() < kSlots) {
      append(*home, key & 0xFF, wanted(key, 0) | row);
    } else {
      rest.emplace_back(key, row);
    }
  });
  for (const auto& [key, row] : rest) {
    if (!put(key, row)) return false;
  }
  return true;
}

}  // namespace penstock::table
