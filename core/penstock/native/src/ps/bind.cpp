// The Python face of channels and sessions: conversions and the interpreter lock, nothing else.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "ops/lookup.h"
#include "ps/channel.h"
#include "ps/errors.h"
#include "ps/geo_bind.h"
#include "ps/message.h"
#include "ps/operators.h"
#include "ps/outbox.h"
#include "ps/session_bind.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace penstock::ps {
namespace {

// What a server's block looks like. A table has no height: any id is a row of it.
struct Block {
  std::string name;
  at::ScalarType dtype;
  std::vector<std::int64_t> sizes;
  bool is_table;
};

using Gradient = std::tuple<std::uint32_t, at::Tensor, std::optional<at::Tensor>>;  // block, values, rows

std::string described(const Part& part) {
  std::string out = std::string(c10::toString(static_cast<at::ScalarType>(part.dtype))) + "[";
  for (std::size_t i = 0; i < part.sizes.size(); ++i) out += (i ? ", " : "") + std::to_string(part.sizes[i]);
  return out + "]";
}

// A request as a server's handler takes it. Its tensors look at the channel's memory until the next one is received.
class Request {
 public:
  explicit Request(std::shared_ptr<const std::vector<Block>> blocks) : blocks_(std::move(blocks)) {}

  // False: more belongs to the request. What was sent ahead of a step is put before the rest of it.
  bool take(Received received) {
    Message next = decode(received.head, received.body);
    kept_->push_back(std::move(received.body.keep));
    const bool is_same = next.trainer == message_.trainer && next.epoch == message_.epoch;
    if (next.kind == Kind::kAhead) {
      if (num_ahead_++ > 0 && !is_same) throw Malformed("what was sent ahead of a step is not of one trainer");
      if (next.parts.empty()) throw Malformed("nothing was sent ahead of a step");
      check_reads(next);
      newest_ = message_.parts.size();
      std::vector<Part> parts = std::exchange(message_.parts, {});
      std::swap(parts, next.parts);
      message_ = std::move(next);
      for (Part& part : parts) add_ahead(std::move(part));
      return false;
    }
    if (num_ahead_ != (next.kind == Kind::kStep ? next.number : 0) || (num_ahead_ > 0 && !is_same)) {
      throw Malformed("a step follows other messages than were sent ahead of it");
    }
    next.parts.insert(next.parts.begin(), std::move_iterator(message_.parts.begin()),
                      std::move_iterator(message_.parts.end()));
    message_ = std::move(next);
    return true;
  }

  const Message& message() const { return message_; }

  // Rows are copied before they are checked, since their sender could still change them.
  std::vector<Gradient> gradients() const {
    std::vector<Gradient> out;
    const auto& parts = message_.parts;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const Block& block = block_of(parts[i]);
      std::optional<at::Tensor> rows;
      if (parts[i].role == Role::kRows) {
        rows = checked_rows(parts[i], block);
        if (++i == parts.size() || parts[i].role != Role::kValues || parts[i].block != parts[i - 1].block) {
          throw Malformed("rows of '" + block.name + "' come without their values");
        }
      }
      for (const Gradient& before : out) {
        if (std::get<0>(before) == parts[i].block) throw Malformed("'" + block.name + "' is pushed twice in a step");
      }
      check_values(parts[i], block, rows);
      out.emplace_back(parts[i].block, tensor_of(parts[i]), std::move(rows));
    }
    return out;
  }

  std::pair<std::uint32_t, at::Tensor> ids() const {
    if (message_.parts.size() != 1 || message_.parts[0].role != Role::kRows) {
      throw Malformed("a lookup has one tensor, the ids");
    }
    return {message_.parts[0].block, checked_rows(message_.parts[0], block_of(message_.parts[0]))};
  }

  // Of kAhead: what the newest message has brought, which `gradients` will have too.
  std::vector<Gradient> newest() const {
    std::vector<Gradient> out;
    for (std::size_t i = newest_; i < message_.parts.size(); ++i) {
      out.emplace_back(message_.parts[i].block, tensor_of(message_.parts[i]), std::nullopt);
    }
    return out;
  }

  std::vector<std::uint32_t> reads() const {
    check_reads(message_);
    return message_.reads;
  }

