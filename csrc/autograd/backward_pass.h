// One call of autograd's engine.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "slot.h"

namespace fusedacc::autograd {

// Python reads and writes all fields but `running` and `product`.
struct BackwardPass {
  // Whether our hooks take the gradients. Otherwise autograd stores them; if `ignored`, they do not count.
  bool captures = true;
  Number scale;
  bool ignored = false;
  // Whether gradients are taken and dropped.
  bool drops = false;
  // Whether a gradient was added to a sum, and the slots whose gradients autograd stores.
  bool added = false;
  std::vector<std::shared_ptr<Slot>> stored;
  // Whether a reducer outside the wrapper may fill p.grad in its own callback at the end of the backward
  // pass, and whether ours was queued again behind it.
  bool reduced_outside = false;
  bool follows_reducer = false;
  // Whether FSDP2 delivers gradients, some of them in its callback at the end of the backward pass.
  bool delivered_late = false;
  // Whether its gradients were added, and whether other backward passes were running then: an enclosing one,
  // or those of other threads. The last one collects what autograd has stored, and shows the result.
  bool has_ended = false;
  bool inner = false;

  int identity = -1;
  // Whether Python must end it, because it has begun it or has handled one of its gradients.
  bool in_python = true;
  // Autograd's engine has the only other reference: this expires when the backward pass has ended or failed.
  std::weak_ptr<void> running;
  // `scale` times the window's `sum_scale`, as last computed: where one of them is on a device.
  struct Product {
    Number sum_scale;
    std::optional<c10::Stream> stream;
    Number value;
  };
  std::optional<Product> product;
};

}  // namespace fusedacc::autograd
