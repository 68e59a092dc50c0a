#include "../ops/tensor_checks.h"
#include "cuda.h"
#include "device/row_thread.h"
#include "launch.h"

namespace fusedacc::cuda {

void add_rows(RowWork work, AtenTensorHandle indices, const ScaleArgument& scale, int32_t device_index) {
  namespace stable = torch::stable::detail;
  AtenTensorHandle own = nullptr;
  FUSEDACC_SHIM(aoti_torch_new_tensor_handle(indices, &own));
  // self, stable, dim, descending; then values, indices.
  StableIValue stack[] = {stable::from(own), stable::from(std::optional<bool>(true)),
                          stable::from(int64_t{0}), stable::from(false)};
  FUSEDACC_SHIM(torch_call_dispatcher("aten::sort", "stable", stack, TORCH_ABI_VERSION));
  const OwnedTensor rows(reinterpret_cast<AtenTensorHandle>(stack[0]));
  const OwnedTensor order(reinterpret_cast<AtenTensorHandle>(stack[1]));
  RowNumbers& numbers = work.numbers;
  numbers = {data_of(rows), 1, numbers.count, numbers.wide, static_cast<const int64_t*>(data_of(order))};
  const bool wide = kPairs[work.table.pair].accumulator == Dtype::kFloat64;
  const OwnedTensor sums(empty({sums_needed(work)}, code_of(wide ? Dtype::kFloat64 : Dtype::kFloat32),
                               {aoti_torch_device_type_cuda(), device_index}));
  launch_rows(work, scale, data_of(sums), device_index, current_stream(device_index));
}

}  // namespace fusedacc::cuda
