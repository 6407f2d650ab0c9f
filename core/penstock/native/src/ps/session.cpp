#include "ps/session.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "ps/errors.h"
#include "ps/tensors.h"

namespace penstock::ps {
namespace {

// The async step of this thread that failed after it was sent.
struct Failed {
  const Session* session = nullptr;
  std::int64_t number = 0;
};
thread_local Failed failed_here;

bool has_sizes(const Part& part, const at::Tensor& like) {
  return part.dtype == static_cast<std::int8_t>(like.scalar_type()) && like.sizes() == at::IntArrayRef(part.sizes);
}

// Of a block, if the answer has it.
const Part* part_of(const std::optional<Message>& answer, std::uint32_t block) {
  const Part* found = nullptr;
  if (answer) {
    for (const Part& one : answer->parts) {
      if (one.block == block) found = &one;
    }
  }
  return found;
}

}  // namespace

std::int64_t next_number() {
  static std::atomic<std::int64_t> last{0};
  return ++last;
}

Session::Session(Sender sender, bool sync, double limit_s, double lease_s, std::size_t num_servers)
    : sender_(sender),
      sync_(sync),
      limit_s_(limit_s),
      next_([this](const std::string&, const at::Tensor& ids, const Placement& of,
                   at::Tensor& rows) { return look_up_ahead(ids, of, rows); },
            [this] { return known_rounds(); }, kNumLookUps) {
  for (std::size_t i = 0; i < num_servers; ++i) {
    servers_.push_back(std::make_unique<Server>());
    servers_.back()->lease_s = lease_s;
  }
}

Session::~Session() {
  for (std::size_t at = 0; at < servers_.size(); ++at) disarm(at);  // a lookup in the background ends
  next_.close();
}

bool Session::arm(std::size_t at, std::array<std::shared_ptr<Channel>, kNumLines> channels,
                  std::vector<std::string> blocks, std::int64_t round, bool local) {
  Server& server = *servers_.at(at);
  if (!server.blocks.empty() && server.blocks != blocks) return false;
  // In the order in which operators take them: one that fails holds a line and disarms.
  const std::lock_guard steps(stepping_);
  end_ahead(false);
  std::vector<std::unique_lock<std::mutex>> used;
  for (Server::Line& line : server.lines) used.emplace_back(line.lock);
  const std::lock_guard guard(arming_);
  for (std::size_t i = 0; i < kNumLines; ++i) server.lines[i].channel = std::move(channels[i]);
  server.answer.reset();
  server.answered.clear();
  if (server.blocks.empty()) {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      server.numbers.emplace(blocks[i], static_cast<std::uint32_t>(i));
      server.sums.push_back(std::make_unique<Sums>());
    }
    server.sums.push_back(std::make_unique<Sums>());
    server.blocks = std::move(blocks);
  }
  server.local = local;
  reached(at, round);
  next_.forget();  // the server may be another process by now
  server.sent_at = server.answered_at = now_s();
  if (!server.armed) ++num_armed_;
  server.armed = true;
  return true;
}

void Session::disarm(std::size_t at) noexcept {
  const std::lock_guard guard(arming_);
  Server& server = *servers_[at];
  if (!server.armed) return;
  server.armed = false;
  --num_armed_;
  for (Server::Line& line : server.lines) {
    if (line.channel != nullptr) line.channel->break_off();
  }
  next_.forget();  // an answer may be lost that ends a round
}

void Session::reached(std::size_t at, std::int64_t round) {
  std::atomic<std::int64_t>& known = servers_.at(at)->round;
  std::int64_t before = known.load();
  while (before < round && !known.compare_exchange_weak(before, round)) continue;
}

void Session::renewed(std::size_t at, double sent_at) {
  std::atomic<double>& known = servers_.at(at)->renewed_at;
  double before = known.load();
  while (before < sent_at && !known.compare_exchange_weak(before, sent_at)) continue;
}

// None, if a lease may have run out.
std::vector<std::int64_t> Session::known_rounds() const {
  std::vector<std::int64_t> all;
  for (const std::unique_ptr<Server>& server : servers_) {
    all.push_back(server->round.load());
    if (now_s() - server->renewed_at.load() >= server->lease_s.load()) return {};
  }
  return all;
}

// ---------------------------------------------------------------- what is sent

Session::Outgoing& Session::of(Sent& out, std::size_t server, Kind kind) {
  std::optional<Outgoing>& found = out[server];
  if (!found) {
    found.emplace();
    found->message.kind = kind;
    found->message.trainer = sender_.trainer;
    found->message.epoch = sender_.epoch;
  }
  return *found;
}

