/* What cuBLAS and cuBLASLt record of a product of matrices. */
#pragma once

#include <cublas_v2.h>

struct gemm {
    const char *call;
    cudaDataType a, b, c;
    cublasComputeType_t compute;
    long m, n, k, batch;
    char trans_a, trans_b;
    int reduced;   /* may split K and add in the output's precision */
    int epilogue;  /* cublasLtEpilogue_t, 1 is none */
    size_t workspace;
    const void *stream;
};

void stub_gemm(const struct gemm *gemm);
char stub_trans(cublasOperation_t operation);
