/*
 * Runtime API: streams and events.
 *
 * Nothing ever runs, so every stream is idle and every event has happened. What is recorded is the
 * order that the calls ask for. No stream is ever captured into a graph.
 */
#include "stub.h"
#include "runtime.h"

#include <stdlib.h>

struct stream {
    long id;
    int priority;
};
struct event {
    long id;
};

static struct stream default_stream;
static long num_streams, num_events;

static struct stream *get(const void *handle) {
    /* 0, 1 and 2 are the legacy and the per-thread default stream. */
    return (uintptr_t)handle <= 2 ? &default_stream : (struct stream *)handle;
}

long stub_stream_id(const void *handle) { return get(handle)->id; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
    struct stream *stream = calloc(1, sizeof *stream);
    stream->id = __sync_add_and_fetch(&num_streams, 1);
    stream->priority = priority;
    *handle = (cudaStream_t)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) {
    return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *handle) {
    return cudaStreamCreateWithPriority(handle, 0, 0);
}

/* Kept: a record may still name it. */
cudaError_t cudaStreamDestroy(cudaStream_t handle) { return cudaSuccess; }

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
    *priority = get(handle)->priority;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) { return cudaSuccess; }

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    stub_record_with_source("sync", handle, "stream");
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    stub_record_with_source("sync", NULL, "device");
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
    stub_record("event", handle, "wait\t%ld", ((struct event *)event)->id);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
    struct event *event = calloc(1, sizeof *event);
    event->id = __sync_add_and_fetch(&num_events, 1);
    *handle = (cudaEvent_t)event;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *handle) { return cudaEventCreateWithFlags(handle, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    free(handle);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    stub_record("event", stream, "record\t%ld", ((struct event *)handle)->id);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(handle, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) { return cudaSuccess; }

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    stub_record_with_source("sync", NULL, "event");
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = 1.0f; /* meaningless, but not a division by zero */
    return cudaSuccess;
}

/* What torch asks before each kernel. */

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *num_dependencies) {
    return cudaStreamIsCapturing(handle, status);
}
