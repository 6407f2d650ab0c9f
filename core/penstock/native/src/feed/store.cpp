#include "feed/store.h"

#include <sys/stat.h>

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

}  // namespace

std::optional<Fault> Chunk::read(int descriptor, uint64_t begin, uint64_t end) {
  struct stat found;
  begin_ = begin;
  last_ = ::fstat(descriptor, &found) == 0 && S_ISREG(found.st_mode)
              ? std::min<uint64_t>(end, static_cast<uint64_t>(found.st_size))
              : 0;
  place_ = {begin, 0};
  return parser_.read(descriptor, place_, end, *this);
}

// Memory for the rows that will have come: growing would copy it.
void Chunk::expect(const Place& place) {
  if (last_ <= place.offset) return;
  const uint64_t bytes = place.offset - begin_;
  const auto rows =
      static_cast<uint64_t>(static_cast<double>(last_ - begin_) / static_cast<double>(bytes) * kProbed * 1.03);
  for (std::size_t slot = 0; slot < rows_.columns.size(); ++slot) {
    Column& column = rows_.columns[slot];
    column.ids.reserve(column.ids.size() * rows / kProbed);
    column.numbers.reserve(column.numbers.size() * rows / kProbed);
    column.lengths.reserve(column.lengths.size() * rows / kProbed);
  }
}

void Store::add(std::shared_ptr<Chunk> chunk) {
  const Rows& rows = chunk->rows();
  if (rows.count == 0) return;
  if (rows.count > std::numeric_limits<uint32_t>::max() || chunks_.size() > std::numeric_limits<uint32_t>::max()) {
    throw std::length_error("a part of a file has more than 2^32 lines");
  }
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    const Column& column = rows.columns[slot];
    Place place{column.ids.data(), column.numbers.data(), column.lengths.data(), {}};
    if (slots_[slot].width == 0) {
      place.starts.resize(rows.count);
      int64_t next = 0;
      for (uint64_t row = 0; row < rows.count; ++row) {
        place.starts[row] = next;
        next += place.lengths[row];
      }
    }
    places_[slot].push_back(std::move(place));
  }
  const auto number = static_cast<uint32_t>(chunks_.size());
  order_.reserve(order_.size() + rows.count);
  for (uint64_t row = 0; row < rows.count; ++row) order_.push_back({number, static_cast<uint32_t>(row)});
  chunks_.push_back(std::move(chunk));
}

void Store::shuffle(uint64_t seed) {
  Random random{seed};
  for (uint64_t left = order_.size(); left > 1; --left) std::swap(order_[left - 1], order_[random.below(left)]);
}

void Store::gather_dense(std::size_t slot, const Reference* rows, uint64_t count, Column& to) const {
  const uint64_t width = slots_[slot].width;
  const Place* const places = places_[slot].data();
  const auto copy = [&](auto member, auto& values) {
    auto* out = values.room(count * width);
    for (uint64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) {
        const Reference& later = rows[i + kAhead];
        __builtin_prefetch(places[later.chunk].*member + later.row * width);
      }
      const auto* from = places[rows[i].chunk].*member + rows[i].row * width;
      for (uint64_t v = 0; v < width; ++v) *out++ = from[v];
    }
    values.commit(count * width);
  };
  if (slots_[slot].is_float) {
    copy(&Place::numbers, to.numbers);
  } else {
    copy(&Place::ids, to.ids);
  }
}

void Store::gather_ragged(std::size_t slot, const Reference* rows, uint64_t count, Column& to) const {
  const Place* const places = places_[slot].data();
  const auto copy = [&](auto member, auto& values) {
    int64_t* lengths = to.lengths.room(count);
    for (uint64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) {
        const Reference& later = rows[i + kAhead];
        __builtin_prefetch(places[later.chunk].starts.data() + later.row);
        __builtin_prefetch(places[later.chunk].lengths + later.row);
      }
      if (i + kAhead / 2 < count) {  // where it begins is there by now
        const Reference& later = rows[i + kAhead / 2];
        __builtin_prefetch(places[later.chunk].*member + places[later.chunk].starts[later.row]);
      }
      const Place& place = places[rows[i].chunk];
      const auto length = static_cast<uint64_t>(place.lengths[rows[i].row]);
      const auto* from = place.*member + place.starts[rows[i].row];
      auto* out = values.room(length);
      for (uint64_t v = 0; v < length; ++v) out[v] = from[v];
      values.commit(length);
      lengths[i] = static_cast<int64_t>(length);
    }
    to.lengths.commit(count);
  };
  if (slots_[slot].is_float) {
    copy(&Place::numbers, to.numbers);
  } else {
    copy(&Place::ids, to.ids);
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
  for (const auto& slot : places_) {
    for (const Place& place : slot) sum += place.starts.capacity() * sizeof(int64_t);
  }
  return sum;
}

}  // namespace penstock::feed
