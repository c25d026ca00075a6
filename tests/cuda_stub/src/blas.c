/* cuBLAS: handles, products of matrices, of a matrix and a vector. */
#include "blas.h"
#include "stub.h"

#include <stdlib.h>

struct handle {
    cudaStream_t stream;
    cublasMath_t math;
};

static struct handle *get(cublasHandle_t handle) { return (struct handle *)handle; }

cublasStatus_t cublasCreate(cublasHandle_t *handle) ANSWER(handle, calloc(1, sizeof(struct handle)))

cublasStatus_t cublasDestroy(cublasHandle_t handle) {
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasGetCudartVersion(void) { return CUDART_VERSION; }

cublasStatus_t cublasGetVersion(cublasHandle_t handle, int *version) ANSWER(version, CUBLAS_VERSION)

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
SETTING(Stream, cudaStream_t, stream)

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *workspace, size_t bytes) {
    return CUBLAS_STATUS_SUCCESS;
}

static const char *type_name(cudaDataType type) {
    switch ((int)type) {
    case CUDA_R_16F: return "float16";
    case CUDA_R_16BF: return "bfloat16";
    case CUDA_R_32F: return "float32";
    case CUDA_R_64F: return "float64";
    default: return "?";
    }
}

void stub_gemm(const struct gemm *gemm) {
    stub_record("gemm", gemm->stream, "%s\t%s\t%d\t%d", gemm->call, type_name(gemm->operands),
                gemm->reduced, gemm->epilogue);
}

/* A call through a handle: its stream and math mode complete the record. */
static cublasStatus_t product(const char *call, cublasHandle_t handle, cudaDataType operands,
                              cudaDataType result) {
    struct handle *h = get(handle);
    int half = result == CUDA_R_16F || result == CUDA_R_16BF;
    int allowed = !((int)h->math & CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
    stub_gemm(&(struct gemm){call, operands, result, half && allowed, 1, h->stream});
    return CUBLAS_STATUS_SUCCESS;
}

/* One element type: the classic functions. */
#define CLASSIC(T, type, data)                                                                     \
    cublasStatus_t cublas##T##gemm(cublasHandle_t handle, cublasOperation_t transa,                \
                                   cublasOperation_t transb, int m, int n, int k,                  \
                                   const type *alpha, const type *A, int lda, const type *B,       \
                                   int ldb, const type *beta, type *C, int ldc) {                  \
        return product(__func__, handle, data, data);                                              \
    }                                                                                              \
    cublasStatus_t cublas##T##gemmStridedBatched(                                                  \
        cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n,   \
        int k, const type *alpha, const type *A, int lda, long long stride_a, const type *B,       \
        int ldb, long long stride_b, const type *beta, type *C, int ldc, long long stride_c,       \
        int batch) {                                                                               \
        return product(__func__, handle, data, data);                                              \
    }                                                                                              \
    cublasStatus_t cublas##T##gemv(cublasHandle_t handle, cublasOperation_t trans, int rows,       \
                                   int columns, const type *alpha, const type *A, int lda,         \
                                   const type *x, int incx, const type *beta, type *y, int incy) { \
        return product(__func__, handle, data, data);                                              \
    }

CLASSIC(S, float, CUDA_R_32F)
CLASSIC(D, double, CUDA_R_64F)

/* Element types as arguments. */

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa,
                            cublasOperation_t transb, int m, int n, int k, const void *alpha,
                            const void *A, cudaDataType a, int lda, const void *B, cudaDataType b,
                            int ldb, const void *beta, void *C, cudaDataType c, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    return product(__func__, handle, a, c);
}

cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k,
    const void *alpha, const void *A, cudaDataType a, int lda, long long stride_a, const void *B,
    cudaDataType b, int ldb, long long stride_b, const void *beta, void *C, cudaDataType c, int ldc,
    long long stride_c, int batch, cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    return product(__func__, handle, a, c);
}
