// What the engine knows of a plan: which instruction waits for which. Torch-free.
//
// Invariant after seal(): the graph is acyclic, edges are sorted and single, and every counter holds the number of
// its instruction's predecessors whenever no run is in progress (a counter that reaches zero is set back at once, by
// the thread that brought it there; a failed run still walks the whole graph).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

namespace penstock {

// Thrown by seal(); holds the instructions of one cycle, in order.
class CycleError : public std::invalid_argument {
 public:
  explicit CycleError(std::vector<std::uint32_t> found)
      : std::invalid_argument("the instructions form a cycle"), cycle(std::move(found)) {}
  std::vector<std::uint32_t> cycle;
};

class Schedule {
 public:
  struct Node {
    std::uint32_t op;                   // reported in trace events
    std::int32_t affinity;              // worker to queue on (modulo the number of workers), or -1
    std::uint32_t first_successor = 0;  // into successors()
    std::uint32_t last_successor = 0;   // one past the last
    std::uint32_t num_predecessors = 0;
    bool on_host;  // runs on a host thread of its own
  };

  std::uint32_t add(std::uint32_t op, std::int32_t affinity, bool on_host);
  void edge(std::uint32_t before, std::uint32_t after);  // std::out_of_range if either does not exist
  void seal();                                           // CycleError

  bool sealed() const noexcept { return sealed_; }
  bool has_host() const noexcept { return has_host_; }
  std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(nodes_.size()); }
  const Node& node(std::uint32_t instruction) const noexcept { return nodes_[instruction]; }
  const std::uint32_t* successors() const noexcept { return successors_.data(); }
  const std::vector<std::uint32_t>& roots() const noexcept { return roots_; }
  // A topological order: of all that are ready, always the one that was added first.
  const std::vector<std::uint32_t>& order() const noexcept { return order_; }
  const std::vector<std::pair<std::uint32_t, std::uint32_t>>& edges() const noexcept { return edges_; }

  // Counts one finished predecessor of `instruction`; true if it was the last.
  bool arrive(std::uint32_t instruction) noexcept {
    const std::uint32_t expected = nodes_[instruction].num_predecessors;
    if (expected == 1) return true;
    std::atomic<std::uint32_t>& waiting = waiting_[instruction];
    if (waiting.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
    waiting.store(expected, std::memory_order_relaxed);  // for the next run, which starts after this one has ended
    return true;
  }

 private:
  void index_edges();
  void sort_topologically();
  std::vector<std::uint32_t> find_cycle(const std::vector<std::uint32_t>& unmet) const;

  std::vector<Node> nodes_;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> edges_;
  std::vector<std::uint32_t> successors_;
  std::vector<std::uint32_t> roots_;
  std::vector<std::uint32_t> order_;
  std::unique_ptr<std::atomic<std::uint32_t>[]> waiting_;
  bool has_host_ = false;
  bool sealed_ = false;
};

}  // namespace penstock
