#include "engine.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/addmm.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "gradients.h"
#include "hook.h"
#include "number_caster.h"

namespace py = pybind11;

namespace fusedacc::autograd {
namespace {

using torch::autograd::AccumulateGrad;
using Lock = std::lock_guard<std::recursive_mutex>;

std::atomic<bool> is_watched{false};

// Calls `function` with the GIL. The engine of autograd rethrows only this kind of error in the thread that
// has called backward().
template <class Function>
auto with_gil(Function function) {
  const py::gil_scoped_acquire gil;
  try {
    return function();
  } catch (py::error_already_set& error) {
    error.restore();
    python_error known;
    known.persist();
    throw known;
  }
}

py::object or_none(const at::Tensor& tensor) {
  return tensor.defined() ? py::cast(tensor) : py::object(py::none());
}

// Whether a CUDA graph is being captured on the current stream. Needs the GIL.
template <class Guard>
bool is_capturing(const Guard& guard) {
  if constexpr (requires(c10::Stream stream) { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(guard.getStream(guard.getDevice()));
  } else {  // an older torch
    return py::module_::import("torch.cuda").attr("is_current_stream_capturing")().cast<bool>();
  }
}

bool is_capturing() { return is_capturing(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA)); }

// Whether multiplying a sum later gives the same bits as multiplying it now, as `is_deferrable` in
// fusedacc/kernels/dtypes.py.
bool is_deferrable(const Number& scale, at::ScalarType dtype) {
  if (dtype == at::kFloat || dtype == at::kDouble) return true;
  if (!scale.on_host()) return false;
  int exponent = 0;
  return scale.value == 1 || (dtype == at::kBFloat16 && std::frexp(scale.value, &exponent) == 0.5);
}

c10::OperatorHandle library_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// Whether the groups have these parameters, by identity.
bool have_parameters(const py::object& groups, const py::list& known) {
  if (!PyList_Check(groups.ptr())) return false;
  if (PyList_GET_SIZE(groups.ptr()) != PyList_GET_SIZE(known.ptr())) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(known.ptr()); ++i) {
    PyObject* const group = PyList_GET_ITEM(groups.ptr(), i);
    PyObject* const expected = PyList_GET_ITEM(known.ptr(), i);
    PyObject* const params = PyDict_Check(group) ? PyDict_GetItemString(group, "params") : nullptr;
    if (params == nullptr || !PyList_Check(params)) return false;
    if (PyList_GET_SIZE(params) != PyList_GET_SIZE(expected)) return false;
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(expected); ++j) {
      if (PyList_GET_ITEM(params, j) != PyList_GET_ITEM(expected, j)) return false;
    }
  }
  return true;
}

// Whether a kernel may add to this sum of the slot. Users may have put it into p.grad.
bool is_kernels_sum(const Slot& slot, const at::Tensor& sum) {
  return sum.scalar_type() == slot.accumulate_dtype && sum.device() == *slot.device && is_plain(sum);
}

// Whether a module may have added the gradient to the slot's `main_grad` itself: it has returned none, or
// `main_grad`, or the parameter has the flag that says so.
bool may_be_added(const Slot& slot, const at::Tensor& gradient) {
  if (!gradient.defined()) return true;
  if (gradient.has_storage() && gradient.is_alias_of(slot.main_grad)) return true;
  return with_gil([&] {
    const py::object parameter = py::cast(slot.parameter());
    return PyObject_HasAttrString(parameter.ptr(), "grad_added_to_main_grad") != 0;
  });
}

// Whether a kernel may take the gradient of the slot's parameter.
bool is_ordinary(const Slot& slot, const at::Tensor& gradient) {
  return is_plain(gradient) && !slot.needs_eager && gradient.scalar_type() == slot.dtype &&
         gradient.device() == *slot.device;
}

}  // namespace

Engine::Engine(AddFlat add, int64_t limit, std::shared_ptr<Sums> sums, std::shared_ptr<WindowState> window,
               Callbacks callbacks)
    : add_(add),
      sums_(std::move(sums)),
      window_(std::move(window)),
      callbacks_(callbacks),
      queue_(
          limit,
          [this](const LaunchQueue::Slots& slots, std::vector<at::Tensor> gradients,
                 const std::shared_ptr<BackwardPass>& backward) {
            add_in_python(slots, std::move(gradients), backward);
          },
          [this] { with_gil([this] { window_->note_interruption(); }); }) {
  for (PyObject* callback : {callbacks_.begin, callbacks_.receive, callbacks_.add, callbacks_.scale,
                             callbacks_.stored, callbacks_.finish}) {
    Py_INCREF(callback);
  }
}

