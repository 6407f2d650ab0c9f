#include "engine/bind_feed.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/torch_plan.h"

namespace py = pybind11;

namespace penstock {
namespace {

constexpr std::int64_t kUnknown = -1;

// What a value of one input has to be.  `fixed`: sizes that are no symbols; `symbols`: axes of sizes that are.
// `lengths`: of a ragged input, the number of the one before it that says how many rows each sequence has; else -1.
struct Input {
  py::object name;
  at::ScalarType dtype;
  std::int64_t rank;
  std::vector<std::pair<std::int64_t, std::int64_t>> fixed;
  std::vector<std::pair<std::int64_t, std::size_t>> symbols;
  bool has_batch;
  std::int64_t lengths;
};

// Rows of one replica; `count` kUnknown: all of a value without a batch.
struct Range {
  std::int64_t first, count;
};

using Inputs = std::shared_ptr<const std::vector<Input>>;

// The arrays of a step, until the last tensor in their memory is gone: on whatever thread that is.
class Arrays {
 public:
  Arrays() = default;
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;
  ~Arrays() {
    const py::gil_scoped_acquire lock;
    held_.clear();
  }
  void hold(py::object array) { held_.push_back(std::move(array)); }

 private:
  std::vector<py::object> held_;
};

// One fed value, in memory as it was given.
struct Fed {
  char* data = nullptr;  // of an array
  at::Tensor tensor;     // or a tensor
  c10::SmallVector<std::int64_t, 5> sizes;
};

// Numpy's number for a dtype of torch; what has none (bfloat16) is not read from arrays.
std::optional<int> numpy_number(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return py::dtype::of<float>().num();
    case at::kDouble:
      return py::dtype::of<double>().num();
    case at::kLong:
      return py::dtype::of<std::int64_t>().num();
    case at::kInt:
      return py::dtype::of<std::int32_t>().num();
    case at::kBool:
      return py::dtype::of<bool>().num();
    default:
      return std::nullopt;
  }
}

bool fits(const Input& input, const Fed& fed) {
  if (static_cast<std::int64_t>(fed.sizes.size()) != input.rank) return false;
  for (const auto& [axis, size] : input.fixed) {
    if (fed.sizes[static_cast<std::size_t>(axis)] != size) return false;
  }
  return true;
}

bool take_tensor(const Input& input, const py::handle& value, Fed& fed) {
  fed.tensor = py::cast<at::Tensor>(value);
  if (fed.tensor.scalar_type() != input.dtype || fed.tensor.requires_grad() || fed.tensor.layout() != at::kStrided ||
      !fed.tensor.device().is_cpu() || !fed.tensor.is_contiguous() || fed.tensor.is_conj() || fed.tensor.is_neg()) {
    return false;
  }
  fed.sizes.assign(fed.tensor.sizes().begin(), fed.tensor.sizes().end());
  return true;
}

bool take_array(const Input& input, const py::handle& value, Fed& fed) {
  auto array = py::reinterpret_borrow<py::array>(value);
  const py::dtype dtype = array.dtype();
  if (numpy_number(input.dtype) != dtype.num() || (array.flags() & py::array::c_style) == 0 || !array.writeable() ||
      (dtype.byteorder() != '=' && dtype.byteorder() != '|')) {
    return false;
  }
  fed.data = static_cast<char*>(array.mutable_data());
  if (reinterpret_cast<std::uintptr_t>(fed.data) % c10::elementSize(input.dtype) != 0) return false;
  for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) fed.sizes.push_back(array.shape(axis));
  return true;
}

// Rows of each replica: as even as possible, the larger shares last.
std::vector<std::int64_t> share_sizes(std::int64_t rows, std::int64_t num_replicas) {
  const std::int64_t pieces = std::min(rows, num_replicas);
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(pieces), rows / pieces);
  for (std::int64_t i = pieces - rows % pieces; i < pieces; ++i) ++sizes[static_cast<std::size_t>(i)];
  return sizes;
}

