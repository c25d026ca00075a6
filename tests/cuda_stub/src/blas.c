/* cuBLAS: handles, products of matrices, of a matrix and a vector, of vectors. */
#include "blas.h"
#include "stub.h"

#include <stdlib.h>
#include <string.h>

struct handle {
    cudaStream_t stream;
    cublasMath_t math;
    cublasPointerMode_t pointers;
    cublasAtomicsMode_t atomics;
    size_t workspace;
};

static struct handle *get(cublasHandle_t handle) { return (struct handle *)handle; }

cublasStatus_t cublasCreate(cublasHandle_t *handle) {
    *handle = calloc(1, sizeof(struct handle));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle) {
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasGetCudartVersion(void) { return CUDART_VERSION; }

cublasStatus_t cublasGetVersion(cublasHandle_t handle, int *version) {
    *version = CUBLAS_VERSION;
    return CUBLAS_STATUS_SUCCESS;
}

/* Settings of a handle, each with the function that reads it. */
#define SETTING(name, type, field)                                                                 \
    cublasStatus_t cublasSet##name(cublasHandle_t handle, type value) {                            \
        get(handle)->field = value;                                                                \
        return CUBLAS_STATUS_SUCCESS;                                                              \
    }                                                                                              \
    cublasStatus_t cublasGet##name(cublasHandle_t handle, type *value) {                           \
        *value = get(handle)->field;                                                               \
        return CUBLAS_STATUS_SUCCESS;                                                              \
    }

SETTING(MathMode, cublasMath_t, math)
SETTING(AtomicsMode, cublasAtomicsMode_t, atomics)

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
    get(handle)->stream = stream;
    get(handle)->workspace = 0; /* as documented: back to the default workspace */
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetStream(cublasHandle_t handle, cudaStream_t *stream) {
    *stream = get(handle)->stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode(cublasHandle_t handle, cublasPointerMode_t mode) {
    get(handle)->pointers = mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode(cublasHandle_t handle, cublasPointerMode_t *mode) {
    *mode = get(handle)->pointers;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *workspace, size_t bytes) {
    get(handle)->workspace = bytes;
    return CUBLAS_STATUS_SUCCESS;
}

static const char *type_name(cudaDataType type) {
    switch ((int)type) {
    case CUDA_R_16F: return "float16";
    case CUDA_R_16BF: return "bfloat16";
    case CUDA_R_32F: return "float32";
    case CUDA_R_64F: return "float64";
    case CUDA_R_8F_E4M3: return "float8_e4m3";
    case CUDA_R_8F_E5M2: return "float8_e5m2";
    case CUDA_R_8I: return "int8";
    case CUDA_R_32I: return "int32";
    case CUDA_C_32F: return "complex64";
    case CUDA_C_64F: return "complex128";
    default: return "?";
    }
}

static const char *compute_name(cublasComputeType_t type) {
    switch ((int)type) {
    case CUBLAS_COMPUTE_16F:
    case CUBLAS_COMPUTE_16F_PEDANTIC: return "float16";
    case CUBLAS_COMPUTE_32F:
    case CUBLAS_COMPUTE_32F_PEDANTIC: return "float32";
    case CUBLAS_COMPUTE_32F_FAST_TF32: return "tf32";
    case CUBLAS_COMPUTE_32F_FAST_16F: return "fast_float16";
    case CUBLAS_COMPUTE_32F_FAST_16BF: return "fast_bfloat16";
    case CUBLAS_COMPUTE_64F:
    case CUBLAS_COMPUTE_64F_PEDANTIC: return "float64";
    case CUBLAS_COMPUTE_32I: return "int32";
    default: return "?";
    }
}

char stub_trans(cublasOperation_t operation) {
    return operation == CUBLAS_OP_N ? 'N' : operation == CUBLAS_OP_T ? 'T' : 'C';
}

void stub_gemm(const struct gemm *gemm) {
    stub_record("gemm", gemm->stream,
                "%s\t%s\t%s\t%s\t%s\t%ld\t%ld\t%ld\t%ld\t%c%c\t%d\t%d\t%zu", gemm->call,
                type_name(gemm->a), type_name(gemm->b), type_name(gemm->c),
                compute_name(gemm->compute), gemm->m, gemm->n, gemm->k, gemm->batch, gemm->trans_a,
                gemm->trans_b, gemm->reduced, gemm->epilogue, gemm->workspace);
    stub_count_captured(gemm->stream);
}

/* A call through a handle: its stream and math mode complete the record. */
static cublasStatus_t product(cublasHandle_t handle, struct gemm gemm) {
    struct handle *h = get(handle);
    int math = (int)h->math;
    int half = gemm.c == CUDA_R_16F || gemm.c == CUDA_R_16BF;

    gemm.stream = h->stream;
    gemm.workspace = h->workspace;
    gemm.epilogue = 1;
    gemm.reduced = half && !(math & CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
    if ((math & 15) == CUBLAS_TF32_TENSOR_OP_MATH && gemm.a == CUDA_R_32F)
        gemm.compute = CUBLAS_COMPUTE_32F_FAST_TF32;
    stub_gemm(&gemm);
    return CUBLAS_STATUS_SUCCESS;
}

#define GEMM(a_, b_, c_, compute_, batch_)                                                         \
    product(handle, (struct gemm){.call = __func__, .a = a_, .b = b_, .c = c_,                     \
                                  .compute = compute_, .m = m, .n = n, .k = k, .batch = batch_,    \
                                  .trans_a = stub_trans(transa), .trans_b = stub_trans(transb)})

/* One element type: the classic functions. */
#define CLASSIC(T, type, data, compute)                                                            \
    cublasStatus_t cublas##T##gemm(cublasHandle_t handle, cublasOperation_t transa,                \
                                   cublasOperation_t transb, int m, int n, int k,                  \
                                   const type *alpha, const type *A, int lda, const type *B,       \
                                   int ldb, const type *beta, type *C, int ldc) {                  \
        return GEMM(data, data, data, compute, 1);                                                 \
    }                                                                                              \
    cublasStatus_t cublas##T##gemmStridedBatched(                                                  \
        cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n,   \
        int k, const type *alpha, const type *A, int lda, long long stride_a, const type *B,       \
        int ldb, long long stride_b, const type *beta, type *C, int ldc, long long stride_c,       \
        int batch) {                                                                               \
        return GEMM(data, data, data, compute, batch);                                             \
    }                                                                                              \
    cublasStatus_t cublas##T##gemmBatched(                                                         \
        cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n,   \
        int k, const type *alpha, const type *const A[], int lda, const type *const B[], int ldb,  \
        const type *beta, type *const C[], int ldc, int batch) {                                   \
        return GEMM(data, data, data, compute, batch);                                             \
    }                                                                                              \
    cublasStatus_t cublas##T##gemv(cublasHandle_t handle, cublasOperation_t trans, int rows,       \
                                   int columns, const type *alpha, const type *A, int lda,         \
                                   const type *x, int incx, const type *beta, type *y, int incy) { \
        int m = trans == CUBLAS_OP_N ? rows : columns, n = 1;                                      \
        int k = trans == CUBLAS_OP_N ? columns : rows;                                             \
        cublasOperation_t transa = trans, transb = CUBLAS_OP_N;                                    \
        return GEMM(data, data, data, compute, 1);                                                 \
    }

