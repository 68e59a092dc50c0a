// Runs micro-batches without Python. Those in the middle of a window are all alike: the first one creates the
// sums, and the last one finishes them. Python decides once how they are handled. It ends the first and the
// last backward pass itself if they are unusual, and then decides again.
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
  bool is_pythons;      // whether Python has taken it over
};

// The state of one wrapper, guarded by the GIL.
class MiddleOfWindow : public std::enable_shared_from_this<MiddleOfWindow> {
 public:
  // owners: Python's Window; the inner optimizer, whose groups are to have the parameters that `_seen` of the
  // next, Python's ParameterSet, has; Python's HookRegistry; a function that is called with a graph task's
  // number when one ends that Python has taken over; and a function that is called at the end of a window's
  // first or last one with the scale, the indices of sums that were added to, and the buckets. on_paid:
  // called with the indices of visible sums that have been multiplied, or made, by the first addition to
  // them. records: as `SumRecords`. assumptions: Python's `Assumptions`. The adder asks what is made here.
  static std::shared_ptr<MiddleOfWindow> make(const pybind11::tuple& owners, pybind11::object on_paid,
                                              const pybind11::tuple& records,
                                              const pybind11::tuple& assumptions,
                                              std::shared_ptr<ImmediateAdder> adder,
                                              std::shared_ptr<GraphTasks> tasks);

  // The next backward passes are like the last: their gradients are multiplied by `scale` and added to the
  // sums that the adder was loaded with. steps: the micro-batches of the window; 0: `step()` ends none, and
  // Python says when this is over. begins_last: the backward of the last may begin here too. not_imported: as
  // in Assumptions.
  void arm(double scale, int64_t steps, bool begins_last, pybind11::object not_imported);
  // The window is empty, and the adder has no sums yet, but it may make some.
  // Its first backward pass may begin here: its gradients are multiplied by `scale` and wait in buckets, or
  // are added where the adder was loaded (`opens`). steps, begins_last: as in `arm`, for the others; 0 if
  // Python decides about them. updates: the update needs nothing but the sums in p.grad.
  void await_first(double scale, bool opens, pybind11::object not_imported, int64_t steps, bool begins_last,
                   bool updates);
  // The lanes whose gradients wait in buckets then: of each its key, its buckets, the limit of a bucket, and
  // whether its gradients may become sums.
  void set_lanes(const pybind11::list& lanes);
  // Every sum is in p.grad, and the update needs nothing else. `ends` tells whether that is so at `step()`.
  void await_update(int64_t steps, pybind11::object not_imported);
  void disarm() {
    armed_ = awaits_clear_ = false;
    first_ = {};
  }

  // Called at a graph task's first gradient, without the GIL: opens the adder if this code may handle the
  // task.
  bool enter(int task);

  // Run `AccumulatingOptimizer.step()` and `.zero_grad()` in mid-window; false leaves that to Python.
  bool step();
  bool zero_grad();
  // Whether a `step()` now has only to run the inner optimizer and to begin the next window. Ends the
  // micro-batch then.
  bool ends();
  // That update is done. If native code has handled the whole window, it may handle the next one alike.
  void note_update();
  // Does what `zero_grad()` does after such an update.
  bool clear();

  // Python takes over the graph task that runs: its number, a function that returns None once the task has
  // failed, its buckets by their lanes' keys, and whether the adder is open for it; None where none runs.
  // `let_go` when it has done so.
  pybind11::object running();
  void let_go() {
    run_task_ = kNone;
    buckets_.clear();
  }
  bool runs() const { return run_task_ != kNone; }

 private:
  static constexpr int kNone = -1;

  MiddleOfWindow(const pybind11::tuple& owners, pybind11::object on_paid, const pybind11::tuple& records,
                 const pybind11::tuple& assumptions, std::shared_ptr<ImmediateAdder> adder,
                 std::shared_ptr<GraphTasks> tasks);
  // As the arguments of `arm` and `await_first`.
  struct Plan {
    double scale = 1;
    int64_t steps = 0;
    bool begins_last = false;
    bool awaits_first = false;
    bool opens = true;
    // After the last backward pass p.grad is the sum for every parameter.
    bool publishes = false;
    bool updates = false;
  };
  struct Lane {
    const int64_t key;
    const std::shared_ptr<BucketMap> buckets;
    const int64_t limit;
    const bool makes_sums;
  };

  // Whether this code may begin a backward pass, because no assumption has changed.
  bool may_begin(const pybind11::object& window);
  static int64_t micro_step(const pybind11::object& window);
  // Whether a backward pass of the current micro-batch has ended.
  static bool has_run(const pybind11::object& window);
  // Whether the groups still have the parameters that Python has seen, and every p.grad is as expected.
  bool is_in_step();
  void leave(const Run& run);
  // Ends a task that Python has not taken over, and fills `added` and `waiting`, the arguments of `on_edge`.
  // Returns false where Python must end the task, because it is an unusual first or last one of a window;
  // that Python then notes `added` a second time is harmless. This and all that it calls need the adder's
  // lock and the GIL.
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
  const pybind11::object on_end_, on_edge_, on_paid_;
  const SumRecords records_;
  Assumptions assumptions_;
  const std::shared_ptr<ImmediateAdder> adder_;
  const std::shared_ptr<GraphTasks> tasks_;
  std::atomic<bool> armed_{false};
  Plan plan_;
  // The plan of the window's first backward pass, while Python has decided nothing since; else without steps.
  Plan first_;
  bool awaits_clear_ = false;  // `note_update` was called last
  bool owes_ = false;          // sums have to be multiplied first, or to be made
  // What p.grad is expected to be, in the order of the groups; empty: None for all.
  std::vector<TensorIdentity> published_;
  std::vector<Lane> lanes_;
  std::vector<std::pair<int64_t, std::shared_ptr<Bucket>>> buckets_;  // of the task that runs
  int run_task_ = kNone;
  // The engine's callback has the only strong reference: it is gone when the graph task has failed.
  std::weak_ptr<Run> run_;
};

}  // namespace fusedacc::autograd
