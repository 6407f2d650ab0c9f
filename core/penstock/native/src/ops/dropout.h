// Dropout whose every bit is a function of (program seed, operator seed, step, global position of the element).
//
// Word for position p: counter = p / 128 * 32 + p % 32, word p / 32 % 4 of it (128 neighbours come from one block of
// counters, and words are stored in order).  An element is kept if its word is at least p * 2^32, rounded.
#pragma once

#include <cstdint>

#include "ops/philox.h"

namespace penstock::ops {

// Where the elements of a contiguous [outer, batch, inner] array lie in the whole batch: positions run over
// [global batch][outer][inner], so that the rows of a replica are a range of positions.
struct DropoutLayout {
  int64_t outer;
  int64_t batch;
  int64_t inner;
  int64_t first_batch;  // global batch coordinate of the first local one
};

struct DropoutRule {
  PhiloxStream stream;
  uint64_t threshold;  // words below are dropped; 2^32 drops all
};

DropoutRule dropout_rule(const PhiloxStream& stream, double p);

// Write the keep mask (0 or 1) of batch coordinates [begin, end); for outer == 1 these are a range of the array.
void dropout_mask(const DropoutRule& rule, const DropoutLayout& layout, uint8_t* mask, int64_t begin, int64_t end);

// y = mask ? x * scale : 0 over [begin, end); the forward on x, the backward on the gradient.
void apply_mask(float* y, const float* x, const uint8_t* mask, double scale, int64_t begin, int64_t end);
void apply_mask(double* y, const double* x, const uint8_t* mask, double scale, int64_t begin, int64_t end);

}  // namespace penstock::ops
