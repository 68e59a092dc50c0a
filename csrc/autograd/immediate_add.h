// Gradients that are added to their accumulators at once, while they are in the cache: one by one, on the
// CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "../common/functors.h"

namespace fusedacc::autograd {

// libfusedacc.so's `fusedacc_add_flat`: it knows the dtypes by their numbers in dtypes.h.
using AddFlat = void (*)(void* accumulator, const void* gradient, int64_t numel, int32_t gradient_dtype,
                         int32_t accumulator_dtype, const Multipliers* by);

// Whether it is an ordinary tensor: no subclass, no wrapper of a function transform, no lazy bits.
bool is_plain(const at::Tensor& tensor);

// Whether element i of the one's memory belongs to element i of the other's, without gaps.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

// The number of a dtype in dtypes.h, or -1.
int32_t dtype_number(at::ScalarType dtype);

// Who adds a product to an accumulator: nobody has said so yet, Python, torch's own call, or libfusedacc.so's
// operator, whose way number w is kOperator + w.
enum class Multiplier : int8_t { kUnknown, kPython, kBlas, kOperator };

// What one wrapper allows while one graph task runs. The accumulators are known weakly: they live and die
// elsewhere.
class ImmediateAdder {
 public:
  explicit ImmediateAdder(AddFlat add) : add_(add) {}

  // The accumulator at this index is of that dtype. What users or an update have put into p.grad may be of
  // another, and is left to Python.
  void expect(int64_t index, at::ScalarType dtype);

  // By a parameter's index: its accumulator, or none where a gradient is to go the other way, and by what the
  // accumulator is to be multiplied first (empty: by 1); 0: its memory holds nothing yet. visible: users see
  // accumulators, in p.grad. streams: the random bits of each one's next addition, as in common/functors.h;
  // -1, or none of them: it is rounded to nearest.
  void load(const std::vector<std::optional<at::Tensor>>& accumulators, std::vector<double> betas,
            bool visible, int64_t seed, std::vector<int64_t> streams);

  // From now on gradients of this graph task are multiplied by scale and added.
  void open(int task, double scale);

  // None any more. Returns the indices of what has been added to since open() or added().
  std::vector<int64_t> close();
  std::vector<int64_t> added();

  // Whether a sum is still to be multiplied first, or to be written over.
  bool owes();

  // The gradients of this parameter go the other way from now on.
  void skip(int64_t index);

  // Asked when a gradient of another graph task comes: whether it has opened this one for it.
  void set_opener(std::function<bool(int)> opener) { opener_ = std::move(opener); }

  // While it is held, nothing is added. Take it before the GIL.
  std::unique_lock<std::recursive_mutex> hold() { return std::unique_lock(mutex_); }

  // Adds, or returns false with nothing done. The gradient is strided and on the CPU. The GIL must not be
  // held: to lock an accumulator that only Python refers to takes it, and hooks on other threads do so within
  // the mutex.
  bool take(int task, int64_t index, const at::Tensor& gradient, const at::Tensor& parameter);

  // accumulator = beta * accumulator + scale * left^T right likewise; operands are matrices on the
  // accumulator's device.
  bool multiply(int task, int64_t index, const at::Tensor& left, const at::Tensor& right,
                const at::Tensor& parameter, Multiplier by);

  // accumulator[i] += scale * the gradients of row i, for each row that is named; likewise.
  bool add_rows(int task, int64_t index, const at::Tensor& rows, const at::Tensor& gradients,
                const at::Tensor& parameter, int64_t padding, bool by_frequency);

 private:
  bool is_open(int task) const {
    return task_.load(std::memory_order_relaxed) == task || (task >= 0 && opener_ && opener_(task));
  }
  // The accumulator that may be added to, or undefined.
  at::Tensor accumulator_of(int task, int64_t index, const at::Tensor& parameter);
  void note(int64_t index, const at::Tensor& accumulator);
  bool is_stochastic(int64_t index) const { return !streams_.empty() && streams_[index] >= 0; }
  // The last arguments of the operators: seed and streams.
  void push_noise(std::vector<c10::IValue>& stack, int64_t index) const;

  const AddFlat add_;
  std::function<bool(int)> opener_;
  std::recursive_mutex mutex_;  // an operator may run Python, which may ask for anything
  std::atomic<int> task_{-1};
  double scale_ = 1;
  bool visible_ = false;
  std::vector<at::ScalarType> dtypes_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> accumulators_;
  std::vector<double> betas_;
  int64_t seed_ = 0;
  std::vector<int64_t> streams_;
  std::vector<bool> fresh_;
  std::vector<int64_t> added_;
};

}  // namespace fusedacc::autograd
