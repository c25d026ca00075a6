/* What cuBLAS and cuBLASLt record of a product of matrices. */
#pragma once

#include <cublas_v2.h>

struct gemm {
    const char *call;
    cudaDataType operands, result;
    int reduced;  /* may split K and add in the result's 16 bits */
    int epilogue; /* cublasLtEpilogue_t, 1 is none */
    const void *stream;
};

void stub_gemm(const struct gemm *gemm);
