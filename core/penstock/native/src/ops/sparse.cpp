#include "ops/sparse.h"

#include <algorithm>
#include <cmath>

#include "ops/target.h"

namespace penstock::ops {
namespace {

constexpr int64_t kDirectRows = 1 << 15;  // 256 KiB of stamps: in the L2 cache
constexpr int64_t kAhead = 16;
constexpr size_t kKeptBytes = size_t{64} << 20;
constexpr uint64_t kLastCall = 0xFFFFFFFFULL;

template <typename T>
inline void prefetch_row(const T* row, int64_t width) {
  constexpr int64_t kPerLine = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t at = 0; at < width; at += kPerLine) {
    __builtin_prefetch(row + at, 1);
  }
  __builtin_prefetch(row + width - 1, 1);  // a row rarely starts at a line
}

// Entries that a share looks through at a time, and their positions that are its own.
constexpr int64_t kChunk = 2048;

// Without branches, whose outcomes could not be predicted.  Returns how many there are.
PENSTOCK_CLONES int64_t own_positions(const int64_t* rows, int64_t begin, int64_t end, RowShare share, int64_t* own) {
  uint8_t is_own[kChunk];
  for (int64_t i = begin; i < end; ++i) {
    is_own[i - begin] = static_cast<uint8_t>(share.has(rows[i]));
  }
  int64_t count = 0;
  for (int64_t i = begin; i < end; ++i) {
    own[count] = i;
    count += is_own[i - begin];
  }
  return count;
}

}  // namespace

void RowIndex::begin(int64_t count, int64_t height) {
  direct_ = height <= kDirectRows || height <= 4 * count;
  size_t entries = static_cast<size_t>(height);
  if (!direct_) {
    int bits = 4;
    while ((int64_t{1} << bits) < 2 * count) {
      ++bits;
    }
    entries = size_t{1} << bits;
    mask_ = entries - 1;
    shift_ = 64 - bits;
    keys_.resize(std::max(keys_.size(), entries));
  }
  if (stamps_.size() < entries) {
    stamps_.resize(entries, 0);
  }
  if (call_ == kLastCall) {
    std::fill(stamps_.begin(), stamps_.end(), 0);
    call_ = 0;
  }
  ++call_;
}

inline uint64_t RowIndex::place(int64_t row) const {
  return direct_ ? static_cast<uint64_t>(row) : (static_cast<uint64_t>(row) * 0x9E3779B97F4A7C15ULL) >> shift_;
}

inline void RowIndex::prefetch(int64_t row) const {
  __builtin_prefetch(&stamps_[place(row)], 1);
}

inline uint32_t RowIndex::number(int64_t row, uint32_t num_rows) {
  uint64_t at = place(row);
  while (stamps_[at] >> 32 == call_) {
    if (direct_ || keys_[at] == row) {
      return static_cast<uint32_t>(stamps_[at]);
    }
    at = (at + 1) & mask_;
  }
  stamps_[at] = call_ << 32 | num_rows;
  if (!direct_) {
    keys_[at] = row;
  }
  return num_rows;
}

template <typename T>
void MergedRows<T>::merge(const SparseGrad<T>& grad, RowShare share) {
  index_.begin(grad.count, grad.height);
  rows_.clear();
  sources_.clear();
  sums_.clear();
  values_ = grad.values;
  if (share.count == 1) {
    for (int64_t i = 0; i < grad.count; ++i) {
      if (i + kAhead < grad.count) {
        index_.prefetch(grad.rows[i + kAhead]);
      }
      meet(grad.rows[i], grad.offset(i), grad.width);
    }
    return;
  }
  int64_t own[kChunk];
  for (int64_t begin = 0; begin < grad.count; begin += kChunk) {
    const int64_t count = own_positions(grad.rows, begin, std::min(begin + kChunk, grad.count), share, own);
    for (int64_t k = 0; k < count; ++k) {
      if (k + kAhead < count) {
        index_.prefetch(grad.rows[own[k + kAhead]]);
      }
      meet(grad.rows[own[k]], grad.offset(own[k]), grad.width);
    }
  }
}

template <typename T>
inline void MergedRows<T>::meet(int64_t row, int64_t from, int64_t width) {
  const auto known = static_cast<uint32_t>(rows_.size());
  const uint32_t slot = index_.number(row, known);
  if (slot == known) {
    rows_.push_back(row);
    sources_.push_back(from);
  } else {
    add(slot, from, width);
  }
}

template <typename T>
void MergedRows<T>::add(uint32_t slot, int64_t from, int64_t width) {
  int64_t source = sources_[slot];
  if (source >= 0) {
    const auto at = static_cast<int64_t>(sums_.size());
    sums_.insert(sums_.end(), values_ + source, values_ + source + width);
    sources_[slot] = source = ~at;
  }
  T* __restrict sum = sums_.data() + ~source;
  const T* __restrict value = values_ + from;
  for (int64_t j = 0; j < width; ++j) {
    sum[j] += value[j];
  }
}

template <typename T>
void MergedRows<T>::shrink() {
  values_ = nullptr;
  if (sums_.capacity() * sizeof(T) > kKeptBytes || rows_.capacity() * sizeof(int64_t) > kKeptBytes) {
    *this = MergedRows<T>();
  }
}

template class MergedRows<float>;
template class MergedRows<double>;

