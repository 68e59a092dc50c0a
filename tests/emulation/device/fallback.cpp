// The boxed fallback for the dispatch key CUDA. It passes each CUDA tensor to the CPU's kernel as an alias of
// its memory, and turns the tensors that the kernel returns or resizes back into CUDA tensors. The operator
// counts as an operation on the current stream: its accesses are checked, and a capture records it.
#include "fallback.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "graph.h"
#include "memory.h"
#include "order.h"
#include "torch_device.h"

namespace emulation {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// These operators read and write no element.
const std::set<std::string> kViews{"aten::as_strided",     "aten::view", "aten::_reshape_alias",
                                   "aten::unfold",         "aten::set_", "aten::view_as_real",
                                   "aten::view_as_complex"};
// PyTorch's CUDA kernels for these operators wait for the device.
const std::set<std::string> kWaiting{"aten::_local_scalar_dense", "aten::equal", "aten::nonzero",
                                     "aten::is_nonzero"};
constexpr char kUnread = static_cast<char>(0xAB);  // the bytes of a copy's target before the copy arrives

bool is_ours(const Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() && tensor.layout() == at::kStrided;
}

Tensor with_layout_of(c10::Storage storage, const Tensor& like, c10::DispatchKeySet keys) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

Tensor cuda_tensor(c10::Storage storage, const Tensor& like) {
  using c10::DispatchKey;
  return with_layout_of(
      std::move(storage), like,
      c10::DispatchKeySet({DispatchKey::CUDA, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCUDA}));
}

c10::DataPtr copy_of(const c10::Storage& storage) {
  const size_t bytes = storage.nbytes();
  c10::DataPtr copy = device_allocator()->allocate(bytes);
  if (bytes > 0) std::memcpy(copy.get(), storage.data(), bytes);
  return copy;
}

// One operator call: its CUDA tensors and their CPU aliases.
class Call {
 public:
  struct Argument {
    Tensor tensor;
    bool is_written;
  };

  int device() const { return device_; }
  const std::vector<Argument>& arguments() const { return arguments_; }

  IValue for_cpu(const IValue& value, bool is_written) {
    if (value.isTensor()) return alias(value.toTensor(), is_written);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(alias(tensor, is_written));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(alias(*tensor, is_written)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (value.toDevice().has_index()) device_ = value.toDevice().index();
      return c10::Device(c10::DeviceType::CPU);
    }
    return value;
  }

  // Turn a result of the CPU's kernel into a CUDA tensor: an argument, a view of an argument, or a new one.
  Tensor for_cuda(const Tensor& result) {
    if (!result.defined() || !result.is_cpu() || result.layout() != at::kStrided) return result;
    for (const auto& [original, alias] : aliases_) {
      if (alias.is_same(result)) {
        adopt(original, alias);
        return original;
      }
    }
    const auto* memory = result.storage().unsafeGetStorageImpl();
    for (const auto& [original, alias] : aliases_) {
      if (alias.storage().unsafeGetStorageImpl() == memory && original.storage().nbytes() > 0) {
        return cuda_tensor(original.storage(), result);
      }
    }
    const DeviceScope scope(device_);
    c10::Storage storage(c10::Storage::use_byte_size_t(), result.storage().nbytes(),
                         copy_of(result.storage()), device_allocator(), true);
    return cuda_tensor(std::move(storage), result);
  }

  // Update the CUDA tensors of arguments that the kernel has resized.
  void adopt_all() {
    for (const auto& [original, alias] : aliases_) adopt(original, alias);
  }

 private:
  // Makes a device current, so that memory is allocated on it.
  struct DeviceScope {
    explicit DeviceScope(int device) : before(std::exchange(current_device(), device)) {}
    ~DeviceScope() { current_device() = before; }
    int before;
  };

  Tensor alias(const Tensor& tensor, bool is_written) {
    if (!is_ours(tensor)) return tensor;
    arguments_.push_back({tensor, is_written});
    device_ = tensor.device().index();
    for (const auto& [original, alias] : aliases_) {
      if (original.is_same(tensor)) return alias;
    }
    aliases_.emplace_back(tensor, new_alias(tensor));
    return aliases_.back().second;
  }

  static Tensor new_alias(const Tensor& tensor) {
    if (tensor.storage().nbytes() == 0) {
      return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
    }
    using c10::DispatchKey;
    c10::DataPtr data(tensor.storage().mutable_data(), c10::Device(c10::DeviceType::CPU));
    c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), nullptr,
                         false);
    Tensor alias = with_layout_of(
        std::move(storage), tensor,
        c10::DispatchKeySet({DispatchKey::CPU, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU}));
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    if (tensor.is_conj()) alias._set_conj(true);
    return alias;
  }

  void adopt(const Tensor& original, const Tensor& alias) const {
    const bool same_memory = alias.storage().data() == original.storage().data();
    const bool same_layout = original.sizes() == alias.sizes() && original.strides() == alias.strides();
    if (same_layout && (same_memory || original.numel() == 0)) return;
    if (!same_memory) {
      const DeviceScope scope(original.device().index());
      original.storage().set_data_ptr_noswap(copy_of(alias.storage()));
      original.storage().unsafeGetStorageImpl()->set_nbytes(alias.storage().nbytes());
    }
    original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(),
                                                          alias.storage_offset());
  }

  int device_ = current_device();
  std::vector<Argument> arguments_;
  std::vector<std::pair<Tensor, Tensor>> aliases_;
};

