// Many tables in one call: their lookups side by side in one matrix, and their updates from columns of one.
//
// The same bits as the operators that they replace: a lookup or an update each, with copies in between.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/checks.h"
#include "ops/lookup.h"
#include "ops/operators.h"
#include "ops/operators_fused.h"
#include "ops/sparse.h"

namespace penstock::ops {

using at::IntArrayRef;
using at::Tensor;
using at::TensorList;

namespace {

// ---------------------------------------------------------------- lookups side by side

// Columns [first, first + bytes) of the result: rows of a table, or of a matrix that is copied as it is.
struct Block {
  RowGather gather;
  const int64_t* ids;  // nullptr: row i is row i
  int64_t first;
};

// Contiguous forms, kept alive by the caller.
std::vector<Tensor> contiguous(TensorList tensors) {
  std::vector<Tensor> made;
  made.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    made.push_back(tensor.contiguous());
  }
  return made;
}

// The message begins with which lookup it is, so that the executor can name the one that was recorded.
void check_lookup(const Check& check, size_t k, const Tensor& table, const Tensor& ids, int64_t padding_idx) {
  TORCH_CHECK_VALUE(table.dim() == 2, check.op(), ": lookup ", k, ": table has shape ", table.sizes(),
                    "; expected [rows, width]");
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong, check.op(), ": lookup ", k, ": ids has dtype ", ids.scalar_type(),
                   "; expected Long");
  TORCH_CHECK_VALUE(padding_idx >= -1 && padding_idx < table.size(0), check.op(), ": lookup ", k, ": padding_idx is ",
                    padding_idx, "; expected -1 (none) or a row of the table, which has ", table.size(0));
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const int64_t bad = first_outside(id, ids.numel(), table.size(0));
  TORCH_CHECK_INDEX(bad < 0, check.op(), ": lookup ", k, ": id ", id[std::max<int64_t>(bad, 0)], " at position ", bad,
                    " of ids ", ids.sizes(), " is outside the table, which has ", table.size(0),
                    " rows; feed smaller ids or make the table larger");
}

void copy_block(const Block& block, char* out, int64_t rows) {
  if (block.ids != nullptr) {
    gather_rows(block.gather, block.ids, out + block.first, 0, rows);
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(out + block.first + i * block.gather.out_stride, block.gather.table + i * block.gather.row_bytes,
                static_cast<size_t>(block.gather.row_bytes));
  }
}

}  // namespace

namespace {

// What is side by side: lookups of `tables`, and matrices.
struct Sources {
  std::vector<Tensor> tables, ids, parts;
  IntArrayRef padding_idx;
};

void check_sources(const Check& check, const Sources& from) {
  const int64_t rows = from.ids[0].numel();
  for (size_t k = 0; k < from.tables.size(); ++k) {
    check_lookup(check, k, from.tables[k], from.ids[k], from.padding_idx[k]);
    check.dtype("a table", from.tables[k], from.tables[0].scalar_type());
    TORCH_CHECK_VALUE(from.ids[k].numel() == rows, check.op(), ": lookup ", k, ": ids has shape ", from.ids[k].sizes(),
                      "; expected ", rows, " ids, as the first has");
  }
  for (const Tensor& part : from.parts) {
    check.dtype("a part", part, from.tables[0].scalar_type());
    TORCH_CHECK_VALUE(part.dim() == 2 && part.size(0) == rows, check.op(), ": a part has shape ", part.sizes(),
                      "; expected [", rows, ", width], a row for each id");
  }
}

// The blocks in their order; `columns` becomes the number of elements of a row.
std::vector<Block> blocks_of(const Check& check, const Sources& from, IntArrayRef order, int64_t& columns) {
  const auto element = static_cast<int64_t>(from.tables[0].element_size());
  std::vector<Block> blocks;
  blocks.reserve(order.size());
  columns = 0;
  for (const int64_t which : order) {
    const bool is_lookup = which >= 0;
    const auto at = static_cast<size_t>(is_lookup ? which : -1 - which);
    const std::vector<Tensor>& among = is_lookup ? from.tables : from.parts;
    TORCH_CHECK_INDEX(at < among.size(), check.op(), ": order holds ", which,
                      "; expected a lookup k, or -1 - k for part k");
    const Tensor& source = among[at];
    const RowGather gather{static_cast<const char*>(source.const_data_ptr()), source.size(1) * element,
                           is_lookup ? from.padding_idx[at] : -1, 0};
    blocks.push_back({gather, is_lookup ? from.ids[at].const_data_ptr<int64_t>() : nullptr, columns * element});
    columns += source.size(1);
  }
  for (Block& block : blocks) {
    block.gather.out_stride = columns * element;
  }
  return blocks;
}

}  // namespace