Engine::~Engine() {
  for (PyObject* callback : {callbacks_.begin, callbacks_.receive, callbacks_.add, callbacks_.scale,
                             callbacks_.stored, callbacks_.finish}) {
    Py_DECREF(callback);
  }
}

std::shared_ptr<Engine> Engine::make(AddFlat add, int64_t limit, std::shared_ptr<Sums> sums,
                                     std::shared_ptr<WindowState> window, Callbacks callbacks) {
  return {new Engine(add, limit, std::move(sums), std::move(window), callbacks), [](Engine* engine) {
            if (Py_IsInitialized() == 0) return;
            const py::gil_scoped_acquire gil;
            delete engine;
          }};
}

void Engine::set_watched(bool watched) { is_watched = watched; }

// During a backward pass

bool Engine::deliver(const SlotPointer& slot, AccumulateGrad& node, const at::Tensor& gradient) {
  const at::Tensor& parameter = node.variable;
  const bool is_unshared = gradient.defined() && is_sole(gradient);
  const Lock lock(mutex_);
  const Reason reason = reason_for(*slot, parameter, &node);
  if (reason == Reason::kFrozen) return false;
  const std::shared_ptr<BackwardPass> backward = enter();
  if (!backward) return false;
  if (slot->main_grad.defined() && may_be_added(*slot, gradient)) {
    return receive_in_python(slot, gradient, reason, is_unshared);
  }
  if (backward->captures && !is_left_to_autograd(reason)) {
    if (!gradient.defined() || backward->drops) return true;
    backward->added = true;  // also if it fails half-way
    if (is_ordinary(*slot, gradient) && add(backward, slot, parameter, gradient, is_unshared)) return true;
  }
  return receive_in_python(slot, gradient, reason, is_unshared);
}

bool Engine::receive_in_python(const SlotPointer& slot, const at::Tensor& gradient, Reason reason,
                               bool is_unshared) {
  return with_gil([&] {
    return py::handle(callbacks_.receive)(slot, or_none(gradient), name_of(reason), is_unshared).cast<bool>();
  });
}

void Engine::add_in_python(const std::vector<SlotPointer>& slots, std::vector<at::Tensor> gradients,
                           const std::shared_ptr<BackwardPass>& backward) {
  with_gil([&] {
    py::list tensors(gradients.size());
    for (size_t i = 0; i < gradients.size(); ++i) tensors[i] = py::cast(std::move(gradients[i]));
    gradients.clear();
    py::handle(callbacks_.add)(backward, slots, tensors);
  });
}

void Engine::after_node(const SlotPointer& slot) {
  if (slot->collects_in == -1 || slot->collects_in != torch::autograd::get_current_graph_task_id()) return;
  slot->collects_in = -1;
  const Lock lock(mutex_);
  with_gil([&] { py::handle(callbacks_.stored)(slot); });
}

Number Engine::scale_of(const std::shared_ptr<BackwardPass>& backward, const c10::Device& device) {
  if (backward->scale.on_host() && window_->sum_scale.on_host()) {
    return {backward->scale.value * window_->sum_scale.value, at::Tensor()};
  }
  const std::optional<c10::Stream> stream = current_stream(device);
  if (!backward->product || backward->product->stream != stream ||
      !backward->product->sum_scale.is_same(window_->sum_scale)) {
    const Number value = with_gil([&] { return py::handle(callbacks_.scale)(backward).cast<Number>(); });
    backward->product = {window_->sum_scale, stream, value};
  }
  return backward->product->value;
}

bool Engine::must_add_in_python(const Slot& slot, const Number& scale) const {
  return !slot.is_native || is_watched || rounds_stochastically_ ||
         !(scale.on_host() || scale.tensor.device() == *slot.device);
}

