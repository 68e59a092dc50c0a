// Runs csrc/cuda/gemm.cpp on the host, on a cuBLAS and a torch made up here: which arguments, modes and
// scalars the library gets, and that torch's handle is left as it was. Prints what fails and exits with 1.
#include "cuda/gemm.cpp"

#include <cmath>
#include <cstring>

#include "check.h"

using namespace fusedacc;

namespace {

struct {
  int pointer_mode = 0, math_mode = 3;
  int calls = 0, status = 0, launches = 0, device = -1;
  int pointer_mode_then = 0, math_mode_then = 0, a_type = 0, b_type = 0, c_type = 0, compute = 0;
  double alpha = 0, beta = 0;
} library;
double memory[2];

double scalar(const void* at) {
  return library.compute == 70 ? *static_cast<const double*>(at) : *static_cast<const float*>(at);
}

}  // namespace

extern "C" {

// torch

AOTITorchError torch_get_current_cuda_blas_handle(void** handle) {
  CHECK(library.device == 2);  // inside the guard
  *handle = &library;
  return 0;
}
AOTITorchError aoti_torch_empty_strided(int64_t, const int64_t* sizes, const int64_t*, int32_t, int32_t,
                                        int32_t device_index, AtenTensorHandle* result) {
  CHECK(sizes[0] == 2 && device_index == 2);
  *result = reinterpret_cast<AtenTensorHandle>(memory);
  return 0;
}
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle, void** data) {
  *data = memory;
  return 0;
}
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle) { return 0; }
int32_t aoti_torch_dtype_float32() { return 6; }
int32_t aoti_torch_dtype_float64() { return 7; }
int32_t aoti_torch_device_type_cuda() { return 1; }

// cuBLAS

int cublasGetPointerMode_v2(void*, int* mode) { return *mode = library.pointer_mode, 0; }
int cublasSetPointerMode_v2(void*, int mode) { return library.pointer_mode = mode, 0; }
int cublasGetMathMode(void*, int* mode) { return *mode = library.math_mode, 0; }
int cublasSetMathMode(void*, int mode) { return library.math_mode = mode, 0; }
int cublasGemmEx(void* handle, int transa, int transb, int m, int n, int k, const void* alpha, const void* a,
                 int a_type, int lda, const void* b, int b_type, int ldb, const void* beta, void* c,
                 int c_type, int ldc, int compute_type, int algorithm) {
  CHECK(handle == &library && algorithm == -1);
  CHECK(transa == 0 && transb == 1 && m == 4 && n == 3 && k == 2 && lda == 4 && ldb == 3 && ldc == 5);
  CHECK(a != b && c != a && c != b);
  ++library.calls;
  library.pointer_mode_then = library.pointer_mode;
  library.math_mode_then = library.math_mode;
  library.a_type = a_type;
  library.b_type = b_type;
  library.c_type = c_type;
  library.compute = compute_type;
  library.alpha = scalar(alpha);
  library.beta = scalar(beta);
  return library.status;
}
}

namespace fusedacc::cuda {

void* current_stream(int32_t device_index) {
  CHECK(device_index == 2);
  return &library;
}
void on_device(int32_t device_index, const std::function<void()>& work) {
  library.device = device_index;
  work();
  library.device = -1;
}
void launch_scalars(const ScaleArgument& scale, const ScaleArgument& keep, bool wide, void* out,
                    void* stream) {
  CHECK(stream == &library);
  ++library.launches;
  if (wide) {
    static_cast<double*>(out)[0] = read_scale<double>(scale);
    static_cast<double*>(out)[1] = read_scale<double>(keep);
  } else {
    static_cast<float*>(out)[0] = read_scale<float>(scale);
    static_cast<float*>(out)[1] = read_scale<float>(keep);
  }
}

}  // namespace fusedacc::cuda

namespace {

char data[3][64];

GemmRequest request(Dtype sum, Dtype operands, ScaleArgument scale, ScaleArgument keep) {
  return {{data[0], 3, 4, 5, 1, sum},
          {data[1], 2, 3, 3, 1, operands},
          {data[2], 2, 4, 4, 1, operands},
          scale,
          keep};
}

bool refused(const GemmRequest& request, const char* says) {
  try {
    cuda::run_gemm(request, 2);
  } catch (const std::runtime_error& error) {
    return std::strstr(error.what(), says) != nullptr;
  }
  return false;
}

void check_dtypes() {
  struct Case {
    Dtype sum, operands;
    int c_type, a_type, compute, math;
  };
  for (const Case& expected : {
           Case{Dtype::kFloat32, Dtype::kFloat32, 0, 0, 68, 3},
           Case{Dtype::kFloat32, Dtype::kBFloat16, 0, 14, 68, 3},
           Case{Dtype::kFloat32, Dtype::kFloat16, 0, 2, 68, 3},
           Case{Dtype::kFloat64, Dtype::kFloat64, 1, 1, 70, 3},
           Case{Dtype::kBFloat16, Dtype::kBFloat16, 14, 14, 68, 19},
           Case{Dtype::kFloat16, Dtype::kFloat16, 2, 2, 68, 19},
       }) {
    for (const bool on_device : {false, true}) {
      const float scale = 0.25f;
      const double keep = 0.5;
      const int launches = library.launches;
      cuda::run_gemm(request(expected.sum, expected.operands,
                             on_device ? ScaleArgument{&scale, 0, 0} : ScaleArgument{nullptr, 0.25, 0},
                             on_device ? ScaleArgument{&keep, 0, 3} : ScaleArgument{nullptr, 0.5, 0}),
                     2);
      CHECK(library.c_type == expected.c_type && library.compute == expected.compute);
      CHECK(library.a_type == expected.a_type && library.b_type == expected.a_type);
      CHECK(library.alpha == 0.25 && library.beta == 0.5);
      CHECK(library.math_mode_then == expected.math && library.math_mode == 3);
      CHECK(library.pointer_mode_then == on_device && library.pointer_mode == 0);
      CHECK(library.launches - launches == on_device);
    }
  }
}

void check_errors() {
  const ScaleArgument one{nullptr, 1, 0};
  const float number = 1;
  CHECK(refused(request(Dtype::kBFloat16, Dtype::kFloat32, one, one), "no product of float32 into bfloat16"));
  GemmRequest empty = request(Dtype::kFloat32, Dtype::kFloat32, one, one);
  empty.left.rows = empty.right.rows = 0;
  CHECK(refused(empty, "have no rows"));
  library.status = 13;
  CHECK(refused(request(Dtype::kBFloat16, Dtype::kBFloat16, {&number, 0, 0}, one),
                "failed with cuBLAS status 13"));
  CHECK(library.pointer_mode == 0 && library.math_mode == 3);
  library.status = 0;
}

}  // namespace

int main() {
  CHECK(cuda::gemm_problem().empty());
  check_dtypes();
  check_errors();
  std::printf("%d calls\n", library.calls);
}
