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

struct operation {
    cublasComputeType_t compute;
    cublasOperation_t trans_a, trans_b;
    cublasLtEpilogue_t epilogue;
};
struct layout {
    cudaDataType type;
    uint64_t rows, columns;
    int32_t batch;
};
struct preference {
    uint64_t max_workspace;
    uint32_t reductions;
};

#define CREATE(handle, type, ...)                                                                  \
    type *made = malloc(sizeof *made);                                                             \
    *made = (type){__VA_ARGS__};                                                                   \
    *handle = (void *)made;                                                                        \
    return CUBLAS_STATUS_SUCCESS;

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *handle, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    CREATE(handle, struct operation, compute, CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT)
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *handle, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t ld) {
    CREATE(handle, struct layout, type, rows, columns, 1)
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *handle) {
    CREATE(handle, struct preference, 0, CUBLASLT_REDUCTION_SCHEME_MASK)
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
    struct operation *operation = (struct operation *)handle;
    if (attribute == CUBLASLT_MATMUL_DESC_TRANSA)
        memcpy(&operation->trans_a, value, size);
    if (attribute == CUBLASLT_MATMUL_DESC_TRANSB)
        memcpy(&operation->trans_b, value, size);
    if (attribute == CUBLASLT_MATMUL_DESC_EPILOGUE)
        memcpy(&operation->epilogue, value, size);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t size) {
    if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)
        memcpy(&((struct layout *)handle)->batch, value, size);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t size) {
    struct preference *preference = (struct preference *)handle;
    if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
        memcpy(&preference->max_workspace, value, size);
    if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)
        memcpy(&preference->reductions, value, size);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    cublasLtMatmulPreference_t preference, int wanted, cublasLtMatmulHeuristicResult_t results[],
    int *found) {
    memset(results, 0, sizeof *results);
    results->algo.data[0] = ((struct preference *)preference)->reductions;
    results->state = CUBLAS_STATUS_SUCCESS;
    results->wavesCount = 1.0f;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *A, cublasLtMatrixLayout_t a_handle, const void *B,
                              cublasLtMatrixLayout_t b_handle, const void *beta, const void *C,
                              cublasLtMatrixLayout_t c_handle, void *D,
                              cublasLtMatrixLayout_t d_handle,
                              const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t bytes,
                              cudaStream_t stream) {
    struct operation *operation = (struct operation *)desc;
    struct layout *a = (struct layout *)a_handle, *b = (struct layout *)b_handle;
    struct layout *d = (struct layout *)d_handle;

    uint64_t reductions = algorithm ? algorithm->data[0] : CUBLASLT_REDUCTION_SCHEME_MASK;
    int half = d->type == CUDA_R_16F || d->type == CUDA_R_16BF;
    stub_gemm(&(struct gemm){
        .call = __func__,
        .a = a->type,
        .b = b->type,
        .c = d->type,
        .compute = operation->compute,
        .m = d->rows,
        .n = d->columns,
        .k = operation->trans_a == CUBLAS_OP_N ? a->columns : a->rows,
        .batch = d->batch,
        .trans_a = stub_trans(operation->trans_a),
        .trans_b = stub_trans(operation->trans_b),
        .reduced = half && (reductions & CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE),
        .epilogue = operation->epilogue,
        .workspace = bytes,
        .stream = stream,
    });
    return CUBLAS_STATUS_SUCCESS;
}
