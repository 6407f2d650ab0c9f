// The Python face of the data feed: batches as arrays without a copy, no interpreter lock while text is read.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <limits>
#include <system_error>

#include "feed/store.h"
#include "feed/stream.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace penstock::feed {
namespace {

constexpr uint64_t kToTheEnd = std::numeric_limits<uint64_t>::max();

std::vector<Slot> slots_of(const std::vector<std::tuple<std::string, bool, uint32_t>>& given) {
  std::vector<Slot> slots;
  slots.reserve(given.size());
  for (const auto& [name, is_float, width] : given) slots.push_back({name, is_float, width});
  return slots;
}

// (line, column, reason, text), or None.
py::object fault_of(const std::optional<Fault>& fault) {
  if (!fault) return py::none();
  return py::make_tuple(fault->line, fault->column, fault->reason, py::bytes(fault->text));
}

py::list faults_of(Parser& parser) {
  py::list out;
  for (const Fault& fault : parser.take_faults()) out.append(fault_of(fault));
  return out;
}

// Call without the lock; a failed read is an OSError.
template <typename Call>
auto unlocked(Call call) {
  try {
    const py::gil_scoped_release released;
    return call();
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
}

// int64[n, 2]: begin and end of each batch that was read since the last call.
py::array_t<int64_t> take_reads(Stream& stream) {
  const std::vector<Reads::Read> reads = stream.reads().take();
  py::array_t<int64_t> out({static_cast<py::ssize_t>(reads.size()), py::ssize_t{2}});
  int64_t* to = out.mutable_data();
  for (const Reads::Read& read : reads) {
    *to++ = read.begin_ns;
    *to++ = read.end_ns;
  }
  return out;
}

const Column& column_of(const Batch& batch, std::size_t slot) {
  if (slot >= batch.rows.columns.size()) throw py::index_error("a batch has no such slot");
  return batch.rows.columns[slot];
}

// Memory of a batch as an array that keeps it alive.  What is written to it is written to the batch.
template <typename T>
py::array array_of(const Buffer<T>& values, std::vector<py::ssize_t> shape, py::handle owner) {
  return py::array_t<T>(std::move(shape), values.data(), owner);
}

py::array values(py::object self, std::size_t slot, uint32_t width, bool is_float) {
  const Column& column = column_of(self.cast<const Batch&>(), slot);
  const uint64_t size = is_float ? column.numbers.size() : column.ids.size();
  std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(width == 0 ? size : size / width)};
  if (width != 0) shape.push_back(width);
  return is_float ? array_of(column.numbers, shape, self) : array_of(column.ids, shape, self);
}

py::array lengths(py::object self, std::size_t slot) {
  const Column& column = column_of(self.cast<const Batch&>(), slot);
  return array_of(column.lengths, {static_cast<py::ssize_t>(column.lengths.size())}, self);
}

template <typename T>
void pad(const T* from, const int64_t* lengths, uint64_t rows, uint64_t width, T* to) {
  for (uint64_t row = 0; row < rows; ++row) {
    const auto length = static_cast<uint64_t>(lengths[row]);
    std::memcpy(to, from, length * sizeof(T));
    std::memset(static_cast<void*>(to + length), 0, (width - length) * sizeof(T));
    from += length;
    to += width;
  }
}

// Rows of a ragged slot at one length, zeros behind their own values.
py::array padded(const Batch& batch, std::size_t slot, uint64_t width, bool is_float) {
  const Column& column = column_of(batch, slot);
  const int64_t* lengths = column.lengths.data();
  const uint64_t rows = column.lengths.size();
  for (uint64_t row = 0; row < rows; ++row) {
    if (static_cast<uint64_t>(lengths[row]) > width) throw py::value_error("a row is longer than that");
  }
  const std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(rows), static_cast<py::ssize_t>(width)};
  if (is_float) {
    py::array_t<float> out(shape);
    float* to = out.mutable_data();
    unlocked([&] { pad(column.numbers.data(), lengths, rows, width, to); });
    return std::move(out);
  }
  py::array_t<int64_t> out(shape);
  int64_t* to = out.mutable_data();
  unlocked([&] { pad(column.ids.data(), lengths, rows, width, to); });
  return std::move(out);
}

