#include <ATen/Parallel.h>

#include <cmath>
#include <vector>

#include "ops/checks.h"
#include "ops/dense.h"
#include "ops/lookup.h"
#include "ops/operators.h"
#include "ops/replicas.h"
#include "ops/sparse.h"

namespace penstock::ops {

using at::Tensor;
using at::TensorList;

namespace {

// One of `count` parts of flat arrays. Parts begin on multiples of kPartElements, so that no cache line is in two.
struct Part {
  int64_t index = 0;
  int64_t count = 1;

  int64_t begin(int64_t size) const {
    constexpr int64_t kPartElements = 64;
    const int64_t pieces = (size + kPartElements - 1) / kPartElements;
    return std::min(size, pieces * index / count * kPartElements);
  }
  int64_t end(int64_t size) const { return Part{index + 1, count}.begin(size); }
};

Part part_of(const Check& check, int64_t part, int64_t num_parts) {
  TORCH_CHECK_INDEX(part >= 0 && part < num_parts, check.op(), ": part is ", part, "; expected one of ", num_parts,
                    ", from 0");
  return {part, num_parts};
}

}  // namespace

// ---------------------------------------------------------------- sparse optimizers

namespace {

// Views the gradient of `param`; `rows` and `values` must stay alive and contiguous.
template <typename T>
SparseGrad<T> sparse_grad(const Check& check, const Tensor& param, const Tensor& rows, const Tensor& values) {
  const SparseGrad<T> grad{rows.const_data_ptr<int64_t>(),
                           values.const_data_ptr<T>(),
                           rows.size(0),
                           param.size(1),
                           param.size(0),
                           param.size(1)};
  const int64_t bad = first_outside(grad.rows, grad.count, grad.height);
  TORCH_CHECK_INDEX(bad < 0, check.op(), ": row ", grad.rows[std::max<int64_t>(bad, 0)], " at position ", bad,
                    " of rows ", rows.sizes(), " is outside param, which has ", grad.height, " rows");
  return grad;
}

RowShare share_of(const Check& check, int64_t part, int64_t num_parts) {
  constexpr int64_t kMost = 1 << 16;
  TORCH_CHECK_INDEX(part >= 0 && part < num_parts && num_parts <= kMost, check.op(), ": part is ", part,
                    "; expected one of ", num_parts, ", from 0, of at most ", kMost);
  return {static_cast<uint32_t>(part), static_cast<uint32_t>(num_parts)};
}

// Sum the duplicates of a share in this thread's scratch, then call `update(merged, begin, end)` for ranges of its
// rows.
template <typename T, typename Update>
void update_merged(const SparseGrad<T>& grad, RowShare share, const Update& update) {
  thread_local MergedRows<T> scratch;
  MergedRows<T>& merged = scratch;  // the lambda below runs on other threads, which have a scratch of their own
  TORCH_CHECK_VALUE(grad.count < (int64_t{1} << 31), "penstock: a sparse gradient has ", grad.count,
                    " rows; at most 2^31 - 1 can be merged at once");
  merged.merge(grad, share);
  at::parallel_for(0, merged.size(), grain_of_rows(grad.width),
                   [&](int64_t begin, int64_t end) { update(merged, begin, end); });
  merged.shrink();
}

}  // namespace

void sparse_sgd_(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& lr) {
  // Each thread has a share, as few as are worth their reading of all ids.
  const int64_t shares = values.numel() < 4 * kGrain ? 1 : at::get_num_threads();
  at::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
    for (int64_t share = begin; share < end; ++share) {
      sparse_sgd_part_(param, rows, values, lr, share, shares);
    }
  });
}

void sparse_sgd_part_(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& lr, int64_t part,
                      int64_t num_parts) {
  const Check check("penstock.sparse_sgd_");
  check.sparse_grad(param, rows, values);
  const double rate = check.scalar("lr", lr);
  const RowShare share = share_of(check, part, num_parts);
  const auto list = rows.expect_contiguous();
  const auto source = values.expect_contiguous();
  with_floating(param, [&](auto type) {
    using T = decltype(type);
    sparse_sgd(param.mutable_data_ptr<T>(), sparse_grad<T>(check, param, *list, *source), rate, share);
  });
}

