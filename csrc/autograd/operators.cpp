#include "operators.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/select_backward.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/library.h>

#include "gradients.h"
#include "weight_sum.h"

namespace py = pybind11;

namespace fusedacc::autograd {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The name of the library of operators, which differs with each change of the sources, because graphs on disk
// call operators by name.
std::string& library_name() {
  static auto& name = *new std::string;
  return name;
}

template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow((library_name() + "::" + name).c_str(), "")
      .typed<Signature>();
}

// Whether AOTAutograd traces for Inductor, which keeps an operator that writes to its ticket. Other compilers
// get the form with an ordered effect.
bool traces_for_inductor() {
  py::gil_scoped_acquire gil;
  return py::module_::import("torch._functorch.config").attr("unlift_effect_tokens").cast<bool>();
}

// How an operator's C++ signature passes an argument.
template <class Argument>
using Passed = std::conditional_t<std::is_class_v<Argument>, const Argument&, Argument>;

// Puts an operator into the graph that is being traced: the form `NAME_` or `NAME`.
template <class... Arguments>
void trace(const char* name, const Arguments&... arguments) {
  const std::string form = traces_for_inductor() ? std::string(name) + "_" : std::string(name);
  find_operator<void(Passed<Arguments>...)>(form.c_str()).call(arguments...);
}

// The ticket as a graph stores it. While AOTAutograd traces it is a fake tensor, and stored among the saved
// tensors. An eager graph stores its number instead, because hooks on saved tensors may cast or move those.
class Ticket {
 public:
  // In a forward pass: stores the ticket's number, if it is known, and returns what is to be saved.
  static Tensor keep(AutogradContext* context, const Tensor& ticket) {
    if (!is_plain(ticket)) return ticket;
    context->saved_data["number"] = number_of(ticket);
    return {};
  }
  // In a backward pass. saved: what `keep` has returned.
  Ticket(AutogradContext* context, const Tensor& saved) : traced_(saved) {
    if (!is_traced()) number_ = context->saved_data["number"].toInt();
  }

  bool is_traced() const { return traced_.defined(); }
  const Tensor& traced() const { return traced_; }
  int64_t number() const { return number_; }

 private:
  const Tensor traced_;
  int64_t number_ = 0;
};

// In an eager backward pass: adds a gradient to the sum, natively or by the Python method of this name. False
// where autograd is to have the gradient, as in a backward pass that is recorded. position: of the weight
// among the running function's tensor arguments. add: adds natively, given a `Destination`.
template <class Add, class... Arguments>
bool try_add(const Ticket& ticket, uint32_t position, Add add, const char* method,
             const Arguments&... arguments) {
  if (at::GradMode::is_enabled()) return false;
  const Destination destination(ticket.number(), position);
  if (destination.sum() == nullptr) return false;
  return add(destination) || destination.sum()->add_in_python(method, arguments...);
}

bool only_in_python(const Destination&) { return false; }

// Adds left^T right natively.
bool try_add_product(const Destination& destination, const Tensor& left, const Tensor& right) {
  if (destination.sum() == nullptr || !is_plain(left) || !is_plain(right)) return false;
  return destination.try_add([&](Engine& engine, const std::shared_ptr<Slot>& slot) {
    const ProductMethod method =
        destination.sum()->product_method(left.scalar_type(), slot->accumulate_dtype, left.size(0));
    return method > ProductMethod::kPython && engine.add_product(slot, left, right, method);
  });
}

// Adds these gradients to rows natively.
bool try_add_rows(const Destination& destination, const Tensor& indices, const Tensor& gradients,
                  int64_t padding, bool by_frequency) {
  if (destination.sum() == nullptr || !is_plain(indices) || !is_plain(gradients)) return false;
  return destination.try_add([&](Engine& engine, const std::shared_ptr<Slot>& slot) {
    return engine.add_rows(slot, indices, gradients, padding, by_frequency);
  });
}

class Cast : public torch::autograd::Function<Cast> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& weight, const Tensor& kept) {
    context->set_materialize_grads(false);
    context->saved_data["dtype"] = weight.scalar_type();
    return kept.detach();
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return {Tensor(), Tensor()};
    // Autograd casts nothing for a parameter whose grad_dtype the wrapper has set to None.
    return {gradients[0].to(context->saved_data["dtype"].toScalarType()), Tensor()};
  }
};

