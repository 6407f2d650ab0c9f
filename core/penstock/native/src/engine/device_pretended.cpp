#include "engine/device_pretended.h"

#include <array>

namespace penstock {
namespace {

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, 8> current_stream{0, 0, 0, 0, 0, 0, 0, 0};

std::int64_t number(const c10::Stream& stream) {
  return 2 * stream.device_index() + stream.id();
}

}  // namespace

c10::Device PretendedDevices::exchangeDevice(c10::Device device) const {
  const c10::Device before = getDevice();
  setDevice(device);
  return before;
}

c10::Device PretendedDevices::getDevice() const {
  return {type(), current_device};
}

void PretendedDevices::setDevice(c10::Device device) const {
  current_device = device.index();
}

void PretendedDevices::uncheckedSetDevice(c10::Device device) const noexcept {
  current_device = device.index();
}

c10::Stream PretendedDevices::getStream(c10::Device device) const {
  return c10::Stream(c10::Stream::UNSAFE, device, current_stream.at(static_cast<std::size_t>(device.index())));
}

c10::Stream PretendedDevices::getDefaultStream(c10::Device device) const {
  return c10::Stream(c10::Stream::UNSAFE, device, 0);
}

c10::Stream PretendedDevices::getStreamFromGlobalPool(c10::Device device, bool) const {
  return c10::Stream(c10::Stream::UNSAFE, device, 1);
}

c10::Stream PretendedDevices::exchangeStream(c10::Stream stream) const {
  const c10::Stream before = getStream(stream.device());
  current_stream.at(static_cast<std::size_t>(stream.device_index())) = stream.id();
  return before;
}

void PretendedDevices::record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const {
  const std::lock_guard guard(lock_);
  if (*event == nullptr) {
    *event = new Event{};
    ++alive_;
  }
  *static_cast<Event*>(*event) = {++versions_, std::chrono::steady_clock::now()};
  const bool timing = flag == c10::EventFlag::BACKEND_DEFAULT;
  log_.push_back({timing ? "time" : "record", number(stream), versions_});
}

void PretendedDevices::block(void* event, const c10::Stream& stream) const {
  const std::lock_guard guard(lock_);
  log_.push_back({"wait", number(stream), static_cast<const Event*>(event)->version});
}

double PretendedDevices::elapsedTime(void* start, void* stop, c10::DeviceIndex) const {
  const std::chrono::duration<double, std::milli> passed =
      static_cast<const Event*>(stop)->at - static_cast<const Event*>(start)->at;
  return passed.count();
}

void PretendedDevices::destroyEvent(void* event, c10::DeviceIndex) const noexcept {
  const std::lock_guard guard(lock_);
  --alive_;
  delete static_cast<Event*>(event);
}

void PretendedDevices::called(std::uint32_t instruction) const {
  const std::lock_guard guard(lock_);
  for (c10::DeviceIndex device = 0; device < deviceCount(); ++device) {
    log_.push_back({"call", number(getStream({type(), device})), instruction});
  }
}

std::vector<PretendedDevices::Entry> PretendedDevices::log() const {
  const std::lock_guard guard(lock_);
  return log_;
}

std::int64_t PretendedDevices::events_alive() const {
  const std::lock_guard guard(lock_);
  return alive_;
}

}  // namespace penstock
