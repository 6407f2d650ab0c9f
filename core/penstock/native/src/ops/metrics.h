// Fluid's metrics: area under the ROC curve from accumulated buckets, and accuracy of the best k classes.
#pragma once

#include <cstdint>

namespace penstock::ops {

// Count n predictions into num_buckets = num_thresholds + 1 buckets, bucket = floor(p * num_thresholds), by label
// (0 is negative, anything else positive).  `stride` and `column` pick the prediction of a row.
// A prediction outside [0, 1] by more than 1e-5 (or NaN) is not counted: its position is returned, and nothing at all
// has been counted; else -1.  Rounding of a softmax gives 1 + 1e-7 at times, hence the slack; it counts as 0 or 1.
template <typename T>
struct Predictions {
  const T* values;
  int64_t stride;
  int64_t column;
  const int64_t* labels;
  int64_t count;
};

int64_t count_buckets(const Predictions<float>& predictions, int64_t* positive, int64_t* negative, int64_t num_buckets);
int64_t count_buckets(const Predictions<double>& predictions, int64_t* positive, int64_t* negative,
                      int64_t num_buckets);

// Area by trapezoids from the highest bucket down; 0 while one of the classes has not been seen (as Fluid).
double area_under_curve(const int64_t* positive, const int64_t* negative, int64_t num_buckets);

// Number of rows of topk [n, k] that contain their label.
int64_t count_correct(const int64_t* topk, const int64_t* labels, int64_t n, int64_t k);

}  // namespace penstock::ops
