// Additions to sums on GPUs that wait for a common launch, and the order of the streams that write to these
// sums. The engine of autograd orders streams only for the gradients that it passes on itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace fusedacc::autograd {

// The current stream of a device, or of the tensor's.
c10::Stream current_stream(const c10::Device& device);
c10::Stream current_stream(const at::Tensor& tensor);

// Not thread-safe: `ImmediateAdder` holds its lock.
class LaunchQueue {
 public:
  // limit: bytes of gradients that may wait.
  explicit LaunchQueue(int64_t limit) : limit_(limit) {}

  // sum <- beta * sum + scale * gradient on the current stream, with the next launch. may_wait: whether no
  // other code can change the gradient until then.
  void add(const at::Tensor& sum, const at::Tensor& gradient, double scale, double beta, bool may_wait);
  // The caller is about to write to the sum on the current stream: after all earlier writes to it.
  void write(const at::Tensor& sum);
  // Launches what waits for this sum, and lets the current stream wait for the last write to it.
  void settle(const at::Tensor& sum);
  // Launches all that waits, and lets the current streams wait for all writes. Each thread that ends a
  // backward pass calls it.
  void join();
  // All backward passes have ended, and their threads have called `join`.
  void forget() { last_writers_.clear(); }

 private:
  // One launch.
  struct Batch {
    const c10::Stream stream;
    const at::ScalarType gradient_dtype;
    const at::ScalarType sum_dtype;
    const double scale;
    const double beta;
    std::vector<at::Tensor> sums;
    std::vector<at::Tensor> gradients;
  };
  using Identity = const at::TensorImpl*;

  Batch& batch_for(const Batch& like);
  void launch();
  static void run(const Batch& batch);
  // Lets `stream` wait for the last write to the sum, and records a write on `stream`.
  void order(const at::Tensor& sum, const c10::Stream& stream);

  const int64_t limit_;
  int64_t nbytes_ = 0;
  std::vector<Batch> batches_;
  std::unordered_set<Identity> waiting_;  // the sums in the batches
  std::unordered_map<Identity, c10::Stream> last_writers_;
};

}  // namespace fusedacc::autograd
