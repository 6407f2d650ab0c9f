// Which server has which row of a table: a batch's ids to each server's rows, every row once, and back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace penstock::ps {

// A table's parts: part i is on server `at[i]` as block `blocks[i]` there. `firsts`: the first row of each part and the
// end, if it is cut into ranges, whose rows are numbered from the part's first; empty if ids are spread by their hash.
struct Parts {
  std::vector<std::uint32_t> at, blocks;
  std::vector<std::int64_t> firsts;

  bool spread() const { return firsts.empty(); }
  // Whether no server has two parts.
  bool are_apart() const {
    return std::all_of(at.begin(), at.end(), [&](auto one) { return std::count(at.begin(), at.end(), one) == 1; });
  }
};

// The part of an id among `num`: the last step of splitmix64 modulo `num`, as `ps/rows.py` has it.
inline std::uint32_t part_of_hash(std::int64_t id, std::uint64_t num) {
  std::uint64_t x = static_cast<std::uint64_t>(id) + 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  x ^= x >> 31;
  return static_cast<std::uint32_t>(x % num);
}

// Scratch of a thread, kept between calls.
class Cut {
 public:
  // Throws std::out_of_range with the id that is no row. `distinct`: an id that repeats is asked for once.
  void cut(const Parts& parts, const std::int64_t* ids, std::int64_t count, bool distinct);

  const std::vector<std::int64_t>& rows(std::size_t part) const { return rows_[part]; }
  std::int64_t num_different() const {
    std::size_t sum = 0;
    for (const auto& rows : rows_) sum += rows.size();
    return static_cast<std::int64_t>(sum);
  }
  // Of the id at position i: its part, and its place among that part's rows.
  std::uint32_t part(std::int64_t i) const { return where_[static_cast<std::size_t>(i)].part; }
  std::uint32_t place(std::int64_t i) const { return where_[static_cast<std::size_t>(i)].place; }
  // Whether the id at position i is the first of those equal to it.
  bool is_first(std::int64_t i) const { return where_[static_cast<std::size_t>(i)].first; }

 private:
  struct Where {
    std::uint32_t part : 31, first : 1;
    std::uint32_t place;
  };
  struct Entry {
    std::int64_t id;
    std::uint32_t at;  // position in where_
    std::uint32_t call;
  };

  bool find_or_add(std::int64_t id, std::uint32_t at, std::uint32_t& found);

  std::vector<std::vector<std::int64_t>> rows_;
  std::vector<Where> where_;
  std::vector<Entry> entries_;  // open addressing, at most half full
  std::uint64_t mask_ = 0;
  std::uint32_t call_ = 0;
};

}  // namespace penstock::ps