// Returns the weight in the dtype of `kept`, which has its elements, recorded by autograd.
Tensor cast_of(const Tensor& weight, const Tensor& kept) { return Cast::apply(weight, kept); }

// The weight as a backward pass uses it: if that is recorded, as a function of the parameter.
Tensor in_backward(const Tensor& used, uint32_t position) {
  if (!at::GradMode::is_enabled()) return used;
  const auto running = torch::autograd::get_current_node();
  if (!running) return used;
  const auto* end =
      dynamic_cast<const torch::autograd::AccumulateGrad*>(running->next_edge(position).function.get());
  return end == nullptr ? used : cast_of(end->variable, used);
}

Tensor as_rows(const Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  return tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor.flatten(0, -2);
}

class Linear : public torch::autograd::Function<Linear> {
 public:
  static constexpr uint32_t kInput = 0, kWeight = 1, kBias = 2;
  static constexpr size_t kArguments = 7;

  // keeps_cast: multiply by a cast of the weight that is kept over the window. Only in graphs, whose
  // operators must not return a kept cast: the operator `multiply_kept` returns a tensor that leads to it.
  static Tensor forward(AutogradContext* context, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias, const OptionalTensor& used, const Tensor& ticket,
                        bool transposed, bool keeps_cast) {
    context->set_materialize_grads(false);
    context->saved_data["has_bias"] = bias.has_value();
    context->saved_data["transposed"] = transposed;
    context->saved_data["keeps_cast"] = keeps_cast;
    context->saved_data["dtype"] = weight.scalar_type();
    const bool casts_bias = bias.has_value() && bias->scalar_type() != input.scalar_type();
    const OptionalTensor bias_used = casts_bias ? OptionalTensor(bias->to(input.scalar_type())) : bias;
    if (keeps_cast) {
      static const auto multiply_kept = find_operator<std::tuple<Tensor, Tensor>(
          const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, bool)>("multiply_kept");
      const auto [output, held] = multiply_kept.call(input, weight.detach(), bias_used, ticket, transposed);
      context->save_for_backward({input, held, Ticket::keep(context, ticket)});
      return as_no_view(output);
    }
    // Not the parameter itself, whose `.data` may be swapped.
    const Tensor multiplied = used.has_value() ? *used : weight.detach().to(input.scalar_type());
    context->save_for_backward(
        {input, input.requires_grad() ? multiplied : Tensor(), Ticket::keep(context, ticket)});
    return as_no_view(at::linear(input, transposed ? multiplied.t() : multiplied, bias_used));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list results(kArguments);
    const Tensor& gradient = gradients[0];
    if (!gradient.defined()) return results;
    const variable_list saved = context->get_saved_variables();
    const Tensor& input = saved[0];
    const Ticket ticket(context, saved[2]);
    const bool transposed = context->saved_data["transposed"].toBool();
    const at::ScalarType dtype = context->saved_data["dtype"].toScalarType();
    const Tensor rows = as_rows(gradient);
    const Tensor inputs = as_rows(input);
    if (context->needs_input_grad(kInput) && saved[1].defined()) {
      const Tensor of_input = context->saved_data["keeps_cast"].toBool()
                                  ? multiply_held(rows, saved[1], transposed, input)
                                  : multiply(rows, in_backward(saved[1], kWeight), transposed);
      results[kInput] = input.dim() == 2 ? of_input : of_input.view_symint(input.sym_sizes());
    }
    const Tensor& left = transposed ? inputs : rows;
    const Tensor& right = transposed ? rows : inputs;
    if (context->needs_input_grad(kWeight) && !add(ticket, left, right)) {
      // Autograd casts nothing for a parameter whose grad_dtype the wrapper has set to None.
      results[kWeight] = at::mm(left.t(), right).to(dtype);
    }
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(kBias)) {
      results[kBias] = rows.sum(0).to(dtype);
    }
    return results;
  }

 private:
  static bool add(const Ticket& ticket, const Tensor& left, const Tensor& right) {
    if (ticket.is_traced()) {
      trace("add_product", ticket.traced(), left, right);
      return true;
    }
    const auto natively = [&](const Destination& destination) {
      return try_add_product(destination, left, right);
    };
    return try_add(ticket, kWeight, natively, "add_product", left, right);
  }

  // For some inputs ATen returns a view of its product. Autograd forbids writing in place to a view that a
  // function of ours returns, so the output has the same memory and is no view.
  static Tensor as_no_view(const Tensor& output) {
    return output.is_view() ? at::_unsafe_view_symint(output, output.sym_sizes()) : output;
  }

  static Tensor multiply(const Tensor& rows, const Tensor& weight, bool transposed) {
    return at::mm(rows, transposed ? weight.t() : weight);
  }

  static Tensor multiply_held(const Tensor& rows, const Tensor& held, bool transposed, const Tensor& input) {
    static const auto multiply_held =
        find_operator<Tensor(const Tensor&, const Tensor&, bool, c10::SymInt)>("multiply_held");
    return multiply_held.call(rows, held, transposed, input.sym_size(-1));
  }
};

