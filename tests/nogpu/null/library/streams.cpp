// Streams, events and the recording of CUDA graphs. All work is done as soon as it is submitted.
//
// What is forbidden while a graph is recorded follows the CUDA Programming Guide ("Prohibited and Unhandled Operations")
// and the reference of cudaThreadExchangeStreamCaptureMode.
#include <algorithm>
#include <set>
#include <thread>

#include "gpu.hpp"

using namespace null_gpu;

struct CUgraph_st {
  std::vector<std::pair<std::string, std::string>> nodes;  // kind, what
};
struct CUgraphExec_st {
  size_t nodes;
};

namespace {

struct Recording {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  cudaStream_t origin;
  bool is_spoiled = false;
  cudaGraph_t graph = new CUgraph_st;
};

struct Stream {
  Recording* recording = nullptr;
  bool is_blocking = true;  // towards the legacy stream
};
struct Event {
  Recording* recording = nullptr;
};

std::set<Recording*> recordings;  // those that have not ended
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

bool is_legacy(cudaStream_t stream) { return !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread; }
Stream* opened(cudaStream_t stream) { return reinterpret_cast<Stream*>(stream); }
Event* opened(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }
Recording* active(Recording* recording) { return recordings.count(recording) ? recording : nullptr; }
Recording* recording_of(cudaStream_t stream) { return is_legacy(stream) ? nullptr : active(opened(stream)->recording); }

cudaError_t forbid(Recording* recording, const std::string& name, cudaError_t error) {
  recording->is_spoiled = true;
  note("forbidden while recording", name);
  return failed(error);
}

bool concerns_this_thread(const Recording* recording) {
  if (recording->thread == std::this_thread::get_id()) return recording->mode != cudaStreamCaptureModeRelaxed;
  return recording->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
}

// Wait for a stream, or with nullptr for the device.
cudaError_t wait(const char* name, Recording* recorded, bool is_device) {
  std::lock_guard guard(mutex);
  if (is_failing()) return failed(cudaErrorLaunchFailure);
  if (is_device && !recordings.empty()) recorded = *recordings.begin();
  if (recorded) return forbid(recorded, name, cudaErrorStreamCaptureUnsupported);
  if (auto error = refuse_while_recording(name)) return error;
  note("wait", name);
  return cudaSuccess;
}

}  // namespace

cudaError_t null_gpu::refuse_while_recording(const char* name) {
  std::lock_guard guard(mutex);
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (auto* recording : recordings)
    if (concerns_this_thread(recording)) return forbid(recording, name, cudaErrorStreamCaptureUnsupported);
  return cudaSuccess;
}

cudaError_t null_gpu::submit(cudaStream_t stream, const std::string& kind, const std::string& what, double amount) {
  std::lock_guard guard(mutex);
  if (is_failing()) return failed(cudaErrorLaunchFailure);
  if (Recording* recording = recording_of(stream)) {
    if (recording->is_spoiled) return failed(cudaErrorStreamCaptureInvalidated);
    recording->graph->nodes.push_back({kind, what});
    note("recorded " + kind, what, amount);
    return cudaSuccess;
  }
  for (auto* recording : recordings) {
    if (is_legacy(stream) && opened(recording->origin)->is_blocking)
      return forbid(recording, kind + " in the legacy stream", cudaErrorStreamCaptureImplicit);
    note("beside a recording", kind + " " + what);
  }
  note(kind, what, amount);
  return cudaSuccess;
}

// --- streams --------------------------------------------------------------------------------------------------------

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  *stream = reinterpret_cast<cudaStream_t>(new Stream{nullptr, !(flags & cudaStreamNonBlocking)});
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete opened(stream);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return wait("cudaStreamSynchronize", recording_of(stream), false);
}
EXPORT cudaError_t cudaDeviceSynchronize() { return wait("cudaDeviceSynchronize", nullptr, true); }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return wait("cudaEventSynchronize", active(opened(event)->recording), false);
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (auto* recording = recording_of(stream))
    return forbid(recording, "cudaStreamQuery", cudaErrorStreamCaptureUnsupported);
  return refuse_while_recording("cudaStreamQuery");
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  if (!recording_of(stream)) function(data);
  return submit(stream, "host function", "");
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  if (auto* recording = recording_of(stream))
    return forbid(recording, "cudaStreamAddCallback", cudaErrorStreamCaptureUnsupported);
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

// --- events ---------------------------------------------------------------------------------------------------------

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete opened(event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  opened(event)->recording = recording_of(stream);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (auto* recording = active(opened(event)->recording))
    return forbid(recording, "cudaEventQuery", cudaErrorCapturedEvent);
  return refuse_while_recording("cudaEventQuery");
}
EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 0.01f;  // nothing takes time here; programs divide by it
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::lock_guard guard(mutex);
  Recording* recording = active(opened(event)->recording);
  if (!recording) return cudaSuccess;
  if (is_legacy(stream)) return forbid(recording, "cudaStreamWaitEvent", cudaErrorStreamCaptureImplicit);
  opened(stream)->recording = recording;  // from now on this stream is recorded, too
  return cudaSuccess;
}

// --- graphs ---------------------------------------------------------------------------------------------------------

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(thread_mode, *mode);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  std::lock_guard guard(mutex);
  static unsigned long long last = 0;
  if (is_legacy(stream)) return failed(cudaErrorStreamCaptureUnsupported);
  if (recording_of(stream)) return failed(cudaErrorIllegalState);
  opened(stream)->recording = new Recording{++last, mode, std::this_thread::get_id(), stream};
  recordings.insert(opened(stream)->recording);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  std::lock_guard guard(mutex);
  Recording* recording = recording_of(stream);
  if (!recording || recording->origin != stream) return failed(cudaErrorStreamCaptureUnmatched);
  opened(stream)->recording = nullptr;
  recordings.erase(recording);  // it stays allocated: events and other streams may still point to it
  *graph = recording->is_spoiled ? nullptr : recording->graph;
  return recording->is_spoiled ? failed(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t**,
                                            const cudaGraphEdgeData**, size_t* dependencies) {
  std::lock_guard guard(mutex);
  Recording* recording = recording_of(stream);
  *status = !recording              ? cudaStreamCaptureStatusNone
            : recording->is_spoiled ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
  if (id) *id = recording ? recording->id : 0;
  if (graph) *graph = recording ? recording->graph : nullptr;
  if (dependencies) *dependencies = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes) return failed(cudaErrorNotSupported);
  *count = graph->nodes.size();
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = new CUgraphExec_st{graph->nodes.size()};
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  return submit(stream, "graph", "", double(graph->nodes));
}
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