std::vector<std::tuple<uint32_t, uint64_t, uint64_t, bool>> marks(const Batch& batch) {
  std::vector<std::tuple<uint32_t, uint64_t, uint64_t, bool>> out;
  out.reserve(batch.marks.size());
  for (const Mark& mark : batch.marks) out.emplace_back(mark.file, mark.place.offset, mark.place.lines, mark.ended);
  return out;
}

using Ids = py::array_t<int64_t, py::array::c_style>;
using Numbers = py::array_t<float, py::array::c_style>;
using Columns = std::vector<std::pair<py::array, std::optional<Ids>>>;

// Columns as they are given: values of the slot's type, and lengths of a ragged one that add up.
std::vector<Given> given_of(const std::vector<Slot>& slots, const Columns& columns, uint64_t rows) {
  if (columns.size() != slots.size()) throw py::value_error("one column for each slot");
  std::vector<Given> out(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const auto& [values, lengths] = columns[i];
    const auto size = static_cast<uint64_t>(values.size());
    uint64_t expected = rows * slots[i].width;
    if (slots[i].width == 0) {
      if (!lengths || static_cast<uint64_t>(lengths->size()) != rows) throw py::value_error("one length for each row");
      out[i].lengths = lengths->data();
      for (uint64_t row = 0; row < rows; ++row) {
        if (out[i].lengths[row] < 1) throw py::value_error("a length below 1");
        expected += static_cast<uint64_t>(out[i].lengths[row]);
      }
    }
    if (size != expected) throw py::value_error("values of slot '" + slots[i].name + "' do not add up");
    if (slots[i].is_float ? !py::isinstance<Numbers>(values) : !py::isinstance<Ids>(values)) {
      throw py::type_error("values of slot '" + slots[i].name + "' have another type, or are not contiguous");
    }
    if (slots[i].is_float) {
      out[i].numbers = static_cast<const float*>(values.data());
    } else {
      out[i].ids = static_cast<const int64_t*>(values.data());
    }
  }
  return out;
}

using Slots = std::vector<std::tuple<std::string, bool, uint32_t>>;

void bind_streams(py::module_& module) {
  py::class_<Batch, std::shared_ptr<Batch>>(module, "Batch")
      .def("values", &values, "slot"_a, "width"_a, "is_float"_a)
      .def("lengths", &lengths, "slot"_a)
      .def("padded", &padded, "slot"_a, "width"_a, "is_float"_a)
      .def_property_readonly("marks", &marks)
      .def_readonly("producer", &Batch::producer)
      .def_readonly("number", &Batch::number)
      .def("__len__", [](const Batch& batch) { return batch.rows.count; });
  py::class_<Batches, std::shared_ptr<Batches>>(module, "Queue")
      .def(py::init<std::size_t>(), "capacity"_a)
      .def(
          "pop",
          [](Batches& queue, double timeout_s) {
            return unlocked([&] { return queue.pop(std::chrono::duration<double>(timeout_s)); });
          },
          "timeout_s"_a)
      .def("close", &Batches::close)
      .def("stop", &Batches::stop)
      .def_property_readonly("finished", &Batches::finished)
      .def("__len__", &Batches::size);
  py::class_<Stream>(module, "Stream")
      .def(py::init([](uint32_t producer, const Slots& slots, uint64_t batch_size, bool skips_bad_lines,
                       std::shared_ptr<Batches> queue) {
             return std::make_unique<Stream>(producer, slots_of(slots), batch_size, skips_bad_lines, std::move(queue));
           }),
           py::kw_only(), "producer"_a, "slots"_a, "batch_size"_a, "skips_bad_lines"_a, "queue"_a)
      .def(
          "read",
          [](Stream& stream, int descriptor, uint32_t file, uint64_t offset, uint64_t lines) {
            return fault_of(unlocked([&] { return stream.read(descriptor, file, Place{offset, lines}); }));
          },
          "descriptor"_a, py::kw_only(), "file"_a, "offset"_a, "lines"_a)
      .def("read_rest", [](Stream& stream) { return fault_of(unlocked([&] { return stream.read_rest(); })); })
      .def(
          "extend",
          [](Stream& stream, const Columns& columns, uint64_t rows, uint32_t file, uint64_t offset) {
            const std::vector<Given> given = given_of(stream.parser().slots(), columns, rows);
            unlocked([&] { stream.extend(given, rows, file, Place{offset, offset}); });
          },
          "columns"_a, "rows"_a, py::kw_only(), "file"_a, "offset"_a)
      .def(
          "end", [](Stream& stream, uint32_t file, uint64_t offset) { stream.end(file, Place{offset, offset}); },
          py::kw_only(), "file"_a, "offset"_a)
      .def("finish", [](Stream& stream) { unlocked([&] { stream.finish(); }); })
      .def("trace_reads", [](Stream& stream) { stream.reads().trace(); })
      .def("take_reads", &take_reads)
      .def("take_faults", [](Stream& stream) { return faults_of(stream.parser()); })
      .def_property_readonly("stopped", &Stream::stopped)
      .def_property_readonly("bytes", [](Stream& stream) { return stream.parser().bytes(); })
      .def_property_readonly("skipped", [](Stream& stream) { return stream.parser().skipped(); });
}

