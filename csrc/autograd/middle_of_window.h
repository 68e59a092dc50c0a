// Runs micro-batches without Python. Those in the middle of a window are all alike, because only the window's
// first creates the sums and only its last finishes them. Python decides once how they are handled. It ends
// the first and the last backward pass itself if they are unusual, and then decides again. The same class
// checks whether an update needs only the inner optimizer, and clears the window after it.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "hook.h"
#include "records.h"

namespace fusedacc::autograd {

// Attributes of Python objects that must not change. They are read at each check, so that no code has to
// report a change. References are weak, because strong ones would form cycles that the garbage collector
// cannot see. All methods need the GIL.
class Assumptions {
 public:
  // Pairs of an object and an attribute's name: those that must be false, those that must stay the same, and
  // versions, which stay the same while only this code acts.
  explicit Assumptions(const pybind11::tuple& lists);
  // Records a module that must not be imported (None for none).
  void forbid(pybind11::object not_imported) { not_imported_ = std::move(not_imported); }
  // Records the present values of what stays, or only the versions. Returns false if an assumption is already
  // violated.
  bool note(bool only_versions = false);
  bool hold() const;

 private:
  struct Assumption {
    pybind11::object owner;  // a weak reference
    Attribute attribute;
    pybind11::object value;  // of what must stay the same
  };
  std::vector<Assumption> all_;
  pybind11::object not_imported_ = pybind11::none();
  size_t num_false_, num_fixed_;  // the first ones, which must be false, and those without the versions
};

// A backward pass that native code has begun.
struct Run {
  const int task;
  const bool is_alike;  // neither the window's first nor its last
  bool is_taken_over;   // by Python
};

// The micro-batches of one wrapper's windows: those in the middle, the backward passes of the first and the
// last one, the check before an update and the clearing after it. The GIL guards its state.
class MiddleOfWindow : public std::enable_shared_from_this<MiddleOfWindow> {
 public:
  // owners, Python's `Owners`:
  //   owners[0]: Python's `Window`.
  //   owners[1]: the inner optimizer. Its groups must have the parameters in `_seen` of owners[2].
  //   owners[2]: Python's `ParameterSet`.
  //   owners[3]: Python's `HookRegistry`.
  //   owners[4]: `finish`, called with a graph task's number when a task ends that Python has taken over.
  //   owners[5]: `finish_first_or_last`, called when an unusual first or last backward pass of a window ends,
  //     with the scale, the indices of the sums that were added to, and the buckets.
  // note_added: called with the indices of exposed sums whose first addition has applied a deferred scale, or
  // has made the sum. records: as `SumRecords`. assumptions: Python's `Assumptions`. make() sets the object
  // as the adder's opener.
  static std::shared_ptr<MiddleOfWindow> make(const pybind11::tuple& owners, pybind11::object note_added,
                                              const pybind11::tuple& records,
                                              const pybind11::tuple& assumptions,
                                              std::shared_ptr<ImmediateAdder> adder,
                                              std::shared_ptr<KnownTasks> tasks);

  // The next backward passes are like the last: their gradients are multiplied by `scale` and added to the
  // sums that the adder was loaded with. steps: the micro-batches of the window; 0: `step()` ends none, and
  // Python says when this is over. begins_last: the backward of the last may begin here too. not_imported: as
  // in Assumptions. on_gpu: some sums are on a GPU.
  void arm(double scale, int64_t steps, bool begins_last, pybind11::object not_imported, bool on_gpu);
  // The window is empty, and the adder has no sums yet, but it may make some.
  // Its first backward pass may begin here: its gradients are multiplied by `scale` and wait in buckets, or
  // are added where the adder was loaded (`opens`). steps, begins_last: as in `arm`, for the others; 0 if
  // Python decides about them. updates: the update needs nothing but the sums in p.grad.
  void await_first(double scale, bool opens, pybind11::object not_imported, int64_t steps, bool begins_last,
                   bool updates);
  // The lanes whose gradients wait in buckets then: of each its key, its buckets, the limit of a bucket, and
  // whether its gradients may become sums.
  void set_lanes(const pybind11::list& lanes);
  // Every sum is in p.grad, and the update needs nothing else. `end_before_update` tells whether that is
  // still so at `step()`.
  void await_update(int64_t steps, pybind11::object not_imported);
  void disarm() {
    armed_ = awaits_clear_ = false;
    first_ = {};
  }

  // Called at a graph task's first gradient, without the GIL: opens the adder if this code may handle the
  // task.
  bool enter(int task);