bool Engine::add(const std::shared_ptr<BackwardPass>& backward, const SlotPointer& slot,
                 const at::Tensor& parameter, const at::Tensor& gradient, bool is_unshared) {
  if (slot->waits) queue_.flush();  // Python may make the sum, or apply its deferred scale
  if (!sums_->begin_main_grad(*slot)) return false;
  const Number scale = scale_of(backward, gradient.device());
  const at::Tensor sum = sums_->current(*slot);
  if (must_add_in_python(*slot, scale) || (slot->in_reduce_bucket && !sum.defined())) {
    backward->in_python = true;
    queue_.add_in_python(slot, gradient, backward, /*may_wait=*/is_unshared);
    return true;
  }
  if (!sum.defined()) {
    add_first(slot, parameter, gradient, scale, is_unshared);
    return true;
  }
  if (!is_kernels_sum(*slot, sum) || sum.sizes() != gradient.sizes() || gradient.is_alias_of(sum)) {
    return false;
  }
  run(slot, sum, gradient, {scale, slot->beta}, is_unshared);
  note_written(*slot, sum, /*is_new=*/false);
  return true;
}

void Engine::add_first(const SlotPointer& slot, const at::Tensor& parameter, const at::Tensor& gradient,
                       const Number& scale, bool is_unshared) {
  const at::ScalarType dtype = slot->accumulate_dtype;
  const bool is_own = gradient.scalar_type() == dtype && is_unshared && is_adoptable(gradient, parameter);
  if (is_own && (scale.is_one() || (!sums_->exposed && is_deferrable(scale, dtype)))) {
    queue_.order_write(slot);
    sums_->put(*slot, gradient);
    slot->beta = scale;
    return;
  }
  const at::Tensor sum = is_own ? gradient : slot->new_sum();
  run(slot, sum, gradient, {scale, Number(), /*overwrites=*/true}, is_unshared);
  note_written(*slot, sum, /*is_new=*/true);
}

void Engine::run(const SlotPointer& slot, const at::Tensor& sum, const at::Tensor& gradient,
                 const Addition& addition, bool is_unshared) {
  if (sum.is_cpu()) return run_now(sum, gradient, addition);
  queue_.add(slot, sum, gradient, addition, /*may_wait=*/is_unshared);
}

void Engine::run_now(const at::Tensor& sum, const at::Tensor& gradient, const Addition& addition) {
  RECORD_FUNCTION("fusedacc::add_at_once", std::vector<c10::IValue>());
  const bool is_flat =
      sum.is_cpu() && addition.scale.on_host() && addition.beta.on_host() && same_layout(gradient, sum);
  if (!is_flat) return run_addition({sum}, {gradient}, addition);
  const Multipliers by{addition.scale.value, addition.beta.value};
  add_(sum.mutable_data_ptr(), gradient.const_data_ptr(), sum.numel(), dtype_number(gradient.scalar_type()),
       dtype_number(sum.scalar_type()), addition.overwrites, &by);
}

void Engine::note_written(Slot& slot, const at::Tensor& sum, bool is_new) {
  slot.beta = Number();
  if (is_new) {
    sums_->put(slot, sum);
  } else if (sums_->exposed) {
    sum.unsafeGetTensorImpl()->bump_version();
  }
}

// Modules that write to sums

std::optional<Engine::Target> Engine::target_for(Slot& slot) {
  if (postpones_) return std::nullopt;
  const std::shared_ptr<BackwardPass> backward = enter();
  const bool writes = backward && backward->captures && !backward->drops && backward->scale.on_host() &&
                      window_->sum_scale.on_host() && !must_add_in_python(slot, backward->scale);
  if (!writes || !sums_->begin_main_grad(slot)) return std::nullopt;
  const double scale = backward->scale.value * window_->sum_scale.value;
  const at::Tensor sum = sums_->current(slot);
  if (!sum.defined()) {
    if (slot.in_reduce_bucket) return std::nullopt;
    return Target{backward, slot.new_sum(), /*is_new=*/true, scale};
  }
  if (!is_kernels_sum(slot, sum) || !slot.beta.on_host()) return std::nullopt;
  return Target{backward, sum, /*is_new=*/false, scale};
}

bool Engine::add_product(const SlotPointer& slot, const at::Tensor& left, const at::Tensor& right,
                         ProductMethod method) {
  const Lock lock(mutex_);
  if (left.dim() != 2) return false;
  if (left.device() != *slot->device || right.device() != *slot->device) return false;
  if (!are_pair(left.scalar_type(), slot->accumulate_dtype)) return false;
  const std::optional<Target> target = target_for(*slot);
  if (!target) return false;
  const at::Tensor& sum = target->sum;
  if (sum.dim() != 2 || !(sum.is_contiguous() || sum.t().is_contiguous())) return false;
  if (left.is_alias_of(sum) || right.is_alias_of(sum)) return false;
  const double beta = target->is_new ? 0 : slot->beta.value;
  if (!sum.is_cpu()) queue_.order_write(slot);
  target->backward->added = true;  // also if it fails half-way
  if (!multiply(sum, left, right, method, target->scale, beta)) return false;
  note_written(*slot, sum, target->is_new);
  return true;
}

