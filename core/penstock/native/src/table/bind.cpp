// The Python face of the sparse table: arrays in, arrays out, no interpreter lock while the table works.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "table/length.h"
#include "table/rules.h"
#include "table/table.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace penstock::table {
namespace {

using Ids = py::array_t<int64_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style>;

FirstValues first_values(const std::string& kind, double a, double b) {
  if (kind == "constant") return {FirstValues::Kind::kConstant, a, b};
  if (kind == "uniform") return {FirstValues::Kind::kUniform, a, b};
  if (kind == "normal") return {FirstValues::Kind::kNormal, a, b};
  if (kind == "truncated_normal") return {FirstValues::Kind::kTruncatedNormal, a, b};
  throw std::invalid_argument("first values are 'constant', 'uniform', 'normal' or 'truncated_normal', not '" + kind +
                              "'");
}

uint64_t count_of(const Ids& ids) {
  if (ids.ndim() != 1) throw std::invalid_argument("ids have one dimension");
  return static_cast<uint64_t>(ids.shape(0));
}

const float* rows_of(const Floats& values, uint64_t count, uint32_t width, const char* what) {
  if (values.ndim() != 2 || static_cast<uint64_t>(values.shape(0)) != count || values.shape(1) != width) {
    throw std::invalid_argument(std::string(what) + " have the shape [" + std::to_string(count) + ", " +
                                std::to_string(width) + "]");
  }
  return values.data();
}

void need_states(const Table& table, uint32_t number, const char* rule) {
  if (table.settings().num_states != number) {
    throw std::invalid_argument(std::string(rule) + " needs a table with " + std::to_string(number) +
                                " states a value, this one has " + std::to_string(table.settings().num_states));
  }
}

void pull(Table& table, const Ids& ids, Floats out, bool create, uint32_t now) {
  const uint64_t count = count_of(ids);
  rows_of(out, count, table.settings().width, "pulled values");
  float* to = out.mutable_data();
  const int64_t* from = ids.data();
  const py::gil_scoped_release unlocked;
  table.pull(from, count, to, create, now);
}

// rule_of(length) is the rule for rows of that length.
template <typename RuleOf>
void push(Table& table, const Ids& ids, const Floats& gradients, uint32_t now, uint32_t threads, RuleOf rule_of) {
  const uint64_t count = count_of(ids);
  const float* values = rows_of(gradients, count, table.settings().width, "gradients");
  const int64_t* from = ids.data();
  const py::gil_scoped_release unlocked;
  with_length(table.settings().width,
              [&](auto length) { table.push(from, count, values, now, rule_of(length), threads); });
}

Floats gather(Table& table, const Ids& ids, uint32_t now) {
  const uint64_t count = count_of(ids);
  Floats out({static_cast<py::ssize_t>(count), static_cast<py::ssize_t>(table.stride())});
  float* to = out.mutable_data();
  const int64_t* from = ids.data();
  const py::gil_scoped_release unlocked;
  table.gather(from, count, to, now);
  return out;
}

void scatter(Table& table, const Ids& ids, const Floats& rows, uint32_t now) {
  const uint64_t count = count_of(ids);
  const float* values = rows_of(rows, count, table.stride(), "rows");
  const int64_t* from = ids.data();
  const py::gil_scoped_release unlocked;
  table.scatter(from, count, values, now);
}

py::array_t<bool> admit(Table& table, const Ids& ids) {
  const uint64_t count = count_of(ids);
  py::array_t<bool> out(static_cast<py::ssize_t>(count));
  bool* to = out.mutable_data();
  const int64_t* from = ids.data();
  const py::gil_scoped_release unlocked;
  table.admit(from, count, to);
  return out;
}

uint64_t rows_to_make(const Table& table, const Ids& ids) {
  const uint64_t count = count_of(ids);
  const int64_t* from = ids.data();
  const py::gil_scoped_release unlocked;
  return table.rows_to_make(from, count);
}

using Bytes = py::array_t<uint8_t, py::array::c_style>;

Bytes copy_counts(const Table& table) {
  std::vector<uint8_t> counts;
  {
    const py::gil_scoped_release unlocked;
    counts = table.copy_counts();
  }
  return Bytes(static_cast<py::ssize_t>(counts.size()), counts.data());
}

bool restore_counts(Table& table, const Bytes& counts) {
  return table.restore_counts(counts.data(), static_cast<uint64_t>(counts.size()));
}

std::unique_ptr<Table> make_table(uint32_t width, std::vector<float> first_states, const std::string& first, double a,
                                  double b, uint64_t seed, uint64_t capacity, uint32_t num_shards, bool keeps_last_use,
                                  uint32_t admit_after) {
  Settings settings;
  settings.width = width;
  settings.num_states = static_cast<uint32_t>(first_states.size());
  settings.first_states = std::move(first_states);
  settings.first_values = first_values(first, a, b);
  settings.seed = seed;
  settings.capacity = capacity;
  settings.num_shards = num_shards;
  settings.keeps_last_use = keeps_last_use;
  settings.admit_after = admit_after;
  return std::make_unique<Table>(std::move(settings));
}

void note_push(Table& table, const Ids& ids) {
  const uint64_t count = count_of(ids);
  const int64_t* from = ids.data();
  const py::gil_scoped_release unlocked;
  table.note_push(from, count);
}

// ([(id, pushes)], pushes of all ids together, by how many an id's may be too low): estimates from a sample.
py::tuple hot(const Table& table, std::size_t most) {
  const HotKeys::Found found = table.hot(most);
  py::list ids;
  for (const HotKeys::Hot& one : found.hot) {
    ids.append(py::make_tuple(static_cast<int64_t>(one.key), one.count * HotKeys::kEvery));
  }
  return py::make_tuple(ids, found.samples * HotKeys::kEvery, found.lost * HotKeys::kEvery);
}

py::tuple copy_shard(const Table& table, uint32_t shard) {
  std::vector<int64_t> ids;
  std::vector<float> rows;
  {
    const py::gil_scoped_release unlocked;
    table.copy_shard(shard, ids, rows);
  }
  const auto count = static_cast<py::ssize_t>(ids.size());
  Floats values({count, static_cast<py::ssize_t>(table.stride())}, rows.data());
  return py::make_tuple(Ids(count, ids.data()), values);
}

}  // namespace
}  // namespace penstock::table