CLASSIC(S, float, CUDA_R_32F, CUBLAS_COMPUTE_32F)
CLASSIC(D, double, CUDA_R_64F, CUBLAS_COMPUTE_64F)
CLASSIC(C, cuComplex, CUDA_C_32F, CUBLAS_COMPUTE_32F)
CLASSIC(Z, cuDoubleComplex, CUDA_C_64F, CUBLAS_COMPUTE_64F)

/* Element types as arguments. */

cublasStatus_t cublasSgemmEx(cublasHandle_t handle, cublasOperation_t transa,
                             cublasOperation_t transb, int m, int n, int k, const float *alpha,
                             const void *A, cudaDataType a, int lda, const void *B, cudaDataType b,
                             int ldb, const float *beta, void *C, cudaDataType c, int ldc) {
    return GEMM(a, b, c, CUBLAS_COMPUTE_32F, 1);
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa,
                            cublasOperation_t transb, int m, int n, int k, const void *alpha,
                            const void *A, cudaDataType a, int lda, const void *B, cudaDataType b,
                            int ldb, const void *beta, void *C, cudaDataType c, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    return GEMM(a, b, c, compute, 1);
}

cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k,
    const void *alpha, const void *A, cudaDataType a, int lda, long long stride_a, const void *B,
    cudaDataType b, int ldb, long long stride_b, const void *beta, void *C, cudaDataType c, int ldc,
    long long stride_c, int batch, cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    return GEMM(a, b, c, compute, batch);
}

cublasStatus_t cublasGemmBatchedEx(cublasHandle_t handle, cublasOperation_t transa,
                                   cublasOperation_t transb, int m, int n, int k, const void *alpha,
                                   const void *const A[], cudaDataType a, int lda,
                                   const void *const B[], cudaDataType b, int ldb, const void *beta,
                                   void *const C[], cudaDataType c, int ldc, int batch,
                                   cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    return GEMM(a, b, c, compute, batch);
}

/* Products of vectors. A result on the host is zero; one on the device stays as it is. */

static cublasStatus_t dot(cublasHandle_t handle, const char *call, int n, cudaDataType type,
                          cublasComputeType_t compute, void *result, size_t size) {
    if (get(handle)->pointers == CUBLAS_POINTER_MODE_HOST)
        memset(result, 0, size);
    return product(handle, (struct gemm){.call = call, .a = type, .b = type, .c = type,
                                         .compute = compute, .m = 1, .n = 1, .k = n, .batch = 1,
                                         .trans_a = 'T', .trans_b = 'N'});
}

cublasStatus_t cublasSdot(cublasHandle_t handle, int n, const float *x, int incx, const float *y,
                          int incy, float *result) {
    return dot(handle, __func__, n, CUDA_R_32F, CUBLAS_COMPUTE_32F, result, sizeof *result);
}

cublasStatus_t cublasDdot(cublasHandle_t handle, int n, const double *x, int incx, const double *y,
                          int incy, double *result) {
    return dot(handle, __func__, n, CUDA_R_64F, CUBLAS_COMPUTE_64F, result, sizeof *result);
}

cublasStatus_t cublasDotEx(cublasHandle_t handle, int n, const void *x, cudaDataType x_type,
                           int incx, const void *y, cudaDataType y_type, int incy, void *result,
                           cudaDataType result_type, cudaDataType execution) {
    return dot(handle, __func__, n, x_type, CUBLAS_COMPUTE_32F, result, 2);
}
