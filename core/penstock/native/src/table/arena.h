// Rows of one shard: equally long runs of floats in chunks that never move, so that a row's address lasts.
//
// A row that does not fit a piece of the pool has a stride too large for a table (8192 floats).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "table/pool.h"

namespace penstock::table {

class Arena {
 public:
  Arena(Pool& pool, uint32_t stride) : pool_(pool), stride_(stride) {
    if (stride * sizeof(float) > Pool::kPieceBytes) throw std::invalid_argument("a row is longer than 32 KiB");
    per_piece_ = static_cast<uint32_t>(Pool::kPieceBytes / (stride * sizeof(float)));
    inverse_ = UINT64_MAX / per_piece_ + 1;
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (float* piece : pieces_) pool_.give_back(piece);
  }

  float* row(uint32_t number) const {
    const uint32_t piece = piece_of(number);
    return pieces_[piece] + static_cast<std::size_t>(number - piece * per_piece_) * stride_;
  }

  uint32_t take() {
    if (!free_.empty()) {
      const uint32_t number = free_.back();
      free_.pop_back();
      return number;
    }
    if (piece_of(next_) == pieces_.size()) pieces_.push_back(static_cast<float*>(pool_.take()));
    return next_++;
  }
  void give_back(uint32_t number) { free_.push_back(number); }

  uint32_t stride() const { return stride_; }
  uint64_t num_bytes() const {
    return pieces_.size() * (Pool::kPieceBytes + sizeof(void*)) + free_.capacity() * sizeof(uint32_t);
  }

 private:
  // number / per_piece_, by a multiplication: exact for every 32-bit number but where one piece has one row.
  uint32_t piece_of(uint32_t number) const {
    if (per_piece_ == 1) return number;
    return static_cast<uint32_t>((static_cast<unsigned __int128>(inverse_) * number) >> 64);
  }

  Pool& pool_;
  uint32_t stride_;
  uint32_t per_piece_;
  uint64_t inverse_;
  uint32_t next_ = 0;
  std::vector<float*> pieces_;
  std::vector<uint32_t> free_;
};

}  // namespace penstock::table