PYBIND11_MODULE(_table, module) {
  using namespace penstock::table;
  py::register_exception<CapacityError>(module, "CapacityError");
  py::class_<Table>(module, "Table")
      .def(py::init(&make_table), py::kw_only(), "width"_a, "first_states"_a, "first"_a, "a"_a, "b"_a, "seed"_a,
           "capacity"_a, "num_shards"_a, "keeps_last_use"_a, "admit_after"_a)
      .def("pull", &pull, "ids"_a, "out"_a.noconvert(), "create"_a, "now"_a)
      .def("gather", &gather, "ids"_a, "now"_a)
      .def("scatter", &scatter, "ids"_a, "rows"_a, "now"_a)
      .def(
          "push_add",
          [](Table& table, const Ids& ids, const Floats& gradients, uint32_t now, uint32_t threads) {
            push(table, ids, gradients, now, threads, [](auto length) { return Add{length}; });
          },
          "ids"_a, "gradients"_a, "now"_a, "threads"_a)
      .def(
          "push_sgd",
          [](Table& table, const Ids& ids, const Floats& gradients, uint32_t now, uint32_t threads, float lr) {
            push(table, ids, gradients, now, threads, [=](auto length) { return Sgd{length, lr}; });
          },
          "ids"_a, "gradients"_a, "now"_a, "threads"_a, "lr"_a)
      .def(
          "push_adagrad",
          [](Table& table, const Ids& ids, const Floats& gradients, uint32_t now, uint32_t threads, float lr,
             float epsilon) {
            need_states(table, 1, "adagrad");
            push(table, ids, gradients, now, threads, [=](auto length) { return Adagrad{length, lr, epsilon}; });
          },
          "ids"_a, "gradients"_a, "now"_a, "threads"_a, "lr"_a, "epsilon"_a)
      .def(
          "push_adam",
          [](Table& table, const Ids& ids, const Floats& gradients, uint32_t now, uint32_t threads, float rate,
             float beta1, float beta2, float epsilon) {
            need_states(table, 2, "adam");
            push(table, ids, gradients, now, threads,
                 [=](auto length) { return Adam{length, rate, beta1, beta2, epsilon}; });
          },
          "ids"_a, "gradients"_a, "now"_a, "threads"_a, "rate"_a, "beta1"_a, "beta2"_a, "epsilon"_a)
      .def("admit", &admit, "ids"_a)
      .def("rows_to_make", &rows_to_make, "ids"_a)
      .def("note_push", &note_push, "ids"_a)
      .def("hot", &hot, "most"_a)
      .def_property_readonly("traffic",
                             [](const Table& table) {
                               const Traffic found = table.traffic();
                               return py::make_tuple(found.pulled, found.absent, found.pushed);
                             })
      .def("copy_counts", &copy_counts)
      .def("restore_counts", &restore_counts, "counts"_a)
      .def("expire", &Table::expire, "oldest"_a, py::call_guard<py::gil_scoped_release>())
      .def("copy_shard", &copy_shard, "shard"_a)
      .def("__len__", &Table::size)
      .def_property_readonly("index_bytes", &Table::index_bytes)
      .def_property_readonly("row_bytes", &Table::row_bytes)
      .def_property_readonly("held_bytes", &Table::held_bytes)
      .def_property_readonly("stride", &Table::stride)
      .def_property_readonly("num_shards", [](const Table& table) { return table.settings().num_shards; });
}