Part& Session::part(Outgoing& to, std::uint32_t block, Role role, at::ScalarType dtype,
                    std::vector<std::int64_t> sizes) {
  Part& part = to.message.parts.emplace_back();
  part.block = block;
  part.role = role;
  part.dtype = static_cast<std::int8_t>(dtype);
  part.num_bytes = c10::elementSize(dtype);
  for (const std::int64_t size : sizes) part.num_bytes *= static_cast<std::size_t>(size);
  part.sizes = std::move(sizes);
  return part;
}

void Session::add(Outgoing& to, std::uint32_t block, Role role, at::Tensor tensor) {
  part(to, block, role, tensor.scalar_type(), tensor.sizes().vec()).data =
      static_cast<const char*>(tensor.const_data_ptr());
  to.kept.push_back(std::move(tensor));
}

bool Session::add_blocks(const Push& push, Sent& out) {
  for (std::size_t i = 0; i < push.of->blocks.size(); ++i) {
    const auto at = static_cast<std::size_t>(push.of->at[i]);
    const auto number = servers_.at(at)->numbers.find(push.of->blocks[i]);
    if (number == servers_[at]->numbers.end() || !travels(push.values[i])) return false;
    const auto ahead = servers_[at]->ahead.find(number->second);
    if (ahead == servers_[at]->ahead.end()) {
      add(of(out, at, Kind::kStep), number->second, Role::kValues, push.values[i]);
    } else if (ahead->second.first != push.values[i].const_data_ptr()) {
      return false;
    }
  }
  return true;
}

bool Session::parts_of(const Placement& table, Parts& out, bool& local) {
  const bool one_name = table.heights.empty() && table.blocks.size() == 1;
  local = table.at.size() == 1;
  for (std::size_t i = 0; i < table.at.size(); ++i) {
    const auto at = static_cast<std::size_t>(table.at[i]);
    const Server& server = *servers_.at(at);
    const auto number = server.numbers.find(table.blocks[one_name ? 0 : i]);
    if (number == server.numbers.end()) return false;
    out.at.push_back(static_cast<std::uint32_t>(at));
    out.blocks.push_back(number->second);
    local = local && server.local;
  }
  if (!table.heights.empty()) {
    out.firsts.push_back(0);
    for (const std::int64_t height : table.heights) out.firsts.push_back(out.firsts.back() + height);
  }
  return true;
}

bool Session::add_rows(const Push& push, Sent& out) {
  Parts parts;
  bool local = false;
  const bool fit = !push.rows.empty() && std::all_of(push.rows.begin(), push.rows.end(), is_sparse_gradient);
  if (!fit || !parts_of(*push.of, parts, local)) return false;
  if (local && servers_[parts.at[0]]->lines[0].channel->shares()) {  // finding duplicates costs more than bringing them
    add_pieces(of(out, parts.at[0], Kind::kStep), parts.blocks[0], push.rows);
    return true;
  }
  const Columns whole = joined(push.rows);
  if (local) {
    Outgoing& to = of(out, parts.at[0], Kind::kStep);
    add(to, parts.blocks[0], Role::kRows, whole.ids);
    add(to, parts.blocks[0], Role::kValues, whole.matrix);
    return true;
  }
  return add_sums(parts, whole, out);
}

// The pieces where they are, copied once: into the body.
void Session::add_pieces(Outgoing& to, std::uint32_t block, const std::vector<Columns>& pieces) {
  std::int64_t count = 0;
  for (const Columns& one : pieces) count += one.ids.numel();
  const std::int64_t width = pieces[0].width;
  Part& ids = part(to, block, Role::kRows, at::kLong, {count});
  for (const Columns& one : pieces) ids.runs.push_back(runs_of(one.ids));
  Part& values = part(to, block, Role::kValues, at::kFloat, {count, width});
  for (const Columns& one : pieces) {
    values.runs.push_back(runs_of(one));
    to.kept.push_back(one.ids);
    to.kept.push_back(one.matrix);
  }
}

