#include "ps/secure_bind.h"

#include <pybind11/stl.h>
#include <sys/socket.h>

#include <string>
#include <utility>
#include <vector>

#include "ps/openssl.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace penstock::ps {

std::shared_ptr<Channel> channel_over(const Connection& connection, bool shares) {
  if (const auto* descriptor = std::get_if<int>(&connection)) return std::make_shared<Channel>(*descriptor, shares);
  return std::make_shared<Channel>(std::get<std::shared_ptr<Secure>>(connection));
}

namespace {

void send_parts(Secure& self, const std::vector<py::buffer>& parts, Deadline deadline) {
  std::vector<py::buffer_info> views;
  std::vector<iovec> bytes;
  for (const py::buffer& part : parts) {
    const py::buffer_info& view = views.emplace_back(part.request());
    bytes.push_back({view.ptr, static_cast<std::size_t>(view.size * view.itemsize)});
  }
  const py::gil_scoped_release released;
  self.send(std::move(bytes), deadline, -1);
}

std::size_t receive_into(Secure& self, const py::buffer& to, Deadline deadline) {
  const py::buffer_info view = to.request(true);
  const py::gil_scoped_release released;
  return self.receive(static_cast<char*>(view.ptr), static_cast<std::size_t>(view.size * view.itemsize), deadline,
                      nullptr);
}

}  // namespace

void bind_secure(py::module_& m) {
  m.def("load_openssl", &load_openssl, "path"_a, "version"_a);
  py::class_<TlsContext, std::shared_ptr<TlsContext>>(m, "TlsContext")
      .def_static(
          "of_server",
          [](const py::bytes& key, const py::bytes& certificates) { return TlsContext::of_server(key, certificates); },
          "key"_a, "certificates"_a)
      .def_static(
          "of_client", [](const py::bytes& authorities) { return TlsContext::of_client(authorities); },
          "authorities"_a);
  py::class_<Secure, std::shared_ptr<Secure>>(m, "SecureSocket")
      .def(py::init<std::shared_ptr<TlsContext>, int, const std::string&>(), "context"_a, "descriptor"_a, py::kw_only(),
           "name"_a = "")
      .def("handshake", &Secure::handshake, "deadline"_a, py::call_guard<py::gil_scoped_release>())
      .def("send", &send_parts, "parts"_a, "deadline"_a)
      .def("receive_into", &receive_into, "to"_a, "deadline"_a)
      .def("stop_receiving", [](Secure& self) { self.shut(SHUT_RD); })
      .def("shut_down", [](Secure& self) { self.shut(SHUT_RDWR); });
}

}  // namespace penstock::ps