void bind_store(py::module_& module) {
  py::class_<Chunk, std::shared_ptr<Chunk>>(module, "Chunk")
      .def(py::init([](const Slots& slots, bool skips_bad_lines) {
             return std::make_shared<Chunk>(slots_of(slots), skips_bad_lines);
           }),
           py::kw_only(), "slots"_a, "skips_bad_lines"_a)
      .def(
          "read",
          [](Chunk& chunk, int descriptor, uint64_t begin, std::optional<uint64_t> end) {
            return fault_of(unlocked([&] { return chunk.read(descriptor, begin, end.value_or(kToTheEnd)); }));
          },
          "descriptor"_a, "begin"_a, "end"_a)
      .def("read_rest", [](Chunk& chunk) { return fault_of(unlocked([&] { return chunk.read_rest(); })); })
      .def(
          "extend",
          [](Chunk& chunk, const Columns& columns, uint64_t rows) {
            const std::vector<Given> given = given_of(chunk.parser().slots(), columns, rows);
            unlocked([&] { chunk.extend(given, rows); });
          },
          "columns"_a, "rows"_a)
      .def("take_faults", [](Chunk& chunk) { return faults_of(chunk.parser()); })
      .def_property_readonly("bytes", [](Chunk& chunk) { return chunk.parser().bytes(); })
      .def_property_readonly("skipped", [](Chunk& chunk) { return chunk.parser().skipped(); })
      .def("__len__", [](const Chunk& chunk) { return chunk.rows().count; });
  py::class_<Store>(module, "Store")
      .def(py::init([](const Slots& slots) { return std::make_unique<Store>(slots_of(slots)); }), "slots"_a)
      .def(
          "add", [](Store& store, std::shared_ptr<Chunk> chunk) { unlocked([&] { store.add(std::move(chunk)); }); },
          "chunk"_a)
      .def(
          "shuffle", [](Store& store, uint64_t seed) { unlocked([&] { store.shuffle(seed); }); }, "seed"_a)
      .def(
          "gather",
          [](const Store& store, uint64_t first, uint64_t count) {
            auto batch = std::make_shared<Batch>();
            unlocked([&] { batch->rows = store.gather(first, count); });
            return batch;
          },
          "first"_a, "count"_a)
      .def(
          "draw",
          [](const Store& store, uint64_t count, uint64_t seed) {
            auto batch = std::make_shared<Batch>();
            unlocked([&] { batch->rows = store.draw(count, seed); });
            return batch;
          },
          "count"_a, "seed"_a)
      .def_property_readonly("bytes", &Store::bytes)
      .def("__len__", &Store::size);
}

}  // namespace
}  // namespace penstock::feed

PYBIND11_MODULE(_feed, module) {
  penstock::feed::bind_streams(module);
  penstock::feed::bind_store(module);
}