// A feed that fits, split over replicas.  `sizes[r][s]`: what symbol s is on replica r, kUnknown where no input has it.
class FedShares {
 public:
  FedShares(Inputs inputs, std::vector<Fed> fed, std::shared_ptr<Arrays> arrays, std::vector<std::int64_t> rows)
      : inputs_(std::move(inputs)), fed_(std::move(fed)), arrays_(std::move(arrays)), rows_(std::move(rows)) {}

  // Say which rows of each input a replica has: of ragged ones those of its sequences.  False if lengths do not add up.
  bool share() {
    for (std::size_t i = 0; i < fed_.size(); ++i) {
      const Input& input = (*inputs_)[i];
      ranges_.emplace_back();
      if (input.lengths >= 0) {
        if (!share_sequences(i, static_cast<std::size_t>(input.lengths))) return false;
        continue;
      }
      std::int64_t first = 0;
      for (const std::int64_t rows : rows_) {
        ranges_[i].push_back(input.has_batch ? Range{first, rows} : Range{0, kUnknown});
        first += rows;
      }
    }
    return true;
  }

  // False if two inputs disagree about a symbol.
  bool measure(std::size_t num_symbols) {
    sizes_.assign(rows_.size(), std::vector<std::int64_t>(num_symbols, kUnknown));
    for (std::size_t i = 0; i < fed_.size(); ++i) {
      const Input& input = (*inputs_)[i];
      for (const auto& [axis, symbol] : input.symbols) {
        const std::int64_t whole = fed_[i].sizes[static_cast<std::size_t>(axis)];
        for (std::size_t r = 0; r < rows_.size(); ++r) {
          const std::int64_t rows = ranges_[i][r].count;
          const std::int64_t size = axis == 0 && rows != kUnknown ? rows : whole;
          std::int64_t& known = sizes_[r][symbol];
          if (known != kUnknown && known != size) return false;
          known = size;
        }
      }
    }
    return true;
  }

  // Put the share of a replica into the slots of a plan, an entry for each input; -1: the plan does not read it.
  void put(TorchPlan& plan, std::size_t replica, const std::vector<std::int64_t>& slots) const {
    if (slots.size() != fed_.size()) throw py::value_error("as many slots as inputs are needed");
    std::vector<std::int64_t> wanted;
    TorchPlan::Tensors tensors;
    wanted.reserve(slots.size());
    tensors.reserve(slots.size());
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] < 0) continue;
      wanted.push_back(slots[i]);
      const Range& own = ranges_[i].at(replica);
      tensors.push_back(rows_of(i, own.first, own.count));
    }
    plan.set_all(wanted, std::move(tensors));
  }

  const std::vector<std::int64_t>& rows() const { return rows_; }
  const std::vector<std::vector<std::int64_t>>& sizes() const { return sizes_; }

 private:
  // The rows of each replica's sequences: sums of what `lengths` says of them.
  bool share_sequences(std::size_t i, std::size_t lengths) {
    const Fed& given = fed_[lengths];
    const auto* length = given.tensor.defined() ? given.tensor.const_data_ptr<std::int64_t>()
                                                : reinterpret_cast<const std::int64_t*>(given.data);
    std::int64_t first = 0;
    for (const Range& sequences : ranges_[lengths]) {
      if (sequences.count == kUnknown) return false;
      std::int64_t rows = 0;
      for (std::int64_t s = sequences.first; s < sequences.first + sequences.count; ++s) {
        if (length[s] < 0) return false;
        rows += length[s];
      }
      ranges_[i].push_back({first, rows});
      first += rows;
    }
    return first == fed_[i].sizes[0];
  }

  // `count` rows from `first` on; kUnknown: all of a value without a batch.
  at::Tensor rows_of(std::size_t i, std::int64_t first, std::int64_t count) const {
    const Fed& fed = fed_[i];
    const bool whole = count == kUnknown || count == fed.sizes[0];
    if (fed.tensor.defined()) return whole ? fed.tensor : fed.tensor.narrow(0, first, count);
    auto sizes = fed.sizes;
    const at::ScalarType dtype = (*inputs_)[i].dtype;
    auto a_row = static_cast<std::int64_t>(c10::elementSize(dtype));
    for (std::size_t axis = 1; axis < sizes.size(); ++axis) a_row *= sizes[axis];
    if (!whole) sizes[0] = count;
    return at::from_blob(fed.data + first * a_row, sizes, [arrays = arrays_](void*) {}, at::TensorOptions(dtype));
  }

  Inputs inputs_;
  std::vector<Fed> fed_;
  std::shared_ptr<Arrays> arrays_;
  std::vector<std::int64_t> rows_;
  std::vector<std::vector<std::int64_t>> sizes_;
  std::vector<std::vector<Range>> ranges_;  // by input and replica
};