class Embedding : public torch::autograd::Function<Embedding> {
 public:
  static constexpr uint32_t kWeight = 1;
  static constexpr size_t kArguments = 5;

  static Tensor forward(AutogradContext* context, const Tensor& indices, const Tensor& weight,
                        const Tensor& ticket, int64_t padding, bool by_frequency) {
    context->set_materialize_grads(false);
    context->saved_data["rows"] = weight.sym_size(0);
    context->saved_data["padding"] = padding;
    context->saved_data["by_frequency"] = by_frequency;
    context->save_for_backward({indices, Ticket::keep(context, ticket)});
    return at::embedding_symint(weight.detach(), indices, padding, by_frequency, /*sparse=*/false);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list results(kArguments);
    const Tensor& gradient = gradients[0];
    if (!gradient.defined() || !context->needs_input_grad(kWeight)) return results;
    const variable_list saved = context->get_saved_variables();
    const Tensor& indices = saved[0];
    const Ticket ticket(context, saved[1]);
    const int64_t padding = context->saved_data["padding"].toInt();
    const bool by_frequency = context->saved_data["by_frequency"].toBool();
    if (!add(ticket, indices, gradient, padding, by_frequency)) {
      results[kWeight] = at::embedding_dense_backward_symint(
          gradient, indices, context->saved_data["rows"].toSymInt(), padding, by_frequency);
    }
    return results;
  }

 private:
  static bool add(const Ticket& ticket, const Tensor& indices, const Tensor& gradient, int64_t padding,
                  bool by_frequency) {
    if (ticket.is_traced()) {
      trace("add_rows", ticket.traced(), indices, gradient, padding, by_frequency);
      return true;
    }
    const auto natively = [&](const Destination& destination) {
      return try_add_rows(destination, indices, gradient, padding, by_frequency);
    };
    return try_add(ticket, kWeight, natively, "add_rows", indices, gradient, padding, by_frequency);
  }
};

class Grouped : public torch::autograd::Function<Grouped> {
 public:
  static constexpr uint32_t kRows = 0, kWeight = 1;
  static constexpr size_t kArguments = 5;

  static Tensor forward(AutogradContext* context, const Tensor& rows, const Tensor& weight,
                        const Tensor& offs, const Tensor& ticket, bool inward) {
    context->set_materialize_grads(false);
    context->saved_data["inward"] = inward;
    const Tensor used = weight.detach();  // not the parameter itself, whose `.data` may be swapped
    context->save_for_backward(
        {rows, rows.requires_grad() ? used : Tensor(), offs, Ticket::keep(context, ticket)});
    return multiply(rows, inward ? used : used.transpose(-2, -1), offs, /*traced=*/!is_plain(ticket));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list results(kArguments);
    const Tensor& gradient = gradients[0];
    if (!gradient.defined()) return results;
    const variable_list saved = context->get_saved_variables();
    const Tensor& rows = saved[0];
    const Tensor& offs = saved[2];
    const Ticket ticket(context, saved[3]);
    const bool inward = context->saved_data["inward"].toBool();
    if (context->needs_input_grad(kRows) && saved[1].defined()) {
      const Tensor used = in_backward(saved[1], kWeight);
      results[kRows] = multiply(gradient, inward ? used.transpose(-2, -1) : used, offs, ticket.is_traced());
    }
    const Tensor& left = inward ? rows : gradient;
    const Tensor& right = inward ? gradient : rows;
    if (context->needs_input_grad(kWeight) && !add(ticket, left, right, offs)) {
      results[kWeight] = at::_grouped_mm(left.t(), right, offs);
    }
    return results;
  }

