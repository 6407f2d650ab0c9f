// Devices that only write down what is asked of them: how tests see streams and events on a machine without a GPU.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace penstock {

// Streams: 2 d is the compute stream of device d, 2 d + 1 its exchange stream. Every function may be called from any
// thread; the log is in the order of the calls.
class PretendedDevices final : public c10::impl::DeviceGuardImplInterface {
 public:
  struct Entry {
    std::string what;  // "record", "wait", "call"
    std::int64_t stream;
    std::int64_t event;  // of a "call": the instruction; else the event's version
  };

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override;
  c10::Device getDevice() const override;
  void setDevice(c10::Device device) const override;
  void uncheckedSetDevice(c10::Device device) const noexcept override;
  c10::Stream getStream(c10::Device device) const override;
  c10::Stream getDefaultStream(c10::Device device) const override;
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override;
  c10::Stream exchangeStream(c10::Stream stream) const override;
  c10::DeviceIndex deviceCount() const noexcept override { return 8; }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override;
  void block(void* event, const c10::Stream& stream) const override;
  void synchronizeEvent(void*) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  double elapsedTime(void* start, void* stop, c10::DeviceIndex) const override;
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override;

  void called(std::uint32_t instruction) const;
  std::vector<Entry> log() const;
  std::int64_t events_alive() const;

 private:
  struct Event {
    std::int64_t version;
    std::chrono::steady_clock::time_point at;
  };
  mutable std::mutex lock_;
  mutable std::vector<Entry> log_;
  mutable std::int64_t versions_ = 0, alive_ = 0;
};

}  // namespace penstock