// Duplicates are summed, and each server gets its part.
bool Session::add_sums(const Parts& parts, const Columns& whole, Sent& out) {
  const at::Tensor &rows = whole.ids, &values = whole.matrix;
  thread_local Cut cut;
  try {
    cut.cut(parts, rows.const_data_ptr<std::int64_t>(), rows.numel(), true);
  } catch (const std::out_of_range&) {
    return false;  // Python says which
  }
  const std::int64_t width = rows.numel() == 0 ? 0 : values.numel() / rows.numel();
  const auto* from = values.const_data_ptr<float>();
  std::vector<at::Tensor> sums;
  for (std::size_t part = 0; part < parts.at.size(); ++part) {
    std::vector<std::int64_t> sizes = values.sizes().vec();
    sizes[0] = static_cast<std::int64_t>(cut.rows(part).size());
    sums.push_back(at::empty(sizes, values.options()));
  }
  for (std::int64_t i = 0; i < rows.numel(); ++i) {  // in order of appearance
    float* __restrict to =
        sums[cut.part(i)].mutable_data_ptr<float>() + static_cast<std::int64_t>(cut.place(i)) * width;
    const float* __restrict value = from + i * width;
    if (cut.is_first(i)) {
      std::copy(value, value + width, to);
    } else {
      for (std::int64_t j = 0; j < width; ++j) to[j] += value[j];
    }
  }
  for (std::size_t part = 0; part < parts.at.size(); ++part) {
    const auto count = static_cast<std::int64_t>(cut.rows(part).size());
    if (count == 0 && !(sync_ && !parts.spread())) continue;  // a round advances the optimizer of a range all the same
    at::Tensor ids = at::empty({count}, rows.options());
    std::copy(cut.rows(part).begin(), cut.rows(part).end(), ids.mutable_data_ptr<std::int64_t>());
    Outgoing& to = of(out, parts.at[part], Kind::kStep);
    add(to, parts.blocks[part], Role::kRows, std::move(ids));
    add(to, parts.blocks[part], Role::kValues, sums[part]);
  }
  const auto held = waits_.hold();
  servers_[parts.at[0]]->sums[parts.blocks[0]]->merges += rows.numel() - cut.num_different();
  return true;
}

// ---------------------------------------------------------------- requests and answers

// Gives every message its key and what it reads; returns the number of an async step.
std::int64_t Session::address(Sent& out) {
  std::int64_t number = 0;
  for (std::size_t at = 0; at < servers_.size(); ++at) {
    Server& server = *servers_[at];
    server.answer.reset();
    server.answered.clear();
    if (!sync_ && !out[at] && server.num_ahead == 0 && server.reads.empty()) continue;  // no barrier waits for it
    if (!sync_ && number == 0) number = next_number();
    Message& message = of(out, at, Kind::kStep).message;
    message.round = sync_ ? server.round.load() : number;
    message.number = server.num_ahead;
    message.reads = server.reads;
  }
  return number;
}

bool Session::step(const std::vector<Push>& pushes, const std::vector<std::int64_t>& ahead) {
  std::unique_lock one_at_a_time(stepping_);
  const bool well = whole_step(pushes, ahead, one_at_a_time);
  end_ahead(well);
  if (sync_) well ? next_.step_done() : next_.forget();
  return well;
}

bool Session::whole_step(const std::vector<Push>& pushes, const std::vector<std::int64_t>& ahead,
                         std::unique_lock<std::recursive_mutex>& one_at_a_time) {
  if (!is_armed() || ahead != ahead_) return false;
  Sent out(servers_.size());
  for (const Push& push : pushes) {
    if (!(push.of->is_table ? add_rows(push, out) : add_blocks(push, out))) return false;
  }
  if (!have_encodings(out)) return false;
  send_dense_first(out);
  const std::int64_t number = address(out);
  if (!have_encodings(out) || !has_left(out)) return false;
  Answers answers(servers_.size());
  Lines lines(servers_.size());
  if (!exchange(out, answers, lines)) {
    if (number != 0) {  // no other step until Python, on this thread, has repeated it: numbers have to arrive in order
      failed_here = {this, number};
      one_at_a_time.release();
    }
    return false;
  }
  for (std::size_t at = 0; at < servers_.size(); ++at) {
    if (answers[at]) done(at, out[at]->message, std::move(*answers[at]), number);
  }
  return true;
}

bool Session::have_encodings(const Sent& out) {
  for (const std::optional<Outgoing>& one : out) {
    if (std::string why = one ? why_not(one->message) : ""; !why.empty()) {
      leave_to_python(std::move(why));
      return false;
    }
  }
  return true;
}

void Session::leave_to_python(std::string why) {
  const std::lock_guard guard(reasoning_);
  if (!is_left_.exchange(true)) why_ = std::move(why);
}

std::string Session::take_why() {
  const std::lock_guard guard(reasoning_);
  return std::exchange(why_, {});
}

std::int64_t Session::begin_step() {
  stepping_.lock();
  end_ahead(false);
  next_.forget();
  if (failed_here.session != this) return 0;
  stepping_.unlock();  // the one of the step that failed
  return std::exchange(failed_here, {}).number;
}

void Session::give_up_step() {
  if (failed_here.session != this) return;
  failed_here = {};
  stepping_.unlock();
}

void Session::done(std::size_t at, const Message& sent, Answer answer, std::int64_t number) {
  Server& server = *servers_[at];
  if (sync_) {
    reached(at, answer.message.round);
  } else if (!sent.parts.empty() || server.num_ahead != 0) {
    server.acknowledged = number;
  }
  count(server, sent, answer.message);
  server.answer = std::move(answer.message);
  server.answered = std::move(answer.bodies);
}