bool Engine::multiply(const at::Tensor& sum, const at::Tensor& left, const at::Tensor& right,
                      ProductMethod method, double scale, double beta) {
  at::Tensor out = sum;
  if (method == ProductMethod::kBlas) {
    if (left.scalar_type() != sum.scalar_type()) return false;
    out.addmm_(left.t(), right, beta, scale);
    return true;
  }
  if (method == ProductMethod::kWideningBlas) {
    if (sum.is_cpu() || sum.scalar_type() != at::kFloat || left.element_size() != 2) return false;
    at::addmm_out(out, sum, left.t(), right, at::kFloat, beta, scale);
    return true;
  }
  // A method is chosen for the device on which the weight is then, and the weight may have been moved since.
  if (method < ProductMethod::kOperator || !sum.is_cpu()) return false;
  static const auto operation = library_operator("fusedacc::gemm_accumulate_");
  torch::jit::Stack stack;
  torch::jit::push(stack, sum, left, right, c10::IValue(), scale, c10::IValue(), beta,
                   static_cast<int64_t>(method) - static_cast<int64_t>(ProductMethod::kOperator));
  operation.callBoxed(stack);
  return true;
}

bool Engine::add_rows(const SlotPointer& slot, const at::Tensor& rows, const at::Tensor& gradients,
                      int64_t padding, bool by_frequency) {
  const Lock lock(mutex_);
  if (!gradients.is_cpu() || !slot->device->is_cpu()) return false;  // Triton adds rows on a GPU
  if (!are_pair(gradients.scalar_type(), slot->accumulate_dtype)) return false;
  const std::optional<Target> target = target_for(*slot);
  if (!target) return false;
  const at::Tensor& sum = target->sum;
  if (sum.dim() != 2 || !sum.is_contiguous() || gradients.is_alias_of(sum)) return false;
  if (!target->is_new && !slot->beta.is_one()) return false;
  const at::Tensor named = rows.reshape({rows.numel()});
  at::Tensor terms = gradients.reshape({rows.numel(), sum.size(1)});
  if (sum.size(1) > 1 && terms.stride(1) != 1) terms = terms.contiguous();
  static const auto operation = library_operator("fusedacc::accumulate_rows_");
  torch::jit::Stack stack;
  torch::jit::push(stack, sum, named, terms, c10::IValue(), target->scale, padding, by_frequency);
  target->backward->added = true;  // also if it fails half-way
  if (target->is_new) sum.zero_();
  operation.callBoxed(stack);
  note_written(*slot, sum, target->is_new);
  return true;
}

bool Engine::add_part(const SlotPointer& slot, const at::Tensor& gradient, int64_t index) {
  const Lock lock(mutex_);
  if (!is_ordinary(*slot, gradient) || !are_pair(gradient.scalar_type(), slot->accumulate_dtype))
    return false;
  const std::optional<Target> target = target_for(*slot);
  // Python keeps a record of the matrices that a window's first micro-batch has written.
  if (!target || target->is_new || !slot->beta.is_one()) return false;
  const at::Tensor& sum = target->sum;
  if (sum.dim() != 3 || !sum.is_contiguous() || gradient.is_alias_of(sum)) return false;
  const at::Tensor matrix = sum.select(/*dim=*/0, index);
  if (matrix.sizes() != gradient.sizes()) return false;
  target->backward->added = true;  // also if it fails half-way
  if (!sum.is_cpu()) queue_.order_write(slot);
  run_now(matrix, gradient, {Number{target->scale, at::Tensor()}, Number()});
  note_written(*slot, sum, /*is_new=*/false);
  return true;
}

void Engine::settle(const SlotPointer& slot) {
  const Lock lock(mutex_);
  queue_.order_write(slot);
}

void Engine::flush() {
  const Lock lock(mutex_);
  queue_.flush();
}

void Engine::join() {
  const Lock lock(mutex_);
  queue_.join();
}

// Backward passes

std::shared_ptr<BackwardPass> Engine::current_backward() {
  const Lock lock(mutex_);
  const auto found = backwards_.find(torch::autograd::get_current_graph_task_id());
  return found == backwards_.end() ? nullptr : found->second;
}

