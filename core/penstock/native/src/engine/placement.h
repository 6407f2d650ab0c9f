// Where the tensors of a plan lie: blocks of an arena, handed out while the plan's instructions run.
//
// Which results may share memory is decided outside (penstock/graph/analysis/buffers.py) and not believed here:
//  * A block is handed out only while no tensor is in it, nor in the blocks before it that it overlaps (its
//    `checks`); else the allocation is the ordinary one and the block is *blocked* for the rest of the run, so that
//    later blocks, which check only their nearest predecessors, see it. So is a block that an operator does not ask
//    for.
//  * A block is handed out again over its own living tensor (in place) only if that tensor is the operator's operand,
//    neither has another reference, and all operands are laid out as they were when the result was seen to be (this
//    last is TorchPlan's to check).
//  * A block that is occupied after a run, because an operator has kept a tensor, is abandoned: it is never handed out
//    again, and the arena's memory is left to that tensor and replaced.
//  * Memory outlives the plan and the arena as long as a tensor lies in it.
// So a wrong or outdated decision costs an allocation, never a result.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/allocator.h"

namespace penstock {

// Memory that several plans use in turn, never two at once. Grows to what the largest asks for.
class Arena {
 public:
  using Buffer = std::shared_ptr<char>;
  Arena() : Arena(nullptr) {}
  // Counted with another one: living() is then of both. `shared`: other processes of this host can map the memory.
  explicit Arena(const Arena* counted_with, bool shared = false);
  Buffer reserve(std::size_t nbytes);
  void release() { buffer_ = nullptr; }
  void forget(const Buffer& buffer);  // the next reserve() takes new memory, if this is the present one
  std::size_t size() const noexcept { return buffer_ ? size_ : 0; }
  // Bytes of all memory it has taken that is not freed: its own, and what tensors keep.
  std::int64_t living() const noexcept { return living_->load(std::memory_order_relaxed); }

 private:
  std::shared_ptr<std::atomic<std::int64_t>> living_;
  Buffer buffer_;
  std::size_t size_ = 0;
  const bool shared_ = false;
};

class Placement {
 public:
  // The first kHeader bytes of a block name its tenant.
  static constexpr std::size_t kHeader = 64;
  struct Block {
    std::size_t offset, nbytes;
    std::vector<std::uint32_t> checks;
  };
  // One allocation of an instruction: the `occurrence`-th one of `nbytes`. `operand`: position of the argument whose
  // memory it takes over, or -1.
  struct Entry {
    std::size_t nbytes;
    std::uint32_t occurrence, block;
    std::int32_t operand;
  };
  static constexpr std::size_t kMaxEntries = 16;  // of one instruction
  struct Counts {
    std::uint64_t planned = 0, handed_out = 0, unplanned = 0;  // the two last: of the last run
    std::uint64_t abandoned = 0, occupied = 0;
    std::int64_t unplanned_live = 0, unplanned_peak = 0;
  };

  // `entries`: by instruction. `lasting`: tensors stay in their slots from a run to the next, so the arena is this
  // plan's alone, and tensors are looked for before a run instead of after it. Raises std::invalid_argument.
  Placement(std::shared_ptr<Arena> arena, std::vector<Block> blocks, std::vector<std::vector<Entry>> entries,
            bool lasting);
  ~Placement();
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;

  static void leave(void* memory);  // what frees memory of a block

  void begin_run(std::size_t num_threads);
  void end_run();
  Counts counts() const;
  const Meter& meter() const noexcept { return *meter_; }
  bool takes_over(std::uint32_t instruction) const {
    return entries_[instruction].size() == 1 && entries_[instruction][0].operand >= 0;
  }

  // Open while an instruction's operator runs.
  class Call : public Request {
   public:
    Call(Placement& placement, std::uint32_t instruction, std::uint32_t thread);
    ~Call() override;
    c10::DataPtr allocate(std::size_t nbytes) override;
    // `operand`: what the entry that takes over memory names, if any; `holders`: its expected references.
    std::int32_t operand() const noexcept { return entries_.size() == 1 ? entries_[0].operand : -1; }
    // To be called only if the operands are laid out as observed.
    void offer(const at::Tensor& operand, std::size_t holders);

   private:
    Placement& placement_;
    const std::vector<Entry>& entries_;
    const std::uint32_t thread_;
    bool takes_over_ = false;
    std::uint32_t handed_out_ = 0;
    std::array<std::uint32_t, kMaxEntries> seen_;  // for each entry: allocations of its size so far
  };

 private:
  struct Tenants;
  struct alignas(64) PerThread {
    std::uint64_t handed_out = 0;
  };
  bool vacant(const Block& block, std::uint32_t index) const noexcept;
  void* hand_out(const Entry& entry, bool takes_over);
  void pass_over(const Entry& entry) noexcept;
  void block(std::uint32_t index) noexcept;
  void settle();
  void* address(std::uint32_t block) const noexcept;

  const std::shared_ptr<Arena> arena_;
  const std::vector<Block> blocks_;
  const std::vector<std::vector<Entry>> entries_;
  const bool lasting_;
  std::size_t nbytes_ = 0;
  std::uint64_t num_entries_ = 0;
  std::vector<char> abandoned_;
  Tenants* tenants_;
  char* base_ = nullptr;
  std::vector<PerThread> threads_;
  std::shared_ptr<Meter> meter_ = std::make_shared<Meter>();
  std::uint64_t unplanned_before_ = 0;
};

}  // namespace penstock
