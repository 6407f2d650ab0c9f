#include "feed/store.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace penstock::feed {
namespace {

constexpr uint64_t kAhead =
    16;  // rows that are asked for before they are read: as many lines as a core waits for at once

// SplitMix64: the same numbers everywhere, unlike the library's distributions.
struct Random {
  uint64_t state;

  uint64_t next() {
    state += 0x9E3779B97F4A7C15ULL;
    uint64_t x = state;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
  }
  // Below `bound`: the high half of a product; its bias is bound / 2^64.
  uint64_t below(uint64_t bound) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(next()) * bound) >> 64);
  }
};

template <typename T>
void copy_values(const T* from, uint64_t count, Buffer<T>& to) {
  T* room = to.room(count);
  for (uint64_t i = 0; i < count; ++i) room[i] = from[i];
  to.commit(count);
}

}  // namespace

void Store::add(std::shared_ptr<Chunk> chunk) {
  const Rows& rows = chunk->rows();
  if (rows.count == 0) return;
  if (rows.count > std::numeric_limits<uint32_t>::max() || chunks_.size() > std::numeric_limits<uint32_t>::max()) {
    throw std::length_error("a part of a file has more than 2^32 lines");
  }
  std::vector<std::vector<int64_t>> starts(slots_.size());
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].width != 0) continue;
    const int64_t* lengths = rows.columns[slot].lengths.data();
    starts[slot].resize(rows.count);
    int64_t next = 0;
    for (uint64_t row = 0; row < rows.count; ++row) {
      starts[slot][row] = next;
      next += lengths[row];
    }
  }
  const auto number = static_cast<uint32_t>(chunks_.size());
  order_.reserve(order_.size() + rows.count);
  for (uint64_t row = 0; row < rows.count; ++row) order_.push_back({number, static_cast<uint32_t>(row)});
  starts_.push_back(std::move(starts));
  chunks_.push_back(std::move(chunk));
}

void Store::shuffle(uint64_t seed) {
  Random random{seed};
  for (uint64_t left = order_.size(); left > 1; --left) std::swap(order_[left - 1], order_[random.below(left)]);
}

void Store::gather_dense(std::size_t slot, const Reference* rows, uint64_t count, Column& to) const {
  const uint64_t width = slots_[slot].width;
  const auto copy = [&](auto member) {
    for (uint64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) {
        const Reference& later = rows[i + kAhead];
        __builtin_prefetch((chunks_[later.chunk]->rows().columns[slot].*member).data() + later.row * width);
      }
      const auto* from = (chunks_[rows[i].chunk]->rows().columns[slot].*member).data() + rows[i].row * width;
      copy_values(from, width, to.*member);
    }
  };
  if (slots_[slot].is_float) {
    copy(&Column::numbers);
  } else {
    copy(&Column::ids);
  }
}

void Store::gather_ragged(std::size_t slot, const Reference* rows, uint64_t count, Column& to) const {
  const auto copy = [&](auto member) {
    for (uint64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) {
        const Reference& later = rows[i + kAhead];
        __builtin_prefetch(starts_[later.chunk][slot].data() + later.row);
        __builtin_prefetch(chunks_[later.chunk]->rows().columns[slot].lengths.data() + later.row);
      }
      if (i + kAhead / 2 < count) {  // where it begins is there by now
        const Reference& later = rows[i + kAhead / 2];
        __builtin_prefetch((chunks_[later.chunk]->rows().columns[slot].*member).data() +
                           starts_[later.chunk][slot][later.row]);
      }
      const Column& from = chunks_[rows[i].chunk]->rows().columns[slot];
      const int64_t length = from.lengths.data()[rows[i].row];
      copy_values((from.*member).data() + starts_[rows[i].chunk][slot][rows[i].row], static_cast<uint64_t>(length),
                  to.*member);
      to.lengths.push(length);
    }
  };
  if (slots_[slot].is_float) {
    copy(&Column::numbers);
  } else {
    copy(&Column::ids);
  }
}

Rows Store::gather(uint64_t first, uint64_t count) const {
  if (first > order_.size() || count > order_.size() - first) throw std::out_of_range("rows beyond the last");
  return gathered(order_.data() + first, count);
}

Rows Store::draw(uint64_t count, uint64_t seed) const {
  if (order_.empty()) throw std::out_of_range("there are no rows to draw from");
  Random random{seed};
  std::vector<Reference> drawn;
  drawn.reserve(count);
  for (uint64_t i = 0; i < count; ++i) drawn.push_back(order_[random.below(order_.size())]);
  return gathered(drawn.data(), count);
}

Rows Store::gathered(const Reference* references, uint64_t count) const {
  Rows rows(slots_.size());
  rows.reserve(slots_, count);
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].width != 0) {
      gather_dense(slot, references, count, rows.columns[slot]);
    } else {
      gather_ragged(slot, references, count, rows.columns[slot]);
    }
  }
  rows.count = count;
  return rows;
}

uint64_t Store::bytes() const {
  uint64_t sum = order_.capacity() * sizeof(Reference);
  for (const auto& chunk : chunks_) sum += chunk->rows().bytes();
  for (const auto& chunk : starts_) {
    for (const auto& slot : chunk) sum += slot.capacity() * sizeof(int64_t);
  }
  return sum;
}

}  // namespace penstock::feed
