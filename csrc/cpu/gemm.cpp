#include "cpu.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>

#include "../ops/arguments.h"

namespace fusedacc::cpu {
namespace {

// The rows of a part, where a product is cut up for the threads.
constexpr int64_t kSplitRows = 128;
// What may be allocated beside the operands. Products of fewer elements than this repack the other operand
// too often; two parts of a weight of 3072 x 768 fit.
constexpr int64_t kPartBytes = 3 << 20;
// Casts of so many tokens at least are multiplied at once.
constexpr int64_t kLeastTokens = 128;
// Parts end at multiples of the blocks that oneDNN and BLAS work in.
constexpr int64_t kBlock = 64;

int32_t torch_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
      return aoti_torch_dtype_float64();
    case Dtype::kBFloat16:
      return aoti_torch_dtype_bfloat16();
    case Dtype::kFloat16:
      return aoti_torch_dtype_float16();
    default:
      return aoti_torch_dtype_float32();
  }
}

// A tensor over memory that outlives it.
AtenTensorHandle borrowed(const Matrix& matrix) {
  const int64_t sizes[] = {matrix.rows, matrix.cols}, strides[] = {matrix.row_stride, matrix.col_stride};
  AtenTensorHandle tensor = nullptr;
  FUSEDACC_SHIM(aoti_torch_create_tensor_from_blob(matrix.data, 2, sizes, strides, 0,
                                                   torch_dtype(matrix.dtype), aoti_torch_device_type_cpu(), 0,
                                                   &tensor));
  return tensor;
}

// Uninitialised memory for a matrix with dense rows.
class Room {
 public:
  Room(int64_t elements, Dtype dtype) : tensor_(nullptr), dtype_(dtype) {
    const int64_t stride = 1;
    AtenTensorHandle handle = nullptr;
    FUSEDACC_SHIM(aoti_torch_empty_strided(1, &elements, &stride, torch_dtype(dtype),
                                           aoti_torch_device_type_cpu(), 0, &handle));
    tensor_.reset(handle);
    FUSEDACC_SHIM(aoti_torch_get_data_ptr(handle, &data_));
  }
  Matrix matrix(int64_t rows, int64_t cols) const { return {data_, rows, cols, cols, 1, dtype_}; }

 private:
  OwnedTensor tensor_;
  Dtype dtype_;
  void* data_ = nullptr;
};

void copy(const Matrix& target, const Matrix& source) {
  const OwnedTensor to(borrowed(target)), from(borrowed(source));
  FUSEDACC_SHIM(aoti_torch_copy_(to.get(), from.get(), 0));
}

// sum <- keep * sum + scale * left^T right, all of one dtype. In place: BLAS and oneDNN take keep as beta.
void multiply_whole(const Matrix& sum, const Matrix& left, const Matrix& right, double keep, double scale) {
  const OwnedTensor out(borrowed(sum)), a(borrowed(left.transposed())), b(borrowed(right));
  FUSEDACC_SHIM(aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), keep, scale));
}

struct Product {
  const Matrix &sum, &left, &right;
  double keep, scale;
};

void multiply_rows(int64_t begin, int64_t end, void* opaque) {
  const Product& all = *static_cast<const Product*>(opaque);
  for (int64_t part = begin; part < end; ++part) {
    const int64_t first = part * kSplitRows, count = std::min(kSplitRows, all.sum.rows - first);
    multiply_whole(all.sum.part(first, count, 0, all.sum.cols), all.left.part(0, all.left.rows, first, count),
                   all.right, all.keep, all.scale);
  }
}

void multiply_split(const Matrix& sum, const Matrix& left, const Matrix& right, double keep, double scale) {
  const int64_t parts = (sum.rows + kSplitRows - 1) / kSplitRows;
  uint32_t threads = 1;
  FUSEDACC_SHIM(torch_get_num_threads(&threads));
  // Fewer parts would leave threads without work.
  if (parts >= 2 * static_cast<int64_t>(threads)) {
    Product all{sum, left, right, keep, scale};
    FUSEDACC_SHIM(torch_parallel_for(0, parts, 1, multiply_rows, &all));
  } else {
    multiply_whole(sum, left, right, keep, scale);
  }
}

