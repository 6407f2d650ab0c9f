// Batch normalisation over the batch of all replicas: what each replica adds up of its share, and what it makes of the
// sums of all.
//
// Statistics are float64 [3, channels] a replica and [replicas, 3, channels] of all. Forward: number of values, mean,
// sum of squared differences from that mean, joined as Chan, Golub and LeVeque do. Backward: number of values, sum of
// the gradient, sum of gradient times normalised input. Every replica joins them in the same order, so all get the same
// bits. Inputs are [n, channels, ...]; a strided one costs a copy. No result depends on the number of threads.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cmath>
#include <vector>

#include "ops/checks.h"
#include "ops/operators.h"

namespace penstock::ops {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

namespace {

constexpr int64_t kLanes = 8;  // partial sums: a single one would wait for each addition

struct Layout {
  int64_t rows;
  int64_t channels;
  int64_t inner;  // values of one row and channel, one after another

  explicit Layout(const Tensor& x)
      : rows(x.size(0)), channels(x.size(1)), inner(x.numel() / std::max<int64_t>(1, x.size(0) * x.size(1))) {}
  int64_t values() const { return rows * inner; }
  int64_t at(int64_t row, int64_t channel) const { return (row * channels + channel) * inner; }
};

void check_input(const Check& check, const Tensor& x) {
  check.floating("x", x);
  TORCH_CHECK_VALUE(x.dim() >= 2, check.op(), ": x has shape ", x.sizes(), "; expected [n, channels, ...]");
}

void check_stats(const Check& check, const Tensor& stats, int64_t channels) {
  check.dtype("stats", stats, at::kDouble);
  TORCH_CHECK_VALUE(stats.dim() == 3 && stats.size(1) == 3 && stats.size(2) == channels, check.op(),
                    ": stats has shape ", stats.sizes(), "; expected [replicas, 3, ", channels, "]");
}

void check_channels(const Check& check, const char* name, const Tensor& tensor, const Tensor& x) {
  check.dtype(name, tensor, x.scalar_type());
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.size(0) == x.size(1) && tensor.is_contiguous(), check.op(), ": ", name,
                    " has shape ", tensor.sizes(), "; expected a contiguous [", x.size(1), "], one for each channel");
}

template <typename T>
const T* optional_data(const Check& check, const char* name, const OptionalTensor& tensor, const Tensor& x) {
  if (!tensor.has_value() || !tensor->defined()) {
    return nullptr;
  }
  check_channels(check, name, *tensor, x);
  return tensor->const_data_ptr<T>();
}

// Add `value(i)` for i in [0, n), in an order that depends on n alone.
template <typename Value>
double sum_of(int64_t n, const Value& value) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += value(i + lane);
    }
  }
  double sum = 0;
  for (; i < n; ++i) {
    sum += value(i);
  }
  for (const double lane : lanes) {
    sum += lane;
  }
  return sum;
}

// sums[c] = the sum of `value(position, c)` over all values of channel c, for channels [first, last).
template <typename Value>
void channel_sums(const Layout& layout, int64_t first, int64_t last, double* sums, const Value& value) {
  std::fill(sums + first, sums + last, 0.0);
  for (int64_t row = 0; row < layout.rows; ++row) {
    for (int64_t c = first; c < last; ++c) {
      const int64_t base = layout.at(row, c);
      sums[c] +=
          layout.inner == 1 ? value(base, c) : sum_of(layout.inner, [&](int64_t i) { return value(base + i, c); });
    }
  }
}

int64_t channel_grain(const Layout& layout) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, layout.values()));
}

// The statistics of the whole batch, from those of its shares.
struct Whole {
  std::vector<double> count, mean, squares;

