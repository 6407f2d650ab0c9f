// Optimizer updates of the rows that a sparse gradient (rows, values) names: duplicates are summed in order of
// appearance, then each touched row is updated once.
//
// Invariant: the result depends on the gradient's order only, never on threads, timing or earlier calls.  Every row id
// must be in [0, height): callers prove it with `first_outside` before anything is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock::ops {

// A sparse gradient of a table [height, width].  `stride`: elements from one row of the values to the next.
// `sources`: which row of the values is that of each row; nullptr: its own, in order.
template <typename T>
struct SparseGrad {
  const int64_t* rows;
  const T* values;
  int64_t count;
  int64_t width;
  int64_t height;
  int64_t stride;
  const int64_t* sources = nullptr;

  // Where the values of row i begin.
  int64_t offset(int64_t i) const { return (sources == nullptr ? i : sources[i]) * stride; }
};

// One of `count` shares of a table's rows, in groups of neighbours: as many threads update a table at the same time,
// and every entry of a row is in the same share, whatever their number.  A share reads all ids, and memory of its own
// rows.
struct RowShare {
  uint32_t index = 0;
  uint32_t count = 1;  // at most 2^16

  bool has(int64_t row) const {
    constexpr int kGroup = 5;  // 32 rows, so that few cache lines are in two shares
    const uint32_t mixed = static_cast<uint32_t>(row >> kGroup) * 0x9E3779B1U >> 16;
    return mixed * count >> 16 == index;
  }
};

// Finds the duplicates of a list of rows in one pass.  Scratch, kept between calls: one per thread.
//
// A stamp says which call wrote an entry, so that nothing has to be cleared.  For small tables the entries are indexed
// by row; for large ones they are an open-addressing map (at most half full).
class RowIndex {
 public:
  // Start a new list of at most `count` rows of a table with `height` rows.
  void begin(int64_t count, int64_t height);

  // Number the row: the k-th new row gets k.  `num_rows` says how many there were before.
  uint32_t number(int64_t row, uint32_t num_rows);

  void prefetch(int64_t row) const;

 private:
  uint64_t place(int64_t row) const;

  std::vector<uint64_t> stamps_;  // call << 32 | number
  std::vector<int64_t> keys_;     // of the map
  uint64_t call_ = 0;
  uint64_t mask_ = 0;
  int shift_ = 0;
  bool direct_ = false;
};

// The touched rows of one gradient that are in a share, in order of first appearance, and their summed values.  Scratch
// as above.
template <typename T>
class MergedRows {
 public:
  void merge(const SparseGrad<T>& grad, RowShare share = {});

  // Give memory back that only an unusually large gradient needed.
  void shrink();

  int64_t size() const { return static_cast<int64_t>(rows_.size()); }
  int64_t row(int64_t slot) const { return rows_[static_cast<size_t>(slot)]; }

  // A row that appeared once is read where it lies.
  const T* values(int64_t slot) const {
    const int64_t from = sources_[static_cast<size_t>(slot)];
    return from >= 0 ? values_ + from : sums_.data() + ~from;
  }

 private:
  void meet(int64_t row, int64_t from, int64_t width);
  void add(uint32_t slot, int64_t from, int64_t width);

  RowIndex index_;
  std::vector<int64_t> rows_;
  std::vector<int64_t> sources_;  // offset in the gradient's values, or ~offset in sums_
  std::vector<T> sums_;
  const T* values_ = nullptr;
};

extern template class MergedRows<float>;
extern template class MergedRows<double>;

// param[row] -= lr * value, duplicate after duplicate, for the rows of a share: no merge is needed.
void sparse_sgd(float* param, const SparseGrad<float>& grad, double lr, RowShare share);
void sparse_sgd(double* param, const SparseGrad<double>& grad, double lr, RowShare share);

struct SparseAdamStep {
  double beta1;
  double beta2;
  double epsilon;
  double step_size;  // lr * sqrt(1 - beta2^step) / (1 - beta1^step)
};

template <typename T>
struct SparseAdamArrays {
  T* param;
  T* moment1;
  T* moment2;
  int64_t width;
};

// torch.optim.SparseAdam for the slots [begin, end) of `rows`.
void sparse_adam(const SparseAdamArrays<float>& arrays, const MergedRows<float>& rows, const SparseAdamStep& step,
                 int64_t begin, int64_t end);
void sparse_adam(const SparseAdamArrays<double>& arrays, const MergedRows<double>& rows, const SparseAdamStep& step,
                 int64_t begin, int64_t end);

template <typename T>
struct SparseAdagradArrays {
  T* param;
  T* moment;
  int64_t width;
};

// moment += g * g; param -= lr * g / (sqrt(moment) + epsilon), for the slots [begin, end) of `rows`.
void sparse_adagrad(const SparseAdagradArrays<float>& arrays, const MergedRows<float>& rows, double lr, double epsilon,
                    int64_t begin, int64_t end);
void sparse_adagrad(const SparseAdagradArrays<double>& arrays, const MergedRows<double>& rows, double lr,
                    double epsilon, int64_t begin, int64_t end);

}  // namespace penstock::ops
