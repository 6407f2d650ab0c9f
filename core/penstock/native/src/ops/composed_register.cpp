// Registers the composed operators: for CUDA under the names that the CPU kernels have, and for every device in the
// namespace penstock_composed, where tests compare them with those kernels.
#include <torch/library.h>

#include "ops/composed.h"
#include "ops/operators.h"

namespace {

namespace composed = penstock::ops::composed;

void implement_values(torch::Library& m) {
  m.impl("lookup_table", composed::lookup_table);
  m.impl("sparse_sgd_", composed::sparse_sgd_);
  m.impl("sparse_adam_", composed::sparse_adam_);
  m.impl("sparse_adagrad_", composed::sparse_adagrad_);
  m.impl("sgd_", composed::sgd_);
  m.impl("adam_", composed::adam_);
  m.impl("fused_sgd_", composed::fused_sgd_);
  m.impl("fused_momentum_", composed::fused_momentum_);
  m.impl("fused_adagrad_", composed::fused_adagrad_);
  m.impl("fused_adam_", composed::fused_adam_);
  m.impl("dropout", composed::dropout);
  m.impl("dropout_backward", composed::dropout_backward);
  m.impl("sequence_pool", composed::sequence_pool);
  m.impl("sequence_pool_backward", composed::sequence_pool_backward);
  m.impl("sequence_rows", composed::sequence_rows);
  m.impl("auc", composed::auc);
  m.impl("accuracy", composed::accuracy);
}

}  // namespace

// What only devices call: the graph builder makes them or puts them in the place of a CPU kernel, no program records
// them.
TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("fused_broadcast_(Tensor(a!)[] destinations, Tensor[] sources) -> ()");
  m.def("gather_rows(Tensor[] parts, int owner) -> Tensor");
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, "
      "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
      "float dropout_p, bool is_causal, Tensor? attn_mask=None, float? scale=None) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)");
}

TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, m) {
  m.impl("gather_rows", composed::gather_rows);
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("fused_broadcast_", composed::fused_broadcast_);
  m.impl("attention", composed::attention);
  m.impl("attention_backward", composed::attention_backward);
}

// all_reduce_, reduce_, broadcast_ and fused_broadcast_ on CUDA: penstock/native/collectives.py, over NCCL.
TORCH_LIBRARY_IMPL(penstock, CUDA, m) {
  implement_values(m);
  m.impl("attention", composed::attention);
  m.impl("attention_backward", composed::attention_backward);
  m.impl("scale_loss_grad", penstock::ops::scale_loss_grad);
}

TORCH_LIBRARY(penstock_composed, m) {
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
  m.def("fused_sgd_(Tensor(a!)[] params, Tensor[] grads, Tensor lr) -> ()");
  m.def(
      "fused_momentum_(Tensor(a!)[] params, Tensor(b!)[] velocities, Tensor[] grads, Tensor lr, float momentum, "
      "bool nesterov) -> ()");
  m.def("fused_adagrad_(Tensor(a!)[] params, Tensor(b!)[] moments, Tensor[] grads, Tensor lr, float epsilon) -> ()");
  m.def(
      "fused_adam_(Tensor(a!)[] params, Tensor(b!)[] moments1, Tensor(c!)[] moments2, Tensor step, Tensor[] grads, "
      "Tensor lr, float beta1, float beta2, float epsilon, float weight_decay, bool epsilon_hat=False) -> ()");
  m.def(
      "dropout(Tensor x, Tensor rng, float p, bool training, int op_seed, int batch_dim, int rows_per_sample) "
      "-> (Tensor, Tensor)");
  m.def("dropout_backward(Tensor grad, Tensor mask, float p, bool training) -> Tensor");
  m.def("sequence_pool(Tensor x, Tensor lengths, str kind, float pad_value) -> (Tensor out, Tensor index)");
  m.def("sequence_pool_backward(Tensor grad, Tensor index, Tensor lengths, SymInt rows, str kind) -> Tensor");
  m.def("sequence_rows(Tensor lengths, SymInt rows, str kind) -> Tensor");
  m.def("auc(Tensor predict, Tensor label, Tensor(a!) stat_pos, Tensor(b!) stat_neg) -> Tensor");
  m.def("accuracy(Tensor topk_indices, Tensor label) -> (Tensor accuracy, Tensor correct, Tensor total)");
  m.def("all_reduce_(Tensor(a!)[] tensors) -> ()");
  m.def("reduce_(Tensor(a!)[] tensors, int owner) -> ()");
  m.def("broadcast_(Tensor(a!)[] destinations, Tensor source) -> ()");
  m.def("fused_broadcast_(Tensor(a!)[] destinations, Tensor[] sources) -> ()");
}

TORCH_LIBRARY_IMPL(penstock_composed, CompositeExplicitAutograd, m) {
  implement_values(m);
  m.impl("all_reduce_", composed::all_reduce_);
  m.impl("reduce_", composed::reduce_);
  m.impl("broadcast_", composed::broadcast_);
  m.impl("fused_broadcast_", composed::fused_broadcast_);
}
