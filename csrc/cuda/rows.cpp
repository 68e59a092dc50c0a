#include "rows.h"

#include <torch/csrc/stable/library.h>

#include "../ops/dispatch.h"
#include "cuda.h"
#include "row_launch.h"

namespace fusedacc::cuda {
namespace {

// Row numbers in ascending order, equal ones as they stood, and where each stood.
class Sorted {
 public:
  explicit Sorted(AtenTensorHandle indices) : Sorted(sort(indices)) {}

  // In place of the numbers as they came.
  void put(RowNumbers& numbers) const {
    numbers.data = data_of(rows_);
    numbers.stride = 1;
    numbers.order = static_cast<const int64_t*>(data_of(order_));
  }

 private:
  struct Handles {
    AtenTensorHandle rows, order;
  };

  explicit Sorted(Handles handles) : rows_(handles.rows), order_(handles.order) {}

  static Handles sort(AtenTensorHandle indices) {
    namespace stable = torch::stable::detail;
    AtenTensorHandle own = nullptr;
    FUSEDACC_SHIM(aoti_torch_new_tensor_handle(indices, &own));
    // self, stable, dim, descending; then values, indices.
    StableIValue stack[] = {stable::from(own), stable::from(std::optional<bool>(true)),
                            stable::from(int64_t{0}), stable::from(false)};
    FUSEDACC_SHIM(torch_call_dispatcher("aten::sort", "stable", stack, TORCH_ABI_VERSION));
    return {reinterpret_cast<AtenTensorHandle>(stack[0]), reinterpret_cast<AtenTensorHandle>(stack[1])};
  }

  OwnedTensor rows_, order_;
};

}  // namespace

void add_rows(RowWork work, AtenTensorHandle indices, const ScaleArgument& scale, int32_t device_index) {
  const Sorted sorted(indices);
  sorted.put(work.numbers);
  const bool wide = kPairs[work.table.pair].accumulator == Dtype::kFloat64;
  const OwnedTensor sums(empty(1, sums_needed(work),
                               wide ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32(),
                               {aoti_torch_device_type_cuda(), device_index}));
  launch_rows(work, scale, data_of(sums), device_index, current_stream(device_index));
}

}  // namespace fusedacc::cuda
