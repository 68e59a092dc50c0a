#include "grouped.h"

#include <algorithm>
#include <cstring>

#include "cpu.h"

namespace fusedacc::cpu {
namespace {

// What a pass over an accumulator's element costs, in products of it.
constexpr int64_t kPassCost = 8;
// Into so many parts at least is the work of all experts cut; so many rows at least has a part.
constexpr int64_t kParts = 16, kPartsPerThread = 4, kPartRows = 128;

// Some rows of an expert's accumulator. `first_cost`: that of all parts before.
struct Part {
  int64_t expert, first_row, rows, first_cost;
};

struct Context {
  const GroupedRequest& request;
  const std::vector<Part>& parts;
};

// What is left to do without tokens.
void keep_only(const GemmRequest& product) {
  const Matrix& accumulator = product.accumulator;
  const double beta = product.beta;
  const int64_t size = element_size(accumulator.dtype);
  const bool flat = accumulator.row_stride == accumulator.cols;
  const int64_t rows = flat ? 1 : accumulator.rows;
  const int64_t cols = flat ? accumulator.rows * accumulator.cols : accumulator.cols;
  const Loops::Flat multiply = loops().flat[find_pair(stored_as(accumulator.dtype), accumulator.dtype)];
  for (int64_t row = 0; row < rows; ++row) {
    char* data = static_cast<char*>(accumulator.data) + row * accumulator.row_stride * size;
    if (beta == 0) {
      std::memset(data, 0, static_cast<size_t>(cols * size));
    } else {
      multiply(data, data, 0, cols, {beta, 1, product.noise.from(row * accumulator.row_stride)}, true);
    }
  }
}

void run_part(const GroupedRequest& request, const GemmRequest& product) {
  const int64_t tokens = product.left.rows;
  if (tokens == 0) {
    keep_only(product);
  } else if (request.rounds(tokens)) {
    run_gemm(product, Way::kRounded);
  } else if (request.is_rank_k(tokens)) {
    loops().add_rank_k[find_pair(product.left.dtype, product.accumulator.dtype)](product);
  } else {
    run_gemm(product, Way::kWhole);
  }
}

// A part belongs to the thread in whose share of the cost it begins.
void run_parts(int64_t begin, int64_t end, void* opaque) {
  const Context& context = *static_cast<const Context*>(opaque);
  const auto before = [](const Part& part, int64_t cost) { return part.first_cost < cost; };
  auto part = std::lower_bound(context.parts.begin(), context.parts.end(), begin, before);
  for (; part != context.parts.end() && part->first_cost < end; ++part) {
    const GemmRequest product = context.request.product(part->expert);
    run_part(context.request, product.rows_part(part->first_row, part->rows));
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
  if (used.size() == 1 && !request.is_rank_k(request.tokens(used[0]))) {
    run_part(request, request.product(used[0]));  // BLAS shares it out itself
    return;
  }
  uint32_t threads = 1;
  if (torch_get_num_threads(&threads) != 0) threads = 1;
  const int64_t wanted = std::max(kParts, kPartsPerThread * static_cast<int64_t>(threads));
  std::vector<Part> parts;
  int64_t first_cost = 0;
  for (const int64_t expert : used) {
    const int64_t own = shape.rows * row_cost(expert);
    const int64_t count = std::max<int64_t>(1, own / std::max<int64_t>(1, cost / wanted));
    const int64_t even = (shape.rows + count - 1) / count;
    const int64_t step = (even + kPartRows - 1) / kPartRows * kPartRows;
    for (int64_t row = 0; row < shape.rows; row += step) {
      const int64_t rows = std::min(step, shape.rows - row);
      parts.push_back({expert, row, rows, first_cost});
      first_cost += rows * row_cost(expert);
    }
  }
  Context context{request, parts};
  parallel_for(cost, grain() * kPassCost, run_parts, context);
}

}  // namespace fusedacc::cpu
