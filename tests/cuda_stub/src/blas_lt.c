/*
 * cuBLASLt: descriptors are decoded into the record of a product.
 *
 * The heuristic offers one algorithm without a workspace. The algorithm carries the reduction
 * schemes that the preference allows, as the real one carries its choice among them.
 */
#include "blas.h"
#include "stub.h"

#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>

/* What is recorded of any descriptor: an operation's epilogue, a layout's type, a preference. */
struct descriptor {
    cublasLtEpilogue_t epilogue;
    cudaDataType type;
    uint32_t reductions;
};

static cublasStatus_t create(void *handle, struct descriptor values) {
    struct descriptor *made = malloc(sizeof *made);
    *made = values;
    *(struct descriptor **)handle = made;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *handle, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    return create(handle, (struct descriptor){.epilogue = CUBLASLT_EPILOGUE_DEFAULT});
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *handle, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t ld) {
    return create(handle, (struct descriptor){.type = type});
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *handle) {
    return create(handle, (struct descriptor){.reductions = CUBLASLT_REDUCTION_SCHEME_MASK});
}

#define DESTROY(name, type)                                                                        \
    cublasStatus_t name(type handle) {                                                             \
        free(handle);                                                                              \
        return CUBLAS_STATUS_SUCCESS;                                                              \
    }

DESTROY(cublasLtMatmulDescDestroy, cublasLtMatmulDesc_t)
DESTROY(cublasLtMatrixLayoutDestroy, cublasLtMatrixLayout_t)
DESTROY(cublasLtMatmulPreferenceDestroy, cublasLtMatmulPreference_t)

/* Attributes that change nothing in the record (pointers, scales, strides) are accepted. */

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t size) {
    if (attribute == CUBLASLT_MATMUL_DESC_EPILOGUE)
        memcpy(&((struct descriptor *)handle)->epilogue, value, size);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t size) {
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t size) {
    if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)
        memcpy(&((struct descriptor *)handle)->reductions, value, size);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    cublasLtMatmulPreference_t preference, int wanted, cublasLtMatmulHeuristicResult_t results[],
    int *found) {
    memset(results, 0, sizeof *results);
    results->algo.data[0] = ((struct descriptor *)preference)->reductions;
    results->state = CUBLAS_STATUS_SUCCESS;
    results->wavesCount = 1.0f;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                              const void *alpha, const void *A, cublasLtMatrixLayout_t a,
                              const void *B, cublasLtMatrixLayout_t b, const void *beta,
                              const void *C, cublasLtMatrixLayout_t c, void *D,
                              cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algorithm,
                              void *workspace, size_t bytes, cudaStream_t stream) {
    cudaDataType result = ((struct descriptor *)d)->type;
    uint64_t reductions = algorithm ? algorithm->data[0] : CUBLASLT_REDUCTION_SCHEME_MASK;
    int half = result == CUDA_R_16F || result == CUDA_R_16BF;
    stub_gemm(&(struct gemm){
        .call = __func__,
        .operands = ((struct descriptor *)a)->type,
        .result = result,
        .reduced = half && (reductions & CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE),
        .epilogue = ((struct descriptor *)operation)->epilogue,
        .stream = stream,
    });
    return CUBLAS_STATUS_SUCCESS;
}
