#include "cuda.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <stdexcept>

#include "../ops/arguments.h"
#include "device/blas_call.h"

// Weak, since a torch without CUDA does not have it and the library must load there too.
extern "C" __attribute__((weak)) AOTITorchError torch_get_current_cuda_blas_handle(void** handle);

namespace fusedacc::cuda {
namespace {

// What is used of cuBLAS, declared here because its headers need not be there where this is built.
// Enumerations are ints, with the values of cublas_api.h and library_types.h, which are part of its ABI.
using Handle = void*;
using GemmEx = int (*)(Handle, int transa, int transb, int m, int n, int k, const void* alpha, const void* a,
                       int a_type, int lda, const void* b, int b_type, int ldb, const void* beta, void* c,
                       int c_type, int ldc, int compute_type, int algorithm);
using GetMode = int (*)(Handle, int* mode);
using SetMode = int (*)(Handle, int mode);

constexpr int kPointersOnDevice = 1;     // CUBLAS_POINTER_MODE_DEVICE
constexpr int kNoReducedPrecision = 16;  // CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
constexpr int kCompute32 = 68;           // CUBLAS_COMPUTE_32F
constexpr int kCompute64 = 70;           // CUBLAS_COMPUTE_64F
constexpr int kDefaultAlgorithm = -1;    // CUBLAS_GEMM_DEFAULT
constexpr int kTypes[] = {0, 14, 2, 1};  // CUDA_R_32F, _16BF, _16F, _64F: in the order of Dtype

struct Cublas {
  GemmEx gemm_ex = nullptr;
  GetMode get_pointer_mode = nullptr, get_math_mode = nullptr;
  SetMode set_pointer_mode = nullptr, set_math_mode = nullptr;
};

// The library that torch has loaded, and no other: a handle belongs to the library that made it.
void* symbol(const char* name) {
  if (void* found = dlsym(RTLD_DEFAULT, name)) return found;
  for (const char* library : {"libcublas.so.13", "libcublas.so.12", "libcublas.so.11"}) {
    if (void* loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD)) {
      void* found = dlsym(loaded, name);
      dlclose(loaded);  // torch keeps it
      if (found != nullptr) return found;
    }
  }
  return nullptr;
}

Cublas find_cublas() {
  Cublas found;
  found.gemm_ex = reinterpret_cast<GemmEx>(symbol("cublasGemmEx"));
  found.get_pointer_mode = reinterpret_cast<GetMode>(symbol("cublasGetPointerMode_v2"));
  found.set_pointer_mode = reinterpret_cast<SetMode>(symbol("cublasSetPointerMode_v2"));
  found.get_math_mode = reinterpret_cast<GetMode>(symbol("cublasGetMathMode"));
  found.set_math_mode = reinterpret_cast<SetMode>(symbol("cublasSetMathMode"));
  return found;
}

const Cublas& cublas() {
  static const Cublas found = find_cublas();
  return found;
}

void check_status(int status, const char* call) {
  if (status != 0) {
    throw std::runtime_error("fusedacc: " + std::string(call) + " failed with cuBLAS status " +
                             std::to_string(status));
  }
}

// Changes a mode of the handle, which is torch's, until the end of the scope.
class ModeGuard {
 public:
  ModeGuard(Handle handle, GetMode get, SetMode set) : handle_(handle), set_(set) {
    check_status(get(handle, &previous_), "reading a mode");
  }
  void change(int mode) {
    check_status(set_(handle_, mode), "setting a mode");
    changed_ = true;
  }
  int previous() const { return previous_; }
  ~ModeGuard() {
    if (changed_) set_(handle_, previous_);
  }
  ModeGuard(const ModeGuard&) = delete;
  ModeGuard& operator=(const ModeGuard&) = delete;

 private:
  Handle handle_;
  SetMode set_;
  int previous_ = 0;
  bool changed_ = false;
};

void run_here(const GemmRequest& request, int32_t device_index) {
  // Sets torch's stream, workspace and TF32 mode.
  Handle handle = nullptr;
  FUSEDACC_SHIM(torch_get_current_cuda_blas_handle(&handle));
  const Cublas& blas = cublas();
  const BlasCall call = blas_call(request);
  const Dtype sum = request.accumulator.dtype;
  const bool wide = sum == Dtype::kFloat64;

  ModeGuard math(handle, blas.get_math_mode, blas.set_math_mode);
  // Else partial sums might be joined in the dtype of a 16-bit accumulator.
  if (element_size(sum) == 2) math.change(math.previous() | kNoReducedPrecision);

  ModeGuard pointers(handle, blas.get_pointer_mode, blas.set_pointer_mode);
  const double wide_numbers[] = {request.scale.value, request.keep.value};
  const float numbers[] = {static_cast<float>(request.scale.value), static_cast<float>(request.keep.value)};
  const void* alpha = wide ? static_cast<const void*>(&wide_numbers[0]) : &numbers[0];
  const void* beta = wide ? static_cast<const void*>(&wide_numbers[1]) : &numbers[1];
  OwnedTensor scalars(nullptr);
  if (request.scale.tensor != nullptr || request.keep.tensor != nullptr) {
    const int64_t size = 2, stride = 1;
    AtenTensorHandle memory = nullptr;
    FUSEDACC_SHIM(aoti_torch_empty_strided(1, &size, &stride,
                                           wide ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32(),
                                           aoti_torch_device_type_cuda(), device_index, &memory));
    scalars.reset(memory);
    void* data = nullptr;
    FUSEDACC_SHIM(aoti_torch_get_data_ptr(memory, &data));
    launch_scalars(request.scale, request.keep, wide, data, current_stream(device_index));
    alpha = data;
    beta = static_cast<const char*>(data) + (wide ? sizeof(double) : sizeof(float));
    pointers.change(kPointersOnDevice);
  }
  const int type = kTypes[static_cast<int32_t>(request.left.dtype)];
  check_status(blas.gemm_ex(handle, static_cast<int>(call.a.operation), static_cast<int>(call.b.operation),
                            call.m, call.n, call.k, alpha, call.a.data, type, call.a.leading, call.b.data,
                            type, call.b.leading, beta, call.c, kTypes[static_cast<int32_t>(sum)],
                            call.c_leading, wide ? kCompute64 : kCompute32, kDefaultAlgorithm),
               "cublasGemmEx");
}

}  // namespace

std::string gemm_problem() {
  if (torch_get_current_cuda_blas_handle == nullptr) return "this torch has no CUDA";
  const Cublas& blas = cublas();
  const bool found = blas.gemm_ex && blas.get_pointer_mode && blas.set_pointer_mode && blas.get_math_mode &&
                     blas.set_math_mode;
  return found ? "" : "cublasGemmEx was not found among the libraries that torch has loaded";
}

void run_gemm(const GemmRequest& request, int32_t device_index) {
  const std::string problem = gemm_problem();
  if (!problem.empty()) throw std::runtime_error("fusedacc: " + problem);
  const Dtype sum = request.accumulator.dtype, operands = request.left.dtype;
  if (operands == Dtype::kFloat32 && sum != Dtype::kFloat32) {
    throw std::runtime_error(std::string("fusedacc: cuBLAS adds no product of float32 into ") +
                             dtype_name(sum));
  }
  if (request.left.rows == 0) {
    throw std::runtime_error("fusedacc: left and right have no rows; there is nothing to multiply");
  }
  on_device(device_index, [&] { run_here(request, device_index); });
}

}  // namespace fusedacc::cuda
