#include "engine/allocator.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace penstock {
namespace {

// initial-exec: one load, where a library's default model calls a function.
__attribute__((tls_model("initial-exec"))) thread_local Request* open_request = nullptr;

void free_any(void* memory);

class PlanAllocator final : public c10::Allocator {
 public:
  explicit PlanAllocator(c10::Allocator* previous) : previous_(previous) {}

  c10::DataPtr allocate(std::size_t nbytes) override {
    Request* request = open_request;
    if (request == nullptr || nbytes == 0) [[likely]]
      return previous_->allocate(nbytes);
    return request->allocate(nbytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return previous_->raw_deleter() != nullptr ? &free_any : nullptr; }
  bool is_simple_data_ptr(const c10::DataPtr& memory) const override { return previous_->is_simple_data_ptr(memory); }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
  c10::Allocator& previous() { return *previous_; }

 private:
  c10::Allocator* const previous_;
};

// Never destroyed, nor is what follows: tensors that outlive the library's statics are freed through it.
PlanAllocator* installed = nullptr;

struct Metered {
  c10::DataPtr memory;
  std::shared_ptr<Meter> meter;
  std::size_t nbytes;
};
struct Shard {
  std::mutex lock;
  std::unordered_map<const void*, Metered> living;
};
struct Range {
  std::uintptr_t begin, end;
  c10::DeleterFnPtr leave;
};
constexpr std::size_t kShards = 16;
Shard* const shards = new Shard[kShards];
std::mutex& range_lock = *new std::mutex;
std::vector<Range>& ranges = *new std::vector<Range>;

Shard& shard_of(const void* memory) {
  return shards[(reinterpret_cast<std::uintptr_t>(memory) >> 6) % kShards];
}

// False if the memory is not metered.
bool free_if_metered(void* memory) {
  Shard& shard = shard_of(memory);
  std::unique_lock guard(shard.lock);
  const auto found = shard.living.extract(memory);
  guard.unlock();
  if (found.empty()) return false;
  found.mapped().meter->subtract(found.mapped().nbytes);
  if (open_request != nullptr) open_request->freed(memory);
  return true;
}

void free_metered(void* memory) {
  free_if_metered(memory);
}

c10::DeleterFnPtr range_of(const void* memory) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const std::lock_guard guard(range_lock);
  for (const Range& range : ranges) {
    if (range.begin <= address && address < range.end) return range.leave;
  }
  return nullptr;
}

// Only for raw allocations: tensors know how they are freed.
void free_any(void* memory) {
  if (memory == nullptr || free_if_metered(memory)) return;
  const c10::DeleterFnPtr leave = range_of(memory);
  if (leave != nullptr) {
    leave(memory);
    return;
  }
  installed->previous().raw_deleter()(memory);
}

}  // namespace

Request::Request() noexcept : outer_(std::exchange(open_request, this)) {}

Request::~Request() {
  open_request = outer_;
}

void install_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    installed = new PlanAllocator(c10::GetCPUAllocator());
    c10::SetCPUAllocator(installed, /*priority=*/UINT8_MAX);
  });
}

c10::DataPtr allocate_plainly(std::size_t nbytes) {
  install_allocator();
  return installed->previous().allocate(nbytes);
}

c10::DataPtr allocate_metered(std::size_t nbytes, std::shared_ptr<Meter> meter) {
  c10::DataPtr memory = installed->previous().allocate(nbytes);
  void* const address = memory.get();
  const c10::Device device = memory.device();
  meter->add(nbytes);
  Shard& shard = shard_of(address);
  const std::lock_guard guard(shard.lock);
  shard.living.insert_or_assign(address, Metered{std::move(memory), std::move(meter), nbytes});
  return {address, address, &free_metered, device};
}

void add_range(const void* begin, std::size_t nbytes, c10::DeleterFnPtr leave) {
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::lock_guard guard(range_lock);
  ranges.push_back({address, address + nbytes, leave});
}

void remove_range(const void* begin) {
  const auto starts = [begin](const Range& range) { return range.begin == reinterpret_cast<std::uintptr_t>(begin); };
  const std::lock_guard guard(range_lock);
  ranges.erase(std::remove_if(ranges.begin(), ranges.end(), starts), ranges.end());
}

}  // namespace penstock