namespace {

PENSTOCK_BODY void sgd_row(T* __restrict row, const T* __restrict value, int64_t width, T rate) {
  for (int64_t j = 0; j < width; ++j) {
    row[j] -= rate * value[j];
  }
}

PENSTOCK_BODY void sgd_all_rows(T* param, const SparseGrad<T>& grad, T rate) {
  const int64_t width = grad.width;
  for (int64_t i = 0; i < grad.count; ++i) {
    if (i + kAhead < grad.count) {
      prefetch_row(param + grad.rows[i + kAhead] * width, width);
    }
    sgd_row<T>(param + grad.rows[i] * width, grad.values + grad.offset(i), width, rate);
  }
}

PENSTOCK_BODY void sgd_own_rows(T* param, const SparseGrad<T>& grad, T rate, RowShare share) {
  const int64_t width = grad.width;
  int64_t own[kChunk];
  for (int64_t begin = 0; begin < grad.count; begin += kChunk) {
    const int64_t count = own_positions(grad.rows, begin, std::min(begin + kChunk, grad.count), share, own);
    for (int64_t k = 0; k < std::min(kAhead, count); ++k) {
      prefetch_row(param + grad.rows[own[k]] * width, width);
    }
    for (int64_t k = 0; k < count; ++k) {
      if (k + kAhead < count) {
        prefetch_row(param + grad.rows[own[k + kAhead]] * width, width);
      }
      sgd_row<T>(param + grad.rows[own[k]] * width, grad.values + grad.offset(own[k]), width, rate);
    }
  }
}

PENSTOCK_BODY void sgd_rows(T* param, const SparseGrad<T>& grad, double lr, RowShare share) {
  if (share.count == 1) {
    sgd_all_rows<T>(param, grad, static_cast<T>(lr));
  } else {
    sgd_own_rows<T>(param, grad, static_cast<T>(lr), share);
  }
}

template <typename T>
struct AdamFactors {
  T weight1, weight2, epsilon, size;
};

PENSTOCK_BODY void adam_row(T* __restrict param, T* __restrict moment1, T* __restrict moment2, const T* __restrict grad,
                            int64_t width, const AdamFactors<T>& by) {
  for (int64_t j = 0; j < width; ++j) {
    const T m = moment1[j] + (grad[j] - moment1[j]) * by.weight1;
    const T v = moment2[j] + (grad[j] * grad[j] - moment2[j]) * by.weight2;
    moment1[j] = m;
    moment2[j] = v;
    param[j] -= by.size * m / (std::sqrt(v) + by.epsilon);
  }
}

PENSTOCK_BODY void adam_rows(const SparseAdamArrays<T>& arrays, const MergedRows<T>& rows, const SparseAdamStep& step,
                             int64_t begin, int64_t end) {
  const AdamFactors<T> by{static_cast<T>(1 - step.beta1), static_cast<T>(1 - step.beta2), static_cast<T>(step.epsilon),
                          static_cast<T>(step.step_size)};
  const int64_t width = arrays.width;
  for (int64_t slot = begin; slot < end; ++slot) {
    if (slot + kAhead < end) {
      const int64_t next = rows.row(slot + kAhead) * width;
      prefetch_row(arrays.param + next, width);
      prefetch_row(arrays.moment1 + next, width);
      prefetch_row(arrays.moment2 + next, width);
    }
    const int64_t at = rows.row(slot) * width;
    adam_row<T>(arrays.param + at, arrays.moment1 + at, arrays.moment2 + at, rows.values(slot), width, by);
  }
}

PENSTOCK_BODY void adagrad_row(T* __restrict param, T* __restrict moment, const T* __restrict grad, int64_t width,
                               T rate, T epsilon) {
  for (int64_t j = 0; j < width; ++j) {
    const T sum = moment[j] + grad[j] * grad[j];
    moment[j] = sum;
    param[j] -= rate * grad[j] / (std::sqrt(sum) + epsilon);
  }
}

PENSTOCK_BODY void adagrad_rows(const SparseAdagradArrays<T>& arrays, const MergedRows<T>& rows, double lr,
                                double epsilon, int64_t begin, int64_t end) {
  const int64_t width = arrays.width;
  for (int64_t slot = begin; slot < end; ++slot) {
    if (slot + kAhead < end) {
      const int64_t next = rows.row(slot + kAhead) * width;
      prefetch_row(arrays.param + next, width);
      prefetch_row(arrays.moment + next, width);
    }
    const int64_t at = rows.row(slot) * width;
    adagrad_row<T>(arrays.param + at, arrays.moment + at, rows.values(slot), width, static_cast<T>(lr),
                   static_cast<T>(epsilon));
  }
}

}  // namespace

PENSTOCK_CLONES void sparse_sgd(float* param, const SparseGrad<float>& grad, double lr, RowShare share) {
  sgd_rows<float>(param, grad, lr, share);
}
PENSTOCK_CLONES void sparse_sgd(double* param, const SparseGrad<double>& grad, double lr, RowShare share) {
  sgd_rows<double>(param, grad, lr, share);
}

PENSTOCK_CLONES void sparse_adam(const SparseAdamArrays<float>& arrays, const MergedRows<float>& rows,
                                 const SparseAdamStep& step, int64_t begin, int64_t end) {
  adam_rows<float>(arrays, rows, step, begin, end);
}
PENSTOCK_CLONES void sparse_adam(const SparseAdamArrays<double>& arrays, const MergedRows<double>& rows,
                                 const SparseAdamStep& step, int64_t begin, int64_t end) {
  adam_rows<double>(arrays, rows, step, begin, end);
}

PENSTOCK_CLONES void sparse_adagrad(const SparseAdagradArrays<float>& arrays, const MergedRows<float>& rows, double lr,
                                    double epsilon, int64_t begin, int64_t end) {
  adagrad_rows<float>(arrays, rows, lr, epsilon, begin, end);
}
PENSTOCK_CLONES void sparse_adagrad(const SparseAdagradArrays<double>& arrays, const MergedRows<double>& rows,
                                    double lr, double epsilon, int64_t begin, int64_t end) {
  adagrad_rows<double>(arrays, rows, lr, epsilon, begin, end);
}

}  // namespace penstock::ops
