// Registers the operators that passes put in the place of several others.  Schemas declare every write.
#include <torch/library.h>

#include "ops/operators_fused.h"

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "product(Tensor x, Tensor w, Tensor? bias, bool transpose_x, bool transpose_w, str activation, str kernel) "
      "-> Tensor");
  m.def(
      "product_by(Tensor x, Tensor w, Tensor? bias, bool transpose_x, bool transpose_w, str activation, str kernel) "
      "-> Tensor");
  m.def("fused_add_act(Tensor x, Tensor y, str activation, float scale) -> Tensor");
  m.def("max_pool_2x2(Tensor x, bool relu) -> (Tensor, Tensor)");
  m.def("max_pool_2x2_backward(Tensor grad, Tensor places) -> Tensor");
  m.def("mkl_vendor_check() -> int");
  m.def("lookup_concat(Tensor[] tables, Tensor[] ids, int[] padding_idx, Tensor[] parts, int[] order) -> Tensor");
  m.def(
      "fused_sparse_sgd_(Tensor(a!)[] params, Tensor[] rows, Tensor[] values, int[] pieces, Tensor[] lengths, int[] "
      "ragged, Tensor lr) -> ()");
  m.def(
      "fused_sparse_adam_(Tensor(a!)[] params, Tensor(b!)[] moments1, Tensor(c!)[] moments2, Tensor step, "
      "Tensor[] rows, Tensor[] values, int[] pieces, Tensor[] lengths, int[] ragged, Tensor lr, float beta1, float "
      "beta2, float epsilon) -> ()");
  m.def(
      "fused_sparse_adagrad_(Tensor(a!)[] params, Tensor(b!)[] moments, Tensor[] rows, Tensor[] values, "
      "int[] pieces, Tensor[] lengths, int[] ragged, Tensor lr, float epsilon) -> ()");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  using namespace penstock::ops;
  m.impl("product", product);
  m.impl("product_by", product_by);
  m.impl("fused_add_act", fused_add_act);
  m.impl("max_pool_2x2", max_pool_2x2);
  m.impl("max_pool_2x2_backward", max_pool_2x2_backward);
  m.impl("lookup_concat", lookup_concat);
  m.impl("fused_sparse_sgd_", fused_sparse_sgd_);
  m.impl("fused_sparse_adam_", fused_sparse_adam_);
  m.impl("fused_sparse_adagrad_", fused_sparse_adagrad_);
}

// Both are made of torch's own operators where the tensors are not the CPU's.
TORCH_LIBRARY_IMPL(penstock, CUDA, m) {
  using namespace penstock::ops;
  m.impl("product", product);
  m.impl("product_by", product_by);
  m.impl("fused_add_act", fused_add_act);
}

// Without a tensor among the arguments there is no backend key to dispatch on.
TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, m) {
  m.impl("mkl_vendor_check", penstock::ops::mkl_vendor_check);
}
