// What a session counts of its exchange, by server and block.
#include "ps/session.h"

namespace penstock::ps {
namespace {

std::int64_t bytes_of_parts(const Message& message) {
  std::int64_t sum = 0;
  for (const Part& part : message.parts) sum += static_cast<std::int64_t>(part.num_bytes);
  return sum;
}

}  // namespace

Counted Session::sums(std::size_t at) {
  const std::lock_guard guard(arming_);
  const Server& server = *servers_.at(at);
  const auto held = waits_.hold();
  Counted out;
  for (std::size_t i = 0; i < server.sums.size(); ++i) {
    out.emplace_back(i < server.blocks.size() ? server.blocks[i] : "", *server.sums[i]);
  }
  return out;
}

void Session::count(Server& server, const Message& sent, const Message& answer) {
  const auto held = waits_.hold();
  Sums& whole = sent.kind == Kind::kStep ? *server.sums.back() : *server.sums[sent.parts[0].block];
  whole.calls += 1;
  whole.staleness += answer.number;
  if (sent.kind != Kind::kStep) {
    whole.sent_bytes += bytes_of_parts(sent);
    whole.received_bytes += bytes_of_parts(answer);
    return;
  }
  for (const Part& part : sent.parts) {
    Sums& sums = *server.sums[part.block];
    sums.calls += part.role == Role::kValues ? 1 : 0;
    sums.sent_bytes += static_cast<std::int64_t>(part.num_bytes);
  }
  for (const auto& [block, sent_ahead] : server.ahead) {
    server.sums[block]->calls += 1;
    server.sums[block]->sent_bytes += static_cast<std::int64_t>(sent_ahead.second);
  }
  for (const Part& part : answer.parts) {
    if (part.block >= server.blocks.size()) continue;
    Sums& sums = *server.sums[part.block];
    sums.calls += 1;
    sums.received_bytes += static_cast<std::int64_t>(part.num_bytes);
  }
}

void Session::count_merges(const std::vector<Push>& pushes, std::size_t num) {
  const auto held = waits_.hold();
  for (const Push& one : pushes) {
    Server& server = *servers_.at(static_cast<std::size_t>(one.of->at[0]));
    const auto number = server.numbers.find(one.of->blocks[0]);
    if (number != server.numbers.end()) server.sums[number->second]->merges += static_cast<std::int64_t>(num) - 1;
  }
}

}  // namespace penstock::ps
