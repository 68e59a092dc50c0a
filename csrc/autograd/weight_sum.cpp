#include "weight_sum.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <unordered_map>

#include "gradients.h"
#include "hook.h"

namespace py = pybind11;

namespace fusedacc::autograd {

WeightSum::WeightSum(const std::shared_ptr<Engine>& engine, std::shared_ptr<Slot> slot, PyObject* add)
    : engine_(engine), slot_(std::move(slot)), add_(add) {
  Py_INCREF(add_);
}

WeightSum::~WeightSum() {
  if (Py_IsInitialized() == 0) return;
  py::gil_scoped_acquire gil;
  Py_DECREF(add_);
}

namespace {

// The sums that exist, by their numbers. The mutex is held without the GIL only for a moment, and nothing is
// freed under it.
std::mutex sums_mutex;
std::unordered_map<int64_t, std::weak_ptr<WeightSum>>& sums() {
  static auto& known = *new std::unordered_map<int64_t, std::weak_ptr<WeightSum>>;
  return known;
}

}  // namespace

std::shared_ptr<WeightSum> WeightSum::make(int64_t number, const std::shared_ptr<Engine>& engine,
                                           std::shared_ptr<Slot> slot, PyObject* add) {
  const std::shared_ptr<WeightSum> sum(new WeightSum(engine, std::move(slot), add));
  std::lock_guard<std::mutex> lock(sums_mutex);
  std::erase_if(sums(), [](const auto& entry) { return entry.second.expired(); });
  sums().emplace(number, sum);
  return sum;
}

std::shared_ptr<WeightSum> WeightSum::find(int64_t number) {
  std::lock_guard<std::mutex> lock(sums_mutex);
  const auto entry = sums().find(number);
  return entry == sums().end() ? nullptr : entry->second.lock();
}

namespace {

// The index of a product in the table of methods; -1 for other dtypes.
int32_t place(at::ScalarType operand, at::ScalarType accumulator, int64_t tokens) {
  const int32_t from = dtype_number(operand);
  const int32_t to = dtype_number(accumulator);
  if (from < 0 || to < 0) return -1;
  return (kDtypeCount * from + to) * cpu::kClasses + cpu::class_of(tokens);
}

}  // namespace

void WeightSum::set_product_method(at::ScalarType operand, at::ScalarType accumulator, int64_t tokens,
                                   ProductMethod method) {
  const int32_t index = place(operand, accumulator, tokens);
  if (index >= 0) product_methods_[index] = method;
}

ProductMethod WeightSum::product_method(at::ScalarType operand, at::ScalarType accumulator,
                                        int64_t tokens) const {
  const int32_t index = place(operand, accumulator, tokens);
  return index < 0 ? ProductMethod::kPython : product_methods_[index].load();
}

bool WeightSum::has_product_method(at::ScalarType operand, int64_t tokens) const {
  return slot_->node != nullptr &&
         product_method(operand, slot_->accumulate_dtype, tokens) != ProductMethod::kUnknown;
}

void WeightSum::forget_product_methods() {
  for (auto& method : product_methods_) method = ProductMethod::kUnknown;
}

at::Tensor make_ticket(int64_t number) {
  const c10::InferenceMode training(false);
  return at::from_blob(
      new int64_t(number), {1}, [](void* memory) { delete static_cast<int64_t*>(memory); }, at::kLong);
}

int64_t number_of(const at::Tensor& ticket) {
  TORCH_CHECK(ticket.is_cpu() && ticket.scalar_type() == at::kLong && ticket.numel() == 1,
              "a ticket of fusedacc was changed to a ", ticket.scalar_type(), " on ", ticket.device());
  return *ticket.const_data_ptr<int64_t>();
}

Destination::Destination(int64_t number, uint32_t position) : sum_(WeightSum::find(number)) {
  const auto running = torch::autograd::get_current_node();
  if (!sum_ || !running) return;
  const torch::autograd::AccumulateGrad* const node = sum_->slot()->node;
  if (node != nullptr && running->next_edge(position).function.get() == node) node_ = node;
}

Destination::Destination(int64_t number) : sum_(WeightSum::find(number)) {
  if (!sum_) return;
  torch::autograd::AccumulateGrad* const node = sum_->slot()->node;
  const auto* graph = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (node != nullptr && graph != nullptr && graph->count(node) != 0) node_ = node;
}

bool Destination::may_add() const {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  const bool wants_all = wanted != nullptr && wanted->empty();
  // Python shows the gradient to hooks that only look.
  return node_ != nullptr && wants_all && !has_hooks(node_->variable) && may_write(*sum_->slot(), *node_);
}

}  // namespace fusedacc::autograd