 private:
  // torch's operator has a version for fake tensors in bfloat16 only; an operator of ours has one for the
  // rest.
  static Tensor multiply(const Tensor& rows, const Tensor& weight, const Tensor& offs, bool traced) {
    if (!traced || rows.scalar_type() == at::kBFloat16) return at::_grouped_mm(rows, weight, offs);
    static const auto multiply_groups =
        find_operator<Tensor(const Tensor&, const Tensor&, const Tensor&)>("multiply_groups");
    return multiply_groups.call(rows, weight, offs);
  }

  static bool add(const Ticket& ticket, const Tensor& left, const Tensor& right, const Tensor& offs) {
    if (ticket.is_traced()) {
      trace("add_grouped", ticket.traced(), left, right, offs);
      return true;
    }
    return try_add(ticket, kWeight, only_in_python, "add_products", left, right, offs);
  }
};

class Selected : public torch::autograd::Function<Selected> {
 public:
  static constexpr uint32_t kWeight = 0;
  static constexpr size_t kArguments = 4;

  static Tensor forward(AutogradContext* context, const Tensor& weight, const OptionalTensor& position,
                        int64_t index, const Tensor& ticket) {
    context->set_materialize_grads(false);
    context->saved_data["sizes"] = weight.sym_sizes();
    context->saved_data["index"] = index;
    context->save_for_backward({position.value_or(Tensor()), Ticket::keep(context, ticket)});
    return matrix_of(weight.detach(), position, index);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list results(kArguments);
    const Tensor& gradient = gradients[0];
    if (!gradient.defined() || !context->needs_input_grad(kWeight)) return results;
    const variable_list saved = context->get_saved_variables();
    const Tensor& position = saved[0];
    const Ticket ticket(context, saved[1]);
    const int64_t index = context->saved_data["index"].toInt();
    if (ticket.is_traced()) {
      trace("add_part", ticket.traced(), gradient,
            position.defined() ? OptionalTensor(position) : std::nullopt, index);
      return results;
    }
    const auto sizes = context->saved_data["sizes"].toSymIntVector();
    int64_t part = position.defined() ? position.item<int64_t>() : index;
    if (part < 0) part += sizes[0].expect_int();
    const auto natively = [&](const Destination& destination) {
      return destination.try_add([&](Engine& engine, const std::shared_ptr<Slot>& slot) {
        return engine.add_part(slot, gradient, part);
      });
    };
    if (!try_add(ticket, kWeight, natively, "add_part", gradient, part)) {
      results[kWeight] = at::select_backward_symint(gradient, sizes, /*dim=*/0, part);
    }
    return results;
  }

  // As PyTorch computes weight[position], which a compiler cannot trace if it does not know the index.
  static Tensor matrix_of(const Tensor& weight, const OptionalTensor& position, int64_t index) {
    return weight.select_symint(/*dim=*/0,
                                position.has_value() ? position->item().toSymInt() : c10::SymInt(index));
  }
};

// Whether an ordinary eager call may be recorded. The caller has checked the types of Python's tensors.
bool may_record(const Tensor& input, const Tensor& weight) {
  return at::GradMode::is_enabled() && weight.requires_grad() && is_plain(input) && is_plain(weight) &&
         input.device() == weight.device() && !weight.is_meta() && weight.dim() == 2 && !input.is_nested() &&
         !at::impl::torch_function_mode_enabled() && !torch::jit::tracer::isTracing() &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

bool are_indices(const Tensor& indices) {
  return indices.scalar_type() == at::kLong || indices.scalar_type() == at::kInt;
}

int64_t tokens(const Tensor& tensor) {
  return c10::multiply_integers(tensor.sizes().slice(0, tensor.dim() - 1));
}

// The functions that Python calls

// Returns the input of a Linear in the dtype of the product, as under autocast; none if PyTorch must compute
// the product, or raise. transposed: the weight is (in, out).
OptionalTensor operand_of(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          bool transposed) {
  at::ScalarType dtype = weight.scalar_type();
  Tensor operand = input;
  const c10::DeviceType device = input.device().type();
  if (at::autocast::is_autocast_enabled(device) && dtype != at::kDouble) {
    dtype = at::autocast::get_autocast_dtype(device);
    if (input.is_floating_point() && input.scalar_type() != at::kDouble) operand = input.to(dtype);
  }
  const bool fits = operand.scalar_type() == dtype && !weight.is_complex() && input.dim() > 0 &&
                    input.sym_size(-1) == weight.sym_size(transposed ? 0 : 1) &&
                    (!bias.has_value() || (bias->scalar_type() == weight.scalar_type() && bias->dim() == 1));
  return fits ? OptionalTensor(operand) : std::nullopt;
}

// Computes input @ weight.T + bias, or input @ weight + bias if transposed. input: as returned by
// `operand_of`. used: the weight in the input's dtype, if that differs; the bias is cast here. ticket: of the
// weight's sum.
Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
              const OptionalTensor& used, const Tensor& ticket, bool transposed) {
  return Linear::apply(input, weight, bias, used, ticket, transposed, /*keeps_cast=*/false);
}