 private:
  // Each block once: what is answered is then not more than all blocks, whatever the request is.
  void check_reads(const Message& message) const {
    std::vector<bool> is_read(blocks_->size());
    for (const std::uint32_t block : message.reads) {
      if (block >= blocks_->size() || (*blocks_)[block].is_table)
        throw Malformed("a step reads what is no block with values");
      if (is_read[block]) throw Malformed("a step reads '" + (*blocks_)[block].name + "' twice");
      is_read[block] = true;
    }
  }

  // At most one gradient of each block, so that what waits for a step is not more than the blocks.
  void add_ahead(Part part) {
    const Block& block = block_of(part);
    if (part.role != Role::kValues) throw Malformed("rows of '" + block.name + "' were sent ahead of a step");
    check_values(part, block, std::nullopt);
    for (const Part& before : message_.parts) {
      if (before.block == part.block) throw Malformed("'" + block.name + "' is pushed twice in a step");
    }
    message_.parts.push_back(std::move(part));
  }

  const Block& block_of(const Part& part) const {
    if (part.block >= blocks_->size())
      throw Malformed("block " + std::to_string(part.block) + " is not on this server");
    return (*blocks_)[part.block];
  }

  at::Tensor tensor_of(const Part& part) const {
    return at::from_blob(
        const_cast<char*>(part.data), part.sizes, [kept = kept_](void*) {},
        at::TensorOptions().dtype(static_cast<at::ScalarType>(part.dtype)));
  }

  at::Tensor checked_rows(const Part& part, const Block& block) const {
    if (static_cast<at::ScalarType>(part.dtype) != at::kLong || part.sizes.size() != 1 || block.sizes.empty()) {
      throw Malformed("rows of '" + block.name + "' are int64 [n] of a block with rows, not " + described(part));
    }
    at::Tensor rows = at::empty(part.sizes, at::kLong);
    auto* to = rows.mutable_data_ptr<std::int64_t>();
    std::memcpy(to, part.data, part.num_bytes);
    const std::int64_t bad = block.is_table ? -1 : ops::first_outside(to, rows.numel(), block.sizes[0]);
    if (bad >= 0) {
      throw Malformed("row " + std::to_string(to[bad]) + " of '" + block.name + "', which has " +
                      std::to_string(block.sizes[0]));
    }
    return rows;
  }

  void check_values(const Part& part, const Block& block, const std::optional<at::Tensor>& rows) const {
    std::vector<std::int64_t> expected = block.sizes;
    if (rows) expected[0] = rows->numel();
    const bool fits = rows || !block.is_table;
    if (!fits || static_cast<at::ScalarType>(part.dtype) != block.dtype || part.sizes != expected) {
      throw Malformed("a push of '" + block.name + "' has the values " + described(part) +
                      ", which do not fit the block" + (fits ? "" : ": a push of a table has rows and values"));
    }
  }

  std::shared_ptr<std::vector<std::shared_ptr<void>>> kept_ = std::make_shared<std::vector<std::shared_ptr<void>>>();
  std::shared_ptr<const std::vector<Block>> blocks_;
  Message message_;
  std::int64_t num_ahead_ = 0;
  std::size_t newest_ = 0;  // the first part of the newest message
};

// The blocks of a server by their numbers, and what went over its channels, by trainer and block. Thread-safe.
class Traffic {
 public:
  explicit Traffic(std::vector<Block> blocks) : blocks_(std::make_shared<std::vector<Block>>(std::move(blocks))) {}

  const std::shared_ptr<const std::vector<Block>>& blocks() const { return blocks_; }

  void received(std::int64_t trainer, const Message& message) {
    add(trainer, message, [](Sums& sums, const Part& part) {
      sums.calls += part.role == Role::kValues ? 1 : 0;
      sums.received_bytes += static_cast<std::int64_t>(part.num_bytes);
    });
  }
  void sent(std::int64_t trainer, const Message& message) {
    add(trainer, message, [](Sums& sums, const Part& part) {
      sums.calls += 1;
      sums.sent_bytes += static_cast<std::int64_t>(part.num_bytes);
    });
  }
  std::map<std::int64_t, std::vector<Sums>> sums() {
    const std::lock_guard guard(lock_);
    return sums_;
  }

 private:
  template <typename Count>
  void add(std::int64_t trainer, const Message& message, Count count) {
    const std::lock_guard guard(lock_);
    std::vector<Sums>& sums = sums_[trainer];
    sums.resize(blocks_->size());
    for (const Part& part : message.parts) {
      if (part.block < blocks_->size()) count(sums[part.block], part);
    }
  }

