// Runs the micro-batches in the middle of a window: neither the first, which creates the sums, nor the last,
// which finishes them. They are all alike, so Python decides once in a window how they are handled, and does
// not run in their backward passes. In the first and the last one Python runs only at the end.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "hook.h"

namespace fusedacc::autograd {

// Attributes of Python objects that must not change. They are read at each check, so that no code has to
// report a change. References are weak, because strong ones would form cycles that the garbage collector
// cannot see. All methods need the GIL.
class Assumptions {
 public:
  // Pairs of an object and an attribute's name: those that must be false, and those that must stay the same.
  Assumptions(const pybind11::list& is_false, const pybind11::list& stays);
  // Records a module that must not be imported (None for none).
  void forbid(pybind11::object not_imported) { not_imported_ = std::move(not_imported); }
  // Records the present values of `stays`. Returns false if an assumption is already violated.
  bool note();
  bool hold() const;

 private:
  struct Attribute {
    pybind11::object owner;  // a weak reference
    pybind11::object name;
    pybind11::object value;  // of what must stay the same
  };
  std::vector<Attribute> attributes_;
  pybind11::object not_imported_ = pybind11::none();
  size_t num_false_;  // the first ones, which must be false
};

// A backward pass that native code has begun.
struct Run {
  const int task;
  const bool is_alike;  // neither the window's first nor its last
  bool is_pythons;      // whether Python has taken it over
};

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// The state of one wrapper, guarded by the GIL.
class MiddleOfWindow : public std::enable_shared_from_this<MiddleOfWindow> {
 public:
  // owners: Python's Window; the inner optimizer, whose groups are to have the parameters that `_seen` of the
  // next, Python's ParameterSet, has; a function that is called with a graph task's number when one ends that
  // Python has taken over; and a function that is called at the end of a window's first or last one with the
  // scale, the indices of sums that were added to, and the buckets. on_paid: called with the indices of sums
  // that have been multiplied, or written over, by the first addition to them. assumptions: Python's
  // `Assumptions`. The adder asks what is made here.
  static std::shared_ptr<MiddleOfWindow> make(const pybind11::tuple& owners, pybind11::object on_paid,
                                              const pybind11::tuple& assumptions,
                                              std::shared_ptr<ImmediateAdder> adder,
                                              std::shared_ptr<GraphTasks> tasks);

  // The next backward passes are like the last: their gradients are multiplied by `scale` and added to the
  // sums that the adder was loaded with. steps: the micro-batches of the window, the last of which Python
  // ends; 0: `step()` ends none, and Python says when this is over. begins_last: the backward of the last may
  // begin here too. not_imported: as in Assumptions. owes: sums may have to be multiplied first, or to be
  // written over.
  void arm(double scale, int64_t steps, bool begins_last, pybind11::object not_imported, bool owes);
  // The window is empty, and so is what the adder was loaded with, but for memory that is to be written over.
  // Its first backward pass may begin here: its gradients are multiplied by `scale` and wait in buckets, or
  // are added where the adder was loaded (`opens`).
  void await_first(double scale, bool opens, pybind11::object not_imported);
  // The lanes whose gradients wait in buckets then: of each its key, its buckets, and the limit of a bucket.
  void set_lanes(const pybind11::list& lanes);
  // Every sum is in p.grad, and the update needs nothing else. `ends` tells whether that is so at `step()`.
  void await_update(int64_t steps, pybind11::object not_imported);
  void disarm() { armed_ = false; }

  // Called at a graph task's first gradient, without the GIL: opens the adder if this code may handle the
  // task.
  bool enter(int task);

  // Run `AccumulatingOptimizer.step()` and `.zero_grad()` in mid-window; false leaves that to Python.
  bool step();
  bool zero_grad();
  // Whether a `step()` now has only to run the inner optimizer and to begin the next window.
  bool ends();

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

  MiddleOfWindow(const pybind11::tuple& owners, pybind11::object on_paid, const pybind11::tuple& assumptions,
                 std::shared_ptr<ImmediateAdder> adder, std::shared_ptr<GraphTasks> tasks);
  // As the arguments of `arm` and `await_first`.
  struct Plan {
    double scale = 1;
    int64_t steps = 0;
    bool begins_last = false;
    bool owes = false;
    bool awaits_first = false;
    bool opens = true;
  };
  struct Lane {
    const int64_t key;
    const std::shared_ptr<BucketMap> buckets;
    const int64_t limit;
  };

  // Whether this code may begin a backward pass, because no assumption has changed.
  bool may_begin(const pybind11::object& window);
  static int64_t micro_step(const pybind11::object& window);
  // Whether a backward pass of the current micro-batch has ended.
  static bool has_run(const pybind11::object& window);
  // Whether the groups still have the parameters that Python has seen, and every p.grad is as expected.
  bool is_in_step();
  void leave(const Run& run);
  // Ends a task that Python has not taken over. Needs the adder's lock and the GIL. Returns the indices of
  // the sums that were added to.
  std::vector<int64_t> close(int task);
  // Counts the micro-batch of a task that is neither the window's first nor its last.
  void count(std::vector<int64_t> added);

  const pybind11::object window_, inner_, parameters_;  // weak references
  const pybind11::object on_end_, on_edge_, on_paid_;
  Assumptions assumptions_;
  const std::shared_ptr<ImmediateAdder> adder_;
  const std::shared_ptr<GraphTasks> tasks_;
  std::atomic<bool> armed_{false};
  Plan plan_;
  // What p.grad is expected to be, in the order of the groups; empty: None for all.
  std::vector<WeakTensor> published_;
  std::vector<Lane> lanes_;
  std::vector<std::pair<int64_t, std::shared_ptr<Bucket>>> buckets_;  // of the task that runs
  int run_task_ = kNone;
  // The engine's callback has the only strong reference: it is gone when the graph task has failed.
  std::weak_ptr<Run> run_;
};

}  // namespace fusedacc::autograd
