// Attention on devices, with the operands of torch's operator for CPU, which is what a program has recorded.
//
// Invariant: on CPU tensors it gives what that operator gives, up to the order of sums
// (tests/native/ops/test_composed_operators.py). What the backward call gets as `logsumexp` is what the forward call
// of the same operands returned; its shape is the kernel's own.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "ops/checks.h"
#include "ops/composed.h"

namespace penstock::ops::composed {

using at::Tensor;

namespace {

constexpr int64_t kAligned = 8;  // elements of a head that the kernel wants as a multiple, of any type

// Whether torch's memory-efficient kernel takes these: everything else goes through whole matrices of scores.
bool fits_efficient(const Tensor& query, const Tensor& value, const std::optional<Tensor>& mask) {
  const auto type = query.scalar_type();
  return query.is_cuda() && !mask && (type == at::kFloat || type == at::kHalf || type == at::kBFloat16) &&
         query.size(-1) % kAligned == 0 && value.size(-1) % kAligned == 0;
}

void check_operands(const Check& check, const Tensor& query, double dropout_p) {
  check.floating("query", query);
  TORCH_CHECK_VALUE(query.dim() == 4, check.op(), ": query has shape ", query.sizes(),
                    "; expected [batch, heads, positions, width]");
  TORCH_CHECK_VALUE(dropout_p == 0, check.op(), ": dropout_p is ", dropout_p, "; a recorded program drops by itself");
}

double scale_of(const Tensor& query, std::optional<double> scale) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))));
}

// The result with its dimensions in memory in another order, from outermost to innermost: a recorded view counts on the
// strides that torch's kernel for CPU gives.
Tensor laid_out(const Tensor& result, at::IntArrayRef order) {
  std::vector<int64_t> sizes, place(order.size());
  for (size_t k = 0; k < order.size(); ++k) {
    sizes.push_back(result.size(order[k]));
    place[static_cast<size_t>(order[k])] = static_cast<int64_t>(k);
  }
  const Tensor out = at::empty(sizes, result.options()).permute(place);
  return out.strides() == result.strides() ? result : out.copy_(result);
}

constexpr std::array<int64_t, 4> kPositionsFirst{0, 2, 1, 3};  // of gradients: [batch, positions, heads, width]

// Of the output: as the query lies.
std::vector<int64_t> order_of(const Tensor& query) {
  std::vector<int64_t> order{0, 1, 2, 3};
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return query.stride(a) > query.stride(b); });
  return order;
}

// [batch, heads, positions, positions of the keys]
Tensor scores_of(const Tensor& query, const Tensor& key, bool is_causal, const std::optional<Tensor>& mask,
                 double scale) {
  Tensor scores = at::matmul(query * scale, key.transpose(-2, -1));
  if (is_causal) {
    const Tensor later = at::ones({query.size(-2), key.size(-2)}, query.options().dtype(at::kBool)).triu(1);
    scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
  }
  if (!mask) return scores;
  return mask->scalar_type() == at::kBool
             ? scores.masked_fill(mask->logical_not(), -std::numeric_limits<double>::infinity())
             : scores + *mask;
}

}  // namespace

std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value, double dropout_p,
                                     bool is_causal, const std::optional<Tensor>& attn_mask,
                                     std::optional<double> scale) {
  const Check check("penstock.attention");
  check_operands(check, query, dropout_p);
  if (fits_efficient(query, value, attn_mask)) {
    auto found =
        at::_scaled_dot_product_efficient_attention(query, key, value, std::nullopt,
                                                    /*compute_log_sumexp=*/true, /*dropout_p=*/0, is_causal, scale);
    return {laid_out(std::get<0>(found), order_of(query)), std::get<1>(found)};
  }
  const Tensor scores = scores_of(query, key, is_causal, attn_mask, scale_of(query, scale));
  const Tensor sums = at::logsumexp(scores, -1);
  return {laid_out(at::matmul((scores - sums.unsqueeze(-1)).exp(), value), order_of(query)), sums};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                                      const Tensor& value, const Tensor& out, const Tensor& logsumexp,
                                                      double dropout_p, bool is_causal,
                                                      const std::optional<Tensor>& attn_mask,
                                                      std::optional<double> scale) {
  const Check check("penstock.attention_backward");
  check_operands(check, query, dropout_p);
  if (fits_efficient(query, value, attn_mask)) {
    const Tensor unused = at::empty({}, at::TensorOptions().dtype(at::kLong));  // the state of dropout
    auto found = at::_scaled_dot_product_efficient_attention_backward(
        laid_out(grad_out, kPositionsFirst), query, key, value, /*attn_bias=*/Tensor(), laid_out(out, kPositionsFirst),
        logsumexp, unused, unused, /*dropout_p=*/0, {true, true, true, false}, is_causal, scale);
    return {laid_out(std::get<0>(found), kPositionsFirst), laid_out(std::get<1>(found), kPositionsFirst),
            laid_out(std::get<2>(found), kPositionsFirst)};
  }
  const double by = scale_of(query, scale);
  const Tensor weights = (scores_of(query, key, is_causal, attn_mask, by) - logsumexp.unsqueeze(-1)).exp();
  const Tensor towards = at::matmul(grad_out, value.transpose(-2, -1));
  const Tensor scores = weights * (towards - (grad_out * out).sum(-1, /*keepdim=*/true)) * by;
  return {laid_out(at::matmul(scores, key), kPositionsFirst),
          laid_out(at::matmul(scores.transpose(-2, -1), query), kPositionsFirst),
          laid_out(at::matmul(weights.transpose(-2, -1), grad_out), kPositionsFirst)};
}

}  // namespace penstock::ops::composed