  const std::shared_ptr<const std::vector<Block>> blocks_;
  std::mutex lock_;
  std::map<std::int64_t, std::vector<Sums>> sums_;
};

// A server's side of a channel.
class Answers {
 public:
  Answers(int descriptor, std::shared_ptr<Traffic> traffic, bool shares)
      : channel_(std::make_shared<Channel>(descriptor, shares)), traffic_(std::move(traffic)) {}

  // `in_parts`: each message ahead of a step is returned too, as the request that the step will be.
  std::shared_ptr<Request> receive(bool in_parts) {
    const py::gil_scoped_release released;
    if (open_ == nullptr) open_ = std::make_shared<Request>(traffic_->blocks());
    bool is_whole = false;
    do {
      is_whole = open_->take(channel_->receive(std::numeric_limits<double>::infinity()));
    } while (!is_whole && !in_parts);
    if (!is_whole) return open_;
    trainer_ = open_->message().trainer;
    if (counts(trainer_)) traffic_->received(trainer_, open_->message());
    return std::exchange(open_, nullptr);
  }

  // From any thread, between the first message ahead of a step and its answer: the value of one block, which does not
  // change. Sent in the background, before the answer.
  void send_early(std::int64_t trainer, std::int64_t round, std::uint32_t block, const at::Tensor& value,
                  double limit_s) {
    const py::gil_scoped_release released;
    const at::Tensor whole = value.contiguous().detach();  // without Python's object, which only its lock may free
    Message message{.kind = Kind::kEarly, .round = round};
    message.parts.push_back(described_as(block, whole.scalar_type(), whole.sizes().vec()));
    message.parts[0].data = static_cast<const char*>(whole.const_data_ptr());
    if (counts(trainer)) traffic_->sent(trainer, message);
    early_.send(channel_, std::move(message), {whole}, limit_s);
  }

  // Copies tensors to where the answer's body is taken from: they may change when this returns.
  void stage(const std::vector<std::uint32_t>& blocks, const std::vector<at::Tensor>& tensors) {
    const py::gil_scoped_release released;
    answer_ = {};
    std::vector<at::Tensor> copies;  // until their bytes are taken
    copies.reserve(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& tensor = copies.emplace_back(tensors[i].contiguous());
      Part part = described_as(blocks.at(i), tensor.scalar_type(), tensor.sizes().vec());
      part.data = static_cast<const char*>(tensor.const_data_ptr());
      answer_.parts.push_back(std::move(part));
    }
    channel_->stage(bytes_of(answer_));
  }

  // The same for rows of a table [height, ...]: gathered straight into it. `ids` are checked.
  void stage_rows(std::uint32_t block, const at::Tensor& table, const at::Tensor& ids) {
    const py::gil_scoped_release released;
    std::vector<std::int64_t> sizes = table.sizes().vec();
    sizes[0] = ids.numel();
    answer_ = {};
    answer_.parts.push_back(described_as(block, table.scalar_type(), std::move(sizes)));
    const Part& part = answer_.parts[0];
    const std::int64_t row_bytes = static_cast<std::int64_t>(part.num_bytes) / std::max<std::int64_t>(1, ids.numel());
    const ops::RowGather gather{static_cast<const char*>(table.const_data_ptr()), row_bytes, -1, row_bytes};
    ops::gather_rows(gather, ids.const_data_ptr<std::int64_t>(), channel_->room(part.num_bytes), 0, ids.numel());
  }

  // `early`: blocks whose values have been sent early, and hold.
  void answer(std::int64_t round, std::int64_t staleness, double deadline, std::vector<std::uint32_t> early) {
    const py::gil_scoped_release released;
    answer_.kind = Kind::kAnswer;
    answer_.round = round;
    answer_.number = staleness;
    answer_.reads = std::move(early);
    traffic_->sent(trainer_, answer_);
    send(deadline);
  }

  void refuse(const std::string& reason, bool rejoin, double deadline) {
    const py::gil_scoped_release released;
    answer_ = {};
    answer_.kind = Kind::kRefuse;
    answer_.number = rejoin ? 1 : 0;
    answer_.text = reason;
    channel_->stage({});
    send(deadline);
  }

  void break_off() { channel_->break_off(); }
  void stop_receiving() { channel_->stop_receiving(); }
  std::string take_why() { return channel_->take_why(); }

