// Adds gradients to accumulators without Python: on a CPU one by one, while they are in the cache, and on a
// GPU many with one launch.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "../common/functors.h"
#include "launch_queue.h"
#include "tensor_identity.h"

namespace fusedacc::autograd {

// The function `fusedacc_add_flat` of libfusedacc.so. Dtypes are numbered as in dtypes.h.
using AddFlat = void (*)(void* accumulator, const void* gradient, int64_t numel, int32_t gradient_dtype,
                         int32_t accumulator_dtype, const Multipliers* by);

// Whether it is an ordinary tensor: no subclass, no wrapper of a function transform, no lazy bits.
bool is_plain(const at::Tensor& tensor);

// Whether both tensors are dense and have their elements in the same order in memory.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

// The number of a dtype in dtypes.h, or -1.
int32_t dtype_number(at::ScalarType dtype);

// The method that adds a product to an accumulator: not chosen yet; Python; torch's addmm; its addmm of
// 16-bit operands into a float32 accumulator on a GPU; or method w of libfusedacc.so's operator for CPUs, as
// kOperator + w.
enum class ProductMethod : int8_t { kUnknown, kPython, kBlas, kWideningBlas, kOperator };

// The accumulators of one wrapper that may be added to while one graph task runs. It refers weakly to private
// ones, and reads those that users see from p.grad.
class ImmediateAdder {
 public:
  // limit: bytes of gradients that may wait for a launch.
  ImmediateAdder(AddFlat add, int64_t limit) : add_(add), queue_(limit) {}

  // Sets the dtype of the accumulator at this index. A tensor of another dtype, which the user or an update
  // may have put into p.grad, is left to Python.
  void expect(int64_t index, at::ScalarType dtype) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    const size_t count = std::max(dtypes_.size(), static_cast<size_t>(index) + 1);
    dtypes_.resize(count, at::ScalarType::Undefined);
    dtypes_[index] = dtype;
  }

  // By a parameter's index: its accumulator, or none where a gradient is to go the other way, and by what the
  // accumulator is to be multiplied first (empty: by 1); 0: there is none yet, and the first product may
  // overwrite the memory given, or new memory. exposed: users see accumulators, in p.grad. generation: of the
  // accumulators (`ParamGrads`).
  void load(const std::vector<std::optional<at::Tensor>>& accumulators, std::vector<double> betas,
            bool exposed, int64_t generation);
  // Forgets all accumulators; the next ones are private.
  void unload();
  // From now on the accumulator at this index is this tensor times `beta`.
  void set(int64_t index, const at::Tensor& accumulator, double beta);
  void set_generation(int64_t generation) { generation_ = generation; }
  // Whether the accumulators of this generation are loaded, and need no more than an addition.
  bool has(int64_t generation) { return generation_ == generation && !has_pending_scale(); }
  bool is_exposed() const { return exposed_; }
  // Refers to no accumulator any more, because they may be in p.grad now.
  void release();
  // Prepares an empty window: first products may make the sums that they have made in the last one.
  void offer_again();
  // The sums in new memory, by their parameter's index, that products have made since the last call.
  std::vector<std::pair<int64_t, at::Tensor>> take_made();