void sparse_adam_(const Tensor& param, const Tensor& moment1, const Tensor& moment2, const Tensor& step,
                  const Tensor& rows, const Tensor& values, const Tensor& lr, double beta1, double beta2,
                  double epsilon) {
  sparse_adam_part_(param, moment1, moment2, step, rows, values, lr, beta1, beta2, epsilon, 0, 1);
}

void sparse_adam_part_(const Tensor& param, const Tensor& moment1, const Tensor& moment2, const Tensor& step,
                       const Tensor& rows, const Tensor& values, const Tensor& lr, double beta1, double beta2,
                       double epsilon, int64_t part, int64_t num_parts) {
  const Check check("penstock.sparse_adam_");
  check.sparse_grad(param, rows, values);
  check.state("moment1", moment1, param);
  check.state("moment2", moment2, param);
  const double t = check.step(step);
  const double size = check.scalar("lr", lr) * std::sqrt(1 - std::pow(beta2, t)) / (1 - std::pow(beta1, t));
  const SparseAdamStep by{beta1, beta2, epsilon, size};
  const RowShare share = share_of(check, part, num_parts);
  const auto list = rows.expect_contiguous();
  const auto source = values.expect_contiguous();
  with_floating(param, [&](auto type) {
    using T = decltype(type);
    const SparseAdamArrays<T> arrays{param.mutable_data_ptr<T>(), moment1.mutable_data_ptr<T>(),
                                     moment2.mutable_data_ptr<T>(), param.size(1)};
    update_merged(
        sparse_grad<T>(check, param, *list, *source), share,
        [&](const MergedRows<T>& merged, int64_t begin, int64_t end) { sparse_adam(arrays, merged, by, begin, end); });
  });
}

void sparse_adagrad_(const Tensor& param, const Tensor& moment, const Tensor& rows, const Tensor& values,
                     const Tensor& lr, double epsilon) {
  sparse_adagrad_part_(param, moment, rows, values, lr, epsilon, 0, 1);
}

void sparse_adagrad_part_(const Tensor& param, const Tensor& moment, const Tensor& rows, const Tensor& values,
                          const Tensor& lr, double epsilon, int64_t part, int64_t num_parts) {
  const Check check("penstock.sparse_adagrad_");
  check.sparse_grad(param, rows, values);
  check.state("moment", moment, param);
  const double rate = check.scalar("lr", lr);
  const RowShare share = share_of(check, part, num_parts);
  const auto list = rows.expect_contiguous();
  const auto source = values.expect_contiguous();
  with_floating(param, [&](auto type) {
    using T = decltype(type);
    const SparseAdagradArrays<T> arrays{param.mutable_data_ptr<T>(), moment.mutable_data_ptr<T>(), param.size(1)};
    update_merged(sparse_grad<T>(check, param, *list, *source), share,
                  [&](const MergedRows<T>& merged, int64_t begin, int64_t end) {
                    sparse_adagrad(arrays, merged, rate, epsilon, begin, end);
                  });
  });
}

// ---------------------------------------------------------------- dense optimizers

void sgd_(const Tensor& param, const Tensor& grad, const Tensor& lr) {
  sgd_part_(param, grad, lr, 0, 1);
}

void sgd_part_(const Tensor& param, const Tensor& grad, const Tensor& lr, int64_t part, int64_t num_parts) {
  const Check check("penstock.sgd_");
  check.floating("param", param);
  check.writable("param", param);
  check.same("grad", grad, "param", param);
  const double rate = check.scalar("lr", lr);
  const Part own = part_of(check, part, num_parts);
  const auto source = grad.expect_contiguous();
  with_floating(param, [&](auto type) {
    using T = decltype(type);
    T* to = param.mutable_data_ptr<T>();
    const T* from = source->const_data_ptr<T>();
    at::parallel_for(own.begin(param.numel()), own.end(param.numel()), kGrain,
                     [&](int64_t begin, int64_t end) { sgd(to, from, rate, begin, end); });
  });
}

void adam_(const Tensor& param, const Tensor& moment1, const Tensor& moment2, const Tensor& step, const Tensor& grad,
           const Tensor& lr, double beta1, double beta2, double epsilon, double weight_decay, bool epsilon_hat) {
  adam_part_(param, moment1, moment2, step, grad, lr, beta1, beta2, epsilon, weight_decay, epsilon_hat, 0, 1);
}