 private:
  static Part described_as(std::uint32_t block, at::ScalarType dtype, std::vector<std::int64_t> sizes) {
    Part part;
    part.block = block;
    part.dtype = static_cast<std::int8_t>(dtype);
    part.sizes = std::move(sizes);
    part.num_bytes = c10::elementSize(dtype);
    for (const std::int64_t size : part.sizes) part.num_bytes *= static_cast<std::size_t>(size);
    return part;
  }

  void send(double deadline) {
    if (!early_.finish()) throw Unavailable("values before an answer could not be sent");
    channel_->send_staged(encode(answer_), deadline);
    answer_ = {};
  }

  static constexpr std::int64_t kMaxTrainers = std::int64_t{1} << 20;  // that are counted

  static bool counts(std::int64_t trainer) { return trainer >= 0 && trainer < kMaxTrainers; }

  std::shared_ptr<Channel> channel_;
  Outbox early_;
  std::shared_ptr<Traffic> traffic_;
  std::shared_ptr<Request> open_;  // of which messages ahead have come
  std::int64_t trainer_ = -1;      // who sent the request that is being answered
  Message answer_;
};

void bind_server(py::module_& m) {
  py::class_<Block>(m, "Block")
      .def(py::init([](std::string name, const at::ScalarType& dtype, std::vector<std::int64_t> sizes, bool is_table) {
             return Block{std::move(name), dtype, std::move(sizes), is_table};
           }),
           "name"_a, "dtype"_a, "sizes"_a, py::kw_only(), "is_table"_a);
  py::class_<Request, std::shared_ptr<Request>>(m, "Request")
      .def_property_readonly("kind", [](const Request& self) { return static_cast<int>(self.message().kind); })
      .def_property_readonly("trainer", [](const Request& self) { return self.message().trainer; })
      .def_property_readonly("epoch", [](const Request& self) { return self.message().epoch; })
      .def_property_readonly("round", [](const Request& self) { return self.message().round; })
      .def("gradients", &Request::gradients)
      .def("newest", &Request::newest)
      .def("ids", &Request::ids)
      .def("reads", &Request::reads);
  py::class_<Traffic, std::shared_ptr<Traffic>>(m, "Traffic")
      .def(py::init<std::vector<Block>>(), "blocks"_a)
      .def("sums", [](Traffic& self) {
        py::list out;
        for (const auto& [trainer, sums] : self.sums()) {
          for (std::size_t block = 0; block < sums.size(); ++block) {
            if (sums[block].calls != 0) out.append(py::make_tuple(trainer, block, as_dict(sums[block])));
          }
        }
        return out;
      });
  py::class_<Answers>(m, "Answers")
      .def(py::init<int, std::shared_ptr<Traffic>, bool>(), "descriptor"_a, "traffic"_a, py::kw_only(), "shares"_a)
      .def("receive", &Answers::receive, py::kw_only(), "in_parts"_a = false)
      .def("send_early", &Answers::send_early)
      .def("stage", &Answers::stage)
      .def("stage_rows", &Answers::stage_rows)
      .def("answer", &Answers::answer, "round"_a, "staleness"_a, "deadline"_a, "early"_a = std::vector<std::uint32_t>{})
      .def("refuse", &Answers::refuse)
      .def("shut_down", &Answers::break_off)
      .def("close", &Answers::break_off)  // the descriptor goes with the object, which no thread uses then
      .def("stop_receiving", &Answers::stop_receiving)
      .def("take_why", &Answers::take_why);
}

// What is thrown here, as the errors of the package.
void translate(std::exception_ptr thrown) {
  const auto raise = [](const char* name, const char* what) {
    const py::object type = py::module_::import("penstock.errors").attr(name);
    PyErr_SetString(type.ptr(), what);
  };
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const Unavailable& error) {
    raise("Unavailable", error.what());
  } catch (const Malformed& error) {
    raise("PeerError", error.what());
  }
}

}  // namespace
}  // namespace penstock::ps

PYBIND11_MODULE(_ps, m) {
  using namespace penstock::ps;
  py::register_exception_translator(&translate);
  m.attr("AHEAD") = static_cast<int>(Kind::kAhead);
  m.attr("LOOK_UP") = static_cast<int>(Kind::kLookUp);
  m.attr("STEP") = static_cast<int>(Kind::kStep);
  bind_server(m);
  bind_session(m);
  bind_geo(m);
}
