// `torch.ops.penstock.prefetch`, `send_ahead`, `send_step` and `recv_step` on CPU tensors: through the open session of
// their remote, and where there is none, or something goes wrong, by the operators of the same names and `_by_python`
// behind them, which ps/remote_ops.py has.
#include "ps/operators.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "ps/errors.h"
#include "ps/session.h"

namespace penstock::ps {
namespace {

using at::Tensor;
using at::TensorList;
using Strings = c10::List<std::string>;

struct Layouts {
  std::mutex lock;
  std::map<std::string, std::shared_ptr<const Layout>> known;
};

Layouts& layouts() {
  static Layouts* all = new Layouts;
  return *all;
}

std::shared_ptr<const Layout> layout_of(const std::string& spec) {
  const std::lock_guard guard(layouts().lock);
  const auto found = layouts().known.find(spec);
  return found == layouts().known.end() ? nullptr : found->second;
}

thread_local bool repeats_here = false;

// While Python does a step that was this session's; null: of no session. When Python has ended in an error before it
// came to repeat the step, it is given up.
class HandedOver {
 public:
  explicit HandedOver(Session* session) : session_(session), before_(std::exchange(repeats_here, session != nullptr)) {}
  HandedOver(const HandedOver&) = delete;
  HandedOver& operator=(const HandedOver&) = delete;
  ~HandedOver() {
    repeats_here = before_;
    if (session_ != nullptr) session_->give_up_step();
  }

