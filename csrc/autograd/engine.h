// The engine of one wrapper: its hooks deliver gradients here, modules write products and rows, and each
// backward pass begins and ends here. Most windows need Python only to call the inner optimizer and to begin
// the next window. docs/design.md lists the exceptions.
#pragma once

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "../common/functors.h"
#include "launch_queue.h"
#include "reason.h"
#include "window.h"

namespace fusedacc::autograd {

// The function `fusedacc_add_flat` of libfusedacc.so. Dtypes are numbered as in dtypes.h.
using AddFlat = void (*)(void* sum, const void* gradient, int64_t numel, int32_t gradient_dtype,
                         int32_t sum_dtype, bool overwrites, const Multipliers* by);

// The method that adds a product to a sum. Python has the same numbers (fusedacc/kernels/constants.py).
enum class ProductMethod : int8_t {
  kUnknown,       // not chosen yet
  kPython,        // only Python can
  kBlas,          // torch's addmm
  kWideningBlas,  // its addmm of 16-bit operands into a float32 sum on a GPU
  kOperator,      // and above: libfusedacc.so's operator for CPUs, by method `value - kOperator`
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  using SlotPointer = std::shared_ptr<Slot>;

  // The Python functions that the engine calls. None refers strongly to an object that has the engine.
  struct Callbacks {
    // Begins the running backward pass: returns its `BackwardPass`, or None if autograd is to handle it
    // alone.
    PyObject* begin;
    // Handles a gradient: called with a slot, the gradient, the reason and whether only the engine of
    // autograd refers to it. Returns whether it was taken.
    PyObject* receive;
    // Adds gradients: called with a backward pass, slots and gradients.
    PyObject* add;
    // Returns the backward pass's scale times the window's `sum_scale`.
    PyObject* scale;
    // Adds a gradient that hooks have seen in p.grad: called with a slot, after its node has run.
    PyObject* stored;
    // Ends a backward pass.
    PyObject* finish;
  };

  // add: of libfusedacc.so. limit: bytes of gradients that may wait for a launch.
  static std::shared_ptr<Engine> make(AddFlat add, int64_t limit, std::shared_ptr<Sums> sums,
                                      std::shared_ptr<WindowState> window, Callbacks callbacks);
  ~Engine();

  // Held while sums are written. Take it without the GIL.
  std::recursive_mutex& mutex() { return mutex_; }

  // During a backward pass

  // Handles a gradient of the slot's parameter that has reached the hook on `node`. Returns whether it was
  // taken; else autograd stores it. gradient: undefined if the backward pass has none.
  bool deliver(const SlotPointer& slot, torch::autograd::AccumulateGrad& node, const at::Tensor& gradient);
  // Called after the node has run. Adds the gradient that autograd has stored, if Python has asked for it.
  void after_node(const SlotPointer& slot);
  // Adds to the sum of a slot within a module's backward, or returns false with nothing added. Operands are
  // matrices: sum = beta * sum + scale * left^T right, or sum[i] += scale * (the gradients of row i).
  bool add_product(const SlotPointer& slot, const at::Tensor& left, const at::Tensor& right,
                   ProductMethod method);
  bool add_rows(const SlotPointer& slot, const at::Tensor& rows, const at::Tensor& gradients, int64_t padding,
                bool by_frequency);
  // The same for one matrix of a stack, sum[index] += scale * gradient, if the stack has a sum already.
  bool add_part(const SlotPointer& slot, const at::Tensor& gradient, int64_t index);

  // Python is about to write to the sum of a slot on the current stream, or to read it.
  void settle(const SlotPointer& slot);
  // Adds all that waits.
  void flush();
  // Lets the current streams wait for all that was added in the running backward passes.
  void join();

  // Backward passes

  // The backward pass in which this thread runs; null if the engine does not know it.
  std::shared_ptr<BackwardPass> current_backward();
  // The same, but an unknown one begins. Null where autograd handles it alone.
  std::shared_ptr<BackwardPass> enter();
  // All backward passes, with those that have failed.
  std::vector<std::shared_ptr<BackwardPass>> backwards();
  // Calls `finish` again, after the callbacks that are queued now.
  void call_back(const std::shared_ptr<BackwardPass>& backward);
  // Whether several threads have ended backward passes.
  bool has_threads() const { return has_threads_; }
  // Forgets a backward pass. Returns whether it was known.
  bool drop(const std::shared_ptr<BackwardPass>& backward);

  // Windows

  // How the next micro-batches are handled.
  struct Plan {
    // Backward passes need no more than additions, times `scale`.
    double scale = 1;
    // The micro-batches of a window; 0: `step()` ends none, and there is no last one.
    int64_t steps = 0;
    // Whether all windows are alike. Else Python begins and ends the first backward pass of each.
    bool repeats = false;
    // Whether an update needs only what p.grad holds after a window's last backward pass.
    bool updates_plainly = false;
  };
  void set_plan(Plan plan);
  // Drops the plan: Python begins the next backward pass.
  void drop_plan();
  // Records whether the named condition holds. While any does, Python begins and ends all backward passes.
  void set_condition(const std::string& name, bool holds);
  void set_slots(std::vector<SlotPointer> slots);
  // Runs `step()` in the middle of a window; false leaves it to Python. groups: of the inner optimizer.
  // known: the parameters of each group as Python has seen them last.
  bool step(const pybind11::object& groups, const pybind11::list& known);
  // Whether `zero_grad()` now does nothing, because it is in the middle of a window.
  bool has_nothing_to_clear();
  // Ends a window's last micro-batch, if its update has only to run the inner optimizer; else false.
  // Arguments as of `step`.
  bool begin_update(const pybind11::object& groups, const pybind11::list& known);
  // Call it after the update: marks the gradients in p.grad as used. False where Python must do so.
  bool end_update();
  // Clears the gradients that an update has used, if nothing else is to be cleared; else false.
  bool clear_used(const pybind11::object& groups, const pybind11::list& known);