  explicit Whole(const Tensor& stats) : count(stats.size(2)), mean(stats.size(2)), squares(stats.size(2)) {
    const int64_t replicas = stats.size(0), channels = stats.size(2);
    const double* all = stats.const_data_ptr<double>();
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t r = 0; r < replicas; ++r) {
        join(c, all + r * 3 * channels + c, channels);
      }
    }
  }

 private:
  void join(int64_t c, const double* share, int64_t channels) {
    const double rows = share[0];
    const double together = count[c] + rows;
    const double apart = share[channels] - mean[c];
    mean[c] += apart * (rows / together);
    squares[c] += share[2 * channels] + apart * apart * (count[c] * rows / together);
    count[c] = together;
  }
};

template <typename T>
void move_running(const OptionalTensor& tensor, int64_t channels, double momentum, const std::vector<double>& batch) {
  if (!tensor.has_value() || !tensor->defined()) {
    return;
  }
  T* running = tensor->mutable_data_ptr<T>();
  for (int64_t c = 0; c < channels; ++c) {
    running[c] = static_cast<T>((1 - momentum) * static_cast<double>(running[c]) + momentum * batch[c]);
  }
}

}  // namespace

Tensor batch_norm_stats(const Tensor& x) {
  const Check check("penstock.batch_norm_stats");
  check_input(check, x);
  const Layout layout(x);
  const auto dense = x.expect_contiguous();
  Tensor stats = at::empty({3, layout.channels}, x.options().dtype(at::kDouble));
  double* count = stats.mutable_data_ptr<double>();
  double* mean = count + layout.channels;
  double* squares = mean + layout.channels;
  with_floating(x, [&](auto type) {
    using T = decltype(type);
    const T* from = dense->const_data_ptr<T>();
    at::parallel_for(0, layout.channels, channel_grain(layout), [&](int64_t first, int64_t last) {
      channel_sums(layout, first, last, mean, [&](int64_t i, int64_t) { return static_cast<double>(from[i]); });
      for (int64_t c = first; c < last; ++c) {
        count[c] = static_cast<double>(layout.values());
        mean[c] /= count[c];
      }
      channel_sums(layout, first, last, squares, [&](int64_t i, int64_t c) {
        const double apart = static_cast<double>(from[i]) - mean[c];
        return apart * apart;
      });
    });
  });
  return stats;
}

std::tuple<Tensor, Tensor, Tensor> sync_batch_norm(const Tensor& x, const OptionalTensor& weight,
                                                   const OptionalTensor& bias, const OptionalTensor& running_mean,
                                                   const OptionalTensor& running_var, const Tensor& stats,
                                                   double momentum, double eps) {
  const Check check("penstock.sync_batch_norm");
  check_input(check, x);
  const Layout layout(x);
  check_stats(check, stats, layout.channels);
  const auto dense = x.expect_contiguous();
  const Tensor joined = stats.contiguous();
  const Whole whole(joined);
  Tensor out = at::empty_like(*dense);
  Tensor mean = at::empty({layout.channels}, x.options());
  Tensor invstd = at::empty({layout.channels}, x.options());
  with_floating(x, [&](auto type) {
    using T = decltype(type);
    const T* scale = optional_data<T>(check, "weight", weight, x);
    const T* shift = optional_data<T>(check, "bias", bias, x);
    optional_data<T>(check, "running_mean", running_mean, x);
    optional_data<T>(check, "running_var", running_var, x);
    T* means = mean.mutable_data_ptr<T>();
    T* inverses = invstd.mutable_data_ptr<T>();
    std::vector<double> unbiased(whole.squares);
    for (int64_t c = 0; c < layout.channels; ++c) {
      means[c] = static_cast<T>(whole.mean[c]);
      inverses[c] = static_cast<T>(1 / std::sqrt(whole.squares[c] / whole.count[c] + eps));
      unbiased[c] /= whole.count[c] - 1;
    }
    const T* from = dense->const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    at::parallel_for(0, layout.rows * layout.channels, grain_of_rows(layout.inner), [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t c = block % layout.channels;
        const T factor = inverses[c] * (scale ? scale[c] : T(1));
        const T centre = means[c];
        const T add = shift ? shift[c] : T(0);
        for (int64_t i = block * layout.inner; i < (block + 1) * layout.inner; ++i) {
          to[i] = (from[i] - centre) * factor + add;
        }
      }
    });
    move_running<T>(running_mean, layout.channels, momentum, whole.mean);
    move_running<T>(running_var, layout.channels, momentum, unbiased);
  });
  return {out, mean, invstd};
}

