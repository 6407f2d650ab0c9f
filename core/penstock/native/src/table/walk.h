// The pipeline through index and rows.  A look-up is two accesses to memory, sometimes three, each of which needs the
// one before; a core can have a dozen or more under way, if it gets them early.  So keys go through in blocks:
// while a block's rows are used, the rows of the next block and the index lines of those after are on their way.
#pragma once

#include <algorithm>
#include <cstdint>

#include "table/arena.h"
#include "table/index.h"

namespace penstock::table {

// Measured: 8 is as fast, 24 and more are slower, and so are prefetches past the first cache.
constexpr uint64_t kBlock = 16;
constexpr std::size_t kLineBytes = 64;

inline void prefetch_floats(const float* first, uint32_t floats) {
  const auto begin = reinterpret_cast<uintptr_t>(first) & ~(kLineBytes - 1);
  const auto end = reinterpret_cast<uintptr_t>(first + floats);
  for (uintptr_t line = begin; line < end; line += kLineBytes) __builtin_prefetch(reinterpret_cast<const void*>(line));
}

struct Place {
  const Index* index;
  const Arena* rows;
  uint64_t key;
};

// The stages of one block of look-ups.
struct Walker {
  Place places[kBlock];
  const Index::Bucket* homes[kBlock];
  float* rows[kBlock];
  uint32_t away[kBlock];  // which of them are not at home
  uint32_t num_away;

  template <typename PlaceOf>
  void seek(uint64_t first, uint64_t count, PlaceOf place_of) {
    for (uint64_t i = 0; i < count; ++i) {
      places[i] = place_of(first + i);
      homes[i] = places[i].index->home(places[i].key);
      __builtin_prefetch(homes[i]);
    }
  }
  void meet(uint64_t count, uint32_t floats) {
    num_away = 0;
    for (uint64_t i = 0; i < count; ++i) {
      const uint32_t slot = Index::slot(*homes[i], places[i].key);
      if (slot != Index::kNone) [[likely]] {
        rows[i] = places[i].rows->row(homes[i]->rows[slot]);
        prefetch_floats(rows[i], floats);
        continue;
      }
      rows[i] = nullptr;
      if (homes[i]->away == 0) continue;
      __builtin_prefetch(Index::other(homes[i], places[i].key));
      away[num_away++] = static_cast<uint32_t>(i);
    }
  }
  void meet_away(uint32_t floats) {
    for (uint32_t k = 0; k < num_away; ++k) {
      const Place& place = places[away[k]];
      const Index::Bucket& other = *Index::other(homes[away[k]], place.key);
      const uint32_t slot = Index::slot(other, place.key);
      if (slot == Index::kNone) continue;
      rows[away[k]] = place.rows->row(other.rows[slot]);
      prefetch_floats(rows[away[k]], floats);
    }
  }
};

// use(i, row) for i of 0..count in order, row nullptr where the key has none.  place_of(i) says where to look; `floats`
// is how much of a row will be used.  The places must not change meanwhile.
template <typename PlaceOf, typename Use>
void walk(uint64_t count, uint32_t floats, PlaceOf place_of, Use use) {
  Walker walkers[4];
  const uint64_t num_blocks = (count + kBlock - 1) / kBlock;
  const auto length = [&](uint64_t block) { return std::min(kBlock, count - block * kBlock); };
  for (uint64_t step = 0; step < num_blocks + 3; ++step) {
    if (step < num_blocks) walkers[step & 3].seek(step * kBlock, length(step), place_of);
    if (step - 1 < num_blocks) walkers[(step - 1) & 3].meet(length(step - 1), floats);
    if (step - 2 < num_blocks) walkers[(step - 2) & 3].meet_away(floats);
    if (step >= 3) {
      float* const* rows = walkers[(step - 3) & 3].rows;
      for (uint64_t i = 0, n = length(step - 3); i < n; ++i) use((step - 3) * kBlock + i, rows[i]);
    }
  }
}

}  // namespace penstock::table