// The same for ordinary calls: none where the caller must look closer.
OptionalTensor try_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          const Tensor& ticket, bool transposed) {
  const bool fits = may_record(input, weight) && input.scalar_type() == weight.scalar_type() &&
                    !weight.is_complex() && input.dim() > 0 &&
                    input.size(-1) == weight.size(transposed ? 0 : 1) &&
                    (!bias.has_value() ||
                     (is_plain(*bias) && bias->dim() == 1 && bias->scalar_type() == weight.scalar_type())) &&
                    !at::autocast::is_autocast_enabled(input.device().type());
  if (!fits) return std::nullopt;
  // If Python has not selected a product yet, it does so in the forward pass.
  const std::shared_ptr<WeightSum> sum = WeightSum::find(number_of(ticket));
  if (!sum || !sum->has_product_method(input.scalar_type(), tokens(input))) return std::nullopt;
  return linear(input, weight, bias, std::nullopt, ticket, transposed);
}

// Computes weight[indices]. padding: a non-negative row that gets no gradient, or -1. by_frequency: a row
// gets the mean of its gradients.
Tensor embedding(const Tensor& indices, const Tensor& weight, const Tensor& ticket, int64_t padding,
                 bool by_frequency) {
  return Embedding::apply(indices, weight, ticket, padding, by_frequency);
}

OptionalTensor try_embedding(const Tensor& indices, const Tensor& weight, const Tensor& ticket,
                             int64_t padding, bool by_frequency) {
  if (!are_indices(indices) || !may_record(indices, weight)) return std::nullopt;
  return embedding(indices, weight, ticket, padding, by_frequency);
}

// Computes rows[s_e:t_e] @ weight[e].T for every expert e, whose rows end at offs[e], or rows[s_e:t_e] @
// weight[e] if inward. Output rows after the last expert's are uninitialised, as in torch's grouped_mm.
Tensor grouped(const Tensor& rows, const Tensor& weight, const Tensor& offs, const Tensor& ticket,
               bool inward) {
  return Grouped::apply(rows, weight, offs, ticket, inward);
}

// Computes weight[position] for a tensor of one index, or weight[index].
Tensor selected(const Tensor& weight, const OptionalTensor& position, int64_t index, const Tensor& ticket) {
  return Selected::apply(weight, position, index, ticket);
}

// The operators' kernels: `plain_*` without autograd, `recorded_*` with it. A graph calls the operators with
// whatever comes at run time, so the latter check again, and leave to PyTorch what it must compute, or
// refuse.

Tensor plain_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const Tensor&,
                    bool transposed, bool) {
  return at::linear(input, transposed ? weight.t() : weight, bias);
}

Tensor recorded_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       const Tensor& ticket, bool transposed, bool keeps_cast) {
  const OptionalTensor operand = operand_of(input, weight, bias, transposed);
  if (!operand.has_value() || input.device() != weight.device() || input.layout() != at::kStrided) {
    return plain_linear(input, weight, bias, ticket, transposed, keeps_cast);
  }
  const bool casts = operand->scalar_type() != weight.scalar_type();
  return Linear::apply(*operand, weight, bias, OptionalTensor(), ticket, transposed, keeps_cast && casts);
}

Tensor plain_embedding(const Tensor& indices, const Tensor& weight, const Tensor&, int64_t padding,
                       bool by_frequency) {
  return at::embedding_symint(weight, indices, padding, by_frequency, /*sparse=*/false);
}

