/*
 * Runtime API: streams, events, stream capture, graphs.
 *
 * Nothing ever runs, so every stream is idle and every event has happened. What is recorded is the
 * order that the calls ask for. A capture counts what it catches, spreads over events as CUDA's
 * does, and refuses what CUDA refuses.
 */
#include "stub.h"
#include "runtime.h"

#include <stdlib.h>

struct graph {
    long id, num_nodes;
    int capturing; /* until its capture ends, for all streams that have joined */
};
struct stream {
    long id;
    int priority;
    struct graph *graph; /* the capture that it takes part in */
    int origin;          /* the stream on which the capture began */
};
struct event {
    long id;
    struct graph *graph; /* of the capture in which it was recorded */
};

static struct stream default_stream;
static long num_streams, num_events, num_graphs, num_captures;
static __thread enum cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

static struct stream *get(const void *handle) {
    /* 0, 1 and 2 are the legacy and the per-thread default stream. */
    return (uintptr_t)handle <= 2 ? &default_stream : (struct stream *)handle;
}

long stub_stream_id(const void *handle) { return get(handle)->id; }

static struct graph *captured_by(const void *handle) {
    struct graph *graph = get(handle)->graph;
    return graph && graph->capturing ? graph : NULL;
}

long stub_stream_graph(const void *handle) {
    struct graph *graph = captured_by(handle);
    return graph ? graph->id : 0;
}

void stub_count_captured(const void *handle) {
    struct graph *graph = captured_by(handle);
    if (graph)
        graph->num_nodes++;
}

int stub_refused_in_capture(const void *handle) { return captured_by(handle) != NULL; }

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

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    if (stub_refused_in_capture(handle))
        return stub_error(cudaErrorStreamCaptureUnsupported);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    if (stub_refused_in_capture(handle))
        return stub_error(cudaErrorStreamCaptureUnsupported);
    stub_record_with_source("sync", handle, "stream");
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    if (num_captures && mode != cudaStreamCaptureModeRelaxed)
        return stub_error(cudaErrorStreamCaptureUnsupported);
    stub_record_with_source("sync", NULL, "device");
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned flags) {
    struct event *event = (struct event *)event_handle;
    stub_record("event", handle, "wait\t%ld", event->id);
    if (event->graph && event->graph->capturing)
        get(handle)->graph = event->graph;
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
    struct event *event = (struct event *)handle;
    event->graph = captured_by(stream);
    stub_record("event", stream, "record\t%ld", event->id);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(handle, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) { return cudaSuccess; }

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    struct event *event = (struct event *)handle;
    if (event->graph && event->graph->capturing)
        return stub_error(cudaErrorStreamCaptureUnsupported);
    stub_record_with_source("sync", NULL, "event");
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = 1.0f; /* meaningless, but not a division by zero */
    return cudaSuccess;
}

/* Capture. */

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *other) {
    enum cudaStreamCaptureMode former = mode;
    mode = *other;
    *other = former;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode wanted) {
    struct stream *stream = get(handle);
    if (stream == &default_stream || captured_by(handle))
        return stub_error(cudaErrorStreamCaptureUnsupported);

    stream->graph = calloc(1, sizeof *stream->graph);
    stream->graph->capturing = 1;
    stream->graph->id = __sync_add_and_fetch(&num_graphs, 1);
    stream->origin = 1;
    __sync_add_and_fetch(&num_captures, 1);
    stub_record("graph", handle, "begin\t%ld\t0", stream->graph->id);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    struct stream *stream = get(handle);
    if (!captured_by(handle) || !stream->origin)
        return stub_error(cudaErrorIllegalState);

    *graph = (cudaGraph_t)stream->graph;
    stub_record("graph", handle, "end\t%ld\t%ld", stream->graph->id, stream->graph->num_nodes);
    stream->graph->capturing = 0;
    stream->graph = NULL;
    stream->origin = 0;
    __sync_sub_and_fetch(&num_captures, 1);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    *status = captured_by(handle) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *num_dependencies) {
    struct graph *captured = captured_by(handle);
    cudaStreamIsCapturing(handle, status);
    if (id)
        *id = captured ? captured->id : 0;
    if (graph)
        *graph = (cudaGraph_t)captured;
    if (dependencies)
        *dependencies = NULL;
    if (edges)
        *edges = NULL;
    if (num_dependencies)
        *num_dependencies = 0;
    return cudaSuccess;
}

/* Graphs. */

cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t *nodes, size_t *num_nodes) {
    if (nodes)
        return stub_error(stub_unknown("cudaGraphGetNodes (nodes)", cudaErrorNotSupported));
    *num_nodes = ((struct graph *)handle)->num_nodes;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t handle,
                                          unsigned long long flags) {
    struct graph *copy = malloc(sizeof *copy);
    *copy = *(struct graph *)handle;
    *executable = (cudaGraphExec_t)copy;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph,
                                 unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
    struct graph *graph = (struct graph *)handle;
    stub_record("graph", stream, "launch\t%ld\t%ld", graph->id, graph->num_nodes);
    return cudaSuccess;
}

/* Kept: streams that joined the capture may still point to it. */
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cudaSuccess; }

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    free(executable);
    return cudaSuccess;
}
