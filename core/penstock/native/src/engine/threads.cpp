#include "engine/threads.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <dlfcn.h>

#include <utility>

namespace penstock {
namespace {

struct IntraOp {
  void (*set_openmp)(int) = nullptr;
  int (*get_openmp)() = nullptr;
  int (*set_mkl)(int) = nullptr;  // returns what was set before; 0 means "as OpenMP"
};

void drop_openmp(IntraOp& runtimes) {
  runtimes.set_openmp = nullptr;
  runtimes.get_openmp = nullptr;
}

// The functions of the OpenMP runtime and the MKL that libtorch_cpu itself uses: a process may hold several
// (scikit-learn brings its own), so the search starts at libtorch_cpu and its dependencies, not at the process.
IntraOp find_intra_op() {
  IntraOp found;
  Dl_info library{};
  if (dladdr(reinterpret_cast<void*>(&at::get_num_threads), &library) == 0) return found;
  void* handle = dlopen(library.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return found;
  found.set_openmp = reinterpret_cast<void (*)(int)>(dlsym(handle, "omp_set_num_threads"));
  found.get_openmp = reinterpret_cast<int (*)()>(dlsym(handle, "omp_get_max_threads"));
  if (found.set_openmp == nullptr || found.get_openmp == nullptr) drop_openmp(found);
  found.set_mkl = reinterpret_cast<int (*)(int)>(dlsym(handle, "MKL_Set_Num_Threads_Local"));
  dlclose(handle);
  return found;
}

IntraOp& used_intra_op() {
  static IntraOp used = find_intra_op();
  return used;
}

const IntraOp& intra_op() {
  return used_intra_op();
}

class IntraOpGuard {
 public:
  explicit IntraOpGuard(int num_threads) {
    // torch sets the thread's number from a global one when it first asks for it on a thread: let that happen now.
    static_cast<void>(at::get_num_threads());
    if (intra_op().set_openmp != nullptr) {
      openmp_before_ = intra_op().get_openmp();
      intra_op().set_openmp(num_threads);
    }
    if (intra_op().set_mkl != nullptr) mkl_before_ = intra_op().set_mkl(num_threads);
  }
  ~IntraOpGuard() {
    if (intra_op().set_openmp != nullptr && openmp_before_ > 0) intra_op().set_openmp(openmp_before_);
    if (intra_op().set_mkl != nullptr) intra_op().set_mkl(mkl_before_);
  }
  IntraOpGuard(const IntraOpGuard&) = delete;
  IntraOpGuard& operator=(const IntraOpGuard&) = delete;

 private:
  int openmp_before_ = 0;
  int mkl_before_ = 0;
};

}  // namespace

void with_operator_state(int intra_op_threads, const std::function<void()>& body) {
  const IntraOpGuard threads(intra_op_threads);
  const c10::impl::ForceDispatchKeyGuard keys(c10::default_included_set, c10::default_excluded_set);
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::AutoGradMode no_grad(false);
  body();
}

void use_intra_op_runtimes(bool openmp, bool mkl) {
  IntraOp used = find_intra_op();
  if (!openmp) drop_openmp(used);
  if (!mkl) used.set_mkl = nullptr;
  used_intra_op() = used;
}

void hold_intra_op_threads(int num_threads) {
  static const IntraOp& set = intra_op();
  if (set.set_openmp == nullptr || set.get_openmp() == num_threads) return;
  set.set_openmp(num_threads);
  if (set.set_mkl != nullptr) set.set_mkl(num_threads);
}

void use_intra_op_threads_here(int num_threads) {
  // As in the guard: what torch sets when it is first asked on a thread is set before, not after.
  static_cast<void>(at::get_num_threads());
  hold_intra_op_threads(num_threads);
}

std::pair<int, int> intra_op_threads_here() {
  return {intra_op().get_openmp != nullptr ? intra_op().get_openmp() : 0, at::get_num_threads()};
}

std::pair<bool, bool> intra_op_runtimes() {
  return {intra_op().set_openmp != nullptr, intra_op().set_mkl != nullptr};
}

}  // namespace penstock
