#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <vector>

#include "ops/checks.h"
#include "ops/dropout.h"
#include "ops/initial.h"
#include "ops/lookup.h"
#include "ops/metrics.h"
#include "ops/operators.h"

namespace penstock::ops {

using at::Tensor;

// ---------------------------------------------------------------- lookup

Tensor lookup_table(const Tensor& table, const Tensor& ids, int64_t padding_idx) {
  const Check check("penstock.lookup_table");
  check.dim("table", table, 2, "[rows, width]");
  check.dtype("ids", ids, at::kLong);
  TORCH_CHECK_VALUE(padding_idx >= -1 && padding_idx < table.size(0), check.op(), ": padding_idx is ", padding_idx,
                    "; expected -1 (none) or a row of the table, which has ", table.size(0));
  const auto source = table.expect_contiguous();
  const auto list = ids.expect_contiguous();
  const int64_t* id = list->const_data_ptr<int64_t>();
  const int64_t bad = first_outside(id, ids.numel(), table.size(0));
  TORCH_CHECK_INDEX(bad < 0, check.op(), ": id ", id[std::max<int64_t>(bad, 0)], " at position ", bad, " of ids ",
                    ids.sizes(), " is outside the table, which has ", table.size(0),
                    " rows; feed smaller ids or make the table larger");
  std::vector<int64_t> sizes = ids.sizes().vec();
  sizes.push_back(table.size(1));
  Tensor out = at::empty(sizes, table.options());
  const int64_t row_bytes = table.size(1) * static_cast<int64_t>(table.element_size());
  const RowGather gather{static_cast<const char*>(source->const_data_ptr()), row_bytes, padding_idx, row_bytes};
  char* to = static_cast<char*>(out.mutable_data_ptr());
  at::parallel_for(0, ids.numel(), grain_of_rows(table.size(1)),
                   [&](int64_t begin, int64_t end) { gather_rows(gather, id, to, begin, end); });
  return out;
}

// ---------------------------------------------------------------- dropout

namespace {

// A whole batch of shape [.., global batch, ..] seen from this replica; outer == 1 is flattened to a range.
DropoutLayout dropout_layout(const Check& check, const Tensor& x, int64_t batch_dim, int64_t rows_per_sample,
                             int64_t first_row) {
  if (batch_dim == -1) {
    return {1, x.numel(), 1, 0};
  }
  TORCH_CHECK_INDEX(batch_dim >= 0 && batch_dim < x.dim(), check.op(), ": batch_dim is ", batch_dim,
                    "; expected -1 (none) or a dimension of x, which has shape ", x.sizes());
  TORCH_CHECK_VALUE(rows_per_sample >= 1 && x.size(batch_dim) % rows_per_sample == 0, check.op(),
                    ": rows_per_sample is ", rows_per_sample, "; expected a positive divisor of x's size ",
                    x.size(batch_dim), " in dimension ", batch_dim);
  const auto sizes = x.sizes();
  const int64_t outer = c10::multiply_integers(sizes.slice(0, batch_dim));
  const int64_t inner = c10::multiply_integers(sizes.slice(batch_dim + 1));
  const int64_t first = first_row * rows_per_sample;
  if (outer == 1) {
    return {1, sizes[batch_dim] * inner, 1, first * inner};
  }
  return {outer, sizes[batch_dim], inner, first};
}

template <typename T>
void dropout_typed(const DropoutRule& rule, const DropoutLayout& layout, double scale, const Tensor& x, Tensor& y,
                   Tensor& mask) {
  const T* from = x.const_data_ptr<T>();
  T* to = y.mutable_data_ptr<T>();
  auto* keep = static_cast<uint8_t*>(mask.mutable_data_ptr());
  if (layout.outer != 1) {
    at::parallel_for(0, layout.batch, grain_of_rows(layout.outer * layout.inner),
                     [&](int64_t begin, int64_t end) { dropout_mask(rule, layout, keep, begin, end); });
    at::parallel_for(0, x.numel(), kGrain,
                     [&](int64_t begin, int64_t end) { apply_mask(to, from, keep, scale, begin, end); });
    return;
  }
  constexpr int64_t kPiece = 4096;  // the mask is applied while it is in the L1 cache
  at::parallel_for(0, x.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kPiece) {
      const int64_t stop = std::min(end, at + kPiece);
      dropout_mask(rule, layout, keep, at, stop);
      apply_mask(to, from, keep, scale, at, stop);
    }
  });
}

