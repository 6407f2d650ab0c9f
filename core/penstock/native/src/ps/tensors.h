// Which tensors go over a channel as they are. Those of too many dimensions do not (`why_not`).
#pragma once

#include <ATen/core/Tensor.h>

namespace penstock::ps {

inline bool travels(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.is_contiguous();
}

}  // namespace penstock::ps
