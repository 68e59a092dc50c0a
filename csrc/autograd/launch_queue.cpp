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

c10::Stream current_stream(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream current_stream(const at::Tensor& tensor) { return current_stream(tensor.device()); }

namespace {

void wait_for(const c10::Stream& stream, const c10::Stream& earlier) {
  if (stream == earlier) return;
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(stream);
}

}  // namespace

LaunchQueue::Batch& LaunchQueue::batch_for(const Batch& like) {
  const auto fits = [&](const Batch& batch) {
    return batch.stream == like.stream && batch.gradient_dtype == like.gradient_dtype &&
           batch.sum_dtype == like.sum_dtype && batch.scale == like.scale && batch.beta == like.beta;
  };
  const auto batch = std::find_if(batches_.begin(), batches_.end(), fits);
  return batch == batches_.end() ? batches_.emplace_back(like) : *batch;
}

void LaunchQueue::add(const at::Tensor& sum, const at::Tensor& gradient, double scale, double beta,
                      bool may_wait) {
  const Identity identity = sum.unsafeGetTensorImpl();
  if (waiting_.count(identity) != 0) launch();  // no launch adds to a sum twice
  Batch& batch = batch_for({current_stream(sum), gradient.scalar_type(), sum.scalar_type(), scale, beta,
                            /*sums=*/{}, /*gradients=*/{}});
  batch.sums.push_back(sum);
  batch.gradients.push_back(gradient);
  waiting_.insert(identity);
  nbytes_ += static_cast<int64_t>(gradient.nbytes());
  if (!may_wait || nbytes_ >= limit_) launch();
}

void LaunchQueue::order(const at::Tensor& sum, const c10::Stream& stream) {
  const auto [writer, is_first] = last_writers_.try_emplace(sum.unsafeGetTensorImpl(), stream);
  if (is_first) return;
  wait_for(stream, writer->second);
  writer->second = stream;
}

void LaunchQueue::write(const at::Tensor& sum) {
  settle(sum);
  order(sum, current_stream(sum));
}

void LaunchQueue::settle(const at::Tensor& sum) {
  const Identity identity = sum.unsafeGetTensorImpl();
  if (waiting_.count(identity) != 0) launch();
  const auto writer = last_writers_.find(identity);
  if (writer != last_writers_.end()) wait_for(current_stream(sum), writer->second);
}

void LaunchQueue::launch() {
  // If a launch raises, nothing waits any more: the backward pass has failed.
  const std::vector<Batch> batches = std::exchange(batches_, {});
  waiting_.clear();
  nbytes_ = 0;
  for (const Batch& batch : batches) {
    for (const at::Tensor& sum : batch.sums) order(sum, batch.stream);
    run(batch);
  }
}

void LaunchQueue::run(const Batch& batch) {
  static const auto accumulate =
      c10::Dispatcher::singleton().findSchemaOrThrow("fusedacc::scale_accumulate_", "");
  const at::NoGradGuard no_grad;
  const c10::StreamGuard on_stream(batch.stream);
  torch::jit::Stack stack;
  torch::jit::push(stack, batch.sums, batch.gradients, c10::IValue(), batch.scale, std::vector<bool>{},
                   c10::IValue(), batch.beta, /*seed=*/int64_t{0}, std::vector<int64_t>{});
  accumulate.callBoxed(stack);
}

void LaunchQueue::join() {
  launch();
  std::vector<c10::Stream> streams;
  for (const auto& [sum, stream] : last_writers_) {
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  }
  for (const c10::Stream& stream : streams) {
    wait_for(current_stream(stream.device()), stream);
  }
}

}  // namespace fusedacc::autograd
