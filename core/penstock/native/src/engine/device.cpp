#include "engine/device.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace penstock {

DevicePlan::DevicePlan(const Guard& guard, const std::vector<c10::DeviceIndex>& devices, bool timed)
    : guard_(guard), timed_(timed) {
  std::vector<c10::DeviceIndex> known;
  for (const c10::DeviceIndex index : devices) {
    const c10::Device device(guard_.type(), index);
    compute_.push_back(stream_of(guard_.getDefaultStream(device)));
    if (std::find(known.begin(), known.end(), index) != known.end()) continue;
    known.push_back(index);
    exchange_.push_back(stream_of(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true)));
  }
  for (const c10::Stream stream : streams_) step_marks_.push_back({nullptr, stream});
  base_.assign(streams_.size(), nullptr);
}

DevicePlan::~DevicePlan() {
  for (const Mark& mark : step_marks_) destroy(mark.event, mark.stream.device_index());
  if (first_ != nullptr) destroy(first_, streams_[0].device_index());
  for (std::size_t i = 0; i < base_.size(); ++i) destroy(base_[i], streams_[i].device_index());
  for (const Node& node : nodes_) {
    for (const Mark& mark : node.marks) destroy(mark.event, mark.stream.device_index());
    destroy(node.start, streams_[node.streams[0]].device_index());
    destroy(node.stop, streams_[node.streams[0]].device_index());
  }
}

void DevicePlan::destroy(void* event, c10::DeviceIndex device) const noexcept {
  if (event != nullptr) guard_.destroyEvent(event, device);
}

std::size_t DevicePlan::stream_of(c10::Stream stream) {
  const auto found = std::find(streams_.begin(), streams_.end(), stream);
  if (found != streams_.end()) return static_cast<std::size_t>(found - streams_.begin());
  streams_.push_back(stream);
  return streams_.size() - 1;
}

void DevicePlan::place(std::int32_t replica, bool exchange) {
  if (replica >= static_cast<std::int32_t>(compute_.size())) {
    throw std::invalid_argument("replica " + std::to_string(replica) + " has no device; there are " +
                                std::to_string(compute_.size()));
  }
  Node node;
  if (exchange) {
    node.streams = exchange_;
  } else {
    node.streams = {compute_[static_cast<std::size_t>(std::max(replica, 0))]};
  }
  nodes_.push_back(std::move(node));
}

void DevicePlan::seal(const std::vector<std::pair<std::uint32_t, std::uint32_t>>& edges) {
  for (const auto& [before, after] : edges) {
    Node& first = nodes_.at(before);
    Node& second = nodes_.at(after);
    if (first.streams == second.streams) continue;
    second.waits.push_back(before);
    if (!first.marks.empty()) continue;
    for (const std::size_t stream : first.streams) first.marks.push_back({nullptr, streams_[stream]});
  }
}

void DevicePlan::record(Mark& mark, c10::EventFlag flag) {
  guard_.record(&mark.event, mark.stream, mark.stream.device_index(), flag);
}

void DevicePlan::wait(const std::vector<Mark>& marks, c10::Stream stream) const {
  for (const Mark& mark : marks) {
    if (mark.stream != stream) guard_.block(mark.event, stream);
  }
}

void DevicePlan::capture_on(c10::Stream stream, Runtime runtime) {
  const bool one_stream = compute_.size() == 1 && std::all_of(nodes_.begin(), nodes_.end(), [&](const Node& node) {
                            return node.streams.size() == 1 && node.streams[0] == compute_[0];
                          });
  if (!one_stream || runtime.record == nullptr) {
    throw std::invalid_argument("only a plan of one device without exchanges can be captured, by a CUDA runtime");
  }
  streams_[compute_[0]] = stream;
  step_marks_[compute_[0]].stream = stream;
  runtime_ = runtime;
}

void DevicePlan::begin_capture() {
  guard_.record(&first_, streams_[compute_[0]], streams_[compute_[0]].device_index(), c10::EventFlag::BACKEND_DEFAULT);
  for (Node& node : nodes_) {  // made before the capture, in which they become nodes
    const c10::Stream stream = streams_[node.streams[0]];
    if (node.stop == nullptr) {
      guard_.record(&node.stop, stream, stream.device_index(), c10::EventFlag::BACKEND_DEFAULT);
    }
  }
  order_.clear();
  capture_ = Capture::kUnderWay;
}

void DevicePlan::end_capture() {
  capture_ = Capture::kDone;
}

void DevicePlan::record_in_graph(void* event) {
  constexpr unsigned kExternal = 1;  // cudaEventRecordExternal: a node of the graph, not an order within it
  if (event == nullptr || runtime_.record(event, runtime_.stream, kExternal) != 0) {
    throw std::runtime_error("CUDA records no event in a graph");
  }
}

