#include "ps/session_bind.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <tuple>
#include <utility>

#include "ps/channel.h"
#include "ps/operators.h"
#include "ps/secure_bind.h"
#include "ps/session.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace penstock::ps {

py::dict as_dict(const Sums& sums) {
  return py::dict("calls"_a = sums.calls, "sent_bytes"_a = sums.sent_bytes, "received_bytes"_a = sums.received_bytes,
                  "wait_ns"_a = sums.wait_ns, "merges"_a = sums.merges, "staleness"_a = sums.staleness);
}

namespace {

// (blocks, servers, heights), for a sparse gradient with its width and pieces (rows, values, first column).
using Described = std::tuple<std::vector<std::string>, std::vector<std::int64_t>, std::vector<std::int64_t>>;
using Pieces = std::pair<std::int64_t, std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>>;

Layout::Gradient gradient_of(const Described& described, const std::optional<Pieces>& pieces) {
  Layout::Gradient out;
  std::tie(out.of.blocks, out.of.at, out.of.heights) = described;
  out.of.is_table = pieces.has_value();
  if (pieces) {
    out.width = pieces->first;
    for (const auto& [rows, values, column] : pieces->second) out.pieces.push_back({rows, values, column});
  }
  return out;
}

using Class = py::class_<Session, std::shared_ptr<Session>>;

void bind_meeting(Class& made) {
  made.def(
          "meet", [](Session& self, std::size_t num_threads) { self.meeting().begin(num_threads); },
          py::call_guard<py::gil_scoped_release>())
      .def("leave_meeting", [](Session& self) { self.meeting().leave(); })
      .def(
          "leave_meeting_for", [](Session& self, std::int64_t thread) { self.meeting().leave_for(thread); }, "thread"_a)
      .def("fail_meeting", [](Session& self) { self.meeting().fail(); })
      .def_property_readonly("num_met", [](Session& self) { return self.meeting().num_pushed(); })
      .def("waiting", [](Session& self) { return self.meeting().waiting(); });
}

void bind_next_rows(Class& made) {
  made.def("begin_next", &Session::begin_next)
      .def(
          "look_up_next",
          [](Session& self, const std::string& table, const at::Tensor& ids, const std::vector<std::string>& blocks,
             const std::vector<std::int64_t>& at, const std::vector<std::int64_t>& heights, const at::Tensor& rows) {
            return self.look_up_next(table, ids.detach(), {blocks, at, heights, true}, rows.detach());
          },
          "table"_a, "ids"_a, "blocks"_a, "at"_a, "heights"_a, "rows"_a)
      .def(
          "take_next",
          [](Session& self, const std::string& table, const at::Tensor& ids, const at::Tensor& rows) {
            at::Tensor found = rows.detach();
            if (!self.take_next(table, ids.detach(), found)) return false;
            if (!found.is_same(rows)) rows.detach().copy_(found);
            return true;
          },
          "table"_a, "ids"_a, "rows"_a, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("num_taken", &Session::num_taken)
      .def("forget_next", &Session::forget_next);
}

}  // namespace

void bind_session(py::module_& m) {
  Class made(m, "Session");
  made.def(py::init([](std::int64_t trainer, std::int64_t epoch, bool sync, double limit_s, double lease_s,
                       std::size_t num_servers) {
             return std::make_shared<Session>(Sender{trainer, epoch}, sync, limit_s, lease_s, num_servers);
           }),
           "trainer"_a, "epoch"_a, py::kw_only(), "sync"_a, "limit_s"_a, "lease_s"_a, "num_servers"_a)
      .def(
          "arm",
          [](Session& self, std::size_t server, const std::array<Connection, kNumLines>& connections,
             std::vector<std::string> blocks, std::int64_t round, bool shares, bool local) {
            std::array<std::shared_ptr<Channel>, kNumLines> channels;
            for (std::size_t i = 0; i < kNumLines; ++i) channels[i] = channel_over(connections[i], shares);
            const py::gil_scoped_release released;
            return self.arm(server, std::move(channels), std::move(blocks), round, local);
          },
          "server"_a, "connections"_a, "blocks"_a, "round"_a, py::kw_only(), "shares"_a, "local"_a)
      .def("disarm", &Session::disarm, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("is_armed", &Session::is_armed)
      .def("is_armed_at", [](Session& self, std::size_t at) { return self.server(at).armed.load(); })
      .def("round", [](Session& self, std::size_t at) { return self.server(at).round.load(); })
      .def("reached", &Session::reached)
      .def("renewed", &Session::renewed)
      .def("set_lease", &Session::set_lease)
      .def("acknowledged", [](Session& self, std::size_t at) { return self.server(at).acknowledged.load(); })
      .def("sent_at", [](Session& self, std::size_t at) { return self.server(at).sent_at.load(); })
      .def("answered_at", [](Session& self, std::size_t at) { return self.server(at).answered_at.load(); })
      .def("begin_step", &Session::begin_step, py::call_guard<py::gil_scoped_release>())
      .def("end_step", &Session::end_step)
      .def("begin_push", &Session::begin_push, py::call_guard<py::gil_scoped_release>())
      .def("end_push", &Session::end_push)
      .def("take_why", &Session::take_why)
      .def("set_ahead", [](Session& self, std::int64_t num) { self.num_ahead = num; })
      .def("sums", [](Session& self, std::size_t server) {
        py::list out;
        for (const auto& [block, sums] : self.sums(server)) out.append(py::make_tuple(block, as_dict(sums)));
        return out;
      });
  bind_meeting(made);
  bind_next_rows(made);
  m.def("open_session", &open_session);
  m.def("close_session", [](const std::string& remote, const Session& session) { close_session(remote, &session); });
  m.def("next_number", &next_number);
  m.def("repeats_step", &repeats_step);
  m.def("meets", [](const std::string& remote) {
    const auto session = find_session(remote);
    return session != nullptr && session->meeting().is_open();
  });
  m.attr("NUM_CHANNELS") = kNumLines;
  m.def("know_layout", [](const std::string& spec, const std::vector<Described>& dense,
                          const std::vector<std::pair<Described, Pieces>>& sparse) {
    Layout layout;
    for (const Described& one : dense) layout.gradients.push_back(gradient_of(one, std::nullopt));
    for (const auto& [one, pieces] : sparse) layout.gradients.push_back(gradient_of(one, pieces));
    know_layout(spec, std::move(layout));
  });
}

}  // namespace penstock::ps
