// A parameter and its sum, and where the sums of all parameters are.
#pragma once

#include <ATen/DimVector.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/python_headers.h>

#include <atomic>
#include <optional>
#include <utility>

#include "number.h"
#include "tensor_identity.h"

namespace fusedacc::autograd {

// What p.grad holds, and so where the sum is. `GradState` in fusedacc/accumulators/state.py describes each,
// and has the same numbers.
enum class GradState : int8_t { kNotOurs, kPublished, kDtypeCopy, kAutogradPending, kIgnored };

// Python's `Slot` extends this class, and keeps the parameter alive. A reference to the parameter from here,
// strong or weak, would make `torch.utils.swap_tensors` fail.
class Slot {
 public:
  explicit Slot(PyObject* parameter) : parameter_(parameter) {}

  const at::Tensor& parameter() const;
  // p.grad. `Tensor::grad` would first ask whether the parameter is a leaf, and warn if not.
  const at::Tensor& p_grad() const { return parameter().unsafeGetTensorImpl()->grad(); }
  bool is_placed(const at::Tensor& gradient) const {
    return placed.has_value() && gradient.defined() && placed->refers_to(gradient);
  }
  // Whether p.grad, which holds this gradient, was filled by autograd or the user, and counts.
  bool is_foreign(const at::Tensor& gradient) const;
  // The memory of a new sum, with the strides that autograd gives a gradient.
  at::Tensor new_sum() const;

  // The sum while it is private, else undefined.
  at::Tensor accumulator;
  // The memory of the sum that modules may add to at any time (`main_grad=True`), else undefined. It holds
  // zeros, or what modules have just added, while it is not the sum.
  at::Tensor main_grad;
  // The deferred scale: the factor by which the sum is still to be multiplied.
  Number beta;
  GradState grad_state = GradState::kNotOurs;
  // The tensor that was last put into p.grad, its version then, and its bytes if it is sparse.
  std::optional<TensorIdentity> placed;
  int64_t placed_version = 0;
  std::optional<int64_t> sparse_bytes;
  // Whether `ParamGrads.set_aside` has put p.grad aside for `ignore()`.
  bool is_aside = false;

  // Of the parameter and its sum, as Python has described them last.
  at::ScalarType dtype = at::ScalarType::Undefined;
  at::ScalarType accumulate_dtype = at::ScalarType::Undefined;
  std::optional<c10::Device> device;
  // Whether native code can run the backend that adds its gradients.
  bool is_native = false;
  // Whether only plain torch can add its gradients.
  std::atomic<bool> needs_eager{false};
  // Whether the sum must be in a bucket that is all-reduced. Python makes these sums.
  bool in_reduce_bucket = false;
  // Whether a hook after the parameter's node may be that of a reducer, which reads p.grad. False with
  // `data_parallel=`, where it is ours.
  bool may_be_reduced_outside = true;
  // Whether modules have written parts of its sum, which Python completes at the end of the backward pass.
  bool is_begun = false;
  // Whether the parameter has the memory, dtype, shape and AccumulateGrad node, and requires a gradient, as
  // when `note_seen` was called last.
  bool is_as_seen() const;
  void note_seen();
  void forget_seen() { seen_.reset(); }

  // Whether FSDP2 has sharded the parameter, and whether a module can write its gradient.
  bool sharded = false;
  bool has_path = false;

  // The AccumulateGrad node with our hook; null without one. Python keeps the node alive.
  std::atomic<torch::autograd::AccumulateGrad*> node{nullptr};
  // The graph task in which autograd stores a gradient that is added as soon as the node has run;
  // -1: none.
  std::atomic<int> collects_in{-1};
  // The stream that has last written to the sum in the running backward passes.
  std::optional<c10::Stream> writer;
  // Whether an addition to the sum waits for a launch.
  bool waits = false;

 private:
  struct Seen {
    const void* data;
    at::ScalarType dtype;
    at::DimVector sizes;
    bool is_trained;
    const torch::autograd::Node* node;

    bool operator==(const Seen&) const = default;
  };
  // None for a parameter that is not plain, or on another kind of device than a CPU or GPU of CUDA.
  std::optional<Seen> look() const;

  PyObject* const parameter_;
  std::optional<Seen> seen_;
};

// Where the sums of a wrapper's parameters are. Python's `ParamGrads` extends this class.
class Sums {
 public:
  explicit Sums(bool always_exposed) : always_exposed(always_exposed), exposed(always_exposed) {}

  // The sum of a slot; undefined before the first gradient. It is still to be multiplied by `Slot::beta`.
  at::Tensor current(const Slot& slot) const;
  // Makes a tensor the sum: in p.grad if users see sums there, else in private.
  void put(Slot& slot, const at::Tensor& sum);
  // Makes `main_grad`, where there is one, the sum of a slot without a sum. Returns false if the sum is
  // another tensor: then Python decides.
  bool begin_main_grad(Slot& slot);
  // Makes a tensor the sum and p.grad.
  void publish(Slot& slot, const at::Tensor& sum);
  // placed: what was put into p.grad; undefined for nothing.
  void set_state(Slot& slot, GradState state, const at::Tensor& placed = {});

  const bool always_exposed;
  bool exposed;             // whether users see sums in p.grad now
  bool consumed = false;    // whether an update has used the gradients in p.grad
  int64_t num_ignored = 0;  // slots in the state kIgnored
};

}  // namespace fusedacc::autograd
