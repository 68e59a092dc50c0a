#include "gemm.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "../ops/tensor_checks.h"
#include "cpu.h"

// MKL's product of bfloat16 into float32, if torch has MKL. MKL may be linked with 32-bit or 64-bit integers:
// 64-bit arguments work for both.
extern "C" __attribute__((weak)) void cblas_gemm_bf16bf16f32(int64_t layout, int64_t transpose_a,
                                                             int64_t transpose_b, int64_t m, int64_t n,
                                                             int64_t k, float alpha, const void* a,
                                                             int64_t lda, const void* b, int64_t ldb,
                                                             float beta, void* c, int64_t ldc);

extern "C" __attribute__((visibility("default"))) bool fusedacc_has_mkl_bfloat16() {
  return cblas_gemm_bf16bf16f32 != nullptr;
}

namespace fusedacc::cpu {
namespace {

// Bytes of temporaries. With fewer, the other operand would be repacked too often; two parts of a weight of
// 3072 x 768 fit.
constexpr int64_t kPartBytes = 3 << 20;
// Tokens that are cast and multiplied at once, at least.
constexpr int64_t kLeastTokens = 128;
// Rows per thread at least in our own loops, which take four rows at a time.
constexpr int64_t kRankRows = 16;
// Parts end at multiples of oneDNN's and BLAS's blocks.
constexpr int64_t kBlock = 64;

constexpr int64_t parts_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Returns a tensor over memory that outlives it.
AtenTensorHandle borrowed(const Matrix& matrix) {
  const int64_t sizes[] = {matrix.rows, matrix.cols};
  const int64_t strides[] = {matrix.row_stride, matrix.col_stride};
  AtenTensorHandle tensor = nullptr;
  FUSEDACC_SHIM(aoti_torch_create_tensor_from_blob(matrix.data, 2, sizes, strides, 0, code_of(matrix.dtype),
                                                   aoti_torch_device_type_cpu(), 0, &tensor));
  return tensor;
}

void copy(const Matrix& target, const Matrix& source) {
  const OwnedTensor to(borrowed(target)), from(borrowed(source));
  FUSEDACC_SHIM(aoti_torch_copy_(to.get(), from.get(), 0));
}

// Uninitialised memory for a matrix with dense rows.
class Buffer {
 public:
  Buffer(int64_t elements, Dtype dtype)
      : tensor_(empty({elements}, code_of(dtype), Device::cpu())), dtype_(dtype) {}
  Matrix matrix(int64_t rows, int64_t cols) const { return {data_of(tensor_), rows, cols, cols, 1, dtype_}; }
  Matrix copy_of(const Matrix& source) const {
    const Matrix target = matrix(source.rows, source.cols);
    copy(target, source);
    return target;
  }

 private:
  OwnedTensor tensor_;
  Dtype dtype_;
};

// Multiplies matrices of one dtype in place, since BLAS and oneDNN have a beta too.
void multiply_whole(const GemmRequest& all) {
  const OwnedTensor out(borrowed(all.accumulator));
  const OwnedTensor a(borrowed(all.left.transposed()));
  const OwnedTensor b(borrowed(all.right));
  FUSEDACC_SHIM(aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), all.beta, all.scale));
}

// oneDNN's AMX kernels load bfloat16 rows in pairs. If a column is dense and has an odd number of rows, they
// also read the element behind it and multiply it by zero, so inf or nan there would spoil the product. Such
// an operand is copied to dense rows first.
Matrix safe_operand(const Matrix& operand, std::optional<Buffer>& memory) {
  const bool reads_past_columns = operand.row_stride == 1 && operand.cols > 1 && operand.rows % 2 == 1;
  if (!reads_past_columns) return operand;
  return memory.emplace(operand.rows * operand.cols, operand.dtype).copy_of(operand);
}

void multiply_bfloat16(GemmRequest all) {
  std::optional<Buffer> left_memory, right_memory;
  all.left = safe_operand(all.left, left_memory);
  all.right = safe_operand(all.right, right_memory);
  multiply_whole(all);
}

int64_t thread_count() {
  uint32_t threads = 1;
  FUSEDACC_SHIM(torch_get_num_threads(&threads));
  return threads;
}

