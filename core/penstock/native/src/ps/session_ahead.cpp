// What a session sends of a step before it is all there.
#include <algorithm>
#include <iterator>
#include <utility>

#include "ps/session.h"
#include "ps/tensors.h"

namespace penstock::ps {
namespace {

// Of the dense gradients of a step, and of what else it has: less is not worth a message of its own.
constexpr std::size_t kApart = std::size_t{64} << 10;
// Of dense gradients that are all there, and leave one message after the other so that the first are answered while the
// next travel: as the groups of `graph/passes/send_ahead.py`.
constexpr std::size_t kGroup = std::size_t{256} << 10;

// Where to cut parts [0, count): the ends of groups of at least kGroup, what is left over belongs to the last.
std::vector<std::size_t> groups_of(const std::vector<Part>& parts, std::size_t count) {
  std::vector<std::size_t> ends;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < count; ++i) {
    bytes += parts[i].num_bytes;
    if (bytes >= kGroup) {
      ends.push_back(i + 1);
      bytes = 0;
    }
  }
  if (count != 0 && (ends.empty() || bytes >= kApart)) {
    ends.push_back(count);
  } else if (count != 0) {
    ends.back() = count;
  }
  return ends;
}

}  // namespace

// False: nothing may be sent.
bool Session::add_ahead(const std::vector<std::string>& blocks, at::IntArrayRef at,
                        const std::vector<at::Tensor>& values, Sent& out) {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const auto to = static_cast<std::size_t>(at[i]);
    Server& server = *servers_.at(to);
    if (server.local || server.lines[0].channel->shares()) continue;  // its bytes cost less than one more message
    const auto number = server.numbers.find(blocks[i]);
    if (number == server.numbers.end() || !travels(values[i])) return false;
    if (server.ahead.contains(number->second)) {  // of a step that was given up
      end_ahead(false);
      return false;
    }
    add(of(out, to, Kind::kAhead), number->second, Role::kValues, values[i]);
  }
  return have_encodings(out);
}

std::int64_t Session::send_ahead(const std::vector<std::string>& blocks, at::IntArrayRef at,
                                 const std::vector<at::Tensor>& values) {
  const std::lock_guard one_at_a_time(stepping_);
  Sent out(servers_.size());
  if (!is_armed() || is_left_ || meeting_->is_open() || !add_ahead(blocks, at, values, out)) return 0;
  std::int64_t sent = 0;
  for (std::size_t to = 0; to < out.size(); ++to) {
    if (!out[to]) continue;
    send_ahead_to(to, *std::move(out[to]));
    if (sent == 0) ahead_.push_back(sent = next_number());
  }
  return sent;
}

// The server is asked for the values of blocks as soon as it has them: it may then answer in parts.
void Session::send_ahead_to(std::size_t at, Outgoing out) {
  Server& server = *servers_[at];
  for (const Part& part : out.message.parts) server.ahead[part.block] = {part.data, part.num_bytes};
  out.message.round = sync_ ? server.round.load() : 0;
  out.message.reads = server.reads;
  if (server.num_ahead == 0 && !server.reads.empty()) {
    server.inbox.begin(server.lines[0].channel, out.message.round);
  }
  ++server.num_ahead;
  server.outbox.send(server.lines[0].channel, std::move(out.message), std::move(out.kept), limit_s_);
}

// The rest of a step's dense gradients leave before its rows, in groups, so that they are answered while those travel.
// Without rows the last group is the step's message.
void Session::send_dense_first(Sent& out) {
  for (std::size_t at = 0; at < out.size(); ++at) {
    Server& server = *servers_[at];
    if (!out[at] || server.local || server.lines[0].channel->shares() || server.reads.empty()) continue;
    std::vector<Part>& parts = out[at]->message.parts;
    const auto is_row = [](const Part& one) { return one.role == Role::kRows; };
    const auto num_dense = static_cast<std::size_t>(std::find_if(parts.begin(), parts.end(), is_row) - parts.begin());
    std::vector<std::size_t> ends = groups_of(parts, num_dense);
    std::size_t other_bytes = 0, dense_bytes = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) (i < num_dense ? dense_bytes : other_bytes) += parts[i].num_bytes;
    if (!ends.empty() && other_bytes < kApart) ends.pop_back();
    if (ends.empty() || dense_bytes < kApart) continue;
    std::size_t begin = 0;
    for (const std::size_t end : ends) {
      Outgoing first;
      first.message = {.kind = Kind::kAhead, .trainer = sender_.trainer, .epoch = sender_.epoch};
      for (; begin < end; ++begin) first.message.parts.push_back(std::move(parts[begin]));
      first.kept = out[at]->kept;
      send_ahead_to(at, std::move(first));
    }
    parts.erase(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(begin));
  }
}

// What was sent ahead belongs to this step, and has left.
bool Session::has_left(const Sent& out) {
  bool well = true;
  for (std::size_t at = 0; at < servers_.size(); ++at) {
    Server& server = *servers_[at];
    if (server.num_ahead == 0) continue;
    const auto sending = out[at] ? wait_for(server, out[at]->message) : std::optional<Waits::One>{};
    well = server.outbox.finish() && out[at] && well;
  }
  return well;
}

// The open step is over. If it was not done, servers must not wait for the rest of what they have of it.
void Session::end_ahead(bool well) {
  for (std::size_t at = 0; at < servers_.size(); ++at) {
    Server& server = *servers_[at];
    if (server.num_ahead == 0) continue;
    if (!well) {
      disarm(at);
      server.outbox.finish();
      server.inbox.drop();
    }
    server.num_ahead = 0;
    server.ahead.clear();
  }
  ahead_.clear();
}

}  // namespace penstock::ps
