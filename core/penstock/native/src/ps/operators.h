// Operators of a trainer's step over an open session.
#pragma once

#include <string>
#include <vector>

#include "ps/session.h"

namespace penstock::ps {

// What a `send_step` pushes, without the tensors: its dense gradients, then its sparse ones with their pieces.
struct Layout {
  struct Piece {  // which of the operator's `rows` and `row_values`, and the first column of those
    std::int64_t rows, values, column;
  };
  struct Gradient {
    Placement of;
    std::int64_t width = 0;
    std::vector<Piece> pieces;
  };
  std::vector<Gradient> gradients;
};

void know_layout(const std::string& spec, Layout layout);

// Whether this thread is in Python's `send_step` for a remote that was open when the operator began.
bool repeats_step();

}  // namespace penstock::ps
