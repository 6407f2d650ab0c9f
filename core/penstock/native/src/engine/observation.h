// What the instructions of a plan allocate in one run, and which results keep it: what a placement is planned from.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/allocator.h"
#include "engine/layouts.h"

namespace penstock {

class Observation {
 public:
  struct Allocation {
    const void* memory;
    std::size_t nbytes;
    std::uint32_t occurrence;  // among the instruction's allocations of the same size
    bool freed = false;        // before the operator returned, by its own thread
    std::vector<std::pair<std::uint32_t, std::uint32_t>> results{};  // which keep it: return value, place in its list
    std::vector<std::uint32_t> twins{};  // arguments of the same type, sizes, strides and bytes as its only result
  };

  explicit Observation(std::size_t num_instructions) : allocations_(num_instructions), layouts_(num_instructions) {}
  const std::vector<std::vector<Allocation>>& allocations() const noexcept { return allocations_; }
  const Meter& meter() const noexcept { return *meter_; }
  // Of the arguments of an instruction whose result has a twin; else none.
  const std::optional<Layouts>& layouts(std::uint32_t instruction) const { return layouts_[instruction]; }

  // Open while an instruction's operator runs.
  class Call : public Request {
   public:
    Call(Observation& observation, std::uint32_t instruction, const torch::jit::Stack& arguments);
    c10::DataPtr allocate(std::size_t nbytes) override;
    void freed(const void* memory) noexcept override;
    void returned(const torch::jit::Stack& results);

   private:
    struct Layout {
      std::uint32_t position;
      c10::ScalarType type;
      std::vector<std::int64_t> sizes, strides;
      std::size_t nbytes;
      bool operator==(const Layout& other) const;
    };
    static Layout layout_of(const at::Tensor& tensor, std::uint32_t position);
    void keep(const at::Tensor& tensor, std::uint32_t value, std::uint32_t place);

    Observation& observation_;
    const std::uint32_t instruction_;
    std::vector<Allocation>& allocations_;
    std::optional<Layouts> layouts_;
    std::vector<Layout> arguments_;
  };

 private:
  std::vector<std::vector<Allocation>> allocations_;  // by instruction; each is written by the thread that runs it
  std::vector<std::optional<Layouts>> layouts_;       // likewise
  std::shared_ptr<Meter> meter_ = std::make_shared<Meter>();
};

}  // namespace penstock