Tensor lookup_concat(TensorList tables, TensorList ids, IntArrayRef padding_idx, TensorList parts, IntArrayRef order) {
  const Check check("penstock.lookup_concat");
  TORCH_CHECK_VALUE(!tables.empty() && tables.size() == ids.size() && tables.size() == padding_idx.size(), check.op(),
                    ": got ", tables.size(), " tables, ", ids.size(), " ids and ", padding_idx.size(),
                    " padding_idx; expected one of each for every lookup");
  const Sources from{contiguous(tables), contiguous(ids), contiguous(parts), padding_idx};
  check_sources(check, from);
  int64_t columns = 0;
  const std::vector<Block> blocks = blocks_of(check, from, order, columns);
  const int64_t rows = from.ids[0].numel();
  Tensor out = at::empty({rows, columns}, tables[0].options());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const auto count = static_cast<int64_t>(blocks.size());
  const int64_t grain = std::max<int64_t>(1, kGrain * count / std::max<int64_t>(1, rows * columns));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      copy_block(blocks[static_cast<size_t>(k)], to, rows);
    }
  });
  return out;
}

// ---------------------------------------------------------------- updates of many tables

namespace {

constexpr size_t kFields = 4;  // of a piece: its table, its rows, its values, the first column of those

// The gradients of several tables, as the operators are given them.
struct Pieces {
  TensorList rows;
  TensorList values;
  IntArrayRef pieces;
  TensorList lengths;
  IntArrayRef ragged;
};

// For each row of sequences of these lengths, which sequence it is of.
std::vector<int64_t> sequences_of(const Check& check, const Tensor& lengths) {
  check.dtype("lengths", lengths, at::kLong);
  const Tensor list = lengths.contiguous();
  const int64_t* length = list.const_data_ptr<int64_t>();
  std::vector<int64_t> found;
  for (int64_t s = 0; s < list.numel(); ++s) {
    TORCH_CHECK_VALUE(length[s] >= 0, check.op(), ": the length of sequence ", s, " is ", length[s],
                      "; expected at least 0");
    found.insert(found.end(), static_cast<size_t>(length[s]), s);
  }
  return found;
}

// The gradients of several tables in pieces: `lists_` of rows, and columns of matrices.  Pieces of one table follow one
// another, in the order in which their duplicates are summed.  A ragged piece has a row of values for each sequence,
// which is that of all rows of the sequence.
class TableGrads {
 public:
  TableGrads(const Check& check, TensorList params, const Pieces& given)
      : check_(check),
        params_(params),
        lists_(contiguous(given.rows)),
        lengths_(given.lengths),
        pieces_(given.pieces),
        ragged_(given.ragged) {
    const TensorList values = given.values;
    const IntArrayRef pieces = given.pieces;
    TORCH_CHECK_VALUE(ragged_.empty() || ragged_.size() * kFields == pieces.size(), check.op(), ": got ",
                      ragged_.size(), " numbers for ", pieces.size() / kFields,
                      " pieces; expected none or one a piece");
    for (const Tensor& lengths : lengths_) {
      sequences_.push_back(sequences_of(check, lengths));
    }
    TORCH_CHECK_VALUE(!params.empty() && pieces.size() % kFields == 0, check.op(), ": got ", params.size(),
                      " params and ", pieces.size(), " numbers for pieces; expected at least one, and ", kFields,
                      " numbers a piece");
    for (const Tensor& value : values) {
      check.dim("values", value, 2, "[n, width]");
      matrices_.push_back(value.stride(1) == 1 ? value : value.contiguous());
    }
    for (const Tensor& param : params) {
      check.floating("a param", param);
      check.dtype("a param", param, params[0].scalar_type());
      check.dim("a param", param, 2, "[rows, width]");
      check.writable("a param", param);
    }
    first_.assign(params.size() + 1, 0);
    for (size_t at = 0; at < pieces.size(); at += kFields) {
      check_piece(at);
      first_[static_cast<size_t>(pieces[at]) + 1] = at + kFields;
    }
    for (size_t k = 1; k < first_.size(); ++k) {  // a table without pieces has an empty range
      first_[k] = std::max(first_[k], first_[k - 1]);
    }
  }

