#include "ps/log_file_bind.h"

#include <pybind11/stl.h>

#include <cerrno>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "ps/crc32.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace penstock::ps {
namespace {

[[noreturn]] void raise(const std::system_error& error) {
  errno = error.code().value();
  PyErr_SetFromErrno(PyExc_OSError);
  throw py::error_already_set();
}

std::string_view view_of(const py::buffer_info& info) {
  return {static_cast<const char*>(info.ptr), static_cast<std::size_t>(info.size * info.itemsize)};
}

std::int64_t append(LogFile& self, const py::bytes& head, const std::vector<py::buffer>& parts) {
  std::vector<py::buffer_info> held;
  Record record{std::string(head), {}};
  held.reserve(parts.size());
  for (const py::buffer& part : parts) {
    held.push_back(part.request());
    record.body.push_back(view_of(held.back()));
  }
  try {
    const py::gil_scoped_release released;
    return self.append({std::move(record)});
  } catch (const std::system_error& error) {
    raise(error);
  }
}

void cut(LogFile& self, std::int64_t size, std::int64_t next) {
  try {
    const py::gil_scoped_release released;
    self.cut(size, next);
  } catch (const std::system_error& error) {
    raise(error);
  }
}

}  // namespace

void bind_log_file(py::module_& m) {
  py::class_<BlockWords>(m, "BlockWords")
      .def(py::init([](std::string values, std::string rows, std::string name, std::string dtype) {
             return BlockWords{std::move(values), std::move(rows), std::move(name), std::move(dtype)};
           }),
           py::kw_only(), "values"_a, "rows"_a, "name"_a, "dtype"_a);
  py::class_<LogFile, std::shared_ptr<LogFile>>(m, "LogFile")
      .def(py::init<std::int64_t>(), "next"_a)
      .def("open", &LogFile::open, "descriptor"_a, py::call_guard<py::gil_scoped_release>())
      .def("close", &LogFile::close, py::call_guard<py::gil_scoped_release>())
      .def("append", &append, "head"_a, "parts"_a)
      .def("cut", &cut, "size"_a, "next"_a)
      .def_property_readonly("is_kept", &LogFile::is_kept)
      .def_property_readonly("next", &LogFile::next)
      .def_property_readonly("size", &LogFile::size);
  m.def(
      "crc32",
      [](const py::buffer& data, std::uint32_t before) {
        const py::buffer_info info = data.request();
        const std::string_view view = view_of(info);
        return crc32(before, view.data(), view.size());
      },
      "data"_a, "before"_a = 0);
}

}  // namespace penstock::ps
