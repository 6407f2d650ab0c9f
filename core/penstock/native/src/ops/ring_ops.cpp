// `torch.ops.penstock.ring_*`: the exchange among processes of one host (ring/ring.h) as operators on CPU tensors.
//
// A ring has a name, under which a process opens it once and operators find it. `step` is what the ranks said at the
// beginning of a step, int64[ranks, 3]: rows, whether the rank has ended, signature of the exchanges that it will make.
// Gradients are weighed by it: a rank counts as many times as it has rows. Nothing here takes the interpreter lock.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <map>
#include <memory>
#include <mutex>

#include "ops/checks.h"
#include "ops/replicas.h"
#include "ops/ring/ring.h"

namespace penstock::ops {
namespace {

using at::Tensor;
using at::TensorList;
using ring::Piece;
using ring::Ring;

enum Column : int64_t { kRows, kEnded, kSignature, kColumns };
constexpr int64_t kHasEnded = 1;  // in the column kEnded; see distributed/exchange_ops.py

class Rings {
 public:
  void open(const std::string& name, std::unique_ptr<Ring> ring) {
    const std::lock_guard guard(lock_);
    TORCH_CHECK_VALUE(rings_.emplace(name, std::move(ring)).second, "the ring '", name, "' is open already");
  }
  void close(const std::string& name) {
    const std::lock_guard guard(lock_);
    rings_.erase(name);
  }
  std::shared_ptr<Ring> find(const std::string& name) {
    const std::lock_guard guard(lock_);
    const auto found = rings_.find(name);
    TORCH_CHECK_VALUE(found != rings_.end(), "no ring '", name, "' is open in this process");
    return found->second;
  }