// Replace the tensors of a value with new tensors on the same memory, which a later resize or set_() does not
// change.
IValue frozen(const IValue& value) {
  const auto freeze = [](const Tensor& tensor) {
    return is_ours(tensor) ? cuda_tensor(tensor.storage(), tensor) : tensor;
  };
  if (value.isTensor()) return freeze(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(freeze(tensor));
    return list;
  }
  return value;
}

std::vector<Tensor> tensors_of(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  return {};
}

// Run an operator again on the tensors from the capture, and copy the results into the captured results.
void run_again(const c10::OperatorHandle& op, const std::string& name, const std::vector<IValue>& arguments,
               const std::vector<IValue>& results) {
  for (const IValue& argument : arguments) {
    for (const Tensor& tensor : tensors_of(argument)) {
      if (is_ours(tensor) && tensor.numel() > 0 && !is_allocated(tensor.storage().data())) {
        return report("REPLAY: " + name + " takes memory that is gone");
      }
    }
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  Stack stack(arguments.begin(), arguments.end());
  run_on_cpu(op, &stack);
  for (size_t i = 0; i < results.size(); ++i) {
    const std::vector<Tensor> to = tensors_of(results[i]);
    const std::vector<Tensor> from = tensors_of(stack[stack.size() - results.size() + i]);
    for (size_t k = 0; k < to.size(); ++k) {
      if (is_ours(to[k]) && to[k].data_ptr() != from[k].data_ptr()) to[k].copy_(from[k]);
    }
  }
}

// Wait for a blocking copy between host and device. Delay a non-blocking copy to the host: its data arrives
// when the host waits. Return false if the caller must still make the copy.
bool copy_is_done(const Operation& operation, const std::vector<IValue>& arguments, const Tensor& source) {
  const Tensor& to = arguments[0].toTensor();
  const Tensor& from = arguments[1].toTensor();
  if (to.is_cuda() == from.is_cuda() || to.numel() == 0) return false;
  if (!arguments[2].toBool()) {
    implicit_wait(operation.stream, "copy_");
    return false;
  }
  if (to.is_cuda() || !to.is_contiguous()) return false;
  std::memset(to.mutable_data_ptr(), kUnread, to.nbytes());
  arrive_after(operation, [to, value = source.clone()] {
    const at::AutoDispatchBelowAutograd guard;
    to.copy_(value);
  });
  return true;
}

// A copy between devices runs on the current stream of the source. The target's current stream waits before
// and after it.
void order(StreamId first, StreamId second) {
  Event event;
  record(event, first);
  wait(second, event);
}
std::optional<int> device_copied_from(const std::string& name, const std::vector<IValue>& arguments) {
  if (name != "aten::copy_") return std::nullopt;
  const c10::Device to = arguments[0].toTensor().device();
  const c10::Device from = arguments[1].toTensor().device();
  return to.is_cuda() && from.is_cuda() && to != from ? std::optional<int>(from.index()) : std::nullopt;
}

}  // namespace

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t argument_count = schema.arguments().size();
  const size_t result_count = schema.returns().size();
  const size_t first = stack->size() - argument_count;
  const std::vector<IValue> arguments(stack->begin() + first, stack->end());
  Call call;
  for (size_t i = 0; i < argument_count; ++i) {
    const auto* alias_info = schema.arguments()[i].alias_info();
    (*stack)[first + i] = call.for_cpu(arguments[i], alias_info != nullptr && alias_info->isWrite());
  }

  const std::string overload = schema.overload_name();
  const std::string name = schema.name() + (overload.empty() ? "" : "." + overload);
  const std::optional<int> copied_from = device_copied_from(schema.name(), arguments);
  const StreamId stream = current_stream(copied_from.value_or(call.device()));
  if (copied_from) order(current_stream(arguments[0].toTensor().device().index()), stream);
  const bool is_view = kViews.count(schema.name()) > 0;
  Operation operation{stream, 0, name};
  if (!is_view) {
    const Lock lock(state_mutex());
    operation = start(stream, name);
    for (const auto& [tensor, is_written] : call.arguments()) {
      if (tensor.numel() > 0) access(tensor.storage().data(), is_written, operation);
    }
    check_captured(operation);
  }
  if (copied_from) order(stream, current_stream(arguments[0].toTensor().device().index()));
  if (kWaiting.count(schema.name()) > 0) implicit_wait(stream, name);
  if (schema.name() == "aten::copy_" && copy_is_done(operation, arguments, (*stack)[first + 1].toTensor())) {
    torch::jit::drop(*stack, argument_count);
    stack->push_back(arguments[0]);
    return;
  }

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  const auto result = [&](const Tensor& tensor) {
    Tensor ours = call.for_cuda(tensor);
    if (!is_view && is_ours(ours) && ours.numel() > 0) first_write(ours.storage().data(), operation);
    return ours;
  };
  const size_t first_result = stack->size() - result_count;
  for (size_t i = first_result; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = result(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(result(tensor));
      value = list;
    }
  }
  call.adopt_all();

  if (is_recording() && !is_view) {
    std::vector<IValue> taken, left;
    for (const IValue& argument : arguments) taken.push_back(frozen(argument));
    for (size_t i = first_result; i < stack->size(); ++i) left.push_back(frozen((*stack)[i]));
    write_down([op, name, taken, left] { run_again(op, name, taken, left); });
  }
}

}  // namespace emulation