  // From now on gradients of this graph task are multiplied by scale and added.
  void open(int task, double scale) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    scale_ = scale;
    added_.clear();
    made_.clear();
    queue_.forget();  // of a backward pass that has failed
    task_ = task;
  }

  // Stops adding. Both return the indices of the accumulators added to since open() or added().
  std::vector<int64_t> close() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    task_ = -1;
    queue_.join();
    if (exposed_) release();
    return std::exchange(added_, {});
  }
  std::vector<int64_t> added() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return std::exchange(added_, {});
  }

  // Whether a sum still has a deferred scale, which the next addition applies, or is yet to be made.
  bool has_pending_scale() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return std::any_of(betas_.begin(), betas_.end(), [](double beta) { return beta != 1; });
  }

  // Whether a product has made the sum that was loaded at this index with a beta of 0.
  bool has_written(int64_t index) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return is_offered(index) && betas_[index] != 0;
  }
  // Whether a product may make, or has made, the sum at this index.
  bool is_offered(int64_t index) const {
    return index < static_cast<int64_t>(offered_.size()) && offered_[index];
  }

  // From now on, leaves the gradients of this parameter to Python.
  void skip(int64_t index) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    generation_ = -1;
    if (index < 0 || index >= static_cast<int64_t>(accumulators_.size())) return;
    const at::Tensor accumulator = at::Tensor(accumulators_[index].lock());
    if (exposed_) {
      queue_.join();  // the accumulator is in p.grad
    } else if (accumulator.defined() && !accumulator.is_cpu()) {
      queue_.settle(accumulator);
    }
    accumulators_[index].reset();
    betas_[index] = 1;  // else a product would make the sum a second time
    if (exposed_) shown_[index] = TensorIdentity(at::Tensor());
  }
  // Lets the current streams wait for all that was added in the running backward passes. is_last: whether no
  // other one is running.
  void join(bool is_last) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    queue_.join();
    if (is_last) queue_.forget();
  }

  // Sets a function that is called for a gradient of another graph task. It returns whether it has opened
  // this adder for that task.
  void set_opener(std::function<bool(int)> opener) { opener_ = std::move(opener); }

  // While this lock is held, nothing is added. Take it before the GIL.
  std::unique_lock<std::recursive_mutex> hold() { return std::unique_lock(mutex_); }

  // Adds, or returns false with nothing done. The gradient is strided and on the accumulator's device.
  // is_sole: whether no other code refers to it; then it may wait on a GPU. The caller must not hold the GIL:
  // locking an accumulator that only Python refers to takes the GIL, and hooks on other threads do so while
  // they hold the mutex.
  bool take(int task, int64_t index, const at::Tensor& gradient, const at::Tensor& parameter, bool is_sole);

  // The same for accumulator = beta * accumulator + scale * left^T right. The operands are matrices on the
  // accumulator's device.
  bool multiply(int task, int64_t index, const at::Tensor& left, const at::Tensor& right,
                const at::Tensor& parameter, ProductMethod method);

  // The same for accumulator[i] += scale * (the gradients of row i), for the given rows only.
  bool add_rows(int task, int64_t index, const at::Tensor& rows, const at::Tensor& gradients,
                const at::Tensor& parameter, int64_t padding, bool by_frequency);

 private:
  bool is_open(int task) const {
    return task_.load(std::memory_order_relaxed) == task || (task >= 0 && opener_ && opener_(task));
  }
  // The accumulator that may be added to, or undefined. makes: whether it may be made.
  at::Tensor accumulator_of(int task, int64_t index, const at::Tensor& parameter, bool makes = false);
  bool multiply_on_gpu(int64_t index, const at::Tensor& into, const at::Tensor& left, const at::Tensor& right,
                       ProductMethod method);
  void note(int64_t index, const at::Tensor& accumulator);

  const AddFlat add_;
  LaunchQueue queue_;
  std::function<bool(int)> opener_;
  std::recursive_mutex mutex_;  // an operator may run Python, which may call back
  std::atomic<int> task_{-1};
  double scale_ = 1;
  bool exposed_ = false;
  std::vector<at::ScalarType> dtypes_;
  std::vector<WeakTensor> accumulators_;
  std::vector<TensorIdentity> shown_;  // what is expected in p.grad if `exposed_`
  std::vector<std::pair<int64_t, at::Tensor>> made_;
  // What each accumulator is multiplied by first. During a pass this is true, and Python's
  // `DeferredScales.scales` still has the scales that the pass has applied; `note_added` removes them.
  std::vector<double> betas_;
  std::vector<bool> offered_;  // whether a product may make, or has made, this sum
  int64_t generation_ = -1;
  std::vector<int64_t> added_;
};

}  // namespace fusedacc::autograd
