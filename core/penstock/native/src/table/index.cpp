#include "table/index.h"

#include <cstring>
#include <utility>

namespace penstock::table {

Index::Index(Pool& pool, uint32_t shared_bits) : pool_(pool), shared_bits_(shared_bits), pieces_(cleared(1)) {}

Index::~Index() {
  for (Bucket* piece : pieces_) pool_.give_back(piece);
}

std::vector<Index::Bucket*> Index::cleared(uint64_t num_pieces) {
  std::vector<Bucket*> pieces;
  while (pieces.size() < num_pieces) {
    pieces.push_back(static_cast<Bucket*>(pool_.take()));
    std::memset(static_cast<void*>(pieces.back()), 0, Pool::kPieceBytes);
  }
  return pieces;
}

void Index::append(Bucket& to, uint64_t key, uint32_t row) {
  to.keys[to.used] = key;
  to.rows[to.used] = row;
  ++to.used;
}

void Index::remove(Bucket& from, uint32_t slot) {
  --from.used;
  from.keys[slot] = from.keys[from.used];
  from.rows[slot] = from.rows[from.used];
}

void Index::insert(uint64_t key, uint32_t row) {
  if ((size_ + 1) * 10 > pieces_.size() * kBuckets * kSlots * 9) grow();
  while (!put(key, row)) grow();  // a piece that happens to be full, at 10^-7 or less
  ++size_;
}

bool Index::put(uint64_t key, uint32_t row) {
  Bucket* home = mutable_home(key);
  Bucket* second = mutable_other(home, key);
  if (home->used == kSlots && second->used == kSlots && !make_room(home, second)) return false;
  Bucket* to = home->used < kSlots ? home : second;
  if (to == second) ++home->away;
  append(*to, key, row);
  return true;
}

// Move the entry to the other of its buckets, which has room.
void Index::move(Bucket* from, uint32_t slot) {
  const uint64_t key = from->keys[slot];
  Bucket* to = mutable_other(from, key);
  if (mutable_home(key) == from) {
    ++from->away;
  } else {
    --to->away;
  }
  append(*to, key, from->rows[slot]);
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
      Bucket* to = mutable_other(steps[at].bucket, steps[at].bucket->keys[slot]);
      steps[known++] = {to, at, slot};
      if (to->used == kSlots) continue;
      // From the end of the way to its beginning: each move frees the slot that the one before it fills.
      for (uint32_t last = known - 1; last >= 2; last = steps[last].before) {
        const Step& from = steps[steps[last].before];
        if (mutable_other(from.bucket, from.bucket->keys[steps[last].slot]) != steps[last].bucket) return false;
        move(from.bucket, steps[last].slot);
      }
      return true;
    }
  }
  return false;
}

uint32_t Index::erase(uint64_t key) {
  Bucket* home = mutable_home(key);
  Bucket* here = home;
  uint32_t at = slot(*here, key);
  if (at == kNone && home->away != 0) {
    here = mutable_other(home, key);
    at = slot(*here, key);
  }
  if (at == kNone) return kNone;
  const uint32_t row = here->rows[at];
  if (here != home) --home->away;
  remove(*here, at);
  --size_;
  return row;
}

void Index::grow() {
  std::vector<Bucket*> old;
  old.swap(pieces_);
  uint64_t wanted = old.size();
  do {
    for (Bucket* piece : pieces_) pool_.give_back(piece);
    wanted += wanted / 10 + 1;
    pieces_ = cleared(wanted);
  } while (!refill(old));
  for (Bucket* piece : old) pool_.give_back(piece);
}

// First all that fit into their homes, then the others: fewest keys are away.
bool Index::refill(const std::vector<Bucket*>& from) {
  std::vector<std::pair<uint64_t, uint32_t>> rest;
  for (const Bucket* piece : from) {
    for (const Bucket* here = piece; here < piece + kBuckets; ++here) {
      for (uint32_t i = 0; i < here->used; ++i) {
        Bucket* home = mutable_home(here->keys[i]);
        if (home->used < kSlots) {
          append(*home, here->keys[i], here->rows[i]);
        } else {
          rest.emplace_back(here->keys[i], here->rows[i]);
        }
      }
    }
  }
  for (const auto& [key, row] : rest) {
    if (!put(key, row)) return false;
  }
  return true;
}

}  // namespace penstock::table