// Multiplies into a float32 accumulator operands that are cast to float32, some tokens at a time.
void multiply_cast(const GemmRequest& all) {
  const Matrix &left = all.left, &right = all.right;
  const int64_t fit = kPartBytes / static_cast<int64_t>(sizeof(float)) / (left.cols + right.cols);
  const int64_t tokens = std::min(left.rows, std::max(kLeastTokens, fit / kBlock * kBlock));
  const Buffer left_memory(tokens * left.cols, Dtype::kFloat32);
  const Buffer right_memory(tokens * right.cols, Dtype::kFloat32);
  int64_t first = 0;
  do {
    GemmRequest part = all.tokens_part(first, std::min(tokens, left.rows - first));
    part.left = left_memory.copy_of(part.left);
    part.right = right_memory.copy_of(part.right);
    multiply_whole(part);
    first += tokens;
  } while (first < left.rows);
}

// Cuts the accumulator across its longer side into parts that fit a float32 temporary, and calls
// work(part, temporary).
template <typename Work>
void by_parts(const GemmRequest& all, Work&& work) {
  const int64_t rows = all.accumulator.rows;
  const int64_t cols = all.accumulator.cols;
  const int64_t size = std::max(rows, cols);
  const int64_t other = std::min(rows, cols);
  const int64_t parts =
      std::max<int64_t>(1, parts_of(size * other * element_size(Dtype::kFloat32), kPartBytes));
  const int64_t step = std::min(size, parts_of(parts_of(size, parts), kBlock) * kBlock);
  const Buffer buffer(step * other, Dtype::kFloat32);
  for (int64_t first = 0; first < size; first += step) {
    const int64_t count = std::min(step, size - first);
    if (rows >= cols) {
      work(all.rows_part(first, count), buffer.matrix(count, other));
    } else {
      work(all.cols_part(first, count), buffer.matrix(other, count));
    }
  }
}

// Cost of a pass over an accumulator's element, in multiplications.
constexpr int64_t kPassCost = 8;

// Adds a product by fusedacc's own loops, in one pass over the accumulator for each part of the tokens.
void add_rank_k(const GemmRequest& all) {
  const int64_t row_cost = all.accumulator.cols * (kPassCost + all.left.rows);
  const int64_t rows = std::max(kRankRows, kGrain * kPassCost / row_cost);
  const Loops::AddRankK add = loops().add_rank_k[find_pair(all.left.dtype, all.accumulator.dtype)];
  parallel_for(all.accumulator.rows, rows,
               [&](int64_t begin, int64_t end) { add(all.rows_part(begin, end - begin)); });
}

// Multiplies bfloat16 into a float32 accumulator without a temporary. BLAS gets the transposed matrices, by
// columns.
void multiply_by_mkl(const GemmRequest& all) {
  constexpr int64_t kColumnMajor = 102, kAsItIs = 111, kTransposed = 112;
  std::optional<Buffer> left_memory, right_memory;
  const Matrix left = safe_operand(all.left, left_memory), right = safe_operand(all.right, right_memory);
  const auto by_rows = [](const Matrix& matrix) { return matrix.col_stride == 1 || matrix.cols == 1; };
  const auto stride = [&](const Matrix& matrix) {
    return by_rows(matrix) ? std::max(matrix.row_stride, matrix.cols)
                           : std::max(matrix.col_stride, matrix.rows);
  };
  const Matrix& into = all.accumulator;
  cblas_gemm_bf16bf16f32(kColumnMajor, by_rows(right) ? kAsItIs : kTransposed,
                         by_rows(left) ? kTransposed : kAsItIs, into.cols, into.rows, left.rows,
                         static_cast<float>(all.scale), right.data, stride(right), left.data, stride(left),
                         static_cast<float>(all.beta), into.data, std::max(into.row_stride, into.cols));
}

// Adds into a 16-bit accumulator through float32 copies of its parts, so that it is rounded once.
void add_narrow(const GemmRequest& all) {
  by_parts(all, [](const GemmRequest& part, const Matrix& wide) {
    if (part.beta != 0) copy(wide, part.accumulator);
    const GemmRequest into_wide{wide, part.left, part.right, part.scale, part.beta};
    if (part.left.dtype == Dtype::kFloat32) {
      multiply_whole(into_wide);
    } else {
      multiply_cast(into_wide);
    }
    copy(part.accumulator, wide);
  });
}

}  // namespace

