// Additions to sums that wait for a common launch, and the order of the streams that write to these sums. The
// engine of autograd orders streams only for the gradients that it passes on itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "backward_pass.h"

namespace fusedacc::autograd {

// The current stream of a device; none for a CPU.
std::optional<c10::Stream> current_stream(const c10::Device& device);

// sum <- scale * gradient, if it overwrites, or beta * sum + scale * gradient.
struct Addition {
  Number scale;
  Number beta;
  bool overwrites = false;

  bool is_same(const Addition& other) const {
    return overwrites == other.overwrites && scale.is_same(other.scale) && beta.is_same(other.beta);
  }
};

// Calls the library's operator for these lists.
void run_addition(const std::vector<at::Tensor>& sums, const std::vector<at::Tensor>& gradients,
                  const Addition& addition);

// Not thread-safe: `Engine` holds its lock.
class LaunchQueue {
 public:
  using Slots = std::vector<std::shared_ptr<Slot>>;
  // Adds the gradients of these slots in Python, in the given backward pass.
  using AddInPython =
      std::function<void(const Slots&, std::vector<at::Tensor>, const std::shared_ptr<BackwardPass>&)>;

  // limit: bytes of gradients that may wait. note_loss: called if an exception has lost gradients that
  // waited.
  LaunchQueue(int64_t limit, AddInPython add_in_python, std::function<void()> note_loss)
      : limit_(limit), add_in_python_(std::move(add_in_python)), note_loss_(std::move(note_loss)) {}

  // Adds to the slot's sum, for which nothing waits, on the current stream with the next launch. may_wait:
  // false if other code refers to the gradient, and so might change it: then the launch is at once. Other
  // tensors may share its memory, so a hook must not write later to what it has returned. backward: only
  // `add_in_python` passes it.
  void add(const std::shared_ptr<Slot>& slot, const at::Tensor& sum, const at::Tensor& gradient,
           const Addition& addition, bool may_wait, const std::shared_ptr<BackwardPass>& backward = nullptr);
  // The same, but Python adds the gradient, and may create the sum. backward: gives the scale.
  void add_in_python(const std::shared_ptr<Slot>& slot, const at::Tensor& gradient,
                     const std::shared_ptr<BackwardPass>& backward, bool may_wait);
  // The caller is about to write to the slot's sum on the current stream: orders this after all earlier
  // writes to the sum.
  void order_write(const std::shared_ptr<Slot>& slot);
  // Launches all that waits.
  void flush();
  // Launches all that waits, and lets the current streams wait for all writes. Each thread that ends a
  // backward pass calls it.
  void join();
  // All backward passes have ended, and their threads have called `join`.
  void forget();
  // Drops what waits.
  void drop();

 private:
  // One launch.
  struct Batch {
    const std::optional<c10::Stream> stream;
    const at::ScalarType gradient_dtype;
    const Addition addition;
    const std::shared_ptr<BackwardPass> backward;  // null where native code adds
    Slots slots{};
    std::vector<at::Tensor> sums{};
    std::vector<at::Tensor> gradients{};
  };

  // Lets `stream` wait for the last write to the slot's sum, and records a write on `stream`.
  void order(const std::shared_ptr<Slot>& slot, const c10::Stream& stream);

  const int64_t limit_;
  const AddInPython add_in_python_;
  const std::function<void()> note_loss_;
  int64_t nbytes_ = 0;
  std::vector<Batch> batches_;
  Slots written_;                     // slots with a `writer`
  std::vector<c10::Stream> streams_;  // on which sums were written
};

}  // namespace fusedacc::autograd
