/*
 * cuDNN's backend API: descriptors keep their attributes. Of an executed plan the stream is recorded.
 *
 * Heuristics offer one engine without notes, knobs or a workspace. The version is older than the
 * 9.15.1 with which attention is chosen from cuDNN.
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
struct attribute {
    cudnnBackendAttributeName_t name;
    cudnnBackendAttributeType_t type;
    int64_t count;
    void *values;
    struct attribute *next;
};
struct descriptor {
    cudnnBackendDescriptorType_t type;
    struct attribute *attributes;
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

/* Descriptors. */

static size_t size_of(cudnnBackendAttributeType_t type) {
    switch (type) {
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR: return 1;
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE: return 8;
    case CUDNN_TYPE_FRACTION: return 16;
    default: return 4; /* floats, int32, enumerations */
    }
}

static struct attribute *find(const struct descriptor *descriptor, int name) {
    struct attribute *attribute = descriptor ? descriptor->attributes : NULL;
    while (attribute && (int)attribute->name != name)
        attribute = attribute->next;
    return attribute;
}

/* The descriptor that an attribute names, NULL where it is not set. */
static struct descriptor *follow(const struct descriptor *descriptor, int name) {
    struct attribute *attribute = find(descriptor, name);
    return attribute ? *(struct descriptor **)attribute->values : NULL;
}

static void set(struct descriptor *descriptor, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t count, const void *values) {
    struct attribute *attribute = find(descriptor, name);
    if (!attribute) {
        attribute = calloc(1, sizeof *attribute);
        attribute->name = name;
        attribute->next = descriptor->attributes;
        descriptor->attributes = attribute;
    }

    attribute->type = type;
    attribute->count = count;
    attribute->values = malloc(count * size_of(type) + 1);
    memcpy(attribute->values, values, count * size_of(type));
}

static struct descriptor *create(cudnnBackendDescriptorType_t type) {
    struct descriptor *descriptor = calloc(1, sizeof *descriptor);
    descriptor->type = type;
    return descriptor;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t *descriptor) {
    *descriptor = create(type);
    return CUDNN_STATUS_SUCCESS;
}

/* Kept: other descriptors refer to it, and cuDNN promises that they may. */
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count,
                                       const void *values) {
    set(descriptor, name, type, count, values);
    return CUDNN_STATUS_SUCCESS;
}

/* The caller has made the descriptors that results are copied into. */
static void offer_engine(struct descriptor *heuristics, int64_t *count, void *results) {
    *count = 1;
    if (!results)
        return;

    struct descriptor *engine = create(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    struct descriptor *graph = follow(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
    int64_t index = 0;
    set(engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &graph);
    set(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &index);
    set(*(struct descriptor **)results, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR,
        1, &engine);
}

static void read_attribute(struct attribute *attribute, int64_t wanted, int64_t *count,
                           void *values) {
    if (count)
        *count = attribute->count;
    if (!values)
        return;

    if (attribute->type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
        struct descriptor **from = attribute->values, **to = values;
        for (int64_t i = 0; i < wanted && i < attribute->count; i++)
            *to[i] = *from[i];
        return;
    }
    int64_t given = wanted < attribute->count ? wanted : attribute->count;
    memcpy(values, attribute->values, given * size_of(attribute->type));
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const handle,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t wanted,
                                       int64_t *count, void *values) {
    struct descriptor *descriptor = handle;
    struct attribute *attribute = find(descriptor, name);
    int64_t zero = 0, one = 1;

    if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS)
        offer_engine(descriptor, count ? count : &one, wanted ? values : NULL);
    else if (attribute)
        read_attribute(attribute, wanted, count, values);
    else if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)
        read_attribute(&(struct attribute){name, type, 1, &zero}, wanted, count, values);
    else if (name == CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT)
        read_attribute(&(struct attribute){name, type, 1, &one}, wanted, count, values);
    else if (count)
        *count = 0; /* notes, knobs: none */
    return CUDNN_STATUS_SUCCESS;
}

/* Execution: a plan has taken the stream. */

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t pack) {
    stub_record("dnn", ((struct handle *)handle)->stream, "");
    return CUDNN_STATUS_SUCCESS;
}