// What a program asks of its feeds.  `read` takes the usual ones; None says that Python has to look.
class FeedReader {
 public:
  FeedReader(Inputs inputs, std::size_t num_symbols) : inputs_(std::move(inputs)), num_symbols_(num_symbols) {}

  std::optional<FedShares> read(const py::dict& feed, std::int64_t num_replicas) const {
    const std::vector<Input>& inputs = *inputs_;
    if (feed.size() != inputs.size()) return std::nullopt;
    std::vector<Fed> fed(inputs.size());
    auto arrays = std::make_shared<Arrays>();
    std::int64_t rows = kUnknown;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (!take(inputs[i], feed, fed[i], *arrays)) return std::nullopt;
      if (!inputs[i].has_batch) continue;
      if (rows != kUnknown && rows != fed[i].sizes[0]) return std::nullopt;
      rows = fed[i].sizes[0];
    }
    if (rows <= 0) return std::nullopt;
    FedShares shares(inputs_, std::move(fed), std::move(arrays), share_sizes(rows, num_replicas));
    if (!shares.share() || !shares.measure(num_symbols_)) return std::nullopt;
    return shares;
  }

 private:
  bool take(const Input& input, const py::dict& feed, Fed& fed, Arrays& arrays) const {
    const py::handle value = PyDict_GetItemWithError(feed.ptr(), input.name.ptr());
    if (!value) {
      PyErr_Clear();
      return false;
    }
    if (py::isinstance<py::array>(value)) {
      if (!take_array(input, value, fed)) return false;
      arrays.hold(py::reinterpret_borrow<py::object>(value));
    } else if (!py::type::of(value).is(tensor_type_) || !take_tensor(input, value, fed)) {
      return false;
    }
    return fits(input, fed);
  }

  Inputs inputs_;
  std::size_t num_symbols_;
  py::object tensor_type_ = py::module_::import("torch").attr("Tensor");  // exactly: a subclass may mean more
};

using GivenInput =
    std::tuple<py::object, at::ScalarType, std::int64_t, std::vector<std::pair<std::int64_t, std::int64_t>>,
               std::vector<std::pair<std::int64_t, std::size_t>>, bool, std::int64_t>;

std::unique_ptr<FeedReader> make_reader(const std::vector<GivenInput>& given, std::size_t num_symbols) {
  std::vector<Input> inputs;
  for (const auto& [name, dtype, rank, fixed, symbols, has_batch, lengths] : given) {
    if (lengths >= static_cast<std::int64_t>(inputs.size())) throw py::value_error("lengths come before their rows");
    inputs.push_back({name, dtype, rank, fixed, symbols, has_batch, lengths});
  }
  return std::make_unique<FeedReader>(std::make_shared<const std::vector<Input>>(std::move(inputs)), num_symbols);
}

}  // namespace

void bind_feed(py::module_& m) {
  py::class_<FedShares>(m, "FedShares")
      .def("put", &FedShares::put, py::arg("plan"), py::arg("replica"), py::arg("slots"))
      .def_property_readonly("rows", &FedShares::rows)
      .def_property_readonly("sizes", &FedShares::sizes);
  py::class_<FeedReader>(m, "FeedReader")
      .def(py::init(&make_reader), py::arg("inputs"), py::arg("num_symbols"))
      .def("read", &FeedReader::read, py::arg("feed"), py::arg("num_replicas"));
}

}  // namespace penstock
