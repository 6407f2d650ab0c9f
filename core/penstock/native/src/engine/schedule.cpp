#include "engine/schedule.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <string>

namespace penstock {

std::uint32_t Schedule::add(std::uint32_t op, std::int32_t affinity, bool on_host) {
  if (sealed_) throw std::invalid_argument("a sealed plan takes no more instructions");
  nodes_.push_back(Node{.op = op, .affinity = affinity, .on_host = on_host});
  has_host_ = has_host_ || on_host;
  return size() - 1;
}

void Schedule::edge(std::uint32_t before, std::uint32_t after) {
  if (sealed_) throw std::invalid_argument("a sealed plan takes no more edges");
  if (before >= size() || after >= size()) {
    throw std::out_of_range("edge " + std::to_string(before) + " -> " + std::to_string(after) + ", but the plan has " +
                            std::to_string(size()) + " instructions");
  }
  edges_.emplace_back(before, after);
}

void Schedule::seal() {
  if (sealed_) throw std::invalid_argument("the plan is sealed already");
  index_edges();
  sort_topologically();
  sealed_ = true;
}

void Schedule::index_edges() {
  std::sort(edges_.begin(), edges_.end());
  edges_.erase(std::unique(edges_.begin(), edges_.end()), edges_.end());
  for (Node& node : nodes_) node.num_predecessors = 0;
  successors_.clear();
  std::size_t edge = 0;
  for (std::uint32_t i = 0; i < size(); ++i) {
    nodes_[i].first_successor = static_cast<std::uint32_t>(edge);
    for (; edge < edges_.size() && edges_[edge].first == i; ++edge) {
      successors_.push_back(edges_[edge].second);
      ++nodes_[edges_[edge].second].num_predecessors;
    }
    nodes_[i].last_successor = static_cast<std::uint32_t>(edge);
  }
  waiting_ = std::make_unique<std::atomic<std::uint32_t>[]>(nodes_.size());
  roots_.clear();
  for (std::uint32_t i = 0; i < size(); ++i) {
    waiting_[i].store(nodes_[i].num_predecessors, std::memory_order_relaxed);
    if (nodes_[i].num_predecessors == 0) roots_.push_back(i);
  }
}

void Schedule::sort_topologically() {
  std::vector<std::uint32_t> unmet(nodes_.size());
  for (std::uint32_t i = 0; i < size(); ++i) unmet[i] = nodes_[i].num_predecessors;
  std::priority_queue<std::uint32_t, std::vector<std::uint32_t>, std::greater<>> ready(roots_.begin(), roots_.end());
  order_.clear();
  while (!ready.empty()) {
    const std::uint32_t instruction = ready.top();
    ready.pop();
    order_.push_back(instruction);
    const Node& node = nodes_[instruction];
    for (std::uint32_t k = node.first_successor; k < node.last_successor; ++k) {
      if (--unmet[successors_[k]] == 0) ready.push(successors_[k]);
    }
  }
  if (order_.size() != nodes_.size()) throw CycleError(find_cycle(unmet));
}

std::vector<std::uint32_t> Schedule::find_cycle(const std::vector<std::uint32_t>& unmet) const {
  // What is left over has a predecessor that is left over: walking backwards must come round.
  std::vector<std::uint32_t> blocker(nodes_.size(), 0);
  for (const auto& [before, after] : edges_) {
    if (unmet[before] != 0) blocker[after] = before;
  }
  std::uint32_t at = 0;
  while (unmet[at] == 0) ++at;
  for (std::uint32_t i = 0; i < size(); ++i) at = blocker[at];
  std::vector<std::uint32_t> cycle{at};
  for (std::uint32_t i = blocker[at]; i != at; i = blocker[i]) cycle.push_back(i);
  std::reverse(cycle.begin(), cycle.end());
  return cycle;
}

}  // namespace penstock