std::shared_ptr<BackwardPass> Engine::enter() {
  const Lock lock(mutex_);
  const int identity = torch::autograd::get_current_graph_task_id();
  const auto found = backwards_.find(identity);
  if (found != backwards_.end()) return found->second;
  return identity == -1 ? nullptr : begin(identity);
}

std::vector<std::shared_ptr<BackwardPass>> Engine::backwards() {
  const Lock lock(mutex_);
  std::vector<std::shared_ptr<BackwardPass>> all;
  for (const auto& [identity, backward] : backwards_) all.push_back(backward);
  return all;
}

std::shared_ptr<BackwardPass> Engine::begin(int identity) {
  const std::shared_ptr<BackwardPass> backward = with_gil([&] {
    if (may_begin()) {
      auto created = std::make_shared<BackwardPass>();
      created->scale.value = plan_->scale;
      created->in_python = false;
      return created;
    }
    drop_plan();
    const py::object begun = py::handle(callbacks_.begin)();
    return begun.is_none() ? nullptr : begun.cast<std::shared_ptr<BackwardPass>>();
  });
  if (!backward) return nullptr;
  backward->identity = identity;
  backwards_[identity] = backward;
  const auto running = std::make_shared<bool>(true);
  backward->running = running;
  queue_callback(backward, running);
  return backward;
}

void Engine::queue_callback(const std::shared_ptr<BackwardPass>& backward, std::shared_ptr<void> running) {
  torch::autograd::Engine::get_default_engine().queue_callback(
      [engine = weak_from_this(), backward, running = std::move(running)] {
        const std::shared_ptr<Engine> found = engine.lock();
        if (found) found->finish(backward);
      });
}

void Engine::call_back(const std::shared_ptr<BackwardPass>& backward) {
  queue_callback(backward, backward->running.lock());
}

void Engine::finish(const std::shared_ptr<BackwardPass>& backward) {
  try {
    const Lock lock(mutex_);
    const auto found = backwards_.find(backward->identity);
    if (found == backwards_.end() || found->second != backward) return;  // Python has dropped it
    note_thread();
    if (!backward->in_python && backwards_.size() == 1) {
      queue_.join();
      const bool is_done = with_gil([&] {
        // A parameter may have got another node, without our hook.
        const bool is_unexpected = !sums_->always_exposed && any_gradient();
        if (!plan_ || is_unexpected || (is_last() && !publish())) return false;
        window_->ran = true;
        return true;
      });
      if (is_done) {
        queue_.forget();
        backwards_.erase(found);
        return;
      }
    }
  } catch (python_error& error) {  // raised by Python code that an operator has called
    error.persist();               // another thread may report it
    throw;
  }
  with_gil([&] { py::handle(callbacks_.finish)(backward); });
}

void Engine::note_thread() {
  const std::thread::id thread = std::this_thread::get_id();
  if (last_thread_ != std::thread::id() && last_thread_ != thread) has_threads_ = true;
  last_thread_ = thread;
}

bool Engine::drop(const std::shared_ptr<BackwardPass>& backward) {
  const Lock lock(mutex_);
  const auto found = backwards_.find(backward->identity);
  if (found == backwards_.end() || found->second != backward) return false;
  backwards_.erase(found);
  if (backwards_.empty()) {
    queue_.drop();  // only a failed backward pass has left anything: others launch all when they end
    queue_.join();
    queue_.forget();
  }
  return true;
}

// Windows

void Engine::set_plan(Plan plan) {
  plan_ = plan;
  planned_window_ = window_->number;
}

void Engine::drop_plan() { plan_.reset(); }

void Engine::set_slots(std::vector<SlotPointer> slots) { std::swap(slots_, slots); }

void Engine::set_condition(const std::string& name, bool holds) {
  if (holds) {
    conditions_.insert(name);
  } else {
    conditions_.erase(name);
  }
}

bool Engine::plan_applies() const {
  return plan_.has_value() && (plan_->repeats || planned_window_ == window_->number) && conditions_.empty() &&
         !is_watched && !window_->tainted && sums_->num_ignored == 0;
}

bool Engine::may_use_plan() const { return plan_applies() && !sums_->consumed; }

bool Engine::may_begin() const {
  if (!backwards_.empty() || !may_use_plan() || at::GradMode::is_enabled()) return false;
  if (on_gpu_ && is_capturing()) return false;  // Python refuses to capture a part of a window
  if (sums_->always_exposed) return true;
  if (window_->micro_step >= std::max<int64_t>(plan_->steps, 1)) return false;  // full: its update has failed
  const bool is_first = window_->micro_step == 0 && !window_->ran;
  return !is_first || (plan_->repeats && !sums_->exposed);
}

