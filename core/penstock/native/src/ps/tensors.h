// Which tensors go over a channel as they are.
#pragma once

#include <ATen/core/Tensor.h>

#include "ps/message.h"

namespace penstock::ps {

inline bool travels(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.is_contiguous() && tensor.dim() <= static_cast<int64_t>(kMaxDims);
}

}  // namespace penstock::ps