// The same for a float32 sum and operands that are cast to float32, some tokens at a time.
void multiply_cast(const Matrix& sum, const Matrix& left, const Matrix& right, double keep, double scale) {
  const int64_t fit = kPartBytes / static_cast<int64_t>(sizeof(float)) / (left.cols + right.cols);
  const int64_t tokens = std::min(left.rows, std::max(kLeastTokens, fit / kBlock * kBlock));
  const Room left_room(tokens * left.cols, Dtype::kFloat32), right_room(tokens * right.cols, Dtype::kFloat32);
  int64_t first = 0;
  do {
    const int64_t count = std::min(tokens, left.rows - first);
    const Matrix left_part = left_room.matrix(count, left.cols);
    const Matrix right_part = right_room.matrix(count, right.cols);
    copy(left_part, left.part(first, count, 0, left.cols));
    copy(right_part, right.part(first, count, 0, right.cols));
    multiply_whole(sum, left_part, right_part, first == 0 ? keep : 1.0, scale);
    first += count;
  } while (first < left.rows);
}

// Cuts the sum across its longer side into parts that a temporary of `dtype` has room for, and calls
// work(part of the sum, of left, of right, temporary).
template <typename Work>
void by_parts(const GemmRequest& request, Dtype dtype, Work&& work) {
  const Matrix &sum = request.accumulator, &left = request.left, &right = request.right;
  const bool by_rows = sum.rows >= sum.cols;
  const int64_t size = by_rows ? sum.rows : sum.cols, other = by_rows ? sum.cols : sum.rows;
  const int64_t parts =
      std::max<int64_t>(1, (size * other * element_size(dtype) + kPartBytes - 1) / kPartBytes);
  const int64_t even = (size + parts - 1) / parts;
  const int64_t step = std::min(size, (even + kBlock - 1) / kBlock * kBlock);
  const Room room(step * other, dtype);
  for (int64_t first = 0; first < size; first += step) {
    const int64_t count = std::min(step, size - first);
    if (by_rows) {
      work(sum.part(first, count, 0, other), left.part(0, left.rows, first, count), right,
           room.matrix(count, other));
    } else {
      work(sum.part(0, other, first, count), left, right.part(0, right.rows, first, count),
           room.matrix(other, count));
    }
  }
}

// sum <- keep * sum + scale * product; the sum is not read where keep is 0.
void add(const Matrix& sum, const Matrix& product, double scale, double keep) {
  Work work;
  Task task{sum.data, product.data, sum.rows * sum.cols, 0, find_pair(product.dtype, sum.dtype),
            -1,       keep == 0};
  const int64_t sizes[] = {sum.rows, sum.cols}, sum_strides[] = {sum.row_stride, sum.col_stride},
                product_strides[] = {product.row_stride, product.col_stride};
  StridedLayout layout;
  if (merge_dims(2, sizes, sum_strides, product_strides, layout) == Merged::kStrided) {
    task.layout = 0;
    work.layouts.push_back(layout);
  }
  work.push(task);
  run(work, {scale, keep});
}

// Into a float32 sum by products that torch rounds to bfloat16, as in its own backward.
void add_rounded(const GemmRequest& request, double keep, double scale) {
  by_parts(request, Dtype::kBFloat16,
           [&](const Matrix& sum, const Matrix& left, const Matrix& right, const Matrix& product) {
             multiply_whole(product, left, right, 0, 1);
             add(sum, product, scale, keep);
           });
}

// Into a 16-bit sum by float32 copies of its parts, so that it is rounded once.
void add_narrow(const GemmRequest& request, double keep, double scale) {
  by_parts(request, Dtype::kFloat32,
           [&](const Matrix& sum, const Matrix& left, const Matrix& right, const Matrix& wide) {
             if (keep != 0) copy(wide, sum);
             if (left.dtype == Dtype::kFloat32) {
               multiply_whole(wide, left, right, keep, scale);
             } else {
               multiply_cast(wide, left, right, keep, scale);
             }
             copy(sum, wide);
           });
}

}  // namespace

void run_gemm(const GemmRequest& request, Way way) {
  const double scale = read_scale<double>(request.scale), keep = read_scale<double>(request.keep);
  const Dtype sum = request.accumulator.dtype, operands = request.left.dtype;
  const bool wide = sum == Dtype::kFloat32 || sum == Dtype::kFloat64;
  const bool rounded = way == Way::kRounded && operands == Dtype::kBFloat16;
  if (way == Way::kSplit && sum == operands && sum == Dtype::kFloat32) {
    multiply_split(request.accumulator, request.left, request.right, keep, scale);
  } else if (sum == operands && (wide || rounded)) {
    multiply_whole(request.accumulator, request.left, request.right, keep, scale);
  } else if (rounded && wide) {
    add_rounded(request, keep, scale);
  } else if (wide) {
    multiply_cast(request.accumulator, request.left, request.right, keep, scale);
  } else {
    add_narrow(request, keep, scale);
  }
}

}  // namespace fusedacc::cpu
