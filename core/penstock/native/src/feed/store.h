// Rows in memory, in chunks as they were read, and the order in which batches take them.
//
// The order begins as that of the files and is a function of it and the seeds of the shuffles since, not of how many
// threads read.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "feed/parser.h"

namespace penstock::feed {

// What one reader has read: a part of a file.
class Chunk {
 public:
  Chunk(std::vector<Slot> slots, bool skips_bad_lines)
      : parser_(std::move(slots), skips_bad_lines), rows_(parser_.slots().size()) {}

  // Read the lines that begin from byte `begin` (where one begins) to `end`; without one that has no line end.
  std::optional<Fault> read(int descriptor, uint64_t begin, uint64_t end);
  std::optional<Fault> read_rest() { return parser_.read_rest(place_, *this); }

  // Take rows that are columns already.
  void extend(const std::vector<Given>& given, uint64_t count) {
    std::vector<uint64_t> starts(given.size(), 0);
    for (uint64_t row = 0; row < count; ++row) rows_.append(parser_.slots(), given, starts, row);
  }

  Parser& parser() { return parser_; }
  Rows& rows() { return rows_; }
  const Rows& rows() const { return rows_; }
  bool appended(const Place& place) {
    if (rows_.count == kProbed && last_ != 0) [[unlikely]]
      expect(place);
    return true;
  }

 private:
  static constexpr uint64_t kProbed = 256;  // rows, by which the size of those to come is judged

  void expect(const Place& place);

  Parser parser_;
  Rows rows_;
  Place place_;
  uint64_t begin_ = 0, last_ = 0;  // bytes of the file; last 0: it is not known how many there are
};

// Many threads may `gather`; nothing else meanwhile.
class Store {
 public:
  explicit Store(std::vector<Slot> slots) : slots_(std::move(slots)), places_(slots_.size()) {}

  void add(std::shared_ptr<Chunk> chunk);
  void shuffle(uint64_t seed);
  Rows gather(uint64_t first, uint64_t count) const;
  // Rows at random, each any number of times.
  Rows draw(uint64_t count, uint64_t seed) const;

  const std::vector<Slot>& slots() const { return slots_; }
  uint64_t size() const { return order_.size(); }
  uint64_t bytes() const;

 private:
  struct Reference {
    uint32_t chunk;
    uint32_t row;
  };
  // Where a chunk's column lies.  A chunk does not change once it was added.
  struct Place {
    const int64_t* ids;
    const float* numbers;
    const int64_t* lengths;
    std::vector<int64_t> starts;  // of a row's values, if the slot is ragged
  };
  Rows gathered(const Reference* rows, uint64_t count) const;
  void gather_dense(std::size_t slot, const Reference* rows, uint64_t count, Column& to) const;
  void gather_ragged(std::size_t slot, const Reference* rows, uint64_t count, Column& to) const;

  std::vector<Slot> slots_;
  std::vector<std::shared_ptr<Chunk>> chunks_;
  std::vector<std::vector<Place>> places_;  // of slot and chunk
  std::vector<Reference> order_;
};

}  // namespace penstock::feed
