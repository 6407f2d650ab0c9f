// Pieces of a sparse gradient, where the backward pass has left them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ps/message.h"

namespace penstock::ps {

// Rows of a table: ids int64, of any shape, and columns [first, first + width) of a matrix with a row for each.
struct Columns {
  at::Tensor ids, matrix;
  std::int64_t first = 0, width = 0;
};

// Whether it is one that a message can be written from: on the CPU, float32, its ids contiguous.
bool is_sparse_gradient(const Columns& one);

Runs runs_of(const at::Tensor& ids);
Runs runs_of(const Columns& one);

// One list of ids and a matrix of their values alone: the pieces one after another. At least one piece.
Columns joined(const std::vector<Columns>& pieces);

}  // namespace penstock::ps
