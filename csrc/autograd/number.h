// A factor: a number on the host, or a tensor of one element on a device.
#pragma once

#include <ATen/core/Tensor.h>

namespace fusedacc::autograd {

struct Number {
  double value = 1;
  at::Tensor tensor;  // if it is defined, `value` does not count

  bool on_host() const { return !tensor.defined(); }
  // Whether it is known to be 1 without reading a device.
  bool is_one() const { return on_host() && value == 1; }
  // Whether it is the same number, or the same tensor.
  bool is_same(const Number& other) const {
    return tensor.is_same(other.tensor) && (tensor.defined() || value == other.value);
  }
};

}  // namespace fusedacc::autograd