  // Call `body(k)` for every table, on any threads.
  template <typename Body>
  void each(const Body& body) const {
    const auto count = static_cast<int64_t>(params_.size());
    const int64_t grain = std::max<int64_t>(1, kGrain * count / std::max<int64_t>(1, elements_));
    at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        body(static_cast<size_t>(k));
      }
    });
  }

  // The pieces of table k, in order.
  template <typename T, typename Body>
  void pieces(size_t k, const Body& body) const {
    for (size_t at = first_[k]; at < first_[k + 1]; at += kFields) {
      const Tensor& list = lists_[static_cast<size_t>(pieces_[at + 1])];
      const Tensor& matrix = matrices_[static_cast<size_t>(pieces_[at + 2])];
      const int64_t which = ragged(at);
      body(SparseGrad<T>{list.const_data_ptr<int64_t>(), matrix.const_data_ptr<T>() + pieces_[at + 3], list.numel(),
                         params_[k].size(1), params_[k].size(0), matrix.stride(0),
                         which < 0 ? nullptr : sequences_[static_cast<size_t>(which)].data()});
    }
  }

  // Call `update(share)` with shares of the rows of table k; a single large table is shared out to threads.
  template <typename Update>
  void by_rows(const Update& update) const {
    const int64_t shares = elements_ < 4 * kGrain || params_.size() > 1 ? 1 : at::get_num_threads();
    at::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
      for (int64_t share = begin; share < end; ++share) {
        update(RowShare{static_cast<uint32_t>(share), static_cast<uint32_t>(shares)});
      }
    });
  }

  // Sum the duplicates of table k in this thread's scratch, and call `update(merged, begin, end)`.
  template <typename T, typename Update>
  void merged(size_t k, const Update& update) const {
    thread_local MergedRows<T> own;
    MergedRows<T>& scratch = own;  // the lambda below may run on other threads, which have their own
    thread_local std::vector<int64_t> rows;
    thread_local std::vector<T> values;
    SparseGrad<T> whole{nullptr, nullptr, 0, params_[k].size(1), params_[k].size(0), params_[k].size(1)};
    if (first_[k + 1] - first_[k] == kFields) {
      pieces<T>(k, [&](const SparseGrad<T>& only) { whole = only; });
    } else {
      rows.clear();
      values.clear();
      pieces<T>(k, [&](const SparseGrad<T>& piece) { append(piece, rows, values); });
      whole.rows = rows.data();
      whole.values = values.data();
      whole.count = static_cast<int64_t>(rows.size());
    }
    scratch.merge(whole);
    at::parallel_for(0, scratch.size(), grain_of_rows(whole.width),
                     [&](int64_t begin, int64_t end) { update(scratch, begin, end); });
    scratch.shrink();
    shrink(rows);
    shrink(values);
  }

 private:
  // Which lengths a piece has; -1: none.
  int64_t ragged(size_t at) const { return ragged_.empty() ? -1 : ragged_[at / kFields]; }

  // The rows that the values of a piece need to have.  Checked: those of its sequences are its rows.
  int64_t rows_of_values(size_t at, int64_t rows) const {
    const int64_t which = ragged(at);
    if (which < 0) {
      return rows;
    }
    TORCH_CHECK_INDEX(within(which, 0, sequences_.size()), check_.op(), ": piece ", at / kFields, " has the lengths ",
                      which, "; there are ", sequences_.size());
    const auto& own = sequences_[static_cast<size_t>(which)];
    TORCH_CHECK_VALUE(static_cast<int64_t>(own.size()) == rows, check_.op(), ": lengths ", which, " add up to ",
                      own.size(), ", but there are ", rows, " rows");
    return lengths_[static_cast<size_t>(which)].numel();
  }

  // Pieces are in the order of their tables, their rows inside of them, and as many as the matrix has.
  void check_piece(size_t at) const {
    const int64_t table = pieces_[at], list = pieces_[at + 1], matrix = pieces_[at + 2], column = pieces_[at + 3];
    const int64_t before = at == 0 ? 0 : pieces_[at - kFields];
    TORCH_CHECK_INDEX(within(table, before, params_.size()) && within(list, 0, lists_.size()) &&
                          within(matrix, 0, matrices_.size()) && column >= 0,
                      check_.op(), ": piece ", at / kFields, " is (", table, ", ", list, ", ", matrix, ", ", column,
                      "); expected (param, rows, values, column), params ascending");
    const Tensor& param = params_[static_cast<size_t>(table)];
    const Tensor& rows = lists_[static_cast<size_t>(list)];
    const Tensor& values = matrices_[static_cast<size_t>(matrix)];
    check_.dtype("rows", rows, at::kLong);
    check_.dtype("values", values, param.scalar_type());
    const int64_t expected = rows_of_values(at, rows.numel());
    TORCH_CHECK_VALUE(values.size(0) == expected && column + param.size(1) <= values.size(1), check_.op(),
                      ": values has shape ", values.sizes(), "; expected ", expected, " rows and columns ", column,
                      " to ", column + param.size(1));
    TORCH_CHECK_VALUE(rows.numel() < (int64_t{1} << 31), check_.op(), ": a piece has ", rows.numel(),
                      " rows; at most 2^31 - 1 can be merged at once");
    const int64_t* id = rows.const_data_ptr<int64_t>();
    const int64_t bad = first_outside(id, rows.numel(), param.size(0));
    TORCH_CHECK_INDEX(bad < 0, check_.op(), ": row ", id[std::max<int64_t>(bad, 0)], " at position ", bad, " of rows ",
                      rows.sizes(), " is outside param ", table, ", which has ", param.size(0), " rows");
    elements_ += rows.numel() * param.size(1);
  }

  static bool within(int64_t at, int64_t first, size_t size) { return at >= first && at < static_cast<int64_t>(size); }

  template <typename T>
  static void append(const SparseGrad<T>& piece, std::vector<int64_t>& rows, std::vector<T>& values) {
    rows.insert(rows.end(), piece.rows, piece.rows + piece.count);
    for (int64_t i = 0; i < piece.count; ++i) {
      const T* from = piece.values + piece.offset(i);
      values.insert(values.end(), from, from + piece.width);
    }
  }

  template <typename Element>
  static void shrink(std::vector<Element>& scratch) {
    constexpr size_t kKeptBytes = size_t{64} << 20;  // give memory back that only an unusually large gradient needed
    if (scratch.capacity() * sizeof(Element) > kKeptBytes) {
      std::vector<Element>().swap(scratch);
    }
  }

  const Check& check_;
  TensorList params_;
  std::vector<Tensor> lists_;
  std::vector<Tensor> matrices_;
  TensorList lengths_;
  std::vector<std::vector<int64_t>> sequences_;  // of the rows of each lengths
  IntArrayRef pieces_;
  IntArrayRef ragged_;
  std::vector<size_t> first_;  // of each table, its first number in pieces_
  mutable int64_t elements_ = 0;
};

}  // namespace