void run_gemm(const GemmRequest& request, GemmMethod method) {
  const Dtype accumulator = request.accumulator.dtype, operands = request.left.dtype;
  const bool wide = accumulator == Dtype::kFloat32 || accumulator == Dtype::kFloat64;
  const bool bfloat16 = operands == Dtype::kBFloat16;
  const int64_t tokens = request.left.rows;
  if (method == GemmMethod::kRankK && tokens > 0 && (wide || tokens <= kRankTokens)) {
    add_rank_k(request);
  } else if (method == GemmMethod::kMkl && accumulator == Dtype::kFloat32 && bfloat16 && tokens > 0 &&
             fusedacc_has_mkl_bfloat16()) {
    multiply_by_mkl(request);
  } else if (method == GemmMethod::kOnednn && accumulator == operands && bfloat16) {
    multiply_bfloat16(request);
  } else if (accumulator == operands && wide) {
    multiply_whole(request);
  } else if (wide) {
    multiply_cast(request);
  } else {
    add_narrow(request);
  }
}

namespace {

// The work of all experts is cut into at least so many parts, each with at least kPartRows rows.
constexpr int64_t kParts = 16, kPartsPerThread = 4, kPartRows = 128;

// Some rows of an expert's accumulator. first_cost: total cost of the parts before.
struct ExpertRows {
  int64_t expert, first_row, rows, first_cost;
};

// Multiplies the accumulator by beta: what remains to do without tokens.
void multiply_by_beta(const GemmRequest& product) {
  const Matrix& accumulator = product.accumulator;
  const double beta = product.beta;
  const int64_t size = element_size(accumulator.dtype);
  const bool flat = accumulator.row_stride == accumulator.cols;
  const int64_t rows = flat ? 1 : accumulator.rows;
  const int64_t cols = flat ? accumulator.rows * accumulator.cols : accumulator.cols;
  const Loops::Flat multiply = loops().flat[find_pair(accumulator.dtype, accumulator.dtype)];
  for (int64_t row = 0; row < rows; ++row) {
    char* data = static_cast<char*>(accumulator.data) + row * accumulator.row_stride * size;
    if (beta == 0) {
      std::memset(data, 0, static_cast<size_t>(cols * size));
    } else {
      multiply(data, data, 0, cols, {beta, 1}, true);
    }
  }
}

void run_part(const GroupedRequest& request, const GemmRequest& product) {
  const int64_t tokens = product.left.rows;
  if (tokens == 0) {
    multiply_by_beta(product);
  } else {
    run_gemm(product, request.method_for(tokens));
  }
}

}  // namespace

void run_grouped(const GroupedRequest& request) {
  const Matrix& shape = request.all.accumulator;
  std::vector<int64_t> used;
  int64_t cost = 0;
  const auto row_cost = [&](int64_t expert) { return shape.cols * (kPassCost + request.tokens(expert)); };
  for (int64_t expert = 0; expert < request.experts(); ++expert) {
    if (request.tokens(expert) == 0 && request.all.beta == 1) continue;
    used.push_back(expert);
    cost += shape.rows * row_cost(expert);
  }
  if (used.size() == 1) {
    run_part(request, request.product(used[0]));  // one product uses all threads itself
    return;
  }
  const int64_t wanted = std::max(kParts, kPartsPerThread * thread_count());
  std::vector<ExpertRows> parts;
  int64_t first_cost = 0;
  for (const int64_t expert : used) {
    const int64_t expert_cost = shape.rows * row_cost(expert);
    const int64_t count = std::max<int64_t>(1, expert_cost / std::max<int64_t>(1, cost / wanted));
    const int64_t step = parts_of(parts_of(shape.rows, count), kPartRows) * kPartRows;
    for (int64_t row = 0; row < shape.rows; row += step) {
      const int64_t rows = std::min(step, shape.rows - row);
      parts.push_back({expert, row, rows, first_cost});
      first_cost += rows * row_cost(expert);
    }
  }
  // A part belongs to the thread whose share of the cost contains its beginning.
  parallel_for(cost, kGrain * kPassCost, [&](int64_t begin, int64_t end) {
    const auto before = [](const ExpertRows& part, int64_t first) { return part.first_cost < first; };
    auto part = std::lower_bound(parts.begin(), parts.end(), begin, before);
    for (; part != parts.end() && part->first_cost < end; ++part) {
      run_part(request, request.product(part->expert).rows_part(part->first_row, part->rows));
    }
  });
}

}  // namespace fusedacc::cpu