Tensor batch_norm_grad_stats(const Tensor& grad, const Tensor& x, const Tensor& mean, const Tensor& invstd) {
  const Check check("penstock.batch_norm_grad_stats");
  check_input(check, x);
  check.same("grad", grad, "x", x);
  check_channels(check, "mean", mean, x);
  check_channels(check, "invstd", invstd, x);
  const Layout layout(x);
  const auto dense = x.expect_contiguous();
  const auto dense_grad = grad.expect_contiguous();
  Tensor stats = at::empty({3, layout.channels}, x.options().dtype(at::kDouble));
  double* count = stats.mutable_data_ptr<double>();
  double* sum = count + layout.channels;
  double* product = sum + layout.channels;
  with_floating(x, [&](auto type) {
    using T = decltype(type);
    const T* from = dense->const_data_ptr<T>();
    const T* back = dense_grad->const_data_ptr<T>();
    const T* means = mean.const_data_ptr<T>();
    const T* inverses = invstd.const_data_ptr<T>();
    at::parallel_for(0, layout.channels, channel_grain(layout), [&](int64_t first, int64_t last) {
      channel_sums(layout, first, last, sum, [&](int64_t i, int64_t) { return static_cast<double>(back[i]); });
      channel_sums(layout, first, last, product, [&](int64_t i, int64_t c) {
        return static_cast<double>(back[i]) * (static_cast<double>(from[i]) - static_cast<double>(means[c]));
      });
      for (int64_t c = first; c < last; ++c) {
        count[c] = static_cast<double>(layout.values());
        product[c] *= static_cast<double>(inverses[c]);
      }
    });
  });
  return stats;
}

std::tuple<Tensor, Tensor, Tensor> sync_batch_norm_backward(const Tensor& grad, const Tensor& x,
                                                            const OptionalTensor& weight, const Tensor& mean,
                                                            const Tensor& invstd, const Tensor& own,
                                                            const Tensor& stats) {
  const Check check("penstock.sync_batch_norm_backward");
  check_input(check, x);
  check.same("grad", grad, "x", x);
  check_channels(check, "mean", mean, x);
  check_channels(check, "invstd", invstd, x);
  const Layout layout(x);
  check_stats(check, stats, layout.channels);
  check_stats(check, own.unsqueeze(0), layout.channels);
  const auto dense = x.expect_contiguous();
  const auto dense_grad = grad.expect_contiguous();
  const Tensor sums = stats.contiguous().sum(0);
  const double* count = sums.const_data_ptr<double>();
  const double* sum = count + layout.channels;
  const double* product = sum + layout.channels;
  Tensor out = at::empty_like(*dense);
  with_floating(x, [&](auto type) {
    using T = decltype(type);
    const T* scale = optional_data<T>(check, "weight", weight, x);
    const T* from = dense->const_data_ptr<T>();
    const T* back = dense_grad->const_data_ptr<T>();
    const T* means = mean.const_data_ptr<T>();
    const T* inverses = invstd.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    at::parallel_for(0, layout.rows * layout.channels, grain_of_rows(layout.inner), [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t c = block % layout.channels;
        const T factor = inverses[c] * (scale ? scale[c] : T(1));
        const T centre = means[c];
        const T level = static_cast<T>(sum[c] / count[c]);
        const T slope = static_cast<T>(product[c] / count[c]) * inverses[c];
        for (int64_t i = block * layout.inner; i < (block + 1) * layout.inner; ++i) {
          to[i] = (back[i] - level - (from[i] - centre) * slope) * factor;
        }
      }
    });
  });
  const Tensor mine = own.to(x.scalar_type());
  return {out, mine.select(0, 2).clone(), mine.select(0, 1).clone()};
}

}  // namespace penstock::ops