void adam_part_(const Tensor& param, const Tensor& moment1, const Tensor& moment2, const Tensor& step,
                const Tensor& grad, const Tensor& lr, double beta1, double beta2, double epsilon, double weight_decay,
                bool epsilon_hat, int64_t part, int64_t num_parts) {
  const Check check("penstock.adam_");
  check.floating("param", param);
  check.writable("param", param);
  check.state("moment1", moment1, param);
  check.state("moment2", moment2, param);
  check.same("grad", grad, "param", param);
  const AdamSettings settings{beta1, beta2, epsilon, weight_decay, epsilon_hat};
  const AdamStep by = adam_step(settings, check.scalar("lr", lr), check.step(step));
  const Part own = part_of(check, part, num_parts);
  const auto source = grad.expect_contiguous();
  with_floating(param, [&](auto type) {
    using T = decltype(type);
    const AdamArrays<T> arrays{param.mutable_data_ptr<T>(), moment1.mutable_data_ptr<T>(),
                               moment2.mutable_data_ptr<T>(), source->const_data_ptr<T>()};
    at::parallel_for(own.begin(param.numel()), own.end(param.numel()), kGrain,
                     [&](int64_t begin, int64_t end) { adam(arrays, by, begin, end); });
  });
}

// ---------------------------------------------------------------- gradient exchange on CPU

namespace {

template <typename T, typename Sum>
void sum_typed(TensorList tensors, const Part& part, const Sum& sum) {
  std::vector<T*> arrays;
  arrays.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    arrays.push_back(tensor.mutable_data_ptr<T>());
  }
  const int64_t size = tensors[0].numel();
  at::parallel_for(part.begin(size), part.end(size), kGrain,
                   [&](int64_t begin, int64_t end) { sum(arrays.data(), begin, end); });
}

template <typename Sum>
void sum_replicas(const Check& check, TensorList tensors, const Part& part, const Sum& sum) {
  check_replicas(check, tensors);
  part_of(check, part.index, part.count);
  with_summable(check, tensors[0], [&](auto type) { sum_typed<decltype(type)>(tensors, part, sum); });
}

void sum_all(TensorList tensors, const Part& part) {
  const auto count = static_cast<int64_t>(tensors.size());
  sum_replicas(Check("penstock.all_reduce_"), tensors, part,
               [&](auto* arrays, int64_t begin, int64_t end) { sum_to_all(arrays, count, begin, end); });
}

void sum_at_owner(TensorList tensors, int64_t owner, const Part& part) {
  const Check check("penstock.reduce_");
  const auto count = static_cast<int64_t>(tensors.size());
  TORCH_CHECK_INDEX(owner >= 0 && owner < count, check.op(), ": owner is ", owner,
                    "; expected a position in the list of ", count, " tensors");
  sum_replicas(check, tensors, part,
               [&](auto* arrays, int64_t begin, int64_t end) { sum_to_one(arrays, count, owner, begin, end); });
}

}  // namespace

void all_reduce_(TensorList tensors) {
  sum_all(tensors, Part{});
}

void all_reduce_part_(TensorList tensors, int64_t part, int64_t num_parts) {
  sum_all(tensors, Part{part, num_parts});
}

void reduce_(TensorList tensors, int64_t owner) {
  sum_at_owner(tensors, owner, Part{});
}

void reduce_part_(TensorList tensors, int64_t owner, int64_t part, int64_t num_parts) {
  sum_at_owner(tensors, owner, Part{part, num_parts});
}

void broadcast_(TensorList destinations, const Tensor& source) {
  const Check check("penstock.broadcast_");
  for (const Tensor& destination : destinations) {
    check.same("a destination", destination, "source", source);
    check.writable("a destination", destination);
  }
  const auto from = source.expect_contiguous();
  const auto* bytes = static_cast<const char*>(from->const_data_ptr());
  for (const Tensor& destination : destinations) {
    auto* to = static_cast<char*>(destination.mutable_data_ptr());
    if (to == bytes) {
      continue;
    }
    at::parallel_for(0, static_cast<int64_t>(source.nbytes()), kGrain * 4,
                     [&](int64_t begin, int64_t end) { std::copy(bytes + begin, bytes + end, to + begin); });
  }
}

}  // namespace penstock::ops