Tensor recorded_embedding(const Tensor& indices, const Tensor& weight, const Tensor& ticket, int64_t padding,
                          bool by_frequency) {
  if (!are_indices(indices) || indices.device() != weight.device()) {
    return plain_embedding(indices, weight, ticket, padding, by_frequency);
  }
  return embedding(indices, weight, ticket, padding, by_frequency);
}

Tensor plain_grouped(const Tensor& rows, const Tensor& weight, const Tensor& offs, const Tensor&,
                     bool inward) {
  return at::_grouped_mm(rows, inward ? weight : weight.transpose(-2, -1), offs);
}

Tensor recorded_grouped(const Tensor& rows, const Tensor& weight, const Tensor& offs, const Tensor& ticket,
                        bool inward) {
  if (rows.dim() != 2 || rows.scalar_type() != weight.scalar_type() || rows.device() != weight.device()) {
    return plain_grouped(rows, weight, offs, ticket, inward);
  }
  return grouped(rows, weight, offs, ticket, inward);
}

Tensor plain_selected(const Tensor& weight, const OptionalTensor& position, int64_t index, const Tensor&) {
  return Selected::matrix_of(weight, position, index);
}

bool run_add_product(const Tensor& ticket, const Tensor& left, const Tensor& right) {
  return try_add_product(Destination(number_of(ticket)), left, right);
}

bool run_add_rows(const Tensor& ticket, const Tensor& indices, const Tensor& gradients, int64_t padding,
                  bool by_frequency) {
  return try_add_rows(Destination(number_of(ticket)), indices, gradients, padding, by_frequency);
}

void define(const std::string& name, c10::DispatchKey key, c10::KernelFunction kernel) {
  // For as long as the process lives.
  static auto& kept = *new std::vector<c10::RegistrationHandleRAII>;
  kept.push_back(c10::Dispatcher::singleton().registerImpl(
      {library_name() + "::" + name, ""}, key, std::move(kernel), std::nullopt, nullptr, "fusedacc"));
}

// An operator with a kernel for each case.
template <class Plain, class Recorded>
void define_forward(const std::string& name, Plain* plain, Recorded* recorded) {
  define(name, c10::DispatchKey::CompositeExplicitAutograd,
         c10::KernelFunction::makeFromUnboxedRuntimeFunction(plain));
  define(name, c10::DispatchKey::Autograd, c10::KernelFunction::makeFromUnboxedRuntimeFunction(recorded));
}

// An operator of a compiled backward pass, in both forms: calls `add`, and Python where it returns false.
template <class... Arguments>
void define_backward(const std::string& name, bool (*add)(Arguments...), const py::function& in_python) {
  for (const std::string& form : {name, name + "_"}) {
    // A reference for as long as the process lives.
    auto kernel = [add, otherwise = py::handle(in_python).inc_ref()](Arguments... arguments) {
      if (add(arguments...)) return;
      py::gil_scoped_acquire gil;
      otherwise(arguments...);
    };
    define(form, c10::DispatchKey::CPU, c10::KernelFunction::makeFromUnboxedLambda(std::move(kernel)));
  }
}

// Defines the kernels of this library's operators, whose schemas Python has defined. The functions are what
// `add_product` and `add_rows` do where native code must not add.
void define_operators(const std::string& library, const py::function& add_product_in_python,
                      const py::function& add_rows_in_python) {
  library_name() = library;
  define_forward("linear", &plain_linear, &recorded_linear);
  define_forward("embedding", &plain_embedding, &recorded_embedding);
  define_forward("grouped", &plain_grouped, &recorded_grouped);
  define_forward("selected", &plain_selected, &selected);
  define_backward("add_product", &run_add_product, add_product_in_python);
  define_backward("add_rows", &run_add_rows, add_rows_in_python);
}

}  // namespace

void define_functions(py::module_& module) {
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  module.def("make_ticket", &make_ticket);
  module.def("cast_of", &cast_of, without_gil);
  module.def("operand_of", &operand_of, without_gil);
  module.def("linear", &linear, without_gil);
  module.def("try_linear", &try_linear, without_gil);
  module.def("embedding", &embedding, without_gil);
  module.def("try_embedding", &try_embedding, without_gil);
  module.def("grouped", &grouped, without_gil);
  module.def("selected", &selected, without_gil);
  module.def("try_add_product", &run_add_product, without_gil);
  module.def("define_operators", &define_operators);
}

}  // namespace fusedacc::autograd
