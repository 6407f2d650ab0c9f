// Registers `torch.ops.penstock.*`: schemas and CPU kernels.  The schemas declare every write.
//
// Fake kernels and derivatives are in penstock/native/ops.py.
#include <torch/library.h>

#include "ops/operators.h"

TORCH_LIBRARY(penstock, m) {
  m.def("lookup_table(Tensor table, Tensor ids, int padding_idx=-1) -> Tensor");
  m.def("sparse_sgd_(Tensor(a!) param, Tensor rows, Tensor values, Tensor lr) -> ()");
  m.def(
      "sparse_adam_(Tensor(a!) param, Tensor(b!) moment1, Tensor(c!) moment2, Tensor step, Tensor rows, "
      "Tensor values, Tensor lr, float beta1, float beta2, float epsilon) -> ()");
  m.def(
      "sparse_adagrad_(Tensor(a!) param, Tensor(b!) moment, Tensor rows, Tensor values, Tensor lr, float epsilon) "
      "-> ()");
  m.def("sgd_(Tensor(a!) param, Tensor grad, Tensor lr) -> ()");
  m.def(
      "adam_(Tensor(a!) param, Tensor(b!) moment1, Tensor(c!) moment2, Tensor step, Tensor grad, Tensor lr, "
      "float beta1, float beta2, float epsilon, float weight_decay, bool epsilon_hat=False) -> ()");
  m.def("sparse_sgd_.part(Tensor(a!) param, Tensor rows, Tensor values, Tensor lr, int part, int num_parts) -> ()");
  m.def(
      "sparse_adam_.part(Tensor(a!) param, Tensor(b!) moment1, Tensor(c!) moment2, Tensor step, Tensor rows, "
      "Tensor values, Tensor lr, float beta1, float beta2, float epsilon, int part, int num_parts) -> ()");
  m.def(
      "sparse_adagrad_.part(Tensor(a!) param, Tensor(b!) moment, Tensor rows, Tensor values, Tensor lr, "
      "float epsilon, int part, int num_parts) -> ()");
  m.def("sgd_.part(Tensor(a!) param, Tensor grad, Tensor lr, int part, int num_parts) -> ()");
  m.def(
      "adam_.part(Tensor(a!) param, Tensor(b!) moment1, Tensor(c!) moment2, Tensor step, Tensor grad, Tensor lr, "
      "float beta1, float beta2, float epsilon, float weight_decay, bool epsilon_hat, int part, int num_parts) "
      "-> ()");
  m.def("all_reduce_(Tensor(a!)[] tensors) -> ()");
  m.def("reduce_(Tensor(a!)[] tensors, int owner) -> ()");
  m.def("all_reduce_.part(Tensor(a!)[] tensors, int part, int num_parts) -> ()");
  m.def("reduce_.part(Tensor(a!)[] tensors, int owner, int part, int num_parts) -> ()");
  m.def("fused_all_reduce_(Tensor(a!)[] tensors, int replicas) -> ()");
  m.def("fused_sgd_(Tensor(a!)[] params, Tensor[] grads, Tensor lr) -> ()");
  m.def(
      "fused_momentum_(Tensor(a!)[] params, Tensor(b!)[] velocities, Tensor[] grads, Tensor lr, float momentum, "
      "bool nesterov) -> ()");
  m.def("fused_adagrad_(Tensor(a!)[] params, Tensor(b!)[] moments, Tensor[] grads, Tensor lr, float epsilon) -> ()");
  m.def(
      "fused_adam_(Tensor(a!)[] params, Tensor(b!)[] moments1, Tensor(c!)[] moments2, Tensor step, Tensor[] grads, "
      "Tensor lr, float beta1, float beta2, float epsilon, float weight_decay, bool epsilon_hat=False) -> ()");
  m.def("batch_norm_stats(Tensor x) -> Tensor");
  m.def(
      "sync_batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "Tensor stats, float momentum, float eps) -> (Tensor, Tensor, Tensor)");
  m.def("batch_norm_grad_stats(Tensor grad, Tensor x, Tensor mean, Tensor invstd) -> Tensor");
  m.def(
      "sync_batch_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor invstd, Tensor own, "
      "Tensor stats) -> (Tensor, Tensor, Tensor)");
  m.def("broadcast_(Tensor(a!)[] destinations, Tensor source) -> ()");
  m.def(
      "dropout(Tensor x, Tensor rng, float p, bool training, int op_seed, int batch_dim, int rows_per_sample) "
      "-> (Tensor, Tensor)");
  m.def("dropout_backward(Tensor grad, Tensor mask, float p, bool training) -> Tensor");
  m.def("normal(SymInt[] size, float mean, float std, int seed, ScalarType dtype) -> Tensor");
  m.def("truncated_normal(SymInt[] size, float mean, float std, int seed, ScalarType dtype) -> Tensor");
  m.def("uniform(SymInt[] size, float low, float high, int seed, ScalarType dtype) -> Tensor");
  m.def("scale_loss_grad(Tensor like, float value) -> Tensor");
  m.def("auc(Tensor predict, Tensor label, Tensor(a!) stat_pos, Tensor(b!) stat_neg) -> Tensor");
  m.def("accuracy(Tensor topk_indices, Tensor label) -> (Tensor accuracy, Tensor correct, Tensor total)");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  using namespace penstock::ops;
  m.impl("lookup_table", lookup_table);
  m.impl("sparse_sgd_", sparse_sgd_);
  m.impl("sparse_adam_", sparse_adam_);
  m.impl("sparse_adagrad_", sparse_adagrad_);
  m.impl("sgd_", sgd_);
  m.impl("adam_", adam_);
  m.impl("sparse_sgd_.part", sparse_sgd_part_);
  m.impl("sparse_adam_.part", sparse_adam_part_);
  m.impl("sparse_adagrad_.part", sparse_adagrad_part_);
  m.impl("sgd_.part", sgd_part_);
  m.impl("adam_.part", adam_part_);
  m.impl("all_reduce_", all_reduce_);
  m.impl("reduce_", reduce_);
  m.impl("all_reduce_.part", all_reduce_part_);
  m.impl("reduce_.part", reduce_part_);
  m.impl("broadcast_", broadcast_);
  m.impl("fused_all_reduce_", fused_all_reduce_);
  m.impl("fused_sgd_", fused_sgd_);
  m.impl("fused_momentum_", fused_momentum_);
  m.impl("fused_adagrad_", fused_adagrad_);
  m.impl("fused_adam_", fused_adam_);
  m.impl("batch_norm_stats", batch_norm_stats);
  m.impl("sync_batch_norm", sync_batch_norm);
  m.impl("batch_norm_grad_stats", batch_norm_grad_stats);
  m.impl("sync_batch_norm_backward", sync_batch_norm_backward);
  m.impl("dropout", dropout);
  m.impl("dropout_backward", dropout_backward);
  m.impl("scale_loss_grad", scale_loss_grad);
  m.impl("auc", auc);
  m.impl("accuracy", accuracy);
}

// Without a tensor among the arguments there is no backend key to dispatch on.
TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, m) {
  using namespace penstock::ops;
  m.impl("normal", normal);
  m.impl("truncated_normal", truncated_normal);
  m.impl("uniform", uniform);
}
