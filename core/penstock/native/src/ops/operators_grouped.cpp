// Several tensors in one call: the exchange of a bucket of gradients, the updates of a group of parameters.
//
// The same bits as one call a tensor, except where an update is torch's own fused kernel (momentum, Adagrad).
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <vector>

#include "ops/checks.h"
#include "ops/dense.h"
#include "ops/operators.h"
#include "ops/replicas.h"

namespace penstock::ops {

using at::Tensor;
using at::TensorList;

namespace {

// Positions of several arrays laid one after another: array k is [ends[k - 1], ends[k]).
class Joined {
 public:
  void append(int64_t size) { ends_.push_back((ends_.empty() ? 0 : ends_.back()) + size); }
  void grow(int64_t size) { ends_.back() += size; }

  // Call `body(k, begin, end)` with ranges within the arrays, on any threads; together they are all elements.
  template <typename Body>
  void each(const Body& body) const {
    at::parallel_for(0, ends_.empty() ? 0 : ends_.back(), kGrain, [&](int64_t begin, int64_t end) {
      auto k = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
      while (begin < end) {
        const int64_t base = k == 0 ? 0 : ends_[k - 1];
        const int64_t stop = std::min(end, ends_[k]);
        if (stop > begin) {
          body(k, begin - base, stop - base);
        }
        begin = std::max(begin, stop);
        ++k;
      }
    });
  }

 private:
  std::vector<int64_t> ends_;
};

// Gradients whose memory follows one another on every replica are one run: a bucket of a buffer plan is a single one.
template <typename T>
void sum_runs(TensorList tensors, size_t replicas) {
  std::vector<T*> arrays;  // run by run, one array a replica
  Joined joined;
  int64_t last = 0;  // elements of the last run
  for (size_t at = 0; at < tensors.size(); at += replicas) {
    const int64_t size = tensors[at].numel();
    bool follows = !arrays.empty();
    for (size_t r = 0; follows && r < replicas; ++r) {
      follows = arrays[arrays.size() - replicas + r] + last == tensors[at + r].const_data_ptr<T>();
    }
    if (follows) {
      joined.grow(size);
      last += size;
      continue;
    }
    for (size_t r = 0; r < replicas; ++r) {
      arrays.push_back(tensors[at + r].mutable_data_ptr<T>());
    }
    joined.append(size);
    last = size;
  }
  joined.each([&](size_t run, int64_t begin, int64_t end) {
    sum_to_all(arrays.data() + run * replicas, static_cast<int64_t>(replicas), begin, end);
  });
}

Joined joined_sizes(TensorList params) {
  Joined joined;
  for (const Tensor& param : params) {
    joined.append(param.numel());
  }
  return joined;
}

}  // namespace

void fused_all_reduce_(TensorList tensors, int64_t replicas) {
  const Check check("penstock.fused_all_reduce_");
  const auto count = static_cast<size_t>(replicas);
  TORCH_CHECK_VALUE(replicas > 0 && tensors.size() % count == 0, check.op(), ": got ", tensors.size(), " tensors for ",
                    replicas, " replicas; expected the same number for each");
  for (size_t at = 0; at < tensors.size(); at += count) {
    check_replicas(check, tensors.slice(at, count));
    check.dtype("a tensor", tensors[at], tensors[0].scalar_type());
  }
  with_summable(check, tensors[0], [&](auto type) { sum_runs<decltype(type)>(tensors, count); });
}

void fused_sgd_(TensorList params, TensorList grads, const Tensor& lr) {
  const Check check("penstock.fused_sgd_");
  const std::vector<Tensor> dense = check.dense_grads(params, grads);
  const double rate = check.scalar("lr", lr);
  with_floating(params[0], [&](auto type) {
    using T = decltype(type);
    joined_sizes(params).each([&](size_t k, int64_t begin, int64_t end) {
      sgd(params[k].mutable_data_ptr<T>(), dense[k].const_data_ptr<T>(), rate, begin, end);
    });
  });
}

void fused_momentum_(TensorList params, TensorList velocities, TensorList grads, const Tensor& lr, double momentum,
                     bool nesterov) {
  const Check check("penstock.fused_momentum_");
  const std::vector<Tensor> dense = check.dense_grads(params, grads);
  check.states("velocities", params, velocities);
  const double rate = check.scalar("lr", lr);
  const at::AutoDispatchBelowADInplaceOrView guard;
  // A velocity starts from zero, so that torch's first step, which copies the gradient, needs no case of its own.
  at::_fused_sgd_(params, dense, velocities, /*weight_decay=*/0, momentum, rate, /*dampening=*/0, nesterov,
                  /*maximize=*/false, /*is_first_step=*/false);
}

void fused_adagrad_(TensorList params, TensorList moments, TensorList grads, const Tensor& lr, double epsilon) {
  const Check check("penstock.fused_adagrad_");
  const std::vector<Tensor> dense = check.dense_grads(params, grads);
  check.states("moments", params, moments);
  const double rate = check.scalar("lr", lr);
  const at::AutoDispatchBelowADInplaceOrView guard;
  // The count of steps weighs nothing, because lr_decay is 0; it is read all the same.
  const std::vector<Tensor> steps(params.size(), at::ones({1}));
  at::_fused_adagrad_(params, dense, moments, steps, rate, /*lr_decay=*/0, /*weight_decay=*/0, epsilon,
                      /*maximize=*/false);
}

void fused_adam_(TensorList params, TensorList moments1, TensorList moments2, const Tensor& step, TensorList grads,
                 const Tensor& lr, double beta1, double beta2, double epsilon, double weight_decay, bool epsilon_hat) {
  const Check check("penstock.fused_adam_");
  const std::vector<Tensor> dense = check.dense_grads(params, grads);
  check.states("moments1", params, moments1);
  check.states("moments2", params, moments2);
  const AdamSettings settings{beta1, beta2, epsilon, weight_decay, epsilon_hat};
  const AdamStep by = adam_step(settings, check.scalar("lr", lr), check.step(step));
  with_floating(params[0], [&](auto type) {
    using T = decltype(type);
    joined_sizes(params).each([&](size_t k, int64_t begin, int64_t end) {
      const AdamArrays<T> arrays{params[k].mutable_data_ptr<T>(), moments1[k].mutable_data_ptr<T>(),
                                 moments2[k].mutable_data_ptr<T>(), dense[k].const_data_ptr<T>()};
      adam(arrays, by, begin, end);
    });
  });
}

}  // namespace penstock::ops
