// Pools over sequences whose rows lie one after another, made of torch's operators; nothing waits for the device, so
// lengths that do not add up to the rows are not refused here.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/segment_reduce.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "ops/checks.h"
#include "ops/composed.h"

namespace penstock::ops::composed {

using at::Tensor;

namespace {

// `sequence`: of each row; `first`, `last`: rows of each sequence, the last below the first where it has none.
struct Sequences {
  Tensor lengths, sequence, first, last, row;

  Sequences(const Check& check, const Tensor& given, int64_t rows) {
    check.dtype("lengths", given, at::kLong);
    lengths = given.reshape({-1});
    sequence = at::repeat_interleave(lengths, std::optional<int64_t>(rows));
    last = lengths.cumsum(0) - 1;
    first = last - lengths + 1;
    row = at::arange(rows, lengths.options());
  }
};

// [n] as [n, 1, ...] with the dimensions of `like`.
Tensor beside(const Tensor& column, const Tensor& like) {
  std::vector<int64_t> sizes(static_cast<size_t>(like.dim()), 1);
  sizes[0] = column.size(0);
  return column.reshape(sizes);
}

bool is_sum(std::string_view kind) {
  return kind == "sum" || kind == "average" || kind == "sqrt";
}

// What the sum of each sequence is divided by.
Tensor divisor(const Sequences& of, std::string_view kind, const Tensor& like) {
  const Tensor counts = beside(of.lengths, like).to(like.scalar_type());
  return kind == "sqrt" ? counts.sqrt() : counts;
}

void check_kind(const Check& check, std::string_view kind) {
  TORCH_CHECK_VALUE(is_sum(kind) || kind == "max" || kind == "first" || kind == "last", check.op(), ": kind is '", kind,
                    "'; expected sum, average, sqrt, max, first or last");
}

Tensor reduced(const Tensor& x, const Sequences& of, c10::string_view how, double initial) {
  return at::segment_reduce(x.contiguous(), how, of.lengths, /*indices=*/{}, /*offsets=*/{}, /*axis=*/0,
                            /*unsafe=*/true, initial);
}

}  // namespace

std::tuple<Tensor, Tensor> sequence_pool(const Tensor& x, const Tensor& lengths, c10::string_view kind, double pad) {
  const Check check("penstock.sequence_pool");
  check.floating("x", x);
  TORCH_CHECK_VALUE(x.dim() >= 1, check.op(), ": x has no dimensions; expected [rows, ...]");
  const std::string_view name{kind.data(), kind.size()};
  check_kind(check, name);
  const int64_t rows = x.size(0);
  const Sequences of(check, lengths, rows);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[0] = of.lengths.size(0);
  Tensor index = at::empty({0}, of.lengths.options());
  Tensor out;
  if (rows == 0) {
    index = name == "max" ? at::full(sizes, -1, of.lengths.options()) : index;
    return {at::full(sizes, pad, x.options()), index};
  }
  if (is_sum(name)) {
    out = reduced(x, of, "sum", 0);
    if (name != "sum") out = out / divisor(of, name, out);
  } else if (name == "max") {
    out = reduced(x, of, "max", -std::numeric_limits<double>::infinity());
    const Tensor of_row = out.index_select(0, of.sequence);
    const Tensor attains = (x == of_row) | (x.isnan() & of_row.isnan());
    const Tensor number = beside(of.row, x).expand(x.sizes());
    const Tensor candidate = at::where(attains, number, at::full({}, rows, of.lengths.options()));
    index = at::full(sizes, rows, of.lengths.options());
    index.scatter_reduce_(0, beside(of.sequence, x).expand(x.sizes()), candidate, "amin");
    index = at::where(beside(of.lengths, out) == 0, at::full({}, -1, of.lengths.options()), index);
  } else {
    const Tensor at_row = name == "first" ? of.first : of.last;
    out = x.index_select(0, at_row.clamp(0, rows - 1));
  }
  out = at::where(beside(of.lengths, out) == 0, at::full({}, pad, out.options()), out);
  return {out.contiguous(), index};
}

Tensor sequence_pool_backward(const Tensor& grad, const Tensor& index, const Tensor& lengths, int64_t rows,
                              c10::string_view kind) {
  const Check check("penstock.sequence_pool_backward");
  check.floating("grad", grad);
  const std::string_view name{kind.data(), kind.size()};
  check_kind(check, name);
  const Sequences of(check, lengths, rows);
  Tensor given = grad;
  if (is_sum(name) && name != "sum") given = grad / divisor(of, name, grad);
  const Tensor of_row = given.index_select(0, of.sequence);
  if (is_sum(name)) return of_row.contiguous();
  const Tensor none = at::zeros({}, grad.options());
  if (name == "max") {
    return at::where(beside(of.row, of_row) == index.index_select(0, of.sequence), of_row, none).contiguous();
  }
  const Tensor chosen = (name == "first" ? of.first : of.last).index_select(0, of.sequence) == of.row;
  return at::where(beside(chosen, of_row), of_row, none).contiguous();
}

Tensor sequence_rows(const Tensor& lengths, int64_t rows, c10::string_view kind) {
  const Check check("penstock.sequence_rows");
  const std::string_view name{kind.data(), kind.size()};
  TORCH_CHECK_VALUE(name == "sequence" || name == "position" || name == "mirror", check.op(), ": kind is '", name,
                    "'; expected sequence, position or mirror");
  const Sequences of(check, lengths, rows);
  if (name == "sequence") return of.sequence;
  if (name == "position") return of.row - of.first.index_select(0, of.sequence);
  return (of.first + of.last).index_select(0, of.sequence) - of.row;
}

}  // namespace penstock::ops::composed
