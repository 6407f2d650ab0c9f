// What a session sends of a step before it is all there.
#include <utility>

#include "ps/session.h"
#include "ps/tensors.h"

namespace penstock::ps {

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
  if (!is_armed() || is_left_ || !add_ahead(blocks, at, values, out)) return 0;
  std::int64_t sent = 0;
  for (std::size_t to = 0; to < out.size(); ++to) {
    if (!out[to]) continue;
    Server& server = *servers_[to];
    for (const Part& part : out[to]->message.parts) server.ahead[part.block] = {part.data, part.num_bytes};
    ++server.num_ahead;
    server.outbox.send(server.lines[0].channel, std::move(out[to]->message), std::move(out[to]->kept), limit_s_);
    if (sent == 0) ahead_.push_back(sent = next_number());
  }
  return sent;
}

// What was sent ahead belongs to this step, and has left.
bool Session::has_left(const Sent& out) {
  bool well = true;
  for (std::size_t at = 0; at < servers_.size(); ++at) {
    if (servers_[at]->num_ahead != 0) well = servers_[at]->outbox.finish() && out[at] && well;
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
    }
    server.num_ahead = 0;
    server.ahead.clear();
  }
  ahead_.clear();
}

}  // namespace penstock::ps
