#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "ops/checks.h"
#include "ops/composed.h"
#include "ops/philox.h"

namespace penstock::ops::composed {

using at::Tensor;

Tensor lookup_table(const Tensor& table, const Tensor& ids, int64_t padding_idx) {
  const Check check("penstock.lookup_table");
  check.dim("table", table, 2, "[rows, width]");
  check.dtype("ids", ids, at::kLong);
  std::vector<int64_t> sizes = ids.sizes().vec();
  sizes.push_back(table.size(1));
  Tensor out = table.index_select(0, ids.reshape({-1})).reshape(sizes);
  return padding_idx < 0 ? out : out.masked_fill_((ids == padding_idx).unsqueeze(-1), 0);
}

// ---------------------------------------------------------------- dropout

namespace {

constexpr int64_t kWord = 0xFFFFFFFF;  // words are kept in int64, which torch can multiply on every device
constexpr int64_t kGroup = 4 * kPhiloxLanes;

Tensor upper(const Tensor& product) {
  return at::bitwise_and(at::bitwise_right_shift(product, 32), kWord);
}

Tensor lower(const Tensor& product) {
  return at::bitwise_and(product, kWord);
}

// Philox4x32-10 for counters [first, first + count): the four words of each, as philox_block makes them. A product of
// two words wraps around in int64 just as in uint64.
std::array<Tensor, 4> philox(const PhiloxStream& stream, int64_t first, int64_t count, at::Device device) {
  const auto options = at::TensorOptions().dtype(at::kLong).device(device);
  const Tensor counters = at::arange(first, first + count, options);
  std::array<Tensor, 4> word{lower(counters), upper(counters),
                             at::full({count}, static_cast<int64_t>(stream.high & kWord), options),
                             at::full({count}, static_cast<int64_t>(stream.high >> 32), options)};
  uint32_t key0 = stream.key0;
  uint32_t key1 = stream.key1;
  for (int round = 0; round < 10; ++round) {
    const Tensor product0 = word[0] * int64_t{0xD2511F53};
    const Tensor product1 = word[2] * int64_t{0xCD9E8D57};
    word = {at::bitwise_xor(at::bitwise_xor(upper(product1), word[1]), static_cast<int64_t>(key0)), lower(product1),
            at::bitwise_xor(at::bitwise_xor(upper(product0), word[3]), static_cast<int64_t>(key1)), lower(product0)};
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
  return word;
}

// The words of positions [first, first + count), see ops/dropout.h.
Tensor words_of(const PhiloxStream& stream, int64_t first, int64_t count, at::Device device) {
  const int64_t group = first / kGroup;
  const int64_t groups = (first + count + kGroup - 1) / kGroup - group;
  const auto word = philox(stream, group * kPhiloxLanes, groups * kPhiloxLanes, device);
  std::vector<Tensor> parts;
  parts.reserve(word.size());
  for (const Tensor& w : word) {
    parts.push_back(w.view({groups, kPhiloxLanes}));
  }
  return at::stack(parts, 1).view({-1}).narrow(0, first - group * kGroup, count);
}

Tensor apply(const Tensor& values, const Tensor& mask, double p) {
  const double scale = p < 1 ? 1 / (1 - p) : 0.0;
  return at::where(mask, values * scale, at::zeros({}, values.options()));
}

void check_probability(const Check& check, double p) {
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, check.op(), ": p is ", p, "; expected a probability between 0 and 1");
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
  TORCH_CHECK_INDEX(batch_dim >= -1 && batch_dim < x.dim(), check.op(), ": batch_dim is ", batch_dim,
                    "; expected -1 (none) or a dimension of x, which has shape ", x.sizes());
  if (!training) {
    return {x.clone(at::MemoryFormat::Contiguous), at::empty({0}, x.options().dtype(at::kBool))};
  }
  const Tensor numbers = rng.cpu().contiguous();  // the engine keeps them on the host: nothing waits
  const int64_t* state = numbers.const_data_ptr<int64_t>();
  const auto sizes = x.sizes();
  const bool rows = batch_dim >= 0;
  const int64_t outer = rows ? c10::multiply_integers(sizes.slice(0, batch_dim)) : 1;
  const int64_t batch = rows ? sizes[batch_dim] : x.numel();
  const int64_t inner = rows ? c10::multiply_integers(sizes.slice(batch_dim + 1)) : 1;
  const int64_t first = rows ? state[2] * rows_per_sample * outer * inner : 0;
  const Tensor words = words_of(philox_stream(state[0], op_seed, state[1]), first, x.numel(), x.device());
  const Tensor keep = words >= static_cast<int64_t>(std::llround(p * 4294967296.0));
  Tensor mask = keep.view({batch, outer, inner}).transpose(0, 1).reshape(sizes).contiguous();
  return {apply(x, mask, p).contiguous(), mask};
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
  return apply(grad, mask, p).contiguous();
}

// ---------------------------------------------------------------- metrics

Tensor auc(const Tensor& predict, const Tensor& label, const Tensor& stat_pos, const Tensor& stat_neg) {
  const Check check("penstock.auc");
  check.floating("predict", predict);
  check.dtype("label", label, at::kLong);
  check.dtype("stat_pos", stat_pos, at::kLong);
  check.same("stat_neg", stat_neg, "stat_pos", stat_pos);
  const Tensor p = predict.dim() == 2 ? predict.select(1, predict.size(1) - 1) : predict;
  at::_assert_async(((p >= -1e-5) & (p <= 1 + 1e-5)).all(),
                    "penstock.auc: a prediction is no probability between 0 and 1 (the output of a softmax or "
                    "sigmoid)");
  const Tensor bucket = (p.clamp(0, 1) * (stat_pos.numel() - 1)).to(at::kLong);
  const Tensor positive = (label.reshape({-1}) != 0).to(at::kLong);
  const c10::List<std::optional<Tensor>> where({bucket});
  Tensor pos = stat_pos;
  Tensor neg = stat_neg;
  pos.index_put_(where, positive, /*accumulate=*/true);
  neg.index_put_(where, 1 - positive, /*accumulate=*/true);
  const Tensor rise = pos.to(at::kDouble);
  const Tensor width = neg.to(at::kDouble);
  const Tensor above = rise.sum() - rise.cumsum(0);  // whole numbers below 2^53: exact in any order
  const Tensor area = (width * (above + rise / 2)).sum() / rise.sum() / width.sum();
  return at::where((rise.sum() > 0) & (width.sum() > 0), area, at::zeros({}, area.options()));
}

std::tuple<Tensor, Tensor, Tensor> accuracy(const Tensor& topk_indices, const Tensor& label) {
  const Check check("penstock.accuracy");
  check.dtype("topk_indices", topk_indices, at::kLong);
  check.dim("topk_indices", topk_indices, 2, "[n, k]");
  check.dtype("label", label, at::kLong);
  const int64_t n = topk_indices.size(0);
  const Tensor correct = (topk_indices == label.reshape({n, 1})).any(1).sum();
  const Tensor share = correct.to(at::kDouble) / static_cast<double>(std::max<int64_t>(n, 1));
  return {share.to(at::kFloat), correct.to(at::kInt), at::full({}, n, correct.options().dtype(at::kInt))};
}

}  // namespace penstock::ops::composed
