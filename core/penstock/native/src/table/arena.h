// Rows of one shard, in pieces that never move, so that a row's address lasts.
//
// A piece has the values of its rows side by side; their states are in the memory beside the piece.  So a pull touches
// lines and pages of values alone.  (With states next to the values, Adagrad's pulls took half as long again as SGD's
// on a virtual machine whose host has small pages, where translations of addresses compete with rows for the caches.)
//
// piece   rows x (width values | 1 word: last use, if the table keeps it)
// beside  rows x states
//
// A row's number is its piece's and its place there.  A row of more than 32 KiB is too long for a table.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "table/pool.h"

namespace penstock::table {

// Where the parts of a row lie: the same for all shards.
class Layout {
 public:
  static constexpr uint64_t kNone = ~uint64_t{0};

  Layout(uint32_t value_floats, uint32_t state_floats) : value_floats_(value_floats), state_floats_(state_floats) {
    const uint64_t row_bytes = (uint64_t{value_floats} + state_floats) * sizeof(float);
    if (row_bytes > Pool::kPieceBytes) throw std::invalid_argument("a row is longer than 32 KiB");
    // Beside a piece are at most four times its bytes: a region stays below 256 MiB.
    const uint64_t rows = Pool::kPieceBytes / (value_floats * sizeof(float));
    const uint64_t with_states = 4 * Pool::kPieceBytes / std::max<uint64_t>(1, state_floats * sizeof(float));
    num_rows_ = static_cast<uint32_t>(std::min(rows, with_states));
    place_bits_ = static_cast<uint32_t>(std::bit_width(num_rows_ - 1));
    inverse_ = (uint64_t{1} << 32) / value_floats + 1;
    beside_bytes_ = (num_rows_ * state_floats * sizeof(float) + 63) / 64 * 64;
    region_mask_ = Pool::alignment(beside_bytes_) - 1;
  }

  float* values(Regions regions, uint64_t number) const {
    const uint64_t place = number & ((uint64_t{1} << place_bits_) - 1);
    return reinterpret_cast<float*>(regions.piece(number >> place_bits_)) + place * value_floats_;
  }
  float* states(float* values) const {
    auto* at = reinterpret_cast<char*>(values);
    const uint64_t offset = reinterpret_cast<uintptr_t>(values) & region_mask_;
    // (floats before it in its piece) / value_floats, by a multiplication: exact, for both are below 2^13 + 1 and
    // nothing remains.
    const uint64_t place = ((offset & (Pool::kPieceBytes - 1)) / sizeof(float) * inverse_) >> 32;
    return reinterpret_cast<float*>(Pool::beside(at - offset, offset, beside_bytes_)) + place * state_floats_;
  }
  uint64_t number(uint32_t piece, uint32_t place) const { return (uint64_t{piece} << place_bits_) | place; }
  uint32_t num_rows() const { return num_rows_; }  // of a piece
  uint32_t state_floats() const { return state_floats_; }
  std::size_t beside_bytes() const { return beside_bytes_; }

 private:
  uint32_t value_floats_, state_floats_;
  uint32_t num_rows_, place_bits_;
  uint64_t inverse_;
  std::size_t beside_bytes_;
  uint64_t region_mask_;
};

class Arena {
 public:
  Arena(Pool& pool, const Layout& layout) : pool_(pool), layout_(layout), next_(layout.num_rows()) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (const uint32_t piece : pieces_) pool_.give_back(piece);
  }

  float* values(uint64_t number) const { return layout_.values(pool_.regions(), number); }

  uint64_t take() {
    if (free_ != Layout::kNone) {
      const uint64_t number = free_;
      std::memcpy(&free_, values(number), sizeof free_);
      return number;
    }
    if (next_ == layout_.num_rows()) {
      pieces_.reserve(pieces_.size() + 1);  // so that a piece cannot be lost
      pieces_.push_back(pool_.take());
      next_ = 0;
    }
    return layout_.number(pieces_.back(), next_++);
  }
  // The row has to be two words or more: it keeps the number of the row that was given back before.
  void give_back(uint64_t number) {
    std::memcpy(values(number), &free_, sizeof free_);
    free_ = number;
  }

  uint64_t num_bytes() const { return pieces_.size() * (pool_.piece_bytes() + sizeof(uint32_t)); }

 private:
  Pool& pool_;
  const Layout& layout_;
  uint32_t next_;  // place in the last piece
  std::vector<uint32_t> pieces_;
  uint64_t free_ = Layout::kNone;  // the row last given back
};

}  // namespace penstock::table
