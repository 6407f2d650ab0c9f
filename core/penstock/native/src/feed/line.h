// One line of MultiSlot text: for each slot in order, how many values it has, and the values, all apart by blanks.
#pragma once

#include <cstdint>
#include <string>

#include "feed/rows.h"

namespace penstock::feed {

struct Fault {
  uint64_t line = 0;    // from 1, in what was read
  uint64_t column = 0;  // from 1, in bytes
  std::string reason;
  std::string text;  // the line, cut to what a person reads
};

// Append the line that begins at `p` to `rows`.  Text up to `end` may be read as `numbers.h` says, and end[-1] is a
// line end.  Return where the next line begins; or nullptr, with column and reason in `fault`, and `rows` as they were.
const char* read_line(const char* p, const char* end, const std::vector<Slot>& slots, Rows& rows, Fault& fault);

}  // namespace penstock::feed