 private:
  Session* session_;
  bool before_;
};

Tensor token() {
  return at::empty({0}, at::kLong);
}

std::vector<std::string> vector_of(const Strings& given) {
  std::vector<std::string> out;
  out.reserve(given.size());
  for (std::size_t i = 0; i < given.size(); ++i) out.push_back(given.get(i));
  return out;
}

Tensor send_ahead(TensorList values, const std::string& remote, Strings blocks, at::IntArrayRef at) {
  const auto session = find_session(remote);
  const std::int64_t number = session == nullptr ? 0 : session->send_ahead(vector_of(blocks), at, values.vec());
  return at::full({1}, number, at::kLong);
}

// What `send_ahead` has returned, in its order; other tokens are empty.
std::vector<std::int64_t> numbers_ahead(TensorList after) {
  std::vector<std::int64_t> out;
  for (const Tensor& token : after) {
    if (token.numel() == 1 && *token.const_data_ptr<std::int64_t>() != 0)
      out.push_back(*token.const_data_ptr<std::int64_t>());
  }
  std::sort(out.begin(), out.end());
  return out;
}

// As a message takes it: the gradient of a sum, for example, is one number with strides of 0.
Tensor written_out(const Tensor& gradient) {
  return gradient.device().is_cpu() ? gradient.contiguous() : gradient;
}

// The same for a matrix of which columns are taken where they are, if each row lies in one piece.
Tensor in_rows(const Tensor& matrix) {
  return matrix.dim() == 2 && matrix.stride(1) == 1 ? matrix : written_out(matrix);
}

std::vector<Push> pushes_of(const Layout& layout, TensorList values, TensorList rows, TensorList row_values) {
  std::vector<Push> pushes;
  std::size_t dense = 0;
  for (const Layout::Gradient& gradient : layout.gradients) {
    Push& push = pushes.emplace_back();
    push.of = &gradient.of;
    if (gradient.of.is_table) {
      for (const Layout::Piece& piece : gradient.pieces) {
        push.rows.push_back({written_out(rows.at(static_cast<std::size_t>(piece.rows))),
                             in_rows(row_values.at(static_cast<std::size_t>(piece.values))), piece.column,
                             gradient.width});
      }
    } else {
      const TensorList own = values.slice(dense, gradient.of.blocks.size());
      for (const Tensor& one : own) push.values.push_back(written_out(one));
      dense += gradient.of.blocks.size();
    }
  }
  return pushes;
}

void push_for_all_by_python(Session& session, const std::vector<Push>& pushes, const std::string& remote,
                            const std::string& spec) {
  std::vector<Tensor> values, rows, row_values;
  for (const Push& push : pushes) {
    values.insert(values.end(), push.values.begin(), push.values.end());
    if (!push.of->is_table) continue;
    const Columns whole = joined(push.rows);
    rows.push_back(whole.ids);
    row_values.push_back(whole.matrix);
  }
  session.forget_answers();
  const HandedOver handed_over(&session);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("penstock::push_for_all_by_python", "")
                             .typed<Tensor(TensorList, TensorList, TensorList, c10::string_view, c10::string_view)>();
  op.call(values, rows, row_values, remote, spec);
}

// Raises what has ended the exchange. `num_came`: of the threads that were announced; others are waited for.
void check_threads_by_python(const std::string& remote, std::int64_t num_came, double waited_s) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("penstock::check_threads_by_python", "")
                             .typed<Tensor(const Tensor&, c10::string_view, std::int64_t, double)>();
  op.call(token(), remote, num_came, waited_s);
}

void push_for_all(Session& session, const std::vector<Push>& own, const std::string& remote, const std::string& spec) {
  Meeting& meeting = session.meeting();
  try {
    const std::vector<Push> merged = meeting.merged(own);
    if (!session.step(merged, {})) push_for_all_by_python(session, merged, remote, spec);
    session.count_merges(merged, meeting.num_merged());
  } catch (...) {
    meeting.failed();
    throw;
  }
  meeting.pushed();
}

constexpr double kCheckS = 1.0;  // while a thread waits

// Of threads that train in step: returns when the round of this one is pushed, whichever thread has done it. An error
// of the check leaves open, as that of a push does, whether the servers have the gradients.
Tensor send_together(Session& session, const std::vector<Push>& own, const std::string& remote,
                     const std::string& spec) {
  Meeting& meeting = session.meeting();
  const auto began = std::chrono::steady_clock::now();
  const auto round = meeting.bring(own);
  for (;;) {
    const Meeting::Outcome outcome = meeting.wait(round, kCheckS);
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - began;
    switch (outcome) {
      case Meeting::Outcome::kPush:
        push_for_all(session, own, remote, spec);
        return token();
      case Meeting::Outcome::kPushed:
        return token();
      case Meeting::Outcome::kLate:
        try {  // signal handlers run here, too
          check_threads_by_python(remote, static_cast<std::int64_t>(meeting.num_came()), waited.count());
        } catch (...) {
          meeting.take_back(round);
          throw;
        }
        break;
      case Meeting::Outcome::kDropped:
        check_threads_by_python(remote, -1, waited.count());
        throw Unavailable("the exchange of this trainer's threads with their servers has ended");
    }
  }
}

Tensor send_step(TensorList values, TensorList rows, TensorList row_values, TensorList after, const std::string& remote,
                 const std::string& spec) {
  const auto session = find_session(remote);
  const bool meets = session != nullptr && session->meeting().is_open();
  if (const auto layout = meets || (session != nullptr && session->is_armed()) ? layout_of(spec) : nullptr) {
    const std::vector<Push> own = pushes_of(*layout, values, rows, row_values);
    if (meets) return send_together(*session, own, remote, spec);
    if (session->step(own, numbers_ahead(after))) return token();
  }
  const HandedOver handed_over(session.get());
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("penstock::send_step_by_python", "")
          .typed<Tensor(TensorList, TensorList, TensorList, TensorList, c10::string_view, c10::string_view)>();
  return op.call(values, rows, row_values, after, remote, spec);
}

Tensor recv_step(TensorList out, TensorList after, const std::string& remote, Strings variables, Strings blocks,
                 at::IntArrayRef at) {
  const auto session = find_session(remote);
  if (session != nullptr && session->is_armed() && session->read(vector_of(blocks), at, out)) return token();
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("penstock::recv_step_by_python", "")
          .typed<Tensor(TensorList, TensorList, c10::string_view, Strings, Strings, at::IntArrayRef)>();
  return op.call(out, after, remote, std::move(variables), std::move(blocks), at);
}

// Rows of ids, zeros where an id is `padding`: no server is asked for those. False: Python has to do it.
bool look_up_live(Session& session, const std::string& name, const Tensor& ids, const Placement& table, int64_t padding,
                  Tensor& out) {
  const auto* first = ids.const_data_ptr<int64_t>();
  const auto* end = first + ids.numel();
  const std::int64_t num_live = ids.numel() - std::count(first, end, padding);
  if (num_live == ids.numel()) return session.look_up(name, ids, table, out);
  Tensor live = at::empty({num_live}, ids.options()), rows = at::empty({num_live, out.size(1)}, out.options());
  std::copy_if(first, end, live.mutable_data_ptr<int64_t>(), [&](int64_t id) { return id != padding; });
  if (num_live != 0 && !session.look_up(name, live, table, rows)) return false;
  const auto row_bytes = static_cast<std::size_t>(out.size(1)) * out.element_size();
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for (const auto* id = first; id != end; ++id, to += row_bytes) {
    if (*id == padding) {
      std::memset(to, 0, row_bytes);
    } else {
      std::memcpy(to, from, row_bytes);
      from += row_bytes;
    }
  }
  return true;
}

// Nothing, if Python has to do it.
std::optional<Tensor> prefetch_natively(const Tensor& ids, const std::string& remote, const std::string& name,
                                        const Placement& table, int64_t width, at::ScalarType dtype,
                                        std::optional<int64_t> padding_idx) {
  const auto session = find_session(remote);
  if (session == nullptr || !session->is_armed() || !ids.is_contiguous() || ids.scalar_type() != at::kLong) {
    return std::nullopt;
  }
  std::vector<int64_t> sizes = ids.sizes().vec();
  sizes.push_back(width);
  const Tensor flat = ids.reshape(-1);
  Tensor out = at::empty({flat.numel(), width}, ids.options().dtype(dtype));
  if (flat.numel() != 0 && !(padding_idx ? look_up_live(*session, name, flat, table, *padding_idx, out)
                                         : session->look_up(name, flat, table, out))) {
    return std::nullopt;
  }
  return out.reshape(sizes);
}

Tensor prefetch(const Tensor& ids, const std::string& remote, const std::string& table, Strings blocks,
                at::IntArrayRef at, at::IntArrayRef heights, int64_t width, at::ScalarType dtype,
                std::optional<int64_t> padding_idx) {
  Placement parts;
  parts.blocks = vector_of(blocks);
  parts.at = at.vec();
  parts.heights = heights.vec();
  if (auto found = prefetch_natively(ids, remote, table, parts, width, dtype, padding_idx)) return *std::move(found);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("penstock::prefetch_by_python", "")
                             .typed<Tensor(const Tensor&, c10::string_view, c10::string_view, Strings, at::IntArrayRef,
                                           at::IntArrayRef, int64_t, at::ScalarType, std::optional<int64_t>)>();
  return op.call(ids, remote, table, std::move(blocks), at, heights, width, dtype, padding_idx);
}

}  // namespace

