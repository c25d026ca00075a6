/*
 * cuDNN's version, older than the 9.15.1 with which attention is chosen from it, and its handles.
 */
#define _GNU_SOURCE
#include "stub.h"

#include <cudnn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct handle {
    cudaStream_t stream;
};

size_t cudnnGetVersion(void) { return DNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
const char *cudnnGetErrorString(cudnnStatus_t status) {
    return status == CUDNN_STATUS_SUCCESS ? "CUDNN_STATUS_SUCCESS" : "error of the CUDA stub";
}
void cudnnGetLastErrorString(char *text, size_t size) { snprintf(text, size, "CUDA stub"); }

cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int *value) {
    size_t version = cudnnGetVersion();
    *value = type == MAJOR_VERSION   ? version / 10000
             : type == MINOR_VERSION ? version / 100 % 100
                                     : version % 100;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) ANSWER(handle, calloc(1, sizeof(struct handle)))

cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
    free(handle);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    ((struct handle *)handle)->stream = stream;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t *stream) {
    *stream = ((struct handle *)handle)->stream;
    return CUDNN_STATUS_SUCCESS;
}
