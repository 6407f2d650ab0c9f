#include "engine/placement.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace penstock {
namespace {

constexpr std::uint32_t kBlocked = 1u << 30;
constexpr std::uint32_t kOrphan = 1u << 31;
constexpr std::uint32_t kCount = kBlocked - 1;  // the other bits: tensors that live in the block
constexpr std::int64_t kPlans = std::int64_t{1} << 40;

}  // namespace

// The tenants of blocks. Owned by the placement, until that gives it up while tensors live: then by the last of them.
struct Placement::Tenants {
  struct alignas(16) Tenancy {
    std::atomic<std::uint32_t> state{0};
    Tenants* tenants = nullptr;
  };

  explicit Tenants(std::size_t size) : tenancies(size) {
    for (Tenancy& tenancy : tenancies) tenancy.tenants = this;
  }

  // A deleter of tensors: their memory's header names the tenancy.
  static void leave(void* memory) {
    Tenancy* tenancy;
    std::memcpy(&tenancy, static_cast<char*>(memory) - kHeader, sizeof tenancy);
    const std::uint32_t before = tenancy->state.fetch_sub(1, std::memory_order_acq_rel);
    // Without the mark nothing of the tenants may be touched any more: they may be gone.
    if ((before & kOrphan) == 0) return;
    Tenants* tenants = tenancy->tenants;
    if (tenants->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete tenants;
  }

  // The placement's last touch. A tensor that dies meanwhile either is not counted, or sees the mark.
  static void abandon(Tenants* tenants) {
    std::int64_t living = 0;
    for (Tenancy& tenancy : tenants->tenancies) {
      living += tenancy.state.fetch_or(kOrphan, std::memory_order_acq_rel) & kCount;
    }
    if (tenants->owners.fetch_sub(kPlans - living, std::memory_order_acq_rel) == kPlans - living) delete tenants;
  }

  std::vector<Tenancy> tenancies;
  Arena::Buffer buffer;
  std::atomic<std::int64_t> owners{kPlans};
};

Arena::Arena(const Arena* counted_with, bool shared)
    : living_(counted_with != nullptr ? counted_with->living_ : std::make_shared<std::atomic<std::int64_t>>(0)),
      shared_(shared) {}

Arena::Buffer Arena::reserve(std::size_t nbytes) {
  if (buffer_ && size_ >= nbytes) return buffer_;
  buffer_ = nullptr;  // before the new one is taken
  auto memory = std::make_shared<c10::DataPtr>(shared_ ? allocate_shared(nbytes) : allocate_plainly(nbytes));
  char* const begin = static_cast<char*>(memory->get());
  add_range(begin, nbytes, &Placement::leave);
  const auto counted = static_cast<std::int64_t>(nbytes);
  buffer_ = Buffer(begin, [memory, living = living_, counted](char* address) {
    remove_range(address);
    living->fetch_sub(counted, std::memory_order_relaxed);
  });
  living_->fetch_add(counted, std::memory_order_relaxed);
  size_ = nbytes;
  return buffer_;
}

void Arena::forget(const Buffer& buffer) {
  if (buffer_ == buffer) buffer_ = nullptr;
}

void Placement::leave(void* memory) {
  Tenants::leave(memory);
}

Placement::Placement(std::shared_ptr<Arena> arena, std::vector<Block> blocks, std::vector<std::vector<Entry>> entries,
                     bool lasting)
    : arena_(std::move(arena)),
      blocks_(std::move(blocks)),
      entries_(std::move(entries)),
      lasting_(lasting),
      abandoned_(blocks_.size(), 0) {
  for (const Block& block : blocks_) {
    nbytes_ = std::max(nbytes_, block.offset + block.nbytes);
    for (const std::uint32_t other : block.checks) {
      if (other >= blocks_.size()) throw std::invalid_argument("a block checks block " + std::to_string(other));
    }
  }
  for (const std::vector<Entry>& of_instruction : entries_) {
    num_entries_ += of_instruction.size();
    if (of_instruction.size() > kMaxEntries) throw std::invalid_argument("an instruction has more than 16 entries");
    for (const Entry& entry : of_instruction) {
      if (entry.block >= blocks_.size() || blocks_[entry.block].nbytes < entry.nbytes + kHeader) {
        throw std::invalid_argument("an entry of " + std::to_string(entry.nbytes) + " bytes does not fit block " +
                                    std::to_string(entry.block));
      }
    }
  }
  tenants_ = new Tenants(blocks_.size());
}

Placement::~Placement() {
  Tenants::abandon(tenants_);
}

void Placement::begin_run(std::size_t num_threads) {
  if (lasting_) settle();
  threads_.assign(num_threads, {});
  unplanned_before_ = meter_->allocations();
  if (blocks_.empty()) return;
  tenants_->buffer = arena_->reserve(nbytes_);
  base_ = tenants_->buffer.get();
}

void Placement::end_run() {
  if (!lasting_) settle();
}

// Between runs, on one thread. Nothing holds the buffer afterwards but the arena, and tensors in it: the arena
// can grow for another plan without keeping what it was.
void Placement::settle() {
  bool occupied = false;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    std::atomic<std::uint32_t>& state = tenants_->tenancies[i].state;
    const std::uint32_t now = state.load(std::memory_order_acquire);
    if (now == 0) continue;
    if ((now & kCount) != 0) abandoned_[i] = 1;
    occupied = occupied || (now & kCount) != 0;
    state.fetch_and(~kBlocked, std::memory_order_relaxed);
  }
  base_ = nullptr;
  if (!occupied) {
    tenants_->buffer = nullptr;
    return;
  }
  arena_->forget(tenants_->buffer);
  Tenants* const left = std::exchange(tenants_, new Tenants(blocks_.size()));
  Tenants::abandon(left);
}

