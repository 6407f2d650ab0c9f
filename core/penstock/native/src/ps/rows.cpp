#include "ps/rows.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace penstock::ps {

void Cut::cut(const Parts& parts, const std::int64_t* ids, std::int64_t count, bool distinct) {
  rows_.resize(parts.at.size());
  for (auto& rows : rows_) rows.clear();
  where_.resize(static_cast<std::size_t>(count));
  if (distinct) {
    std::uint64_t size = 16;
    while (size < 2 * static_cast<std::uint64_t>(count)) size *= 2;
    if (entries_.size() < size || call_ == std::numeric_limits<std::uint32_t>::max()) {
      entries_.assign(std::max<std::size_t>(size, entries_.size()), Entry{0, 0, 0});
      call_ = 0;
    }
    mask_ = size - 1;
    ++call_;
  }
  const std::uint64_t num = parts.at.size();
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t before = 0;
    if (distinct && find_or_add(ids[i], static_cast<std::uint32_t>(i), before)) {
      where_[static_cast<std::size_t>(i)] = {where_[before].part, 0, where_[before].place};
      continue;
    }
    std::uint32_t part = 0;
    std::int64_t row = ids[i];
    if (parts.spread()) {
      part = num == 1 ? 0 : part_of_hash(row, num);
    } else {
      if (row < 0 || row >= parts.firsts.back()) throw std::out_of_range(std::to_string(row));
      const auto after = std::upper_bound(parts.firsts.begin(), parts.firsts.end(), row);
      part = static_cast<std::uint32_t>(after - parts.firsts.begin() - 1);
      row -= parts.firsts[part];
    }
    where_[static_cast<std::size_t>(i)] = {part, 1, static_cast<std::uint32_t>(rows_[part].size())};
    rows_[part].push_back(row);
  }
}

bool Cut::find_or_add(std::int64_t id, std::uint32_t at, std::uint32_t& found) {
  std::uint64_t slot = (static_cast<std::uint64_t>(id) * 0x9E3779B97F4A7C15ULL >> 20) & mask_;
  while (entries_[slot].call == call_) {
    if (entries_[slot].id == id) {
      found = entries_[slot].at;
      return true;
    }
    slot = (slot + 1) & mask_;
  }
  entries_[slot] = {id, at, call_};
  return false;
}

}  // namespace penstock::ps