  // Whether all parameters are as Python has seen them last; false if there are none.
  bool are_as_seen() const;
  // Whether any parameter has a p.grad, and whether one has a p.grad that autograd or the user has filled.
  bool any_gradient() const;
  bool any_foreign_gradient() const;
  // Whether all additions go to Python: traffic is measured, or sums are rounded stochastically.
  static void set_watched(bool is_watched);
  void set_rounds_stochastically(bool rounds) { rounds_stochastically_ = rounds; }
  // While products are postponed, only Python writes them.
  void set_postpones(bool postpones) { postpones_ = postpones; }
  // Some parameters are, or were, on a GPU.
  void note_gpu() { on_gpu_ = true; }
  // A backward pass ran past our hooks, as those of compiled autograd do.
  void note_bypass() { is_bypassed_ = true; }
  bool is_bypassed() const { return is_bypassed_; }

 private:
  Engine(AddFlat add, int64_t limit, std::shared_ptr<Sums> sums, std::shared_ptr<WindowState> window,
         Callbacks callbacks);

  // Whether there is a plan for this window, and nothing unusual has happened.
  bool plan_applies() const;
  // The same, and no update has used the gradients in p.grad. Then this code may handle a backward pass, a
  // `step()` or a `zero_grad()`.
  bool may_use_plan() const;
  // Whether this code may begin the next backward pass.
  bool may_begin() const;
  bool is_last() const { return plan_->steps != 0 && window_->micro_step + 1 >= plan_->steps; }
  // Puts the sums of a window into p.grad, or returns false with nothing done.
  bool publish();
  // Whether every p.grad is what was put there, or is not there.
  bool shows_only_sums() const;
  // Whether the nodes on GPUs were created on the streams that are current.
  bool are_on_current_streams() const;
  std::shared_ptr<BackwardPass> begin(int identity);
  void queue_callback(const std::shared_ptr<BackwardPass>& backward, std::shared_ptr<void> running);
  void finish(const std::shared_ptr<BackwardPass>& backward);
  // Records that this thread ends a backward pass.
  void note_thread();
  bool receive_in_python(const SlotPointer& slot, const at::Tensor& gradient, Reason reason,
                         bool is_unshared);
  void add_in_python(const std::vector<SlotPointer>& slots, std::vector<at::Tensor> gradients,
                     const std::shared_ptr<BackwardPass>& backward);
  // The factor of a backward pass's gradients on the current stream of this device.
  Number scale_of(const std::shared_ptr<BackwardPass>& backward, const c10::Device& device);
  // Adds an ordinary gradient; false where Python must.
  bool add(const std::shared_ptr<BackwardPass>& backward, const SlotPointer& slot,
           const at::Tensor& parameter, const at::Tensor& gradient, bool is_unshared);
  void add_first(const SlotPointer& slot, const at::Tensor& parameter, const at::Tensor& gradient,
                 const Number& scale, bool is_unshared);
  // Adds now on a CPU, and with the next launch on a GPU.
  void run(const SlotPointer& slot, const at::Tensor& sum, const at::Tensor& gradient,
           const Addition& addition, bool is_unshared);
  void run_now(const at::Tensor& sum, const at::Tensor& gradient, const Addition& addition);
  bool must_add_in_python(const Slot& slot, const Number& scale) const;
  // The slot's sum, to which a module may write in a running backward pass.
  struct Target {
    const std::shared_ptr<BackwardPass> backward;
    const at::Tensor sum;
    const bool is_new;  // new memory, which holds nothing yet
    const double scale;
  };
  // None where Python must write.
  std::optional<Target> target_for(Slot& slot);
  bool multiply(const at::Tensor& sum, const at::Tensor& left, const at::Tensor& right, ProductMethod method,
                double scale, double beta);
  // Makes a sum current that was written, or is in a batch that waits.
  void note_written(Slot& slot, const at::Tensor& sum, bool is_new);

  const AddFlat add_;
  const std::shared_ptr<Sums> sums_;
  const std::shared_ptr<WindowState> window_;
  const Callbacks callbacks_;
  // Guards the queue, the backward passes and the sums. An operator may run Python, which may call back.
  std::recursive_mutex mutex_;
  LaunchQueue queue_;
  std::unordered_map<int, std::shared_ptr<BackwardPass>> backwards_;
  std::thread::id last_thread_;  // the thread that has ended the last backward pass
  std::atomic<bool> has_threads_{false};
  // The GIL guards these four.
  std::optional<Plan> plan_;
  int64_t planned_window_ = 0;  // the number of the window for which the plan was made
  std::unordered_set<std::string> conditions_;
  std::vector<SlotPointer> slots_;
  bool rounds_stochastically_ = false;
  bool postpones_ = false;
  bool on_gpu_ = false;
  std::atomic<bool> is_bypassed_{false};
};

}  // namespace fusedacc::autograd
