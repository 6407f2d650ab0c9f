#include "ps/columns.h"

#include <ATen/ops/empty.h>

namespace penstock::ps {

bool is_sparse_gradient(const Columns& one) {
  const at::Tensor &ids = one.ids, &matrix = one.matrix;
  return ids.device().is_cpu() && ids.is_contiguous() && ids.scalar_type() == at::kLong && matrix.device().is_cpu() &&
         matrix.scalar_type() == at::kFloat && matrix.dim() == 2 && matrix.stride(1) == 1 &&
         matrix.size(0) == ids.numel() && one.first >= 0 && one.first + one.width <= matrix.size(1);
}

Runs runs_of(const at::Tensor& ids) {
  return {static_cast<const char*>(ids.const_data_ptr()), 1, ids.nbytes(), ids.nbytes()};
}

Runs runs_of(const Columns& one) {
  const std::size_t element = one.matrix.element_size();
  return {static_cast<const char*>(one.matrix.const_data_ptr()) + static_cast<std::size_t>(one.first) * element,
          static_cast<std::size_t>(one.matrix.size(0)), static_cast<std::size_t>(one.width) * element,
          static_cast<std::size_t>(one.matrix.stride(0)) * element};
}

Columns joined(const std::vector<Columns>& pieces) {
  const Columns& first = pieces[0];
  if (pieces.size() == 1 && first.width == first.matrix.size(1) && first.matrix.is_contiguous()) {
    return {first.ids.reshape(-1), first.matrix, 0, first.width};
  }
  std::int64_t count = 0;
  std::vector<Runs> ids, values;
  for (const Columns& one : pieces) {
    count += one.ids.numel();
    ids.push_back(runs_of(one.ids));
    values.push_back(runs_of(one));
  }
  Columns out{at::empty({count}, first.ids.options()), at::empty({count, first.width}, first.matrix.options()), 0,
              first.width};
  write_runs(ids, static_cast<char*>(out.ids.mutable_data_ptr()));
  write_runs(values, static_cast<char*>(out.matrix.mutable_data_ptr()));
  return out;
}

}  // namespace penstock::ps
