// How a session looks up rows of a batch.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "ps/errors.h"
#include "ps/session.h"
#include "ps/tensors.h"

namespace penstock::ps {

bool Session::knows(const std::string& table) {
  const std::lock_guard guard(knowing_);
  return !known_.insert(table).second;
}

bool Session::look_up(const std::string& name, const at::Tensor& ids, const Placement& table, at::Tensor& out) {
  const bool can = is_armed() && num_ahead == 0 && travels(ids) && ids.scalar_type() == at::kLong && travels(out);
  Parts parts;
  bool local = false;
  if (!can || !knows(name) || !parts_of(table, parts, local) || !parts.are_apart()) return false;
  if (sync_) {
    const Waits::One waiting(waits_, *servers_[parts.at[0]]->sums[parts.blocks[0]]);
    if (take_next(name, ids, out)) return true;
  }
  return look_up_now(ids, parts, local, out);
}

bool Session::take_next(const std::string& name, const at::Tensor& ids, at::Tensor& rows) {
  return sync_ && next_.take(name, ids, rows);
}

bool Session::look_up_next(const std::string& name, const at::Tensor& ids, Placement table, at::Tensor rows) {
  if (!sync_ || !is_armed() || !travels(ids) || ids.scalar_type() != at::kLong || !travels(rows)) return false;
  return next_.want(name, ids, std::move(table), std::move(rows));
}

bool Session::look_up_ahead(const at::Tensor& ids, const Placement& table, at::Tensor& out) {
  blocks_no_step = true;  // a thread of `next_`
  Parts parts;
  bool local = false;
  return is_armed() && parts_of(table, parts, local) && parts.are_apart() && look_up_now(ids, parts, local, out);
}

bool Session::look_up_now(const at::Tensor& ids, const Parts& parts, bool local, at::Tensor& out) {
  thread_local Cut cut;
  Sent sent(servers_.size());
  if (local) {
    add(of(sent, parts.at[0], Kind::kLookUp), parts.blocks[0], Role::kRows, ids);
  } else if (!add_lookups(parts, ids, cut, sent)) {
    return false;
  }
  for (std::size_t at = 0; at < sent.size(); ++at) {
    if (sent[at]) sent[at]->message.round = sync_ ? servers_[at]->round.load() : 0;
  }
  Answers answers(servers_.size());
  Lines lines(servers_.size());  // until the rows are copied: the next request's answer comes into the same memory
  if (!exchange(sent, answers, lines) || !are_rows(sent, answers, out)) return false;
  char* to = static_cast<char*>(out.mutable_data_ptr());
  if (local) {
    std::memcpy(to, answers[parts.at[0]]->message.parts[0].data, out.nbytes());
    return true;
  }
  const std::size_t row_bytes = out.numel() == 0 ? 0 : out.nbytes() / static_cast<std::size_t>(out.size(0));
  std::vector<const char*> from;
  for (const std::uint32_t at : parts.at) {
    from.push_back(answers[at] ? answers[at]->message.parts[0].data : nullptr);
  }
  for (std::int64_t i = 0; i < ids.numel(); ++i) {
    std::memcpy(to + static_cast<std::size_t>(i) * row_bytes, from[cut.part(i)] + cut.place(i) * row_bytes, row_bytes);
  }
  return true;
}

bool Session::add_lookups(const Parts& parts, const at::Tensor& ids, Cut& cut, Sent& out) {
  try {
    cut.cut(parts, ids.const_data_ptr<std::int64_t>(), ids.numel(), true);
  } catch (const std::out_of_range&) {
    return false;  // Python says which
  }
  for (std::size_t part = 0; part < parts.at.size(); ++part) {
    const auto& rows = cut.rows(part);
    if (rows.empty()) continue;
    at::Tensor own = at::empty({static_cast<std::int64_t>(rows.size())}, ids.options());
    std::copy(rows.begin(), rows.end(), own.mutable_data_ptr<std::int64_t>());
    add(of(out, parts.at[part], Kind::kLookUp), parts.blocks[part], Role::kRows, std::move(own));
  }
  return true;
}

// Whether each answer has the rows that were asked for; if not, Python says what does not fit.
bool Session::are_rows(const Sent& sent, const Answers& answers, const at::Tensor& like) {
  const std::size_t row_bytes = like.numel() == 0 ? 0 : like.nbytes() / static_cast<std::size_t>(like.size(0));
  for (std::size_t at = 0; at < sent.size(); ++at) {
    if (!sent[at]) continue;
    const auto& found = answers[at]->message.parts;
    const auto asked = static_cast<std::size_t>(sent[at]->message.parts[0].sizes[0]);
    if (found.size() != 1 || found[0].dtype != static_cast<std::int8_t>(like.scalar_type()) ||
        found[0].num_bytes != asked * row_bytes) {
      return false;
    }
    count(*servers_[at], sent[at]->message, answers[at]->message);
  }
  return true;
}

}  // namespace penstock::ps