void check_probability(const Check& check, double p) {
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, check.op(), ": p is ", p, "; expected a probability between 0 and 1");
}

double keep_scale(double p) {
  return p < 1 ? 1 / (1 - p) : 0.0;
}

}  // namespace

std::tuple<Tensor, Tensor> dropout(const Tensor& x, const Tensor& rng, double p, bool training, int64_t op_seed,
                                   int64_t batch_dim, int64_t rows_per_sample) {
  const Check check("penstock.dropout");
  check.floating("x", x);
  check_probability(check, p);
  check.dtype("rng", rng, at::kLong);
  TORCH_CHECK_VALUE(rng.dim() == 1 && rng.size(0) == 3, check.op(), ": rng has shape ", rng.sizes(),
                    "; expected [3]: program seed, step, first global row");
  if (!training) {
    return {x.clone(at::MemoryFormat::Contiguous), at::empty({0}, x.options().dtype(at::kBool))};
  }
  const auto numbers = rng.expect_contiguous();
  const int64_t* state = numbers->const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(state[1] >= 0 && state[2] >= 0, check.op(), ": rng is (", state[0], ", ", state[1], ", ", state[2],
                    "); expected a step and a first global row of at least 0");
  const DropoutLayout layout = dropout_layout(check, x, batch_dim, rows_per_sample, state[2]);
  const DropoutRule rule = dropout_rule(philox_stream(state[0], op_seed, state[1]), p);
  const auto source = x.expect_contiguous();
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor mask = at::empty(x.sizes(), x.options().dtype(at::kBool));
  with_floating(x, [&](auto type) { dropout_typed<decltype(type)>(rule, layout, keep_scale(p), *source, y, mask); });
  return {y, mask};
}

Tensor dropout_backward(const Tensor& grad, const Tensor& mask, double p, bool training) {
  const Check check("penstock.dropout_backward");
  check.floating("grad", grad);
  check_probability(check, p);
  if (!training) {
    return grad.clone(at::MemoryFormat::Contiguous);
  }
  check.dtype("mask", mask, at::kBool);
  TORCH_CHECK_VALUE(mask.sizes() == grad.sizes(), check.op(), ": mask has shape ", mask.sizes(), "; expected ",
                    grad.sizes(), ", the shape of grad");
  const auto from = grad.expect_contiguous();
  const auto keep = mask.expect_contiguous();
  Tensor out = at::empty(grad.sizes(), grad.options());
  with_floating(grad, [&](auto type) {
    using T = decltype(type);
    const T* values = from->const_data_ptr<T>();
    const auto* bits = static_cast<const uint8_t*>(keep->const_data_ptr());
    T* to = out.mutable_data_ptr<T>();
    at::parallel_for(0, grad.numel(), kGrain,
                     [&](int64_t begin, int64_t end) { apply_mask(to, values, bits, keep_scale(p), begin, end); });
  });
  return out;
}

// ---------------------------------------------------------------- values

namespace {

template <typename Distribution>
Tensor filled(const char* op, at::IntArrayRef size, const Distribution& values, int64_t seed, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble, op, ": dtype is ", dtype, "; expected Float or Double");
  Tensor out = at::empty(size, at::TensorOptions().dtype(dtype));
  with_floating(out, [&](auto type) {
    auto* to = out.mutable_data_ptr<decltype(type)>();
    at::parallel_for(0, out.numel(), kGrain / 8,
                     [&](int64_t begin, int64_t end) { fill(to, values, seed, begin, end); });
  });
  return out;
}

void check_std(const char* op, double std) {
  TORCH_CHECK_VALUE(std >= 0, op, ": std is ", std, "; expected at least 0");
}

}  // namespace

Tensor normal(at::IntArrayRef size, double mean, double std, int64_t seed, at::ScalarType dtype) {
  check_std("penstock.normal", std);
  return filled("penstock.normal", size, Normal{mean, std}, seed, dtype);
}

