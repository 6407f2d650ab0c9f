// What the exchanges of gradients share: the check that tensors of several replicas can be added as flat arrays.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/checks.h"

namespace penstock::ops {

// The tensors are one memory layout each, all the same, so that they can be added as flat arrays.
inline void check_replicas(const Check& check, at::TensorList tensors) {
  const at::Tensor& first = tensors[0];
  TORCH_CHECK_VALUE(first.is_non_overlapping_and_dense(), check.op(), ": tensor 0 of shape ", first.sizes(),
                    " has strides ", first.strides(), ", which leave gaps or overlap; expected a dense tensor");
  for (size_t k = 1; k < tensors.size(); ++k) {
    const at::Tensor& other = tensors[k];
    TORCH_CHECK_TYPE(other.scalar_type() == first.scalar_type(), check.op(), ": tensor ", k, " has dtype ",
                     other.scalar_type(), "; expected ", first.scalar_type(), " as tensor 0");
    TORCH_CHECK_VALUE(other.sizes() == first.sizes() && other.strides() == first.strides(), check.op(), ": tensor ", k,
                      " has shape ", other.sizes(), " and strides ", other.strides(), "; expected ", first.sizes(),
                      " and ", first.strides(), " as tensor 0");
    for (size_t j = 0; j < k && first.numel() > 0; ++j) {
      TORCH_CHECK_VALUE(other.const_data_ptr() != tensors[j].const_data_ptr(), check.op(), ": tensors ", j, " and ", k,
                        " are the same memory; expected one of its own for each replica");
    }
  }
}

// Call `body` with a value of the tensor's element type. Raises TypeError for one that the sums are not made for.
template <typename Body>
void with_summable(const Check& check, const at::Tensor& tensor, const Body& body) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return body(float{});
    case at::kDouble:
      return body(double{});
    case at::kInt:
      return body(int32_t{});
    case at::kLong:
      return body(int64_t{});
    default:
      TORCH_CHECK_TYPE(false, check.op(), ": the tensors have dtype ", tensor.scalar_type(),
                       "; expected Float, Double, Int or Long");
  }
}

}  // namespace penstock::ops