bool Session::read(const std::vector<std::string>& blocks, at::IntArrayRef at, at::TensorList out) {
  const std::lock_guard one_at_a_time(stepping_);
  std::vector<const Part*> found;
  std::vector<std::set<std::uint32_t>> reads(servers_.size());  // each block once
  bool whole = true;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    Server& server = *servers_.at(static_cast<std::size_t>(at[i]));
    const auto number = server.numbers.find(blocks[i]);
    if (number == server.numbers.end()) return false;
    std::string why = why_not(static_cast<std::size_t>(out[i].dim()));
    if (why.empty()) {
      reads[static_cast<std::size_t>(at[i])].insert(number->second);
    } else {
      leave_to_python(std::move(why));
    }
    const Part* part = part_of(server.answer, number->second);
    whole = whole && part != nullptr && travels(out[i]) && has_sizes(*part, out[i]);
    found.push_back(part);
  }
  if (whole) {
    for (std::size_t i = 0; i < found.size(); ++i) {
      std::memcpy(out[i].mutable_data_ptr(), found[i]->data, found[i]->num_bytes);
    }
  }
  for (std::size_t server = 0; server < servers_.size(); ++server) {
    servers_[server]->reads.assign(reads[server].begin(), reads[server].end());
  }
  if (!meeting_->is_open()) forget_answers();  // each step reads what its own round has made
  return whole;
}

void Session::forget_answers() {
  const std::lock_guard one_at_a_time(stepping_);
  for (const std::unique_ptr<Server>& server : servers_) {
    server->answer.reset();
    server->answered.clear();
  }
}

Session::Line Session::free_line(Server& server, Kind kind) {
  if (kind != Kind::kLookUp) return {std::unique_lock(server.lines[0].lock), server.lines[0].channel.get()};
  for (std::size_t i = 1; i < kNumLines; ++i) {
    std::unique_lock held(server.lines[i].lock, std::try_to_lock);
    if (held || i + 1 == kNumLines) {
      if (!held) held.lock();
      return {std::move(held), server.lines[i].channel.get()};
    }
  }
  return {};
}

// Where memory is shared the body is written into it; else the socket takes it from where it lies.
void Session::send(Channel& channel, const Message& message, Deadline deadline) {
  if (!channel.shares()) return channel.send(encode(message), bytes_of(message), deadline);
  write_body(message, channel.room(size_of_body(message)));
  channel.send_staged(encode(message), deadline);
}

// Sends to all, then takes all answers: none is waited for before the last is asked.
bool Session::exchange(Sent& out, Answers& answers, Lines& lines) {
  bool well = true;
  for (std::size_t at = 0; at < out.size() && well; ++at) {
    if (!out[at]) continue;
    Server& server = *servers_[at];
    lines[at] = free_line(server, out[at]->message.kind);
    try {
      if (!server.armed) throw Unavailable("the server has been disarmed");
      const bool is_copy = lines[at].channel->shares();
      const auto sending = is_copy ? std::optional<Waits::One>{} : wait_for(server, out[at]->message);
      server.sent_at = out[at]->sent_at = now_s();
      send(*lines[at].channel, out[at]->message, now_s() + limit_s_);
    } catch (const std::exception&) {
      disarm(at);
      well = false;
    }
  }
  for (std::size_t at = 0; at < out.size() && well; ++at) {
    if (out[at]) well = await(*lines[at].channel, at, *out[at], answers[at]);
  }
  if (!well) {  // answers that were not taken would be taken for those of the next request
    for (std::size_t at = 0; at < out.size(); ++at) {
      if (out[at]) disarm(at);
    }
  }
  return well;
}

// Until it ends, time counts as a wait of what is sent. Nothing, on a thread that no step waits for.
std::optional<Waits::One> Session::wait_for(Server& server, const Message& sent) {
  if (blocks_no_step) return std::nullopt;
  Sums& sums = sent.kind == Kind::kStep ? *server.sums.back() : *server.sums[sent.parts[0].block];
  return std::optional<Waits::One>(std::in_place, waits_, sums);
}

bool Session::await(Channel& channel, std::size_t at, const Outgoing& sent, std::optional<Answer>& answer) {
  Server& server = *servers_[at];
  const auto waiting = wait_for(server, sent.message);
  try {
    if (sent.message.kind == Kind::kStep && server.inbox.is_open()) {
      answer = server.inbox.take(now_s() + limit_s_);
    } else {
      Received received = channel.receive(now_s() + limit_s_);
      answer.emplace(Answer{decode(received.head, received.body), {}});
      answer->bodies.push_back(std::move(received.body));
    }
    server.answered_at = now_s();
    if (answer->message.kind != Kind::kAnswer) return false;
    renewed(at, sent.sent_at);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace penstock::ps