 private:
  std::mutex lock_;
  std::map<std::string, std::shared_ptr<Ring>> rings_;
};

Rings& rings() {
  static Rings* all = new Rings;  // outlives threads that still wait at exit
  return *all;
}

void ring_open(const std::string& name, int64_t descriptor, int64_t rank, int64_t num_ranks, int64_t slot_bytes) {
  TORCH_CHECK_VALUE(rank >= 0 && num_ranks > rank && slot_bytes > 0, "ring_open: rank ", rank, " of ", num_ranks);
  rings().open(name,
               std::make_unique<Ring>(static_cast<int>(descriptor), static_cast<std::uint32_t>(rank),
                                      static_cast<std::uint32_t>(num_ranks), static_cast<std::size_t>(slot_bytes)));
}

void ring_close(const std::string& name) {
  rings().close(name);
}

void ring_fail(const std::string& name, const std::string& why) {
  rings().find(name)->fail(why);
}

// Memory that the ranks of this host sum in place when tensors in it are reduced; the tensor's end frees it.
Tensor ring_memory(int64_t nbytes) {
  TORCH_CHECK_VALUE(nbytes > 0, "ring_memory: ", nbytes, " bytes");
  char* begin = ring::make_memory(static_cast<std::size_t>(nbytes));
  const auto free = [](void* memory) { ring::free_memory(static_cast<char*>(memory)); };
  return at::from_blob(begin, {nbytes}, free, at::TensorOptions().dtype(at::kByte));
}

int64_t ring_num_in_place(const std::string& name) {
  return static_cast<int64_t>(rings().find(name)->num_in_place());
}

int64_t ring_size_bytes(int64_t num_ranks, int64_t slot_bytes) {
  return static_cast<int64_t>(
      Ring::size_bytes(static_cast<std::uint32_t>(num_ranks), static_cast<std::size_t>(slot_bytes)));
}

const int64_t* step_of(const Check& check, const Tensor& step, const Ring& ring) {
  check.dtype("step", step, at::kLong);
  TORCH_CHECK_VALUE(
      step.is_contiguous() && step.dim() == 2 && step.size(0) == ring.num_ranks() && step.size(1) == kColumns,
      check.op(), ": step has shape ", step.sizes(), "; expected [", ring.num_ranks(), ", 3]");
  return step.const_data_ptr<int64_t>();
}

// By rank: rows / all rows, or for sums 1 for each that has rows.
std::vector<double> weights_of(const Check& check, const Tensor& step, const Ring& ring, bool mean) {
  const int64_t* said = step_of(check, step, ring);
  int64_t total = 0;
  for (int64_t r = 0; r < ring.num_ranks(); ++r) total += said[r * kColumns + kRows];
  std::vector<double> weights;
  for (int64_t r = 0; r < ring.num_ranks(); ++r) {
    const int64_t rows = said[r * kColumns + kRows];
    const double single = rows > 0 ? 1 : 0;
    weights.push_back(mean && total != 0 ? static_cast<double>(rows) / static_cast<double>(total) : single);
  }
  return weights;
}

Tensor ring_meet(const Tensor& mine, const std::string& name) {
  const Check check("penstock.ring_meet");
  check.dtype("mine", mine, at::kLong);
  const auto own = mine.contiguous();
  const auto ring = rings().find(name);
  Tensor all = at::empty({static_cast<int64_t>(ring->num_ranks()), own.numel()}, own.options());
  ring->meet(own.const_data_ptr<int64_t>(), static_cast<std::size_t>(own.numel()), all.mutable_data_ptr<int64_t>());
  return all;
}

Tensor ring_step(const Tensor& mine, const std::string& name) {
  const Check check("penstock.ring_step");
  TORCH_CHECK_VALUE(mine.dim() == 1 && mine.size(0) == kColumns, check.op(), ": mine has shape ", mine.sizes(),
                    "; expected [3]: rows, ended, signature");
  const Tensor all = ring_meet(mine, name);
  const int64_t* said = all.const_data_ptr<int64_t>();
  const int64_t signature = mine.const_data_ptr<int64_t>()[kSignature];
  for (int64_t r = 0; r < all.size(0); ++r) {
    const int64_t* theirs = said + r * kColumns;
    TORCH_CHECK(theirs[kEnded] == kHasEnded || (theirs[kEnded] == 0 && theirs[kSignature] == signature), "rank ", r,
                " begins a step of another program: its parameters, or their order, differ from those of rank ",
                rings().find(name)->rank());
  }
  return all;
}

void ring_all_reduce_(TensorList tensors, int64_t replicas, const Tensor& step, bool mean, const std::string& name) {
  const Check check("penstock.ring_all_reduce_");
  const auto count = static_cast<std::size_t>(replicas);
  TORCH_CHECK_VALUE(replicas > 0 && !tensors.empty() && tensors.size() % count == 0, check.op(), ": got ",
                    tensors.size(), " tensors for ", replicas, " replicas; expected the same number for each");
  const auto ring = rings().find(name);
  const std::vector<double> weights = weights_of(check, step, *ring, mean);
  for (std::size_t at = 0; at < tensors.size(); at += count) {
    check_replicas(check, tensors.slice(at, count));
    check.dtype("a tensor", tensors[at], tensors[0].scalar_type());
  }
  TORCH_CHECK_TYPE(tensors[0].is_floating_point() || !mean, check.op(), ": a mean of integers");
  with_summable(check, tensors[0], [&](auto type) {
    using T = decltype(type);
    std::vector<Piece<T>> pieces;
    for (std::size_t at = 0; at < tensors.size(); at += count) {
      Piece<T> piece{{}, tensors[at].numel()};
      for (const Tensor& tensor : tensors.slice(at, count)) piece.replicas.push_back(tensor.mutable_data_ptr<T>());
      pieces.push_back(std::move(piece));
    }
    ring->all_reduce(pieces, weights);
  });
}

std::vector<std::size_t> scaled(const int64_t* counts, int64_t num_ranks, std::size_t bytes) {
  std::vector<std::size_t> sizes;
  for (int64_t r = 0; r < num_ranks; ++r) sizes.push_back(static_cast<std::size_t>(counts[r]) * bytes);
  return sizes;
}

// The rows of all ranks, in the order of the ranks; values are weighed as dense gradients are.
std::tuple<Tensor, Tensor> ring_gather(const Tensor& rows, const Tensor& values, const Tensor& step, bool mean,
                                       const std::string& name) {
  const Check check("penstock.ring_gather");
  check.dtype("rows", rows, at::kLong);
  check.floating("values", values);
  TORCH_CHECK_VALUE(rows.dim() == 1 && values.dim() == 2 && values.size(0) == rows.size(0), check.op(),
                    ": rows has shape ", rows.sizes(), ", values ", values.sizes(), "; expected [n] and [n, width]");
  const auto ring = rings().find(name);
  const double weight = weights_of(check, step, *ring, mean)[ring->rank()];
  const int64_t mine = rows.numel(), width = values.size(1), num_ranks = ring->num_ranks();
  std::vector<int64_t> counts(static_cast<std::size_t>(num_ranks));
  ring->meet(&mine, 1, counts.data());
  int64_t total = 0;
  for (const int64_t n : counts) total += n;
  Tensor all_rows = at::empty({total}, rows.options()), all_values = at::empty({total, width}, values.options());
  const Tensor own_rows = rows.contiguous();
  Tensor own_values = values.contiguous();
  if (weight != 1) own_values = own_values * weight;
  const auto from = [](const Tensor& tensor) {
    const auto* bytes = static_cast<const char*>(tensor.const_data_ptr());
    return [bytes](char* to, std::size_t begin, std::size_t end) { std::copy(bytes + begin, bytes + end, to); };
  };
  ring->gather(from(own_rows), scaled(counts.data(), num_ranks, sizeof(int64_t)),
               static_cast<char*>(all_rows.mutable_data_ptr()));
  ring->gather(from(own_values),
               scaled(counts.data(), num_ranks, static_cast<std::size_t>(width) * values.element_size()),
               static_cast<char*>(all_values.mutable_data_ptr()));
  return {all_rows, all_values};
}

void ring_broadcast_(TensorList tensors, int64_t root, const std::string& name) {
  const Check check("penstock.ring_broadcast_");
  const auto ring = rings().find(name);
  for (const Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), check.op(), ": a tensor of shape ", tensor.sizes(),
                      " has strides ", tensor.strides(), ", which leave gaps or overlap");
    ring->broadcast(static_cast<char*>(tensor.mutable_data_ptr()), tensor.nbytes(), static_cast<std::uint32_t>(root));
  }
}

}  // namespace
}  // namespace penstock::ops

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  using namespace penstock::ops;
  m.def("ring_open(str ring, int descriptor, int rank, int num_ranks, int slot_bytes) -> ()", ring_open);
  m.def("ring_close(str ring) -> ()", ring_close);
  m.def("ring_fail(str ring, str why) -> ()", ring_fail);
  m.def("ring_num_in_place(str ring) -> int", ring_num_in_place);
  m.def("ring_memory(int nbytes) -> Tensor", ring_memory);
  m.def("ring_size_bytes(int num_ranks, int slot_bytes) -> int", ring_size_bytes);
  m.def("ring_meet(Tensor mine, str ring) -> Tensor");
  m.def("ring_step(Tensor mine, str ring) -> Tensor");
  m.def("ring_all_reduce_(Tensor(a!)[] tensors, int replicas, Tensor step, bool mean, str ring) -> ()");
  m.def("ring_gather(Tensor rows, Tensor values, Tensor step, bool mean, str ring) -> (Tensor, Tensor)");
  m.def("ring_broadcast_(Tensor(a!)[] tensors, int root, str ring) -> ()");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  using namespace penstock::ops;
  m.impl("ring_meet", ring_meet);
  m.impl("ring_step", ring_step);
  m.impl("ring_all_reduce_", ring_all_reduce_);
  m.impl("ring_gather", ring_gather);
  m.impl("ring_broadcast_", ring_broadcast_);
}
