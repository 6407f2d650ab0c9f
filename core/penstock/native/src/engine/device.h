// What a plan over devices with streams needs beside its order: a stream for each call, events where an edge leaves a
// stream, and times taken by the device.
//
// Streams: each device has one compute stream (its default stream, so that copies of feeds and fetches are in order
// with it) and one exchange stream. An instruction of a replica runs on its device's compute stream; an exchange
// (reduce, broadcast, gather) runs on the exchange streams of all devices.
//
// Invariants
//  * An edge within a stream costs nothing: the engine launches the second after the first was launched.
//  * An edge between streams is an event: recorded behind the first, waited for before the second. So whatever the
//    schedule orders is ordered on the devices, and an exchange overlaps what does not depend on it.
//  * begin(): exchange streams wait for all that was put on compute streams before. end(): compute streams wait for all
//    exchanges, so that the next user of the compute streams sees the whole step.
//  * A tensor that a call on another stream reads is recorded there: its memory is not given out again before.
//
// A plan of one stream may be captured as a CUDA graph (capture_on, exec/step_graphs.py). Its instructions then run on
// the stream that captures, and each one's end is an event of the graph, whose time is set anew by each replay; one
// starts where the one launched before it ends.
// An instruction's marks are touched by its own call, and after it (the engine orders them) by its successors' calls.
// Knows devices only as c10::impl::DeviceGuardImplInterface: one build serves CPU wheels and CUDA wheels.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace penstock {

class DevicePlan {
 public:
  using Guard = c10::impl::DeviceGuardImplInterface;

  struct Time {
    std::uint32_t instruction;
    double start_ms;  // since begin()
    double duration_ms;
  };

  // `devices[r]` is replica r's; `guard` outlives the plan (torch's are never destroyed).
  DevicePlan(const Guard& guard, const std::vector<c10::DeviceIndex>& devices, bool timed);
  ~DevicePlan();
  DevicePlan(const DevicePlan&) = delete;
  DevicePlan& operator=(const DevicePlan&) = delete;

  // Says where the next instruction runs; once for each, in order. std::invalid_argument for an unknown replica.
  void place(std::int32_t replica, bool exchange);
  // All edges of the plan, after all instructions.
  void seal(const std::vector<std::pair<std::uint32_t, std::uint32_t>>& edges);

  void begin();
  void end();
  // After a failed step: wait until the devices have done what was launched.
  void abandon();
  // Whether the devices have done the last step.
  bool ended() const;
  // When each instruction of the last step ran, by the devices' clocks. Waits for it.
  std::vector<Time> times();

  // cudaEventRecordWithFlags of the CUDA runtime that torch has loaded, and what a stream is to it.
  struct Runtime {
    int (*record)(void* event, void* stream, unsigned flags) = nullptr;
    void* stream = nullptr;
  };

  // Run every instruction on `stream` from now on: as usual, or between the next two calls under a capture, whose
  // replays are launched there too.
  // std::invalid_argument unless the plan has one device and no exchanges.
  void capture_on(c10::Stream stream, Runtime runtime);
  // The next run is captured; `end_capture` says that it was: runs are replays from then on, and times() theirs.
  void begin_capture();
  void end_capture();

  // A call in progress: its streams are current on this thread.
  class Call {
   public:
    Call(DevicePlan& plan, std::uint32_t instruction, const torch::jit::Stack& arguments);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    // The call was launched: record what others wait for.
    void launched();

   private:
    DevicePlan& plan_;
    std::uint32_t instruction_;
    c10::Device device_before_;
    std::vector<c10::Stream> streams_before_;
  };

 private:
  struct Mark {  // an event and the stream behind whose work it was recorded
    void* event = nullptr;
    c10::Stream stream;
  };
  struct Node {
    std::vector<std::size_t> streams{};  // of streams_; the first is where times are taken
    std::vector<std::uint32_t> waits{};  // instructions on other streams that come right before
    std::vector<Mark> marks{};           // empty unless another stream waits
    void* start = nullptr;
    void* stop = nullptr;
  };

  std::size_t stream_of(c10::Stream stream);
  void record_in_graph(void* event);
  void record(Mark& mark, c10::EventFlag flag);
  void wait(const std::vector<Mark>& marks, c10::Stream stream) const;
  void hold(const c10::IValue& value, const Node& node) const;
  void destroy(void* event, c10::DeviceIndex device) const noexcept;

  const Guard& guard_;
  const bool timed_;
  std::vector<c10::Stream> streams_;   // all of them, each once
  std::vector<std::size_t> compute_;   // replica -> streams_
  std::vector<std::size_t> exchange_;  // one for each device
  std::vector<Mark> step_marks_;       // compute streams at begin(), exchange streams at end()
  std::vector<void*> base_;            // timed events at begin(), one for each stream
  std::vector<Node> nodes_;
  bool ran_ = false;
  Runtime runtime_;
  enum class Capture : std::uint8_t { kNone, kUnderWay, kDone };
  Capture capture_ = Capture::kNone;
  void* first_ = nullptr;             // the start of a captured plan's first instruction
  std::vector<std::uint32_t> order_;  // in which a captured plan's instructions were launched
};

}  // namespace penstock