void DevicePlan::begin() {
  for (Mark& mark : step_marks_) record(mark, c10::EventFlag::PYTORCH_DEFAULT);
  for (const std::size_t stream : exchange_) wait(step_marks_, streams_[stream]);
  for (std::size_t i = 0; timed_ && i < streams_.size(); ++i) {
    guard_.record(&base_[i], streams_[i], streams_[i].device_index(), c10::EventFlag::BACKEND_DEFAULT);
  }
  ran_ = false;
}

void DevicePlan::end() {
  for (Mark& mark : step_marks_) record(mark, c10::EventFlag::PYTORCH_DEFAULT);
  for (const std::size_t stream : compute_) wait(step_marks_, streams_[stream]);
  ran_ = true;
}

void DevicePlan::abandon() {
  for (const c10::Stream stream : streams_) guard_.synchronizeStream(stream);
}

bool DevicePlan::ended() const {
  if (!ran_ || !timed_ || nodes_.empty()) return ran_;
  if (capture_ == Capture::kDone) return guard_.queryEvent(step_marks_[compute_[0]].event);
  return std::all_of(nodes_.begin(), nodes_.end(), [&](const Node& node) { return guard_.queryEvent(node.stop); });
}

std::vector<DevicePlan::Time> DevicePlan::times() {
  std::vector<Time> found;
  if (capture_ == Capture::kDone && timed_ && ran_ && !order_.empty()) {
    const std::size_t stream = compute_[0];
    const c10::DeviceIndex device = streams_[stream].device_index();
    // Behind the replay: an event within it may be that of the one before.
    guard_.synchronizeEvent(step_marks_[stream].event);
    found.resize(nodes_.size());
    double before = guard_.elapsedTime(base_[stream], first_, device);  // a call into the runtime each
    for (const std::uint32_t i : order_) {
      const double after = guard_.elapsedTime(base_[stream], nodes_[i].stop, device);
      found[i] = {i, before, after - before};
      before = after;
    }
    return found;
  }
  for (std::uint32_t i = 0; timed_ && ran_ && i < nodes_.size(); ++i) {
    const Node& node = nodes_[i];
    const std::size_t stream = node.streams[0];
    const c10::DeviceIndex device = streams_[stream].device_index();
    guard_.synchronizeEvent(node.stop);
    found.push_back(
        {i, guard_.elapsedTime(base_[stream], node.start, device), guard_.elapsedTime(node.start, node.stop, device)});
  }
  return found;
}

// The memory of a tensor that was made on another stream must outlast its use on this one.
void DevicePlan::hold(const c10::IValue& value, const Node& node) const {
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) hold(c10::IValue(tensor), node);
    return;
  }
  if (!value.isTensor()) return;
  const at::Tensor& tensor = value.toTensor();
  if (!tensor.defined() || tensor.device().type() != guard_.type() || !tensor.has_storage()) return;
  for (const std::size_t stream : node.streams) {
    if (streams_[stream].device() == tensor.device()) {
      guard_.recordDataPtrOnStream(tensor.storage().data_ptr(), streams_[stream]);
    }
  }
}

DevicePlan::Call::Call(DevicePlan& plan, std::uint32_t instruction, const torch::jit::Stack& arguments)
    : plan_(plan), instruction_(instruction), device_before_(plan.guard_.getDevice()) {
  Node& node = plan_.nodes_.at(instruction_);
  for (const std::size_t index : node.streams) {
    const c10::Stream stream = plan_.streams_[index];
    streams_before_.push_back(plan_.guard_.exchangeStream(stream));
    for (const std::uint32_t before : node.waits) plan_.wait(plan_.nodes_[before].marks, stream);
  }
  const c10::Stream first = plan_.streams_[node.streams[0]];
  plan_.guard_.setDevice(first.device());
  if (!node.waits.empty()) {
    for (const c10::IValue& value : arguments) plan_.hold(value, node);
  }
  if (plan_.capture_ == Capture::kUnderWay) {
    if (plan_.order_.empty()) plan_.record_in_graph(plan_.first_);
  } else if (plan_.timed_) {
    plan_.guard_.record(&node.start, first, first.device_index(), c10::EventFlag::BACKEND_DEFAULT);
  }
}

void DevicePlan::Call::launched() {
  Node& node = plan_.nodes_[instruction_];
  const c10::Stream first = plan_.streams_[node.streams[0]];
  if (plan_.capture_ == Capture::kUnderWay) {
    plan_.record_in_graph(node.stop);
    plan_.order_.push_back(instruction_);
  } else if (plan_.timed_) {
    plan_.guard_.record(&node.stop, first, first.device_index(), c10::EventFlag::BACKEND_DEFAULT);
  }
  for (Mark& mark : node.marks) plan_.record(mark, c10::EventFlag::PYTORCH_DEFAULT);
}

DevicePlan::Call::~Call() {
  for (auto stream = streams_before_.rbegin(); stream != streams_before_.rend(); ++stream) {
    plan_.guard_.exchangeStream(*stream);
  }
  plan_.guard_.uncheckedSetDevice(device_before_);
}

}  // namespace penstock