bool Engine::publish() {
  const auto fits = [](const SlotPointer& slot) {
    const at::Tensor &sum = slot->accumulator, &parameter = slot->parameter();
    if (!sum.defined()) return slot->grad_state == GradState::kNotOurs && !slot->is_begun;
    return slot->grad_state == GradState::kNotOurs && slot->beta.is_one() && parameter.is_leaf() &&
           !slot->is_begun && sum.layout() == at::kStrided && sum.device() == parameter.device();
  };
  if (!std::all_of(slots_.begin(), slots_.end(), fits)) return false;
  for (const SlotPointer& slot : slots_) {
    const at::Tensor sum = slot->accumulator;
    if (sum.defined()) sums_->publish(*slot, sum);
  }
  sums_->exposed = true;
  return true;
}

bool Engine::shows_only_sums() const {
  return std::all_of(slots_.begin(), slots_.end(), [](const SlotPointer& slot) {
    const at::Tensor& gradient = slot->p_grad();
    if (!gradient.defined()) return slot->grad_state == GradState::kNotOurs && !slot->accumulator.defined();
    return slot->grad_state == GradState::kPublished && slot->is_placed(gradient) &&
           slot->parameter().grad_dtype() == gradient.scalar_type() &&
           gradient.scalar_type() == slot->parameter().scalar_type();
  });
}

bool Engine::are_as_seen() const {
  return !slots_.empty() &&
         std::all_of(slots_.begin(), slots_.end(), [](const auto& slot) { return slot->is_as_seen(); });
}

bool Engine::are_on_current_streams() const {
  return std::all_of(slots_.begin(), slots_.end(), [](const SlotPointer& slot) {
    const torch::autograd::AccumulateGrad* const node = slot->node;
    if (node == nullptr || !slot->device->is_cuda()) return true;
    return node->input_metadata(0).stream() == current_stream(*slot->device);
  });
}

bool Engine::any_foreign_gradient() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const auto& slot) {
    return slot->p_grad().defined() && slot->is_foreign(slot->p_grad());
  });
}

bool Engine::any_gradient() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const auto& slot) { return slot->p_grad().defined(); });
}

bool Engine::step(const py::object& groups, const py::list& known) {
  const std::unique_lock lock(mutex_, std::try_to_lock);  // another thread's backward pass may hold it
  if (!lock.owns_lock()) return false;
  if (!plan_ || !backwards_.empty() || !window_->ran || window_->micro_step + 1 >= plan_->steps) return false;
  if (!may_use_plan() || !have_parameters(groups, known) || any_gradient()) return false;
  window_->has_updated = false;
  window_->count_micro_batch();
  return true;
}

bool Engine::has_nothing_to_clear() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  if (!plan_ || !backwards_.empty() || window_->ran) return false;
  return 0 < window_->micro_step && window_->micro_step < plan_->steps && may_use_plan();
}

bool Engine::begin_update(const py::object& groups, const py::list& known) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  if (!plan_ || !plan_->updates_plainly || !backwards_.empty() || !window_->ran) return false;
  if (!may_use_plan() || !have_parameters(groups, known) || !shows_only_sums()) return false;
  window_->has_updated = false;
  window_->count_micro_batch();
  return true;
}

bool Engine::end_update() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || !shows_only_sums()) return false;
  for (const SlotPointer& slot : slots_) {
    const at::Tensor& gradient = slot->p_grad();
    if (gradient.defined()) slot->placed_version = gradient._version();
  }
  sums_->consumed = true;
  return true;
}

bool Engine::clear_used(const py::object& groups, const py::list& known) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  if (on_gpu_ && (is_capturing() || !are_on_current_streams())) return false;  // Python must hook new nodes
  if (at::hasCallbacks()) return false;  // a profiler may run, which Python's `zero_grad()` tells of its work
  if (!plan_applies() || !plan_->updates_plainly || !backwards_.empty() || !sums_->consumed) return false;
  if (!have_parameters(groups, known) || !are_as_seen() || !shows_only_sums()) return false;
  for (const SlotPointer& slot : slots_) {
    slot->parameter().mutable_grad().reset();
    sums_->set_state(*slot, GradState::kNotOurs);
  }
  sums_->consumed = false;
  sums_->exposed = false;
  return true;
}

}  // namespace fusedacc::autograd