Tensor truncated_normal(at::IntArrayRef size, double mean, double std, int64_t seed, at::ScalarType dtype) {
  check_std("penstock.truncated_normal", std);
  return filled("penstock.truncated_normal", size, TruncatedNormal{mean, std}, seed, dtype);
}

Tensor uniform(at::IntArrayRef size, double low, double high, int64_t seed, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(low <= high, "penstock.uniform: low is ", low, " and high is ", high, "; expected low <= high");
  return filled("penstock.uniform", size, Uniform{low, high}, seed, dtype);
}

Tensor scale_loss_grad(const Tensor& like, double value) {
  return at::empty(like.sizes(), like.options()).fill_(value);
}

// ---------------------------------------------------------------- metrics

namespace {

// Labels int64 [n] or [n, 1].
int64_t check_labels(const Check& check, const Tensor& label, int64_t n) {
  check.dtype("label", label, at::kLong);
  TORCH_CHECK_VALUE((label.dim() == 1 || (label.dim() == 2 && label.size(1) == 1)) && label.size(0) == n, check.op(),
                    ": label has shape ", label.sizes(), "; expected [", n, "] or [", n, ", 1]");
  return n;
}

}  // namespace

Tensor auc(const Tensor& predict, const Tensor& label, const Tensor& stat_pos, const Tensor& stat_neg) {
  const Check check("penstock.auc");
  check.floating("predict", predict);
  TORCH_CHECK_VALUE(predict.dim() == 1 || (predict.dim() == 2 && (predict.size(1) == 1 || predict.size(1) == 2)),
                    check.op(), ": predict has shape ", predict.sizes(), "; expected [n], [n, 1] or [n, 2]");
  const int64_t n = check_labels(check, label, predict.size(0));
  check.dtype("stat_pos", stat_pos, at::kLong);
  check.writable("stat_pos", stat_pos);
  check.same("stat_neg", stat_neg, "stat_pos", stat_pos);
  check.writable("stat_neg", stat_neg);
  TORCH_CHECK_VALUE(stat_pos.numel() >= 2, check.op(), ": stat_pos has ", stat_pos.numel(),
                    " buckets; expected num_thresholds + 1, at least 2");
  const int64_t columns = predict.dim() == 2 ? predict.size(1) : 1;
  const auto values = predict.expect_contiguous();
  const auto labels = label.expect_contiguous();
  int64_t* positive = stat_pos.mutable_data_ptr<int64_t>();
  int64_t* negative = stat_neg.mutable_data_ptr<int64_t>();
  with_floating(predict, [&](auto type) {
    using T = decltype(type);
    const Predictions<T> rows{values->const_data_ptr<T>(), columns, columns - 1, labels->const_data_ptr<int64_t>(), n};
    const int64_t bad = count_buckets(rows, positive, negative, stat_pos.numel());
    TORCH_CHECK_VALUE(bad < 0, check.op(), ": the prediction of row ", bad, " is ",
                      rows.values[std::max<int64_t>(bad, 0) * rows.stride + rows.column],
                      "; expected a probability between 0 and 1 (the output of a softmax or sigmoid)");
  });
  return at::scalar_tensor(area_under_curve(positive, negative, stat_pos.numel()), at::kDouble);
}

std::tuple<Tensor, Tensor, Tensor> accuracy(const Tensor& topk_indices, const Tensor& label) {
  const Check check("penstock.accuracy");
  check.dtype("topk_indices", topk_indices, at::kLong);
  check.dim("topk_indices", topk_indices, 2, "[n, k]");
  const int64_t n = check_labels(check, label, topk_indices.size(0));
  const auto topk = topk_indices.expect_contiguous();
  const auto labels = label.expect_contiguous();
  const int64_t correct =
      count_correct(topk->const_data_ptr<int64_t>(), labels->const_data_ptr<int64_t>(), n, topk_indices.size(1));
  const double share = n > 0 ? static_cast<double>(correct) / static_cast<double>(n) : 0.0;
  return {at::scalar_tensor(share, at::kFloat), at::scalar_tensor(correct, at::kInt), at::scalar_tensor(n, at::kInt)};
}

}  // namespace penstock::ops