void know_layout(const std::string& spec, Layout layout) {
  const std::lock_guard guard(layouts().lock);
  layouts().known.try_emplace(spec, std::make_shared<const Layout>(std::move(layout)));
}

bool repeats_step() {
  return repeats_here;
}

namespace {

struct Sessions {
  std::mutex lock;
  std::map<std::string, std::shared_ptr<Session>> by_remote;
};

Sessions& sessions() {
  static Sessions* all = new Sessions;  // outlives threads that still wait at exit
  return *all;
}

}  // namespace

void open_session(const std::string& remote, std::shared_ptr<Session> session) {
  const std::lock_guard guard(sessions().lock);
  sessions().by_remote[remote] = std::move(session);
}

void close_session(const std::string& remote, const Session* session) {
  const std::lock_guard guard(sessions().lock);
  const auto found = sessions().by_remote.find(remote);
  if (found != sessions().by_remote.end() && found->second.get() == session) sessions().by_remote.erase(found);
}

std::shared_ptr<Session> find_session(const std::string& remote) {
  const std::lock_guard guard(sessions().lock);
  const auto found = sessions().by_remote.find(remote);
  return found == sessions().by_remote.end() ? nullptr : found->second;
}

}  // namespace penstock::ps

TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  using namespace penstock::ps;
  m.impl("send_ahead", send_ahead);
  m.impl("send_step", send_step);
  m.impl("recv_step", recv_step);
  m.impl("prefetch", prefetch);
}