bool Placement::vacant(const Block& block, std::uint32_t index) const noexcept {
  const std::vector<Tenants::Tenancy>& all = tenants_->tenancies;
  if (all[index].state.load(std::memory_order_acquire) != 0) return false;
  for (const std::uint32_t other : block.checks) {
    if (all[other].state.load(std::memory_order_acquire) != 0) return false;
  }
  return true;
}

void* Placement::address(std::uint32_t block) const noexcept {
  return base_ + blocks_[block].offset + kHeader;
}

void Placement::block(std::uint32_t index) noexcept {
  tenants_->tenancies[index].state.fetch_or(kBlocked, std::memory_order_acq_rel);
}

// A block that its instruction did not ask for: later ones rely on it to have looked at what lies before it.
void Placement::pass_over(const Entry& entry) noexcept {
  if (entry.operand < 0 && !vacant(blocks_[entry.block], entry.block)) block(entry.block);
}

// Null if the block cannot be had now. Moving in is one step from what was seen: of two that want a block, one gets it.
void* Placement::hand_out(const Entry& entry, bool takes_over) {
  Tenants::Tenancy* const tenancy = &tenants_->tenancies[entry.block];
  std::uint32_t expected = 0;
  if (entry.operand < 0) {
    const bool free = vacant(blocks_[entry.block], entry.block);
    if (free && abandoned_[entry.block]) return nullptr;  // it passes on that its checks are free
    if (!free || !tenancy->state.compare_exchange_strong(expected, 1, std::memory_order_acq_rel)) {
      block(entry.block);
      return nullptr;
    }
  } else {
    expected = 1;
    if (!takes_over || !tenancy->state.compare_exchange_strong(expected, 2, std::memory_order_acq_rel)) return nullptr;
  }
  char* const memory = static_cast<char*>(address(entry.block));
  std::memcpy(memory - kHeader, &tenancy, sizeof tenancy);
  return memory;
}

Placement::Counts Placement::counts() const {
  Counts counts{.planned = num_entries_,
                .unplanned = meter_->allocations() - unplanned_before_,
                .unplanned_live = meter_->live(),
                .unplanned_peak = meter_->peak()};
  for (const PerThread& thread : threads_) counts.handed_out += thread.handed_out;
  for (const char gone : abandoned_) counts.abandoned += gone != 0;
  for (const Tenants::Tenancy& tenancy : tenants_->tenancies) counts.occupied += (tenancy.state.load() & kCount) != 0;
  return counts;
}

Placement::Call::Call(Placement& placement, std::uint32_t instruction, std::uint32_t thread)
    : placement_(placement), entries_(placement.entries_[instruction]), thread_(thread) {
  for (std::size_t i = 0; i < entries_.size(); ++i) seen_[i] = 0;
}

Placement::Call::~Call() {
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (seen_[i] <= entries_[i].occurrence) placement_.pass_over(entries_[i]);
  }
  placement_.threads_[thread_].handed_out += handed_out_;
}

void Placement::Call::offer(const at::Tensor& operand, std::size_t holders) {
  if (!operand.defined() || operand.use_count() != holders) return;
  const c10::Storage& storage = operand.unsafeGetTensorImpl()->unsafe_storage();
  takes_over_ = storage && storage.use_count() == 1 && storage.data() == placement_.address(entries_[0].block);
}

c10::DataPtr Placement::Call::allocate(std::size_t nbytes) {
  const Entry* found = nullptr;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].nbytes == nbytes && seen_[i]++ == entries_[i].occurrence) found = &entries_[i];
  }
  void* const memory = found != nullptr ? placement_.hand_out(*found, takes_over_) : nullptr;
  if (memory == nullptr) return allocate_metered(nbytes, placement_.meter_);
  ++handed_out_;
  return {memory, memory, &Tenants::leave, c10::Device(c10::DeviceType::CPU)};
}

}  // namespace penstock
