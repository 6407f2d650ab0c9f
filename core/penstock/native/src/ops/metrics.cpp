#include "ops/metrics.h"

#include <algorithm>

#include "ops/target.h"

namespace penstock::ops {
namespace {

constexpr double kSlack = 1e-5;

template <typename T>
int64_t count_rows(const Predictions<T>& rows, int64_t* positive, int64_t* negative, int64_t num_buckets) {
  const T low = static_cast<T>(-kSlack);
  const T high = static_cast<T>(1 + kSlack);
  for (int64_t i = 0; i < rows.count; ++i) {
    const T p = rows.values[i * rows.stride + rows.column];
    if (!(p >= low && p <= high)) {  // also NaN
      return i;
    }
  }
  const T thresholds = static_cast<T>(num_buckets - 1);
  for (int64_t i = 0; i < rows.count; ++i) {
    const T p = std::clamp(rows.values[i * rows.stride + rows.column], T(0), T(1));
    const auto bucket = static_cast<int64_t>(p * thresholds);
    ++(rows.labels[i] != 0 ? positive : negative)[bucket];
  }
  return -1;
}

}  // namespace

int64_t count_buckets(const Predictions<float>& predictions, int64_t* positive, int64_t* negative,
                      int64_t num_buckets) {
  return count_rows(predictions, positive, negative, num_buckets);
}
int64_t count_buckets(const Predictions<double>& predictions, int64_t* positive, int64_t* negative,
                      int64_t num_buckets) {
  return count_rows(predictions, positive, negative, num_buckets);
}

double area_under_curve(const int64_t* positive, const int64_t* negative, int64_t num_buckets) {
  double above = 0;  // positives in higher buckets
  double total_negative = 0;
  double area = 0;
  for (int64_t bucket = num_buckets - 1; bucket >= 0; --bucket) {
    const auto width = static_cast<double>(negative[bucket]);
    const auto rise = static_cast<double>(positive[bucket]);
    area += width * (above + rise / 2);
    above += rise;
    total_negative += width;
  }
  return above > 0 && total_negative > 0 ? area / above / total_negative : 0.0;
}

int64_t count_correct(const int64_t* topk, const int64_t* labels, int64_t n, int64_t k) {
  int64_t correct = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t* row = topk + i * k;
    correct += std::find(row, row + k, labels[i]) != row + k ? 1 : 0;
  }
  return correct;
}

}  // namespace penstock::ops
