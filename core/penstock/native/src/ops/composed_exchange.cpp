#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>

#include "ops/checks.h"
#include "ops/composed.h"

namespace penstock::ops::composed {
namespace {

using at::Tensor;
using at::TensorList;

void check_replicas(const Check& check, TensorList tensors) {
  for (const Tensor& tensor : tensors) {
    check.same("a tensor", tensor, "the first one", tensors[0]);
  }
}

// ((t0 + t1) + t2) + ..., on the device of tensors[at]: the order does not depend on the rank that adds.
Tensor sum_on(TensorList tensors, int64_t at) {
  const auto device = tensors[static_cast<size_t>(at)].device();
  Tensor sum = tensors[0].to(device, tensors[0].scalar_type(), /*non_blocking=*/true, /*copy=*/true);
  for (size_t k = 1; k < tensors.size(); ++k) {
    sum.add_(tensors[k].to(device, /*dtype=*/tensors[k].scalar_type(), /*non_blocking=*/true));
  }
  return sum;
}

void check_owner(const Check& check, int64_t owner, size_t count) {
  TORCH_CHECK_INDEX(owner >= 0 && owner < static_cast<int64_t>(count), check.op(), ": owner is ", owner,
                    "; expected a position in the list of ", count, " tensors");
}

}  // namespace

void all_reduce_(TensorList tensors) {
  check_replicas(Check("penstock.all_reduce_"), tensors);
  const Tensor sum = sum_on(tensors, 0);
  for (const Tensor& tensor : tensors) {
    tensor.copy_(sum, /*non_blocking=*/true);
  }
}

void reduce_(TensorList tensors, int64_t owner) {
  const Check check("penstock.reduce_");
  check_owner(check, owner, tensors.size());
  check_replicas(check, tensors);
  tensors[static_cast<size_t>(owner)].copy_(sum_on(tensors, owner), /*non_blocking=*/true);
}

void broadcast_(TensorList destinations, const Tensor& source) {
  const Check check("penstock.broadcast_");
  for (const Tensor& destination : destinations) {
    check.same("a destination", destination, "source", source);
  }
  for (const Tensor& destination : destinations) {
    if (!destination.is_same(source)) {
      destination.copy_(source, /*non_blocking=*/true);
    }
  }
}

void fused_broadcast_(TensorList destinations, TensorList sources) {
  const Check check("penstock.fused_broadcast_");
  TORCH_CHECK_VALUE(!sources.empty() && destinations.size() % sources.size() == 0, check.op(), ": got ",
                    destinations.size(), " destinations for ", sources.size(),
                    " sources; expected a whole list of them for each replica");
  for (size_t i = 0; i < destinations.size(); ++i) {
    check.same("a destination", destinations[i], "its source", sources[i % sources.size()]);
  }
  for (size_t i = 0; i < destinations.size(); ++i) {
    destinations[i].copy_(sources[i % sources.size()], /*non_blocking=*/true);
  }
}

Tensor gather_rows(TensorList parts, int64_t owner) {
  const Check check("penstock.gather_rows");
  check_owner(check, owner, parts.size());
  const auto device = parts[static_cast<size_t>(owner)].device();
  std::vector<Tensor> here;
  here.reserve(parts.size());
  for (const Tensor& part : parts) {
    here.push_back(part.to(device, part.scalar_type(), /*non_blocking=*/true));
  }
  return at::cat(here);
}

}  // namespace penstock::ops::composed
