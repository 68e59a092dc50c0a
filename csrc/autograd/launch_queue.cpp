#include "launch_queue.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace fusedacc::autograd {

std::optional<c10::Stream> current_stream(const c10::Device& device) {
  if (!device.is_cuda()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

namespace {

void wait_for(const c10::Stream& stream, const c10::Stream& earlier) {
  if (stream == earlier) return;
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(stream);
}

c10::IValue tensor_of(const Number& number) {
  return number.on_host() ? c10::IValue() : c10::IValue(number.tensor);
}

}  // namespace

void run_addition(const std::vector<at::Tensor>& sums, const std::vector<at::Tensor>& gradients,
                  const Addition& addition) {
  static const auto accumulate =
      c10::Dispatcher::singleton().findSchemaOrThrow("fusedacc::scale_accumulate_", "");
  const at::NoGradGuard no_grad;
  std::vector<bool> overwrite;
  if (addition.overwrites) overwrite.push_back(true);  // one flag for all
  torch::jit::Stack stack;
  torch::jit::push(stack, sums, gradients, tensor_of(addition.scale), addition.scale.value, overwrite,
                   tensor_of(addition.beta), addition.beta.value, /*seed=*/int64_t{0},
                   /*streams=*/std::vector<int64_t>{});
  accumulate.callBoxed(stack);
}

void LaunchQueue::add(const std::shared_ptr<Slot>& slot, const at::Tensor& sum, const at::Tensor& gradient,
                      const Addition& addition, bool may_wait,
                      const std::shared_ptr<BackwardPass>& backward) {
  const std::optional<c10::Stream> stream = current_stream(gradient.device());
  const auto fits = [&](const Batch& batch) {
    return batch.stream == stream && batch.gradient_dtype == gradient.scalar_type() &&
           batch.backward == backward && batch.addition.is_same(addition);
  };
  auto batch = std::find_if(batches_.begin(), batches_.end(), fits);
  if (batch == batches_.end()) {
    batches_.push_back({.stream = stream,
                        .gradient_dtype = gradient.scalar_type(),
                        .addition = addition,
                        .backward = backward});
    batch = batches_.end() - 1;
  }
  batch->slots.push_back(slot);
  if (backward == nullptr) batch->sums.push_back(sum);
  batch->gradients.push_back(gradient);
  slot->waits = true;
  nbytes_ += static_cast<int64_t>(gradient.nbytes());
  if (!may_wait || nbytes_ >= limit_) flush();
}

void LaunchQueue::add_in_python(const std::shared_ptr<Slot>& slot, const at::Tensor& gradient,
                                const std::shared_ptr<BackwardPass>& backward, bool may_wait) {
  add(slot, /*sum=*/at::Tensor(), gradient, Addition(), may_wait, backward);
}

void LaunchQueue::order(const std::shared_ptr<Slot>& slot, const c10::Stream& stream) {
  if (slot->writer.has_value()) {
    wait_for(stream, *slot->writer);
  } else {
    written_.push_back(slot);
  }
  slot->writer = stream;
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
}

void LaunchQueue::order_write(const std::shared_ptr<Slot>& slot) {
  if (slot->waits) flush();
  const std::optional<c10::Stream> stream = current_stream(slot->parameter().device());
  if (stream.has_value()) order(slot, *stream);
}

void LaunchQueue::flush() {
  std::vector<Batch> batches = std::exchange(batches_, {});
  nbytes_ = 0;
  for (const Batch& batch : batches) {
    for (const auto& slot : batch.slots) slot->waits = false;
  }
  try {
    for (Batch& batch : batches) {
      if (batch.stream.has_value()) {
        for (const auto& slot : batch.slots) order(slot, *batch.stream);
      }
      const c10::OptionalStreamGuard on_stream(batch.stream);
      if (batch.backward == nullptr) {
        run_addition(batch.sums, batch.gradients, batch.addition);
      } else {
        add_in_python_(batch.slots, std::move(batch.gradients), batch.backward);
      }
    }
  } catch (...) {
    note_loss_();  // of other backward passes too, which do not fail
    throw;
  }
}

void LaunchQueue::join() {
  flush();
  for (const c10::Stream& stream : streams_) wait_for(*current_stream(stream.device()), stream);
}

void LaunchQueue::forget() {
  for (const auto& slot : written_) slot->writer.reset();
  written_.clear();
  streams_.clear();
}

void LaunchQueue::drop() {
  const std::vector<Batch> batches = std::exchange(batches_, {});
  nbytes_ = 0;
  for (const Batch& batch : batches) {
    for (const auto& slot : batch.slots) slot->waits = false;
  }
}

}  // namespace fusedacc::autograd
