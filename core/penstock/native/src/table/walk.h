// The pipeline through index and rows.  A look-up is two accesses to memory, rarely three, each of which needs the one
// before; a core can have dozens under way, if it gets them early.  So keys go through in blocks: while a block's rows
// are used, the rows of the next blocks and the index lines of those after are on their way.
//
// Prefetches of a block come in a row, after its addresses were computed.  A prefetch does not retire before its
// address is translated, which is a search in page tables: one among forty other instructions, ten are in a core's
// window; in a loop of nothing else, all of a block are (measured: 25 to 30 % more rows a second).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "table/arena.h"
#include "table/index.h"

namespace penstock::table {

constexpr uint64_t kPlainBlock = 16;
constexpr uint64_t kBlockWithOperands = 8;  // where the use of a row reads a third line, a gradient
constexpr uint64_t kIndexAhead = 1;         // blocks between the prefetch of an index line and its use
constexpr uint64_t kRowsAhead = 2;          // and between the prefetch of a row and its use
constexpr std::size_t kLineBytes = 64;

// Functions that only prefetch are inlined at once: g++ takes them for functions without effect, and drops their calls.
[[gnu::always_inline]] inline void prefetch_floats(const float* first, uint32_t floats) {
  const auto begin = reinterpret_cast<uintptr_t>(first) & ~(kLineBytes - 1);
  const auto end = reinterpret_cast<uintptr_t>(first + floats);
  for (uintptr_t line = begin; line < end; line += kLineBytes) __builtin_prefetch(reinterpret_cast<const void*>(line));
}

// Look-ups under way.  `Keys` has key(i), what is sought; index(key), where; row(number), its address; prefetch(row);
// prefetch_operand(i), of what the use of the row reads besides.
template <typename Keys, uint64_t kBlock>
class Walk {
 public:
  Walk(const Keys& keys, Regions regions, uint64_t count) : sought_(keys), regions_(regions), count_(count) {}

  template <typename Use>
  void run(Use use) {
    const uint64_t num_blocks = (count_ + kBlock - 1) / kBlock;
    constexpr uint64_t kUse = kIndexAhead + kRowsAhead;
    for (uint64_t step = 0; step < num_blocks + kUse; ++step) {
      if (step < num_blocks) seek(step);
      if (step > kIndexAhead) meet_away();
      if (step - kIndexAhead < num_blocks) meet(step - kIndexAhead);
      if (step >= kUse) give(step - kUse, use);
    }
  }

 private:
  static constexpr uint64_t kSeats = kBlock * std::bit_ceil(kIndexAhead + kRowsAhead + 1);

  uint64_t length(uint64_t block) const { return std::min(kBlock, count_ - block * kBlock); }
  static uint64_t seat(uint64_t block) { return block * kBlock & (kSeats - 1); }

  void seek(uint64_t block) {
    const uint64_t first = seat(block);
    for (uint64_t i = 0, n = length(block); i < n; ++i) {
      const uint64_t key = sought_.key(block * kBlock + i);
      keys_[first + i] = key;
      homes_[first + i] = sought_.index(key).home(regions_, key);
    }
    for (uint64_t i = first, n = first + length(block); i < n; ++i) __builtin_prefetch(homes_[i]);
    for (uint64_t i = 0, n = length(block); i < n; ++i) sought_.prefetch_operand(block * kBlock + i);
  }
  void meet(uint64_t block) {
    const uint64_t first = seat(block);
    for (uint64_t i = first, n = first + length(block); i < n; ++i) {
      const uint64_t number = sought_.index(keys_[i]).find_home(*homes_[i], keys_[i]);
      if (number != Index::kNone) [[likely]] {
        rows_[i] = sought_.row(number);
        continue;
      }
      rows_[i] = nullptr;
      if (!homes_[i]->sends_away()) continue;
      __builtin_prefetch(Index::other(homes_[i], keys_[i]));
      away_[num_away_++] = static_cast<uint32_t>(i);
    }
    for (uint64_t i = first, n = first + length(block); i < n; ++i) {
      if (rows_[i] != nullptr) [[likely]]
        sought_.prefetch(rows_[i]);
    }
  }
  void meet_away() {  // of the block met last
    for (uint32_t k = 0; k < num_away_; ++k) {
      const uint32_t i = away_[k];
      const uint64_t number = sought_.index(keys_[i]).find_away(*Index::other(homes_[i], keys_[i]), keys_[i]);
      if (number == Index::kNone) continue;
      rows_[i] = sought_.row(number);
      sought_.prefetch(rows_[i]);
    }
    num_away_ = 0;
  }
  template <typename Use>
  void give(uint64_t block, Use& use) {
    const uint64_t first = seat(block);
    for (uint64_t i = 0, n = length(block); i < n; ++i) use(block * kBlock + i, rows_[first + i]);
  }

  const Keys& sought_;
  Regions regions_;
  uint64_t count_;
  uint64_t keys_[kSeats];
  const Index::Bucket* homes_[kSeats];
  float* rows_[kSeats];
  uint32_t away_[kBlock];
  uint32_t num_away_ = 0;
};

// use(i, values) for i of 0..count in order, nullptr where the key has no row.  The index must not change meanwhile.
template <uint64_t kBlock, typename Keys, typename Use>
void walk(const Keys& keys, Regions regions, uint64_t count, Use use) {
  Walk<Keys, kBlock>(keys, regions, count).run(use);
}

}  // namespace penstock::table
