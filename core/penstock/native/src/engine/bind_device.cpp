#include "engine/bind_device.h"

#include <pybind11/stl.h>

#include <memory>

#include "engine/device.h"
#include "engine/device_pretended.h"

namespace py = pybind11;

namespace penstock {
namespace {

std::shared_ptr<DevicePlan> make_plan(const std::vector<c10::DeviceIndex>& devices, bool timed,
                                      const PretendedDevices* pretended) {
  if (pretended != nullptr) return std::make_shared<DevicePlan>(*pretended, devices, timed);
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) {
    throw py::value_error("this torch has no CUDA devices");
  }
  return std::make_shared<DevicePlan>(*c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA), devices, timed);
}

std::vector<std::pair<double, double>> times(DevicePlan& plan) {
  std::vector<DevicePlan::Time> found;
  {
    const py::gil_scoped_release unlocked;
    found = plan.times();
  }
  std::vector<std::pair<double, double>> pairs;
  pairs.reserve(found.size());
  for (const DevicePlan::Time& time : found) pairs.emplace_back(time.start_ms, time.duration_ms);
  return pairs;
}

std::vector<std::tuple<std::string, std::int64_t, std::int64_t>> log(const PretendedDevices& devices) {
  std::vector<std::tuple<std::string, std::int64_t, std::int64_t>> rows;
  for (const PretendedDevices::Entry& entry : devices.log()) rows.emplace_back(entry.what, entry.stream, entry.event);
  return rows;
}

}  // namespace

void bind_device(py::module_& m) {
  py::class_<PretendedDevices, std::shared_ptr<PretendedDevices>>(m, "PretendedDevices")
      .def(py::init<>())
      .def("log", &log)
      .def("called", &PretendedDevices::called, py::arg("instruction"))
      .def_property_readonly("events_alive", &PretendedDevices::events_alive);
  py::class_<DevicePlan, std::shared_ptr<DevicePlan>>(m, "DevicePlan")
      .def(py::init(&make_plan), py::arg("devices"), py::kw_only(), py::arg("timed") = true,
           py::arg("pretended") = py::none(), py::keep_alive<1, 4>())
      .def("place", &DevicePlan::place, py::arg("replica"), py::kw_only(), py::arg("exchange"))
      .def("seal", &DevicePlan::seal, py::arg("edges"))
      .def("begin", &DevicePlan::begin)
      .def("end", &DevicePlan::end)
      .def(
          "capture_on",
          [](DevicePlan& plan, std::int64_t stream_id, c10::DeviceIndex device, std::uintptr_t record,
             std::uintptr_t stream) {
            const c10::Stream on(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, device), stream_id);
            plan.capture_on(
                on, {reinterpret_cast<int (*)(void*, void*, unsigned)>(record), reinterpret_cast<void*>(stream)});
          },
          py::arg("stream_id"), py::arg("device"), py::kw_only(), py::arg("record"), py::arg("stream"))
      .def("begin_capture", &DevicePlan::begin_capture)
      .def("end_capture", &DevicePlan::end_capture)
      .def("abandon", &DevicePlan::abandon, py::call_guard<py::gil_scoped_release>())
      .def("ended", &DevicePlan::ended)
      .def("times", &times);
}

}  // namespace penstock
