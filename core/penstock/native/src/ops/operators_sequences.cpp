// Operators over sequences whose rows lie one after another; `lengths` int64 [n] or [n, 1] adds up to the rows.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/checks.h"
#include "ops/lookup.h"
#include "ops/operators.h"
#include "ops/sequences.h"

namespace penstock::ops {
namespace {

using at::Tensor;

constexpr std::array<std::pair<std::string_view, Pool>, 6> kPools{{{"sum", Pool::kSum},
                                                                   {"average", Pool::kAverage},
                                                                   {"sqrt", Pool::kSqrt},
                                                                   {"max", Pool::kMax},
                                                                   {"first", Pool::kFirst},
                                                                   {"last", Pool::kLast}}};

Pool pool_of(const Check& check, std::string_view kind) {
  for (const auto& [name, pool] : kPools) {
    if (name == kind) return pool;
  }
  TORCH_CHECK_VALUE(false, check.op(), ": kind is '", kind, "'; expected sum, average, sqrt, max, first or last");
}

// Where each sequence begins, and the end of the last.  Checked: the lengths add up to `rows`.
std::vector<int64_t> starts_of(const Check& check, const Tensor& lengths, int64_t rows) {
  check.dtype("lengths", lengths, at::kLong);
  const auto list = lengths.expect_contiguous();
  const int64_t* length = list->const_data_ptr<int64_t>();
  std::vector<int64_t> starts(static_cast<size_t>(lengths.numel()) + 1, 0);
  for (int64_t s = 0; s < lengths.numel(); ++s) {
    TORCH_CHECK_VALUE(length[s] >= 0, check.op(), ": the length of sequence ", s, " is ", length[s],
                      "; expected at least 0");
    TORCH_CHECK_VALUE(length[s] <= rows - starts[static_cast<size_t>(s)], check.op(), ": the lengths of ",
                      lengths.numel(), " sequences add up to more than the ", rows, " rows");
    starts[static_cast<size_t>(s) + 1] = starts[static_cast<size_t>(s)] + length[s];
  }
  TORCH_CHECK_VALUE(starts.back() == rows, check.op(), ": the lengths of ", lengths.numel(), " sequences add up to ",
                    starts.back(), ", but there are ", rows, " rows");
  return starts;
}

int64_t width_of(at::IntArrayRef sizes) {
  return c10::multiply_integers(sizes.slice(1));
}

std::vector<int64_t> sizes_with(int64_t first, at::IntArrayRef like) {
  std::vector<int64_t> sizes = like.vec();
  sizes[0] = first;
  return sizes;
}

std::tuple<Tensor, Tensor> sequence_pool(const Tensor& x, const Tensor& lengths, c10::string_view kind, double pad) {
  const Check check("penstock.sequence_pool");
  check.floating("x", x);
  TORCH_CHECK_VALUE(x.dim() >= 1, check.op(), ": x has no dimensions; expected [rows, ...]");
  const Pool pool = pool_of(check, {kind.data(), kind.size()});
  const std::vector<int64_t> starts = starts_of(check, lengths, x.size(0));
  const auto source = x.expect_contiguous();
  const std::vector<int64_t> sizes = sizes_with(lengths.numel(), x.sizes());
  Tensor out = at::empty(sizes, x.options());
  Tensor index = at::empty(pool == Pool::kMax ? sizes : std::vector<int64_t>{0}, at::TensorOptions().dtype(at::kLong));
  int64_t* rows = index.mutable_data_ptr<int64_t>();
  with_floating(x, [&](auto type) {
    using T = decltype(type);
    const SequenceRows<T> given{source->const_data_ptr<T>(), starts.data(), width_of(x.sizes())};
    T* to = out.mutable_data_ptr<T>();
    at::parallel_for(0, lengths.numel(), grain_of_rows(given.width * 4), [&](int64_t begin, int64_t end) {
      pool_sequences(given, pool, static_cast<T>(pad), to, rows, begin, end);
    });
  });
  return {out, index};
}

Tensor sequence_pool_backward(const Tensor& grad, const Tensor& index, const Tensor& lengths, int64_t rows,
                              c10::string_view kind) {
  const Check check("penstock.sequence_pool_backward");
  check.floating("grad", grad);
  const Pool pool = pool_of(check, {kind.data(), kind.size()});
  const std::vector<int64_t> starts = starts_of(check, lengths, rows);
  TORCH_CHECK_VALUE(grad.dim() >= 1 && grad.size(0) == lengths.numel(), check.op(), ": grad has shape ", grad.sizes(),
                    "; expected a row for each of ", lengths.numel(), " sequences");
  check.dtype("index", index, at::kLong);
  TORCH_CHECK_VALUE(pool != Pool::kMax || index.sizes() == grad.sizes(), check.op(), ": index has shape ",
                    index.sizes(), "; expected ", grad.sizes(), ", the shape of grad");
  const auto source = grad.expect_contiguous();
  const auto from = index.expect_contiguous();
  Tensor out = at::empty(sizes_with(rows, grad.sizes()), grad.options());
  with_floating(grad, [&](auto type) {
    using T = decltype(type);
    const SequenceRows<T> given{source->const_data_ptr<T>(), starts.data(), width_of(grad.sizes())};
    T* to = out.mutable_data_ptr<T>();
    at::parallel_for(0, lengths.numel(), grain_of_rows(given.width * 4), [&](int64_t begin, int64_t end) {
      pool_gradients(given, pool, from->const_data_ptr<int64_t>(), to, begin, end);
    });
  });
  return out;
}

// Embedding and sum in one, as a pass puts it in the place of `lookup_table` and `sequence_pool`, with the same
// results.
std::tuple<Tensor, Tensor> lookup_pool(const Tensor& table, const Tensor& ids, const Tensor& lengths,
                                       int64_t padding_idx, double pad) {
  const Check check("penstock.lookup_pool");
  check.floating("table", table);
  check.dim("table", table, 2, "[rows, width]");
  check.dtype("ids", ids, at::kLong);
  TORCH_CHECK_VALUE(padding_idx >= -1 && padding_idx < table.size(0), check.op(), ": lookup 0: padding_idx is ",
                    padding_idx, "; expected -1 (none) or a row of the table, which has ", table.size(0));
  const auto list = ids.expect_contiguous();
  const int64_t* id = list->const_data_ptr<int64_t>();
  const int64_t bad = first_outside(id, ids.numel(), table.size(0));
  TORCH_CHECK_INDEX(bad < 0, check.op(), ": lookup 0: id ", id[std::max<int64_t>(bad, 0)], " at position ", bad,
                    " of ids ", ids.sizes(), " is outside the table, which has ", table.size(0),
                    " rows; feed smaller ids or make the table larger");
  const std::vector<int64_t> starts = starts_of(check, lengths, ids.numel());
  const auto source = table.expect_contiguous();
  Tensor out = at::empty({lengths.numel(), table.size(1)}, table.options());
  with_floating(table, [&](auto type) {
    using T = decltype(type);
    const RowSums<T> of{source->const_data_ptr<T>(), id, starts.data(), table.size(1), padding_idx,
                        static_cast<T>(pad)};
    T* to = out.mutable_data_ptr<T>();
    const int64_t rows = std::max<int64_t>(1, ids.numel() / std::max<int64_t>(1, lengths.numel()));
    at::parallel_for(0, lengths.numel(), grain_of_rows(table.size(1) * rows),
                     [&](int64_t begin, int64_t end) { sum_rows(of, to, begin, end); });
  });
  return {out, at::empty({0}, at::TensorOptions().dtype(at::kLong))};
}

// What row `row` of sequence `s` has in `sequence_rows`.
int64_t entry_of(std::string_view kind, const std::vector<int64_t>& starts, size_t s, int64_t row) {
  if (kind == "sequence") return static_cast<int64_t>(s);
  if (kind == "position") return row - starts[s];
  return starts[s] + starts[s + 1] - 1 - row;
}

Tensor sequence_rows(const Tensor& lengths, int64_t rows, c10::string_view kind) {
  const Check check("penstock.sequence_rows");
  const std::string_view name{kind.data(), kind.size()};
  TORCH_CHECK_VALUE(name == "sequence" || name == "position" || name == "mirror", check.op(), ": kind is '", name,
                    "'; expected sequence, position or mirror");
  const std::vector<int64_t> starts = starts_of(check, lengths, rows);
  Tensor out = at::empty({rows}, at::TensorOptions().dtype(at::kLong));
  int64_t* to = out.mutable_data_ptr<int64_t>();
  for (size_t s = 0; s + 1 < starts.size(); ++s) {
    for (int64_t row = starts[s]; row < starts[s + 1]; ++row) to[row] = entry_of(name, starts, s, row);
  }
  return out;
}

}  // namespace
}  // namespace penstock::ops

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("sequence_pool(Tensor x, Tensor lengths, str kind, float pad_value) -> (Tensor out, Tensor index)");
  m.def("sequence_pool_backward(Tensor grad, Tensor index, Tensor lengths, SymInt rows, str kind) -> Tensor");
  m.def(
      "lookup_pool(Tensor table, Tensor ids, Tensor lengths, int padding_idx, float pad_value) "
      "-> (Tensor out, Tensor index)");
  m.def("sequence_rows(Tensor lengths, SymInt rows, str kind) -> Tensor");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("sequence_pool", penstock::ops::sequence_pool);
  m.impl("sequence_pool_backward", penstock::ops::sequence_pool_backward);
  m.impl("lookup_pool", penstock::ops::lookup_pool);
  m.impl("sequence_rows", penstock::ops::sequence_rows);
}