  // Runs `AccumulatingOptimizer.step()` in mid-window; false leaves that to Python.
  bool step();
  // Whether `AccumulatingOptimizer.zero_grad()` has nothing to do, because micro-batches of a window have run
  // and it is not complete; false leaves the decision to Python.
  bool zero_grad();
  // Whether a `step()` now has only to run the inner optimizer and to begin the next window. If so, this ends
  // the micro-batch. In both cases it disarms.
  bool end_before_update();
  // That update is done. If native code has handled the whole window, it may handle the next one alike.
  void note_update();
  // Does what `zero_grad()` does after such an update.
  bool clear();

  // Hands the graph task that runs over to Python. Returns its number, a function that returns None once the
  // task has failed, its buckets by their lanes' keys, and whether the adder is open for it; None if none
  // runs. Python calls `let_go` when it has registered the task.
  pybind11::object hand_over();
  void let_go() {
    run_task_ = kNone;
    buckets_.clear();
  }
  bool runs() const { return run_task_ != kNone; }

 private:
  static constexpr int kNone = -1;

  MiddleOfWindow(const pybind11::tuple& owners, pybind11::object note_added, const pybind11::tuple& records,
                 const pybind11::tuple& assumptions, std::shared_ptr<ImmediateAdder> adder,
                 std::shared_ptr<KnownTasks> tasks);
  // As the arguments of `arm` and `await_first`.
  struct Plan {
    double scale = 1;
    int64_t steps = 0;
    bool begins_last = false;
    bool on_gpu = false;
    bool awaits_first = false;
    bool opens = true;
    // Whether native code may put the sums into p.grad after the window's last backward pass. Only if it has
    // begun the window, because only `await_first` is told what the update needs; else Python publishes.
    bool may_publish = false;
    bool updates = false;
  };
  // A lane (device, gradient dtype, accumulate dtype) of parameters, and the buckets of its pending
  // gradients.
  struct Lane {
    const int64_t key;
    const std::shared_ptr<BucketMap> buckets;
    const int64_t limit;
    const bool makes_sums;
  };

  // Whether no assumption has changed. If one has, disarms. It never arms: `enter` has disarmed in a window's
  // first and last backward pass, and only what ends them may arm again.
  bool check_assumptions(const pybind11::object& window);
  static int64_t micro_step(const pybind11::object& window);
  // Whether a backward pass of the current micro-batch has ended.
  static bool has_run(const pybind11::object& window);
  // Whether the groups still have the parameters that Python has seen, and every p.grad is as expected.
  bool is_in_step();
  void leave(const Run& run);
  // Ends a task that Python has not taken over, and fills `added` and `waiting`, the arguments of
  // `finish_first_or_last`. Returns false where Python must end the task, because it is an unusual first or
  // last one of a window. `Capture.finish_first_or_last` then notes `added` a second time if `end_last` has
  // noted it. That is harmless: the first note has removed the scales, and the sums exist. This and all that
  // it calls need the adder's lock and the GIL.
  bool end(const Run& run, const pybind11::object& window, std::vector<int64_t>& added,
           std::vector<std::shared_ptr<Bucket>>& waiting);
  // Whether autograd has stored a gradient, because a parameter's AccumulateGrad node has no hook.
  bool has_stored() const;
  // Returns the indices of the sums that were added to.
  std::vector<int64_t> close(int task);
  // These do what Python does at the end of a backward pass, or return false, as `end` does.
  bool end_first(const pybind11::object& window, const std::vector<int64_t>& added,
                 const std::vector<std::shared_ptr<Bucket>>& waiting);
  void end_alike(const std::vector<int64_t>& added);
  bool end_last(const pybind11::object& window, const std::vector<int64_t>& added);
  static void count_backward(const pybind11::object& window);
  static void end_micro_batch(const pybind11::object& window);
  // The update needs only what p.grad holds now.
  void note_published();

  const pybind11::object window_, inner_, parameters_, registry_;  // weak references
  const pybind11::object finish_, finish_first_or_last_, note_added_;
  const SumRecords records_;
  Assumptions assumptions_;
  const std::shared_ptr<ImmediateAdder> adder_;
  const std::shared_ptr<KnownTasks> tasks_;
  std::atomic<bool> armed_{false};
  Plan plan_;
  // A copy of the plan with which the window began. `clear()` restores it for the next window, so that Python
  // decides nothing. Empty (without steps) after `arm`, when Python has decided in mid-window.
  Plan first_;
  bool awaits_clear_ = false;       // `note_update` was called last
  bool had_pending_scale_ = false;  // when the task that runs began, as `ImmediateAdder::has_pending_scale`
  // What p.grad is expected to be, in the order of the groups; empty: None for all.
  std::vector<TensorIdentity> expected_grads_;
  std::vector<Lane> lanes_;
  std::vector<std::pair<int64_t, std::shared_ptr<Bucket>>> buckets_;  // of the task that runs
  int run_task_ = kNone;
  // The engine's callback has the only strong reference: it is gone when the graph task has failed.
  std::weak_ptr<Run> run_;
};

}  // namespace fusedacc::autograd
