// What a thread needs before it may run operators: dispatch state and the number of intra-op threads.
//
// Invariant: only settings of the calling thread change. `torch.set_num_threads` is not used, because its value
// reaches every thread started later.
#pragma once

#include <functional>
#include <utility>

namespace penstock {

// Runs `body` on this thread with no-grad, below autograd and in-place-or-view tracking, with the dispatch keys of a
// fresh thread (whatever modes or autocast the caller is in), and with `intra_op_threads` threads for an operator;
// sets everything back afterwards.
void with_operator_state(int intra_op_threads, const std::function<void()>& body);

// Sets this thread's number back to `num_threads` if an operator has changed it. The first `at::parallel_for` of a
// library compiled with OpenMP does: it sets torch's global number, once for each thread, by a flag of that library.
void hold_intra_op_threads(int num_threads);

// Lets an operator called on this thread use `num_threads` threads from now on; for threads that are not an engine's.
void use_intra_op_threads_here(int num_threads);

// The number of threads that an operator called on this thread would use: {OpenMP's, torch's}.
std::pair<int, int> intra_op_threads_here();

// Leaves the setters of OpenMP or MKL alone from now on. Not while an engine runs. penstock.native.intra_op calls it
// with what its probes found.
void use_intra_op_runtimes(bool openmp, bool mkl);

// Whether the number can be set for a thread alone: in {OpenMP, MKL}. Where it cannot, operators use torch's number.
std::pair<bool, bool> intra_op_runtimes();

}  // namespace penstock