void fused_sparse_sgd_(TensorList params, TensorList rows, TensorList values, IntArrayRef pieces, TensorList lengths,
                       IntArrayRef ragged, const Tensor& lr) {
  const Check check("penstock.fused_sparse_sgd_");
  const TableGrads grads(check, params, {rows, values, pieces, lengths, ragged});
  const double rate = check.scalar("lr", lr);
  with_floating(params[0], [&](auto type) {
    using T = decltype(type);
    grads.each([&](size_t k) {
      T* to = params[k].mutable_data_ptr<T>();
      grads.by_rows([&](RowShare share) {
        grads.pieces<T>(k, [&](const SparseGrad<T>& piece) { sparse_sgd(to, piece, rate, share); });
      });
    });
  });
}

void fused_sparse_adam_(TensorList params, TensorList moments1, TensorList moments2, const Tensor& step,
                        TensorList rows, TensorList values, IntArrayRef pieces, TensorList lengths, IntArrayRef ragged,
                        const Tensor& lr, double beta1, double beta2, double epsilon) {
  const Check check("penstock.fused_sparse_adam_");
  const TableGrads grads(check, params, {rows, values, pieces, lengths, ragged});
  check.states("moments", params, moments1);
  check.states("moments", params, moments2);
  const double t = check.step(step);
  const double size = check.scalar("lr", lr) * std::sqrt(1 - std::pow(beta2, t)) / (1 - std::pow(beta1, t));
  const SparseAdamStep by{beta1, beta2, epsilon, size};
  with_floating(params[0], [&](auto type) {
    using T = decltype(type);
    grads.each([&](size_t k) {
      const SparseAdamArrays<T> arrays{params[k].mutable_data_ptr<T>(), moments1[k].mutable_data_ptr<T>(),
                                       moments2[k].mutable_data_ptr<T>(), params[k].size(1)};
      grads.merged<T>(k, [&](const MergedRows<T>& merged, int64_t begin, int64_t end) {
        sparse_adam(arrays, merged, by, begin, end);
      });
    });
  });
}

void fused_sparse_adagrad_(TensorList params, TensorList moments, TensorList rows, TensorList values,
                           IntArrayRef pieces, TensorList lengths, IntArrayRef ragged, const Tensor& lr,
                           double epsilon) {
  const Check check("penstock.fused_sparse_adagrad_");
  const TableGrads grads(check, params, {rows, values, pieces, lengths, ragged});
  check.states("moments", params, moments);
  const double rate = check.scalar("lr", lr);
  with_floating(params[0], [&](auto type) {
    using T = decltype(type);
    grads.each([&](size_t k) {
      const SparseAdagradArrays<T> arrays{params[k].mutable_data_ptr<T>(), moments[k].mutable_data_ptr<T>(),
                                          params[k].size(1)};
      grads.merged<T>(k, [&](const MergedRows<T>& merged, int64_t begin, int64_t end) {
        sparse_adagrad(arrays, merged, rate, epsilon, begin, end);
      });
    });
  });
}

}  // namespace penstock::ops
